"""Tensor-parallel slices of experts compared with vLLM's Triton kernels and a read of the weights. Timed cold."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from deep_gemm.moe import api as public

from . import experts, fp4, layers
from .bulk_read import READ, read, read_of
from .contenders import OURS
from .fp4 import VLLM
from .layers import Layer
from .linear import relative_error
from .report import MAX_NAME, Row
from .table import name_of

METHOD = (
    f"few_experts: {layers.METHOD}; weights and routes as of experts; deep_gemm: deep_gemm.experts, whose result is "
    "that of the public parts bit for bit; vllm: fused_experts of vLLM, Triton kernels, the same FP8 weights with "
    "scales of 128x128, its casts of activations and its table of configurations; config: whether it has a table tuned "
    "on this GPU for these sizes; its error is beside our result; bulk_read: a kernel that brings the weights of the "
    "experts that are hit, and x and the result, from DRAM into shared memory"
)
CONTENDERS = (OURS, VLLM, READ)
SIZES = (
    (256, 8, 7168, 128),  # DeepSeek-V3 on 16, 8 and 4 GPUs
    (256, 8, 7168, 256),
    (256, 8, 7168, 512),
    (512, 10, 2048, 128),  # Qwen3-Next on 4 and 2
    (512, 10, 2048, 256),
    (160, 8, 5120, 384),  # GLM-4.5 on 4
    (128, 8, 4096, 384),  # Qwen3-235B on 4 and 8; vLLM supports only multiples of 128
    (128, 8, 4096, 192),
    (128, 8, 2048, 384),  # Qwen3-30B on 2 and 8
    (128, 8, 2048, 96),
    (64, 6, 2048, 352),  # DeepSeek-V2-Lite on 4
)
QUICK_SIZES = ((256, 8, 7168, 256), (512, 10, 2048, 256), (128, 8, 4096, 192))
MOST_OF_NAME = 24
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
TUNED, UNTUNED = "tuned table", "no tuned table"
TOKENS, QUICK_TOKENS = (1, 4, 16, 64, 256, 1024), (1, 16, 64, 256)


def shapes_of(*, quick: bool = False) -> list[experts.Shape]:
    """List the shapes to measure."""
    sizes, tokens = (QUICK_SIZES, QUICK_TOKENS) if quick else (SIZES, TOKENS)
    return [(count, topk, m, hidden, width) for count, topk, hidden, width in sizes for m in tokens]


class FewExperts(experts.Experts):
    """Tokens and routes, and the ways to compute the mixture."""

    kind: ClassVar[str] = "few_experts"
    table_key: ClassVar[tuple[Any, ...]] = ("fp8_w8a8", 128, 128)
    """The key of a configuration in vLLM's table, without the number and the width of experts."""

    def contenders(self) -> Iterator[Layer]:
        """Yield every way to compute the mixture."""
        x, ids, weights, (w1, w2, *_) = self.x, self.topk_ids, self.topk_weights, self.weights
        yield Layer(OURS, lambda: public.experts(x, ids, weights, w1, w2, out=self.out), parts=layers.parts_of_experts)
        yield self.of_vllm()
        source = read_of(self.work.bytes).to(x.device)
        yield Layer(READ, lambda: read(source))

    def of_vllm(self) -> Layer:
        """Return the way that uses vLLM's kernels."""
        theirs: list[Tensor] = []
        return Layer(
            VLLM,
            lambda: theirs.append(self._by_vllm()),
            parts=lambda names: names,
            error=lambda: relative_error(theirs[-1], self.out),
            table=self._table_of_vllm,
        )

    def _table_of_vllm(self) -> str:
        find = importlib.import_module(f"{FUSED_MOE}.fused_moe").get_moe_configs
        return TUNED if find(self.work.shape[0], self.work.shape[-1], *self.table_key) else UNTUNED

    def given_to_vllm(self, config: Any) -> tuple[Tensor, Tensor, Any]:
        """Return the weights in vLLM's layout, and the settings that vLLM's `config` makes from the weights' scales."""
        (w1, s1), (w2, s2) = self.weights.w1, self.weights.w2
        return w1, w2, config.fp8_w8a8_moe_quant_config(s1, s2, block_shape=[128, 128])

    def _by_vllm(self) -> Any:
        if importlib.util.find_spec("vllm") is None:
            raise NotImplementedError("vllm is not installed: pip install vllm==0.26.0")
        w1, w2, how = self.given_to_vllm(importlib.import_module(f"{FUSED_MOE}.config"))
        call = importlib.import_module(f"{FUSED_MOE}.fused_moe").fused_experts
        return call(self.x, w1, w2, self.topk_weights, self.topk_ids, quant_config=how)


def time_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for each row with parts: the kernels' times, then the names of our products, or vLLM's error.

    >>> of_vllm = {"error": 0.01, "config": TUNED, "parts": {"fused": 6.0, "sum": 3.0}}
    >>> list(time_lines([Row("few_experts", (4, 2, 6, 256, 128), VLLM, "cold", **of_vllm)]))
    ['4x2x6x256x128 vllm: fused 6.0, sum 3.0; error 0.01, tuned table']
    """
    for row in rows:
        if row.parts:
            parts = ", ".join(f"{name[:MOST_OF_NAME]} {us:.1f}" for name, us in row.parts.items())
            products = "; ".join(name[:MAX_NAME] for name in row.kernels if row.contender == OURS and "gemm" in name)
            tail = f"; {products}" if products else f"; error {row.error or 0:.2g}, {row.config or 'table unknown'}"
            yield f"{name_of(row.shape)} {row.contender}: {parts}{tail}"


BENCH = experts.bench_of(
    FewExperts,
    experts.weights_of,
    shapes_of,
    "256,8,64,7168,256",
    method=METHOD,
    tables=fp4.tables,
    notes=lambda report: time_lines(report.rows),
    contenders=CONTENDERS,
)

"""BF16 mixtures of experts compared with torch's products, vLLM's Triton kernels, a read of weights. Timed cold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.moe import api as public

from . import experts, few_experts, fp4, layers
from .bulk_read import READ, read, read_of
from .contenders import BF16, OURS
from .experts_by_torch import chains_in_bf16
from .fp4 import VLLM
from .layers import Layer
from .linear import relative_error

METHOD = (
    f"bf16_experts: {layers.METHOD}; routes as of experts, normal weights; deep_gemm: deep_gemm.experts with BF16 "
    "weights; bf16: the fastest of chains of torch's grouped_mm, as of experts; vllm: fused_experts of vLLM, Triton "
    "kernels, by its table of configurations; config: whether it has one tuned on this GPU for these sizes; bulk_read: "
    "a kernel that brings the weights of the experts that are hit, and x and the result, from DRAM into shared memory; "
    "error: relative, beside a chain of torch's"
)
CONTENDERS = (OURS, BF16, VLLM, READ)
SIZES = (
    (128, 8, 2048, 768),  # Qwen3-30B on 1 and 2 GPUs
    (128, 8, 2048, 384),
    (128, 8, 4096, 384),  # Qwen3-235B on 4
    (512, 10, 2048, 256),  # Qwen3-Next on 2
    (128, 8, 2816, 704),  # Gemma 4
    (64, 6, 2048, 1408),  # DeepSeek-V2-Lite
    (160, 8, 5120, 192),  # GLM-4.5 on 8
    (8, 2, 4096, 3584),  # Mixtral 8x7B on 4
)
QUICK_SIZES = (SIZES[0], SIZES[-1])
TOKENS, QUICK_TOKENS = (1, 16, 64, 256, 1024, 4096), (1, 64, 4096)
MOST_ERROR = 0.01
"""This package and the rivals round to BF16 at the same steps, but add in different orders."""


def shapes_of(*, quick: bool = False) -> list[experts.Shape]:
    """List the shapes to measure."""
    sizes, tokens = (QUICK_SIZES, QUICK_TOKENS) if quick else (SIZES, TOKENS)
    return [(count, topk, m, hidden, width) for count, topk, hidden, width in sizes for m in tokens]


def weights_of(num_experts: int, hidden: int, intermediate: int, device: str) -> experts.Weights:
    """Make random weights in BF16; the members for FP8 weights stay empty."""
    torch.manual_seed(0)
    shapes = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
    w1, w2 = (torch.randn(shape, device=device, dtype=torch.bfloat16).div_(shape[-1] ** 0.5) for shape in shapes)
    return experts.Weights((w1, w1[:, :0]), (w2, w2[:, :0]), w1, w2)


class Bf16Experts(few_experts.FewExperts):
    """Tokens and routes, and the ways to compute the mixture."""

    kind: ClassVar[str] = "bf16_experts"
    table_key: ClassVar[tuple[Any, ...]] = (None,)

    def contenders(self) -> Iterator[Layer]:
        """Yield every way to compute the mixture."""
        x, ids, weights, w1, w2 = self.x, self.topk_ids, self.topk_weights, self.weights.plain1, self.weights.plain2
        yield Layer(OURS, lambda: public.experts(x, ids, weights, w1, w2, out=self.out), parts=layers.parts_of_experts)
        for chain, call in chains_in_bf16(x, ids, weights, w1, w2, with_compiled=x.is_cuda):
            yield Layer(BF16, call, chain=chain)
        yield self.of_vllm()
        source = read_of(self.work.bytes).to(x.device)
        yield Layer(READ, lambda: read(source))

    def given_to_vllm(self, config: Any) -> tuple[Tensor, Tensor, Any]:
        """Return the weights as vLLM takes them: without scales."""
        return self.weights.plain1, self.weights.plain2, None

    def judge(self, out: Tensor) -> tuple[float, str | None]:
        """Return the error of a result relative to a chain of torch operators, and the reason if it is too large."""
        plain = self.weights.plain1, self.weights.plain2
        chains = chains_in_bf16(self.x, self.topk_ids, self.topk_weights, *plain, with_compiled=False)
        error = relative_error(out, dict(chains)["sum"]())
        return error, None if error <= MOST_ERROR else f"wrong: relative error {error:.2g}, expected {MOST_ERROR}"


BENCH = experts.bench_of(
    Bf16Experts,
    weights_of,
    shapes_of,
    "128,8,64,2048,768",
    method=METHOD,
    tables=fp4.tables,
    notes=lambda report: few_experts.time_lines(report.rows),
    contenders=CONTENDERS,
)

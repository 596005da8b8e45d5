"""FP8 products with a scale for each row, compared with torch, vLLM, and scales of blocks. Timed cold, on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm.api.dense import fp8_gemm_nt
from deep_gemm.gemm.kinds.output import Output

from . import table
from .cases import Shape
from .contenders import OURS, m_major
from .kinds import Kind, Kinds, Verdict, Work, within
from .linear import relative_error
from .products import MAX_ERROR_BF16
from .report import Report

FAST, EXACT, CUTLASS, BLOCKS = "torch_fast", "torch_exact", "cutlass", f"{OURS}_128x128"
METHOD = (
    "random normal numbers, cast by rows on both sides; torch_fast, torch_exact: torch._scaled_mm with scales of rows, "
    "with fast accumulation and without; cutlass: cutlass_scaled_mm of vLLM, if it is installed; deep_gemm_128x128: "
    "ours with 1x128 and 128x128; error: relative, beside an FP64 product of the same operands, for some rows"
)
WEIGHTS = (
    *((6144, 4096), (4096, 14336), (28672, 4096)),  # Llama-3-8B
    *((5120, 5120), (18432, 7168), (2112, 7168), (7168, 2048)),
)
MS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CHECKED = 64
"""This many rows, from the first on, are compared with an FP64 product."""
MOST_FAST_ERROR = 8e-3
"""Fast accumulation loses more than rounding to BF16 does."""
BY_ROWS: dict[str, Any] = {"recipe_a": (1, 0), "recipe_b": (1, 0)}


def dense(shape: Shape, device: str = "cuda") -> Work:
    """Make a dense product."""
    m, n, k = shape
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    a, b = (per_token_cast_to_fp8(each, gran_k=0) for each in (x, w))
    by_blocks = m_major(per_token_cast_to_fp8(x)), per_block_cast_to_fp8(w)
    d = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: fp8_gemm_nt(a, b, d, **BY_ROWS),
        FAST: partial(by_torch, a, b, fast=True),
        EXACT: partial(by_torch, a, b, fast=False),
        CUTLASS: by_cutlass(a, b),
        BLOCKS: lambda: fp8_gemm_nt(*by_blocks, d),
    }

    def check(name: str) -> Verdict:
        d.fill_(torch.nan)
        got = calls[name]()
        right = (a[0][:CHECKED].double() * a[1][:CHECKED]) @ (b[0].double() * b[1]).t()
        error = relative_error((d if got is None else got)[:CHECKED], right)
        return within(MAX_ERROR_BF16 if name == OURS else MOST_FAST_ERROR, error)

    checks = {name: partial(check, name) for name in (OURS, FAST, EXACT, CUTLASS)}
    return Work(2 * m * n * k, m * k + n * k + 2 * m * n + 4 * (m + n), calls, checks)


def by_torch(a: Operand, b: Operand, *, fast: bool) -> Tensor:
    """Multiply with torch."""
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1].t(), out_dtype=torch.bfloat16, use_fast_accum=fast)


def by_cutlass(a: Operand, b: Operand) -> Callable[[], Tensor]:
    """Multiply with vLLM. Without vLLM the first call raises, and the other contenders are measured."""

    def call() -> Tensor:
        if importlib.util.find_spec("vllm") is None:
            raise NotImplementedError("vllm is not installed: pip install vllm==0.26.0")
        ops: Any = importlib.import_module("vllm._custom_ops")
        return ops.cutlass_scaled_mm(a[0], b[0].t(), a[1], b[1].t(), torch.bfloat16)  # type: ignore[no-any-return]

    return call


def tables(report: Report) -> list[Table]:
    """Tabulate our times beside each rival's, and means of ratios by rows."""
    rivals = {FAST: "fast", EXACT: "exact", CUTLASS: "cutlass", BLOCKS: "128x128"}
    columns = [table.shape("m x n x k"), table.ours()]
    for name, heading in rivals.items():
        columns += [*table.beside(name, heading)]
    lines = table.lines_of(report)
    ratios = ((_rows(line.row.shape[0]), tuple(line.over(line.us(name)) for name in rivals)) for line in lines)
    return [
        table.table_of(report.kind, columns, lines, gap=1),
        table.means_of(["rows"], [f"/ {heading}" for heading in rivals.values()], ratios),
    ]


def _rows(m: int) -> tuple[str]:
    return ("to 128" if m <= 128 else "129 to 512" if m <= 512 else "from 1024",)


QUICK = ((1, 4096, 14336), (128, 2112, 7168), (4096, 28672, 4096))
KINDS = Kinds(
    {"rows_dense": Kind([(m, n, k) for n, k in WEIGHTS for m in MS], QUICK, dense)},
    repeats=15,
    seconds=0.05,
    cool_seconds=0.1,
    outputs=(Output(sfa=WHOLE, sfb=WHOLE), Output()),
)
BENCH = KINDS.bench("rows", METHOD, "4096,28672,4096", (OURS, FAST, EXACT, CUTLASS, BLOCKS), tables)

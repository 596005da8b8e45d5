"""The product of hyper-connections: ours beside torch, a copy, and what DeepGEMM would take. Cold, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_gemm.hyper import reference
from deep_gemm.hyper.api import compute
from deep_gemm.hyper.check import HcProblem
from deep_gemm.testing import calc_diff

from . import yardsticks
from .cases import PEAK_TFLOPS, Shape, cold_copy_us
from .contenders import OURS
from .layers import COPY, EAGER
from .products import measure_each
from .report import Add, Announce, Row, cold_rows_of
from .timing import L2Flush, cold

METHOD = (
    "hc: GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, "
    "contenders of a shape interleaved in one process in rotating order, median, least and most; random normal "
    "operands; shapes are m, n, k, splits, 0 of which are a single result; torch: A to FP32, a TF32 product, squares "
    "summed, in as many parts; copy: reads half as many bytes as A and B have, and writes them; our results checked "
    f"against FP64 sums on the same GPU; {yardsticks.METHOD}"
)
KIND = "hc_prenorm"
NUMBERS = 4
"""Numbers of a shape."""
REPEATS = 20
CONTENDERS = (OURS, EAGER, COPY)
MOST_DIFFERENCE = 1e-8
SHAPES: tuple[Shape, ...] = tuple(
    (m, 24, k, splits) for splits in (0, 16) for k in (7168, 7680, 28672) for m in (13, 137, 1024, 4096, 8192)
)


def shapes_of(*, quick: bool = False) -> Sequence[Shape]:
    """List what is measured."""
    return SHAPES[:15:5] if quick else SHAPES


def chosen(shapes: Sequence[Shape]) -> list[Shape]:
    """These shapes; a single result where the number of splits is left out."""
    return [shape if len(shape) == NUMBERS else (*shape, 0) for shape in shapes]


def measure(shapes: Sequence[Shape], *, only: Sequence[str] = (), add: Add, announce: Announce) -> None:
    """Time the yardsticks, and the product at these shapes."""
    flush = L2Flush()
    add(yardsticks.measure(flush))
    measure_each(
        [(KIND, shape) for shape in shapes], lambda _, shape: rows_of(shape, problem(shape), flush, only), add, announce
    )


def problem(shape: Shape, device: str = "cuda") -> HcProblem:
    """Random operands, and outputs."""
    m, n, k, splits = shape
    torch.manual_seed(0)
    a = torch.randn(m, k, device=device, dtype=torch.float32).bfloat16()
    b = torch.randn(n, k, device=device, dtype=torch.float32)
    outputs = (torch.empty((max(splits, 1), *size), device=device, dtype=torch.float32) for size in ((m, n), (m,)))
    return HcProblem(a, b, *outputs)


def rows_of(shape: Shape, p: HcProblem, flush: L2Flush, only: Sequence[str]) -> list[Row]:
    """Check ours, and time all contenders."""
    m, n, k, _ = shape
    operations = 2 * m * n * k
    moved = sum(x.numel() * x.element_size() for x in p)
    floor_us = round(max(operations / (PEAK_TFLOPS * 1e6), cold_copy_us(moved)), 3)
    work: dict[str, Any] = {"operations": operations, "bytes": moved, "floor_us": floor_us}
    source = torch.empty((m * k * 2 + n * k * 4) // 2, dtype=torch.uint8, device=p.a.device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: compute(p),
        EAGER: lambda: in_torch(p),
        COPY: lambda: target.copy_(source),
    }
    if only:
        calls = {name: call for name, call in calls.items() if name in only}
    error = difference(p) if OURS in calls else None
    wrong = f"wrong: difference {error:.2g}" if error is not None and not error <= MOST_DIFFERENCE else None
    return cold_rows_of(KIND, shape, cold(calls, flush, REPEATS), errors={OURS: error}, failed={OURS: wrong}, **work)


def in_torch(p: HcProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch: a product in TF32 and a sum, of each split."""
    splits = p.d.shape[0]
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        wide = p.a.float()
        parts = zip(wide.tensor_split(splits, 1), p.b.tensor_split(splits, 1), strict=True)
        products = torch.stack([rows @ vectors.t() for rows, vectors in parts])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return products, torch.stack([part.square().sum(1) for part in wide.tensor_split(splits, 1)])


def difference(p: HcProblem) -> float:
    """Say how far ours is from the reference on the same device, in D or the sums of squares."""
    p.d.fill_(torch.nan), p.sqr_sum.fill_(torch.nan)
    compute(p)
    right = p._replace(d=torch.empty_like(p.d), sqr_sum=torch.empty_like(p.sqr_sum))
    reference.hc_prenorm(right)
    differences = calc_diff(p.d, right.d), calc_diff(p.sqr_sum, right.sqr_sum)
    return float(torch.stack(differences).max())  # NaN if either is

"""The product of hyper-connections compared with torch, a copy, and an estimate of DeepGEMM. Timed cold, on a GPU."""

from __future__ import annotations

import torch

from deep_gemm.hyper.api import compute, hc_prenorm
from deep_gemm.hyper.check import HcProblem
from deep_gemm.testing import calc_diff

from . import attention
from .cases import Shape
from .contenders import OURS
from .kinds import Kind, Kinds, Work, of_ours
from .layers import COPY, EAGER
from .numerics import in_tf32

METHOD = (
    "random normal operands; shapes are m, n, k, splits (0: a single result); torch: A to FP32, a TF32 "
    "product, squares summed, in as many parts; copy: reads half as many bytes as A and B have, and writes them; our "
    "results checked against FP64 sums on the same GPU"
)
NUMBERS = 4
"""A shape has this many numbers."""
MOST_DIFFERENCE = 1e-8
SHAPES: tuple[Shape, ...] = tuple(
    (m, 24, k, splits) for splits in (0, 16) for k in (7168, 7680, 28672) for m in (13, 137, 1024, 4096, 8192)
)


def problem(shape: Shape, device: str = "cuda") -> HcProblem:
    """Make random operands, and outputs."""
    m, n, k, splits = shape
    torch.manual_seed(0)
    a = torch.randn(m, k, device=device, dtype=torch.float32).bfloat16()
    b = torch.randn(n, k, device=device, dtype=torch.float32)
    outputs = (torch.empty((max(splits, 1), *size), device=device, dtype=torch.float32) for size in ((m, n), (m,)))
    return HcProblem(a, b, *outputs)


def work_of(shape: Shape, device: str = "cuda") -> Work:
    """Make the work of a shape."""
    (m, n, k, _), p = shape, problem(shape, device)
    source = torch.empty((m * k * 2 + n * k * 4) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {OURS: lambda: compute(p), EAGER: lambda: in_torch(p), COPY: lambda: target.copy_(source)}
    moved = sum(x.numel() * x.element_size() for x in p)
    return Work(2 * m * n * k, moved, calls, of_ours(lambda: difference(p), MOST_DIFFERENCE))


def in_torch(p: HcProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same results by torch: a TF32 product and a sum of squares for each split."""
    splits, wide = p.d.shape[0], p.a.float()
    parts = zip(wide.tensor_split(splits, 1), p.b.tensor_split(splits, 1), strict=True)
    products = torch.stack([in_tf32(rows, vectors) for rows, vectors in parts])
    return products, torch.stack([part.square().sum(1) for part in wide.tensor_split(splits, 1)])


def difference(p: HcProblem) -> float:
    """Return the larger of D's and the sums of squares' differences from the reference on the same device."""
    p.d.fill_(torch.nan), p.sqr_sum.fill_(torch.nan)
    compute(p)
    right = p._replace(d=torch.empty_like(p.d), sqr_sum=torch.empty_like(p.sqr_sum))
    hc_prenorm(right)
    differences = calc_diff(p.d, right.d), calc_diff(p.sqr_sum, right.sqr_sum)
    return float(torch.stack(differences).max())  # NaN if either one is NaN


KINDS = Kinds(
    {"hc_prenorm": Kind(SHAPES, SHAPES[:15:5], work_of)},
    completed=lambda shape: shape if len(shape) == NUMBERS else (*shape, 0),
)
"""A shape without a number of splits means a single result."""
BENCH = KINDS.bench("hc", METHOD, "4096,24,7168,16", (OURS, EAGER, COPY), attention.tables, (NUMBERS - 1, NUMBERS))

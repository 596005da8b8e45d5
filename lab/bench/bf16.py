"""BF16 products compared with torch's, and with an estimate of DeepGEMM. Timed cold, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.gemm.api.bf16_dense import bf16_gemm_nt, bf16_gemm_tn
from deep_gemm.gemm.api.bf16_einsum import einsum
from deep_gemm.gemm.api.bf16_grouped import (
    k_grouped_bf16_gemm_tn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
)
from deep_gemm.testing import calc_diff

from . import attention
from .cases import Shape
from .contenders import OURS
from .kinds import Call, Kind, Kinds, Work, of_ours
from .layers import EAGER
from .logits_prefill import MOST_DIFFERENCE

METHOD = (
    "random normal operands; shapes: dense and wgrad m, n, k; groups: groups, rows of each, n, k; along k: groups, m, "
    "n, k; einsum: b, m, n, k or b, h, r, d; planes: D as torch lays its own; uneven groups and counts: 0.7 to 1.3 of "
    "the rows; torch: mm, addmm into FP32, grouped_mm, einsum; our results checked against FP32 products for some rows"
)
CHECKED = 64


def random(*shape: int, device: str) -> Tensor:
    """Draw normal numbers in BF16."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def work(operations: int, tensors: Sequence[Tensor], ours: Call, in_torch: Call | None, error: Any) -> Work:
    """Return the work of a product that reads or writes each of these tensors once."""
    return of_bytes(operations, sum(x.numel() * x.element_size() for x in tensors), ours, in_torch, error)


def of_bytes(operations: int, count: int, ours: Call, in_torch: Call | None, error: Any) -> Work:
    """Make the work of a product that moves `count` bytes."""
    calls = {OURS: ours} if in_torch is None else {OURS: ours, EAGER: in_torch}
    return Work(operations, count, calls, of_ours(error, MOST_DIFFERENCE))


def dense(shape: Shape, device: str = "cuda") -> Work:
    """Make a dense product."""
    m, n, k = shape
    a, b, d = random(m, k, device=device), random(n, k, device=device), random(m, n, device=device)

    def error() -> float:
        d.fill_(torch.nan)
        bf16_gemm_nt(a, b, d)
        return float(calc_diff(d[-CHECKED:], a[-CHECKED:].float() @ b.float().t()))

    calls = (lambda: bf16_gemm_nt(a, b, d)), (lambda: torch.mm(a, b.t(), out=d))
    return work(2 * m * n * k, (a, b, d), *calls, error)


def wgrad(shape: Shape, device: str = "cuda") -> Work:
    """Make a gradient of weights, added in FP32."""
    m, n, k = shape
    a, b = random(k, m, device=device), random(k, n, device=device)
    d = torch.zeros(m, n, device=device, dtype=torch.float32)

    def error() -> float:
        d.fill_(1)
        bf16_gemm_tn(a, b, d, d)
        return float(calc_diff(d[-CHECKED:], a[:, -CHECKED:].float().t() @ b.float() + 1))

    def in_torch() -> Tensor:
        return torch.addmm(d, a.t(), b, out_dtype=torch.float32)

    return work(2 * m * n * k, (a, b, d, d), lambda: bf16_gemm_tn(a, b, d, d), in_torch, error)


def counts_of(groups: int, rows: int, device: str) -> Tensor:
    """Draw each group's number of rows: 0.7 to 1.3 of `rows`, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return (
        (rows * (0.7 + 0.6 * torch.rand(groups, generator=generator, dtype=torch.float32))).to(torch.int32).to(device)
    )


def contiguous(shape: Shape, device: str = "cuda", *, uneven: bool = False) -> Work:
    """Make a product of rows that are stacked by group, with an id for each row."""
    groups, rows, n, k = shape
    counts = (
        counts_of(groups, rows, device) if uneven else torch.full((groups,), rows, device=device, dtype=torch.int64)
    )
    ids = torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(counts)
    ends = counts.cumsum(0).to(torch.int32)
    m = len(ids)
    a, b, d = random(m, k, device=device), random(groups, n, k, device=device), random(m, n, device=device)

    def error() -> float:
        d.fill_(torch.nan)
        m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids)
        finite = bool(d.isfinite().all())
        right = a[-CHECKED:].float() @ b[-1].float().t()  # the last group has at least this many rows
        return float(calc_diff(d[-CHECKED:], right)) if finite else torch.nan

    def in_torch() -> Tensor:
        return torch._grouped_mm(a, b.mT, offs=ends)

    return work(2 * m * n * k, (a, b, d), lambda: m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids), in_torch, error)


def masked(shape: Shape, device: str = "cuda") -> Work:
    """Make a masked product: each group has space for at most 4096 rows, and a count of the rows in use."""
    groups, rows, n, k = shape
    counts = counts_of(groups, rows, device)
    room = min(4096, 2 * rows)
    a, b = random(groups, room, k, device=device), random(groups, n, k, device=device)
    d = random(groups, room, n, device=device)
    used = int(counts.sum())

    def error() -> float:
        d.fill_(torch.nan)
        m_grouped_bf16_gemm_nt_masked(a, b, d, counts, rows)
        last = int(counts[-1])
        return float(calc_diff(d[-1, :last], a[-1, :last].float() @ b[-1].float().t()))

    moved = b.numel() * 2 + used * (n + k) * 2
    return of_bytes(2 * used * n * k, moved, lambda: m_grouped_bf16_gemm_nt_masked(a, b, d, counts, rows), None, error)


def along_k(shape: Shape, device: str = "cuda", *, counted: bool = False) -> Work:
    """Make gradients of experts' weights, added in FP32; `counted`: only the GPU knows the groups' depths."""
    groups, m, n, k = shape
    ks = None if counted else [k] * groups
    layout = torch.full((groups,), k, dtype=torch.int32, device=device) if counted else None
    a, b = random(groups * k, m, device=device), random(groups * k, n, device=device)
    d = torch.zeros(groups, m, n, device=device, dtype=torch.float32)

    def error() -> float:
        d.fill_(1)
        k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout, c=d)
        return float(calc_diff(d[-1, -CHECKED:], a[-k:, -CHECKED:].float().t() @ b[-k:].float() + 1))

    def ours() -> None:
        k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout, c=d)

    return work(2 * groups * m * n * k, (a, b, d, d), ours, None, error)


def expression(expr: str, *, in_planes: bool = False) -> Callable[..., Work]:
    """Return a maker of an expression's work; `in_planes`: D has torch's layout, one head after another."""

    def make(shape: Shape, device: str = "cuda") -> Work:
        sizes = dict(zip("bmnk" if expr.startswith("bmk") else "bhrd", shape, strict=True))
        operands, _, out = expr.partition("->")
        a, b = (random(*(sizes[x] for x in axes), device=device) for axes in operands.split(","))
        d = random(*(sizes[x] for x in out), device=device)
        d = d.transpose(0, 1).contiguous().transpose(0, 1) if in_planes else d
        operations = 2
        for size in shape:
            operations *= size

        def error() -> float:
            d.fill_(torch.nan)
            einsum(expr, a, b, d)
            if expr.startswith("bmk"):
                return float(calc_diff(d[:CHECKED], torch.einsum(expr, a[:, :CHECKED].float(), b.float())))
            return float(calc_diff(d[:CHECKED], torch.einsum(expr, a[:CHECKED].float(), b.float())))

        calls = (lambda: einsum(expr, a, b, d)), (lambda: torch.einsum(expr, a, b))
        return work(operations, (a, b, d), *calls, error)

    return make


WEIGHTS = (*((2112, 7168), (576, 7168), (24576, 1536), (32768, 512)), *((7168, 16384), (4096, 7168), (7168, 2048)))
DENSE_SHAPES: tuple[Shape, ...] = (
    *((m, n, k) for m in (1, 16, 64, 128, 512, 1024, 4096) for n, k in WEIGHTS),
    *((256, 7168, 256), (8192, 8192, 8192)),
)
CONTIGUOUS: tuple[Shape, ...] = (
    *((4, 8192, 4096, 7168), (8, 4096, 7168, 2048)),
    *((32, 256, 4096, 7168), (32, 256, 7168, 2048)),
)
MASKED: tuple[Shape, ...] = (
    *((32, 192, 4096, 7168), (6, 1024, 4096, 7168)),
    *((32, 20, 4096, 7168), (32, 20, 7168, 2048)),
)
ALONG_K: tuple[Shape, ...] = ((4, 4096, 7168, 8192), (8, 7168, 2048, 4096), (16, 7168, 2048, 2048))
SUMS: tuple[Shape, ...] = ((129, 128, 384, 128), (4096, 128, 384, 128), (8192, 256, 256, 256))
HEADS: tuple[Shape, ...] = tuple((b, *rest) for b in (4, 32, 128, 4096) for rest in ((128, 512, 128), (8, 4096, 1024)))
KINDS = Kinds(
    {
        "bf16_dense": Kind(DENSE_SHAPES, ((1, 576, 7168), (128, 2112, 7168), (4096, 7168, 2048)), dense),
        "bf16_wgrad_fp32": Kind(((4096, 7168, 4096), (7168, 2048, 4096)), ((7168, 2048, 4096),), wgrad),
        "bf16_contiguous": Kind(CONTIGUOUS, CONTIGUOUS[-1:], contiguous),
        "bf16_contiguous_uneven": Kind(CONTIGUOUS, CONTIGUOUS[-1:], lambda shape: contiguous(shape, uneven=True)),
        "bf16_masked": Kind(MASKED, MASKED[-1:], masked),
        "bf16_k_grouped": Kind(ALONG_K, ALONG_K[1:2], along_k),
        "bf16_k_grouped_counted": Kind(ALONG_K, ALONG_K[1:2], lambda shape: along_k(shape, counted=True)),
        "einsum_bmk_bnk_mn": Kind(SUMS, SUMS[:1], expression("bmk,bnk->mn")),
        "einsum_bhr_hdr_bhd": Kind(HEADS, HEADS[:1], expression("bhr,hdr->bhd")),
        "einsum_bhd_hdr_bhr": Kind(HEADS, HEADS[:1], expression("bhd,hdr->bhr")),
        "einsum_bhd_hdr_bhr_planes": Kind(HEADS, HEADS[:1], expression("bhd,hdr->bhr", in_planes=True)),
    },
    repeats=15,
    seconds=0.05,
    cool_seconds=0.25,
)
BENCH = KINDS.bench("bf16", METHOD, "4096,7168,2048", (OURS, EAGER), attention.tables)

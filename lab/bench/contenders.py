"""The contenders of a case: operands on the GPU, a call for each contender, and the error of its result.

Every error is the relative error of the whole result. The right result is the FP64 product of a contender's operands:
the same FP8 values and scales; or the FP8 values alone (the tensorwise product, with one scale, 1); or the BF16
operands before quantization (`bf16`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.api.dense import fp8_gemm_nt, wgrad_gemm_fp8_fp8_fp32_nt
from deep_gemm.gemm.api.grouped import (
    k_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)

from ..casts import spread
from .cases import Case

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

Weights = TypeVar("Weights")
Parts = Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]]
"""Yields parts of an output with the right values, group by group, because FP64 needs eight times the memory."""

OURS, FAST, BLOCKWISE, BF16 = "deep_gemm", "cublaslt_fast", "cublaslt_blockwise", "bf16"


@dataclass(frozen=True)
class Contender:
    """One way to compute a case."""

    name: str
    call: Callable[[], Tensor]
    """Computes and returns the output. A call does not affect later calls."""
    parts: Parts
    reset: Callable[[], object] = lambda: None
    """Prepares the output for a checked call, if all calls write to the same buffer."""

    def error(self) -> float:
        """Return the relative error of one call."""
        self.reset()
        off = size = 0.0
        for got, expected in self.parts(self.call()):
            off += float((got.double() - expected).square().sum())
            size += float(expected.square().sum())
        return float((off / size) ** 0.5)


def contenders_of(case: Case, device: str = "cuda") -> list[Contender]:
    """Make random operands for a case, and all its contenders."""
    torch.manual_seed(0)
    make = {
        "dense": _dense,
        "dense_1d1d": _dense_1d1d,
        "contiguous": _contiguous,
        "contiguous_uneven": _contiguous,
        "masked": _masked,
        "k_grouped": _k_grouped,
    }
    with torch.device(device):
        return [*make[case.kind](case), *([] if case.kind == "dense" else [_yardstick(case)])]


def _yardstick(case: Case) -> Contender:
    """Make the dense product that shows the GPU's present speed; the product runs in the contenders' rounds."""
    m, n, k = case.fast_shape
    x = _randn(m, k).to(torch.float8_e4m3fn)
    w = _randn(n, k).to(torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32)
    return Contender(
        FAST,
        lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        lambda got: [(got, x.double() @ w.double().t())],
    )


def _dense(case: Case) -> Iterator[Contender]:
    m, n, k = case.shape
    x, w = _randn(m, k), _randn(n, k)
    (a, sa), (b, sb) = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)
    operand, d = m_major((a, sa)), _empty(m, n)
    one = torch.ones((), dtype=torch.float32)

    @cache
    def from_blocks() -> Tensor:
        return dequantized((a, sa), 1) @ dequantized((b, sb), 128).t()

    def ours() -> Tensor:
        fp8_gemm_nt(operand, (b, sb), d)
        return d

    yield Contender(OURS, ours, lambda got: [(got, from_blocks())], lambda: d.fill_(torch.nan))
    yield Contender(
        FAST,
        lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        lambda got: [(got, a.double() @ b.double().t())],
    )
    yield Contender(BLOCKWISE, blockwise_call((a, sa), (b, sb)), lambda got: [(got, from_blocks())])
    yield Contender(BF16, lambda: x @ w.t(), lambda got: [(got, x.double() @ w.double().t())])


def blockwise_call(a: Operand, b: Operand) -> Callable[[], Tensor]:
    """Return a call of cuBLASLt with 1x128 and 128x128 scales. A's scales are m-major; rows of B's are padded to 4."""
    (x, sa), (w, sb) = a, b
    k_blocks = sb.shape[1]
    padded_m, padded_blocks = ceil_div(x.shape[0], 4) * 4, ceil_div(k_blocks, 4) * 4
    sa_m_major = torch.empty(k_blocks, padded_m, dtype=torch.float32).t()[: x.shape[0]].copy_(sa)
    sb_padded = torch.empty(sb.shape[0], padded_blocks, dtype=torch.float32)[:, :k_blocks].copy_(sb)

    def call() -> Tensor:
        from torch.nn.functional import ScalingType, scaled_mm

        return scaled_mm(
            x,
            w.t(),
            scale_a=sa_m_major,
            scale_recipe_a=ScalingType.BlockWise1x128,
            scale_b=sb_padded.t(),
            scale_recipe_b=ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )

    return call


def _dense_1d1d(case: Case) -> Iterator[Contender]:
    m, n, k = case.shape
    x, y = _randn(m, k), _randn(n, k)
    a, b = per_token_cast_to_fp8(x), per_token_cast_to_fp8(y)
    a_operand, b_operand = m_major(a), m_major(b)
    c = torch.randn(m, n, dtype=torch.float32)
    d = c.clone()

    def ours() -> Tensor:
        wgrad_gemm_fp8_fp8_fp32_nt(a_operand, b_operand, d)
        return d

    def expected() -> Tensor:
        return c.double() + dequantized(a, 1) @ dequantized(b, 1).t()

    yield Contender(OURS, ours, lambda got: [(got, expected())], lambda: d.copy_(c))
    yield Contender(
        BF16,
        lambda: torch.addmm(c, x, y.t(), out_dtype=torch.float32),
        lambda got: [(got, c.double() + x.double() @ y.double().t())],
    )


def _contiguous(case: Case) -> Iterator[Contender]:
    _, _, n, k = case.shape
    sizes = torch.tensor(case.sizes, dtype=torch.int64)
    m = sum(case.sizes)
    x = _randn(m, k)
    a, sa = per_token_cast_to_fp8(x)
    operand = m_major((a, sa))
    w, b, sb = _weights(len(sizes), n, k, keep_bf16=True)
    layout, places = layout_of(case), places_of(case)
    d, ends = _empty(m, n), sizes.cumsum(0).to(torch.int32)

    def grouped_bf16() -> Tensor:
        from torch.nn.functional import grouped_mm

        return grouped_mm(x, w.mT, offs=ends)

    yield Contender(
        OURS,
        lambda: multiply(case, operand, (b, sb), d, layout),
        parts_of(places, (a, sa), lambda group: dequantized((b[group], sb[group]), 128)),
        lambda: d.fill_(torch.nan),
    )
    yield Contender(BF16, grouped_bf16, lambda got: ((got[at], x[at].double() @ w[g].double().t()) for g, at in places))


def _masked(case: Case) -> Iterator[Contender]:
    groups, _, n, k = case.shape
    quantized = [per_token_cast_to_fp8(_randn(case.max_m, k)) for _ in range(groups)]
    a, sa = (torch.stack(tensors) for tensors in zip(*quantized, strict=True))
    operand = m_major((a, sa))
    _, b, sb = _weights(groups, n, k, keep_bf16=False)
    layout, d = layout_of(case), _empty(groups, case.max_m, n)
    yield Contender(
        OURS,
        lambda: multiply(case, operand, (b, sb), d, layout),
        parts_of(places_of(case), (a, sa), lambda group: dequantized((b[group], sb[group]), 128)),
        lambda: d.fill_(torch.nan),
    )


def _k_grouped(case: Case) -> Iterator[Contender]:
    groups, m, n, _ = case.shape
    ks = list(case.sizes)
    x, y = _randn(m, sum(ks)), _randn(n, sum(ks))
    a, b = m_major(k_grouped_cast_to_fp8(x, ks)), m_major(k_grouped_cast_to_fp8(y, ks))
    # Each group's k is a multiple of 128, so casting the whole operands gives the same values.
    a_whole, b_whole = per_token_cast_to_fp8(x), per_token_cast_to_fp8(y)
    ks_tensor = torch.tensor(ks, dtype=torch.int32)
    d = torch.zeros(groups, m, n, dtype=torch.float32)

    def ours() -> Tensor:
        k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor, c=d)
        return d

    def expected(at: slice) -> Tensor:
        blocks = slice(at.start // 128, at.stop // 128)
        p, q = ((values[:, at], scales[:, blocks]) for values, scales in (a_whole, b_whole))
        return dequantized(p, 1) @ dequantized(q, 1).t()

    yield Contender(OURS, ours, lambda got: ((got[g], expected(at)) for g, at in _slices(case.sizes)), d.zero_)


def _weights(groups: int, n: int, k: int, *, keep_bf16: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Make BF16 weights (empty without `keep_bf16`), and FP8 values and scales, group by group to save memory."""
    w = _empty(groups if keep_bf16 else 0, n, k)
    b = torch.empty(groups, n, k, dtype=torch.float8_e4m3fn)
    sb = torch.empty(groups, ceil_div(n, 128), ceil_div(k, 128), dtype=torch.float32)
    for group in range(groups):
        weights = _randn(n, k)
        b[group], sb[group] = per_block_cast_to_fp8(weights)
        if keep_bf16:
            w[group] = weights
    return w, b, sb


def _slices(sizes: Iterable[int]) -> list[tuple[int, Any]]:
    """List the groups that are not empty, each with its range of rows."""
    found, start = [], 0
    for group, size in enumerate(sizes):
        if size:
            found.append((group, slice(start, start + size)))
        start += size
    return found


def places_of(case: Case) -> list[tuple[int, Any]]:
    """Return the position of each group's rows in A and D; a dense product has one group of all rows."""
    if case.kind.endswith("masked"):
        return [(group, (group, slice(size))) for group, size in enumerate(case.sizes)]
    return _slices(case.sizes) or [(0, slice(None))]


def layout_of(case: Case) -> Tensor:
    """Return the group of each row, or a masked product's rows per group; a dense product has none."""
    sizes = torch.tensor(case.sizes, dtype=torch.int32)
    if case.kind.endswith("masked"):
        return sizes
    return torch.arange(len(case.sizes), dtype=torch.int32).repeat_interleave(sizes)


def multiply(case: Case, a: Operand, b: Operand, d: Tensor, layout: Tensor, **said: Any) -> Tensor:
    """Compute a case with weights `[groups, n, k]` into D, and return D. A dense product uses the first weight."""
    if case.kind.endswith("masked"):
        m_grouped_fp8_gemm_nt_masked(a, b, d, layout, case.shape[1], **said)
    elif case.sizes:
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **said)
    else:
        fp8_gemm_nt(a, (b[0][0], b[1][0]), d, **said)
    return d


def parts_of(places: Sequence[tuple[int, Any]], a: Operand, weight_of: Callable[[int], Tensor]) -> Parts:
    """Multiply A by each group's weight in FP64."""
    values, scales = a
    return lambda got: (
        (got[at], dequantized((values[at], scales[at]), 1) @ weight_of(group).t()) for group, at in places
    )


def kept(make: Callable[[int, int, int], Weights]) -> _lru_cache_wrapper[Weights]:
    """Make a function keep the weights that it last made, because consecutive cases share weights."""

    @lru_cache(maxsize=1)
    def weights_of(groups: int, n: int, k: int, device: str) -> Weights:
        torch.manual_seed(0)
        with torch.device(device):
            return make(groups, n, k)

    return weights_of


def dequantized(operand: Operand, rows: int) -> Tensor:
    """Multiply values `[..., m, k]` by one scale for each `rows` x 128, in FP64."""
    return spread(*operand, rows)


def m_major(operand: Operand) -> Operand:
    """Convert the scales of an operand to the layout that products load."""
    values, scales = operand
    return values, get_mn_major_tma_aligned_tensor(scales)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)

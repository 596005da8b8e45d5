"""Casts of ordinary tensors to FP8 values with FP32 scales, for one row, one column or one block at a time.

All casts share their rules. A scale is the block's largest finite magnitude over 448, the largest E4M3 value, so that
every finite input fits. An infinity saturates to +-448 (as the hardware's saturating conversion does). A NaN of either
sign becomes the byte 0x7F in its own element. Neither influences the scale. A block without a finite non-zero value has
scale 1. No scale is below 2^-126, the smallest normal FP32 number. With `use_ue8m0` a scale is rounded up to a power of
two. With `min_amax`, rounded to FP32, the block's largest magnitude counts as at least this, in blocks of zeros too.
FP64 input is rounded to FP32 first, so values beyond FP32's range count as infinities.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .choose.config_cast import INPUTS, MAX_GROUPS, Grain
from .gpus import is_hopper
from .kernels import cast_rows, cast_tiles, lay_scales
from .kernels.cast_rows import RowCast
from .kernels.cast_tiles import TileCast
from .problem import check_counts
from .problem.checks import integers
from .problem.integers import as_integer
from .problem.layout import SCALE_BLOCK, align, ceil_div, pitch_of_scales, rows_of_counts
from .problem.numbers import magnitude
from .problem.tracing import is_dispatched
from .scales import packed_rows, unpack_ue8m0_from_int

FP8_MAX = 448.0
MIN_SCALE = 2.0**-126
PITCH_LIMIT = 1 << 32
"""Bytes from a row to the next for which kernels that cast rows have room."""

Quantized = tuple[Tensor, Tensor]


def per_token_cast_to_fp8(
    x: Tensor,
    use_ue8m0: bool = False,
    gran_k: int = SCALE_BLOCK,
    *,
    min_amax: float = 0.0,
    mn_major: bool = False,
    masked_m: Tensor | None = None,
    use_packed_ue8m0: bool = False,
) -> Quantized:
    """Cast with one scale for each row and each `gran_k` columns: activations.

    `x` is `[..., m, k]` of any floating type; the result is values `[..., m, k]` (torch.float8_e4m3fn) and scales
    `[..., m, ceil(k / gran_k)]` (torch.float32), both row-major. With `mn_major`, for `[m, k]` and `[groups, m, k]`,
    scales lie as `get_mn_major_tma_aligned_tensor` would lay them: products then load them as they are. With
    `masked_m`, int32 `[groups]` for x `[groups, m, k]`, only the first `masked_m[g]` rows of each group count: the
    others may hold anything, and their result is undefined (on the CPU zeros with scale 1). As in every cast,
    `use_ue8m0` rounds scales up to powers of two, and `min_amax` is the least that a block's largest magnitude counts
    as. With `use_packed_ue8m0` too, scales are int32 `[..., m, ceil(k / gran_k / 4)]`, four exponents in each
    (`pack_ue8m0_to_int`), which no product here takes.

    >>> values, scales = per_token_cast_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0, 0.0]], [[2.0]])
    """
    if use_packed_ue8m0:
        if not use_ue8m0 or mn_major or masked_m is not None:
            raise ValueError("use_packed_ue8m0: expected use_ue8m0, and neither mn_major nor masked_m, with it")
        values, scales = per_token_cast_to_fp8(x, use_ue8m0, gran_k, min_amax=min_amax)
        return values, packed_rows(scales)
    gran_k = granularity(gran_k)
    if is_dispatched(x):
        operator = torch.ops.deep_gemm.per_token_cast_to_fp8.default
        return operator(x, use_ue8m0, gran_k, min_amax, mn_major, masked_m)  # type: ignore[no-any-return]
    check_rows(x, mn_major, masked_m)
    if gran_k == SCALE_BLOCK and has_kernels(x) and (masked_m is None or len(masked_m) <= MAX_GROUPS):
        min_amax = magnitude("min_amax", min_amax)
        if x.dim() == 2 and _is_transposed(x):
            return _cast_columns(x.t(), use_ue8m0, min_amax, mn_major)
        return _cast_rows(x, use_ue8m0, min_amax, mn_major, masked_m)
    if masked_m is not None:
        has_no_row = ~rows_of_counts(masked_m, x.shape[1])[..., None]
        x = x.masked_fill(has_no_row, 0)
    values, scales = _cast(x, 1, gran_k, use_ue8m0, min_amax)
    if masked_m is not None:
        scales.masked_fill_(has_no_row, 1)
    return values, lay_scales.laid_out(scales) if mn_major else scales


def per_channel_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each column and each `gran_k` rows: operands that are transposed afterwards.

    `x` is `[..., k, n]` of any floating type; the result is values `[..., k, n]` and scales
    `[..., ceil(k / gran_k), n]`.

    >>> values, scales = per_channel_cast_to_fp8(torch.tensor([[896.0, 448.0], [448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, 448.0], [224.0, 0.0]], [[2.0, 1.0]])
    """
    gran_k = granularity(gran_k)
    if is_dispatched(x):
        operator = torch.ops.deep_gemm.per_channel_cast_to_fp8.default
        return operator(x, use_ue8m0, gran_k, min_amax)  # type: ignore[no-any-return]
    if gran_k == SCALE_BLOCK and has_kernels(x):
        return _cast_tiles(x, Grain.CHANNELS, use_ue8m0, magnitude("min_amax", min_amax))
    return _cast(x, gran_k, 1, use_ue8m0, min_amax)


def per_block_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each block of `gran_k` rows and columns: weights.

    `x` is `[..., n, k]` of any floating type; the result is values `[..., n, k]` and scales
    `[..., ceil(n / gran_k), ceil(k / gran_k)]`.

    >>> values, scales = per_block_cast_to_fp8(torch.full((130, 256), 448.0))
    >>> values.shape, scales.shape
    (torch.Size([130, 256]), torch.Size([2, 2]))
    """
    gran_k = granularity(gran_k)
    if is_dispatched(x):
        operator = torch.ops.deep_gemm.per_block_cast_to_fp8.default
        return operator(x, use_ue8m0, gran_k, min_amax)  # type: ignore[no-any-return]
    if gran_k == SCALE_BLOCK and has_kernels(x):
        return _cast_tiles(x, Grain.BLOCKS, use_ue8m0, magnitude("min_amax", min_amax))
    return _cast(x, gran_k, gran_k, use_ue8m0, min_amax)


def cast_both_to_fp8(x: Tensor, use_ue8m0: bool = False, *, min_amax: float = 0.0) -> tuple[Quantized, Quantized]:
    """Cast a matrix and its transpose, each with one scale for each row and 128 columns, as training needs both.

    `x` is `[m, k]` of any floating type. The result is `per_token_cast_to_fp8(x, mn_major=True)` and
    `per_token_cast_to_fp8(x.T, mn_major=True)`: values `[m, k]` with scales `[m, ceil(k / 128)]`, and values `[k, m]`
    with scales `[k, ceil(m / 128)]`. Products load these scales as they are. A GPU reads `x` once.

    >>> (values, scales), (values_t, scales_t) = cast_both_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0, 0.0]], [[2.0]])
    >>> values_t.float().tolist(), scales_t.tolist()
    ([[448.0], [-448.0], [0.0]], [[2.0], [1.0], [1.0]])
    """
    if is_dispatched(x):
        values, scales, *of_columns = torch.ops.deep_gemm.cast_both_to_fp8.default(x, use_ue8m0, min_amax)
        return (values, scales), tuple(of_columns)
    check_matrix(x)
    if has_kernels(x):
        return _cast_both(x, use_ue8m0, magnitude("min_amax", min_amax))
    rows = per_token_cast_to_fp8(x, use_ue8m0, min_amax=min_amax, mn_major=True)
    return rows, per_token_cast_to_fp8(x.t(), use_ue8m0, min_amax=min_amax, mn_major=True)


def k_grouped_cast_to_fp8(
    x: Tensor, ks: Sequence[int], use_ue8m0: bool = False, *, min_amax: float = 0.0, mn_major: bool = False
) -> Quantized:
    """Cast operands of a k-grouped product: `x` is `[m, sum(ks)]`, the groups' columns side by side.

    The result is what `k_grouped_fp8_gemm_nt_contiguous` takes: the one-dimensional concatenation of each group's
    row-major `[m, k_g]` values, and scales `[m, sum(ceil(k_g / 128))]`. No scale spans two groups. With `mn_major`,
    scales lie as `get_mn_major_tma_aligned_tensor` would lay them: the product then loads them as they are. On a GPU
    nothing copies `x`, be it row-major or, as `x.t()` is, the transpose of a row-major matrix.

    >>> values, scales = k_grouped_cast_to_fp8(torch.ones(4, 160), [128, 32])
    >>> values.shape, scales.shape
    (torch.Size([640]), torch.Size([4, 2]))
    """
    if is_dispatched(x):
        operator = torch.ops.deep_gemm.k_grouped_cast_to_fp8.default
        return operator(x, ks, use_ue8m0, min_amax, mn_major)  # type: ignore[no-any-return]
    ks, min_amax = check_groups(x, ks, min_amax)
    if has_kernels(x):
        return _cast_groups(x, ks, use_ue8m0, min_amax, mn_major)
    groups = [per_token_cast_to_fp8(part, use_ue8m0, min_amax=min_amax) for part in torch.split(x, list(ks), dim=1)]
    if not groups:
        return empty_values((0,), x), empty_scales((x.shape[0],), 0, x, mn_major=mn_major)
    scales = torch.cat([scales for _, scales in groups], dim=1)
    values = torch.cat([values.flatten() for values, _ in groups])
    return values, lay_scales.laid_out(scales) if mn_major else scales


def per_custom_dims_cast_to_fp8(
    x: Tensor, dims: Sequence[int], use_ue8m0: bool = False, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each index of the dimensions `dims`: one for all the others of a slice.

    The result is values of x's shape, and scales of the sizes of `dims`, in the order of x's dimensions.

    >>> values, scales = per_custom_dims_cast_to_fp8(torch.tensor([[896.0, -448.0], [448.0, 0.0]]), (0,))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0], [448.0, 0.0]], [2.0, 1.0])
    """
    check_castable(x)
    kept = sorted({dim % max(x.dim(), 1) for dim in integers("dims", dims)})
    if any(not -x.dim() <= dim < x.dim() for dim in dims):
        raise ValueError(f"dims: expected dimensions of x, which has {x.dim()}, got {tuple(dims)}")
    others = [dim for dim in range(x.dim()) if dim not in kept]
    # [..., as x] -> [slices, elements of one]
    rows = x.permute(*kept, *others).reshape(prod(x.shape[dim] for dim in kept), prod(x.shape[dim] for dim in others))
    values, scales = per_token_cast_to_fp8(rows, use_ue8m0, max(rows.shape[1], 1), min_amax=min_amax)
    in_order = values.view([x.shape[dim] for dim in (*kept, *others)])
    back = [(*kept, *others).index(dim) for dim in range(x.dim())]
    if scales.numel() == 0:  # slices without elements
        scales = torch.ones(rows.shape[0], 1, device=x.device)
    return in_order.permute(back).contiguous(), scales.view([x.shape[dim] for dim in kept])


@torch.no_grad()
def cast_back_from_fp8(x: Tensor, sf: Tensor, gran_k: int = SCALE_BLOCK) -> Tensor:
    """Get the FP32 numbers that FP8 values and their scales stand for, each rounded once.

    `x` is `[..., m, k]`; `sf` is `[..., m, ceil(k / gran_k)]`, or one for each block,
    `[..., ceil(m / gran_k), ceil(k / gran_k)]`, in FP32 or, for rows, as packed UE8M0.

    >>> cast_back_from_fp8(*per_token_cast_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))).tolist()
    [[896.0, -448.0, 0.0]]
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x: expected dtype torch.float8_e4m3fn, got {x.dtype}")
    return scaled_back(x.float(), sf, gran_k)


def scaled_back(x: Tensor, sf: Tensor, gran_k: int) -> Tensor:
    """Multiply FP32 numbers `[..., m, k]` with scales of rows or of blocks."""
    gran_k = granularity(gran_k)
    if not isinstance(sf, Tensor):
        raise TypeError(f"sf: expected a tensor, got {type(sf).__name__}")
    if x.dim() < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    *batch, m, k = x.shape
    columns = ceil_div(k, gran_k)
    if sf.dtype == torch.int32:
        sf = unpack_ue8m0_from_int(sf)[..., :columns]
    if sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32 or torch.int32, got {sf.dtype}")
    of_rows, of_blocks = (*batch, m, columns), (*batch, ceil_div(m, gran_k), columns)
    if sf.shape not in (of_rows, of_blocks):
        raise ValueError(f"sf: expected shape {of_rows} or {of_blocks}, got {tuple(sf.shape)}")
    if sf.shape != of_rows:
        sf = sf.repeat_interleave(gran_k, -2)[..., :m, :]
    return x * sf.repeat_interleave(gran_k, -1)[..., :k]


def cast_by_torch(x: Tensor, rows: int, columns: int) -> Quantized:
    """Cast with one scale for each `rows` x `columns` block by torch's operations, on a GPU too: a yardstick."""
    return _cast(x, rows, columns, use_ue8m0=False, min_amax=0.0)


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Round positive FP32 numbers up to powers of two, exactly.

    >>> ceil_to_ue8m0(torch.tensor([1.0, 1.1, 0.5])).tolist()
    [1.0, 2.0, 0.5]
    """
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent with the mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def scales_of(amax: Tensor, largest: float, use_ue8m0: bool) -> Tensor:
    """Scales that bring magnitudes of at most `amax` to at most `largest`, by the rules of all casts."""
    # By a tensor: a GPU divides by a number inexactly, by its reciprocal.
    scales = (amax / amax.new_full((), largest)).clamp_min(MIN_SCALE)
    if use_ue8m0:
        scales = ceil_to_ue8m0(scales)
    return torch.where(amax == 0, 1.0, scales)


def has_kernels(x: Tensor) -> bool:
    """Tell whether a tensor's casts have kernels: on a Hopper GPU, of every type but FP64."""
    return (
        isinstance(x, Tensor)
        and x.is_cuda
        and x.layout is torch.strided
        and x.dtype in INPUTS
        and x.dim() >= 2
        and x.numel() > 0
        and is_hopper(x.get_device())
    )


def _is_transposed(x: Tensor) -> bool:
    """Tell whether a matrix's columns lie as kernels need rows, and its rows do not."""
    return x.shape[1] > 1 and x.stride(1) != 1 and x.stride(0) == 1


def empty_values(shape: Sequence[int], x: Tensor) -> Tensor:
    """Make room for FP8 values on the device of `x`."""
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)


def empty_scales(rows: Sequence[int], k: int, x: Tensor, *, mn_major: bool, gran_k: int = SCALE_BLOCK) -> Tensor:
    """Make room for the scales of rows, `[..., m]`; with `mn_major` they lie as products load them."""
    *batch, m = rows
    blocks = ceil_div(k, gran_k)
    if not mn_major:
        return torch.empty((*rows, blocks), dtype=torch.float32, device=x.device)
    pitch = pitch_of_scales(m)
    strides = (blocks * pitch,) * len(batch) + (1, pitch)
    return torch.empty_strided((*rows, blocks), strides, dtype=torch.float32, device=x.device)


def as_rows(x: Tensor) -> Tensor:
    """See a tensor as a matrix of all its rows, each contiguous; a copy if that is not possible."""
    m, k = x.shape[:-1].numel(), x.shape[-1]
    return with_rows(with_rows(x).reshape(m, k))


def with_rows(x: Tensor) -> Tensor:
    """Give `[..., m, k]`, or a copy if kernels cannot read its rows: contiguous, within 4 GiB of each other."""
    is_readable = x.stride(-1) == 1 or x.shape[-1] <= 1
    return x if is_readable and x.stride(-2) * x.element_size() < PITCH_LIMIT else x.contiguous()


@torch.no_grad()
def _cast_rows(
    x: Tensor, use_ue8m0: bool, min_amax: float, mn_major: bool, masked_m: Tensor | None = None
) -> Quantized:
    """Cast on a GPU, each row's 128 columns with a scale."""
    values, scales = empty_values(x.shape, x), empty_scales(x.shape[:-1], x.shape[-1], x, mn_major=mn_major)
    if x.dim() == 3 and mn_major and masked_m is None:
        for part in zip(x, values, scales, strict=True):
            cast_rows.run(RowCast(as_rows(part[0]), *part[1:], min_amax, use_ue8m0))
        return values, scales
    of_rows = scales if masked_m is not None or mn_major else as_rows(scales)
    cast_rows.run(RowCast(as_rows(x), as_rows(values), of_rows, min_amax, use_ue8m0, counts=masked_m))
    return values, scales


@torch.no_grad()
def _cast_columns(x: Tensor, use_ue8m0: bool, min_amax: float, mn_major: bool) -> Quantized:
    """Cast the transpose of `x` `[m, k]` on a GPU, each column's 128 rows with a scale."""
    x = with_rows(x)
    m, k = x.shape
    values, scales = empty_values((k, m), x), empty_scales((k,), m, x, mn_major=mn_major)
    cast_tiles.run(TileCast(x, None, None, None, values, scales, min_amax, use_ue8m0))
    return values, scales


@torch.no_grad()
def _cast_groups(x: Tensor, ks: Sequence[int], use_ue8m0: bool, min_amax: float, mn_major: bool) -> Quantized:
    """Cast groups of columns on a GPU, each to its part of what all have."""
    m, is_transposed = x.shape[0], _is_transposed(x)
    x = with_rows(x.t()).t() if is_transposed else with_rows(x)
    values = empty_values((x.numel(),), x)
    scales = empty_scales((m,), SCALE_BLOCK * sum(ceil_div(k, SCALE_BLOCK) for k in ks), x, mn_major=mn_major)
    column = block = 0
    for k in ks:
        part, its_values = x[:, column : column + k], values[m * column : m * (column + k)].view(m, k)
        its_scales = scales[:, block : block + ceil_div(k, SCALE_BLOCK)]
        if is_transposed:
            cast_tiles.run(TileCast(part.t(), None, None, None, its_values, its_scales, min_amax, use_ue8m0))
        else:
            cast_rows.run(RowCast(part, its_values, its_scales, min_amax, use_ue8m0))
        column, block = column + k, block + ceil_div(k, SCALE_BLOCK)
    return values, scales


@torch.no_grad()
def _cast_both(x: Tensor, use_ue8m0: bool, min_amax: float) -> tuple[Quantized, Quantized]:
    """Cast a matrix and its transpose on a GPU."""
    if _is_transposed(x):
        columns, rows = _cast_both(x.t(), use_ue8m0, min_amax)
        return rows, columns
    x = with_rows(x)
    m, k = x.shape
    values, scales = empty_values((m, k), x), empty_scales((m,), k, x, mn_major=True)
    of_columns = empty_values((k, m), x), empty_scales((k,), m, x, mn_major=True)
    cast_tiles.run(TileCast(x, Grain.ROWS, values, scales, *of_columns, min_amax, use_ue8m0))
    return (values, scales), of_columns


@torch.no_grad()
def _cast_tiles(x: Tensor, grain: Grain, use_ue8m0: bool, min_amax: float) -> Quantized:
    """Cast on a GPU, each tile's 128 rows with a scale, or with one for each column."""
    *batch, m, k = x.shape
    x = with_rows(x)
    columns = k if grain == Grain.CHANNELS else ceil_div(k, SCALE_BLOCK)
    values = empty_values(x.shape, x)
    scales = torch.empty((*batch, ceil_div(m, SCALE_BLOCK), columns), dtype=torch.float32, device=x.device)
    # Matrices whose tiles are all whole are one matrix.
    rows = x.numel() // k if m % SCALE_BLOCK == 0 else m
    parts = x.reshape(-1, rows, k), values.view(-1, rows, k), scales.view(-1, ceil_div(rows, SCALE_BLOCK), columns)
    for one, its_values, its_scales in zip(*parts, strict=True):
        cast_tiles.run(TileCast(one, grain, its_values, its_scales, min_amax=min_amax, rounds_up=use_ue8m0))
    return values, scales


@torch.no_grad()
def _cast(x: Tensor, rows: int, columns: int, use_ue8m0: bool, min_amax: float) -> Quantized:
    """Cast with one scale for each `rows` x `columns` block of the last two dimensions."""
    min_amax = check_blocks(x, rows, columns, min_amax)
    *batch, m, k = x.shape
    padding = (0, align(k, columns) - k, 0, align(m, rows) - m)
    # [..., m, k] -> [..., row blocks, rows, column blocks, columns]
    blocks = F.pad(x.float(), padding).view(*batch, ceil_div(m, rows), rows, ceil_div(k, columns), columns)
    finite = torch.where(blocks.isfinite(), blocks.abs(), 0.0)
    amax = finite.amax(dim=(-3, -1), keepdim=True).clamp_min(min_amax)
    scales = scales_of(amax, FP8_MAX, use_ue8m0)
    # The clamp saturates infinities, and quotients that round to just above 448. The conversion keeps a NaN's sign.
    quotients = (blocks / scales).clamp(-FP8_MAX, FP8_MAX)
    values = quotients.masked_fill(quotients.isnan(), torch.nan).to(torch.float8_e4m3fn)
    values = values.view(*batch, align(m, rows), align(k, columns))[..., :m, :k].contiguous()
    return values, scales[..., 0, :, 0].contiguous()


def granularity(gran_k: object) -> int:
    """Check how many columns share a scale."""
    number = as_integer(gran_k)
    if number is None or number < 1:
        raise ValueError(f"gran_k: expected a positive integer, got {gran_k!r}")
    return number


def check_rows(x: Tensor, mn_major: bool, masked_m: Tensor | None) -> None:
    """Check what a cast of rows asks besides `check_blocks`."""
    if mn_major and isinstance(x, Tensor) and x.dim() not in (2, 3):
        raise ValueError(f"x: expected shape (m, k) or (groups, m, k) with mn_major, got {tuple(x.shape)}")
    if masked_m is not None:
        check_counts(x, masked_m)


def check_blocks(x: Tensor, rows: int, columns: int, min_amax: float) -> float:
    """Check a cast with a scale for each `rows` x `columns` block, and give `min_amax` as a number."""
    check_castable(x)
    if x.dim() < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    granularity(min(rows, columns))
    return magnitude("min_amax", min_amax)


def check_matrix(x: Tensor) -> None:
    """Check a matrix that is cast together with its transpose."""
    check_castable(x)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (m, k), got {tuple(x.shape)}")


def check_groups(x: Tensor, ks: Sequence[int], min_amax: float) -> tuple[Sequence[int], float]:
    """Check a cast of groups of columns, and give sizes and `min_amax` as numbers."""
    check_castable(x)
    min_amax = magnitude("min_amax", min_amax)
    ks = integers("ks", ks)
    if any(k < 0 for k in ks):
        raise ValueError(f"ks: expected no negative size, got {list(ks)}")
    if x.dim() != 2 or x.shape[1] != sum(ks):
        raise ValueError(f"x: expected shape (m, sum(ks)) = (m, {sum(ks)}), got {tuple(x.shape)}")
    return ks, min_amax


def check_castable(x: Tensor) -> None:
    """Check that a tensor is of a type that casts take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise ValueError(f"x: expected a dense tensor, got layout {x.layout}")
    if not x.is_floating_point() or x.element_size() == 1:
        raise ValueError(f"x: expected dtype float32, bfloat16, float16 or float64, got {x.dtype}")

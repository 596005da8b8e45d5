"""Casts to FP8 values with FP32 scales, and back. A scale is for columns of a row, rows of a column, or a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..compat.forms import accepts_names
from ..core.call import FREE_ROWS, Function, run
from ..core.check.checks import cuts_gradient, has_type, integers, no_gradient, same_device
from ..core.check.layout import SCALE_BLOCK, ceil_div, check_dense, rows_of_counts
from ..core.check.tracing import is_dispatched, without_autocast
from ..core.check.ue8m0 import EXPONENTS, powers_of
from . import lay_scales
from .by_kernels import can_cast, cast_both_of, cast_groups_of, cast_of, cast_tensor_of
from .by_torch import cast_blocks
from .rules import (
    Quantized,
    Target,
    check_castable,
    check_groups,
    check_matrix,
    check_rows,
    checked_tensor,
    empty_scales,
    empty_values,
    granularity,
)
from .scales import packed_rows, unpack_ue8m0_from_int, words_laid_out


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
    """Cast with one scale for each row and each `gran_k` columns, as activations need.

    `x` is `[..., m, k]` of any floating type. The result is values `[..., m, k]` (torch.float8_e4m3fn) and scales
    `[..., m, ceil(k / gran_k)]` (torch.float32), both row-major. With `mn_major`, for `[m, k]` and `[groups, m, k]`,
    scales have the layout of `get_mn_major_tma_aligned_tensor`, which products load directly. With `masked_m`, int32
    `[groups]` for x `[groups, m, k]`, only the first `masked_m[g]` rows of each group are cast. The other rows may have
    any content, and their results are undefined (on the CPU zeros with scale 1). As in every cast, `use_ue8m0` rounds
    scales up to powers of two, and `min_amax` replaces smaller values of a block's largest magnitude. With
    `use_packed_ue8m0` too, scales are int32 `[..., m, ceil(k / gran_k / 4)]` with four exponents each
    (`pack_ue8m0_to_int`); with `mn_major`, in the layout of `get_mn_major_tma_aligned_packed_ue8m0_tensor`. `gran_k=0`
    means all columns: scales are `[..., m, 1]` and never packed. On a Hopper GPU, a kernel casts if 32, 64, 128 or all
    columns share a scale. torch makes all other casts.

    >>> values, scales = per_token_cast_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0, 0.0]], [[2.0]])
    """
    if use_packed_ue8m0 and (not use_ue8m0 or masked_m is not None):
        raise ValueError("use_packed_ue8m0: expected use_ue8m0 and no masked_m with packed scales")
    said = use_ue8m0, gran_k, min_amax, mn_major
    if masked_m is None:
        return run(ROWS, (x,), (*said, use_packed_ue8m0))  # type: ignore[no-any-return]
    return run(MASKED_ROWS, (x, masked_m), said)  # type: ignore[no-any-return]


def cast_checked(x: Tensor, to: Target, masked_m: Tensor | None = None) -> Quantized:
    """Check and compute a cast. With `masked_m`, cast only the first rows of each group."""
    no_gradient("x", x)
    check_rows(x, to.mn_major, masked_m)
    to = to.checked(x)
    if can_cast(x, to, masked_m):
        return cast_of(x, to, masked_m)
    if masked_m is not None:
        has_no_row = ~rows_of_counts(masked_m, x.shape[1])[..., None]
        x = x.masked_fill(has_no_row, 0)
    values, scales = cast_blocks(x, to)
    if masked_m is not None:
        scales.masked_fill_(has_no_row, 1)
    return values, stored(scales, to)


def stored(scales: Tensor, to: Target) -> Tensor:
    """Convert FP32 scales of rows to the type and layout of the cast's result."""
    if to.packs:
        words = packed_rows(scales)
        return words_laid_out(words) if to.mn_major else words
    return lay_scales.laid_out(scales) if to.mn_major else scales


def per_rows(
    use_ue8m0: bool = False,
    gran_k: int = SCALE_BLOCK,
    min_amax: float = 0.0,
    mn_major: bool = False,
    use_packed_ue8m0: bool = False,
) -> Target:
    """Make the target of `per_token_cast_to_fp8`."""
    if use_packed_ue8m0 and gran_k == 0:
        raise ValueError("use_packed_ue8m0: expected gran_k above 0, got 0: a row's only scale does not fill a word")
    return Target(1, granularity(gran_k, 0), use_ue8m0, min_amax, mn_major, use_packed_ue8m0)


def per_blocks(use_ue8m0: bool, gran_k: int, min_amax: float, *, columns: int | None = None) -> Target:
    """Make the target of `per_block_cast_to_fp8`, with `columns` columns under a scale if given."""
    rows = granularity(gran_k)
    return Target(rows, rows if columns is None else columns, use_ue8m0, min_amax)


per_channels = partial(per_blocks, columns=1)
"""Makes the target of `per_channel_cast_to_fp8`."""


def _rows_operator(x: Tensor, *said: Any, masked_m: Tensor | None = None) -> Quantized:
    to, operator = per_rows(*said), torch.ops.deep_gemm.per_token_cast_to_fp8.default
    if not to.packs:
        return operator(x, to.use_ue8m0, to.columns, to.min_amax, to.mn_major, masked_m)  # type: ignore[no-any-return]
    check_rows(x, to.mn_major, None)
    values, scales = operator(x, to.use_ue8m0, to.columns, to.min_amax)
    return values, stored(scales, to)


OF_ONE: dict[str, Any] = {
    "tensors": lambda x: (x,),
    "wants_checks": lambda tensors: cuts_gradient(tensors, ()),
    "free": [FREE_ROWS],
}
"""Arguments of `Function` for a cast of one tensor, whose gradient is refused and whose number of rows may vary."""


def _of_many_rows(name: str, cast: Callable[..., Target]) -> Function:
    def as_operator(x: Tensor, use_ue8m0: bool, gran_k: int, min_amax: float) -> Quantized:
        operator = getattr(torch.ops.deep_gemm, f"{name}_cast_to_fp8").default
        return operator(x, use_ue8m0, granularity(gran_k), min_amax)  # type: ignore[no-any-return]

    return Function(lambda x, *said: cast_checked(x, cast(*said)), as_operator, **OF_ONE)


ROWS = Function(lambda x, *said: cast_checked(x, per_rows(*said)), _rows_operator, **OF_ONE)
MASKED_ROWS = Function(
    lambda x, masked_m, *said: cast_checked(x, per_rows(*said), masked_m),
    lambda x, masked_m, *said: _rows_operator(x, *said, masked_m=masked_m),
    lambda x, masked_m: (x, masked_m),
    lambda tensors: cuts_gradient(tensors[:1], ()),
)
CHANNELS, BLOCKS = _of_many_rows("per_channel", per_channels), _of_many_rows("per_block", per_blocks)


def per_channel_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each column and each `gran_k` rows, for operands that are transposed afterwards.

    `x` is `[..., k, n]` of any floating type. The result is values `[..., k, n]` and scales
    `[..., ceil(k / gran_k), n]`.

    >>> values, scales = per_channel_cast_to_fp8(torch.tensor([[896.0, 448.0], [448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, 448.0], [224.0, 0.0]], [[2.0, 1.0]])
    """
    return run(CHANNELS, (x,), (use_ue8m0, gran_k, min_amax))  # type: ignore[no-any-return]


def per_block_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each block of `gran_k` rows and columns, as weights need.

    `x` is `[..., n, k]` of any floating type. The result is values `[..., n, k]` and scales
    `[..., ceil(n / gran_k), ceil(k / gran_k)]`.

    >>> values, scales = per_block_cast_to_fp8(torch.full((130, 256), 448.0))
    >>> values.shape, scales.shape
    (torch.Size([130, 256]), torch.Size([2, 2]))
    """
    return run(BLOCKS, (x,), (use_ue8m0, gran_k, min_amax))  # type: ignore[no-any-return]


def per_tensor_cast_to_fp8(
    x: Tensor, scale: Tensor | None = None, use_ue8m0: bool = False, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for a whole tensor: its own scale, FP32 `[1]`, or a given scale, as in checkpoints.

    A given `scale`, FP32 of one element, is also returned. Values are then x / scale for any scale. Quotients above
    448, also infinite ones (x / 0), become 448 with their sign. A NaN quotient or an infinite x becomes NaN.

    >>> values, scale = per_tensor_cast_to_fp8(torch.tensor([[896.0, -448.0], [448.0, 0.0]]))
    >>> values.float().tolist(), scale.tolist()
    ([[448.0, -224.0], [224.0, 0.0]], [2.0])
    """
    values, *made = run(TENSOR, (x, scale), (use_ue8m0, min_amax, scale is None))
    return values, made[0] if scale is None else scale


def _cast_tensor(x: Tensor, scale: Tensor | None, use_ue8m0: bool, min_amax: float, _: bool) -> tuple[Tensor, ...]:
    to = checked_tensor(x, scale, use_ue8m0, min_amax)
    if can_cast(x, to):
        return cast_tensor_of(x, to, scale)
    values, made = cast_blocks(x.reshape(1, -1), to, scale)
    return (values.view(x.shape), made.view(1))[: 1 + (scale is None)]


TENSOR = Function(
    _cast_tensor,
    lambda *call: torch.ops.deep_gemm.per_tensor_cast_to_fp8.default(*call[:-1]),
    **{**OF_ONE, "tensors": lambda x, scale: (x,) if scale is None else (x, scale)},
)


def cast_both_to_fp8(x: Tensor, use_ue8m0: bool = False, *, min_amax: float = 0.0) -> tuple[Quantized, Quantized]:
    """Cast a matrix and its transpose, each with one scale for each row and 128 columns. Training needs both.

    `x` is `[m, k]` of any floating type. The result is `per_token_cast_to_fp8(x, mn_major=True)` and
    `per_token_cast_to_fp8(x.T, mn_major=True)`: values `[m, k]` with scales `[m, ceil(k / 128)]`, and values `[k, m]`
    with scales `[k, ceil(m / 128)]`. Products load these scales directly. A GPU reads `x` only once.

    >>> (values, scales), (values_t, scales_t) = cast_both_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0, 0.0]], [[2.0]])
    >>> values_t.float().tolist(), scales_t.tolist()
    ([[448.0], [-448.0], [0.0]], [[2.0], [1.0], [1.0]])
    """
    return run(BOTH, (x,), (use_ue8m0, min_amax))  # type: ignore[no-any-return]


def _cast_both(x: Tensor, use_ue8m0: bool, min_amax: float) -> tuple[Quantized, Quantized]:
    check_matrix(x)
    to = per_rows(use_ue8m0, min_amax=min_amax, mn_major=True)
    if can_cast(x, to):
        return cast_both_of(x, to.checked(x))
    return cast_checked(x, to), cast_checked(x.t(), to)


def _both_as_operator(*call: Any) -> tuple[Quantized, Quantized]:
    values, scales, columns, of_columns = torch.ops.deep_gemm.cast_both_to_fp8.default(*call)
    return (values, scales), (columns, of_columns)


BOTH = Function(_cast_both, _both_as_operator, **OF_ONE)


def k_grouped_cast_to_fp8(
    x: Tensor, ks: Sequence[int], use_ue8m0: bool = False, *, min_amax: float = 0.0, mn_major: bool = False
) -> Quantized:
    """Cast operands of a k-grouped product: `x` is `[m, sum(ks)]`, the groups' columns side by side.

    The result is an operand of `k_grouped_fp8_gemm_nt_contiguous`: the one-dimensional concatenation of each group's
    row-major `[m, k_g]` values, and scales `[m, sum(ceil(k_g / 128))]`. No scale spans two groups. With `mn_major`,
    scales have the layout of `get_mn_major_tma_aligned_tensor`, which the product loads directly. A GPU does not copy
    `x` if it is row-major, or if it is the transpose of a row-major matrix, such as `x.t()`.

    >>> values, scales = k_grouped_cast_to_fp8(torch.ones(4, 160), [128, 32])
    >>> values.shape, scales.shape
    (torch.Size([640]), torch.Size([4, 2]))
    """
    if is_dispatched(x):
        operator = torch.ops.deep_gemm.k_grouped_cast_to_fp8.default
        return operator(x, ks, use_ue8m0, min_amax, mn_major)  # type: ignore[no-any-return]
    ks, min_amax = check_groups(x, ks, min_amax)
    to = per_rows(use_ue8m0, min_amax=min_amax, mn_major=mn_major)
    if can_cast(x, to):
        return cast_groups_of(x, ks, to)
    groups = [cast_blocks(part, to) for part in torch.split(x, list(ks), dim=1)]
    if not groups:
        return empty_values((0,), x), empty_scales((x.shape[0],), 0, x, mn_major=mn_major)
    with without_autocast():
        scales = torch.cat([scales for _, scales in groups], dim=1)
        values = torch.cat([values.flatten() for values, _ in groups])
    return values, stored(scales, to)


def per_custom_dims_cast_to_fp8(
    x: Tensor, dims: Sequence[int], use_ue8m0: bool = False, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each index of the dimensions `dims`: all other dimensions share it.

    The result is values of x's shape, and scales whose shape is the sizes of `dims`, in the order of x's dimensions.

    >>> values, scales = per_custom_dims_cast_to_fp8(torch.tensor([[896.0, -448.0], [448.0, 0.0]]), (0,))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0], [448.0, 0.0]], [2.0, 1.0])
    """
    check_castable(x)
    x = x.detach()  # else the copy below would require a gradient
    kept = sorted({dim % max(x.dim(), 1) for dim in integers("dims", dims)})
    if any(not -x.dim() <= dim < x.dim() for dim in dims):
        raise ValueError(f"dims: expected some of the {x.dim()} dimensions of x, got {tuple(dims)}")
    others = [dim for dim in range(x.dim()) if dim not in kept]
    # [..., as x] -> [slices, elements of a slice]
    rows = x.permute(*kept, *others).reshape(prod(x.shape[dim] for dim in kept), prod(x.shape[dim] for dim in others))
    values, scales = per_token_cast_to_fp8(rows, use_ue8m0, 0, min_amax=min_amax)
    in_order = values.view([x.shape[dim] for dim in (*kept, *others)])
    back = [(*kept, *others).index(dim) for dim in range(x.dim())]
    return in_order.permute(back).contiguous(), scales.view([x.shape[dim] for dim in kept])


@accepts_names(x_fp8="x")
def cast_back_from_fp8(x: Tensor, sf: Tensor, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False) -> Tensor:
    """Convert FP8 values and their scales back to FP32 numbers. Each number is rounded once.

    `x` is `[..., m, k]`. `sf` is `[..., m, ceil(k / gran_k)]`, or has a scale for each block:
    `[..., ceil(m / gran_k), ceil(k / gran_k)]`. Scales are FP32, UE8M0 exponents (torch.uint8), or, for rows, packed
    UE8M0; `use_packed_ue8m0` requires packed scales. `gran_k=0`: `sf` is `[..., m, 1]`, or one element for all rows.

    >>> cast_back_from_fp8(*per_token_cast_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))).tolist()
    [[896.0, -448.0, 0.0]]
    """
    no_gradient("x", x)
    no_gradient("sf", sf)
    check_dense("x", x)
    has_type("x", x, (torch.float8_e4m3fn,))
    if x.dim() < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    with torch.no_grad():
        return scaled_back(x.float(), sf, gran_k, use_packed_ue8m0, "x")


def scaled_back(x: Tensor, sf: Tensor, gran_k: int, use_packed_ue8m0: bool, name: str) -> Tensor:
    """Multiply FP32 numbers `[..., m, k]` by scales of rows or of blocks. Errors call the numbers `name`."""
    gran_k = granularity(gran_k, 0)
    check_dense("sf", sf)
    if use_packed_ue8m0 and sf.dtype != torch.int32:
        raise ValueError(f"sf: expected dtype torch.int32 with use_packed_ue8m0, got {sf.dtype}")
    same_device({"sf": sf}, x.device, name)
    *batch, m, k = x.shape
    columns = ceil_div(k, gran_k) if gran_k else 1
    if sf.dtype == torch.int32:
        sf = unpack_ue8m0_from_int(sf)[..., :columns]
    elif sf.dtype in EXPONENTS:
        sf = powers_of(sf.view(torch.uint8).int())
    if sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32, torch.int32 or torch.uint8, got {sf.dtype}")
    of_rows, of_blocks = (*batch, m, columns), (*batch, ceil_div(m, gran_k), columns) if gran_k else (1,)
    sf = sf.reshape(sf.shape or 1)
    if sf.shape not in (of_rows, of_blocks):
        raise ValueError(f"sf: expected shape {of_rows} or {of_blocks}, got {tuple(sf.shape)}")
    if not gran_k:
        return x * sf
    if sf.shape != of_rows:
        sf = sf.repeat_interleave(gran_k, -2)[..., :m, :]
    return x * sf.repeat_interleave(gran_k, -1)[..., :k]

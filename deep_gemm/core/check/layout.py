"""Sizes and memory layouts of scales: what TMA can load, and which scales a recipe asks for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from operator import mul

import torch
from torch import Tensor

from ..shadow import TENSORS, Shadow
from .memory import empty
from .numbers import as_integer, integer_in_range
from .tracing import has_memory, refuse_transforms

ADDRESS_ALIGNMENT = 16
"""Bytes. TMA needs it for addresses of values and outputs, and for row pitches."""
SCALE_BLOCK = 128
WORD_BYTES, BF16_BYTES = 4, 2
Recipe = Sequence[int]
"""How many (rows of A, rows of B, columns) share a scale; (rows, columns) for one side."""
RECIPE_1D2D = (1, SCALE_BLOCK, SCALE_BLOCK)
RECIPE_1D1D = (1, 1, SCALE_BLOCK)
RECIPES = (RECIPE_1D2D, RECIPE_1D1D, (1, 64, 64), (1, 32, 32), (1, 1, 32))
RECIPES_OF_A = ((1, SCALE_BLOCK), (1, 64), (1, 32))
RECIPES_OF_B = ((SCALE_BLOCK, SCALE_BLOCK), (1, SCALE_BLOCK), (64, 64), (32, 32), (1, 32))
UE8M0_PER_WORD = 4
"""Exponents in an int32."""
FP32_NOT_EXPONENT = -(1 << 31) | ((1 << 23) - 1)
"""Sign and mantissa."""
SCALES_ALIGNMENT = ADDRESS_ALIGNMENT // 4
"""FP32 elements. Row pitches and group strides of scales are multiples of it."""


def ceil_div(x: int, y: int) -> int:
    """Quotient of two integers, rounded up."""
    return (x + (y - 1)) // y


cell_div = ceil_div  # an older name


def align(x: int, y: int) -> int:
    """Round `x` up to a multiple of `y`."""
    return ceil_div(x, y) * y


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """Get `mn` elements rounded up to a row pitch that TMA accepts, a multiple of 16 bytes.

    >>> get_tma_aligned_size(33, 4)
    36
    """
    mn, element_size = integer_in_range("mn", mn, 0), integer_in_range("element_size", element_size, 1)
    return align(mn, ADDRESS_ALIGNMENT // gcd(element_size, ADDRESS_ALIGNMENT))


def byte_span(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if isinstance(x, Shadow):
        return x.reach()
    if x.is_contiguous():
        return x.numel() * x.element_size()
    strides = x.stride()
    last: int = sum(map(mul, x.shape, strides)) - sum(strides)
    return (last + 1) * x.element_size()


def parts_of(blocks: int, parts: int) -> list[range]:
    """Deal blocks to parts as evenly as can be, in order, the earlier parts being the longer ones.

    >>> parts_of(5, 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    each, more = divmod(blocks, parts)
    starts = [index * each + min(index, more) for index in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


def ids_of_groups(ends: Tensor, m: int, alignment: int) -> Tensor:
    """Give the group of each of m stacked rows, -1 for none, given where groups end. The host reads nothing.

    Group g owns the rows from `ends[g - 1]`, aligned, to `ends[g]`. Ends never decrease; an empty group may repeat one.

    >>> ids_of_groups(torch.tensor([1, 1, 6], dtype=torch.int32), 8, 4).tolist()
    [0, -1, -1, -1, 2, 2, -1, -1]
    """
    rows = torch.arange(m, dtype=torch.int32, device=ends.device)
    if ends.numel() == 0:
        return torch.full_like(rows, -1)
    aligned = (ends + (alignment - 1)) // alignment * alignment
    starts = torch.cat([torch.zeros_like(ends[:1]), aligned[:-1]])
    group = torch.searchsorted(ends, rows, right=True, out_int32=True)  # the first whose end lies behind the row
    is_owned = (rows < ends[-1]) & (rows >= starts[group.clamp_max(ends.numel() - 1)])
    return torch.where(is_owned, group, torch.full_like(group, -1))


def rows_of_groups(ends: Tensor, m: int, alignment: int) -> Tensor:
    """Tell of each of m stacked rows whether a group owns it: see `ids_of_groups`."""
    return ids_of_groups(ends, m, alignment) >= 0


def rows_of_counts(counts: Tensor, max_m: int) -> Tensor:
    """Tell of each of max_m rows of each group whether the group uses it. The host reads nothing.

    >>> rows_of_counts(torch.tensor([1, 0], dtype=torch.int32), 2).int().tolist()
    [[1, 0], [0, 0]]
    """
    return torch.arange(max_m, dtype=torch.int32, device=counts.device) < counts[:, None]


def pitch_of_scales(mn: int) -> int:
    """Elements from one block of k to the next of scales that lie m-major: rows, in multiples of 16 bytes.

    >>> pitch_of_scales(33)
    36
    """
    return (mn + (SCALES_ALIGNMENT - 1)) // SCALES_ALIGNMENT * SCALES_ALIGNMENT  # for symbolic sizes in their own form


def is_mn_major_tma_aligned(sf: Tensor) -> bool:
    """Tell whether TMA can load these scales in place: laid out so, from an address that is a multiple of 16 bytes."""
    return is_mn_major(sf) and sf.data_ptr() % ADDRESS_ALIGNMENT == 0


def is_mn_major(sf: Tensor) -> bool:
    """Tell whether scales are laid out as TMA loads them: m-major, with a pitch that is a multiple of 16 bytes.

    The stride of a dimension of size 1 does not matter.
    """
    *groups, mn, num_k_blocks = sf.shape
    *group_strides, row_stride, pitch = sf.stride()
    return (
        (row_stride == 1 or mn <= 1)
        and (num_k_blocks <= 1 or (pitch >= mn and pitch % SCALES_ALIGNMENT == 0))
        and (not groups or groups[0] <= 1 or group_strides[0] % SCALES_ALIGNMENT == 0)
    )


def with_usual_strides(sf: Tensor) -> Tensor:
    """Give m-major scales the strides of `empty_mn_major` in dimensions of size 1, where they move nothing.

    Programs compare strides, or build descriptors from them, whatever the size.
    """
    if 1 not in sf.shape:
        return sf
    *groups, mn, num_k_blocks = sf.shape
    *group_strides, _, pitch = sf.stride()
    pitch = pitch if num_k_blocks > 1 else get_tma_aligned_size(mn, 4)
    if groups and groups[0] <= 1:
        group_strides = [num_k_blocks * pitch]
    strides = (*group_strides, 1, pitch)
    return sf if sf.stride() == strides else sf.detach().as_strided(sf.shape, strides)


def empty_mn_major(sf: Tensor, num_k_blocks: int | None = None) -> Tensor:
    """Make room for the same scales in the layout that TMA loads: m-major, in rows of a multiple of 16 bytes.

    With `num_k_blocks`, make room for that number of FP32 scales in each row, whatever type and number `sf` has.
    """
    *outer, of_row = sf.shape
    pitch = pitch_of_scales(outer[-1])
    num_k_blocks, dtype = (of_row, sf.dtype) if num_k_blocks is None else (num_k_blocks, torch.float32)
    strides = (num_k_blocks * pitch, 1, pitch)[3 - sf.dim() :]
    return empty("scales laid out for TMA", (*outer, num_k_blocks), dtype, sf.device, strides)


def address(name: str, x: Tensor, alignment: int) -> None:
    """Check that a tensor begins at a multiple of `alignment` bytes."""
    if has_memory(x) and x.data_ptr() % alignment:
        raise ValueError(f"{name}: expected an address that is a multiple of {alignment} bytes, got {x.data_ptr():#x}")


def whole_elements(name: str, x: Tensor) -> None:
    """Check that a tensor begins at a multiple of its element's size: one made from a buffer may begin at any byte."""
    address(name, x, x.element_size())


def dense(name: str, x: object) -> Tensor:
    """Check that `x` is a dense tensor and return it."""
    if not isinstance(x, TENSORS):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")
    return x  # type: ignore[return-value]


def describe(x: object) -> str:
    """Name a type, for an error; and the length of a pair or a list."""
    return f"a {type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__


def check_dense(name: str, x: object) -> None:
    """Check that this is a dense tensor, outside of transforms."""
    dense(name, x)
    refuse_transforms()


def check_scales(sf: Tensor) -> None:
    """Check FP32 scales of a matrix or of several matrices."""
    check_dense("sf", sf)
    if sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32, got {sf.dtype}")
    check_shape_of_scales(sf)


def check_shape_of_scales(sf: Tensor) -> None:
    """Check scales of any type, of a matrix or of several matrices."""
    check_dense("sf", sf)
    if sf.dim() not in (2, 3):
        raise ValueError(f"sf: expected shape (mn, k_blocks) or (groups, mn, k_blocks), got {tuple(sf.shape)}")
    whole_elements("sf", sf)


def check_powers_of_two(name: str, x: Tensor) -> None:
    """Check that FP32 numbers are powers of two, infinities or NaN. Values on a GPU are not read, so not checked."""
    check_dense(name, x)
    if x.dtype != torch.float32:
        raise ValueError(f"{name}: expected dtype torch.float32, got {x.dtype}")
    if not x.is_cpu:
        return
    wrong = (x.detach().view(torch.int32) & FP32_NOT_EXPONENT != 0) & ~x.isnan()
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{name}: expected powers of two, got {x[index].item()} at {index}")


def block_under_a_scale(
    sf: Tensor, mn: int, k: int, recipe: Recipe | None, num_groups: int | None, is_sfa: bool | None
) -> tuple[int, int]:
    """Check scales against a recipe, and tell how many rows and columns share one."""
    rows, columns = _stated(recipe, is_sfa)
    check_dense("sf", sf)
    each = 1  # scales of an element
    if columns < SCALE_BLOCK and sf.dtype in (torch.int32, torch.uint8, torch.float8_e8m0fnu):
        each = UE8M0_PER_WORD if sf.dtype == torch.int32 else 1
    elif sf.dtype == torch.int32:
        raise NotImplementedError("sf: packed UE8M0 scales (torch.int32) are not supported, pass torch.float32 scales")
    elif sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32, got {sf.dtype}")
    groups = () if num_groups is None else (integer_in_range("num_groups", num_groups, 0),)
    mn, k = integer_in_range("mn", mn, 0), integer_in_range("k", k, 0)
    expected = (*groups, ceil_div(mn, rows), ceil_div(k, columns * each))
    if tuple(sf.shape) != expected:
        raise ValueError(f"sf: expected shape {expected}, got {tuple(sf.shape)}")
    return rows, columns


def recipe_numbers(name: str, recipe: Recipe) -> tuple[int, ...]:
    """Get a recipe as a tuple of integers. The caller checks their values."""
    # No tensor may be in a recipe: comparing one waits for the GPU, and gives no truth value for several elements.
    is_sequence = isinstance(recipe, Sequence) and not isinstance(recipe, str)
    if not is_sequence or any(as_integer(x) is None and hasattr(x, "shape") for x in recipe):
        raise ValueError(f"{name}: expected a tuple of integers, got {recipe!r}")
    numbers = [(x, as_integer(x)) for x in recipe]  # no `:=` among them: Dynamo of torch 2.11 does not follow it
    return tuple(x if number is None else number for x, number in numbers)


def either(choices: Sequence[object]) -> str:
    """List choices, in words.

    >>> either([1, 2, 3])
    '1, 2 or 3'
    """
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def _stated(recipe: Recipe | None, is_sfa: bool | None) -> tuple[int, ...]:
    """Give the rows and columns under a scale of one side."""
    stated = RECIPE_1D2D if recipe is None else recipe_numbers("recipe", recipe)
    if stated in (*RECIPES_OF_A, *RECIPES_OF_B):
        return stated
    if stated not in RECIPES:
        sides = either(sorted({*RECIPES_OF_A, *RECIPES_OF_B}))
        raise NotImplementedError(f"recipe: expected {either(RECIPES)}, or {sides} for one side, got {stated}")
    of_a, of_b, columns = stated
    if is_sfa is None and of_a != of_b:
        raise ValueError(f"is_sfa: expected True or False with the recipe {stated}, got None")
    return of_a if is_sfa else of_b, columns

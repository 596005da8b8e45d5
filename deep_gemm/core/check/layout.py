"""Sizes and memory layouts of scales: the layouts that TMA can load, and the scales that a recipe states."""

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
"""Bytes. TMA needs this alignment for addresses of values and outputs, and for row pitches."""
SCALE_BLOCK = 128
WORD_BYTES, BF16_BYTES = 4, 2
Recipe = Sequence[int]
"""Numbers of (rows of A, rows of B, columns) that share a scale; (rows, columns) for one operand."""
RECIPE_1D2D = (1, SCALE_BLOCK, SCALE_BLOCK)
RECIPE_1D1D = (1, 1, SCALE_BLOCK)
RECIPES = (RECIPE_1D2D, RECIPE_1D1D, (1, 64, 64), (1, 32, 32), (1, 1, 32))
RECIPES_OF_A = ((1, SCALE_BLOCK), (1, 64), (1, 32))
RECIPES_OF_B = ((SCALE_BLOCK, SCALE_BLOCK), (1, SCALE_BLOCK), (64, 64), (32, 32), (1, 32))
UE8M0_PER_WORD = 4
"""UE8M0 exponents in an int32."""
FP32_NOT_EXPONENT = -(1 << 31) | ((1 << 23) - 1)
"""The sign and mantissa bits of an FP32 number."""
SCALES_ALIGNMENT = ADDRESS_ALIGNMENT // 4
"""FP32 elements. Pitches and group strides of scales are multiples of this number."""


def ceil_div(x: int, y: int) -> int:
    """Divide two integers, and round up."""
    return (x + (y - 1)) // y


cell_div = ceil_div  # an older name


def align(x: int, y: int) -> int:
    """Round `x` up to a multiple of `y`."""
    return ceil_div(x, y) * y


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """Round `mn` elements up to a row pitch that TMA accepts, a multiple of 16 bytes.

    >>> get_tma_aligned_size(33, 4)
    36
    """
    mn, element_size = integer_in_range("mn", mn, 0), integer_in_range("element_size", element_size, 1)
    return align(mn, ADDRESS_ALIGNMENT // gcd(element_size, ADDRESS_ALIGNMENT))


def byte_span(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last element."""
    if isinstance(x, Shadow):
        return x.reach()
    if x.is_contiguous():
        return x.numel() * x.element_size()
    strides = x.stride()
    last: int = sum(map(mul, x.shape, strides)) - sum(strides)
    return (last + 1) * x.element_size()


def parts_of(blocks: int, parts: int) -> list[range]:
    """Split blocks into parts as evenly as possible, in order. Earlier parts are longer if lengths differ.

    >>> parts_of(5, 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    each, more = divmod(blocks, parts)
    starts = [index * each + min(index, more) for index in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


def ids_of_groups(ends: Tensor, m: int, alignment: int) -> Tensor:
    """Return the group of each of m stacked rows, or -1 for a row without a group. The host reads no GPU memory.

    Group g has the rows from the aligned `ends[g - 1]` to `ends[g]`. Ends never decrease, but may repeat.

    >>> ids_of_groups(torch.tensor([1, 1, 6], dtype=torch.int32), 8, 4).tolist()
    [0, -1, -1, -1, 2, 2, -1, -1]
    """
    rows = torch.arange(m, dtype=torch.int32, device=ends.device)
    if ends.numel() == 0:
        return torch.full_like(rows, -1)
    aligned = (ends + (alignment - 1)) // alignment * alignment
    starts = torch.cat([torch.zeros_like(ends[:1]), aligned[:-1]])
    group = torch.searchsorted(ends, rows, right=True, out_int32=True)  # the first group whose end is behind the row
    is_owned = (rows < ends[-1]) & (rows >= starts[group.clamp_max(ends.numel() - 1)])
    return torch.where(is_owned, group, torch.full_like(group, -1))


def rows_of_groups(ends: Tensor, m: int, alignment: int) -> Tensor:
    """Tell for each of m stacked rows whether it is in a group: see `ids_of_groups`."""
    return ids_of_groups(ends, m, alignment) >= 0


def rows_of_counts(counts: Tensor, max_m: int) -> Tensor:
    """Tell for each of the max_m rows of each group whether the group uses the row. The host reads no GPU memory.

    >>> rows_of_counts(torch.tensor([1, 0], dtype=torch.int32), 2).int().tolist()
    [[1, 0], [0, 0]]
    """
    return torch.arange(max_m, dtype=torch.int32, device=counts.device) < counts[:, None]


def pitch_of_scales(mn: int) -> int:
    """Compute the pitch of m-major scales, between k-blocks: the rows, rounded up to a multiple of 4 (16 bytes).

    >>> pitch_of_scales(33)
    36
    """
    return (mn + (SCALES_ALIGNMENT - 1)) // SCALES_ALIGNMENT * SCALES_ALIGNMENT  # symbolic sizes need this form


def is_mn_major_tma_aligned(sf: Tensor) -> bool:
    """Tell whether TMA can load these scales in place: `is_mn_major`, at an address that is a multiple of 16 bytes."""
    return is_mn_major(sf) and sf.data_ptr() % ADDRESS_ALIGNMENT == 0


def is_mn_major(sf: Tensor) -> bool:
    """Tell whether scales have the layout that TMA loads: m-major, with a pitch that is a multiple of 16 bytes.

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
    """Replace the strides of m-major scales in dimensions of size 1 by the strides of `empty_mn_major`.

    Programs compare strides, or build descriptors from strides, even if a size is 1. No element moves.
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
    """Allocate a tensor like `sf` in the layout that TMA loads: m-major, with a pitch of a multiple of 16 bytes.

    With `num_k_blocks`, each row has this number of FP32 scales, for any type and number of scales of `sf`.
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
    """Check that a tensor begins at a multiple of its element's size: a tensor of a buffer may begin at any byte."""
    address(name, x, x.element_size())


def dense(name: str, x: object) -> Tensor:
    """Check that `x` is a dense tensor and return it."""
    if not isinstance(x, TENSORS):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")
    return x  # type: ignore[return-value]


def describe(x: object) -> str:
    """Describe an object for an error: its type, and the length of a tuple or list."""
    return f"a {type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__


def check_dense(name: str, x: object) -> None:
    """Check that `x` is a dense tensor and that no transform of torch.func is active."""
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
    """Check scales against a recipe. Return the numbers of rows and columns that share a scale."""
    rows, columns = _stated(recipe, is_sfa)
    check_dense("sf", sf)
    each = 1  # scales in an element
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
    """Return a recipe as a tuple of integers. The caller checks their values."""
    # A recipe may not contain a tensor: a comparison would wait for the GPU, and has no truth value for many elements.
    is_sequence = isinstance(recipe, Sequence) and not isinstance(recipe, str)
    if not is_sequence or any(as_integer(x) is None and hasattr(x, "shape") for x in recipe):
        raise ValueError(f"{name}: expected a tuple of integers, got {recipe!r}")
    numbers = [(x, as_integer(x)) for x in recipe]  # without `:=`, which Dynamo of torch 2.11 cannot trace here
    return tuple(x if number is None else number for x, number in numbers)


def either(choices: Sequence[object]) -> str:
    """List choices in words.

    >>> either([1, 2, 3])
    '1, 2 or 3'
    """
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def _stated(recipe: Recipe | None, is_sfa: bool | None) -> tuple[int, ...]:
    """Return the numbers of rows and columns of one operand that share a scale."""
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

"""Checks of a product's arguments, one at a time: types, shapes, layouts, addresses, overlaps.

The first tensor with an axis sets the axis's size: once `a` has passed as (m, k), other tensors must have the same m
and k. A message is built only when it is raised, because the checks of a correct call must take only microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import NoReturn

import torch
from torch import Tensor

from .layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, address, align, byte_span, ceil_div, dense, describe, whole_elements
from .memory import copied, empty
from .numbers import as_integer
from .recipes import E4M3
from .tracing import has_memory

K_MULTIPLE = 16
OUTPUT_TYPES = (torch.bfloat16, torch.float32)

Operand = tuple[Tensor, Tensor]
"""FP8 values and their FP32 scales."""
Axes = tuple[str, ...]
Sizes = dict[str, int]


# Tensors and their shapes


tensor = dense


def bind(name: str, x: Tensor, axes: Axes, sizes: Sizes) -> None:
    """Store a tensor's sizes under the names of its axes. If a name already has a size, the two must be equal."""
    before, shape = sizes.copy(), x.shape
    if len(axes) == len(shape) and tuple(map(sizes.setdefault, axes, shape)) == shape:
        return
    names = ", ".join(axes)
    known = ", ".join(str(before.get(axis, axis)) for axis in axes)
    expected = f"({names})" if names == known else f"({names}) = ({known})"
    raise ValueError(f"{name}: expected shape {expected}, got {tuple(shape)}")


def has_type(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check a tensor's type."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")


def shaped(name: str, x: object, dtypes: tuple[torch.dtype, ...], axes: Axes, sizes: Sizes) -> Tensor:
    """Check that `x` is a tensor of one of these types, `bind` its axes, and return it."""
    x = tensor(name, x)
    has_type(name, x, dtypes)
    bind(name, x, axes, sizes)
    return x


def int32(name: str, x: object, axis: str, size: int) -> Tensor:
    """Check that `x` is a contiguous one-dimensional int32 tensor and return it."""
    x = tensor(name, x)
    has_type(name, x, (torch.int32,))
    if x.shape != (size,):
        raise ValueError(f"{name}: expected shape ({axis},) = ({size},), got {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {x.stride(0)}")
    whole_elements(name, x)
    return x


# Operands


def pair(name: str, operand: Operand) -> Operand:
    """Check that an operand is a pair of tensors."""
    if not isinstance(operand, (tuple, list)) or len(operand) != 2:
        raise TypeError(f"{name}: expected a pair (values, scales), got {describe(operand)}{_casts_for(operand)}")
    values, scales = operand
    for its_name, x in ((name, values), (f"sf{name}", scales)):
        no_gradient(its_name, tensor(its_name, x))
    return values, scales


def no_gradient(name: str, x: object) -> None:
    """Refuse, in grad mode, a tensor that was computed from a tensor with a gradient, which would be lost here.

    Callers that compute under torch.no_grad() call this function first.
    """
    if torch.is_grad_enabled() and isinstance(x, Tensor) and _carries_gradient(x):
        refuse_gradient(name)


def written(name: str, d: object) -> None:
    """Refuse, in grad mode, an output that requires a gradient, even a leaf: autograd does not see the write."""
    if wants_gradient(d):
        refuse_gradient(name)


def without_gradients(given: Mapping[str, Tensor]) -> None:
    """Refuse, in grad mode, a given tensor that requires a gradient, even a leaf: the gradient would be lost here."""
    for name, x in given.items():
        written(name, x)


def wants_gradient(*given: object) -> bool:
    """Tell whether grad mode is on and one of these tensors requires a gradient."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)


def cuts_gradient(operands: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Tell whether a product would lose a gradient. `operands`: values and scales. `others` include C and D."""
    return torch.is_grad_enabled() and (any(map(_carries_gradient, operands)) or any(x.requires_grad for x in others))


def _carries_gradient(x: Tensor) -> bool:
    """Tell whether a gradient would flow through an operand to the tensors that it was computed from.

    The answer is False for a leaf and for a view of a leaf. Programs store FP8 weights and their scales in Parameters,
    which require a gradient by default, and call products in grad mode. They do not train 8-bit values, so their
    calls must pass.
    """
    return x.requires_grad and not (x if x._base is None else x._base).is_leaf


def refuse_gradient(name: str) -> NoReturn:
    """Raise an error for an input whose gradient would be lost, with advice."""
    raise ValueError(
        f"{name}: expected a tensor without a gradient, got one that requires a gradient, which would be lost here: "
        f"train with deep_gemm.nn, or call under torch.no_grad()"
    )


def fp8(name: str, values: Tensor, dtypes: tuple[torch.dtype, ...] = (E4M3.dtype,)) -> None:
    """Check the type of values."""
    dtype = values.dtype
    if dtype in dtypes:
        return
    if dtype in (torch.int8, getattr(torch, "float4_e2m1fn_x2", None)):
        raise NotImplementedError(f"{name}: packed FP4 values ({dtype}) are not supported, pass torch.float8_e4m3fn")
    raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {dtype}{_casts_for(values)}")


def _casts_for(x: object) -> str:
    """Return a hint that names the casts if the caller passed a plain tensor instead of an operand."""
    is_plain = isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1
    return ": per_token_cast_to_fp8 casts activations, per_block_cast_to_fp8 weights" if is_plain else ""


def fp32_scales(name: str, sf: Tensor, also: tuple[torch.dtype, ...] = ()) -> None:
    """Check the type of scales: FP32, or one of `also`."""
    dtype = sf.dtype
    if dtype == torch.float32 or dtype in also:
        whole_elements(name, sf)
        return
    if dtype in (torch.int32, getattr(torch, "float8_e8m0fnu", None)):
        raise NotImplementedError(f"{name}: UE8M0 scales ({dtype}) are not supported, pass torch.float32")
    raise ValueError(f"{name}: expected dtype torch.float32, got {dtype}")


def operand(
    name: str, given: Operand, axes: Axes, sizes: Sizes, dtypes: tuple[torch.dtype, ...] = (E4M3.dtype,)
) -> Operand:
    """Check an operand's values, and `bind` their axes."""
    values, scales = pair(name, given)
    fp8(name, values, dtypes)
    bind(name, values, axes, sizes)
    return values, scales


def scales(
    name: str,
    sf: Tensor,
    axis: str,
    outer: tuple[int, ...],
    k: int,
    rows: int,
    columns: int = SCALE_BLOCK,
    *,
    transposed: bool = False,
    also: tuple[torch.dtype, ...] = (),
    hint: str = "",
) -> Tensor:
    """Check the scales of a matrix `[outer, k]`, one for `rows` x `columns` values. If `transposed`, transpose scales.

    Scales are FP32 or have a type in `also`. The error ends with `hint` if `sf` has a scale for 128 columns of a row.
    """
    fp32_scales(name, sf, also)
    *groups, mn = outer
    num_mn_blocks, num_k_blocks = ceil_div(mn, rows), ceil_div(k, columns)
    expected = (*groups, num_k_blocks, num_mn_blocks) if transposed else (*groups, num_mn_blocks, num_k_blocks)
    if sf.shape != expected:
        axes = [axis if rows == 1 else f"ceil({axis} / {rows})", f"ceil(k / {columns})"]
        axes = [*(["groups"] if groups else []), *(axes[::-1] if transposed else axes)]
        of_rows = (*groups, num_k_blocks, mn) if transposed else (*outer, num_k_blocks)
        hint = hint if columns == SCALE_BLOCK and sf.shape == of_rows else ""
        raise ValueError(f"{name}: expected shape ({', '.join(axes)}) = {expected}, got {tuple(sf.shape)}{hint}")
    return sf.mT if transposed else sf


def multiple(name: str, size: int, of: int) -> None:
    """Check that a size is a multiple of `of`."""
    if size % of:
        raise ValueError(f"{name}: expected a multiple of {of}, got {size}")


def depth(k: int) -> None:
    """Check k, the depth of a product."""
    multiple("k", k, K_MULTIPLE)


def columns(n: int, dtype: torch.dtype) -> None:
    """Check n, the number of columns of an output of this type."""
    of = 8 if dtype == torch.bfloat16 else 4
    if n % of:
        raise ValueError(f"n: expected a multiple of {of} for {dtype} output, got {n}")


# Layouts


def weights(name: str, values: Tensor, copy_if_transposed: bool = False) -> Tensor:
    """Check the values of all groups by `k_major`. Groups may share one matrix if their stride is 0."""
    if values.shape[0] > 1 and values.stride(0) == 0:
        return k_major(name, values[0], copy_if_transposed).expand(values.shape)
    return k_major(name, values, copy_if_transposed)


def k_major(name: str, values: Tensor, copy_if_transposed: bool = False) -> Tensor:
    """Check that values are contiguous along k and TMA can address their rows. Copy a transposed operand if allowed."""
    if copy_if_transposed and values.shape[-1] > 1 and values.stride(-1) != 1:
        return copied(f"{name} along k", values)
    rows(name, values, "k")
    return values


def rows(name: str, x: Tensor, axis: str) -> None:
    """Check that rows are contiguous along `axis` and that their pitch and address are multiples of 16 bytes."""
    if (not x.is_contiguous() or x.shape[-1] * x.element_size() % ADDRESS_ALIGNMENT) and x.numel():
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name}: expected values contiguous along {axis}, got strides {x.stride()}")
        apart(name, x)
        for size, stride in zip(x.shape[:-1], x.stride(), strict=False):
            if size > 1 and stride * x.element_size() % ADDRESS_ALIGNMENT:
                raise ValueError(f"{name}: expected rows that start at multiples of 16 bytes, got strides {x.stride()}")
    address(name, x, ADDRESS_ALIGNMENT)


def apart(name: str, x: Tensor) -> None:
    """Check that no two elements share memory: each stride must exceed the extent of all smaller strides."""
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):  # groups may be column ranges of a larger matrix
        if size > 1:
            if stride < extent:
                raise ValueError(f"{name}: expected rows that do not overlap, got strides {x.stride()}")
            extent = (size - 1) * stride + extent


# Output


def nothing(name: str, value: object, hint: str = "", expected: object = None) -> None:
    """Refuse a value of a keyword that only other GPUs or newer releases support; `expected` is the neutral value."""
    if value is not expected:
        got = type(value).__name__ if isinstance(value, Tensor) else repr(value)
        raise NotImplementedError(f"{name}: expected {expected}, got {got}{hint}")


def outputs(
    inputs: dict[str, Tensor],
    d: Tensor | None,
    c: Tensor | None,
    axes: Axes,
    sizes: Sizes,
    default_dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...] = OUTPUT_TYPES,
) -> tuple[Tensor, Tensor | None]:
    """Check D and C against the inputs, and make D if it is None. For a matrix D, C may be a bias `[n]`."""
    if c is not None and c is not d and axes == ("m", "n") and tensor("c", c).dim() == 1:
        c = bias("c", c, ("n",), sizes, inputs, default_dtype if d is None else tensor("d", d).dtype)
        d, _ = outputs(inputs, d, None, axes, sizes, default_dtype, dtypes)
        return d, None if c is None else c.expand(d.shape)
    a = inputs["a"]
    supported_device("a", a)
    written("d", d)
    if c is not d and wants_gradient(c):
        refuse_gradient("c")
    given = {} if d is None else {"d": d}
    if c is not None and c is not d:
        given["c"] = c
    for name, x in given.items():
        shaped(name, x, dtypes, axes, sizes)
    same_device({**inputs, **given}, a.device)
    dtype = d.dtype if d is not None else c.dtype if c is not None else default_dtype
    if c is not None and c.dtype != dtype:
        raise ValueError(f"c: expected dtype {dtype}, which d has, got {c.dtype}")
    columns(sizes["n"], dtype)
    for name, x in given.items():
        rows(name, x, "n")
    if d is None:
        return empty("the output", [sizes[axis] for axis in axes], dtype, a.device), c
    no_overlap(inputs, d, c)
    return d, c


def bias(
    name: str, x: Tensor | None, axes: Axes, sizes: Sizes, inputs: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """Check a bias, if there is one, and add it to `inputs`. Return it as FP32 if `dtype`, the type of D, is FP32."""
    if x is None:
        return None
    inputs[name] = shaped(name, x, OUTPUT_TYPES, axes, sizes)
    written(name, x)
    if not x.is_contiguous() or (has_memory(x) and x.data_ptr() % ADDRESS_ALIGNMENT):
        raise ValueError(f"{name}: expected contiguous rows aligned to 16 bytes, got strides {x.stride()}")
    return x.float() if x.dtype != dtype == torch.float32 else x


def supported_device(name: str, x: Tensor) -> None:
    """Check that a tensor is on the CPU, on a GPU, or on "meta", where a tensor has a shape but no elements."""
    if not x.is_meta:
        readable(name, x)


def readable(name: str, x: Tensor) -> None:
    """Check that the host can read a tensor."""
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got device {x.device}")


def same_device(given: dict[str, Tensor], device: torch.device, first: str = "a") -> None:
    """Check that all tensors are on `device`, the device of the tensor named `first`."""
    for name, x in given.items():
        if x.device != device:
            raise ValueError(f"{name}: expected device {device}, where {first} is, got {x.device}")


def no_overlap(inputs: dict[str, Tensor], d: Tensor, c: Tensor | None, d_name: str = "d") -> None:
    """Check that D shares no memory with an input. C may be the same tensor as D."""
    if not has_memory(d):
        return
    d_first, d_end = _byte_range(d)
    for name, x in inputs.items():
        first = x.data_ptr()
        if first < d_end and d_first < first + byte_span(x) and _overlap(d, x):
            raise ValueError(f"{d_name}: expected memory that does not overlap {name}")
    if c is not None and c is not d and not same_memory(c, d) and _overlap(c, d):
        raise ValueError("c: expected d itself or memory that does not overlap it, got a partial overlap")


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Tell whether x and y begin at the same address with the same strides. A stride of a size of 1 does not count."""
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return x.data_ptr() == y.data_ptr() and all(size <= 1 or mine == its for size, mine, its in strides)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors may share memory. Two separate column ranges of one matrix do not."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    x_first, x_end = _byte_range(x)
    y_first, y_end = _byte_range(y)
    if x_end <= y_first or y_end <= x_first:
        return False
    # In each tensor, all rows begin at multiples of this pitch behind the first row.
    pitch = gcd(*(t.stride(dim) * t.element_size() for t in (x, y) for dim in range(t.dim() - 1) if t.shape[dim] > 1))
    if pitch == 0 or x.stride(-1) != 1 or y.stride(-1) != 1:
        return True
    gap = (y_first - x_first) % pitch  # from the beginning of x's columns to y's
    return gap < x.shape[-1] * x.element_size() or gap + y.shape[-1] * y.element_size() > pitch


def _byte_range(x: Tensor) -> tuple[int, int]:
    """Return the address of the first byte and the address behind the last byte."""
    first = x.data_ptr()
    return first, first + byte_span(x)


# Sizes and layouts of groups whose values are on the host


def on_host(x: Tensor) -> bool:
    """Tell whether the host can read a tensor's elements without waiting."""
    return x.is_cpu and has_memory(x)


def in_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Check that the elements of a CPU tensor are in `low`..`high`."""
    wrong = ((x < low) | (x > high)).nonzero()
    if len(wrong):
        index = tuple(wrong[0].tolist())
        at = index[0] if len(index) == 1 else index
        raise ValueError(f"{name}: expected values in {low}..{high}, got {int(x[index])} at index {at}")


def ends(layout: Tensor, m: int, alignment: int, name: str = "grouped_layout") -> None:
    """Check the ends of groups. Each group begins at the aligned end of the previous group."""
    in_range(name, layout, 0, m)
    last = 0
    for index, end in enumerate(layout.tolist()):
        # The end of an empty group is the previous group's end, or the empty group's own aligned start.
        if end != last and end < align(last, alignment):
            raise ValueError(
                f"{name}: expected an end of {last} or from {align(last, alignment)}, "
                f"the aligned start of group {index}, got {end}"
            )
        last = end


def depths_of_ends(ends: Tensor | None, alignment: int, name: str = "ks_tensor") -> Tensor:
    """Compute the depths of groups from their ends along k. The host reads no GPU memory.

    A group begins at the aligned end of the previous group, without a gap between groups, so all ends are aligned.
    """
    if ends is None:
        raise ValueError(f"{name}: expected the ends of groups with use_psum_layout, got None")
    int32(name, ends, "groups", tensor(name, ends).numel())
    if ends.is_cpu:
        last = 0
        for group, end in enumerate(ends.tolist()):
            if last % alignment:
                raise ValueError(
                    f"{name}: expected ends that are multiples of {alignment}, the alignment of groups, got {last} "
                    f"for group {group - 1}"
                )
            if end < last:
                raise ValueError(f"{name}: expected ends that do not decrease, got {end} after {last}")
            last = end
    return torch.diff(ends, prepend=ends.new_zeros(1))


def integers(name: str, given: object) -> tuple[int, ...]:
    """Return the integers of a list, or of a tensor, whose elements the host reads. Refuse any other object."""
    if isinstance(given, Tensor):
        readable(name, tensor(name, given))
        given = given.tolist()
    numbers = [as_integer(x) for x in given] if isinstance(given, Sequence) else [None]
    sizes = tuple(x for x in numbers if x is not None)
    if len(sizes) != len(numbers):
        raise ValueError(f"{name}: expected a list of integers, got {given!r}")
    return sizes


def depths(name: str, ks: tuple[int, ...]) -> None:
    """Check that the depths of groups are multiples of 16."""
    for index, k in enumerate(ks):
        if k < 0 or k % K_MULTIPLE:
            raise ValueError(f"{name}: expected multiples of {K_MULTIPLE}, got {k} at index {index}")

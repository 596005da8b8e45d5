"""What is asked of a product: its operands and sizes. Every mistake of a caller is raised here, in words.

Each function takes what a caller passed and returns a problem that is right: shapes agree, types and addresses are
what the kernels need, the output exists and overlaps nothing that it must not. Nothing is written before that.
Sizes are bound by name as shapes are read: `a: expected shape (m, k)`, and from then on m and k mean those numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import RECIPE_1D1D, RECIPE_1D2D, SCALE_BLOCK, Recipe, align, ceil_div
from .tensor_map import ADDRESS_ALIGNMENT

K_MULTIPLE = 16
ZERO_PADDING_BLOCK = 128

Operand = tuple[Tensor, Tensor]
"""FP8 values and their FP32 scales."""


class DenseProblem(NamedTuple):
    """D = C + A @ B.T, with A `[m, k]`, B `[n, k]` and D `[m, n]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    c: Tensor | None
    m: int
    n: int
    k: int
    sfb_rows: int
    """Rows of B under one scale: 128 (1D2D) or 1 (1D1D)."""


class ContiguousProblem(NamedTuple):
    """Rows of A `[m, k]` stacked by group, each multiplied by its group's B `[groups, n, k]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    grouped_layout: Tensor
    """A group id for each row (-1: skip it), or with `layout_is_ends` the end of each group's rows."""
    num_groups: int
    m: int
    n: int
    k: int
    sfb_rows: int
    layout_is_ends: bool
    alignment: int
    """Rows that group starts (offsets form) and zero padding are aligned to."""
    zero_padding: bool


class MaskedProblem(NamedTuple):
    """The first `masked_m[g]` rows of each group of A `[groups, max_m, k]`, times B `[groups, n, k]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    masked_m: Tensor
    expected_m: int
    num_groups: int
    max_m: int
    n: int
    k: int
    sfb_rows: int


class KGroupedProblem(NamedTuple):
    """D[g] = C[g] + A_g @ B_g.T, with A_g `[m, k_g]` and B_g `[n, k_g]` stored one group after another."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    c: Tensor | None
    ks: tuple[int, ...] | None
    """The groups' k where the caller has them on the host; `ks_tensor` has them otherwise."""
    ks_tensor: Tensor | None
    num_groups: int
    m: int
    n: int


def dense_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    c: Tensor | None,
    *,
    major: str = "nt",
    recipe: Recipe | None = None,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
) -> DenseProblem:
    """Check a dense product. `major` says how A (n: `[m, k]`) and B (t: `[n, k]`) are given, else transposed."""
    sizes: dict[str, int] = {}
    sfb_rows = _sfb_rows(recipe, recipe_a, recipe_b)
    a_axes = ("m", "k") if major[0] == "n" else ("k", "m")
    b_axes = ("n", "k") if major[1] == "t" else ("k", "n")
    av, sfa = _operand("a", a, a_axes, sizes)
    bv, sfb = _operand("b", b, b_axes, sizes)
    if a_axes == ("k", "m"):
        av = av.mT
    if b_axes == ("k", "n"):
        bv = bv.mT
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    sfa = _scales("sfa", sfa, "m", (m,), k, 1, transposed=a_axes == ("k", "m"))
    sfb = _scales("sfb", sfb, "n", (n,), k, sfb_rows, transposed=b_axes == ("k", "n"))
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    d, c = _outputs(inputs, d, c, ("m", "n"), sizes, _default_dtype(sfb_rows))
    _check_k(k)
    av = _k_major("a", av, copy_if_transposed=a_axes == ("k", "m"))
    bv = _k_major("b", bv, copy_if_transposed=b_axes == ("k", "n"))
    return DenseProblem(av, sfa, bv, sfb, d, c, m, n, k, sfb_rows)


def contiguous_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    grouped_layout: Tensor | None,
    *,
    num_groups: int | None,
    major: str,
    recipe: Recipe | None,
    recipe_a: Recipe | None,
    recipe_b: Recipe | None,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
    alignment: int,
) -> ContiguousProblem:
    """Check a product grouped along m with the groups' rows stacked."""
    sizes: dict[str, int] = {}
    sfb_rows = _sfb_rows(recipe, recipe_a, recipe_b)
    b_axes = ("groups", "n", "k") if major[1] == "t" else ("groups", "k", "n")
    av, sfa = _operand("a", a, ("m", "k"), sizes)
    bv, sfb = _operand("b", b, b_axes, sizes)
    if b_axes[1] == "k":
        bv = bv.mT
    m, n, k, groups = sizes["m"], sizes["n"], sizes["k"], sizes["groups"]
    if num_groups is not None and num_groups != groups:
        raise ValueError(f"num_groups: expected the {groups} groups of b, got {num_groups}")
    sfa = _scales("sfa", sfa, "m", (m,), k, 1)
    sfb = _scales("sfb", sfb, "n", (groups, n), k, sfb_rows, transposed=b_axes[1] == "k")
    if grouped_layout is None:  # consecutive groups of equal size; ids, because the ends of a group may not be aligned
        grouped_layout, use_psum_layout = _equal_groups(m, groups, av.device), False
    axis = "groups" if use_psum_layout else "m"
    _check_int32("grouped_layout", grouped_layout, axis, sizes[axis])
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "grouped_layout": grouped_layout}
    d, _ = _outputs(inputs, d, None, ("m", "n"), sizes, _default_dtype(sfb_rows))
    _check_k(k)
    if grouped_layout.device.type == "cpu":
        if use_psum_layout:
            _check_ends(grouped_layout, m, alignment)
        else:
            _check_range("grouped_layout", grouped_layout, -1, groups - 1)
    av = _k_major("a", av)
    bv = _k_major("b", bv, copy_if_transposed=b_axes[1] == "k")
    return ContiguousProblem(
        av,
        sfa,
        bv,
        sfb,
        d,
        grouped_layout,
        groups,
        m,
        n,
        k,
        sfb_rows,
        use_psum_layout,
        alignment if use_psum_layout else ZERO_PADDING_BLOCK,
        ensure_zero_padding,
    )


def masked_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    masked_m: Tensor | None,
    expected_m: int | None,
    *,
    recipe: Recipe | None,
    recipe_a: Recipe | None,
    recipe_b: Recipe | None,
) -> MaskedProblem:
    """Check a product grouped along m with a row count for each group."""
    sizes: dict[str, int] = {}
    sfb_rows = _sfb_rows(recipe, recipe_a, recipe_b)
    av, sfa = _operand("a", a, ("groups", "max_m", "k"), sizes)
    bv, sfb = _operand("b", b, ("groups", "n", "k"), sizes)
    groups, max_m, n, k = sizes["groups"], sizes["max_m"], sizes["n"], sizes["k"]
    sfa = _scales("sfa", sfa, "max_m", (groups, max_m), k, 1)
    sfb = _scales("sfb", sfb, "n", (groups, n), k, sfb_rows)
    masked_m = _check_int32("masked_m", masked_m, "groups", groups)
    if expected_m is None:
        expected_m = max_m
    if isinstance(expected_m, bool) or not isinstance(expected_m, int) or expected_m < 0:
        raise ValueError(f"expected_m: expected a row count, got {expected_m!r}")
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "masked_m": masked_m}
    d, _ = _outputs(inputs, d, None, ("groups", "max_m", "n"), sizes, _default_dtype(sfb_rows))
    _check_k(k)
    if masked_m.device.type == "cpu":
        _check_range("masked_m", masked_m, 0, max_m)
    av, bv = _k_major("a", av), _k_major("b", bv)
    return MaskedProblem(av, sfa, bv, sfb, d, masked_m, expected_m, groups, max_m, n, k, sfb_rows)


def k_grouped_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    ks: Sequence[int] | None,
    ks_tensor: Tensor | None,
    c: Tensor | None,
    *,
    recipe: Recipe | None = None,
    k_major_scales: bool = True,
) -> KGroupedProblem:
    """Check a product grouped along k. Scales are `[m, blocks of k]`, or `[blocks of k, m]` if not `k_major_scales`."""
    if recipe is not None and not isinstance(recipe, Sequence):
        raise ValueError(f"recipe: expected a tuple of integers, got {recipe!r}")
    if recipe is not None and tuple(recipe) != RECIPE_1D1D:
        raise NotImplementedError(f"recipe: expected {RECIPE_1D1D} for a k-grouped product, got {tuple(recipe)}")
    host_ks, num_groups = _group_sizes(ks, ks_tensor)
    av, sfa = _pair("a", a)
    bv, sfb = _pair("b", b)
    for name, sf in (("sfa", sfa), ("sfb", sfb)):
        _check_scale_dtype(name, sf)
        _check_dims(name, sf, 2)
    if not k_major_scales:
        sfa, sfb = sfa.t(), sfb.t()
    m, n = sfa.shape[0], sfb.shape[0]
    if host_ks is not None:
        sum_k, num_blocks = sum(host_ks), sum(ceil_div(k, SCALE_BLOCK) for k in host_ks)
    else:  # only the GPU knows the sizes: the host takes their sum from the values
        sum_k, num_blocks = (av.numel() // m if m else bv.numel() // n if n else 0), sfa.shape[1]
    for name, values, sf, axis, rows in (("a", av, sfa, "m", m), ("b", bv, sfb, "n", n)):
        _check_fp8(name, values)
        if tuple(values.shape) != (rows * sum_k,):
            raise ValueError(
                f"{name}: expected shape ({axis} * sum(ks),) = ({rows * sum_k},), got {tuple(values.shape)}"
            )
        if sf.shape[1] != num_blocks:
            raise ValueError(
                f"sf{name}: expected {num_blocks} blocks of k, sum(ceil(k / 128)) over the groups, got {sf.shape[1]}"
            )
        _check_rows(name, values, "k")
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    if ks_tensor is not None:
        inputs["ks_tensor"] = ks_tensor
    sizes = {"groups": num_groups, "m": m, "n": n}
    d, c = _outputs(inputs, d, c, ("groups", "m", "n"), sizes, torch.float32, dtypes=(torch.float32,))
    return KGroupedProblem(av, sfa, bv, sfb, d, c, host_ks, ks_tensor, num_groups, m, n)


def check_ordinary_matrices(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, major: str) -> None:
    """Check a product of ordinary tensors, which torch computes."""
    sizes: dict[str, int] = {}
    a_axes = ("m", "k") if major[0] == "n" else ("k", "m")
    b_axes = ("n", "k") if major[1] == "t" else ("k", "n")
    for name, x, axes in (("a", a, a_axes), ("b", b, b_axes), ("d", d, ("m", "n")), ("c", c, ("m", "n"))):
        if name == "c" and x is None:
            continue
        x = _check_tensor(name, x)  # noqa: PLW2901
        _bind(name, x, axes, sizes)
        if x.device != a.device:
            raise ValueError(f"{name}: expected device {a.device}, where a is, got {x.device}")
    if b.dtype != a.dtype:
        raise ValueError(f"b: expected dtype {a.dtype}, which a has, got {b.dtype}")


# Recipes and defaults


def _sfb_rows(recipe: Recipe | None, recipe_a: Recipe | None, recipe_b: Recipe | None) -> int:
    """Rows of B under one scale, from the recipe or from one for each side."""
    if recipe is None and recipe_a is None and recipe_b is None:
        return SCALE_BLOCK
    for name, given in (("recipe", recipe), ("recipe_a", recipe_a), ("recipe_b", recipe_b)):
        if given is not None and not isinstance(given, Sequence):
            raise ValueError(f"{name}: expected a tuple of integers, got {given!r}")
    stated = tuple(recipe) if recipe is not None else None
    if stated is not None and stated not in (RECIPE_1D2D, RECIPE_1D1D):
        raise NotImplementedError(f"recipe: expected {RECIPE_1D2D} or {RECIPE_1D1D}, got {stated}")
    for name, side in (("recipe_a", recipe_a), ("recipe_b", recipe_b)):
        allowed = ((1, SCALE_BLOCK),) if name == "recipe_a" else ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
        if side is not None and tuple(side) not in allowed:
            raise NotImplementedError(f"{name}: expected {' or '.join(map(str, allowed))}, got {tuple(side)}")
    if stated is None:
        return recipe_b[0] if recipe_b is not None else SCALE_BLOCK
    if recipe_b is not None and recipe_b[0] != stated[1]:
        raise ValueError(f"recipe_b: expected what recipe {stated} says, got {tuple(recipe_b)}")
    return stated[1]


def _default_dtype(sfb_rows: int) -> torch.dtype:
    return torch.float32 if sfb_rows == 1 else torch.bfloat16


def _equal_groups(m: int, groups: int, device: torch.device) -> Tensor:
    """Make the ids of consecutive groups of equal size."""
    if m % max(groups, 1):
        raise ValueError(f"grouped_layout: left out, so m must be a multiple of the {groups} groups, got m = {m}")
    return torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(m // max(groups, 1))


# Checks of single arguments


def _pair(name: str, operand: Operand) -> Operand:
    if not isinstance(operand, tuple | list) or len(operand) != 2:
        raise TypeError(f"{name}: expected a pair (values, scales), got {_describe(operand)}")
    values, scales = operand
    _check_tensor(name, values)
    _check_tensor(f"sf{name}", scales)
    return values, scales


def _operand(name: str, operand: Operand, axes: tuple[str, ...], sizes: dict[str, int]) -> Operand:
    """Take an operand apart and bind its sizes to the names of its axes."""
    values, scales = _pair(name, operand)
    _check_fp8(name, values)
    _bind(name, values, axes, sizes)
    return values, scales


def _bind(name: str, x: Tensor, axes: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Bind a tensor's sizes to the names of its axes; those bound before must agree."""
    if x.dim() != len(axes) or any(sizes.get(axis, size) != size for axis, size in zip(axes, x.shape, strict=True)):
        raise ValueError(f"{name}: expected shape {_shape_text(axes, sizes)}, got {tuple(x.shape)}")
    sizes.update(zip(axes, x.shape, strict=True))


def _shape_text(axes: tuple[str, ...], sizes: dict[str, int]) -> str:
    names = ", ".join(axes)
    known = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
    return f"({names})" if names == known else f"({names}) = ({known})"


def _check_tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {_describe(x)}")
    return x


def _describe(x: object) -> str:
    return f"a {type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__


def _check_fp8(name: str, values: Tensor) -> None:
    if values.dtype == torch.float8_e4m3fn:
        return
    if values.dtype in (torch.int8, getattr(torch, "float4_e2m1fn_x2", None)):
        raise NotImplementedError(
            f"{name}: packed FP4 values ({values.dtype}) are not supported, pass torch.float8_e4m3fn"
        )
    raise ValueError(f"{name}: expected dtype torch.float8_e4m3fn, got {values.dtype}")


def _check_scale_dtype(name: str, scales: Tensor) -> None:
    if scales.dtype == torch.float32:
        return
    if scales.dtype in (torch.int32, getattr(torch, "float8_e8m0fnu", None)):
        raise NotImplementedError(f"{name}: UE8M0 scales ({scales.dtype}) are not supported, pass torch.float32")
    raise ValueError(f"{name}: expected dtype torch.float32, got {scales.dtype}")


def _scales(
    name: str, scales: Tensor, axis: str, outer: tuple[int, ...], k: int, rows: int, transposed: bool = False
) -> Tensor:
    """Check the type and shape of scales, one for `rows` x 128 values, and turn them if they were passed transposed."""
    _check_scale_dtype(name, scales)
    expected = [*outer[:-1], ceil_div(outer[-1], rows), ceil_div(k, SCALE_BLOCK)]
    axes = [*["groups"][: len(outer) - 1], axis if rows == 1 else f"ceil({axis} / {rows})", "ceil(k / 128)"]
    if transposed:
        axes[-2:], expected[-2:] = axes[:-3:-1], expected[:-3:-1]
    if list(scales.shape) != expected:
        raise ValueError(f"{name}: expected shape ({', '.join(axes)}) = {tuple(expected)}, got {tuple(scales.shape)}")
    return scales.mT if transposed else scales


def _check_dims(name: str, x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(x.shape)}")


def _check_int32(name: str, x: Tensor | None, axis: str, size: int) -> Tensor:
    x = _check_tensor(name, x)
    if x.dtype != torch.int32:
        raise ValueError(f"{name}: expected dtype torch.int32, got {x.dtype}")
    if tuple(x.shape) != (size,):
        raise ValueError(f"{name}: expected shape ({axis},) = ({size},), got {tuple(x.shape)}")
    if size > 1 and x.stride(0) != 1:
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {x.stride(0)}")
    return x


def _check_k(k: int) -> None:
    if k % K_MULTIPLE:
        raise ValueError(f"k: expected a multiple of {K_MULTIPLE}, got {k}")


def _check_address(name: str, x: Tensor) -> None:
    if x.data_ptr() % ADDRESS_ALIGNMENT:
        raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {x.data_ptr():#x}")


def _k_major(name: str, values: Tensor, copy_if_transposed: bool = False) -> Tensor:
    """Check that values are contiguous along k with rows that TMA can address; copy an operand that was transposed."""
    if copy_if_transposed and values.shape[-1] > 1 and values.stride(-1) != 1:
        return values.contiguous()
    _check_rows(name, values, "k")
    return values


def _check_rows(name: str, x: Tensor, axis: str) -> None:
    """Check for rows contiguous along `axis`, their pitch and address multiples of 16 bytes."""
    if x.numel() == 0:
        return
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected values contiguous along {axis}, got strides {x.stride()}")
    extent = x.shape[-1]
    for dim in sorted(range(x.dim() - 1), key=x.stride):  # groups may lie inside rows of a larger matrix
        if x.shape[dim] > 1:
            if x.stride(dim) < extent:
                raise ValueError(f"{name}: expected rows that do not overlap, got strides {x.stride()}")
            if x.stride(dim) * x.element_size() % ADDRESS_ALIGNMENT:
                raise ValueError(f"{name}: expected rows that start at multiples of 16 bytes, got strides {x.stride()}")
            extent = (x.shape[dim] - 1) * x.stride(dim) + extent
    _check_address(name, x)


# Output


def _outputs(
    inputs: dict[str, Tensor],
    d: Tensor | None,
    c: Tensor | None,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    default_dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> tuple[Tensor, Tensor | None]:
    """Check D and C against the inputs; make D where it was left out."""
    device = inputs["a"].device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"a: expected a CPU or CUDA tensor, got device {device}")
    shape = tuple(sizes[axis] for axis in axes)
    for name, x in (("d", d), ("c", c)):
        if x is None:
            continue
        _check_tensor(name, x)
        if x.dtype not in dtypes:
            raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {_shape_text(axes, sizes)}, got {tuple(x.shape)}")
    for name, x in (*inputs.items(), ("d", d), ("c", c)):
        if x is not None and x.device != device:
            raise ValueError(f"{name}: expected device {device}, where a is, got {x.device}")
    dtype = d.dtype if d is not None else c.dtype if c is not None else default_dtype
    if c is not None and c.dtype != dtype:
        raise ValueError(f"c: expected dtype {dtype}, which d has, got {c.dtype}")
    multiple = 8 if dtype == torch.bfloat16 else 4
    if sizes["n"] % multiple:
        raise ValueError(f"n: expected a multiple of {multiple} for {dtype} output, got {sizes['n']}")
    for name, x in (("d", d), ("c", c)):
        if x is not None:
            _check_rows(name, x, "n")
    if d is None:
        return torch.empty(shape, dtype=dtype, device=device), c
    for name, x in inputs.items():
        if _overlap(d, x):
            raise ValueError(f"d: expected memory that does not overlap {name}")
    if c is not None and not _same_memory(c, d) and _overlap(c, d):
        raise ValueError("c: expected d itself or memory that does not overlap it, got a partial overlap")
    return d, c


def _same_memory(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors of one shape are the same elements; the stride of a single row says nothing."""
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return x.data_ptr() == y.data_ptr() and all(size <= 1 or mine == its for size, mine, its in strides)


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors may share memory; two column ranges of one matrix do not."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    x_first, x_end = _byte_range(x)
    y_first, y_end = _byte_range(y)
    if x_end <= y_first or y_end <= x_first:
        return False
    # All rows begin at multiples of the pitch, seen from the first row of their tensor.
    pitch = gcd(*(t.stride(dim) * t.element_size() for t in (x, y) for dim in range(t.dim() - 1) if t.shape[dim] > 1))
    if pitch == 0 or x.stride(-1) != 1 or y.stride(-1) != 1:
        return True
    gap = (y_first - x_first) % pitch  # where y's columns begin, seen from the beginning of x's
    return gap < x.shape[-1] * x.element_size() or gap + y.shape[-1] * y.element_size() > pitch


def _byte_range(x: Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


# Group sizes and layouts, where their values are on the host


def _check_range(name: str, x: Tensor, low: int, high: int) -> None:
    wrong = ((x < low) | (x > high)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(f"{name}: expected values in {low}..{high}, got {int(x[index])} at index {index}")


def _check_ends(ends: Tensor, m: int, alignment: int) -> None:
    _check_range("grouped_layout", ends, 0, m)
    last = 0
    for index, end in enumerate(ends.tolist()):
        # An empty group may repeat the end before it, or name its own, aligned start.
        if end != last and end < align(last, alignment):
            raise ValueError(
                f"grouped_layout: expected an end of {last} or from {align(last, alignment)}, "
                f"the aligned start of group {index}, got {end}"
            )
        last = end


def _group_sizes(ks: Sequence[int] | None, ks_tensor: Tensor | None) -> tuple[tuple[int, ...] | None, int]:
    """Sizes where the host has them, in a list or in a CPU tensor, and how many groups there are."""
    if ks is None and ks_tensor is None:
        raise ValueError("ks: expected a list, or ks_tensor with the same numbers, got neither")
    from_tensor = None
    if ks_tensor is not None:
        groups = len(ks) if isinstance(ks, Sequence) else _check_tensor("ks_tensor", ks_tensor).numel()
        _check_int32("ks_tensor", ks_tensor, "groups", groups)
        from_tensor = tuple(ks_tensor.tolist()) if ks_tensor.device.type == "cpu" else None
    if ks is None:
        if from_tensor is not None:
            _check_group_sizes("ks_tensor", from_tensor)
        return from_tensor, groups
    if isinstance(ks, Tensor):
        ks = ks.tolist()
    if not isinstance(ks, Sequence) or not all(isinstance(k, int) and not isinstance(k, bool) for k in ks):
        raise ValueError(f"ks: expected a list of integers, got {ks!r}")
    sizes = tuple(ks)
    _check_group_sizes("ks", sizes)
    if from_tensor is not None and from_tensor != sizes:
        raise ValueError(f"ks_tensor: expected the numbers of ks, {sizes}, got {from_tensor}")
    return sizes, len(sizes)


def _check_group_sizes(name: str, ks: tuple[int, ...]) -> None:
    for index, k in enumerate(ks):
        if k < 0 or k % K_MULTIPLE:
            raise ValueError(f"{name}: expected multiples of {K_MULTIPLE}, got {k} at index {index}")

"""Checks of calls of dense products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.check import checks, ue8m0
from ...core.check.checks import Operand, Sizes
from ...core.check.recipes import FOR_ROWS_OF_B, MX, NO_RECIPES, Recipes, default_dtype, scales_of, taken
from .. import packed
from ..fine_scales import as_kernels_take_it
from ..kinds.epilogues import BLOCK_SUMS
from ..kinds.output import types_of_b
from ..kinds.works import DENSE
from ..problem import Problem
from .bf16 import laid_out

ORDINARY_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def dense_problem(
    a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, *, major: str = "nt", recipes: Recipes = NO_RECIPES
) -> Problem:
    """Check a dense product. `major` "nt" means A `[m, k]` and B `[n, k]`; "tn" means that both are transposed."""
    sizes: Sizes = {}
    turn_a, turn_b = major[0] == "t", major[1] == "n"
    if packed.is_packed(b) and not turn_a:
        return _packed_problem(a, b, d, c, turn_b, recipes)
    of_a, of_b = scales_of(recipes)
    av, sfa = checks.operand("a", a, ("k", "m") if turn_a else ("m", "k"), sizes)
    types = types_of_b(DENSE, *taken(of_a, of_b))
    bv, sfb = checks.operand("b", b, ("k", "n") if turn_b else ("n", "k"), sizes, types)
    av, bv = av.mT if turn_a else av, bv.mT if turn_b else bv
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    sfa = ue8m0.scales("sfa", sfa, "m", (m,), k, of_a, of_b, transposed=turn_a)
    sfb = ue8m0.scales("sfb", sfb, "n", (n,), k, of_b, of_a, transposed=turn_b, hint=FOR_ROWS_OF_B)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    d, c = checks.outputs(inputs, d, c, ("m", "n"), sizes, default_dtype(of_b))
    checks.depth(k)
    av = checks.k_major("a", av, copy_if_transposed=turn_a)
    bv = checks.k_major("b", bv, copy_if_transposed=turn_b)
    of_a, of_b = taken(of_a, of_b)
    return Problem(av, sfa, bv, sfb, d, c, of_b=of_b, of_a=of_a)


def _packed_problem(
    a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, turn_b: bool, recipes: Recipes
) -> Problem:
    """Check a dense product with an FP4 weight."""
    sizes: Sizes = {}
    of_a = packed.scales_beside(recipes)
    av, sfa = checks.operand("a", a, ("m", "k"), sizes)
    bv, sfb = packed.weight("b", b, ("k", "n") if turn_b else ("n", "k"), sizes, turned=turn_b)
    sfa = ue8m0.scales("sfa", sfa, "m", (sizes["m"],), sizes["k"], of_a, MX)
    d, c = checks.outputs({"a": av, "sfa": sfa, "b": bv, "sfb": sfb}, d, c, ("m", "n"), sizes, torch.bfloat16)
    av, bv = checks.k_major("a", av), checks.k_major("b", bv)
    av, sfa, bv, sfb, of_a = as_kernels_take_it(av, sfa, bv, sfb, taken(of_a, MX)[0])
    return Problem(av, sfa, bv, sfb, d, c, of_b=MX, of_a=of_a)


def block_sums_problem(a: Any, b: Any, d: Tensor, recipes: Any, **softmax: Any) -> Problem:
    """State a product of checked operands whose D has sums of blocks. Without `recipes` A and B are BF16."""
    more: dict[str, Any] = {"epilogue": BLOCK_SUMS, "softmax": softmax}
    if recipes is None:
        return Problem(laid_out("a", a, "m"), None, laid_out("b", b, "n"), None, d, None, DENSE, None, None, **more)
    (bv, sfb), (of_a, of_b) = b, taken(*recipes)
    sfb = ue8m0.scales("sfb", sfb, "n", (len(bv),), bv.shape[1], *reversed(recipes))
    return Problem(a[0], a[1], bv, sfb, d, of_b=of_b, of_a=of_a, **more)


def check_ordinary_matrices(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, major: str) -> None:
    """Check a product of ordinary tensors, or of FP8 values without scales. Torch computes it."""
    sizes: Sizes = {}
    given = {"a": a, "b": b, "d": d} if c is None else {"a": a, "b": b, "d": d, "c": c}
    a_axes = ("m", "k") if major[0] == "n" else ("k", "m")
    b_axes = ("n", "k") if major[1] == "t" else ("k", "n")
    for (name, x), axes in zip(given.items(), (a_axes, b_axes, ("m", "n"), ("m", "n")), strict=False):
        checks.bind(name, checks.tensor(name, x), axes, sizes)
    checks.without_gradients(given)
    checks.same_device(given, a.device)
    is_fp8 = a.dtype == torch.float8_e4m3fn
    if not is_fp8:
        checks.has_type("a", a, ORDINARY_TYPES)
    if b.dtype != a.dtype:
        raise ValueError(f"b: expected dtype {a.dtype}, which a has, got {b.dtype}")
    types_of_d = checks.OUTPUT_TYPES if is_fp8 else (a.dtype, torch.float32) if a.element_size() == 2 else (a.dtype,)
    checks.has_type("d", d, types_of_d)
    if c is not None and c.dtype != d.dtype:
        raise ValueError(f"c: expected dtype {d.dtype}, which d has, got {c.dtype}")
    checks.apart("d", d)
    checks.no_overlap({"a": a, "b": b}, d, c)

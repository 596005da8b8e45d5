"""Products of heads, as einsum states them: what is asked, checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from . import checks
from .checks import Axes, Operand, Sizes
from .layout import SCALE_BLOCK, Recipe, ceil_div
from .recipes import default_dtype, sfb_rows_of


class EinsumProblem(NamedTuple):
    """D[h] = C[h] + A[h] @ B[h].T for each head h: A `[heads, m, k]`, B `[heads, n, k]`, views of what a caller has."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    """As the caller has it; so is C."""
    c: Tensor | None
    heads: int
    m: int
    n: int
    k: int
    sfb_rows: int
    heads_first: bool
    """D is `[heads, m, n]`; else `[m, heads, n]`."""

    def by_head(self, x: Tensor) -> Tensor:
        """View a D or a C as `[heads, m, n]`."""
        return x if self.heads_first else x.transpose(0, 1)


class Form(NamedTuple):
    """How an expression reads: axes of A, B and D, and which of them are m, n and k."""

    a: Axes
    b: Axes
    d: Axes
    m: str
    n: str
    k: str

    def order(self, axes: Axes, last: str) -> tuple[int, ...]:
        """Places of the head, of m or n, and of `last` among an operand's axes."""
        (rows,) = (axis for axis in axes if axis not in ("h", last))
        return axes.index("h"), axes.index(rows), axes.index(last)


FORMS = {
    "bhr,hdr->bhd": Form(("b", "h", "r"), ("h", "d", "r"), ("b", "h", "d"), "b", "d", "r"),
    "bhd,hdr->bhr": Form(("b", "h", "d"), ("h", "d", "r"), ("b", "h", "r"), "b", "r", "d"),
    "bhd,bhr->hdr": Form(("b", "h", "d"), ("b", "h", "r"), ("h", "d", "r"), "d", "r", "b"),
}
"""The expressions that there are."""


def form_of(expr: object) -> Form:
    """Read an expression, in which spaces do not matter."""
    form = FORMS.get(expr.replace(" ", "")) if isinstance(expr, str) else None
    if form is None:
        known = " or ".join(map(repr, FORMS))
        raise NotImplementedError(f"expr: expected {known}, got {expr!r}")
    return form


def einsum_problem(
    form: Form, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe | None
) -> EinsumProblem:
    """Check a product of heads.

    Values that are not contiguous along the summed axis are copied, except where a caller has them so by mistake: A of
    the forms that sum over its last axis, and B of the first.
    """
    sizes: Sizes = {}
    sfb_rows = sfb_rows_of((recipe, None, None))
    av, sfa = checks.operand("a", a, form.a, sizes)
    bv, sfb = checks.operand("b", b, form.b, sizes)
    _scales("sfa", sfa, form, form.a, 1, sizes)
    _scales("sfb", sfb, form, form.b, sfb_rows, sizes)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    m, n, k = sizes[form.m], sizes[form.n], sizes[form.k]
    d, c = checks.outputs(inputs, d, c, form.d, {**sizes, "n": n}, default_dtype(sfb_rows))
    checks.depth(k)
    order_a, order_b = form.order(form.a, form.k), form.order(form.b, form.k)
    av = checks.k_major("a", av.permute(order_a), copy_if_transposed=form.a[-1] != form.k)
    bv = checks.weights("b", bv.permute(order_b), copy_if_transposed=form.b[-1] != form.k)
    sfa, sfb = sfa.permute(order_a), sfb.permute(order_b)
    return EinsumProblem(av, sfa, bv, sfb, d, c, sizes["h"], m, n, k, sfb_rows, form.d[0] == "h")


def _scales(name: str, sf: Tensor, form: Form, axes: Axes, rows: int, sizes: Sizes) -> None:
    """Check scales, one for `rows` x 128 values of each head: axes as those of the values."""
    checks.fp32_scales(name, sf)
    blocks = {axis: 1 if axis == "h" else SCALE_BLOCK if axis == form.k else rows for axis in axes}
    expected = tuple(ceil_div(sizes[axis], blocks[axis]) for axis in axes)
    if sf.shape != expected:
        names = (axis if blocks[axis] == 1 else f"ceil({axis} / {blocks[axis]})" for axis in axes)
        raise ValueError(f"{name}: expected shape ({', '.join(names)}) = {expected}, got {tuple(sf.shape)}")

"""Public products: how calls are checked, and what computes them. Like all calls, they use records: core/call.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import call
from ..core.call import FREE_ROWS, Function, Key, requires_gradient
from ..core.check import checks
from ..core.check.checks import cuts_gradient
from ..core.check.recipes import whole_recipe
from ..core.replay import FIXED, Free
from ..core.settings import get_compile_mode
from .launch import run as launch
from .problem import Problem
from .reference import compute

FREE: Sequence[Free] = (FREE_ROWS, ((0,), (1,)), FIXED, FIXED, *[FREE_ROWS] * 3)
"""Sizes that may differ: rows of A; of its scales (m-major, so their pitch follows from m); of C, a layout and D."""


def by_operator(
    product: Product,
    a: Any,
    b: Any,
    d: Tensor | None,
    c: Tensor | None,
    said: Key,
    layout: Tensor | None = None,
    ks: Sequence[int] | None = None,
    **more: Any,
) -> Tensor | None:
    """Compute a product by its operator, which makes D, or by its overload `into`, which writes the caller's D.

    `more`: further arguments of the operator.
    """
    operator, given = getattr(torch.ops.deep_gemm, product.operator), product.inputs_of(c, said, layout, ks) | more
    if product.has_scales:
        (given["a"], given["sfa"]), (given["b"], given["sfb"]) = checks.pair("a", a), checks.pair("b", b)
    else:
        given["a"], given["b"] = a, b
    if "recipes" in given:
        given["recipe"] = whole_recipe(given.pop("recipes"))
    if d is None:
        return operator.default(**given)  # type: ignore[no-any-return]
    if "c" in given:  # an operator accepts a tensor that it writes only once
        given["adds_to_d"], given["c"] = c is d, None if c is d else c
    operator.into(d=checks.tensor("d", d), **given)
    return None


@dataclass(eq=False)
class Product:
    """A public product: how a call is checked, and which code computes it. Without scales, A and B are plain tensors.

    `run` and the product's operator are called with `(a, b, d, c, said, layout, ks)`. Checks and operators get the
    arguments after D under the names in `inputs` and `options`.
    """

    operator: str
    """The operator of `torch.ops.deep_gemm` that computes it."""
    ask: Callable[..., Problem]
    """`(a, b, d, **inputs) -> problem`: checks everything, makes D if it was left out."""
    options: Sequence[str] = ()
    """Names of the options in `said`, in order. Operators have one `recipe` for a caller's `recipes`."""
    inputs: Sequence[str] = ("c",)
    """Names of C (or the layout in its place), of a tensor beside C that locates groups, and of the host's depths."""
    as_operator: Callable[..., Tensor | None] = by_operator
    """`(product, a, b, d, c, said, layout, ks) -> D or None`: passes a call to the operator."""
    on_gpu: Callable[[Any], None] = launch
    """Computes a problem of CUDA tensors."""
    reference: Callable[[Any], None] = compute
    """Computes a problem of CPU tensors."""
    has_scales: bool = True
    has_gradients: bool = False
    """True if the operator that makes D has a gradient."""
    free: Sequence[Free] = ()
    """For each tensor (A, its scales, B, its scales, others), the parts that may differ between calls of one record."""
    wants_checks: Callable[[Sequence[Tensor]], bool] = lambda tensors: cuts_gradient(tensors[:4], tensors[4:])
    """Tells whether a call must be checked again although a call like it passed: its FP8 values or scales may be
    computed from a tensor that requires a gradient, which the checks refuse."""
    output_of: Callable[[Any], Tensor] = lambda problem: problem.d
    """Returns the D of a problem in the caller's form."""

    def inputs_of(
        self, c: Tensor | None, said: Key = (), layout: Tensor | None = None, ks: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Name the arguments of a call that follow D."""
        return dict(zip(self.inputs, (c, layout, ks), strict=False)) | dict(zip(self.options, said, strict=False))

    def compute(self, problem: Problem) -> None:
        """Compute a problem on the device of its tensors."""
        if problem.d.is_cuda:
            self.on_gpu(problem)
        elif get_compile_mode() == 0:
            self.reference(problem)

    def __post_init__(self) -> None:
        """Make the functions for calls with a D and without: now, because Dynamo cannot trace this."""
        self.into = self._function(outputs=1)
        self.made = self._function(has_gradient=lambda a, b, *_: self.has_gradients and requires_gradient((a, b)))

    def _function(self, **more: Any) -> Function:
        return Function(
            self._answer,
            lambda a, b, d, c, layout, ks, _, *said: self.as_operator(self, a, b, d, c, said, layout, ks),
            self._tensors,
            self.wants_checks,
            free=self.free,
            numbers=5 if "ks" in self.inputs else None,
            **more,
        )

    def _answer(self, a: Any, b: Any, d: Any, c: Any, layout: Any, ks: Any, _: int, *said: Any) -> Any:
        problem = self.ask(a, b, d, **self.inputs_of(c, said, layout, ks))
        self.compute(problem)
        return self.output_of(problem) if d is None else None

    def _tensors(self, a: Any, b: Any, d: Any, c: Any, layout: Any, _: Any) -> tuple[Tensor, ...]:
        tensors = (*a, *b) if self.has_scales else (a, b)
        if c is not None and c is not d:
            tensors = (*tensors, c)
        if layout is not None:
            tensors = (*tensors, layout)
        return tensors if d is None else (*tensors, d)


def run(
    product: Product,
    a: Any,
    b: Any,
    d: Tensor | None,
    c: Tensor | None = None,
    said: Key = (),
    layout: Tensor | None = None,
    ks: Sequence[int] | None = None,
) -> Tensor | None:
    """Compute a product; return D if the call makes it.

    `said` holds the caller's options; products of groups have `layout` and `ks`.
    """
    absent = (c is None) | (c is d) << 1 | (layout is None) << 2 | (ks is None) << 3
    function = product.made if d is None else product.into
    return call.run(function, (a, b, d, c, layout, ks), (absent, *said))  # type: ignore[no-any-return]

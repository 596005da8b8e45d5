"""Operators of dense products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ...core.operators import Kernel, operator
from ..ops import OPERANDS, Compute, c_of, real_and_fake, recipes_of
from . import api as dense
from .check import check_ordinary_matrices


def kernels(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a product as its two operators take it."""

    def new(
        a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, c: Tensor | None = None, *, recipe: Sequence[int] | None = None
    ) -> Tensor | None:
        return compute((a, sfa), (b, sfb), None, c, recipes_of(recipe))

    def into(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        d: Tensor,
        c: Tensor | None = None,
        *,
        adds_to_d: bool = False,
        recipe: Sequence[int] | None = None,
    ) -> None:
        compute((a, sfa), (b, sfb), d, c_of(d, c, adds_to_d), recipes_of(recipe))

    return new, into


for major, product in (("nt", dense.NT), ("nn", dense.NN), ("tn", dense.TN), ("tt", dense.TT)):
    (new, into), (fake_new, fake_into) = map(kernels, real_and_fake(product))
    operator(f"fp8_gemm_{major}({OPERANDS}, Tensor? c=None, *, int[]? recipe=None) -> Tensor", new, fake_new)
    operator(
        f"fp8_gemm_{major}.into({OPERANDS}, Tensor(d!) d, Tensor? c=None, "
        "*, bool adds_to_d=False, int[]? recipe=None) -> ()",
        into,
        fake_into,
    )


def ordinary(compute: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]) -> Kernel:
    """Give a product of ordinary matrices as its operator takes it."""

    def into(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, adds_to_d: bool = False) -> None:
        compute(a, b, d, c_of(d, c, adds_to_d))

    return into


for major in ("nt", "nn", "tn", "tt"):
    schema = f"cublaslt_gemm_{major}(Tensor a, Tensor b, Tensor(d!) d, Tensor? c=None, bool adds_to_d=False) -> ()"
    real = getattr(dense, f"cublaslt_gemm_{major}")
    operator(schema, ordinary(real), ordinary(partial(check_ordinary_matrices, major=major)))

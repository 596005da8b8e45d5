"""Operators of products of grouped rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core.operators import Kernel, operator
from ..ops import OPERANDS, Compute, real_and_fake, recipes_of
from . import api as grouped


def contiguous(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a product of stacked rows as its two operators take it."""

    def new(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        grouped_layout: Tensor | None = None,
        *,
        recipe: Sequence[int] | None = None,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        num_groups: int | None = None,
    ) -> Tensor | None:
        said = recipes_of(recipe), num_groups, use_psum_layout, ensure_zero_padding
        return compute((a, sfa), (b, sfb), None, grouped_layout, said)

    def into(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        d: Tensor,
        grouped_layout: Tensor | None = None,
        *,
        recipe: Sequence[int] | None = None,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        num_groups: int | None = None,
    ) -> None:
        said = recipes_of(recipe), num_groups, use_psum_layout, ensure_zero_padding
        compute((a, sfa), (b, sfb), d, grouped_layout, said)

    return new, into


def masked(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a product of counted rows as its two operators take it."""

    def new(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        masked_m: Tensor,
        *,
        expected_m: int | None = None,
        recipe: Sequence[int] | None = None,
    ) -> Tensor | None:
        return compute((a, sfa), (b, sfb), None, masked_m, (recipes_of(recipe), expected_m, type(expected_m)))

    def into(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        d: Tensor,
        masked_m: Tensor,
        *,
        expected_m: int | None = None,
        recipe: Sequence[int] | None = None,
    ) -> None:
        compute((a, sfa), (b, sfb), d, masked_m, (recipes_of(recipe), expected_m, type(expected_m)))

    return new, into


for name, product, kernels, layout in (
    (
        "m_grouped_fp8_gemm_nt_contiguous",
        grouped.CONTIGUOUS_NT,
        contiguous,
        "Tensor? grouped_layout=None, *, int[]? recipe=None, bool use_psum_layout=False, "
        "bool ensure_zero_padding=True, int? num_groups=None",
    ),
    (
        "m_grouped_fp8_gemm_nn_contiguous",
        grouped.CONTIGUOUS_NN,
        contiguous,
        "Tensor? grouped_layout=None, *, int[]? recipe=None, bool use_psum_layout=False, "
        "bool ensure_zero_padding=True, int? num_groups=None",
    ),
    (
        "m_grouped_fp8_gemm_nt_masked",
        grouped.MASKED,
        masked,
        "Tensor masked_m, *, SymInt? expected_m=None, int[]? recipe=None",
    ),
):
    (new, into), (fake_new, fake_into) = map(kernels, real_and_fake(product))
    operator(f"{name}({OPERANDS}, {layout}) -> Tensor", new, fake_new)
    operator(f"{name}.into({OPERANDS}, Tensor(d!) d, {layout}) -> ()", into, fake_into)

"""The operator of products into the parts of heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core.operators import Kernel, operator
from ..ops import OPERANDS, Compute, real_and_fake, recipes_of
from .api import SKIP_HEAD_MID


def kernel(compute: Compute) -> Kernel:
    """Give the product as its operator takes it."""

    def into(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        d: Tensor,
        head_splits: Sequence[int],
        *,
        recipe: Sequence[int] | None = None,
    ) -> None:
        compute((a, sfa), (b, sfb), d, None, (recipes_of(recipe), tuple(head_splits)))

    return into


into, fake_into = map(kernel, real_and_fake(SKIP_HEAD_MID))
operator(
    f"fp8_gemm_nt_skip_head_mid.into({OPERANDS}, Tensor(d!) d, int[] head_splits, *, int[]? recipe=None) -> ()",
    into,
    fake_into,
)

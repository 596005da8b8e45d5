"""Checks of calls of the product that hyper-connections compute before their norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.check import checks
from ..core.check.layout import whole_elements
from ..core.check.numbers import INT32_MAX, integer_in_range
from ..core.check.tracing import has_memory

BLOCK_K = 64
COLUMNS = (8, 16, 24, 32)
SPLITS_LIMIT = 1 << 16


class HcProblem(NamedTuple):
    """Checked arguments. Without `num_splits` there is one split."""

    a: Tensor
    b: Tensor
    d: Tensor
    """`[splits, m, n]`."""
    sqr_sum: Tensor
    """`[splits, m]`."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """m, n, k, splits."""
        splits, m, n = self.d.shape
        return m, n, self.a.shape[1], splits


def hc_problem(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None) -> HcProblem:
    """Check the arguments of `tf32_hc_prenorm_gemm`, and return them with a first dimension of splits."""
    sizes: checks.Sizes = {}
    given = {"a": a, "b": b, "d": d, "sqr_sum": sqr_sum}
    for name, x in given.items():
        checks.has_type(name, checks.tensor(name, x), (torch.bfloat16 if name == "a" else torch.float32,))
    splits: tuple[str, ...] = ()
    if num_splits is not None:
        sizes["num_splits"] = integer_in_range("num_splits", num_splits, 1, SPLITS_LIMIT)
        splits = ("num_splits",)
    checks.bind("a", a, ("m", "k"), sizes)
    checks.bind("b", b, ("n", "k"), sizes)
    checks.bind("d", d, (*splits, "m", "n"), sizes)
    checks.bind("sqr_sum", sqr_sum, (*splits, "m"), sizes)
    checks.supported_device("a", a)
    checks.same_device(given, a.device)
    checks.without_gradients(given)
    if sizes["n"] not in COLUMNS:
        raise ValueError(f"n: expected 8, 16, 24 or 32, got {sizes['n']}")
    checks.multiple("k", sizes["k"], BLOCK_K)
    # TMA counts in signed numbers of 32 bits. While torch traces, the check would become a guard on the number of rows.
    if has_memory(a) and sizes["m"] * sizes.get("num_splits", 1) > INT32_MAX:
        raise ValueError(f"m: expected rows of all splits below 2^31, got {sizes['m']}")
    checks.rows("a", a, "k")
    checks.rows("b", b, "k")
    if d.numel() and d.stride(-1) != 1:
        raise ValueError(f"d: expected values contiguous along n, got strides {d.stride()}")
    checks.apart("d", d)
    if not sqr_sum.is_contiguous():
        raise ValueError(f"sqr_sum: expected a contiguous tensor, got strides {sqr_sum.stride()}")
    whole_elements("d", d)
    whole_elements("sqr_sum", sqr_sum)
    checks.no_overlap({"a": a, "b": b}, d, None)
    checks.no_overlap({"a": a, "b": b, "d": d}, sqr_sum, None, "sqr_sum")
    return HcProblem(a, b, d, sqr_sum) if splits else HcProblem(a, b, d[None], sqr_sum[None])

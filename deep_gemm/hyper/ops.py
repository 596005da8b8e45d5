"""The operator of the product that hyper-connections make ahead of their norm."""

from __future__ import annotations

from typing import Any

from ..core.operators import flops_of, operator
from . import api
from .check import hc_problem


def fake(*given: Any) -> None:
    """Check the call."""
    hc_problem(*given)


operator(
    "tf32_hc_prenorm_gemm(Tensor a, Tensor b, Tensor(d!) d, Tensor(s!) sqr_sum, SymInt? num_splits=None) -> ()",
    api.tf32_hc_prenorm_gemm,
    fake,
    flops=flops_of("a"),
)

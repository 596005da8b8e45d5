"""The operator of the product that hyper-connections make ahead of their norm."""

from __future__ import annotations

from torch import Tensor

from ..core.operators import flops_of, operator
from . import api as hyper_connections
from .check import hc_problem


def prenorm(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None) -> None:
    """Multiply, and sum up squares."""
    hyper_connections.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits)


def fake_prenorm(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None) -> None:
    """Stand for both."""
    hc_problem(a, b, d, sqr_sum, num_splits)


operator(
    "tf32_hc_prenorm_gemm(Tensor a, Tensor b, Tensor(d!) d, Tensor(s!) sqr_sum, SymInt? num_splits=None) -> ()",
    prenorm,
    fake_prenorm,
    flops=flops_of("a"),
)

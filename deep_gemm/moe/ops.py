"""Operators of a mixture of experts and its parts.

Functions take `ExpertRows`; operators take a list of its members instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple as register_namedtuple

from ..casts.gating import gating_of
from ..casts.ops import fake_cast
from ..casts.rules import Quantized, Target
from ..core.check.numbers import magnitude
from ..core.operators import operators
from . import activation, routing
from .api import experts
from .check import (
    ExpertRows,
    activation_problem,
    check_gather,
    check_routes,
    check_weighted,
    experts_problem,
    flops_of_rows,
)
from .route_rows import RouteProblem

Members = tuple[Tensor, ...]

# Lets torch.export save programs that return ExpertRows.
register_namedtuple(ExpertRows, serialized_type_name="deep_gemm.ExpertRows")


def fake_expert_rows(topk_ids: Tensor, num_experts: int) -> Members:
    """Return empty rows of the right shapes for all routes."""
    check_routes(topk_ids, num_experts)
    return tuple(RouteProblem(topk_ids, num_experts).rows)


def fake_gather_cast(x: Tensor, rows: Members, min_amax: float, mn_major: bool, gran_k: int, **_: object) -> Quantized:
    """Return empty values and scales of the right shapes."""
    check_gather(x, ExpertRows(*rows))
    magnitude("min_amax", min_amax)
    shape = ExpertRows(*rows).token_of.shape[0], x.shape[1]
    return Target(1, gran_k, mn_major=mn_major).empty(shape, x)  # type: ignore[no-any-return]


def fake_weighted(y: Tensor, rows: Members, topk_weights: Tensor, out: Tensor | None) -> Tensor | None:
    """Return an empty result of the right shape."""
    check_weighted(y, ExpertRows(*rows), topk_weights, out)
    if out is not None:
        return None
    return y.new_empty((topk_weights.shape[0], y.shape[1]), dtype=torch.bfloat16)


def fake_silu_mul(
    x: Tensor,
    row_weights: Tensor | None,
    masked_m: Tensor | None,
    ends: Tensor | None,
    limit: float | None,
    min_amax: float,
    mn_major: bool,
    activation: str,
    alpha: float | None,
    beta: float | None,
    gran_k: int,
    **_: object,
) -> Quantized:
    """Return empty values and scales of the right shapes."""
    gating = gating_of(activation, alpha, beta, limit)
    activation_problem(x, row_weights, masked_m, ends, gating, alignment=1)  # the alignment of fake ends is unknown
    activated = torch.empty((*x.shape[:-1], x.shape[-1] // 2), device=x.device, dtype=torch.float32)
    return fake_cast(activated, Target(1, gran_k, min_amax=min_amax, mn_major=mn_major))


def fake_experts(
    out: Tensor | None, limit: float | None, activation: str, alpha: float | None, beta: float | None, **given: Any
) -> Tensor | None:
    """Check the call, and return an empty output unless `out` is given."""
    problem = experts_problem(out=out, gating=gating_of(activation, alpha, beta, limit), **given)
    return problem.out if out is None else None


GATING = "str activation='swiglu', float? alpha=None, float? beta=None"
operators(
    "expert_rows(Tensor topk_ids, SymInt num_experts) -> "
    "(Tensor counts, Tensor ends, Tensor row_of, Tensor token_of, Tensor ids)",
    lambda topk_ids, num_experts: tuple(routing.expert_rows(topk_ids, num_experts)),
    fake_expert_rows,
)
operators(
    "gather_cast_to_fp8(Tensor x, Tensor[] rows, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False, "
    "int gran_k=128) -> (Tensor, Tensor)",
    lambda x, rows, **said: routing.gather_cast_to_fp8(x, ExpertRows(*rows), **said),
    fake_gather_cast,
)
operators(
    "gather_weighted(Tensor y, Tensor[] rows, Tensor topk_weights<, Tensor(out!) out>) -> Tensor",
    lambda y, rows, topk_weights, out: routing.gather_weighted(y, ExpertRows(*rows), topk_weights, out=out),
    fake_weighted,
)
operators(
    "silu_mul_cast_to_fp8(Tensor x, Tensor? row_weights=None, Tensor? masked_m=None, Tensor? ends=None, "
    "float? limit=None, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False, "
    f"{GATING}, int gran_k=128) -> (Tensor, Tensor)",
    activation.silu_mul_cast_to_fp8,
    fake_silu_mul,
)
operators(
    "experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor? sfw1, Tensor w2, Tensor? sfw2"
    f"<, Tensor(out!) out>, float? limit=None, {GATING}, int? gran_k=None, int[]? recipe_b=None, "
    "Tensor? w1_bias=None, Tensor? w2_bias=None) -> Tensor",
    experts,
    fake_experts,
    flops=lambda _, x, topk_ids, w1, **__: flops_of_rows(topk_ids.numel(), x, w1),
)

"""Operators of a mixture of experts and its parts.

Where functions take `ExpertRows`, operators take a list of its members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple as register_namedtuple

from ..casts.ops import fake_rows
from ..casts.rules import Quantized, empty_scales, empty_values
from ..core.check.checks import Operand
from ..core.check.numbers import magnitude
from ..core.operators import Kernel, operator
from ..gemm.ops import Compute
from . import activation, routing
from .api import experts
from .check import ExpertRows, activation_problem, check_gather, check_routes, check_weighted, experts_problem

Members = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

register_namedtuple(
    ExpertRows, serialized_type_name="deep_gemm.ExpertRows"
)  # exported programs that give one are saved


def expert_rows(topk_ids: Tensor, num_experts: int) -> Members:
    """Give each route a row."""
    counts, ends, row_of, token_of, ids = routing.expert_rows(topk_ids, num_experts)
    return counts, ends, row_of, token_of, ids


def fake_expert_rows(topk_ids: Tensor, num_experts: int) -> Members:
    """Stand for the rows of all routes."""
    check_routes(topk_ids, num_experts)

    def int32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=topk_ids.device)

    routes = topk_ids.numel()
    return int32(num_experts), int32(num_experts), int32(*topk_ids.shape), int32(routes), int32(routes)


operator(
    "expert_rows(Tensor topk_ids, SymInt num_experts) -> "
    "(Tensor counts, Tensor ends, Tensor row_of, Tensor token_of, Tensor ids)",
    expert_rows,
    fake_expert_rows,
)


def gather_cast(
    x: Tensor, rows: Sequence[Tensor], use_ue8m0: bool = False, min_amax: float = 0.0, mn_major: bool = False
) -> Quantized:
    """Cast tokens and copy them to their rows."""
    return routing.gather_cast_to_fp8(x, ExpertRows(*rows), use_ue8m0=use_ue8m0, min_amax=min_amax, mn_major=mn_major)


def fake_gather_cast(
    x: Tensor, rows: Sequence[Tensor], use_ue8m0: bool = False, min_amax: float = 0.0, mn_major: bool = False
) -> Quantized:
    """Stand for tokens in their rows."""
    check_gather(x, ExpertRows(*rows))
    magnitude("min_amax", min_amax)
    num_rows, k = ExpertRows(*rows).token_of.shape[0], x.shape[1]
    return empty_values((num_rows, k), x), empty_scales((num_rows,), k, x, mn_major=mn_major)


operator(
    "gather_cast_to_fp8(Tensor x, Tensor[] rows, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False) "
    "-> (Tensor, Tensor)",
    gather_cast,
    fake_gather_cast,
)


def weighted(y: Tensor, rows: Sequence[Tensor], topk_weights: Tensor) -> Tensor | None:
    """Sum up the rows of each token."""
    return routing.gather_weighted(y, ExpertRows(*rows), topk_weights)


def fake_weighted(y: Tensor, rows: Sequence[Tensor], topk_weights: Tensor) -> Tensor:
    """Stand for the sums."""
    check_weighted(y, ExpertRows(*rows), topk_weights, None)
    return torch.empty((topk_weights.shape[0], y.shape[1]), dtype=torch.bfloat16, device=y.device)


def weighted_into(y: Tensor, rows: Sequence[Tensor], topk_weights: Tensor, out: Tensor) -> None:
    """Sum up the rows of each token."""
    routing.gather_weighted(y, ExpertRows(*rows), topk_weights, out=out)


def fake_weighted_into(y: Tensor, rows: Sequence[Tensor], topk_weights: Tensor, out: Tensor) -> None:
    """Stand for the sums."""
    check_weighted(y, ExpertRows(*rows), topk_weights, out)


SUMMANDS = "Tensor y, Tensor[] rows, Tensor topk_weights"
operator(f"gather_weighted({SUMMANDS}) -> Tensor", weighted, fake_weighted)
operator(f"gather_weighted.into({SUMMANDS}, Tensor(out!) out) -> ()", weighted_into, fake_weighted_into)


def silu_mul(
    x: Tensor,
    row_weights: Tensor | None = None,
    masked_m: Tensor | None = None,
    ends: Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = False,
    min_amax: float = 0.0,
    mn_major: bool = False,
) -> Quantized:
    """Activate and cast."""
    return activation.silu_mul_cast_to_fp8(
        x,
        row_weights,
        masked_m=masked_m,
        ends=ends,
        limit=limit,
        use_ue8m0=use_ue8m0,
        min_amax=min_amax,
        mn_major=mn_major,
    )


def fake_silu_mul(
    x: Tensor,
    row_weights: Tensor | None = None,
    masked_m: Tensor | None = None,
    ends: Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = False,
    min_amax: float = 0.0,
    mn_major: bool = False,
) -> Quantized:
    """Stand for both."""
    activation_problem(x, row_weights, masked_m, ends, limit, alignment=1)  # fake ends are aligned to nothing
    activated = torch.empty((*x.shape[:-1], x.shape[-1] // 2), device=x.device)
    return fake_rows(activated, min_amax=min_amax, mn_major=mn_major)


operator(
    "silu_mul_cast_to_fp8(Tensor x, Tensor? row_weights=None, Tensor? masked_m=None, Tensor? ends=None, "
    "float? limit=None, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False) -> (Tensor, Tensor)",
    silu_mul,
    fake_silu_mul,
)


def kernels(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a mixture of experts as its two operators take it."""

    def new(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        sfw1: Tensor,
        w2: Tensor,
        sfw2: Tensor,
        limit: float | None = None,
    ) -> Tensor | None:
        return compute(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out=None, limit=limit)

    def into(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        sfw1: Tensor,
        w2: Tensor,
        sfw2: Tensor,
        out: Tensor,
        limit: float | None = None,
    ) -> None:
        compute(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out=out, limit=limit)

    return new, into


def ask_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Operand, w2: Operand, out: Tensor | None, limit: float | None
) -> Tensor | None:
    """Ask what `experts` computes, without an answer."""
    problem = experts_problem(x, topk_ids, topk_weights, w1, w2, out, limit)
    return problem.out if out is None else None


TENSORS = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor sfw1, Tensor w2, Tensor sfw2"
(new, into), (fake_new, fake_into) = kernels(experts), kernels(ask_experts)
operator(f"experts({TENSORS}, float? limit=None) -> Tensor", new, fake_new)
operator(f"experts.into({TENSORS}, Tensor(out!) out, float? limit=None) -> ()", into, fake_into)

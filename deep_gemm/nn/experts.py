"""A gated mixture of experts with FP8 products, forward and backward.

Rows are routes of tokens, stacked by expert, as `expert_rows` says; p is the weight of a row's route.

    x rows     --cast 1x128--> h = A w1^T   (BF16: gate and up)
    s = silu(gate) up  --cast 1x128--> y = A w2^T,   out = sum of each token's p y

    dout rows  --cast 1x128--> ds / p = A w2,   dp = <s, ds / p>
    dh         --cast 1x128--> A w1,            dx = sum of each token's
    dw2 = (p dout rows)^T s,   dw1 = dh^T (x rows): groups along k, all operands cast 1x128 along each expert's rows

From forward to backward stay x, h, the weights, and where each row comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..casts.fp8 import k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from ..casts.gating import Gating
from ..core.check.checks import K_MULTIPLE
from ..core.check.integers import integer_in_range
from ..core.check.layout import align
from ..core.check.numbers import positive
from ..core.check.tracing import is_dispatched
from ..gemm.rows.api import k_grouped_fp8_gemm_nt_contiguous
from ..linear.backward import output_type, transposed
from ..moe.api import activate_rows, product_of_rows
from ..moe.check import ExpertRows
from ..moe.routing import expert_rows, gather_cast_to_fp8, gather_weighted
from .gradients import (
    as_autocast_says,
    features,
    gradient_beside_main_grad,
    in_shape,
    main_grad_of,
    outside_of_graphs,
    weight_type,
)


class Experts(torch.nn.Module):
    """The experts of a mixture: the weighted sum of `w2[e] @ (silu(gate) * up)` over each token's experts e.

    `w1` is `[num_experts, 2 intermediate, hidden]`, the gate's rows first, and `w2` `[num_experts, hidden,
    intermediate]`, both drawn as `torch.nn.Linear` draws its weight. hidden and intermediate are multiples of 16. A
    router chooses experts and weights: gradients flow to the weights, and to x. `limit` and `accumulates_main_grad`:
    as for `silu_mul_cast_to_fp8` and `Linear`. The result has the type of x, or of autocast, rounded to BF16 at least.

    The gradients of `w1` and `w2` need the number of each expert's rows on the host, so backward waits for a GPU once.

    >>> experts = Experts(num_experts=4, hidden=32, intermediate=16)
    >>> topk_weights, topk_ids = torch.randn(2, 3, 4).softmax(-1).topk(2)
    >>> experts(torch.randn(2, 3, 32), topk_ids, topk_weights).shape
    torch.Size([2, 3, 32])
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        limit: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        accumulates_main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = integer_in_range("num_experts", num_experts, 1)
        self.hidden, self.intermediate = features("hidden", hidden), features("intermediate", intermediate)
        self.limit = None if limit is None else positive("limit", limit)
        self.accumulates_main_grad = accumulates_main_grad
        dtype = weight_type(dtype)
        shape1, shape2 = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
        self.w1 = torch.nn.Parameter(torch.empty(shape1, device=device, dtype=dtype))
        self.w2 = torch.nn.Parameter(torch.empty(shape2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as `torch.nn.Linear` draws its own."""
        for weight in (self.w1, self.w2):
            bound = 1 / sqrt(weight.shape[2])
            torch.nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        """Sizes and what is multiplied, for `print`."""
        sizes = f"num_experts={self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        return f"{sizes}, products=fp8"

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the mixture of tokens x `[..., hidden]`: `topk_ids` and `topk_weights` are `[..., topk]`.

        Ids are int32 or int64, -1 for none.
        """
        x = as_autocast_says(x)
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x: expected shape (..., {self.hidden}), got {tuple(x.shape)}")
        for name, of_routes in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if of_routes.shape[:-1] != x.shape[:-1] or of_routes.dim() != x.dim():
                raise ValueError(
                    f"{name}: expected shape (..., topk) with leading dimensions {tuple(x.shape[:-1])}, "
                    f"got {tuple(of_routes.shape)}"
                )
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(f"topk_weights: expected shape {tuple(topk_ids.shape)}, got {tuple(topk_weights.shape)}")
        rows = expert_rows(topk_ids.reshape(prod(x.shape[:-1]), topk_ids.shape[-1]), self.num_experts)
        main_grads = (
            main_grad_of("w1", self.w1, self.accumulates_main_grad and self.w1.requires_grad),
            main_grad_of("w2", self.w2, self.accumulates_main_grad and self.w2.requires_grad),
        )
        flat = x.reshape(-1, self.hidden), topk_weights.reshape(rows.row_of.shape)
        if main_grads != (None, None):
            out = apply_beside_main_grads(*flat, self.w1, self.w2, rows, self.limit, main_grads)
        else:
            out = mixture(*flat, self.w1, self.w2, rows, self.limit)
        return in_shape(out, x.shape)


def mixture(x: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor, rows: ExpertRows, limit: float | None) -> Tensor:
    """Compute a mixture of rows that are laid out already, with gradients."""
    if is_dispatched(x):  # an operator of nn/ops.py, with a formula for its gradients
        out, _ = torch.ops.deep_gemm.nn_experts(x, topk_weights, w1, w2, list(rows), limit)
        return out.to(x.dtype)  # type: ignore[no-any-return]
    nowhere = (None, None)
    return _Experts.apply(x, topk_weights, w1, w2, rows, limit, nowhere)  # type: ignore[no-any-return, no-untyped-call]


@outside_of_graphs
def apply_beside_main_grads(*args: Any) -> Tensor:
    """Compute the mixture, gradients of weights being added to `main_grad`: no graph has this effect."""
    return _Experts.apply(*args)  # type: ignore[no-any-return, no-untyped-call]


class _Experts(torch.autograd.Function):
    """The products of a mixture. What nobody needs is neither computed nor saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        rows: ExpertRows,
        limit: float | None,
        main_grads: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Compute the mixture, and keep what the gradients that are needed take."""
        needs_x, needs_p, needs_w1, _, *_ = ctx.needs_input_grad
        out, h = with_gates(x, topk_weights, w1, w2, rows, limit)
        ctx.save_for_backward(
            x if needs_w1 else None,
            topk_weights,
            w1 if needs_x else None,
            w2 if needs_x or needs_p or needs_w1 else None,
            h,
            *rows,
        )
        ctx.types = x.dtype, topk_weights.dtype, w1.dtype, w2.dtype
        ctx.limit, ctx.main_grads = limit, main_grads
        ctx.marked = tuple(
            None if buffer is None else weight for weight, buffer in zip((w1, w2), main_grads, strict=True)
        )
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients that are needed."""
        x, topk_weights, w1, w2, h, *fields = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        of_x, of_p, of_w1, of_w2 = gradients(
            grad, x, topk_weights, w1, w2, h, ExpertRows(*fields), ctx.limit, needs, ctx.types, ctx.main_grads
        )
        if ctx.marked[0] is not None:
            of_w1 = gradient_beside_main_grad(ctx.marked[0])
        if ctx.marked[1] is not None:
            of_w2 = gradient_beside_main_grad(ctx.marked[1])
        return of_x, of_p, of_w1, of_w2, None, None, None


def with_gates(
    x: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor, rows: ExpertRows, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the mixture, and gate and up of each row, which all gradients take."""
    h = product_of_rows(gather_cast_to_fp8(x, rows, mn_major=True), per_block_cast_to_fp8(w1), rows)
    y = product_of_rows(activate_rows(h, rows, Gating(limit=limit)), per_block_cast_to_fp8(w2), rows)
    out = gather_weighted(y, rows, topk_weights)
    assert out is not None
    return out, h


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, of the weights of routes, of w1 and of w2."""


def gradients(
    grad: Tensor,
    x: Tensor | None,
    topk_weights: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    h: Tensor,
    rows: ExpertRows,
    limit: float | None,
    needs: Sequence[bool],
    types: Sequence[torch.dtype],
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:
    """Compute the gradients that are needed, in these types."""
    needs_x, needs_p, needs_w1, needs_w2 = needs
    is_empty = (rows.ids < 0)[:, None]  # behind the last row of an expert, where products leave anything
    activation = Activation.of(h.masked_fill(is_empty, 0), limit)
    p = of_rows(topk_weights.float(), rows)[:, None]
    stack = Stack.of(rows) if needs_w1 or needs_w2 else None
    of_x = of_p = of_w1 = of_w2 = None
    if w2 is not None:  # one of the first three needs it
        a = gather_cast_to_fp8(grad.contiguous(), rows, mn_major=True)
        ds = product_of_rows(a, transposed(per_block_cast_to_fp8(w2)), rows)  # but for the factor p
        ds = ds.masked_fill_(is_empty, 0).float()
        if needs_p:
            of_p = of_routes((activation.s * ds).sum(1), rows).to(types[1])
        dh = activation.gradient(ds * p).to(torch.bfloat16) if needs_x or needs_w1 else None
        if dh is not None and w1 is not None and needs_x:
            a = per_token_cast_to_fp8(dh, mn_major=True)
            dx = product_of_rows(a, transposed(per_block_cast_to_fp8(w1)), rows)
            of_x = gather_weighted(dx, rows, torch.ones_like(rows.row_of, dtype=torch.float32))
            assert of_x is not None
            of_x = of_x.to(types[0])
        if dh is not None and x is not None and needs_w1 and stack is not None:
            of_w1 = stack.product(dh[stack.row], x[stack.token], types[2], main_grads[0])
    if needs_w2 and stack is not None:
        dy = grad[stack.token] * p[stack.row]
        of_w2 = stack.product(dy, activation.s[stack.row], types[3], main_grads[1])
    return of_x, of_p, of_w1, of_w2


def of_rows(x: Tensor, rows: ExpertRows) -> Tensor:
    """Give each row what its route has; 0 where a row has no route. The host reads nothing."""
    num_rows = len(rows.ids)
    to = torch.where(rows.row_of < 0, num_rows, rows.row_of).flatten().long()  # routes without a row share the last
    return x.new_zeros(num_rows + 1).scatter_(0, to, x.flatten())[:num_rows]


def of_routes(x: Tensor, rows: ExpertRows) -> Tensor:
    """Give each route what its row has; 0 where a route has no row."""
    found = x.new_zeros(rows.row_of.shape) if len(x) == 0 else x[rows.row_of.clamp_min(0).long()]
    return found.masked_fill(rows.row_of < 0, 0)


class Activation(NamedTuple):
    """FP32 silu(gate) * up, and what its gradient takes."""

    s: Tensor
    of_gate: Tensor
    """The derivative of s by gate."""
    of_up: Tensor

    @classmethod
    def of(cls, h: Tensor, limit: float | None) -> Activation:
        """Activate rows that hold gate and up side by side."""
        gate, up = (half.float() for half in h.chunk(2, dim=1))
        cut_gate = gate if limit is None else gate.clamp_max(limit)
        cut_up = up if limit is None else up.clamp(-limit, limit)
        sigmoid = cut_gate.sigmoid()
        silu = cut_gate * sigmoid
        of_gate, of_up = cut_up * sigmoid * (1 + cut_gate - silu), silu
        if limit is not None:
            of_gate = of_gate.masked_fill(gate > limit, 0)
            of_up = of_up.masked_fill(up.abs() > limit, 0)
        return cls(silu * cut_up, of_gate, of_up)

    def gradient(self, ds: Tensor) -> Tensor:
        """The gradient of gate and up, side by side."""
        return torch.cat([ds * self.of_gate, ds * self.of_up], dim=1)


class Stack(NamedTuple):
    """Rows stacked by expert once more, with space behind each expert's: products along k take multiples of 16."""

    ks: list[int]
    """How many rows each expert has here."""
    row: Tensor
    """The row at each place; any at a place without one."""
    token: Tensor
    """Its token."""
    is_space: Tensor
    """bool `[places, 1]`"""

    @classmethod
    def of(cls, rows: ExpertRows) -> Stack:
        """Wait for the number of each expert's rows: they decide how much memory the casts need."""
        counts = rows.counts.tolist()
        ks = [align(count, K_MULTIPLE) for count in counts]
        device = rows.ids.device
        starts, own = (torch.tensor(each, dtype=torch.long).to(device) for each in (_starts(counts), _starts(ks)))
        depths = torch.tensor(ks, dtype=torch.long).to(device)
        expert = torch.repeat_interleave(torch.arange(len(ks), device=device), depths, output_size=sum(ks))
        within = torch.arange(sum(ks), device=device) - own[expert]
        is_space = within >= rows.counts[expert]
        row = (starts[expert] + within).masked_fill_(is_space, 0)
        return cls(ks, row, rows.token_of[row].long() if len(row) else row, is_space[:, None])

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
        """Compute a.T @ b of each expert's places: added to `main_grad`, else returned in `dtype`."""
        shape = len(self.ks), a.shape[1], b.shape[1]
        if not sum(self.ks):
            return None if main_grad is not None else torch.zeros(shape, dtype=dtype, device=a.device)
        of_a, of_b = (
            k_grouped_cast_to_fp8(each.masked_fill(self.is_space, 0).t(), self.ks, mn_major=True) for each in (a, b)
        )
        if main_grad is not None:
            k_grouped_fp8_gemm_nt_contiguous(of_a, of_b, main_grad, self.ks, None, main_grad)
            return None
        d = torch.empty(shape, dtype=output_type(dtype), device=a.device)
        k_grouped_fp8_gemm_nt_contiguous(of_a, of_b, d, self.ks)
        return d.to(dtype)


def _starts(sizes: list[int]) -> list[int]:
    """Give where parts of these sizes begin."""
    return list(accumulate(sizes, initial=0))[:-1]

"""A gated mixture of experts with products in FP8, or in BF16, forward and backward.

Rows are routes of tokens, stacked by expert in the order of `expert_rows`; p is the weight of a row's route.

    x rows     --cast 1x128--> h = A w1^T   (BF16: gate and up)
    s = silu(gate) up  --cast 1x128--> y = A w2^T,   out = sum of p y over each token's rows

    dout rows  --cast 1x128--> ds / p = A w2,   dp = <s, ds / p>
    dh         --cast 1x128--> A w1,            dx = sum over each token's rows
    dw2 = (p dout rows)^T s,   dw1 = dh^T (x rows): groups along k, all operands cast 1x128 along each expert's rows

Backward keeps x, h, the weights, and the token of each row. The host does not wait for the GPU. In BF16 nothing is
cast: the same products read rows in their own layout, and dw2 = (dout rows)^T (p s).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts.depths import GroupedRows, cast_along_groups, cast_silu_gradient
from ..casts.gating import Gating
from ..casts.rules import Rows
from ..core.call import FREE_ROWS, Function, run
from ..core.check.checks import K_MULTIPLE, tensor
from ..core.check.memory import empty
from ..core.check.numbers import integer_in_range, positive
from ..core.check.recipes import PER_ROW
from ..core.check.tracing import is_dispatched
from ..gemm.api.bf16_grouped import k_grouped_bf16_gemm_tn_contiguous
from ..gemm.api.grouped import k_grouped_fp8_gemm_nt_contiguous
from ..gemm.ask.bf16 import MULTIPLE
from ..linear.backward import output_type, transposed
from ..moe.api import activate_rows, product_of_rows
from ..moe.check import ExpertRows
from ..moe.routing import expert_rows, gather_and_cast, gather_weighted, sum_rows
from .gradients import (
    Trained,
    as_autocast_says,
    features,
    gradient_beside_main_grad,
    in_shape,
    main_grad_of,
    once,
    outside_of_graphs,
    weight_type,
)
from .kept import Weight, cast_weight, cast_weight_back, for_backward, for_forward, tensors_of

FP8 = "fp8"
BF16 = "bf16"
MULTIPLES = {BF16: MULTIPLE, FP8: K_MULTIPLE}
"""Allowed values of `products`, and for each the number that must divide the sizes."""


class Experts(Trained):
    """The experts of a mixture: the weighted sum of `w2[e] @ (silu(gate) * up)` over each token's experts e.

    `w1` is `[num_experts, 2 intermediate, hidden]`, the gate's rows first, and `w2` `[num_experts, hidden,
    intermediate]`, both initialized like the weight of `torch.nn.Linear`. hidden and intermediate are multiples of 16.
    A router chooses experts and weights: gradients flow to the weights, and to x. `limit` and `accumulates_main_grad`:
    as for `silu_mul_cast_to_fp8` and `Linear`. The result has the type of x, or of autocast, rounded to BF16 at least.
    `products="bf16"` computes in BF16: sizes are multiples of 8, and weights of other types are rounded to BF16.

    >>> experts = Experts(num_experts=4, hidden=32, intermediate=16)
    >>> topk_weights, topk_ids = torch.randn(2, 3, 4).softmax(-1).topk(2)
    >>> experts(torch.randn(2, 3, 32), topk_ids, topk_weights).shape
    torch.Size([2, 3, 32])
    """

    products = FP8

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
        products: str = FP8,
    ) -> None:
        super().__init__()
        if products not in (FP8, BF16):
            raise ValueError(f"products: expected {FP8!r} or {BF16!r}, got {products!r}")
        self.products = products
        self.num_experts = integer_in_range("num_experts", num_experts, 1)
        of = MULTIPLES[products]
        self.hidden, self.intermediate = features("hidden", hidden, of), features("intermediate", intermediate, of)
        self.limit = None if limit is None else positive("limit", limit)
        self.accumulates_main_grad = accumulates_main_grad
        dtype = weight_type(dtype)
        shape1, shape2 = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
        self.w1 = torch.nn.Parameter(torch.empty(shape1, device=device, dtype=dtype))
        self.w2 = torch.nn.Parameter(torch.empty(shape2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights like `torch.nn.Linear` draws its weight."""
        for weight in (self.w1, self.w2):
            bound = 1 / sqrt(weight.shape[2])
            torch.nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        """Return sizes and the type of the products, for `print`."""
        sizes = f"num_experts={self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        return f"{sizes}, products={self.products}"

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the mixture for tokens x `[..., hidden]`; `topk_ids` and `topk_weights` are `[..., topk]`.

        Ids are int32 or int64; -1 means no expert.
        """
        x = as_autocast_says(tensor("x", x))
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x: expected shape (..., {self.hidden}), got {tuple(x.shape)}")
        for name, of_routes in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            tensor(name, of_routes)
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
            out = apply_outside_of_graphs(*flat, self.w1, self.w2, rows, self.limit, self.products, main_grads)
        else:
            out = mixture(*flat, self.w1, self.w2, rows, self.limit, self.products)
        return in_shape(out, x.shape)


def mixture(
    x: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor, rows: ExpertRows, limit: float | None, products: str = FP8
) -> Tensor:
    """Compute a mixture of rows that are stacked already, with gradients."""
    given = x, topk_weights, w1, w2
    if x.is_meta or is_dispatched(x):  # call an operator of nn/ops.py, with a formula for its gradients
        out, _ = torch.ops.deep_gemm.nn_experts(*given, list(rows), limit, products)
        return out  # type: ignore[no-any-return]
    return _Experts.apply(*given, rows, limit, products, (None, None))  # type: ignore[no-any-return, no-untyped-call]


class _Experts(torch.autograd.Function):
    """The products of a mixture; the weights may be cast already. Only needed tensors are computed and saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        w1: Weight,
        w2: Weight,
        rows: ExpertRows,
        limit: float | None,
        products: str,
        main_grads: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Compute the mixture, and save the tensors that backward needs."""
        needs_x, needs_p, needs_w1, _, *_ = ctx.needs_input_grad
        out, h = with_gates(x, topk_weights, w1, w2, rows, limit, products)
        saved1, saved2 = (None, None) if isinstance(w1, tuple) else (w1, w2)
        ctx.save_for_backward(
            x if needs_w1 else None,
            topk_weights,
            saved1 if needs_x else None,
            saved2 if needs_x or needs_p or needs_w1 else None,
            h,
            *rows,
        )
        ctx.cast = (w1, w2) if saved1 is None else None
        ctx.types = x.dtype, topk_weights.dtype, *(getattr(saved, "dtype", None) for saved in (saved1, saved2))
        ctx.limit, ctx.products, ctx.main_grads = limit, products, main_grads
        ctx.marked = [None if buffer is None else w for w, buffer in zip((w1, w2), main_grads, strict=True)]
        return out.to(x.dtype)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the needed gradients."""
        x, topk_weights, w1, w2, h, *fields = ctx.saved_tensors
        if ctx.cast is not None:
            w1, w2 = map(transposed, ctx.cast)
        needs = ctx.needs_input_grad[:4]
        of_x, of_p, *found = gradients(
            *(grad, x, topk_weights, w1, w2, h, ExpertRows(*fields), ctx.limit, needs, ctx.types),
            *(ctx.products, ctx.main_grads),
        )
        marked = zip(ctx.marked, found, strict=True)
        of_weights = [own if w is None else gradient_beside_main_grad(w) for w, own in marked]
        return of_x, of_p, *of_weights, None, None, None, None


apply_outside_of_graphs = outside_of_graphs(_Experts.apply)
"""Computes the mixture outside of a graph: gradients are added to `main_grad`, or weights are cast already."""


def with_gates(
    x: Tensor, topk_weights: Tensor, w1: Weight, w2: Weight, rows: ExpertRows, limit: float | None, products: str = FP8
) -> tuple[Tensor, Tensor]:
    """Compute the mixture, and gate and up of each row, which backward needs."""
    is_fp8 = products == FP8
    w1, w2 = (for_forward(w) if is_fp8 or isinstance(w, tuple) else w.to(torch.bfloat16) for w in (w1, w2))
    return run(FORWARD, (x, topk_weights, w1, w2, rows), (limit, products))  # type: ignore[no-any-return]


@torch.no_grad()
def _with_gates(
    x: Tensor, topk_weights: Tensor, w1: Weight, w2: Weight, rows: ExpertRows, limit: float | None, products: str
) -> tuple[Tensor, Tensor]:
    scaled = PER_ROW if products == FP8 else None
    of_w1, of_w2 = (cast_weight(w) if products == FP8 else (w, None) for w in (w1, w2))
    h = product_of_rows(gather_and_cast(x, rows, scaled), of_w1, rows)
    y = product_of_rows(activate_rows(h, rows, Gating(limit=limit), scaled), of_w2, rows)
    return gather_weighted(y, rows, topk_weights), h  # type: ignore[return-value]


FORWARD = Function(
    _with_gates,
    _with_gates,
    lambda x, p, w1, w2, rows: (x, p, rows.row_of, rows.token_of, rows.ids, *tensors_of(w1, w2), *rows[:2]),
    free=[FREE_ROWS] * 5,
)
MOST_AT_ONCE = 1 << 24
"""The most elements of gate and up that allow backward as one record, which holds the memory of all steps at once."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, of the weights of routes, of w1 and of w2."""


def gradients(
    grad: Tensor,
    x: Tensor | None,
    topk_weights: Tensor,
    w1: Weight | None,
    w2: Weight | None,
    h: Tensor,
    rows: ExpertRows,
    limit: float | None,
    needs: Sequence[bool],
    types: Sequence[Any],
    products: str = FP8,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:
    """Compute the needed gradients, in `types`. A weight that is cast already is passed transposed."""
    depths = GroupedRows(*rows[:2], rows.token_of).depths if products == FP8 else rows.counts
    weights = [None if w is None else for_backward(w) if products == FP8 else w for w in (w1, w2)]
    p, are_none = of_rows(topk_weights.float(), rows), [each is None for each in (x, w1, w2, *main_grads)]
    said: tuple[Any, ...] = (products, limit, *needs, *are_none[:3], *types[2:], *are_none[3:])
    operands: tuple[Any, ...] = (grad.contiguous(), x, p, *weights, h, rows, depths, *main_grads)
    if h.numel() <= MOST_AT_ONCE:
        of_x, parts, of_w1, of_w2 = run(BACKWARD[2 - main_grads.count(None)], operands, said)
    else:
        of_x, parts, of_w1, of_w2 = _gradients(*operands, *said)
    of_p = None if parts is None else of_routes(parts.sum(0), rows)
    found = zip((of_x, of_p, of_w1, of_w2), types, strict=True)
    return tuple([None if each is None else each.to(dtype) for each, dtype in found])  # type: ignore[return-value]


@torch.no_grad()
def _gradients(
    grad: Tensor,
    x: Tensor | None,
    p: Tensor,
    w1: Weight | None,
    w2: Weight | None,
    h: Tensor,
    rows: ExpertRows,
    depths: Tensor,
    main_grad1: Tensor | None,
    main_grad2: Tensor | None,
    products: Any,
    limit: float | None,
    needs_x: bool,
    needs_p: bool,
    needs_w1: bool,
    needs_w2: bool,
    *more: Any,
) -> Gradients:
    """Compute gradients one after the other, so that memory holds few operands. p's gradient has parts to add up."""
    groups, types = GroupedRows(rows.counts, rows.ends, rows.token_of), more[3:5]
    is_fp8, scaled = products == FP8, PER_ROW if products == FP8 else None
    a = ds = of_x = of_p = of_w1 = of_w2 = None
    if w2 is not None or (needs_w2 and not is_fp8):
        a = gather_and_cast(grad, rows, scaled)
    if w2 is not None:  # the gradient of x, of p or of w1 is needed
        ds = product_of_rows(a, turned(w2, products), rows)  # without the factor p
    if is_fp8:
        a = None
    dh, dh_columns, s_columns, parts = cast_silu_gradient(
        *(h, ds, groups, p, limit), gradient_too=needs_x or needs_w1, activation_too=needs_p or needs_w2, scaled=is_fp8
    )
    del ds
    if needs_p:
        of_p = parts
    if needs_w2 and s_columns is not None:
        a = cast_along_groups(grad, groups, p) if is_fp8 else a
        of_w2 = weight_gradient(a, s_columns, depths, types[1], main_grad2)
    a = None
    del s_columns
    if needs_x and dh is not None and w1 is not None:
        of_x = sum_rows(product_of_rows(dh, turned(w1, products), rows), rows.row_of)
    if is_fp8:
        dh = None
    else:
        dh_columns = dh
    if needs_w1 and dh_columns is not None and x is not None:
        of_tokens = cast_along_groups(x, groups) if is_fp8 else gather_and_cast(x, rows, scaled)
        of_w1 = weight_gradient(dh_columns, of_tokens, depths, types[0], main_grad1)
    return of_x, of_p, of_w1, of_w2


BACKWARD = [
    Function(_gradients, _gradients, lambda *operands: tuple(tensors_of(*operands)), outputs=outputs)
    for outputs in range(3)
]
"""Backward functions with no, one and two weight gradients that are added to a `main_grad`."""


def weight_gradient(a: Any, b: Any, depths: Tensor, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """Compute a @ b.T along groups of these depths (BF16: a.T @ b); add to `main_grad`, or return in `dtype`."""
    product: Any = k_grouped_fp8_gemm_nt_contiguous
    shape = depths.shape[0], *(scales.shape[0] if scales is not None else x.shape[1] for x, scales in (a, b))
    if a[1] is None:
        product, a, b = k_grouped_bf16_gemm_tn_contiguous, a[0], b[0]
    if main_grad is not None:
        product(a, b, main_grad, None, depths, main_grad)
        return None
    d = empty("the gradient", shape, output_type(dtype), depths.device)
    product(a, b, d, None, depths)
    return d.to(dtype)


def turned(w: Weight, products: str) -> Rows:
    """Return a weight transposed, in the layout that products of gradients read."""
    if products == FP8 or isinstance(w, tuple):
        return cast_weight_back(w)
    return w.to(torch.bfloat16).mT, None


def of_rows(x: Tensor, rows: ExpertRows) -> Tensor:
    """Return for each row the value of its route; a row without a route is undefined. The host does not wait."""
    found = x.new_empty(rows.ids.shape[0] + 1)
    found[rows.row_of] = x  # routes without a row have -1, so they write the last element
    return found[:-1]


def of_routes(x: Tensor, rows: ExpertRows) -> Tensor:
    """Return for each route the value of its row, or 0 if it has no row."""
    return F.pad(x, (0, 1))[rows.row_of]  # routes without a row have -1, so they read the last element, a zero

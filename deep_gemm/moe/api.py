"""A gated mixture of experts with FP8, FP4 or BF16 weights, for activations in a model's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..casts.gating import Gating, gating_of
from ..casts.rules import empty_scales, granularity
from ..core.call import FREE_ROWS, Function, run
from ..core.check.checks import Operand, cuts_gradient, pair
from ..core.check.layout import BF16_BYTES, SCALE_BLOCK, WORD_BYTES, Recipe, ceil_div, get_tma_aligned_size
from ..core.check.memory import empty
from ..core.check.numbers import integers_from
from ..core.check.recipes import NO_RECIPES, PER_ROW, Recipes, Scales
from ..core.check.tracing import handles_operators, num_modes
from ..core.gpu import is_hopper
from ..core.replay import FIXED
from ..core.shadow import TENSORS
from ..gemm.api.bf16_grouped import ACTIVATED, product_of_bf16_rows
from ..gemm.api.grouped import product_of_stacked_groups, product_of_stacked_rows
from ..gemm.kinds.output import recipes_for
from ..gemm.packed import is_packed
from ..gemm.product import run as run_product
from . import experts_few
from .activation import activated_product_of_rows, cast_activated
from .check import ActivationProblem, ExpertRows, ExpertsProblem, experts_problem, present
from .routing import MANY_ROWS, expert_rows, gather_and_cast, sum_rows


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Operand | Tensor,
    w2: Operand | Tensor,
    *,
    out: Tensor | None = None,
    limit: float | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    beta: float | None = None,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor | None:
    """Compute a gated mixture of experts: the weighted sum of `w2[e] @ (silu(gate) * up)` over each token's experts e.

    - `x`: `[tokens, hidden]`, BF16, FP16 or FP32.
    - `topk_ids`: int32 or int64 `[tokens, topk]`, -1 for no expert; `topk_weights`: `[tokens, topk]`, FP32, BF16 or
      FP16.
    - `w1`: values `[experts, 2 intermediate, hidden]`, the gate's rows first, and scales
      `[experts, ceil(2 intermediate / 128), ceil(hidden / 128)]`; `w2`: values `[experts, hidden, intermediate]`, and
      its scales. `per_block_cast_to_fp8` makes both pairs. hidden and intermediate are multiples of 16. Scales may be
      finer or coarser, as for `linear`: `[experts, n, 1]` for whole rows, `[experts]` for each expert's weight.
      Either weight may be FP4 (MXFP4) as for `m_grouped_fp8_fp4_gemm_nt_contiguous`: values `[experts, n, k / 2]`, two
      to a byte, and scales `[experts, n, k / 32]`, k a multiple of 32.
    - Or both weights are BF16 tensors of these shapes, without scales; then hidden and intermediate are multiples of
      8, and tokens and activations are BF16 too, not cast to FP8. Rows or columns of a weight may be contiguous.
    - `out`: BF16 `[tokens, hidden]`. If it is given, the function returns None; if it is left out, the function
      makes it and returns it.
    - `limit`, `activation`, `alpha`, `beta`: as for `silu_mul_cast_to_fp8`.
    - `gran_k`, `recipe_b`: as for `linear`, of both products. If `gran_k` is left out, each cast follows its weight.
      BF16 weights have neither.
    - `w1_bias`, `w2_bias`: `[experts, 2 intermediate]` and `[experts, hidden]`, FP32 or BF16, added in FP32 before a
      product is rounded to BF16, so a route's weight multiplies `w2_bias` too. Each call converts BF16 biases to FP32.

    The result equals `expert_rows`, `gather_cast_to_fp8`, a grouped product with `w1` in BF16, `silu_mul_cast_to_fp8`,
    a grouped product with `w2` in BF16, and `gather_weighted`, bit for bit. With BF16 weights the products are calls of
    `m_grouped_bf16_gemm_nt_contiguous`, and both casts round to BF16. The host does not wait for the GPU.

    There is no gradient. In grad mode the function refuses x or topk_weights if a gradient would flow through them:
    `deep_gemm.nn` has experts for training.

    >>> w1, w2 = per_block_cast_to_fp8(torch.ones(2, 32, 16)), per_block_cast_to_fp8(torch.ones(2, 16, 16))
    >>> topk_ids, topk_weights = torch.tensor([[0, 1], [1, -1], [-1, -1]]), torch.full((3, 2), 0.5)
    >>> experts(torch.ones(3, 16), topk_ids, topk_weights, w1, w2)[:, 0].tolist()
    [4096.0, 2048.0, 0.0]
    """
    absent = (w1_bias is None) | (w2_bias is None) << 1
    said = limit, activation, alpha, beta, gran_k, recipe_b, absent
    is_plain = isinstance(w1, TENSORS) or isinstance(w2, TENSORS)
    function = (MADE_BY_BF16 if is_plain else MADE) if out is None else INTO_BY_BF16 if is_plain else INTO
    result: Tensor | None = run(function, (x, topk_ids, topk_weights, w1, w2, w1_bias, w2_bias, out), said)
    return result


def _as_operator(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Any,
    w2: Any,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    out: Tensor | None,
    *said: Any,
) -> Tensor | None:
    said = *said[:-1], w1_bias, w2_bias
    of_w1, of_w2 = ((w, None) if isinstance(w, TENSORS) else pair(name, w) for name, w in (("w1", w1), ("w2", w2)))
    operator, weights = torch.ops.deep_gemm.experts, (*of_w1, *of_w2)
    if out is None:
        return operator.default(x, topk_ids, topk_weights, *weights, *said)  # type: ignore[no-any-return]
    operator.into(x, topk_ids, topk_weights, *weights, out, *said)
    return None


def _answer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Operand | Tensor,
    w2: Operand | Tensor,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    out: Tensor | None,
    limit: float | None,
    activation: str,
    alpha: float | None,
    beta: float | None,
    gran_k: int | None,
    recipe_b: Recipe | None,
    _: int,
) -> Tensor | None:
    gating = gating_of(activation, alpha, beta, limit)
    problem = experts_problem(x, topk_ids, topk_weights, w1, w2, out, gating, gran_k, recipe_b, w1_bias, w2_bias)
    compute_experts(problem)
    return problem.out if out is None else None


INTO = Function(
    _answer,
    _as_operator,
    lambda x, ids, p, w1, w2, *others: (x, ids, p, *w1, *w2, *present(*others)),
    lambda tensors: cuts_gradient(tensors[:7], tensors[7:]),
    free=[*[FREE_ROWS] * 3, *[FIXED] * 4, *[FREE_ROWS] * 3],
    outputs=1,
)
INTO_BY_BF16 = replace(
    INTO,
    tensors=present,
    wants_checks=lambda tensors: cuts_gradient(tensors[:5], tensors[5:]),
    free=[*[FREE_ROWS] * 3, FIXED, FIXED, *[FREE_ROWS] * 3],
)
MADE, MADE_BY_BF16 = replace(INTO, outputs=0), replace(INTO_BY_BF16, outputs=0)


@torch.no_grad()
def compute_experts(p: ExpertsProblem) -> None:
    """Compute `experts`, step by step."""
    if experts_few.serves(p):
        y, row_of = experts_few.run(p)
        sum_rows(y, row_of, p.topk_weights, p.out, is_dependent=True)
        return
    rows = expert_rows(p.topk_ids, p.num_experts)
    (_, of_x, _), (_, of_middle, _) = p.first, p.second
    # The kernel before each later kernel is of this call, and waits for all earlier kernels. With few rows the time of
    # a call depends on when a kernel begins, and on when it starts to load its weight.
    is_dependent = rows.ids.shape[0] < MANY_ROWS
    a = gather_and_cast(p.x, rows, of_x, is_dependent=is_dependent)
    recipes = recipes_for(p.first)
    middle = activations_of_rows(a, p.w1, rows, p.gating, recipes, of_middle, p.w1_bias, is_dependent=is_dependent)
    y = product_of_rows(middle, p.w2, rows, recipes_for(p.second), p.w2_bias, is_behind_cast=is_dependent)
    sum_rows(y, rows.row_of, p.topk_weights, p.out, is_dependent=is_dependent)


def product_of_rows(
    a: Any,
    w: Any,
    rows: ExpertRows,
    recipes: Recipes = NO_RECIPES,
    bias: Tensor | None = None,
    *,
    is_behind_cast: bool = False,
    by_ends: bool = False,
) -> Tensor:
    """Multiply each row by its expert's weight, in BF16. Rows after the last expert's last row are not written.

    `bias`: FP32 `[experts, n]`, added before rounding.
    `by_ends`: describe groups by their ends, so that rows without an expert cost no time. The bits are the same.
    """
    d = empty("a product", (a[0].shape[0], w[0].shape[1]), torch.bfloat16, a[0].device)
    is_many = d.is_cuda and (by_ends or d.shape[0] >= MANY_ROWS)
    is_many = is_many and not (num_modes() or handles_operators(a[0], w[0]))  # modes must see the operator by ids
    if w[1] is None:
        layout = rows.ends if is_many else rows.ids
        product_of_bf16_rows(a[0], w[0], d, layout, bias, by_ends=is_many, is_behind_cast=is_behind_cast)
    elif is_many:
        product_of_stacked_groups(a, w, d, rows.ends, recipes, bias)
    else:
        product_of_stacked_rows(a, w, d, rows.ids, recipes, bias, is_behind_cast=is_behind_cast)
    return d


def activations_of_rows(
    a: Any,
    w: Any,
    rows: ExpertRows,
    gating: Gating,
    recipes: Recipes = NO_RECIPES,
    of_middle: Scales | None = PER_ROW,
    bias: Tensor | None = None,
    *,
    is_dependent: bool = False,
    by_ends: bool = False,
) -> Any:
    """Compute `activate_rows` of `product_of_rows`, bit for bit; a Hopper GPU does so for many rows in one kernel.

    The one kernel serves BF16, or scales of 1x128 beside 128x128 without `recipes`, and adds no bias. An epilogue that
    activates keeps the tensor cores waiting, so `experts` in FP8 gains only 1% on an H200, 4% on an H100; in BF16 it
    gains 2 to 7% on an H200. Few rows take two kernels: their cast takes 2 us, and the one kernel's wider tiles, fewer
    in number, would slow the products by more.
    """
    values, intermediate, is_bf16 = a[0], w[0].shape[1] // 2, w[1] is None
    has_kernel = values.is_cuda and is_hopper(values.get_device())
    is_usual = is_bf16 or (recipes == NO_RECIPES and of_middle == PER_ROW and not is_packed(w))
    is_many = activates_in_product(values.shape[0], intermediate, is_bf16)
    if not (has_kernel and is_many and is_usual and gating.is_silu and bias is None):
        h = product_of_rows(a, w, rows, recipes, bias, is_behind_cast=is_dependent, by_ends=by_ends)
        return activate_rows(h, rows, gating, of_middle, is_dependent=is_dependent)
    d = empty("activations", (values.shape[0], intermediate), values.dtype, values.device)
    if is_bf16:
        run_product(ACTIVATED, values, w[0], d, rows.ends, (True, False, gating.limit))
        return d, None
    scales = empty_scales((values.shape[0],), intermediate, d, mn_major=True)
    activated_product_of_rows(a, w, (d, scales), rows.ends, limit=gating.limit, gates_apart=True)
    return d, scales


def activates_in_product(rows: int, intermediate: int, is_bf16: bool = False) -> bool:
    """Tell whether a Hopper GPU activates this many rows in the kernel that multiplies them."""
    return rows >= MANY_ROWS and (is_bf16 or intermediate % SCALE_BLOCK == 0)


def activate_rows(
    h: Tensor, rows: ExpertRows, gating: Gating, scaled: Scales | None = PER_ROW, *, is_dependent: bool = False
) -> Any:
    """Compute `cast_activated` of rows that are stacked without gaps, whatever alignment the user has set."""
    p = ActivationProblem(h, None, None, rows.ends, 1, gating)
    return cast_activated(p, mn_major=True, scaled=scaled, is_dependent=is_dependent)


def experts_workspace_bytes(
    tokens: int, topk: int, num_experts: int, hidden: int, intermediate: int, *, gran_k: int | None = SCALE_BLOCK
) -> int:
    """Count the bytes that `experts` needs for rows, FP8 operands and both products, if it holds all at one time.

    `gran_k` columns of a row share a scale (0: the whole row); None means BF16 operands, without scales. A GPU with
    many rows holds no first product, because the product activates its own result. The count leaves out FP32 copies of
    UE8M0 scales and BF16 biases, and gaps: parts of a shared buffer begin at multiples of 256 bytes.

    >>> experts_workspace_bytes(tokens=1, topk=1, num_experts=1, hidden=128, intermediate=128)
    1076
    """
    gran_k = None if gran_k is None else granularity(gran_k, 0)
    tokens, topk, num_experts = integers_from(0, tokens=tokens, topk=topk, num_experts=num_experts)
    hidden, intermediate = integers_from(0, hidden=hidden, intermediate=intermediate)
    rows = tokens * topk
    of_experts = 2 * WORD_BYTES  # counts, ends
    of_routes = 3 * WORD_BYTES  # row_of, token_of, ids
    of_products = BF16_BYTES * (2 * intermediate + hidden)
    of_operands, of_scales = BF16_BYTES * (hidden + intermediate), 0
    if gran_k is not None:  # scales of equal columns are adjacent in memory, as products load them
        aligned = get_tma_aligned_size(rows, WORD_BYTES)
        blocks = ceil_div(hidden, gran_k) + ceil_div(intermediate, gran_k) if gran_k else 2
        of_operands, of_scales = hidden + intermediate, aligned * blocks
    return num_experts * of_experts + rows * (of_routes + of_operands + of_products) + WORD_BYTES * of_scales

"""Log-probabilities of given tokens under an output head: memory never holds the logits of all tokens.

    hidden [m, k], weight [n, k]   --product in FP32-->  logits, divided by the temperature
    each 128 columns of a row      --log(sum(exp))---->  one number for each block of 128 columns
    all blocks of the vocabulary   --log(sum(exp))---->  lse;   the result is the token's logit - lse

On a GPU the product adds up blocks itself, and stores only the token's logit. FP8 heads with finer scales, the CPU
and backward compute logits in pieces. Blocks are added in the order of the vocabulary, for any pieces and any number of
ranks. Backward multiplies again: dlogits = (onehot - exp(logits - lse)) * grad / temperature, rounded to BF16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..casts.fp8 import cast_back_from_fp8, cast_checked
from ..casts.rules import LAYER_TYPES, Target
from ..core.check import checks
from ..core.check.checks import Operand, Sizes
from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.check.numbers import positive
from ..core.check.recipes import E4M3, Scales, taken
from ..core.check.tracing import handles_operators, is_dispatched, refuse_transforms
from ..gemm.api.bf16_dense import bf16_gemm_nn, bf16_gemm_nt, bf16_gemm_tn
from ..gemm.api.dense import BLOCK_SUMS_OF, fp8_gemm_nt
from ..gemm.ask.bf16 import MULTIPLE
from ..gemm.kinds.output import SUMMED_OPERANDS
from ..gemm.product import run as run_product
from ..gemm.softmax_piece import BACKWARD, BLOCK, add_blocks, run
from ..linear.check import OF_ALL_K
from ..linear.check import weight as checked_weight
from .gradients import WEIGHT_TYPES, aligned, main_grad_of, outside_of_graphs

TOKENS, COLUMNS = 4096, 4224
"""Tokens in a piece, and columns in a piece of many tokens (up to a block more): four waves of 256 x 128 on 132 SMs.
A larger vocabulary has pieces of at least 2176 columns: a BF16 product of up to 2112 may split k and change bits."""
_c10d: Any = getattr(dist, "distributed_c10d", None)  # some builds of torch lack it


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor | Operand,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    accumulates_main_grad: bool = False,
) -> Tensor:
    """Compute log_softmax(hidden @ weight.T / temperature) for one token of each row, in FP32.

    - `hidden`: `[..., k]`, BF16, FP16 or FP32; rounded to BF16 if `weight` is a tensor.
    - `weight`: the head `[n, k]`, rounded to BF16 if it has another type; or FP8 values and scales as for `linear`,
      and then `hidden` is cast like x of `linear`. n is a multiple of 8; k is a multiple of 8, or with FP8 of 16.
    - `ids`: int32 or int64 `[...]`, a token of the vocabulary for each row. A negative id is padding: its result is 0,
      without a gradient. An id past the vocabulary gives NaN.
    - `group`: ranks that share the vocabulary. Each rank holds the next rows of the weight (a multiple of 128, except
      on the last rank) and the same `hidden` and `ids`. The host waits until it knows the number of rows of every rank.

    Backward holds logits of 4096 tokens and 4224 columns in memory; forward holds none unless the weight is FP8 with
    finer scales than 128x128. If `set_batch_invariant` is on, a result's bits depend only on its row, the weight and
    its id, not on the number of ranks. `hidden` has a gradient, summed over the group; so has a weight that is a
    tensor, by BF16 products summed in FP32. With `accumulates_main_grad` the weight's gradient is added to
    `weight.main_grad`, as in `nn.Linear`.

    >>> hidden, head = torch.ones(2, 16), torch.zeros(8, 16)
    >>> selected_logprobs(hidden, head, torch.tensor([3, -1])).tolist() == [-torch.tensor(8.0).log().item(), 0.0]
    True
    """
    w = weight
    if not isinstance(w, Tensor):  # torch makes even frozen parameters require a gradient
        values, scales = checks.pair("weight", w)
        w = values.detach(), scales.detach()
    recipes_of(hidden, w, ids, temperature)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a process group of torch.distributed or None, got {type(group).__name__}")
    name = None if group is None else group.group_name
    given = hidden, *((w, None) if isinstance(w, Tensor) else w), ids, temperature, name
    if accumulates_main_grad and isinstance(w, Tensor) and checks.wants_gradient(w):
        return _beside_main_grad(*given, main_grad_of("weight", w, True))
    if not (is_dispatched(hidden) or handles_operators(w)):
        refuse_transforms()
        if not checks.wants_gradient(hidden, w):
            return forward(hidden, w, ids, temperature, name)[0]
    return torch.ops.deep_gemm.nn_selected_logprobs(*given)[0]  # type: ignore[no-any-return]


_beside_main_grad = outside_of_graphs(lambda *given: torch.ops.deep_gemm.nn_selected_logprobs(*given)[0])


def recipes_of(hidden: Tensor, w: Tensor | Operand, ids: Tensor, temperature: float) -> tuple[Scales, Scales] | None:
    """Check a call, and return the scales of hidden states and an FP8 weight; None for a BF16 weight."""
    checks.has_type("hidden", checks.tensor("hidden", hidden), LAYER_TYPES)
    checks.supported_device("hidden", hidden)
    if hidden.dim() < 1:
        raise ValueError(f"hidden: expected shape (..., k), got {tuple(hidden.shape)}")
    sizes: Sizes = {"k": hidden.shape[-1]}
    recipes, of_k = None, MULTIPLE
    if isinstance(w, Tensor):
        values = checks.shaped("weight", w, WEIGHT_TYPES, ("n", "k"), sizes)
    else:
        (values, _), (kind, *scales) = checked_weight("weight", w, ("n", "k"), sizes, also=OF_ALL_K)
        recipes, of_k = (scales[0], scales[1]), checks.K_MULTIPLE
        if kind != E4M3:
            raise NotImplementedError(f"weight: expected values of {E4M3.dtype}, got FP4")
        checks.k_major("weight", values)
    for axis, of in (("n", MULTIPLE), ("k", of_k)):
        if sizes[axis] % of:
            raise ValueError(f"weight: expected shape (n, k) with {axis} a multiple of {of}, got {tuple(values.shape)}")
    checks.has_type("ids", checks.tensor("ids", ids), (torch.int32, torch.int64))
    if ids.shape != hidden.shape[:-1]:
        raise ValueError(f"ids: expected shape {tuple(hidden.shape[:-1])}, one for each row, got {tuple(ids.shape)}")
    checks.same_device({"weight": values, "ids": ids}, hidden.device, "hidden")
    positive("temperature", temperature)
    return recipes


@torch.no_grad()
def forward(
    hidden: Tensor, w: Tensor | Operand, ids: Tensor, temperature: float, group: str | None, main_grad: object = None
) -> tuple[Tensor, Tensor]:
    """Compute the results, and the logarithm of each row's sum (`lse`), which backward needs."""
    recipes, values = recipes_of(hidden, w, ids, temperature), w if isinstance(w, Tensor) else w[0]
    m, n = ids.numel(), len(values)
    of_ranks, first = rows_of_ranks(n, group, hidden.device)
    sums = empty("sums of blocks", (m, ceil_div(n, BLOCK)), torch.float32, hidden.device)
    chosen = empty("logits of ids", (m, 1), torch.float32, hidden.device).zero_()
    a, tokens = rows_of(hidden, ids, first, recipes)
    if not sum_at_once(a, tokens, w, recipes, 1 / temperature, sums, chosen):
        most = COLUMNS * TOKENS // min(max(m, 1), TOKENS)
        for rows, columns, _, logits in pieces(a, m, w, most, recipes):
            of_piece = sums[rows, columns.start // BLOCK : ceil_div(columns.stop, BLOCK)]
            add_blocks(logits, 1 / temperature, of_piece, tokens[rows], columns.start, chosen[rows])
    if group is not None:
        numbers = [ceil_div(size, BLOCK) for size in of_ranks]
        sent = torch.cat([F.pad(sums, (0, max(numbers) - sums.shape[1])), chosen], 1)
        received = [torch.empty_like(sent) for _ in of_ranks]
        dist.all_gather(received, sent, group=_c10d._resolve_process_group(group))
        sums = torch.cat([each[:, :number] for each, number in zip(received, numbers, strict=True)], 1)
        chosen = torch.stack([each[:, -1:] for each in received]).sum(0)  # one rank has the logit, others a zero
    tokens = torch.full_like(tokens, -1)
    while sums.shape[1] > 1:
        blocks = F.pad(sums, (0, -sums.shape[1] % 4), value=-torch.inf)  # the kernel loads four at a time
        sums = empty("sums of blocks", (m, ceil_div(sums.shape[1], BLOCK)), torch.float32, hidden.device)
        add_blocks(blocks, 1.0, sums, tokens, 0, chosen)
    picks = ids.reshape(-1, 1)
    logprobs = (chosen - sums).masked_fill_(picks < 0, 0).masked_fill_(picks >= sum(of_ranks), torch.nan)
    return logprobs.view(ids.shape), sums


@torch.no_grad()
def backward(
    grad: Tensor,
    lse: Tensor,
    hidden: Tensor,
    w: Tensor | Operand,
    ids: Tensor,
    temperature: float,
    group: str | None,
    needs_hidden: bool,
    needs_w: bool,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the needed gradients; a gradient that is not needed is an empty tensor."""
    values, x = w if isinstance(w, Tensor) else w[0], hidden.reshape(-1, hidden.shape[-1])
    recipes, (_, first) = recipes_of(hidden, w, ids, temperature), rows_of_ranks(len(values), group, hidden.device)
    factors = (grad / temperature).masked_fill_(ids < 0, 0).reshape(-1, 1)
    of_hidden = x.new_zeros(x.shape if needs_hidden else 0, dtype=torch.float32)
    of_w = (values.new_empty if len(x) else values.new_zeros)(values.shape if needs_w and main_grad is None else 0)
    is_written_once = of_w.dtype == torch.bfloat16 and len(x) <= TOKENS
    a, tokens = rows_of(hidden, ids, first, recipes)
    for rows, columns, part, logits in pieces(a, len(x), w, COLUMNS, recipes):
        if rows.start == 0:
            head = part if recipes is None else cast_back_from_fp8(part[0], part[1], recipes[1].columns).bfloat16()
        of_logits = to_gradient(logits, 1 / temperature, tokens[rows], columns.start, lse[rows], factors[rows])
        if needs_hidden:
            bf16_gemm_nn(of_logits, head, of_hidden[rows], of_hidden[rows])
        if needs_w and main_grad is not None:
            bf16_gemm_tn(of_logits, laid_out(x[rows]), main_grad[columns], main_grad[columns])
        elif needs_w:
            if rows.start == 0:
                of_head = of_w[columns] if is_written_once else head.new_empty(head.shape, dtype=torch.float32)
            bf16_gemm_tn(of_logits, laid_out(x[rows]), of_head, of_head if rows.start else None)
            if rows.stop == len(x) and not is_written_once:
                of_w[columns] = of_head
    if group is not None and needs_hidden:
        dist.all_reduce(of_hidden, group=_c10d._resolve_process_group(group))
    return of_hidden.to(hidden.dtype).view(hidden.shape if needs_hidden else 0), of_w


def rows_of(hidden: Tensor, ids: Tensor, first: int, recipes: Any) -> tuple[Any, Tensor]:
    """Return hidden states as products take them, and tokens as row numbers of a weight that begins at `first`.

    Padding and other ranks' tokens match no row of the weight.
    """
    x, tokens = hidden.reshape(-1, hidden.shape[-1]), empty("rows of ids", ids.shape, torch.int32, ids.device)
    tokens = tokens.copy_(torch.where(ids < 0, -1, ids - first).clamp_(-1, 2**31 - 1)).view(-1)
    if recipes is not None:
        return cast_checked(x, Target(1, recipes[0].columns, mn_major=True)), tokens
    a = laid_out(x)
    return a if a.stride(1) == 1 else a.contiguous(), tokens


def sum_at_once(a: Any, tokens: Tensor, w: Any, recipes: Any, scale: float, sums: Tensor, chosen: Tensor) -> bool:
    """Let products add up blocks of columns, so that no logits are stored; False if no kernel does so for this head.

    A head that must be copied is multiplied in parts: each copy takes the memory of the copy before.
    """
    if recipes is not None and (E4M3, *taken(*recipes)) not in SUMMED_OPERANDS:
        return False
    if not tokens.is_cuda or 0 in (a if recipes is None else a[0]).shape:
        return False
    is_copied = recipes is None and laid_out(w[:2]).data_ptr() != w.data_ptr()  # one row has any stride
    product = BLOCK_SUMS_OF[recipes is None]
    for columns in cut(len(w if recipes is None else w[0]), 2 * COLUMNS if is_copied else 2**31):
        head = laid_out(w[columns]) if recipes is None else w
        of_part = sums[:, columns.start // BLOCK : ceil_div(columns.stop, BLOCK)]
        said = columns.start, scale, recipes
        if scale == 1:
            run_product(product, a, head, of_part, tokens, said, chosen)
        else:  # a record would serve this temperature alone
            product.compute(product.ask(a, head, of_part, **product.inputs_of(tokens, said, chosen)))
        del head  # before the next part is copied
    return True


def pieces(a: Any, m: int, w: Any, most: int, recipes: Any) -> Iterator[Any]:
    """Compute the logits of `TOKENS` of m tokens and `most` columns at a time, all tokens of some columns in turn.

    Yield each piece with its part of the weight. A piece's logits overwrite the previous piece's logits.
    """
    values = w if recipes is None else w[0]
    most_logits = min(m, TOKENS + BLOCK) * min(len(values), most + BLOCK)
    memory = empty("logits", (most_logits,), torch.float32, values.device)
    for columns in cut(len(values), most):
        if recipes is None:
            head: Any = laid_out(w[columns])
        else:
            of_x, of_w = recipes
            head = w[0][columns], w[1]
            if of_w.rows:  # otherwise all rows share one scale
                head = head[0], w[1][columns.start // of_w.rows : ceil_div(columns.stop, of_w.rows)]
        for rows in cut(m, TOKENS):
            size, width = rows.stop - rows.start, columns.stop - columns.start
            logits = memory[: size * width].view(size, width)
            if recipes is not None:
                fp8_gemm_nt((a[0][rows], a[1][rows]), head, logits, recipe_a=of_x, recipe_b=of_w)
            elif values.is_cuda:
                bf16_gemm_nt(a[rows], head, logits)
            else:  # torch's order of additions depends on the number of rows; FP64 hides the order
                logits.copy_(a[rows].double() @ head.double().mT)
            yield rows, columns, head, logits


def laid_out(x: Tensor) -> Tensor:
    """Return a matrix in BF16 with strides that products accept; copy it if necessary."""
    x = x.to(torch.bfloat16)
    (rows, columns), (down, along) = x.shape, x.stride()
    is_by_rows = along == 1 and down % MULTIPLE == 0 and down >= columns
    is_taken = is_by_rows or (down == 1 and along % MULTIPLE == 0 and along >= rows)
    return aligned(x if is_taken else x.contiguous())


def cut(size: int, most: int) -> Iterator[slice]:
    """Split a size into similar pieces of whole blocks, each over half of `most`, at most a block above `most`."""
    blocks = ceil_div(size, BLOCK)
    number = min(ceil_div(blocks, max(most // BLOCK, 1)), max(size // ((most + BLOCK) // 2), 1))
    starts = [blocks * i // number * BLOCK for i in range(number)]
    return map(slice, starts, [*starts[1:], size])


def to_gradient(logits: Tensor, scale: float, tokens: Tensor, start: int, lse: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient of logits in BF16. It overwrites the logits."""
    if logits.is_cuda:
        run(BACKWARD, logits, scale, start, tokens=tokens, lse=lse, factors=factors)
        return logits.view(torch.bfloat16)[:, : logits.shape[1]]  # rows keep their pitch in bytes
    onehot = (tokens[:, None] == torch.arange(start, start + logits.shape[1])).float()
    return (onehot - logits.mul_(scale).sub_(lse).exp_()).mul_(factors).bfloat16()


def rows_of_ranks(n: int, group: str | None, device: torch.device) -> tuple[list[int], int]:
    """Return each rank's number of rows of the weight, and the number of rows before this rank's."""
    if group is None:
        return [n], 0
    ranks = _c10d._resolve_process_group(group)
    of_ranks = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(ranks.size())]
    dist.all_gather(of_ranks, torch.full((1,), n, dtype=torch.int64, device=device), group=ranks)
    rows: list[int] = torch.cat(of_ranks).tolist()
    if any(each % BLOCK for each in rows[:-1]):
        raise ValueError(f"weight: expected a multiple of {BLOCK} rows on every rank but the last, got {rows} by rank")
    return rows, sum(rows[: ranks.rank()])

"""Mega MoE: a mixture of experts over the ranks of a group in one call, from a buffer that the caller fills.

Names and arguments are as in DeepGEMM for Hopper. docs/experts_across_gpus.md has the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..casts import cast_rows
from ..casts.by_kernels import as_rows, has_kernels
from ..casts.cast_rows import RowCast
from ..casts.fp8 import per_token_cast_to_fp8
from ..casts.rules import empty_scales
from ..core.check.checks import Operand, nothing
from ..core.check.layout import SCALE_BLOCK, Recipe
from ..core.check.numbers import integer_in_range
from ..gemm.ask.silu import INTERLEAVED, SILU_COLUMNS
from . import mega_by_peers
from .by_group import Planner, compute_mega
from .by_peers import Peers
from .collectives import all_agree, place_in
from .mega_check import (
    RECIPE,
    RECIPE_FP4,
    SWIGLU,
    MegaProblem,
    MegaSizes,
    MegaTensors,
    check_activation,
    check_weights,
    fill_problem,
    mega_limit,
    mega_problem,
    mega_sizes,
)

MISTAKES = (ValueError, TypeError, NotImplementedError)


class SM90SymmBuffer:
    """The memory of `fp8_mega_moe` and `fp8_fp4_mega_moe`: tokens, routes, and tensors for intermediate results.

    `get_symm_buffer_for_sm90_mega_moe` and `get_symm_buffer_for_mega_moe` make it.

    Before each call the caller fills the first `len(y)` rows of these tensors, `y` being the call's output:

    - `x`: e4m3 `[T, hidden]`, and `x_sf`: FP32 `[T, hidden / 128]`, as `per_token_cast_to_fp8` gives them;
    - `topk_idx`: int64 `[T, topk]`, experts numbered over all ranks, -1 for none (a new buffer holds -1 throughout);
    - `topk_weights`: FP32 `[T, topk]`.

    T is `num_max_tokens_per_rank`. `l1_acts`, `l1_acts_sf`, `l2_acts` and `l2_acts_sf` have a row for every route of
    every rank, in case all experts are here. The products may read them, or other memory, and their contents are
    undefined after a call. (With FP4 weights the first half of `l2_acts_sf` holds scales for 128 columns.)
    """

    x: Tensor
    """FP8 values of tokens."""
    x_sf: Tensor
    """Scales of tokens."""
    topk_idx: Tensor
    """Experts of tokens."""
    topk_weights: Tensor
    """Weights of tokens' routes."""
    l1_acts: Tensor
    """FP8 values that the first product may read."""
    l1_acts_sf: Tensor
    """Scales of `l1_acts`."""
    l2_acts: Tensor
    """FP8 values that the second product may read."""
    l2_acts_sf: Tensor
    """Scales of `l2_acts`, one for each 64 columns, or for each 128 columns with FP4 weights."""

    def __init__(
        self, sizes: MegaSizes, device: torch.device, group: dist.ProcessGroup | None, peers: Peers | None = None
    ) -> None:
        self.sizes, self.group = sizes, group
        by_collectives = peers is None and sizes.ranks > 1
        self.planner = Planner(sizes.here, None, device, group) if by_collectives else None
        tokens, rows = sizes.max_tokens, sizes.rows
        self.num_experts, self.num_max_tokens_per_rank, self.num_topk = sizes.num_experts, tokens, sizes.topk
        self.hidden, self.intermediate_hidden = sizes.hidden, sizes.intermediate
        weights = torch.zeros(tokens, sizes.topk, device=device, dtype=torch.float32)

        def fp8(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)

        self._tensors: MegaTensors | None = MegaTensors(
            fp8(tokens, sizes.hidden),
            weights.new_empty(tokens, sizes.hidden // SCALE_BLOCK),
            torch.full_like(weights, -1, dtype=torch.int64),
            weights,
            fp8(rows, sizes.hidden),
            empty_scales((rows,), sizes.hidden, weights, mn_major=True),
            fp8(rows, sizes.intermediate),
            empty_scales((rows,), sizes.intermediate, weights, mn_major=True, gran_k=SILU_COLUMNS),
        )
        self.calls = None if peers is None else mega_by_peers.Calls(sizes, self._tensors, peers)

    def destroy(self) -> None:
        """Free the memory. Calls refuse the buffer from then on."""
        self._tensors = self.calls = self.planner = None

    @property
    def tensors(self) -> MegaTensors:
        """Return all tensors of the buffer; raise an error if the buffer was destroyed."""
        if self._tensors is None:
            raise ValueError("buffer: expected a buffer in use, got a destroyed one")
        return self._tensors

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name

        def __getattr__(self, name: str) -> Tensor:
            """Return a tensor of the buffer by its name."""
            if name not in MegaTensors._fields:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.tensors, name)


def get_symm_buffer_for_sm90_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
) -> SM90SymmBuffer:
    """Make a buffer for `fp8_mega_moe`. All ranks of the group make this call together, with the same numbers.

    - `group`: the default group if it is None; without a default group this process is alone.
    - `num_experts`: the experts of all ranks together. Each rank has an equal share, in order of ranks.
    - `num_max_tokens_per_rank`: rounded up to a multiple of 128.
    - `hidden`, `intermediate_hidden`: multiples of 256 and of 128.
    - `use_fp8_dispatch`, `activation`: True and "swiglu", or a NotImplementedError.

    The buffer is on the current GPU, or on the CPU if there is no GPU or the group is Gloo's. In a call up to 8 Hopper
    GPUs, which must be of one node, write into each other's memory; otherwise rows go through collectives.

    >>> buffer = get_symm_buffer_for_sm90_mega_moe(None, 8, 100, 2, 256, 128)
    >>> buffer.x.shape, buffer.x_sf.shape, buffer.topk_idx.shape
    (torch.Size([128, 256]), torch.Size([128, 2]), torch.Size([128, 2]))
    """
    is_alone = group is None and not (dist.is_available() and dist.is_initialized())
    rank, ranks = (0, 1) if is_alone else place_in(group)
    asked = num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden
    sizes = mega_sizes(*asked, use_fp8_dispatch, activation, rank, ranks)
    on_cpu = not torch.cuda.is_available() or (not is_alone and dist.get_backend(group) == "gloo")
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    if not is_alone:
        given = {"num_experts": sizes.num_experts, "num_max_tokens_per_rank": sizes.max_tokens, "num_topk": sizes.topk}
        # A GPU of another kind would use collectives, and wait for the other GPUs for ever.
        way = {"peer_memory": int(mega_by_peers.why_not_by_peers(sizes, device) is None)}
        given |= {"hidden": sizes.hidden, "intermediate_hidden": sizes.intermediate, **way}
        all_agree(given, device, group)
    with torch.inference_mode(False):  # calls of any mode write into its tensors
        return SM90SymmBuffer(sizes, device, group, mega_by_peers.peers_of(sizes, device, group))


def transform_weights_for_mega_moe_sm90(l1_weights: Operand, l2_weights: Operand) -> tuple[Operand, Operand]:
    """Give both weights of this rank's experts as `fp8_mega_moe` takes them.

    - `l1_weights`: values `[experts here, 2 intermediate, hidden]`, the gate's rows first, and scales
      `[experts here, 2 intermediate / 128, hidden / 128]`; `l2_weights`: values `[experts here, hidden, intermediate]`,
      and scales likewise. `per_block_cast_to_fp8` gives them.

    In the values of `l1_weights` 8 rows of the gate and 8 of up then alternate, so that one thread of a kernel has
    both. Scales and `l2_weights` stay unchanged.

    >>> l1, l2 = per_block_cast_to_fp8(torch.ones(1, 256, 256)), per_block_cast_to_fp8(torch.ones(1, 256, 128))
    >>> l1[0][0, :128] = 2  # the gate
    >>> transform_weights_for_mega_moe_sm90(l1, l2)[0][0][0, ::4, 0].tolist()[:6]
    [2.0, 2.0, 448.0, 448.0, 2.0, 2.0]
    """
    l1, l2 = check_weights(l1_weights, l2_weights, {}, is_fp4=False)
    values = l1[0].detach()
    experts, rows, hidden = values.shape
    # [experts, gate or up, turns, 8, hidden] -> [experts, turns, gate or up, 8, hidden]
    halves = values.view(torch.uint8).reshape(experts, 2, rows // (2 * INTERLEAVED), INTERLEAVED, hidden)
    return (halves.transpose(1, 2).reshape(values.shape).view(values.dtype), l1[1]), l2


def mega_moe_pre_dispatch_sm90(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int | None = None,
    group_size: int = 128,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Cast tokens to FP8 as `per_token_cast_to_fp8` does, into the tensors of a buffer, and copy their routes too.

    - `x`: `[tokens, hidden]`, BF16, FP16 or FP32; `topk_idx`: int32 or int64 `[tokens, topk]`, -1 for no expert;
      `topk_weights`: `[tokens, topk]`, FP32, BF16 or FP16.
    - `buf_x`, `buf_x_sf`, `buf_topk_idx`, `buf_topk_weights`: `x`, `x_sf`, `topk_idx`, `topk_weights` of the buffer.
    - `num_tokens`: the number of tokens that count; None: all. Later rows of the buffer get no expert.
    - `group_size`: 128, or a NotImplementedError. `routed_scaling_factor`: a factor of all weights.

    >>> buffer = get_symm_buffer_for_sm90_mega_moe(None, 8, 128, 1, 256, 128)
    >>> filled = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    >>> mega_moe_pre_dispatch_sm90(torch.full((2, 256), 896.0), torch.tensor([[3], [5]]), torch.ones(2, 1), *filled)
    >>> buffer.x_sf[0].tolist(), buffer.topk_idx[:3].tolist()
    ([2.0, 2.0], [[3], [5], [-1]])
    """
    targets = buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights
    given = x, topk_idx, topk_weights
    x, ids, weights, factor = fill_problem(*given, targets, num_tokens, group_size, routed_scaling_factor)
    tokens = x.shape[0]
    with torch.no_grad():
        if has_kernels(x):
            cast_rows.run(RowCast(as_rows(x), buf_x[:tokens], buf_x_sf[:tokens]))
        else:
            buf_x[:tokens], buf_x_sf[:tokens] = per_token_cast_to_fp8(x)
        buf_topk_idx[:tokens] = ids
        buf_topk_idx[tokens:] = -1
        torch.mul(weights.float(), factor, out=buf_topk_weights[:tokens])


def fp8_mega_moe(
    y: Tensor,
    l1_weights: Operand,
    l2_weights: Operand,
    sym_buffer: SM90SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: Recipe = RECIPE,
    activation: str = SWIGLU,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: None = None,
) -> None:
    """Compute a gated mixture of the experts of all ranks, for the tokens that the buffer holds. All ranks call it.

        gate, up = the halves of l1_weights[e] @ x[t]                                       e = topk_idx[t, k]
        y[t] = sum over k of l2_weights[e] @ Q(silu(gate) * up * topk_weights[t, k])

    - `y`: BF16 `[tokens, hidden]`. A rank has at most `num_max_tokens_per_rank` tokens, and may have none. Later
      rows of the buffer are not read.
    - `l1_weights`, `l2_weights`: of this rank's experts, from `transform_weights_for_mega_moe_sm90`.
    - `cumulative_local_expert_recv_stats`: int32 `[experts here]`; the call adds how many tokens each expert received.
    - `recipe`, `activation`: (128, 128, 128) and "swiglu", or a NotImplementedError.
    - `activation_clamp`: gate is clamped to at most this number, up to +- this number.
    - `fast_math`: accepted; it changes nothing. `num_tokens_bound`: accepted as None.

    Calls with one buffer follow each other on one stream.

    gate and up are FP32, accumulated as in `fp8_gemm_nt`. Q casts to FP8 with one scale, largest / 448, for each row
    and 64 columns. A route's result is rounded to BF16. The sum over k is FP32, in order of k, and rounded once to
    BF16: the same bits each time, whatever the number of ranks. If rows go through collectives, a mistake of one rank
    is an error on each rank. By peer memory it is an error on that rank alone; if another rank waits for that rank in
    vain for 30 seconds, the waiting rank's next call raises a RuntimeError.

    >>> l1, l2 = per_block_cast_to_fp8(torch.ones(2, 256, 256)), per_block_cast_to_fp8(torch.ones(2, 256, 128))
    >>> buffer = get_symm_buffer_for_sm90_mega_moe(None, 2, 128, 2, 256, 128)
    >>> buffer.x[:2], buffer.x_sf[:2] = per_token_cast_to_fp8(torch.ones(2, 256))
    >>> buffer.topk_idx[:2], buffer.topk_weights[:2] = torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), 0.5)
    >>> y = torch.empty(2, 256, dtype=torch.bfloat16)
    >>> fp8_mega_moe(y, *transform_weights_for_mega_moe_sm90(l1, l2), buffer)
    >>> y[:, 0].tolist()  # 128 * 256 * 256 / 2 of each route
    [8388608.0, 4194304.0]
    """
    nothing("num_tokens_bound", num_tokens_bound)
    counts = cumulative_local_expert_recv_stats
    _compute(y, l1_weights, l2_weights, sym_buffer, counts, (recipe, activation, activation_clamp, RECIPE))


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SM90SymmBuffer:
    """Make a buffer for `fp8_fp4_mega_moe`, with the other arguments of `get_symm_buffer_for_sm90_mega_moe`.

    - `num_shared_experts`: 0; `use_fp8_dispatch`: None or True; `mma_type`: a name that begins with "fp8". Other
      values are a NotImplementedError.

    >>> get_symm_buffer_for_mega_moe(None, 8, 100, 2, 256, 128).x.dtype
    torch.float8_e4m3fn
    """
    if integer_in_range("num_shared_experts", num_shared_experts, 0):
        raise NotImplementedError(f"num_shared_experts: expected 0, got {num_shared_experts}")
    _check_mma_type(mma_type)
    sizes = num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden
    dispatch = True if use_fp8_dispatch is None else use_fp8_dispatch
    return get_symm_buffer_for_sm90_mega_moe(group, *sizes, dispatch, activation)


def _check_mma_type(mma_type: str) -> None:
    if not isinstance(mma_type, str) or not mma_type.startswith("fp8"):
        raise NotImplementedError(f"mma_type: expected a name that begins with 'fp8', got {mma_type!r}")


def transform_weights_for_mega_moe(
    l1_weights: Operand, l2_weights: Operand, activation: str = SWIGLU, mma_type: str = "fp8xfp4"
) -> tuple[Operand, Operand]:
    """Give both FP4 weights of this rank's experts as `fp8_fp4_mega_moe` takes them.

    - `l1_weights`: values `[experts here, 2 intermediate, hidden / 2]`, two to a byte, the gate's rows first, and
      scales `[experts here, 2 intermediate, hidden / 32]`; `l2_weights`: values `[experts here, hidden,
      intermediate / 2]`, and scales likewise. Both may have any form that `fp8_fp4_gemm_nt` takes.
    - `activation`, `mma_type`: as for `get_symm_buffer_for_mega_moe`.

    Values, and scales in FP32 or words, are not copied; other scales are viewed as words, four to an int32.

    >>> w = torch.zeros(1, 256, 128, dtype=torch.int8), torch.zeros(1, 256, 8, dtype=torch.uint8)
    >>> (values, scales), _ = transform_weights_for_mega_moe(w, (w[0][..., :64], w[1][..., :4]))
    >>> values.shape, scales.shape, scales.data_ptr() == w[1].data_ptr()
    (torch.Size([1, 256, 128]), torch.Size([1, 256, 2]), True)
    """
    check_activation(activation)
    _check_mma_type(mma_type)
    return check_weights(l1_weights, l2_weights, {}, is_fp4=True)


F = TypeVar("F", bound=Callable[..., None])


def accepts_later_keywords(function: F) -> F:
    """Accept keywords that later releases added, if their value requests nothing: None or False."""
    known = signature(function).parameters

    @wraps(function)
    def call(*given: Any, **said: Any) -> None:
        for name in [name for name in said if name not in known]:
            value = said.pop(name)
            nothing(name, None if value is False else value)
        function(*given, **said)

    return call  # type: ignore[return-value]


@accepts_later_keywords
def fp8_fp4_mega_moe(
    y: Tensor,
    l1_weights: Operand,
    l2_weights: Operand,
    sym_buffer: SM90SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: Recipe = RECIPE_FP4,
    activation: str = SWIGLU,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Compute `fp8_mega_moe` with FP4 weights, from `transform_weights_for_mega_moe`.

    `recipe` must be (1, 1, 32), and keywords not named here must be None or False; else it raises NotImplementedError.
    gate and up are rounded to BF16, and Q has one scale for each row and 128 columns, as in `silu_mul_cast_to_fp8`.
    The rest is as for `fp8_mega_moe`. By peer memory, scales of `l2_weights` are UE8M0, in any form.

    >>> l1 = torch.full((2, 256, 128), 0x22, dtype=torch.uint8), torch.full((2, 256, 8), 127, dtype=torch.uint8)
    >>> l2 = torch.full((2, 256, 64), 0x22, dtype=torch.uint8), torch.full((2, 256, 4), 127, dtype=torch.uint8)
    >>> buffer = get_symm_buffer_for_mega_moe(None, 2, 128, 2, 256, 128)
    >>> buffer.x[:2], buffer.x_sf[:2] = per_token_cast_to_fp8(torch.ones(2, 256))
    >>> buffer.topk_idx[:2], buffer.topk_weights[:2] = torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), 0.5)
    >>> y = torch.empty(2, 256, dtype=torch.bfloat16)
    >>> fp8_fp4_mega_moe(y, *transform_weights_for_mega_moe(l1, l2), buffer)
    >>> y[:, 0].tolist()  # 128 * 256 * 256 / 2 of each route
    [8388608.0, 4194304.0]
    """
    counts = cumulative_local_expert_recv_stats
    said = recipe, activation, activation_clamp, RECIPE_FP4
    _compute(y, l1_weights, l2_weights, sym_buffer, counts, said)


def _compute(
    y: Tensor,
    l1: Operand,
    l2: Operand,
    buffer: SM90SymmBuffer,
    counts: Tensor | None,
    said: tuple[Recipe, str, float | None, Recipe],
) -> None:
    """Run a call. `said` holds arguments of `mega_limit`; the last argument is the recipe of these weights."""
    if not isinstance(buffer, SM90SymmBuffer):
        raise TypeError(f"sym_buffer: expected SM90SymmBuffer, got {type(buffer).__name__}")
    sizes, tensors, is_fp4 = buffer.sizes, buffer.tensors, said[-1] is RECIPE_FP4
    if buffer.calls is not None:
        buffer.calls(y, l1, l2, counts, mega_limit(*said), is_fp4=is_fp4)
        return
    asked: MegaProblem | Exception
    try:
        asked = mega_problem(y, l1, l2, sizes, tensors, counts, mega_limit(*said), is_fp4=is_fp4)
    except MISTAKES as mistake:
        asked = mistake
    compute_mega(asked, sizes, buffer.planner)

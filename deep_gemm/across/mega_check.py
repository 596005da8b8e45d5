"""Checks for mega MoE, a mixture over the ranks of a group in one call: of its buffer's sizes, and of a call."""

from __future__ import annotations

from math import isfinite
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ..casts.rules import LAYER_TYPES
from ..core.check import checks
from ..core.check.checks import Operand, Sizes
from ..core.check.layout import SCALE_BLOCK, Recipe, align, recipe_numbers
from ..core.check.numbers import integer_in_range, positive
from ..core.check.recipes import PER_BLOCK
from ..core.check.tracing import has_memory
from ..gemm import packed
from ..moe.check import expert_weights, route_weights
from .check import count_of_each

TOKEN_MULTIPLE, HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE = 128, 256, 128
RECIPE = (SCALE_BLOCK, SCALE_BLOCK, SCALE_BLOCK)
RECIPE_FP4 = (1, 1, packed.COLUMNS)
FILLED_TYPES = torch.float8_e4m3fn, torch.float32, torch.int64, torch.float32
"""Types of the first members of `MegaTensors`, which the caller fills: x, x_sf, topk_idx, topk_weights."""
SWIGLU = "swiglu"


class MegaSizes(NamedTuple):
    """Sizes of a buffer, and of the mixture that it serves."""

    num_experts: int
    ranks: int
    rank: int
    max_tokens: int
    """Most tokens of each rank, a multiple of 128."""
    topk: int
    hidden: int
    intermediate: int

    @property
    def here(self) -> int:
        """Return the number of experts of each rank."""
        return self.num_experts // self.ranks

    @property
    def first(self) -> int:
        """Return the first expert of this rank."""
        return self.rank * self.here

    @property
    def rows(self) -> int:
        """Count the rows of this rank's experts if they receive every route of every rank."""
        return self.ranks * self.max_tokens * self.topk


class MegaTensors(NamedTuple):
    """The tensors that a caller fills, and the tensors that a call uses for its work."""

    x: Tensor
    """e4m3 `[max_tokens, hidden]`"""
    x_sf: Tensor
    """FP32 `[max_tokens, hidden / 128]`"""
    topk_idx: Tensor
    """int64 `[max_tokens, topk]`, numbered over all ranks, -1: no expert."""
    topk_weights: Tensor
    """FP32 `[max_tokens, topk]`"""
    l1_acts: Tensor
    """e4m3 `[rows, hidden]`: the received tokens, stacked by expert."""
    l1_acts_sf: Tensor
    """FP32 `[rows, hidden / 128]`"""
    l2_acts: Tensor
    """e4m3 `[rows, intermediate]`"""
    l2_acts_sf: Tensor
    """FP32 `[rows, intermediate / 64]`"""

    def of(self, tokens: int) -> MegaTensors:
        """Return these tensors; of those that the caller fills, only the first `tokens` rows."""
        filled = len(FILLED_TYPES)
        return MegaTensors(*(x[:tokens] for x in self[:filled]), *self[filled:])


class MegaProblem(NamedTuple):
    """The checked arguments of one call."""

    y: Tensor
    """BF16 `[tokens, hidden]`"""
    l1: Operand
    """`[experts here, 2 intermediate, hidden]`. In FP8, gate and up alternate every 8 rows, but the scales of all gate
    rows precede the scales of all up rows. In FP4 all gate rows precede all up rows."""
    l2: Operand
    """`[experts here, hidden, intermediate]`"""
    tensors: MegaTensors
    """The tensors that the caller has filled have the same number of rows as y."""
    counts: Tensor | None
    """int32 `[experts here]`. The call adds each expert's number of received tokens."""
    limit: float | None


def mega_sizes(
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool,
    activation: str,
    rank: int,
    ranks: int,
) -> MegaSizes:
    """Check the requested sizes of a new buffer."""
    count_of_each(num_experts, ranks)
    tokens = align(integer_in_range("num_max_tokens_per_rank", num_max_tokens_per_rank, 1), TOKEN_MULTIPLE)
    topk = integer_in_range("num_topk", num_topk, 1)
    hidden = _multiple("hidden", hidden, HIDDEN_MULTIPLE)
    intermediate = _multiple("intermediate_hidden", intermediate_hidden, INTERMEDIATE_MULTIPLE)
    if use_fp8_dispatch is not True:
        raise NotImplementedError(f"use_fp8_dispatch: expected True, got {use_fp8_dispatch!r}")
    check_activation(activation)
    return MegaSizes(int(num_experts), ranks, rank, tokens, topk, hidden, intermediate)


def _multiple(name: str, size: int, of: int) -> int:
    """Check that a size is a positive multiple of another."""
    size = integer_in_range(name, size, 1)
    checks.multiple(name, size, of)
    return size


def check_activation(activation: str) -> None:
    """Check the name of the activation: only "swiglu" is supported."""
    if activation != SWIGLU:
        raise NotImplementedError(f"activation: expected {SWIGLU!r}, got {activation!r}")


def check_weights(l1: Operand, l2: Operand, sizes: Sizes, *, is_fp4: bool) -> tuple[Operand, Operand]:
    """Check both weights of one rank's experts, and that their sizes match."""
    for name, w in (("l1_weights", l1), ("l2_weights", l2)):
        values, _ = checks.pair(name, w)
        if is_fp4:
            checks.has_type(name, values, packed.VALUES)
        else:
            checks.fp8(name, values)
    recipe_b, names = None if is_fp4 else PER_BLOCK, ("l1_weights", "l2_weights")
    (l1, _), (l2, _) = expert_weights(l1, l2, sizes, None, recipe_b, names, "experts here")
    _multiple("hidden", sizes["hidden"], HIDDEN_MULTIPLE)
    _multiple("intermediate", sizes["intermediate"], INTERMEDIATE_MULTIPLE)
    checks.weights("l1_weights", l1[0])
    checks.weights("l2_weights", l2[0])
    checks.same_device({"sfl1_weights": l1[1], "l2_weights": l2[0], "sfl2_weights": l2[1]}, l1[0].device, "l1_weights")
    return l1, l2


def mega_limit(recipe: Recipe, activation: str, activation_clamp: float | None, expected: Recipe) -> float | None:
    """Check the options of a call, and return the limit of gate and up."""
    if recipe is not expected and recipe_numbers("recipe", recipe) != expected:
        raise NotImplementedError(f"recipe: expected {expected}, got {recipe!r}")
    check_activation(activation)
    return None if activation_clamp is None else positive("activation_clamp", activation_clamp)


def mega_problem(
    y: Tensor,
    l1: Operand,
    l2: Operand,
    sizes: MegaSizes,
    tensors: MegaTensors,
    counts: Tensor | None,
    limit: float | None,
    *,
    is_fp4: bool,
) -> MegaProblem:
    """Check a call whose `limit` is checked already. The host reads no ids from a GPU."""
    checks.written("y", y)
    checks.has_type("y", checks.tensor("y", y), (torch.bfloat16,))
    known: Sizes = {
        "hidden": sizes.hidden,
        "experts here": sizes.here,
        "2 intermediate": 2 * sizes.intermediate,
        "intermediate": sizes.intermediate,
    }
    checks.bind("y", y, ("tokens", "hidden"), known)
    tokens = known["tokens"]
    if tokens > sizes.max_tokens:
        raise ValueError(f"y: expected at most {sizes.max_tokens} tokens, the size of the buffer, got {tokens}")
    checks.rows("y", y, "hidden")
    l1, l2 = check_weights(l1, l2, known, is_fp4=is_fp4)
    if counts is not None:
        checks.int32("cumulative_local_expert_recv_stats", counts, "experts here", sizes.here)
    device = tensors.x.device
    given = {"y": y, "l1_weights": l1[0], "sfl1_weights": l1[1], "l2_weights": l2[0], "sfl2_weights": l2[1]}
    given |= {} if counts is None else {"cumulative_local_expert_recv_stats": counts}
    checks.same_device(given, device, "the buffer")
    for name, x in given.items():
        if not has_memory(x):
            raise NotImplementedError(
                f"{name}: expected a tensor with memory, outside of torch.compile, got a {type(x).__name__}"
            )
    filled = tensors.of(tokens)
    for name, dtype in zip(filled._fields[: len(FILLED_TYPES)], FILLED_TYPES, strict=True):
        checks.has_type(f"buffer.{name}", getattr(filled, name), (dtype,))
    if checks.on_host(filled.topk_idx):
        checks.in_range("buffer.topk_idx", filled.topk_idx, -1, sizes.num_experts - 1)
    del given["y"]
    checks.no_overlap(given | {f"buffer.{name}": each for name, each in filled._asdict().items()}, y, None, "y")
    return MegaProblem(y, l1, l2, filled, counts, limit)


def fill_problem(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    filled: tuple[Tensor, Tensor, Tensor, Tensor],
    num_tokens: int | None,
    group_size: int,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check tokens and the buffer's tensors; return the tokens to write, and the factor for their weights."""
    sizes: Sizes = {}
    checks.no_gradient("x", x)
    checks.no_gradient("topk_weights", topk_weights)
    checks.shaped("x", x, LAYER_TYPES, ("tokens", "hidden"), sizes)
    checks.shaped("topk_idx", topk_idx, (torch.int32, torch.int64), ("tokens", "topk"), sizes)
    route_weights(topk_weights, sizes)
    _multiple("hidden", sizes["hidden"], HIDDEN_MULTIPLE)
    if integer_in_range("group_size", group_size, 1) != SCALE_BLOCK:
        raise NotImplementedError(f"group_size: expected {SCALE_BLOCK}, got {group_size!r}")
    sizes["hidden / 128"] = sizes["hidden"] // SCALE_BLOCK
    targets = dict(zip(("buf_x", "buf_x_sf", "buf_topk_idx", "buf_topk_weights"), filled, strict=True))
    columns = "hidden", "hidden / 128", "topk", "topk"
    for (name, target), dtype, axis in zip(targets.items(), FILLED_TYPES, columns, strict=True):
        checks.has_type(name, checks.tensor(name, target), (dtype,))
        checks.written(name, target)
        checks.bind(name, target, ("max_tokens", axis), sizes)
        if not target.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {target.stride()}")
    checks.same_device({"topk_idx": topk_idx, "topk_weights": topk_weights, **targets}, x.device, "x")
    inputs = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    goes_to = dict(zip(("topk_idx", "topk_weights"), filled[2:], strict=True))
    for name, target in targets.items():
        # An input may be the first rows of its own target: then it stays in place.
        to_it = {its: e for its, e in inputs.items() if goes_to.get(its) is target and e.dtype == target.dtype}
        apart = {its: e for its, e in inputs.items() if its not in to_it or not checks.same_memory(e, target)}
        checks.no_overlap(apart, target, None, name)
        inputs[name] = target
    most = min(sizes["tokens"], sizes["max_tokens"])
    tokens = sizes["tokens"] if num_tokens is None else num_tokens
    tokens = integer_in_range("num_tokens", tokens, 0, most)
    factor = routed_scaling_factor
    if isinstance(factor, bool) or not isinstance(factor, Real) or not isfinite(factor):
        raise ValueError(f"routed_scaling_factor: expected a finite number, got {factor!r}")
    return x[:tokens], topk_idx[:tokens], topk_weights[:tokens], float(factor)

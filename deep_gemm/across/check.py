"""Checks of the arguments of experts that several processes share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..casts.rules import LAYER_TYPES
from ..core.check import checks
from ..core.check.checks import K_MULTIPLE, Operand, Sizes
from ..core.check.layout import Recipe
from ..core.check.numbers import integer_in_range
from ..gemm.ask.bf16 import MULTIPLE
from ..gemm.kinds.output import BF16_OPERANDS, USUAL_OPERANDS, Operands
from ..linear.check import OF_ALL_K, weight
from ..moe.check import WEIGHT_TYPES, check_routes, layer_output, route_weights


class Share(NamedTuple):
    """The experts of one process: `first` to `first + here - 1`."""

    num_experts: int
    first: int
    here: int
    hidden: int
    intermediate: int

    @property
    def rank(self) -> int:
        """Return the rank of the process."""
        return self.first // self.here

    @property
    def ranks(self) -> int:
        """Count the processes."""
        return self.num_experts // self.here


def count_of_each(num_experts: int, world_size: int) -> int:
    """Return the number of experts of each process."""
    num_experts = integer_in_range("num_experts", num_experts, 1)
    if world_size < 1:
        raise ValueError("group: expected a group that this process is a member of")
    if num_experts % world_size:
        raise ValueError(
            f"num_experts: expected a multiple of the number of processes, {world_size}, got {num_experts}"
        )
    return num_experts // world_size


def share_of_experts(
    num_experts: int,
    w1: Tensor | Operand,
    w2: Tensor | Operand,
    rank: int,
    world_size: int,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
    *,
    is_bf16: bool = False,
) -> tuple[Share, tuple[Operands, Operands]]:
    """Check the weights of one process: both are pairs of values and scales, or both are ordinary tensors.

    Return its share, and the operands of both products. Tensors become FP8 with the usual scales if products are FP8.
    """
    count = count_of_each(num_experts, world_size)
    sizes: Sizes = {"experts / processes": count}
    axes1 = "experts / processes", "2 intermediate", "hidden"
    axes2 = "experts / processes", "hidden", "intermediate"
    if isinstance(w1, Tensor) != isinstance(w2, Tensor):
        raise ValueError("w2: expected a tensor if w1 is one, and a pair (values, scales) if w1 is a pair")
    if is_bf16 and not isinstance(w1, Tensor):
        raise ValueError("products: expected 'fp8', because w1 is a pair (values, scales), got 'bf16'")
    given, operands = {}, [BF16_OPERANDS if is_bf16 else USUAL_OPERANDS] * 2
    for i, (name, w, axes) in enumerate((("w1", w1, axes1), ("w2", w2, axes2))):
        if isinstance(w, Tensor):
            for its_name, said in (("gran_k", gran_k), ("recipe_b", recipe_b)):
                if said is not None:
                    raise ValueError(f"{its_name}: expected None beside weights that each call casts, got {said!r}")
            checks.shaped(name, w, WEIGHT_TYPES, axes, sizes)
            given[name] = w
        else:
            (given[name], given[f"sf{name}"]), operands[i] = weight(name, w, axes, sizes, gran_k, recipe_b, OF_ALL_K)
            checks.weights(name, given[name])
    hidden, intermediate = sizes["hidden"], sizes["intermediate"]
    if sizes["2 intermediate"] != 2 * intermediate:
        raise ValueError(
            f"w1: expected 2 * intermediate = {2 * intermediate} rows, gate and up, got {sizes['2 intermediate']}"
        )
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        checks.multiple(name, size, MULTIPLE if is_bf16 else K_MULTIPLE)
    checks.same_device(given, given["w1"].device, "w1")
    return Share(num_experts, rank * count, count, hidden, intermediate), (operands[0], operands[1])


def check_tokens(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, share: Share, device: torch.device, out: Tensor | None = None
) -> None:
    """Check the tokens of one process, their routes, and the output. The host reads no ids from a GPU."""
    sizes: Sizes = {"hidden": share.hidden}
    checks.shaped("x", x, LAYER_TYPES, ("tokens", "hidden"), sizes)
    checks.supported_device("x", x)
    checks.bind("topk_ids", checks.tensor("topk_ids", topk_ids), ("tokens", "topk"), sizes)
    route_weights(topk_weights, sizes)
    inputs = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    checks.same_device(inputs, device, "w1")
    if out is not None:
        layer_output(out, ("tokens", "hidden"), sizes, inputs, "x")
    check_routes(topk_ids, share.num_experts)

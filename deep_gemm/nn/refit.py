"""New weights for layers that serve: BF16 masters are cast into the memory that the layers already use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..casts.fp4 import quantize_mxfp4
from ..casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from ..core.check.checks import Operand, tensor
from ..core.check.recipes import TENSOR, Scales
from ..core.check.ue8m0 import FP32_MANTISSA_BITS, words_of
from ..gemm.packed import is_packed
from ..linear.check import OF_ALL_K, operands_of
from .frozen import Holder
from .gradients import WEIGHT_TYPES

EXTRA_STATE = "_extra_state"
"""The ending of state dict names for results of `get_extra_state`, which are not tensors and are never cast."""


@torch.no_grad()
def refit_(frozen: torch.nn.Module, master: torch.nn.Module | Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Cast new weights into the memory of layers that serve, so that CUDA graphs and addresses stay valid.

    - `frozen`: `nn.FrozenLinear`, `nn.FrozenExperts`, `distributed.Experts`, or a model with such layers, as made by
      `to_fp8_inference`.
    - `master`: a module, or its state dict, with the same names: `weight`, `w1` and `w2` in BF16, FP16 or FP32, on any
      device. Weights are cast to the form of the layer's: by blocks or by rows as by `to_fp8_inference` and by
      loading this state dict; or by finer blocks, to MXFP8, MXFP4 or BF16. Other parameters and buffers are copied.
    - `strict`: refuse a name that only one side has. If False, `master` may have only some names; other weights stay.

    All names, shapes and types are checked before the first byte changes. The writes are launches on the current
    stream: a graph replayed later on this stream reads only new weights. Another stream must wait before it replays.

    >>> layer = FrozenLinear(per_block_cast_to_fp8(torch.zeros(8, 16)))
    >>> refit_(layer, {"weight": torch.ones(8, 16)})
    >>> layer(torch.ones(1, 16))[0, 0].item()
    16.0
    """
    state = master.state_dict() if isinstance(master, torch.nn.Module) else master
    state = {name: x for name, x in state.items() if not name.endswith(EXTRA_STATE)}
    held = weights_of(frozen)
    missing, unknown, given = map(sorted, (held.keys() - state, state.keys() - held, held.keys() & state))
    if missing and (strict or not given):
        raise ValueError(f"master: expected the names of frozen, got none of {', '.join(missing[:3])}")
    if unknown and strict:
        raise ValueError(f"master: expected the names of frozen, got others: {', '.join(unknown[:3])}")
    for name in given:
        x, (weight, layer) = tensor(f"master[{name!r}]", state[name]), held[name]
        values, is_fp4 = weight[0], layer is not None and is_packed(weight)
        shape = (*values.shape[:-1], 2 * values.shape[-1]) if is_fp4 else values.shape
        is_whole = not x.is_meta and not hasattr(x, "full_tensor")  # a rank's part of a DTensor is not a whole weight
        if x.shape != shape or not is_whole or (layer is not None and x.dtype not in WEIGHT_TYPES):
            raise ValueError(
                f"master[{name!r}]: expected a whole tensor of shape {tuple(shape)} in BF16, FP16 or FP32, "
                f"got a {type(x).__name__} of shape {tuple(x.shape)} in {x.dtype} on {x.device}"
            )
        if layer is not None and weight[1] is not None and not is_fp4:
            recipe_of(name, weight, layer)
    for name in given:
        weight, layer = held[name]
        x = state[name].to(weight[0].device)
        made = (x, None) if layer is None or weight[1] is None else cast_as(name, weight, x, layer)
        for old, new in zip(weight, made, strict=True):
            if old is not None:
                old.copy_(new)


def weights_of(frozen: torch.nn.Module) -> dict[str, tuple[Any, Holder | None]]:
    """Return by a master's names the cast weights, each with its layer; and all other state."""
    if not isinstance(frozen, torch.nn.Module):
        raise TypeError(f"frozen: expected a torch.nn.Module, got {type(frozen).__name__}")
    held: dict[str, tuple[Any, Holder | None]] = {}
    for path, layer in frozen.named_modules(remove_duplicate=False):  # state dicts name a shared layer twice too
        if isinstance(layer, Holder):
            of_layer = [name.removesuffix("_values") for name in layer._buffers if name.endswith("_values")]
            held |= {f"{path}.{name}".lstrip("."): (layer.held(name), layer) for name in layer.WEIGHTS or of_layer}
    if not held:
        raise ValueError(f"frozen: expected a layer that holds cast weights, got none in {type(frozen).__name__}")
    cast = {x.data_ptr() for weight, _ in held.values() for x in weight if x is not None}
    others = {name: x for name, x in frozen.state_dict().items() if not name.endswith(EXTRA_STATE)}
    return held | {name: ((x, None), None) for name, x in others.items() if x.data_ptr() not in cast}


def recipe_of(name: str, weight: Operand, layer: Holder) -> Scales:
    """Return the rows and columns of an FP8 weight that share a scale."""
    *_, of_w = operands_of(name, *weight, getattr(layer, "gran_k", None), getattr(layer, "recipe_b", None), OF_ALL_K)
    if of_w == TENSOR:
        raise NotImplementedError(f"{name}: expected scales of rows or of blocks, got one for the whole weight")
    return of_w


def cast_as(name: str, weight: Operand, x: Tensor, layer: Holder) -> Operand:
    """Cast a matrix, or one for each group, to the types and layout of the weight that a layer holds."""
    values, scales = weight
    if is_packed(weight):
        made, exponents = quantize_mxfp4(x)
        made = made.view(values.dtype)
    else:
        of_w = recipe_of(name, weight, layer)
        cast, gran_k = (per_token_cast_to_fp8, of_w.columns) if of_w.rows == 1 else (per_block_cast_to_fp8, of_w.rows)
        made, powers = cast(x, scales.dtype != torch.float32, gran_k)
        if scales.dtype == torch.float32:
            return made, powers
        exponents = (powers.view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)
    return made, words_of(exponents) if scales.dtype == torch.int32 else exponents.view(scales.dtype)

"""A model that exists, in FP8 by one call: layers of torch become those of `nn`, in place.

    print(to_fp8_training(model))

A layer stays the same object and its parameters stay theirs, so hooks, optimizers, and weights that are shared are as
before. What is left, and why, is told.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from .casts.fp8 import per_block_cast_to_fp8
from .casts.rules import LAYER_TYPES
from .core.check import checks
from .core.check.layout import SCALE_BLOCK
from .nn import Experts, FrozenExperts, FrozenLinear, Linear
from .nn.gradients import SCALES, dequantized, features, weight_type
from .nn.sharding import know_shardings

__all__ = ["Conversion", "Filter", "dequantized_state_dict", "to_fp8_inference", "to_fp8_training"]

Filter = Callable[[str, Module], bool]
"""Tells of a layer's name and the layer whether it is to be converted."""

OUTPUT = "lm_head"
OUTPUTS_AND_ROUTERS = (OUTPUT, "output", "router", "gate")
"""Names of layers that are left without a filter, as models that ship in FP8 leave theirs."""
ALREADY = "in FP8 already"
WEIGHTS = {torch.nn.Linear: ("weight",), Linear: ("weight",), Experts: ("w1", "w2")}
"""Layers that are converted, and what is multiplied there."""


class Conversion(NamedTuple):
    """The result of a conversion, which `print` shows."""

    converted: list[str]
    """Names of the layers that are in FP8 now."""
    left: dict[str, str]
    """The reason why each other layer that holds a matrix is as it was."""

    def __str__(self) -> str:
        lines = [f"layers converted to FP8: {len(self.converted)}, left: {len(self.left)}"]
        for reason, number in Counter(self.left.values()).most_common():
            names = [name or "the model" for name, why in self.left.items() if why == reason]
            lines.append(f"{number:6}  {reason}: {', '.join(names[:3])}{', ...' * (number > 3)}")
        return "\n".join(lines)


class _ForInference(Conversion):
    def __str__(self) -> str:
        how = "a state dict in FP8 loads into converted layers, and into others after dequantized_state_dict"
        return f"{super().__str__()}\n        {how}"


def to_fp8_training(model: Module, filter: Filter | None = None, *, accumulates_main_grad: bool = False) -> Conversion:
    """Let a model's linear layers compute in FP8, forward and backward: each `torch.nn.Linear` becomes `nn.Linear`.

    Parameters stay what they are, so an optimizer and a state dict made before or after fit, in both directions.
    Without a `filter`, layers named lm_head, output, router or gate are left, and what the model's
    `get_output_embeddings` gives. `accumulates_main_grad` is as for `nn.Linear`. Another call converts what is new.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> print(to_fp8_training(model))
    layers converted to FP8: 1, left: 1
         1  out_features: expected a multiple of 16, which FP8 products need, got 10: 2
    """

    def check(layer: Any) -> None:
        features("in_features", layer.in_features)
        features("out_features", layer.out_features)
        weight_type(layer.weight.dtype)

    def convert(layer: Any) -> None:
        layer.__class__ = Linear
        layer.accumulates_main_grad = accumulates_main_grad

    know_shardings()
    # FSDP2 and tensor parallelism give a layer the weight that it computes with.
    kinds = (Parameter, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", Parameter))
    return _convert(model, filter, (torch.nn.Linear,), kinds, check, convert)


def to_fp8_inference(model: Module, filter: Filter | None = None) -> Conversion:
    """Cast a model's weights to FP8, a scale for each 128x128: layers become `nn.FrozenLinear`, `nn.FrozenExperts`.

    `torch.nn.Linear` is taken, and `nn.Linear` and `nn.Experts`, in BF16, FP16 or FP32; on the device "meta" too. Then
    a state dict loads by its names, whether its weights are cast (`weight` with `weight_scale_inv`) or not; and the
    model's own is such a checkpoint. A weight that another module has too is left. `filter` is as for
    `to_fp8_training`. A model of transformers gets a `quantization_config`, so its `save_pretrained` writes a
    checkpoint in FP8.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    >>> to_fp8_inference(model).converted
    ['0']
    >>> model
    Sequential(
      (0): FrozenLinear(weight=float8_e4m3fn [32, 64], weight_scale_inv=float32 [1, 1], bias=True)
    )
    """
    owners = Counter(id(p) for module in _modules(model).values() for p in module._parameters.values())
    read = {
        id(layer)
        for module in _modules(model).values()
        if isinstance(module, torch.nn.TransformerEncoderLayer)
        for layer in (module.linear1, module.linear2)
    }

    def check(layer: Any) -> None:
        if id(layer) in read:
            raise ValueError("read by torch.nn.TransformerEncoderLayer itself")
        for name in WEIGHTS[type(layer)]:
            weight = getattr(layer, name)
            if owners[id(weight)] > 1:
                raise ValueError(f"{name}: shared with another module")
            checks.has_type(name, weight, LAYER_TYPES)
            checks.depth(weight.shape[-1])
            checks.columns(weight.shape[-2], torch.bfloat16)
        if getattr(layer, "bias", None) is not None:
            checks.has_type("bias", layer.bias, LAYER_TYPES)

    def convert(layer: Any) -> None:
        w, *more = (per_block_cast_to_fp8(getattr(layer, name).detach()) for name in WEIGHTS[type(layer)])
        frozen = FrozenExperts(w, more[0], layer.limit) if more else FrozenLinear(w, layer.bias)
        layer.__class__ = type(frozen)
        given = vars(layer)
        given.update((name, value) for name, value in vars(frozen).items() if name not in given)
        given.update(_parameters=frozen._parameters, _buffers=frozen._buffers)

    config: Any = getattr(model, "config", None)
    is_saved = hasattr(config, "model_type") and hasattr(model, "save_pretrained")  # by transformers
    given: Any = getattr(config, "quantization_config", None) if is_saved else None
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", "fp8")
    if method != "fp8":
        raise ValueError(f"model: expected weights that are not quantized yet, or FP8, got quant_method {method!r}")
    done = _ForInference(*_convert(model, filter, tuple(WEIGHTS), (Parameter,), check, convert))
    if is_saved:
        config.quantization_config = _quantization_config(model)
    return done


def _quantization_config(model: Any) -> dict[str, Any]:
    """Say which modules of a model of transformers hold FP8, in the words that transformers, vLLM and SGLang read."""
    held = {name: x.to("meta") for name, x in model.state_dict().items() if x.dim() > 1}
    saved = held
    with suppress(ImportError):  # transformers 4 saves the names that a model has
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(model, held)
    # A reader may ask for a name in the model or in the checkpoint, which has each expert by itself.
    everything = {**held, **saved}
    others = {
        re.sub(r"(\.experts)\..*", r"\1", name.rpartition(".")[0])
        for name, x in everything.items()
        if x.dtype != torch.float8_e4m3fn and not name.endswith(SCALES)
    }
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix):  # the body of a model, which has an output and begins names so
        others |= {OUTPUT, *(f"{prefix}.{name}" for name in others)}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        "modules_to_not_convert": sorted(others - {""}),
    }


def dequantized_state_dict(state_dict: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Give a state dict without FP8: each weight that has a `_scale_inv` is multiplied by it, and rounded to `dtype`.

    So a model that is not converted loads a checkpoint in FP8, or what a converted one has. Torch alone would load FP8
    values without their scales, and with `strict=False` without a word.

    >>> w = torch.full((16, 16), 448.0).to(torch.float8_e4m3fn)
    >>> found = dequantized_state_dict({"weight": w, "weight_scale_inv": torch.full((1, 1), 2.0)})
    >>> list(found), found["weight"][0, 0].item()
    (['weight'], 896.0)
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected names and tensors, got {type(state_dict).__name__}")
    weight_type(dtype)
    found = {}
    for name, held in state_dict.items():
        values, scales = held, state_dict.get(name + SCALES)
        if scales is not None:
            values = dequantized(name, values, scales, dtype)
        if not name.endswith(SCALES) or name.removesuffix(SCALES) not in state_dict:
            found[name] = values
    return found


def _modules(model: Module) -> dict[str, Module]:
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return dict(model.named_modules())


def _convert(
    model: Module,
    filter: Filter | None,
    layers: tuple[type[Module], ...],
    kinds: tuple[type, ...],
    check: Callable[[Module], None],
    convert: Callable[[Module], None],
) -> Conversion:
    """Convert layers of these classes whose weights are of these kinds: all that are chosen, or none."""
    chosen, left = {}, {}
    modules, why_unwanted = _modules(model), _choice(model, filter)
    for name, module in modules.items():
        if type(module) in layers:
            why = why_unwanted(name, module) or _why_impossible(module, kinds, check)
        else:
            why = _why_another(module)
        if why is not None:
            left[name] = why
        elif type(module) in layers:
            chosen[name] = module
    done = Conversion([*chosen], left)
    if not chosen and ALREADY not in left.values():
        raise ValueError(f"model: expected a layer that can be converted, got none\n{done}")
    for module in chosen.values():
        convert(module)
    return done


def _choice(model: Module, filter: Filter | None) -> Callable[[str, Module], str | None]:
    """Make what tells why a layer is not wanted."""
    if filter is None:
        give = getattr(model, "get_output_embeddings", None)  # of models of transformers
        output = None if give is None else give()

        def usual(name: str, layer: Module) -> str | None:
            is_kept = layer is output or name.rpartition(".")[2] in OUTPUTS_AND_ROUTERS
            return "an output or a router by its name, which only a filter takes" if is_kept else None

        return usual
    if not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a layer, got {type(filter).__name__}")

    def asked(name: str, layer: Module) -> str | None:
        answer = filter(name, layer)
        if not isinstance(answer, bool):
            raise TypeError(f"filter: expected True or False of {name!r}, got {answer!r}")
        return None if answer else "left by the filter"

    return asked


def _why_impossible(layer: Module, kinds: tuple[type, ...], check: Callable[[Module], None]) -> str | None:
    if "forward" in vars(layer):
        return "its forward is another, set on the layer itself"
    for name in WEIGHTS[type(layer)]:
        weight = layer._parameters.get(name)
        if type(weight) not in kinds:
            return f"{name}: expected a Parameter, got {type(getattr(layer, name, None)).__name__}"
    try:
        check(layer)
    except ValueError as error:
        return str(error)
    return None


def _why_another(module: Module) -> str | None:
    """Say why a module of another class is left, if it holds a matrix."""
    kind = type(module)
    if kind.__module__.partition(".")[0] == __package__:
        return ALREADY
    if isinstance(module, torch.nn.Linear):
        return f"{kind.__name__}, derived from torch.nn.Linear, which may compute something else"
    own = [p for p in module._parameters.values() if p is not None]
    if hasattr(module, "num_experts") and any(not is_lazy(p) and p.dim() > 2 for p in own):
        if any("bias" in name for name in module._parameters):
            return f"{kind.__name__}, stacked experts with biases, which experts in FP8 do not have"
        return f"{kind.__name__}, stacked experts: see deep_gemm.nn.Experts, or experts_implementation of transformers"
    return f"{kind.__name__}, no linear layer" if any(is_lazy(p) or p.dim() > 1 for p in own) else None

"""Convert a model in place by one call: layers of torch become those of `nn`, in FP8, or its experts in BF16.

    print(to_fp8_training(model))

A layer stays the same object and its parameters stay theirs, so hooks, optimizers, and weights that are shared are as
before. Each conversion tells the share of parameters it has reached, and why other layers are left.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from fnmatch import translate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from .casts.rules import LAYER_TYPES
from .core.check import checks
from .core.check.layout import SCALE_BLOCK
from .nn import Experts, FrozenExperts, FrozenLinear, Linear, gradients, stacked
from .nn.experts import BF16, FP8
from .nn.gradients import ENDINGS, ROW_SCALES, SCALES, as_held, features, multiply_scales, weight_type
from .nn.linear import known_recipe
from .nn.sharding import know_shardings
from .nn.stacked import FrozenStackedExperts, is_stacked

__all__ = ["Conversion", "Filter", "dequantized_state_dict", "to_bf16_training", "to_fp8_inference", "to_fp8_training"]

Filter = Callable[[str, Module], bool]
"""Tells of a layer's name and the layer whether it is to be converted."""

OUTPUT = "lm_head"
OUTPUTS_AND_ROUTERS = (OUTPUT, "output", "router", "gate")
"""Names of layers that are left without a filter, as models that ship in FP8 leave theirs."""
ALREADY = "in {} already"
WEIGHTS = {torch.nn.Linear: ("weight",), Linear: ("weight",), Experts: ("w1", "w2")}
"""Layers that can be converted, and their weights; `_weights_of` knows stacked experts too."""
SIZES = ("out_features", "in_features"), ("hidden", "intermediate")
"""Names of rows and columns of a layer's last weight: of a linear layer, of stacked experts."""
PAGE = "docs/convert.md#what-is-converted"
BY_BLOCKS = "\nexperts have a scale for 128x128 of a weight: recipe='row' is for linear layers"
LOADS = "\na state dict in FP8 loads into this model, into others after\ndequantized_state_dict"


class Conversion(NamedTuple):
    """The result of a conversion, which `print` shows."""

    converted: list[str]
    """Names of the layers that are in FP8 now, or in BF16, as `products` says."""
    left: dict[str, str]
    """The reason why each other layer that holds a matrix is as it was."""
    held: dict[str, int]
    """How many parameters the matrices of each of these layers have: a shared one counts in the first."""
    parameters: int
    """How many the whole model has."""
    note: str = ""
    products: str = FP8
    """The numbers that converted layers multiply: "fp8" or "bf16"."""

    def in_fp8(self) -> int:
        """Count the parameters that are multiplied in FP8, since this call or another."""
        return self.multiplied_in(FP8)

    def multiplied_in(self, products: str) -> int:
        """Count the parameters that this package multiplies in "fp8" or "bf16", since this call or another."""
        now, wanted = (ALREADY.format(each.upper()) for each in (self.products, products))
        return self._count([name for name in self.held if self.left.get(name, now) == wanted])

    def _count(self, names: list[str]) -> int:
        return sum(self.held[name] for name in names)

    def __str__(self) -> str:
        ends = dict.fromkeys(name.rpartition(".")[2] or "the model" for name in self.converted)
        into = self.products.upper()
        rows = [(self.converted, f"now in {into}: {', '.join(ends)}")] if ends else []
        reasons = {why: [name for name in self.left if self.left[name] == why] for why in self.left.values()}
        for why, names in sorted(reasons.items(), key=lambda reason: -self._count(reason[1])):
            shown = [name or "the model" for name in names[:3]]
            rows.append((names, f"{why}: {', '.join(shown)}{', ...' * (len(names) > 3)}"))
        every = max(self.parameters, 1)
        lines = [f"in {into}: {self.multiplied_in(self.products) / every:.1%} of {self.parameters:,} parameters"]
        lines.append(f"layers converted to {into}: {len(self.converted)}, left: {len(self.left)}")
        for names, words in rows:
            first = f"{self._count(names) / every:7.1%} {len(names):6}  "
            lines += textwrap.wrap(words, 80, initial_indent=first, subsequent_indent=" " * 16, break_on_hyphens=False)
        return "\n".join([*lines, f"why layers are left, and what to do: {PAGE}"]) + self.note


def to_fp8_training(
    model: Module, filter: Filter | None = None, *, accumulates_main_grad: bool = False, recipe: str = "block"
) -> Conversion:
    """Let a model's layers compute in FP8, forward and backward: each `torch.nn.Linear` becomes `nn.Linear`.

    Mixtures of transformers get the experts implementation that computes as `nn.Experts` does. Parameters stay what
    they are, so an optimizer and a state dict made before or after fit, in both directions. Without a `filter`, layers
    named lm_head, output, router or gate are left, and the model's `get_output_embeddings()`.
    `accumulates_main_grad` and `recipe` are as for `nn.Linear`; experts have scales by blocks with either recipe, and
    the result says so. Another call converts new layers.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> print(to_fp8_training(model))
    in FP8: 85.0% of 2,410 parameters
    layers converted to FP8: 1, left: 1
      85.0%      1  now in FP8: 0
      13.3%      1  out_features: expected a multiple of 16, which FP8 products
                    need, got 10: 2
    why layers are left, and what to do: docs/convert.md#what-is-converted
    """
    known_recipe(recipe)
    done = _to_training(model, filter, FP8, accumulates_main_grad=accumulates_main_grad, recipe=recipe)
    has_experts = any(is_stacked(model.get_submodule(name)) for name in done.converted)
    return done._replace(note=BY_BLOCKS) if recipe == "row" and has_experts else done


def to_bf16_training(model: Module, filter: Filter | None = None) -> Conversion:
    """Let a model's mixtures of transformers compute as `nn.Experts(products="bf16")` does, forward and backward.

    They get the experts implementation that does so; the model's `set_experts_implementation` is the way back. Weights
    are not changed, and linear layers stay torch's. Mixtures are left if their gate is not `silu(gate) * up`. `filter`
    is as for `to_fp8_training`. A mixture that was converted to FP8 becomes BF16 by this call, and the other way round.
    """
    return _to_training(model, filter, BF16)


def _to_training(model: Module, filter: Filter | None, products: str, **said: Any) -> Conversion:
    """Let layers compute in such products, forward and backward: mixtures, and linear layers in FP8, as is `said`."""

    def takes(layer: Module) -> bool:
        is_linear = type(layer) is torch.nn.Linear and products == FP8
        return is_linear or (is_stacked(layer) and stacked.products_of(layer) != products)

    def check(layer: Any) -> None:
        weight = getattr(layer, _weights_of(layer)[-1])
        for name, size in zip(SIZES[is_stacked(layer)], weight.shape[-2:], strict=True):
            features(name, size, stacked.MULTIPLES[products])
        weight_type(weight.dtype)

    def convert(layer: Any) -> None:
        if is_stacked(layer):
            stacked.register_experts()
            layer.register_load_state_dict_pre_hook(multiply_scales)
            layer.config._experts_implementation = stacked.NAME_FP8 if products == FP8 else stacked.NAME
        else:
            layer.__class__ = Linear
            vars(layer).update(said)

    know_shardings()
    # FSDP2 and tensor parallelism give a layer the weight that it computes with.
    kinds = (Parameter, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", Parameter))
    return _convert(model, filter, takes, kinds, check, convert, products)


def to_fp8_inference(model: Module, filter: Filter | None = None) -> Conversion:
    """Cast a model's weights to FP8, a scale for each 128x128: layers become `nn.FrozenLinear`, `nn.FrozenExperts`.

    `torch.nn.Linear` is taken, `nn.Linear`, `nn.Experts`, and mixtures of transformers whose gate is `silu(gate) * up`,
    in BF16, FP16 or FP32; on the device "meta" too. Values stay parameters, without a gradient. Then a state dict loads
    by its names, whether its weights are cast (`weight` with `weight_scale_inv` or `weight_scale`) or not; and the
    model's own is such a checkpoint. A weight that another module has too is left. `filter` is as for
    `to_fp8_training`. A model of transformers gets a `quantization_config`, so its `save_pretrained` writes a
    checkpoint in FP8. If it was loaded with compressed-tensors, its FP8 is kept, and other weights are cast by row.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    >>> to_fp8_inference(model).converted
    ['0']
    >>> model
    Sequential(
      (0): FrozenLinear(weight=float8_e4m3fn [32, 64], weight_scale_inv=float32 [1, 1], bias=True)
    )
    """
    modules = _modules(model)
    owners = Counter(id(p) for module in modules.values() for p in module._parameters.values())
    kept = _read_by_torch(modules)

    def check(layer: Any) -> None:
        if why := kept.get(id(layer)):
            raise ValueError(why)
        if is_stacked(layer) and not is_by_row:
            # A checkpoint has gate and up apart, so their scales must come apart too.
            checks.multiple("intermediate", layer.down_proj.shape[2], SCALE_BLOCK)
        for name in _weights_of(layer):
            weight = getattr(layer, name)
            if owners[id(weight)] > 1:
                raise ValueError(f"{name}: shared with another module")
            if method == "modelopt" and not weight.is_meta:
                raise ValueError(f"{name}: expected the device meta, as transformers loads no scales of ModelOpt")
            if compressed := _compressed(layer):
                values, scales = (x.to("meta") for x in compressed)
                gradients.dequantized(name, values, scales, torch.bfloat16)  # checks shapes
            else:
                checks.has_type(name, weight, LAYER_TYPES)
            checks.depth(weight.shape[-1])
            checks.columns(weight.shape[-2], torch.bfloat16)
        if getattr(layer, "bias", None) is not None:
            checks.has_type("bias", layer.bias, LAYER_TYPES)

    def convert(layer: Any) -> None:
        cast, given = gradients.CASTS[ENDINGS[is_by_row]], _compressed(layer)
        w, *more = (as_held(n, *given) if given else cast(getattr(layer, n).detach()) for n in _weights_of(layer))
        kind = FrozenStackedExperts if is_stacked(layer) else FrozenExperts
        frozen = kind(w, more[0], stacked.limit_of(layer)) if more else FrozenLinear(w, layer.bias)
        layer.__class__ = type(frozen)
        here = vars(layer)
        for name in ("forward", "quantization_scheme", "quantization_status"):  # of compressed-tensors
            here.pop(name, None)
        here.update((name, value) for name, value in vars(frozen).items() if name not in here)
        here.update(_parameters=frozen._parameters, _buffers=frozen._buffers)

    config: Any = getattr(model, "config", None)
    is_saved = hasattr(config, "model_type") and hasattr(model, "save_pretrained")  # by transformers
    given: Any = getattr(config, "quantization_config", None) if is_saved else None
    given = {"quant_method": "fp8"} if given is None else given if isinstance(given, dict) else given.to_dict()
    said = vars(model).get("_said_quantization_config") == given  # by an earlier call: what it left is no wish
    groups = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
    method = given.get("quant_method", "fp8" if said else None)
    is_by_row = method != "fp8" and all(each.get("strategy") != "block" for each in groups)
    if method not in ("fp8", "compressed-tensors", "modelopt"):
        raise ValueError(f"model: expected weights that are not quantized yet, or FP8, got quant_method {method!r}")
    asked = vars(model).get("_ignored", ()) if said else given.get("ignore") or given.get("exclude_modules") or ()
    for each in asked if filter is None else ():
        pattern = each[3:] if each.startswith("re:") else translate(each)
        kept |= {id(x): "ignored by quantization_config" for name, x in modules.items() if re.match(pattern, name)}
    done = _convert(model, filter, lambda layer: bool(_weights_of(layer)), (Parameter,), check, convert)
    model.register_load_state_dict_pre_hook(gradients.drop_scales_of_activations)  # type: ignore[no-untyped-call]
    if is_saved:
        vars(model)["_ignored"] = asked
        _know_scales(model)
        _say_scales(model)
        model.register_load_state_dict_post_hook(_say_scales)  # type: ignore[no-untyped-call]
    return done._replace(note=LOADS)


def _read_by_torch(modules: Mapping[str, Module]) -> dict[int, str]:
    """Give the layers whose weights a module of torch reads by itself, by identity, and the reason to leave each."""
    encoders = [module for module in modules.values() if isinstance(module, torch.nn.TransformerEncoderLayer)]
    layers = [layer for module in encoders for layer in (module.linear1, module.linear2)]
    return {id(layer): "read by torch.nn.TransformerEncoderLayer itself" for layer in layers}


def _know_scales(model: Any) -> None:
    """Let transformers save scales of stacked experts as it does their values: each expert's under its own name."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if hasattr(quantizer, "compressor"):  # of compressed-tensors, which would save stacked experts as it loaded them
        quantizer.compressor.remove_decompression_hook(model)
        quantizer.remove_quantization_config(model)
        model._weight_conversions = None
    layers = [name for name, layer in _modules(model).items() if isinstance(layer, FrozenStackedExperts)]
    if not layers:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    known = getattr(model, "_weight_conversions", None)
    if known is None:  # as transformers asks for them when it saves a model that it did not load
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        known = [each for each in mapping if not isinstance(each, PrefixChange)]
    names = [f"{layer}.{weight}" for layer in layers for weight in stacked.WEIGHTS]
    ending = gradients.ending_of(*model.get_submodule(layers[0]).held(stacked.WEIGHTS[0]))
    scales = []
    for each in known:
        patterns = each._original_source_patterns, each._original_target_patterns
        is_theirs = any(re.search(f"{target}$", name) for target in patterns[1] for name in names)
        if isinstance(each, WeightConverter) and is_theirs:
            ends = ([pattern + ending for pattern in part] for part in patterns)
            scales.append(WeightConverter(*ends, operations=[*each.operations]))
            scales[-1].scope_prefix, scales[-1].base_model_prefix = each.scope_prefix, each.base_model_prefix
    model._weight_conversions = [*known, *scales]


def _say_scales(model: Any, *_: Any) -> None:
    """Say which modules of a model of transformers hold FP8, in the words that transformers, vLLM and SGLang read."""
    state = model.state_dict()
    in_fp8 = [name for name, x in state.items() if x.dtype == torch.float8_e4m3fn]
    forms = {end * (state[name + end].dim() > 1) for name in in_fp8 for end in ENDINGS if name + end in state}
    held = {name: x.to("meta") for name, x in state.items() if x.dim() > 1}
    saved = held
    with suppress(ImportError):  # transformers 4 saves the names that a model has
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(model, held)
    # A reader may ask for a name in the model or in the checkpoint, which has each expert by itself.
    everything = {**held, **saved}
    others = {
        re.sub(r"(\.experts)\..*", r"\1", name.rpartition(".")[0])
        for name, x in everything.items()
        if x.dtype != torch.float8_e4m3fn and not name.endswith(ENDINGS)
    }
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix):  # the body of a model, which has an output and begins names so
        others |= {OUTPUT, *(f"{prefix}.{name}" for name in others)}
    left = sorted(others - {""})
    said: dict[str, Any] = {"modules_to_not_convert": left}  # without a quant_method nothing reads it
    blocks = {gradients.scaled(name, state) for name in in_fp8 if name + SCALES in state}
    if forms == {SCALES} and len(blocks) == 1:
        [block] = map(list, blocks)
        said |= {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    elif forms == {ROW_SCALES}:
        form = {"num_bits": 8, "type": "float", "symmetric": True}
        of_weights, of_rows = form | {"strategy": "channel"}, form | {"strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": of_weights, "input_activations": of_rows}
        said = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
        left += [f"re:{re.escape(name)}\\..*" for name in left if name.endswith(".experts")]
        said |= {"config_groups": {"group_0": group}, "ignore": left}
    model.config.quantization_config = model._said_quantization_config = said


def dequantized_state_dict(state_dict: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Give a state dict without FP8: a weight with `_scale_inv` or `_scale` is multiplied by it, rounded to `dtype`.

    So an unconverted model can load a checkpoint in FP8, or the state dict of a converted model. Torch alone would load
    FP8 values without their scales, and with `strict=False` without a word.

    >>> w = torch.full((16, 16), 448.0).to(torch.float8_e4m3fn)
    >>> found = dequantized_state_dict({"weight": w, "weight_scale_inv": torch.full((1, 1), 2.0)})
    >>> list(found), found["weight"][0, 0].item()
    (['weight'], 896.0)
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected names and tensors, got {type(state_dict).__name__}")
    weight_type(dtype)
    found = dict(state_dict)
    for name, held in state_dict.items():
        of_scales = name + ENDINGS[name + ROW_SCALES in state_dict and held.dtype not in gradients.WEIGHT_TYPES]
        if of_scales in state_dict:
            found[name] = gradients.dequantized(name, held, found.pop(of_scales), dtype)
        elif getattr(held, "dtype", None) == torch.float8_e4m3fn:
            raise ValueError(f"{name}: expected scales beside values of {held.dtype}, got none: give all files at once")
    unread = gradients.OF_ACTIVATIONS if len(found) < len(state_dict) else ()
    return {name: x for name, x in found.items() if name.rpartition(".")[2] not in unread}


def _modules(model: Module) -> dict[str, Module]:
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return dict(model.named_modules())


def _weights_of(layer: Module) -> tuple[str, ...]:
    """Name the weights of a layer that can be converted; none of others."""
    return stacked.WEIGHTS if is_stacked(layer) else WEIGHTS.get(type(layer), ())


def _compressed(layer: Module) -> tuple[Tensor, Tensor] | None:
    """Give the FP8 weight of a linear layer as transformers and compressed-tensors load it, with scales as they are."""
    own = {name: p.detach() for name, p in layer._parameters.items() if p is not None}
    wrapped = getattr(layer.forward, "__wrapped__", None) if "forward" in vars(layer) else torch.nn.Linear.forward
    is_theirs = type(layer) is torch.nn.Linear and wrapped is torch.nn.Linear.forward
    if not is_theirs or own.keys() - {"bias", "input_scale"} != {"weight", "weight_scale"}:
        return None
    return (own["weight"], own["weight_scale"]) if own["weight"].dtype == torch.float8_e4m3fn else None


def _convert(
    model: Module,
    filter: Filter | None,
    takes: Callable[[Module], bool],
    kinds: tuple[type, ...],
    check: Callable[[Module], None],
    convert: Callable[[Module], None],
    products: str = FP8,
) -> Conversion:
    """Convert layers that are taken and whose weights are of these kinds: all that are chosen, or none."""
    chosen: dict[str, Module] = {}
    left, held = dict[str, str](), dict[str, int]()
    counted: set[int] = set()
    modules, why_unwanted = _modules(model), _choice(model, filter)
    for name, module in modules.items():
        taken = takes(module)
        why = (why_unwanted(name, module) or _why_impossible(module, kinds, check)) if taken else _why_another(module)
        if why is not None:
            left[name] = why
        elif taken:
            chosen[name] = module
        if taken or why is not None:
            given = [p for p in module._parameters.values() if p is not None]
            own = {id(p): p.numel() for p in given if not is_lazy(p) and p.dim() > 1}
            held[name] = sum(number for key, number in own.items() if key not in counted)
            counted |= own.keys()
    parameters = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    done = Conversion([*chosen], left, held, parameters, products=products)
    for name, why in left.items():
        if hasattr(modules[name], "quantization_scheme"):
            raise ValueError(f"model: expected all layers of compressed-tensors to be converted, got {name}: {why}")
    if not chosen and ALREADY.format(products.upper()) not in left.values():
        raise ValueError(f"model: expected a layer that can be converted, got none\n{done}")
    shared = {id(layer.config) for layer in chosen.values() if is_stacked(layer)}
    for name, module in modules.items():
        if name not in chosen and is_stacked(module) and id(module.config) in shared:
            module.config = copy(module.config)  # converted ones change theirs
    for module in chosen.values():
        convert(module)
    return done


def _choice(model: Module, filter: Filter | None) -> Callable[[str, Module], str | None]:
    """Make what tells why a layer is not wanted."""
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a layer, got {type(filter).__name__}")
    give = getattr(model, "get_output_embeddings", None)  # of models of transformers
    output = give() if filter is None and give is not None else None

    def why_unwanted(name: str, layer: Module) -> str | None:
        if filter is None:
            is_kept = not _compressed(layer) and (layer is output or name.rpartition(".")[2] in OUTPUTS_AND_ROUTERS)
            return "an output or a router by its name, which only a filter takes" if is_kept else None
        answer = filter(name, layer)
        if not isinstance(answer, bool):
            raise TypeError(f"filter: expected True or False of {name!r}, got {answer!r}")
        return None if answer else "left by the filter"

    return why_unwanted


def _why_impossible(layer: Module, kinds: tuple[type, ...], check: Callable[[Module], None]) -> str | None:
    if "forward" in vars(layer) and not _compressed(layer):
        return "its forward is another, set on the layer itself"
    if is_stacked(layer) and (refusal := stacked.form_refusal(layer)):
        return refusal
    for name in _weights_of(layer):
        weight = layer._parameters.get(name)
        if type(weight) not in kinds:
            return f"{name}: expected a Parameter, got {type(getattr(layer, name, None)).__name__}"
    try:
        check(layer)
    except ValueError as error:
        return str(error).replace("sfweight", "weight_scale")
    return None


def _why_another(module: Module) -> str | None:
    """Say why a module of another class is left, if it holds a matrix."""
    kind = type(module)
    ours = kind.__module__.partition(".")[0] == __package__
    products = getattr(module, "products", FP8) if ours else stacked.products_of(module)
    if products is not None:
        return ALREADY.format(products.upper())
    if kind is torch.nn.Linear:
        return "a linear layer, which stays torch's"
    if isinstance(module, torch.nn.Linear):
        return f"{kind.__name__}, derived from torch.nn.Linear, which may compute something else"
    own = [p for p in module._parameters.values() if p is not None]
    if hasattr(module, "num_experts") and any(not is_lazy(p) and p.dim() > 2 for p in own):
        return f"{kind.__name__}, stacked experts: see deep_gemm.nn.Experts"
    return f"{kind.__name__}, no linear layer" if any(is_lazy(p) or p.dim() > 1 for p in own) else None

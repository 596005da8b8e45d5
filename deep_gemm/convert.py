"""Convert a model in place by one call: its layers become layers of `nn` in FP8, or its experts compute in BF16.

    print(to_fp8_training(model))

A layer and its parameters stay the same objects, so hooks, optimizers and shared weights still work. The result of a
conversion tells the fraction of parameters that is converted, and why other layers are left.
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
from .nn.experts import BF16, FP8, MULTIPLES
from .nn.gradients import ENDINGS, ROW_SCALES, SCALES, as_held, features, multiply_scales, weight_type
from .nn.linear import known_recipe
from .nn.sharding import know_shardings
from .nn.stacked import FrozenStackedExperts, is_stacked

__all__ = ["Conversion", "Filter", "dequantized_state_dict", "to_bf16_training", "to_fp8_inference", "to_fp8_training"]

Filter = Callable[[str, Module], bool]
"""A function of a layer's name and the layer, which tells whether to convert the layer."""

OUTPUT = "lm_head"
OUTPUTS_AND_ROUTERS = (OUTPUT, "output", "router", "gate")
"""Names of layers that are not converted if there is no filter. Models published in FP8 do not convert them either."""
ALREADY = "in {} already"
WEIGHTS = {torch.nn.Linear: ("weight",), Linear: ("weight",), Experts: ("w1", "w2")}
"""Classes of layers that can be converted, and their weights. `_weights_of` adds stacked experts."""
SIZES = ("out_features", "in_features"), ("hidden", "intermediate")
"""Names of the rows and columns of the last weight: in a linear layer, and in stacked experts."""
PAGE = "docs/convert.md#what-is-converted"
BY_BLOCKS = "\nexperts have a scale for 128x128 of a weight: recipe='row' is for linear layers"
LOADS = "\na state dict in FP8 loads into this model, into others after\ndequantized_state_dict"


class Conversion(NamedTuple):
    """The result of a conversion. `print` shows it as a table."""

    converted: list[str]
    """Names of the layers that are now in FP8 or BF16, as `products` states."""
    left: dict[str, str]
    """For each other layer that has a matrix, the reason why it is not converted."""
    held: dict[str, int]
    """Number of parameters in the matrices of each layer above. A shared matrix counts only in the first layer."""
    parameters: int
    """Number of parameters of the whole model."""
    note: str = ""
    products: str = FP8
    """The format in which converted layers multiply: "fp8" or "bf16"."""

    def in_fp8(self) -> int:
        """Count the parameters of layers that this or an earlier call converted to FP8."""
        return self.multiplied_in(FP8)

    def multiplied_in(self, products: str) -> int:
        """Count the parameters of layers that this or an earlier call converted to "fp8" or "bf16"."""
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
    """Convert a model for training in FP8, forward and backward: each `torch.nn.Linear` becomes an `nn.Linear`.

    Mixtures of transformers get an experts implementation that computes like `nn.Experts`. Parameters do not change, so
    optimizers and state dicts of the unconverted model fit the converted model, and the other way round. Without a
    `filter`, layers named lm_head, output, router or gate are not converted, nor is the model's
    `get_output_embeddings()`. `accumulates_main_grad` and `recipe` are as in `nn.Linear`. Experts have scales by blocks
    with either recipe, and the result tells this. A further call converts only new layers.

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
    """Let a model's mixtures of transformers compute like `nn.Experts(products="bf16")`, forward and backward.

    Mixtures get another experts implementation; `set_experts_implementation` of the model undoes this. Weights do not
    change; linear layers stay torch's. Mixtures with activations other than `silu(gate) * up` stay too. `filter` is as
    in `to_fp8_training`. This call converts a mixture from FP8 to BF16, and `to_fp8_training` converts it back.
    """
    return _to_training(model, filter, BF16)


def _to_training(model: Module, filter: Filter | None, products: str, **said: Any) -> Conversion:
    """Convert mixtures to these products, for FP8 also linear layers. `said` has options of linear layers."""

    def takes(layer: Module) -> bool:
        is_linear = type(layer) is torch.nn.Linear and products == FP8
        return is_linear or (is_stacked(layer) and stacked.products_of(layer) != products)

    def check(layer: Any) -> None:
        weight = getattr(layer, _weights_of(layer)[-1])
        for name, size in zip(SIZES[is_stacked(layer)], weight.shape[-2:], strict=True):
            features(name, size, MULTIPLES[products])
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
    # A DTensor is accepted: FSDP2 and tensor parallelism pass a layer the weight with which it computes.
    kinds = (Parameter, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", Parameter))
    return _convert(model, filter, takes, kinds, check, convert, products)


def to_fp8_inference(model: Module, filter: Filter | None = None) -> Conversion:
    """Cast weights to FP8, with a scale for each 128x128 block. Layers become `nn.FrozenLinear` or `nn.FrozenExperts`.

    This converts `torch.nn.Linear`, `nn.Linear`, `nn.Experts`, and mixtures of transformers with `silu(gate) * up`, in
    BF16, FP16 or FP32, also on the device "meta". Values stay parameters, but have no gradient. The model then loads
    state dicts with cast weights (`weight` with `weight_scale_inv` or `weight_scale`) and with plain weights. Its own
    state dict has cast weights. A weight that another module shares stays. `filter` is as in `to_fp8_training`. A
    model of transformers gets a `quantization_config`, so `save_pretrained` writes a checkpoint in FP8. If the model
    was loaded with compressed-tensors, its FP8 weights do not change, and other weights are cast by row.

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
            # A checkpoint stores gate and up separately, so no scale may span both.
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
        for name in ("forward", "quantization_scheme", "quantization_status"):  # set by compressed-tensors
            here.pop(name, None)
        here.update((name, value) for name, value in vars(frozen).items() if name not in here)
        here.update(_parameters=frozen._parameters, _buffers=frozen._buffers)

    config: Any = getattr(model, "config", None)
    is_saved = hasattr(config, "model_type") and hasattr(model, "save_pretrained")  # by transformers
    given: Any = getattr(config, "quantization_config", None) if is_saved else None
    given = {"quant_method": "fp8"} if given is None else given if isinstance(given, dict) else given.to_dict()
    said = vars(model).get("_said_quantization_config") == given  # set by an earlier call, not by the user
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
    """Return, by id, the layers whose weights a module of torch reads directly, and the reason to leave each layer."""
    encoders = [module for module in modules.values() if isinstance(module, torch.nn.TransformerEncoderLayer)]
    layers = [layer for module in encoders for layer in (module.linear1, module.linear2)]
    return {id(layer): "read by torch.nn.TransformerEncoderLayer itself" for layer in layers}


def _know_scales(model: Any) -> None:
    """Let transformers save scales of stacked experts like their values: each expert's scales under its own name."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if hasattr(quantizer, "compressor"):  # compressed-tensors would save stacked experts as it loaded them
        quantizer.compressor.remove_decompression_hook(model)
        quantizer.remove_quantization_config(model)
        model._weight_conversions = None
    layers = [name for name, layer in _modules(model).items() if isinstance(layer, FrozenStackedExperts)]
    if not layers:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    known = getattr(model, "_weight_conversions", None)
    if known is None:  # as transformers does when it saves a model that it did not load
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
    """Set `quantization_config`, by which transformers, vLLM and SGLang know which modules of a model are in FP8."""
    state = model.state_dict()
    in_fp8 = [name for name, x in state.items() if x.dtype == torch.float8_e4m3fn]
    forms = {end * (state[name + end].dim() > 1) for name in in_fp8 for end in ENDINGS if name + end in state}
    held = {name: x.to("meta") for name, x in state.items() if x.dim() > 1}
    saved = held
    with suppress(ImportError):  # transformers 4 saves the names that a model has
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(model, held)
    # A reader may use names of the model or of the checkpoint, in which each expert has names of its own.
    everything = {**held, **saved}
    others = {
        re.sub(r"(\.experts)\..*", r"\1", name.rpartition(".")[0])
        for name, x in everything.items()
        if x.dtype != torch.float8_e4m3fn and not name.endswith(ENDINGS)
    }
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix):  # the body of a model: the whole model's names have this prefix
        others |= {OUTPUT, *(f"{prefix}.{name}" for name in others)}
    left = sorted(others - {""})
    said: dict[str, Any] = {"modules_to_not_convert": left}  # without a quant_method, no library reads it
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
    """Return a state dict without FP8: a weight is multiplied by its `_scale_inv` or `_scale`, and rounded to `dtype`.

    An unconverted model can then load a checkpoint in FP8, or the state dict of a converted model. Torch itself would
    load FP8 values without their scales, and with `strict=False` it would not warn.

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
            raise ValueError(f"{name}: expected scales beside values of {held.dtype}, got none: pass all files at once")
    unread = gradients.OF_ACTIVATIONS if len(found) < len(state_dict) else ()
    return {name: x for name, x in found.items() if name.rpartition(".")[2] not in unread}


def _modules(model: Module) -> dict[str, Module]:
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return dict(model.named_modules())


def _weights_of(layer: Module) -> tuple[str, ...]:
    """Return the names of a layer's weights; none if the layer cannot be converted."""
    return stacked.WEIGHTS if is_stacked(layer) else WEIGHTS.get(type(layer), ())


def _compressed(layer: Module) -> tuple[Tensor, Tensor] | None:
    """Return the FP8 weight and scales of a linear layer that transformers loaded by compressed-tensors, else None."""
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
    """Convert the layers that `takes` accepts and whose weights have a type in `kinds`: all chosen layers, or none."""
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
            module.config = copy(module.config)  # the converted layers change the shared config
    for module in chosen.values():
        convert(module)
    return done


def _choice(model: Module, filter: Filter | None) -> Callable[[str, Module], str | None]:
    """Make a function that tells why a layer is not wanted."""
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a layer, got {type(filter).__name__}")
    give = getattr(model, "get_output_embeddings", None)  # a method of transformers' models
    output = give() if filter is None and give is not None else None

    def why_unwanted(name: str, layer: Module) -> str | None:
        if filter is None:
            is_kept = not _compressed(layer) and (layer is output or name.rpartition(".")[2] in OUTPUTS_AND_ROUTERS)
            return "an output or a router by its name: only a filter converts it" if is_kept else None
        answer = filter(name, layer)
        if not isinstance(answer, bool):
            raise TypeError(f"filter: expected True or False for {name!r}, got {answer!r}")
        return None if answer else "left by the filter"

    return why_unwanted


def _why_impossible(layer: Module, kinds: tuple[type, ...], check: Callable[[Module], None]) -> str | None:
    if "forward" in vars(layer) and not _compressed(layer):
        return "its forward is replaced on the layer itself"
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
    """Return why a module of another class is left; None if it has no matrix."""
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

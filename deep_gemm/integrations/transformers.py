"""FP8 models of transformers (5.17 and newer) on `linear` and `experts`. A program calls only `use_deep_gemm()`.

While it is in use, two parts of transformers' `finegrained_fp8` are replaced: the function `fp8_linear`, which every
`FP8Linear` calls, and the entries of the experts interface that `FP8Experts` calls (also of FP4 weights). If `linear`
or `experts` refuses a layer, transformers' own function computes the layer, and a warning tells why.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.check.checks import Operand, wants_gradient
from ..core.check.layout import either
from ..core.check.recipes import PER_BLOCK
from ..linear.api import linear
from ..linear.backward import bias_gradient
from ..linear.check import SCALES_OF_WEIGHTS
from ..moe.api import experts
from ..nn.stacked import form_refusal, limit_of

__all__ = ["DeepGemmUse", "use_deep_gemm"]

OLDEST = (5, 17)
WAYS_OF_EXPERTS = ("grouped_mm", "batched_mm", "deepgemm")
"""Values of `experts_implementation` that `experts` replaces. "eager" loops over experts and calls `fp8_linear`."""
LINEAR_PARAMETERS: tuple[str, ...] = (
    *("input", "weight", "weight_scale_inv", "block_size"),
    *("bias", "activation_scale", "allow_deepgemm"),
)
EXPERTS_PARAMETERS: tuple[str, ...] = ("self", "hidden_states", "top_k_index", "top_k_weights")
DECLINED = (ValueError, NotImplementedError)
"""Errors by which `linear` and `experts` refuse a call."""

Function = Callable[..., Any]


class DeepGemmUse:
    """A use of this package by transformers, from `use_deep_gemm` to `stop` or to the end of a `with` block.

    - `taken`: the number of calls that `linear` and `experts` computed, by these names.
    - `left`: the number of calls that transformers computed, by the reason.
    """

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __enter__(self) -> DeepGemmUse:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End this use. When the last use ends, transformers gets its own functions back."""
        if self in _uses:
            _uses.remove(self)
            if not _uses:
                _undo.pop()()


_uses: list[DeepGemmUse] = []
_undo: list[Callable[[], None]] = []
_refusals: WeakKeyDictionary[torch.nn.Module, str | None] = WeakKeyDictionary()


def use_deep_gemm() -> DeepGemmUse:
    """Let FP8 models of transformers use `linear` and `experts`, in the whole process.

    Models may be loaded before or after the call. Without a `with` statement, the use ends by `stop`; with it, at the
    end of the block. Uses may overlap in any order.
    """
    if not _uses:
        _undo.append(_install(_finegrained_fp8()))
    use = DeepGemmUse()
    _uses.append(use)
    return use


def _finegrained_fp8() -> Any:
    """Import transformers' module of FP8 layers. Check that the functions to replace have the known parameters."""
    oldest = ".".join(map(str, OLDEST))
    try:
        version: str = import_module("transformers").__version__
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"transformers: expected {oldest} or newer, none is installed", name=e.name) from e
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(f"transformers: expected {oldest} or newer, got {version}", name="transformers")
    there = import_module("transformers.integrations.finegrained_fp8")
    interface = getattr(there, "ALL_FP8_EXPERTS_FUNCTIONS", {})
    places = {"fp8_linear": (getattr(there, "fp8_linear", None), LINEAR_PARAMETERS)}
    places |= {way: (interface.get(way), EXPERTS_PARAMETERS) for way in WAYS_OF_EXPERTS}
    for name, (function, expected) in places.items():
        got = function and tuple(inspect.signature(function).parameters)
        if got != expected:
            message = f"transformers {version}: expected a function {name} of {', '.join(expected)}, got {got}"
            raise ImportError(message, name="transformers")
    return there


def _install(there: Any) -> Callable[[], None]:
    """Replace transformers' functions. Return the function that undoes this."""
    interface = there.ALL_FP8_EXPERTS_FUNCTIONS
    own_linear: Function = there.fp8_linear
    own_experts: dict[str, Function] = {way: interface[way] for way in WAYS_OF_EXPERTS}
    # Dynamo cannot trace the choice and the launch of a kernel, so a compiled model calls these between its graphs.
    between_graphs: Any = torch.compiler.disable
    linear_here = between_graphs(_linear_or(own_linear))
    experts_here = {way: between_graphs(_experts_or(own)) for way, own in own_experts.items()}
    there.fp8_linear = linear_here
    for way in WAYS_OF_EXPERTS:
        interface[way] = experts_here[way]

    def undo() -> None:
        # If another library has replaced a function since, do not touch it: our function then only forwards calls.
        if there.fp8_linear is linear_here:
            there.fp8_linear = own_linear
        for way in WAYS_OF_EXPERTS:
            if interface[way] is experts_here[way]:
                del interface[way]  # then the entry that all interfaces share is visible again
                if interface[way] is not own_experts[way]:
                    interface[way] = own_experts[way]

    return undo


def _linear_or(own: Function) -> Function:
    """Make the replacement of `fp8_linear`. `allow_deepgemm` is for another library, which runs only on one GPU."""

    def fp8_linear(
        input: Tensor,
        weight: Tensor,
        weight_scale_inv: Tensor,
        block_size: Any = None,
        bias: Tensor | None = None,
        activation_scale: Tensor | None = None,
        allow_deepgemm: bool = True,
    ) -> Any:
        return _here_or(
            lambda: own(input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm),
            "linear",
            linear_refusal(weight, block_size, activation_scale),
            lambda: _differentiable(_Linear, (input, bias), input, weight, weight_scale_inv, bias, block_size),
        )

    return fp8_linear


def _experts_or(own: Function) -> Function:
    """Make the replacement of an entry of the experts interface."""

    def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return _here_or(
            lambda: own(self, hidden_states, top_k_index, top_k_weights),
            "experts",
            experts_refusal(self),
            lambda: _differentiable(
                _Experts, (hidden_states, top_k_weights), hidden_states, top_k_index, top_k_weights, self
            ),
        )

    return experts_forward


def _here_or(own: Function, layer: str, refusal: str | None, here: Function) -> Any:
    """Compute a layer by `here`, or by `own` if it is refused. Count the call, and warn of each new reason."""
    if not _uses:
        return own()
    if refusal is None:
        try:
            out = here()
            for use in _uses:
                use.taken[layer] += 1
            return out
        except DECLINED as e:
            refusal = str(e)
    reason = f"{layer}: {refusal}"
    is_new = False
    for use in _uses:
        is_new |= reason not in use.left
        use.left[reason] += 1
    if is_new:
        warnings.warn(f"deep_gemm leaves a layer to transformers; {reason}", RuntimeWarning, stacklevel=2)
    return own()


# Further reasons why layers are not taken; `linear` and `experts` refuse other layers themselves


def linear_refusal(weight: Tensor | None, block_size: Any, activation_scale: object) -> str | None:
    """Return why a linear layer is not taken; None if it is. FP4 weights have scales of 32 for any `block_size`."""
    if activation_scale is not None:
        return "activation_scale: expected None, a scale for each row and 128 columns of activations, got a static one"
    allowed = [*map(tuple, SCALES_OF_WEIGHTS)]
    if not is_fp4(weight) and (block_size is None or tuple(block_size) not in allowed):
        return f"block_size: expected {either(allowed)}, got {block_size}"
    return None


def experts_refusal(layer: Any) -> str | None:
    """Return why a mixture in FP8 or BF16 is not taken; None if it is. The answer for a layer is kept."""
    if layer not in _refusals:
        of_weights = None
        if hasattr(layer, "block_size"):  # an `FP8Experts`
            static = True if layer.activation_scheme == "static" else None
            of_weights = linear_refusal(getattr(layer, "gate_up_proj", None), layer.block_size, static)
        _refusals[layer] = of_weights or form_refusal(layer)
    return _refusals[layer]


# Code of both layers. Gradients use dequantized weights, as in transformers


def _differentiable(layer: Any, trained: tuple[object, ...], *given: Any) -> Any:
    """Compute a layer, with a record for gradients only if one of the tensors in `trained` requires a gradient.

    A record costs time in each step of decoding.
    """
    return layer.apply(*given) if wants_gradient(*trained) else layer.compute(*given)


class _Linear(torch.autograd.Function):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, _: Any) -> Tensor:
        out: Any = linear(x, as_operand(weight, scales), bias=bias)
        return out.to(x.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, block: Any) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.block = block
        return _Linear.compute(x, weight, scales, bias, block)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, _, _, needs_bias, _ = ctx.needs_input_grad
        weight, scales = ctx.saved_tensors
        of_x = grad @ dequantized(weight, scales, ctx.block).to(grad.dtype) if needs_x else None
        of_bias = bias_gradient(grad.flatten(0, -2), ctx.bias_dtype) if needs_bias else None
        return of_x, None, None, of_bias, None


class _Experts(torch.autograd.Function):
    @staticmethod
    def compute(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: Any) -> Tensor:
        if topk_ids.is_cpu:  # a GPU ignores any id without an expert, the CPU only -1
            topk_ids = topk_ids.masked_fill(topk_ids == layer.num_experts, -1)  # another rank's expert
        w1 = as_operand(layer.gate_up_proj, layer.gate_up_proj_scale_inv)
        w2 = as_operand(layer.down_proj, layer.down_proj_scale_inv)
        out: Any = experts(x, topk_ids, topk_weights, w1, w2, limit=limit_of(layer))
        return out.to(x.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, topk_ids, topk_weights)
        ctx.layer = layer
        return _Experts.compute(x, topk_ids, topk_weights, layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute gradients by transformers' loop over experts, whose linear layers have gradients."""
        x, topk_ids, topk_weights = ctx.saved_tensors
        loop = inspect.unwrap(type(ctx.layer).forward)
        with torch.enable_grad():
            x, topk_weights = x.detach().requires_grad_(), topk_weights.detach().requires_grad_()
            of_x, of_weights = torch.autograd.grad(loop(ctx.layer, x, topk_ids, topk_weights), (x, topk_weights), grad)
        return of_x, None, of_weights, None


def is_fp4(weight: Tensor | None) -> bool:
    """Tell whether a weight is FP4: two values in a byte."""
    return weight is not None and weight.dtype == torch.int8


def as_operand(weight: Tensor, scales: Tensor) -> Operand:
    """Make an operand of a weight: scales of FP8 values become FP32, and scales of FP4 values do not change."""
    return weight, as_fp32(scales) if weight.dtype == torch.float8_e4m3fn else scales


def as_fp32(scales: Tensor) -> Tensor:
    """Convert UE8M0 scales, which are powers of two, to FP32."""
    return scales.float() if scales.dtype == torch.float8_e8m0fnu else scales


def dequantized(weight: Tensor, scales: Tensor, block: Sequence[int] = PER_BLOCK) -> Tensor:
    """Multiply FP8 values by their scales of blocks: FP32 `[..., n, k]`."""
    if is_fp4(weight):
        raise NotImplementedError("weight: expected torch.float8_e4m3fn for gradients, got FP4")
    (n, k), (rows, columns) = weight.shape[-2:], block
    by_rows = as_fp32(scales).repeat_interleave(rows, dim=-2)[..., :n, :]
    return weight.float() * by_rows.repeat_interleave(columns, dim=-1)[..., :k]

"""Shared parts of layers: types under autocast, sizes that products allow, FP8 weights of state dicts, and the buffers
for gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..casts.fp8 import cast_back_from_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from ..core.check.checks import K_MULTIPLE, Operand, tensor
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.check.numbers import integer_in_range
from ..core.check.tracing import is_dynamo_compiling
from ..linear.check import OF_ALL_K, operands_of

WEIGHT_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALES, ROW_SCALES = ENDINGS = "_scale_inv", "_scale"
"""Checkpoints append these to a weight's name for scales of blocks, and of whole rows. Both multiply the values."""
CASTS: dict[str, Callable[..., Any]] = {
    SCALES: per_block_cast_to_fp8,
    ROW_SCALES: partial(per_token_cast_to_fp8, gran_k=0),
}
"""Functions that cast weights, by the ending of the scales' names."""
OF_ACTIVATIONS = "input_scale", "k_scale", "v_scale"
"""Names of static scales in checkpoints, for activations and the key/value cache: this package does not read them."""


class Trained(torch.nn.Module):
    """A module for training: FP8 weights of a state dict are multiplied by their scales."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *more: Any) -> None:
        multiply_scales(self, state_dict, prefix, *more)
        super()._load_from_state_dict(state_dict, prefix, *more)


def multiply_scales(module: torch.nn.Module, state_dict: dict[str, Tensor], prefix: str, *more: Any) -> None:
    """Convert weights of a state dict to the types of a module; FP8 values without scales are refused."""
    *_, errors = more
    drop_scales_of_activations(module, state_dict, prefix)
    for name, held in module._parameters.items():
        key = prefix + name
        given = state_dict.get(key)
        if held is None or held.dtype not in WEIGHT_TYPES or not isinstance(given, Tensor):
            continue
        of_scales = key + ENDINGS[key + ROW_SCALES in state_dict]
        if given.dtype in WEIGHT_TYPES and of_scales not in state_dict:
            continue
        try:
            state_dict[key] = dequantized(key, given, state_dict.pop(of_scales, None), held.dtype)
        except ValueError as error:
            errors.append(str(error).replace(f"sf{key}", of_scales))
            state_dict[key] = held


def drop_scales_of_activations(module: torch.nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Remove static scales from a state dict, unless modules hold them: activations get scales of their own."""
    for path, each in module.named_modules(prefix=prefix.removesuffix(".")):
        for name in set(OF_ACTIVATIONS) - each._parameters.keys() - each._buffers.keys():
            state_dict.pop(f"{path}.{name}".removeprefix("."), None)


def as_held(name: str, values: Tensor, scales: Tensor) -> Operand:
    """Convert an FP8 weight of a checkpoint to the form of layers: FP32 or UE8M0 scales, or a column of row scales.

    A single scale is repeated for each row. Two scales of a `gate_up_proj` are repeated for the halves of its rows.
    A file's mapped pages may hold values at addresses that products refuse: such values are copied.
    """
    values = aligned(values)
    scales = scales.float() if scales.dtype in WEIGHT_TYPES else scales
    *groups, n, k = values.shape
    of_blocks = *groups, ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    if scales.dtype != torch.float32 or scales.shape == of_blocks or (scales.dim() > 1 and scales.shape[-1] > 1):
        return values, scales
    parts = scales.numel() / max(prod(groups), 1)
    if parts in (1, n, 1 + name.removesuffix(".weight").endswith("gate_up_proj")):
        scales = scales.reshape(*groups, -1, 1).repeat_interleave(n // int(parts), -2)
    elif scales.dim() < 2:
        raise ValueError(f"sf{name}: expected a scale for each of {n} rows or for all, got {tuple(scales.shape)}")
    return values, scales


def aligned(x: Tensor) -> Tensor:
    """Return a tensor at an address that products accept: a copy if necessary."""
    return x.clone() if x.data_ptr() % ADDRESS_ALIGNMENT else x


def ending_of(values: Tensor, scales: Any) -> str:
    """Return the ending that checkpoints give to the name of these scales."""
    is_fp32 = values.dtype == torch.float8_e4m3fn and getattr(scales, "dtype", None) == torch.float32
    return ENDINGS[is_fp32 and scales.shape == (*values.shape[:-1], 1)]


def scaled(name: str, state: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the rows and columns of an FP8 weight that share a scale."""
    *_, of_w = operands_of(name, state[name], state[name + SCALES], None, None, OF_ALL_K)
    return of_w.rows, of_w.columns


def dequantized(name: str, values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply an FP8 weight of a state dict by its scales, and round the result to `dtype`."""
    if tensor(name, values).dtype != torch.float8_e4m3fn:
        beside = "" if scales is None else " beside scales"
        raise ValueError(f"{name}: expected torch.float8_e4m3fn{beside}, got {values.dtype}")
    if scales is None:
        raise ValueError(f"{name}{SCALES}: expected scales beside values of {values.dtype}, got none")
    values, scales = as_held(name, values, scales)
    *_, of_w = operands_of(name, values, scales, None, None, OF_ALL_K)
    return cast_back_from_fp8(values, scales, of_w.columns).to(dtype)


def outside_of_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep torch.compile out of a function with effects that no graph can express.

    `torch.compiler.disable` loads the compiler, which takes seconds. So this happens at the function's first call.
    """
    disabled: list[Callable[..., Tensor]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if not is_dynamo_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return call


class _Once(torch.autograd.Function):
    """Returns the first `count` arguments, which are gradients, and refuses a gradient of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Any) -> tuple[Any, ...]:
        return given[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        instead = "take layers of torch.nn where these are needed"
        raise NotImplementedError(f"create_graph: products in FP8 have no gradients of gradients: {instead}")


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let callers use gradients, but not differentiate them, whatever the gradients depend on.

    torch's `once_differentiable` looks at the incoming gradients, but not at weights that require a gradient.
    """

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        always = torch.empty(0, dtype=torch.float32, requires_grad=True)
        return _Once.apply(len(found), *found, *grads, always)  # type: ignore[no-untyped-call]

    return call


def features(name: str, size: int, of: int = K_MULTIPLE) -> int:
    """Check a size that is the depth of one of a weight's three products, and a number of columns in another."""
    size = integer_in_range(name, size, 1)
    if size % of:
        products = "FP8" if of == K_MULTIPLE else "BF16"
        raise ValueError(f"{name}: expected a multiple of {of}, which {products} products need, got {size}")
    return size


def weight_type(dtype: torch.dtype | None) -> torch.dtype | None:
    """Check the requested type of a weight; None is torch's default."""
    if dtype is not None and dtype not in WEIGHT_TYPES:
        raise ValueError(f"dtype: expected {' or '.join(map(str, WEIGHT_TYPES))}, got {dtype!r}")
    return dtype


def as_autocast_says(x: Tensor) -> Tensor:
    """Convert activations to the type of the active autocast. Weights keep their type: all are cast to FP8 anyway."""
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(device))
    return x


def in_shape(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new result in the caller's shape, but not as a view; no other tensor may share its memory.

    Autograd refuses to change a view of a Function in place, and a view that is changed in place loses FSDP2's hook.
    """
    return torch.ops.aten._unsafe_view.default(rows, shape)  # type: ignore[no-any-return]


def main_grad_of(name: str, weight: Tensor, is_fused: bool) -> Tensor | None:
    """Return the buffer to which the product adds a weight's gradient; None if autograd handles the gradient."""
    if not is_fused:
        return None
    buffer = getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        raise ValueError(
            f"{name}.main_grad: expected a tensor, because accumulates_main_grad is set, got {buffer!r}: a weight that "
            "FSDP2 gathers has none"
        )
    if buffer.shape != weight.shape or buffer.dtype != torch.float32:
        raise ValueError(
            f"{name}.main_grad: expected shape {tuple(weight.shape)} and dtype torch.float32, "
            f"got {tuple(buffer.shape)} and {buffer.dtype}"
        )
    return buffer


def gradient_beside_main_grad(weight: Tensor) -> Tensor | None:
    """Return a gradient to autograd for a weight whose gradient is in `main_grad`: None, or zeros for Megatron.

    Megatron marks weights with an attribute, which is set here. Its hooks wait for a gradient, and then drop it.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)

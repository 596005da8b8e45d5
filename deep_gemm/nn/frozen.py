"""Layers for inference with FP8 or FP4 weights: modules around `linear` and `experts`.

State dicts use the names of checkpoints: `weight`, and `weight_scale_inv` or, for whole rows, `weight_scale`. Either
scale multiplies the values. A weight that is not cast yet is cast when it is loaded. Values are parameters without
a gradient, so `parameters()` counts them; scales are buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..core.check.checks import Operand, Sizes, pair, tensor, wants_gradient
from ..core.check.layout import SCALE_BLOCK, Recipe, ceil_div
from ..core.check.numbers import positive
from ..linear import check
from ..linear.api import linear
from ..moe.api import experts
from ..moe.routing import expert_rows
from .experts import BF16, FP8, apply_outside_of_graphs
from .gradients import (
    CASTS,
    ROW_SCALES,
    SCALES,
    WEIGHT_TYPES,
    aligned,
    as_autocast_says,
    as_held,
    ending_of,
    multiply_scales,
)

BIAS = "_bias"
M = TypeVar("M", bound="Holder")


class Holder(torch.nn.Module):
    """A module that holds cast weights in buffers: `w_values` and `w_scales` for a weight called w."""

    WEIGHTS: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that are weights for inference."""

    def hold(self, name: str, w: Operand) -> None:
        """Hold a weight."""
        for ending, x in zip(("_values", "_scales"), pair(name, w), strict=True):
            self.register_buffer(name + ending, x)

    def held(self, name: str) -> Operand:
        """Return a held weight: its values and scales."""
        here = self._buffers  # attribute access takes half a us more: torch searches the parameters first
        return here[name + "_values"], here[name + "_scales"]  # type: ignore[return-value]

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Move cast weights and their scales, but keep their types: `half` and similar calls convert others only."""
        fixed = {id(each) for each in (*self._buffers.values(), *map(self._parameters.get, self.WEIGHTS))}

        def moved(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(y.device) if id(x) in fixed and y.dtype != x.dtype else y

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class Frozen(Holder):
    """A module for inference. Its state dict uses the names of checkpoints: `w`, and `w_scale_inv` or `w_scale`."""

    gran_k: int | None
    recipe_b: Recipe | None

    def hold(self, name: str, w: Operand | Tensor) -> None:
        """Hold a weight: its values as a parameter without a gradient, and any scales as a buffer."""
        values, scales = (w, None) if isinstance(w, Tensor) else pair(name, w)
        self.register_parameter(name, torch.nn.Parameter(values.detach(), requires_grad=False))
        self.register_buffer(name + ending_of(values, scales), scales)

    def held(self, name: str) -> Operand:
        """Return a held weight: its values and scales."""
        here, scales = self._buffers, name + SCALES
        return self._parameters[name], here[scales if scales in here else name + ROW_SCALES]  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Return the types and shapes of the held tensors, for `print`."""
        held = [(name, x) for name, x in self.state_dict().items() if name != "bias"]
        return ", ".join(f"{name}={str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in held)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, metadata: Any, *more: Any) -> None:
        """Load weights: keep cast weights and their scales, and cast other weights."""
        *_, errors = more
        multiply_scales(self, state_dict, prefix, metadata, *more)  # for weights held in BF16
        for name in self.WEIGHTS:
            key, before = prefix + name, self.held(name)
            if key in state_dict and before[1] is not None:
                of_scales = key + (ROW_SCALES if key + ROW_SCALES in state_dict else SCALES)
                try:
                    after = self._cast(key, before, state_dict[key], state_dict.pop(of_scales, None))
                except ValueError as error:
                    errors.append(str(error).replace(f"sf{key}", of_scales))
                    after = before
                ending, (_, scales) = ending_of(*after), after
                state_dict[key], state_dict[key + ending] = after
                old: Any = self._buffers.pop(name + ending_of(*before))
                is_alike = old.dtype == scales.dtype and old.shape == scales.shape
                self._buffers[name + ending] = old if is_alike else torch.empty_like(scales, device=old.device)
        super()._load_from_state_dict(state_dict, prefix, metadata, *more)

    def _cast(self, name: str, held: Operand, given: Tensor, scales: Tensor | None) -> Operand:
        """Convert a weight of a state dict to the form of the held weight."""
        values, _ = held
        if given.dtype in WEIGHT_TYPES and scales is None:
            device = given.device if values.is_meta else values.device
            given, scales = CASTS[ending_of(*held)](given.detach().to(device))
        if scales is None:
            raise ValueError(f"sf{name}: expected scales beside values of {given.dtype}, got none")
        if given.dtype != values.dtype or given.shape != values.shape:
            raise ValueError(
                f"{name}: expected {values.dtype} {list(values.shape)}, got {given.dtype} {list(given.shape)}"
            )
        found = as_held(name, given, scales)
        axes = ("groups", "n", "k")[3 - given.dim() :]
        check.weight(name, found, axes, Sizes(), self.gran_k, self.recipe_b, check.OF_ALL_K)
        return found


class FrozenLinear(Frozen):
    """`linear` with a weight that is FP8 or FP4 already.

    `w` is a pair of values and scales as for `linear`; `gran_k` and `recipe_b` too are as for `linear`. `bias` becomes
    a parameter without a gradient. The result has the type of x, or of autocast, rounded to BF16 at least.

    >>> w = torch.full((8, 64), 0x22, dtype=torch.int8), torch.full((8, 4), 127, dtype=torch.uint8)  # MXFP4, all ones
    >>> FrozenLinear(w, bias=torch.ones(8))(torch.ones(2, 128))[:, 0].tolist()
    [129.0, 129.0]
    """

    WEIGHTS = ("weight",)

    def __init__(
        self, w: Operand, bias: Tensor | None = None, *, gran_k: int | None = None, recipe_b: Recipe | None = None
    ) -> None:
        super().__init__()
        self.hold("weight", pair("w", w))
        self.gran_k, self.recipe_b = gran_k, recipe_b
        self.bias = None if bias is None else torch.nn.Parameter(tensor("bias", bias).detach(), requires_grad=False)

    def extra_repr(self) -> str:
        """Return the types and shapes of the held tensors, for `print`."""
        return f"{super().extra_repr()}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """Compute x @ w.T + bias for x `[..., k]`."""
        x = as_autocast_says(x if type(x) is Tensor else tensor("x", x))
        out: Any = linear(x, self.held("weight"), bias=self.bias, gran_k=self.gran_k, recipe_b=self.recipe_b)
        return out.to(x.dtype)  # type: ignore[no-any-return]


class FrozenExperts(Frozen):
    """`experts` with weights that are FP8 or FP4 pairs, or BF16 tensors.

    `limit`, `gran_k`, `recipe_b` and biases are as for `experts`; biases become buffers in FP32. The result has the
    type of x, or of autocast, rounded to BF16 at least. x and the weights of routes have gradients if w1
    and w2 are BF16 or have FP32 scales of 128x128, and there is no bias.

    >>> w1 = torch.full((2, 64, 16), 0x22, dtype=torch.int8), torch.full((2, 64, 1), 127, dtype=torch.uint8)
    >>> w2 = torch.full((2, 32, 16), 0x22, dtype=torch.int8), torch.full((2, 32, 1), 127, dtype=torch.uint8)
    >>> FrozenExperts(w1, w2)(torch.ones(1, 32), torch.tensor([[1]]), torch.ones(1, 1))[0, 0].item()  # 32 * 32 * 32
    32768.0
    """

    WEIGHTS = "w1", "w2"

    def __init__(
        self,
        w1: Operand | Tensor,
        w2: Operand | Tensor,
        limit: float | None = None,
        *,
        gran_k: int | None = None,
        recipe_b: Recipe | None = None,
        w1_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        are_bf16 = isinstance(w1, Tensor) and isinstance(w2, Tensor)
        for name, given, w in zip(self.WEIGHTS, ("w1", "w2"), (w1, w2), strict=True):
            self.hold(name, w if are_bf16 else pair(given, w))  # type: ignore[arg-type]
        for name, given, bias in zip(self.WEIGHTS, ("w1_bias", "w2_bias"), (w1_bias, w2_bias), strict=True):
            self.register_buffer(name + BIAS, None if bias is None else aligned(tensor(given, bias).detach().float()))
        self.limit = None if limit is None else positive("limit", limit)
        self.gran_k, self.recipe_b = gran_k, recipe_b

    @property
    def products(self) -> str:
        """Return the type of the products, FP8 or BF16."""
        return BF16 if self.held(self.WEIGHTS[0])[1] is None else FP8

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *more: Any) -> None:
        for name in self.WEIGHTS:
            for key, is_bias in ((prefix + name, False), (prefix + name + BIAS, True)):
                if isinstance(x := state_dict.get(key), Tensor):
                    state_dict[key] = aligned(x.float() if is_bias else x)
        super()._load_from_state_dict(state_dict, prefix, *more)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the mixture for tokens x `[tokens, hidden]`; ids and weights of routes are `[tokens, topk]`."""
        x = as_autocast_says(x if type(x) is Tensor else tensor("x", x))
        w1, w2 = map(self.held, self.WEIGHTS)
        is_bf16 = w1[1] is None
        biases = [self._buffers.get(name + BIAS) for name in self.WEIGHTS]
        is_usual = is_bf16 or (self.gran_k is None and _is_usual(w1) and _is_usual(w2))
        weights = (w1[0], w2[0]) if is_bf16 else (w1, w2)
        if wants_gradient(x, topk_weights) and is_usual and biases[0] is biases[1] is None:
            rows = expert_rows(topk_ids, w1[0].shape[0])
            return apply_outside_of_graphs(x, topk_weights, *weights, rows, self.limit, self.products, (None, None))
        said: dict[str, Any] = {"limit": self.limit, "gran_k": self.gran_k, "recipe_b": self.recipe_b}
        out: Any = experts(x, topk_ids, topk_weights, *weights, w1_bias=biases[0], w2_bias=biases[1], **said)
        return out.to(x.dtype)  # type: ignore[no-any-return]


def _is_usual(w: Operand) -> bool:
    """Tell whether a weight is FP8 with an FP32 scale for each 128x128, as products of gradients need it."""
    values, scales = w
    shape = *values.shape[:1], *(ceil_div(size, SCALE_BLOCK) for size in values.shape[1:])
    return values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.shape == shape

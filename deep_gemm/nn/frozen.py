"""Layers for inference, whose weights are FP8 or FP4 already: modules around `linear` and `experts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.check.checks import Operand, pair
from ..core.check.layout import Recipe
from ..core.check.numbers import positive
from ..linear.api import linear
from ..moe.api import experts

M = TypeVar("M", bound="Holder")


class Holder(torch.nn.Module):
    """A module that holds cast weights in buffers, `w_values` and `w_scales` for one called w."""

    def hold(self, name: str, w: Operand) -> None:
        """Hold a weight."""
        values, scales = pair(name, w)
        self.register_buffer(f"{name}_values", values)
        self.register_buffer(f"{name}_scales", scales)

    def held(self, name: str) -> Operand:
        """Give a weight that is held."""
        here = self._buffers  # by attribute each takes half a us: torch looks for it among parameters first
        return here[f"{name}_values"], here[f"{name}_scales"]  # type: ignore[return-value]

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Move cast weights and their scales, but leave their types: `half` and its like are for other parameters."""
        fixed = {id(each) for each in self._buffers.values()}

        def moved(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(y.device) if id(x) in fixed and y.dtype != x.dtype else y

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class FrozenLinear(Holder):
    """`linear` with a weight that is FP8 or FP4 already.

    `w` is a pair of values and scales as `linear` takes it, and so are `gran_k` and `recipe_b`; `bias` becomes a
    parameter without a gradient. The result is BF16.

    >>> w = torch.full((8, 64), 0x22, dtype=torch.int8), torch.full((8, 4), 127, dtype=torch.uint8)  # MXFP4, all ones
    >>> FrozenLinear(w, bias=torch.ones(8))(torch.ones(2, 128))[:, 0].tolist()
    [129.0, 129.0]
    """

    def __init__(
        self, w: Operand, bias: Tensor | None = None, *, gran_k: int | None = None, recipe_b: Recipe | None = None
    ) -> None:
        super().__init__()
        self.hold("w", w)
        self.gran_k, self.recipe_b = gran_k, recipe_b
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x @ w.T + bias of x `[..., k]`."""
        out = linear(x, self.held("w"), bias=self.bias, gran_k=self.gran_k, recipe_b=self.recipe_b)
        assert out is not None
        return out


class FrozenExperts(Holder):
    """`experts` with weights that are FP8 or FP4 already: pairs of values and scales as `experts` takes them.

    `limit`, `gran_k` and `recipe_b` are as for `experts` too.

    >>> w1 = torch.full((2, 64, 16), 0x22, dtype=torch.int8), torch.full((2, 64, 1), 127, dtype=torch.uint8)
    >>> w2 = torch.full((2, 32, 16), 0x22, dtype=torch.int8), torch.full((2, 32, 1), 127, dtype=torch.uint8)
    >>> FrozenExperts(w1, w2)(torch.ones(1, 32), torch.tensor([[1]]), torch.ones(1, 1))[0, 0].item()  # 32 * 32 * 32
    32768.0
    """

    def __init__(
        self,
        w1: Operand,
        w2: Operand,
        limit: float | None = None,
        *,
        gran_k: int | None = None,
        recipe_b: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.hold("w1", w1)
        self.hold("w2", w2)
        self.limit = None if limit is None else positive("limit", limit)
        self.gran_k, self.recipe_b = gran_k, recipe_b

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the mixture of tokens x `[tokens, hidden]`; ids and weights of routes are `[tokens, topk]`."""
        said: dict[str, Any] = {"limit": self.limit, "gran_k": self.gran_k, "recipe_b": self.recipe_b}
        out = experts(x, topk_ids, topk_weights, self.held("w1"), self.held("w2"), **said)
        assert out is not None
        return out

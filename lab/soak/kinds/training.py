"""Training steps of layers: results, and the gradients of all inputs and parameters."""

from __future__ import annotations

from contextlib import nullcontext
from math import sqrt
from typing import ClassVar

import torch
from torch.func import functional_call

from deep_gemm import nn
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.rules import Target

from ...casts import spread
from ..draw import Draw
from ..trial import Right, Tensors, Trial
from . import fp8
from .layers import TYPES, as_cast

ROUTES = "topk_ids"
MOST_ERROR = 0.3
"""The largest allowed error, relative to the norm of a token's or an expert's numbers.

Six casts have an error of 0.063 together (`TYPICAL_OF_EXPERTS` of the tests); casts of few features that partly
cancel have an error several times larger.
"""


class Step(Trial):
    """Forward and backward of a layer. Results are `y` and gradients: "dx" is the gradient of "x"."""

    layer: torch.nn.Module
    weights: ClassVar[tuple[str, ...]]

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.keeps_casts = draw.flag(0.3)

    def fill(self) -> None:
        """Draw normal numbers, and weights that keep products normal."""
        for name, x in self.operands.items():
            if x.is_floating_point():
                x.copy_(self.draw.normal(x.shape) / (sqrt(x.shape[-1]) if name in self.weights else 1))

    def call(self, x: Tensors) -> Tensors:
        """Make new leaves and parameters, and run both passes."""
        given = {name: each if name == ROUTES else each.detach().requires_grad_() for name, each in x.items()}
        given |= {name: torch.nn.Parameter(given[name].detach()) for name in self.weights}
        grad = given.pop("grad").detach()
        inputs = tuple(each for name, each in given.items() if name not in self.weights)
        with nn.keep_casts() if self.keeps_casts else nullcontext():
            y = functional_call(self.layer, {name: given[name] for name in self.weights}, inputs)
            given.pop(ROUTES, None)
            found = zip(given, torch.autograd.grad(y, tuple(given.values()), grad), strict=True)
        return {"y": y.detach(), **{"d" + name: each for name, each in found}}


class LinearStep(Step):
    """`nn.Linear`."""

    kind = "train_linear"
    weights = ("weight",)

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.m, self.n, self.k = draw.size(1, 1500), draw.size(16, 2000, 16), draw.size(16, 2000, 16)
        dtype, of_weight = draw.rng.choice(TYPES), draw.rng.choice((torch.bfloat16, torch.float32))
        self.recipe = draw.rng.choice(("block", "row"))
        self.layer = nn.Linear(self.k, self.n, bias=False, device="meta", recipe=self.recipe)
        self.operands = {
            "x": draw.matrix((self.m, self.k), dtype),
            "weight": torch.empty(self.n, self.k, dtype=of_weight, device=draw.device),
            "grad": draw.matrix((self.m, self.n), dtype),
        }

    def right(self) -> dict[str, Right]:
        """Compute three products in FP64, from the numbers after the casts."""
        x, weight, grad = self.operands.values()

        def cast(operand: torch.Tensor) -> torch.Tensor:
            return as_cast(operand, 128 if self.recipe == "block" else operand.shape[1])

        blocks = spread(*cast_blocks(weight, Target(128, 128)), 128)
        w, turned = (blocks, blocks.t()) if self.recipe == "block" else (cast(weight), cast(weight.t()))
        products = {
            "y": (cast(x), w, x.dtype),
            "dx": (cast(grad), turned, x.dtype),
            "dweight": (cast(grad.t()), cast(x.t()), weight.dtype),
        }
        return {name: Right(*fp8.product(a, b, None, dtype, False)) for name, (a, b, dtype) in products.items()}


class ExpertsStep(Step):
    """`nn.Experts`."""

    kind = "train_experts"
    weights = ("w1", "w2")

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.tokens, self.topk, self.experts = draw.size(1, 300), draw.rng.randint(1, 6), draw.rng.choice((1, 3, 8, 20))
        self.hidden, self.inner = draw.size(16, 700, 16), draw.size(16, 500, 16)
        dtype, of_weights = draw.rng.choice(TYPES), draw.rng.choice((torch.bfloat16, torch.float32))
        products = draw.rng.choice(("fp8", "bf16"))
        self.layer = nn.Experts(self.experts, self.hidden, self.inner, device="meta", products=products)
        shapes = {"w1": (2 * self.inner, self.hidden), "w2": (self.hidden, self.inner)}
        self.operands = {
            "x": draw.matrix((self.tokens, self.hidden), dtype),
            ROUTES: torch.empty(self.tokens, self.topk, dtype=torch.int64, device=draw.device),
            "topk_weights": torch.empty(self.tokens, self.topk, device=draw.device, dtype=torch.float32),
            **{
                name: torch.empty(self.experts, *shape, dtype=of_weights, device=draw.device)
                for name, shape in shapes.items()
            },
            "grad": draw.matrix((self.tokens, self.hidden), dtype),
        }

    def fill(self) -> None:
        """Draw routes; some have no expert."""
        super().fill()
        self.operands[ROUTES].copy_(self.draw.integers((self.tokens, self.topk), -1, self.experts - 1))
        # Weights have one sign, so that results of an expert that a token has twice do not cancel each other.
        self.operands["topk_weights"].copy_(self.draw.powers_of_two((self.tokens, self.topk), -3, 0))

    def right(self) -> dict[str, Right]:
        """Compute by torch in FP64, from the numbers before any cast."""
        leaves = {name: x.double().requires_grad_() for name, x in self.operands.items() if name != ROUTES}
        grad = leaves.pop("grad").detach()
        x, p, w1, w2 = leaves.values()
        y = torch.zeros_like(grad)
        for expert in range(self.experts):
            token, column = (self.operands[ROUTES] == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ w1[expert].t()).chunk(2, dim=1)
            rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].t()
            y = y.index_add(0, token, rows * p[token, column, None])
        found = zip(leaves, torch.autograd.grad(y, tuple(leaves.values()), grad), strict=True)
        results = {"y": y.detach(), **{"d" + name: each for name, each in found}}
        of_all = {"dtopk_weights": (0, 1)}
        return {
            name: Right(each, MOST_ERROR, norms_along=of_all.get(name, tuple(range(each.dim()))[1:]))
            for name, each in results.items()
        }

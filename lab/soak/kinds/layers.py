"""Layers with FP8 weights, and the routing of rows to experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.rules import Target
from deep_gemm.linear.api import linear
from deep_gemm.moe import api as layers
from deep_gemm.moe import routing
from deep_gemm.moe.activation import silu_mul

from ...casts import spread
from ..draw import Draw
from ..trial import Right, Tensors, Trial
from . import fp8

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def as_cast(x: Tensor, columns: int) -> Tensor:
    """Return the FP64 numbers of x after a cast by rows, with a scale for `columns` columns (0: x in BF16)."""
    if columns == 0:
        return x.bfloat16().double()
    return spread(*cast_blocks(x, Target(1, columns)), 1, columns)


class Linear(Trial):
    """`linear`."""

    kind = "linear"
    faults: ClassVar = {"x": "cast_type", **dict.fromkeys(("w", "sfw", "out"), fp8.INTS)}
    make_weight: ClassVar[type[fp8.Weight]] = fp8.Weight

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.weight = self.make_weight(draw, exact=False)
        depths = self.weight.depths
        self.m, self.n, self.k = draw.size(1, 1500), draw.size(8, 2500, 8), draw.size(depths, 3000, depths)
        w, sfw = self.weight.room((self.n, self.k))
        self.operands = {"x": draw.matrix((self.m, self.k), draw.rng.choice(TYPES)), "w": w, "sfw": sfw}
        if draw.flag():
            self.operands["bias"] = torch.empty(self.n, dtype=draw.rng.choice(TYPES), device=draw.device)
        self.outputs = {"out": draw.output((self.m, self.n), torch.bfloat16)}
        self.is_stated = draw.flag()

    def refused_faults(self) -> Mapping[str, str]:
        """Return the `faults` that this problem must refuse."""
        return {**self.faults, "sfw": self.weight.refused(self.is_stated)}

    def fill(self) -> None:
        """Draw normal numbers."""
        x = self.operands
        x["x"].copy_(self.draw.normal(x["x"].shape))
        self.weight.fill(x["w"], x["sfw"])
        if "bias" in x:
            x["bias"].copy_(self.draw.normal((self.n,)))

    def call(self, x: Tensors) -> Tensors:
        """Compute the layer into the given output."""
        said = self.weight.said(self.is_stated)
        linear(x["x"], self.weight.given(x["w"], x["sfw"]), out=x["out"], bias=x.get("bias"), **said)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute the layer in FP64, from the numbers of x after its cast."""
        x = self.operands
        bias = x.get("bias")
        c = None if bias is None else bias.expand(self.m, self.n)
        a, b = as_cast(x["x"], self.weight.columns_of_a), self.weight.numbers(x["w"], x["sfw"])
        return {"out": Right(*fp8.product(a, b, c, torch.bfloat16, exact=False, columns=self.weight.columns))}


class Experts(Trial):
    """`experts`."""

    kind = "experts"
    faults: ClassVar = {"x": "cast_type", "topk_ids": "shape device", "topk_weights": fp8.INTS} | {
        **dict.fromkeys(("w1", "w2"), "dtype device"),
        **dict.fromkeys(("sf1", "sf2"), fp8.SCALES),
    }
    make_weight: ClassVar[Any] = fp8.Weight

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.tokens, self.topk, self.experts = draw.size(1, 300), draw.rng.randint(1, 6), draw.rng.choice((1, 3, 8, 20))
        self.weights = {name: self.make_weight(draw, exact=True, low=-6, high=-3) for name in "12"}
        self.weights["2"].is_beside(self.weights["1"])
        depths = self.make_weight.depths
        self.hidden, self.middle = draw.size(depths, 700, depths), draw.size(depths, 500, depths)
        sizes = {"1": (self.experts, 2 * self.middle, self.hidden), "2": (self.experts, self.hidden, self.middle)}
        self.operands = {
            "x": draw.matrix((self.tokens, self.hidden), draw.rng.choice(TYPES)),
            "topk_ids": torch.empty(
                self.tokens, self.topk, dtype=draw.rng.choice((torch.int32, torch.int64)), device=draw.device
            ),
            "topk_weights": torch.empty(self.tokens, self.topk, device=draw.device, dtype=torch.float32),
        }
        for name, shape in sizes.items():
            room = zip(("w" + name, "sf" + name), self.weights[name].room(shape), strict=True)
            self.operands |= {of: x for of, x in room if x is not None}
            if draw.flag():
                dtype = draw.rng.choice((torch.float32, torch.bfloat16))
                self.operands[f"w{name}_bias"] = torch.empty(shape[:2], dtype=dtype, device=draw.device)
        self.outputs = {"out": draw.output((self.tokens, self.hidden), torch.bfloat16)}
        self.is_stated = draw.flag()

    def refused_faults(self) -> Mapping[str, str]:
        """Return the `faults` that this problem must refuse."""
        of_scales = {"sf" + name: weight.refused(self.is_stated) for name, weight in self.weights.items()}
        return {**self.faults, **of_scales, **dict.fromkeys(self.biases(self.operands), "shape device")}

    def biases(self, x: Tensors) -> dict[str, Tensor]:
        """Return the biases among operands, by their names in a call."""
        return {name: x[name] for name in ("w1_bias", "w2_bias") if name in x}

    def fill(self) -> None:
        """Draw normal tokens, small integer weights, and routes; some routes have no expert."""
        x, draw = self.operands, self.draw
        x["x"].copy_(draw.normal(x["x"].shape))
        x["topk_ids"].copy_(draw.integers(x["topk_ids"].shape, -1, self.experts - 1))
        x["topk_weights"].copy_(draw.powers_of_two(x["topk_weights"].shape, -3, 0))
        for name, weight in self.weights.items():
            weight.fill(x["w" + name], x.get("sf" + name))
        for bias in self.biases(x).values():
            bias.copy_(draw.normal(bias.shape))

    def call(self, x: Tensors) -> Tensors:
        """Compute the layer into the given output."""
        w1, w2 = (weight.given(x["w" + name], x.get("sf" + name)) for name, weight in self.weights.items())
        said = self.weights["1"].said(self.is_stated) | self.biases(x)
        layers.experts(x["x"], x["topk_ids"], x["topk_weights"], w1, w2, out=x["out"], **said)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute the layer expert by expert."""
        x = self.operands
        w1, w2 = (weight.numbers(x["w" + name], x.get("sf" + name)) for name, weight in self.weights.items())
        columns, biases = self.weights["1"].columns_of_a, self.biases(x)
        tokens = as_cast(x["x"], columns)
        total = torch.zeros(self.tokens, self.hidden, dtype=torch.float64, device=tokens.device)
        size = torch.zeros_like(total)
        for expert in range(self.experts):
            weight = (x["topk_weights"].double() * (x["topk_ids"] == expert)).sum(1, keepdim=True)
            at = weight[:, 0].nonzero().flatten()
            c1, c2 = (biases[name][expert].double() if name in biases else 0.0 for name in ("w1_bias", "w2_bias"))
            hidden = silu_mul((tokens[at] @ w1[expert].t() + c1).bfloat16(), None)
            middle = as_cast(hidden, columns)
            total[at] += weight[at] * (middle @ w2[expert].t() + c2)
            # Tensor cores cut off bits of the first product, so an activation may be off by an FP8 step, 1/8 of it,
            # or by a few BF16 steps.
            size[at] += weight[at] * (middle.abs() @ w2[expert].abs().t() + abs(c2))
        allowed = size * (2.0**-3 if columns else 2.0**-5) + total.abs() * 2.0**-7 + 1e-6
        return {"out": Right(total, allowed)}


class PlainWeight:
    """A weight in BF16, without scales, with the methods of `fp8.Weight`."""

    depths = 8
    columns_of_a = 0

    def __init__(self, draw: Draw, **_: object) -> None:
        self.draw = draw

    def said(self, _: bool) -> dict[str, Any]:
        """Return the keywords that describe scales in a call: none."""
        return {}

    def refused(self, _: bool) -> str:
        """Return the faults of scales that a layer refuses: none, because there are no scales."""
        return ""

    def is_beside(self, other: PlainWeight) -> None:
        """Do nothing: BF16 weights have no facts to share."""

    def room(self, shape: Sequence[int]) -> tuple[Tensor, None]:
        """Allocate the weight, in either layout."""
        turned = self.draw.flag()
        x = self.draw.matrix((*shape[:-2], *((shape[-1], shape[-2]) if turned else shape[-2:])), torch.bfloat16)
        return x.mT if turned else x, None

    def fill(self, w: Tensor, _: None) -> None:
        """Draw numbers with which results have about the magnitude of x."""
        w.copy_(self.draw.normal(w.shape) / w.shape[-1] ** 0.5)

    def given(self, w: Tensor, _: None) -> Tensor:
        """Return a weight unchanged."""
        return w

    def numbers(self, w: Tensor, _: None) -> Tensor:
        """Convert the weight to FP64."""
        return w.double()


class ExpertsBf16(Experts):
    """`experts` with weights in BF16."""

    kind = "experts_bf16"
    make_weight = PlainWeight

    def refused_faults(self) -> Mapping[str, str]:
        """Return the `faults` that this problem must refuse; scales have none."""
        return {name: faults for name, faults in super().refused_faults().items() if name in self.operands}


class Routing(Trial):
    """`expert_rows`, `gather_cast_to_fp8` and `gather_weighted`."""

    kind = "routing"
    faults: ClassVar = {"x": "cast_type", "topk_weights": "dtype shape device"}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.tokens, self.topk, self.experts = draw.size(1, 2000), draw.rng.randint(1, 8), draw.rng.choice((1, 8, 256))
        self.k = draw.size(8, 1000, 8)
        self.ids_type, self.columns = draw.rng.choice((torch.int32, torch.int64)), draw.rng.choice((128, 128, 64, 32))
        self.operands = {
            "x": draw.matrix((self.tokens, self.k), torch.bfloat16),
            "topk_ids": torch.empty(self.tokens, self.topk, dtype=self.ids_type, device=draw.device),
            "topk_weights": torch.empty(self.tokens, self.topk, device=draw.device, dtype=torch.float32),
        }
        self.outputs = {"out": draw.output((self.tokens, self.k), torch.bfloat16)}

    def fill(self) -> None:
        """Draw integers, so that sums are exact."""
        x, draw = self.operands, self.draw
        x["x"].copy_(draw.integers(x["x"].shape, -4, 4))
        x["topk_ids"].copy_(draw.integers(x["topk_ids"].shape, -1, self.experts - 1))
        x["topk_weights"].copy_(draw.integers(x["topk_weights"].shape, -4, 4))

    def call(self, x: Tensors) -> Tensors:
        """Make rows, gather tokens into them both unchanged and in FP8, and sum them up again."""
        rows = routing.expert_rows(x["topk_ids"], self.experts)
        values, sf = routing.gather_cast_to_fp8(x["x"], rows, gran_k=self.columns)
        y = x["x"].index_select(0, rows.token_of.clamp(min=0))
        routing.gather_weighted(y, rows, x["topk_weights"], out=x["out"])
        return {"ends": rows.ends, "ids": rows.ids, "token_of": rows.token_of, "values": values, "scales": sf}

    def right(self) -> dict[str, Right]:
        """Compute the rows with a stable sort."""
        x = self.operands
        expert = x["topk_ids"].flatten().long()
        key = torch.where(expert < 0, self.experts, expert)
        in_order, route = key.sort(stable=True)
        has_token = in_order < self.experts
        token = route // self.topk
        ends = torch.bincount(key, minlength=self.experts + 1)[: self.experts].cumsum(0)
        values, sf = cast_blocks(x["x"], Target(1, self.columns))
        bytes_of_rows = values.view(torch.uint8).index_select(0, token).view(torch.float8_e4m3fn)
        weight = (x["topk_weights"] * (x["topk_ids"] >= 0)).double().sum(1, keepdim=True)
        return {
            "ends": Right(ends),
            "ids": Right(in_order.masked_fill(~has_token, -1)),
            "token_of": Right(token.masked_fill(~has_token, -1)),
            "values": Right(bytes_of_rows, None, has_token[:, None]),
            "scales": Right(sf[token], None, has_token[:, None]),
            "out": Right(weight * x["x"].double()),
        }

"""Mega MoE of a single process. A Hopper GPU computes it as for several ranks, with its own memory as a peer's."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from deep_gemm.across import mega_by_peers
from deep_gemm.across.mega_check import SWIGLU, mega_sizes
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.rules import Target
from deep_gemm.core.check.checks import Operand
from deep_gemm.distributed import SM90SymmBuffer, fp8_mega_moe
from deep_gemm.gemm.ask.silu import INTERLEAVED, SILU_COLUMNS
from deep_gemm.moe.activation import silu_mul

from ...casts import spread
from ..draw import Draw
from ..trial import Right, Tensors, Trial
from . import fp8

FILLED = ("x", "x_sf", "topk_idx", "topk_weights")


class MegaMoe(Trial):
    """`fp8_mega_moe`."""

    kind = "fp8_mega_moe"
    columns, type_of_first = SILU_COLUMNS, torch.float32
    faults: ClassVar = {
        "l1": fp8.SCALES,
        "l2": fp8.SCALES,
        "sfl1": fp8.SCALES,
        "sfl2": fp8.SCALES,
        "y": fp8.OUTPUT,
        "counts": fp8.INTS,
    }
    make_weight: ClassVar[type[fp8.Weight]] = fp8.Weight

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.tokens, self.topk, self.experts = draw.size(1, 300), draw.rng.randint(1, 6), draw.rng.choice((1, 3, 8, 20))
        self.hidden, self.middle = draw.size(256, 1024, 256), draw.size(128, 512, 128)
        self.limit = draw.rng.choice((None, 0.5, 4.0))
        device, blocks = torch.device(draw.device), self.hidden // 128
        sizes = mega_sizes(
            self.experts, self.tokens, self.topk, self.hidden, self.middle, True, SWIGLU, rank=0, ranks=1
        )
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.buffer = SM90SymmBuffer(sizes, device, None, mega_by_peers.peers_of(sizes, device, None))
        self.operands = {
            "x": torch.empty(self.tokens, self.hidden, device=device, dtype=torch.float32).to(torch.float8_e4m3fn),
            "x_sf": torch.empty(self.tokens, blocks, device=device, dtype=torch.float32),
            "topk_idx": torch.empty(self.tokens, self.topk, dtype=torch.int64, device=device),
            "topk_weights": torch.empty(self.tokens, self.topk, device=device, dtype=torch.float32),
        }
        shapes = {"l1": (self.experts, 2 * self.middle, self.hidden), "l2": (self.experts, self.hidden, self.middle)}
        self.weights = {name: self.make_weight(draw, exact=True, low=-6, high=-3) for name in shapes}
        for name, shape in shapes.items():
            self.operands[name], self.operands["sf" + name] = self.weights[name].room(shape)
        self.outputs = {
            "y": draw.output((self.tokens, self.hidden), torch.bfloat16),
            "counts": draw.output((1, self.experts), torch.int32, packed=True),
        }
        self.starts = {"counts": draw.integers((1, self.experts), 0, 1000, torch.int32)}

    def fill(self) -> None:
        """Draw small integer tokens and weights, and routes; some routes have no expert."""
        x, draw = self.operands, self.draw
        fp8.fill_values(draw, x["x"], exact=True)
        x["x_sf"].copy_(draw.powers_of_two(x["x_sf"].shape, -3, 0))
        x["topk_idx"].copy_(draw.integers(x["topk_idx"].shape, -1, self.experts - 1))
        x["topk_weights"].copy_(draw.powers_of_two(x["topk_weights"].shape, -3, 0))
        for name, weight in self.weights.items():
            weight.fill(x[name], x["sf" + name])

    def call(self, x: Tensors) -> Tensors:
        """Fill the buffer as callers do, and compute into the given output."""
        for name, target in zip(FILLED, self.buffer.tensors, strict=False):
            target[: self.tokens].copy_(x[name])
        counts = x["counts"]
        counts = counts[0] if counts.dim() == 2 and len(counts) == 1 else counts
        l1, l2 = (weight.given(x[name], x["sf" + name]) for name, weight in self.weights.items())
        self.compute(x["y"], l1, l2, counts)
        return {}

    def compute(self, y: Tensor, l1: Operand, l2: Operand, counts: Tensor) -> None:
        """Call `fp8_mega_moe` with these weights."""
        fp8_mega_moe(y, l1, l2, self.buffer, counts, activation_clamp=self.limit)

    def first_weight(self, expert: int) -> Tensor:
        """Return the FP64 numbers of an expert's first weight, with the gate's rows first."""
        x = self.operands
        return self.weights["l1"].numbers(gate_first(x["l1"][expert]), x["sfl1"][expert])

    def right(self) -> dict[str, Right]:
        """Compute the output route by route."""
        x = self.operands
        tokens, ids = spread(x["x"], x["x_sf"], 1), x["topk_idx"]
        total = torch.zeros(self.tokens, self.hidden, dtype=torch.float64, device=tokens.device)
        allowed = torch.zeros_like(total)
        w2 = self.weights["l2"].numbers(x["l2"], x["sfl2"])
        for expert in range(self.experts):
            w1 = self.first_weight(expert)
            at, column = (ids == expert).nonzero(as_tuple=True)
            first = (tokens[at] @ w1.t()).to(self.type_of_first)
            middle = silu_mul(first, self.limit) * x["topk_weights"][at, column, None]
            values, scales = cast_blocks(middle, Target(1, self.columns))
            cast = values.double() * scales.double().repeat_interleave(self.columns, 1)
            route = cast @ w2[expert].t()
            # Tensor cores cut off bits of the first product, so an activation may be off by an FP8 step, 1/8 of it.
            size = cast.abs() @ w2[expert].abs().t()
            total.index_add_(0, at, route)
            allowed.index_add_(0, at, size * 2.0**-3 + route.abs() * 2.0**-8)
        came = torch.bincount(ids[ids >= 0], minlength=self.experts)
        return {
            "y": Right(total, allowed + total.abs() * 2.0**-8 + 1e-6),
            "counts": Right(self.starts["counts"] + came.int()),
        }


def gate_first(l1: Tensor) -> Tensor:
    """Reorder alternating rows: first all rows of gate, then all of up."""
    rows, hidden = l1.shape
    turns = l1.view(torch.uint8).view(rows // (2 * INTERLEAVED), 2, INTERLEAVED, hidden)
    return turns.transpose(0, 1).reshape(l1.shape).view(l1.dtype)

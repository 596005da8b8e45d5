"""BF16 products: dense, groups of rows, groups along k, and expressions. All sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

import deep_gemm

from ..draw import Draw
from ..trial import Right, Tensors
from . import dense, fp8, rows

BF16, LARGEST = torch.bfloat16, 4


class OfBf16(fp8.OfFp8):
    """The code that kinds of BF16 products share: operands without scales, and exact sums."""

    def drawn_exactness(self) -> bool:
        """Choose small integers always."""
        return True

    def drawn_depth(self, most: int) -> int:
        """Draw k: a multiple of 8, because k is contiguous in some operands."""
        return self.draw.size(8, most, 8)

    def room_of_a(self, *rows: int) -> dict[str, Tensor]:
        """Allocate A."""
        a = self.draw.matrix((*rows, self.k), BF16, turned=self.turned_a)
        return {"a": a.mT if self.turned_a else a}

    def room_of_b(self, *rows: int) -> dict[str, Tensor]:
        """Allocate B, in either memory layout for either shape."""
        b = self.draw.matrix((*rows, self.k), BF16, turned=self.turned if len(rows) == 1 else self.draw.flag())
        return {"b": b.mT if self.turned else b}

    def fill_operands(self) -> None:
        """Draw small integers."""
        for name in ("a", "b"):
            self.operands[name].copy_(self.draw.integers(self.operands[name].shape, -LARGEST, LARGEST))

    def given(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        return x["a"], x["b"]

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the FP64 numbers of A `[..., m, k]` and B `[..., n, k]`."""
        a, b = self.operands["a"].double(), self.operands["b"].double()
        return a.mT if self.turned_a else a, b.mT if self.turned else b


class DenseBf16(OfBf16, dense.Dense):
    """`bf16_gemm_nt` and its relatives."""

    kind = "bf16_gemm"
    calls: ClassVar = {
        "nt": deep_gemm.bf16_gemm_nt,
        "nn": deep_gemm.bf16_gemm_nn,
        "tn": deep_gemm.bf16_gemm_tn,
        "tt": deep_gemm.bf16_gemm_tt,
    }
    majors: ClassVar = tuple(calls)
    has_rows = False

    def drawn_rows(self) -> int:
        """Draw m."""
        return self.draw.size(8, 3000, 8) if self.turned_a else super().drawn_rows()

    def refused_faults(self) -> Mapping[str, str]:
        """Return the faults that a call must refuse: operands may have any layout."""
        found = {"a": fp8.VALUES, "b": fp8.VALUES, "d": fp8.OUTPUT + " expanded"}
        return found | ({"c": "dtype shape device"} if self.c == "c" else {})


class RowsBf16(OfBf16, rows.Contiguous):
    """`m_grouped_bf16_gemm_nt_contiguous` and its nn form."""

    kind = "m_grouped_bf16_contiguous"
    faults: ClassVar = {"a": fp8.VALUES, "b": "dtype address shape device", "layout": "dtype device", "d": fp8.OUTPUT}
    calls = deep_gemm.m_grouped_bf16_gemm_nt_contiguous, deep_gemm.m_grouped_bf16_gemm_nn_contiguous


class MaskedBf16(OfBf16, rows.Masked):
    """`m_grouped_bf16_gemm_nt_masked`."""

    kind = "m_grouped_bf16_masked"
    faults: ClassVar = {**dict.fromkeys(("a", "b", "d"), "dtype address shape device"), "masked_m": fp8.INTS}
    calls = (deep_gemm.m_grouped_bf16_gemm_nt_masked,)

    def right(self) -> dict[str, Right]:
        """Compute all rows; rows from a group's count on are undefined, but inside of D."""
        found = super().right()
        found["d"].rest_is_kept = False
        return found


class DepthsBf16(OfBf16):
    """`k_grouped_bf16_gemm_tn_contiguous`."""

    kind = "k_grouped_bf16"
    faults: ClassVar = {
        **dict.fromkeys(("a", "b"), "dtype address stride device"),
        "d": "dtype address shape device",
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        groups, self.c = draw.rng.choice((1, 2, 5, 12)), draw.rng.choice((None, "c", "d"))
        of_64 = draw.flag(0.7)
        self.ks = [0 if draw.flag(0.2) else draw.size(1, 700, 64 if of_64 else 1) for _ in range(groups)]
        self.m, self.n = draw.size(8, 1000, 8), draw.size(8, 1000, 8)
        self.dtype = BF16 if draw.flag(0.2) else torch.float32
        total = sum(self.ks) + draw.rng.choice((0, 0, 9))
        self.is_counted = draw.flag(0.4)  # only the GPU has the depths, and each call of `fill` draws other depths
        self.operands = {
            "a": torch.empty(total, self.m, dtype=BF16, device=draw.device),
            "b": torch.empty(total, self.n, dtype=BF16, device=draw.device),
        }
        if self.is_counted:
            self.operands["grouped_layout"] = torch.tensor(self.ks, dtype=torch.int32, device=draw.device)
        if self.c == "c":
            self.operands["c"] = torch.empty(groups, self.m, self.n, dtype=self.dtype, device=draw.device)
        self.outputs = {"d": draw.output((groups, self.m, self.n), self.dtype, packed=True)}

    def fill(self) -> None:
        """Draw everything anew, except depths that the host passes."""
        super().fill()
        if self.is_counted:
            self.draw.rng.shuffle(self.ks)
            self.operands["grouped_layout"].copy_(torch.tensor(self.ks, dtype=torch.int32))
        self.draw_c((len(self.ks), self.m, self.n), self.c)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        c = {"c": x.get("c"), "d": x["d"], None: None}[self.c]
        ks = None if self.is_counted else self.ks
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x["a"], x["b"], x["d"], ks, x.get("grouped_layout"), c)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D group by group."""
        parts = []
        first = 0
        for k in self.ks:
            a, b = (self.operands[name][first : first + k].double() for name in ("a", "b"))
            parts.append(a.t() @ b)
            first += k
        exact = torch.stack(parts)
        c = self.operands.get("c", self.starts.get("d"))
        return {"d": Right(exact if c is None else exact + c.double())}


class Expressions(OfBf16):
    """`einsum`."""

    kind = "einsum"
    faults: ClassVar = dict.fromkeys(("a", "d"), "dtype address shape device") | {"b": "dtype address device"}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.expr = draw.rng.choice(("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr"))
        sizes = {
            "b": draw.size(1, 300),
            "h": draw.rng.choice((1, 2, 5, 8)),
            "d": draw.size(8, 500, 8),
            "r": draw.size(8, 500, 8),
            "m": draw.size(8, 400, 8),
            "n": draw.size(8, 400, 8),
            "k": draw.size(64, 512, 64),
        }
        operands, result = self.expr.split("->")
        shapes = {name: [sizes[axis] for axis in of] for name, of in zip("ab", operands.split(","), strict=True)}
        self.operands = {name: torch.empty(shape, dtype=BF16, device=draw.device) for name, shape in shapes.items()}
        self.dtype = torch.float32 if self.expr in ("bmk,bnk->mn", "bhd,bhr->hdr") and draw.flag() else BF16
        self.adds = self.dtype == torch.float32 and draw.flag()
        self.shape = [sizes[axis] for axis in result]
        self.outputs = {"d": draw.output(self.shape, self.dtype, packed=True)}

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        if self.adds:
            self.starts["d"] = self.draw.integers(self.shape, -8, 8)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        deep_gemm.einsum(self.expr, x["a"], x["b"], x["d"], x["d"] if self.adds else None)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D by torch, in FP64."""
        exact = torch.einsum(self.expr, self.operands["a"].double(), self.operands["b"].double())
        return {"d": Right(exact + self.starts["d"].double() if self.adds else exact)}

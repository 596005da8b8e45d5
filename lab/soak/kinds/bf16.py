"""BF16 products: dense, groups of rows, groups along k, and expressions. All sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from deep_gemm.core.settings import get_mk_alignment_for_contiguous_layout
from deep_gemm.gemm import bf16

from ..draw import Draw
from ..trial import Right, Tensors, Trial
from .groups import draw_counts, draw_layout, ids_of_ends, rows_written

BF16, LARGEST = torch.bfloat16, 4
CALLS = {"nt": bf16.bf16_gemm_nt, "nn": bf16.bf16_gemm_nn, "tn": bf16.bf16_gemm_tn, "tt": bf16.bf16_gemm_tt}


class OfBf16(Trial):
    """The common parts of all kinds of BF16."""

    def fill(self) -> None:
        """Whole numbers."""
        for name in ("a", "b"):
            self.operands[name].copy_(self.draw.integers(self.operands[name].shape, -LARGEST, LARGEST))


class DenseBf16(OfBf16):
    """`bf16_gemm_nt` and its relatives."""

    kind = "bf16_gemm"

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.major = draw.rng.choice(tuple(CALLS))
        self.dtype = torch.float32 if draw.flag(0.3) else BF16
        self.c = draw.rng.choice((None, None, "c", "d"))
        # A dimension that lies contiguous is a multiple of 8.
        self.m = draw.size(8, 3000, 8) if self.major[0] == "t" else draw.size(1, 3000)
        self.n, self.k = draw.size(8, 3000, 8), draw.size(8, 4096, 8)
        a, b = (
            (self.k, self.m) if self.major[0] == "t" else (self.m, self.k),
            (self.k, self.n) if self.major[1] == "n" else (self.n, self.k),
        )
        self.operands = {"a": draw.matrix(a, BF16), "b": draw.matrix(b, BF16)}
        self.outputs = {"d": draw.output((self.m, self.n), self.dtype)}
        if self.c == "c":
            self.operands["c"] = draw.matrix((self.m, self.n), self.dtype)

    @property
    def text(self) -> str:
        """The problem in a few words."""
        return f"{self.major} {self.m}x{self.n}x{self.k} {self.dtype} C={self.c}"

    def refused_faults(self) -> Mapping[str, str]:
        """All operands are taken as they lie."""
        faults = {"a": "dtype address stride shape device", "b": "dtype address stride shape device"}
        return {
            **faults,
            "d": "dtype address stride shape device expanded",
            **({"c": "dtype shape device"} if self.c == "c" else {}),
        }

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.draw_c((self.m, self.n), self.c)

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        CALLS[self.major](x["a"], x["b"], x["d"], {"c": x.get("c"), "d": x["d"], None: None}[self.c])
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D in FP64."""
        a, b = self.operands["a"].double(), self.operands["b"].double()
        exact = (a.t() if self.major[0] == "t" else a) @ (b if self.major[1] == "n" else b.t())
        c = self.operands.get("c", self.starts.get("d"))
        return {"d": Right(exact if c is None else exact + c.double())}


class RowsBf16(OfBf16):
    """`m_grouped_bf16_gemm_nt_contiguous` and its nn form."""

    kind = "m_grouped_bf16_contiguous"
    faults: ClassVar = {
        "a": "dtype address stride shape device",
        "b": "dtype address shape device",
        "layout": "dtype device",
        "d": "dtype address stride shape device",
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.nn, self.by_ends, self.zero_padding = draw.flag(0.4), draw.flag(), draw.flag(0.7)
        self.groups, self.m = draw.rng.choice((1, 2, 5, 16, 33)), draw.size(1, 2000)
        self.n, self.k = draw.size(8, 1500, 8), draw.size(8, 1500, 8)
        self.dtype = torch.float32 if draw.flag(0.2) else BF16
        self.alignment = get_mk_alignment_for_contiguous_layout()
        b = draw.matrix((self.groups, self.n, self.k), BF16, turned=draw.flag())
        self.operands = {
            "a": draw.matrix((self.m, self.k), BF16),
            "b": b.mT if self.nn else b,
            "layout": torch.empty(self.groups if self.by_ends else self.m, dtype=torch.int32, device=draw.device),
        }
        self.outputs = {"d": draw.output((self.m, self.n), self.dtype)}

    @property
    def text(self) -> str:
        """The problem in a few words."""
        form = ("nn " if self.nn else "nt ") + ("ends" if self.by_ends else "ids")
        return f"{form} {self.groups} groups {self.m}x{self.n}x{self.k} {self.dtype}"

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.operands["layout"].copy_(draw_layout(self.draw, self.m, self.groups, self.alignment, self.by_ends))

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        product = bf16.m_grouped_bf16_gemm_nn_contiguous if self.nn else bf16.m_grouped_bf16_gemm_nt_contiguous
        of_layout: Any = {"use_psum_layout": self.by_ends, "ensure_zero_padding": self.zero_padding}
        product(x["a"], x["b"], x["d"], x["layout"], **of_layout)
        return {}

    def right(self) -> dict[str, Right]:
        """Group by group."""
        x = self.operands
        ids = ids_of_ends(x["layout"], self.m, self.alignment) if self.by_ends else x["layout"]
        b = (x["b"].mT if self.nn else x["b"]).double()
        exact = torch.zeros(self.m, self.n, dtype=torch.float64, device=b.device)
        for group in range(self.groups):
            at = (ids == group).nonzero().flatten()
            exact[at] = x["a"][at].double() @ b[group].t()
        written = rows_written(ids, self.alignment, self.zero_padding, self.by_ends)
        return {"d": Right(exact, None, written)}


class MaskedBf16(OfBf16):
    """`m_grouped_bf16_gemm_nt_masked`."""

    kind = "m_grouped_bf16_masked"
    faults: ClassVar = {
        "a": "dtype address shape device",
        "b": "dtype address shape device",
        "masked_m": "dtype shape device",
        "d": "dtype address shape device",
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.groups, self.max_m = draw.rng.choice((1, 2, 5, 16)), draw.size(1, 600)
        self.n, self.k = draw.size(8, 1000, 8), draw.size(8, 1500, 8)
        self.dtype = torch.float32 if draw.flag(0.2) else BF16
        self.expected_m = draw.rng.choice((1, self.max_m))
        self.operands = {
            "a": draw.matrix((self.groups, self.max_m, self.k), BF16),
            "b": draw.matrix((self.groups, self.n, self.k), BF16),
            "masked_m": torch.empty(self.groups, dtype=torch.int32, device=draw.device),
        }
        self.outputs = {"d": draw.output((self.groups, self.max_m, self.n), self.dtype)}

    @property
    def text(self) -> str:
        """The problem in a few words."""
        return f"{self.groups} groups of {self.max_m}x{self.n}x{self.k} {self.dtype}"

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.operands["masked_m"].copy_(draw_counts(self.draw, self.groups, self.max_m))

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        bf16.m_grouped_bf16_gemm_nt_masked(x["a"], x["b"], x["d"], x["masked_m"], self.expected_m)
        return {}

    def right(self) -> dict[str, Right]:
        """All rows; those behind a group's count are undefined, but lie inside of D."""
        x = self.operands
        row = torch.arange(self.max_m, device=self.draw.device)
        written = (row < x["masked_m"][:, None])[..., None]
        return {"d": Right(x["a"].double() @ x["b"].double().mT, None, written, rest_is_kept=False)}


class DepthsBf16(OfBf16):
    """`k_grouped_bf16_gemm_tn_contiguous`."""

    kind = "k_grouped_bf16"
    faults: ClassVar = {
        "a": "dtype address stride device",
        "b": "dtype address stride device",
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
        self.is_counted = draw.flag(0.4)  # on the GPU alone, where each filling draws other depths
        self.operands = {
            "a": torch.empty(total, self.m, dtype=BF16, device=draw.device),
            "b": torch.empty(total, self.n, dtype=BF16, device=draw.device),
        }
        if self.is_counted:
            self.operands["grouped_layout"] = torch.tensor(self.ks, dtype=torch.int32, device=draw.device)
        if self.c == "c":
            self.operands["c"] = torch.empty(groups, self.m, self.n, dtype=self.dtype, device=draw.device)
        self.outputs = {"d": draw.output((groups, self.m, self.n), self.dtype, packed=True)}

    @property
    def text(self) -> str:
        """The problem in a few words."""
        return f"{self.m}x{self.n} ks={self.ks} {self.dtype} C={self.c} counted={self.is_counted}"

    def fill(self) -> None:
        """Draw all anew, but depths that the host states."""
        super().fill()
        if self.is_counted:
            self.draw.rng.shuffle(self.ks)
            self.operands["grouped_layout"].copy_(torch.tensor(self.ks, dtype=torch.int32))
        self.draw_c((len(self.ks), self.m, self.n), self.c)

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        c = {"c": x.get("c"), "d": x["d"], None: None}[self.c]
        ks = None if self.is_counted else self.ks
        bf16.k_grouped_bf16_gemm_tn_contiguous(x["a"], x["b"], x["d"], ks, x.get("grouped_layout"), c)
        return {}

    def right(self) -> dict[str, Right]:
        """Group by group."""
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
    faults: ClassVar = {
        "a": "dtype address shape device",
        "b": "dtype address device",
        "d": "dtype address shape device",
    }

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

    @property
    def text(self) -> str:
        """The problem in a few words."""
        shapes = " ".join("x".join(map(str, x.shape)) for x in self.operands.values())
        return f"{self.expr} {shapes} {self.dtype} adds={self.adds}"

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        if self.adds:
            self.starts["d"] = self.draw.integers(self.shape, -8, 8)

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        bf16.einsum(self.expr, x["a"], x["b"], x["d"], x["d"] if self.adds else None)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D by torch, in FP64."""
        exact = torch.einsum(self.expr, self.operands["a"].double(), self.operands["b"].double())
        return {"d": Right(exact + self.starts["d"].double() if self.adds else exact)}

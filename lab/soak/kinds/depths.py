"""FP8 products of groups along k; the host knows the depths, or only the GPU does."""

from __future__ import annotations

from typing import ClassVar

import torch

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.api.grouped import k_grouped_fp8_gemm_nt_contiguous

from ...casts import spread
from ..draw import Draw
from ..trial import Right, Tensors
from . import fp8


class Depths(fp8.OfFp8):
    """`k_grouped_fp8_gemm_nt_contiguous`."""

    kind = "k_grouped_fp8"
    faults: ClassVar = {
        **{"a": "dtype address shape device", "b": "dtype address device"},
        **{"sfa": fp8.SCALES, "d": "dtype address"},
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.exact, self.adds, groups = self.drawn_exactness(), draw.flag(), draw.rng.choice((1, 2, 5, 12))
        self.ks = [0 if draw.flag(0.2) else draw.size(16, 700, 16) for _ in range(groups)]
        self.m, self.n = draw.size(1, 800), draw.size(8, 800, 8)
        self.host_knows = draw.flag()
        total, blocks = sum(self.ks), sum(ceil_div(k, 128) for k in self.ks)
        self.operands = {
            "a": torch.empty(self.m * total, dtype=torch.float8_e4m3fn, device=draw.device),
            "sfa": draw.scales((self.m, blocks)),
            "b": torch.empty(self.n * total, dtype=torch.float8_e4m3fn, device=draw.device),
            "sfb": draw.scales((self.n, blocks)),
        }
        if not self.host_knows:
            self.operands["ks_tensor"] = torch.tensor(self.ks, dtype=torch.int32, device=draw.device)
        self.outputs = {"d": draw.output((groups, self.m, self.n), torch.float32, packed=True)}

    def fill(self) -> None:
        """Draw everything anew, except the depths."""
        super().fill()
        if self.adds:
            self.starts["d"] = self.draw.integers((len(self.ks), self.m, self.n), -8, 8)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        ks = self.ks if self.host_knows else None
        c = x["d"] if self.adds else None
        k_grouped_fp8_gemm_nt_contiguous((x["a"], x["sfa"]), (x["b"], x["sfb"]), x["d"], ks, x.get("ks_tensor"), c)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D group by group."""
        x, first, block = self.operands, 0, 0
        found = []
        for group, k in enumerate(self.ks):
            blocks = slice(block, block + ceil_div(k, 128))
            a = x["a"][self.m * first : self.m * (first + k)].view(self.m, k)
            b = x["b"][self.n * first : self.n * (first + k)].view(self.n, k)
            c = self.starts["d"][group] if self.adds else None
            found.append(
                fp8.product(
                    spread(a, x["sfa"][:, blocks], 1), spread(b, x["sfb"][:, blocks], 1), c, torch.float32, self.exact
                )
            )
            first, block = first + k, blocks.stop
        allowed = None if self.exact else torch.stack([bound for _, bound in found])  # type: ignore[misc]
        return {"d": Right(torch.stack([right for right, _ in found]), allowed)}

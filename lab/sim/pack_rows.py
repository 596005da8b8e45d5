"""The `pack_rows` kernel in the simulator, with the source and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.across import pack_rows
from deep_gemm.across.message import pack, row_bytes
from deep_gemm.across.pack_rows import PackConfig

from .launcher import How, Stage
from .library import HostKernel
from .trial import Trial, same

POISON = -0x5A5A5A5A


def run(
    kernel: HostKernel | None,
    config: PackConfig,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor | None,
    shape: tuple[int, int],
    **how: Unpack[How],
) -> Tensor:
    """Pack tokens on simulated SMs into int32 rows of this shape. Elements that stay unwritten are poison."""
    rows = torch.full(shape, POISON, dtype=torch.int32)
    given = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "row_of": row_of}
    stage = Stage(config, given, {"rows": rows}, {"x": 16, "rows": 16}, **how)
    slots = shape[0] if row_of is None else x.shape[0]
    stage.run(
        pack_rows.KERNEL,
        kernel,
        lambda at: pack_rows.values_of(**{"row_of": None, **at}),
        pack_rows.grid(config, slots, x.shape[1]),
    )
    return rows


@dataclass(frozen=True)
class PackTrial(Trial):
    """Random tokens: each has some rows; or each has one row, and `behind` more rows have no token."""

    kernel = pack_rows.KERNEL
    config: PackConfig
    tokens: int
    hidden: int
    topk: int
    seed: int = 0
    behind: int | None = None
    schedule: str | None = None

    @classmethod
    def drawn(cls, config: PackConfig, seed: int) -> PackTrial:
        """Draw sizes, and whether each token has a fixed row."""
        draw = random.Random(seed)
        sizes = draw.randint(1, 6), 16 * draw.randint(1, 70), draw.randint(1, 20)
        return cls(config, *sizes, seed, behind=draw.choice((None, 0, 3)))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare rows with the result of torch's operations, bit for bit."""
        g = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.tokens, self.hidden + 16, generator=g, dtype=torch.float32)
        x[-1] *= 2.0**-110  # neither tiny numbers nor infinities are ordinary
        x[0, 5] = torch.inf
        x = x.to(self.config.dtype)[:, : self.hidden]
        ids = torch.randint(-1, 99, (self.tokens, self.topk), generator=g)
        given = ids.to(torch.int64 if self.config.id_bytes == 8 else torch.int32)
        if self.config.id_bytes == 8:
            given[0, 0], ids[0, 0] = (1 << 32) + 1, -1
        p = torch.randn(self.tokens, self.topk, generator=g, dtype=torch.float32)
        words = row_bytes(self.hidden, self.topk) // 4
        row_of = None
        rows = self.tokens + (self.behind or 0)
        if self.behind is None:
            rows = self.tokens * self.topk
            row_of = torch.randperm(rows, generator=g).int().view(self.tokens, self.topk)
            some = torch.randint(0, self.topk + 1, (self.tokens, 1), generator=g)
            row_of[torch.arange(self.topk) >= some] = -1
        found = run(kernel, self.config, x, given, p, row_of, (rows, words), **self.how)
        right = torch.full_like(found, POISON)
        of_tokens = pack(x, ids, p)
        if row_of is None:
            right[: self.tokens] = of_tokens
            routes = self.hidden // 4 + -(-self.hidden // 128)
            right[self.tokens :, routes : routes + self.topk] = -1
            right[self.tokens :, routes + self.topk :] = 0
        else:
            token, column = (row_of >= 0).nonzero(as_tuple=True)
            right[row_of[token, column].long()] = of_tokens[token]
        same("rows", found, right)
        return 0.0

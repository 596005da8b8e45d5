"""The `experts_few` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.gating import Gating, activated
from deep_gemm.moe.experts_few import KERNEL, FewConfig, values_of

from ..casts import assert_near_bf16, wider
from .cast_rows import OF_ACTIVATIONS
from .launcher import How, Stage
from .library import HostKernel
from .trial import Trial, same

GATINGS = Gating(), Gating(limit=1.5), Gating(alpha=1.7, beta=1.0), Gating("situ", 1.5, 2.0)


def run(
    kernel: HostKernel | None,
    config: FewConfig,
    b: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    d: Tensor,
    gating: Gating = GATINGS[0],
    **how: Unpack[How],
) -> Tensor:
    """Compute rows on simulated SMs, into `d`, and give the rows of routes, which the first product alone writes.

    The second asks for weights while the first may still write the activations.
    """
    row_of = torch.full(topk_ids.shape, -9, dtype=torch.int32)
    written = {"d": d, "row_of": None if config.is_second else row_of}
    given, aligned = {"b": b, "topk_ids": topk_ids, "w": w}, dict.fromkeys(("b", "w", "d"), 16)
    stage = Stage(config, given, written, aligned, ready=("topk_ids", "w") if config.is_second else (), **how)
    stage.run(
        KERNEL,
        kernel,
        lambda at: values_of(config, at["b"], at["topk_ids"], at.get("row_of"), at["w"], at["d"], gating),
        stage.num_sms,
    )
    return row_of


def rows_of(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Give the row of each route, and the expert and token of each row."""
    pairs = sorted({(int(e), t) for t, ids in enumerate(topk_ids) for e in ids if 0 <= e < num_experts})
    of = {pair: row for row, pair in enumerate(pairs)}
    row_of = [[of.get((int(e), t), -1) for e in ids] for t, ids in enumerate(topk_ids)]
    return torch.tensor(row_of, dtype=torch.int32).view(topk_ids.shape), pairs


@dataclass(frozen=True)
class FewTrial(Trial):
    """One product of random routes; `n` columns of its rows."""

    kernel = KERNEL
    config: FewConfig
    tokens: int
    topk: int = 2
    num_experts: int = 5
    n: int = 48
    k: int = 144
    seed: int = 0
    schedule: str | None = None
    gating: Gating = GATINGS[0]
    ids: torch.dtype = torch.int64

    @classmethod
    def drawn(cls, config: FewConfig, seed: int) -> FewTrial:
        """Draw sizes, and how many experts there are: few that share the tokens, or many without a token."""
        draw = random.Random(f"{config.name} {seed}")
        return cls(
            config,
            draw.choice((config.columns, draw.randint(1, config.columns))),
            draw.randint(1, 4),
            draw.choice((1, 3, 40, 512)),
            16 * draw.randint(1, 8) if config.is_second else 8 * draw.randint(1, 12),
            8 * draw.choice((1, 8, 9, 17, 40)),
            seed,
            gating=draw.choice(GATINGS),
            ids=draw.choice((torch.int32, torch.int64)),
            num_sms=draw.randint(1, 5),
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare rows of the second product to the bit, as sums are exact, and activations as casts compare them."""
        g = torch.Generator().manual_seed(self.seed)
        is_second = self.config.is_second
        ids = torch.randint(-1, self.num_experts, (self.tokens, self.topk), generator=g).to(self.ids)
        for other in (self.num_experts, 1 << 32 if self.ids == torch.int64 else -2):  # no expert has these
            ids[torch.rand(ids.shape, generator=g, dtype=torch.float32) < 0.1] = other
        row_of, pairs = rows_of(ids, self.num_experts)
        count = ids.numel() if is_second else self.tokens
        b = torch.randint(-3, 4, (count, self.k), generator=g).bfloat16()
        if is_second:
            b[len(pairs) :] = torch.nan
        rows = self.n if is_second else 2 * self.n
        w = (torch.randint(-31, 32, (self.num_experts, rows, self.k), generator=g) / 256).bfloat16()
        d = torch.full((ids.numel(), self.n), torch.nan, dtype=torch.bfloat16)
        right = d.clone()
        for row, (expert, token) in enumerate(pairs):
            product = (w[expert].double() @ b[row if is_second else token].double()).bfloat16()
            right[row] = product if is_second else activated(product[None], self.gating)[0].bfloat16()
        wide_ids = torch.cat([ids, ids + 1], 1)[:, : self.topk]
        b = b if is_second else wider(b, 8, torch.nan)
        found = run(kernel, self.config, b, wide_ids, w, d, self.gating, **self.how)
        if is_second:
            same("rows", d.view(torch.int16), right.view(torch.int16))
        else:
            same("row_of", found, row_of)
            same("rows without a token", d[len(pairs) :].isnan(), right[len(pairs) :].isnan())
            assert_near_bf16(d[: len(pairs)], right[: len(pairs)], OF_ACTIVATIONS)
            others = int((d[: len(pairs)] != right[: len(pairs)]).sum())
            assert others <= 2 + d.numel() // 50, f"{others} of {d.numel()} activations are rounded to another number"
        return 0.0

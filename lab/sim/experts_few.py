"""The `experts_few` kernel in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.gating import Gating, activated
from deep_gemm.casts.rules import FP8_MAX, Rows
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.moe.experts_few import KERNEL, MOST_TOKENS, FewConfig, values_of

from ..casts import assert_near_bf16, spread, wider
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
    w: Rows,
    d: Tensor,
    gating: Gating = GATINGS[0],
    first_expert: int = 0,
    **how: Unpack[How],
) -> Tensor:
    """Compute rows on simulated SMs into `d`, and return each route's row, which only the first product writes.

    The second product loads weights while the first one may still write the activations.
    """
    row_of = torch.full(topk_ids.shape, -9, dtype=torch.int32)
    written = {"d": d, "row_of": None if config.is_second else row_of}
    given = {"b": b, "topk_ids": topk_ids, "w": w[0], "sfw": w[1]}
    ready = ("topk_ids", "w", "sfw") if config.is_second else ()
    stage = Stage(config, given, written, dict.fromkeys(("b", "w", "d"), 16), ready=ready, **how)

    def values(at: Any) -> dict[str, Any]:
        w = at["w"], at.get("sfw")
        return values_of(config, at["b"], at["topk_ids"], at.get("row_of"), w, at["d"], gating, first_expert)

    stage.run(KERNEL, kernel, values, stage.num_sms)
    return row_of


def rows_of(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the row of each route, and the expert and token of each row."""
    pairs = sorted({(int(e), t) for t, ids in enumerate(topk_ids) for e in ids if 0 <= e < num_experts})
    of = {pair: row for row, pair in enumerate(pairs)}
    row_of = [[of.get((int(e), t), -1) for e in ids] for t, ids in enumerate(topk_ids)]
    return torch.tensor(row_of, dtype=torch.int32).view(topk_ids.shape), pairs


def drawn_for(config: FewConfig, rows: int, shape: tuple[int, int, int], g: torch.Generator) -> tuple[Tensor, Rows]:
    """Draw B and weights of this shape whose sums are exact: the scales of B's cast are powers of two."""
    experts, n, k = shape
    b = torch.randint(-3, 4, (rows, k), generator=g)
    if config.scales is None:
        return b.bfloat16(), ((torch.randint(-31, 32, shape, generator=g) / 256).bfloat16(), None)
    columns = config.scales.columns or k
    b[:, (k - 1) % columns :: columns] = int(FP8_MAX)
    exponents = torch.randint(-2, 3, (rows, ceil_div(k, columns)), generator=g)
    b = b * 2.0 ** exponents.repeat_interleave(columns, 1)[:, :k]
    blocks = experts, ceil_div(n, config.scales.rows), 1 if config.scales == WHOLE else ceil_div(k, SCALE_BLOCK)
    scales = 2.0 ** torch.randint(-13, -8, blocks, generator=g)
    values = torch.randint(-3, 4, shape, generator=g).to(torch.float8_e4m3fn)
    return b.to(torch.float32 if config.is_second else torch.bfloat16), (values, scales.float())


def numbers_of(config: FewConfig, w: Rows) -> Tensor:
    """Convert weights to FP64 numbers."""
    values, scales = w
    if config.scales is None or scales is None:
        return values.double()
    return spread(values, scales, config.scales.rows, config.scales.columns or values.shape[-1])


@dataclass(frozen=True)
class FewTrial(Trial):
    """One product with random routes; `n` is the number of columns."""

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
    first_expert: int = 0
    """The id of the first expert."""

    @classmethod
    def drawn(cls, config: FewConfig, seed: int) -> FewTrial:
        """Draw sizes and the number of experts: few experts, or many experts, most of them without a token."""
        draw = random.Random(f"{config.name} {seed}")
        return cls(
            config,
            draw.choice((MOST_TOKENS, draw.randint(1, MOST_TOKENS))),
            draw.randint(1, 4),
            draw.choice((1, 3, 40, 512)),
            16 * draw.randint(1, 8) if config.is_second else 8 * draw.randint(1, 12),
            (8 if config.scales is None else 16) * draw.choice((1, 8, 9, 17, 40)),
            seed,
            gating=draw.choice(GATINGS),
            ids=draw.choice((torch.int32, torch.int64)),
            first_expert=draw.choice((0, 37)),
            num_sms=draw.randint(1, 5),
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare the second product's rows bit for bit, because sums are exact; compare activations like casts."""
        g = torch.Generator().manual_seed(self.seed)
        is_second = self.config.is_second
        ids = torch.randint(-1, self.num_experts, (self.tokens, self.topk), generator=g).to(self.ids)
        for other in (self.num_experts, 1 << 32 if self.ids == torch.int64 else -2):  # ids without an expert
            ids[torch.rand(ids.shape, generator=g, dtype=torch.float32) < 0.1] = other
        row_of, pairs = rows_of(ids, self.num_experts)
        count = ids.numel() if is_second else self.tokens
        shape = self.num_experts, self.n if is_second else 2 * self.n, self.k
        b, w = drawn_for(self.config, count, shape, g)
        if is_second:
            b[len(pairs) :] = torch.nan
        numbers, is_fp32 = numbers_of(self.config, w), self.config.scales is not None and not is_second
        d = torch.full((ids.numel(), self.n), torch.nan, dtype=torch.float32 if is_fp32 else torch.bfloat16)
        right = d.clone()
        for row, (expert, token) in enumerate(pairs):
            product = (numbers[expert] @ b[row if is_second else token].double()).bfloat16()
            right[row] = product if is_second else activated(product[None], self.gating)[0].to(d.dtype)
        ids = ids.where(ids == -1, ids + self.first_expert)
        wide_ids = torch.cat([ids, ids + 1], 1)[:, : self.topk]
        b = b if is_second else wider(b, 8, torch.nan)
        found = run(kernel, self.config, b, wide_ids, w, d, self.gating, self.first_expert, **self.how)
        if is_second:
            same("rows", d.view(torch.int16), right.view(torch.int16))
        else:
            same("row_of", found, row_of)
            same("rows without a token", d[len(pairs) :].isnan(), right[len(pairs) :].isnan())
            assert_near_bf16(d[: len(pairs)], right[: len(pairs)], 2.0**-13 if is_fp32 else OF_ACTIVATIONS)
            if is_fp32:
                return 0.0
            others = int((d[: len(pairs)] != right[: len(pairs)]).sum())
            assert others <= 2 + d.numel() // 50, f"{others} of {d.numel()} activations are rounded to another number"
        return 0.0

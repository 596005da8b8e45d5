"""Grouped BF16 rows in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from deep_gemm.gemm.config.bf16 import BLOCK_K, Bf16Config
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.gemm.problem import Problem

from .bf16 import operand
from .product import draws, ids_of, near_edge
from .rows import RowsTrial, drawn_bias, drawn_layout


def random_problem(config: Bf16Config, layout: Any, n: int, k: int, seed: int = 0, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments."""
    return Bf16RowsTrial(config, tuple(layout), seed, n=n, k=k, **more).problem()


@dataclass(frozen=True)
class Bf16RowsTrial(RowsTrial):
    """One layout of rows: ids, ends or counts."""

    kernel = BF16_GEMM
    k: int = 200
    zero_padding: bool = False
    limit: float | None = None
    """The limit of gate and up, if the product activates its rows."""

    @classmethod
    def takes(cls, config: Any) -> bool:
        """Accept grouped rows, except rows that are stored to addresses."""
        return config.work.groups_rows and not config.epilogue.has_row_addresses

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> Self:
        """Draw empty groups, short groups and groups longer than a tile; and columns around a tile's edges."""
        draw = draws(config, seed)
        alignment = draw.choice((1, 16, 128))
        layout, rows = drawn_layout(draw, config, alignment)
        may_zero = not (config.work.has_planes or config.epilogue.activates)
        return cls(
            config,
            layout if not config.work.reads_ids else (*layout, 0),
            seed,
            n=near_edge(draw, config.block_n, 8, blocks=1),
            k=BLOCK_K * draw.randint(1, 4) - draw.choice((0, 8 * draw.randrange(8))),
            rows=rows,
            alignment=alignment,
            zero_padding=may_zero and draw.random() < 0.5,
            num_sms=draw.randint(1, 5),
            limit=draw.choice((None, 0.5)),
        )

    def problem(self) -> Problem:
        """Draw random matrices; A is NaN in rows without a group. Sums before an activation are exact, and small."""
        generator, numbers = torch.Generator().manual_seed(self.seed), torch.tensor(self.layout, dtype=torch.int32)
        epilogue = self.config.epilogue
        columns = self.n * (1 + epilogue.activates)
        a = operand((*self.shape, self.k), False, 0, generator, epilogue.activates)
        b = operand((self.groups, columns, self.k), self.config.majors.b_is_mn, 0, generator, epilogue.activates)
        if epilogue.activates:
            b *= 11 / 256
        of_rows: dict[str, Any] = {"alignment": self.alignment, "zero_padding": self.zero_padding}
        of_rows |= {"expected_m": self.shape[-1] / self.groups, "epilogue": epilogue, "limit": self.limit}
        of_rows["bias"] = drawn_bias(self.config, self.groups, self.n, generator)
        p = Problem(a, None, b, None, self.room(), numbers, self.config.work, None, None, **of_rows)
        a[ids_of(p) < 0] = float("nan")
        return p

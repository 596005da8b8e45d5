"""Grouped rows of BF16 in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deep_gemm.gemm.config.bf16 import BLOCK_K, Bf16Config
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.gemm.problem import Problem

from .library import HostKernel
from .product import Outcome, ProductTrial, draws, ids_of, near_edge, run
from .rows import drawn_layout

CANARY = 12345.0
"""Value of D beforehand: rows without a group keep it."""


def random_problem(
    config: Bf16Config,
    layout: Sequence[int],
    n: int,
    k: int,
    seed: int = 0,
    *,
    rows: int | None = None,
    alignment: int = 128,
    zero_padding: bool = False,
) -> Problem:
    """Make a problem with random data for a layout of the configuration's kind; A is NaN in rows without a group."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(layout, dtype=torch.int32)
    groups = int(numbers.max()) + 1 if config.work.reads_ids else len(layout)
    if config.work.reads_ids:
        rows = len(layout)
    elif rows is None:
        rows = int(numbers.max())
    planes = (groups,) if config.work.has_planes else ()
    a = torch.randn(*planes, rows, k, generator=generator, dtype=torch.float32).to(torch.bfloat16)
    b = torch.randn(
        groups, *((k, n) if config.majors.b_is_mn else (n, k)), generator=generator, dtype=torch.float32
    ).to(torch.bfloat16)
    b = b.mT if config.majors.b_is_mn else b
    d = torch.full((*planes, rows, n), CANARY, dtype=torch.float32 if config.is_fp32 else torch.bfloat16)
    of_rows = {"alignment": alignment, "zero_padding": zero_padding, "expected_m": rows / groups}
    p = Problem(a, None, b, None, d, numbers, config.work, None, None, **of_rows)  # type: ignore[arg-type]
    a[ids_of(p) < 0] = float("nan")
    return p


@dataclass(frozen=True)
class Bf16RowsTrial(ProductTrial):
    """One layout of rows: ids, ends or counts."""

    kernel = BF16_GEMM
    config: Bf16Config
    layout: tuple[int, ...] = (0, 3, 70)
    n: int = 136
    k: int = 200
    seed: int = 0
    schedule: str | None = None
    rows: int | None = None
    alignment: int = 128
    zero_padding: bool = False

    @classmethod
    def takes(cls, config: Bf16Config) -> bool:
        """Take grouped rows."""
        return config.work.groups_rows

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> Bf16RowsTrial:
        """Draw groups: empty, short and longer than a tile; and columns around a tile's edges."""
        draw = draws(config, seed)
        alignment = draw.choice((1, 16, 128))
        layout, rows = drawn_layout(draw, config, alignment)
        return cls(
            config,
            layout if not config.work.reads_ids else (*layout, 0),
            near_edge(draw, config.block_n, 8, blocks=1),
            BLOCK_K * draw.randint(1, 4) - draw.choice((0, 8 * draw.randrange(8))),
            seed,
            rows=rows,
            alignment=alignment,
            zero_padding=not config.work.has_planes and draw.random() < 0.5,
            num_sms=draw.randint(1, 5),
        )

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        of_rows = {"rows": self.rows, "alignment": self.alignment, "zero_padding": self.zero_padding}
        p = random_problem(self.config, self.layout, self.n, self.k, self.seed, **of_rows)  # type: ignore[arg-type]
        return run(kernel, self.config, p, **self.how)

"""The `cast_depths` kernel in the simulator, with the source and parameters of a GPU's launch.

Rows after the last group are NaN and have no token. Outputs are filled with poison before the launch, and must still
be poison after the last group.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import cast_depths
from deep_gemm.casts.cast_depths import OF_SILU, DepthsCast, DepthsCastConfig, Source, grid, room_of
from deep_gemm.casts.depths import GroupedRows, Silu, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.rules import Quantized, empty_scales
from deep_gemm.core.check.layout import SCALE_BLOCK, align, ceil_div

from ..casts import MOST_OTHERS, assert_near, assert_near_bf16, assert_same_bits, wider, wild
from .cast_rows import POISON, poison, run_kernel, strided
from .launcher import How
from .library import HostKernel
from .trial import Trial

OUTPUTS = ("columns", "column_scales", "values", "scales", "activated", "activated_scales", "sums")
OF_BF16 = 2.0**-7
"""Elements are rounded to BF16 first, and may be the BF16 number next to the reference's. So may a scale."""
OF_SUMS = 2.0**-15
"""Allowed error of sums: a GPU's sigmoid is within 2^-17, and sums are rounded in another order."""


def run_cast(kernel: HostKernel | None, config: DepthsCastConfig, p: DepthsCast, **how: Unpack[How]) -> None:
    """Cast like `casts.cast_depths.run`, into the outputs of `p`, on simulated SMs."""
    aligned = dict.fromkeys(("x", "ds", "columns", "values", "activated"), 16)
    run_kernel(cast_depths, kernel, config, p, OUTPUTS, aligned, lambda _: grid(p), **how)


def of_groups(columns: Quantized, groups: GroupedRows) -> Quantized:
    """Return the groups' part of columns, without the unused space after it."""
    k, blocks = columns[1].shape[0], sum(ceil_div(count, SCALE_BLOCK) for count in groups.counts.tolist())
    return columns[0][: k * int(groups.depths.sum())], columns[1][:, :blocks]


def _near(found: Quantized, right: Quantized) -> float:
    return assert_near(found, right, OF_BF16) if found[0].numel() else 0.0


@dataclass(frozen=True)
class DepthsTrial(Trial):
    """One configuration, groups, columns, seed and schedule."""

    kernel = cast_depths.KERNEL
    config: DepthsCastConfig
    counts: tuple[int, ...] = (5, 0, 130)
    k: int = 144
    """Columns of the matrix that is cast along groups, or of gate and of up."""
    seed: int = 0
    schedule: str | None = None
    behind: int = 3
    """Number of rows after the last group."""
    limit: float | None = None
    parts: str = "both"
    """The parts of SiLU to compute: `gradient`, `activation`, or both."""
    ends: tuple[int, ...] = ()
    """Ends that contradict `counts`. Then results are undefined, but a write outside of the outputs is a mistake."""

    @classmethod
    def drawn(cls, config: DepthsCastConfig, seed: int) -> DepthsTrial:
        """Draw groups, columns and a limit."""
        draw = random.Random(seed)
        counts = tuple(
            draw.choice((0, 1, draw.randint(1, 40), draw.randint(1, 200))) for _ in range(draw.randint(1, 5))
        )
        k, limit = draw.randint(1, 16) * 16, draw.choice((None, 1.5))
        if config.source == Source.SILU_AT_ONCE:
            k = align(k, SCALE_BLOCK)
        elif config.source == Source.SILU_ROWS:
            k //= draw.choice((1, 2))
        elif config.source == Source.SILU and k % SCALE_BLOCK == 0:
            k -= 16  # for whole blocks a call would choose another configuration
        parts = draw.choice(("both", "gradient", "activation"))
        return cls(config, counts, k, seed, behind=draw.randint(0, 20), limit=limit, parts=parts)

    @property
    def groups(self) -> GroupedRows:
        """Return the groups, with a token for each of their rows."""
        counts = torch.tensor(self.counts, dtype=torch.int32)
        used, generator = sum(self.counts), torch.Generator().manual_seed(self.seed)
        token_of = torch.randint(0, max(used // 2, 1), (used + self.behind,), generator=generator, dtype=torch.int32)
        token_of[used:] = -1
        return GroupedRows(counts, counts.cumsum(0, dtype=torch.int32), token_of)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare casts of tokens bit for bit, and SiLU's results with an error of up to one step of FP8."""
        groups = self.groups
        if len(groups.token_of) == 0:
            return 0.0
        generator = torch.Generator().manual_seed(self.seed + 1)
        p = torch.rand(len(groups.token_of), generator=generator, dtype=torch.float32) * 2
        p[sum(self.counts) :] = torch.nan
        if self.config.source in OF_SILU:
            return self._check_silu(kernel, groups, p)
        weights = p if self.config.source == Source.WEIGHTED else None
        x = wider(wild(max(sum(self.counts) // 2, 1), self.k, self.config.dtype, self.seed, block_rows=32), 32, 3.0)
        columns, used = self._room(groups, self.k)
        rows = len(groups.token_of)
        ends = torch.tensor(self.ends, dtype=torch.int32) if self.ends else groups.ends
        run_cast(kernel, self.config, DepthsCast(x, ends, rows, groups.token_of, weights, *columns), **self.how)
        if self.ends:
            return 0.0
        assert_same_bits(used(columns), cast_along_groups(x, groups, weights))
        return 0.0

    def _check_silu(self, kernel: HostKernel | None, groups: GroupedRows, p: Tensor) -> float:
        rows, used_rows = len(groups.token_of), sum(self.counts)
        generator = torch.Generator().manual_seed(self.seed + 2)
        h = (torch.randn(rows, 2 * self.k, generator=generator, dtype=torch.float32) * 2).bfloat16()
        ds = torch.randn(rows, self.k, generator=generator, dtype=torch.float32).bfloat16()
        h[used_rows:] = ds[used_rows:] = torch.nan
        has_gradient, has_activation = (self.parts in ("both", part) for part in ("gradient", "activation"))
        is_scaled = self.config.source != Source.SILU_ROWS
        (columns, used), (activated, used_of_s) = self._room(groups, 2 * self.k), self._room(groups, self.k)
        values = poison(rows, 2 * self.k).view(torch.float8_e4m3fn)
        scales = empty_scales((rows,), 2 * self.k, h, mn_major=True)
        sums = torch.full((ceil_div(self.k, SCALE_BLOCK), rows), torch.nan, dtype=torch.float32)
        dh, s = (poison(rows, 2 * k).view(h.dtype) for k in (2 * self.k, self.k))
        room = (*columns, values, scales, *activated) if is_scaled else (None, None, dh, None, s, None)
        asked = [has_gradient] * 4 + [has_activation] * 3
        made = {name: x for name, x, is_asked in zip(OUTPUTS, (*room, sums), asked, strict=True) if is_asked}
        ends = groups.ends if is_scaled else groups.ends[-1:]
        cast = DepthsCast(h, ends, rows, row_weights=p, ds=ds, limit=self.limit, **made)
        run_cast(kernel, self.config, cast, **self.how)
        right = cast_silu_gradient(h, ds, groups, p, self.limit, scaled=is_scaled)
        assert right.of_weights is not None
        others = 0.0
        if has_gradient:
            if bool(((values if is_scaled else dh)[used_rows:].view(torch.uint8) != POISON).any()):
                raise ValueError("values: expected unchanged rows after the last group")
            if right.columns is not None:
                of_rows = [(q[0][:used_rows], q[1][:used_rows]) for q in ((values, scales), right.rows)]
                others = max(_near(of_rows[0], of_rows[1]), _near(used(columns), right.columns))
            else:
                assert_near_bf16(dh[:used_rows], right.rows[0][:used_rows], OF_BF16)
        if has_activation:
            if is_scaled:
                others = max(others, _near(used_of_s(activated), right.activated))
            else:
                assert_near_bf16(s[:used_rows], right.activated[0][:used_rows], OF_BF16)
                assert bool((s[used_rows:].view(torch.uint8) == POISON).all()), "rows behind the last group"
            of_s = Silu.of(h[:used_rows], self.limit).s
            off = (sums.sum(0) - right.of_weights[0])[:used_rows].abs()
            if not bool((off <= OF_SUMS * (of_s * ds[:used_rows].float()).abs().sum(1)).all()):
                raise ValueError(f"sums: expected the reference's sums, got an error of {float(off.max()):.2g}")
        if others > MOST_OTHERS:
            raise ValueError(f"{others:.2%} of values are next to the right ones")
        return others / MOST_OTHERS

    def _room(self, groups: GroupedRows, k: int) -> tuple[Quantized, Callable[[Quantized], Quantized]]:
        """Allocate columns filled with poison, and a function that returns the groups' part and checks the rest."""
        depth, blocks = room_of(len(groups.token_of), len(self.counts))
        values = poison(k * depth).view(torch.float8_e4m3fn)
        scales = strided(torch.Size((k, blocks)), (1, align(k, 4)))

        def used(room: Quantized) -> Quantized:
            found = of_groups(room, groups)
            is_behind = values.view(torch.uint8)[found[0].numel() :]
            if bool((is_behind != POISON).any()) or not bool(scales[:, found[1].shape[1] :].isnan().all()):
                raise ValueError("values: expected unchanged memory after the last group")
            return found

        return (values, scales), used

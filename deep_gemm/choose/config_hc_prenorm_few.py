"""The configuration of the `hc_prenorm_few` kernel: few rows times few columns, by warps that share out k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..problem.hyper_connections import COLUMNS
from ..problem.layout import align, ceil_div
from .config_hc_prenorm import CHUNK_BYTES, MAX_CLUSTER

TILE_ROWS = 16
"""Rows of a tile: as many as a product of mma.sync has."""
STEP = 32
"""Values of k that a warp multiplies at a time."""
AHEAD = {8: 4, 16: 3, 24: 3, 32: 2}
"""Steps that a warp has under way, by columns: as many as there are registers for."""


@dataclass(frozen=True)
class HcFewConfig:
    """One configuration."""

    block_n: int
    """Columns of a tile: all of them, or 8 if tiles are few."""
    cluster: int = 1
    """CTAs that share out k."""
    warps: int = 8
    """Warps of a CTA, which take steps by turns."""
    ahead: int = 3
    """Steps that a warp has in registers."""

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return TILE_ROWS

    @property
    def name(self) -> str:
        """Short, for people; such as "16x8/k16/w8 4 ahead"."""
        return f"{TILE_ROWS}x{self.block_n}/k{self.cluster}/w{self.warps} {self.ahead} ahead"

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * 32

    @property
    def chunks(self) -> int:
        """Parts of a tile's sums: four of each lane of a warp, of 8 columns or of squares."""
        return self.block_n // 8 + 1

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/hc_prenorm_few.cuh, which asserts that it is the same, in whole 16 bytes."""
        sent = self.cluster * ceil_div(self.chunks, self.cluster) * CHUNK_BYTES if self.cluster > 1 else 16
        return align(self.warps * self.chunks * CHUNK_BYTES + sent + 8, 16)

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.block_n in COLUMNS, f"tiles of {COLUMNS} columns"
        yield 1 <= self.cluster <= MAX_CLUSTER, f"clusters of 1 to {MAX_CLUSTER} CTAs"
        yield 1 <= self.warps <= 16, "1 to 16 warps"
        yield 1 <= self.ahead <= 8, "1 to 8 steps ahead"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        numbers = {
            "kBlockN": self.block_n,
            "kClusterK": self.cluster,
            "kWarps": self.warps,
            "kAhead": self.ahead,
            "kNumMathWarps": 1,
            "kSharedBytes": self.shared_bytes,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in numbers.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


def tiles(config: HcFewConfig, m: int, n: int, splits: int) -> int:
    """Count tiles of D, of all splits: each has a cluster."""
    return ceil_div(m, TILE_ROWS) * (n // config.block_n) * splits


def grid(config: HcFewConfig, m: int, n: int, splits: int, num_sms: int) -> int:
    """A cluster for each tile, whatever `num_sms` is: it decides whether this kernel is chosen."""
    return tiles(config, m, n, splits) * config.cluster

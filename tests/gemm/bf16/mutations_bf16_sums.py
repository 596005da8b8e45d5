"""Ways to break sums over BF16 products, in what they share with no other kernel, and the trials they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deep_gemm.gemm.bf16.choose import SUM_OUTPUT
from deep_gemm.gemm.bf16.config import Bf16Config, bf16_config
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from deep_gemm.gemm.bf16.sum_slices import KERNEL as SUM_SLICES
from deep_gemm.gemm.bf16.sum_slices import SlicesConfig, reachable_slices
from lab.sim import bf16 as sim_bf16
from lab.sim import bf16_sums as sim
from lab.sim.mutate import Mutation

ONE_IN = 2


@dataclass(frozen=True)
class Products:
    """Kernels of both launches, of which mutations change the same sources."""

    config: Bf16Config
    output: SlicesConfig


@dataclass(frozen=True)
class Trial:
    """Configurations, slices, a problem, seed and schedule. The shape is products, m, n, k."""

    config: Products
    slices: int
    shape: tuple[int, int, int, int]
    seed: int = 0
    schedule: str | None = None

    def headers(self) -> dict[str, str]:
        return {name: text for name, text in SUM_SLICES.headers(self.config.output).items() if name in SOURCES}

    def run(self, headers: Mapping[str, str]) -> None:
        edits = {name: headers[name] for name in SOURCES}
        config, output = self.config.config, self.config.output
        kernel, adder = sim_bf16.compile_config(config, edits), sim.compile_slices(output, edits)
        p = sim.random_problem(config, *self.shape, output, self.seed)
        outcome = sim.run(kernel, adder, config, self.slices, p, seed=self.seed, schedule=self.schedule)
        if outcome.mistakes is not None:
            raise ValueError(outcome.mistakes)


_SUMS, _SLICES = "work/sums.cuh", "sum_slices.cuh"
SOURCES = (_SUMS, _SLICES)
BF16, FP32, ADDED = reachable_slices()
CONFIG = bf16_config(64, 64, SUM_OUTPUT)
FEW, MANY, ADDING = (Products(CONFIG, output) for output in (BF16, FP32, ADDED))

TRIALS = [
    Trial(FEW, 4, (5, 70, 72, 192), 1),
    Trial(MANY, 83, (83, 2, 136, 64), 2),
    Trial(ADDING, 3, (3, 40, 72, 128), 3),
]

assert all(name in BF16_GEMM.headers(CONFIG) for name in SOURCES)

MUTATIONS = [
    Mutation("all slices begin at the first block", _SUMS, "k_blocks * tile.plane / p.sum.slices", "0 * tile.plane / p.sum.slices", shows_in=FEW),
    Mutation("slices end where they begin", _SUMS, "(tile.plane + 1) / p.sum.slices", "tile.plane / p.sum.slices", shows_in=FEW),
    Mutation("blocks of one product alone", _SUMS, "static_cast<uint64_t>(p.sum.products) *", "static_cast<uint64_t>(1) *", shows_in=FEW),
    Mutation("A of the first product", _SUMS, "slot.a, k, tile.row_m, product)", "slot.a, k, tile.row_m, 0)", shows_in=FEW),
    Mutation("B of the first product", _SUMS, "slot.b, k, tile.row_n, product)", "slot.b, k, tile.row_n, 0)", shows_in=FEW),
    Mutation("the first block of each product", _SUMS, "(k_block - product * k_blocks_of_product) * kBlockK", "0", shows_in=FEW),
    Mutation("one slice of all", _SUMS, "return p.sum.slices;", "return 1;", shows_in=FEW),
    Mutation("slices read before they are written", _SLICES, "  ptx::griddepcontrol_wait();\n", "", shows_in=FEW),
    Mutation("the last slice left out", _SLICES, "p.count * (warp + 1) / kWarps", "(p.count - 1) * (warp + 1) / kWarps", shows_in=FEW),
    Mutation("the first slices of every warp", _SLICES, "first = p.count * warp / kWarps", "first = 0", shows_in=FEW),
    Mutation("as many slices as are loaded at once", _SLICES, "first < end; first += kAtOnce", "first < end; first += p.count", shows_in=MANY),
    Mutation("a slice's columns again", _SLICES, "at + (first + i) * plane", "at", shows_in=FEW),
    Mutation("warps do not meet", _SLICES, "  ptx::syncthreads();\n", "", shows_in=FEW),
    Mutation("the last warp's sum left out", _SLICES, "i = 1; i < kWarps", "i = 1; i + 1 < kWarps", shows_in=FEW),
    Mutation("columns outside stored", _SLICES, "if (warp != 0 || !is_any) return;", "if (warp != 0) return;", shows_in=FEW),
    Mutation("D not added", _SLICES, "if constexpr (kAddsToD) add", "if constexpr (false) add", shows_in=ADDING),
    Mutation("the first row alone", _SLICES, "static_cast<uint64_t>(row) * p.d_pitch", "static_cast<uint64_t>(0) * p.d_pitch", shows_in=FEW),
]  # fmt: skip

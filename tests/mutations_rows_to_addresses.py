"""Ways to break the epilogue that stores rows at addresses, and the trials they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from test_sim_rows import ids_of_sizes

from deep_gemm.choose.config import GemmConfig
from deep_gemm.choose.config_of_tile import tile_config
from deep_gemm.kernels import fp8_gemm
from deep_gemm.kernels.rows_to_addresses import OUTPUT
from deep_gemm.problem import ContiguousProblem
from deep_gemm.sim import rows as sim_rows
from deep_gemm.sim import rows_to_addresses as sim
from deep_gemm.sim.dense import compile_config
from deep_gemm.sim.mutate import Mutation


@dataclass(frozen=True)
class Trial:
    """One configuration, seed and schedule."""

    config: GemmConfig
    n: int
    k: int
    seed: int
    schedule: str | None = None

    def headers(self) -> dict[str, str]:
        return fp8_gemm.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        ids = [*ids_of_sizes([70, 0, 3, 129, 1]), *[-1] * 130]
        problem = sim_rows.random_problem(self.config, ids, self.n, self.k, self.seed, zero_padding=False)
        assert isinstance(problem, ContiguousProblem)
        kernel = compile_config(self.config, headers)
        outcome = sim.run(kernel, self.config, problem, seed=self.seed, schedule=self.schedule)
        if outcome.mistakes is not None:
            raise ValueError(outcome.mistakes)


ONE_UNIT = tile_config(128, 32, OUTPUT, k=128)
TWO_UNITS = replace(tile_config(128, 64, OUTPUT, k=128), unit_n=32, panel_columns=32, num_store_buffers=1)
"""As the widest tiles have, but narrow; one buffer for both."""
TRIALS = [
    *(Trial(ONE_UNIT, 72, 128, seed, name) for seed, name in ((1, None), (2, "late_stores"), (3, "slow_lanes"))),
    *(Trial(TWO_UNITS, 72, 128, seed, name) for seed, name in ((4, None), (5, "late_stores"), (6, "slow_warps"))),
]
_STORE, _KERNEL = "epilogue/store_rows.cuh", "fp8_gemm.cuh"
MUTATIONS = [
    Mutation("rows of a warpgroup alike", _STORE, "row_of_lane(warpgroup * 64 + ", "row_of_lane("),
    Mutation("rows of a warp alike", _STORE, "ptx::warp_index() % 4 * 16 + ptx::lane_index()", "ptx::lane_index()"),
    Mutation("warps share a buffer", _STORE, " + ptx::warp_index() % 4 * kWarpBytes)", ")"),
    Mutation("warpgroups share a buffer", _STORE, "storage.buffers + warpgroup * kNumStoreBuffers * kBufferBytes", "storage.buffers"),
    Mutation("a tile's first rows' addresses", _STORE, "tile.row_m + row_of_unit(i * kUnitsAlongN) + row_of_lane;", "row_of_unit(i * kUnitsAlongN) + row_of_lane;"),
    Mutation("lanes 16 to 31 copy too", _STORE, "ptx::lane_index() < 16 && row", "row"),
    Mutation("rows past the group's end go too", _STORE, "row < tile.end_m) words", "row < p.m) words"),
    Mutation("addresses of the tile before", _KERNEL, "      output.expect(p, tile);\n", ""),
    Mutation("half an address", _STORE, "uint64_t{words.y} << 32 | words.x", "words.x"),
    Mutation("addresses of 4 bytes", _STORE, "uint64_t{row} * 8", "uint64_t{row} * 4"),
    Mutation("a buffer is written while it is read", _STORE, "      ptx::tma_store_wait_read<kNumStoreBuffers - 1>();\n", ""),
    Mutation("rows without room behind them", _STORE, "rows + lane * kRowPitch, columns", "rows + lane * (kRowPitch - 16), columns"),
    Mutation("what is copied is not fenced", _STORE, "      ptx::fence_proxy_async_shared();  // every writing thread, before what it wrote is copied\n", ""),
    Mutation("rows are copied before all lanes have written", _STORE, "before what it wrote is copied\n      ptx::syncwarp();\n", "before what it wrote is copied\n"),
    Mutation("a unit's columns are a tile's first", _STORE, "tile.row_n + column_of_unit(unit);", "tile.row_n;", shows_in=TWO_UNITS),
    Mutation("all rows begin at column 0", _STORE, "(address) + column * 2,", "(address),"),
    Mutation("columns past the last are copied", _STORE, "p.n - column < kUnitN ? p.n - column : kUnitN", "kUnitN"),
    Mutation("units past the last column go", _STORE, "address != 0 && column < p.n", "address != 0", shows_in=TWO_UNITS),
    Mutation("rows go nowhere's way", _STORE, "address != 0 && column < p.n", "column < p.n && lane < 16"),
    Mutation("nothing is committed", _STORE, "      ptx::tma_store_commit();\n", ""),
    Mutation("a warp ends while its rows are read", _STORE, "finish() { ptx::tma_store_wait_read<0>(); }", "finish() {}"),
    Mutation("halves of words swapped", _STORE, "ptx::pack_bf16(v[2], v[3])", "ptx::pack_bf16(v[3], v[2])"),
    Mutation("columns 8 to 15 over columns 0 to 7", _STORE, "(column + lane / 16 * 8) * 2", "column * 2"),
]  # fmt: skip

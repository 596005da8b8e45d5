"""Ways to break what the linear_decode kernel does itself, the cast of what it multiplies, and the trials they meet.

What it shares with fp8_gemm_decode and with the casts is broken in their lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from layer_cases import same_bits

from deep_gemm.choose.config_decode import DecodeConfig
from deep_gemm.choose.config_linear_decode import LinearDecodeConfig
from deep_gemm.kernels import linear_decode
from deep_gemm.problem import DenseProblem
from deep_gemm.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.sim import fp8_gemm_decode, mutate
from deep_gemm.sim import linear_decode as sim


@dataclass(frozen=True)
class Trial:
    """One tile, layer, seed and schedule. `special` numbers lie among the others."""

    tile: DecodeConfig
    mnk: tuple[int, int, int]
    seed: int
    schedule: str | None = None
    special: tuple[float, ...] = ()

    @property
    def config(self) -> LinearDecodeConfig:
        return LinearDecodeConfig(self.tile)

    def headers(self) -> dict[str, str]:
        return linear_decode.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        (m, n, k), g = self.mnk, torch.Generator().manual_seed(self.seed)
        x = torch.randn(m, k, generator=g).to(torch.bfloat16)
        for row, number in enumerate(self.special):
            x[row % m, row * 130 % k] = number
        w = per_block_cast_to_fp8(torch.randn(n, k, generator=g) * torch.logspace(0, 2, k))
        room = torch.full((m, k + 8), torch.nan, dtype=torch.bfloat16)
        room[:, :k] = x
        c = torch.randn(n, generator=g).to(torch.bfloat16).expand(m, n) if self.tile.with_c else None
        d = sim.run(
            sim.compile_config(self.config, headers),
            self.config,
            room[:, :k],
            w,
            c,
            seed=self.seed,
            schedule=self.schedule,
            truncate=True,
        )
        a, sfa = per_token_cast_to_fp8(x)
        p = DenseProblem(a, sfa, *w, torch.full_like(d, torch.nan), c, m, n, k, 128)
        right = fp8_gemm_decode.run(fp8_gemm_decode.compile_config(self.tile), self.tile, p, truncate=True).d
        if not same_bits(d, right):
            raise ValueError(f"{int((d != right).sum())} of {d.numel()} elements differ")


ALONE = DecodeConfig(8, 3, 1, 1)
WIDE = DecodeConfig(16, 3, 2, 1, with_c=True)
SPLIT = DecodeConfig(8, 3, 1, 3)
MANY = DecodeConfig(32, 3, 1, 1)

TRIALS = [
    *(Trial(ALONE, (7, 136, 2192), seed) for seed in (1, 2)),
    *(Trial(ALONE, (8, 72, 2192), 3, name) for name in ("slow_warps", "slow_lanes", "late_loads", "slow_producer")),
    *(Trial(ALONE, (8, 64, 2192), seed, "slow_warps") for seed in (4, 5, 6)),
    Trial(ALONE, (11, 72, 400), 7),
    Trial(ALONE, (7, 72, 656), 8, special=(torch.inf, torch.nan, 1e-40, 3e38)),
    Trial(ALONE, (3, 40, 16), 9),
    *(Trial(WIDE, (13, 200, 1296), seed) for seed in (10, 11)),
    Trial(WIDE, (19, 200, 400), 12, "slow_math"),
    *(Trial(SPLIT, (5, 136, 3088), seed, name) for seed, name in ((13, None), (14, "slow_cta"), (15, "slow_warps"))),
    Trial(SPLIT, (5, 72, 144), 16),
    *(Trial(MANY, (29, 72, 656), seed) for seed in (17, 18)),
]

_KERNEL = "linear_decode.cuh"
_BAR = "    ptx::bar_sync(1, kNumMathThreads);\n"
Mutation = mutate.Mutation

MUTATIONS = [
    # The ring and the kernel ahead
    Mutation("slots are not waited for", _KERNEL, "    wait_until_free(shared.ring, at);\n", ""),
    Mutation("B loaded before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n  RingPosition at", "  RingPosition at"),
    Mutation("x loaded before the kernel ahead has ended", _KERNEL, "    ptx::griddepcontrol_wait();\n    float total", "    float total"),
    Mutation("bytes of whole boxes announced", _KERNEL, "mbarrier_arrive_expect_tx(full, p.slot_bytes)", "mbarrier_arrive_expect_tx(full, kBBytes)"),
    # Blocks
    Mutation("rows of x that are not there are read", _KERNEL, "p.m - work.row_m < kBlockTokens ? p.m - work.row_m : kBlockTokens", "kBlockTokens"),
    Mutation("columns past k are read", _KERNEL, "if (!at.is_there(group) || column >= p.k) continue;", "if (!at.is_there(group)) continue;"),
    Mutation("blocks past the group's are read", _KERNEL, "if (!at.is_there(group) || column >= p.k) continue;", "if (column >= p.k) continue;"),
    Mutation("blocks past the group's are written", _KERNEL, "      if (!at.is_there(group)) continue;\n", ""),
    Mutation("what is not loaded stays as it was", _KERNEL, "      held[i] = {};\n", ""),
    Mutation("a group of all k-blocks that are left", _KERNEL, "work.end_k_block - first < kGroupKBlocks ? work.end_k_block - first : kGroupKBlocks", "work.end_k_block - first"),
    Mutation("a group of a k-block too many", _KERNEL, "count(work.end_k_block - first < kGroupKBlocks ? work.end_k_block - first : kGroupKBlocks)", "count(kGroupKBlocks)"),
    Mutation("quotients rounded down", _KERNEL, "((1 << 20) + count - 1) / count", "(1 << 20) / count"),
    Mutation("k-blocks counted from the first of all", _KERNEL, "(group.k_block + at.k_block) * kBlockK + lane", "at.k_block * kBlockK + lane"),
    Mutation("tokens counted from the first of all", _KERNEL, "static_cast<uint64_t>(work.row_m + at.token) * p.x_pitch", "static_cast<uint64_t>(at.token) * p.x_pitch"),
    Mutation("rows of x lie without gaps", _KERNEL, "(work.row_m + at.token) * p.x_pitch", "(work.row_m + at.token) * p.k * 2"),
    # The cast
    Mutation("a lane's neighbours left out of the largest", _KERNEL, "amax_of(largest_of_team(keys, lane))", "amax_of(keys[lane % kBlocksOfTeam])"),
    Mutation("all blocks count as ordinary", _KERNEL, "if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return false;", ""),
    Mutation("blocks that are not ordinary are left as they are", _KERNEL, " pieces.cast<false>(shared, group, lane);", " {}"),
    Mutation("divided by the scale of another block", _KERNEL, "ptx::shfl_sync(of_lane.scale, first_of_team + i)", "ptx::shfl_sync(of_lane.scale, first_of_team)"),
    Mutation("divided by the scales of the other team", _KERNEL, "first_of_team = ptx::lane_index() / kLanes * kLanes", "first_of_team = 0"),
    Mutation("values not swizzled", _KERNEL, "(lane / 2 ^ token % 8)", "(lane / 2)"),
    Mutation("halves of a chunk swapped", _KERNEL, "+ lane % 2 * 8)", "+ (lane + 1) % 2 * 8)"),
    Mutation("values at the first k-block's place", _KERNEL, "shared.a[at.k_block] + offset", "shared.a[0] + offset"),
    Mutation("scales at another token's place", _KERNEL, "at.k_block * kBlockTokens + at.token, of_lane", "at.k_block * kBlockTokens + (at.token ^ 1), of_lane"),
    Mutation("scales of A without B's", _KERNEL, "of_lane.scale * sfb", "of_lane.scale"),
    Mutation("scales of B of the group's first k-block", _KERNEL, "at.is_there(group) ? at.k_block : 0", "0"),
    Mutation("scales of B of the first block of columns", _KERNEL, "static_cast<uint64_t>(work.row_n / 128) * p.sfb_stride_n", "0"),
    Mutation("scales written past the group's", _KERNEL, "if (lane < kBlocksOfTeam && at.is_there(group))", "if (lane < kBlocksOfTeam)"),
    # Groups
    Mutation("values not shown to WGMMA", _KERNEL, "    ptx::fence_proxy_async_shared();  // WGMMA is going to read what this thread has written\n", ""),
    Mutation("multiplied before all have cast", _KERNEL, _BAR + "    const uint32_t count", "    const uint32_t count"),
    Mutation("cast while others still multiply", _KERNEL, "    ptx::bar_sync(1, kNumMathThreads);  // everybody is done with A and scales\n", ""),
    Mutation("the next group is not loaded", _KERNEL, "      pieces.load(p, work, group, lane);\n    }", "    }"),
    Mutation("A of the next k-block", _KERNEL, "a_address + i * kABytes", "a_address + (i + 1) * kABytes"),
    Mutation("the last group left out", _KERNEL, "if (next >= work.end_k_block) break;", "if (next + kGroupKBlocks > work.end_k_block) break;"),
    Mutation("a CTA without k-blocks takes some", _KERNEL, "  if (work.k_block == work.end_k_block) return;\n", ""),
    Mutation("no block barrier after the barriers' initialization", _KERNEL, "  ptx::syncthreads();\n", ""),
]  # fmt: skip

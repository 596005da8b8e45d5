"""Ways to break the cast_rows kernel and what the kernels that cast share, and the trials they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from casts import assert_same_bits, hard_quotients, wild

from deep_gemm.choose.config_cast import CastConfig, cast_config
from deep_gemm.kernels import cast_rows
from deep_gemm.problem.layout import align, ceil_div
from deep_gemm.quantize import per_token_cast_to_fp8
from deep_gemm.sim import cast_rows as sim
from deep_gemm.sim.mutate import Mutation


@dataclass(frozen=True)
class Trial:
    """One configuration, matrix, seed and schedule. Without a shape, the matrix of hard quotients."""

    config: CastConfig
    shape: tuple[int, int] | None
    seed: int = 0
    schedule: str | None = None
    is_m_major: bool = True
    min_amax: float = 0.0
    rounds_up: bool = False

    def headers(self) -> dict[str, str]:
        return cast_rows.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        kernel = sim.compile_config(self.config, headers)
        x = hard_quotients() if self.shape is None else wild(*self.shape, self.config.dtype, self.seed)
        m, k = x.shape
        if self.seed % 2 == 0 and self.shape is not None:  # rows of a wider matrix
            x = torch.cat([x, torch.full((m, 16), 3.0, dtype=x.dtype)], dim=1)[:, :k]
        found = sim.run(
            kernel,
            self.config,
            x,
            (1, align(m, 4)) if self.is_m_major else (ceil_div(k, 128), 1),
            min_amax=self.min_amax,
            rounds_up=self.rounds_up,
            seed=self.seed,
            schedule=self.schedule,
        )
        assert_same_bits(found, per_token_cast_to_fp8(x, self.rounds_up, min_amax=self.min_amax))


BF16, FP16, FP32 = (
    cast_config(dtype, is_aligned=True, is_few=False) for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
FEW, SINGLE, SINGLE_FP32 = (
    cast_config(torch.bfloat16, is_aligned=True, is_few=True),
    cast_config(torch.bfloat16, is_aligned=False, is_few=True),
    cast_config(torch.float32, is_aligned=False, is_few=True),
)

TRIALS = [
    Trial(BF16, (67, 5 * 128 + 24), 1),
    Trial(BF16, (67, 5 * 128 + 24), 2, "slow_warps", is_m_major=False),
    Trial(BF16, (33, 136), 3, "slow_lanes", rounds_up=True),
    Trial(BF16, (33, 520), 3, min_amax=1e3),
    Trial(FP16, (35, 264), 4),
    Trial(FP32, (35, 1028), 5),
    Trial(FP32, (35, 260), 6, "slow_warps", rounds_up=True),
    Trial(FP32, None),
    Trial(FEW, (6, 1416), 7, is_m_major=False),
    Trial(SINGLE, (6, 1403), 8),
    Trial(SINGLE_FP32, (6, 771), 9, "slow_lanes"),
]

_ROWS, _VALUES = "cast_rows.cuh", "cast/values.cuh"

MUTATIONS = [
    # Where things are
    Mutation("blocks of a row rounded down", _ROWS, "ceil_div(ceil_div(p.k, kBlock), kBlocks)", "ceil_div(p.k / kBlock, kBlocks)"),
    Mutation("every CTA takes the first rows", _ROWS, "ptx::block_index() / tiles_k * kRows", "0"),
    Mutation("every CTA takes the first blocks", _ROWS, "ptx::block_index() % tiles_k * kBlocks", "0"),
    Mutation("two passes take the same block", _ROWS, "row((pass * kTeams + team) / kBlocks)", "row((pass / 2 * 2 * kTeams + team) / kBlocks)"),
    Mutation("rows lie as far apart as their values", _ROWS, "row * p.x_pitch * kInputBytes", "row * p.values_pitch * kInputBytes"),
    Mutation("rows lie as far apart as they are long", _ROWS, "p.values + row * p.values_pitch", "p.values + row * p.x_pitch"),
    Mutation("rows past the last are loaded", _ROWS, "row < p.m, (first_block", "true, (first_block"),
    Mutation("rows past the last are stored", _ROWS, "    if (row < p.m)\n      store_piece", "      store_piece"),
    Mutation("scales past the last row are stored", _ROWS, "first_row + row < p.m && ", ""),
    Mutation("scales past the last block are stored", _ROWS, " && (first_block + block) * kBlock < p.k", ""),
    Mutation("the two strides of the scales exchanged", _ROWS, "(first_row + row) * p.scales_stride_m + (first_block + block) * p.scales_stride_k", "(first_row + row) * p.scales_stride_k + (first_block + block) * p.scales_stride_m"),
    Mutation("half of the scales", _ROWS, "i < kRows * kBlocks; i += kNumThreads", "i < kRows * kBlocks / 2; i += kNumThreads"),
    Mutation("columns past the last are loaded", _VALUES, "if (is_there && column < end)", "if (is_there)", shows_in=BF16),
    Mutation("single columns past the last are loaded", _VALUES, "if (!is_there || column >= end) continue;", "if (!is_there) continue;", shows_in=SINGLE),
    Mutation("columns past the last are stored", _VALUES, "    if (column >= end) return;\n", ""),
    Mutation("single columns past the last are stored", _VALUES, "if (column < end) ptx::st_global_b8", "ptx::st_global_b8", shows_in=SINGLE),
    Mutation("lanes take single columns beside each other", _VALUES, "kVector == 1 ? element * kLanes + lane", "kVector == 1 ? element + lane", shows_in=SINGLE),
    Mutation("both elements of a word in its lower half", _VALUES, "<< i % 2 * 16", "<< 0", shows_in=SINGLE),
    # Order
    Mutation("x is loaded before the kernel ahead has ended", _ROWS, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("a team does not wait for its scales", _ROWS, "  ptx::syncwarp();\n", ""),
    Mutation("nobody waits for all scales", _ROWS, "  ptx::syncthreads();\n", ""),
    # Largest magnitudes
    Mutation("signs count", _VALUES, "return (word & kMagnitudes) + kKeyOfZero;", "return word + kKeyOfZero;"),
    Mutation("infinities count in FP32", _VALUES, "kInputIsFp32 ? 0x00800000", "kInputIsFp32 ? 0x007fffff", shows_in=FP32),
    Mutation("infinities count in BF16", _VALUES, ": 0x00800080;", ": 0x007f007f;"),
    Mutation("large numbers do not count in FP16", _VALUES, "0x04000400", "0x08000800", shows_in=FP16),
    Mutation("keys compared as they lie", _VALUES, "static_cast<int32_t>(a) > static_cast<int32_t>(b)", "a > b", shows_in=FP32),
    Mutation("the second elements of words do not count", _VALUES, "return both.x > both.y ? both.x : both.y;", "return both.x;"),
    Mutation("infinities alone", _VALUES, "  uint32_t key = kKeyOfZero;\n#pragma unroll\n  for (uint32_t word : piece.words)", "  uint32_t key = key_of(piece.words[0]);\n#pragma unroll\n  for (uint32_t word : piece.words)"),
    Mutation("half of a team", _VALUES, "for (uint32_t distance = 1; distance < kLanes; distance *= 2)", "for (uint32_t distance = 1; distance < kLanes / 2; distance *= 2)"),
    Mutation("a lane keeps what it should hand over", _VALUES, "keys[is_odd ? 2 * i : 2 * i + 1]", "keys[is_odd ? 2 * i + 1 : 2 * i]"),
    Mutation("a lane keeps the other's keys", _VALUES, "is_odd = (lane & distance) != 0;", "is_odd = (lane & distance) == 0;"),
    # Scales
    Mutation("no floor", _VALUES, "amax = amax < min_amax ? min_amax : amax;", ""),
    Mutation("no least scale", _VALUES, "quotient < kLeastScale ? kLeastScale : quotient", "quotient", shows_in=FP32),
    Mutation("powers of two rounded down", _VALUES, "(ptx::bits_of(least) + 0x7fffff) & 0x7f800000", "ptx::bits_of(least) & 0x7f800000"),
    Mutation("a power of two becomes the next", _VALUES, "ptx::bits_of(least) + 0x7fffff", "ptx::bits_of(least) + 0x800000"),
    Mutation("zeros have the least scale", _VALUES, "amax == 0.f ? 1.f : rounds_up", "rounds_up"),
    Mutation("always powers of two", _VALUES, "rounds_up ? power : least", "power"),
    # Quotients
    Mutation("infinities stay", _VALUES, "ptx::min_magnitude(x * power, 1024.f)", "x * power"),
    Mutation("the largest are cut off", _VALUES, "1024.f)", "512.f)"),
    Mutation("numbers as they are, by a significand", _VALUES, "x * power, 1024.f", "x, 1024.f"),
    Mutation("a power of two too many", _VALUES, "ptx::float_of(0x7f000000 - ", "ptx::float_of(0x7e800000 - "),
    Mutation("a guess is enough", _VALUES, "return ptx::fma(excess, d.reciprocal, guess);", "return guess;", shows_in=FP32),
    Mutation("negative zeros become positive", _VALUES, "ptx::fma(guess, significand_of(d.scale), -reduced);\n  return ptx::fma(excess, d.reciprocal, guess);", "ptx::fma(-guess, significand_of(d.scale), reduced);\n  return ptx::fma(excess, -d.reciprocal, guess);"),
    Mutation("pairs of values exchanged", _VALUES, "ptx::pack_e4m3(a, b) | ptx::pack_e4m3(c, d) << 16", "ptx::pack_e4m3(c, d) | ptx::pack_e4m3(a, b) << 16"),
    Mutation("the first four twice", _VALUES, "pack_quotients(v[4], v[5], v[6], v[7])", "low"),
]  # fmt: skip

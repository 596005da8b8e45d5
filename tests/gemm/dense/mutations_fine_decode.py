"""Mistakes in the fp8_gemm_decode kernel's code for fine scales, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.core.check.recipes import BLOCKS_OF_32, BLOCKS_OF_64, MX, PER_64
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.config.decode import DecodeConfig
from lab.sim.fp8_gemm_decode import DecodeTrial as Trial
from lab.sim.mutate import Mutation

BLOCKS = DecodeConfig(16, 3, 2, 1, is_fp32=True, sfb=BLOCKS_OF_32)
ROWS = DecodeConfig(8, 3, 2, 2, is_fp32=True, sfa=MX, sfb=MX)
TALL = DecodeConfig(32, 3, 2, 1, is_fp32=True, sfa=MX, sfb=MX)
HALVES = DecodeConfig(24, 2, 1, 3, is_fp32=True, with_c=True, sfa=PER_64, sfb=BLOCKS_OF_64)

TRIALS = [
    *(Trial(BLOCKS, 13, 200, 1296, seed) for seed in (1, 2)),
    *(Trial(BLOCKS, 16, 64, 2176, seed, "slow_warps") for seed in (3, 4, 5)),
    *(Trial(BLOCKS, 17, 72, 1296, 6, name) for name in ("late_loads", "slow_math", "slow_producer", "slow_lanes")),
    *(Trial(ROWS, 7, 136, k, k) for k in (16, 288, 2128)),
    *(Trial(TALL, 29, 200, 1296, seed, any_scales=seed == 8, words=Words.B) for seed in (7, 8)),
    *(Trial(TALL, 32, 64, 2176, seed, "slow_warps", words=Words.A) for seed in (9, 10)),
    Trial(TALL, 5, 136, 1328, 11, "late_loads", words=Words.A | Words.B),
    *(Trial(HALVES, 23, 136, k, 12) for k in (336, 1168)),
    Trial(HALVES, 23, 136, 1168, 13, words=Words.A | Words.B),
]

_FINE, _TILE = "decode/fine.cuh", "decode/tile.cuh"
_BAR = "    ptx::bar_sync(1, kNumMathThreads);\n"
_STORE = "    scales.store(p, first, shared.scales);\n"


def _replace(name: str, old: str, new: str, shows_in: object = None) -> Mutation:
    return Mutation(name, _FINE, old, new, shows_in=shows_in)


MUTATIONS = [
    # Scales: from global to shared memory
    _replace("scales of B of the first warpgroup's rows", "work.row_n + ptx::warp_index() / 4 * 64)", "work.row_n)"),
    _replace("scales of B of the first tile's rows", "(work.row_n + ptx::warp_index()", "(ptx::warp_index()"),
    _replace("scales of rows past the last", "first_row + load.row < last_row ? first_row + load.row : last_row", "first_row + load.row"),
    _replace("the last block's scales left out", "last_row = (p.n - 1) / kRowsOfB", "last_row = p.n / kRowsOfB - 1"),
    _replace("scales of tokens past the last", "(token < p.m ? token : p.m - 1)", "(token)"),
    _replace("scales past the last column of k", "return k < end_k ? k : end_k - 1;", "return k;"),
    _replace("scales of any column are read", "work.end_k_block * kBlockK < p.k ? work.end_k_block * kBlockK : p.k", "0u - 1"),
    _replace("scales from the first k-block on", "first_k_block * kBlockK + i * columns", "i * columns"),
    Mutation("scales of an empty range are read", _TILE, "  if (work.k_block < work.end_k_block) scales.load", "  scales.load", shows_in=ROWS),
    _replace("scales of rows where those of columns are", "row(index / kTogether % kScalesOfRows)", "row(index % kScalesOfRows)"),
    Mutation("the next scales are not loaded", _TILE, "if (first + kBlocks < work.end_k_block) scales.load", "if (false) scales.load"),
    Mutation("the next scales are loaded one too far", _TILE, "scales.load(p, work, first + kBlocks)", "scales.load(p, work, first + kBlocks + 1)"),
    Mutation("scales are overwritten while they are read", _TILE, _BAR[:-1] + "  // all warps have read the previous scales\n", ""),
    Mutation("scales are read before they are there", _TILE, _STORE + _BAR, _STORE),
    _replace("scales are stored behind the last", "if (Load::kCount % 128 != 0 && load.index >= Load::kCount) break;", ""),
    # Words
    _replace("words of B are loaded as numbers", "if (p.words & kWordsOfB) load_rows<true>(p, work, along_k); else", ""),
    _replace("words of B are stored as numbers", "if (p.words & kWordsOfB) store_rows<true>(first_k_block, to); else", ""),
    _replace("words of A are numbers of B", "if (p.words & kWordsOfB) store", "if (p.words & kWordsOfA) store"),
    _replace("a word of A for each scale", "p.words & kWordsOfA ? 4 : 1;", "1;"),
    _replace("words of A are stored as numbers", "are_words = p.words & kWordsOfA;", "are_words = false;"),
    _replace("a word of B for each k-block", "(kColumnsOfB * (kAreWords ? 4 : 1))", "(kAreWords ? kBlockK : kColumnsOfB)", HALVES),
    _replace("exponents of A from the range's first on", "place = first_k_block * kPartsOfA + index / kBlockTokens;", "place = index / kBlockTokens;", HALVES),
    _replace("exponents of B from the range's first on", "(first_k_block + k_block) * kPartsOfB + part", "k_block * kPartsOfB + part", HALVES),
    _replace("exponents of B from the word's first on", "(first_k_block + k_block) * kPartsOfB + part", "part", HALVES),
    _replace("one exponent of a word of A for all", "bits_of_scale_at(place, tokens[i])", "bits_of_scale_at(0, tokens[i])"),
    _replace("exponents of a word in the other order", "st_shared_v4_b32(scales, scale(0), scale(1), scale(2), scale(3));", "st_shared_v4_b32(scales, scale(3), scale(2), scale(1), scale(0));"),
    _replace("one exponent of a word for both halves", "st_shared_v2_b32(scales, scale(0), scale(1));", "st_shared_v2_b32(scales, scale(0), scale(0));", HALVES),
    Mutation("the highest exponent is infinite", "types.cuh", "s == 255 ? 0x7fffffff : ", ""),
    Mutation("exponents of a word read in the other order", "types.cuh", "place % 4 * 8", "(3 - place % 4) * 8"),
    # Scales of a thread
    _replace("scales of the first warp's rows", "ptx::warp_index() % 4 * 16 + (kRowsOfB", "(kRowsOfB"),
    _replace("scales of the warp's first row", "(kRowsOfB == 1 ? ptx::lane_index() / 4 : 0)", "0", ROWS),
    _replace("both rows have one scale", "row / kRowsOfB + i * 8 : 0", "row / kRowsOfB : 0", ROWS),
    _replace("blocks of 32 rows have one scale", "kRowsOfB < 64 ? row / kRowsOfB + i * 8 : 0", "kRowsOfB < 32 ? row + i * 8 : 0", BLOCKS),
    _replace("parts two and three swapped", "of[i][2] = four.z, of[i][3] = four.w", "of[i][3] = four.z, of[i][2] = four.w"),
    _replace("the second half has the first's scale", "of[i][1] = two.y", "of[i][1] = two.x", HALVES),
    # Partial sums
    _replace("all parts of B are the first", "ptx::smem_descriptor_from_low(b_low + k / 16)", "ptx::smem_descriptor_from_low(b_low)"),
    _replace("all parts of A are the first", "ptx::smem_descriptor_from_low(a_low + k / 16)", "ptx::smem_descriptor_from_low(a_low)"),
    _replace("the first 32 columns of a part alone", "k != part * kDepth);", "false);", HALVES),
    _replace("a part's sum begins with what was there", "k != part * kDepth);", "true);"),
    _replace("one scale of A for the parts of a k-block", "kPartOfA = kPart * kDepth / kColumnsOfA", "kPartOfA = 0", ROWS),
    _replace("one scale of B for the parts of a k-block", "kPartOfB = kPart * kDepth / kColumnsOfB", "kPartOfB = 0"),
    _replace("no fence before a part", "    ptx::wgmma_fence();\n", ""),
    _replace("sums are not waited for", "      ptx::wgmma_wait_group<kIssued - 1>();\n", ""),
    _replace("the last sums are not waited for", "kPart + kNumPartials < kParts ? kNumPartials : kParts - kPart;", "kNumPartials;"),
    _replace("parts behind the first sums are left out", "if constexpr (kPart + kNumPartials < kParts) issue", "if constexpr (false) issue", TALL),
    _replace("a part too few", "part < kNumPartials; ++part)", "part + 1 < kNumPartials; ++part)"),
    _replace("the last part is not promoted", "if constexpr (kPart < kParts) {", "if constexpr (kPart + 1 < kParts) {"),
    _replace("every part is promoted from one sum", "partials[kPart % kNumPartials];", "partials[0];"),
    # Promotion
    _replace("parts past the first are left out where k ends", "kPart * kDepth < depth)", "(kPart + 1) * kDepth < depth)"),
    _replace("k ends where a k-block of the range does", "p.k - (first + i) * kBlockK,", "p.k - first * kBlockK,", ROWS),
    _replace("tokens of a pair swapped", "j % 2 ? scales[j / 4].y : scales[j / 4].x", "j % 2 ? scales[j / 4].x : scales[j / 4].y"),
    _replace("rows of a pair swapped", "rows.of[j / 2 % kScalesOfThread]", "rows.of[(j / 2 + 1) % kScalesOfThread]", ROWS),
    _replace("promotion replaces the total", "[kPartOfB], total[j]);", "[kPartOfB], 0.f);"),
    Mutation("totals start as they are", _TILE, "  for (float& x : total) x = 0;", "  for (float& x : total) x = x;"),
    _replace("both warpgroups multiply the same rows", "ptx::smem_address(shared.b) + warpgroup * 64 * kBlockK", "ptx::smem_address(shared.b)"),
    # The ring
    _replace("full is not waited for", "      wait_until_loaded(shared.ring, at);\n", ""),
    _replace("slots are given back before the products are done", "if constexpr (kPart + 1 == kParts) done();", "if constexpr (kPart == 0) done();"),
    _replace("slots are never given back", "if constexpr (kPart + 1 == kParts) done();", ""),
    _replace("all k-blocks in the first slot", "b_low + at.stage * (kBBytes / 16)", "b_low"),
    _replace("tokens of the first slot", "a_low + at.stage * (kABytes / 16)", "a_low"),
]  # fmt: skip

"""Ways to break the kernel of the indexer's logits, and the trials they meet."""

from __future__ import annotations

from deep_gemm.indexer.kernel import mqa_config
from lab.sim.fp8_mqa_logits import MqaTrial
from lab.sim.mutate import Mutation

CLEAN, PLAIN, COMPRESSED = (mqa_config(64, 64, 4, *form) for form in ((False, True), (False, False), (True, False)))
WIDE, BF16 = mqa_config(64, 128, 4, False, False), mqa_config(24, 32, 2, False, True)
NARROW = mqa_config(16, 32, 4, False, True)
TRIALS = [
    MqaTrial(CLEAN, 21, 1100, "anywhere", 0),
    MqaTrial(CLEAN, 30, 900, "packed", 1),
    MqaTrial(PLAIN, 33, 700, "causal", 2, "slow_math"),
    MqaTrial(PLAIN, 33, 700, "causal", 3, "late_loads"),
    MqaTrial(WIDE, 61, 1500, "causal", 4),
    MqaTrial(WIDE, 41, 1300, "causal", 5, "slow_producer"),
    MqaTrial(COMPRESSED, 21, 400, "anywhere", 6),
    MqaTrial(BF16, 43, 600, "anywhere", 7),
    MqaTrial(NARROW, 50, 600, "anywhere", 8, "slow_warps"),
    MqaTrial(CLEAN, 390 * 4, 40, "anywhere", 9),
    MqaTrial(CLEAN, 30, 1700, "packed", 0, "slow_cta"),
    MqaTrial(CLEAN, 30, 1700, "packed", 2, "slow_lanes"),
]

_K, _U, _W = "fp8_mqa_logits.cuh", "logits/unit.cuh", "logits/weights.cuh"
_R, _S = "logits/ranges.cuh", "logits/shares.cuh"


def of_both(kernel: str) -> list[Mutation]:
    """Ways to break this kernel or the paged one."""
    return [
        Mutation(
            "slots of keys are not given back",
            kernel,
            "if constexpr (kUnit + 1 == kUnits) release(work.shared.ring, slots[kBlock], work.lane, scales[kBlock]);",
            "",
        ),
        Mutation("the slot of another block is given back", kernel, "slots[kBlock], work.lane", "slots[0], work.lane"),
        Mutation(
            "all blocks of a run have the first's scales",
            kernel,
            "logits, scales[kBlock], work.lane",
            "logits, scales[0], work.lane",
        ),
        Mutation("products are not waited for", kernel, "kInFlight < kLag ? kInFlight : kLag", "kLag"),
        Mutation("both warpgroups multiply the same keys", kernel, " + warpgroup * 64 * kDepth);", ");"),
        Mutation(
            "all slots are the first",
            kernel,
            "work.keys_low + slots[kBlock].stage * (kKeysBytes / 16)",
            "work.keys_low",
        ),
        Mutation(
            "the second unit multiplies the first's q", kernel, "work.q_low + kUnit * (Unit::kBytes / 16)", "work.q_low"
        ),
        Mutation(
            "the second unit's rows are the first's",
            kernel,
            "work.rows + kUnit * kUnitTokens",
            "work.rows + 0 * kUnitTokens",
        ),
    ]


MUTATIONS = [
    *of_both(_K),
    # the ring and the slots of tiles
    Mutation("slots of keys are not waited for", _K, "wait_until_free(shared.ring, at);", ";"),
    Mutation(
        "room for keys is taken for granted",
        _K,
        "else if (!ptx::mbarrier_test_wait_parity(&shared.ring.empty[at.stage], at.parity ^ 1))",
        "else if (false)",
    ),
    Mutation("keys are not waited for", _K, "if (!is_loaded) wait_until_loaded(work.shared.ring, at);", ""),
    Mutation(
        "slots of keys are given back before the last product is done",
        _K,
        "if constexpr (kUnit + 1 == kUnits) release(",
        "if constexpr (kUnit == 0) release(",
    ),
    Mutation("all blocks of a run have the first's keys", _K, "key + kBlock * kBlockKeys", "key"),
    Mutation("runs are as long as one block", _K, "key += kRunBlocks * kBlockKeys", "key += kBlockKeys"),
    Mutation("what a run leaves is left out", _K, "for (; blocks; --blocks, key", "for (; false; --blocks, key"),
    Mutation("scales are not announced", _K, "kSlotBytes = kKeysBytes + kBlockKeys * 4", "kSlotBytes = kKeysBytes"),
    Mutation("q is not announced", _K, "arrive_expect_tx(full, kUnits * Unit::kBytes)", "arrive(full)"),
    Mutation("one arrival is not expected", _K, "&shared.q_full[slot], 33", "&shared.q_full[slot], 32"),
    Mutation(
        "tiles' slots are not waited for",
        _K,
        "    ptx::mbarrier_wait_parity(&shared.q_empty[tile_at.slot()], tile_at.parity() ^ 1);\n    ptx::syncwarp();\n    load",
        "    load",
    ),
    Mutation(
        "tiles' slots are given back by one warp",
        _K,
        "&shared.q_empty[slot], kNumMathWarps",
        "&shared.q_empty[slot], 1",
    ),
    Mutation(
        "tiles' slots are not given back",
        _K,
        "if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[tile_at.slot()]);",
        "",
    ),
    Mutation(
        "the end waits for no slot",
        _K,
        "  // No tile is left.\n  ptx::mbarrier_wait_parity(&shared.q_empty[tile_at.slot()], tile_at.parity() ^ 1);",
        "",
    ),
    Mutation("parity stays", _K, "count / kTileSlots % 2", "0"),
    Mutation("mbarriers are not initialized in time", _S, "  ptx::syncthreads();\n", "", everywhere=True),
    Mutation("the kernel ahead is not waited for", _K, "  ptx::griddepcontrol_wait();\n", ""),
    # what is loaded
    Mutation("the second unit gets the first's q", _K, " + unit * Unit::kColumns);", ");"),
    Mutation("keys begin elsewhere", _K, "shared.keys[at.stage], 0, key)", "shared.keys[at.stage], 0, key + 1)"),
    Mutation("scales begin elsewhere", _K, "shared.scales[at.stage], key, 0", "shared.scales[at.stage], key + 1, 0"),
    Mutation("weights of the token before", _K, "token * p.weights_pitch", "(token ? token - 1 : 0) * p.weights_pitch"),
    Mutation("weights lie close", _K, "token * p.weights_pitch + column", "token * kHeads + column"),
    Mutation(
        "weights of tokens that there are not",
        _K,
        "column < kTileColumns && token < p.tokens\n",
        "column < kTileColumns\n",
    ),
    Mutation("only the first weights are laid", _K, "first < kTileColumns; first +=", "first < 0; first +="),
    Mutation(
        "weights are not in their order",
        _W,
        "column % 8 / 2 * 4 + column / 8 % 2 * 2",
        "column % 8 / 2 * 2 + column / 8 % 2 * 8",
    ),
    Mutation("weights of other lanes", _W, "lane % 4 * 16", "lane % 2 * 16"),
    Mutation("weights of the first unit", _K, "units[i].load(laid[i], lane)", "units[i].load(laid[0], lane)"),
    # products and sums
    Mutation("no fence before the product", _U, "    ptx::wgmma_fence();\n", ""),
    Mutation("products are not committed", _U, "    ptx::wgmma_commit_group();\n", ""),
    Mutation("negative scores count", _U, "ptx::add_rn(x, ptx::abs_f32(x))", "2 * x"),
    Mutation("a NaN becomes zero", _U, "ptx::add_rn(x, ptx::abs_f32(x))", "2 * ptx::max_f32(x, 0)"),
    Mutation("weights are not halved", _U, "given * 0.5f", "given"),
    Mutation("columns of another token", _U, "eight * 8 / kHeads;", "eight * 8 / (kHeads + 8);"),
    Mutation("rows go to the wrong lanes", _U, "has_second_row = lane & 2", "has_second_row = lane & 1"),
    Mutation("sums of half the columns", _U, "ptx::shfl_xor_sync(given, 2)", "0.f"),
    Mutation("sums of the same token twice", _U, "ptx::shfl_xor_sync(given, 1)", "ptx::shfl_xor_sync(kept, 1)"),
    Mutation("keys of the other half", _U, "(lane & 2) * 4", "(lane & 1) * 8"),
    Mutation("tokens of a lane are neighbours", _U, "return 2 * i + (lane & 1);", "return i + (lane & 1);"),
    # ranges and stores
    Mutation("logits are not scaled", _K, ": logits[i] * scale;", ": logits[i];"),
    Mutation("ranges begin a key late", _K, "key - row.z < row.w", "key - row.z - 1 < row.w"),
    Mutation("ranges end a key late", _K, "key - row.z < row.w", "key - row.z <= row.w"),
    Mutation("rows of tokens that there are not", _K, "    if (token >= p.tokens) address = 0;\n", ""),
    Mutation("compressed rows begin at key 0", _K, "if (kIsCompressed) address -=", "if (false) address -="),
    Mutation(
        "both tokens stored by a lane without one",
        _K,
        "if (Unit::kTokens % 2 && token_of_lane(i, lane) >= Unit::kTokens) continue;",
        "",
    ),
    Mutation("starts below zero", _R, "given_begin < 0 ? 0 : given_begin", "given_begin"),
    Mutation("ends behind the keys", _R, "most < p.keys ? most : p.keys", "most"),
    Mutation("ends below zero", _R, "given_end < 0 ? 0 : given_end", "given_end"),
    Mutation("crossed ranges", _R, "if (end <= begin) return {0, 0};", "if (end == begin) return {0, 0};"),
    Mutation("compressed rows are as long as ranges", _R, "end - begin > p.row_keys", "false"),
    Mutation("empty ranges count", _R, "of_lane.is_empty() ? ~0u : of_lane.begin", "of_lane.begin"),
    Mutation("blocks end early", _R, "ceil_div(highest - first, kBlockKeys)", "(highest - first) / kBlockKeys"),
    Mutation(
        "blocks begin where the first range does not",
        _R,
        "lowest = range.begin < lowest",
        "lowest = range.begin > lowest",
    ),
    # shares
    Mutation(
        "shares leave out the last", _S, "total * (cta + 1) / grid) - begin", "(total - 1) * (cta + 1) / grid) - begin"
    ),
    Mutation("shares of threads overlap", _S, "first = thread * per_thread", "first = thread"),
    Mutation(
        "what beginning costs is shared out, not taken",
        _K,
        "const uint32_t cost = cost_of_tile(p);",
        "const uint32_t cost = 0;",
    ),
    Mutation("sums of a warp alone", _S, "if (other == warp) before[line] += total;", ""),
    Mutation("a thread's share begins at its first tile", _S, "        ++tile;\n", ""),
    Mutation(
        "a tile is begun anew",
        _K,
        "++share.tile, share.number = 0) {\n    const Range of_lane = lane < kTileTokens ? range_of(p, share.tile * kTileTokens + lane) : Range{0, 0};\n    const TileKeys keys = tile_keys_of(of_lane);\n    const uint32_t left",
        "++share.tile) {\n    const Range of_lane = lane < kTileTokens ? range_of(p, share.tile * kTileTokens + lane) : Range{0, 0};\n    const TileKeys keys = tile_keys_of(of_lane);\n    const uint32_t left",
    ),
    Mutation("blocks beyond the share", _K, "left < share.count ? left : share.count", "left"),
    Mutation("blocks of a tile from its first on", _K, "keys.first + first * kBlockKeys", "keys.first"),
    # what is filled
    Mutation("nothing is filled before a range", _R, "fills_before() + (p.keys", "0 + (p.keys"),
    Mutation("nothing is filled behind a range", _R, "p.keys > end() ? ceil_div(p.keys - end(), kFillKeys) : 0", "0"),
    Mutation("fill covers logits", _K, "keys.first - key < kFillKeys ? keys.first", "false ? keys.first"),
    Mutation("some pieces are left", _K, "piece += kFillWarps", "piece += kFillWarps + 1"),
    Mutation("one token is left", _K, "token < tokens; ++token", "token + 1 < tokens; ++token"),
    Mutation(
        "fill beyond the tokens",
        _K,
        "p.tokens - first_token < kTileTokens ? p.tokens - first_token : kTileTokens",
        "kTileTokens",
    ),
    Mutation(
        "filled with zeros",
        _K,
        "kInfinity, kInfinity, kInfinity,\n                                  kInfinity",
        "0, 0, 0, 0",
    ),
    Mutation("fill goes on", _K, "fills - share.number < share.count ? fills : share.number + share.count", "fills"),
]

"""Mistakes in the indexer's kernels (keys in rows, keys in pages, schedules), and trials that must notice them."""

from __future__ import annotations

from collections.abc import Sequence

from deep_gemm.indexer.config import InRows, logits_config
from lab.sim.logits import MqaTrial, PagedTrial, PlanTrial
from lab.sim.mutate import Mutation

_M, _K, _P = "fp8_mqa_logits.cuh", "fp8_paged_mqa_logits.cuh", "plan_paged_contexts.cuh"
_T, _U = "logits/tiles.cuh", "logits/unit.cuh"
_R, _S, _L = "logits/ranges.cuh", "logits/shares.cuh", "lanes.cuh"

# ---- both kernels: mutations of shared sources, which the trials of each list must notice ------------------------

_BOTH = [
    # the ring and the slots of tiles
    Mutation("slots of keys are not given back", _T, "if constexpr (kUnit + 1 == kUnits) release(ring, slots[kBlock], work.lane, scales[kBlock]);", ""),
    Mutation("the slot of another block is given back", _T, "slots[kBlock], work.lane", "slots[0], work.lane"),
    Mutation("keys are not waited for", _T, "if (kInPages || !is_loaded) wait_until_loaded(ring, at);", ""),
    Mutation("all slots are the first", _T, "work.keys_low + slots[kBlock].stage * (kKeysBytes / 16)", "work.keys_low"),
    Mutation("scales are not announced", _T, "kSlotBytes = kKeysBytes + kBlockKeys * 4", "kSlotBytes = kKeysBytes"),
    Mutation("q is not announced", _T, "arrive_expect_tx(full, kUnits * Unit::kBytes)", "arrive(full)"),
    Mutation("one arrival is not expected", _T, "&shared.q_full[slot], 33", "&shared.q_full[slot], 32"),
    Mutation("tiles are not waited for", _T, "    ptx::mbarrier_wait_parity(&shared.q_full[slot_at.slot()], slot_at.parity());\n", ""),
    Mutation("tiles' slots are given back by one warp", _T, "&shared.q_empty[slot], kNumMathWarps", "&shared.q_empty[slot], 1"),
    Mutation("tiles' slots are not given back", _T, "if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[slot_at.slot()]);", ""),
    Mutation("nobody is told that no tile is left", _T, "    ptx::st_shared_v2_b32(&shared.plans[at.slot()], 0, 0);\n", ""),
    Mutation("the end waits for no slot", _T, "  wait_for_slot(shared, at);\n", ""),
    # products and sums
    Mutation("products are not waited for", _T, "kInFlight < kLag ? kInFlight : kLag", "kLag"),
    Mutation("both warpgroups multiply the same keys", _T, " + warpgroup * 64 * kDepth);", ");"),
    Mutation("the second unit gets the first's q", _T, " + unit * Unit::kColumns);", ");"),
    Mutation("the second unit multiplies the first's q", _T, "work.q_low + kUnit * (Unit::kBytes / 16)", "work.q_low"),
    Mutation("weights of the first unit", _T, "[slot_at.slot()][unit], lane)", "[slot_at.slot()][0], lane)"),
    Mutation("runs are as long as one block", _T, "key += kRunBlocks * step", "key += step"),
    Mutation("what a run leaves is left out", _T, "for (; blocks; --blocks, key", "for (; false; --blocks, key"),
    # stores
    Mutation("logits are not scaled", _T, ": logits[i] * scale;", ": logits[i];"),
    Mutation("all blocks of a run have the first's scales", _T, "logits, scales[kBlock], work.lane", "logits, scales[0], work.lane"),
    Mutation("all blocks of a run have the first's keys", _T, "key + kBlock * work.step", "key"),
    Mutation("the second unit's rows are the first's", _T, "work.rows + kUnit * kUnitTokens", "work.rows + 0 * kUnitTokens"),
    Mutation("both tokens stored by a lane without one", _T, "if (Unit::kTokens % 2 && token_of_lane(i, lane) >= Unit::kTokens) continue;", ""),
]  # fmt: skip

# ---- keys in rows --------------------------------------------------------------------------------------------------

ALL_CLEAN = InRows(is_clean=True)
CLEAN, PLAIN, COMPRESSED = (logits_config(64, 64, 4, of) for of in (ALL_CLEAN, InRows(), InRows(is_compressed=True)))
WIDE, BF16 = logits_config(64, 128, 4, InRows()), logits_config(24, 32, 2, ALL_CLEAN)
NARROW = logits_config(16, 32, 4, ALL_CLEAN)
ROWS_TRIALS = [
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
ROWS_MUTATIONS = [
    *_BOTH,
    # the ring and the slots of tiles
    Mutation("slots of keys are given back before the last product is done", _T, "if constexpr (kUnit + 1 == kUnits) release(", "if constexpr (kUnit == 0) release("),
    Mutation("slots of keys are not waited for", _M, "wait_until_free(shared.ring, at);", ";"),
    Mutation("room for keys is taken for granted", _M, "else if (!ptx::mbarrier_test_wait_parity(&shared.ring.empty[at.stage], at.parity ^ 1))", "else if (false)"),
    Mutation("tiles' slots are not waited for", _M, "    wait_for_slot(shared, tile_at);\n    load", "    load"),
    Mutation("parity stays", _M, "count / kTileSlots % 2", "0"),
    Mutation("mbarriers are not initialized in time", _S, "  ptx::syncthreads();\n", "", everywhere=True),
    Mutation("the kernel ahead is not waited for", _M, "  ptx::griddepcontrol_wait();\n", ""),
    # loads of operands
    Mutation("keys begin elsewhere", _M, "shared.keys[at.stage], 0, key)", "shared.keys[at.stage], 0, key + 1)"),
    Mutation("scales begin elsewhere", _M, "shared.scales[at.stage], key, 0", "shared.scales[at.stage], key + 1, 0"),
    Mutation("weights of the token before", _M, "token * p.weights_pitch", "(token ? token - 1 : 0) * p.weights_pitch"),
    Mutation("weights lie close", _M, "token * p.weights_pitch + column", "token * kHeads + column"),
    Mutation("weights of tokens that there are not", _M, "column < kTileColumns && token < p.tokens\n", "column < kTileColumns\n"),
    Mutation("only the first weights are laid", _M, "first < kTileColumns; first +=", "first < 0; first +="),
    Mutation("weights are not in their order", _U, "column % 8 / 2 * 4 + column / 8 % 2 * 2", "column % 8 / 2 * 2 + column / 8 % 2 * 8"),
    Mutation("weights of other lanes", _U, "lane % 4 * 16", "lane % 2 * 16"),
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
    Mutation("ranges begin a key late", _M, "key - row.z < row.w", "key - row.z - 1 < row.w"),
    Mutation("ranges end a key late", _M, "key - row.z < row.w", "key - row.z <= row.w"),
    Mutation("rows of tokens that there are not", _M, "    if (token >= p.tokens) address = 0;\n", ""),
    Mutation("compressed rows begin at key 0", _M, "if (kIsCompressed) address -=", "if (false) address -="),
    Mutation("starts below zero", _R, "given_begin < 0 ? 0 : given_begin", "given_begin"),
    Mutation("ends behind the keys", _R, "most < p.keys ? most : p.keys", "most"),
    Mutation("ends below zero", _R, "given_end < 0 ? 0 : given_end", "given_end"),
    Mutation("crossed ranges", _R, "if (end <= begin) return {0, 0};", "if (end == begin) return {0, 0};"),
    Mutation("compressed rows are as long as ranges", _R, "end - begin > p.row_keys", "false"),
    Mutation("empty ranges count", _R, "of_lane.is_empty() ? ~0u : of_lane.begin", "of_lane.begin"),
    Mutation("blocks end early", _R, "ceil_div(highest - first, kBlockKeys)", "(highest - first) / kBlockKeys"),
    Mutation("blocks begin where the first range does not", _R, "lowest = range.begin < lowest", "lowest = range.begin > lowest"),
    # shares
    Mutation("shares leave out the last", _S, "total * (cta + 1) / grid) - begin", "(total - 1) * (cta + 1) / grid) - begin"),
    Mutation("shares of threads overlap", _S, "first = thread * per_thread", "first = thread"),
    Mutation("what beginning costs is shared out, not taken", _M, "const uint32_t cost = cost_of_tile(p);", "const uint32_t cost = 0;"),
    Mutation("sums of a warp alone", _S, "if (other == warp) before[line] += total;", ""),
    Mutation("a thread's share begins at its first tile", _S, "        ++tile;\n", ""),
    Mutation("a tile is begun anew", _M, "++share.tile, share.number = 0) {\n    const Range of_lane = lane < kTileTokens ? range_of(p, share.tile * kTileTokens + lane) : Range{0, 0};\n    const TileKeys keys = tile_keys_of(of_lane);\n    const uint32_t left", "++share.tile) {\n    const Range of_lane = lane < kTileTokens ? range_of(p, share.tile * kTileTokens + lane) : Range{0, 0};\n    const TileKeys keys = tile_keys_of(of_lane);\n    const uint32_t left"),
    Mutation("blocks beyond the share", _M, "left < share.count ? left : share.count", "left"),
    Mutation("blocks of a tile from its first on", _M, "keys.first + first * kBlockKeys", "keys.first"),
    # logits that are filled
    Mutation("nothing is filled before a range", _R, "fills_before() + (p.keys", "0 + (p.keys"),
    Mutation("nothing is filled behind a range", _R, "p.keys > end() ? ceil_div(p.keys - end(), kFillKeys) : 0", "0"),
    Mutation("fill covers logits", _M, "keys.first - key < kFillKeys ? keys.first", "false ? keys.first"),
    Mutation("some pieces are left", _M, "piece += kFillWarps", "piece += kFillWarps + 1"),
    Mutation("one token is left", _M, "token < tokens; ++token", "token + 1 < tokens; ++token"),
    Mutation("fill beyond the tokens", _M, "p.tokens - first_token < kTileTokens ? p.tokens - first_token : kTileTokens", "kTileTokens"),
    Mutation("filled with zeros", _M, "kInfinity, kInfinity, kInfinity,\n                                  kInfinity", "0, 0, 0, 0"),
    Mutation("fill goes on", _M, "fills - share.number < share.count ? fills : share.number + share.count", "fills"),
]  # fmt: skip

# ---- keys in pages -------------------------------------------------------------------------------------------------


def one_token(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((length,) for length in lengths)


def tokens(next_n: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the context lengths of the last `next_n` tokens of each sequence."""
    return tuple(tuple(max(length - next_n + 1 + t, 0) for t in range(next_n)) for length in lengths)


PAGES_TRIALS = [
    PagedTrial(tokens(2, [333, 0, 64, 700]), 64, 64, room=48),
    PagedTrial(tokens(3, [300, 65, 129]), 24, 32, page=32, seed=1, schedule="slow_producer"),
    PagedTrial(one_token([(i * 97) % 400 if i % 3 else 0 for i in range(70)]), 16, 32, shares=1, seed=2),
    PagedTrial(one_token([2900, 1500]), 64, 128, shares=1, seed=3, schedule="slow_math"),
    PagedTrial(one_token([2900, 1500]), 64, 128, page=32, shares=1, seed=4, schedule="late_loads"),
    PagedTrial(((900, 901, 902, 903), (10, 0, 300, 128)), 64, 64, num_sms=4, seed=5),
    PagedTrial(one_token([300, -5, 90]), 64, 32, columns=100, seed=6, schedule="slow_lanes"),
    PagedTrial(one_token([1100, 0, 30]), 16, 32, page=32, shares=1, num_sms=1, columns=1160, seed=8, hides_block=True),
    PagedTrial(tokens(2, [500, 1300, 90, 260]), 104, 32, shares=3, num_sms=3, seed=7, schedule="slow_warps"),
    PagedTrial(tokens(2, [(i * 61) % 500 for i in range(40)]), 16, 32, shares=3, num_sms=3, seed=9),
    PagedTrial(one_token([300] * 17 + [900] * 15), 16, 32, shares=5, num_sms=5, seed=10),
]
PAGES_MUTATIONS = [
    *_BOTH,
    # the ring and the slots of sequences
    Mutation("slots of keys are not waited for", _K, "    wait_until_free(shared.ring, at);\n    ptx::syncwarp();\n", ""),
    Mutation("slots of sequences are not waited for", _K, "      wait_for_slot(shared, slot_at);\n", ""),
    # loads of the producer
    Mutation("pages behind the context are loaded", _K, "held = page * kPage < keys ? held : p.cache_blocks;", ";"),
    Mutation("the next entries are not cut", _K, "        entries = next;\n        entries.cut(p, keys);\n", "        entries = next;\n"),
    Mutation("pages of the last keys are left out", _K, "held = page * kPage < keys ? held", "held = page * kPage + kPage <= keys ? held"),
    Mutation("the table is read behind its rows", _K, "held = page * kPage < p.most_keys ? ptx", "held = true ? ptx"),
    Mutation("pages of another sequence", _K, "p.table + sequence * p.table_pitch + page", "p.table + page"),
    Mutation("the first entries are those of the sequence's begin", _K, "entries.load(p, begin.x, begin.y + half,", "entries.load(p, begin.x, half,"),
    Mutation("entries of the first sequence for all", _K, "      if (sequence != begin.x) entries.load(p, sequence, blocks.first, blocks.step, lane);\n", ""),
    Mutation("the entries stay", _K, "        entries = next;\n", ""),
    Mutation("no blocks behind the first entries", _K, "const bool is_more = first + step < blocks.end;", "const bool is_more = false;"),
    Mutation("blocks of new entries from the third on", _K, "first += step, held = 0;", "first += step;"),
    Mutation("all pages are the block's first", _K, "shared.keys[at.stage] + lane * (kPage * kDepth)", "shared.keys[at.stage]"),
    Mutation("scales of the first page", _K, "shared.scales[at.stage] + lane * kPage", "shared.scales[at.stage]"),
    Mutation("a page for two lanes", _K, "entries.held, held * kPages + lane % kPages", "entries.held, held * kPages"),
    Mutation("weights of the first token", _K, "(sequence * kNextN + token) * p.weights_pitch", "sequence * kNextN * p.weights_pitch"),
    Mutation("only the first weights", _K, "first < kAll; first += kAtOnce", "first < 0; first += kAtOnce"),
    Mutation("weights of the first columns again", _K, "lay_weights(shared.weights[at.slot()], weights, first * 32 + lane);", "lay_weights(shared.weights[at.slot()], weights, lane);"),
    # shares
    Mutation("sequences from their first segment on", _K, "sequence == begin.x ? begin.y : 0, all", "0, all"),
    Mutation("the last sequence is left out", _K, "window <= end.x && window", "window < end.x && window"),
    Mutation("only 32 sequences", _K, "window += 32)", "window = ~0u)"),
    Mutation("both CTAs of a share take all", _K, "Blocks blocks = {first_segment + half, all, p.splits};", "Blocks blocks = {first_segment, all, 1};"),
    Mutation("more sequences than lanes", _K, "p.sequences <= 32;", "p.sequences <= 75;"),
    Mutation("sums of half a warp", _L, "distance < 32; distance *= 2", "distance < 16; distance *= 2"),
    Mutation("lanes below are taken from the other end", _L, "sum += lane >= distance ? below : 0;", "sum += below;"),
    Mutation("longer shares begin too early", _K, "share * each + (share < longer ? share : longer)", "share * each"),
    Mutation("no share is longer", _K, "first + each + (share < longer)", "first + each"),
    Mutation("the sequence with as many bits below", _K, "ptx::popc((left & (0 - left)) - 1)", "ptx::popc(left - 1)"),
    Mutation("both CTAs take the same half", _K, "half = ptx::block_index() % p.splits", "half = 0"),
    Mutation("math warps step as if alone", _T, "step = splits * kBlockKeys;", "step = kBlockKeys;"),
    # keys of tokens
    Mutation("the first token's context for all", _K, "p.contexts_pitch + token * p.contexts_step", "p.contexts_pitch"),
    Mutation("the longest context is the first token's", _K, "most = keys > most ? keys : most;", "most = token ? most : keys;"),
    Mutation("negative contexts", _K, "given < 0 ? 0 : given", "given"),
    Mutation("contexts beyond the rows", _K, "return keys < p.most_keys ? keys : p.most_keys;", "return keys;"),
    Mutation("rows of the first token", _K, "(sequence * kNextN + lane) * p.logits_pitch", "sequence * kNextN * p.logits_pitch"),
    # products and stores
    Mutation("a key too many", _K, "return key < row.z;", "return key <= row.z;"),
    Mutation("the kernel ahead is not waited for", _K, "  ptx::griddepcontrol_wait();\n", ""),
]  # fmt: skip

# ---- schedules -----------------------------------------------------------------------------------------------------

PLAN_TRIALS = [
    PlanTrial(1100, 3, 132),
    PlanTrial(31, 1, 7, seed=1, schedule="slow_warps"),
    PlanTrial(5, 2, 600, seed=2),
    PlanTrial(9, 2, 20, most=0, seed=3),
    PlanTrial(700, 1, 600, seed=4, schedule="slow_lanes"),
]
PLAN_MUTATIONS = [
    Mutation("segments of the first token", _P, "most = context > most ? context : most;", "most = token ? most : context;"),
    Mutation("segments end early", _P, "ceil_div(static_cast<uint32_t>(most), kSegmentKeys)", "static_cast<uint32_t>(most) / kSegmentKeys"),
    Mutation("sequences that there are not", _P, "if (sequence < p.sequences) sum += segments_of(p, sequence);", "sum += segments_of(p, sequence);"),
    Mutation("sums of half a warp", _L, "distance < 32; distance *= 2", "distance < 16; distance *= 2"),
    Mutation("lanes below are taken from the other end", _L, "sum += lane >= distance ? below : 0;", "sum += below;"),
    Mutation("sums of a warp alone", _P, "if (other == warp) sum += total;", ""),
    Mutation("the last row is as the others", _P, "wanted = is_last ? total - 1 :", "wanted = false ? total - 1 :"),
    Mutation("rows of a thread alone", _P, "row <= p.shares; row += kNumThreads", "row <= p.shares; row = ~0u - 1"),
    Mutation("the last row is left out", _P, "row = thread; row <= p.shares", "row = thread; row < p.shares"),
    Mutation("batches without keys", _P, "    if (total) {", "    if (true) {"),
    Mutation("a thread's sequences begin with the first", _P, "segment = wanted - (owner ?", "segment = wanted - (false ?"),
    Mutation("the thread behind", _P, "<= wanted) owner += step;", "< wanted) owner += step;"),
    Mutation("the kernel ahead is not waited for", _P, "  ptx::griddepcontrol_wait();\n", ""),
]  # fmt: skip

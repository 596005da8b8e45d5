"""Ways to break the kernels of logits of pages, and the trials they meet."""

from __future__ import annotations

from collections.abc import Sequence

from mutations_fp8_mqa_logits import of_both

from lab.sim.fp8_paged_mqa_logits import PagedTrial
from lab.sim.mutate import Mutation
from lab.sim.plan_paged_contexts import PlanTrial


def one_token(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((length,) for length in lengths)


def tokens(next_n: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The last tokens of sequences."""
    return tuple(tuple(max(length - next_n + 1 + t, 0) for t in range(next_n)) for length in lengths)


TRIALS = [
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

_K = "fp8_paged_mqa_logits.cuh"


MUTATIONS = [
    *of_both(_K),
    # the ring and the slots of sequences
    Mutation(
        "slots of keys are not waited for", _K, "    wait_until_free(shared.ring, at);\n    ptx::syncwarp();\n", ""
    ),
    Mutation("keys are not waited for", _K, "        wait_until_loaded(work.shared.ring, at);\n", ""),
    Mutation(
        "slots of sequences are not waited for",
        _K,
        "      ptx::mbarrier_wait_parity(&shared.q_empty[slot_at.slot], slot_at.parity ^ 1);\n      ptx::syncwarp();\n",
        "",
    ),
    Mutation(
        "sequences are not waited for",
        _K,
        "    ptx::mbarrier_wait_parity(&shared.q_full[slot_at.slot], slot_at.parity);\n",
        "",
    ),
    Mutation(
        "slots of sequences are not given back",
        _K,
        "if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[slot_at.slot]);",
        "",
    ),
    Mutation("one lane fewer arrives", _K, "&shared.q_full[slot], 33)", "&shared.q_full[slot], 32)"),
    Mutation("scales are not announced", _K, "kSlotBytes = kKeysBytes + kBlockKeys * 4", "kSlotBytes = kKeysBytes"),
    Mutation(
        "nobody is told that no sequence is left",
        _K,
        "    ptx::st_shared_v2_b32(&shared.plans[slot_at.slot], 0, 0);\n",
        "",
    ),
    # what the producer asks for
    Mutation("pages behind the context are loaded", _K, "held = page * kPage < keys ? held : p.cache_blocks;", ";"),
    Mutation(
        "the next entries are not cut",
        _K,
        "        entries = next;\n        entries.cut(p, keys);\n",
        "        entries = next;\n",
    ),
    Mutation(
        "pages of the last keys are left out",
        _K,
        "held = page * kPage < keys ? held",
        "held = page * kPage + kPage <= keys ? held",
    ),
    Mutation("the table is read behind its rows", _K, "held = page * kPage < p.most_keys ? ptx", "held = true ? ptx"),
    Mutation("pages of another sequence", _K, "p.table + sequence * p.table_pitch + page", "p.table + page"),
    Mutation(
        "the first entries are those of the sequence's begin",
        _K,
        "entries.load(p, begin.x, begin.y + half,",
        "entries.load(p, begin.x, half,",
    ),
    Mutation(
        "entries of the first sequence for all",
        _K,
        "      if (sequence != begin.x) entries.load(p, sequence, blocks.first, blocks.step, lane);\n",
        "",
    ),
    Mutation("the entries stay", _K, "        entries = next;\n", ""),
    Mutation(
        "no blocks behind the first entries",
        _K,
        "const bool is_more = first + step < blocks.end;",
        "const bool is_more = false;",
    ),
    Mutation("blocks of new entries from the third on", _K, "first += step, held = 0;", "first += step;"),
    Mutation(
        "all pages are the block's first",
        _K,
        "shared.keys[at.stage] + lane * (kPage * kDepth)",
        "shared.keys[at.stage]",
    ),
    Mutation("scales of the first page", _K, "shared.scales[at.stage] + lane * kPage", "shared.scales[at.stage]"),
    Mutation("a page for two lanes", _K, "entries.held, held * kPages + lane % kPages", "entries.held, held * kPages"),
    Mutation(
        "the second unit's q is the first's", _K, "first_token * kHeads + unit * Unit::kColumns", "first_token * kHeads"
    ),
    Mutation(
        "weights of the first token",
        _K,
        "(sequence * kNextN + token) * p.weights_pitch",
        "sequence * kNextN * p.weights_pitch",
    ),
    Mutation("only the first weights", _K, "first < kAll; first += kAtOnce", "first < 0; first += kAtOnce"),
    Mutation(
        "weights of the first columns again",
        _K,
        "      store_weights(shared.weights[at.slot], first, lane);",
        "      store_weights(shared.weights[at.slot], 0, lane);",
    ),
    # shares
    Mutation("sequences from their first segment on", _K, "sequence == begin.x ? begin.y : 0, all", "0, all"),
    Mutation("the last sequence is left out", _K, "window <= end.x && window", "window < end.x && window"),
    Mutation("only 32 sequences", _K, "window += 32)", "window = ~0u)"),
    Mutation(
        "both CTAs of a share take all",
        _K,
        "Blocks blocks = {first_segment + half, all, p.splits};",
        "Blocks blocks = {first_segment, all, 1};",
    ),
    Mutation("more sequences than lanes", _K, "p.sequences <= 32;", "p.sequences <= 75;"),
    Mutation("sums of half a warp", _K, "distance < 32; distance *= 2", "distance < 16; distance *= 2"),
    Mutation("lanes below are taken from the other end", _K, "sum += lane >= distance ? below : 0;", "sum += below;"),
    Mutation("longer shares begin too early", _K, "share * each + (share < longer ? share : longer)", "share * each"),
    Mutation("no share is longer", _K, "first + each + (share < longer)", "first + each"),
    Mutation("the sequence with as many bits below", _K, "ptx::popc((left & (0 - left)) - 1)", "ptx::popc(left - 1)"),
    Mutation("both CTAs take the same half", _K, "half = ptx::block_index() % p.splits", "half = 0"),
    Mutation("math warps step as if alone", _K, "step = p.splits * kBlockKeys;", "step = kBlockKeys;"),
    # keys of tokens
    Mutation("the first token's context for all", _K, "p.contexts_pitch + token * p.contexts_step", "p.contexts_pitch"),
    Mutation(
        "the longest context is the first token's",
        _K,
        "most = keys > most ? keys : most;",
        "most = token ? most : keys;",
    ),
    Mutation("negative contexts", _K, "given < 0 ? 0 : given", "given"),
    Mutation("contexts beyond the rows", _K, "return keys < p.most_keys ? keys : p.most_keys;", "return keys;"),
    Mutation(
        "rows of the first token",
        _K,
        "(sequence * kNextN + lane) * p.logits_pitch",
        "sequence * kNextN * p.logits_pitch",
    ),
    # products and stores
    Mutation(
        "logits are not scaled", _K, "ptx::st_global_f32(to, logits[i] * scale)", "ptx::st_global_f32(to, logits[i])"
    ),
    Mutation("all blocks of a run have the first's keys", _K, "key + kBlock * work.step", "key"),
    Mutation("a key too many", _K, "if (key >= row.z) continue;", "if (key > row.z) continue;"),
    Mutation(
        "what a run leaves is left out",
        _K,
        "for (; blocks; --blocks, key += step)",
        "for (; false; --blocks, key += step)",
    ),
    Mutation("the kernel ahead is not waited for", _K, "  ptx::griddepcontrol_wait();\n", ""),
]


PLAN_TRIALS = [
    PlanTrial(1100, 3, 132),
    PlanTrial(31, 1, 7, seed=1, schedule="slow_warps"),
    PlanTrial(5, 2, 600, seed=2),
    PlanTrial(9, 2, 20, most=0, seed=3),
    PlanTrial(700, 1, 600, seed=4, schedule="slow_lanes"),
]
_P = "plan_paged_contexts.cuh"
PLAN_MUTATIONS = [
    Mutation(
        "segments of the first token", _P, "most = context > most ? context : most;", "most = token ? most : context;"
    ),
    Mutation(
        "segments end early",
        _P,
        "ceil_div(static_cast<uint32_t>(most), kSegmentKeys)",
        "static_cast<uint32_t>(most) / kSegmentKeys",
    ),
    Mutation(
        "sequences that there are not",
        _P,
        "if (sequence < p.sequences) sum += segments_of(p, sequence);",
        "sum += segments_of(p, sequence);",
    ),
    Mutation("sums of half a warp", _P, "distance < 32; distance *= 2", "distance < 16; distance *= 2"),
    Mutation("lanes below are taken from the other end", _P, "sum += lane >= distance ? below : 0;", "sum += below;"),
    Mutation("sums of a warp alone", _P, "if (other == warp) sum += total;", ""),
    Mutation("the last row is as the others", _P, "wanted = is_last ? total - 1 :", "wanted = false ? total - 1 :"),
    Mutation("rows of a thread alone", _P, "row <= p.shares; row += kNumThreads", "row <= p.shares; row = ~0u - 1"),
    Mutation("the last row is left out", _P, "row = thread; row <= p.shares", "row = thread; row < p.shares"),
    Mutation("batches without keys", _P, "    if (total) {", "    if (true) {"),
    Mutation(
        "a thread's sequences begin with the first", _P, "segment = wanted - (owner ?", "segment = wanted - (false ?"
    ),
    Mutation("the thread behind", _P, "<= wanted) owner += step;", "< wanted) owner += step;"),
    Mutation("the kernel ahead is not waited for", _P, "  ptx::griddepcontrol_wait();\n", ""),
]

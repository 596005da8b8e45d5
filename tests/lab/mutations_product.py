"""Mutations of docs/learn/product.cuh: mistakes that were once made in such kernels."""

from __future__ import annotations

from lab.learn import BROKEN, LearnConfig, LearnTrial
from lab.sim.mutate import Mutation

TRIALS = [
    *(LearnTrial(LearnConfig(), (200, 392, 528), seed) for seed in (1, 2)),
    *(LearnTrial(LearnConfig(), (200, 392, 528), 3, name) for name in ("late_loads", "late_stores", "slow_lanes")),
    *(LearnTrial(LearnConfig(32, 4), (200, 336, 272), 4, name) for name in ("slow_producer", "slow_math")),
    *(LearnTrial(LearnConfig(cluster_size=2), (264, 264, 528), seed) for seed in (5, 6, 7)),
    *(LearnTrial(LearnConfig(cluster_size=2), (200, 264, 400), 8, name) for name in ("slow_cta", "late_loads", "even")),
    *(LearnTrial(LearnConfig(cluster_size=2), (200, 264, 400), seed, "slow_warpgroup") for seed in (1, 2, 3)),
]

_ARRIVE = "ptx::mbarrier_arrive_after(&shared.empty[at.stage], sfa[1], lane == 0);"
_ARRIVE_CLUSTER = (
    "ptx::mbarrier_arrive_cluster_after(&shared.empty[at.stage], lane % kClusterSize, sfa[1], lane < kClusterSize);"
)
_RELEASE = f"""\
    // One lane releases the slot, once the last value that the warp loaded from it has arrived.
    if constexpr (kClusterSize > 1)
      {_ARRIVE_CLUSTER}
    else
      {_ARRIVE}
"""
_WAIT_WGMMA = "    ptx::wgmma_wait_group<0>();\n"
_WAIT_FULL = "ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);"
_WAIT_EMPTY = "ptx::mbarrier_wait_parity(&shared.empty[at.stage], at.parity ^ 1);\n      ptx::mbarrier_arrive_expect_tx"
_BEFORE_STORE = "  ptx::fence_proxy_async_shared();\n  ptx::bar_sync(1 + warpgroup, 128);\n"
_BEFORE_WRITE = "  if (is_storing_thread) ptx::tma_store_wait_read<0>();\n  ptx::bar_sync(1 + warpgroup, 128);\n"
_SYNC = "if constexpr (kClusterSize > 1) ptx::cluster_sync(); else ptx::syncthreads();"
_ISSUE = "ptx::smem_descriptor(a + k), ptx::smem_descriptor(b + k), k != 0"


def _replace(name: str, old: str, new: str, *, everywhere: bool = False) -> Mutation:
    return Mutation(name, "product.cuh", old, new, everywhere)


def _remove(name: str, old: str) -> Mutation:
    return _replace(name, old, "")


MUTATIONS = [
    *BROKEN,
    # Counts, parities, waits
    _replace("empty expects one arrival", "kClusterSize * kNumMathWarps);", "1);"),
    _replace("empty expects one warp too many", "kClusterSize * kNumMathWarps);", "kClusterSize * kNumMathWarps + 1);"),
    _replace("empty expects one warp too few", "kClusterSize * kNumMathWarps);", "kClusterSize * kNumMathWarps - 1);"),
    _replace("empty forgets the other CTA", "kClusterSize * kNumMathWarps);", "kNumMathWarps);"),
    _replace("full expects two arrivals", "&shared.full[i], 1)", "&shared.full[i], 2)"),
    _replace("consumer waits for the other parity", _WAIT_FULL, _WAIT_FULL.replace("parity);", "parity ^ 1);")),
    _replace("parity never flips", ", parity ^= 1;", ";"),
    _replace("producer does not wait", _WAIT_EMPTY, "ptx::mbarrier_arrive_expect_tx"),
    _replace(
        "ring position starts anew with each tile",
        "float total[kBlockN / 2];\n      mul",
        "at = {}; float total[kBlockN / 2];\n      mul",
    ),
    _replace("slot is never released", _ARRIVE, ";"),
    _replace("all lanes release", _ARRIVE, _ARRIVE.replace("lane == 0", "true")),
    _replace("slot released before the products are done", _WAIT_WGMMA + _RELEASE, _RELEASE + _WAIT_WGMMA),
    _replace("full announces too many bytes", "(full, kStageBytes)", "(full, kStageBytes + 16)"),
    # Start and end
    _remove("no fence after mbarrier_init", "    ptx::fence_mbarrier_init();\n"),
    _remove("nobody waits for the initialization", _SYNC),
    _replace("block barrier instead of the cluster's", _SYNC, "ptx::syncthreads();"),
    _replace(
        "exits while the other CTA still arrives",
        "if constexpr (kClusterSize > 1)\n    for",
        "if constexpr (false)\n    for",
    ),
    _remove(
        "exits while TMA still reads",
        "    if (warp % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();\n",
    ),
    _replace("producer keeps its registers", "ptx::setmaxnreg_dec<40>();", ""),
    _replace("registers exceed what the launch gave", "setmaxnreg_dec<40>", "setmaxnreg_dec<64>"),
    _replace("math registers exceed what is free", "setmaxnreg_inc<232>", "setmaxnreg_inc<240>"),
    # Products
    _remove("no fence before the products", "    ptx::wgmma_fence();\n"),
    _replace("accumulators read too early", "ptx::wgmma_wait_group<0>", "ptx::wgmma_wait_group<1>"),
    _replace("accumulators never start from zero", _ISSUE, _ISSUE.replace("k != 0", "true")),
    _replace("accumulators always start from zero", _ISSUE, _ISSUE.replace("k != 0", "false")),
    _replace(
        "k advances twice as fast", _ISSUE, _ISSUE.replace("a + k)", "a + k * 2)").replace("b + k)", "b + k * 2)")
    ),
    _replace("both warpgroups take the first rows", "+ warpgroup * 64 * kBlockK;", ";"),
    _remove("products are never committed", "    ptx::wgmma_commit_group();\n"),
    # Scales
    _replace("the second row's scale is the first's", "[at.stage][row + 8]", "[at.stage][row]"),
    _replace("scale of the next k-block", "k_blocks + k_block)", "k_blocks + (k_block ^ 1))"),
    _replace(
        "scale read from a slot given back",
        "sfa[i / 2 % 2] * sfb",
        "(i % 4 < 2 ? ptx::ld_shared_f32(&shared.sfa[at.stage][row]) : sfa[1]) * sfb",
    ),
    # Store
    _replace(
        "only the storing thread fences",
        _BEFORE_STORE,
        "  ptx::bar_sync(1 + warpgroup, 128);\n  if (is_storing_thread) ptx::fence_proxy_async_shared();\n",
    ),
    _replace("waits for all reads but one", _BEFORE_WRITE, _BEFORE_WRITE.replace("<0>", "<1>")),
    _replace("no barrier before the store", _BEFORE_STORE, "  ptx::fence_proxy_async_shared();\n"),
    _replace("buffer written while TMA reads it", _BEFORE_WRITE, "  ptx::bar_sync(1 + warpgroup, 128);\n"),
    _replace(
        "only the storing thread knows that TMA has read",
        _BEFORE_WRITE,
        "  if (is_storing_thread) ptx::tma_store_wait_read<0>();\n",
    ),
    _replace(
        "both warpgroups at one named barrier", "bar_sync(1 + warpgroup, 128)", "bar_sync(1, 128)", everywhere=True
    ),
    _replace(
        "rows and columns of matrices exchanged",
        "warp % 4 * 16 + lane % 16;",
        "warp % 4 * 16 + lane / 16 * 8 + lane % 8;",
    ),
    _replace(
        "store coordinates exchanged",
        "row_n + column,\n                        row_m + warpgroup * 64);",
        "row_m + warpgroup * 64, row_n + column);",
    ),
    _remove("stores are never committed", "    ptx::tma_store_commit();\n"),
    # Multicast
    _replace("multicast to itself alone", "row_n + first, 3);", "row_n + first, 1 << ptx::cluster_rank());"),
    _replace(
        "each CTA loads the same half",
        "const uint32_t first = ptx::cluster_rank() * kRows;",
        "const uint32_t first = 0;",
    ),
    _replace(
        "release reaches its own CTA alone",
        _ARRIVE_CLUSTER,
        "ptx::mbarrier_arrive_after(&shared.empty[at.stage], sfa[1], lane < kClusterSize);",
    ),
    _replace("k rounded down", "k_blocks = ceil_div(p.k, kBlockK)", "k_blocks = p.k / kBlockK"),
]

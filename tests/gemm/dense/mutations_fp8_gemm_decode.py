"""Mistakes that are easily made in the fp8_gemm_decode kernel, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.gemm.config.decode import DecodeConfig
from lab.sim.fp8_gemm_decode import DecodeTrial as Trial
from lab.sim.mutate import Mutation

ALONE = DecodeConfig(16, 3, 1, 1)
ALONE_WIDE = DecodeConfig(64, 4, 2, 1, is_fp32=True, with_c=True)
SPLIT = DecodeConfig(16, 3, 2, 3)
SPLIT_FP32 = DecodeConfig(24, 2, 1, 5, is_fp32=True)
FEW_CHUNKS = DecodeConfig(8, 3, 1, 8)
WITH_C = DecodeConfig(16, 3, 1, 2, with_c=True)

TRIALS = [
    *(Trial(ALONE, 13, 200, 1296, seed) for seed in (1, 2)),
    *(Trial(ALONE, 17, 72, 1296, 3, name) for name in ("late_loads", "slow_math", "slow_producer", "slow_lanes")),
    Trial(ALONE, 5, 72, 8208, 4),
    *(Trial(ALONE, 16, 64, 8320, seed, "slow_warps") for seed in (5, 6, 7)),
    Trial(ALONE_WIDE, 61, 200, 656, 5),
    *(Trial(ALONE_WIDE, 61, 200, 656, seed, "slow_warps") for seed in (6, 7)),
    *(Trial(SPLIT, 13, 328, 1296, seed) for seed in (8, 9)),
    *(Trial(SPLIT, 13, 200, 1296, 10, how) for how in ("slow_cta", "late_stores", "late_loads", "slow_warps", "even")),
    *(Trial(SPLIT, 9, 128, 256, seed, "slow_cta") for seed in (1, 2, 3)),
    *(Trial(SPLIT_FP32, 21, 72, 1296, seed) for seed in (11, 12)),
    *(Trial(FEW_CHUNKS, 7, 136, 1296, seed) for seed in (13, 14)),
    Trial(FEW_CHUNKS, 7, 72, 400, 15),
    *(Trial(FEW_CHUNKS, 23, 64, 1296, seed, "slow_cta") for seed in range(1, 6)),
    Trial(SPLIT_FP32, 69, 64, 1296, 15),
    Trial(FEW_CHUNKS, 7, 72, 1296, 15, "late_stores"),
    Trial(WITH_C, 13, 72, 528, 16),
    Trial(WITH_C, 19, 72, 528, 16, in_place=True),
    *(Trial(WITH_C, 13, 72, 528, seed, is_dependent=True) for seed in (17, 18)),
    Trial(WITH_C, 13, 72, 528, 19, "slow_math", is_dependent=True),
    *(
        Trial(WITH_C, 13, 72, k, 20, name, is_dependent=True, weight_is_ready=True)
        for k in (128, 528, 1296)
        for name in ("slow_math", "late_loads")
    ),
    *(Trial(WITH_C, 13, 72, 128, seed, "late_loads", is_dependent=True, weight_is_ready=True) for seed in range(1, 5)),
]

_DECODE, _TILE, _EXCHANGE, _RING = (f"{name}.cuh" for name in ("fp8_gemm_decode", "decode/tile", "exchange", "ring"))
_E4M3 = "decode/e4m3.cuh"
_BAR = "    ptx::bar_sync(1, kNumMathThreads);\n"
_STORE = "    scales.store(p, first, shared.scales);\n"
_WAIT_WGMMA = "    ptx::wgmma_wait_group<0>();\n"
_RELEASE = "    release(ring, at, lane);\n"
_SYNCWARP = "  ptx::syncwarp();\n"

MUTATIONS = [
    # The ring
    Mutation("full is not waited for", _TILE, "    wait_until_loaded(ring, at);\n", ""),
    Mutation("empty is not waited for", _DECODE, "    wait_until_free(shared.ring, at);\n", ""),
    Mutation("slots are never given back", _TILE, _RELEASE, ""),
    Mutation("slots are given back before the product is done", _TILE, _WAIT_WGMMA + _RELEASE, _RELEASE + _WAIT_WGMMA),
    Mutation("the product is not waited for", _TILE, _WAIT_WGMMA, ""),
    Mutation("empty expects one arrival", _RING, "kEmptyArrivals = kMulticastCtas * kNumMathWarps", "kEmptyArrivals = 1"),
    Mutation("bytes of whole boxes announced", _DECODE, "p.slot_bytes);", "kABytes + kBBytes);"),
    Mutation("A loaded into the wrong slot", _DECODE, "shared.a[stage] + block * kABytes", "shared.a[0] + block * kABytes"),
    Mutation("B of the next k-block", _DECODE, "i * (kBlockK / kSlotBlocks), work.row_n", "(i + 1) * (kBlockK / kSlotBlocks), work.row_n"),
    Mutation("A of the first tile", _DECODE, "(i + block) * kBlockK, work.row_m, work)", "(i + block) * kBlockK, 0, work)"),
    Mutation("no block barrier after the barriers' initialization", _DECODE, "  ptx::syncthreads();\n", ""),
    Mutation("barriers not fenced", _RING, "    ptx::fence_mbarrier_init();\n", ""),
    Mutation("A loaded before the kernel ahead has ended", _DECODE, "    ptx::griddepcontrol_wait();\n#pragma unroll 1", "#pragma unroll 1"),
    Mutation("scales loaded before the kernel ahead has ended", _DECODE, "    ptx::griddepcontrol_wait();\n    for (CtaWork", "    for (CtaWork"),
    # Work
    Mutation("k-blocks rounded down", _TILE, "ceil_div(p.k, kBlockK)", "(p.k / kBlockK)"),
    Mutation("every CTA takes all of k", _TILE, "end_k_block = num_k_blocks * (rank + 1) / kClusterK", "end_k_block = num_k_blocks"),
    Mutation("a k-block between two CTAs left out", _TILE, "num_k_blocks * (rank + 1) / kClusterK", "num_k_blocks / kClusterK * (rank + 1)"),
    Mutation("tiles of m rounded down", _TILE, "tiles_m = ceil_div(p.m, kBlockTokens)", "tiles_m = p.m / kBlockTokens + (p.m < kBlockTokens)"),
    Mutation("the last tile moved up too far", _TILE, "p.m - kBlockTokens : 0;", "p.m - kBlockTokens - 1 : 0;"),
    Mutation("the last tile moved up where C is added", _TILE, "kMovesLastTileUp = !kWithC;", "kMovesLastTileUp = true;", shows_in=WITH_C),
    Mutation("clusters count as CTAs", _TILE, "ptx::block_index() / kClusterK", "ptx::block_index()"),
    # The weight is loaded before A
    Mutation("loads the weight ahead though it is not ready", _DECODE, "  if (p.weight_is_ready) {", "  {"),
    Mutation("loads A ahead with the weight", _DECODE, "load_b(work.k_block + stage * kSlotBlocks, stage);", "load_b(work.k_block + stage * kSlotBlocks, stage), load_a(work.k_block + stage * kSlotBlocks, stage);"),
    Mutation("loads B again behind the wait", _DECODE, "i < end_ahead; i += kSlotBlocks, at = at.next()) load_a(i, at.stage);", "i < end_ahead; i += kSlotBlocks, at = at.next()) load_b(i, at.stage), load_a(i, at.stage);"),
    Mutation("no A for what was loaded ahead", _DECODE, "i < end_ahead; i += kSlotBlocks, at = at.next()) load_a(i, at.stage);", "i < end_ahead; i += kSlotBlocks, at = at.next()) {}"),
    Mutation("all of B loaded ahead, whatever the ring holds", _DECODE, "end_ahead += count < kNumStages * kSlotBlocks ? count : kNumStages * kSlotBlocks;", "end_ahead += count;"),
    Mutation("the ring filled ahead, whatever k is", _DECODE, "end_ahead += count < kNumStages * kSlotBlocks ? count : kNumStages * kSlotBlocks;", "end_ahead += kNumStages;"),
    Mutation("B of the next k-block loaded ahead", _DECODE, "load_b(work.k_block + stage * kSlotBlocks, stage);", "load_b(work.k_block + stage * kSlotBlocks + 1, stage);"),
    # Scales and promotion
    Mutation("scales of tokens outside are read", _E4M3, "(token < p.m ? token : p.m - 1)", "(token)"),
    Mutation("scales past the last k-block are read", _E4M3, "first_k_block + i < work.end_k_block ? first_k_block + i : work.end_k_block - 1", "first_k_block + i"),
    Mutation("scales of an empty range are read", _TILE, "  if (work.k_block < work.end_k_block) scales.load", "  scales.load"),
    Mutation("scales of B of the first block", _E4M3, "static_cast<uint64_t>(work.row_n / 128) * p.sfb_stride_n", "0"),
    Mutation("scales of B of one k-block for all", _E4M3, "ptx::shfl_sync(sfb, index / kBlockTokens)", "ptx::shfl_sync(sfb, 0)"),
    Mutation("scales overwritten while others read them", _TILE, "    ptx::bar_sync(1, kNumMathThreads);  // all warps have read the previous scales\n", ""),
    Mutation("scales read before all are there", _TILE, _STORE + _BAR, _STORE),
    Mutation("the next scales are not loaded", _TILE, "    if (first + kBlocks < work.end_k_block) scales.load(p, work, first + kBlocks);\n", ""),
    Mutation("the next scales are loaded one too far", _TILE, "scales.load(p, work, first + kBlocks)", "scales.load(p, work, first + kBlocks + 1)"),
    Mutation("tokens of a pair swapped in the promotion", _TILE, "j % 2 ? scale[j / 4].y : scale[j / 4].x", "j % 2 ? scale[j / 4].x : scale[j / 4].y"),
    Mutation("scales of the rows' neighbours", _TILE, "j % 2 ? scale[j / 4].y", "j / 2 % 2 ? scale[j / 4].y"),
    Mutation("promotion replaces the total", _TILE, "scale[j / 4].x, total[j])", "scale[j / 4].x, 0.f)"),
    Mutation("totals start as they are", _TILE, "  for (float& x : total) x = 0;", "  for (float& x : total) x = x;"),
    Mutation("half of a block's depth", _TILE, "k < kBlockK; k += 32)", "k < kBlockK / 2; k += 32)"),
    Mutation("both warpgroups multiply the same rows", _E4M3, "ptx::warp_index() / 4 * 64 * kBlockK", "0"),
    Mutation("no fence before the product", _TILE, "  ptx::wgmma_fence();\n", ""),
    # The reduction
    Mutation("sums sent before all CTAs run", _DECODE, "      if constexpr (kClusterK > 1) ptx::cluster_wait();\n      tiles", "      tiles"),
    Mutation("sums added before they have arrived", _TILE, "    ptx::mbarrier_wait_parity_cluster(&shared.received, 0);\n", ""),
    Mutation("half of the bytes expected", _EXCHANGE, "* kChunkFloats * 4);", "* kChunkFloats * 2);"),
    Mutation("every CTA expects a whole share", _EXCHANGE, "  if (first >= chunks) return 0;\n  return chunks - first < chunks_per_cta(accumulators) ? chunks - first : chunks_per_cta(accumulators);", "  return chunks_per_cta(accumulators);"),
    Mutation("nothing expected", _TILE, "  if constexpr (kClusterK > 1) expect_chunks<kAccumulators>(&shared.received, work.rank);\n", ""),
    Mutation("all send to the same place", _EXCHANGE, "(sender * kChunks + chunk % kChunks)", "(chunk % kChunks)"),
    Mutation("sent to the place of another chunk", _EXCHANGE, "sender * kChunks + chunk % kChunks", "sender * kChunks + (chunk + 1) % kChunks"),
    Mutation("sent to the wrong CTA", _EXCHANGE, "received, first + chunk / kChunks,", "received, first + (chunk / kChunks + 1) % kClusterK,"),
    Mutation("chunks counted as if there were one warp", _EXCHANGE, "i / 4 * kNumMathWarps + warp", "i / 4 + warp"),
    Mutation("the last CTA's sums left out", _EXCHANGE, "sender < kSenders; ++sender", "sender + 1 < kSenders; ++sender"),
    Mutation("the first CTA's sums added twice", _EXCHANGE, "uint32_t sender = 1;", "uint32_t sender = 0;"),
    Mutation("two registers of a chunk swapped", _EXCHANGE, "first + chunk / kChunks, x, y, z, w);", "first + chunk / kChunks, x, z, y, w);"),
    Mutation("another lane's sums", _EXCHANGE, "chunk_of_cta * kChunkFloats + lane * 4;", "chunk_of_cta * kChunkFloats + (lane ^ 1) * 4;"),
    Mutation("received is not initialized", _TILE, "  ptx::mbarrier_init(&shared.received, 1);\n", ""),
    # Storing
    Mutation("a tile is transposed where others still multiply", _TILE, "    ptx::bar_sync(1, kNumMathThreads);  // all warps have read the ring\n", ""),
    Mutation("transposed before all lanes have written", _TILE, _SYNCWARP + "  ptx::Float4 d", "  ptx::Float4 d"),
    Mutation("rows 8 to 15 over rows 0 to 7", _TILE, "room + transposed(token, column + 8), v.z", "room + transposed(token, column), v.z"),
    Mutation("tokens of a pair swapped", _TILE, "transposed(token + 1, column), v.y", "transposed(token + 1, column), v.x"),
    Mutation("rows outside D written", _TILE, "if (d_row >= p.m || d_column >= p.n) return;", "if (d_column >= p.n) return;"),
    Mutation("columns outside D written", _TILE, "if (d_row >= p.m || d_column >= p.n) return;", "if (d_row >= p.m) return;"),
    Mutation("C left out", _TILE, "d.x += c.x, d.y += c.y, d.z += c.z, d.w += c.w;", ""),
    Mutation("C's pairs swapped", _TILE, "ptx::unpack_bf16(c.x), high = ptx::unpack_bf16(c.y)", "ptx::unpack_bf16(c.y), high = ptx::unpack_bf16(c.x)"),
    Mutation("C read with D's pitch in bytes", _TILE, "p.c + (d_row * p.c_pitch + d_column) * kCBytes", "p.c + d_row * p.c_pitch + d_column * kOutputBytes"),
    Mutation("D written with pairs swapped", _TILE, "ptx::pack_bf16(d.x, d.y), ptx::pack_bf16(d.z, d.w)", "ptx::pack_bf16(d.z, d.w), ptx::pack_bf16(d.x, d.y)"),
    Mutation("all chunks to the rows of the first", _TILE, "work.row_m + chunk / kNumMathWarps * 8", "work.row_m"),
    Mutation("all warps to the same columns", _TILE, "work.row_n + chunk % kNumMathWarps * 16", "work.row_n"),
    Mutation("the last chunks of the last CTA written though there are none", _TILE, "chunk_of_cta >= kShare || chunk >= chunks_of_tile(kAccumulators)", "chunk_of_cta >= kShare"),
    Mutation("shares written twice", _TILE, "if (chunk_of_cta >= kShare || chunk", "if (chunk"),
]  # fmt: skip

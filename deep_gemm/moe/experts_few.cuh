// One of the two products of a layer of experts, for few tokens. It streams the BF16 or E4M3 weights of the experts in use.
// The first product activates its sums before it stores them, and gather_weighted sums up the rows of the second.
//
//   a warp                 for each item, for each k-block:   empty --wait--> weights --TMA--> full
//   another, BF16          for each item, for each k-block:   empty --wait--> B --TMA--> full
//   4 others, E4M3         each for every fourth k-block:     B -> registers; empty --wait--> B cast, scales --arrive--> full
//   math, 2 warpgroups     for each item, for each k-block:   full --wait--> WGMMA, in E4M3 promote --arrive--> empty
//                          after the last k-block:            accumulators --> activated --> rows
//
// A unit is 16 rows of an expert's weight: 8 of gate and the same 8 of up, or 16 neighbours. An item is up to kMaxUnits units of
// one expert, multiplied together. CTAs share out the items of all experts in use. A slot loads as slowly for few units
// as for many, so the time depends on the number of items of a CTA. Items of one expert do not overlap and leave no gap.
//
// Weights are A of WGMMA, and tokens are B. The first product multiplies all tokens; the second multiplies the rows of the expert
// and some rows after them. Products with tokens of other experts are not stored.
//
// Every CTA finds the rows itself, from all ids. So the second product loads weights while the first one ends, and waits for it
// only before it loads B. The ids are complete by then: the first product lets the second start after its own wait, once a CTA has
// nearly requested its last weights. If the second started earlier, its loads would queue before the first's.
#pragma once
#include "cast/piece.cuh"
#include "cast/silu.cuh"
#include "config.cuh"
#include "lanes.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

struct ExpertsFewParams {
  ptx::TensorMap map_w, map_fours;  // boxes of one unit, and of four units: (k, row among 8, first or second 8 rows, unit)
  ptx::TensorMap map_b;             // x [tokens, k], or activations [rows, k], in boxes of p.tokens rows
  const uint8_t* b;                 // the same matrix before its cast to E4M3: x in BF16, or activations in FP32
  const float* sfw;                 // scales of E4M3 weights
  const uint8_t* topk_ids;          // [tokens, topk], of id_bytes each; ids of one token are adjacent
  int32_t* row_of;                  // [tokens, topk], -1: no expert; the first product writes it
  uint8_t* d;                       // [rows, n], FP32 if the second product casts it, else BF16
  uint32_t tokens, topk, ids_pitch, id_bytes, num_experts, first_expert;  // ids of experts begin at first_expert
  uint32_t n, k, units, units_apart;  // units of an expert's weight; distance in the maps between the first units of two experts
  uint32_t b_pitch;                   // in bytes
  uint32_t sfw_stride_e, sfw_stride_n, sfw_stride_k;  // strides of experts, of 128 rows (or of each row), of k-blocks
  uint32_t gating;                    // 2: SiTU; SwiGLU otherwise
  float limit, alpha, beta, alpha_reciprocal, beta_reciprocal;
};
#include "experts_few_params_layout.cuh"  // asserts the layout that core/params.py packs

constexpr uint32_t kLineBytes = 128, kBlockK = kIsFp8 ? kLineBytes : kLineBytes / 2;
constexpr uint32_t kUnitRows = 16, kUnitBytes = kUnitRows * kLineBytes;
constexpr uint32_t kMaxUnits = 8, kUnitsOfWarpgroup = kMaxUnits / 2;  // one unit for each math warp
constexpr uint32_t kWarpgroupBytes = kUnitsOfWarpgroup * kUnitBytes;
constexpr uint32_t kNumMathWarps = kMaxUnits, kNumMathThreads = kNumMathWarps * 32;
constexpr uint32_t kNumBWarps = kNumThreads / 32 - kNumMathWarps - 1;
// Shared memory has no space for the scales of more stages.
constexpr uint32_t kBBytes = kColumns * kLineBytes, kMaxStages = kIsFp8 ? 6 : kRingBytes / (kWarpgroupBytes + kBBytes);
static_assert(kNumBWarps == (kIsFp8 ? 4 : 1), "math warps, one that loads weights, and those that bring B");
static_assert(kMaxExperts == 2 * kNumMathThreads, "two experts for each math thread");
static_assert(kColumns == 8, "a thread has two columns, and an expert's tokens are half a word");

struct SharedStorage {
  alignas(1024) uint8_t ring[kRingBytes];
  uint32_t entry_of[kMaxExperts];  // of an expert: bit t: token t uses it; its first row << 16
  uint32_t hit[kMaxExperts];       // the experts in use, in ascending order
  uint32_t of_warp[kNumMathWarps]; // for the experts that a warp looks at: experts in use << 16 | rows
  uint64_t full[kMaxStages], empty[kMaxStages];
  alignas(8) float of_columns[kIsFp8 ? kMaxStages : 1][kColumns];      // scales of B
  float of_units[kIsFp8 && !kIsByRow ? kMaxStages : 1][kMaxUnits][2];  // scales of weights, if they change along k
  float largest[kIsFp8 && kIsByRow ? kNumBWarps : 1][kColumns];        // largest magnitudes in a warp's part of each row of B
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "FewConfig.shared_bytes and SharedStorage differ");

// Returns the expert of a route, or num_experts if it has none. It reads the L2: the second product may read before the kernel
// ahead of the layer has ended, and the L1 may hold older ids.
DEVICE uint32_t expert_of(const ExpertsFewParams& p, uint32_t token, uint32_t route) {
  const uint8_t* id = p.topk_ids + (uint64_t{token} * p.ids_pitch + route - token * p.topk) * p.id_bytes;
  const uint32_t low = ptx::ld_relaxed_gpu_b32(id) - p.first_expert;
  const uint32_t high = p.id_bytes == 8 ? ptx::ld_relaxed_gpu_b32(id + 4) : 0;
  return high == 0 && low < p.num_experts ? low : p.num_experts;
}

// Returns the row of a token at an expert. A token that names an expert twice has one row for both.
DEVICE uint32_t row_of(uint32_t entry, uint32_t token) { return (entry >> 16) + ptx::popc(entry & ((1u << token) - 1)); }

// Gives each (token, expert) pair a row, ordered by expert and then by token; lists the experts in use and returns their number.
// All threads must call it.
DEVICE uint32_t find_rows(const ExpertsFewParams& p, SharedStorage& shared) {
  const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = ptx::lane_index();
  for (uint32_t route = thread; route < p.tokens * p.topk; route += kNumThreads) {
    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);
    if (expert < p.num_experts) ptx::red_shared_or(&shared.entry_of[expert], 1u << token);
  }
  ptx::syncthreads();
  uint32_t tokens[2] = {}, counts[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    if (warp < kNumMathWarps) tokens[i] = ptx::ld_shared_b32(&shared.entry_of[thread * 2 + i]);
    counts[i] = ptx::popc(tokens[i]) + (tokens[i] != 0 ? 1u << 16 : 0);
  }
  const uint32_t up_to = sum_up_to_lane(counts[0] + counts[1], lane);
  if (warp < kNumMathWarps && lane == 31) ptx::st_shared_b32(&shared.of_warp[warp], up_to);
  ptx::syncthreads();
  uint32_t before = up_to - counts[0] - counts[1], all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kNumMathWarps; ++w) {
    const uint32_t of_warp = ptx::ld_shared_b32(&shared.of_warp[w]);
    before += w < warp ? of_warp : 0, all += of_warp;
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; before += counts[i++]) {
    if (tokens[i] == 0) continue;
    ptx::st_shared_b32(&shared.hit[before >> 16], thread * 2 + i);
    ptx::st_shared_b32(&shared.entry_of[thread * 2 + i], tokens[i] | before << 16);
  }
  ptx::syncthreads();
  if (!kIsSecond && ptx::block_index() == ptx::grid_size() - 1)
    for (uint32_t route = thread; route < p.tokens * p.topk; route += kNumThreads) {  // gather_weighted reads it
      const uint32_t token = route / p.topk, expert = expert_of(p, token, route);
      const uint32_t row = expert < p.num_experts ? row_of(ptx::ld_shared_b32(&shared.entry_of[expert]), token) : ~0u;
      ptx::st_global_b32(p.row_of + route, row);
    }
  return all >> 16;
}

// The items of this CTA, and the sizes and number of its ring's stages.
struct Work {
  uint32_t item_units, items_of_expert;  // units of an item; the last item of an expert may have fewer
  uint32_t first, end;                   // range of items, counted over all experts in use
  uint32_t k_blocks, a_bytes, stage_bytes, stages;

  // Makes items as small as possible without giving a CTA more of them.
  DEVICE Work(const ExpertsFewParams& p, uint32_t num_hit) : k_blocks(ceil_div(p.k, kBlockK)) {
    const uint32_t items_of_cta = ceil_div(num_hit * ceil_div(p.units, kMaxUnits), ptx::grid_size());
    item_units = num_hit == 0 ? 1 : ceil_div(p.units, items_of_cta * ptx::grid_size() / num_hit);
    items_of_expert = ceil_div(p.units, item_units);
    const Part part(num_hit * items_of_expert, ptx::grid_size(), ptx::block_index());
    first = part.first, end = part.first + part.count;
    a_bytes = ceil_div(item_units, kUnitsOfWarpgroup) * kWarpgroupBytes;
    stage_bytes = a_bytes + kBBytes;
    stages = kRingBytes / stage_bytes < kMaxStages ? kRingBytes / stage_bytes : kMaxStages;
  }
};

// Units of one expert that are multiplied together.
struct Item {
  uint32_t number, count = 0;  // index among the items of all experts in use; number of units, 0 after the CTA's last item
  uint32_t unit, in_map;       // its first unit: counted in the expert, and in the maps
  uint32_t expert, entry;      // the expert's number, and its entry_of

  DEVICE Item(const ExpertsFewParams& p, const SharedStorage& shared, const Work& work, uint32_t number_) : number(number_) {
    if (number >= work.end) return;
    const uint32_t place = number / work.items_of_expert;
    expert = ptx::ld_shared_b32(&shared.hit[place]);
    unit = (number - place * work.items_of_expert) * work.item_units, in_map = expert * p.units_apart + unit;
    entry = ptx::ld_shared_b32(&shared.entry_of[expert]);
    count = p.units - unit < work.item_units ? p.units - unit : work.item_units;
  }

  // Returns a bit mask of the columns of B that belong to the expert.
  DEVICE uint32_t columns() const { return kIsSecond ? (1u << ptx::popc(entry & 0xffff)) - 1 : entry & 0xffff; }
  // Returns the scale of a row of a unit of weights. `in_item` counts units from the item's first.
  DEVICE const float* scale_of(const ExpertsFewParams& p, uint32_t in_item, uint32_t row, uint32_t k_block) const {
    const uint32_t of_unit = unit + in_item;
    const uint32_t weight_row = kIsSecond ? of_unit * kUnitRows + row : of_unit * 8 + row % 8 + (row < 8 ? 0 : p.n);
    const uint64_t block = kIsByRow ? weight_row : weight_row / kBlock;
    return p.sfw + uint64_t{expert} * p.sfw_stride_e + block * p.sfw_stride_n + uint64_t{k_block} * p.sfw_stride_k;
  }
};

// Calls `use` for each slot of a CTA: each k-block of each item.
DEVICE void for_slots(const ExpertsFewParams& p, const SharedStorage& shared, const Work& work, const auto& use) {
  uint32_t stage = 0, parity = 0;
  for (Item item(p, shared, work, work.first); item.count != 0; item = Item(p, shared, work, item.number + 1)) {
#pragma unroll 1
    for (uint32_t k_block = 0; k_block < work.k_blocks; ++k_block) {
      use(item, k_block, stage, parity);
      if (++stage == work.stages) stage = 0, parity ^= 1;
    }
  }
}

// One warp loads weights: each lane loads one unit, or four.
DEVICE void load_weights(const ExpertsFewParams& p, SharedStorage& shared, const Work& work) {
  const uint32_t lane = ptx::lane_index();
  const uint32_t let_at = work.k_blocks > kEarlyBlocks ? work.k_blocks - 1 - kEarlyBlocks : 0;
  const auto load = [&](const Item& item, uint32_t k_block, uint32_t stage, uint32_t parity) {
    if (lane == 0) {
      ptx::mbarrier_wait_parity(&shared.empty[stage], parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(&shared.full[stage], item.count * kUnitBytes);
    }
    ptx::syncwarp();
    const uint32_t fours = item.count / 4, unit = lane < fours ? lane * 4 : lane + fours * 3;
    if (unit < item.count)
      ptx::tma_load_4d(lane < fours ? &p.map_fours : &p.map_w, &shared.full[stage],
                       shared.ring + stage * work.stage_bytes + unit * kUnitBytes, k_block * kBlockK, 0, 0, item.in_map + unit);
    if (!kIsSecond && item.number + 1 == work.end && k_block == let_at) ptx::griddepcontrol_launch_dependents();
  };
  for_slots(p, shared, work, load);
}

// One warp loads B.
DEVICE void load_b(const ExpertsFewParams& p, SharedStorage& shared, const Work& work) {
  if constexpr (kIsSecond) ptx::griddepcontrol_wait();
  const auto load = [&](const Item& item, uint32_t k_block, uint32_t stage, uint32_t parity) {
    uint8_t* const to = shared.ring + stage * work.stage_bytes + work.a_bytes;
    ptx::mbarrier_wait_parity(&shared.empty[stage], parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&shared.full[stage], p.tokens * kLineBytes);
    ptx::tma_load_2d(&p.map_b, &shared.full[stage], to, k_block * kBlockK, kIsSecond ? item.entry >> 16 : 0);
  };
  if (ptx::lane_index() == 0) for_slots(p, shared, work, load);
}

// Returns the lowest column of a mask; 32 if the mask is empty.
DEVICE uint32_t first_of(uint32_t columns) { return ptx::popc(~columns & (columns - 1)); }

// Casts B to E4M3 with several warps. A warp casts 128 columns of a row at a time, which become a column of B for WGMMA.
struct Caster {
  static constexpr uint32_t kAtOnce = 4;  // pieces that are cast together; first, all columns of a slot are loaded
  uint32_t warp = ptx::warp_index() - kNumMathWarps - 1, lane = ptx::lane_index();
  Divisor of_lane{};  // for one scale per row: the divisor of the column whose number is the lane's

  // Loads four elements for a lane. It avoids ".nc" loads, which the compiler may move before griddepcontrol_wait.
  DEVICE Piece load(const ExpertsFewParams& p, const Item& item, uint32_t column, uint32_t k_block) const {
    const uint32_t row = (kIsSecond ? item.entry >> 16 : 0) + column, first = k_block * kBlockK + lane * kElements;
    const uint8_t* const from = p.b + uint64_t{row} * p.b_pitch + uint64_t{first} * kInputBytes;
    Piece piece = {};
    if (column == 32 || first >= p.k) return piece;
#pragma unroll
    for (uint32_t i = 0; i < kWords; i += 2) {
      const ptx::Uint2 loaded = ptx::ld_global_v2_b32(from + i * 4);
      piece.words[i] = loaded.x, piece.words[i + 1] = loaded.y;
    }
    return piece;
  }

  // Finds the scales of the rows of an item's expert. Each warp reads a part of k.
  DEVICE void find_scales(const ExpertsFewParams& p, SharedStorage& shared, const Work& work, const Item& item) {
    for (uint32_t left = item.columns(); left != 0; left &= left - 1) {
      const uint32_t column = first_of(left);
      uint32_t keys[1] = {};
      Piece pieces[kColumns];
#pragma unroll 1
      for (uint32_t k_block = warp; k_block < work.k_blocks; k_block += kNumBWarps * kColumns) {
#pragma unroll
        for (uint32_t i = 0; i < kColumns; ++i) pieces[i] = load(p, item, column, k_block + i * kNumBWarps);
#pragma unroll
        for (const Piece& piece : pieces) keys[0] = larger_key(keys[0], key_of<false>(piece));
      }
      const float amax = amax_of(largest_of_team(keys, lane));
      if (lane == 0) ptx::st_shared_f32(&shared.largest[warp][column], amax);
    }
    ptx::bar_sync(1, kNumBWarps * 32);
    float amax = 0;
#pragma unroll
    for (auto& of_warp : shared.largest) amax = ptx::max_f32(amax, ptx::ld_shared_f32(of_warp + lane % kColumns));
    of_lane = divisor_of<false>(amax, 0.f, false);
    ptx::bar_sync(1, kNumBWarps * 32);  // before the warps reuse `largest` for another expert
  }

  // Casts kAtOnce pieces of columns and stores them in WGMMA's layout: rows of 128 bytes whose chunks of 16 are swizzled.
  DEVICE void cast(float* of_columns, uint8_t* b, const uint32_t* columns, const Piece* pieces) const {
    CastPiece casts[kAtOnce];
    if constexpr (!kIsByRow) cast_pieces(pieces, lane, casts);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t column = columns[i];
      if (column == 32) continue;
      if constexpr (kIsByRow)
        casts[i] = cast_by<false>({ptx::shfl_sync(of_lane.scale, column), ptx::shfl_sync(of_lane.reciprocal, column)}, pieces[i]);
      if (lane == 0) ptx::st_shared_f32(of_columns + column, casts[i].scale);
      ptx::st_shared_b32(b + column * kLineBytes + ((lane / 4 ^ column % 8) * 16 + lane % 4 * 4), casts[i].values.words[0]);
    }
  }
};
static_assert(kLanes == 32, "a warp has 128 columns");

// A warp casts every kNumBWarps-th k-block. It loads scales of weights too, and does not wait for the previous kernel to do so.
DEVICE void cast_b(const ExpertsFewParams& p, SharedStorage& shared, const Work& work) {
  Caster caster;
  uint32_t slot = 0;
  const auto cast = [&](const Item& item, uint32_t k_block, uint32_t stage, uint32_t parity) {
    const uint32_t unit = caster.lane / 2, half = caster.lane % 2;
    uint8_t* const to = shared.ring + stage * work.stage_bytes + work.a_bytes;
    const bool is_own = slot++ % kNumBWarps == caster.warp;
    float of_unit = 0;
    if (!kIsByRow && is_own && unit < item.count) of_unit = ptx::ld_global_f32(item.scale_of(p, unit, half * 8, k_block));
    if constexpr (kIsSecond) ptx::griddepcontrol_wait();
    if (kIsByRow && k_block == 0 && (item.unit == 0 || item.number == work.first)) caster.find_scales(p, shared, work, item);
    if (!is_own) return;
    uint32_t left = item.columns(), columns[kColumns];
    Piece pieces[kColumns];
#pragma unroll
    for (uint32_t i = 0; i < kColumns; ++i, left &= left - 1) {
      columns[i] = first_of(left);
      pieces[i] = caster.load(p, item, columns[i], k_block);
    }
    ptx::mbarrier_wait_parity(&shared.empty[stage], parity ^ 1);
#pragma unroll
    for (uint32_t i = 0; i < kColumns; i += Caster::kAtOnce)
      if (columns[i] < 32) caster.cast(shared.of_columns[stage], to, columns + i, pieces + i);
    if (!kIsByRow && unit < kMaxUnits) ptx::st_shared_f32(&shared.of_units[stage][unit][half], of_unit);
    ptx::fence_proxy_async_shared();  // WGMMA reads bytes that threads have stored
    ptx::syncwarp();
    if (caster.lane == 0) ptx::mbarrier_arrive(&shared.full[stage]);
  };
  for_slots(p, shared, work, cast);
  if constexpr (kIsSecond) ptx::griddepcontrol_wait();  // also without items: the sum that follows waits for this kernel alone
}

// Activates and rounds as products in BF16 followed by cast_rows do.
DEVICE float activated(const ExpertsFewParams& p, float gate, float up) {
  const ptx::Float2 rounded = ptx::unpack_bf16(ptx::pack_bf16(gate, up));
  return p.gating == 2 ? Situ(p)(rounded.x, rounded.y, 1.f) : Swiglu(p)(rounded.x, rounded.y, 1.f);
}

// Stores one unit: a warp's sums of an item.
DEVICE void store_unit(const ExpertsFewParams& p, const Item& item, const float (&sums)[4]) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
  if (warp >= item.count) return;
  const uint32_t column = (item.unit + warp) * (kIsSecond ? kUnitRows : kUnitRows / 2) + lane / 4;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t b = lane % 4 * 2 + i;  // a token, or one of the expert's rows
    if ((item.columns() >> b & 1) == 0) continue;
    const uint32_t row = kIsSecond ? (item.entry >> 16) + b : row_of(item.entry, b);
    const float first = sums[i], second = sums[2 + i];
    uint8_t* const to = p.d + (uint64_t{row} * p.n + column) * (kIsFp8 && !kIsSecond ? 4 : 2);
    if constexpr (kIsSecond) {
      ptx::st_global_b16(to, ptx::pack_bf16(first, 0.f));
      ptx::st_global_b16(to + kUnitRows, ptx::pack_bf16(second, 0.f));  // 8 columns further
    } else if constexpr (kIsFp8) {
      ptx::st_global_f32(to, activated(p, first, second));
    } else {
      ptx::st_global_b16(to, ptx::pack_bf16(activated(p, first, second), 0.f));
    }
  }
}

// Math warps multiply. A warpgroup without 64 rows of its own in an item multiplies the first 64 rows and discards the sums. Sums
// of 128 values of E4M3 are promoted, each times its scales, or once at the end if no scale changes along k.
//
// This is a template because each type of weights has its own instructions, and only one type is compiled.
template <uint32_t kN>
DEVICE void multiply(const ExpertsFewParams& p, SharedStorage& shared, const Work& work) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
  const uint32_t ring = ptx::smem_descriptor_low(ptx::smem_address(shared.ring));
  float sums[kN / 2] = {}, of_rows[2] = {};
  ptx::Float2 of_columns = {};
  const auto multiply_slot = [&](const Item& item, uint32_t k_block, uint32_t stage, uint32_t parity) {
    const uint32_t slot = ring + stage * (work.stage_bytes / 16), b = slot + work.a_bytes / 16;
    const uint32_t a = slot + (warp / 4 * kUnitsOfWarpgroup < item.count ? warp / 4 * (kWarpgroupBytes / 16) : 0);
    float partial[kN / 2];
    float (&products)[kN / 2] = kIsFp8 ? partial : sums;
    ptx::mbarrier_wait_parity(&shared.full[stage], parity);
    ptx::fence_registers(products);
    ptx::wgmma_fence();
    if constexpr (kIsFp8)
      ptx::wgmma_m64k128_e4m3<kN>(products, a, b);
    else
      ptx::wgmma_m64k64_bf16<kN>(products, a, b, k_block != 0);
    ptx::wgmma_commit_group();
    if constexpr (kIsFp8) of_columns = ptx::ld_shared_v2_f32(&shared.of_columns[stage][lane % 4 * 2]);
#pragma unroll
    for (uint32_t i = 0; i < 2 && kIsFp8; ++i) {
      if (!kIsByRow) of_rows[i] = ptx::ld_shared_f32(&shared.of_units[stage][warp][i]);
      if (kIsByRow && k_block == 0 && warp < item.count) of_rows[i] = ptx::ld_global_f32(item.scale_of(p, warp, lane / 4 + i * 8, 0));
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(products);  // keeps the compiler from reading `products` before the wait
    ptx::mbarrier_arrive_after(&shared.empty[stage], kIsByRow ? of_columns.y : of_rows[1], lane == 0);
#pragma unroll
    for (uint32_t i = 0; i < kN / 2 && kIsFp8; ++i) {
      const float scale = ptx::mul_rn(i % 2 == 0 ? of_columns.x : of_columns.y, of_rows[i / 2]);
      if (k_block == 0) sums[i] = 0;
      sums[i] = kIsByRow ? ptx::add_rn(sums[i], partial[i]) : ptx::fma(partial[i], scale, sums[i]);
      if (kIsByRow && k_block + 1 == work.k_blocks) sums[i] = ptx::mul_rn(sums[i], scale);
    }
    if (k_block + 1 != work.k_blocks) return;
    store_unit(p, item, sums);
    if constexpr (kCudaRelease < 1209)  // see kStoresAtOnce in tile.cuh
#pragma unroll
      for (float& x : sums) x = 0;
  };
  for_slots(p, shared, work, multiply_slot);
}

KERNEL(kNumThreads, kCtasPerSm) KERNEL_NAME(GRID_CONSTANT ExpertsFewParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warp = ptx::warp_index();
  if (warp == kNumMathWarps && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_w);
    ptx::prefetch_tensormap(&p.map_fours);
    ptx::prefetch_tensormap(&p.map_b);
    for (uint32_t stage = 0; stage < kMaxStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 2);
      ptx::mbarrier_init(&shared.empty[stage], kNumMathWarps);
    }
    ptx::fence_mbarrier_init();
  }
  for (uint32_t i = ptx::thread_index(); i < kMaxExperts; i += kNumThreads) ptx::st_shared_b32(&shared.entry_of[i], 0);
  ptx::syncthreads();

  if constexpr (kIsSecond)
    ptx::griddepcontrol_launch_dependents();
  else
    ptx::griddepcontrol_wait();
  const Work work(p, find_rows(p, shared));
  if (warp == kNumMathWarps) return load_weights(p, shared, work);
  if (warp > kNumMathWarps) return kIsFp8 ? cast_b(p, shared, work) : load_b(p, shared, work);
  multiply<kColumns>(p, shared, work);
}

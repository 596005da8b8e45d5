// One of the two products of a layer of experts, for few tokens and BF16 weights: it streams the weights of the experts that are hit.
// The first product is activated on its way out, and gather_weighted sums up the rows of the second.
//
//   producer, one thread   for each item, for each k-block:   empty --wait--> weights, B --TMA--> full
//   math, 2 warpgroups     for each item, for each k-block:   full --wait--> WGMMA --arrive--> empty
//                          after the last k-block:            accumulators --> activated --> rows
//
// A unit is 16 rows of an expert's weight: 8 of gate and the same 8 of up, or 16 neighbours. CTAs share out the units of all experts
// that are hit as evenly as they can be, neighbours to the same CTA, whatever the sizes are. An item is up to kMaxUnits units that are
// multiplied at a time.
//
// Weights are A of WGMMA, and tokens B. The first product takes all tokens, so its items may have units of several experts. The second
// takes the rows of one expert and the rows behind them. Columns of other experts are multiplied too, and not stored.
//
// Every CTA finds rows by itself, from all ids. So the second product asks for weights while the first one runs: it fills its ring
// and the L2 before it waits. Ids are there by then, as the first product lets the second start behind its own wait.
#pragma once
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
  ptx::TensorMap map_w;     // boxes of a unit: (k, row of 8, which 8 rows of the unit, the first 8 rows of it)
  ptx::TensorMap map_b;     // x [tokens, k], or activations [rows, k]
  const uint8_t* topk_ids;  // [tokens, topk], of id_bytes; ids of a token lie beside each other
  int32_t* row_of;          // [tokens, topk], -1: no expert; the first product writes it
  uint8_t* d;               // BF16 [rows, n]
  uint32_t tokens, topk, ids_pitch, id_bytes, num_experts;
  uint32_t n, k;
  uint32_t units;         // of an expert's weight
  uint32_t eights, step;  // 8 rows count as one: from an expert to the next, and from a unit to the next
  uint32_t b_bytes;       // of a box of B
  uint32_t gating;        // 0: silu(gate) * up; 1: with a limit, alpha or beta; 2: SiTU
  float limit, alpha, beta, alpha_reciprocal, beta_reciprocal;
};
#include "experts_few_params_layout.cuh"  // asserts that it lies as core/params.py packs it

constexpr uint32_t kBlockK = 64, kLineBytes = kBlockK * 2;
constexpr uint32_t kUnitRows = 16, kUnitBytes = kUnitRows * kLineBytes;
constexpr uint32_t kUnitsOfProduct = 4;  // of the 64 rows of one WGMMA: one for each warp
constexpr uint32_t kProductBytes = kUnitsOfProduct * kUnitBytes;
constexpr uint32_t kNumMathWarps = 8, kNumMathThreads = kNumMathWarps * 32;
constexpr uint32_t kProducts = kMaxUnits / kUnitsOfProduct / 2;  // of a warpgroup, which takes every other 64 rows
constexpr uint32_t kBBytes = kColumns * kLineBytes;
constexpr uint32_t kNone = ~0u;
static_assert(kNumThreads == kNumMathThreads + 32, "math warps, and a producer behind them");
static_assert(kMaxExperts == 2 * kNumMathThreads, "two experts for each math thread");
static_assert(kProducts * kUnitsOfProduct * 2 == kMaxUnits && kMaxTokens == 64, "whole products; two words of tokens");

struct SharedStorage {
  alignas(1024) uint8_t ring[kRingBytes];
  uint32_t tokens_of[kMaxExperts][2];  // bit t: token t has the expert
  uint32_t first_row[kMaxExperts];     // of an expert that is hit
  uint32_t hit[kMaxExperts];           // the experts that are hit, in order
  uint32_t of_warp[kNumMathWarps];     // experts that are hit << 16 | rows, of a warp's experts
  uint32_t num_hit;
  uint64_t full[kMaxStages], empty[kMaxStages];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "FewConfig.shared_bytes and SharedStorage differ");

// The expert of a route. From the L2: the second product asks before the kernel ahead has ended, and the L1 may have older ids.
DEVICE uint32_t expert_of(const ExpertsFewParams& p, uint32_t token, uint32_t route) {
  const uint8_t* id = p.topk_ids + (uint64_t{token} * p.ids_pitch + route - token * p.topk) * p.id_bytes;
  const uint32_t low = ptx::ld_relaxed_gpu_b32(id), high = p.id_bytes == 8 ? ptx::ld_relaxed_gpu_b32(id + 4) : 0;
  return high == 0 && low < p.num_experts ? low : kNone;
}

// An expert's tokens, and where their rows begin. A token that names an expert twice has one row for both.
struct Rows {
  uint32_t tokens[2], first;

  DEVICE Rows(const SharedStorage& shared, uint32_t expert) : first(ptx::ld_shared_b32(&shared.first_row[expert])) {
    const ptx::Uint2 both = ptx::ld_shared_v2_b32(&shared.tokens_of[expert]);
    tokens[0] = both.x, tokens[1] = both.y;
  }
  DEVICE uint32_t count() const { return ptx::popc(tokens[0]) + ptx::popc(tokens[1]); }
  DEVICE bool has(uint32_t token) const { return tokens[token / 32] >> token % 32 & 1; }
  DEVICE uint32_t row_of(uint32_t token) const {
    const uint32_t below = (1u << token % 32) - 1;
    return first + (token < 32 ? ptx::popc(tokens[0] & below) : ptx::popc(tokens[0]) + ptx::popc(tokens[1] & below));
  }
};

// Gives each token of an expert a row, by expert and then by token, and lists the experts that are hit. All threads come here.
DEVICE void find_rows(const ExpertsFewParams& p, SharedStorage& shared) {
  const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = ptx::lane_index();
  for (uint32_t route = thread; route < p.tokens * p.topk; route += kNumThreads) {
    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);
    if (expert != kNone) ptx::red_shared_or(&shared.tokens_of[expert][token / 32], 1u << token % 32);
  }
  ptx::syncthreads();
  uint32_t counts[2] = {}, up_to = 0;
  if (warp < kNumMathWarps) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const ptx::Uint2 tokens = ptx::ld_shared_v2_b32(&shared.tokens_of[thread * 2 + i]);
      const uint32_t rows = ptx::popc(tokens.x) + ptx::popc(tokens.y);
      counts[i] = rows + (rows != 0 ? 1u << 16 : 0);
    }
    up_to = sum_up_to_lane(counts[0] + counts[1], lane);
    if (lane == 31) ptx::st_shared_b32(&shared.of_warp[warp], up_to);
  }
  ptx::syncthreads();
  if (warp < kNumMathWarps) {
    uint32_t before = up_to - counts[0] - counts[1];
#pragma unroll
    for (uint32_t w = 0; w < kNumMathWarps; ++w) {
      const uint32_t of_warp = ptx::ld_shared_b32(&shared.of_warp[w]);
      before += w < warp ? of_warp : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (counts[i] != 0) {
        ptx::st_shared_b32(&shared.hit[before >> 16], thread * 2 + i);
        ptx::st_shared_b32(&shared.first_row[thread * 2 + i], before & 0xffff);
      }
      before += counts[i];
    }
    if (thread == kNumMathThreads - 1) ptx::st_shared_b32(&shared.num_hit, before >> 16);
  }
  ptx::syncthreads();
}

// Tells gather_weighted which row each route has.
DEVICE void store_rows(const ExpertsFewParams& p, const SharedStorage& shared) {
  for (uint32_t route = ptx::thread_index(); route < p.tokens * p.topk; route += kNumThreads) {
    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);
    ptx::st_global_b32(p.row_of + route, expert == kNone ? kNone : Rows(shared, expert).row_of(token));
  }
}

// One of all units of experts that are hit, in order.
struct Unit {
  uint32_t hit, in_expert;  // the expert's place in shared.hit, and the unit's in the expert
  uint32_t eight;           // the place of its first 8 rows among all experts' rows, by eights

  DEVICE Unit(const ExpertsFewParams& p, const SharedStorage& shared, uint32_t number)
      : hit(number / p.units), in_expert(number - hit * p.units) {
    eight = expert(shared) * p.eights + in_expert * p.step;
  }
  DEVICE uint32_t expert(const SharedStorage& shared) const { return ptx::ld_shared_b32(&shared.hit[hit]); }

  // Goes on from behind an expert's last unit to the first of the next.
  DEVICE void settle(const ExpertsFewParams& p, const SharedStorage& shared) {
    if (in_expert == p.units) ++hit, in_expert = 0, eight = expert(shared) * p.eights;
  }
};

// What this CTA multiplies, and how its ring is divided.
struct Work {
  uint32_t first, end;  // units
  uint32_t item_units, k_blocks;
  uint32_t a_bytes, stage_bytes, stages;

  DEVICE Work(const ExpertsFewParams& p, uint32_t num_hit) : k_blocks(ceil_div(p.k, kBlockK)) {
    const uint32_t total = num_hit * p.units, most = ceil_div(total, ptx::grid_size());  // of a CTA
    const Part part(total, ptx::grid_size(), ptx::block_index());
    first = part.first, end = part.first + part.count;
    item_units = most == 0 ? 1 : ceil_div(most, ceil_div(most, kMaxUnits));
    a_bytes = ceil_div(item_units, kUnitsOfProduct) * kProductBytes;
    stage_bytes = a_bytes + kBBytes;
    stages = kRingBytes / stage_bytes;
    stages = stages < kMaxStages ? stages : kMaxStages;
  }
};

struct Position {
  uint32_t stage = 0, parity = 0;

  DEVICE void advance(const Work& work) {
    if (++stage == work.stages) stage = 0, parity ^= 1;
  }
};

// Units that are multiplied at a time.
struct Item {
  Unit unit;
  uint32_t number, count;  // of the first, among all units; of units, 0 behind the last item

  DEVICE Item(const ExpertsFewParams& p, const SharedStorage& shared, const Work& work, uint32_t number_)
      : unit(p, shared, number_ < work.end ? number_ : work.first), number(number_) {
    count = work.end - number < work.item_units ? work.end - number : work.item_units;
    const uint32_t of_expert = p.units - unit.in_expert;
    if (kIsSecond && of_expert < count) count = of_expert;
  }
};

// A slot that the producer fills: one k-block of an item.
struct Slot {
  Item item;
  uint32_t k_block = 0;
  Position at;

  DEVICE void advance(const ExpertsFewParams& p, const SharedStorage& shared, const Work& work) {
    at.advance(work);
    if (++k_block == work.k_blocks) k_block = 0, item = Item(p, shared, work, item.number + item.count);
  }

  template <typename Use>
  DEVICE void for_units(const ExpertsFewParams& p, const SharedStorage& shared, const Use& use) const {
    Unit unit = item.unit;
#pragma unroll 1
    for (uint32_t i = 0; i < item.count; ++i, ++unit.in_expert, unit.eight += p.step) {
      unit.settle(p, shared);
      use(i, unit.eight);
    }
  }
};

// Producer, one thread. Weights of the second product are ahead of B by the whole ring.
DEVICE void load(const ExpertsFewParams& p, SharedStorage& shared, const Work& work) {
  Slot weights{Item(p, shared, work, work.first)}, b = weights;
  uint32_t ahead = 0, may_be_ahead = kIsSecond ? work.stages : 1;
  while (true) {
    for (; ahead < may_be_ahead && weights.item.count != 0; ++ahead, weights.advance(p, shared, work)) {
      uint64_t* const full = &shared.full[weights.at.stage];
      ptx::mbarrier_wait_parity(&shared.empty[weights.at.stage], weights.at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, weights.item.count * kUnitBytes + p.b_bytes);
      uint8_t* const to = shared.ring + weights.at.stage * work.stage_bytes;
      weights.for_units(p, shared, [&](uint32_t i, uint32_t eight) {
        ptx::tma_load_4d(&p.map_w, full, to + i * kUnitBytes, weights.k_block * kBlockK, 0, 0, eight);
      });
    }
    if (kIsSecond && may_be_ahead != 1) {
      Slot next = weights;
      for (uint32_t units = 0; units < kPrefetchedUnits && next.item.count != 0; units += next.item.count) {
        next.for_units(p, shared, [&](uint32_t, uint32_t eight) {
          ptx::tma_prefetch_4d(&p.map_w, next.k_block * kBlockK, 0, 0, eight);
        });
        next.advance(p, shared, work);
      }
      ptx::griddepcontrol_wait();
      may_be_ahead = 1;
    }
    if (b.item.count == 0) break;
    const uint32_t row = kIsSecond ? ptx::ld_shared_b32(&shared.first_row[b.item.unit.expert(shared)]) : 0;
    ptx::tma_load_2d(&p.map_b, &shared.full[b.at.stage], shared.ring + b.at.stage * work.stage_bytes + work.a_bytes,
                     b.k_block * kBlockK, row);
    b.advance(p, shared, work);
    --ahead;
  }
}

using Sums = float[kProducts][kColumns / 2];

// Multiplies an item. A warpgroup without 64 rows of its own in it multiplies the first, and does not store them.
DEVICE void multiply(SharedStorage& shared, const Work& work, const Item& item, Position& at, Sums& sums) {
  const uint32_t warpgroup = ptx::warp_index() / 4, lane = ptx::lane_index();
  uint32_t rows[kProducts];
#pragma unroll
  for (uint32_t i = 0; i < kProducts; ++i) {
    const uint32_t product = warpgroup + i * 2;
    rows[i] = product * kUnitsOfProduct < item.count ? product * (kProductBytes / 16) : 0;
    if constexpr (kCudaRelease < 1209)  // see kStoresAtOnce in tile.cuh
#pragma unroll
      for (float& x : sums[i]) x = 0;
  }
  const uint32_t ring = ptx::smem_descriptor_low(ptx::smem_address(shared.ring));
  uint32_t last = 0;
#pragma unroll 1
  for (uint32_t k_block = 0; k_block < work.k_blocks; ++k_block) {
    const uint32_t slot = ring + at.stage * (work.stage_bytes / 16);
    ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kProducts; ++i)
      ptx::wgmma_m64k64_bf16<kColumns>(sums[i], slot + rows[i], slot + work.a_bytes / 16, k_block != 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    if (k_block != 0 && lane == 0) ptx::mbarrier_arrive(&shared.empty[last]);
    last = at.stage;
    at.advance(work);
  }
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (auto& of_product : sums) ptx::fence_registers(of_product);  // or what reads them might be moved ahead of the wait
  if (lane == 0) ptx::mbarrier_arrive(&shared.empty[last]);
}

// As products in BF16 and cast_rows behind them give it.
DEVICE float activated(const ExpertsFewParams& p, float gate, float up) {
  const ptx::Float2 rounded = ptx::unpack_bf16(ptx::pack_bf16(gate, up));
  if (p.gating == 0) return Plain(p)(rounded.x, rounded.y, 1.f);
  return p.gating == 1 ? Swiglu(p)(rounded.x, rounded.y, 1.f) : Situ(p)(rounded.x, rounded.y, 1.f);
}

DEVICE void store(const ExpertsFewParams& p, uint32_t row, uint32_t column, float value) {
  ptx::st_global_b16(p.d + (uint64_t{row} * p.n + column) * 2, ptx::pack_bf16(value, 0.f));
}

// Stores a warp's sums of an item: a unit of each product.
DEVICE void store_item(const ExpertsFewParams& p, const SharedStorage& shared, const Item& item, const Sums& sums) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
#pragma unroll
  for (uint32_t i = 0; i < kProducts; ++i) {
    const uint32_t in_item = (warp / 4 + i * 2) * kUnitsOfProduct + warp % 4;
    if (in_item >= item.count) break;
    const Unit unit(p, shared, item.number + in_item);
    const Rows rows(shared, unit.expert(shared));
    const uint32_t column = unit.in_expert * (kIsSecond ? kUnitRows : kUnitRows / 2) + lane / 4, count = rows.count();
#pragma unroll
    for (uint32_t j = 0; j < kColumns / 4; ++j) {
      const uint32_t b = j / 2 * 8 + lane % 4 * 2 + j % 2;  // a token, or one of the expert's rows
      const float first = sums[i][j / 2 * 4 + j % 2], second = sums[i][j / 2 * 4 + 2 + j % 2];
      if constexpr (kIsSecond) {
        if (b >= count) continue;
        store(p, rows.first + b, column, first);
        store(p, rows.first + b, column + kUnitRows / 2, second);
      } else if (rows.has(b)) {
        store(p, rows.row_of(b), column, activated(p, first, second));
      }
    }
  }
}

KERNEL(kNumThreads, kCtasPerSm) bf16_gemm_experts_few(GRID_CONSTANT ExpertsFewParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warp = ptx::warp_index();
  if (warp == kNumMathWarps && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_w);
    ptx::prefetch_tensormap(&p.map_b);
    for (uint32_t stage = 0; stage < kMaxStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], kNumMathWarps);
    }
    ptx::fence_mbarrier_init();
  }
  for (uint32_t i = ptx::thread_index(); i < kMaxExperts; i += kNumThreads)
    ptx::st_shared_v2_b32(&shared.tokens_of[i], 0, 0);
  ptx::syncthreads();

  if constexpr (!kIsSecond) ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  find_rows(p, shared);
  if (!kIsSecond && ptx::block_index() == ptx::grid_size() - 1) store_rows(p, shared);

  const Work work(p, ptx::ld_shared_b32(&shared.num_hit));
  if (warp == kNumMathWarps) {
    if (ptx::elect_sync()) load(p, shared, work);
    return;
  }
  Position at;
  Sums sums;
  for (Item item(p, shared, work, work.first); item.count != 0; item = Item(p, shared, work, item.number + item.count)) {
    multiply(shared, work, item, at, sums);
    store_item(p, shared, item, sums);
  }
}

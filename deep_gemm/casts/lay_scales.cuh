// Copies scales to the layout that TMA loads: FP32 [groups, m, k_blocks] with any strides becomes m-major (scales of
// successive rows are adjacent). Words of UE8M0, [groups, m, ceil(k_blocks / 4)], are converted to FP32.
//
//   sf, any strides -> registers -> a tile in shared memory -> out, strides (k_blocks * pitch, 1, pitch)
//
// A CTA copies kRows rows of kBlocks k-blocks, and issues all its loads before it stores the first. Successive threads
// read along k or along m, in the direction in which scales are adjacent, and write along m. The gap between the last
// row and the pitch is not written. FP32 is copied as bits, so a NaN keeps its bits.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct ScalesParams {
  const uint32_t* sf;
  uint32_t* out;
  uint64_t group_stride, stride_m, stride_k;  // of sf, in elements; 0 repeats a scale
  uint64_t pitch;                             // of out, in elements: from a k-block to the next
  uint32_t m, k_blocks;
  uint32_t reads_along_m;
  uint32_t are_words;
};
#include "scales_params_layout.cuh"  // asserts that core/params.py has the same layout

constexpr uint32_t kEach = kRows * kBlocks / kNumThreads;  // elements of a thread

struct SharedStorage {
  uint32_t tile[kBlocks][kRows + 1];  // one more word: successive blocks of a row are in different banks
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "ScalesConfig.shared_bytes and SharedStorage differ");

// The row and block of a scale in the tile.
struct Place {
  uint32_t row, block;
};

DEVICE Place place_of(uint32_t i, bool is_along_m) {
  const uint32_t index = i * kNumThreads + ptx::thread_index();
  return is_along_m ? Place{index % kRows, index / kRows} : Place{index / kBlocks, index % kBlocks};
}

KERNEL(kNumThreads, kCtasPerSm) lay_scales(GRID_CONSTANT ScalesParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t tiles_m = ceil_div(p.m, kRows), tiles_k = ceil_div(p.k_blocks, kBlocks);
  const uint32_t tile = ptx::block_index() % (tiles_m * tiles_k);
  const uint64_t group = ptx::block_index() / (tiles_m * tiles_k);
  const uint32_t first_row = tile / tiles_k * kRows, first_block = tile % tiles_k * kBlocks;
  const bool reads_along_m = p.reads_along_m != 0, are_words = p.are_words != 0;

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait

  uint32_t words[kEach] = {};
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const Place at = place_of(i, reads_along_m);
    const uint64_t row = first_row + at.row, block = first_block + at.block;
    if (row < p.m && block < p.k_blocks)
      words[i] = ptx::ld_global_b32(p.sf + group * p.group_stride + row * p.stride_m + (are_words ? block / 4 : block) * p.stride_k);
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const Place at = place_of(i, reads_along_m);
    ptx::st_shared_b32(&shared.tile[at.block][at.row], are_words ? bits_of_scale_at(at.block, words[i]) : words[i]);
  }
  ptx::syncthreads();

#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const Place at = place_of(i, true);
    const uint64_t row = first_row + at.row, block = first_block + at.block;
    if (row < p.m && block < p.k_blocks)
      ptx::st_global_b32(p.out + (group * p.k_blocks + block) * p.pitch + row,
                         ptx::ld_shared_b32(&shared.tile[at.block][at.row]));
  }
}

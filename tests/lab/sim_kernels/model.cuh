// Unit kernels of tests/lab/test_sim.py: each operation's effect, and results that it hides until a kernel waits.
#pragma once
#include "cases.cuh"

// Copies 256 words of shared memory to `out`, in their order.
DEVICE void copy_out(Case& c, const uint8_t* tile, uint32_t thread) {
  for (uint32_t i = thread; i < 256; i += 128) write_f32(c.out + i, ptx::ld_shared_f32(tile + i * 4));
}

DEVICE void load_at(Case& c, Shared& shared, uint64_t* bar, uint32_t thread, int32_t x, int32_t y) {
  init_barrier(bar, thread);
  if (thread != 0) return;
  ptx::mbarrier_arrive_expect_tx(bar, 1024);
  ptx::tma_load_2d(&c.map_in, bar, shared.tile, x, y);
}

DEVICE void load_and_copy(Case& c, Shared& shared, uint64_t* bar, uint32_t thread, int32_t x, int32_t y) {
  load_at(c, shared, bar, thread, x, y);
  ptx::mbarrier_wait_parity(bar, 0);
  copy_out(c, shared.tile, thread);
}

CASE(load) { load_and_copy(c, shared, bar, thread, 0, 0); }

CASE(load_over_the_corner) { load_and_copy(c, shared, bar, thread, -4, -2); }

CASE(load_past_the_end) { load_and_copy(c, shared, bar, thread, 28, 60); }

CASE(load_without_waiting) {
  load_at(c, shared, bar, thread, 0, 0);
  ptx::syncthreads();
  copy_out(c, shared.tile, thread);
  ptx::mbarrier_wait_parity(bar, 0);
}

CASE(load_by_asking) {
  load_at(c, shared, bar, thread, 0, 0);
  while (!ptx::mbarrier_test_wait_parity(bar, 0)) {
  }
  copy_out(c, shared.tile, thread);
}

BARRIER_CASE(load_3d) {
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(bar, 1024);
    ptx::tma_load_3d(&c.map_in, bar, shared.tile, 0, 8, static_cast<int32_t>(c.x));
  }
  ptx::mbarrier_wait_parity(bar, 0);
  copy_out(c, shared.tile, thread);
}

BARRIER_CASE(load_4d) {
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(bar, 1024);
    ptx::tma_load_4d(&c.map_in, bar, shared.tile, 0, 1, 1, -1);
  }
  ptx::mbarrier_wait_parity(bar, 0);
  copy_out(c, shared.tile, thread);
}

CASE(store) {
  for (uint32_t i = thread; i < 256; i += 128) ptx::st_shared_f32(shared.tile + i * 4, i);
  if (c.x) ptx::fence_proxy_async_shared();
  ptx::syncthreads();
  if (thread == 0) {
    ptx::tma_store_2d(&c.map_out, shared.tile, -4, 60);
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
  }
}

CASE(store_adds) {
  for (uint32_t i = thread; i < 256; i += 128) ptx::st_shared_f32(shared.tile + i * 4, 1);
  if (ptx::block_index() == 0)
    for (uint32_t i = thread; i < 2048; i += 128) write_f32(c.out + i, 5);
  ptx::fence_proxy_async_shared();
  ptx::cluster_sync();
  if (thread == 0) {
    for (int i = 0; i < 3; ++i) ptx::tma_reduce_add_2d(&c.map_out, shared.tile, 0, 8);
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
  }
}

CASE(store_then_read) {
  for (uint32_t i = thread; i < 256; i += 128) ptx::st_shared_f32(shared.tile + i * 4, 7);
  ptx::fence_proxy_async_shared();
  ptx::syncthreads();
  if (thread == 0) {
    ptx::tma_store_2d(&c.map_out, shared.tile, 0, 0);
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
    write_f32(c.out + 2047, ptx::ld_global_f32(c.out));
  }
}

CASE(accumulators) {
  float d[8];
  for (float& x : d) x = 1;
  for (uint32_t i = thread; i < 1024; i += 128) {  // E4M3's 1 in each byte
    ptx::st_shared_v4_b32(shared.tile + i * 16, 0x38383838, 0x38383838, 0x38383838, 0x38383838);
    ptx::st_shared_v4_b32(shared.other + i * 16, 0x38383838, 0x38383838, 0x38383838, 0x38383838);
  }
  ptx::fence_proxy_async_shared();
  ptx::syncthreads();
  ptx::wgmma_fence();
  ptx::wgmma_m64k32_e4m3<16>(d, ptx::smem_descriptor(ptx::smem_address(shared.tile)),
                             ptx::smem_descriptor(ptx::smem_address(shared.other)), true);
  ptx::wgmma_commit_group();
  write_f32(c.out + thread, d[3]);
  ptx::wgmma_wait_group<0>();
  write_f32(c.out + 128 + thread, d[3]);
}

CASE(accumulators_of_nothing) {
  float d[4];
  ptx::fence_registers(d);
  write_f32(c.out + thread, d[3]);
}

// Sums 4096 products. `once`: the tensor core adds all; else it adds 128 at a time, and the thread adds these sums.
CASE(accumulate) {
  const bool once = c.x;
  for (uint32_t i = thread; i < 4096; i += 128) {
    ptx::st_shared_f32(shared.tile + i * 4, ptx::ld_global_f32(c.in + i % 2048));
    ptx::st_shared_f32(shared.other + i * 4, ptx::ld_global_f32(c.in + (i * 7 + 3) % 2048));
  }
  ptx::fence_proxy_async_shared();
  ptx::syncthreads();
  float total[4] = {}, d[4];
  for (uint32_t k_block = 0; k_block < 32; ++k_block) {
    const uint32_t a = ptx::smem_address(shared.tile), b = ptx::smem_address(shared.other) + k_block % 8 * 1024;
    ptx::wgmma_fence();
    for (uint32_t k = 0; k < 128; k += 32)
      ptx::wgmma_m64k32_e4m3<8>(d, ptx::smem_descriptor(a + k), ptx::smem_descriptor(b + k), k || (once && k_block));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    for (int i = 0; i < 4; ++i) total[i] = once ? d[i] : total[i] + d[i];
  }
  for (uint32_t i = 0; i < 4; ++i)
    write_f32(c.out + (warp * 16 + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2, total[i]);
}

CASE(lanes) {
  const bool is_elected = ptx::elect_sync(), again = ptx::elect_sync();
  if (is_elected) ptx::atom_add(c.flags, 1);
  if (is_elected && again) ptx::atom_add(c.flags + 1, 1);
  write_f32(c.out + thread, ptx::shfl_sync(static_cast<float>(thread), 37));
  if (ptx::all_sync(lane < 32)) ptx::atom_add(c.flags + 2, 1);
  if (ptx::all_sync(lane < 31)) ptx::atom_add(c.flags + 3, 1);
  if (ptx::warp_index() == 2) ptx::atom_add(c.flags + 4, 1);
}

CASE(matrices) {
  ptx::stmatrix_x4(shared.tile + lane * 16, lane, 100 + lane, 200 + lane, 300 + lane);
  ptx::syncwarp();
  if (warp != 0) return;
  for (uint32_t i = lane; i < 128; i += 32) write_f32(c.out + i, ptx::ld_shared_b32(shared.tile + i * 4));
}

CASE(named_barriers) {
  if (warp == 0) {
    ptx::st_shared_f32(&shared.floats[lane], 3);
    ptx::bar_sync(1, 64);
  }
  if (warp == 1) {
    ptx::bar_sync(1, 64);
    write_f32(c.out + lane, ptx::ld_shared_f32(&shared.floats[lane]));
  }
}

// A warp that arrives goes on at once: warp 0 writes words that warp 1 waits for, before warp 1 reaches the barrier.
CASE(arrivals_at_a_named_barrier) {
  if (warp == 0) {
    ptx::st_shared_f32(&shared.floats[lane], 3);
    ptx::bar_arrive(1, 64);
    ptx::st_shared_f32(&shared.floats[32 + lane], 4);
    ptx::bar_arrive(2, 64);
  }
  if (warp == 1) {
    ptx::bar_sync(2, 64);
    ptx::bar_sync(1, 64);
    write_f32(c.out + lane, ptx::ld_shared_f32(&shared.floats[lane]) + ptx::ld_shared_f32(&shared.floats[32 + lane]));
  }
}

// Reads words sent by st.async twice: before it waits for their mbarrier, and after.
CASE(async_exchange) {
  if (thread == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::st_shared_v4_b32(shared.floats, 7, 7, 7, 7);
  }
  ptx::cluster_sync();
  if (thread == 0 && ptx::cluster_rank() == 0) ptx::st_async_v4_f32(shared.floats, bar, 1, 1, 2, 3, 4);
  ptx::cluster_sync();
  if (thread == 0 && ptx::cluster_rank() == 1) {
    const ptx::Float4 early = ptx::ld_shared_v4_f32(shared.floats);
    ptx::st_global_v4_f32(c.out, early.x, early.y, early.z, early.w);
    ptx::mbarrier_arrive_expect_tx(bar, 16);
    ptx::mbarrier_wait_parity_cluster(bar, 0);
    const ptx::Float4 v = ptx::ld_shared_v4_f32(shared.floats);
    ptx::st_global_v4_f32(c.out + 4, v.x, v.y, v.z, v.w);
  }
}

// Stores by TMA the words sent by st.async, with and without a fence by the thread that waited for them.
CASE(store_of_what_was_sent) {
  for (uint32_t i = thread; i < 256; i += 128) ptx::st_shared_f32(shared.tile + i * 4, 7);
  ptx::fence_proxy_async_shared();
  init_barrier(bar, thread);
  ptx::cluster_sync();
  if (thread == 0 && ptx::cluster_rank() == 0) ptx::st_async_v2_b32(shared.tile, bar, 1, 1, 2);
  if (thread == 0 && ptx::cluster_rank() == 1) {
    ptx::mbarrier_arrive_expect_tx(bar, 8);
    ptx::mbarrier_wait_parity_cluster(bar, 0);
    if (c.x) ptx::fence_proxy_async_shared();
    ptx::tma_store_2d(&c.map_out, shared.tile, 0, 0);
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
  }
}

CASE(multicast) {
  const uint32_t rank = ptx::cluster_rank();
  init_barrier(bar, thread);
  ptx::cluster_sync();
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(bar, 2048);
    ptx::tma_load_2d_multicast(&c.map_in, bar, shared.tile + rank * 1024, 0, 8 * rank, 3);
  }
  ptx::mbarrier_wait_parity(bar, 0);
  for (uint32_t i = thread; i < 512; i += 128)
    write_f32(c.out + 512 * rank + i, ptx::ld_shared_f32(shared.tile + i * 4));
  ptx::cluster_sync();
}

// Block 1 sends a number to block 0 through global memory.
CASE(flag) {
  if (thread != 0) return;
  if (ptx::block_index() == 1) {
    write_f32(c.out, 4);
    ptx::atom_add(c.flags, 1);
  } else {
    while (ptx::atom_add(c.flags, 0) == 0) {
    }
    write_f32(c.out + 1, 1 + ptx::ld_global_f32(c.out));
  }
}

// Each block writes its rank, and the number of blocks that came before it.
CASE(blocks) {
  if (thread != 0) return;
  const uint32_t turn = ptx::atom_add(c.flags, 1);
  ptx::st_global_v2_f32(c.out + 2 * ptx::block_index(), ptx::cluster_rank(), turn);
}

CASE(address) {
  if (thread == 0) ptx::st_global_b32(c.flags, static_cast<uint32_t>(reinterpret_cast<uint64_t>(c.in)));
}

CASE(numbers) {
  if (thread != 0) return;
  ptx::st_global_b32(c.flags, ptx::pack_bf16(1.00390625f, 1.01171875f));  // both halfway: rounds down, then up
  ptx::st_global_b32(c.flags + 1, ptx::pack_bf16(ptx::ld_shared_f32(shared.tile), -3.4e38f));
  const ptx::Float2 pair = ptx::unpack_bf16(0x40003f80);
  ptx::st_global_v2_f32(c.out, pair.x, pair.y);
  write_f32(c.out + 2, ptx::fma(1 + 0x1p-12f, 1 + 0x1p-12f, -1 - 0x1p-11f));
}

// Unit kernels of tests/lab/test_sim_failures.py. Before each stands a pattern of its error's message and,
// behind `with`, how it is launched if not as usual.
#pragma once
#include "cases.cuh"

DEVICE void expect_tile(Case& c, Shared& shared, uint64_t* bar, uint32_t thread) {
  if (thread != 0) return;
  ptx::mbarrier_arrive_expect_tx(bar, 1024);
  ptx::tma_load_2d(&c.map_in, bar, shared.tile, 0, 0);
}

// Makes a tensor map in `out` for the tensor of `in`, one chunk of 16 bytes further.
DEVICE ptx::TensorMap* make_map(Case& c) {
  auto* map = reinterpret_cast<ptx::TensorMap*>((reinterpret_cast<uint64_t>(c.out) + 63) / 64 * 64);
  ptx::tensormap_copy(map, c.map_in);
  ptx::tensormap_replace_address(map, c.in + 4);
  return map;
}

// Multiplies what begins at bytes `a` and `b` of the tile, and waits until at most `kLeft` products are in flight.
template <uint32_t kLeft>
DEVICE void multiply(Shared& shared, uint32_t a, uint32_t b) {
  float d[4];
  const uint32_t at = ptx::smem_address(shared.tile);
  ptx::wgmma_fence();
  ptx::wgmma_m64k32_e4m3<8>(d, ptx::smem_descriptor(at + a), ptx::smem_descriptor(at + b), false);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<kLeft>();
}

// ---- Waiting for ever

// deadlock: every thread waits.\n  CTA 0, warps 0,2-3: exited\n  CTA 0, warp 1: waits for the end of parity 0 of the
// mbarrier at shared-memory offset 36864, whose phase 0 \(parity 0\) lacks 1 of 1 arrivals and 0 bytes
BARRIER_CASE(deadlock) {
  if (warp == 1) ptx::mbarrier_wait_parity(bar, 0);
}

// warps 0-1: waits in bar_sync at barrier 3, where 64 of 96 threads have arrived
CASE(deadlock_at_a_named_barrier) {
  if (warp < 2) ptx::bar_sync(3, 96);
}

// CTA 0, warps 0-3: waits at the cluster's barrier, where 128 of 256 threads have arrived
// with {"num_sms": 2, "cluster_size": 2}
CASE(deadlock_of_a_cluster) {
  if (ptx::cluster_rank() == 0) return ptx::cluster_sync();
  if (thread == 0) ptx::mbarrier_init(bar, 1);
  ptx::syncthreads();
  ptx::mbarrier_wait_parity(bar, 0);
}

// some by asking again and again.\n  CTA 0, warps 0-3: asks for the end of parity 0 of the mbarrier at
BARRIER_CASE(deadlock_by_asking) {
  while (!ptx::mbarrier_test_wait_parity(bar, 0)) {
  }
}

// lanes 0-4,6-31: waits for the rest of its warp at syncwarp
BARRIER_CASE(missing_lanes) {
  if (lane == 5) ptx::mbarrier_wait_parity(bar, 0);
  ptx::syncwarp();
}

// no end after 20001 steps
// with {"max_steps": 20000}
CASE(no_end) {
  for (;;) ptx::syncwarp();
}

// setmaxnreg_inc needs 256 registers for its warp; \d+ of the block are free
// with {"threads": 256, "seed": 3}
CASE(registers_beyond_the_pool) {
  if (warp < 4) ptx::setmaxnreg_inc<256>();
  else ptx::setmaxnreg_dec<248>();
}

// ---- Copies from and to addresses

// bulk_load: 24 bytes from byte 0 of `in` .*: expected whole 16 bytes
BARRIER_CASE(bulk_load_of_half_a_chunk) {
  if (thread == 0) ptx::bulk_load(bar, shared.tile, c.in, 24);
}

// bulk_load: the mbarrier at shared-memory offset 36864 of CTA 0 is not initialized
CASE(bulk_load_before_its_barrier) {
  if (thread == 0) ptx::bulk_load(bar, shared.tile, c.in, 32);
}

// pieces of TMA loads in flight into its shared memory
BARRIER_CASE(bulk_load_that_nobody_waits_for) {
  if (thread != 0) return;
  ptx::mbarrier_arrive_expect_tx(bar, 32);
  ptx::bulk_load(bar, shared.tile, c.in, 32);
}

// ---- mbarriers

// warp \d, lane \d+: mbarrier_arrive: the mbarrier at shared-memory offset 36872 of CTA 0 is not initialized
CASE(barrier_not_initialized) { ptx::mbarrier_arrive(bar + 1); }

// is not initialized, or something has overwritten it
CASE(barrier_overwritten) {
  if (thread != 0) return;
  ptx::mbarrier_init(bar, 1);
  ptx::st_shared_f32(bar, 0);
  ptx::mbarrier_arrive(bar);
}

// tma_load_2d: .* is not visible to TMA: fence_mbarrier_init is missing
CASE(barrier_not_fenced_for_tma) {
  if (thread == 0) ptx::mbarrier_init(bar, 1);
  ptx::syncthreads();
  expect_tile(c, shared, bar, thread);
}

// is not visible to the cluster: fence_mbarrier_init is missing
// with {"num_sms": 2, "cluster_size": 2}
CASE(barrier_not_fenced_for_the_cluster) {
  if (thread == 0) ptx::mbarrier_init(bar, 9);
  ptx::cluster_sync();
  if (thread == 0) ptx::mbarrier_arrive_cluster(bar, 1 - ptx::cluster_rank());
  ptx::cluster_sync();
}

// more arrivals than the mbarrier at .* was initialized for \(1\), while 16 bytes are still to land
BARRIER_CASE(too_many_arrivals) {
  if (thread != 0) return;
  ptx::mbarrier_arrive_expect_tx(bar, 16);
  ptx::mbarrier_arrive(bar);
}

// tx-count overflow: .* would count 1048576 bytes, beyond 2\^20 - 1
BARRIER_CASE(tx_overflow) {
  if (thread == 0) ptx::mbarrier_arrive_expect_tx(bar, 1 << 20);
}

// parity 2; it is 0 or 1
BARRIER_CASE(parity_is_no_bit) {
  ptx::mbarrier_wait_parity(bar, 2);
}

// mbarrier_init: 0 arrivals; it takes 1 to
CASE(no_arrivals_expected) { ptx::mbarrier_init(bar, 0); }

// ---- Warps and barriers

// divergent warp: this lane is at (elect_sync|syncwarp) while others of its warp are at (elect_sync|syncwarp)
CASE(divergent_warp) {
  if (lane == 3) ptx::elect_sync();
  else ptx::syncwarp();
}

// exits while other lanes of its warp wait for it at syncwarp|some of its lanes have exited
CASE(lane_exits_early) {
  if (lane != 3) ptx::syncwarp();
}

// bar_sync: barrier 1 for (96|128) threads, but others arrived at it for (96|128)
CASE(named_barrier_with_two_counts) { ptx::bar_sync(1, warp < 2 ? 128 : 96); }

// barrier 16 does not exist
CASE(named_barrier_that_does_not_exist) { ptx::bar_sync(16, 128); }

// for 48 threads; that is no multiple of 32
CASE(named_barrier_of_half_a_warp) { ptx::bar_sync(1, 48); }

// cluster_wait without cluster_arrive
CASE(cluster_wait_alone) { ptx::cluster_wait(); }

// a second arrival without cluster_wait between
CASE(cluster_arrive_twice) {
  ptx::cluster_arrive();
  ptx::cluster_arrive();
}

// different setmaxnreg in the warps of one warpgroup \(0\): all four must execute it
CASE(setmaxnreg_in_one_warp) {
  if (warp == 1) ptx::setmaxnreg_dec<40>();
}

// setmaxnreg_dec<48>: the warp has 40 registers a thread
CASE(setmaxnreg_in_the_wrong_direction) {
  ptx::setmaxnreg_dec<40>();
  ptx::setmaxnreg_dec<48>();
}

// ---- Shared memory

// ld_shared_f32: shared-memory offset 37888 \(4 bytes\) lies outside the block's 37888 bytes
CASE(shared_out_of_range) { ptx::ld_shared_f32(shared.tile + 37888); }

// ld_shared_v2_f32: shared-memory offset 37888 \(8 bytes\) lies outside the block's 37888 bytes
CASE(shared_address_out_of_range) { ptx::ld_shared_v2_f32(ptx::smem_address(shared.tile) + 37888); }

// ld_shared_f32: shared-memory offset -512 \(4 bytes\) lies outside
CASE(shared_address_of_the_system) { ptx::ld_shared_f32(512u); }

// offset -4 \(4 bytes\) lies outside
CASE(shared_before_the_start) { ptx::st_shared_f32(shared.tile - 4, 1); }

// ld_shared_v4_f32: shared-memory offset 8 is not a multiple of 16
CASE(shared_misaligned) { ptx::ld_shared_v4_f32(shared.tile + 8); }

// is not a multiple of 16
CASE(stmatrix_misaligned) { ptx::stmatrix_x4(shared.tile + lane * 8, 1, 2, 3, 4); }

// the kernel's plan of shared memory has 37888 bytes, but it was launched with 4096
// with {"shared_bytes": 4096}
CASE(plan_larger_than_the_launch) {}

// ---- Global memory, whether or not the value is used

// ld_global_f32 reads 4 bytes of global memory out of bounds: 0 bytes past the end of `in` \(8192 bytes\)
CASE(global_past_the_end) { ptx::ld_global_f32(c.in + 2048); }

// 12 bytes before `in`
CASE(global_before_the_start) { ptx::ld_global_nc_f32(c.in - 3); }

// byte 8184 of `in`
CASE(global_vector_over_the_end) { ptx::ld_global_v4_f32(c.in + 2046); }

// not a multiple of 8: byte 4 of `in`
CASE(global_misaligned) { ptx::ld_global_v2_f32(c.in + 1); }

// st_global_b32 writes to `in`, an input
CASE(global_write_to_an_input) { ptx::st_global_b32(const_cast<float*>(c.in), 1); }

// the .nc path is for constant data
CASE(global_nc_read_of_an_output) { ptx::ld_global_nc_f32(c.out); }

// wrote outside of `out` by other means than `ptx::`
CASE(global_write_by_other_means) { c.out[-1] = 1; }

// tma_load_2d reads 16 bytes of global memory out of bounds: 0 bytes past the end of `in`
BARRIER_CASE(tma_map_larger_than_the_tensor) {
  expect_tile(c, shared, bar, thread);
  ptx::mbarrier_wait_parity(bar, 0);
}

// tma_store_2d writes to `in`, an input
CASE(tma_store_to_an_input) {
  if (thread == 0) ptx::tma_store_2d(&c.map_in, shared.tile, 0, 0);
}

// touches `in`, which the kernel before may still be using: no thread of this block has passed
// with {"dependent": true}
CASE(touched_before_griddepcontrol_wait) { ptx::ld_global_f32(c.in); }

// ---- TMA

// shared-memory offset 64 is not a multiple of 128
BARRIER_CASE(tma_destination_misaligned) {
  ptx::tma_load_2d(&c.map_in, bar, shared.tile + 64, 0, 0);
}

// tma_load_3d: the tensor map has 2 dimensions
BARRIER_CASE(tma_rank) {
  ptx::tma_load_3d(&c.map_in, bar, shared.tile, 0, 0, 0);
}

// the CTA mask 2 does not fit a cluster of 1
BARRIER_CASE(tma_mask) {
  ptx::tma_load_2d_multicast(&c.map_in, bar, shared.tile, 0, 0, 2);
}

// CTA 0 exits with \d pieces of TMA loads in flight into its shared memory
// with {"schedule": "late_loads"}
BARRIER_CASE(exit_with_loads_in_flight) {
  expect_tile(c, shared, bar, thread);
}

// exits with TMA stores that were never committed
CASE(exit_with_uncommitted_stores) {
  if (thread == 0) ptx::tma_store_2d(&c.map_out, shared.tile, 0, 0);
}

// exits while TMA still reads its shared memory for a store of warp 0: tma_store_wait_read<0> is missing
// with {"schedule": "late_stores"}
CASE(exit_while_tma_reads) {
  if (thread != 0) return;
  ptx::tma_store_2d(&c.map_out, shared.tile, 0, 0);
  ptx::tma_store_commit();
}

// exits (with bytes that do not add up: .* -?\d+ bytes|with \d pieces of TMA loads in flight)
// with {"x": 100}
BARRIER_CASE(exit_with_unbalanced_bytes) {
  if (thread == 0) {
    ptx::tma_load_2d(&c.map_in, bar, shared.tile, 0, 0);
    ptx::tma_load_2d(&c.map_in, bar, shared.tile, 0, 8);
    ptx::mbarrier_arrive_expect_tx(bar, 1024);
  }
  while (!ptx::mbarrier_test_wait_parity(bar, 0) && --c.x) {
  }
}

// ---- Tensor maps that kernels make

// prefetch_tensormap uses a tensor map that a kernel made, byte \d+ of `out` .*, without fence_tensormap
CASE(map_without_acquire) {
  if (thread != 0) return;
  ptx::TensorMap* map = make_map(c);
  ptx::fence_tensormap_release();
  ptx::prefetch_tensormap(map);
}

// fence_tensormap_acquire: byte \d+ of `out` .* was written, and fence_tensormap_release has not shown it
CASE(map_without_release) {
  if (thread == 0) ptx::fence_tensormap_acquire(make_map(c));
}

// prefetch_tensormap uses a tensor map that a kernel made, .*, without fence_tensormap_acquire
CASE(map_written_since_it_was_acquired) {
  if (thread != 0) return;
  ptx::TensorMap* map = make_map(c);
  ptx::fence_tensormap_release();
  ptx::fence_tensormap_acquire(map);
  ptx::tensormap_replace_size<0>(map, 8);
  ptx::prefetch_tensormap(map);
}

// tensormap_replace_size writes a tensor map that a copy in flight is using: byte \d+ of `out`
// with {"schedule": "late_loads"}
BARRIER_CASE(map_written_while_a_copy_uses_it) {
  if (thread != 0) return;
  ptx::TensorMap* map = make_map(c);
  ptx::fence_tensormap_release();
  ptx::fence_tensormap_acquire(map);
  ptx::mbarrier_arrive_expect_tx(bar, 1024);
  ptx::tma_load_2d(map, bar, shared.tile, 0, 0);
  ptx::tensormap_replace_size<0>(map, 8);
}

// tensormap_replace_size: 0 is no size of a dimension
CASE(map_with_a_size_of_zero) {
  if (thread == 0) ptx::tensormap_replace_size<1>(make_map(c), 0);
}

// tensormap_replace_stride: 24 bytes are no stride of a dimension; it takes multiples of 16
CASE(map_with_a_stride_that_is_illegal) {
  if (thread == 0) ptx::tensormap_replace_stride<1>(make_map(c), 24);
}

// tensormap_replace_size writes 128 bytes of global memory out of bounds
CASE(map_of_an_input) {
  if (thread == 0) ptx::tensormap_replace_size<0>(const_cast<ptx::TensorMap*>(&c.map_in), 8);
}

// ---- WGMMA

// wgmma_m64k32_e4m3 without wgmma_fence since its accumulators were last touched
CASE(wgmma_without_fence) {
  float d[4];
  const uint64_t a = ptx::smem_descriptor(ptx::smem_address(shared.tile));
  ptx::wgmma_m64k32_e4m3<8>(d, a, a, false);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
}

// the descriptor of B reaches from 38912 to 39840 of shared memory, which lies from 1024 to 38912
CASE(wgmma_descriptor_out_of_range) { multiply<0>(shared, 0, 37888); }

// the descriptor of A: address 1152 does not lie in the first row of a swizzle atom
CASE(wgmma_descriptor_misaligned) { multiply<0>(shared, 128, 0); }

// operands differ between the lanes of a warp
CASE(wgmma_operands_differ_between_lanes) { multiply<0>(shared, lane == 7 ? 1024 : 0, 0); }

// other operands than the same product of another warp of its warpgroup
CASE(wgmma_operands_differ_between_warps) { multiply<0>(shared, warp == 2 ? 1024 : 0, 0); }

// exits with a WGMMA in flight: wgmma_wait_group<0> is missing
CASE(exit_with_a_product_in_flight) { multiply<1>(shared, 0, 0); }

// ---- Clusters

// CTA \d may not have started yet: no cluster barrier stands before this access
// with {"num_sms": 2, "cluster_size": 2}
BARRIER_CASE(peer_may_not_have_started) {
  ptx::st_async_b32(shared.floats, bar, 1 - ptx::cluster_rank(), 1);
}

// st_async_b32: CTA 1 of the cluster has exited
// with {"num_sms": 2, "cluster_size": 2, "threads": 32}
BARRIER_CASE(peer_has_exited) {
  ptx::cluster_sync();
  if (ptx::cluster_rank() != 0) return;
  for (int i = 0; i < 2000; ++i) ptx::syncwarp();
  ptx::st_async_b32(shared.floats, bar, 1, 1);
}

// mbarrier_arrive_cluster: CTA 1 of the cluster has exited
// with {"num_sms": 2, "cluster_size": 2, "threads": 32}
BARRIER_CASE(arrival_at_a_cta_that_has_exited) {
  ptx::cluster_sync();
  if (ptx::cluster_rank() != 0) return;
  for (int i = 0; i < 2000; ++i) ptx::syncwarp();
  if (lane == 0) ptx::mbarrier_arrive_cluster(bar, 1);
}

// CTA 1 exits with 1 pieces of TMA loads in flight|CTA 1 of the cluster has exited
// with {"num_sms": 2, "cluster_size": 2, "schedule": "late_stores"}
BARRIER_CASE(remote_store_lands_too_late) {
  ptx::cluster_sync();
  if (thread == 0 && ptx::cluster_rank() == 0) ptx::st_async_b32(shared.floats, bar, 1, 1);
}

// CTA 1 exits with \d pieces of TMA loads in flight|CTA 1 of the cluster has exited
// with {"num_sms": 2, "cluster_size": 2, "schedule": "late_loads"}
BARRIER_CASE(multicast_lands_in_a_cta_that_has_exited) {
  ptx::cluster_sync();
  if (thread != 0 || ptx::cluster_rank() != 0) return;
  ptx::mbarrier_arrive_expect_tx(bar, 1024);
  ptx::tma_load_2d_multicast(&c.map_in, bar, shared.tile, 0, 0, 3);
  ptx::mbarrier_wait_parity(bar, 0);
}

// rank 2 in a cluster of 2
// with {"num_sms": 2, "cluster_size": 2}
BARRIER_CASE(rank_outside_the_cluster) {
  ptx::cluster_sync();
  ptx::st_async_b32(shared.floats, bar, 2, 1);
}

// ---- Launches

// launch: 512 threads in a block of a kernel bounded to 256
// with {"threads": 512}
CASE(launch_beyond_the_bounds) {}

// launch: a grid of whole clusters
// with {"num_sms": 3, "cluster_size": 2}
CASE(launch_of_half_a_cluster) {}

// launch: more than 232448 bytes
// with {"shared_bytes": 232449}
CASE(launch_with_too_much_memory) {}

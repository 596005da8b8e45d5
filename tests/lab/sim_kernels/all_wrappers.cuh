// Calls every function of ptx/ once, so that the assembler reads the text of each function. It computes nothing.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tensormap.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

struct SharedStorage {
  alignas(1024) float tile[1024];
  uint64_t barrier;
};

KERNEL(256, 1) all_wrappers(GRID_CONSTANT ptx::TensorMap map, float* out, uint32_t* flags) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  uint64_t* barrier = &shared.barrier;
  float* tile = shared.tile;
  const uint32_t lane = ptx::lane_index(), warp = ptx::warp_index(), thread = ptx::thread_index();

  // mbarrier
  ptx::mbarrier_init(barrier, ceil_div(256, 32));
  ptx::fence_mbarrier_init();
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_arrive_expect_tx(barrier, 112);
  ptx::mbarrier_arrive_cluster(barrier, 1);
  ptx::mbarrier_arrive_after(barrier, out[0], ptx::opaque(flags[0]) == 0);
  ptx::mbarrier_arrive_after(barrier, flags[5], flags[0] == 0);
  ptx::mbarrier_arrive_cluster_after(barrier, 1, out[0], flags[0] == 0);
  if (ptx::mbarrier_test_wait_parity(barrier, 0)) flags[0] = 1;
  if (ptx::mbarrier_try_wait_parity(barrier, 0)) flags[1] = 1;
  if (ptx::mbarrier_try_wait_parity_cluster(barrier, 0)) flags[1] = 2;
  ptx::mbarrier_wait_parity(barrier, 1);
  ptx::mbarrier_wait_parity_cluster(barrier, 1);

  // TMA
  ptx::prefetch_tensormap(&map);
  flags[8] = static_cast<uint32_t>(ptx::evict_first_policy());
  ptx::tma_load_2d(&map, barrier, tile, 1, 2);
  ptx::tma_load_2d_evict_first(&map, barrier, tile, 1, 2);
  ptx::tma_load_2d_multicast(&map, barrier, tile, 1, 2, 3);
  ptx::tma_load_3d(&map, barrier, tile, 1, 2, 3);
  ptx::tma_load_3d_evict_first(&map, barrier, tile, 1, 2, 3);
  ptx::tma_load_3d_multicast(&map, barrier, tile, 1, 2, 3, 3);
  ptx::tma_load_4d(&map, barrier, tile, 1, 2, 3, 4);
  ptx::bulk_load(barrier, tile, out, 16);
  ptx::tma_prefetch_2d(&map, 1, 2);
  ptx::tma_prefetch_3d(&map, 1, 2, 3);
  ptx::tma_prefetch_4d(&map, 1, 2, 3, 4);
  ptx::fence_proxy_async_shared();
  ptx::fence_proxy_async_global();
  ptx::tma_store_2d(&map, tile, 1, 2);
  ptx::tma_store_3d(&map, tile, 1, 2, 3);
  ptx::tma_store_4d(&map, tile, 1, 2, 3, 4);
  ptx::tma_reduce_add_2d(&map, tile, 1, 2);
  ptx::tma_reduce_add_3d(&map, tile, 1, 2, 3);
  ptx::tma_reduce_add_4d(&map, tile, 1, 2, 3, 4);
  ptx::bulk_store(out, tile, 16);
  ptx::tma_store_commit();
  ptx::tma_store_wait_read<1>();

  // Tensor maps that a kernel makes
  ptx::TensorMap* made = reinterpret_cast<ptx::TensorMap*>(out);
  ptx::tensormap_copy(made, map);
  ptx::tensormap_replace_address(made, out + 64);
  ptx::tensormap_replace_size<0>(made, 7);
  ptx::tensormap_replace_stride<1>(made, 128);
  ptx::fence_tensormap_release();
  ptx::fence_tensormap_acquire(made);

  // Cluster
  ptx::cluster_arrive();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  ptx::cluster_sync();
  flags[2] = ptx::mapa(tile, ptx::cluster_rank() ^ 1);
  ptx::st_async_v4_f32(tile, barrier, 1, 2.f, 3.f, 4.f, 5.f);
  ptx::st_async_v2_b32(tile, barrier, 1, 7, 8);
  ptx::st_async_b32(tile, barrier, 1, 6);

  // Warp and block
  float sum = ptx::shfl_sync(out[1], warp) + ptx::shfl_xor_sync(out[1], 2);
  if (ptx::all_sync(sum > 0) && ptx::elect_sync()) flags[3] = ptx::shfl_sync(lane, 5);
  flags[4] = ptx::ballot_sync(sum > 1) + ptx::reduce_min_sync(lane);
  ptx::syncwarp();
  ptx::syncthreads();
  if (ptx::syncthreads_and(sum > 2)) ptx::bar_sync(2, 256);
  else ptx::bar_arrive(2, 256);
  flags[4] = ptx::grid_size() + ptx::block_index();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // Memory
  sum += ptx::ld_shared_f32(tile + thread) + ptx::ld_shared_v2_f32(tile).y + ptx::ld_shared_v4_f32(tile).z;
  sum += ptx::ld_shared_f32(ptx::smem_address(tile)) + ptx::ld_shared_v2_f32(ptx::smem_address(tile) + 8).y +
         ptx::ld_shared_v4_f32(ptx::smem_address(tile) + 16).w;
  ptx::st_shared_f32(tile + thread, sum);
  ptx::st_shared_v2_f32(tile, sum, sum);
  ptx::st_shared_v4_b32(tile, ptx::ld_shared_b32(tile + 7), ptx::ld_shared_v4_b32(tile + 4).w, ptx::ld_shared_v4_b32(ptx::smem_address(tile)).x, 4);
  ptx::st_shared_b32(tile + 3, lane);
  ptx::st_shared_v2_b32(tile + 6, lane, warp);
  ptx::red_shared_add(reinterpret_cast<uint32_t*>(tile + 3), ptx::popc(ptx::match_any_sync(warp)));
  ptx::red_shared_or(reinterpret_cast<uint32_t*>(tile + 3), 1u << warp);
  ptx::stmatrix_x4(tile + lane * 4, 1, 2, 3, 4);
  sum += ptx::ld_global_f32(out) + ptx::ld_global_v2_f32(out).y + ptx::ld_global_v4_f32(out).z;
  sum += ptx::ld_global_nc_f32(out + 8);
  ptx::cp_async_16(tile, out);
  ptx::cp_async_wait_all();
  ptx::prefetch_l2(out);
  float products[4] = {};
  ptx::mma_m16n8k8_tf32(products, lane, warp, lane, warp, lane, warp);
  out[9] = products[3];
  flags[6] = ptx::ld_global_i32(out + 1) + ptx::ld_global_nc_i32(out + 9) + ptx::ld_global_b32(out + 2);
  ptx::st_global_b32(out, 7);
  ptx::st_global_v2_b32(out, 7, ptx::ld_global_v2_b32(out + 4).y);
  ptx::st_global_v2_f32(out, sum, ptx::fma(sum, sum, sum));
  ptx::st_global_v4_f32(out, sum, sum, sum, sum);
  ptx::st_global_v4_b32(out, 1, 2, 3, 4);
  ptx::st_global_b8(out, ptx::ld_global_nc_b16(out + 10) + ptx::ld_global_nc_b32(out + 11));
  ptx::st_global_b16(out + 13, lane);
  ptx::st_global_f32(out + 3, ptx::float_of(ptx::bits_of(sum) + ptx::ld_global_nc_v4_b32(out + 12).z));
  sum += ptx::add_rn(ptx::mul_rn(sum, 3.f), ptx::float_of(ptx::ld_global_b16(out) + ptx::ld_global_v4_b32(out).z));
  flags[7] = ptx::atom_add(flags, 1) + ptx::atom_add_acq_rel_b32(flags, 1) + ptx::ld_acquire_sys_b32(flags);
  ptx::red_release_gpu_add_b32(flags, 1);
  flags[9] = ptx::ld_relaxed_gpu_b32(flags) + ptx::ld_acquire_gpu_b32(flags);
  ptx::st_release_sys_b32(flags, static_cast<uint32_t>(ptx::global_timer()));
  sum += ptx::unpack_bf16(ptx::pack_bf16(sum, 1.f)).x + ptx::unpack_f16(ptx::pack_e4m3(sum, sum)).y;
  sum += ptx::ex2_approx(ptx::lg2_approx(ptx::rcp_approx(ptx::fma_rn(sum, 2.f, 1.f))));
  sum += ptx::min_magnitude(ptx::min_nan(ptx::abs_f32(sum), 3.f), 2.f) + ptx::max_f32(ptx::float_of(ptx::max_bf16x2(lane, flags[3])), ptx::float_of(ptx::max_f16x2(lane, 3)));
  sum += ptx::max_nan_f32(sum, ptx::float_of(ptx::max_nan_bf16x2(lane, flags[3]) + ptx::max_nan_f16x2(lane, 3)));

  // WGMMA and registers: the first warpgroup gives up registers, the second takes them and multiplies.
  if (thread < 128) {
    ptx::setmaxnreg_dec<40>();
  } else {
    ptx::setmaxnreg_inc<232>();
    const uint32_t low = ptx::smem_descriptor_low(ptx::smem_address(tile));
    float shallow[kUnitN / 2];
    ptx::wgmma_fence();
    ptx::wgmma_m64_e4m3<kUnitN, 64>(shallow, low, low);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(shallow);
#pragma unroll
    for (uint32_t i = 0; i < kUnitN / 2; ++i) sum += shallow[i];
    const uint32_t words[16] = {ptx::ld_shared_u16(ptx::smem_address(tile)), ptx::ld_shared_v2_b32(tile).y,
                                ptx::byte_perm(thread, low ^ lane, 0x5140)};
    const uint32_t few[4] = {words[0], words[1], words[2], low};
    float of_registers[kUnitN / 2], of_few[kUnitN / 2];
    ptx::wgmma_fence();
    ptx::wgmma_registers_m64k128_e4m3<kUnitN>(of_registers, words, low);
    ptx::wgmma_registers_m64k32_e4m3<kUnitN>(of_few, few, low);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(of_registers);
    ptx::fence_registers(of_few);
#pragma unroll
    for (uint32_t i = 0; i < kUnitN / 2; ++i) sum += of_registers[i] + of_few[i];
    float d[kUnitN / 2];
    ptx::fence_registers(d);
    ptx::wgmma_fence();
    ptx::wgmma_m64k128_e4m3<kUnitN>(d, low, low);
    ptx::wgmma_m64k32_e4m3<kUnitN>(d, ptx::smem_descriptor_from_low(low), ptx::smem_descriptor_from_low(low), true);
    ptx::wgmma_m64k32_e4m3<kUnitN>(d, ptx::smem_descriptor(ptx::smem_address(tile) + 32),
                                   ptx::smem_descriptor_from_low(low + 2), true);
    ptx::wgmma_commit_group();
    ptx::fence_registers(d);
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (float x : d) sum += x;
    float of_bf16[24 / 2];
    const uint32_t across = ptx::mn_major_descriptor_low(ptx::smem_address(tile), 8192);
    ptx::wgmma_fence();
    ptx::wgmma_m64k64_bf16<24, false, true>(of_bf16, low, across, false);
    ptx::wgmma_m64k16_bf16<24, false, true>(of_bf16, ptx::smem_descriptor_from_low(low), ptx::smem_descriptor_from_low(across), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(of_bf16);
#pragma unroll
    for (float x : of_bf16) sum += x;
    ptx::st_global_v2_f32(out + thread * 2, sum, sum);
  }
}

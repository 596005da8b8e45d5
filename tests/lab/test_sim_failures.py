"""Each way in which a kernel can be wrong ends with a message that says what, where, and who waits for what."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from sim_cases import cases_of, run_case

from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from lab.sim import SimulationError

pytestmark = pytest.mark.host_compiler

INIT = "if (thread == 0) { ptx::mbarrier_init(bar, 1); ptx::fence_mbarrier_init(); } ptx::syncthreads();"
LOAD = (
    "if (thread == 0) {"
    " ptx::mbarrier_arrive_expect_tx(bar, 1024); ptx::tma_load_2d(&c.map_in, bar, shared.tile, 0, 0); }"
)
MULTIPLY = (
    "float d[4]; const uint32_t a = ptx::smem_address(shared.tile);"
    " {before} ptx::wgmma_m64k32_e4m3<8>(d, {a}, {b}, false);"
)
# Makes a tensor map in `out`, like that of `in`.
MAKE_MAP = (
    "auto* map = reinterpret_cast<ptx::TensorMap*>((reinterpret_cast<uint64_t>(c.out) + 63) / 64 * 64);"
    " if (thread == 0) { ptx::tensormap_copy(map, c.map_in); ptx::tensormap_replace_address(map, c.in + 4); {after} }"
)
FINISH = "ptx::wgmma_commit_group(); ptx::wgmma_wait_group<0>();"
WAIT = "ptx::mbarrier_wait_parity(bar, 0);"


def multiply(*, before: str = "ptx::wgmma_fence();", a: str = "a", b: str = "a") -> str:
    return MULTIPLY.format(before=before, a=f"ptx::smem_descriptor({a})", b=f"ptx::smem_descriptor({b})")


PAIR = {"num_sms": 2, "cluster_size": 2}
# Name: what the kernel does, what the message must say, and how it is launched if not as usual.
FAILURES: dict[str, tuple[Any, ...]] = {
    # ---- Waiting for ever
    "deadlock": (
        INIT + "if (warp == 1) ptx::mbarrier_wait_parity(bar, 0);",
        r"deadlock: every thread waits.\n  CTA 0, warps 0,2-3: exited\n"
        r"  CTA 0, warp 1: waits for the end of parity 0 of the mbarrier at shared-memory offset 36864, "
        r"whose phase 0 \(parity 0\) lacks 1 of 1 arrivals and 0 bytes",
    ),
    "deadlock_at_a_named_barrier": (
        "if (warp < 2) ptx::bar_sync(3, 96);",
        r"warps 0-1: waits in bar_sync at barrier 3, where 64 of 96 threads have arrived",
    ),
    "deadlock_of_a_cluster": (
        "if (ptx::cluster_rank() == 0) ptx::cluster_sync();"
        "else { if (thread == 0) ptx::mbarrier_init(bar, 1); ptx::syncthreads(); ptx::mbarrier_wait_parity(bar, 0); }",
        r"CTA 0, warps 0-3: waits at the cluster's barrier, where 128 of 256 threads have arrived",
        PAIR,
    ),
    "deadlock_by_asking": (
        INIT + "while (!ptx::mbarrier_test_wait_parity(bar, 0)) {}",
        r"some by asking again and again.\n  CTA 0, warps 0-3: asks for the end of parity 0 of the mbarrier at",
    ),
    "missing_lanes": (
        INIT + "if (lane == 5) ptx::mbarrier_wait_parity(bar, 0); ptx::syncwarp();",
        r"lanes 0-4,6-31: waits for the rest of its warp at syncwarp",
    ),
    "no_end": ("for (;;) ptx::syncwarp();", r"no end after 20001 steps", {"max_steps": 20000}),
    "registers_beyond_the_pool": (
        "if (warp < 4) ptx::setmaxnreg_inc<256>(); else ptx::setmaxnreg_dec<248>();",
        r"setmaxnreg_inc needs 256 registers for its warp; \d+ of the block are free",
        {"threads": 256, "seed": 3},
    ),
    # ---- Copies from and to addresses
    "bulk_load_of_half_a_chunk": (
        INIT + "if (thread == 0) ptx::bulk_load(bar, shared.tile, c.in, 24);",
        r"bulk_load: 24 bytes from byte 0 of `in` .*: expected whole 16 bytes",
    ),
    "bulk_load_before_its_barrier": (
        "if (thread == 0) ptx::bulk_load(bar, shared.tile, c.in, 32);",
        r"bulk_load: the mbarrier at shared-memory offset 36864 of CTA 0 is not initialized",
    ),
    "bulk_load_that_nobody_waits_for": (
        INIT
        + "if (thread == 0) { ptx::mbarrier_arrive_expect_tx(bar, 32); ptx::bulk_load(bar, shared.tile, c.in, 32); }",
        r"pieces of TMA loads in flight into its shared memory",
    ),
    # ---- mbarriers
    "barrier_not_initialized": (
        "ptx::mbarrier_arrive(bar + 1);",
        r"warp \d, lane \d+: mbarrier_arrive: the mbarrier at shared-memory offset 36872 of CTA 0 is not initialized",
    ),
    "barrier_overwritten": (
        "if (thread == 0) { ptx::mbarrier_init(bar, 1); ptx::st_shared_f32(bar, 0); ptx::mbarrier_arrive(bar); }",
        r"is not initialized, or something has overwritten it",
    ),
    "barrier_not_fenced_for_tma": (
        "if (thread == 0) ptx::mbarrier_init(bar, 1); ptx::syncthreads();" + LOAD,
        r"tma_load_2d: .* is not visible to TMA: fence_mbarrier_init is missing",
    ),
    "barrier_not_fenced_for_the_cluster": (
        "if (thread == 0) ptx::mbarrier_init(bar, 9); ptx::cluster_sync();"
        "if (thread == 0) ptx::mbarrier_arrive_cluster(bar, 1 - ptx::cluster_rank()); ptx::cluster_sync();",
        r"is not visible to the cluster: fence_mbarrier_init is missing",
        PAIR,
    ),
    "too_many_arrivals": (
        INIT + "if (thread == 0) { ptx::mbarrier_arrive_expect_tx(bar, 16); ptx::mbarrier_arrive(bar); }",
        r"more arrivals than the mbarrier at .* was initialized for \(1\), while 16 bytes are still to land",
    ),
    "tx_overflow": (
        INIT + "if (thread == 0) ptx::mbarrier_arrive_expect_tx(bar, 1 << 20);",
        r"tx-count overflow: .* would count 1048576 bytes, beyond 2\^20 - 1",
    ),
    "parity_is_no_bit": (INIT + "ptx::mbarrier_wait_parity(bar, 2);", r"parity 2; it is 0 or 1"),
    "no_arrivals_expected": ("ptx::mbarrier_init(bar, 0);", r"mbarrier_init: 0 arrivals; it takes 1 to"),
    # ---- Warps and barriers
    "divergent_warp": (
        "if (lane == 3) ptx::elect_sync(); else ptx::syncwarp();",
        r"divergent warp: this lane is at (elect_sync|syncwarp) while others of its warp are at (elect_sync|syncwarp)",
    ),
    "lane_exits_early": (
        "if (lane != 3) ptx::syncwarp();",
        r"exits while other lanes of its warp wait for it at syncwarp|some of its lanes have exited",
    ),
    "named_barrier_with_two_counts": (
        "ptx::bar_sync(1, warp < 2 ? 128 : 96);",
        r"bar_sync: barrier 1 for (96|128) threads, but others arrived at it for (96|128)",
    ),
    "named_barrier_that_does_not_exist": ("ptx::bar_sync(16, 128);", r"barrier 16 does not exist"),
    "named_barrier_of_half_a_warp": ("ptx::bar_sync(1, 48);", r"for 48 threads; that is no multiple of 32"),
    "cluster_wait_alone": ("ptx::cluster_wait();", r"cluster_wait without cluster_arrive"),
    "cluster_arrive_twice": (
        "ptx::cluster_arrive(); ptx::cluster_arrive();",
        r"a second arrival without cluster_wait between",
    ),
    "setmaxnreg_in_one_warp": (
        "if (warp == 1) ptx::setmaxnreg_dec<40>();",
        r"different setmaxnreg in the warps of one warpgroup \(0\): all four must execute it",
    ),
    "setmaxnreg_in_the_wrong_direction": (
        "ptx::setmaxnreg_dec<40>(); ptx::setmaxnreg_dec<48>();",
        r"setmaxnreg_dec<48>: the warp has 40 registers a thread",
    ),
    # ---- Shared memory
    "shared_out_of_range": (
        "ptx::ld_shared_f32(shared.tile + 37888);",
        r"ld_shared_f32: shared-memory offset 37888 \(4 bytes\) lies outside the block's 37888 bytes",
    ),
    "shared_address_out_of_range": (
        "ptx::ld_shared_v2_f32(ptx::smem_address(shared.tile) + 37888);",
        r"ld_shared_v2_f32: shared-memory offset 37888 \(8 bytes\) lies outside the block's 37888 bytes",
    ),
    "shared_address_of_the_system": (
        "ptx::ld_shared_f32(512u);",
        r"ld_shared_f32: shared-memory offset -512 \(4 bytes\) lies outside",
    ),
    "shared_before_the_start": ("ptx::st_shared_f32(shared.tile - 4, 1);", r"offset -4 \(4 bytes\) lies outside"),
    "shared_misaligned": (
        "ptx::ld_shared_v4_f32(shared.tile + 8);",
        r"ld_shared_v4_f32: shared-memory offset 8 is not a multiple of 16",
    ),
    "stmatrix_misaligned": ("ptx::stmatrix_x4(shared.tile + lane * 8, 1, 2, 3, 4);", r"is not a multiple of 16"),
    "plan_larger_than_the_launch": (
        "",
        r"the kernel's plan of shared memory has 37888 bytes, but it was launched with 4096",
        {"shared_bytes": 4096},
    ),
    # ---- Global memory, whether or not the value is used
    "global_past_the_end": (
        "ptx::ld_global_f32(c.in + 2048);",
        r"ld_global_f32 reads 4 bytes of global memory out of bounds: 0 bytes past the end of `in` \(8192 bytes\)",
    ),
    "global_before_the_start": ("ptx::ld_global_nc_f32(c.in - 3);", r"12 bytes before `in`"),
    "global_vector_over_the_end": ("ptx::ld_global_v4_f32(c.in + 2046);", r"byte 8184 of `in`"),
    "global_misaligned": ("ptx::ld_global_v2_f32(c.in + 1);", r"not a multiple of 8: byte 4 of `in`"),
    "global_write_to_an_input": (
        "ptx::st_global_b32(const_cast<float*>(c.in), 1);",
        r"st_global_b32 writes to `in`, an input",
    ),
    "global_nc_read_of_an_output": ("ptx::ld_global_nc_f32(c.out);", r"the .nc path is for constant data"),
    "global_write_by_other_means": ("c.out[-1] = 1;", r"wrote outside of `out` by other means than `ptx::`"),
    "tma_map_larger_than_the_tensor": (
        INIT + LOAD + WAIT,
        r"tma_load_2d reads 16 bytes of global memory out of bounds: 0 bytes past the end of `in`",
        {"data": torch.zeros(100 * 4), "in_map": TensorMap(ElementType.FLOAT32, (32, 64), (512,), (32, 8), 128)},
    ),
    "tma_store_to_an_input": (
        "if (thread == 0) ptx::tma_store_2d(&c.map_in, shared.tile, 0, 0);",
        r"tma_store_2d writes to `in`, an input",
    ),
    "touched_before_griddepcontrol_wait": (
        "ptx::ld_global_f32(c.in);",
        r"touches `in`, which the kernel before may still be using: no thread of this block has passed",
        {"dependent": True},
    ),
    # ---- TMA
    "tma_destination_misaligned": (
        INIT + "ptx::tma_load_2d(&c.map_in, bar, shared.tile + 64, 0, 0);",
        r"shared-memory offset 64 is not a multiple of 128",
    ),
    "tma_rank": (
        INIT + "ptx::tma_load_3d(&c.map_in, bar, shared.tile, 0, 0, 0);",
        r"tma_load_3d: the tensor map has 2 dimensions",
    ),
    "tma_mask": (
        INIT + "ptx::tma_load_2d_multicast(&c.map_in, bar, shared.tile, 0, 0, 2);",
        r"the CTA mask 2 does not fit a cluster of 1",
    ),
    "exit_with_loads_in_flight": (
        INIT + LOAD,
        r"CTA 0 exits with \d pieces of TMA loads in flight into its shared memory",
        {"schedule": "late_loads"},
    ),
    "exit_with_uncommitted_stores": (
        "if (thread == 0) ptx::tma_store_2d(&c.map_out, shared.tile, 0, 0);",
        r"exits with TMA stores that were never committed",
    ),
    "exit_while_tma_reads": (
        "if (thread == 0) { ptx::tma_store_2d(&c.map_out, shared.tile, 0, 0); ptx::tma_store_commit(); }",
        r"exits while TMA still reads its shared memory for a store of warp 0: tma_store_wait_read<0> is missing",
        {"schedule": "late_stores"},
    ),
    "exit_with_unbalanced_bytes": (
        INIT + "if (thread == 0) { ptx::tma_load_2d(&c.map_in, bar, shared.tile, 0, 0);"
        "ptx::tma_load_2d(&c.map_in, bar, shared.tile, 0, 8); ptx::mbarrier_arrive_expect_tx(bar, 1024); }"
        "while (!ptx::mbarrier_test_wait_parity(bar, 0) && --c.x) {}",
        r"exits (with bytes that do not add up: .* -?\d+ bytes|with \d pieces of TMA loads in flight)",
        {"x": 100},
    ),
    # ---- Tensor maps that kernels make
    "map_without_acquire": (
        MAKE_MAP.replace("{after}", "ptx::fence_tensormap_release(); ptx::prefetch_tensormap(map);"),
        r"prefetch_tensormap uses a tensor map that a kernel made, byte \d+ of `out` .*, without fence_tensormap",
    ),
    "map_without_release": (
        MAKE_MAP.replace("{after}", "ptx::fence_tensormap_acquire(map);"),
        r"fence_tensormap_acquire: byte \d+ of `out` .* was written, and fence_tensormap_release has not shown it",
    ),
    "map_written_since_it_was_acquired": (
        MAKE_MAP.replace(
            "{after}",
            "ptx::fence_tensormap_release(); ptx::fence_tensormap_acquire(map); ptx::tensormap_replace_size<0>(map, 8);"
            " ptx::prefetch_tensormap(map);",
        ),
        r"prefetch_tensormap uses a tensor map that a kernel made, .*, without fence_tensormap_acquire",
    ),
    "map_written_while_a_copy_uses_it": (
        INIT
        + MAKE_MAP.replace(
            "{after}",
            "ptx::fence_tensormap_release(); ptx::fence_tensormap_acquire(map);"
            " ptx::mbarrier_arrive_expect_tx(bar, 1024); ptx::tma_load_2d(map, bar, shared.tile, 0, 0);"
            " ptx::tensormap_replace_size<0>(map, 8);",
        ),
        r"tensormap_replace_size writes a tensor map that a copy in flight is using: byte \d+ of `out`",
        {"schedule": "late_loads"},
    ),
    "map_with_a_size_of_zero": (
        MAKE_MAP.replace("{after}", "ptx::tensormap_replace_size<1>(map, 0);"),
        r"tensormap_replace_size: 0 is no size of a dimension",
    ),
    "map_with_a_stride_that_is_illegal": (
        MAKE_MAP.replace("{after}", "ptx::tensormap_replace_stride<1>(map, 24);"),
        r"tensormap_replace_stride: 24 bytes are no stride of a dimension; it takes multiples of 16",
    ),
    "map_of_an_input": (
        "if (thread == 0) ptx::tensormap_replace_size<0>(const_cast<ptx::TensorMap*>(&c.map_in), 8);",
        r"tensormap_replace_size writes 128 bytes of global memory out of bounds",
    ),
    # ---- WGMMA
    "wgmma_without_fence": (
        multiply(before="") + FINISH,
        r"wgmma_m64k32_e4m3 without wgmma_fence since its accumulators were last touched",
    ),
    "wgmma_descriptor_out_of_range": (
        multiply(b="a + 37888") + FINISH,
        r"the descriptor of B reaches from 38912 to 39840 of shared memory, which lies from 1024 to 38912",
    ),
    "wgmma_descriptor_misaligned": (
        multiply(a="a + 128") + FINISH,
        r"the descriptor of A: address 1152 does not lie in the first row of a swizzle atom",
    ),
    "wgmma_operands_differ_between_lanes": (
        multiply(a="a + (lane == 7 ? 1024 : 0)") + FINISH,
        r"operands differ between the lanes of a warp",
    ),
    "wgmma_operands_differ_between_warps": (
        multiply(a="a + (warp == 2 ? 1024 : 0)") + FINISH,
        r"other operands than the same product of another warp of its warpgroup",
    ),
    "exit_with_a_product_in_flight": (
        multiply() + "ptx::wgmma_commit_group(); ptx::wgmma_wait_group<1>();",
        r"exits with a WGMMA in flight: wgmma_wait_group<0> is missing",
    ),
    # ---- Clusters
    "peer_may_not_have_started": (
        INIT + "ptx::st_async_b32(shared.floats, bar, 1 - ptx::cluster_rank(), 1);",
        r"CTA \d may not have started yet: no cluster barrier stands before this access",
        PAIR,
    ),
    "peer_has_exited": (
        INIT + "ptx::cluster_sync(); if (ptx::cluster_rank() == 0) {"
        "for (int i = 0; i < 2000; ++i) ptx::syncwarp(); ptx::st_async_b32(shared.floats, bar, 1, 1); }",
        r"st_async_b32: CTA 1 of the cluster has exited",
        {**PAIR, "threads": 32},
    ),
    "arrival_at_a_cta_that_has_exited": (
        INIT + "ptx::cluster_sync(); if (ptx::cluster_rank() == 0) {"
        "for (int i = 0; i < 2000; ++i) ptx::syncwarp(); if (lane == 0) ptx::mbarrier_arrive_cluster(bar, 1); }",
        r"mbarrier_arrive_cluster: CTA 1 of the cluster has exited",
        {**PAIR, "threads": 32},
    ),
    "remote_store_lands_too_late": (
        INIT + "ptx::cluster_sync(); if (thread == 0 && ptx::cluster_rank() == 0)"
        " ptx::st_async_b32(shared.floats, bar, 1, 1);",
        r"CTA 1 exits with 1 pieces of TMA loads in flight|CTA 1 of the cluster has exited",
        {**PAIR, "schedule": "late_stores"},
    ),
    "multicast_lands_in_a_cta_that_has_exited": (
        INIT + "ptx::cluster_sync(); if (thread == 0 && ptx::cluster_rank() == 0) {"
        "ptx::mbarrier_arrive_expect_tx(bar, 1024);"
        "ptx::tma_load_2d_multicast(&c.map_in, bar, shared.tile, 0, 0, 3); ptx::mbarrier_wait_parity(bar, 0); }",
        r"CTA 1 exits with \d pieces of TMA loads in flight|CTA 1 of the cluster has exited",
        {**PAIR, "schedule": "late_loads"},
    ),
    "rank_outside_the_cluster": (
        INIT + "ptx::cluster_sync(); ptx::st_async_b32(shared.floats, bar, 2, 1);",
        r"rank 2 in a cluster of 2",
        PAIR,
    ),
    # ---- Launches
    "launch_beyond_the_bounds": ("", r"launch: 512 threads in a block of a kernel bounded to 256", {"threads": 512}),
    "launch_of_half_a_cluster": ("", r"launch: a grid of whole clusters", {"num_sms": 3, "cluster_size": 2}),
    "launch_with_too_much_memory": ("", r"launch: more than 232448 bytes", {"shared_bytes": 232449}),
}
CASES = cases_of({name: body for name, (body, *_) in FAILURES.items()})


@pytest.mark.parametrize("name", FAILURES)
def test_failure_is_named(name: str) -> None:
    _, message, *options = FAILURES[name]
    with pytest.raises(SimulationError, match=message) as caught:
        run_case(CASES, name, **dict(*options))
    assert "again with seed=" in str(caught.value)


def test_an_error_comes_whole_from_another_process() -> None:
    error = SimulationError("kernel", "broke a rule", "seed 3")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) == "kernel: broke a rule\n(again with seed 3)"
    assert copied.what == "broke a rule"

"""The simulator's model: each operation's effect, results that it hides until a kernel waits, and whole kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sim_cases import cases_file, run_case
from thorough import one_in

from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.sources import cuda_sources
from lab.learn import KERNEL, LearnConfig, LearnTrial, problem, simulated
from lab.sim import SCHEDULES, Buffer, HostCompileError, Pointer, SimulationError, compile_kernel, library, simulate
from lab.sim.arguments import U64, Argument, Map, Struct, encode

pytestmark = pytest.mark.host_compiler

FP32, UINT8 = ElementType.FLOAT32, ElementType.UINT8
MODEL = cases_file("model.cuh")
PLAIN = TensorMap(FP32, (32, 64), (128,), (32, 8))
ALL = torch.arange(2048.0).reshape(64, 32)  # the content of `in`


def run(name: str, **options: Any) -> torch.Tensor:
    return run_case(MODEL, name, **options)[0].reshape(-1)


def unswizzled(words: torch.Tensor, span_bytes: int) -> torch.Tensor:
    """Put swizzled words of shared memory in the order of the rows that TMA loaded.

    (PTX ISA, "Swizzling Modes": 16-byte chunks are exchanged within the span, by the index of their 128-byte line.)
    """
    at = torch.arange(words.numel())
    chunk = at // 4
    line = chunk // 8
    return words[(chunk ^ line % max(span_bytes // 16, 1)) * 4 + at % 4]


# ---- TMA


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_a_loaded_box_is_swizzled_as_its_map_says(span: int) -> None:
    columns = span // 4 if span else 32
    box = TensorMap(FP32, (32, 64), (128,), (columns, 256 // columns), span)
    words = run("load", in_map=box)[:256]
    assert torch.equal(unswizzled(words, span).reshape(-1, columns), ALL[: 256 // columns, :columns])


@pytest.mark.parametrize("name, x, y", [("load_over_the_corner", -4, -2), ("load_past_the_end", 28, 60)])
def test_what_lies_outside_the_tensor_loads_as_zero(name: str, x: int, y: int) -> None:
    padded = torch.nn.functional.pad(ALL, (8, 64, 8, 64))
    assert torch.equal(run(name, in_map=PLAIN)[:256].reshape(8, 32), padded[y + 8 : y + 16, x + 8 : x + 40])


def test_dimensions_beyond_the_second_select_and_clip() -> None:
    four = TensorMap(FP32, (16, 4, 8, 4), (64, 256, 2048), (16, 2, 4, 2))
    right = torch.nn.functional.pad(torch.arange(2048.0).reshape(4, 8, 4, 16), (0, 0, 0, 0, 0, 0, 1, 0))
    assert torch.equal(run("load_4d", in_map=four)[:256].reshape(2, 4, 2, 16), right[0:2, 1:5, 1:3])


def test_addresses_wrap_at_64_bits_while_bounds_are_checked_by_dimension() -> None:
    """2**25 steps of 2**39 bytes wrap to the start. Kernels use such strides to move a tensor's end."""
    wrapping = TensorMap(FP32, (32, 64, 2**32), (128, 2**39), (32, 8, 1))
    assert torch.equal(run("load_3d", in_map=wrapping, x=2**25)[:256].reshape(8, 32), ALL[8:16])
    with pytest.raises(SimulationError, match="out of bounds"):
        run("load_3d", in_map=wrapping, x=1)


def test_memory_that_a_load_is_writing_reads_as_poison() -> None:
    assert run("load_without_waiting", schedule="late_loads")[:256].isnan().all()


def test_asking_whether_a_load_has_landed_is_waiting_too() -> None:
    assert torch.equal(run("load_by_asking", in_map=PLAIN)[:256].reshape(8, 32), ALL[:8])


def test_a_store_writes_what_lies_inside_the_tensor() -> None:
    out = run("store", out_map=PLAIN, x=1).reshape(64, 32)
    assert torch.equal(out[60:, :28], torch.arange(256.0).reshape(8, 32)[:4, 4:])
    assert out[:60].isnan().all()
    assert out[60:, 28:].isnan().all()


def test_a_store_does_not_see_writes_that_no_proxy_fence_followed() -> None:
    assert run("store", x=0).isnan().all()


@pytest.mark.parametrize("seed", range(3))
def test_reducing_stores_of_two_blocks_add_up(seed: int) -> None:
    out = run("store_adds", num_sms=2, cluster_size=2, seed=seed).reshape(64, 32)
    assert (out[8:16] == 5 + 2 * 3).all()
    assert (out[:8] == 5).all()


def test_having_been_read_is_not_having_been_written() -> None:
    out = run("store_then_read", schedule="late_stores")
    assert out[2047].isnan(), "the value that the thread read"
    assert out[0] == 7, "the value in the end"


# ---- WGMMA


@pytest.mark.parametrize("seed", range(4))
def test_accumulators_are_poison_until_the_wait(seed: int) -> None:
    out = run("accumulators", seed=seed)
    assert out[:128].isnan().all()
    assert (out[128:256] == 1 + 32).all()


def test_registers_that_nothing_was_written_to_are_no_zeros() -> None:
    if library.POISON_FLAG not in library.kernel_flags():
        pytest.skip("this g++ cannot fill them")
    assert (run("accumulators_of_nothing")[:128] < -1e38).all()


@pytest.mark.parametrize(
    ("version", "fills"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", False),
        ("g++ (GCC) 15.1.1 20250425", True),
        ("another compiler", False),
    ],
)
def test_a_compiler_that_cannot_fill_registers_is_not_asked_to(
    version: str, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_compiler_version", lambda: version)
    assert (library.POISON_FLAG in library.kernel_flags()) == fills


def fp8_words() -> torch.Tensor:
    values = torch.randn(8192, generator=torch.Generator().manual_seed(1)).abs() * 2  # positive: no terms cancel
    return values.to(torch.float8_e4m3fn).view(torch.float32)


def accumulated(one_level: bool, truncate: bool) -> torch.Tensor:
    return run("accumulate", data=fp8_words(), x=int(one_level), truncate=truncate)[:512]


def test_products_are_exact_to_fp32_by_default() -> None:
    one, two = accumulated(True, False).double(), accumulated(False, False).double()
    assert float(((one - two) / two).abs().max()) < 1e-6


def test_truncated_accumulation_needs_a_second_level() -> None:
    """With k = 4096 and Hopper's few bits, the error stays small only if each 128 columns' sum is promoted to FP32."""
    right = accumulated(False, False).double()
    one = float(((accumulated(True, True).double() - right) / right).abs().mean())
    two = float(((accumulated(False, True).double() - right) / right).abs().mean())
    assert one > 2e-3
    assert two < one / 4


# ---- Warps, blocks, clusters


@pytest.mark.parametrize("seed", range(3))
def test_lanes_of_a_warp_agree(seed: int) -> None:
    out, flags, _ = run_case(MODEL, "lanes", seed=seed)
    assert flags[:5].tolist() == [4, 4, 128, 0, 32]
    assert out.reshape(-1)[:128].tolist() == [float(t // 32 * 32 + 5) for t in range(128)]


def test_stmatrix_places_the_fragments_of_each_lane() -> None:
    # Each matrix is stored row by row. A row has four words, of one lane after the other.
    assert run("matrices")[:128].tolist() == [matrix * 100 + lane for matrix in range(4) for lane in range(32)]


def test_conversions_round_to_nearest_even_and_keep_nan() -> None:
    out, flags, _ = run_case(MODEL, "numbers")
    low, high = torch.tensor([1.00390625, 1.01171875]).to(torch.bfloat16).view(torch.int16).tolist()
    assert flags[0] == low | high << 16
    assert flags[1] & 0xFFFF == 0x7FFF
    assert out.reshape(-1)[:3].tolist() == [1, 2, 2.0**-24]


@pytest.mark.parametrize("schedule", ["even", "late_stores"])
def test_what_is_sent_by_st_async_is_poison_until_its_mbarrier_was_waited_for(schedule: str) -> None:
    out = run("async_exchange", num_sms=2, cluster_size=2, schedule=schedule)
    assert out[:4].isnan().all(), "neither the value before, which is overwritten, nor the new value"
    assert out[4:8].tolist() == [1, 2, 3, 4]


def test_tma_does_not_see_what_was_sent_by_st_async_before_a_proxy_fence() -> None:
    def stored(x: int) -> list[int]:
        return (
            run("store_of_what_was_sent", out_map=PLAIN, num_sms=2, cluster_size=2, x=x)[:3].view(torch.int32).tolist()
        )

    seven = torch.tensor([7.0]).view(torch.int32).item()
    assert stored(1) == [1, 2, seven]
    assert stored(0) == [-1, -1, seven]


@pytest.mark.parametrize("seed", range(3))
def test_multicast_brings_each_half_to_both(seed: int) -> None:
    out = run("multicast", in_map=PLAIN, num_sms=2, cluster_size=2, seed=seed)
    assert torch.equal(out[:1024], torch.arange(512.0).repeat(2))


@pytest.mark.parametrize("seed", range(4))
def test_a_named_barrier_orders_those_who_arrive_before_those_who_wait(seed: int) -> None:
    assert (run("named_barriers", seed=seed)[:32] == 3).all()
    assert (run("arrivals_at_a_named_barrier", seed=seed)[:32] == 7).all()


def test_a_block_can_wait_for_another_that_runs_at_the_same_time() -> None:
    assert run("flag", num_sms=2)[:2].tolist() == [4, 5]
    with pytest.raises(SimulationError, match=r"no end after 20001 steps .*\n  CTA 0, warp 0, lane 0: can run"):
        run("flag", num_sms=1, grid=2, max_steps=20000)


def test_a_grid_larger_than_the_gpu_runs_in_waves_of_clusters() -> None:
    out = run("blocks", num_sms=4, grid=10, cluster_size=2)
    ranks, turns = out[:20].reshape(10, 2).T.tolist()
    assert ranks == [0, 1] * 5
    assert sorted(turns) == list(range(10))
    assert all(turn >= (i // 2 - 1) * 2 for i, turn in enumerate(turns)), "two clusters run at a time"
    assert out[20:].isnan().all()


def test_clusters_of_eight() -> None:
    ranks, turns = run("blocks", num_sms=8, cluster_size=8)[:16].reshape(8, 2).T.tolist()
    assert ranks == sorted(turns) == list(range(8))


# ---- Whole kernels


@pytest.mark.parametrize(
    "config, mnk",
    [
        (LearnConfig(), (256, 256, 896)),
        (LearnConfig(num_stages=2), (130, 136, 144)),
        (LearnConfig(32, 4), (200, 336, 496)),
        (LearnConfig(cluster_size=2), (300, 256, 896)),
        (LearnConfig(cluster_size=2), (64, 264, 400)),
        (LearnConfig(16, 5), (1, 24, 2048)),
    ],
)
def test_the_product_of_the_tutorial_is_right_in_every_schedule(config: LearnConfig, mnk: tuple[int, int, int]) -> None:
    for seed, schedule in enumerate(one_in(3, SCHEDULES)):
        LearnTrial(config, mnk, seed, schedule).run()


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    steps = [simulated(LearnConfig(), problem(130, 136, 144), seed=seed).steps for seed in (1, 1, 2)]
    assert steps[0] == steps[1] != steps[2]


def test_more_sms_give_the_same_numbers() -> None:
    p = problem(300, 264, 272)
    outputs = [torch.as_tensor(simulated(LearnConfig(), p, num_sms=sms).buffers["d"]) for sms in (1, 3)]
    assert torch.equal(*outputs)


def test_the_portable_switch_of_fibers_gives_the_same_run() -> None:
    config, p = LearnConfig(), problem(130, 136, 144)
    portable = compile_kernel(KERNEL.source, KERNEL.headers(config), name="product", flags=("-DSIM_UCONTEXT",))
    one, other = simulated(config, p), simulated(config, p, portable)
    assert torch.equal(torch.as_tensor(one.buffers["d"]), torch.as_tensor(other.buffers["d"]))
    assert one.steps == other.steps


def test_trials_pass_on_the_unbroken_kernel() -> None:
    trial = LearnTrial(LearnConfig(), (130, 136, 144))
    trial.run(trial.headers())


# ---- Compiling and calling


def test_every_wrapper_of_the_gpu_exists_here_with_the_same_parameters() -> None:
    source = (Path(__file__).parent / "sim_kernels" / "all_wrappers.cuh").read_text()
    headers = {**cuda_sources(), "config.cuh": '#pragma once\n#include "types.cuh"\nconstexpr uint32_t kUnitN = 64;\n'}
    kernel = compile_kernel('#include "config.cuh"\n' + source, headers, name="all_wrappers")
    assert kernel.argument_bytes() == [128, 8, 8]


def test_a_source_that_is_not_cpp_is_refused_with_the_compilers_words() -> None:
    with pytest.raises(HostCompileError, match="nonsense"):
        compile_kernel("nonsense;\n", {}, name="k")


@pytest.mark.release
def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    source = "KERNEL(32, 1) k(const float*) {}\n"
    first = compile_kernel(source, {}, name="k", cache_dir=tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = compile_kernel(source, {}, name="k", cache_dir=tmp_path)
    assert first.path == again.path
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    other = compile_kernel(source + "\n", {}, name="k", cache_dir=tmp_path)
    assert other.path != first.path


def test_arguments_that_do_not_fit_the_kernel_are_refused() -> None:
    kernel = compile_kernel("KERNEL(32, 1) k(const float*, uint32_t) {}\n", {}, name="k")
    buffers = {"x": Buffer(torch.zeros(4))}
    with pytest.raises(ValueError, match=r"arguments: expected parameters of \[8, 4\] bytes, got \[8\]"):
        simulate(kernel, [Pointer("x")], buffers, threads=32, shared_bytes=0)
    with pytest.raises(ValueError, match="schedule: expected one of even, "):
        simulate(kernel, [Pointer("x"), 1], buffers, threads=32, shared_bytes=0, schedule="odd")


@pytest.mark.parametrize(
    "argument, size",
    [(1, 4), (-1, 4), (1.5, 4), (U64(2**40), 8), (Pointer(None), 8), (Struct(1, U64(2)), 16), (Struct(U64(2), 1), 16)],
)
def test_arguments_are_laid_out_as_cpp_does(argument: Argument, size: int) -> None:
    assert len(encode(argument, {})) == size


def test_a_struct_with_a_tensor_map_is_aligned_to_it() -> None:
    spec = TensorMap(UINT8, (64, 64), (64,), (64, 8))
    assert len(encode(Struct(1, Map("x", spec), 2), {"x": 4096})) == 64 + 128 + 64


def test_a_tensor_map_that_the_driver_would_refuse_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        encode(Map("x", TensorMap(UINT8, (20, 64), (20,), (16, 8))), {"x": 4096})
    with pytest.raises(ValueError, match="expected an address that is a multiple of 16, got 0x1008"):
        encode(Map("x", TensorMap(UINT8, (32, 64), (32,), (16, 8))), {"x": 0x1008})


def test_a_buffer_begins_at_no_better_alignment_than_it_promises() -> None:
    _, flags, _ = run_case(MODEL, "address")
    assert flags[0] % 32 == 16


def test_kernels_of_one_process_do_not_share_their_bounds() -> None:
    small = compile_kernel("KERNEL(32, 1) small(uint32_t) {}\n", {}, name="small")
    compile_kernel("KERNEL(512, 1) large(uint32_t) {}\n", {}, name="large")
    with pytest.raises(SimulationError, match="64 threads in a block of a kernel bounded to 32"):
        simulate(small, [0], {}, threads=64, shared_bytes=0)

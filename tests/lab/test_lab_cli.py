"""The laboratory's command line, as a person types it: its output, and its messages about mistakes."""

from __future__ import annotations

import os
import re
from functools import cache, partial
from pathlib import Path

import pytest
from test_cli import no_compiler, words
from test_cli import printed as printed_any
from test_cli import run as run_any

from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from lab import inspect as inspect_kernels
from lab.configs import reachable_decode, reachable_grouped, reachable_heads, reachable_k_grouped, reachable_silu
from lab.configs import reachable_dense as reachable
from lab.gates import GATES
from lab.inspect import OPCODES
from lab.kernels import all_kernels
from lab.sim import command as sim_command
from lab.sim import library

all_configs = cache(partial(run_any, "configs", program="lab", columns=40))
run, printed = partial(run_any, program="lab"), partial(printed_any, program="lab")


# ---- inspect ----------------------------------------------------------------------------------------------------


def test_inspect_shows_what_a_kernel_is_made_of() -> None:
    shown = printed("inspect", "fp8_gemm", "--block-m", "256", "--block-n", "128")
    for fact in (
        "fp8_gemm 256x128 bf16, sm_90a, NVRTC",
        "tile 256 x 128 x 128",
        "registers 168 a thread at launch, 64512 of 65536",
        "then 232 for a math thread, 40 for a producer's",
        "shared memory 217088 of 232448 bytes",
        "ring 3 stages of 50176 bytes",
        "stores 2 buffers of 32768 bytes, 4 panels of 64 x 64 each",
        "ms, cold",
        "each 16 FFMA",
        "UTMALDG TMA loads 3",
        "UTMASTG TMA stores 4",
    ):
        assert fact in shown
    assert shown.count("passed") == len(GATES)
    assert all(gate.name in shown for gate in GATES)
    assert "SASS" not in shown


def test_inspect_takes_every_part_of_a_configuration() -> None:
    clustered = words(run("inspect", "--block-m", "128", "--block-n", "64", "--cluster-n", "2", "--with-c"))
    assert "fp8_gemm 128x64/n2 bf16+c" in clustered
    assert "cluster 2 CTAs share A along n" in clustered
    assert "UTMALDG TMA loads, 1 multicast 3" in clustered
    adding = words(run("inspect", "--block-m", "64", "--block-n", "16", "--output", "fp32", "--adds-to-d"))
    assert "fp8_gemm 64x16 fp32+d" in adding
    assert "UTMAREDG TMA stores that add 1" in adding
    assert "UTMASTG" not in adding


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("cast_rows",), ("cast_rows ", "LDG loads from global memory ", "MUFU reciprocals")),
        (("cast_tiles",), ("cast_tiles ", "STS stores to shared memory ")),
        (("route_rows",), ("route_rows int32 64 experts, sm_90a", "threads 1024, in 1 blocks an SM")),
        (("gather_weighted", "--config", "weights in bfloat16"), ("gather_weighted weights in bfloat16, sm_90a",)),
        (("lay_scales",), ("lay_scales 64x32, sm_90a", "LDG loads from global memory 8", "shared memory 8320 bytes")),
    ],
)
def test_inspect_shows_every_other_kernel_too(arguments: tuple[str, ...], facts: tuple[str, ...]) -> None:
    shown = printed("inspect", *arguments)
    assert [fact for fact in facts if fact not in shown] == []
    assert shown.count("passed") == len(GATES)
    assert "spills" not in shown


def test_inspect_says_where_sass_comes_from_if_it_cannot_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernels, "disassemble", lambda cubin: None)
    assert "SASS: there is no nvdisasm or cuobjdump on PATH, in CUDA_HOME/bin or in Triton" in printed(
        "inspect", "--block-m", "64", "--block-n", "16", "--sass"
    )


def test_inspect_prints_sass_as_nvdisasm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    line = "        /*0000*/  LDC R1, c[0x0][0x28] ;  [bold] " + "x" * 100
    tool.write_text(f"#!/bin/sh\necho '{line}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert line in run("inspect", "--block-m", "64", "--block-n", "16", "--sass").output


def test_inspect_fails_and_tells_why_where_a_gate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = FP8_GEMM.headers

    def without_setmaxnreg(config: GemmConfig) -> dict[str, str]:
        return {name: re.sub(r"ptx::setmaxnreg_\w+<\w+>\(\);", "", text) for name, text in headers(config).items()}

    monkeypatch.setattr(FP8_GEMM, "headers", without_setmaxnreg)
    result = run("inspect", "--block-m", "128", "--block-n", "16")
    assert result.exit_code == 1
    assert "128x16 bf16, setmaxnreg as planned: registers are moved between warps (setmaxnreg) to nothing" in words(
        result
    )
    assert "failed" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inspect int8_gemm", "kernel: expected one of fp8_gemm, bf16_gemm, fp8_gemm_decode, "),
        ("inspect lay_scales --config 1x1", "config: expected one of ['64x32'], got '1x1'"),
        ("inspect --config 256x128", "config: expected one of ['"),
        ("inspect --block-m 100", "block_m: expected one of [64, 128, 192, 256], got 100"),
        ("inspect --block-n 100", "block_n: expected a multiple of 16 from 16 to 256, got 100"),
        ("inspect --block-n wide", "Invalid value for '--block-n'"),
        ("inspect --output fp16", "Invalid value for '--output'"),
        ("inspect --cluster-n 4", "256x128/n4 bf16: needs 1 or 2 CTAs that share an operand"),
        ("inspect --adds-to-d", "needs FP32 output where it is added to D"),
        ("inspect --output fp32 --adds-to-d --with-c", "needs C added in one way, not both"),
        ("inspect --block-n 256", "256x256 bf16: needs 320 accumulators in 232 registers"),
        ("sim int8_gemm", "kernel: expected one of fp8_gemm, bf16_gemm, fp8_gemm_decode, "),
        ("sim --config 1x1", "config: expected one of ['64x32 bf16', "),
        ("sim --set depth=5", "set: expected one of num_sms, truncate, m, n, k, schedule, "),
        ("sim --seeds 0", "Invalid value for '--seeds'"),
        ("sim --first-seed -1", "Invalid value for '--first-seed'"),
        ("sim --block-m 100", "block_m: expected one of [64, 128, 192, 256], got 100"),
        ("sim --block-m 256 --block-n 256", "256x256 bf16 run 1: needs 320 accumulators in 232 registers"),
        ("sim --cluster-n 4", "128x128/n4 bf16 tail: needs 1 or 2 CTAs that share an operand"),
        ("sim --adds-to-d", "128x128 bf16+d tail: needs FP32 output where it is added to D"),
    ],
)
def test_mistakes_are_refused_in_words(line: str, message: str) -> None:
    shown = printed(*line.split(), code=2)
    assert message in shown
    assert "Traceback" not in shown


def test_inspect_says_what_to_install_where_the_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernels, "compiler_version", no_compiler)
    assert 'Run: pip install "hopper-gemm[cu13]"' in printed("inspect", code=2)


def test_every_opcode_that_is_shown_has_a_name_in_the_reader() -> None:
    from deep_gemm.core.jit.cubin import _MNEMONICS

    assert set(OPCODES) <= set(_MNEMONICS.values())


def test_inspect_of_a_source_that_does_not_compile_fails_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = FP8_GEMM.headers
    monkeypatch.setattr(FP8_GEMM, "headers", lambda config: {**headers(config), "ring.cuh": "int x = ;"})
    result = run("inspect", "--block-m", "64", "--block-n", "16")
    assert result.exit_code == 1
    assert "NVRTC: NVRTC_ERROR_COMPILATION" in words(result)
    assert "Traceback" not in result.output


# ---- sim --------------------------------------------------------------------------------------------------------

SMALL = ("--set", "m=40", "--set", "n=72", "--set", "k=272", "--block-m", "64", "--block-n", "64")


@pytest.mark.host_compiler
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (SMALL, "fp8_gemm 64x64 bf16 tail"),
        ((*SMALL, "--fp32", "--adds-to-d"), "fp8_gemm 64x64 fp32+d tail"),
        ((*SMALL, "--with-c", "--cluster-n", "2"), "fp8_gemm 64x64/n2 bf16+c tail"),
        (("fp8_gemm", "--config", "64x128 silu by ends", "--set", "n=256"), "fp8_gemm 64x128 silu by ends"),
        (("sum_slices",), "sum_slices bf16"),
        (("k_group_maps", "--set", "ks=(16, 0, 144)"), "k_group_maps maps"),
    ],
)
def test_sim_runs_seeds_and_says_how_far_from_wrong(arguments: tuple[str, ...], name: str) -> None:
    shown = printed("sim", *arguments, "--seeds", "2")
    assert name in shown
    how = r"(to the bit|within 0\.\d+ of the rounding that is allowed), in \S+ s\.\s*$"
    assert re.search(rf"2 of 2 seeds, each with .* gave the right result {how}", shown)


@pytest.mark.host_compiler
@pytest.mark.parametrize(
    ("broken", "by", "says"),
    [
        ("ptx::mbarrier_init(&full[stage], kFullArrivals + more_arrivals);", "", "is not initialized"),
        ("scale[i / 2 % 2], total[i]);", "scale[i / 2 % 2], 0.f);", "elements are wrong, 0 of them NaN; the worst"),
    ],
)
def test_sim_prints_the_command_that_shows_a_failure_again(
    monkeypatch: pytest.MonkeyPatch, broken: str, by: str, says: str
) -> None:
    headers = FP8_GEMM.headers

    def broken_headers(config: GemmConfig) -> dict[str, str]:
        return {name: text.replace(broken, by) for name, text in headers(config).items()}

    monkeypatch.setattr(FP8_GEMM, "headers", broken_headers)
    result = run("sim", *SMALL, "--first-seed", "3", "--set", "num_sms=4", "--fp32", "--with-c", "--cluster-m", "2")
    assert result.exit_code == 1
    assert says in result.output
    assert "m=40, n=72, k=272, seed=3" in result.output
    (again,) = re.findall("again: python -m lab (.*)", result.output)
    assert again == (
        "sim fp8_gemm --set m=40 --set n=72 --set k=272 --set num_sms=4 --block-m 64 --block-n 64 "
        "--cluster-m 2 --cluster-n 1 --cluster-k 1 --fp32 --with-c --first-seed 3 --seeds 1"
    )
    assert run(*again.split()).output == result.output


@pytest.mark.host_compiler
def test_sim_tells_of_its_progress_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "seed 0 passed" not in run("sim", *SMALL, "--seeds", "2").output, "only of what takes long"
    monkeypatch.setattr(sim_command, "SECONDS_BETWEEN_LINES", 0)
    lines = run("sim", *SMALL, "--seeds", "2", "--first-seed", "3").output.splitlines()
    assert [line.split(" s ")[1].split() for line in lines if "/2" in line] == [
        ["1/2", "seed", "3", "passed"],
        ["2/2", "seed", "4", "passed"],
    ]


@pytest.mark.host_compiler
def test_sim_says_what_a_trial_cannot_be() -> None:
    assert "k: expected a multiple of 16, got 100" in printed("sim", *SMALL, "--set", "k=100", code=1)
    shown = printed("sim", *SMALL, "--set", "schedule=slow", code=1)
    assert "schedule: expected one of even, slow_cta, " in shown


def test_sim_without_a_host_compiler_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    library._compiler.cache_clear()
    library._compiler_version.cache_clear()
    result = run("sim", *SMALL)
    assert result.exit_code == 2
    assert result.output == "deep_gemm: the simulator needs g++ (C++20); none was found in PATH\n"


# ---- configs ----------------------------------------------------------------------------------------------------


def test_configs_lists_every_reachable_configuration() -> None:
    result = all_configs()
    assert result.exit_code == 0
    lines = {tuple(line.split()) for line in result.output.splitlines()}
    of_heads = [config for config in reachable_heads() if isinstance(config, GemmConfig)]
    listed = [*reachable(), *reachable_grouped(), *reachable_silu(), *reachable_k_grouped(), *of_heads]
    for config in listed:
        producer, math = map(str, config.registers)
        sizes = [str(config.num_stages), str(config.shared_bytes), str(config.num_threads)]
        assert (*config.name.split(), *sizes, producer, "/", math) in lines
    for decode in reachable_decode():
        sizes = [str(decode.num_stages), str(decode.shared_bytes), str(decode.num_threads)]
        assert (*decode.name.split(), *sizes, str(decode.registers_limit)) in lines
    every = len(listed) - len(of_heads) + len(reachable_decode()) + len(reachable_heads())
    assert f"{every} configurations" in result.output
    kernels = [kernel for name, kernel in all_kernels().items() if "fp8_gemm" not in name]
    others = [(kernel, config) for kernel in kernels for config in kernel.configs()]
    by_name = {line[:-3]: line for line in lines}
    for kernel, of_kernel in others:
        name = (kernel.name, *of_kernel.name.split())
        line = by_name[name]
        plan = kernel.code_plan(of_kernel)
        assert line[-3:-1] == (str(plan.shared_bytes), str(sum(threads for threads, _ in plan.roles)))
    assert f"{len(others)} configurations of the other kernels" in result.output

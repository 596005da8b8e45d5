"""The command line, as a person types it: what it shows, and what it says of mistakes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a plain checkout too

from deep_gemm import demo, inspect_kernels
from deep_gemm.__main__ import app
from deep_gemm.config import GemmConfig
from deep_gemm.gates import GATES
from deep_gemm.heuristics import reachable
from deep_gemm.inspect_kernels import FAMILIES, OPCODES
from deep_gemm.jit import CompilerMissing
from deep_gemm.kernels import fp8_gemm


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})


def words(result: Result) -> str:
    """All that was printed, without what depends on the width of the terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_every_command_is_listed_with_what_it_does() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "inspect", "configs"):
        assert command in result.output


# ---- inspect ----------------------------------------------------------------------------------------------------


def test_inspect_shows_what_a_kernel_is_made_of() -> None:
    result = run("inspect", "fp8_gemm", "--block-m", "256", "--block-n", "128")
    assert result.exit_code == 0
    shown = words(result)
    for fact in (
        "fp8_gemm 256x128 bf16, sm_90a, NVRTC",
        "tile 256 x 128 x 128",
        "registers 168 a thread at launch, 64512 of 65536",
        "then 232 for a math thread, 40 for a producer's",
        "shared memory 217088 of 232448 bytes",
        "ring 3 stages of 50176 bytes",
        "stores 2 buffers of 32768 bytes, 4 panels of 64 x 64 each",
        "ms, cold",
        "each 8 FFMA",
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


def test_inspect_says_where_sass_comes_from_if_it_cannot_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernels, "disassemble", lambda cubin: None)
    result = run("inspect", "--block-m", "64", "--block-n", "16", "--sass")
    assert result.exit_code == 0
    assert "nvdisasm is not on PATH. It comes with the CUDA toolkit" in words(result)


def test_inspect_prints_sass_as_nvdisasm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    line = "        /*0000*/  LDC R1, c[0x0][0x28] ;  [bold] " + "x" * 100
    tool.write_text(f"#!/bin/sh\necho '{line}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert line in run("inspect", "--block-m", "64", "--block-n", "16", "--sass").output


def test_inspect_fails_and_tells_why_where_a_gate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = fp8_gemm.headers

    def without_setmaxnreg(config: GemmConfig) -> dict[str, str]:
        return {name: re.sub(r"ptx::setmaxnreg_\w+<\w+>\(\);", "", text) for name, text in headers(config).items()}

    monkeypatch.setattr(fp8_gemm, "headers", without_setmaxnreg)
    result = run("inspect", "--block-m", "128", "--block-n", "16")
    assert result.exit_code == 1
    assert "128x16 bf16, setmaxnreg as planned: registers are moved between warps (setmaxnreg) to nothing" in words(
        result
    )
    assert "failed" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8_gemm",), "expected fp8_gemm, got int8_gemm"),
        (("--block-m", "100"), "block_m: expected one of [64, 128, 192, 256], got 100"),
        (("--block-n", "100"), "block_n: expected a multiple of 16 from 16 to 256, got 100"),
        (("--block-n", "wide"), "Invalid value for '--block-n'"),
        (("--output", "fp16"), "Invalid value for '--output'"),
        (("--cluster-n", "4"), "256x128/n4 bf16: needs clusters of 1 or 2"),
        (("--adds-to-d",), "needs FP32 output where it is added to D"),
        (("--output", "fp32", "--adds-to-d", "--with-c"), "needs C added in one way, not both"),
        (("--block-n", "256"), "256x256 bf16: needs 320 accumulators in 232 registers"),
    ],
)
def test_inspect_refuses_in_words(arguments: tuple[str, ...], message: str) -> None:
    result = run("inspect", *arguments)
    assert result.exit_code == 2
    assert message in words(result)
    assert "Traceback" not in result.output


def test_inspect_says_what_to_install_where_the_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernels, "compiler_version", _no_compiler)
    result = run("inspect")
    assert result.exit_code == 2
    assert 'Run: pip install "deep_gemm[cu13]"' in words(result)


def test_every_opcode_that_is_shown_has_a_name_in_the_reader() -> None:
    from deep_gemm.jit.cubin import _MNEMONICS

    assert set(OPCODES) <= set(_MNEMONICS.values())


# ---- configs ----------------------------------------------------------------------------------------------------


def test_configs_lists_every_reachable_configuration() -> None:
    result = run("configs")
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    for config in reachable():
        producer, math = map(str, config.registers)
        sizes = [str(config.num_stages), str(config.shared_bytes), str(config.num_threads)]
        assert [*config.name.split(), *sizes, producer, "/", math] in lines
    assert f"{len(reachable())} configurations" in result.output


# ---- demo -------------------------------------------------------------------------------------------------------

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the demo runs the kernels instead")


def _no_compiler() -> str:
    raise CompilerMissing('deep_gemm compiles its kernels at run time. Run: pip install "deep_gemm[cu13]"')


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are test_package's."""
    monkeypatch.setattr(demo, "_show_products", lambda console: True)


@without_gpu
@pytest.mark.usefixtures("no_products")
def test_demo_without_a_gpu_compiles_a_kernel_of_each_kind() -> None:
    result = run("demo")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.output.splitlines()]
    for kind, config in FAMILIES.items():
        (row,) = [row for row in rows if row.startswith(f"{kind} {config.name} ")]
        assert row.endswith(f"{len(GATES)} of {len(GATES)}")
    assert max(map(len, result.output.splitlines())) <= 80


@without_gpu
@pytest.mark.usefixtures("no_products")
def test_demo_without_a_compiler_says_what_to_install_and_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernels, "compiler_version", _no_compiler)
    result = run("demo")
    assert result.exit_code == 0
    assert 'Run: pip install "deep_gemm[cu13]"' in words(result)


@without_gpu
@pytest.mark.usefixtures("no_products")
def test_demo_fails_where_a_kernel_is_not_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_kernels, "FAMILIES", {"decode": FAMILIES["decode"]})
    plan = fp8_gemm.code_plan(FAMILIES["large"])
    monkeypatch.setattr(fp8_gemm, "code_plan", lambda config: plan)
    result = run("demo")
    assert result.exit_code == 1
    assert "64x32 bf16, QGMMA as planned:" in words(result)


@pytest.mark.usefixtures("no_products")
def test_demo_on_a_gpu_shows_products_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert demo.run()
    assert capsys.readouterr().out == ""


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))

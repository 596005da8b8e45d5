"""docs/learn: its code is from the files, its outputs are what commands print, and its kernels compile and run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deep_gemm.core.jit.compiler import compile_cubin
from lab import learn
from lab.__main__ import app
from lab.bench.timing import Spread
from lab.sim import SimulationError
from lab.sim.rounding import TENSOR_CORES

ROOT = Path(__file__).resolve().parents[2]
PRODUCT, OWN = ((ROOT / "docs" / "learn" / f"{name}.md").read_text() for name in ("product", "own"))
EXAMPLE = ROOT / "examples" / "own_kernel.py"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def shown_by(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["learn", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_goes_through_the_whole_product_in_order() -> None:
    lines = "".join(blocks(PRODUCT, "cuda")).splitlines()
    source = learn.SOURCE.read_text().splitlines()
    assert [line for line in lines if line] == [line for line in source if line]
    assert len(source) <= 185


@pytest.mark.host_compiler
def test_the_page_shows_what_the_command_prints() -> None:
    assert shown_by() == blocks(PRODUCT, "text")[0]


@pytest.mark.host_compiler
def test_the_page_shows_what_the_simulator_says_of_each_mistake() -> None:
    shown = blocks(PRODUCT, "text")[1:]
    assert len(shown) == len(learn.BROKEN) == 5
    *mistakes, ending = shown_by("broken").splitlines(keepends=True)
    assert "".join(mistakes) == "".join(
        f"{number}. {mutation.name}\n{text}\n"
        for number, (mutation, text) in enumerate(zip(learn.BROKEN, shown, strict=True), 1)
    )
    assert f"`{ending.strip()}`" in PRODUCT


@pytest.mark.parametrize("step", learn.STEPS, ids=lambda step: step.title)
def test_each_step_compiles_as_planned_and_is_on_the_page(step: learn.Step) -> None:
    compile_cubin(learn.KERNEL.source, learn.KERNEL.headers(step.config), name="product", strict=True)
    assert f"\n| {step.title} |" in PRODUCT


@pytest.mark.host_compiler
@pytest.mark.parametrize("step", learn.STEPS, ids=lambda step: step.title)
def test_each_step_is_right(step: learn.Step) -> None:
    learn.LearnTrial(step.config, (300, 264, 528), num_sms=2 if step.is_persistent else 12).run()


def test_the_commands_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for what, said in (
        ("time", "found no CUDA GPU; these run anywhere: `learn` and `learn broken`"),
        ("tim", "what: expected one of run, broken, time, got 'tim'"),
    ):
        result = CliRunner().invoke(app, ["learn", what])
        assert result.exit_code == 2
        assert said in result.output


@pytest.mark.parametrize("is_right", [True, False])
def test_times_are_printed_of_what_is_right_alone(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print the table of a GPU's run, but compute on the CPU with made-up times."""
    of, d_of = learn.problem, {}

    def calls(p: Any) -> list[tuple[str, Any]]:
        right = learn.right_and_allowed(*learn.TIMED, "cpu", TENSOR_CORES)[0]
        d_of["d"] = right.bfloat16() if is_right else right.bfloat16() * 1.5
        return [(step.title, lambda: p.d.copy_(d_of["d"])) for step in learn.STEPS]

    monkeypatch.setattr(learn, "TIMED", (128, 256, 512))
    monkeypatch.setattr(learn, "problem", lambda m, n, k, device="cpu": of(m, n, k))
    monkeypatch.setattr(learn, "calls", calls)
    monkeypatch.setattr(learn, "L2Flush", lambda: None)
    monkeypatch.setattr(learn, "cold", lambda named, *_: {name: (Spread(1.0, 1.0, 1.0), ()) for name in named})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    result = CliRunner().invoke(app, ["learn", "time"])
    assert result.exit_code == (0 if is_right else 1), result.output
    assert ("a CTA for each SM" in result.output) == is_right
    assert bool(re.search(r"^one slot.*: \d+ of 32768 elements are wrong", result.output)) == (not is_right)
    assert max(map(len, result.output.splitlines())) <= 80 or not is_right


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(learn.STEPS)))
@pytest.mark.parametrize("mnk", [(300, 264, 528), (1, 24, 2048), (4096, 2112, 7168)])
def test_each_step_is_right_on_a_gpu(number: int, mnk: tuple[int, int, int]) -> None:
    p = learn.problem(*mnk, "cuda")
    _, call = list(learn.calls(p))[number]
    p.d.fill_(float("nan"))
    call()
    learn.checked(p.d, p, TENSOR_CORES)


# ---- A kernel of your own


def test_the_page_shows_the_example() -> None:
    text = EXAMPLE.read_text()
    shown = [*blocks(OWN, "cuda"), *blocks(OWN, "python")]
    assert len(shown) == 3
    assert [block for block in shown if block not in text] == []


def test_the_kernel_of_the_example_compiles_for_a_gpu() -> None:
    example = runpy.run_path(str(EXAMPLE))
    kernel, config = example["KERNEL"], example["CONFIG"]
    compile_cubin(kernel.source, kernel.headers(config), name=kernel.name, strict=True)


@pytest.mark.host_compiler
def test_the_page_shows_what_the_example_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == blocks(OWN, "text")[0]


@pytest.mark.host_compiler
def test_the_page_shows_what_the_simulator_says_of_the_mistake(tmp_path: Path) -> None:
    guard = "  if (row >= p.rows) return;\n"
    broken = tmp_path / "own_kernel.py"
    assert EXAMPLE.read_text().count(guard) == 1
    broken.write_text(EXAMPLE.read_text().replace(guard, ""))
    with pytest.raises(SimulationError) as raised:
        runpy.run_path(str(broken))["row_amax"](torch.randn(37, 500))
    assert f"row_amax: {raised.value.what}\n" == blocks(OWN, "text")[1]

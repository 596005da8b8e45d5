"""The programs in examples/ run, on the CPU and on a GPU, and what they print is right."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def printed_by(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def error_in(out: str) -> float:
    return float(re.findall(r"relative error beside BF16: ([\d.]+)", out)[0])


def test_a_model_with_fp8_layers_is_near_the_one_in_bf16(printed_by: Callable[[str], str]) -> None:
    out = printed_by("linear_in_a_model")
    before, after = map(int, re.findall(r"(\d+) (?:bytes )?in", out))
    assert after < 0.51 * before
    assert 0.01 < error_in(out) < 0.07


def test_a_mixture_of_experts_is_near_the_one_in_bf16(printed_by: Callable[[str], str]) -> None:
    assert 0.01 < error_in(printed_by("mixture_of_experts")) < 0.08


def test_each_experts_rows_are_near_their_own_product(printed_by: Callable[[str], str]) -> None:
    lines = printed_by("grouped_product").splitlines()
    assert len(lines) == 4
    assert all(float(line.split()[-1]) < 1e-3 for line in lines)


def test_a_choice_is_shown_for_each_batch(printed_by: Callable[[str], str]) -> None:
    lines = printed_by("which_tile").splitlines()
    assert sum(line.startswith("m = ") for line in lines) == 6
    assert sum("  chosen" in line for line in lines) == 1


def test_every_example_has_a_test() -> None:
    tests = sorted(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for example in EXAMPLES.glob("*.py"):
        named = re.compile(rf'"{example.stem}(\.py)?"')
        assert any(named.search(text) for text in tests), example.name

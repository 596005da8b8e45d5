"""The programs in examples/ run, and what they print is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def error_in(out: str) -> float:
    return float(re.findall(r"relative error beside BF16: ([\d.]+)", out)[0])


def test_a_model_with_fp8_layers_is_near_the_one_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed_by("linear_in_a_model", capsys)
    before, after = map(int, re.findall(r"(\d+) (?:bytes )?in", out))
    assert after < 0.51 * before
    assert 0.01 < error_in(out) < 0.07


def test_a_mixture_of_experts_is_near_the_one_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0.01 < error_in(printed_by("mixture_of_experts", capsys)) < 0.08


def test_each_experts_rows_are_near_their_own_product(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("grouped_product", capsys).splitlines()
    assert len(lines) == 4
    assert all(float(line.split()[-1]) < 1e-3 for line in lines)


def test_a_choice_is_shown_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("which_tile", capsys).splitlines()
    assert sum(line.startswith("m = ") for line in lines) == 6
    assert sum(line.endswith("chosen") for line in lines) == 1


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(
        re.findall(r'printed_by\("(\w+)"', Path(__file__).read_text())
    )

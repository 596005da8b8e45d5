"""A small transformer with experts learns in FP8 as in BF16, and a transformer with wrong gradients is detected."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import module_of, some

pytestmark = pytest.mark.release

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_small.py"
example = module_of(EXAMPLE)
SMALL = example.SIZES["small"]


@pytest.fixture(scope="module")
def bf16() -> list[float]:
    curve: list[float] = example.train_bf16(SMALL)
    return curve


def compared(bf16: list[float], fp8: list[float]) -> Any:
    return example.Comparison(SMALL, bf16, fp8, example.best_loss(SMALL))


def test_fp8_learns_as_bf16_does(bf16: list[float], tmp_path: Path) -> None:
    found = compared(bf16, example.train_fp8(SMALL))
    assert found.why_not() is None
    for step in range(0, example.STEPS, example.LAST):  # at every step, not only at the end
        means = [sum(curve[step : step + example.LAST]) / example.LAST for curve in (found.bf16, found.fp8)]
        assert abs(means[0] - means[1]) < 0.05, step
    example.draw(found, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 10_000


def shift_gradients_of_experts(model: Any) -> None:
    """Pass each expert the gradient of its neighbour."""
    for block in model.blocks:
        block.experts.w1.register_hook(lambda grad: grad.roll(1, 0))


def freeze_experts(model: Any) -> None:
    for block in model.blocks:
        block.experts.requires_grad_(False)


@pytest.mark.parametrize("change", [shift_gradients_of_experts, freeze_experts])
def test_a_model_with_wrong_gradients_is_found_out(bf16: list[float], change: Any) -> None:
    """Train in BF16, which is faster: the test looks only at learning curves, not at the type used in training."""
    found = compared(bf16, example.train_bf16(SMALL, change=change))
    assert found.apart > 5 * example.TOLERANCE
    reason = some(found.why_not())
    assert reason.startswith("FP8 ends at")


def test_curves_that_only_seem_to_agree_are_refused() -> None:
    guess = [2.77] * example.STEPS
    assert compared(guess, guess).why_not().startswith("BF16 learned too little")
    assert compared([1.2] * 300, [float("nan")] * 300).why_not().startswith("FP8 ends at nan")
    assert compared([1.2] * 300, [1.17] * 300).why_not() is not None, "a better curve is as suspicious as a worse one"
    assert compared([1.2] * 300, [1.21] * 300).why_not() is None


def test_the_best_possible_loss_is_that_of_the_data() -> None:
    follows = example.chain(SMALL, 0)
    assert torch.allclose(follows.sum(-1), torch.ones(()))
    assert (follows > 0).sum(-1).unique().tolist() == [4]
    tokens = torch.cat(list(example.batches(SMALL, 200, 0)))
    of_next = follows[tokens[:, :-2].flatten(), tokens[:, 1:-1].flatten(), tokens[:, 2:].flatten()]
    assert abs(-of_next.log().mean().item() - example.best_loss(SMALL)) < 0.05


def test_the_command_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "curves.json"
    monkeypatch.setattr(sys, "argv", ["train_small.py", "--steps", "30", "--save", str(path)])
    with pytest.raises(SystemExit, match="BF16 learned too little"):
        example.main()
    assert [len(curve) for curve in list(json.loads(path.read_text()).values())[:2]] == [30, 30]
    assert "   30 " in capsys.readouterr().out


@pytest.mark.gpu
def test_a_larger_one_learns_on_a_gpu() -> None:
    size = example.SIZES["large"]
    curves = [run(size, device="cuda") for run in (example.train_bf16, example.train_fp8)]
    assert example.Comparison(size, *curves, best=example.best_loss(size)).why_not() is None

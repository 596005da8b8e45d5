"""Converted models together with torch's ways to share work among processes (ranks.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from nn_cases import said_by_ranks
from thorough import up_to

WAYS = ["ddp", "fsdp", "experts_across", "tensor_parallel", "logprobs"]


def test_two_processes_have_what_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said_by_ranks("tests/nn/ranks.py", *WAYS) == ["".join(f"{way}: same\n" for way in WAYS)] * 2


def gpus() -> int:
    """Return four if the machine has four GPUs, else two if it has two, else one."""
    return next(count for count in (4, 2, 1) if torch.cuda.device_count() >= count)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_gpus_have_what_one_has(way: str) -> None:
    ranks = gpus()
    assert said_by_ranks("tests/nn/ranks.py", way, ranks=ranks) == [f"{way}: same\n"] * ranks


EXAMPLE = Path("examples") / "train_fsdp2.py"


def learns(ranks: int, steps: int = 60) -> None:
    shorter = f"from examples import train_fsdp2 as example; example.STEPS = {steps}; example.main()"
    out, *_ = said_by_ranks(*([str(EXAMPLE)] if steps == 60 else ["-c", shorter]), ranks=ranks)
    assert out.startswith("in FP8: 94.0% of 209,152 parameters\nlayers converted to FP8: 6, left: 2\n")
    *curves, in_bf16 = (float(loss) for loss in re.findall(r" (\d+\.\d\d)\b", out))
    plain, in_fp8 = curves[::2], curves[1::2]
    assert len(plain) == len(in_fp8) == steps // 10
    assert plain[0] > 2
    assert max(plain[-1], in_fp8[-1], in_bf16) < (0.2 if steps == 60 else 1.5)
    assert abs(plain[-1] - in_fp8[-1]) < 0.05


def test_the_example_learns_and_gives_its_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    learns(2, up_to(60, 20))


def test_two_ranks_sample_and_train_with_the_same_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = "from examples import exact_rl as example; example.STEPS = 2; example.STEPS_WITHOUT = 1; example.main()"
    out, other = said_by_ranks("-c", program)
    assert re.findall(r"^on +\d+ +\d\.\d+ +(\S+)$", out, re.MULTILINE) == ["0.00e+00"] * 2
    assert other == ""


@pytest.mark.gpu
def test_the_example_learns_on_gpus() -> None:
    learns(gpus())

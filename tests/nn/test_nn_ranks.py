"""Converted models in company of torch's ways to share work among processes (ranks.py)."""

from __future__ import annotations

import pytest
import torch
from nn_cases import said_by_ranks

WAYS = ["ddp", "fsdp", "tensor_parallel"]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_have_what_one_has(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said_by_ranks("tests/nn/ranks.py", way) == ["same\n"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_gpus_have_what_one_has(way: str) -> None:
    """Two if there are two, else one."""
    ranks = min(torch.cuda.device_count(), 2)
    assert said_by_ranks("tests/nn/ranks.py", way, ranks=ranks) == ["same\n"] * ranks

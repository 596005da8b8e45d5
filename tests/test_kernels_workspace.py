"""Workspaces, on the CPU: who shares room and counters with whom."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deep_gemm.kernels import workspace
from deep_gemm.kernels.workspace import ARENA_BYTES, COUNTER_BYTES, Workspaces

ROOM = 1000


class OnCpu(Workspaces):
    @property
    def _place(self) -> torch.device:
        return torch.device("cpu")


class Stream:
    is_capturing = False
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: stream.is_capturing, current_stream=lambda device: stream
    )
    monkeypatch.setattr(workspace, "torch", SimpleNamespace(**vars(torch) | {"cuda": cuda}))
    return stream


def test_launches_on_a_stream_share_a_workspace_and_streams_do_not(stream: Stream) -> None:
    of = OnCpu(0)
    first = of.of_launch(1, ROOM, 8)
    assert of.of_launch(1, ROOM - 1, 16) == first
    other = of.of_launch(2, ROOM, 8)
    assert other[0] != first[0]
    assert abs(other[1] - first[1]) == COUNTER_BYTES
    assert of.of_launch(1, 2 * ROOM, 8)[1] == first[1]
    assert stream.waits == 1  # for the zeros, which all streams use


def test_a_launch_that_is_captured_shares_counters_with_nobody(stream: Stream) -> None:
    of = OnCpu(0)
    seen = {of.of_launch(1, ROOM, 8)[1]}
    stream.is_capturing = True
    for _ in range(5):
        _, counters = of.of_launch(1, ROOM, 8)
        assert counters not in seen
        seen.add(counters)
    assert stream.waits == 1  # a capture may not wait


def test_zeros_that_a_graph_sets_take_the_place_of_counters_that_are_not_there(stream: Stream) -> None:
    made = []

    class Zeros(OnCpu):
        def _zeros(self) -> torch.Tensor:
            made.append(super()._zeros())
            return made[-1]

    of = Zeros(0)
    stream.is_capturing = True
    assert of.of_launch(1, ROOM, 8)[1] == made[0].data_ptr()
    assert not made[0].any()
    stream.is_capturing = False
    for each in range(ARENA_BYTES // COUNTER_BYTES + 1):
        of.of_launch(each, 1, 8)
    assert len(made) == 2
    assert of.of_launch(ARENA_BYTES // COUNTER_BYTES, 1, 8)[1] == made[1].data_ptr()


def test_more_counters_than_there_are(stream: Stream) -> None:
    with pytest.raises(ValueError, match="counter_bytes: expected at most 1024, got 1028"):
        OnCpu(0).of_launch(1, ROOM, COUNTER_BYTES + 4)
    assert workspace.workspaces_of(3) is workspace.workspaces_of(3)

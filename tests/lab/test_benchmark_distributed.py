"""`bench distributed`: two processes over Gloo on this machine, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_docs import script

from lab.bench import command
from lab.bench.distributed import COMBINE, DISPATCH, GROUP, GROUP_FIXED, LAYER, MEGA
from lab.bench.distributed_training import routes_of_all
from lab.bench.layers import ALONE
from lab.bench.report import Report

SHAPE = (4, 2, 6, 256, 128, 1)
STEP = SHAPE[:5]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the processes that it starts see none either
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_two_processes_measure_the_layer_and_its_ways(
    no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.json"
    assert command.run("distributed", shapes="4,2,6,256,128,1; 4,2,6,256,128", processes=2, out=path, commit="abc")
    rows = Report.load(path).rows
    assert {(row.kind, row.contender) for row in rows} == {
        *((LAYER, name) for name in (GROUP, GROUP_FIXED, MEGA, ALONE)),
        *((kind, name) for kind in (DISPATCH, COMBINE) for name in (GROUP, GROUP_FIXED)),
        *(("ep_step", name) for name in (GROUP, ALONE)),
    }
    for row in rows:
        assert (
            row.shape == (STEP if row.kind == "ep_step" else SHAPE)
            and row.config == "2 processes"
            and row.failed is None
        )
        assert row.us_min and row.us and row.us_max and 0 < row.us_min <= row.us <= row.us_max
    assert "ep_combine" in capsys.readouterr().out


def test_routes_are_different_experts_and_skew_prefers_few() -> None:
    even, skewed = (routes_of_all(64, 4, 500, skew, processes=2) for skew in (0, 1))
    for routes in (even, skewed):
        assert routes.shape == (1000, 4)
        assert all(len(set(row)) == 4 for row in routes.tolist())
    most = [int(torch.bincount(routes.flatten(), minlength=64).max()) for routes in (even, skewed)]
    assert most[0] < 100 and most[1] > 500  # 62.5 on average; a third of 4000 draws want the first, 1000 get it at most
    assert torch.equal(even, routes_of_all(64, 4, 500, 0, processes=2))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "dense", "processes": 2}, "--processes is for bench distributed"),
        ({"kind": "distributed"}, "found none; --quick and --shapes run anywhere"),
        ({"kind": "distributed", "quick": True, "processes": 0}, "processes: expected at least 1, got 0"),
        ({"kind": "distributed", "shapes": "8,2,8"}, "five or six integers, of which the last may be 0, like 256,6,"),
        ({"kind": "distributed", "shapes": "5,2,6,256,128,0"}, "expected experts for 2 processes to share"),
        ({"kind": "distributed", "quick": True, "only": "torch"}, "only: expected some of nccl, nccl_fixed"),
    ],
)
def test_what_cannot_be_measured_is_refused(no_gpu: None, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(command.UsageError, match=re.escape(says)):
        command.run(**arguments)  # type: ignore[arg-type]


def test_the_time_line_of_a_call_is_drawn_from_its_record(tmp_path: Path) -> None:
    timeline = script("draw_timeline")
    seen = [("fill", 5.0, 1.0), ("ncclDevKernel_AllReduce", 6.0, 1.0), ("post_rows", 8.0, 2.0), ("fp8_gemm", 10.0, 3.0)]
    assert timeline.behind_all_reduce(seen) == [("post_rows", 0.0, 2.0), ("fp8_gemm", 2.0, 3.0)]
    timeline.draw(tmp_path / "line.png")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")

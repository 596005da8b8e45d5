"""Yardsticks: what DeepGEMM's times of another day are scaled by, and that a run on another GPU shows none of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.bench import yardsticks
from lab.bench.report import HEADER_KEYS, Report
from lab.bench.timing import L2Flush, Spread
from lab.bench.yardsticks import COPY, PRODUCT, Yardsticks

THAT_DAY = Yardsticks("NVIDIA H200", 256.22, 1400.71)


@pytest.mark.parametrize(
    ("kind", "shape", "us"),
    [
        ("mqa_logits", (2048, 8192, 64, 128), 224.61),
        ("mqa_logits_clean", (2048, 32768, 64, 128), 954.31),
        ("paged_mqa_logits", (64, 2, 64, 128, 8192), 27.01),
        ("paged_metadata", (4, 1, 131072), 2.69),
        ("fp8_einsum", (4, 8, 4096, 1024), 16.67),
        ("hc_prenorm", (4096, 24, 7168, 16), 34.24),
        ("skip_head_mid", (128, 32768, 512), 11.49),
        ("bf16_dense", (8192, 8192, 8192), 1376.86),
        ("bf16_masked", [32, 192, 4096, 7168], 655.23),
    ],
)
def test_on_the_day_of_the_anchors_upstream_takes_what_it_took(kind: str, shape: tuple[int, ...], us: float) -> None:
    assert THAT_DAY.upstream_us(kind, shape) == pytest.approx(us)


def test_the_yardstick_of_what_limits_a_shape_scales_it() -> None:
    slow_memory, slow_arithmetic = replace(THAT_DAY, copy_us=2 * 256.22), replace(THAT_DAY, bf16_dense_us=2 * 1400.71)
    assert slow_memory.upstream_us("skip_head_mid", (128, 32768, 512)) == pytest.approx(2 * 11.49)
    assert slow_arithmetic.upstream_us("skip_head_mid", (128, 32768, 512)) == pytest.approx(11.49)
    assert slow_memory.upstream_us("mqa_logits", (2048, 8192, 64, 128)) == pytest.approx(224.61)
    assert slow_arithmetic.upstream_us("mqa_logits", (2048, 8192, 64, 128)) == pytest.approx(2 * 224.61)


def test_no_figure_stands_where_none_was_measured() -> None:
    assert replace(THAT_DAY, gpu="NVIDIA H100 80GB HBM3").upstream_us("skip_head_mid", (128, 32768, 512)) is None
    assert replace(THAT_DAY, gpu=None).upstream_us("skip_head_mid", (128, 32768, 512)) is None
    assert THAT_DAY.upstream_us("skip_head_mid", (129, 32768, 512)) is None
    assert THAT_DAY.upstream_us("dense", (128, 32768, 512)) is None


def test_every_row_of_the_family_names_a_yardstick_that_was_timed() -> None:
    family = yardsticks._family()
    assert {row["by"] for row in family["rows"]} <= set(family["yardsticks"]) == {COPY, PRODUCT}
    assert tuple(family["yardsticks"][COPY]["shape"]) == yardsticks.COPY_SHAPE
    assert tuple(family["yardsticks"][PRODUCT]["shape"]) == yardsticks.PRODUCT_SHAPE
    assert all(row["us"] > 0 for row in family["rows"])
    assert len(yardsticks._times()) == len(family["rows"])


def test_a_result_file_gives_its_yardsticks_back(tmp_path: Path) -> None:
    rows = yardsticks.rows_of({COPY: Spread(250.0, 249.0, 251.0), PRODUCT: Spread(1400.0, 1390.0, 1410.0)})
    header = dict.fromkeys(HEADER_KEYS, "") | {"machine": {"gpu": "NVIDIA H200"}, "stopped": None}
    Report(header, rows).save(tmp_path / "file.json")
    assert yardsticks.yardsticks_of(Report.load(tmp_path / "file.json")) == Yardsticks("NVIDIA H200", 250.0, 1400.0)
    assert yardsticks.yardsticks_of(Report(header, rows[:1])) is None


@pytest.mark.gpu
def test_both_are_timed_on_a_gpu() -> None:
    rows = yardsticks.measure(L2Flush())
    assert [row.kind for row in rows] == [COPY, PRODUCT]
    header = {"machine": {"gpu": torch.cuda.get_device_name()}}
    found = yardsticks.yardsticks_of(Report(header, rows))
    assert found is not None
    assert 100 < found.copy_us < 1000
    assert 500 < found.bf16_dense_us < 4000

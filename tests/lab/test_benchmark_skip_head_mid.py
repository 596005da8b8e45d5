"""The benchmark of products into heads, all of it that needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_gemm
from lab.bench import skip_head_mid as bench
from lab.bench.contenders import OURS
from lab.bench.layers import ALONE
from lab.bench.timing import Spread

SHAPE = (3, 512, 256)


def test_the_anchors_shapes_are_measured() -> None:
    assert set(bench.shapes_of(quick=True)) <= set(bench.shapes_of())
    assert {(128, 32768, 512), (4096, 32768, 512)} <= set(bench.shapes_of())


def test_a_right_result_passes_and_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)  # numbers of which no product is by chance what stands in D
    product = bench.IntoHeads(SHAPE, "cpu")
    assert product.wrong() is None
    right = deep_gemm.fp8_gemm_nt_skip_head_mid

    def touches(a: Any, b: Any, d: torch.Tensor, splits: Any) -> None:
        right(a, b, d, splits)
        d[1, 128] = 0

    monkeypatch.setattr(bench, "fp8_gemm_nt_skip_head_mid", touches)
    assert product.wrong() == "wrong: 1 elements between parts were written"
    monkeypatch.setattr(bench, "fp8_gemm_nt_skip_head_mid", lambda *_: None)
    assert (product.wrong() or "").startswith("wrong: 1536 elements differ")


def test_rows_have_both_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cold", lambda calls, *_: {name: (Spread(2.0, 1.0, 3.0), ("kernel",)) for name in calls})
    product: Any = bench.IntoHeads(SHAPE, "cpu")
    flush: Any = None
    ours, alone = bench.rows_of(product, flush, ())
    assert (ours.kind, ours.shape, ours.contender, ours.failed) == ("skip_head_mid", SHAPE, OURS, None)
    assert (alone.contender, alone.us, alone.operations) == (ALONE, 2.0, 2 * 3 * 512 * 256)
    assert [row.contender for row in bench.rows_of(product, flush, (ALONE,))] == [ALONE]


@pytest.mark.gpu
def test_a_shape_is_measured_on_a_gpu() -> None:
    rows: list[Any] = []
    bench.measure([(128, 8192, 512)], add=rows.extend, announce=lambda _: None)
    assert [row.kind for row in rows] == ["copy", "bf16_dense", "skip_head_mid", "skip_head_mid"]
    assert [row.failed for row in rows] == [None] * 4

"""The parts of benches of FP4 weights and fine scales that need no GPU. These benches have rivals of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import some
from test_benchmark import measured, pretend_gpu

from lab.bench import fine, fp4, products, tune, yardsticks
from lab.bench.bulk_read import READ
from lab.bench.cases import FINE_DENSE, FP4_DENSE, Case
from lab.bench.contenders import BF16, OURS, Contender
from lab.bench.report import HEADER_KEYS, Report
from lab.bench.timing import KernelEvent, L2Flush, Spread
from lab.bench.yardsticks import COPY, PRODUCT, Yardsticks

SMALL: Mapping[str, tuple[int, ...]] = {
    FP4_DENSE: (5, 64, 288),
    "fp4_masked": (3, 4, 64, 288),
    "fp4_contiguous": (3, 7, 64, 288),
    FINE_DENSE: (5, 64, 288),
    "fine_masked": (3, 4, 64, 288),
}
RIVALS = {
    FP4_DENSE: (fp4.HUMMING, "humming-kernels is not installed: pip install humming-kernels==0.1.19"),
    FINE_DENSE: (fine.TRITON, "no transformers with a Triton kernel: pip install transformers==5.3.0"),
}
"""The rival from another package, and the reason that is printed if that package is not installed."""
OWN = {fp4: (OURS, fp4.FP8, READ), fine: (fine.USUAL, *fine.SAID, BF16)}
"""Contenders that need no other package."""


def small_case(kind: str) -> Case:
    (case,) = products.cases_of(kind, shapes=[SMALL[kind]])
    return case


def contenders(kind: str) -> dict[str, Contender]:
    return {each.name: each for each in products.WITH_OWN_RIVALS[kind].contenders_of(small_case(kind), "cpu")}


def scaled(contender: Contender) -> torch.Tensor:
    return contender.call() * 1.01


@pytest.mark.parametrize("kind", SMALL)
def test_every_case_is_one_that_products_take_and_few_are_some_of_all(kind: str) -> None:
    found = products.cases_of(kind)
    for case in found:
        *_, n, k = case.shape
        assert n % 8 == 0 and k % 16 == 0
        assert len(case.sizes) == (0 if kind.endswith("_dense") else case.shape[0])
        assert max(case.sizes, default=0) <= case.max_m or kind.endswith("contiguous")
    shapes = [case.shape for case in found]
    assert shapes == list(dict.fromkeys(shapes))
    assert 0 < len(products.cases_of(kind, quick=True)) < len(found)
    assert sum(len(products.cases_of(kind, is_judged=part)) for part in (False, True)) == len(found)


@pytest.mark.parametrize("kind", SMALL)
def test_shapes_may_be_new_and_of_as_many_numbers_as_the_kind_has(kind: str) -> None:
    assert small_case(kind).is_judged is None
    with pytest.raises(ValueError, match=rf"shapes: expected \(.*m, n, k\) for bench {kind}|expected \(groups, rows"):
        products.cases_of(kind, shapes=[(1, 2)])


@pytest.mark.parametrize("kind", SMALL)
def test_products_are_right_and_a_wrong_one_is_noticed(kind: str) -> None:
    found, own = contenders(kind), OWN[products.WITH_OWN_RIVALS[kind]]
    assert list(found) == [*own, *RIVALS.get(kind, ())[:1]]
    for name in own:
        error, why = products.checked(found[name], products.MAX_ERROR_BF16)
        assert why is None and error is not None and (error > 0) == (name != READ)
        if name.startswith(OURS):
            nearly = replace(found[name], call=partial(scaled, found[name]))
            assert "wrong: relative error" in str(products.checked(nearly, products.MAX_ERROR_BF16)[1])


@pytest.mark.parametrize("kind", RIVALS)
def test_a_rival_that_is_not_there_is_left_out_in_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    name, why = RIVALS[kind]
    assert products.checked(contenders(kind)[name], 1.0) == (None, f"NotImplementedError: {why}")


@pytest.mark.parametrize("kind", SMALL)
def test_a_run_measures_keeps_and_shows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    module, compiled = products.WITH_OWN_RIVALS[kind], []
    kernels = (KernelEvent("cast", 0, 20), KernelEvent("product", 30, 80))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(products, "recorded", lambda calls, *_: {name: [kernels] for name in calls})
    monkeypatch.setattr(products, "made", lambda case: list(contenders(case.kind).values()))
    monkeypatch.setattr(tune, "compile_all", lambda configs, announce: compiled.append(configs))
    report, output = measured(tmp_path, kind, "--quick", "--commit", "abc")
    assert compiled == [[]]
    rows: list[Any] = [row for row in report.rows if not row.failed]
    assert {row.contender for row in rows} == set(OWN[module])
    assert len(rows) == len(OWN[module]) * len(module.QUICK[kind])
    assert all(row.bytes and row.fast_shape is None for row in rows)
    assert {row.shape for row in rows if row.is_judged} <= {
        case.shape for case in products.cases_of(kind, is_judged=True)
    }
    assert f"{kind} on " in output and "geometric means of ratios" in output
    assert all((why in " ".join(output.split())) == (kind == of) for of, (_, why) in RIVALS.items())
    assert module.METHOD in report.header["method"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SMALL)
def test_a_run_on_a_gpu(kind: str) -> None:
    rows = products.cold_rows(replace(small_case(kind), shape=(*SMALL[kind][:-2], 256, 512)), L2Flush(), 3)
    assert {row.contender for row in rows if row.us} >= set(OWN[products.WITH_OWN_RIVALS[kind]])
    assert all(row.failed is None for row in rows if row.contender.startswith(OURS))


# Yardsticks scale DeepGEMM's times of another day. A run on another GPU must show none of these times.


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
    found = some(yardsticks.yardsticks_of(Report(header, rows)))
    assert 100 < found.copy_us < 1000
    assert 500 < found.bf16_dense_us < 4000

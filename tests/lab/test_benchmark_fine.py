"""`bench fine_dense` and `fine_masked`, what needs no GPU of them."""

from __future__ import annotations

import importlib.util
import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from test_benchmark import invoke, pretend_gpu

import deep_gemm
from deep_gemm.core.check.recipes import BLOCKS_OF_32, BLOCKS_OF_64, MX, PER_64, PER_BLOCK, PER_ROW
from deep_gemm.core.gpu import GPUS
from lab.bench import fine, products, table, tune
from lab.bench.cases import FINE_DENSE, FINE_KINDS, Case
from lab.bench.contenders import BF16, OURS, Contender
from lab.bench.report import Report, Row
from lab.bench.timing import L2Flush

SMALL = {FINE_DENSE: (5, 64, 288), "fine_masked": (3, 4, 64, 288)}
OF_OURS = [fine.USUAL, *fine.SAID]


def small_case(kind: str) -> Case:
    (case,) = products.cases_of(kind, shapes=[SMALL[kind]])
    return case


def contenders(kind: str) -> dict[str, Contender]:
    return {each.name: each for each in fine.contenders_of(small_case(kind), "cpu")}


def scaled(contender: Contender) -> torch.Tensor:
    return contender.call() * 1.01


def test_weights_are_those_of_ranks_that_share_a_model_and_most_of_them_judge() -> None:
    found = products.cases_of(FINE_DENSE)
    shapes = [case.shape for case in found]
    assert shapes == list(dict.fromkeys(shapes))
    weights = {shape[1:] for shape in shapes}
    assert weights >= {(4608, 5120), (5120, 2304), (576, 5120), (5120, 288), (3072, 3072), (384, 3072), (3072, 192)}
    assert {case.shape[1:] for case in found if not case.is_judged} == fine.FITTED
    assert {shape[0] for shape in shapes} == set(fine.MS)
    assert all(n % 8 == 0 and k % 16 == 0 for n, k in weights)


@pytest.mark.parametrize("kind", FINE_KINDS)
def test_few_cases_are_some_of_all_and_shapes_may_be_new(kind: str) -> None:
    found = products.cases_of(kind)
    assert 0 < len(products.cases_of(kind, quick=True)) < len(found)
    assert sum(len(products.cases_of(kind, is_judged=part)) for part in (False, True)) == len(found)
    assert max(max(case.sizes, default=0) for case in found) <= found[0].max_m
    assert small_case(kind).is_judged is None
    with pytest.raises(ValueError, match=rf"shapes: expected \(.*m, n, k\) for bench {kind}|expected \(groups, rows"):
        products.cases_of(kind, shapes=[(1, 2)])


def test_contenders_are_named_by_their_scales() -> None:
    of_a_and_b = list(fine.SIDES.values())
    assert of_a_and_b == [
        (PER_ROW, PER_BLOCK),
        (PER_ROW, BLOCKS_OF_32),
        (MX, BLOCKS_OF_32),
        (PER_64, BLOCKS_OF_64),
        (MX, MX),
    ]
    for name, (_, of_b) in fine.SIDES.items():
        assert name.split("_")[2] == f"{of_b.rows}x{of_b.columns}"


@pytest.mark.parametrize("kind", FINE_KINDS)
def test_products_are_right_and_each_wrong_one_is_noticed(kind: str) -> None:
    found = contenders(kind)
    assert list(found) == [*OF_OURS, BF16, *([fine.TRITON] if kind == FINE_DENSE else [])]
    for name in (*OF_OURS, BF16):
        error, why = products.checked(found[name], products.MAX_ERROR_BF16)
        assert why is None and error is not None and 0 < error < products.MAX_ERROR_BF16
    for name in OF_OURS:
        nearly = replace(found[name], call=partial(scaled, found[name]))
        assert "wrong: relative error" in str(products.checked(nearly, products.MAX_ERROR_BF16)[1])


def test_scales_of_fine_weights_are_powers_of_two_that_fold() -> None:
    by_scales = fine.weights_of(1, 256, 512, "cpu").by_scales
    for of, (_, scales) in by_scales.items():
        exponents = scales.log2()
        assert bool((exponents == exponents.round()).all()) == (of != PER_BLOCK)
        if of != PER_BLOCK:
            blocks = exponents.view(*exponents.shape[:-1], -1, 128 // of.columns)
            assert (blocks.amax(-1) - blocks.amin(-1)).max() <= 2


def test_a_rival_that_is_not_there_is_left_out_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, SimpleNamespace()):  # none, and one that loads its kernels from a hub
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=module: found)
        monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", module)
        error, why = products.checked(contenders(FINE_DENSE)[fine.TRITON], 1.0)
        assert error is None
        assert why == ("NotImplementedError: no transformers with a Triton kernel: pip install transformers==5.3.0")


def test_the_rival_is_given_the_same_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: Any, b: Any, sa: Any, sb: Any, block_size: list[int], dtype: torch.dtype) -> torch.Tensor:
        assert a.is_contiguous() and b.is_contiguous() and block_size == [32, 32]
        x, w = (deep_gemm.cast_back_from_fp8(*each, 32) for each in ((a, sa), (b, sb)))
        return (x @ w.t()).to(dtype)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    rival = SimpleNamespace(w8a8_block_fp8_matmul_triton=multiply)
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", rival)
    assert contenders(FINE_DENSE)[fine.TRITON].error() < products.MAX_ERROR_BF16


def test_what_a_run_needs_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.configurations(products.cases_of(FINE_DENSE)) == []  # of a GPU that is not there nothing is known
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(products, "get_num_sms", lambda: GPUS[0].num_sms)
    found = products.configurations(products.cases_of(FINE_DENSE))
    assert len(set(found)) == len(found)
    assert {(config.sfa, config.sfb) for config in found} == set(fine.SIDES.values())
    case = products.cases_of(FINE_DENSE)[0]
    assert all(products.config_of(case, name) in found for name in OF_OURS)
    assert products.config_of(case, BF16) is None
    assert products.configurations(products.cases_of("fine_masked")) == []


@pytest.mark.parametrize("kind", FINE_KINDS)
def test_a_run_measures_keeps_and_shows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    compiled: list[Any] = []
    monkeypatch.setattr(tune, "compile_all", lambda configs, announce: compiled.append(configs))
    monkeypatch.setattr(products, "made", lambda case: list(contenders(case.kind).values()))
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", SimpleNamespace())
    out = tmp_path / "result.json"
    code, output = invoke("bench", kind, "--quick", "--out", str(out), "--commit", "abc")
    assert code == 0, output
    assert compiled == [[]]
    report = Report.load(out)
    rows = [row for row in report.rows if not row.failed]
    assert {row.contender for row in rows} == {*OF_OURS, BF16}
    assert len(rows) == 6 * len(fine.QUICK[kind])
    assert all(row.bytes and row.fast_shape is None for row in rows)
    assert {row.shape for row in rows if row.is_judged} <= {
        case.shape for case in products.cases_of(kind, is_judged=True)
    }
    assert f"{kind} on " in output
    assert "geometric means of ratios" in output
    assert ("no transformers with a Triton kernel" in output) == (kind == FINE_DENSE)
    assert "fine scales: normal numbers" in report.header["method"]


@pytest.mark.parametrize("kind", FINE_KINDS)
def test_tables_fit_80_columns(kind: str) -> None:
    us = dict(
        zip((*OF_OURS, BF16, fine.TRITON), (1000.5, 1500.75, 2001.0, 500.25, 3001.5, 1334.0, 6003.0), strict=True)
    )
    rows = [
        Row(kind, case.shape, name, "cold", us=us[name], is_judged=case.is_judged)
        for case in products.cases_of(kind)
        for name in us
    ]
    report = Report({"kind": kind, "commit": "0", "machine": {"gpu": "NVIDIA H100", "cpu": ""}}, rows)
    console = Console(width=80, record=True, file=io.StringIO())
    table.print_report(report, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    whole = "x".join(map(str, rows[-1].shape))
    line = next(line for line in lines if line.startswith(whole)).split()
    assert line[1:] == ["1000.5", "1334.0", "1500.8", "1.50", "2001.0", "2.00", "500.2", "0.50", "3001.5", "3.00"]
    means = [line.split() for line in lines if line.split()[-3:] == ["1.50", "1.12", "0.25"]]
    assert {each[-5] for each in means} == {"judged", "fitted"}
    assert any(each[:3] == ["32x32", "by", "1x128"] for each in means)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FINE_KINDS)
def test_a_run_on_a_gpu(kind: str) -> None:
    rows = products.cold_rows(replace(small_case(kind), shape=(*SMALL[kind][:-2], 256, 288)), L2Flush(), 3)
    assert {row.contender for row in rows if row.us} >= {*OF_OURS, BF16}
    assert all(row.failed is None for row in rows if row.contender.startswith(OURS))

"""Dense cases that nothing was tuned to: by which rule they are there, and which part of them is judged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from deep_gemm.cli.models import BLOCK
from lab.bench import command, machine
from lab.bench.cases import RESULTS_FOLDER, all_cases, cases_of, grid_cases, tuned_weights
from lab.bench.compare import comparisons, summaries
from lab.bench.contenders import FAST, OURS
from lab.bench.grid import GROUPED_KINDS, MS, MS_OF_A_WEIGHT, all_weights, expert_weights
from lab.bench.report import Report, Row
from lab.bench.timing import Spread
from lab.bench.tune_fit import Collected


def test_new_weights_meet_all_sizes_of_batch() -> None:
    shapes = [case.shape for case in grid_cases() if case.kind == "dense"]
    assert len(shapes) == len(set(shapes))
    weights = {shape[1:] for shape in shapes}
    assert weights <= set(all_weights())
    assert not weights & tuned_weights()
    counts = Counter(shape[0] for shape in shapes)
    assert set(counts) == set(MS)
    assert max(counts.values()) - min(counts.values()) <= 3
    assert max(Counter(shape[1:] for shape in shapes).values()) == MS_OF_A_WEIGHT
    assert sum(m & (m - 1) != 0 for m in MS) > len(MS) / 2  # most are no powers of two
    ns, ks = {n for n, _ in weights}, {k for _, k in weights}
    assert min(ns) <= 512 and max(ns) >= 28672 and min(ks) <= 512 and max(ks) >= 14336


def test_no_choice_was_fitted_to_a_judged_weight() -> None:
    """Neither by the benchmark's cases nor by the times of the cost model, of which a part is held back."""
    judged = {case.shape for case in grid_cases() if case.is_judged}
    files = map(Collected.load, RESULTS_FOLDER.glob("tune-*"))
    fitted = [each for file in files for each in file.products if each.is_fitted]
    assert not {shape[1:] for shape in judged if len(shape) == 3} & {(each.n, each.k) for each in fitted}
    assert {(each.n, each.k) for each in fitted} <= tuned_weights()
    assert {(576, 7168), (7168, 2048), (2112, 4096), (4096, 7168)} <= tuned_weights()  # the last two by groups too


def test_groups_are_of_every_kind_and_of_experts_in_use() -> None:
    groups = [case for case in grid_cases() if case.kind != "dense"]
    counts = Counter((case.kind, case.is_judged) for case in groups)
    assert min(counts[kind, True] for kind in GROUPED_KINDS) >= 8
    weights = set(expert_weights())
    for case in groups:
        n, k = case.shape[1:3] if case.kind == "k_grouped" else case.shape[2:]
        assert (case.shape[0], n, k) in weights
        assert (n, k) not in tuned_weights()
        assert len(case.sizes) == case.shape[0]
        if case.kind == "contiguous_uneven":
            assert sum(case.sizes) == case.shape[1]
            assert max(case.sizes) > 2 * min(case.sizes)
        assert max(case.sizes) <= case.max_m or case.kind != "masked"
        assert case.kind != "k_grouped" or case.shape[3] % BLOCK == 0
    assert {case.shape for case in cases_of("grouped", is_judged=True)} > {c.shape for c in groups if c.is_judged}


def test_a_weight_is_either_fitted_or_judged() -> None:
    dense = [case for case in grid_cases() if case.kind == "dense"]
    parts = {part: {case.shape[1:] for case in dense if case.is_judged is part} for part in (False, True)}
    assert not parts[False] & parts[True]
    assert 3 * len(parts[False]) < len(parts[True]) < 6 * len(parts[False])
    assert not any(case.is_judged for case in all_cases())


def test_parts_make_up_all_dense_cases() -> None:
    fitted, judged = (cases_of("dense", is_judged=part) for part in (False, True))
    assert all(case.is_judged for case in judged)
    assert set(fitted) | set(judged) == set(cases_of("dense"))
    assert len(fitted) + len(judged) == len(cases_of("dense"))


def test_the_field_survives_a_file_and_old_files_have_none(tmp_path: Path) -> None:
    judged = next(case for case in grid_cases() if case.is_judged)
    rows = [Row.of(case, OURS, "cold", Spread(2.0, 1.0, 3.0)) for case in (judged, all_cases()[0])]
    Report(machine.header("dense", "as usual", "abc"), rows).save(tmp_path / "f.json")
    assert [row.is_judged for row in Report.load(tmp_path / "f.json").rows] == [True, False]
    text = json.loads((tmp_path / "f.json").read_text())
    for row in text["rows"]:
        del row["is_judged"]
    (tmp_path / "old.json").write_text(json.dumps(text))
    assert [row.is_judged for row in Report.load(tmp_path / "old.json").rows] == [None, None]


def test_means_of_what_is_judged_stand_apart() -> None:
    def rows(shape: tuple[int, ...], us: float, *, is_judged: bool | None) -> list[Row]:
        return [
            Row("dense", shape, name, "cold", us=took, fast_shape=shape, is_judged=is_judged)
            for name, took in ((OURS, us), (FAST, 10.0))
        ]

    header = {"machine": {"gpu": "NVIDIA H200"}}
    few, many, known = (16, 512, 1024), (1000, 512, 1024), (17, 512, 2048)
    report = Report(
        header, [*rows(few, 8, is_judged=True), *rows(many, 12.5, is_judged=True), *rows(known, 20, is_judged=False)]
    )
    found = {each.regime: each for each in summaries(comparisons(report))}
    assert found["judged, dense"].count == 2
    assert found["judged, dense"].to_fast == pytest.approx(1.0)
    assert found["judged, m <= 128"].to_fast == pytest.approx(0.8)
    assert found["judged, m > 128"].to_fast == pytest.approx(1.25)
    assert found["dense, m <= 128"].to_fast == pytest.approx(2.0)
    worst = found["judged, dense"].worst
    assert worst is not None and worst.row.shape == many


def test_a_part_is_of_products_alone() -> None:
    with pytest.raises(command.UsageError, match="--part chooses among all cases of bench dense, grouped, fp4_dense"):
        command.run("casts", part="judged")
    with pytest.raises(command.UsageError, match="expected one of fitted, judged, got 'best'"):
        command.run("dense", part="best")

"""A smaller run of the tests leaves out only combinations of values, and no value."""

from __future__ import annotations

import re
from itertools import combinations, product
from types import SimpleNamespace

from conftest import by_family
from thorough import covering, values

from deep_gemm.linear import kernel as linear_decode
from lab.configs import reachable_dense as reachable


def test_every_feature_of_any_case_occurs_among_the_few() -> None:
    cases = list(product(range(5), "ab", range(3)))
    few = covering(cases, enumerate)
    assert len(few) == 5
    assert few == [case for case in cases if case in few]
    assert {pair for case in few for pair in enumerate(case)} == {pair for case in cases for pair in enumerate(case)}


def test_a_fourth_of_the_configurations_has_every_two_settings_that_occur_together() -> None:
    def pairs(config: object) -> set[object]:
        return set(combinations(vars(config).items(), 2))

    few = covering(reachable(), pairs)
    assert len(few) < len(reachable()) / 4
    assert set().union(*map(pairs, few)) == set().union(*map(pairs, reachable()))


def test_settings_inside_of_a_setting_count_one_by_one() -> None:
    found = [set(values(config)) for config in linear_decode.reachable_linear()]
    assert {("tile.block_tokens", 8), ("tile.block_tokens", 16)} <= set().union(*found)
    assert "tile" not in {name for each in found for name, _ in each}


def test_a_run_ends_with_what_ran_of_each_family_and_what_did_not_and_why() -> None:
    report = SimpleNamespace(nodeid="tests/gemm/rows/test_a.py::test", longrepr=("a.py", 1, "Skipped: needs g++"))
    stats = {"passed": [report] * 2, "failed": [report], "skipped": [report]}
    told = {line.split()[0]: line for line in by_family(stats, {"gemm": 5}, has_gpu=False)}
    left_out = "5 left out: DG_TEST_ALL=1 runs them; 8 of test_gpu_*.py not collected: no Hopper GPU"
    assert re.sub(" +", " ", told["gemm"]) == f"gemm 3 ran; 1 skipped: needs g++; {left_out}"
    assert told["nn"].split() == ["nn", "0", "ran"]
    assert "test_gpu" not in " ".join(by_family(stats, {}, has_gpu=True))

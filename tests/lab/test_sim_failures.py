"""Each mistake of a kernel ends with a message that names the mistake, its place, and a hanging kernel's waits."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pytest
import torch
from sim_cases import case_names, cases_file, run_case

from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from lab.sim import SimulationError

pytestmark = pytest.mark.host_compiler

CASES = cases_file("failures.cuh")
FAILURES = {name: words for words, name in re.findall(r"((?:^// .+\n)+)(?:\w+_)?CASE\((\w+)\)", CASES, re.MULTILINE)}
LARGER: dict[str, Any] = {"in_map": TensorMap(ElementType.FLOAT32, (32, 64), (512,), (32, 8), 128)}
LARGER |= {"data": torch.zeros(100 * 4)}
OPTIONS: dict[str, dict[str, Any]] = {"tma_map_larger_than_the_tensor": LARGER}
"""Launches that a line of failures.cuh cannot describe."""


@pytest.mark.parametrize("name", case_names(CASES))
def test_failure_is_named(name: str) -> None:
    words, _, options = FAILURES[name].replace("\n// ", " ").removeprefix("// ").strip().partition(" with {")
    how = json.loads(f"{{{options}") if options else OPTIONS.get(name, {})
    with pytest.raises(SimulationError, match=words) as caught:
        run_case(CASES, name, **how)
    assert "again with seed=" in str(caught.value)


def test_an_error_comes_whole_from_another_process() -> None:
    error = SimulationError("kernel", "broke a rule", "seed 3")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error) == "kernel: broke a rule\n(again with seed 3)"
    assert copied.what == "broke a rule"

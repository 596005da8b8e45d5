"""The list of all kernels, which tools loop over: no kernel is missing, and each is found by name and inspected."""

from __future__ import annotations

import re

import pytest
from test_cli import run, words

from deep_gemm.core.sources import PACKAGE
from lab.gates import GATES
from lab.kernels import all_kernels, config_named, kernel_named

KERNELS = all_kernels()


def test_no_kernel_is_missing() -> None:
    begin = re.compile(r'\bKERNEL(_NAME)?\(|#include "fp8_gemm.cuh"')  # bf16_gemm.cuh is that file with other operands
    assert {path.stem for path in PACKAGE.glob("*/*.cuh") if begin.search(path.read_text())} == KERNELS.keys()


def test_kernels_and_configurations_are_found_by_name() -> None:
    for name, kernel in KERNELS.items():
        configs = kernel.configs()
        assert kernel_named(name).configs() == configs
        assert len({config.name for config in configs}) == len(configs)
        assert config_named(kernel, None) == configs[0]
        assert config_named(kernel, configs[-1].name) == configs[-1]


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_can_be_inspected(name: str) -> None:
    config = KERNELS[name].configs()[-1].name
    result = run("inspect", name, "--config", config, program="lab")
    assert result.exit_code == 0, result.output
    assert words(result).startswith(f"{name} {config}, sm_90a, NVRTC")
    assert result.output.count("passed") == len(GATES)

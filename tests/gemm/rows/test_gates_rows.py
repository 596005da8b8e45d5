"""Every kernel for grouped rows that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from helpers import gemm_report
from thorough import configurations

from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.kernel import KERNEL as FP8_GEMM
from deep_gemm.gemm.rows.choose import reachable_grouped, reachable_silu
from lab.gates import violations

CONFIGS = [*reachable_grouped(), *reachable_silu()]


def test_all_have_names_of_their_own() -> None:
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize("config", configurations(CONFIGS), ids=lambda config: config.name)
def test_a_kernel_for_grouped_rows_is_what_was_planned(config: GemmConfig) -> None:
    assert violations(gemm_report(config), FP8_GEMM.code_plan(config)) == []

"""The parts of the run under compute-sanitizer that need no GPU: its edits of sources, and its reading of reports."""

from __future__ import annotations

import pytest
from sanitized_gpu import EVERY_LANE_ARRIVES, edited_sources, reports_of

from lab.sim.trial import Trial
from lab.sim.trials import TRIALS

EDITED = "experts_few", "gather_weighted_many", "fp8_gemm", "bf16_gemm", "fp8_mqa_logits", "fp8_paged_mqa_logits"

SAID = """========= COMPUTE-SANITIZER
========= Error: Potential WAR hazard detected at __shared__ 0x35090 in block (2,0,0) :
=========     Read Thread (63,0,0) at fp8_gemm_dense+0x970
=========     Write Thread (160,0,0) at fp8_gemm_dense+0x5500
=========     Current Value : 68, Incoming Value : 0
=========
========= Error: Potential WAR hazard detected at __shared__ 0x35091 in block (2,0,0) :
=========     Read Thread (63,0,0) at fp8_gemm_dense+0x970
=========     Write Thread (160,0,0) at fp8_gemm_dense+0x5500
=========
========= Invalid __global__ read of size 16 bytes
=========     at cast_rows+0x44c0
=========     by thread (301,0,0) in block (31,0,0)
=========
========= ERROR SUMMARY: 3 errors
"""


def test_edits_occur_once() -> None:
    assert edited_sources().keys() == EVERY_LANE_ARRIVES.keys()


@pytest.mark.parametrize(
    "kind", [each for each in TRIALS if each.kernel.name in EDITED], ids=lambda kind: kind.__name__
)
def test_edited_kernels_end_with_the_right_results(kind: type[Trial]) -> None:
    """A barrier that expects more arrivals than come never ends a phase. Each set of a kernel's warps is tried."""
    roles = "convert_warps", "scaling_warps", "storing_warps", "scales"
    configs = filter(kind.takes, kind.kernel.configs())
    for config in {tuple(getattr(each, role, None) for role in roles): each for each in configs}.values():
        trial = kind.drawn(config, 1)
        trial.run({**trial.headers(), **edited_sources()})


def test_reports_are_counted_by_what_they_say_and_by_kernel() -> None:
    assert reports_of(SAID) == {
        "Error: Potential WAR hazard detected: fp8_gemm_dense": 2,
        "Invalid __global__ read of size 16 bytes: cast_rows": 1,
    }

"""Each gate on machine code fails for a kernel that breaks the gate's rule: only machine code shows a spill."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import gemm_report

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.cubin import report
from deep_gemm.core.kernel import CodePlan, Kernel
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.hyper.kernel import KERNEL as HC_PRENORM
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.indexer.config import InPages, InRows, logits_config
from deep_gemm.indexer.kernel import IN_PAGES, IN_ROWS
from lab.gates import GATES, verdicts, violations

# ---- each gate fails on a kernel that breaks its rule -----------------------------------------------------------

PLAIN = tile_config(128, 64, Output())
CLUSTER = tile_config(128, 64, Output(), cluster_n=2)
ADDING = tile_config(128, 64, Output(is_fp32=True, adds_to_d=True))
ADDS_C = next(config for config in BF16_GEMM.configs() if config.with_c and config.cluster_k == config.slices == 1)
HC: dict[str, Any] = {"kernel": HC_PRENORM, "config": HcConfig(128, 24, 2), "file": "hc_prenorm.cuh"}
MQA: dict[str, Any] = {"kernel": IN_ROWS, "config": logits_config(64, 128, 4, InRows())}
PAGED: dict[str, Any] = {"kernel": IN_PAGES, "config": logits_config(64, 128, 4, InPages(2, 64))}
MULTIPLY = "ptx::wgmma_m64k128_e4m3<kUnitN, kExponentBitsOfB>(partial, a_low, b_low)"
OF_SUMS, OF_A = "promote(total[unit_of_piece<kOfUnit>(piece)], partial[", "      ptx::tma_load_2d(&p.map_a"
OF_B, ADDS_UP = "shared.b[at.stage]", "if constexpr (kAddsToD)\n    ptx::tma_reduce_add_3d"
NOTE, MAIN, LOOP = "no C75xx note", "mainloop.cuh", "#pragma unroll 1\n  for (; k_block != end"
OF_LOGITS = "ptx::wgmma_wait_group<kInFlight < kLag ? kInFlight : kLag>();"
NO_REGISTERS = {"ptx::setmaxnreg_inc<kMathRegisters>();": ""}


@dataclass(frozen=True)
class Break:
    """A kernel that breaks its plan, by an edit of a source or by a configuration that the rules refuse."""

    gate: str
    """The gate that must fail; empty if the gates allow the kernel."""
    words: str
    """Part of the gate's message."""
    config: Any = PLAIN
    file: str = "fp8_gemm.cuh"
    edits: Mapping[str, str] = field(default_factory=dict)
    kernel: Kernel[Any] = FP8_GEMM


BREAKS = {
    "more accumulators than registers": Break(
        "no local memory", "values that should be in registers", replace(tile_config(128, 256, Output()), unit_n=256)
    ),
    "an array indexed by what is unknown at compile time": Break(
        "no stack",
        "an array is indexed by what is unknown",
        tile_config(256, 64, Output()),
        file=MAIN,
        edits={OF_SUMS: OF_SUMS.replace("unit_of_piece<kOfUnit>(piece)", "ptx::lane_index() % kUnitsPerWarpgroup")},
    ),
    "accumulators read before the wait": Break(
        NOTE,
        "registers of a running WGMMA are used before wgmma.wait_group",
        file=MAIN,
        edits={
            "      if (i < kCount * kPieces) ptx::wgmma_wait_group<kLag>(); else ptx::wgmma_wait_group<0>();\n": "",
            "ptx::lane_index(), loaded); });\n": "ptx::lane_index(), loaded); });\n      ptx::wgmma_wait_group<0>();\n",
        },
    ),
    "accumulators touched between two products": Break(
        NOTE, "products (WGMMA) wait for each other", file=MAIN, edits={MULTIPLY: f"{MULTIPLY}, partial[0] += 1"}
    ),
    "a k loop unrolled twice": Break(
        "QGMMA as planned", "the k loop is unrolled or copied", file=MAIN, edits={LOOP: LOOP.replace("1", "2")}
    ),
    "half of the products left out": Break(
        "QGMMA as planned",
        "8 tensor core instructions (QGMMA) where 16 were planned",
        file=MAIN,
        edits={
            MULTIPLY: "for (uint32_t k = 0; k < 64; k += 32) ptx::wgmma_m64k32_e4m3<kUnitN>(partial, "
            "ptx::smem_descriptor_from_low(a_low + k / 16), ptx::smem_descriptor_from_low(b_low + k / 16), k != 0)"
        },
    ),
    "no setmaxnreg": Break(
        "setmaxnreg as planned",
        "(setmaxnreg) to nothing a thread where [40, 232] was planned",
        edits=NO_REGISTERS | {"ptx::setmaxnreg_dec<kProducerRegisters>();": ""},
    ),
    "setmaxnreg for the math warps alone": Break(
        "setmaxnreg as planned", "to [232] a thread", edits={"    ptx::setmaxnreg_dec<kProducerRegisters>();\n": ""}
    ),
    "setmaxnreg that the compiler ignores": Break(
        NOTE, "registers are not moved", edits={"KERNEL(kNumThreads, 1)": 'extern "C" __global__ void'}
    ),
    "launch bounds for fewer threads": Break(
        "registers suffice", "the launch would fail", edits={"KERNEL(kNumThreads, 1)": "KERNEL(kNumThreads / 2, 1)"}
    ),
    "launch bounds for more blocks": Break(
        "registers suffice", "would wait for ever", edits={"KERNEL(kNumThreads, 1)": "KERNEL(kNumThreads, 2)"}
    ),
    "a stage too many": Break(
        "shared memory fits", "more than the 232448 that a block may have", replace(PLAIN, num_stages=10)
    ),
    "a static array in shared memory": Break(
        "shared memory fits",
        "bytes of shared memory are static",
        edits={
            "  Tiles tiles(p, shared.roles.work);\n": "  __shared__ uint32_t m[32];\n  m[threadIdx.x % 32] = p.m;\n"
            "  __syncthreads();\n  Tiles tiles(p, shared.roles.work);\n  tiles.rows = m[threadIdx.x / 32];\n"
        },
    ),
    "no load of the scales": Break(
        "TMA loads as planned",
        "2 TMA loads (UTMALDG) where 3 were planned",
        file="operand.cuh",
        edits={
            "load_box<false>(&p.map_sfa, slot.full, slot.scales, tile.row_m, k_block * kScaleParts, planes...);": ""
        },
    ),
    "a cluster that does not share": Break(
        "TMA loads as planned",
        "0 TMA loads to all CTAs of a cluster (multicast) where 1 were planned",
        CLUSTER,
        file="operand.cuh",
        edits={"if constexpr (kSharers > 1)": "if constexpr (false)"},
    ),
    "multicast without a cluster": Break(
        "TMA loads as planned",
        "1 TMA loads to all CTAs of a cluster (multicast) where 0 were planned",
        file="operand.cuh",
        edits={"if constexpr (kSharers > 1)": "if constexpr (kRows == 128)"},
    ),
    "overwriting where it should add": Break(
        "TMA stores as planned",
        "D would be overwritten where it is to be added to",
        ADDING,
        file="epilogue/panels.cuh",
        edits={ADDS_UP: ADDS_UP.replace("kAddsToD", "false")},
    ),
    "a panel not stored": Break(
        "TMA stores as planned",
        "part of D would not be written",
        tile_config(128, 128, Output()),
        file="epilogue/store.cuh",
        edits={"const uint32_t d_column =": "if (i != 0) continue;\n          const uint32_t d_column ="},
    ),
    "bf16_gemm: sums that C was added to are not let go": Break(
        NOTE, "C7515", ADDS_C, "mainloop_of_slice.cuh", {"kWithC || kMayBeEmpty": "kMayBeEmpty"}, BF16_GEMM
    ),
    "hc_prenorm: no wait": Break(NOTE, "C75", **HC, edits={"    ptx::wgmma_wait_group<0>();\n": ""}),
    "hc_prenorm: A is not loaded": Break(
        "TMA loads as planned", "TMA loads", **HC, edits={OF_A: OF_A.replace("ptx", "if (false) ptx")}
    ),
    # the first unit's sums are read while its product still runs
    "fp8_mqa_logits: no wait": Break(
        NOTE, "C7517", **MQA, file="logits/tiles.cuh", edits={OF_LOGITS: "if (kUnit) ptx::wgmma_wait_group<0>();"}
    ),
    "fp8_mqa_logits: no setmaxnreg": Break(
        "setmaxnreg as planned", "setmaxnreg", **MQA, file="fp8_mqa_logits.cuh", edits=NO_REGISTERS
    ),
    "fp8_paged_mqa_logits: no wait": Break(
        NOTE, "C75", **PAGED, file="logits/tiles.cuh", edits={OF_LOGITS: "ptx::wgmma_wait_group<1>();"}
    ),
    "fp8_paged_mqa_logits: no setmaxnreg": Break(
        "setmaxnreg as planned", "setmaxnreg", **PAGED, file="fp8_paged_mqa_logits.cuh", edits=NO_REGISTERS
    ),
    "hc_prenorm: the first block of B": Break(
        "", "", **HC, edits={f"{OF_B}, k_block * kBlockK, unit.row_n);": f"{OF_B}, 0, unit.row_n);"}
    ),
    "fp8_mqa_logits: other keys": Break(
        "", "", **MQA, file="logits/tiles.cuh", edits={"kBlock * work.step,\n": "kBlock * 64,\n"}
    ),
}


@pytest.mark.parametrize("config", [PLAIN, CLUSTER, ADDING], ids=lambda config: config.name)
def test_the_kernels_that_are_broken_below_are_sound_before(config: GemmConfig) -> None:
    assert violations(gemm_report(config), FP8_GEMM.code_plan(config)) == []


@pytest.mark.parametrize("name", BREAKS)
def test_a_gate_refuses(name: str) -> None:
    broken = BREAKS[name]
    headers = broken.kernel.headers(broken.config)
    for before, after in broken.edits.items():
        assert headers[broken.file].count(before) == 1, f"{broken.file} has changed: where is {before!r}?"
        headers[broken.file] = headers[broken.file].replace(before, after)
    kernel = compile_cubin(broken.kernel.source, headers, name="broken")
    found = verdicts(report(kernel.cubin, kernel.log), broken.kernel.code_plan(broken.config))
    told = {verdict.gate.name: "\n".join(verdict.problems) for verdict in found}
    assert broken.words in told[broken.gate] if broken.gate else not any(told.values()), told


def test_every_gate_is_shown_to_refuse_something() -> None:
    assert {broken.gate for broken in BREAKS.values() if broken.gate} == {gate.name for gate in GATES}


def test_a_math_warpgroup_that_asks_for_more_than_was_given_would_wait() -> None:
    plan = FP8_GEMM.code_plan(PLAIN)
    greedy = replace(plan, roles=((128, 40), (256, 240)))
    told = violations(replace(gemm_report(PLAIN), setmaxnreg=frozenset({40, 240})), greedy)
    assert told == [
        "setmaxnreg asks for 128 x 40 + 256 x 240 = 66560 registers where the launch gave 64512: "
        "the last warps to ask would wait for ever"
    ]


def test_the_documentation_lists_every_gate_in_order() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "jit.md").read_text()
    rows = re.findall(r"^\| (.+?) \|", text.split("## Gates")[1].split("\n## ")[0], re.MULTILINE)
    assert rows == ["gate", *(gate.name for gate in GATES)]


# ---- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (
            tile_config(64, 16, Output()),
            CodePlan(((128, 40), (128, 248)), 0, qgmma=16, tma_loads=3, multicast_loads=0, tma_stores=1),
        ),
        (
            tile_config(256, 128, Output(is_fp32=True), cluster_m=2),
            CodePlan(((128, 40), (256, 232)), 0, qgmma=16, tma_loads=3, multicast_loads=1, tma_stores=4),
        ),
        (
            tile_config(192, 128, Output(is_fp32=True, adds_to_d=True)),
            CodePlan(((128, 32), (384, 160)), 0, qgmma=8, tma_loads=3, multicast_loads=0, tma_reduces=2),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, GemmConfig) else "",
)
def test_a_plan_follows_from_the_configuration(config: GemmConfig, plan: CodePlan) -> None:
    assert FP8_GEMM.code_plan(config) == replace(plan, shared_bytes=config.shared_bytes)

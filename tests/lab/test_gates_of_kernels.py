"""Every kernel is compiled for the configurations that can be chosen, and its machine code follows its plan.

`MORE` holds rules of single kernels in addition to their plans. `sampled` selects the configurations to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_loads_nothing_early
from thorough import covering, one_in, sample, values

from deep_gemm.casts.cast_depths import DepthsCastConfig, Source
from deep_gemm.casts.cast_rows import MAX_GROUPS, PIECES, CastConfig, Groups
from deep_gemm.casts.cast_tiles import Grain, TileCastConfig, turns_blocks
from deep_gemm.casts.lay_scales import ScalesConfig
from deep_gemm.casts.rules import AMAX_OF_TENSOR, BF16, PER_TENSOR
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.core.jit.cubin import KernelReport, read_kernels, report
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.kinds.works import IDS
from deep_gemm.gemm.softmax_piece import SoftmaxConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from deep_gemm.kernels import KERNELS, ORDINARY
from lab.gates import violations
from lab.kernels import compiled

MOST_CONFIGURATIONS = {"fp8_gemm": 2063, "fp8_gemm_decode": 850}
FEW = 12
"""A kernel with at most this number of configurations is compiled for all of them."""
ALIKE = "bf16_gemm"
"""A kernel with more than a thousand configurations: every value of every field is enough, even for a release."""
TIGHT = {"fp8_mqa_logits 8x128 bf16", "fp8_mqa_logits 8x128 bf16 compressed"}
"""Configurations that are always compiled, because they are the only two that have spilled."""


def sampled(kernel: Kernel[Any]) -> Sequence[Any]:
    """Return configurations with each value of each field in each kind (every second outside of CI), and `TIGHT`."""
    configs = kernel.configs()
    if len(configs) <= FEW:
        return list(configs)
    chosen = set(one_in(2, covering(configs, values) if kernel.name == ALIKE else sample(configs, kind)))
    return [config for config in configs if config in chosen or f"{kernel.name} {config.name}" in TIGHT]


def kind(config: Any) -> list[Any]:
    """Return a configuration's kind: the work and the epilogue of a product, the groups of a cast."""
    return [getattr(config, name, None) for name in ("work", "epilogue", "groups")]


# ---- rules of single kernels beyond their plans -------------------------------------------------------------------


def cast_of_rows(config: CastConfig, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    of_row = 4 if config.vector == 1 else 1
    ways = 2 * (config.to.format != BF16)  # a unit of rows has code for ordinary values and code for any values
    is_given, is_amax = config.to == PER_TENSOR, config.to == AMAX_OF_TENSOR
    # If a team casts a whole row, registers hold PIECES pieces. Loops read the others: for the amax, and for each way.
    loops = 0 if not config.lanes else 1 if is_given or is_amax else 1 + ways
    units = PIECES + loops if config.lanes else config.rows
    if config.activates:
        of_row = 2 * of_row + 1  # gate, up, and the row's weight
    if config.to_routes:
        stores = (PIECES + 1 if config.lanes else 1) * ways
        of_row += (
            0 if config.lanes else 1 + max(2 * ways, 1)
        )  # the first routes, and the further routes for values and for scales
    groups = MAX_GROUPS // config.num_threads
    of_sizes = {Groups.NONE: 0, Groups.UNTIL: 1, Groups.COUNTS: groups, Groups.ENDS: 2 * groups}
    of_team = is_given + (1 + stores + 1 if config.lanes and config.to_routes else 0)
    yield found.counts["LDG"] == units * of_row + of_sizes[config.groups] + of_team, "each element is loaded once"
    # MUFU computes reciprocals and powers of two. Code for a scale has one. An activated element has two in code with a
    # limit and weights, two in code without, six in code with bounds of gate and up. A group's division has one.
    elements = units * max(config.vector, 4) if config.activates else 0
    of_groups = 0 if config.groups in (Groups.NONE, Groups.UNTIL) else groups
    if not (is_given or is_amax):
        yield found.counts["MUFU"] == ways + 10 * elements + of_groups, "no element is divided"


def cast_of_tiles(config: TileCastConfig, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    of_columns = config.grain == Grain.CHANNELS or (config.column_bytes > 0 and not turns_blocks(config))
    # Code for ordinary tiles and code for others load each amax. With small blocks, a thread has two columns' scales.
    amaxes = of_columns * 2 * (2 if config.block < SCALE_BLOCK // 2 else 1)
    loads = {8: 8, 4: 16, 1: 64}[config.vector]
    yield found.counts["LDG"] == loads + amaxes, "each element and each column's amax is loaded once"
    # A thread computes one scale for its row and one for its column, in code for ordinary tiles and for any tiles.
    yield found.counts["MUFU"] <= 8, "no element is divided; a thread has up to 64"


def cast_of_depths(config: DepthsCastConfig, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    rows = 8 if config.dtype != torch.float32 else 16
    is_at_once = config.source == Source.SILU_AT_ONCE
    # Each row's token and weight. SiLU loads gate, up and ds for the gradient and the activation. SILU_AT_ONCE copies
    # these three to shared memory, and a lane loads the weight of one row.
    of_row = {Source.TOKENS: 2, Source.WEIGHTED: 3, Source.SILU: 2 * 3 + 1}.get(config.source, 0)
    loads = rows * of_row + is_at_once
    if config.source == Source.SILU_ROWS:
        loads = 2 * (3 + 1)  # two rows at a time
    yield found.counts["LDG"] == loads + 2, "each element is loaded once, and each thread loads two ends"
    yield found.counts["LDGSTS"] == 3 * rows * is_at_once, "gate, up and ds are copied once"
    # A sigmoid has two MUFU; gradient and activation compute it separately. SILU_AT_ONCE loops over pairs of rows.
    sigmoids = {Source.SILU: 2 * 64, Source.SILU_AT_ONCE: 2 * 8, Source.SILU_ROWS: 2 * 8}.get(config.source, 0)
    yield found.counts["MUFU"] <= 2 * sigmoids + 16, "no element is divided"


def scales(config: ScalesConfig, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    each = config.rows * config.blocks // config.num_threads
    moves = [found.counts[opcode] for opcode in ("LDG", "STS", "LDS", "STG")]
    yield moves == [each] * 4, "each scale is loaded once, passes shared memory once, and is stored once"


def softmax(config: SoftmaxConfig, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    numbers, others = (3, 0) if config.is_backward else (2, 2)  # forward has a logarithm and a quotient
    yield found.counts["LDG"] == 4 + numbers, "each logit is loaded once, four at a time"
    yield found.counts["MUFU"] == 16 + others, "each logit has one exponential"
    yield found.counts["STG"] == (4 if config.is_backward else 2), "a gradient is written once, four at a time"


def decode(config: Any, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    # A release at cluster scope is a barrier for the whole GPU, half a microsecond. Only the zeros of padding need one.
    yield found.counts["MEMBAR"] == (config.work is IDS), "a cluster's sums are sent without a release"


def sums(config: Any, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    yield found.counts["FFMA"] == 0, "no addition is fused"


def few_rows(config: HcFewConfig, found: KernelReport, cubin: bytes) -> Iterator[tuple[bool, str]]:
    (code,) = read_kernels(cubin)
    mnemonics = [instruction.mnemonic for instruction in code.instructions]
    wait, products = mnemonics.index("ACQBULK"), mnemonics.index("HMMA")
    loads = config.ahead * (2 + config.block_n // 8 * 2)
    yield "LDG" not in mnemonics[:wait], "rows are loaded after the wait for the kernel ahead"
    yield mnemonics[wait:products].count("LDG") == loads, "many rows are loaded at a time"
    yield mnemonics.count("LDG") == 2 * loads, "no row is loaded twice"
    yield mnemonics.count("HMMA") == config.ahead * config.block_n // 8 * 4, "the code has each product once"


MORE: dict[str, Callable[[Any, KernelReport, bytes], Iterator[tuple[bool, str]]]] = {
    "cast_rows": cast_of_rows,
    "cast_tiles": cast_of_tiles,
    "cast_depths": cast_of_depths,
    "fp8_gemm_decode": decode,
    "lay_scales": scales,
    "softmax_piece": softmax,
    "gather_weighted": sums,
    "gather_weighted_many": sums,
    "hc_prenorm_few": few_rows,
}

CASES = {f"{kernel.name} {config.name}": (kernel, config) for kernel in KERNELS for config in sampled(kernel)}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_configurations_are_few_legal_and_have_names_of_their_own(kernel: Kernel[Any]) -> None:
    configs = kernel.configs()
    assert 0 < len(configs) <= MOST_CONFIGURATIONS.get(kernel.name, len(configs))
    assert [config for config in configs if config.why_illegal()] == []
    assert len({config.name for config in configs}) == len(configs)


def test_tight_configurations_are_tried() -> None:
    assert CASES.keys() >= TIGHT


@pytest.mark.parametrize("case", CASES)
def test_machine_code_is_what_was_planned(case: str) -> None:
    kernel, config = CASES[case]
    built = compiled(kernel, config)
    found = report(built.cubin, built.log)
    problems = violations(found, kernel.code_plan(config))
    told = "".join(f"\n  - {problem}" for problem in problems)
    assert not problems, (
        f"{case} compiles, but its machine code is not as planned:{told}\n"
        f"To inspect it: python -m lab inspect {kernel.name} --config '{config.name}'"
    )
    if kernel in ORDINARY and not getattr(config, "is_second", False):  # the second product loads weights early
        assert_loads_nothing_early(built)
    if kernel.name in MORE:
        assert [why for holds, why in MORE[kernel.name](config, found, built.cubin) if not holds] == []

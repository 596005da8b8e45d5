"""Products of grouped rows whose results go each to an address of its own: gemm/epilogue/store_rows.cuh.

The table of addresses takes the place of D among the operands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.check.checks import Operand
from ..core.check.layout import WORD_BYTES
from ..core.check.recipes import E2M1, MX, PER_64, PER_BLOCK, PER_ROW, Scales
from ..core.jit import driver
from ..core.jit.tensor_map import MAP_BYTES
from ..core.settings import get_compile_mode, get_num_sms, get_pdl
from ..gemm import product
from ..gemm.config import GemmConfig
from ..gemm.kernel import KERNEL as FP8_GEMM
from ..gemm.kernel import ROWS_PARAMS
from ..gemm.output import Groups, Output
from ..gemm.packed import is_packed
from ..gemm.packed import weight as packed_weight
from ..gemm.plan import Plan, addresses_of
from ..gemm.rows.launch import GroupedProblem, chosen_tall, grid, numbers_of, operand_maps, prepared
from ..moe.rows_at import FEW, RowsAt, few_rows, sfb_of, zeros

OUTPUT = Output(groups=Groups.ENDS, to_addresses=True)
OUTPUT_BY_64 = replace(OUTPUT, sfa=PER_64)
OUTPUTS = {(each.sfa, each.sfb): each for each in (OUTPUT, OUTPUT_BY_64, replace(OUTPUT, b=E2M1, sfb=MX))}
"""Outputs by the scales of A and B."""


def run(a: Operand, w: Operand, ends: Tensor, addresses: Tensor, *, of_a: Scales = PER_ROW) -> None:
    """Multiply each row by its group's weight, and store the result, BF16 `[n]`, at the row's address.

    `addresses` is int64 `[rows]`, 0 for a result that goes nowhere; `ends` is int32 `[groups]`: where each group's rows
    end, the next one's following them. Operands are as `m_grouped_fp8_gemm_nt_contiguous` takes them, but a scale of A
    may be for 64 columns. Nobody checks them.
    """
    product.run(PRODUCT, a, w, addresses, ends, (of_a,))


def check_weight(name: str, w: Operand) -> None:
    """Refuse a weight that `run` has no kernel for: FP4 whose scales may be no powers of two."""
    if is_packed(w) and w[1].dtype == torch.float32:
        raise NotImplementedError(f"sf{name}: expected UE8M0 beside FP4 where rows go to other GPUs, got torch.float32")


def problem(a: Operand, w: Operand, addresses: Tensor, ends: Tensor, *, of_a: Scales = PER_ROW) -> GroupedProblem:
    """Take the operands of `run` for those of grouped rows; here a scale of A may be for 64 columns beside FP8."""
    (values, scales), (b, sfb), of_b, rows_of_a_group = a, w, PER_BLOCK, len(addresses) / max(len(w[0]), 1)
    if is_packed(w):
        (b, sfb), of_b = packed_weight("b", w, ("groups", "n", "k"), {}), MX
    return GroupedProblem(
        values[None],
        scales[None],
        b,
        sfb,
        addresses,
        ends,
        Groups.ENDS,
        of_b,
        1,
        False,
        rows_of_a_group,
        of_a,
    )


def _ask(a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, said: tuple[Scales]) -> GroupedProblem:
    assert d is not None
    assert c is not None
    return problem(a, b, d, c, of_a=said[0])


def _output(p: GroupedProblem) -> Output:
    return OUTPUTS[p.of_a, p.of_b]


def _on_gpu(p: GroupedProblem) -> Plan | None:
    if 0 in (p.m, p.n, p.num_groups):
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return _on_gpu(p)
    ready = prepared(p)
    plan = planned(ready)
    plan.set_copies(p, ready)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    return plan


def planned(p: GroupedProblem) -> Plan:
    """Choose a configuration, and prepare the launch of a problem that is `prepared`. Its device is the current one."""
    device = p.d.get_device()
    config = chosen_tall(None, p.num_groups, p.expected_m, p.n, p.k, _output(p), device)
    return plan_of(p, config, get_num_sms(), FP8_GEMM.launcher(config, device, get_pdl()))


def plan_of(p: GroupedProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch for a problem that is `prepared`; its `d` is the table of addresses."""
    maps, places = operand_maps(p, config)
    numbers = {**numbers_of(p, 0), "map_d": bytes(MAP_BYTES), "map_whole_d": bytes(MAP_BYTES)}  # D has none
    ctas = grid(config, p.planes, p.m, p.n, num_sms)
    plan = Plan(p, ROWS_PARAMS, numbers, maps, places, launcher, ctas)
    plan.config, plan.output, plan.n, plan.k = config, _output(p), p.n, p.k
    plan.c_is_d, plan.needs_c, plan.alignment_of_c = False, True, WORD_BYTES
    return plan


def _refuse(*_: object) -> None:
    raise NotImplementedError("rows to addresses: expected tensors on a Hopper GPU, outside of torch.compile")


PRODUCT = product.Product(_ask, _refuse, _on_gpu, _refuse)


def at_addresses(weight: Operand) -> RowsAt:
    """Prepare `run` at addresses."""

    def template(weight: Operand, *how: Any) -> Plan:
        addresses = zeros(FEW, weight).long()
        return plan_of(problem(few_rows(weight), weight, addresses, zeros(len(weight[0]), weight)), *how)

    return RowsAt(weight, OUTPUTS[PER_ROW, sfb_of(weight)], template)

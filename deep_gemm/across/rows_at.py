"""Products of experts' rows, and the activation between them, at addresses, for any number of rows.

A public product recognizes a call by its tensors (`product.py`). Here the package lays operands out itself, so there is
nothing to recognize: a plan is found by the number of rows, or is the one there is, and launched at addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..casts import cast_rows
from ..casts.cast_rows import MAX_GROUPS, CastConfig, RowCast, num_ctas, select_cast
from ..casts.cast_rows import Groups as CastGroups
from ..casts.gating import Gating
from ..core.call import put
from ..core.check.checks import Operand
from ..core.check.layout import SCALE_BLOCK, ceil_div, pitch_of_scales
from ..core.check.recipes import E2M1, E4M3, MX, PER_BLOCK, PER_ROW, Scales
from ..core.gpu import gpu_of
from ..core.kernel import ByRows, Prepared
from ..core.meeting import Node
from ..core.settings import get_num_sms, get_pdl, in_force, num_sms_of
from ..gemm.kernel_decode import kernel_of
from ..gemm.output import Groups, Output
from ..gemm.packed import depth_of, is_packed
from ..gemm.plan import Addresses, Plan
from ..gemm.rows import launch as rows
from ..gemm.rows import silu_launch as rows_silu
from ..gemm.rows.check import contiguous_problem
from ..gemm.rows.silu_check import SiluRowsProblem
from ..moe import route_rows
from ..moe.check import ExpertRows
from . import rows_fetched, rows_to_addresses
from .rows_fetched import FetchedRowsProblem

MAX_PLANS = 256
"""Numbers of rows for which a product keeps plans."""
FEW = 2
"""Rows of tensors that parameters and plans are stated with: strides of a single row say nothing."""
MAX_EXPERTS = min(route_rows.MAX_EXPERTS[-1], MAX_GROUPS)
"""Experts of a rank for which the kernels between products have room."""
Template = Callable[..., Plan]
"""Takes a weight, a configuration, a number of SMs, and a launcher."""


class RowsAt:
    """A product of rows with the weights of their experts, at addresses: a plan is found by the number of rows.

    Rows of an operand follow each other without gaps, scales lie m-major with the least pitch, all operands begin at
    multiples of 16 bytes, and no output overlaps another one. Weights of each call have the shapes and strides of those
    given here, and are not kept.
    """

    def __init__(self, weight: Operand, output: Output, template: Template) -> None:
        """`template` prepares the launch of a configuration for a weight, and some number of rows."""
        (self.groups, self.n, _), self.k = weight[0].shape, depth_of(weight)
        self.device, self.output, self._template = weight[0].get_device(), output, template
        self._pitches = ["activation.scales_pitch"] * output.activates + ["fetching.pitch"] * output.fetches
        self._templates: dict[rows.Config, Plan] = {}
        self._plans: dict[int, Plan] = {}
        self._generation = in_force.generation

    def launch(self, m: int, weight: Operand, ahead: Addresses, behind: Addresses) -> None:
        """Multiply m rows, at least one, on the current device; operands lie `ahead` of the weight and `behind`."""
        plan = self._plans.get(m) if self._generation == in_force.generation else None
        if plan is None:
            plan = self.plan(m, weight)
        if in_force.choices.compile_mode == 0:
            values, scales = weight
            plan.launch((*ahead, values.data_ptr(), scales.data_ptr(), *behind))

    def plan(self, m: int, weight: Operand) -> Plan:
        """Copy the template of the configuration that is best for m rows, and make it a plan of m rows."""
        if self._generation != in_force.generation:
            self._templates, self._plans, self._generation = {}, {}, in_force.generation
        templates, plans = self._templates, self._plans  # another thread may change settings meanwhile
        if m in plans:
            return plans[m]
        config = rows.selected(self.groups, m / self.groups, self.n, self.k, self.output, self.device)
        rows.print_if_asked(self.groups, self.n, self.k, config)
        template = templates.get(config)
        if template is None:
            launcher = kernel_of(config).launcher(config, self.device, get_pdl())
            template = templates[config] = self._template(weight, config, get_num_sms(), launcher)
        pitch = pitch_of_scales(m)
        numbers, resized = rows.resized_for(template, m, pitch)
        numbers |= dict.fromkeys(self._pitches, pitch)
        shape = template.rows._replace(shape=(m, self.n))  # the other members are for questions that nobody asks here
        ctas = rows.grid(config, 1, m, self.n, get_num_sms())
        plan = template.derived(shape, ctas, numbers, resized)
        put(plans, m, plan, MAX_PLANS)
        return plan


def product(weight: Operand) -> RowsAt:
    """`product_of_stacked_rows` into BF16, by ids."""

    def template(weight: Operand, *how: Any) -> Plan:
        a, ids = _few_rows(weight), _zeros(FEW, weight)
        d = torch.empty(FEW, weight[0].shape[1], dtype=torch.bfloat16, device=ids.device)
        return rows.plan_of(
            rows.grouped_problem(contiguous_problem(a, weight, d, ids, ensure_zero_padding=False)), *how
        )

    b = E2M1 if is_packed(weight) else E4M3
    return RowsAt(weight, Output(groups=Groups.IDS, b=b, sfb=_sfb(weight)), template)


def activated(weight: Operand, limit: float | None) -> RowsAt:
    """`activated_product_of_rows` with gates apart, by ids."""

    def template(weight: Operand, *how: Any) -> Plan:
        return rows_silu.plan_of(_few_activated(weight, _zeros(FEW, weight), limit), *how)

    return RowsAt(weight, rows_silu.APART, template)


def fetched(weight: Operand, limit: float | None, node: Node) -> RowsAt:
    """The same by `rows_fetched`, which gathers the rows of a node: see there for its operands."""

    def template(weight: Operand, *how: Any) -> Plan:
        ends = _zeros(len(weight[0]), weight)
        of_rows = ExpertRows(ends, ends, ends, ends, ends)  # a plan is the same wherever they are
        return rows_fetched.plan_of(FetchedRowsProblem(_few_activated(weight, ends, limit), of_rows, ends, node), *how)

    return RowsAt(weight, rows_fetched.APART, template)


def to_addresses(weight: Operand) -> RowsAt:
    """`rows_to_addresses.run`: the table of addresses takes the place of D."""

    def template(weight: Operand, *how: Any) -> Plan:
        ids = _zeros(FEW, weight)
        return rows_to_addresses.plan_of(rows_to_addresses.problem(_few_rows(weight), weight, ids.long(), ids), *how)

    return RowsAt(weight, rows_to_addresses.OUTPUTS[PER_ROW, _sfb(weight)], template)


def activation(
    columns: int, groups: int, limit: float | None, device: torch.device, row_weights: Tensor | None = None
) -> ByRows:
    """The cast between two such products: `layers.activate_rows` of BF16 rows that have so many `columns` of gate.

    A launch takes the number of rows, and where h, values, scales and ends are, and the bytes of m scales. Factors of
    rows, if there are any, stay where they are; they are not kept.
    """
    h = torch.empty(FEW, 2 * columns, dtype=torch.bfloat16, device=device)
    ends = torch.zeros(groups, dtype=torch.int32, device=device)
    like = RowCast(h, *few_in_fp8(columns, device), gating=Gating(limit=limit), row_weights=row_weights, ends=ends)
    params, number, is_aligned = cast_rows.params_of(like), h.get_device(), cast_rows.is_aligned(h, like.values)
    gpu = gpu_of(number)

    @cache
    def prepared(config: CastConfig) -> Any:
        changing = ("x", "values", "scales", "sizes", "scales_stride_k", "m")
        return cast_rows.KERNEL.prepared(config, params, changing, number)

    def choose(m: int) -> tuple[Prepared[Any], int]:
        num_sms = num_sms_of(gpu.num_sms)
        config = select_cast(
            torch.bfloat16, m, columns, num_sms, is_aligned=is_aligned, activates=True, groups=CastGroups.UNTIL
        )
        return prepared(config), num_ctas(config, m, columns, num_sms)

    return ByRows(choose)


def _sfb(weight: Operand) -> Scales:
    return MX if is_packed(weight) else PER_BLOCK


def _zeros(count: int, weight: Operand) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=weight[0].device)


def _few_rows(weight: Operand) -> Operand:
    return few_in_fp8(depth_of(weight), weight[0].device)


def _few_activated(weight: Operand, layout: Tensor, limit: float | None) -> SiluRowsProblem:
    d = few_in_fp8(weight[0].shape[1] // 2, layout.device)
    return SiluRowsProblem(*_few_rows(weight), *weight, *d, layout, None, limit, gates_apart=True)


def few_in_fp8(columns: int, device: torch.device) -> Operand:
    """A few rows as products take them, to state parameters with."""
    values = torch.empty(FEW, columns, dtype=torch.float8_e4m3fn, device=device)
    shape, strides = (FEW, ceil_div(columns, SCALE_BLOCK)), (1, pitch_of_scales(FEW))
    return values, torch.empty_strided(shape, strides, dtype=torch.float32, device=device)

"""Products of experts' rows at addresses, for any number of rows.

A public product recognizes a call by its tensors (`product.py`). Here the package lays operands out itself, so there is
nothing to recognize: a plan is found by the number of rows, and launched at addresses.
"""

from __future__ import annotations

import torch

from ..choose.config import GemmConfig
from ..choose.rows import select_grouped
from ..gpus import gpu_of
from ..problem import Operand, SiluRowsProblem, contiguous_problem, silu_rows_problem
from ..problem.layout import SCALE_BLOCK, ceil_div, pitch_of_scales
from ..settings import get_num_sms, get_pdl, in_force
from . import fp8_gemm, rows, rows_silu
from .plan import SCALE_BYTES, Plan
from .rows import GroupedProblem

MAX_PLANS = 256
"""Numbers of rows for which a product keeps plans."""
TEMPLATE_ROWS = 2
"""Of the problem that plans are derived from: strides of a single row say nothing."""


class RowsAt:
    """A product of rows with the weights of their experts: `product_of_stacked_rows` into BF16, by ids.

    If it `activates`: `activated_product_of_rows` with gates apart. Rows of an operand follow each other without gaps,
    scales lie m-major with the least pitch, all operands begin at multiples of 16 bytes, and no output overlaps another
    one. Weights of each call have the shapes and strides of those given here, and are not kept.
    """

    def __init__(self, weight: Operand, *, activates: bool = False, limit: float | None = None) -> None:
        self.groups, self.n, self.k = weight[0].shape
        self.device, self._activates, self._limit = weight[0].get_device(), activates, limit
        self._output = rows_silu.APART if activates else rows.output_of(_few_rows(weight))
        self._templates: dict[GemmConfig, Plan] = {}
        self._plans: dict[int, Plan] = {}
        self._generation = in_force.generation

    def plan(self, m: int, weight: Operand) -> Plan:
        """The plan for so many rows, at least one. The device is the current one."""
        if self._generation != in_force.generation:
            self._templates, self._plans, self._generation = {}, {}, in_force.generation
        found = self._plans.get(m)
        if found is None:
            found = self._derived(m, weight)
            if len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[m] = found
        return found

    def _derived(self, m: int, weight: Operand) -> Plan:
        """Copy the plan of a few rows, in the configuration that is best for m, and make it one of m rows."""
        config = select_grouped(self.groups, m / self.groups, self.n, self.k, self._output, gpu_of(self.device))
        rows.print_if_asked(self.groups, self.n, self.k, config)
        template = self._templates.get(config)
        if template is None:
            template = self._templates[config] = self._template(config, weight)
        pitch = pitch_of_scales(m)
        numbers = {"m": m, "groups.rows": m}
        if self._activates:
            numbers["activation.scales_pitch"] = pitch
        shape = template.rows._replace(shape=(m, self.n))  # the other members are for questions that nobody asks here
        ctas = rows.grid(config, 1, m, self.n, get_num_sms())
        return template.derived(shape, ctas, numbers, rows.resized_for(template, m, pitch * SCALE_BYTES))

    def _template(self, config: GemmConfig, weight: Operand) -> Plan:
        num_sms, launcher = get_num_sms(), fp8_gemm.launcher(config, self.device, get_pdl())
        if self._activates:
            return rows_silu.plan_of(_few_activated_rows(weight, self._limit), config, num_sms, launcher)
        return rows.plan_of(_few_rows(weight), config, num_sms, launcher)


def _few_rows(weight: Operand) -> GroupedProblem:
    ids = _ids(weight)
    d = torch.empty(TEMPLATE_ROWS, weight[0].shape[1], dtype=torch.bfloat16, device=ids.device)
    a = _fp8(weight[0].shape[2], ids.device)
    return rows.grouped_problem(contiguous_problem(a, weight, d, ids, ensure_zero_padding=False))


def _few_activated_rows(weight: Operand, limit: float | None) -> SiluRowsProblem:
    ids = _ids(weight)
    a, d = (_fp8(columns, ids.device) for columns in (weight[0].shape[2], weight[0].shape[1] // 2))
    return silu_rows_problem(a, weight, d, ids, None, limit, gates_apart=True)


def _ids(weight: Operand) -> torch.Tensor:
    return torch.zeros(TEMPLATE_ROWS, dtype=torch.int32, device=weight[0].device)


def _fp8(columns: int, device: torch.device) -> Operand:
    """Rows as products take them."""
    values = torch.empty(TEMPLATE_ROWS, columns, dtype=torch.float8_e4m3fn, device=device)
    shape, strides = (TEMPLATE_ROWS, ceil_div(columns, SCALE_BLOCK)), (1, pitch_of_scales(TEMPLATE_ROWS))
    return values, torch.empty_strided(shape, strides, dtype=torch.float32, device=device)

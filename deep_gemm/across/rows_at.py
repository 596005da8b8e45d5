"""Products of experts' rows, and the activation between them, at addresses, for any number of rows.

A public product recognizes a call by its tensors (`product.py`). Here the package lays operands out itself, so there is
nothing to recognize: a plan is found by the number of rows, or is the one there is, and launched at addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..casts import cast_rows
from ..casts.cast_rows import MAX_GROUPS, CastConfig, RowCast, num_ctas, select_cast
from ..casts.cast_rows import Groups as CastGroups
from ..core.check.checks import Operand
from ..core.check.layout import SCALE_BLOCK, ceil_div, pitch_of_scales
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.kernel import Prepared
from ..core.meeting import Node
from ..core.settings import get_num_sms, get_pdl, in_force, num_sms_of
from ..gemm.config import GemmConfig
from ..gemm.kernel import KERNEL as FP8_GEMM
from ..gemm.output import Groups, Output
from ..gemm.plan import SCALE_BYTES, Addresses, B, D, Plan, put
from ..gemm.rows import launch as rows
from ..gemm.rows import silu_launch as rows_silu
from ..gemm.rows.check import contiguous_problem
from ..gemm.rows.choose import select_grouped
from ..gemm.rows.silu_check import SiluRowsProblem
from ..moe.check import ExpertRows
from . import rows_fetched, rows_to_addresses
from .rows_fetched import FetchedRowsProblem

__all__ = [
    "FEW",
    "MAX_GROUPS",
    "ActivatedRowsAt",
    "ActivationAt",
    "FetchedRowsAt",
    "RowsAt",
    "RowsInPlace",
    "RowsToAddressesAt",
    "few_in_fp8",
]

MAX_PLANS = 256
"""Numbers of rows for which a product keeps plans."""
FEW = 2
"""Rows of tensors that parameters and plans are stated with: strides of a single row say nothing."""


class RowsAt:
    """A product of rows with the weights of their experts: `product_of_stacked_rows` into BF16, by ids.

    Rows of an operand follow each other without gaps, scales lie m-major with the least pitch, all operands begin at
    multiples of 16 bytes, and no output overlaps another one. Weights of each call have the shapes and strides of those
    given here, and are not kept.
    """

    OUTPUT = Output(groups=Groups.IDS)
    PITCHES: tuple[str, ...] = ()
    """Parameters that hold the pitch of m scales."""

    def __init__(self, weight: Operand) -> None:
        self.groups, self.n, self.k = weight[0].shape
        self.device = weight[0].get_device()
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
            put(self._plans, m, found, MAX_PLANS)
        return found

    def _derived(self, m: int, weight: Operand) -> Plan:
        """Copy the plan of a few rows, in the configuration that is best for m, and make it one of m rows."""
        config = select_grouped(self.groups, m / self.groups, self.n, self.k, self.OUTPUT, gpu_of(self.device))
        rows.print_if_asked(self.groups, self.n, self.k, config)
        template = self._templates.get(config)
        if template is None:
            launcher = FP8_GEMM.launcher(config, self.device, get_pdl())
            template = self._templates[config] = self._template(weight, config, get_num_sms(), launcher)
        pitch = pitch_of_scales(m)
        numbers = {"m": m, "groups.rows": m, **dict.fromkeys(self.PITCHES, pitch)}
        shape = template.rows._replace(shape=(m, self.n))  # the other members are for questions that nobody asks here
        ctas = rows.grid(config, 1, m, self.n, get_num_sms())
        return template.derived(shape, ctas, numbers, rows.resized_for(template, m, pitch * SCALE_BYTES))

    def _template(self, weight: Operand, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
        """Prepare the launch for `FEW` rows."""
        a, ids = few_in_fp8(self.k, weight[0].device), _zeros(FEW, weight)
        d = torch.empty(FEW, self.n, dtype=torch.bfloat16, device=ids.device)
        p = contiguous_problem(a, weight, d, ids, ensure_zero_padding=False)
        return rows.plan_of(rows.grouped_problem(p), config, num_sms, launcher)


class ActivatedRowsAt(RowsAt):
    """`activated_product_of_rows` with gates apart, by ids."""

    OUTPUT = rows_silu.APART
    PITCHES: tuple[str, ...] = ("activation.scales_pitch",)

    def __init__(self, weight: Operand, limit: float | None) -> None:
        super().__init__(weight)
        self.limit = limit

    def _template(self, weight: Operand, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
        return rows_silu.plan_of(self._few(weight, _zeros(FEW, weight)), config, num_sms, launcher)

    def _few(self, weight: Operand, layout: Tensor) -> SiluRowsProblem:
        a, d = (few_in_fp8(columns, layout.device) for columns in (self.k, self.n // 2))
        return SiluRowsProblem(*a, *weight, *d, layout, None, self.limit, gates_apart=True)


class FetchedRowsAt(ActivatedRowsAt):
    """The same by `rows_fetched`, which gathers the rows of a node: see there for its operands."""

    OUTPUT = rows_fetched.APART
    PITCHES = ("activation.scales_pitch", "fetching.pitch")

    def __init__(self, weight: Operand, limit: float | None, node: Node) -> None:
        super().__init__(weight, limit)
        self._node = node

    def _template(self, weight: Operand, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
        ends = _zeros(self.groups, weight)
        of_rows = ExpertRows(ends, ends, ends, ends, ends)  # a plan is the same wherever they are
        p = FetchedRowsProblem(self._few(weight, ends), of_rows, ends, self._node)
        return rows_fetched.plan_of(p, config, num_sms, launcher)


class RowsToAddressesAt(RowsAt):
    """`rows_to_addresses.run`: the table of addresses takes the place of D."""

    OUTPUT = rows_to_addresses.OUTPUT

    def _template(self, weight: Operand, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
        a, ids = few_in_fp8(self.k, weight[0].device), _zeros(FEW, weight)
        p = rows_to_addresses.problem(a, weight, ids.long(), ids)
        return rows_to_addresses.plan_of(p, config, num_sms, launcher)


class RowsInPlace:
    """A product all of whose operands stay where they are but the weight; weights lie alike."""

    def __init__(self, planned: Callable[[Operand], Plan], at: Addresses) -> None:
        """`planned` prepares the launch for a weight; `at` is where operands are, those of a weight among them."""
        self._planned, self._ahead, self._behind = planned, at[:B], at[D:]
        self.plan: Plan | None = None
        self._generation = -1

    def launch(self, weight: Operand) -> None:
        """Multiply by a weight. The device is the current one."""
        plan = self.plan
        generation = in_force.generation  # as it is before a plan is made: another thread may change settings meanwhile
        if plan is None or self._generation != generation:
            plan = self.plan = self._planned(weight)
            self._generation = generation
        if in_force.choices.compile_mode:
            return
        values, scales = weight
        plan.launch((*self._ahead, values.data_ptr(), scales.data_ptr(), *self._behind))


class ActivationAt:
    """The cast between two such products: `layers.activate_rows` of BF16 rows that have so many `columns` of gate."""

    def __init__(self, columns: int, groups: int, limit: float | None, device: torch.device) -> None:
        h = torch.empty(FEW, 2 * columns, dtype=torch.bfloat16, device=device)
        ends = torch.zeros(groups, dtype=torch.int32, device=device)
        self._like = RowCast(h, *few_in_fp8(columns, device), activates=True, limit=limit, ends=ends)
        self._is_aligned = cast_rows.is_aligned(h, self._like.values)
        self._device, self._gpu = h.get_device(), gpu_of(h.get_device())
        self._prepared: dict[CastConfig, Prepared[CastConfig]] = {}
        self._chosen: dict[tuple[int, int], tuple[Prepared[CastConfig], int]] = {}  # and how many CTAs

    def launch(self, m: int, h: int, values: int, scales: int, ends: int) -> None:
        """Cast m rows, those of a group up to its end."""
        num_sms = num_sms_of(self._gpu.num_sms)
        found = self._chosen.get((m, num_sms))
        if found is None:
            found = self._choose(m, num_sms)
            put(self._chosen, (m, num_sms), found, MAX_PLANS)
        prepared, ctas = found
        prepared.launch(ctas, h, values, scales, ends, pitch_of_scales(m) * SCALE_BYTES, m)

    def _choose(self, m: int, num_sms: int) -> tuple[Prepared[CastConfig], int]:
        columns = self._like.values.shape[1]
        config = select_cast(
            torch.bfloat16, m, columns, num_sms, is_aligned=self._is_aligned, activates=True, groups=CastGroups.UNTIL
        )
        prepared = self._prepared.get(config)
        if prepared is None:
            changing = ("x", "values", "scales", "sizes", "scales_stride_k", "m")
            prepared = cast_rows.KERNEL.prepared(config, cast_rows.params_of(self._like), changing, self._device)
            self._prepared[config] = prepared
        return prepared, num_ctas(config, m, columns, num_sms)


def _zeros(count: int, weight: Operand) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=weight[0].device)


def few_in_fp8(columns: int, device: torch.device) -> Operand:
    """A few rows as products take them, to state parameters with."""
    values = torch.empty(FEW, columns, dtype=torch.float8_e4m3fn, device=device)
    shape, strides = (FEW, ceil_div(columns, SCALE_BLOCK)), (1, pitch_of_scales(FEW))
    return values, torch.empty_strided(shape, strides, dtype=torch.float32, device=device)

"""Products of experts' rows, and the casts ahead of them, at addresses, for any number of rows.

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
from ..core.check.recipes import E2M1, E4M3, MX, PER_BLOCK, Scales
from ..core.gpu import gpu_of
from ..core.kernel import ByRows, Prepared
from ..core.settings import get_num_sms, get_pdl, in_force, num_sms_of
from ..gemm import launch as rows
from ..gemm import rows_silu
from ..gemm.ask.rows import contiguous_problem
from ..gemm.ask.silu import activated as activated_rows
from ..gemm.kernel import kernel_of
from ..gemm.kinds.output import Output, Sizes
from ..gemm.kinds.works import ENDS, IDS
from ..gemm.packed import depth_of, is_packed
from ..gemm.plan import Addresses, Plan
from . import route_rows

MAX_PLANS = 256
"""Numbers of rows for which a product keeps plans."""
FEW = 2
"""Rows of tensors that parameters and plans are stated with: strides of a single row say nothing."""
MAX_EXPERTS = min(route_rows.MAX_EXPERTS[-1], MAX_GROUPS)
"""Experts of a rank for which the kernels between products have room."""
Template = Callable[..., Plan]
"""Takes a weight, a configuration, a number of SMs, and a launcher."""
BF16 = torch.bfloat16


class RowsAt:
    """A product of rows with the weights of their experts, at addresses: a plan is found by the number of rows.

    Rows of an operand follow each other without gaps, scales lie m-major with the least pitch, all operands begin at
    multiples of 16 bytes, and no output overlaps another one. Weights of each call have the shapes and strides of those
    given here, and are not kept.
    """

    def __init__(self, weight: Operand, output: Output, template: Template, *, is_dependent: bool = False) -> None:
        """`template` prepares the launch of a configuration for a weight, and some number of rows.

        `is_dependent`: as for `Kernel.run`.
        """
        (self.groups, self.n, _), self.k = weight[0].shape, depth_of(weight)
        self.device, self.output, self._template = weight[0].get_device(), output, template
        self._is_dependent = is_dependent
        self._pitches = ["activation.scales_pitch"] * output.epilogue.activates
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
        sizes = Sizes(m / self.groups, self.n, self.k, self.groups)
        config = rows.chosen(sizes, self.output, gpu_of(self.device))
        rows.print_if_asked(self.output, m, sizes, config)
        template = templates.get(config)
        if template is None:
            launcher = kernel_of(config).launcher(config, self.device, self._is_dependent or get_pdl())
            template = templates[config] = self._template(weight, config, get_num_sms(), launcher)
        pitch = pitch_of_scales(m)
        numbers, resized = rows.resized_for(template, m, pitch)
        numbers |= dict.fromkeys(self._pitches, pitch)
        shape = template.rows._replace(shape=(m, self.n))  # the other members are for questions that nobody asks here
        ctas = config.ctas(m, self.n, get_num_sms())
        plan = template.derived(shape, ctas, numbers, resized)
        put(plans, m, plan, MAX_PLANS)
        return plan


def product(weight: Operand, *, by_ends: bool = False, is_behind_cast: bool = False) -> RowsAt:
    """`product_of_stacked_rows` into BF16, by ids, or by ends of groups, where rows behind cost nothing."""

    def template(weight: Operand, *how: Any) -> Plan:
        a, layout = few_rows(weight), zeros(len(weight[0]) if by_ends else FEW, weight)
        d = torch.empty(FEW, weight[0].shape[1], dtype=BF16, device=layout.device)
        said = contiguous_problem(a, weight, d, layout, use_psum_layout=by_ends, ensure_zero_padding=False, alignment=1)
        return rows.plan_of(said, *how, weight_is_ready=is_behind_cast)

    b, work = E2M1 if is_packed(weight) else E4M3, ENDS if by_ends else IDS
    return RowsAt(weight, Output(work=work, b=b, sfb=sfb_of(weight)), template, is_dependent=is_behind_cast)


def activated(weight: Operand, limit: float | None) -> RowsAt:
    """`activated_product_of_rows` with gates apart."""

    def template(weight: Operand, *how: Any) -> Plan:
        ends, d = zeros(len(weight[0]), weight), few_in_fp8(weight[0].shape[1] // 2, weight[0].device)
        problem = activated_rows(few_rows(weight), weight, d, ends, None, limit, gates_apart=True)
        return rows.plan_of(problem, *how)

    return RowsAt(weight, rows_silu.APART, template)


def activation(
    columns: int,
    groups: int,
    gating: Gating,
    device: torch.device,
    row_weights: Tensor | None = None,
    *,
    is_dependent: bool = False,
) -> ByRows:
    """The cast between two such products: `activate_rows` of BF16 rows that have so many `columns` of gate.

    A launch takes the number of rows, and where h, values, scales and ends are, and the bytes of m scales. Factors of
    rows, if there are any, stay where they are; they are not kept.
    """
    h = torch.empty(FEW, 2 * columns, dtype=BF16, device=device)
    ends = torch.empty(groups, dtype=torch.int32, device=device)
    like = RowCast(h, *few_in_fp8(columns, device), gating=gating, row_weights=row_weights, ends=ends)
    return _cast(like, "sizes", is_dependent, activates=True, groups=CastGroups.UNTIL)


def gathered(x: Tensor, topk: int, *, is_dependent: bool = False) -> ByRows:
    """The cast ahead of the first product: `gather_cast_to_fp8` of tokens that lie like `x`, which may have no rows.

    A launch takes the number of tokens, and where they, values, scales and `row_of` are, and the bytes of scales of a
    column.
    """
    row_of = torch.empty(FEW, topk, dtype=torch.int32, device=x.device)
    like = RowCast(x, *few_in_fp8(x.shape[1], x.device), row_of=row_of)
    return _cast(like, "row_of", is_dependent, to_routes=True)


def _cast(like: RowCast, more: str, is_dependent: bool, **kind: Any) -> ByRows:
    # What follows outlives `like`. To keep its tensors would keep memory of a graph's pool, if torch is capturing.
    params, device, dtype, columns = cast_rows.params_of(like), like.x.get_device(), like.x.dtype, like.k
    gpu, is_aligned = gpu_of(device), cast_rows.is_aligned(like.x, like.values)

    @cache
    def prepared(config: CastConfig) -> Any:
        changing = ("x", "values", "scales", more, "scales_stride_k", "m")
        return cast_rows.KERNEL.prepared(config, params, changing, device, is_dependent=is_dependent)

    def choose(m: int) -> tuple[Prepared[Any], int]:
        num_sms = num_sms_of(gpu.num_sms)
        config = select_cast(dtype, m, columns, num_sms, is_aligned=is_aligned, **kind)
        return prepared(config), num_ctas(config, m, columns, num_sms)

    return ByRows(choose)


def sfb_of(weight: Operand) -> Scales:
    """Give the scales of a weight, FP8 or FP4."""
    return MX if is_packed(weight) else PER_BLOCK


def zeros(count: int, weight: Operand) -> Tensor:
    """So many zeros of int32 where a weight is."""
    return torch.zeros(count, dtype=torch.int32, device=weight[0].device)


def few_rows(weight: Operand) -> Operand:
    """A few rows as deep as a weight."""
    return few_in_fp8(depth_of(weight), weight[0].device)


def few_in_fp8(columns: int, device: torch.device) -> Operand:
    """A few rows as products take them, to state parameters with."""
    values = torch.empty(FEW, columns, dtype=torch.float8_e4m3fn, device=device)
    shape, strides = (FEW, ceil_div(columns, SCALE_BLOCK)), (1, pitch_of_scales(FEW))
    return values, torch.empty_strided(shape, strides, dtype=torch.float32, device=device)

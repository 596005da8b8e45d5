"""The first product of experts across a node's GPUs: it fetches its rows from the rooms of all ranks as it goes.

gemm/work/rows_fetched.cuh says how. It is rows_silu.py for rows that are not there yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.call import Key
from ..core.check.checks import Operand
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.meeting import Node, Room, Way
from ..core.settings import get_compile_mode, get_num_sms, get_pdl, in_force
from ..gemm.config.tall import GemmConfig
from ..gemm.kernel import FP8_GEMM
from ..gemm.kinds.epilogues import SILU, SILU_OF_HALVES
from ..gemm.kinds.output import Output
from ..gemm.kinds.works import FETCHED, FETCHED_BYTES, MOST_ROUTES
from ..gemm.launch import fitting
from ..gemm.launch import plan_of as plan_of_product
from ..gemm.plan import PLANS, SFA, A, Addresses, Place, Plan, addresses_of
from ..gemm.plan_kinds import ROW_WEIGHTS
from ..gemm.problem import Problem
from ..moe.check import ExpertRows
from ..moe.rows_at import RowsAt, few_activated, zeros

IN_TURN = Output(work=FETCHED, epilogue=SILU)
APART = Output(work=FETCHED, epilogue=SILU_OF_HALVES)
TOKEN_OF, ROW_OF, RESULTS = range(8, 11)
"""Further operands, behind those of rows_silu.py."""


class FetchedRowsProblem(NamedTuple):
    """A product that is activated, and where its rows of A come from. Nobody checks them."""

    silu: Problem
    """Its work is FETCHED. A, its scales and `row_weights` are room: the kernel fills them."""
    rows: ExpertRows
    """Rows of all slots of the node."""
    addresses: Tensor
    """int64 `[rows]`, room: where the result of each row goes."""
    node: Node


def why_not(room: Room) -> str | None:
    """Say why rows of a room cannot be fetched; None if they can."""
    if 2 * room.row_bytes > FETCHED_BYTES:
        return f"expected two rows in {FETCHED_BYTES} bytes of shared memory, got rows of {room.row_bytes}"
    return None if room.topk <= MOST_ROUTES else f"expected at most {MOST_ROUTES} routes of a token, got {room.topk}"


def run(p: FetchedRowsProblem, config: GemmConfig | None = None) -> None:
    """Fetch, multiply, activate and cast on the GPU that the tensors are on; the host waits for nothing.

    All ranks have met, so their rows lie ready, and `node.arrivals` is zeros. `config` None leaves the choice to the
    heuristics.
    """
    key = signature(p) if config is None else ()
    plan = PLANS.plans.get(key)
    if plan is not None:
        plan.launch(addresses(p))
        return
    device = p.silu.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p, config)
        return
    plan = planned(p, config)
    if get_compile_mode() == 1:
        return
    plan.launch(addresses(p))
    if key:
        PLANS.keep(key, plan)


def planned(p: FetchedRowsProblem, config: GemmConfig | None = None) -> Plan:
    """Choose a configuration if there is none, and prepare the launch. The problem's device is the current one."""
    device = p.silu.d.get_device()
    config = fitting(config, p.silu, gpu_of(device))
    return plan_of(p, config, get_num_sms(), FP8_GEMM.launcher(config, device, get_pdl()))


def signature(p: FetchedRowsProblem) -> Key:
    """Everything that decides what a call launches, but for addresses."""
    silu = p.silu
    tensors = silu.a, silu.sfa, silu.b, silu.sfb, silu.d, silu.scales, silu.c, silu.row_weights, p.rows.row_of
    lie = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors)
    node = p.node
    of_node = (node.room, node.addresses, node.rank, node.state.data_ptr(), node.arrivals.data_ptr())
    return run, lie, silu.limit, silu.epilogue, of_node, in_force.generation


def addresses(p: FetchedRowsProblem) -> Addresses:
    """Give where the operands are, those of rows_silu.py first."""
    more = (p.rows.token_of, p.rows.row_of, p.addresses)
    return (*addresses_of(p.silu), *(x.data_ptr() for x in more))


def plan_of(p: FetchedRowsProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch."""
    room, sfa = p.node.room, p.silu.sfa
    of_fetching = {
        "arrivals": p.node.arrivals.data_ptr(),
        "results": room.results,
        "topk": room.topk,
        "row_bytes": room.row_bytes,
        "weights_at": room.weights,
        "pitch": sfa.stride(1),
        "max_tokens": room.max_tokens,
        **p.node.meeting(Way.THERE),
    }
    numbers = {f"fetching.{name}": value for name, value in of_fetching.items()}
    operands = {
        "token_of": TOKEN_OF,
        "row_of": ROW_OF,
        "values": A,
        "sfa": SFA,
        "weights": ROW_WEIGHTS,
        "addresses": RESULTS,
    }
    places = [Place(f"fetching.{name}", operand) for name, operand in operands.items()]
    return plan_of_product(p.silu, config, num_sms, launcher, numbers=numbers, places=places)


def at_addresses(weight: Operand, limit: float | None, node: Node) -> RowsAt:
    """Prepare the product at addresses, of gates apart: see `run` for its operands."""

    def template(weight: Operand, *how: Any) -> Plan:
        ends = zeros(len(weight[0]), weight)
        of_rows = ExpertRows(ends, ends, ends, ends, ends)  # a plan is the same wherever they are
        return plan_of(FetchedRowsProblem(few_activated(weight, ends, limit, FETCHED), of_rows, ends, node), *how)

    return RowsAt(weight, APART, template)

"""The first product of experts across a node's GPUs: it fetches its rows from the rooms of all ranks as it goes.

gemm/work/rows_fetched.cuh says how. It is rows_silu.py for rows that are not there yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.call import Key
from ..core.check.checks import Operand
from ..core.jit import driver
from ..core.meeting import Node, Room, Way
from ..core.settings import get_compile_mode, get_num_sms, get_pdl, in_force
from ..gemm.config import GemmConfig
from ..gemm.config_fetched import FETCHED_BYTES, MOST_ROUTES
from ..gemm.kernel import KERNEL as FP8_GEMM
from ..gemm.kernel import ROWS_FETCHED_PARAMS
from ..gemm.output import Groups, Output
from ..gemm.plan import PLANS, SFA, A, Addresses, Place, Plan
from ..gemm.rows.launch import chosen_tall, grid
from ..gemm.rows.silu_check import SiluRowsProblem
from ..gemm.rows.silu_launch import ROW_WEIGHTS, parameters_of
from ..gemm.rows.silu_launch import addresses as addresses_of_silu
from ..moe.check import ExpertRows
from ..moe.rows_at import RowsAt, few_activated, zeros

IN_TURN = Output(groups=Groups.ENDS, activates=True, fetches=True)
APART = Output(groups=Groups.ENDS, activates=True, gates_apart=True, fetches=True)
TOKEN_OF, ROW_OF, RESULTS = range(8, 11)
"""Further operands, behind those of rows_silu.py."""


class FetchedRowsProblem(NamedTuple):
    """A product that is activated, and where its rows of A come from. Nobody checks them."""

    silu: SiluRowsProblem
    """A, its scales and `row_weights` are room: the kernel fills them."""
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
    (m, _), (groups, n, k), device = p.silu.a.shape, p.silu.b.shape, p.silu.d.get_device()
    config = chosen_tall(config, groups, m / groups, n, k, output_of(p), device)
    return plan_of(p, config, get_num_sms(), FP8_GEMM.launcher(config, device, get_pdl()))


def output_of(p: FetchedRowsProblem) -> Output:
    """Give all that decides the kernel's code besides the tile."""
    return APART if p.silu.gates_apart else IN_TURN


def signature(p: FetchedRowsProblem) -> Key:
    """Everything that decides what a call launches, but for addresses."""
    tensors = (*p.silu[:7], p.silu.row_weights, p.rows.row_of)
    lie = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors)
    node = p.node
    of_node = (node.room, node.addresses, node.rank, node.state.data_ptr(), node.arrivals.data_ptr())
    return run, lie, p.silu.limit, p.silu.gates_apart, of_node, in_force.generation


def addresses(p: FetchedRowsProblem) -> Addresses:
    """Give where the operands are, those of rows_silu.py first."""
    more = (p.rows.token_of, p.rows.row_of, p.addresses)
    return (*addresses_of_silu(p.silu), *(x.data_ptr() for x in more))


def plan_of(p: FetchedRowsProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch."""
    numbers, maps, places = parameters_of(p.silu, config)
    (m, _), (_, n, k), room = p.silu.a.shape, p.silu.b.shape, p.node.room
    of_fetching = {
        "arrivals": p.node.arrivals.data_ptr(),
        "results": room.results,
        "topk": room.topk,
        "row_bytes": room.row_bytes,
        "weights_at": room.weights,
        "pitch": p.silu.sfa.stride(1),
        "max_tokens": room.max_tokens,
        **p.node.meeting(Way.THERE),
    }
    numbers |= {f"fetching.{name}": value for name, value in of_fetching.items()}
    operands = {
        "token_of": TOKEN_OF,
        "row_of": ROW_OF,
        "values": A,
        "sfa": SFA,
        "weights": ROW_WEIGHTS,
        "addresses": RESULTS,
    }
    places += [Place(f"fetching.{name}", operand) for name, operand in operands.items()]
    plan = Plan(p.silu, ROWS_FETCHED_PARAMS, numbers, maps, places, launcher, grid(config, 1, m, n, num_sms))
    plan.config, plan.output, plan.n, plan.k = config, output_of(p), n, k
    return plan


def at_addresses(weight: Operand, limit: float | None, node: Node) -> RowsAt:
    """Prepare the product at addresses, of gates apart: see `run` for its operands."""

    def template(weight: Operand, *how: Any) -> Plan:
        ends = zeros(len(weight[0]), weight)
        of_rows = ExpertRows(ends, ends, ends, ends, ends)  # a plan is the same wherever they are
        return plan_of(FetchedRowsProblem(few_activated(weight, ends, limit), of_rows, ends, node), *how)

    return RowsAt(weight, APART, template)

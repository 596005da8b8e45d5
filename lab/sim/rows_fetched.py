"""The first product of experts across GPUs in the simulator: rows lie in rooms of several ranks, and one multiplies.

All ranks have met before, so only this one's kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_gemm.across import rows_fetched as kernels
from deep_gemm.across.rows_fetched import FetchedRowsProblem
from deep_gemm.casts.rules import empty_scales
from deep_gemm.core.meeting import STATE_WORDS, Node, Room
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.kernel import ROWS_FETCHED_PARAMS
from deep_gemm.gemm.rows.silu_check import SiluRowsProblem
from deep_gemm.moe.check import ExpertRows
from deep_gemm.moe.route_rows import num_arrivals

from .launcher import Launcher, flat_memory
from .library import HostKernel
from .rows_silu import POISON
from .simulate import Buffer, Simulation

LIMIT = 1 << 40


class Asked(NamedTuple):
    """The request to the rank that multiplies."""

    room: Room
    rank: int
    rooms: list[Tensor]
    """The memory of each rank, with rows of its tokens and nothing else that counts."""
    rows: ExpertRows
    silu: SiluRowsProblem
    """The problem as it must be when the rows have come."""
    addresses: Tensor
    """A rank and a byte of its room for each row, as the rank times 2^32 plus the byte."""
    has_missed: bool = False
    """A rank did not come, so rows are of no use."""

    @property
    def experts(self) -> int:
        """How many are here."""
        return len(self.rows.counts)


def run(
    kernel: HostKernel,
    config: GemmConfig,
    asked: Asked,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    max_steps: int = 20_000_000,
) -> dict[str, Tensor]:
    """Fetch and multiply on simulated SMs: what the kernel wrote, by name; addresses as `Asked` has them."""
    silu, rows, room = asked.silu, asked.rows, asked.room
    sfa = empty_scales(silu.sfa.shape[:1], room.hidden, silu.d, mn_major=True).fill_(torch.nan)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32)
    state[-1] = int(asked.has_missed)
    written = {
        "a": torch.full(silu.a.shape, POISON, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "sfa": sfa,
        "row_weights": torch.full_like(silu.row_weights, torch.nan),  # type: ignore[arg-type]
        "d": silu.d,
        "scales": silu.scales,
        "addresses": torch.full((len(rows.ids),), -1, dtype=torch.int64),
        "arrivals": torch.zeros(num_arrivals(len(rows.ids)), dtype=torch.int32),
    }
    read = {
        "b": silu.b,
        "sfb": silu.sfb,
        "ends": rows.ends + asked.has_missed,  # of routes that were told while they were counted
        "token_of": rows.token_of,
        "row_of": rows.row_of.contiguous(),
        "state": state,
        **{f"room {rank}": memory for rank, memory in enumerate(asked.rooms)},
    }
    alignments = {"a": 16, "sfa": 16, "d": 16, "scales": 16, "b": 16, "addresses": 8}
    alignments |= {f"room {rank}": 16 for rank in range(room.ranks)}
    buffers = {
        name: Buffer(flat_memory(x), is_writable=name in written, alignment=alignments.get(name, 4))
        for name, x in (written | read).items()
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, max_steps=max_steps)
    at = {name: simulation.tensor(name, x) for name, x in (written | read).items()}
    rooms = tuple(simulation.address(f"room {rank}") for rank in range(room.ranks))
    if asked.has_missed:  # its room may be gone
        rooms = tuple(start if rank == asked.rank else 0 for rank, start in enumerate(rooms))
    of_node = at["state"], asked.experts, at["arrivals"], torch.zeros(1, dtype=torch.int32), LIMIT
    node = Node(room, rooms, asked.rank, *of_node)
    operands: Any = {name: at[name] for name in ("a", "sfa", "b", "sfb", "d", "scales", "row_weights")}
    placed = silu._replace(**operands, ids=at["ends"])
    of_rows = rows._replace(**{name: at[name] for name in ("token_of", "row_of", "ends")})
    problem = FetchedRowsProblem(placed, of_rows, at["addresses"], node)
    launcher = Launcher(
        simulation, kernel, ROWS_FETCHED_PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    plan = kernels.plan_of(problem, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(kernels.addresses(problem))
    found = simulation.result().buffers
    got = {name: _as_before(x, found[name]) for name, x in written.items()}
    if not asked.has_missed:
        got["addresses"] = in_rooms(got["addresses"], rooms, room)
    return got


def _as_before(like: Tensor, written: object) -> Tensor:
    """See what a kernel wrote as the tensor that it was made from."""
    assert isinstance(written, Tensor)
    return written.view(like.dtype).as_strided(like.shape, like.stride())


def in_rooms(addresses: Tensor, rooms: Sequence[int], room: Room) -> Tensor:
    """Give addresses as ranks and bytes; others stay as they are."""
    found = addresses.clone()
    for rank, start in enumerate(rooms):
        is_there = (addresses >= start) & (addresses < start + room.num_bytes)
        found[is_there] = rank * 2**32 + addresses[is_there] - start
    return found

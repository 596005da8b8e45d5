"""The calls of rank_cases.py in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rank_cases import Call, Sizes
from torch import Tensor

from deep_gemm.kernels import gather_weighted
from deep_gemm.kernels.gather_weighted import GatherConfig
from deep_gemm.kernels.meeting import STATE_WORDS, Node
from deep_gemm.kernels.params import Field, Kind, Params
from deep_gemm.kernels.return_sums import ReturnConfig
from deep_gemm.kernels.send_rows import SendConfig
from deep_gemm.kernels.sources import cuda_sources
from deep_gemm.sim import gather_weighted as sim_gather
from deep_gemm.sim import return_sums as sim_return
from deep_gemm.sim import send_rows as sim_send
from deep_gemm.sim.library import HostKernel, compile_kernel
from deep_gemm.sim.simulate import Buffer, KernelLaunch, Simulation

KEEP = Params("KeepParams", Field("room", Kind.POINTER), Field("kept", Kind.POINTER), Field("words", Kind.UINT32))
KEEP_ROOM = Path(__file__).parent / "sim_kernels" / "keep_room.cuh"
SUM = GatherConfig(torch.float32)
RETURN = ReturnConfig(num_threads=32)
LIMIT = 1 << 20
"""Steps that a wait may take."""
POISON = 0xA5


@cache
def keep_kernel() -> HostKernel:
    headers = {**cuda_sources(), "keep_room.cuh": KEEP_ROOM.read_text()}
    return compile_kernel('#include "keep_room.cuh"\n', headers, name="keep_room")


@cache
def sum_kernel() -> HostKernel:
    return sim_gather.compile_config(SUM)


@dataclass(frozen=True)
class Kernels:
    send_config: SendConfig
    send: HostKernel
    back: HostKernel


def send_config(sizes: Sizes) -> SendConfig:
    return SendConfig(sizes.dtype, sizes.ids.itemsize, num_threads=64)


def compiled(sizes: Sizes, edits: Mapping[str, str] | None = None) -> Kernels:
    config = send_config(sizes)
    return Kernels(config, sim_send.compile_config(config, edits), sim_return.compile_config(RETURN, edits))


def buffers_of(sizes: Sizes, by_rank: list[list[Call]]) -> dict[str, Buffer]:
    """All that the ranks have, by name; the rank's number ends the name of each."""
    room, found = sizes.room, {}

    def add(name: str, data: Tensor, *, written: bool = False, alignment: int = 4) -> None:
        rank = int(name.rsplit(maxsplit=1)[-1])
        found[name] = Buffer(data, is_writable=written, alignment=alignment, is_dependent=True, rank=rank)

    for rank, calls in enumerate(by_rank):
        memory = torch.full((room.num_bytes,), POISON, dtype=torch.uint8)
        memory[room.flags :] = 0
        add(f"room {rank}", memory, written=True, alignment=16)
        add(f"state {rank}", torch.zeros(STATE_WORDS, dtype=torch.int32), written=True)
        add(f"report {rank}", torch.zeros(1, dtype=torch.int32), written=True)
        for i, call in enumerate(calls):
            rows = max(call.x.shape[0], 1)  # no buffer is empty
            add(f"x {i} {rank}", call.x, alignment=16)
            add(f"ids {i} {rank}", call.topk_ids, alignment=call.topk_ids.element_size())
            add(f"p {i} {rank}", call.topk_weights)
            add(f"goes_to {i} {rank}", torch.full((rows, sizes.ranks), 77, dtype=torch.int32), written=True)
            add(f"kept {i} {rank}", torch.full((room.sums // 4,), 77, dtype=torch.int32), written=True)
            add(f"y {i} {rank}", call.y, alignment=16)
            add(f"row_of {i} {rank}", call.row_of)
            add(f"ones {i} {rank}", torch.ones(rows, sizes.ranks))
            add(f"out {i} {rank}", torch.full((rows, sizes.hidden), torch.nan).bfloat16(), written=True, alignment=16)
    return found


def launches_of(
    sizes: Sizes, kernels: Kernels, by_rank: list[list[Call]], simulation: Simulation, limit: int, num_sms: int
) -> list[list[KernelLaunch]]:
    """The kernels of each rank, in order."""
    room = sizes.room
    addresses = tuple(simulation.address(f"room {rank}") for rank in range(sizes.ranks))
    found: list[list[KernelLaunch]] = []
    for rank, calls in enumerate(by_rank):
        state = simulation.tensor(f"state {rank}", torch.empty(STATE_WORDS, dtype=torch.int32))
        report = simulation.tensor(f"report {rank}", torch.empty(1, dtype=torch.int32))
        node = Node(room, addresses, rank, state, report, limit)
        launches: list[KernelLaunch] = []
        for i, call in enumerate(calls):

            def at(name: str, like: Tensor, i: int = i, rank: int = rank) -> Tensor:
                return simulation.tensor(f"{name} {i} {rank}", like)

            goes_to = at("goes_to", call.goes_to)
            x, ids, p = at("x", call.x), at("ids", call.topk_ids), at("p", call.topk_weights)
            y, row_of = at("y", call.y), at("row_of", call.row_of)
            launches.append(
                sim_send.launch_of(
                    kernels.send, kernels.send_config, x, ids, p, goes_to, sizes.experts_here, node, num_sms
                )
            )
            kept = KEEP.pack(
                {"room": addresses[rank], "kept": simulation.address(f"kept {i} {rank}"), "words": room.sums // 4}
            )
            launches.append(KernelLaunch(keep_kernel(), [kept], 64, 0, 1))
            launches.append(sim_return.launch_of(kernels.back, RETURN, y, row_of, node, num_sms))
            if call.x.shape[0]:
                sums = simulation.tensor(f"room {rank}", torch.empty(room.num_bytes, dtype=torch.uint8))
                sums = sums[room.sums : room.flags].view(torch.bfloat16).view(-1, sizes.hidden)
                ones = at("ones", torch.empty(call.goes_to.shape))
                out = at("out", call.out)
                params = gather_weighted.params_of(sums, goes_to, ones, out)
                launches.append(
                    KernelLaunch(sum_kernel(), [params], SUM.num_threads, 0, gather_weighted.grid(SUM, *out.shape))
                )
        found.append(launches)
    return found


def check(sizes: Sizes, by_rank: list[list[Call]], found: Mapping[str, Tensor]) -> None:
    """Compare all that came, bit by bit. A slot without a route here may hold anything."""
    room = sizes.room
    for rank, calls in enumerate(by_rank):
        for i, call in enumerate(calls):
            where = f"of call {i} on rank {rank}"
            tokens = call.x.shape[0]
            _same(f"row_of {where}", found[f"goes_to {i} {rank}"][:tokens], call.goes_to)
            kept = found[f"kept {i} {rank}"].view(torch.uint8)
            ids = kept[room.ids :][: room.slots * room.topk * 4].view(torch.int32).view(room.slots, room.topk)
            _same(f"ids {where}", ids, call.ids)
            for slot, row in enumerate(call.came):
                if row is not None:
                    _same(f"row {slot} {where}", kept[slot * room.row_bytes :][: room.row_bytes], row)
            out = found[f"out {i} {rank}"][:tokens]
            _same(f"out {where}", out.view(torch.int16), call.out.view(torch.int16))
        if (missed := int(found[f"report {rank}"])) != 0:
            raise ValueError(f"rank {rank} missed rank {missed - 1}")


def _same(name: str, got: Tensor, right: Tensor) -> None:
    if not torch.equal(got, right):
        at = (got != right).nonzero()[0].tolist()
        raise ValueError(f"{name}: expected {right[tuple(at)]} at {at}, got {got[tuple(at)]}")

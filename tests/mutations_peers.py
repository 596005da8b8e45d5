"""Ways to break the kernels that write to peers and the protocol by which ranks meet, and the trials they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rank_cases import Sizes, calls_of
from rank_runs import LIMIT, buffers_of, check, compiled, launches_of, send_config

from deep_gemm.kernels.meeting import ERROR_WORD
from deep_gemm.kernels.send_rows import SendConfig
from deep_gemm.kernels.sources import cuda_sources
from deep_gemm.sim.mutate import Mutation
from deep_gemm.sim.ranks import run_ranks
from deep_gemm.sim.simulate import Simulation


@dataclass(frozen=True)
class PeerTrial:
    """Calls of some ranks, which come at different times."""

    sizes: Sizes
    seed: int
    schedule: str | None = None
    num_sms: int = 2

    @property
    def config(self) -> SendConfig:
        return send_config(self.sizes)

    def headers(self) -> dict[str, str]:
        return dict(cuda_sources())

    def run(self, headers: Mapping[str, str]) -> None:
        found, by_rank = self._simulated(headers, LIMIT)
        check(self.sizes, by_rank, found)

    def _simulated(self, headers: Mapping[str, str], limit: int, comes: int | None = None):  # type: ignore[no-untyped-def]
        by_rank = calls_of(self.sizes, self.seed)
        kernels = compiled(self.sizes, headers)
        buffers = buffers_of(self.sizes, by_rank)
        simulation = Simulation(
            buffers, num_sms=self.num_sms, seed=self.seed, schedule=self.schedule, max_steps=4 * LIMIT
        )
        run_ranks(simulation, launches_of(self.sizes, kernels, by_rank, simulation, limit, self.num_sms)[:comes])
        return {name: torch.as_tensor(each) for name, each in simulation.result().buffers.items()}, by_rank


@dataclass(frozen=True)
class AbsentTrial(PeerTrial):
    """The last rank never comes: the others say so, and write no flag from then on."""

    def run(self, headers: Mapping[str, str]) -> None:
        last = self.sizes.ranks - 1
        found, _ = self._simulated(headers, LIMIT // 2, comes=last)
        room = self.sizes.room
        for rank in range(last):
            for what, got in (("report", found[f"report {rank}"][0]), ("error", found[f"state {rank}"][ERROR_WORD])):
                if int(got) != last + 1:
                    raise ValueError(f"{what} of rank {rank}: expected {last + 1}, got {int(got)}")
        flags = found[f"room {last}"][room.flags :].view(torch.int32).view(2, -1)[:, :last]
        if flags.tolist() != [[1] * last, [0] * last]:
            raise ValueError(f"flags on the absent rank: expected epoch 1 of one meeting, got {flags.tolist()}")


TWO = Sizes(((3, 2), (0, 4), (4, 1), (2, 3)))
WIDE = Sizes(((5, 6), (6, 0), (1, 5)), max_tokens=6, hidden=1040, topk=9, dtype=torch.float32, ids=torch.int32)
THREE = Sizes(((2, 3, 1), (3, 0, 3), (1, 2, 2)), max_tokens=3, topk=2, dtype=torch.float16)
TRIALS = [
    *(PeerTrial(TWO, seed, name) for seed, name in ((1, None), (2, "slow_warps"), (3, "slow_cta"), (4, "late_stores"))),
    PeerTrial(WIDE, 5),
    *(PeerTrial(THREE, seed, name) for seed, name in ((6, None), (7, "slow_lanes"), (8, "late_stores"))),
    *(PeerTrial(TWO, seed, "slow_warps") for seed in range(9, 15)),
    AbsentTrial(TWO, 20),
    AbsentTrial(THREE, 21),
]

_MEET, _SEND, _RETURN, _SUM = "meeting.cuh", "send_rows.cuh", "return_sums.cuh", "weighted_rows.cuh"
_IDS = "routes.cuh"
_CAST = "send/cast_token.cuh"
_COUNT = "ptx::atom_add_acq_rel_b32(m.reached + 1, 1)"
MEETING_MUTATIONS = [
    Mutation("the flag is an ordinary store", _MEET, "ptx::st_release_sys_b32(flag_of(m, thread, m.rank), epoch);", "ptx::st_global_b32(flag_of(m, thread, m.rank), epoch);"),
    Mutation("the count orders nothing", _MEET, _COUNT, _COUNT.replace("_acq_rel_b32", "")),
    Mutation("the count does not wait for the block", _MEET, "thread = ptx::thread_index();\n  ptx::syncthreads();\n  if (thread == 0) {", "thread = ptx::thread_index();\n  if (thread == 0) {"),
    Mutation("flags before the last has counted for others", _MEET, "  ptx::syncthreads();\n  if (ptx::ld_shared_b32(&shared.is_last)", "  if (ptx::ld_shared_b32(&shared.is_last)"),
    Mutation("the first block sets the flags", _MEET, "1) + 1 == ptx::grid_size()", "1) == 0"),
    Mutation("the epoch is not advanced", _MEET, "      ptx::st_global_b32(m.reached, epoch);\n", ""),
    Mutation("the count does not begin anew", _MEET, "      ptx::st_global_b32(m.reached + 1, 0);\n", ""),
    Mutation("the flag is loaded without acquire", _MEET, "ptx::ld_acquire_sys_b32(flag_of", "ptx::ld_global_b32(flag_of"),
    Mutation("nobody waits", _MEET, "thread)) != epoch)", "thread)) == 1u << 31)"),
    Mutation("a rank waits for the epoch before", _MEET, "thread)) != epoch)", "thread)) != epoch && ptx::ld_acquire_sys_b32(flag_of(m, m.rank, thread)) != epoch - 1)"),
    Mutation("a rank flags itself alone", _MEET, "flag_of(m, thread, m.rank), epoch", "flag_of(m, m.rank, m.rank), epoch"),
    Mutation("a rank writes into another one's flag", _MEET, "flag_of(m, thread, m.rank), epoch", "flag_of(m, thread, thread), epoch"),
    Mutation("a rank waits for itself alone", _MEET, "flag_of(m, m.rank, thread)) != epoch", "flag_of(m, m.rank, m.rank)) != epoch"),
    Mutation("the last rank is neither told nor waited for", _MEET, "thread >= m.ranks) return", "thread >= m.ranks - 1) return"),
    Mutation("there is no limit", _MEET, "- start <= m.limit) continue", "- start <= m.limit || true) continue"),
    Mutation("the time is always over", _MEET, "- start <= m.limit) continue", "- start > m.limit) continue"),
    Mutation("the rank that waited is named", _MEET, "ptx::st_global_b32(m.report, thread + 1);", "ptx::st_global_b32(m.report, m.rank + 1);"),
    Mutation("the host is not told", _MEET, "    ptx::st_global_b32(m.report, thread + 1);\n", ""),
    Mutation("the rank forgets whom it missed", _MEET, "    ptx::st_global_b32(m.error, thread + 1);\n", ""),
    Mutation("a rank that missed another sends sums", _RETURN, "  if (!is_whole(m)) return;\n", ""),
    Mutation("a rank that missed another sends rows", _SEND, "  if (!is_whole(m)) return send_nothing(p);\n", ""),
    Mutation("a rank that missed another sums up what it finds", _SEND, "return send_nothing(p);", "return;"),
    Mutation("sums come behind their flag", _RETURN, "#pragma unroll 1\n  for (uint32_t row = ", "  meet(m, shared.meeting);\n#define meet(...)\n#pragma unroll 1\n  for (uint32_t row = "),
    Mutation("rows come behind their flag", _SEND, "#pragma unroll 1\n  for (uint32_t token = ", "  meet(m, shared.meeting);\n#define meet(...)\n#pragma unroll 1\n  for (uint32_t token = "),
]  # fmt: skip
SEND_MUTATIONS = [
    Mutation("ids of routes elsewhere stay as they are", _SEND, "        ptx::st_global_b32(m.rooms[r] + p.ids", "        if (is_here) ptx::st_global_b32(m.rooms[r] + p.ids"),
    Mutation("ids of tokens that are not there stay as they are", _SEND, "token < p.max_tokens; token += ", "token < p.tokens; token += "),
    Mutation("ids are those of all ranks", _SEND, "expert - r * p.experts_here : kNone", "expert : kNone"),
    Mutation("an expert is on every rank", _SEND, "expert != kNoExpert && expert / p.experts_here == r", "expert != kNoExpert"),
    Mutation("an id that no expert has is one", _IDS, "id - first < count ? id - first : kNoExpert", "id - first"),
    Mutation("the upper half of an id is not looked at", _IDS, "words.y == 0 ? words.x : kNoExpert", "words.x"),
    Mutation("ids of 8 bytes read as if of 4", _IDS, "ids + at * 8", "ids + at * 4"),
    Mutation("ids of the first token", _SEND, "uint64_t{token} * p.topk + j, 0, ", "j, 0, "),
    Mutation("a token goes to its last expert's rank", _SEND, "goes_to |= 1u << expert", "goes_to = 1u << expert"),
    Mutation("the first route is not looked at", _SEND, "for (uint32_t j = 0; j < p.topk; ++j) {", "for (uint32_t j = 1; j < p.topk; ++j) {"),
    Mutation("slots of the first rank", _SEND, "uint64_t{m.rank} * p.max_tokens + token;", "token;"),
    Mutation("sums are looked for on another rank", _SEND, "thread * p.max_tokens + token : kNone", "m.rank * p.max_tokens + token : kNone"),
    Mutation("sums are looked for everywhere", _SEND, "goes_to >> thread & 1 ? thread", "true ? thread"),
    Mutation("the row is sent before it is whole", _SEND, "    ptx::syncthreads();  // the row is whole\n", ""),
    Mutation("the next row is made while this one is sent", _SEND, "    ptx::syncthreads();  // all have read the row\n", ""),
    Mutation("operands are read before the kernel ahead has ended", _SEND, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("16 bytes of a row for each thread", _SEND, "at < p.row_bytes; at += kNumThreads * 16", "at < p.row_bytes && at < kNumThreads * 16; at += kNumThreads * 16"),
    Mutation("the row's last bytes are not sent", _SEND, "at < p.row_bytes; at += kNumThreads * 16", "at + 16 < p.row_bytes; at += kNumThreads * 16"),
    Mutation("words of a piece swapped", _SEND, "piece.x, piece.y, piece.z, piece.w", "piece.x, piece.z, piece.y, piece.w"),
    Mutation("a team casts one block", _CAST, "first < blocks; first += kTeams", "first < 1; first += kTeams"),
    Mutation("columns past the last are cast", _CAST, "  if (column >= p.hidden) return;\n", ""),
    Mutation("a scale of the block before", _CAST, "row + p.hidden + block * 4, cast.scale", "row + p.hidden + (block > 0 ? block - 1 : 0) * 4, cast.scale"),
    Mutation("scales behind columns of whole blocks", _CAST, "row + p.hidden + block * 4, cast.scale", "row + ceil_div(p.hidden, kBlock) * kBlock + block * 4, cast.scale"),
    Mutation("weights of the first token", _SEND, "p.topk_weights + uint64_t{token} * p.topk + j) : 0.f", "p.topk_weights + j) : 0.f"),
    Mutation("weights without their padding", _SEND, "words = (p.row_bytes - weights) / 4;", "words = p.topk;"),
    Mutation("the first token's columns", _CAST, "p.x + uint64_t{token} * p.x_pitch", "p.x"),
]  # fmt: skip
RETURN_MUTATIONS = [
    Mutation("sums go to this rank", _RETURN, "m.rooms[to] + p.sums", "m.rooms[m.rank] + p.sums"),
    Mutation("sums of one rank lie over another's", _RETURN, "(uint64_t{m.rank} * p.max_tokens + token) * p.n * 2", "(uint64_t{to} * p.max_tokens + token) * p.n * 2"),
    Mutation("sums lie at their row", _RETURN, "(uint64_t{m.rank} * p.max_tokens + token) * p.n * 2", "uint64_t{row} * p.n * 2"),
    Mutation("weights of the first row", _RETURN, "uint64_t{row} * p.row_bytes + p.weights", "p.weights"),
    Mutation("weights of the token's rank", _RETURN, "m.rooms[m.rank] + uint64_t{row}", "m.rooms[to] + uint64_t{row}"),
    Mutation("one weight for all routes", _RETURN, "weights + (route - first_route) * 4", "weights"),
    Mutation("routes of the first row", _RETURN, "first_route = uint64_t{row} * p.topk", "first_route = 0"),
    Mutation("rows of this rank's own tokens alone", _RETURN, "row < m.ranks * p.max_tokens; row +=", "row < p.max_tokens; row +="),
    Mutation("a CTA sums one row", _RETURN, "row += ptx::grid_size()", "row += m.ranks * p.max_tokens"),
    Mutation("a thread has one piece", _RETURN, "piece < p.n / kColumns; piece += kNumThreads", "piece < p.n / kColumns && piece < kNumThreads; piece += kNumThreads"),
    Mutation("no row has routes", _SUM, "      has_rows = true;\n", ""),
    Mutation("operands are read before the kernel ahead has ended", _RETURN, "  ptx::griddepcontrol_wait();\n", ""),
]  # fmt: skip

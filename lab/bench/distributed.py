"""Mixtures of experts over the processes of a group: the layer, its dispatch and its combine, compared with rivals.

Either all processes have a GPU, or no process has. Rank 0 sends measured rows to the process that started all ranks.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby, product
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from deep_gemm.across import meet_ranks, message, post_rows
from deep_gemm.across.by_group import Facts
from deep_gemm.across.by_peers import why_not
from deep_gemm.across.collectives import all_gather
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.checks import Operand
from deep_gemm.distributed import Experts, owned_experts
from deep_gemm.moe import gather_weighted
from deep_gemm.moe.api import activations_of_rows, product_of_rows
from deep_gemm.moe.check import ExpertRows
from deep_gemm.moe.routing import expert_rows, gather_cast_to_fp8, weighted_sum

from . import distributed_training, fp4_experts, mega_moe, table
from .bench import Asked, Bench, Steps
from .cases import Shape, parse_shapes
from .contenders import m_major
from .distributed_training import STEP, Training, local_ids, routes_of_all
from .experts import weights_of
from .layers import ALONE
from .products import reason
from .report import Add, Announce, Report, Row
from .timing import L2Flush, Spread

GROUP, GROUP_FIXED, FUSED, MEGA = "nccl", "nccl_fixed", "fused", "mega"
CONTENDERS = (GROUP, GROUP_FIXED, FUSED, MEGA, ALONE)
LAYER, LAYER_FP4, DISPATCH, COMBINE = "ep_layer", "ep_layer_fp4", "ep_dispatch", "ep_combine"
MEANING = "experts, top-k, tokens of each process, hidden, intermediate, exponent of Zipf's law"
"""The meaning of a shape's numbers. The shape of a training step has no exponent."""
NUMBERS = MEANING.count(", "), MEANING.count(", ") + 1
REPEATS, WARM_UPS = 30, 3
REPEATS_ON_CPU = 5
MOST_FIXED_TOKENS = 1024
"""With more tokens the decode form with collectives sends too much: each process sums for the tokens of all."""
AHEAD_CYCLES = 2_000_000
"""Clock cycles, about a millisecond, that a GPU sleeps before a replay, so that every process can launch in time."""
SECONDS = 120
"""Time limit of a process that waits for another one."""
METHOD = (
    "distributed: a process for each GPU (without GPUs: CPU tensors over Gloo, by the clock), random routes, "
    "top-k of all experts, each process with the same number of tokens; "
    f"shapes are {MEANING} by which experts are chosen (0: all alike); "
    "before each call a 512 MB fill and an all_reduce, then the call between CUDA events, launches included (those of "
    "graphs lie ahead, while GPUs sleep a millisecond); of "
    f"each call the slowest process, of {REPEATS} calls the median, least and most. nccl: the prefill form, with "
    "its wait of the host; nccl_fixed: the decode form, the layer as a replayed CUDA graph; fused: the same "
    "with peer_memory, the cast being part of its ep_dispatch; ep_layer: the whole, ep_layer_fp4: the whole with "
    "weights in MXFP4, where mega is fp8_fp4_mega_moe, ep_dispatch: rows on their "
    "way to the experts, ep_combine: sums on their way back and added up, by peer memory without the way itself, which "
    "the second product takes; product_alone: both products of a process's rows, which the busiest has most of, as a "
    "replayed graph, without anything between; mega: fp8_mega_moe, whose tokens are "
    "in FP8 before, as a replayed graph where rows go by peer memory. All forms checked: the same bits, but mega, "
    f"another function, near them; {distributed_training.METHOD}"
)
Weights = dict[str, tuple[Operand, Operand]]
"""Weights of both products, by the kind of layer that is timed: with FP8 or with FP4 weights."""
MODELS = ((256, 6, 4096, 2048), (384, 6, 7168, 3072), (256, 8, 7168, 2048))
TOKENS = (1, 8, 32, 128, 512, 1024, 4096, 8192)
SHAPES: tuple[Shape, ...] = tuple(
    (experts, topk, tokens, hidden, intermediate, skew)
    for experts, topk, hidden, intermediate in MODELS
    for skew, tokens in product((0, 1), TOKENS)
)
QUICK = (*(shape for shape in SHAPES[:8] if shape[2] in (1, 128, 4096)), distributed_training.SHAPES[0])
SHAPES += distributed_training.SHAPES
WITHOUT_GPU: tuple[Shape, ...] = ((8, 2, 16, 256, 128, 0), (8, 2, 16, 256, 128, 1), (8, 2, 16, 256, 128))
"""Shapes that a CPU computes within a few seconds."""


def measure(shapes: Sequence[Shape], processes: int, *, only: Sequence[str] = (), add: Add, announce: Announce) -> None:
    """Start the processes, and pass on their rows until they are done."""
    context = multiprocessing.get_context("spawn")
    heard = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        running = spawn(_process, (processes, str(store), shapes, only, heard), processes, join=False)  # type: ignore[no-untyped-call]
        try:
            while True:
                try:
                    what, value = heard.get(timeout=1)
                except Empty:
                    running.join(timeout=0)  # raises the exception of a process that failed
                    continue
                if what == "done":
                    break
                (add if what == "rows" else announce)(value)
            while not running.join():
                pass
        finally:
            for each in running.processes:
                each.terminate()


def _process(
    rank: int, processes: int, store: str, shapes: Sequence[Shape], only: Sequence[str], heard: Queue[Any]
) -> None:
    """Run one process. All processes run the same steps, because a collective needs all of them."""
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    how, timeout = "nccl" if on_gpus else "gloo", timedelta(seconds=SECONDS)
    dist.init_process_group(how, f"file://{store}", rank=rank, world_size=processes, timeout=timeout)

    def say(what: str, value: Any) -> None:
        if rank == 0:
            heard.put((what, value))

    try:
        clock = Clock(torch.device("cuda", rank) if on_gpus else torch.device("cpu"))
        for (is_step, *key), alike in groupby(shapes, key=lambda s: (is_trained(s), s[0], s[1], s[3], s[4])):
            experts, _, hidden, intermediate = key
            weights = None if is_step else _weights(experts, hidden, intermediate, clock.device)
            for shape in alike:
                say("step", f"{STEP if is_step else LAYER} {'x'.join(map(str, shape))}")
                say("rows", rows_of(shape, weights, clock, only))
        say("done", None)
    finally:
        dist.destroy_process_group()


def is_trained(shape: Shape) -> bool:
    """Tell whether a shape is a training step's, not a layer's: it has no exponent."""
    return len(shape) == NUMBERS[0]


def _weights(experts: int, hidden: int, intermediate: int, device: torch.device) -> Weights:
    """Make weights for this process's experts: a pair in FP8, and a different pair in FP4."""
    here, makers = owned_experts(experts), {LAYER: weights_of, LAYER_FP4: fp4_experts.weights_of}
    return {kind: make(here.stop - here.start, hidden, intermediate, str(device))[:2] for kind, make in makers.items()}


class Clock:
    """Times calls that all processes make together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = L2Flush() if device.type == "cuda" else None
        self.one = torch.ones(1, device=device, dtype=torch.float32)

    def times(self, call: Callable[[], object]) -> Spread:
        """Time the slowest process in microseconds. All start when an all_reduce ends, so nearly together."""
        repeats = REPEATS if self.flush else REPEATS_ON_CPU
        for _ in range(WARM_UPS):
            call()
        mine = torch.tensor([self._once(call) for _ in range(repeats)], dtype=torch.float64, device=self.device)
        of_all = mine.new_empty(dist.get_world_size() * repeats)
        all_gather(of_all, mine)
        slowest = of_all.view(-1, repeats).amax(dim=0).tolist()
        return Spread.of(slowest)

    def _once(self, call: Callable[[], object]) -> float:
        if self.flush is None:
            dist.barrier()
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e6
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if isinstance(call, Replayed):
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self.flush()
        dist.all_reduce(self.one)
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3


@dataclass(frozen=True)
class Step:
    """One contender's computation of one part of the layer."""

    kind: str
    contender: str
    call: Callable[[], Any]


class Work:
    """The tokens of this process, and the ways to compute their mixture."""

    def __init__(self, kind: str, shape: Shape, weights: tuple[Operand, Operand], device: torch.device) -> None:
        self.kind, self.shape, self.weights, self.device = kind, shape, weights, device
        experts, topk, tokens, hidden, _, skew = shape
        rank = dist.get_rank()
        of_all = routes_of_all(experts, topk, tokens, skew, dist.get_world_size())
        self.ids_of_all = of_all.to(device)
        self.ids = self.ids_of_all[rank * tokens :][:tokens]
        g = torch.Generator().manual_seed(1 + rank)
        self.x = torch.randn(tokens, hidden, generator=g, dtype=torch.float32).bfloat16().to(device)
        self.p = torch.rand(tokens, topk, generator=g, dtype=torch.float32).to(device)
        fixed = tokens if tokens <= MOST_FIXED_TOKENS else None
        self.layer = Experts(experts, *weights, max_tokens=fixed)
        self.has_fixed = fixed is not None
        self.fused: Experts | None = None
        if why_not(device, dist.get_world_size()) is None:
            self.fused = Experts(experts, *weights, max_tokens=tokens, peer_memory=True)
        has_mega = mega_moe.fits(hidden, shape[4])
        self.mega = mega_moe.MegaCall(self.x, self.ids, self.p, weights, experts) if has_mega else None

    def steps(self) -> Iterator[Step]:
        """Yield all timed steps. Only the whole layer depends on the weights' type, so sends are timed for one type."""
        x, ids, p, layer, fused = self.x, self.ids, self.p, self.layer, self.fused
        yield Step(self.kind, GROUP, lambda: layer(x, ids, p))
        if self.has_fixed:
            yield Step(self.kind, GROUP_FIXED, _replayed(lambda: layer.decode(x, ids, p), self.device))
        if self.mega is not None:
            yield Step(self.kind, MEGA, self.mega if self.mega.waits else _replayed(self.mega, self.device))
        yield Step(self.kind, ALONE, self._products())
        if fused is not None:
            yield Step(self.kind, FUSED, _replayed(lambda: fused.decode(x, ids, p), self.device))
        if self.kind == LAYER:
            yield from self._ways()

    def _ways(self) -> Iterator[Step]:
        """Yield the sending of rows to the experts, and the sending of sums back, of each form."""
        x, ids, p, layer = self.x, self.ids, self.p, self.layer
        if self.fused is not None:
            yield from self._fused_ways(self.fused)
        facts = Facts(self.shape[0], self.shape[3], self.shape[1], 0, 0)
        plan = layer.planner().plan(ids, None, facts)
        rows, sent = message.pack(x, ids, p, plan.row_of, sum(plan.sends)), message.pack(x, ids, p)
        sums = torch.empty(sum(plan.receives), x.shape[1], dtype=torch.bfloat16, device=self.device)
        yield Step(DISPATCH, GROUP, lambda: plan.forth(rows))
        yield Step(COMBINE, GROUP, lambda: plan.sum_up(plan.back(sums)))
        if self.has_fixed:
            everywhere = layer.everywhere(self.shape[1], False)
            back = x.new_empty(everywhere.world_size * len(x), x.shape[1])
            yield Step(DISPATCH, GROUP_FIXED, lambda: everywhere.dispatch(sent))
            yield Step(COMBINE, GROUP_FIXED, lambda: everywhere.combine(back, len(x), None))

    def _fused_ways(self, fused: Experts) -> Iterator[Step]:
        x, ids, p = self.x, self.ids, self.p
        peers, routes = fused.connected(ids.shape[1]), torch.empty_like(ids, dtype=torch.int32)
        out = torch.empty_like(x, dtype=torch.bfloat16)

        def combine() -> None:
            meet_ranks.run(peers.node, x.get_device())
            gather_weighted.run(peers.results, routes, p, out)

        dispatch = partial(post_rows.run, x, ids, p, routes, peers.node)
        dispatch()
        yield Step(DISPATCH, FUSED, _replayed(dispatch, self.device))
        yield Step(COMBINE, FUSED, _replayed(combine, self.device))

    def check(self) -> str | None:
        """Check that all forms give the same results on every process; return a text about a difference, or None."""
        layers = {"decode": (self.layer, self.layer(self.x, self.ids, self.p))} if self.has_fixed else {}
        if self.fused is not None:
            layers["peer_memory"] = (self.fused, self._of_one_process())
        for name, (layer, right) in layers.items():
            got = layer.decode(self.x, self.ids, self.p)
            assert got is not None
            if wrong := self._of_all(got != right):
                return f"wrong: {wrong} elements of {name} differ from the right ones"
        if self.mega is not None:
            is_near = self.mega.is_near(self.layer(self.x, self.ids, self.p))
            if far := self._of_all(torch.tensor(not is_near, dtype=torch.bool, device=self.device)):
                return f"wrong: fp8_mega_moe is far from the layer on {far} processes"
        return None

    def _of_all(self, found: Tensor) -> int:
        """Count the True elements of `found` on all processes."""
        count = found.sum()
        dist.all_reduce(count)
        return int(count)

    def _of_one_process(self) -> Tensor:
        """Compute like one process with all experts: each route alone, so that no rank rounds, then the routes' sum."""
        routes = [
            self.layer(self.x, self.ids[:, [j]], torch.ones_like(self.p[:, [j]])) for j in range(self.ids.shape[1])
        ]
        y = torch.stack(routes, dim=1).flatten(0, 1)
        row_of = torch.arange(len(y), device=self.device, dtype=torch.int32).view(self.ids.shape)
        return weighted_sum(y, row_of, self.p).bfloat16()

    def _products(self) -> Callable[[], object]:
        """Return a call of both grouped products on this process's rows, with operands made beforehand."""
        share, (w1, w2) = self.layer.share, self.weights
        ids = local_ids(self.ids_of_all, share.first, share.here)
        ids = ids[(ids >= 0).any(dim=1)]
        rows = expert_rows(ids, share.here)
        count = int((ids >= 0).sum())
        rows = rows._replace(token_of=rows.token_of[:count], ids=rows.ids[:count])
        if not count:
            return lambda: None
        x = torch.randn(len(ids), share.hidden, dtype=torch.bfloat16, device=self.device)
        a = m_major(gather_cast_to_fp8(x, rows))
        b = activations_of_rows(a, w1, rows, Gating())
        return _replayed(lambda: _both(a, w1, b, w2, rows), self.device)


def _steps_of(work: Training) -> Iterator[Step]:
    """Yield all timed steps of training."""
    yield Step(STEP, GROUP, work.step)
    yield Step(STEP, ALONE, _replayed(work.products(), work.x.device))


class Replayed:
    """A call as a CUDA graph. The host launches ahead, so that no GPU waits for another rank's launch."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call  # keeps the tensors alive that the graph reads
        call()  # compiles the kernels, and connects NCCL
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread calls CUDA too
            call()

    def __call__(self) -> None:
        """Replay the graph."""
        self.graph.replay()


def _replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the call as a CUDA graph; on a CPU, return it unchanged."""
    return call if device.type == "cpu" else Replayed(call)


def _both(a: Quantized, w1: Operand, b: Quantized, w2: Operand, rows: ExpertRows) -> None:
    product_of_rows(a, w1, rows)
    product_of_rows(b, w2, rows)


def rows_of(shape: Shape, weights: Weights | None, clock: Clock, only: Sequence[str]) -> list[Row]:
    """Check and time a shape. Every process makes the same calls. Training makes its own weights."""
    if weights is None:
        return _timed(STEP, shape, partial(Training, shape, clock.device), clock, only)
    works = ((kind, partial(Work, kind, shape, both, clock.device)) for kind, both in weights.items())
    return [row for kind, make in works for row in _timed(kind, shape, make, clock, only)]


def _timed(kind: str, shape: Shape, make: Callable[[], Any], clock: Clock, only: Sequence[str]) -> list[Row]:
    """Make the work of a kind of rows, check it and time its steps."""
    config = f"{dist.get_world_size()} processes"
    try:
        work = make()
        wrong = work.check()
    except Exception as error:
        wrong = reason(error)
    if wrong is not None:
        return [Row(kind, shape, GROUP, "cold", config=config, failed=wrong)]
    found = []
    for step in work.steps() if isinstance(work, Work) else _steps_of(work):
        if not only or step.contender in only:
            spread = asdict(clock.times(step.call))
            found.append(Row(step.kind, shape, step.contender, "cold", config=config, **spread))
    return found


def plan(asked: Asked) -> Steps:
    """Plan timings of mixtures of experts: one process for each GPU, or small mixtures over Gloo if there is no GPU."""
    gpus = torch.cuda.device_count()
    count = asked.processes if asked.processes is not None else gpus or 2
    if count < 1 or (gpus and count > gpus):
        most = f"1 to {gpus}, the number of GPUs" if gpus else "at least 1"
        raise ValueError(f"processes: expected {most}, got {count}")
    if asked.shapes is not None:
        shapes: Sequence[Shape] = parse_shapes(asked.shapes, NUMBERS, "256,6,128,4096,2048,0", 0, MEANING)
    elif gpus:
        shapes = QUICK if asked.quick else SHAPES
    elif asked.quick:
        shapes = WITHOUT_GPU
    else:
        raise ValueError("bench distributed measures GPUs and found none; --quick and --shapes run anywhere")
    for shape in shapes:
        if shape[0] % count or shape[1] > shape[0]:
            raise ValueError(f"shapes: expected experts for {count} processes to share, at least top-k, got {shape}")
    return len(shapes), lambda add, announce: measure(shapes, count, only=asked.only, add=add, announce=announce)


def tables(report: Report) -> list[Table | str]:
    """Tabulate each contender's time, and how much longer the fastest one takes than the products alone."""
    found: dict[tuple[str, Shape], dict[str, Row]] = {}
    for row in report.rows:
        found.setdefault((row.kind, row.shape), {})[row.contender] = row
    lines = [table.Line(next(iter(rows.values())), rows) for rows in found.values()]
    short = {GROUP_FIXED: "fixed", ALONE: "products"}
    columns = (
        table.KIND,
        table.Column("experts", lambda line: str(line.row.shape[0])),
        table.Column("tokens", lambda line: str(line.row.shape[2])),
        table.Column("skew", lambda line: str((*line.row.shape, 0)[5])),
        *(table.time(name, short.get(name, name)) for name in CONTENDERS),
        table.Column("more", lambda line: table.figure(_more(line))),
    )
    said = "microseconds of the slowest process; more: the fastest way over the products alone"
    return [table.table_of("distributed", columns, lines, gap=1), said]


def _more(line: table.Line) -> float | None:
    alone = line.us(ALONE)
    ways = [us for name in line.others if name not in (ALONE, MEGA) and (us := line.us(name))]
    return min(ways) - alone if ways and alone else None


BENCH = Bench("distributed", METHOD, plan, tables, contenders=CONTENDERS, needs_gpu=lambda _: False)

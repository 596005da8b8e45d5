"""Predict the gain of one stream of tasks over both products of experts across GPUs: python docs/model_lag.py

The script writes the tables of "What a lag would bring: a model" in experts_across_gpus.md. Constants are fitted to
the files of two GPUs, and of four H200 on 2026-11-29, among benchmarks/results/distributed-*.json. They are judged by
times that the fit did not use: whole calls of all files, and products of four and eight GPUs in the older files. Rates
of the link and of an SM's stores are from performance_log.md.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from model_nodes import Layer, Line, experts_here, operations_of

from deep_gemm.core.meeting import Room
from deep_gemm.gemm.choose.cost import together

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "experts_across_gpus.md"
BEGIN, END = "<!-- docs/model_lag.py writes this -->\n", "<!-- the model of a lag ends here -->"

SMS = 132
BLOCK_ROWS, TASK_COLUMNS = 128, 256
"""A task multiplies up to this many rows of one expert by this many columns of its weight."""

LINK_GB_S = {2: 287.0, 4: 287.0, 8: 260.0}
"""The link's rate in one direction while the second product stores, by number of GPUs (log, 2026-11-27).

On four H200 the rate was 278 to 295 GB/s, on eight 250 to 270. On two the link was never the limit.
"""
ACTIVATION = 75 / (2314 * 2 / 3)
"""The part of the first product's time that activating adds (log, 2026-11-25; the same call as for routes)."""
WORSE_LINK_GB_S, WORSE_TASKS = 250.0, 1.05
"""Pessimistic assumptions: the lowest link rate of eight H200 in the second product, and all tasks 5% longer.

Beside 8, 16 and 32 CTAs that only copied, products took 0.5, 3.4 and 5.2% longer on the other SMs (log, 2026-11-28).
"""
SM_GB_S = 205 / 8
"""Stores of one SM through registers: 8 CTAs of an H100 sent 205 GB/s (log, 2026-11-28)."""
ROUTES_US = 9.0
"""The time of the kernel that finds a row for each route (log, 2026-11-25: two H200, 8192 tokens of 4096x2048)."""

NARROW = Layer(4096, 2048, 256, 6)
DEEP = Layer(7168, 2048, 256, 8)
MORE = Layer(4096, 2048, 288, 8)
WIDE = Layer(7168, 3072, 384, 6)
CALLS = ((NARROW, 1024), (NARROW, 2048), (NARROW, 4096), (NARROW, 8192), (MORE, 8192), (WIDE, 8192))
AIMS_EIGHT_H100 = (450, 700, 1250, 2500, 3300, 6200)
"""The aims for `CALLS`, in microseconds."""
AIM_OF_PUBLIC, AIM_OF_PRODUCTS = 0.70, 1.10
"""Aims for two GPUs: the part of the public mega MoE's time, and of the time of both products alone."""
PUBLIC_US = {
    "H200": {(NARROW, 1024): 901.5, (NARROW, 4096): 2209.0, (NARROW, 8192): 3860.0, (WIDE, 8192): 10146.1},
    "H100": {(NARROW, 1024): 1255.1, (NARROW, 4096): 2996.1, (NARROW, 8192): 5003.8, (WIDE, 8192): 11983.0},
}
"""Times of the public FP8 mega MoE on two GPUs: August's on H200 (2026-11-28), July's on H100 (2026-11-25)."""

STORED_BESIDE = {
    (2, NARROW, 4096): (1576, 1531),
    (2, NARROW, 8192): (2683, 2611),
    (2, WIDE, 8192): (7304, 7095),
    (2, DEEP, 4096): (3431, 3348),
    (4, NARROW, 8192): (2769, 2777),
    (4, WIDE, 8192): (6708, 6526),
    (4, DEEP, 8192): (6188, 6195),
}
"""Times on H200 before and after idle warps stored results, alternating on one machine (log, 2026-11-27)."""

LAGS = tuple(round(SMS * waves) for waves in (0.5, 1, 1.5, 2, 3, 6))
FEW_TOKENS = 512
"""The fit ignores products of fewer tokens, because the busiest GPU then has more than its share of experts."""
RINGS = (4, 8, 16)
"""Numbers of blocks by which a ring may exceed the smallest ring."""
JUDGED_TOKENS = (1024, 2048, 4096, 8192)
TOLERANCE = 0.002
"""The best lag and ring are the smallest whose time exceeds the least time by at most this part."""

PRODUCTS, CALL = "ep_layer/product_alone", "ep_layer/fused"
"""Fields of result files: both products alone, and the whole call by peer memory."""
LAG = "lag"
"""In place of a field: a whole call by one kernel with a lag."""


class Key(NamedTuple):
    """A row of a result file: the layer, tokens of each GPU, and the row's kind and contender."""

    layer: Layer
    tokens: int
    field: str


@cache
def measured(name: str) -> dict[Key, float]:
    """List microseconds with even routes, from the result file with this beginning of its name."""
    (file,) = RESULTS.glob(f"distributed-{name}-*.json")
    times = {}
    for each in json.loads(file.read_text())["rows"]:
        if each["us"] is not None and len(each["shape"]) == 6 and not each["shape"][5]:
            experts, topk, tokens, hidden, intermediate, _ = each["shape"]
            layer = Layer(hidden, intermediate, experts, topk)
            times[Key(layer, tokens, f"{each['kind']}/{each['contender']}")] = each["us"]
    return times


@dataclass(frozen=True)
class Gpu:
    """The fitted constants of one kind of GPU."""

    name: str
    tflops: float
    """The rate of both products, for needed and wasted rows."""
    vain_rows: float
    """The number of wasted rows that are multiplied at the end of an expert's rows."""
    dram_tb_s: float
    """The rate at which products read weights."""
    post: Line
    """The time to store tokens for peers, and of a meeting, by bytes of rows."""
    sums: Line
    """The time of a meeting, and to add up results, by bytes of results."""
    link_gb_s: float | None = None
    """The link's rate; None means the log's rate for the number of GPUs."""

    def products_us(self, layer: Layer, ranks: int, tokens: int, activation: float = 0.0) -> float:
        """Give the time of both products. The first product takes two thirds, and activates unless it runs alone."""
        rows = tokens * layer.topk / experts_here(layer, ranks)
        multiplied = (
            operations_of(layer, tokens) * (1 + self.vain_rows / rows) * (1 + activation * 2 / 3) / self.tflops / 1e6
        )
        weights = experts_here(layer, ranks) * 3 * layer.hidden * layer.intermediate / self.dram_tb_s / 1e6
        return together(multiplied, weights)


@dataclass(frozen=True)
class Work:
    """The tasks of one GPU. A block has at most `BLOCK_ROWS` rows, of one expert. All blocks have equal tasks."""

    blocks: int
    first: int
    """Tasks of a block in the first product."""
    second: int
    first_us: float
    second_us: float
    tokens_us: float
    """The link's time for a block's tokens."""
    results_us: float
    """The link's time for a task's results."""
    store_us: float
    """An SM's time to store a task's results, to any GPU."""
    stores_beside: bool
    """Whether idle warps store results while the SM multiplies its next task."""
    sms: int = SMS

    @property
    def products_us(self) -> float:
        """Give the time of all tasks, if SMs never wait."""
        return self.blocks * (self.first * self.first_us + self.second * self.second_us) / self.sms

    @property
    def link_us(self) -> float:
        """Give the time of all rows and results on the link, if the link never waits."""
        return self.blocks * (self.tokens_us + self.second * self.results_us)


def work_of(gpu: Gpu, layer: Layer, ranks: int, tokens: int, *, stores_beside: bool) -> Work:
    """Divide a call into tasks."""
    rows = tokens * layer.topk
    experts = experts_here(layer, ranks)
    blocks = round(experts * max(rows / experts / BLOCK_ROWS + 0.5, 1))
    first, second = (math.ceil(columns / TASK_COLUMNS) for columns in (2 * layer.intermediate, layer.hidden))
    both = gpu.products_us(layer, ranks, tokens)
    first_us = gpu.products_us(layer, ranks, tokens, ACTIVATION) - both / 3
    there = tokens * layer.wants(ranks) * (ranks - 1) * layer.there_bytes
    back = rows * layer.back_bytes
    link = (gpu.link_gb_s or LINK_GB_S[ranks]) * 1e3
    return Work(
        blocks,
        first,
        second,
        first_us=first_us * SMS / (blocks * first),
        second_us=both / 3 * SMS / (blocks * second),
        tokens_us=there / link / blocks,
        results_us=back * (ranks - 1) / ranks / link / (blocks * second),
        store_us=back / (blocks * second) / (SM_GB_S * 1e3),
        stores_beside=stores_beside,
    )


def stream(work: Work, lag: int | None) -> Iterator[tuple[int, bool]]:
    """Yield (block, whether the task is the second product's), in the order in which SMs start tasks.

    A block's second product starts `lag` tasks after the end of its first product; if None, after all first products.
    """
    due = 0
    for task in range(work.blocks * work.first):
        while lag is not None and (due + 1) * work.first + lag <= task:
            yield from [(due, True)] * work.second
            due += 1
        yield task // work.first, False
    for block in range(due, work.blocks):
        yield from [(block, True)] * work.second


def least_ring(work: Work, lag: int) -> int:
    """Count the blocks of the smallest ring without a deadlock: no task waits for a later task of the stream."""
    return math.ceil(lag / work.first) + 1


def simulate(work: Work, lag: int | None = None, ring: int | None = None) -> float:
    """Give the microseconds from the first token on the link to the last stored result.

    Each SM starts the next task of the stream. All bytes use one link, in the order of requests. A block's tokens are
    fetched when a slot of the ring is free. The ring has `ring` slots, or one for each block if `ring` is None. A slot
    holds its block's tokens and activations until the second product has read them.
    """
    slots = work.blocks if ring is None else min(ring, work.blocks)
    if lag is not None and slots < min(least_ring(work, lag), work.blocks):
        raise ValueError(f"ring: expected at least {least_ring(work, lag)} blocks for a lag of {lag}, got {ring}")
    arrived = [(block + 1) * work.tokens_us for block in range(slots)] + [math.inf] * (work.blocks - slots)
    link = arrived[slots - 1]
    middle, read, left = [0.0] * work.blocks, [0.0] * work.blocks, [work.second] * work.blocks
    stored = [0.0] * work.sms
    free = [(0.0, sm) for sm in range(work.sms)]
    has_begun = False
    for block, is_second in stream(work, lag):
        if is_second and lag is None and not has_begun:  # it is a separate kernel
            has_begun, over = True, max(free)[0]
            free = [(over, sm) for sm in range(work.sms)]
        begin, sm = free[0]
        if not is_second:
            end = max(max(begin, arrived[block]) + work.first_us, stored[sm])
            middle[block] = max(middle[block], end)
            heapq.heapreplace(free, (end, sm))
            continue
        end = max(max(begin, middle[block]) + work.second_us, stored[sm])
        link = max(link, end) + work.results_us
        stored[sm] = max(end + work.store_us, link)
        heapq.heapreplace(free, (end if work.stores_beside else stored[sm], sm))
        read[block] = max(read[block], end)
        left[block] -= 1
        if not left[block] and block + slots < work.blocks:
            link = max(link, read[block]) + work.tokens_us
            arrived[block + slots] = link
    return max(stored)


def around_us(gpu: Gpu, layer: Layer, tokens: int) -> float:
    """Give the time of a call without its products: storing tokens for peers, routes, sums."""
    return gpu.post.us(tokens * layer.there_bytes) + ROUTES_US + gpu.sums.us(tokens * layer.topk * layer.back_bytes)


def in_turn_us(gpu: Gpu, layer: Layer, ranks: int, tokens: int, *, stores_beside: bool) -> float:
    """Give the time of a call whose second product runs behind the first."""
    work = work_of(gpu, layer, ranks, tokens, stores_beside=stores_beside)
    return around_us(gpu, layer, tokens) + simulate(work)


def fit(error: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Search for constants with a small error: change one at a time, from `start` on, by factors that get smaller."""
    best, step = list(start), 0.2
    least = error(best)
    while step > 1e-3:
        before = least
        for place in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = [x * factor if i == place else x for i, x in enumerate(best)]
                if (found := error(tried)) < least:
                    best, least = tried, found
        if least == before:
            step /= 2
    return best


@cache
def fitted(name: str, *files: tuple[str, int]) -> Gpu:
    """Fit a kind of GPU to files, each with its number of GPUs, with all layers.

    - products: `ep_layer/product_alone`, from 512 tokens on, but not if the whole call takes less time than both
      products (measured alone, the first product writes its result in BF16);
    - storing tokens for peers: `ep_dispatch/fused`; sums: `ep_combine/fused`, with all numbers of tokens.
    """
    times = [(ranks, key, us, measured(file)) for file, ranks in files for key, us in measured(file).items()]

    def line(field: str, num_bytes: Callable[[Key], float]) -> Line:
        return Line.fit([(num_bytes(key), us) for _, key, us, _ in times if key.field == field])

    post = line("ep_dispatch/fused", lambda key: key.tokens * key.layer.there_bytes)
    sums = line("ep_combine/fused", lambda key: key.tokens * key.layer.topk * key.layer.back_bytes)
    both = {
        (key.layer, ranks, key.tokens): us
        for ranks, key, us, of_file in times
        if key.field == PRODUCTS and key.tokens >= FEW_TOKENS and us < of_file[key._replace(field=CALL)]
    }

    def made(constants: Sequence[float]) -> Gpu:
        tflops, vain_rows, dram_tb_s = constants
        return Gpu(name, tflops, vain_rows, dram_tb_s, post, sums)

    def error(constants: Sequence[float]) -> float:
        gpu = made(constants)
        return sum(math.log(gpu.products_us(*call) / us) ** 2 for call, us in both.items())

    return made(fit(error, (1300.0, 64.0, 4.0)))


@dataclass(frozen=True)
class Lag:
    """The best lag of a call, and the smallest ring for this lag."""

    us: float
    tasks: int
    ring_rows: int


def lag_us(gpu: Gpu, layer: Layer, ranks: int, tokens: int, lag: int, ring: int) -> float:
    """Give the time of a call with a lag and a ring, by the simulator."""
    work = work_of(gpu, layer, ranks, tokens, stores_beside=True)
    return around_us(gpu, layer, tokens) + simulate(work, lag, ring)


@cache
def best_lag(gpu: Gpu, layer: Layer, ranks: int, tokens: int) -> Lag:
    """Search lags and rings for the smallest ring near the least time."""
    work = work_of(gpu, layer, ranks, tokens, stores_beside=True)
    around = around_us(gpu, layer, tokens)
    found = []
    for lag, more in product(LAGS, RINGS):
        ring = min(least_ring(work, lag) + more, work.blocks)
        found.append(Lag(around + simulate(work, lag, ring), lag, ring * BLOCK_ROWS))
    least = min(each.us for each in found)
    return min((each for each in found if each.us <= least * (1 + TOLERANCE)), key=lambda each: each.ring_rows)


class Judged(NamedTuple):
    """A time of the model, and the measured time."""

    ranks: int
    gpu: Gpu
    layer: Layer
    tokens: int
    field: str
    model_us: float
    us: float

    @property
    def error(self) -> float:
        """Give the model's relative error."""
        return self.model_us / self.us - 1


FILES = (("2026", 2, False), ("4-2026", 4, False), ("8", 8, True), ("h100", 2, False), ("4-h200-2026-11-29", 4, None))
"""Names of result files, their GPUs, and the calls at their commit: whether warps without other work stored results, as
one product followed the other; None: one kernel with a lag, whose products the fit saw."""


def judge() -> Iterator[Judged]:
    """Compare the model with all four files. The fit used products of two GPUs, and no call."""
    for name, ranks, beside in FILES:
        gpu = H100 if name == "h100" else H200
        for (layer, tokens, field), us in measured(name).items():
            if tokens not in JUDGED_TOKENS:
                continue
            if field == PRODUCTS and beside is not None:
                yield Judged(ranks, gpu, layer, tokens, field, gpu.products_us(layer, ranks, tokens), us)
            elif field == CALL and beside is not None:
                us_of_model = in_turn_us(gpu, layer, ranks, tokens, stores_beside=beside)
                yield Judged(ranks, gpu, layer, tokens, field, us_of_model, us)
            elif field == CALL:
                yield Judged(ranks, gpu, layer, tokens, LAG, best_lag(gpu, layer, ranks, tokens).us, us)


def buffer_mib(layer: Layer, ranks: int, tokens: int, rows: int | None = None) -> float:
    """Give the memory of `fp8_mega_moe`: the room, tokens, and both products' rows, or a ring of `rows` rows."""
    rows = ranks * tokens * layer.topk if rows is None else rows
    row_bytes = layer.hidden * (1 + 4 / 128) + layer.intermediate * (1 + 4 / 64)
    tokens_bytes = tokens * layer.hidden * (1 + 4 / 128)
    return (Room(ranks, tokens, layer.hidden, layer.topk).num_bytes + tokens_bytes + rows * row_bytes) / 2**20


def name_of(layer: Layer) -> str:
    """Name a layer in a table."""
    return f"{layer.experts}x{layer.hidden}x{layer.intermediate}"


def row(*cells: object) -> str:
    """Give a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(*head: object) -> list[str]:
    """Give the first two rows of a table."""
    return [row(*head), "|" + "---|" * len(head)]


def fitted_lines() -> Iterator[str]:
    """Yield the fitted constants."""
    yield from table("fitted", "TFLOPS", "wasted rows", "weights", "storing tokens", "sums")
    for gpu in (H200, H100):
        lines = (f"{x.start_us:.0f} us, {x.gb_s:.0f} GB/s" for x in (gpu.post, gpu.sums))
        yield row(gpu.name, f"{gpu.tflops:.0f}", f"{gpu.vain_rows:.0f}", f"{gpu.dram_tb_s:.2f} TB/s", *lines)
    yield ""


def judged_lines() -> Iterator[str]:
    """Yield the times of the model, and measured times."""
    found = list(judge())
    for field, title in ((CALL, "in turn"), (LAG, "one kernel"), (PRODUCTS, "products")):
        yield from table(title, *JUDGED_TOKENS)
        rows: dict[str, dict[int, str]] = {}
        for each in found:
            if each.field == field:
                name = f"{each.ranks} {each.gpu.name} {name_of(each.layer)}"
                cell = f"{each.model_us:.0f}/{each.us:.0f} {100 * each.error:+.0f}"
                rows.setdefault(name, {})[each.tokens] = cell
        yield from (row(name, *(cells.get(n, "") for n in JUDGED_TOKENS)) for name, cells in rows.items())
        yield ""
    yield from table("8192 tokens", "call minus products, model/measured", "ratio")
    most = {(each.ranks, each.gpu, each.layer, each.field): each for each in found if each.tokens == 8192}
    for (ranks, gpu, layer, field), call in most.items():
        if field != CALL:
            continue
        products = most[ranks, gpu, layer, PRODUCTS]
        more, measured_more = call.model_us - products.model_us, call.us - products.us
        if measured_more > 0:
            name = f"{ranks} {gpu.name}, {name_of(layer)}"
            yield row(name, f"{more:.0f}/{measured_more:.0f}", f"{more / measured_more:.2f}")
    yield ""
    yield from table("stores during the next tile", "measured", "model")
    for (ranks, layer, tokens), (before, after) in STORED_BESIDE.items():
        slow, fast = (in_turn_us(H200, layer, ranks, tokens, stores_beside=x) for x in (False, True))
        ratios = f"{before} -> {after}: {after / before:.3f}", f"{slow:.0f} -> {fast:.0f}: {fast / slow:.3f}"
        yield row(f"{ranks} H200, {layer.hidden}x{layer.intermediate}, {tokens}", *ratios)
    yield ""


class Predicted(NamedTuple):
    """Times of a call, in microseconds."""

    in_turn_us: float
    lag: Lag
    worse_us: float


@cache
def predict(gpu: Gpu, layer: Layer, ranks: int, tokens: int) -> Predicted:
    """Predict today's call, the best lag, and the same lag under the pessimistic assumptions."""
    lag = best_lag(gpu, layer, ranks, tokens)
    worse = replace(
        gpu, tflops=gpu.tflops / WORSE_TASKS, dram_tb_s=gpu.dram_tb_s / WORSE_TASKS, link_gb_s=WORSE_LINK_GB_S
    )
    blocks = lag.ring_rows // BLOCK_ROWS
    return Predicted(
        in_turn_us(gpu, layer, ranks, tokens, stores_beside=True),
        lag,
        lag_us(worse, layer, ranks, tokens, lag.tasks, blocks),
    )


def predicted_lines(gpu: Gpu, ranks: int) -> Iterator[str]:
    """Yield the predictions for one machine."""
    yield from table(f"{ranks} {gpu.name}", "tokens", "products", "link", "in turn", "lag", "worse", "tasks", "ring")
    for layer, tokens in CALLS:
        work, found = work_of(gpu, layer, ranks, tokens, stores_beside=True), predict(gpu, layer, ranks, tokens)
        times = gpu.products_us(layer, ranks, tokens), work.link_us, found.in_turn_us, found.lag.us, found.worse_us
        cells = *(f"{us:.0f}" for us in times), found.lag.tasks, found.lag.ring_rows
        yield row(name_of(layer), tokens, *cells)
    yield ""


def aims_lines() -> Iterator[str]:
    """Yield the predictions beside the aims."""
    yield from table("8 H100", "tokens", "aim, us", "in turn", "lag", "worse", "room")
    for (layer, tokens), aim in zip(CALLS, AIMS_EIGHT_H100, strict=True):
        found = predict(H100, layer, 8, tokens)
        times = found.in_turn_us, found.lag.us, found.worse_us
        room = (found.in_turn_us - found.lag.us) / H100.products_us(layer, 8, tokens)
        yield row(name_of(layer), tokens, aim, *(f"{us:.0f} ({us / aim:.2f})" for us in times), f"{100 * room:.0f}%")
    yield ""
    head = f"of the public ({AIM_OF_PUBLIC:.2f})", f"of the products ({AIM_OF_PRODUCTS:.2f})"
    yield from table("two, lag (worse)", "tokens", *head)
    for gpu in (H200, H100):
        for (layer, tokens), public in PUBLIC_US[gpu.name].items():
            found = predict(gpu, layer, 2, tokens)
            products = gpu.products_us(layer, 2, tokens)
            cells = (f"{found.lag.us / x:.2f} ({found.worse_us / x:.2f})" for x in (public, products))
            yield row(f"{gpu.name}, {name_of(layer)}", tokens, *cells)
    yield ""


def ring_lines(layer: Layer = NARROW, ranks: int = 8, tokens: int = 8192) -> Iterator[str]:
    """Yield the time of a call for each lag and ring."""
    work = work_of(H100, layer, ranks, tokens, stores_beside=True)
    extra = (0, 4, 8, 16, 32, 64)
    yield from table("lag, its least ring", "least", *(f"+{more * BLOCK_ROWS}" for more in extra[1:]))
    for lag in (*LAGS, 12 * SMS):
        least = least_ring(work, lag)
        times = (lag_us(H100, layer, ranks, tokens, lag, least + more) for more in extra)
        yield row(f"{lag}, {least * BLOCK_ROWS} rows", *(f"{us:.0f}" for us in times))
    yield ""


def memory_lines() -> Iterator[str]:
    """Yield the memory of a buffer: today's, and with the rings of H200."""
    yield from table("MiB, today -> with a ring", "tokens", *(f"{ranks} GPUs" for ranks in (2, 4, 8)))
    for layer, tokens in CALLS:
        cells = []
        for ranks in (2, 4, 8):
            ring = best_lag(H200, layer, ranks, tokens).ring_rows
            cells.append(f"{buffer_mib(layer, ranks, tokens):.0f} -> {buffer_mib(layer, ranks, tokens, ring):.0f}")
        yield row(name_of(layer), tokens, *cells)
    yield ""


H200, H100 = fitted("H200", ("2026", 2), ("4-h200-2026-11-29", 4)), fitted("H100", ("h100", 2))


def section() -> str:
    """Give the tables."""
    lines = [*fitted_lines(), *judged_lines()]
    for gpu, ranks in ((H200, 2), (H200, 4), (H200, 8), (H100, 2), (H100, 8)):
        lines += predicted_lines(gpu, ranks)
    return "\n".join([*lines, *aims_lines(), *ring_lines(), *memory_lines()])


def page() -> str:
    """Give the page with today's tables."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + section() + text[end:]


if __name__ == "__main__":
    print(section())
    PAGE.write_text(page())

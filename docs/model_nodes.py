"""Estimates times of experts across nodes from measured times of one node: python docs/model_nodes.py

The script writes the tables of "Beyond a node" in experts_across_gpus.md. Times of collectives are in
benchmarks/collectives-h200x4-2026-11-22.json. Lines are fitted to the times with hidden = 4096, and judged by the times
with 7168. The rate of products, and the layer on which the model of one node is judged, are from the newest of the
files benchmarks/results/distributed-*.json with the largest number of H200.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm.gemm.choose.cost import together

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "collectives-h200x4-2026-11-22.json"
PAGE = ROOT / "docs" / "experts_across_gpus.md"
BEGIN, END = "<!-- docs/model_nodes.py writes this -->\n", "<!-- as far as here -->"

GPU, MEASURED_GPUS = "NVIDIA H200", 4
FITTED_HIDDEN, JUDGED_HIDDEN = 4096, 7168
GPUS_OF_A_NODE = 8
NODES = (1, 2, 4, 8, 16, 32, 64)
TOKENS = (128, 4096)
DRAM_TB_S = 4.2
"""The rate of cold copies on an H200."""
TILE_ROWS = 64
"""Rows of an expert that are multiplied at a time."""


@dataclass(frozen=True)
class Line:
    """A time that grows with bytes."""

    start_us: float
    gb_s: float

    def us(self, num_bytes: float) -> float:
        """Give the microseconds that this number of bytes takes."""
        return self.start_us + num_bytes / self.gb_s / 1e3

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line through (bytes, microseconds) with the least squares of relative errors."""
        ones = sum(1 / us**2 for _, us in points)
        xs = sum(x / us**2 for x, us in points)
        xx = sum((x / us) ** 2 for x, us in points)
        y, xy = sum(1 / us for _, us in points), sum(x / us for x, us in points)
        slope = (ones * xy - xs * y) / (ones * xx - xs**2)
        return cls((y - slope * xs) / ones, 1e-3 / slope)


NETWORK = Line(start_us=20.0, gb_s=40.0)
"""Assumptions: the time of a message without its bytes, and 80% of 400 Gbit/s for each GPU."""


@dataclass(frozen=True)
class Layer:
    """A mixture in which every expert is equally likely."""

    hidden: int
    intermediate: int
    experts: int
    topk: int

    @property
    def there_bytes(self) -> int:
        """Count the bytes of a token's row: FP8 values, scales, routes."""
        return self.hidden + 4 * (self.hidden // 128 + 2 * self.topk)

    @property
    def back_bytes(self) -> int:
        """Count the bytes of a sum in BF16."""
        return 2 * self.hidden

    def wants(self, parts: int) -> float:
        """Give the probability that a token needs one of `parts` equal parts of the experts."""
        return 1 - (1 - 1 / parts) ** self.topk


LAYER = Layer(7168, 3072, 384, 6)


@dataclass(frozen=True)
class Copies:
    """Copies of a token that one GPU sends: over NVLink, forwarded ones included, and over the network."""

    within: float
    beyond: float


def copies_to_ranks(layer: Layer, nodes: int, gpus: int = GPUS_OF_A_NODE) -> Copies:
    """Count one copy for each rank that has any of the token's experts; a node has `gpus` GPUs."""
    ranks = nodes * gpus
    return Copies(layer.wants(ranks) * (gpus - 1), layer.wants(ranks) * (ranks - gpus))


def copies_to_nodes(layer: Layer, nodes: int) -> Copies:
    """Count one copy for each node; the receiving GPU forwards it to the GPUs of its node that need it."""
    ranks = nodes * GPUS_OF_A_NODE
    beyond = layer.wants(nodes) * (nodes - 1) if nodes > 1 else 0.0
    forwarded = layer.wants(ranks) * (nodes - 1) * (GPUS_OF_A_NODE - 1)
    return Copies(layer.wants(ranks) * (GPUS_OF_A_NODE - 1) + forwarded, beyond)


def way_us(copies: Copies, tokens: int, row_bytes: int, within: Line) -> float:
    """Give the time of rows to experts, or of sums back: NVLink and network send at the same time."""
    times = [within.us(tokens * copies.within * row_bytes)]
    if copies.beyond:
        times.append(NETWORK.us(tokens * copies.beyond * row_bytes))
    return max(times)


def ways_us(copies: Copies, layer: Layer, tokens: int, within: Line) -> float:
    """Give the time of rows to experts and of sums back."""
    return sum(way_us(copies, tokens, size, within) for size in (layer.there_bytes, layer.back_bytes))


def operations_of(layer: Layer, tokens: int) -> float:
    """Count the multiplications and additions of both products of one GPU."""
    return 6 * tokens * layer.topk * layer.hidden * layer.intermediate


def gpus_of(report: dict[str, Any]) -> int:
    """Count the GPUs of a result file of `bench distributed`: one for each process, whose number its rows name."""
    return int(report["rows"][0]["config"].split()[0])


def newest_of_most_gpus(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Find the newest result file among those with the most GPUs of this model's kind."""
    of_gpu = [each for each in reports if each["header"]["machine"]["gpu"] == GPU]
    return max(of_gpu, key=lambda each: (gpus_of(each), each["header"]["date"]))


LAYERS = newest_of_most_gpus(
    json.loads(file.read_text()) for file in (ROOT / "benchmarks" / "results").glob("distributed-*.json")
)


def measured_us(layer: Layer, contender: str) -> dict[int, float]:
    """List a contender's microseconds for the whole layer with even routes, by tokens of each GPU."""
    times = {}
    for row in LAYERS["rows"]:
        if row["kind"] == "ep_layer" and row["contender"] == contender:
            experts, topk, tokens, hidden, intermediate, skew = row["shape"]
            if Layer(hidden, intermediate, experts, topk) == layer and not skew:
                times[tokens] = row["us"]
    return times


def experts_here(layer: Layer, ranks: int) -> float:
    """Count the experts of a GPU; with more GPUs than experts each GPU has a copy of one expert."""
    return max(layer.experts / ranks, 1)


def in_whole_tiles(rows: float) -> float:
    """Give the mean number of an expert's rows in whole tiles, if an expert has `rows` random rows on average."""
    most = int(rows + 8 * math.sqrt(rows)) + 2
    logs = [x * math.log(rows) - rows - math.lgamma(x + 1) for x in range(most)]
    return sum(math.exp(log) * math.ceil(x / TILE_ROWS) * TILE_ROWS for x, log in enumerate(logs))


def in_vain(layer: Layer, ranks: int, tokens: int) -> float:
    """Give the number of rows that tiles multiply over the number of rows that experts have."""
    rows = tokens * layer.topk / experts_here(layer, ranks)
    return in_whole_tiles(rows) / rows


def product_tflops(layer: Layer) -> float:
    """Give the rate of both products in whole tiles, with the most tokens that were measured."""
    times = measured_us(layer, "product_alone")
    most = max(times)
    return operations_of(layer, most) * in_vain(layer, gpus_of(LAYERS), most) / times[most] / 1e6


def products_us(layer: Layer, ranks: int, tokens: int, tflops: float) -> float:
    """Give the time of both products of one GPU: operations, and reading the weights of experts with a token.

    The longer time decides; if both are about equal, each slows the other down, as in gemm/choose/cost.py.
    """
    used = 1 - (1 - 1 / layer.experts) ** (ranks * tokens * layer.topk)
    weights = experts_here(layer, ranks) * used * 3 * layer.hidden * layer.intermediate
    multiplied = operations_of(layer, tokens) * in_vain(layer, ranks, tokens)
    return together(multiplied / tflops / 1e6, weights / DRAM_TB_S / 1e6)


def points(rows: Iterable[dict[str, Any]], hidden: int) -> Iterator[tuple[float, float]]:
    """Yield the bytes that a rank sent to others and the collective's time: rows for each rank, there and back."""
    for row in rows:
        if row.get("rows") == "dedup" and row["hidden"] == hidden:
            sent = row["sent_rows"] * (MEASURED_GPUS - 1) / MEASURED_GPUS  # one of four stays
            yield sent * (hidden + 4 * hidden // 128), row["dispatch_us"]
            yield sent * 2 * hidden, row["combine_bf16_us"]


def copies_to_a_peer(rows: Iterable[dict[str, Any]]) -> Line:
    """Fit the time of a copy through symmetric memory to its bytes."""
    return Line.fit([(row["bytes"], row["us"]) for row in rows if "copy to the next" in row["what"]])


def error_of(line: Line, judged: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Give the mean and the largest ratio between the line and the measured times."""
    ratios = [max(line.us(x) / us, us / line.us(x)) for x, us in judged]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)


def section() -> str:
    """Return the tables."""
    rows = json.loads(MEASURED.read_text())["rows"]
    collective = Line.fit(list(points(rows, FITTED_HIDDEN)))
    mean, worst = error_of(collective, list(points(rows, JUDGED_HIDDEN)))
    within = copies_to_a_peer(rows)
    tflops = product_tflops(LAYER)
    lines = [
        f"The fit gives: NCCL's exchange takes {collective.start_us:.0f} us plus bytes at {collective.gb_s:.0f} GB/s "
        f"(times with hidden = {JUDGED_HIDDEN}, which the fit did not use, differ by {mean:.2f} times on average, "
        f"{worst:.2f} at worst); copies to a peer take {within.start_us:.0f} us plus bytes at {within.gb_s:.0f} GB/s. "
        f"Products run at {tflops:.0f} TFLOPS.",
        "",
    ]
    for tokens in TOKENS:
        lines += [
            f"{tokens} tokens on each GPU:",
            "",
            "| nodes | copies of a token: to ranks, to nodes | network MB: to ranks, to nodes | to ranks, us "
            "| to nodes, us | products, us | one after the other | overlapped |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for nodes in NODES:
            lines.append(_row(LAYER, nodes, tokens, within, tflops))
        lines.append("")
    lines += [
        f"One node of {gpus_of(LAYERS)} GPUs, with the measured layer and even routes, in us:",
        "",
        "| tokens on each GPU | products: model, measured | to ranks, model | one after the other, model "
        "| overlapped, model | peer memory, measured | one after the other, overlapped: over the measured time |",
        "|---|---|---|---|---|---|---|",
    ]
    for each, products, alone, ways, in_a_row, overlapped, fused in judged(LAYER, within, tflops):
        lines.append(
            f"| {each} | {products:.0f}, {alone:.0f} | {ways:.0f} | {in_a_row:.0f} | {overlapped:.0f} "
            f"| {fused:.0f} | {in_a_row / fused:.2f}, {overlapped / fused:.2f} |"
        )
    lines.append("")
    return "\n".join(lines)


def _row(layer: Layer, nodes: int, tokens: int, within: Line, tflops: float) -> str:
    both = [way(layer, nodes) for way in (copies_to_ranks, copies_to_nodes)]
    ways = [ways_us(copies, layer, tokens, within) for copies in both]
    megabytes = [copies.beyond * tokens * (layer.there_bytes + layer.back_bytes) / 1e6 for copies in both]
    products = products_us(layer, nodes * GPUS_OF_A_NODE, tokens, tflops)
    least = min(ways)
    counts = [both[0].within + both[0].beyond, both[1].beyond + both[0].within]
    cells = (
        f"{nodes}",
        f"{counts[0]:.1f}, {counts[1]:.1f}",
        f"{megabytes[0]:.0f}, {megabytes[1]:.0f}",
        f"{ways[0]:.0f}",
        f"{ways[1]:.0f}",
        f"{products:.0f}",
        f"{least + products:.0f}",
        f"{overlapped_us(least, products, within):.0f}",
    )
    return f"| {' | '.join(cells)} |"


def overlapped_us(ways: float, products: float, within: Line) -> float:
    """Give the longer of both times, and a start at each end."""
    return max(ways, products) + 2 * within.start_us


def judged(layer: Layer, within: Line, tflops: float) -> Iterator[tuple[float, ...]]:
    """Yield for each number of tokens the model's and the measured times of one node, in the table's order."""
    gpus, fused = gpus_of(LAYERS), measured_us(layer, "fused")
    for tokens, alone in sorted(measured_us(layer, "product_alone").items()):
        products = products_us(layer, gpus, tokens, tflops)
        ways = ways_us(copies_to_ranks(layer, 1, gpus), layer, tokens, within)
        yield tokens, products, alone, ways, products + ways, overlapped_us(ways, products, within), fused[tokens]


def page() -> str:
    """Return the page with today's tables."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + section() + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page())

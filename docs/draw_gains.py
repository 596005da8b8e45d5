"""Draws docs/gains.svg, four gains in bars, from files of measurements:  python docs/draw_gains.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.bench.contenders import BF16, OURS
from lab.bench.peers import DEEPGEMM, sessions
from lab.bench.report import Report, Row, geometric_mean

PICTURE = Path(__file__).with_name("gains.svg")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WIDTH, ROW, TOP, LEFT, UNIT = 600, 58, 44, 16, 200
"""The bars begin at LEFT; UNIT is as long as the other's speed. So narrow that a telephone shows it."""
COLOUR = "#c9404f"
"""Neither light nor dark: it stays as it is where the site turns pictures for the dark."""


class Gain(NamedTuple):
    """How many times as fast as another."""

    what: str
    other: str
    gpu: str
    factor: float


def gains() -> tuple[Gain, ...]:
    """The four, the largest first."""
    experts, linear = (_newest(kind).rows for kind in ("experts", "linear"))
    h200 = next(session for gpu, session in sessions().items() if "H200" in gpu)
    few = [row for row in h200.rows if row.kind == "dense" and row.shape[0] <= 128]
    return (
        Gain("Mixture of experts in one call", "torch's BF16 grouped GEMM", "H200", _mean(experts, BF16)),
        Gain(
            "Linear layer, 1 to 64 tokens",
            "torch in BF16",
            "H200",
            _mean([row for row in linear if row.shape[0] <= 64], BF16),
        ),
        Gain("vLLM, a prefill of 8 x 1024 tokens", "its own FP8 kernels", "H100", _prefill()),
        Gain("FP8 GEMM, 1 to 128 rows", "DeepGEMM 2.5.0", "H200", _mean(few, DEEPGEMM)),
    )


def _newest(kind: str) -> Report:
    return Report.load(max(RESULTS.glob(f"{kind}-20*.json")))


def _mean(rows: list[Row], other: str) -> float:
    """The geometric mean over shapes of another's time by ours."""
    us = {(row.kind, row.shape, row.contender): row.us for row in rows if row.mode == "cold"}
    pairs = [(us[kind, shape, other], time) for (kind, shape, who), time in us.items() if who == OURS]
    mean = geometric_mean(theirs / ours for theirs, ours in pairs if theirs and ours)
    assert mean is not None
    return mean


def _prefill() -> float:
    """The geometric mean over models of the GPU's time by vLLM's own kernels by that with the plugin."""
    runs = json.loads(max(RESULTS.glob("engines-h100-20*.json")).read_text())["runs"]
    ms = {(run["model"], run["who"]): sum(ms for _, ms in run["profile"].get("prefill 8 x 1024", ())) for run in runs}
    mean = geometric_mean(ms[model, "own"] / time for (model, who), time in ms.items() if who == "plugin")
    assert mean is not None
    return mean


def svg() -> str:
    """The picture: a line at the other's speed, and a bar for ours."""
    found = gains()
    height = TOP + ROW * len(found) + 6
    line = LEFT + UNIT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            f'<text x="{line}" y="24" font-size="13" fill="#5a5a5a" text-anchor="middle">the other: 1x</text>',
            f'<path d="M{line},30 V{height - 8}" stroke="#8a8a8a" stroke-dasharray="4 3"/>',
            *(row for i, gain in enumerate(found) for row in _bar(TOP + i * ROW, gain)),
            "</svg>",
            "",
        ]
    )


def _bar(y: int, gain: Gain) -> Iterator[str]:
    length = gain.factor * UNIT
    yield (
        f'<text x="{LEFT}" y="{y + 14}" font-size="15" fill="#5a5a5a"><tspan font-weight="bold" fill="#1f1f1f">'
        f"{gain.what}</tspan>, beside {gain.other}, {gain.gpu}</text>"
    )
    yield f'<rect x="{LEFT}" y="{y + 22}" width="{length:.0f}" height="24" rx="3" fill="{COLOUR}"/>'
    yield (
        f'<text x="{LEFT + length + 8:.0f}" y="{y + 41}" font-size="19" font-weight="bold" fill="#1f1f1f">'
        f"{gain.factor:.1f}x</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(svg())

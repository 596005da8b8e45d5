"""Draws docs/gains.svg, five gains on an H100 in bars, from files of measurements:  python docs/draw_gains.py"""

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
"""Bars begin at LEFT. UNIT is the length of 1x, the other implementation's speed. The picture fits on a telephone."""
COLOUR = "#c9404f"
"""A colour of medium brightness, which does not change when the site inverts pictures in dark mode."""


class Gain(NamedTuple):
    """A speedup over another implementation on an H100, and on an H200 if it was timed there."""

    what: str
    other: str
    factor: float
    h200: float | None = None


def gains() -> tuple[Gain, ...]:
    """Return the gains, the largest first. Each gain is a geometric mean over all shapes that were timed."""
    h200, h100 = sessions().values()
    return (
        Gain(
            "Mixture of experts in one call",
            "torch 2.11's BF16 grouped GEMM",
            _mean(_newest("experts-h100"), BF16),
            _mean(_newest("experts"), BF16),
        ),
        Gain(
            "Linear layer, 1 to 64 tokens",
            "torch 2.11 in BF16",
            _mean(_few(_newest("linear-h100"), 64), BF16),
            _mean(_few(_newest("linear"), 64), BF16),
        ),
        Gain("vLLM, prefill of 8 x 1024 tokens", "vLLM 0.26.0's own kernels", _in_vllm(("prefill 8 x 1024",))),
        Gain(
            "FP8 GEMM, 1 to 128 rows",
            "DeepGEMM 2.5.0",
            *(_mean(_few([row for row in one.rows if row.kind == "dense"], 128), DEEPGEMM) for one in (h100, h200)),
        ),
        Gain(
            "vLLM, a token of 1 or 32 sequences",
            "vLLM 0.26.0's own kernels",
            _in_vllm(("decode batch 1", "decode batch 32")),
        ),
    )


def _newest(kind: str) -> list[Row]:
    return Report.load(max(RESULTS.glob(f"{kind}-20*.json"))).rows


def _few(rows: list[Row], most: int) -> list[Row]:
    return [row for row in rows if row.shape[0] <= most]


def _mean(rows: list[Row], other: str) -> float:
    """Compute the geometric mean over shapes of another's time divided by ours."""
    us = {(row.kind, row.shape, row.contender): row.us for row in rows if row.mode == "cold"}
    pairs = [(us[kind, shape, other], time) for (kind, shape, who), time in us.items() if who == OURS]
    mean = geometric_mean(theirs / ours for theirs, ours in pairs if theirs and ours)
    assert mean is not None
    return mean


def _in_vllm(steps: tuple[str, ...]) -> float:
    """Compute the speedup of the GPU's work with the plugin: the mean over models and steps."""
    files = sorted((path.name.rpartition("h100-")[2], path) for path in RESULTS.glob("engines-*h100-20*.json"))
    runs = [run for _, path in files for run in json.loads(path.read_text())["runs"]]  # a later run replaces it
    ms = {
        (run["model"], step, run["who"]): sum(ms for _, ms in run["profile"][step])
        for run in runs
        for step in steps
        if step in run["profile"]
    }
    mean = geometric_mean(ms[model, step, "own"] / time for (model, step, who), time in ms.items() if who == "plugin")
    assert mean is not None
    return mean


def svg() -> str:
    """Return the picture: a line at the other implementation's speed, and a bar for our speed."""
    found = gains()
    height = TOP + ROW * len(found) + 6
    line = LEFT + UNIT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height}" '
            'font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold" fill="#1f1f1f">H100</text>',
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
        f"{gain.what}</tspan>, beside {gain.other}</text>"
    )
    yield f'<rect x="{LEFT}" y="{y + 22}" width="{length:.0f}" height="24" rx="3" fill="{COLOUR}"/>'
    also = "" if gain.h200 is None else f'<tspan font-size="13" fill="#5a5a5a">  H200: {gain.h200:.1f}x</tspan>'
    yield (
        f'<text x="{LEFT + length + 8:.0f}" y="{y + 41}" font-size="19" xml:space="preserve"><tspan font-weight="bold" '
        f'fill="#1f1f1f">{gain.factor:.1f}x</tspan>{also}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(svg())

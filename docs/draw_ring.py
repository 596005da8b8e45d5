"""Draws docs/learn/ring.svg, the ring of docs/learn/product.cuh over time, in a run of the simulator.

python docs/draw_ring.py   from a checkout, with g++

The script adds lines to a copy of the source. They store the simulator's clock at three events of each k-block: the
producer finds the slot free, the first math warp finds the slot loaded, and that warp releases the slot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deep_gemm.core.kernel import Kernel
from deep_gemm.core.params import Params
from lab import learn
from lab.sim.launcher import Stage

PICTURE = Path(__file__).parent / "learn" / "ring.svg"
EVENTS = ("the producer takes the slot", "a math warp finds it loaded", "the warp gives it back")
MNK = (128, 128, 1152)
K_BLOCKS = MNK[2] // 128
CONFIG = learn.LearnConfig()
LEFT, TOP, ROW, TIME = 92, 70, 46, 620
WIDTH = LEFT + TIME + 30
LOADING, MULTIPLYING = "#7aa6c2", "#e0a030"
WRITES = (
    ("  uint32_t m, n, k;\n};", "  uint32_t m, n, k;\n  uint32_t* times;\n};"),
    (
        "      ptx::mbarrier_arrive_expect_tx(full, kStageBytes);\n",
        "      ptx::st_global_b32(p.times + k / kBlockK, ptx::global_timer());\n"
        "      ptx::mbarrier_arrive_expect_tx(full, kStageBytes);\n",
    ),
    (
        "    ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);\n",
        "    ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);\n"
        f"    if (warp + lane == 0) ptx::st_global_b32(p.times + {K_BLOCKS} + k_block, ptx::global_timer());\n",
    ),
    (
        "#pragma unroll\n    for (uint32_t i = 0; i < kBlockN / 2; ++i) total[i] =",
        f"    if (warp + lane == 0) ptx::st_global_b32(p.times + {2 * K_BLOCKS} + k_block, ptx::global_timer());\n"
        "#pragma unroll\n    for (uint32_t i = 0; i < kBlockN / 2; ++i) total[i] =",
    ),
)
"""Lines of product.cuh, and the lines that replace them in the script's copy."""


def times() -> list[list[int]]:
    """Run a tile in the simulator, and return each event's times, one for each k-block."""
    source = learn.SOURCE.read_text()
    for old, new in WRITES:
        assert source.count(old) == 1, f"product.cuh has another line than: {old}"
        source = source.replace(old, new)
    params = Params.of_source(source, "Params")
    kernel: Kernel[Any] = Kernel(
        "product", params, lambda: [CONFIG], more=lambda config: {**learn.KERNEL.headers(config), "product.cuh": source}
    )
    p = learn.problem(*MNK)
    read = {"a": p.a, "b": p.b, "sfa": p.sfa, "sfb": p.sfb}
    written = {"d": p.d.clone(), "times": torch.zeros(3 * K_BLOCKS, dtype=torch.int32)}
    aligned = {"a": 16, "b": 16, "sfa": 16, "d": 16}
    stage = Stage(CONFIG, read, written, aligned, ready={*read, *written}, seed=0, schedule="even", num_sms=1)
    stage.run(kernel, None, lambda at: {**learn.values_of(CONFIG, at, *MNK), "times": at["times"]}, 1)
    found: list[list[int]] = stage.result().buffers["times"].view(3, K_BLOCKS).tolist()
    return found


def svg() -> str:
    """Draw a row for each slot: loading or waiting to be read, then being multiplied; numbers are k-blocks."""
    taken, loaded, given = times()
    begin, end = min(taken), max(given)
    height = TOP + CONFIG.num_stages * ROW + 64

    def at(time: int) -> int:
        return LEFT + round((time - begin) * TIME / (end - begin))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 26, f"A ring of {CONFIG.num_stages} slots, {K_BLOCKS} k-blocks of one tile", 15, weight="bold"),
        _text(LEFT, 48, "as the simulator ran docs/learn/product.cuh; a number is a k-block", 12),
    ]
    for stage in range(CONFIG.num_stages):
        lines.append(_text(LEFT - 12, TOP + stage * ROW + 24, f"slot {stage}", 13, "end"))
        lines.append(f'<path d="M{LEFT} {TOP + stage * ROW + 38}H{LEFT + TIME}" stroke="#cccccc"/>')
    for k_block in range(K_BLOCKS):
        y = TOP + k_block % CONFIG.num_stages * ROW + 4
        for first, last, colour in (
            (taken[k_block], loaded[k_block], LOADING),
            (loaded[k_block], given[k_block], MULTIPLYING),
        ):
            x, width = at(first), max(at(last) - at(first), 2)
            lines.append(f'<rect x="{x}" y="{y}" width="{width}" height="30" fill="{colour}" stroke="#444444"/>')
        lines.append(_text((at(loaded[k_block]) + at(given[k_block])) // 2, y + 20, str(k_block), 13, "middle"))
    y = TOP + CONFIG.num_stages * ROW + 14
    for number, (colour, text) in enumerate(
        ((LOADING, "TMA loads it, or it waits to be read"), (MULTIPLYING, "the first math warp multiplies it"))
    ):
        x = LEFT + number * 280
        lines.append(f'<rect x="{x}" y="{y}" width="16" height="16" fill="{colour}" stroke="#444444"/>')
        lines.append(_text(x + 24, y + 13, text, 12))
    lines.append(_text(LEFT, y + 40, "time of the simulator goes from left to right; white: the slot is free", 12))
    return "\n".join([*lines, "</svg>", ""])


def _text(x: int, y: int, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style} fill="#222222">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())

"""Draws fp8_gemm_pipeline.svg: the work of one SM's roles over time. Run it in this folder; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

COLOURS = ("#7aa6c2", "#c2a77a", "#8fbf8f", "#b58fbf")
LOAD, PRODUCT, PROMOTION = 1.0, 1.6, 0.9


def main() -> None:
    """Draw two math warpgroups with a pair of partial sums each, a ring of four slots, and six k-blocks."""
    plt.rcParams["svg.hashsalt"] = "fp8_gemm"
    figure, axes = plt.subplots(figsize=(9, 3.2))

    def bar(row: int, begin: float, length: float, k_block: int, text: str, height: float = 0.7) -> None:
        axes.broken_barh(
            [(begin, length)], (row - height / 2, height), facecolors=COLOURS[k_block % 4], edgecolor="white"
        )
        axes.text(begin + length / 2, row, text, ha="center", va="center", fontsize=8)

    for k_block in range(6):
        begin = 3.4 + PRODUCT * 2 * k_block
        loaded = k_block * LOAD if k_block < 4 else 3.4 + PRODUCT * 2 * (k_block - 4) + 4.1
        bar(4, loaded, LOAD * 0.95, k_block, f"{k_block % 4}")
        for warpgroup in range(2):
            product = begin + warpgroup * PRODUCT
            bar(3 - warpgroup, product, PRODUCT * 0.97, k_block, f"{k_block}")
            bar(1 - warpgroup, product + PRODUCT, PROMOTION, k_block, f"{k_block}", height=0.5)
    axes.set_yticks(
        [4, 3, 2, 1, 0],
        [
            "slots that TMA loads",
            "k-blocks multiplied, warpgroup 0",
            "k-blocks multiplied, warpgroup 1",
            "k-blocks promoted, warpgroup 0",
            "k-blocks promoted, warpgroup 1",
        ],
    )
    axes.set_xticks([])
    axes.set_xlabel("time; a slot is loaded again once both warpgroups have given it back")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()

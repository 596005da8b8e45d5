"""Draws errors relative to FP64 from a result file of `bench numerics`, and writes their section of docs/numerics.md.

python docs/draw_numerics.py benchmarks/results/numerics-DATE-COMMIT.json
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lab.bench.contenders import BF16, FAST, OURS
from lab.bench.numerics import EXACT, KINDS, ONE_BIG, OPERANDS
from lab.bench.report import Report, Row

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE, RESULTS = DOCS / "numerics.md", DOCS / "numerics.png", DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- docs/draw_numerics.py writes what follows -->\n", "<!-- docs/draw_numerics.py wrote this -->"
NAMES = {OURS: "deep_gemm", EXACT: "cuBLASLt", FAST: "cuBLASLt, fast accumulation", BF16: "BF16"}
COLOURS = {OURS: "#1f6fb4", EXACT: "#7a9e3f", FAST: "#d1612a", BF16: "#777777"}
DENSE = "fp8_gemm_nt"
PLACES = {
    "one_big_same_step": "in the same 32 of k",
    "one_big_same_block": "in the same 128, in another 32",
    "one_big_next_block": "in the next 128",
}


def chosen(report: Report, operands: str, contender: str, output: str = "float32") -> list[Row]:
    """Select dense products of numbers of one kind, sorted by depth."""
    found = [
        row
        for row in report.rows
        if (row.kind, row.operands, row.contender, row.output) == (DENSE, operands, contender, output)
        and row.error is not None
    ]
    return sorted(found, key=lambda row: row.shape[-1])


def draw(report: Report, path: Path) -> None:
    """Draw a panel for each kind of numbers: errors of an FP32 result against k."""
    figure = Figure(figsize=(4 * len(OPERANDS), 4.2), layout="constrained")
    panels = figure.subplots(1, len(OPERANDS), sharey=True, squeeze=False)[0]
    for axes, operands in zip(panels, OPERANDS, strict=True):
        for contender, name in NAMES.items():
            rows = chosen(report, operands, contender)
            ks = [row.shape[-1] for row in rows]
            line = {"color": COLOURS[contender], "marker": "o", "markersize": 3}
            axes.plot(ks, [row.error for row in rows], label=name, **line)
            if contender in (OURS, FAST):
                axes.plot(ks, [row.error_with_cast for row in rows], label=f"{name}, with the cast", ls=":", **line)
        axes.set(title=f"{operands} numbers", xlabel="k", xscale="log", yscale="log")
        axes.grid(color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("relative error beside FP64")
    panels[-1].legend(fontsize=7)
    figure.suptitle(f"FP32 results, 256 x 256 x k; {about(report)}", x=0.995, ha="right", fontsize=7, color="#777777")
    figure.savefig(path, dpi=130)


def about(report: Report) -> str:
    """Name the machine, the day and the commit."""
    header = report.header
    return f"{header['machine'].get('gpu') or 'CPU'}, {header['date'][:10]}, commit {header['commit']}"


def section(report: Report, name: str) -> str:
    """Write the section that the page has of a result file of this name."""
    depths = [row.shape[-1] for row in chosen(report, "normal", OURS)]
    some = [k for k in depths if k in (depths[0], 1024, 8192, depths[-1])] if depths else []
    lines = [
        "",
        "![errors by depth](numerics.png)",
        "",
        f"{about(report)}, `{name}`.",
        "",
        "Relative errors of the arithmetic alone, for dense products of 256 x 256 x k with FP32 results:",
        "",
        row_of("numbers", "k", *NAMES.values(), "bias of fast accumulation"),
        "|---" * (3 + len(NAMES)) + "|",
    ]
    for operands in OPERANDS:
        for k in some:
            of_k = {name: [row for row in chosen(report, operands, name) if row.shape[-1] == k] for name in NAMES}
            errors = [figure_of([row.error for row in rows]) for rows in of_k.values()]
            lines.append(row_of(operands, str(k), *errors, figure_of([row.bias for row in of_k[FAST]])))
    lines += [
        "",
        "The table has every product of this package, at its largest depth: the error of the arithmetic alone, and",
        "after the slash the error with the cast.",
        "",
        row_of("product", "shape", "result", *OPERANDS),
        "|---" * (3 + len(OPERANDS)) + "|",
        *every_product(report),
        "",
        "One product is 2^16, the others are 2^(16 - gap). The largest gap at which small products still count is:",
        "",
        row_of("place of the small products", *NAMES.values()),
        "|---" * (1 + len(NAMES)) + "|",
    ]
    lines += [row_of(place, *(largest_gap(report, kind, name) for name in NAMES)) for kind, place in PLACES.items()]
    return "\n".join([*lines, "", ""])


def every_product(report: Report) -> list[str]:
    """Write a line for each product and each type of its result."""
    lines = []
    ours = [row for row in report.rows if row.contender == OURS and row.kind not in ONE_BIG]
    for kind, of_kind in KINDS.items():
        shape = of_kind.shapes[-1]
        rows = [row for row in ours if row.kind == kind and row.shape == shape]
        for output in dict.fromkeys(row.output for row in rows):
            cells = []
            for operands in OPERANDS:
                found = [row for row in rows if (row.output, row.operands) == (output, operands)]
                both = [figure_of([row.error for row in found]), figure_of([row.error_with_cast for row in found])]
                cells.append(" / ".join(filter(None, both)))
            lines.append(row_of(f"`{kind}`", "x".join(map(str, shape)), str(output), *cells))
    return lines


def largest_gap(report: Report, kind: str, contender: str) -> str:
    """Give the largest gap without a loss; the text "or more" says that no larger gap was tried."""
    lost = {row.shape[0]: row.error for row in report.rows if (row.kind, row.contender) == (kind, contender)}
    gaps = sorted(gap for gap, share in lost.items() if share is not None)
    kept = []
    for gap in gaps:
        if lost[gap] != 0:
            break
        kept.append(gap)
    if not gaps:
        return ""
    return f"below {gaps[0]}" if not kept else f"{kept[-1]} or more" if kept == gaps else str(kept[-1])


def figure_of(values: Sequence[float | None]) -> str:
    """Write the only value as a figure, if there is one."""
    return f"{values[0]:.1e}" if values and values[0] is not None else ""


def row_of(*cells: str) -> str:
    """Write a row of a table."""
    return f"| {' | '.join(cells)} |"


def named_file(text: str) -> str | None:
    """Find the result file that a section names; None if it is not written yet."""
    found = re.search(r"`(numerics-[\w.-]+\.json)`", text)
    return found[1] if found else None


def write(page: Path, text: str) -> None:
    """Put the section into the page, between the two marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, behind = rest.partition(END)
    page.write_text(before + BEGIN + text + END + behind)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    result = Report.load(file)
    draw(result, PICTURE)
    write(PAGE, section(result, file.name))

"""Writes docs/aims.md: the aims of each kind of product, and the measured times.

    cd benchmarks/results
    python ../../docs/write_aims.py dense.json dense-h100.json sustained.json [fine_dense.json ...] > ../../docs/aims.md

Two result files of `bench dense`, one for each GPU, have the judged shapes. The peers' sessions (lab/bench/peers.json),
which measured DeepGEMM, cuBLASLt and this package, have the other times of one call. A result file of
`bench dense --sustained` has the sustained times, and files of `bench fine_dense`, one for each GPU that ran it, have
the times of finer scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lab.bench import fine
from lab.bench.compare import Comparison, comparisons
from lab.bench.contenders import BF16, OURS
from lab.bench.peers import sessions
from lab.bench.report import Report, geometric_mean

Shape = tuple[int, ...]
Choice = Callable[[Shape], bool]
Ratios = list[tuple[float, Shape]]

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


class Products:
    """The products of one kind in a run, and the ratios of our times to other contenders' times."""

    def __init__(self, report: Report, kind: str, mode: str = "cold", *, is_judged: bool = False) -> None:
        self.compared = [
            each
            for each in comparisons(report, mode)
            if each.row.kind == kind and each.row.us and (each.row.is_judged is True) == is_judged
        ]
        self.others = {
            (row.contender, row.shape): row.us for row in report.rows if (row.kind, row.mode) == (kind, mode) and row.us
        }

    def to_deepgemm(self, choice: Choice) -> Ratios:
        """Divide our times by DeepGEMM's."""
        return self._ratios(choice, lambda each: each.to_deepgemm)

    def to_fast(self, choice: Choice) -> Ratios:
        """Divide our times by the times of cuBLASLt's fast product."""
        return self._ratios(choice, lambda each: each.to_fast)

    def to_blockwise(self, choice: Choice) -> Ratios:
        """Divide our times by the times of cuBLASLt's product with scales by block."""

        def ratio(each: Comparison) -> float | None:
            other = self.others.get(("cublaslt_blockwise", each.row.shape))
            return each.row.us / other if each.row.us and other else None

        return self._ratios(choice, ratio)

    def to_floor(self, choice: Choice) -> Ratios:
        """Divide our times by the floor, which holds for an H200."""
        return self._ratios(choice, lambda each: 1 / each.row.fraction_of_floor if each.row.fraction_of_floor else None)

    def tflops(self) -> Ratios:
        """List speeds in TFLOPS."""
        return self._ratios(lambda _: True, lambda each: each.row.tflops)

    def _ratios(self, choice: Choice, ratio: Callable[[Comparison], float | None]) -> Ratios:
        found = [(ratio(each), each.row.shape) for each in self.compared if choice(each.row.shape)]
        return [(value, shape) for value, shape in found if value]


class Table:
    """Lines of a Markdown table: a figure, its aim, and each GPU's value. Aims are set for the H200."""

    def __init__(self) -> None:
        self.lines = ["| our time over that of | aim | H200 | H100 |", "|---|---|---|---|"]

    def worst(self, what: str, aim: float, h200: Ratios, h100: Ratios | None = None) -> None:
        """Add a line with the largest ratio, and its shape if there are several ratios."""

        def text(ratios: Ratios) -> str:
            ratio, shape = max(ratios)
            return f"{ratio:.3f} ({_name(shape)})" if len(ratios) > 1 else f"{ratio:.3f}"

        self._add(what, f"at most {aim:.2f}", text(h200), met=max(h200)[0] <= aim, h100=text(h100) if h100 else "")

    def mean(self, what: str, aim: float, h200: Ratios, h100: Ratios | None = None) -> None:
        """Add a line with the geometric mean of the ratios."""
        means = [geometric_mean(ratio for ratio, _ in ratios) for ratios in (h200, h100 or ())]
        if means[0] is None:
            raise ValueError(f"{what}: expected some shapes, got none")
        texts = ["" if mean is None else f"{mean:.3f}" for mean in means]
        self._add(what, f"at most {aim:.2f}", texts[0], met=means[0] <= aim, h100=texts[1])

    def slowest(self, what: str, aim: float, h200: Ratios, h100: Ratios) -> None:
        """Add a line with the lowest speed, and its shape."""
        texts = [f"{speed:.0f} ({_name(shape)})" for speed, shape in (min(h200), min(h100))]
        self._add(what, f"at least {aim:.0f}", texts[0], met=min(h200)[0] >= aim, h100=texts[1])

    def _add(self, what: str, aim: str, measured: str, *, met: bool, h100: str) -> None:
        self.lines.append(_line(what, aim, f"{measured}{'' if met else ', **missed**'}", h100))


def judged(table: Table, h200: Report, h100: Report) -> None:
    """Add shapes that nothing was tuned to, and shapes of the peers' sessions, in one run on each GPU."""
    new = [Products(report, "dense", is_judged=True) for report in (h200, h100)]
    known = [Products(report, "dense") for report in (h200, h100)]
    parts: tuple[tuple[str, float, Choice], ...] = (
        ("judged", 0.94, lambda _: True),
        ("judged, m <= 128", 0.86, lambda s: s[0] <= 128),
        ("judged, m > 128", 1.00, lambda s: s[0] > 128),
    )
    for words, aim, choice in parts:
        table.mean(f"cuBLASLt fast, {words}, geometric mean", aim, *(each.to_fast(choice) for each in new))
    table.worst("the same, worst of all", 1.12, *(each.to_fast(lambda _: True) for each in new))
    table.mean("DeepGEMM*, 67 shapes, geometric mean", 0.85, *(each.to_deepgemm(lambda _: True) for each in known))
    table.worst("the same, worst", 1.03, *(each.to_deepgemm(lambda _: True) for each in known))


def dense(table: Table, h200: Products, h100: Products) -> None:
    """Add the aims of dense products in prefill and training."""
    large: Choice = lambda s: s[0] >= 128  # noqa: E731
    table.mean("DeepGEMM, m >= 128, geometric mean", 0.94, h200.to_deepgemm(large), h100.to_deepgemm(large))
    table.worst("the same, worst", 1.03, h200.to_deepgemm(large), h100.to_deepgemm(large))
    table.mean("cuBLASLt fast, m >= 128, geometric mean", 1.05, h200.to_fast(large), h100.to_fast(large))
    table.worst("cuBLASLt blockwise, m >= 128, worst", 1.00, h200.to_blockwise(large), h100.to_blockwise(large))
    for shape in ((4096, 7168, 16384), (4096, 4096, 7168)):
        one: Choice = shape.__eq__
        table.worst(f"cuBLASLt fast, {_name(shape)}", 1.07, h200.to_fast(one), h100.to_fast(one))
    shallow: Choice = lambda s: s[2] in (512, 1536) and s[0] >= 1024  # noqa: E731
    table.worst(
        "DeepGEMM, k = 512 and 1536, m >= 1024, worst", 1.00, h200.to_deepgemm(shallow), h100.to_deepgemm(shallow)
    )
    for shape, aim in (((512, 7168, 16384), 0.78), ((512, 7168, 2048), 0.80), ((1024, 2112, 7168), 0.85)):
        one = shape.__eq__
        table.worst(f"DeepGEMM, {_name(shape)}", aim, h200.to_deepgemm(one), h100.to_deepgemm(one))
    narrow: Choice = lambda s: s[1] == 576 and s[0] >= 128  # noqa: E731
    table.mean("DeepGEMM, n = 576, m >= 128, geometric mean", 0.80, h200.to_deepgemm(narrow), h100.to_deepgemm(narrow))


def decode(table: Table, h200: Products, h100: Products) -> None:
    """Add the aims of dense products of few rows."""
    small: Choice = lambda s: s[0] <= 128  # noqa: E731
    table.mean("DeepGEMM, m <= 128, geometric mean", 0.85, h200.to_deepgemm(small), h100.to_deepgemm(small))
    table.worst("the same, worst", 1.03, h200.to_deepgemm(small), h100.to_deepgemm(small))
    table.mean("cuBLASLt fast, m <= 128, geometric mean", 0.95, h200.to_fast(small), h100.to_fast(small))
    table.worst("the same, worst", 1.08, h200.to_fast(small), h100.to_fast(small))
    floors: tuple[tuple[str, float, Choice], ...] = (
        ("m <= 16, n >= 4096", 1.15, lambda s: s[0] <= 16 and s[1] >= 4096),
        ("m <= 16, n = 2112", 1.30, lambda s: s[0] <= 16 and s[1] == 2112),
        ("m = 64, n >= 4096", 1.25, lambda s: s[0] == 64 and s[1] >= 4096),
    )
    for words, aim, choice in floors:
        table.worst(f"a copy of the bytes, {words}, worst", aim, h200.to_floor(choice))


def grouped(table: Table, h200: Report, h100: Report) -> None:
    """Add the aims of products of experts."""
    aims = {
        "contiguous": {(32, 256): 0.88},
        "masked": {(1, 1024): 0.90, (2, 512): 0.90, (4, 256): 0.90, (6, 1024): 0.90, (32, 192): 0.85, (32, 20): 1.0},
    }
    for kind, by_groups in aims.items():
        first, second = Products(h200, kind), Products(h100, kind)
        for (groups, rows), aim in by_groups.items():
            for _, shape in first.to_deepgemm(lambda s, of=(groups, rows): s[:2] == of):  # type: ignore[misc]
                one: Choice = shape.__eq__
                name = f"DeepGEMM, {kind}, {groups} x {rows} rows, {shape[2]}x{shape[3]}"
                table.worst(name, aim, first.to_deepgemm(one), second.to_deepgemm(one))
    uneven = Products(h200, "contiguous_uneven").to_floor(lambda _: True)
    table.mean("the floor, uneven groups, geometric mean", 1.20, uneven)
    table.worst("the same, worst", 1.35, uneven)
    along_k = [Products(report, "k_grouped").tflops() for report in (h200, h100)]
    table.slowest("(TFLOPS) groups along k, slowest", 1050, *along_k)


def no_aims(h200: Report, h100: Report, sustained: Report, name: str) -> list[str]:
    """Say which aims were given up, since neither another kernel nor another choice would reach them."""

    def span(*found: Ratios) -> str:
        ratios = [ratio for every in found for ratio, _ in every]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    everything: Choice = lambda _: True  # noqa: E731
    both = h200, h100
    at_length = span(Products(sustained, "dense", "sustained").to_fast(everything))
    gradients = span(*(Products(each, "dense_1d1d").to_deepgemm(everything) for each in both))
    many = span(*(Products(each, "contiguous").to_deepgemm(lambda s: s[1] >= 4096) for each in both))
    return [
        "## Aims that were given up",
        "",
        "Each of these aims was tried at least twice, but the hardware limits it:",
        "",
        "- **Calls back to back as fast as cuBLASLt fast**, at the GPU's power limit. Fast has one scale for each",
        "  tensor, and adds up in the tensor cores. This package moves partial sums out of them every 128 of k,",
        f"  multiplies these by scales, and adds them. That takes {at_length} of fast's time (`{name}`).",
        "- **Weight gradients in 0.87 of DeepGEMM's time.** Both operands have a scale for each row, so both kernels",
        f"  multiply each partial sum by two scales. The ratios are {gradients}.",
        "- **Groups of 4096 rows and more in 0.95 of DeepGEMM's time.** Both keep the tensor cores busy at the power",
        f"  limit. The ratios are {many}.",
    ]


def finer_scales(reports: Sequence[Report]) -> list[str]:
    """Tabulate products with scales finer than 128x128, for judged shapes. The aims hold on each GPU."""
    few: Choice = lambda s: s[0] <= 64  # noqa: E731
    many: Choice = lambda s: s[0] >= 1024  # noqa: E731
    folding, *others = fine.SAID
    aims = [
        *((name, fine.USUAL, "m <= 64", few, 1.03) for name in fine.SAID),
        (folding, fine.USUAL, "m >= 1024", many, 1.15),
        *((name, BF16, "m >= 1024", many, 1.00) for name in others),
    ]
    gpus = [report.header["machine"]["gpu"] for report in reports]
    lines = [_line("scales", "our time over that of", "aim", *gpus), "|---" * (3 + len(gpus)) + "|"]
    for name, rival, words, choice, aim in aims:
        means = []
        for report in reports:
            us = {(row.contender, row.shape): row.us for row in report.rows if row.is_judged and row.us}
            shapes = [shape for who, shape in us if who == name and choice(shape) and (rival, shape) in us]
            mean = geometric_mean(us[name, shape] / us[rival, shape] for shape in shapes)
            if mean is None:
                raise ValueError(f"{name}, {words}: expected some shapes, got none")
            means.append(f"{mean:.3f}{'' if mean <= aim else ', **missed**'}")
        scales = name.removeprefix(f"{OURS}_").replace("_", " by ")
        over = {fine.USUAL: "128x128", BF16: "BF16 by cuBLASLt"}[rival]
        lines.append(_line(scales, f"{over}, {words}, geometric mean", f"at most {aim:.2f}", *means))
    return lines


def page(files: Iterable[Path]) -> str:
    """Return the text of docs/aims.md."""
    first, second, file, *of_fine = files
    dense_files = first, second
    h200, h100, sustained = sessions()[H200], sessions()[H100], Report.load(file)
    new = [Report.load(each) for each in dense_files]
    measured = [(each.name, Report.load(each)) for each in of_fine]
    table, of_new = Table(), Table()
    judged(of_new, *new)
    products = Products(h200, "dense"), Products(h100, "dense")
    dense(table, *products)
    decode(table, *products)
    grouped(table, h200, h100)
    return "\n".join(
        [
            "# Aims",
            "",
            "Is the package as fast as it should be? Each line has a ratio of our time to another: below 1 this",
            "package is faster. The aims are set for the H200; the last column has the H100's ratios.",
            "",
            "## Shapes that nothing was tuned to",
            "",
            "These are the judged part of the [benchmark's cases](benchmark.md#cases), measured",
            f"{new[0].header['date'][:10]} at commit {new[0].header['commit']}: "
            + " and ".join(f"`{each.name}`" for each in dense_files)
            + ".",
            "The time of DeepGEMM* is its ratio to cuBLASLt fast in the sessions below, times fast's time in this run.",
            "",
            *of_new.lines,
            "",
            "## Beside the original",
            "",
            f"The times are of {h200.header['date']} at commit {h200.header['commit']} on an H200, and",
            f"of {h100.header['date']} at commit {h100.header['commit']} on an H100 (SXM), with all contenders of a",
            "shape in one process ([method](benchmark.md#rivals)). [performance_log.md](performance_log.md) lists the",
            "attempts to reach the missed aims. `docs/write_aims.py` writes this page.",
            "",
            *table.lines,
            "",
            *no_aims(h200, h100, sustained, file.name),
            "",
            "## Scales finer than 128x128",
            "",
            "Each weight was timed with finer scales, with 128x128 and in BF16, in one process",
            "([method](benchmark.md#finer-scales)), for shapes that nothing was tuned to. B's scales are powers of",
            "two that fold. If the first column gives one size, A has scales for the same number of columns; such",
            "scales of A prevent the promotion of a whole k-block at once.",
            *(
                f"Measured {each.header['date'][:10]} at commit {each.header['commit']}: `{name}`."
                for name, each in measured
            ),
            "",
            *finer_scales([each for _, each in measured]),
            "",
        ]
    )


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


if __name__ == "__main__":
    print(page(Path(argument) for argument in sys.argv[1:]), end="")

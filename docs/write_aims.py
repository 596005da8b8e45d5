"""What each regime aims at beside what was measured, from result files, which are named by their commits.

python docs/write_aims.py dense.json sustained.json grouped.json > docs/aims.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from deep_gemm.benchmark.compare import Comparison, comparisons
from deep_gemm.benchmark.report import Report, geometric_mean

Shape = tuple[int, ...]
Choice = Callable[[Shape], bool]


class Table:
    """Lines of a Markdown table: a figure, its aim, what was measured."""

    def __init__(self) -> None:
        self.lines = ["| figure | aim | measured | |", "|---|---|---|---|"]

    def at_most(self, what: str, aim: float, measured: float, where: Shape | None = None) -> None:
        """A ratio that should be no larger than this."""
        at = f" ({_name(where)})" if where else ""
        self._add(what, f"at most {aim:.2f}", f"{measured:.3f}{at}", met=measured <= aim)

    def one(self, what: str, aim: float, ratios: Iterable[tuple[float | None, Shape]]) -> None:
        """The ratio of the one shape that there is."""
        ((ratio, shape),) = ratios
        if ratio is None:
            raise ValueError(f"{what}: expected a time of {_name(shape)} and of the other, got none")
        self.at_most(what, aim, ratio)

    def at_least(self, what: str, aim: float, measured: float, where: Shape) -> None:
        """A speed that should be no smaller than this."""
        self._add(what, f"at least {aim:.0f}", f"{measured:.0f} ({_name(where)})", met=measured >= aim)

    def worst(self, what: str, aim: float, ratios: Iterable[tuple[float | None, Shape]]) -> None:
        """The largest of some ratios, with its shape."""
        largest, where = max((ratio, shape) for ratio, shape in ratios if ratio)
        self.at_most(what, aim, largest, where)

    def mean(self, what: str, aim: float, ratios: Iterable[tuple[float | None, Shape]]) -> None:
        """The geometric mean of some ratios."""
        mean = geometric_mean(ratio for ratio, _ in ratios if ratio)
        if mean is None:
            raise ValueError(f"{what}: expected some shapes, got none")
        self.at_most(what, aim, mean)

    def _add(self, what: str, aim: str, measured: str, *, met: bool) -> None:
        self.lines.append(f"| {what} | {aim} | {measured} | {'' if met else 'missed'} |")


class Measured:
    """Ratios of a result file's products of one kind, those that DeepGEMM was measured at: so without odd shapes."""

    def __init__(self, report: Report, kind: str, mode: str = "cold") -> None:
        compared = [each for each in comparisons(report, mode) if each.row.kind == kind and each.row.us]
        self.compared = [each for each in compared if each.row.deepgemm_ratio_to_fast]
        self.others = {
            (row.contender, row.shape): row.us for row in report.rows if (row.kind, row.mode) == (kind, mode) and row.us
        }

    def to_deepgemm(self, choice: Choice) -> list[tuple[float | None, Shape]]:
        """Of our time to DeepGEMM's, estimated."""
        return self._ratios(choice, lambda each: each.to_deepgemm)

    def to_fast(self, choice: Choice) -> list[tuple[float | None, Shape]]:
        """Of our time to that of cuBLASLt's fast product."""
        return self._ratios(choice, lambda each: each.to_fast)

    def to_blockwise(self, choice: Choice) -> list[tuple[float | None, Shape]]:
        """Of our time to that of cuBLASLt's product with scales by block."""

        def ratio(each: Comparison) -> float | None:
            other = self.others.get(("cublaslt_blockwise", each.row.shape))
            return each.row.us / other if each.row.us and other else None

        return self._ratios(choice, ratio)

    def to_floor(self, choice: Choice) -> list[tuple[float | None, Shape]]:
        """Of our time to the floor."""
        return self._ratios(choice, lambda each: 1 / each.row.fraction_of_floor if each.row.fraction_of_floor else None)

    def slowest_tflops(self) -> tuple[float, Shape]:
        """The lowest speed, and its shape."""
        rows = [each.row for each in self.compared]
        return min((row.operations / row.us / 1e6, row.shape) for row in rows if row.operations and row.us)

    def _ratios(self, choice: Choice, ratio: Callable[[Comparison], float | None]) -> list[tuple[float | None, Shape]]:
        return [(ratio(each), each.row.shape) for each in self.compared if choice(each.row.shape)]


def dense(table: Table, measured: Measured, sustained: Measured) -> None:
    """Prefill and training."""
    large: Choice = lambda s: s[0] >= 128  # noqa: E731
    table.mean("m >= 128, to DeepGEMM, geometric mean", 0.94, measured.to_deepgemm(large))
    table.worst("the same, worst", 1.03, measured.to_deepgemm(large))
    table.mean("m >= 128, to cuBLASLt fast, geometric mean", 1.05, measured.to_fast(large))
    table.worst("m >= 128, to cuBLASLt blockwise, worst", 1.00, measured.to_blockwise(large))
    for shape in ((4096, 7168, 16384), (4096, 4096, 7168)):
        table.one(f"{_name(shape)}, to cuBLASLt fast", 1.07, measured.to_fast(shape.__eq__))
    table.one("8192x8192x8192 sustained, to cuBLASLt fast", 1.01, sustained.to_fast(lambda s: s[0] == 8192))
    shallow: Choice = lambda s: s[2] in (512, 1536) and s[0] >= 1024  # noqa: E731
    table.worst("k = 512 and 1536, m >= 1024, to DeepGEMM, worst", 1.00, measured.to_deepgemm(shallow))
    for shape, aim in (((512, 7168, 16384), 0.78), ((512, 7168, 2048), 0.80), ((1024, 2112, 7168), 0.85)):
        table.one(f"{_name(shape)}, to DeepGEMM", aim, measured.to_deepgemm(shape.__eq__))
    narrow: Choice = lambda s: s[1] == 576 and s[0] >= 128  # noqa: E731
    table.mean("n = 576, m >= 128, to DeepGEMM, geometric mean", 0.80, measured.to_deepgemm(narrow))


def weight_gradients(table: Table, measured: Measured) -> None:
    """Accumulated in FP32, scales by row on both sides."""
    for ratio, shape in measured.to_deepgemm(lambda _: True):
        table.one(f"weight gradient {_name(shape)}, to DeepGEMM", 0.87, [(ratio, shape)])


def decode(table: Table, measured: Measured) -> None:
    """Few rows."""
    small: Choice = lambda s: s[0] <= 128  # noqa: E731
    table.mean("m <= 128, to DeepGEMM, geometric mean", 0.85, measured.to_deepgemm(small))
    table.worst("the same, worst", 1.03, measured.to_deepgemm(small))
    table.mean("m <= 128, to cuBLASLt fast, geometric mean", 0.95, measured.to_fast(small))
    table.worst("the same, worst", 1.08, measured.to_fast(small))
    floors: tuple[tuple[str, float, Choice], ...] = (
        ("m <= 16, n >= 4096", 1.15, lambda s: s[0] <= 16 and s[1] >= 4096),
        ("m <= 16, n = 2112", 1.30, lambda s: s[0] <= 16 and s[1] == 2112),
        ("m = 64, n >= 4096", 1.25, lambda s: s[0] == 64 and s[1] >= 4096),
    )
    for words, aim, choice in floors:
        table.worst(f"{words}, to the copy of the bytes, worst", aim, measured.to_floor(choice))


def grouped(table: Table, report: Report) -> None:
    """Experts."""
    aims = {
        "contiguous": {(4, 8192): 0.95, (8, 4096): 0.95, (32, 256): 0.88},
        "masked": {(1, 1024): 0.90, (2, 512): 0.90, (4, 256): 0.90, (6, 1024): 0.90, (32, 192): 0.85, (32, 20): 1.0},
    }
    for kind, by_groups in aims.items():
        measured = Measured(report, kind)
        for (groups, rows), aim in by_groups.items():
            for ratio, shape in measured.to_deepgemm(lambda s, of=(groups, rows): s[:2] == of):  # type: ignore[misc]
                of = f"{groups} x {rows} rows, {shape[2]}x{shape[3]}"
                table.one(f"{kind}, {of}, to DeepGEMM", aim, [(ratio, shape)])
    uneven = Measured(report, "contiguous_uneven")
    table.mean("uneven groups, to the floor, geometric mean", 1.20, uneven.to_floor(lambda _: True))
    table.worst("the same, worst", 1.35, uneven.to_floor(lambda _: True))
    table.at_least("groups along k, TFLOPS, slowest", 1050, *Measured(report, "k_grouped").slowest_tflops())


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def page(files: list[Path]) -> str:
    """All of it."""
    of_dense, of_sustained, of_groups = (Report.load(file) for file in files)
    table = Table()
    dense(table, Measured(of_dense, "dense"), Measured(of_sustained, "dense", "sustained"))
    weight_gradients(table, Measured(of_dense, "dense_1d1d"))
    decode(table, Measured(of_dense, "dense"))
    grouped(table, of_groups)
    header = of_dense.header
    about = f"{header['machine']['gpu']}, {header['date'][:10]}"
    return "\n".join(
        [
            "# What is aimed at, and where it stands",
            "",
            f"Ratios of times, ours to theirs: {about}, result files, of the commits that end their names,",
            f"{', '.join(f'`{file.name}`' for file in files)}.",
            "DeepGEMM's times are estimates ([benchmark.md](benchmark.md)). What was tried for those that are missed:",
            "[performance_log.md](performance_log.md). `docs/write_aims.py` wrote this page.",
            "",
            *table.lines,
            "",
        ]
    )


if __name__ == "__main__":
    print(page([Path(argument) for argument in sys.argv[1:]]), end="")

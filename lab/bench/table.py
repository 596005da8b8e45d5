"""Prints a run as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from . import distributed, einsum, few_experts, fine, fp4, numerics, skip_head_mid, training
from .bulk_read import READ
from .casts import COMPILED, COPY, EAGER
from .compare import Comparison, comparisons, summaries
from .contenders import BF16, BLOCKWISE, FAST, OURS
from .layers import ALONE
from .products import PRODUCT
from .report import Report, Row, geometric_mean
from .tune_fit import Regret
from .yardsticks import yardsticks_of

SHORT = {"nccl_fixed": "fixed", "product_alone": "products", "bulk_read": "read", "deep_gemm_fp8": "fp8"}
"""Names of contenders that are long for a table."""
PARTS = {True: "judged", False: "fitted", None: ""}
FEW, MANY, LARGE_BYTES = 64, 1024, 29e6
"""Rows up to which, and from which, ratios have means of their own; bytes of a weight in FP8."""


def print_report(report: Report, console: Console) -> None:
    """Print a run's tables, failures and notes."""
    machine = report.header["machine"]
    console.print(
        f"\n{report.kind} on {machine.get('gpu') or machine['cpu']}, commit {report.header['commit']}", style="bold"
    )
    if report.kind == "host":
        console.print(_host_table(report))
        _print_failures(report, console)
    elif report.kind == "casts":
        console.print(_casts_table(report))
        _print_failures(report, console)
    elif report.kind in ("linear", "experts"):
        for part in _linear_tables(report) if report.kind == "linear" else _experts_tables(report):
            console.print(part)
        _print_failures(report, console)
    elif report.kind.startswith("fp4_") or report.kind == "few_experts":
        for part in _tables_beside_reads(report):
            console.print(part)
        if report.kind == "few_experts":
            for line in few_experts.time_lines(report.rows):
                console.print(line, style="dim", markup=False)
        _print_failures(report, console)
    elif report.kind.startswith("fine_"):
        for part in _fine_tables(report):
            console.print(part)
        _print_failures(report, console)
    elif report.kind == "distributed":
        console.print(_distributed_table(report))
        console.print("microseconds of the slowest process; more: the fastest way over the products alone")
    elif report.kind == "einsum":
        console.print(_einsum_table(report))
        console.print(_into_heads_table(report))
        _print_failures(report, console)
    elif report.kind in ("attention", "hc", "bf16"):
        console.print(_attention_table(report))
        _print_failures(report, console)
    elif report.kind == "training":
        for part in _training_tables(report):
            console.print(part)
        _print_failures(report, console)
    elif report.kind == "compile":
        console.print(_compile_line(report))
        _print_failures(report, console)
    elif report.kind == "numerics":
        console.print(_numerics_table(report))
        _print_failures(report, console)
    else:
        for mode in ("cold", "sustained"):
            if compared := comparisons(report, mode):
                console.print(_product_table(report, compared, mode))
        _print_failures(report, console)
        if means := _summary_table(comparisons(report)):
            console.print(means)
            console.print(
                "Ratios are of times: below 1.00 deep_gemm is faster. DeepGEMM* is an estimate: its measured ratio to "
                "cuBLASLt fast\non this model of GPU times what cuBLASLt fast took here. floor: the larger of "
                "operations at 1640 TFLOPS and moving\nthe bytes once, on an H200.",
                style="dim",
            )
    if report.header.get("stopped"):
        console.print(f"stopped: {report.header['stopped']}", style="red", markup=False)


def _print_failures(report: Report, console: Console) -> None:
    """Print each reason once, with its shapes; failures of this package in red."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        if row.failed:
            shapes.setdefault((row.contender, row.failed), []).append("x".join(map(str, row.shape)))
    ours = {row.contender for row in report.failures()}
    for (contender, why), names in shapes.items():
        style = "red" if contender in ours else "dim"
        console.print(f"no time for {contender} at {' '.join(names)}: {why}", style=style, markup=False)


def _casts_table(report: Report) -> Table:
    table = _table("casts", gap=2)
    for heading in ("kind", "m x k"):
        table.add_column(heading)
    for heading in ("us", "of copy", "copy us", "compiled us", "torch us", "TB/s"):
        table.add_column(heading, justify="right")
    times = {(row.kind, row.shape, row.contender): row.us for row in report.rows}
    for row in report.rows:
        if row.contender != OURS:
            continue
        copy, compiled, eager = (times.get((row.kind, row.shape, other)) for other in (COPY, COMPILED, EAGER))
        table.add_row(
            row.kind,
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            _percent(copy / row.us) if copy and row.us else "",
            *(_figure(us) for us in (copy, compiled, eager)),
            f"{row.bytes / row.us / 1e6:.2f}" if row.bytes and row.us else "",
        )
    return table


def _einsum_table(report: Report) -> Table:
    table, known = _table("einsum", gap=2), yardsticks_of(report)
    table.add_column("b x h x r x d")
    for heading in ("us", "row-major", "bf16", "ratio", "DeepGEMM", "ratio"):
        table.add_column(heading, justify="right")
    times = {(row.shape, row.contender): row.us for row in report.rows}
    for row in report.rows:
        if row.kind != einsum.KIND or row.contender != OURS:
            continue
        plain = times.get((row.shape, BF16))
        upstream = None if known is None else known.upstream_us(row.kind, row.shape)
        table.add_row(
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            _figure(times.get((row.shape, einsum.ROW_MAJOR))),
            *(cell for us in (plain, upstream) for cell in (_figure(us), _ratio(_over(row.us, us)))),
        )
    return table


def _into_heads_table(report: Report) -> Table:
    table, known = _table("products into parts of heads", gap=2), yardsticks_of(report)
    table.add_column("m x n x k")
    for heading in ("us", "plain", "ratio", "DeepGEMM", "ratio"):
        table.add_column(heading, justify="right")
    plain = {row.shape: row.us for row in report.rows if row.kind == skip_head_mid.KIND and row.contender == ALONE}
    for row in report.rows:
        if row.kind != skip_head_mid.KIND or row.contender != OURS:
            continue
        upstream = None if known is None else known.upstream_us(row.kind, row.shape)
        table.add_row(
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            *(cell for us in (plain.get(row.shape), upstream) for cell in (_figure(us), _ratio(_over(row.us, us)))),
        )
    return table


def _attention_table(report: Report) -> Table:
    table = _table(report.kind, gap=2)
    table.add_column("kind")
    table.add_column("shape")
    for heading in ("us", "DeepGEMM*", "ratio", "floor", "torch", "TFLOPS", "TB/s"):
        table.add_column(heading, justify="right")
    found = yardsticks_of(report)
    times = {(row.kind, row.shape, row.contender): row.us for row in report.rows}
    for row in report.rows:
        if row.contender != OURS:
            continue
        upstream = found.upstream_us(row.kind, row.shape) if found is not None else None
        table.add_row(
            row.kind,
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            _figure(upstream),
            f"{row.us / upstream:.2f}" if upstream and row.us else "",
            _percent(row.fraction_of_floor) if row.fraction_of_floor else "",
            _figure(times.get((row.kind, row.shape, EAGER))),
            f"{row.tflops:.0f}" if row.tflops else "",
            f"{row.bytes / row.us / 1e6:.2f}" if row.bytes and row.us else "",
        )
    return table


def _numerics_table(report: Report) -> Table:
    """Errors at the largest depth of each product and kind of operands: ours, and beside them rivals' of the same."""
    table = _table("relative errors beside FP64, at the largest depth")
    for heading in ("product", "shape", "operands", "output"):
        table.add_column(heading)
    rivals = FAST, numerics.EXACT, BF16
    for heading in ("error", "with cast", "bias", *rivals):
        table.add_column(heading, justify="right")
    errors = {(row.kind, row.shape, row.operands, row.output, row.contender): row.error for row in report.rows}
    deepest = {(row.kind, row.operands): row.shape for row in report.rows}
    for row in report.rows:
        if row.contender != OURS or (row.shape != deepest[row.kind, row.operands] and row.kind not in numerics.ONE_BIG):
            continue
        table.add_row(
            row.kind,
            "x".join(map(str, row.shape)),
            row.operands,
            row.output,
            *(_error(error) for error in (row.error, row.error_with_cast, row.bias)),
            *(_error(errors.get((row.kind, row.shape, row.operands, row.output, rival))) for rival in rivals),
        )
    return table


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _training_tables(report: Report) -> list[Table]:
    """Steps beside those in BF16, and a time line of each of ours."""
    table, lines = _table("training", gap=2), []
    table.add_column("shape")
    for heading in ("us", "bf16", "ratio", "TFLOPS", "GB", "bf16", "forward", "bf16"):
        table.add_column(heading, justify="right")
    found = {(row.shape, row.contender, row.mode): row for row in report.rows}
    for row in report.rows:
        if (row.contender, row.mode) != (OURS, training.STEP):
            continue
        name, plain = "x".join(map(str, row.shape)), found.get((row.shape, BF16, training.STEP))
        others = plain, *(found.get((row.shape, each, training.FORWARD)) for each in (OURS, BF16))
        plain_us, *forward_us = (None if each is None else each.us for each in others)
        table.add_row(
            name,
            "failed" if row.failed else _figure(row.us),
            _figure(plain_us),
            _ratio(_over(row.us, plain_us)),
            f"{row.tflops:.0f}" if row.tflops else "",
            *(f"{each.peak_bytes / 1e9:.1f}" if each and each.peak_bytes is not None else "" for each in (row, plain)),
            *map(_figure, forward_us),
        )
        if row.parts:
            line = _table(f"{sum(row.parts.values()):.0f} us")
            line.add_column(f"a step of {name}", no_wrap=True)
            line.add_column("us", justify="right")
            for part, us in row.parts.items():
                line.add_row(part, _figure(us))
            lines.append(line)
    return [table, *lines]


def _linear_tables(report: Report) -> list[Table]:
    table = _table("linear", gap=2)
    table.add_column("m x n x k")
    for heading in ("us", "product", "ratio", "+ copy", "ratio", "bf16", "ratio", "torch"):
        table.add_column(heading, justify="right")
    ratios: dict[int, list[tuple[float | None, ...]]] = {}
    for row, others in _beside(report):
        alone, copy, plain, eager = (others.get(name) for name in (ALONE, COPY, BF16, EAGER))
        both = alone + copy if alone and copy else None
        found = tuple(_over(row.us, other) for other in (alone, both, plain))
        ratios.setdefault(row.shape[0], []).append(found)
        table.add_row(
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            *(
                cell
                for us, ratio in zip((alone, both, plain), found, strict=True)
                for cell in (_figure(us), _ratio(ratio))
            ),
            _figure(eager),
        )
    means = _table("geometric means of ratios")
    for heading in ("m", "shapes", "/ product", "/ product + copy", "/ bf16"):
        means.add_column(heading, justify="right")
    for m, of_m in ratios.items():
        means.add_row(str(m), str(len(of_m)), *_means(of_m))
    return [table, means]


def _experts_tables(report: Report) -> list[Table]:
    table = _table("experts", gap=2)
    for heading in ("experts", "tokens", "h x inter", "us", "bf16", "ratio", "products", "share", "torch"):
        table.add_column(heading, justify="left" if heading == "h x inter" else "right")
    ratios: dict[tuple[int, ...], list[tuple[float | None, ...]]] = {}
    for row, others in _beside(report):
        num_experts, _, tokens, *sizes = row.shape
        plain, alone, eager = (others.get(name) for name in (BF16, ALONE, EAGER))
        ratio, share = _over(row.us, plain), _over(alone, row.us)
        ratios.setdefault((num_experts, *sizes), []).append((ratio,))
        table.add_row(
            str(num_experts),
            str(tokens),
            "x".join(map(str, sizes)),
            "failed" if row.failed else _figure(row.us),
            _figure(plain),
            _ratio(ratio),
            _figure(alone),
            _percent(share),
            _figure(eager),
        )
    means = _table("geometric means of ratios")
    for heading in ("experts", "h x inter", "shapes", "/ bf16"):
        means.add_column(heading, justify="right")
    for (num_experts, *sizes), of_weights in ratios.items():
        means.add_row(str(num_experts), "x".join(map(str, sizes)), str(len(of_weights)), *_means(of_weights))
    return [table, means]


def _tables_beside_reads(report: Report) -> list[Table]:
    """Tabulate products or layers and means of ratios by rows; "alone" is the rival's product without its cast."""
    names = {row.contender for row in report.rows}
    rivals = [name for name in (fp4.FP8, fp4.HUMMING, few_experts.VLLM) if name in names]
    table = _table(report.kind, gap=1)
    table.add_column("shape")
    for heading in ("us", *(cell for name in (READ, *rivals) for cell in (SHORT.get(name, name), "ratio"))):
        table.add_column(heading, justify="right")
    if fp4.HUMMING in rivals:
        table.add_column("alone", justify="right")
    alone = {row.shape: row.parts[PRODUCT] for row in report.rows if row.contender == fp4.HUMMING and row.parts}
    ratios: dict[tuple[str, str], list[tuple[float | None, ...]]] = {}
    for row, others in _beside(report):
        times = [others.get(name) for name in (READ, *rivals)]
        found = [_over(row.us, us) for us in times] + [_over(row.us, alone.get(row.shape))]
        ratios.setdefault((_rows_of(row), PARTS[row.is_judged]), []).append(tuple(found))
        table.add_row(
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            *(cell for us, ratio in zip(times, found, strict=False) for cell in (_figure(us), _ratio(ratio))),
            *([_ratio(found[-1])] if fp4.HUMMING in rivals else []),
        )
    means = _table("geometric means of ratios", gap=2)
    for heading in ("rows", "part", "shapes", *(f"/ {SHORT.get(name, name)}" for name in (READ, *rivals, "alone"))):
        means.add_column(heading, justify="right")
    for (rows, part), of_part in ratios.items():
        means.add_row(rows, part, str(len(of_part)), *_means(of_part))
    return [table, means]


def _fine_tables(report: Report) -> list[Table]:
    """Tabulate products with fine scales, each beside 128x128 and BF16, and means of ratios by rows."""
    names = {name: name.removeprefix(f"{OURS}_") for name in fine.SAID}
    table = _table(report.kind, gap=1)
    table.add_column("shape")
    for heading in ("128x128", "bf16", *(cell for name in names.values() for cell in (name.replace("_", "\n"), ""))):
        table.add_column(heading, justify="right")
    beside = _beside(report, fine.USUAL)
    for row, us in beside:
        table.add_row(
            "x".join(map(str, row.shape)),
            "failed" if row.failed else _figure(row.us),
            _figure(us.get(BF16)),
            *(cell for name in names for cell in (_figure(us.get(name)), _ratio(_over(us.get(name), row.us)))),
        )
    ratios: dict[tuple[str, str, str], list[tuple[float | None, ...]]] = {}
    for name, scales in names.items():
        for row, us in beside:
            found = tuple(_over(us.get(name), us.get(rival)) for rival in (fine.USUAL, BF16, fine.TRITON))
            ratios.setdefault((scales.replace("_", " by "), _rows_of(row), PARTS[row.is_judged]), []).append(found)
    means = _table("geometric means of ratios", gap=2)
    for heading in ("scales", "rows", "part", "shapes", "/ 128x128", "/ bf16", "/ triton"):
        means.add_column(heading, justify="right")
    for key, of_key in ratios.items():
        means.add_row(*key, str(len(of_key)), *_means(of_key))
    return [table, means]


def _rows_of(row: Row) -> str:
    """Name the regime of a shape by its rows, of each group, or its tokens; FP4's few rows by the bytes in FP8 too."""
    rows = row.shape[0 if row.kind.endswith("_dense") else 2 if row.kind.endswith("_experts") else 1]
    if rows > FEW:
        return f"to {MANY - 1}" if rows < MANY else f"from {MANY}"
    if row.kind != "fp4_dense":
        return f"to {FEW}"
    return f"to {FEW}, {'from' if row.shape[1] * row.shape[2] >= LARGE_BYTES else 'below'} {LARGE_BYTES / 1e6:.0f} MB"


def _distributed_table(report: Report) -> Table:
    """Tabulate what each way took, and what the layer takes beside its products on the busiest process."""
    table = _table("distributed", gap=1)
    for heading in ("kind", "experts", "tokens", "skew"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for name in distributed.CONTENDERS:
        table.add_column(SHORT.get(name, name), justify="right")
    table.add_column("more", justify="right")
    found: dict[tuple[str, tuple[int, ...]], dict[str, float | None]] = {}
    for row in report.rows:
        found.setdefault((row.kind, row.shape), {})[row.contender] = row.us
    for (kind, shape), us in found.items():
        experts, _, tokens, _, _, *skew = shape
        alone = us.get(ALONE)
        ways = [each for name, each in us.items() if each and name not in (ALONE, distributed.MEGA)]
        table.add_row(
            kind,
            str(experts),
            str(tokens),
            *map(str, skew or [0]),
            *(_figure(us.get(name)) for name in distributed.CONTENDERS),
            _figure(min(ways) - alone) if ways and alone else "",
        )
    return table


def _beside(report: Report, contender: str = OURS) -> list[tuple[Row, dict[str, float]]]:
    """Rows of a contender, ours if none is named, each with the times of all contenders of its shape."""
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in report.rows:
        if row.us:
            times.setdefault(row.shape, {})[row.contender] = row.us
    return [(row, times.get(row.shape, {})) for row in report.rows if row.contender == contender]


def _over(us: float | None, other: float | None) -> float | None:
    return us / other if us and other else None


def _means(ratios: Iterable[tuple[float | None, ...]]) -> list[str]:
    """A mean for each place."""
    return [_ratio(geometric_mean(each for each in column if each)) for column in zip(*ratios, strict=True)]


def _product_table(report: Report, compared: list[Comparison], mode: str) -> Table:
    table = _table(mode)
    for heading in ("m x n x k", "config"):
        table.add_column(heading)
    for heading in (
        "us",
        "spread",
        "TFLOPS",
        "/ fast",
        "/ DeepGEMM*",
        "of floor",
        "error",
        "fast us",
        "block us",
        "bf16 us",
    ):
        table.add_column(heading, justify="right")
    times = {(row.kind, row.shape, row.contender): row.us for row in report.rows if row.mode == mode}
    for each in compared:
        row = each.row
        name = "x".join(map(str, row.shape))
        table.add_row(
            name if row.kind == "dense" else f"{row.kind} {name}",
            row.config or "",
            "failed" if row.failed else _figure(row.us),
            _percent((row.us_max - row.us_min) / row.us) if row.us and row.us_min and row.us_max else "",
            f"{row.tflops:.0f}" if row.tflops else "",
            _ratio(each.to_fast),
            _ratio(each.to_deepgemm),
            _percent(row.fraction_of_floor),
            f"{row.error:.1e}" if row.error is not None else "",
            *(_figure(times.get((row.kind, row.shape, other))) for other in (FAST, BLOCKWISE, BF16)),
        )
    return table


def _summary_table(compared: list[Comparison]) -> Table | None:
    table = _table("geometric means")
    table.add_column("regime")
    for heading in ("shapes", "/ fast", "/ DeepGEMM*", "of floor", "worst / fast"):
        table.add_column(heading, justify="right")
    table.add_column("at")
    for each in summaries(compared):
        ratios = _ratio(each.to_fast), _ratio(each.to_deepgemm)
        worst = each.worst and (_ratio(each.worst.to_fast), "x".join(map(str, each.worst.row.shape)))
        table.add_row(each.regime, str(each.count), *ratios, _percent(each.fraction_of_floor), *(worst or ("", "")))
    return table if table.row_count else None


def contest_table(rows: Iterable[Sequence[str]]) -> Table:
    """Chosen tiles and the best ones."""
    table = _table("chosen and best")
    for heading in ("m x n x k", "chosen", "us", "best", "us", "behind"):
        table.add_column(heading, justify="right" if heading in ("us", "behind") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def regret_table(title: str, before: Sequence[Regret], after: Sequence[Regret]) -> Table:
    """Say how far choices are behind the best, by the constants before and after a fit."""
    table = _table(title)
    table.add_column("products")
    for heading in ("count", "mean before", "after", "p95 before", "after", "worst before", "after"):
        table.add_column(heading, justify="right")
    table.add_column("worst after")
    for old, new in zip(before, after, strict=True):
        pairs = ((old.mean, new.mean), (old.p95, new.p95), (old.worst, new.worst))
        cells = [f"{value:.{1 + (place == 0)}%}" for place, pair in enumerate(pairs) for value in pair]
        table.add_row(new.of, str(new.count), *cells, new.worst_product.name)
    return table


def _host_table(report: Report) -> Table:
    table = _table("one call")
    for heading in ("call", "shape", "which"):
        table.add_column(heading)
    for heading in ("us", "least", "most", "launches", "us each"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        shape = "x".join(str(size) if size else "any" for size in row.shape)
        each = None if row.us is None or not row.kernels else row.us / len(row.kernels)
        which = {"host_new_m": "with a new m", "host_new_weight": "with a new weight"}.get(row.mode, "warm")
        us = "failed" if row.failed else _figure(row.us)
        launches = str(len(row.kernels)) if row.kernels else ""
        least, most = _figure(row.us_min), _figure(row.us_max)
        table.add_row(row.contender, shape, which, us, least, most, launches, _figure(each))
    return table


def _compile_line(report: Report) -> str:
    done = [(row.us, row.config) for row in report.rows if row.us is not None]
    if not done:
        return "nothing compiled"
    median = statistics.median(us for us, _ in done)
    slowest, config = max(done, key=lambda pair: pair[0])
    return (
        f"{len(done)} configurations compiled, median {median / 1e3:.0f} ms, slowest {slowest / 1e3:.0f} ms ({config})"
    )


def _table(title: str, gap: int = 3) -> Table:
    """A table with so many spaces between columns."""
    padding = (0, gap - 1, 0, 0)
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, padding=padding
    )


def _figure(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}" if us < 100 else f"{us:.1f}"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"[{'green' if ratio < 1 else 'red' if ratio > 1.02 else 'default'}]{ratio:.2f}[/]"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"

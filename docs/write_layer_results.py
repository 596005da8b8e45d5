"""Writes the times of casts and layers and their rivals as Markdown, from the files of `bench casts|linear|experts`.

python docs/write_layer_results.py > docs/layer_results.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.bench.contenders import BF16, OURS
from lab.bench.layers import ALONE, COPY, EAGER
from lab.bench.report import Report, Row, geometric_mean

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
GPUS = {"H200": "20", "H100": "h100-20"}
"""The beginning of the date, or of the text before it, in the names of each GPU's files."""
COMPILED = "compiled"
TITLE = """# Results of casts and layers

How long do casts, a linear layer and a mixture of experts take, compared with a copy of the same number of bytes, the
product alone, and torch?

`docs/write_layer_results.py` writes this page from the files in `benchmarks/results/` that are named below; these files
also describe the method. The L2 is cold, all contenders of a shape run in one process, and times are medians of 20
calls. `python -m lab plot FILE` draws the parts of a layer's time.
"""

Times = dict[tuple[str, tuple[int, ...]], dict[str, float]]


def reports(kind: str) -> dict[str, tuple[Path, Report]]:
    """Load the newest file of a kind for each GPU."""
    files = {gpu: max(RESULTS.glob(f"{kind}-{date}*.json")) for gpu, date in GPUS.items()}
    return {gpu: (file, Report.load(file)) for gpu, file in files.items()}


def times_of(report: Report) -> Times:
    """List the microseconds of each contender, by kind and shape."""
    times: Times = {}
    for row in report.rows:
        if row.us is not None:
            times.setdefault((row.kind, tuple(row.shape)), {})[row.contender] = row.us
    return times


def page() -> str:
    """Return the text of docs/layer_results.md, with all three kinds."""
    parts = [TITLE]
    for kind, title, columns, cells in (
        ("casts", "Casts", ("us", "of a copy's speed", "torch.compile us", "eager us"), _cast),
        ("linear", "Linear layers", ("us", "over the product alone", "over torch's BF16 layer"), _linear),
        ("experts", "Mixtures of experts", ("us", "over torch's BF16 chain", "products' share"), _experts),
    ):
        found = reports(kind)
        parts += [f"## {title}", "", *(_source(gpu, *each) for gpu, each in found.items()), ""]
        heads = [f"{column}, {gpu}" for gpu in found for column in columns]
        parts += [_line("shape", *heads), _line(*["---"] * (1 + len(heads)))]
        times = {gpu: times_of(report) for gpu, (_, report) in found.items()}
        shares = {gpu: _shares(report.rows) for gpu, (_, report) in found.items()}
        for key in times["H200"]:
            row = [cell for gpu in found for cell in cells(times[gpu].get(key, {}), shares[gpu].get(key))]
            parts.append(_line(" ".join((key[0] if kind == "casts" else "", "x".join(map(str, key[1])))).strip(), *row))
        parts += ["", *_means(kind, times), ""]
    return "\n".join(parts).rstrip() + "\n"


def _source(gpu: str, file: Path, report: Report) -> str:
    header = report.header
    return (
        f"- {gpu}: `{file.name}`, {header['date'][:10]}, commit {header['commit']}, torch {header['versions']['torch']}"
    )


def _cast(us: dict[str, float], _: float | None) -> Sequence[str]:
    return _us(us.get(OURS)), _percent(us, COPY), _us(us.get(COMPILED)), _us(us.get(EAGER))


def _linear(us: dict[str, float], _: float | None) -> Sequence[str]:
    return _us(us.get(OURS)), _ratio(us, ALONE), _ratio(us, BF16)


def _experts(us: dict[str, float], share: float | None) -> Sequence[str]:
    return _us(us.get(OURS)), _ratio(us, BF16), "" if share is None else f"{share:.0%}"


def _shares(rows: Iterable[Row]) -> dict[tuple[str, tuple[int, ...]], float]:
    """Compute the products' share of our layers' time."""
    return {
        (row.kind, tuple(row.shape)): sum(us for part, us in row.parts.items() if "product" in part) / row.us
        for row in rows
        if row.contender == OURS and row.parts is not None and row.us is not None
    }


def _means(kind: str, times: dict[str, Times]) -> list[str]:
    """Tabulate geometric means over a linear layer's shapes with the same rows, and over all mixtures."""
    if kind == "casts":
        return []
    rivals = (ALONE, BF16) if kind == "linear" else (BF16,)
    names = {ALONE: "the product alone", BF16: "torch in BF16"}
    heads = [f"over {names[rival]}, {gpu}" for gpu in times for rival in rivals]
    lines = [_line("geometric mean", *heads), _line(*["---"] * (1 + len(heads)))]
    for m in sorted({key[1][0] for key in times["H200"]}) if kind == "linear" else (None,):
        cells = []
        for of_gpu in times.values():
            of_m = [us for (_, shape), us in of_gpu.items() if m is None or shape[0] == m]
            for rival in rivals:
                mean = geometric_mean(us[OURS] / us[rival] for us in of_m if OURS in us and rival in us)
                cells.append("" if mean is None else f"{mean:.2f}")
        lines.append(_line("all" if m is None else f"m = {m}", *cells))
    return lines


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _ratio(us: dict[str, float], rival: str) -> str:
    return f"{us[OURS] / us[rival]:.2f}" if OURS in us and rival in us else ""


def _percent(us: dict[str, float], rival: str) -> str:
    return f"{us[rival] / us[OURS]:.0%}" if OURS in us and rival in us else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")

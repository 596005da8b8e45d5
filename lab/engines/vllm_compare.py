"""Compare what vllm_run.py measured: tables of 80 columns, and a result file."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from lab.bench import machine, report
from lab.bench.report import geometric_mean, write_whole

METHOD = (
    "vLLM's offline engine on random models, a process for each provider. logprobs: absolute differences of prompts' "
    "log-probabilities from exact's, and how many have the bits of the vendored copy's; tokens: greedy ones equal to "
    "exact's until the first that differs. ms: host time of a prefill, or of a decoded step; the median of all values. "
    "profile: the GPU's ms by kernel. "
    "start: seconds from a process's begin until the engine is up, and until its first token, with kernels that were "
    "compiled until then; empty caches, or warm ones."
)
RATIOS = (("plugin", "own"), ("plugin", "vendored"), ("ours", "vendored"))
Runs = Mapping[str, Mapping[str, Any]]
"""Results of one model by provider."""
Table = Mapping[str, Mapping[str, float]]
"""Numbers by row and column."""


def compare(files: Sequence[Path], out: Path | None, commit: str | None) -> None:
    """Print the tables of each model and write one file of all; it describes the machine that this runs on."""
    models: dict[str, dict[str, Any]] = {}
    for result in (json.loads(file.read_text()) for file in files):
        models.setdefault(result["model"], {})[result["who"]] = result
    header = machine.header("engines", METHOD, commit)
    gpu = header["machine"]["gpu"]
    found = {(result["gpu"], result["vllm"]) for runs in models.values() for result in runs.values()}
    if [name for name, _ in found] != [gpu]:
        raise ValueError(f"files: expected results of {gpu}, this machine's GPU, and of one vLLM, got {found}")
    header["versions"]["vllm"] = found.pop()[1]
    ratios, lines = [], []
    for model, runs in models.items():
        print(f"\n== {model}, vLLM {header['versions']['vllm']}, {gpu}")
        tables = tables_of(runs)
        for title, table in tables.items():
            print_table(title, table)
        ratios += [row["plugin/own"] for row in tables["ratios"].values() if "plugin/own" in row]
        summed_up = {
            who: run | {"logprobs": tables["logprobs"].get(who), "tokens": None, "profile": largest(run)}
            for who, run in runs.items()
        }
        lines += [json.dumps(run) for run in summed_up.values()]
    header["plugin/own"] = geometric_mean(ratios)
    print(f"\ngeometric mean of plugin/own, {len(ratios)} times: {header['plugin/own']}")
    short = re.findall(r"[A-Z]\d+", gpu or "")
    name = f"engines-{''.join(short[:1]).lower()}-{header['date'][:10]}-{header['commit'][:7]}.json"
    of_runs = ",\n".join(lines)
    path = out or report.RESULTS / name
    write_whole(path, f'{{"header": {json.dumps(header, indent=1)},\n"runs": [\n{of_runs}\n]}}\n')
    print(f"written to {path}")


def tables_of(runs: Runs) -> dict[str, Table]:
    """Make the tables of a model."""
    times = across(runs, "ms", statistics.median)
    of_gpu = across(runs, "profile", lambda rows: sum(ms for _, ms in rows))
    starts = {who: dict(zip(("empty", "warm"), run["starts"], strict=False)) for who, run in runs.items()}
    of_start = {"s": "first_token_s", "kernels": "kernels"}
    return {
        "logprobs": {who: answers(runs, who) for who in runs if who != "exact"},
        "ms": times,
        "ratios": ratios_of(times),
        "start": {
            who: {f"{caches}: {what}": start[of] for caches, start in each.items() for what, of in of_start.items()}
            for who, each in starts.items()
        },
        "GPU, ms": of_gpu,
        "ratios, GPU": ratios_of(of_gpu),
    }


def largest(run: Mapping[str, Any], count: int = 12) -> dict[str, list[tuple[str, float]]]:
    """Give a run's kernels that take the longest in each step, by short names, and what the others take."""
    return {
        step: [*((name[:48], ms) for name, ms in rows[:count]), ("others", sum(ms for _, ms in rows[count:]))]
        for step, rows in run.get("profile", {}).items()
    }


def ratios_of(times: Table) -> Table:
    """Make rows of the ratios of times."""
    return {
        name: {f"{who}/{other}": row[who] / row[other] for who, other in RATIOS if {who, other} <= row.keys()}
        for name, row in times.items()
    }


def across(runs: Runs, what: str, number_of: Callable[[Any], float]) -> dict[str, dict[str, float]]:
    """Make rows of what providers have by name."""
    names = dict.fromkeys(name for run in runs.values() for name in run.get(what, {}))
    having = {name: [who for who, run in runs.items() if name in run.get(what, {})] for name in names}
    return {name: {who: number_of(runs[who][what][name]) for who in each} for name, each in having.items()}


def answers(runs: Runs, who: str) -> dict[str, float]:
    """Summarize a provider's log-probabilities and tokens beside exact's, and its bits beside the vendored copy's."""
    mine, found = runs[who], {}
    if "exact" in runs:
        truth = runs["exact"]
        off = sorted(abs(x - y) for x, y in zip(mine["logprobs"], truth["logprobs"], strict=True))
        found = {"mean": statistics.fmean(off), "median": statistics.median(off)}
        found |= {"99%": off[-(-99 * len(off) // 100) - 1], "max": off[-1]}
        pairs = (zip(*both, strict=True) for both in zip(mine["tokens"], truth["tokens"], strict=True))
        found["tokens"] = sum(len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs)
    if "vendored" in runs:
        pairs_of_numbers = zip(mine["logprobs"], runs["vendored"]["logprobs"], strict=True)
        found["bits of vendored"] = sum(x == y for x, y in pairs_of_numbers)
    return found | {"of": len(mine["logprobs"])}


def print_table(title: str, table: Table) -> None:
    """Print numbers below their columns' names, if there are any."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines = [[title, *columns]]
    for name, row in table.items():
        numbers = [row.get(column, "") for column in columns]
        lines.append([name, *(f"{number:.4g}" if isinstance(number, float) else str(number) for number in numbers)])
    widths = [max(7, *map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines if columns else ():
        print(first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)))

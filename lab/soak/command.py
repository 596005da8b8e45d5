"""The command `python -m lab soak`: run attempts until time is up, with progress, and write a record."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deep_gemm.cli import make_console
from deep_gemm.core.call import RECORDS
from deep_gemm.core.gpu import HOPPER

from ..bench.machine import header
from .ahead import compiling, drawn, likely
from .attempt import Attempt, Kind, attempt
from .kernels import kernels_on
from .kinds import ALL, KINDS

MOST_FAILURES = 20
"""The run ends after this many failures: the first failures are enough to find the faults."""
COUNTED = ("attempts", "calls", "refused", "replays", "failed")
"""Counts for each kind."""
METHOD = (
    "random problems, each compared with FP64 or torch; bytes around outputs and operands compared before and after"
)


def run(
    minutes: float,
    seed: int,
    only: Sequence[str],
    device: str | None,
    first: int,
    count: int | None,
    out: Path | None,
    commit: str | None = None,
) -> bool:
    """Attempt problems until time is up or `count` are done; print and record results. Return whether all passed."""
    device = device_of(device)
    kinds = kinds_of(only, device)
    console = make_console()
    begun, memory = time.monotonic(), [memory_now(device)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU tensors are small
    builds: Iterable[Callable[[], object]] = ()
    if device == "cuda":
        builds = drawn(seed, first, count, kinds) if only or count is not None else likely()
    try:
        with compiling(builds) if device == "cuda" else nullcontext():
            attempts, failures, seconds = _attempt_all(console, kinds, minutes * 60, seed, device, first, count, memory)
    finally:
        torch.set_num_threads(threads)
    memory.append(memory_now(device))
    record = {
        **header("soak", METHOD, commit),
        "device": device,
        "seed": seed,
        "first": first,
        "minutes": minutes,
        "seconds": round(time.monotonic() - begun, 1),
        "attempts": sum(counted["attempts"] for counted in attempts.values()),
        "by_kind": attempts,
        "seconds_by_kind": {kind: round(spent, 2) for kind, spent in seconds.items()},
        "memory": memory,
        "failures": [
            {"repeat": repeat_line(seed, each, device), **vars(each), "done": "; ".join(each.done)} for each in failures
        ],
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    _show(console, record)
    return not failures


def kinds_of(only: Sequence[str], device: str) -> tuple[Kind, ...]:
    """Find kinds of problems by their names; without names, take all kinds of calls."""
    kernels = {each.kind: each for each in kernels_on(device)}
    kinds: dict[str, tuple[Kind, ...]] = {name: (kind,) for name, kind in (KINDS | kernels).items()}
    kinds["kernels"] = (*kernels.values(),)
    if unknown := [name for name in only if name not in kinds]:
        raise ValueError(f"--only: expected kinds among {', '.join(kinds)}, got {', '.join(unknown)}")
    return tuple(kind for name in only for kind in kinds[name]) or ALL


def device_of(asked: str | None) -> str:
    """Return the requested device; by default a Hopper GPU if there is one, else the CPU."""
    has_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER
    if asked not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: expected cuda or cpu, got {asked}")
    if asked == "cuda" and not has_gpu:
        raise ValueError("--device: expected cpu, because there is no Hopper GPU, got cuda")
    return asked or ("cuda" if has_gpu else "cpu")


def repeat_line(seed: int, failed: Attempt, device: str) -> str:
    """Return the command that repeats an attempt."""
    which = f"--seed {seed} --first {failed.number} --count 1 --only {failed.kind} --device {device}"
    return f"python -m lab soak {which}"


def memory_now(device: str) -> dict[str, Any]:
    """Measure the process: the host's peak in MiB, the GPU's present MiB, and the number of records."""
    held: dict[str, Any] = {
        "host_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "records": sum(map(len, RECORDS.values())),
    }
    if device == "cuda":
        held["gpu_allocated_mib"] = round(torch.cuda.memory_allocated() / 2**20, 1)
        held["gpu_reserved_mib"] = round(torch.cuda.memory_reserved() / 2**20, 1)
        free, total = torch.cuda.mem_get_info()
        held["gpu_used_mib"] = round((total - free) / 2**20, 1)
    return held


def _attempt_all(
    console: Console,
    kinds: Sequence[Kind],
    time_s: float,
    seed: int,
    device: str,
    first: int,
    count: int | None,
    memory: list[dict[str, Any]],
) -> tuple[dict[str, dict[str, int]], list[Attempt], dict[str, float]]:
    counts: dict[str, dict[str, int]] = {}
    seconds: dict[str, float] = {}
    failures: list[Attempt] = []
    begun, said = time.monotonic(), 0.0
    number, end = first, None if count is None else first + count
    with console.status("starting") as status:
        while number != end and (elapsed := time.monotonic() - begun) < time_s and len(failures) < MOST_FAILURES:
            started = time.monotonic()
            done = attempt(seed, number, kinds, device)
            number += 1
            seconds[done.kind] = seconds.get(done.kind, 0) + time.monotonic() - started
            counted = counts.setdefault(done.kind, dict.fromkeys(COUNTED, 0))
            of_one = 1, done.calls, done.refused, done.replays, int(done.wrong is not None)
            for name, more in zip(COUNTED, of_one, strict=True):
                counted[name] += more
            if done.wrong is not None:
                failures.append(done)
                _tell(console, seed, done, device)
                if "CUDA error" in done.wrong or "cuLaunchKernel" in done.wrong:
                    console.print("the GPU's context is lost, and nothing after it would tell anything", style="red")
                    break
            progress = f"{number - first} attempts, {len(failures)} failed, {elapsed:.0f} of {time_s:.0f} s"
            status.update(progress)
            if not console.is_terminal and elapsed - said > max(time_s / 8, 5):
                said = elapsed
                memory.append(memory_now(device))
                console.print(progress)
                sys.stdout.flush()
    return counts, failures, seconds


def _tell(console: Console, seed: int, failed: Attempt, device: str) -> None:
    lines = (f"{failed.kind}: {failed.text}", f"  {'; '.join(failed.done)}", f"  {failed.wrong}")
    for line in lines:
        console.print(escape(line), style="red", soft_wrap=True)
    console.print(f"  {repeat_line(seed, failed, device)}", soft_wrap=True, markup=False, highlight=False)


def _show(console: Console, record: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for heading in (*COUNTED, "s"):
        table.add_column(heading, justify="right")
    for kind, counted in sorted(record["by_kind"].items()):
        cells = (str(counted[heading]) for heading in COUNTED)
        table.add_row(kind, *cells, f"{record['seconds_by_kind'][kind]:.1f}")
    console.print(table)
    count, failed = record["attempts"], len(record["failures"])
    verdict = f"{failed} of {count} failed" if failed else f"{count} attempts, none failed"
    console.print(f"{verdict}, in {record['seconds']:.0f} s on {record['machine']['gpu'] or 'the CPU'}")
    console.print(f"memory at first {record['memory'][0]}, at last {record['memory'][-1]}", style="dim")

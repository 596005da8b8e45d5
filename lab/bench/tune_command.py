"""`python -m lab tune`: is what the heuristics choose the best, and a table of products for which it is not."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deep_gemm import __version__
from deep_gemm.cli.console import make_console, with_progress
from deep_gemm.core.gpu import Gpu, gpu_of
from deep_gemm.core.jit import CompilerMissing
from deep_gemm.core.settings import settings
from deep_gemm.gemm import timings
from deep_gemm.gemm.output import Output
from deep_gemm.gemm.table import Entry, Product, read_table
from deep_gemm.gemm.tiles import OUTPUTS_BY_NAME
from deep_gemm.gemm.timings import Timings

from . import machine, table, tune, tune_collect, tune_fit, tune_samples
from .cases import Case, parse_shapes
from .command import UsageError, judged_of, need_gpu
from .contenders import OURS
from .products import GpuLostError, raise_if_lost, reason
from .report import Report, Row, write_whole
from .timing import PairingError
from .tune import Contest, Judgement
from .tune_collect import Collection
from .tuned import table_text, updated

MOST = 1.05
"""The most that an audit lets pass: the time of the chosen tile over that of the best."""
TOLD = 1.02
"""The least that it shows."""
WORTH_AN_ENTRY = 1.03
MADE_BY = f"python -m lab tune, deep_gemm {__version__}; {tune.METHOD}"
DEFAULT_MINUTES = 4.0
"""Minutes of measuring; a collection's compiling comes on top."""


def run(
    *,
    audit: bool = False,
    collect: bool = False,
    minutes: float | None = None,
    fit: bool = False,
    files: Sequence[Path] = (),
    shapes: str | None = None,
    output: str | None = None,
    out: Path | None = None,
    part: str | None = None,
    commit: str | None = None,
    verbose: bool = False,
) -> bool:
    """Audit the choices, tune these shapes, collect what a fit needs, or fit; tell whether all went well."""
    given = {"--audit": audit, "--collect": collect, "--fit": fit, "--shapes": shapes is not None}
    asked_for = [name for name, is_given in given.items() if is_given]
    if len(asked_for) != 1:
        got = " and ".join(asked_for) or "none"
        raise UsageError(
            f"tune: expected one of --audit, --collect, --fit and --shapes '64,2112,7168;4096,7168,2048', got {got}"
        )
    if fit != bool(files):
        got = " ".join(map(str, files)) or "none"
        raise UsageError(f"tune: expected files of --collect with --fit, and with --fit alone, got {got}")
    if output is not None and shapes is None:
        raise UsageError(f"--output is for --shapes; {asked_for[0]} has products of its own")
    if commit is not None and not (audit or collect):
        raise UsageError(f"--commit is for --audit and --collect; {asked_for[0]} records none")
    if part is not None and not audit:
        raise UsageError(f"--part is for --audit; {asked_for[0]} has products of its own")
    is_judged = judged_of(part)
    if minutes is not None and not (collect and minutes > 0):
        raise UsageError(f"--minutes is for --collect, and above 0, got {minutes}")
    if fit:
        return _fit(files, out or timings.FILE, make_console())
    session = _Session(make_console(), verbose)
    try:
        if collect:
            return session.collect(DEFAULT_MINUTES if minutes is None else minutes, out, commit)
        return (
            session.audit(is_judged, out, commit) if audit else session.tune(_cases(shapes or ""), _output(output), out)
        )
    except CompilerMissing as error:
        raise UsageError(str(error)) from error


def _fit(files: Sequence[Path], out: Path, console: Console) -> bool:
    """Make the constants of the GPUs that these files are of, and print how well choices by them do."""
    try:
        collected = [tune_fit.Collected.load(path) for path in files]
    except ValueError as error:
        raise UsageError(str(error)) from error
    before = {one.gpu.name: timings.timings_of(one.gpu) for one in collected}
    with console.status("fitting") as status:
        after = tune_fit.fit(collected, announce=status.update)
    for one in collected:
        title = f"{one.gpu.name}: how much longer the chosen tile takes than the best"
        regrets = [tune_fit.regrets(one.products, one.gpu, each[one.gpu.name]) for each in (before, after)]
        console.print(table.regret_table(title, *regrets))
    made_by = f"python -m lab tune --fit {' '.join(path.name for path in files)}"
    write_whole(out, tune_fit.text_of({**_of_other_gpus(after), **after}, made_by))
    console.print(f"\nwritten to {out}", markup=False)
    return True


def _of_other_gpus(fitted: Mapping[str, Timings]) -> dict[str, Timings]:
    """The GPUs without a file: they keep what is their own, and share the rest."""
    shared = next(iter(fitted.values()))
    return {
        name: replace(shared, **{key: getattr(before, key) for key in timings.OF_A_GPU})
        for name, before in timings.measured().items()
        if name not in fitted
    }


class _Session:
    """A session: what was measured so far, and what is made of it."""

    def __init__(self, console: Console, verbose: bool) -> None:
        self.console, self.verbose = console, verbose
        self.judgements: list[Judgement] = []
        self.failures: list[tuple[Contest, str]] = []
        self.stopped: str | None = None

    def audit(self, is_judged: bool | None, out: Path | None, commit: str | None) -> bool:
        """Compare what is chosen with the best, and keep all times in a result file."""
        try:
            contests = tune.audit_contests(_gpu(), is_judged)
        except ValueError as error:  # of a table in force
            raise UsageError(str(error)) from error
        report = Report(machine.header("audit", tune.METHOD, commit))
        path = out or report.default_path()

        def keep() -> None:
            failures = [Row.of(one.case, OURS, "cold", None, failed=why) for one, why in self.failures]
            report.rows = [row for one in self.judgements for row in one.rows()] + failures
            report.header["stopped"] = self.stopped
            report.save(path)

        self._measure(contests, keep)
        self._print(TOLD)
        self._print_summary()
        self.console.print(f"\nwritten to {path}", markup=False)
        return self._is_whole() and all(one.ratio <= MOST for one in self.judgements)

    def tune(self, cases: Sequence[Case], output: Output, out: Path | None) -> bool:
        """Keep the tiles that are clearly faster than those of the lowest cost in a table, beside what it has."""
        path, gpu = out or settings().tuned_table or Path("tuned.json"), _gpu()
        try:
            entries = read_table(path) if path.exists() else []
        except ValueError as error:
            raise UsageError(str(error)) from error

        def keep() -> None:
            if not self.judgements:
                return
            measured = {_product(one.contest, gpu) for one in self.judgements}
            found = [_entry(one, gpu) for one in self.judgements if one.ratio > WORTH_AN_ENTRY]
            write_whole(path, table_text(updated(entries, measured, found), MADE_BY))

        self._measure([Contest.of(case, output, gpu, by_cost=True) for case in cases], keep)
        self._print(0.0)
        count = sum(one.ratio > WORTH_AN_ENTRY for one in self.judgements)
        self.console.print(f"\n{count} of {len(cases)} shapes have an entry in {path}", markup=False)
        return self._is_whole()

    def collect(self, minutes: float, out: Path | None, commit: str | None) -> bool:
        """Time all that a fit of the cost model needs, and keep it in a file."""
        gpu = _gpu()
        header = machine.header("tune", tune_collect.METHOD, commit)
        found = Collection({**header, "minutes": minutes, "stopped": None})
        path = out or Report(header).default_path()
        entries = [tune_collect.entry_of(sample, gpu) for sample in tune_samples.samples(gpu.num_sms)]
        configs = tune_collect.configurations(entries)

        def failed(what: str, why: str) -> None:
            self.console.print(f"no time of {what}: {why}", style="red", markup=False)

        def add(row: dict[str, Any]) -> None:
            found.add(row)
            found.save(path)
            if self.verbose and row["us"]:
                best = min(row["us"], key=lambda name: row["us"][name][0])
                sizes = f"{row['groups']} x " * bool(row["groups"]) + f"{row['m']}x{row['n']}x{row['k']}"
                self.console.print(f"{sizes} {row['output']}: {best} {row['us'][best][0]:.2f} us", markup=False)

        def work(announce: Callable[[str], None]) -> None:
            workers = len(os.sched_getaffinity(0))
            broken = tune_collect.compile_all(configs, workers, announce, failed)
            able = [entry.without(broken) for entry in entries]
            try:
                found.clusters_at_once = tune_collect.clusters_at_once(torch.cuda.current_device())
            except Exception as error:
                raise_if_lost(error)
                failed("clusters at once", reason(error))
            seconds = minutes * 60
            left = tune_collect.measure(able, seconds=seconds, add=add, failed=failed, announce=announce)
            if left:
                self.stopped = f"{left} of {len(able)} products left after {minutes:g} minutes"

        try:
            with_progress(len(configs) + len(entries), self.console, work)
        except (GpuLostError, PairingError) as error:
            self.stopped = str(error)
        found.header["stopped"] = self.stopped
        found.save(path)
        if self.stopped is not None:
            self.console.print(f"stopped: {self.stopped}", markup=False)
        count = sum(len(row["us"]) for row in found.rows)
        self.console.print(f"{count} times of {len(found.rows)} products written to {path}", markup=False)
        return bool(count)

    def _measure(self, contests: Sequence[Contest], keep: Callable[[], None]) -> None:
        """Measure, and keep what there is after each shape, so that what stops the run takes little with it."""
        configs = tune.configurations(contests)

        def judged(judgement: Judgement) -> None:
            self.judgements.append(judgement)
            keep()
            if self.verbose:
                self.console.print(_line(judgement), markup=False)

        def failed(contest: Contest, why: str) -> None:
            self.failures.append((contest, why))
            self.console.print(f"no times of {contest.case.name}: {why}", style="red", markup=False)

        def work(announce: Callable[[str], None]) -> None:
            tune.compile_all(configs, announce)
            tune.measure(contests, judged=judged, failed=failed, announce=announce)

        try:
            with_progress(len(configs) + len(contests), self.console, work)
        except (GpuLostError, PairingError) as error:
            self.stopped = str(error)
            self.console.print(f"stopped: {error}", style="red", markup=False)
        keep()

    def _is_whole(self) -> bool:
        return not self.failures and self.stopped is None

    def _print(self, behind: float) -> None:
        """Print the shapes whose choice is this far behind the best."""
        told = [one for one in self.judgements if one.ratio > behind]
        if told:
            self.console.print(table.contest_table([_cells(one) for one in told]))

    def _print_summary(self) -> None:
        lost = [one.ratio - 1 for one in self.judgements]
        if not lost:
            return
        worst = max(self.judgements, key=lambda one: one.ratio)
        above = sum(one.ratio > MOST for one in self.judgements)
        self.console.print(
            f"{len(lost)} shapes: the chosen tile takes {statistics.mean(lost):.1%} longer than the best on average, "
            f"{max(lost):.1%} at worst ({worst.contest.case.name}); {above} above {MOST - 1:.0%}"
        )
        by_output: dict[str, list[str]] = {}
        for one in self.judgements:
            if one.ratio > WORTH_AN_ENTRY:
                by_output.setdefault(one.contest.output.name, []).append(",".join(map(str, one.contest.case.shape)))
        for name, shapes in by_output.items():
            command = f"python -m lab tune --output '{name}' --shapes '{';'.join(shapes)}'"
            self.console.print(f"to tune: {command}", markup=False, soft_wrap=True)


def _cases(shapes: str) -> list[Case]:
    try:
        asked_for = dict.fromkeys(parse_shapes(shapes))
    except ValueError as error:
        raise UsageError(str(error)) from error
    odd = next((shape for shape in asked_for if len(shape) != 3 or shape[1] % 8 or shape[2] % 16), None)
    if odd is not None:
        raise UsageError(f"shapes: expected (m, n, k) for tune, n a multiple of 8 and k of 16, got {odd}")
    return [Case("dense", shape) for shape in asked_for]


def _output(name: str | None) -> Output:
    if name is not None and name not in OUTPUTS_BY_NAME:
        raise UsageError(f"output: expected one of {', '.join(OUTPUTS_BY_NAME)}, got {name!r}")
    return OUTPUTS_BY_NAME[name or Output().name]


def _gpu() -> Gpu:
    need_gpu("tune")
    try:
        return gpu_of(torch.cuda.current_device())
    except NotImplementedError as error:
        raise UsageError(str(error)) from error


def _product(contest: Contest, gpu: Gpu) -> Product:
    m, n, k = contest.case.shape
    return m, n, k, contest.output, gpu.name, gpu.num_sms


def _entry(judgement: Judgement, gpu: Gpu) -> Entry:
    m, n, k, output, name, num_sms = _product(judgement.contest, gpu)
    best, chosen = judgement.best, judgement.chosen
    return Entry(name, num_sms, output, m, n, k, best.tile.name, best.spread.us, chosen.tile.name, chosen.spread.us)


def _cells(judgement: Judgement) -> tuple[str, ...]:
    chosen, best = judgement.chosen, judgement.best
    times = f"{chosen.spread.us:.2f}", f"{best.spread.us:.2f}"
    return judgement.contest.case.name, chosen.config, times[0], best.config, times[1], f"{judgement.ratio - 1:.1%}"


def _line(judgement: Judgement) -> str:
    name, chosen, chosen_us, best, best_us, behind = _cells(judgement)
    return f"{name}: {chosen} {chosen_us} us, {best} {best_us} us, {behind}"

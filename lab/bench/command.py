"""`python -m lab bench` and `plot`: choose cases, measure, save, show."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deep_gemm.cli.console import make_console, with_progress

from . import (
    attention,
    bf16,
    cases,
    casts,
    compile_times,
    distributed,
    einsum,
    experts,
    few_experts,
    fp4_experts,
    hc,
    host,
    linear,
    machine,
    numerics,
    products,
    skip_head_mid,
    table,
    training,
    tune,
)
from .report import Add, Announce, Report, Row
from .timing import PairingError

MODULES: dict[str, Any] = {
    "einsum": einsum,
    "casts": casts,
    "linear": linear,
    "experts": experts,
    "fp4_experts": fp4_experts,
    "few_experts": few_experts,
    "attention": attention,
    "hc": hc,
    "bf16": bf16,
    "training": training,
    "distributed": distributed,
    "host": host,
    "compile": compile_times,
    "numerics": numerics,
}
PRODUCTS = ("dense", "grouped", *products.WITH_OWN_RIVALS)
KINDS = (*PRODUCTS, *MODULES)
PLOTTED = ("dense", "grouped", "linear", "experts")
METHODS = {name: module.METHOD for name, module in MODULES.items()}
METHODS |= {name: f"{products.METHOD}; {module.METHOD}" for name, module in products.WITH_OWN_RIVALS.items()}
METHODS["einsum"] += f"; {skip_head_mid.METHOD}"
SHAPES = {
    "casts": ((2,), "8192,7168"),
    "linear": ((3,), "64,2112,7168"),
    "experts": ((5,), "32,8,64,7168,2048"),
    "fp4_experts": ((5,), "48,8,64,6144,2048"),
    "few_experts": ((5,), "256,8,64,7168,256"),
    "attention": ((3, 4, 5), "2048,8192,64,128"),
    "hc": ((3, 4), "4096,24,7168,16"),
    "bf16": ((3, 4), "4096,7168,2048"),
    "training": ((3, 5), "128,8,32768,2048,768"),
}
"""`--shapes` by kind: how many numbers a shape has, and an example."""
PARTS = {"fitted": False, "judged": True}
"""Names that --part takes, and `Case.is_judged` of each."""


def judged_of(part: str | None) -> bool | None:
    """Give `Case.is_judged` of the part that was asked for; None for all."""
    if part not in (None, *PARTS):
        raise UsageError(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
    return None if part is None else PARTS[part]


CONTENDERS: dict[str, tuple[str, ...]] = {name: MODULES[name].CONTENDERS for name in ("einsum", *SHAPES, "distributed")}
CONTENDERS["einsum"] = tuple(dict.fromkeys((*einsum.CONTENDERS, *skip_head_mid.CONTENDERS)))
"""Names that --only takes."""


class UsageError(Exception):
    """The request cannot be carried out; the text says why."""


class TimeUpError(Exception):
    """The time that a run may take is over."""


def run(
    kind: str,
    *,
    quick: bool = False,
    with_sustained: bool = False,
    plot: Path | None = None,
    out: Path | None = None,
    shapes: str | None = None,
    only: str | None = None,
    minutes: float | None = None,
    commit: str | None = None,
    part: str | None = None,
    processes: int | None = None,
) -> bool:
    """Measure, write the result file and print the tables. Tell whether all products of this package were right."""
    steps = _steps(kind, quick, with_sustained, plot, shapes, only, part, processes)
    console = make_console()
    report = Report(machine.header(kind, METHODS.get(kind, products.METHOD), commit))
    path = out or report.default_path()
    try:
        _measure_with_progress(report, path, console, steps, minutes)
    except (products.GpuLostError, PairingError, TimeUpError) as error:
        report.header["stopped"] = str(error)
    report.save(path)
    table.print_report(report, console)
    console.print(f"\nwritten to {path}", markup=False)
    if plot is not None:
        plot_report(report, plot)
        console.print(f"plotted in {plot}", markup=False)
    return not report.failures() and not report.header.get("stopped")


def plot_file(file: Path, out: Path) -> None:
    """Plot a result file."""
    try:
        report = Report.load(file)
    except ValueError as error:
        raise UsageError(str(error)) from error
    plot_report(report, out)


def plot_report(report: Report, out: Path) -> None:
    """Plot a run."""
    _need_matplotlib()
    from . import plot, plot_layers

    try:
        (plot_layers if report.kind in ("linear", "experts") else plot).draw(report, out)
    except ValueError as error:
        raise UsageError(str(error)) from error


def has_gpu() -> bool:
    """Tell whether there is a GPU to measure."""
    return torch.cuda.is_available()


WITHOUT_GPU = "`bench compile`, `bench numerics --quick` and `bench distributed --quick`"


def need_gpu(command: str, instead: str = WITHOUT_GPU) -> None:
    """Refuse a command that measures a GPU if there is none; name what runs `instead`."""
    if not has_gpu():
        raise UsageError(f"{command} measures a GPU and found no CUDA GPU; these run anywhere: {instead}")


Steps = tuple[int, Callable[[Add, Announce], None]]
"""How many steps a run has, and the function that does them; it takes `add` for rows and `announce` for steps."""


def _steps(
    kind: str,
    quick: bool,
    with_sustained: bool,
    plot: Path | None,
    shapes: str | None,
    only: str | None,
    part: str | None,
    processes: int | None,
) -> Steps:
    """Check the request and plan it."""
    if kind not in KINDS:
        raise UsageError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if plot is not None:
        if kind not in PLOTTED:
            raise UsageError(f"--plot draws products and layers, bench {kind} has none")
        _need_matplotlib()
    if shapes is not None and kind not in (*PRODUCTS, *CONTENDERS):
        raise UsageError(f"--shapes chooses products, casts and layers, bench {kind} has its own")
    if part is not None and (kind not in PRODUCTS or quick or shapes is not None):
        raise UsageError(f"--part chooses among all cases of bench {', '.join(PRODUCTS)}; not with --quick or --shapes")
    is_judged = judged_of(part)
    if processes is not None and kind != "distributed":
        raise UsageError(f"--processes is for bench distributed; bench {kind} runs in one")
    names = _contenders(kind, only)
    if kind == "distributed":
        return _distributed(quick, shapes, names, processes)
    if kind == "compile":
        configs = compile_times.configurations(quick)
        return len(configs), lambda add, announce: compile_times.measure(configs, add=add, announce=announce)
    if kind == "numerics":
        if not quick:
            need_gpu("bench numerics")
        steps, device = numerics.steps(quick=quick), "cuda" if has_gpu() else "cpu"
        return len(steps), lambda add, announce: numerics.measure(steps, device, add=add, announce=announce)
    try:
        if kind in CONTENDERS:
            total, measure = _casts_or_layers(kind, quick, shapes)
            need_gpu(f"bench {kind}")
            return total, lambda add, announce: measure(only=names, add=add, announce=announce)
        asked_for = cases.parse_shapes(shapes) if shapes is not None else ()
        chosen = products.cases_of(kind, quick=quick, shapes=asked_for, is_judged=is_judged)
    except ValueError as error:
        raise UsageError(str(error)) from error
    need_gpu(f"bench {kind}")
    if kind == "host":
        return host.STEPS, lambda add, announce: host.measure(add=add, announce=announce)
    ahead = products.configurations(chosen)

    def measure_products(add: Add, announce: Announce) -> None:
        tune.compile_all(ahead, announce)
        products.measure(chosen, with_sustained=with_sustained, add=add, announce=announce)

    return len(ahead) + len(chosen) * (2 if with_sustained else 1), measure_products


def _distributed(quick: bool, shapes: str | None, names: Sequence[str], processes: int | None) -> Steps:
    """Mixtures over processes, one for each GPU; without GPUs small ones over Gloo."""
    gpus = torch.cuda.device_count()
    count = processes if processes is not None else gpus or 2
    if count < 1 or (gpus and count > gpus):
        most = f"1 to {gpus}, as many as GPUs" if gpus else "at least 1"
        raise UsageError(f"processes: expected {most}, got {count}")
    if shapes is not None:
        try:
            chosen: Sequence[Any] = cases.parse_shapes(
                shapes, distributed.NUMBERS, "256,6,128,4096,2048,0", 0, distributed.MEANING
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    elif gpus:
        chosen = distributed.QUICK if quick else distributed.SHAPES
    elif quick:
        chosen = distributed.WITHOUT_GPU
    else:
        raise UsageError("bench distributed measures GPUs and found none; --quick and --shapes run anywhere")
    for shape in chosen:
        if shape[0] % count or shape[1] > shape[0]:
            raise UsageError(f"shapes: expected experts for {count} processes to share, at least top-k, got {shape}")
    return len(chosen), lambda add, announce: distributed.measure(chosen, count, only=names, add=add, announce=announce)


def _casts_or_layers(kind: str, quick: bool, shapes: str | None) -> tuple[int, Callable[..., None]]:
    """Say how many steps there are, and what does them."""
    if kind == "einsum":
        of_heads: Sequence[Any] = einsum.shapes_of(quick=quick)
        into_heads: Sequence[Any] = skip_head_mid.shapes_of(quick=quick)
        if shapes is not None:
            asked = cases.parse_shapes(shapes, (3, 4), "32,8,4096,1024")
            of_heads, into_heads = ([shape for shape in asked if len(shape) == sizes] for sizes in (4, 3))
        return len(of_heads) + len(into_heads), partial(_measure_heads, of_heads, into_heads)
    module = MODULES[kind]
    if shapes is None:
        chosen = module.shapes_of(quick=quick)
    else:
        chosen = getattr(module, "chosen", list)(cases.parse_shapes(shapes, *SHAPES[kind]))
    return len(chosen), partial(module.measure, chosen)


def _measure_heads(
    of_heads: Sequence[Any], into_heads: Sequence[Any], *, only: Sequence[str], add: Add, announce: Announce
) -> None:
    """Products of heads, then products into the parts of heads: those that have a contender that is asked for."""
    if only and not set(only) & set(einsum.CONTENDERS):
        of_heads = ()
    if only and not set(only) & set(skip_head_mid.CONTENDERS):
        into_heads = ()
    einsum.measure(of_heads, only=only, add=add, announce=announce)
    skip_head_mid.measure(into_heads, only=only, add=add, announce=announce, with_yardsticks=False)


def _contenders(kind: str, only: str | None) -> tuple[str, ...]:
    """The contenders that are asked for; none means all."""
    if only is None:
        return ()
    if kind not in CONTENDERS:
        raise UsageError(f"--only chooses contenders of {', '.join(CONTENDERS)}, not of bench {kind}")
    names = tuple(filter(None, (name.strip() for name in only.split(","))))
    if not names or not set(names) <= set(CONTENDERS[kind]):
        raise UsageError(f"only: expected some of {', '.join(CONTENDERS[kind])}, got {only!r}")
    return names


def _measure_with_progress(report: Report, path: Path, console: Console, steps: Steps, minutes: float | None) -> None:
    total, measure = steps
    begin, done = time.monotonic(), itertools.count()

    def add(rows: list[Row]) -> None:
        report.rows += rows
        report.save(path)  # after each step, so that little is lost if the run stops

    def work(announce: Announce) -> None:
        def announce_in_time(step: str) -> None:
            seconds, place = time.monotonic() - begin, next(done)
            if minutes is not None and seconds > minutes * 60:
                raise TimeUpError(f"{total - place} of {total} steps were left when {minutes:g} minutes were over")
            announce(step)
            if not console.is_terminal:  # nobody sees the bar there
                console.print(f"{seconds:6.1f} s  {place + 1:3}/{total}  {step}", markup=False)

        measure(add, announce_in_time)

    with_progress(total, console, work)


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('plots need matplotlib; run: pip install "hopper-gemm[plot]"')

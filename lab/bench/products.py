"""Measures cases: checks every contender, then times all cold. Sustained runs follow the last cold run.

If a contender fails on a shape, its row holds the reason, and the run continues. The run ends early only if the GPU
no longer responds; the rows measured so far are kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deep_gemm.core.check.recipes import E2M1, MX, PER_ROW
from deep_gemm.core.gpu import GPUS
from deep_gemm.core.settings import get_batch_invariant, get_num_sms
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds.output import Output, Sizes

from . import cases as plain
from . import compare, fine, fp4, tune
from .bench import Asked, Bench, Steps
from .cases import FINE_DENSE, FINE_KINDS, FP4_DENSE, FP4_KINDS, Case, Shape
from .contenders import OURS, Contender, contenders_of
from .machine import GpuState, gpu_state
from .report import MAX_NAME, Add, Announce, Row
from .table import name_of
from .timing import Kernels, L2Flush, PairingError, cold, recorded, sustained

REPEATS = 20
METHOD = (
    "cold: GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, "
    f"contenders of a shape interleaved in one process in rotating order, {REPEATS} calls each, median, least and "
    "most; sustained: calls back to back for 0.4 s between events, in five parts, after all cold runs; random normal "
    "operands quantized 1x128 / 128x128; errors relative, of the whole output, beside FP64 products of the same "
    "operands; floor: larger of operations at 1640 TFLOPS and the cold bulk copy of the bytes"
)
# Rounding explains relative errors of 2^-9.2 and 2^-22; the limits also allow for bits that FP8 tensor cores drop.
MAX_ERROR_BF16, MAX_ERROR_FP32 = 4e-3, 1e-3
# With shorter calls the host's launches, not the kernels, limit the rate of calls.
SUSTAINED_FROM_US = 50
# Pause between the FP64 products of the checks, which use much power, and the timing of kernels.
SETTLE_SECONDS = 0.05


class GpuLostError(RuntimeError):
    """The GPU's context has failed permanently: no later call can succeed."""


DENSE_OUTPUTS = {
    "dense": Output(),
    "dense_1d1d": Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW),
    FP4_DENSE: Output(b=E2M1, sfb=MX),
}
WITH_OWN_RIVALS: dict[str, Any] = {**dict.fromkeys(FP4_KINDS, fp4), **dict.fromkeys(FINE_KINDS, fine)}
"""Modules with the cases and contenders of these kinds."""


def cases_of(
    kind: str, *, quick: bool = False, shapes: Sequence[Shape] = (), is_judged: bool | None = None
) -> list[Case]:
    """Choose cases of `bench` for a kind: all, a few, or the given shapes, which may be new."""
    source = WITH_OWN_RIVALS.get(kind)
    if source is None:
        return plain.cases_of(kind, quick=quick, shapes=shapes, is_judged=is_judged)
    every, few = source.all_cases(kind), source.QUICK[kind]
    return plain.chosen_of(kind, every, few, quick=quick, shapes=shapes, is_judged=is_judged)


def measure(cases: Sequence[Case], *, with_sustained: bool, add: Add, announce: Announce) -> None:
    """Measure all cases."""
    cold_us: dict[tuple[Case, str], float] = {}
    flush = L2Flush()
    for case in cases:
        announce(case.name)
        rows = cold_rows(case, flush, REPEATS)
        cold_us.update({(case, row.contender): row.us for row in rows if row.us is not None})
        add(rows)
    for turn, case in enumerate(cases if with_sustained else ()):
        announce(f"{case.name} sustained")
        names = [name for of, name in cold_us if of == case and cold_us[of, name] >= SUSTAINED_FROM_US]
        if names:
            first = turn % len(names)
            add(sustained_rows(case, {name: cold_us[case, name] for name in names[first:] + names[:first]}))


def measure_each(
    kinds: Iterable[tuple[str, Shape]], rows_of: Callable[[str, Shape], list[Row]], add: Add, announce: Announce
) -> None:
    """Measure kinds at shapes, each with the same random numbers. If a kind fails, a row holds the reason."""
    for kind, shape in kinds:
        announce(f"{kind} {name_of(shape)}")
        torch.manual_seed(0)
        try:
            add(rows_of(kind, shape))
        except Exception as exception:
            raise_if_lost(exception)
            add([Row(kind, shape, OURS, "cold", failed=reason(exception))])


def cold_rows(case: Case, flush: L2Flush, repeats: int) -> list[Row]:
    """Check and time all contenders of a case."""
    try:
        contenders = made(case)
    except Exception as exception:
        raise_if_lost(exception)
        return [Row.of(case, OURS, "cold", None, failed=reason(exception))]
    rows, errors, calls = [], {}, {}
    for contender in contenders:
        error, failed = checked(contender, MAX_ERROR_FP32 if case.output_is_fp32 else MAX_ERROR_BF16)
        if failed is None:
            errors[contender.name], calls[contender.name] = error, contender.call
        else:
            rows.append(Row.of(case, contender.name, "cold", None, error=error, failed=failed))
    states: list[GpuState] = []
    time.sleep(SETTLE_SECONDS)
    try:
        times = cold(calls, flush, repeats, lambda: states.append(gpu_state())) if calls else {}
    except Exception as exception:
        raise_if_lost(exception)
        failed = reason(exception)
        return rows + [Row.of(case, name, "cold", None, error=errors[name], failed=failed) for name in calls]
    for name, (spread, kernels) in times.items():
        config = config_of(case, name)
        more: dict[str, Any] = {
            "error": errors[name],
            "config": config and config.name,
            "kernels": tuple(kernel[:MAX_NAME] for kernel in kernels),
        }
        if name == fp4.HUMMING:
            more["parts"] = product_alone(recorded({name: calls[name]}, flush, repeats)[name])
        rows.append(Row.of(case, name, "cold", spread, states[-1], **more))
    return rows


def made(case: Case) -> list[Contender]:
    """Make all contenders of a case."""
    return list(WITH_OWN_RIVALS[case.kind].contenders_of(case)) if case.has_own_rivals else contenders_of(case)


def product_alone(calls: Iterable[Kernels]) -> dict[str, float]:
    """Return the median time of each call's longest kernel, which is the product, not the cast."""
    return {fp4.PRODUCT: statistics.median(max(kernel.us for kernel in kernels) for kernels in calls)}


def sustained_rows(case: Case, cold_us: dict[str, float]) -> list[Row]:
    """Time contenders back to back; `cold_us` has their names and cold times."""
    rows = []
    contenders = {contender.name: contender for contender in made(case)}
    for name, us in cold_us.items():
        states: list[GpuState] = []
        try:
            spread = sustained(contenders[name].call, us, lambda states=states: states.append(gpu_state()))  # type: ignore[misc]
        except Exception as error:
            raise_if_lost(error)
            rows.append(Row.of(case, name, "sustained", None, failed=reason(error)))
            continue
        config = config_of(case, name)
        rows.append(Row.of(case, name, "sustained", spread, states[-1], config=config and config.name))
    return rows


def checked(contender: Contender, max_error: float) -> tuple[float | None, str | None]:
    """Return the error of one call, and the reason if the contender cannot be timed (else None)."""
    try:
        error = contender.error()
    except Exception as exception:
        raise_if_lost(exception)
        return None, reason(exception)
    if contender.name.startswith(OURS) and not error <= max_error:
        return error, f"wrong: relative error {error:.2g}, expected at most {max_error:.0e}"
    return error, None


def config_of(case: Case, contender: str) -> GemmConfig | DecodeConfig | None:
    """Return the configuration chosen for a contender's dense product on this GPU; None if unknown."""
    outputs = fine.OUTPUTS if case.kind == FINE_DENSE else {OURS: DENSE_OUTPUTS.get(case.kind)}
    output = outputs.get(contender)
    return None if output is None else chosen(case.shape, output)


def chosen(shape: Shape, output: Output) -> GemmConfig | DecodeConfig | None:
    """Return the configuration chosen for a dense product `m, n, k` on this GPU; None if the GPU is unknown."""
    words = torch.cuda.get_device_name().split() if torch.cuda.is_available() else []
    gpu = next((gpu for gpu in GPUS if gpu.name in words), None)
    if gpu is None:
        return None
    m, n, k = shape
    gpu = replace(gpu, num_sms=get_num_sms())
    return select(Sizes(m, n, k), output, gpu, split_k=not get_batch_invariant())


def configurations(cases: Iterable[Case]) -> list[GemmConfig | DecodeConfig]:
    """List each configuration of dense products with scales below 128x128 once, to compile all of them in parallel."""
    found = (config_of(case, name) for case in cases if case.kind == FINE_DENSE for name in fine.OUTPUTS)
    return [config for config in dict.fromkeys(found) if config is not None]


def reason(error: BaseException) -> str:
    """Describe an exception in one line."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:300]


def raise_if_lost(error: BaseException) -> None:
    """Raise GpuLostError if the GPU no longer responds, because all later calls would fail too."""
    if isinstance(error, PairingError) or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except Exception as second:
        raise GpuLostError(reason(error)) from second


def plan(kind: str, asked: Asked) -> Steps:
    """Plan the requested cases, and compile their configurations beforehand."""
    shapes = plain.parse_shapes(asked.shapes) if asked.shapes is not None else ()
    cases = cases_of(kind, quick=asked.quick, shapes=shapes, is_judged=asked.is_judged)
    ahead = configurations(cases)

    def work(add: Add, announce: Announce) -> None:
        tune.compile_all(ahead, announce)
        measure(cases, with_sustained=asked.with_sustained, add=add, announce=announce)

    return len(ahead) + len(cases) * (2 if asked.with_sustained else 1), work


def _bench(kind: str, method: str = METHOD, **more: Any) -> Bench:
    return Bench(kind, method, partial(plan, kind), has_parts=True, **more)


BENCHES = (
    *(_bench(kind, tables=compare.tables, notes=compare.notes, drawn_by="plot") for kind in ("dense", "grouped")),
    *(_bench(kind, f"{METHOD}; {module.METHOD}", tables=module.tables) for kind, module in WITH_OWN_RIVALS.items()),
)

"""`python -m deep_gemm compile`: compiles the kernels of given shapes into the cache, with or without a GPU.

`compile_model` is a function that does this for a model of models.py.

Kernels are chosen only by shapes and the kind of GPU. A machine with a GPU finds these kernels if it has the same
version of this package and the same build of NVRTC, and reads the same directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from ..across import mega_by_peers, rows_to_addresses, rows_twice
from ..across.mega_check import TOKEN_MULTIPLE
from ..core.check.layout import SCALE_BLOCK, align, ceil_div
from ..core.check.numbers import integers_from
from ..core.check.recipes import E2M1, MX, NO_RECIPES, PER_64, PER_ROW, WHOLE
from ..core.gpu import Gpu
from ..core.jit import CompileError, directories
from ..core.jit.cache import files_in, written_directory
from ..core.jit.compiler import compiler_version
from ..core.jit.driver import PORTABLE_CLUSTER
from ..core.kernel import Kernel
from ..core.meeting import MAX_RANKS
from ..core.settings import get_batch_invariant, settings
from ..gemm.choose import bf16
from ..gemm.choose.fp8 import select
from ..gemm.config.bf16 import Bf16Config
from ..gemm.config.decode import DecodeConfig
from ..gemm.config.tall import K_MAJOR, GemmConfig
from ..gemm.explain import GROUPS, Question, asked
from ..gemm.kernel import BF16_GEMM, K_GROUP_MAPS, MAPS, kernel_of
from ..gemm.kinds.epilogues import SILU, SILU_OF_HALVES
from ..gemm.kinds.output import BF16_OPERANDS, OUTPUTS_OF, Output, Sizes
from ..gemm.kinds.works import DENSE, ENDS, IDS, Work
from ..hyper import choose as choose_hc
from ..hyper.kernel import MAX_CLUSTER
from ..indexer import kernel as logits_kernel
from ..indexer.config import is_usual
from ..kernels import ORDINARY
from ..linear import kernel as linear_decode
from ..moe.routing import MANY_ROWS
from . import with_progress
from .models import FORMS, Model, Weight, model_named

ACTIVATED = Output(work=ENDS, epilogue=SILU_OF_HALVES)
"""The first product of experts, if it also activates and casts its rows."""
MOST_ROWS = 1 << 16
"""For a weight without a stated m, kernels for all batches up to this number of rows are compiled."""
SECONDS_PER_KERNEL = 0.25
"""Seconds per kernel and processor. Two processors needed 98 s for 755 kernels (docs/release.md, 2026-11-27)."""
MOST_SPLITS = 16
"""Splits of the product before the norm of hyper-connections: engines use one split, or this number."""


@dataclass(frozen=True)
class Job:
    """A kernel to compile, or to load from the cache."""

    kernel: str
    config: Any
    build: Callable[[], object] = field(compare=False)

    @property
    def name(self) -> str:
        """Names of the kernel and its configuration, for people."""
        return f"{self.kernel} {self.config.name}" if self.config is not None else self.kernel


def job_of(kernel: Kernel[Any], config: Any) -> Job:
    """Make the job for a configuration of a kernel."""
    return Job(kernel.name_of(config), config, partial(kernel.build, config))


def compile_model(
    model: str,
    *,
    tp: int = 1,
    ep: int = 1,
    max_tokens: int = MOST_ROWS,
    gpu: str | None = None,
    form: str = FORMS[0],
    console: Console | None = None,
) -> bool:
    """Compile every kernel that a model may need for up to `max_tokens` tokens at once. Tell whether all are ready.

    - `model`: a name in `deep_gemm.cli.models.MODELS`. `tp` ranks share its weights, `ep` ranks share its experts.
    - `gpu`: "H200", "H100" or "H20"; None means the current GPU, or an H200 if the machine has none.
    - `form`: "published", "rows" (FP8 with a scale for each whole row) or "bf16" (only its experts).
    - `console`: shows the progress; None shows nothing.

    Threads compile at the same time, and kernels in the cache are not compiled again.
    """
    jobs = [job for _, job in jobs_of_model(model, tp=tp, ep=ep, max_tokens=max_tokens, gpu=gpu, form=form)]
    return run(jobs, console or Console(quiet=True))


def jobs_of_model(
    model: str, *, tp: int = 1, ep: int = 1, max_tokens: int = MOST_ROWS, gpu: str | None = None, form: str = FORMS[0]
) -> Iterator[tuple[str, Job]]:
    """Yield the kernels that a model may need, as (the weight or layer that needs the kernel, job)."""
    found = model_named(model)
    tp, ep, max_tokens = integers_from(1, tp=tp, ep=ep, max_tokens=max_tokens)
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    kind = asked(1, 8, 16, None, False, False, NO_RECIPES, None, 1, gpu).gpu
    for weight in found.weights(tp, ep, form):
        times = f"{weight.num_groups} of " if weight.groups else ""
        in_type = " in BF16" if weight.is_bf16 else " in FP4" if weight.is_fp4 else ""
        label = f"{weight.name}: {times}{weight.n} x {weight.k}{in_type}"
        for jobs in (_jobs_of_weight(weight, max_tokens, kind), _jobs_across(weight, max_tokens, ep, kind)):
            yield from ((label, job) for job in dict.fromkeys(jobs))
    yield from (("casts, routes and scales", job) for job in ordinary_jobs())
    index_heads = found.attention.index_heads if found.attention else 0
    for job in logits_jobs() if index_heads else ():
        if job.config.heads == index_heads:
            yield "logits of the indexer", job
    for job in dict.fromkeys(_hc_jobs(found, max_tokens, kind)) if found.streams else ():
        yield "hyper-connections", job


def _jobs_of_weight(weight: Weight, max_tokens: int, gpu: Gpu) -> Iterator[Job]:
    dtype = torch.float32 if weight.is_fp32 else torch.bfloat16
    most = max_tokens * weight.rows_per_token
    if weight.is_bf16:
        yield from (job_of(BF16_GEMM, config) for m in every_m(most) for config in configs_in_bf16(weight, m, gpu))
        return
    sizes, groups = (weight.num_groups, weight.n, weight.k), (weight.groups, weight.num_groups)
    recipes = (None, WHOLE, WHOLE) if weight.has_row_scales else NO_RECIPES
    question = asked(*sizes, dtype, False, False, recipes, *groups, gpu.name, weight.is_fp4)
    yield from jobs_of(question, any_m=True, with_layers=True, most=most)
    if weight.groups == "ids" and most >= MANY_ROWS:
        for m in every_m(most):
            for many in many_rows_configs(weight, max(m, MANY_ROWS), gpu):
                yield job_of(kernel_of(many), many)


def configs_in_bf16(weight: Weight, m: int, gpu: Gpu, *, by_ends: bool = False) -> list[Bf16Config]:
    """List the kernels for a BF16 weight and m rows (in all groups or in each); for many rows also with activation."""
    work = GROUPS[weight.groups] if weight.groups else DENSE
    work = ENDS if work is IDS and (by_ends or m >= MANY_ROWS) else work
    outputs = [replace(OUTPUTS_OF[BF16_OPERANDS][2 * weight.is_fp32], work=work)]
    outputs += [bf16.ACTIVATED] * (weight.is_gated and m >= MANY_ROWS)
    sizes = Sizes(m / weight.num_groups if work.is_stacked else m, weight.n, weight.k, weight.num_groups)
    return [bf16.choose(sizes, output, K_MAJOR, gpu) for output in outputs]


def _jobs_across(weight: Weight, max_tokens: int, ranks: int, gpu: Gpu) -> Iterator[Job]:
    """Yield the products of experts across ranks (by peer memory, or `fp8_mega_moe`): rows are from all ranks."""
    if weight.groups != "ids" or not 1 < ranks <= MAX_RANKS:
        return
    most = align(max_tokens, TOKEN_MULTIPLE) * weight.rows_per_token * ranks
    for m in every_m(most):
        in_bf16 = configs_in_bf16(weight, m, gpu, by_ends=True) if weight.is_bf16 else None
        yield from (job_of(kernel_of(config), config) for config in in_bf16 or across_configs(weight, m, ranks, gpu))


def across_configs(weight: Weight, m: int, ranks: int, gpu: Gpu) -> list[GemmConfig | DecodeConfig]:
    """List the configurations that experts across the `ranks` GPUs of a node run for m rows."""
    outputs, depths = [_plain(weight, ENDS)], [weight.k]
    if m < MANY_ROWS or weight.is_fp4:  # needed for few rows with scales of tensors, and for FP4 with FP32 scales
        outputs.append(_plain(weight, IDS))
    if weight.is_fp4 and not weight.is_gated:
        outputs.append(rows_to_addresses.OUTPUTS[PER_ROW, MX])
        # After `fp8_mega_moe`'s activation, whose scales are for 64 columns, these columns become blocks of 128.
        depths.append(ceil_div(weight.k, PER_64.columns) * SCALE_BLOCK)
    elif not weight.is_gated and not weight.has_row_scales:
        outputs += [rows_to_addresses.OUTPUT, rows_to_addresses.OUTPUT_BY_64]
    elif _may_activate(weight):
        outputs += [Output(work=ENDS, epilogue=SILU)] + [ACTIVATED] * (m >= MANY_ROWS)  # the second for collectives
    of_mega = [rows_twice.OUTPUT_IN_TURN] * (ranks >= mega_by_peers.LEAST_RANKS)
    is_twice = m >= MANY_ROWS and _may_activate(weight)
    both = [rows_twice.config_for(weight.k, weight.n // 2, each) for each in [rows_twice.OUTPUT, *of_mega] if is_twice]
    return both + [_grouped(weight, m, output, gpu, k) for output in outputs for k in depths]


def many_rows_configs(weight: Weight, m: int, gpu: Gpu) -> list[GemmConfig | DecodeConfig]:
    """List the configurations that `experts` runs for m rows: groups by ends, and in FP8 also with activation."""
    outputs = [_plain(weight, ENDS)] + [ACTIVATED] * _may_activate(weight)
    return [_grouped(weight, m, output, gpu, weight.k) for output in outputs]


def _may_activate(weight: Weight) -> bool:
    is_usual = not (weight.is_fp4 or weight.has_row_scales)
    return weight.is_gated and is_usual and weight.n % (2 * SCALE_BLOCK) == 0


def _plain(weight: Weight, work: Work) -> Output:
    if weight.has_row_scales:
        return Output(work=work, sfa=WHOLE, sfb=WHOLE)
    return Output(work=work, b=E2M1, sfb=MX) if weight.is_fp4 else Output(work=work)


def _grouped(weight: Weight, m: int, output: Output, gpu: Gpu, k: int) -> GemmConfig | DecodeConfig:
    return select(Sizes(m / weight.num_groups, weight.n, k, weight.num_groups), output, gpu)


def _hc_jobs(model: Model, max_tokens: int, gpu: Gpu) -> Iterator[Job]:
    n, k = model.streams * (2 + model.streams), model.streams * model.hidden
    how = [(splits, cluster) for splits in (1, MOST_SPLITS) for cluster in (MAX_CLUSTER, PORTABLE_CLUSTER)]
    for m in every_m(max_tokens):
        for splits, cluster in how:  # a GPU that cannot run the largest clusters runs portable ones
            config = choose_hc.select_hc(m, n, k, splits, gpu.num_sms, get_batch_invariant(), cluster)
            yield job_of(choose_hc.kernel_of(config).KERNEL, config)


def jobs_of(question: Question, *, any_m: bool, with_layers: bool, most: int = MOST_ROWS) -> Iterator[Job]:
    """Yield the kernels of a product. With `any_m`, yield the kernels of its weight for any m up to `most`."""
    output = question.output
    for m in every_m(most) if any_m else (question.m,):
        config = config_of(question, m)
        yield job_of(kernel_of(config), config)
        if isinstance(config, DecodeConfig):
            is_of_layers = with_layers and output.work is DENSE and not (output.is_fp32 or config.is_fp4)
            if is_of_layers and (casting := linear_decode.serving(m, question.k, config)) is not None:
                yield job_of(linear_decode.KERNEL, casting)
    if output.work.is_along_k:
        yield Job(K_GROUP_MAPS.name, None, partial(K_GROUP_MAPS.build, MAPS))


def config_of(question: Question, m: int) -> GemmConfig | DecodeConfig:
    """Choose the configuration of a product with m rows, or with m rows in all groups together."""
    sizes = replace(question, m=m).sizes
    return select(sizes, question.output, question.gpu, split_k=not get_batch_invariant())


def every_m(most: int = MOST_ROWS) -> Iterator[int]:
    """Yield sizes of batches that cover all choices of kernels: each size up to 128, then in growing steps."""
    m = 1
    while m < most:
        yield m
        m += 1 if m < 128 else max(m // 64 // 8 * 8, 8)
    yield most


def parsed(shapes: str) -> tuple[int | None, int, int]:
    """Read `m,n,k`, or `n,k` for a weight and any m."""
    parts = shapes.replace("x", ",").split(",")
    if len(parts) not in (2, 3) or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"shapes: expected m,n,k or n,k, such as 64,2112,7168, got {shapes!r}")
    numbers = [int(part) for part in parts]
    m, n, k = numbers if len(numbers) == 3 else (1, *numbers)
    m, n, k = integers_from(1, m=m, n=n, k=k)
    return (m if len(numbers) == 3 else None), n, k


def jobs_of_layers() -> Iterator[Job]:
    """Yield all kernels of casts, routes and scales, which serve any shape, and the usual kernels of other layers."""
    yield from ordinary_jobs()
    yield from logits_jobs()
    for config in choose_hc.usual_hc():
        yield job_of(choose_hc.kernel_of(config).KERNEL, config)
    for summing in bf16.reachable_bf16_sum():  # `ordinary_jobs` yields sum_slices, which adds up the slices
        if summing.majors == K_MAJOR:
            yield job_of(BF16_GEMM, summing)


def ordinary_jobs() -> Iterator[Job]:
    """List all kernels of casts, routes and scales."""
    return (job_of(kernel, config) for kernel in ORDINARY for config in kernel.configs())


def logits_jobs() -> Iterator[Job]:
    """List the usual kernels of the indexer's logits."""
    kernels = logits_kernel.IN_ROWS, logits_kernel.IN_PAGES
    return (job_of(kernel, config) for kernel in kernels for config in filter(is_usual, kernel.configs()))


def show(jobs: Iterable[tuple[str, Job]], console: Console) -> None:
    """List each kernel once, under the name of the weight or layer that needs it."""
    told, heading = set[Job](), ""
    for needed_by, job in jobs:
        if job not in told:
            if needed_by != heading:
                heading = needed_by
                console.print(heading, markup=False, soft_wrap=True)
            console.print(f"    {job.name}", markup=False, soft_wrap=True)
            told.add(job)
    console.print(f"{len(told)} kernels", markup=False)


def run(jobs: Iterable[Job], console: Console) -> bool:
    """Compile the kernels that the cache lacks, with progress and a summary. Tell whether all kernels are stored."""
    todo = list(dict.fromkeys(jobs))
    directory, begin = written_directory(settings().jit_cache_dirs), time.perf_counter()
    before, failed = len(files_in(directory)), list[str]()
    compiler_version()  # raises an error before any work if the compiler is missing
    processors = os.cpu_count() or 1
    seconds = max(len(todo) * SECONDS_PER_KERNEL / processors, 1)
    about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    console.print(f"{len(todo)} kernels: about {about} on {processors} processors, less for cached kernels")

    def work(announce: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(processors) as pool:
            running = {pool.submit(job.build): job for job in todo}
            for place, done in enumerate(as_completed(running), 1):
                job, error = running[done], done.exception()
                if error is not None and not isinstance(error, CompileError):
                    raise error
                if error is not None:
                    failed.append(str(error))
                announce(job.name)
                if not console.is_terminal:  # without a terminal, no bar is shown
                    seconds = time.perf_counter() - begin
                    console.print(f"{seconds:6.1f} s  {place:3}/{len(todo)}  {job.name}", markup=False)

    with_progress(len(todo), console, work)
    added = len(files_in(directory)) - before
    for log in failed:
        console.print(log, markup=False, soft_wrap=True)
    console.print(
        f"{len(todo) - len(failed)} of {len(todo)} kernels are ready, {added} of them new, after "
        f"{time.perf_counter() - begin:.1f} s; NVRTC {compiler_version()}; in {directory}",
        markup=False,
        soft_wrap=True,
    )
    return not failed and (any(map(files_in, directories())) or not todo)

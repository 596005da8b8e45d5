"""The product of docs/learn/product.cuh: simulated, deliberately broken, and timed on a GPU beside this package's."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.fp8 import cast_back_from_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.cli import make_console
from deep_gemm.core.check.layout import align, ceil_div
from deep_gemm.core.gpu import gpu_of
from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.kernel import Config, Kernel
from deep_gemm.core.params import Params
from deep_gemm.core.shadow import Mapped
from deep_gemm.core.wgmma_header import wgmma_header
from deep_gemm.gemm.api.dense import fp8_gemm_nt
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.problem import Problem

from .bench.cases import PEAK_TFLOPS
from .bench.timing import L2Flush, cold
from .house import ROOT
from .sim import SCHEDULES, HostKernel, Result, SimulationError
from .sim.launcher import How, Stage
from .sim.mutate import Mutation
from .sim.product import partial_sums
from .sim.rounding import TENSOR_CORES, allowed_difference, describe_mistakes, excess
from .sim.trial import Trial

SOURCE = ROOT / "docs" / "learn" / "product.cuh"
BLOCK_M = BLOCK_K = 128
WARPGROUP_ROWS = 64
PARAMS = Params.of_source(SOURCE.read_text(), "Params")


@dataclass(frozen=True)
class LearnConfig(Config):
    """A configuration of product.cuh."""

    block_n: int = 128
    num_stages: int = 3
    cluster_size: int = 1
    num_threads: int = 384

    @property
    def name(self) -> str:
        """Return a short name for people."""
        return f"{BLOCK_M}x{self.block_n}, {self.num_stages} slots, clusters of {self.cluster_size}"

    @property
    def shared_bytes(self) -> int:
        """Return the size of `SharedStorage`, which product.cuh asserts."""
        slot = (BLOCK_M + self.block_n) * BLOCK_K + BLOCK_M * 4 + 2 * 8
        return align(BLOCK_M * self.block_n * 2 + self.num_stages * slot, 1024)

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers that the source needs."""
        return {
            "kBlockN": self.block_n,
            "kNumStages": self.num_stages,
            "kClusterSize": self.cluster_size,
            "kSharedBytes": self.shared_bytes,
        }

    def num_tiles(self, m: int, n: int) -> int:
        """Count the tiles of a product, including tiles that only fill a cluster."""
        return align(ceil_div(m, BLOCK_M), self.cluster_size) * ceil_div(n, self.block_n)


KERNEL: Kernel[LearnConfig] = Kernel(
    "product",
    PARAMS,
    lambda: [step.config for step in STEPS],
    more=lambda config: {"product.cuh": SOURCE.read_text(), "wgmma_shapes.cuh": wgmma_header([config.block_n])},
)


def values_of(config: LearnConfig, at: Mapping[str, Any], m: int, n: int, k: int) -> dict[str, Any]:
    """Return the members of the parameters; `at` names the tensors."""
    blocks, pitch = ceil_div(k, BLOCK_K), at["sfa"].stride(1) * 4
    panel = min(config.block_n, 64)
    maps = {
        "a": TensorMap(ElementType.UINT8, (k, m), (k,), (BLOCK_K, BLOCK_M), 128),
        "b": TensorMap(ElementType.UINT8, (k, n), (k,), (BLOCK_K, config.block_n // config.cluster_size), 128),
        "sfa": TensorMap(ElementType.FLOAT32, (m, blocks), (pitch,), (BLOCK_M, 1)),
        "d": TensorMap(ElementType.BFLOAT16, (n, m), (n * 2,), (panel, WARPGROUP_ROWS), panel * 2),
    }
    mapped = {f"map_{name}": Mapped(each, at[name]) for name, each in maps.items()}
    return {**mapped, "sfb": at["sfb"], "m": m, "n": n, "k": k}


@cache
def problem(m: int, n: int, k: int, device: str = "cpu") -> Problem:
    """Make a problem: cast random matrices, and fill D with NaN."""
    generator = torch.Generator(device).manual_seed(m * 7 + n * 5 + k)
    x, w = (torch.randn(rows, k, generator=generator, device=device, dtype=torch.float32) for rows in (m, n))
    d = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
    return dense_problem(per_token_cast_to_fp8(x, mn_major=True), per_block_cast_to_fp8(w), d, None)


@cache
def right_and_allowed(m: int, n: int, k: int, device: str, share: float) -> tuple[Tensor, Tensor]:
    """Return the product in FP64, and the allowed difference of D; `share` is as for `allowed_difference`."""
    p = problem(m, n, k, device)
    x, w = (cast_back_from_fp8(values, scales).double() for values, scales in ((p.a, p.sfa), (p.b, p.sfb)))
    right = x @ w.t()
    return right, allowed_difference(p, right.bfloat16(), share)


def checked(d: Tensor, p: Problem, share: float, tile: tuple[int, int] | None = None) -> float:
    """Return the largest error relative to what rounding explains; raise a ValueError that counts the mistakes."""
    right, allowed = right_and_allowed(p.m, p.n, p.k, str(p.a.device.type), share)
    if mistakes := describe_mistakes(d, right, allowed, tile):
        raise ValueError(mistakes)
    return float(excess(d, right, allowed).amax())


def simulated(config: LearnConfig, p: Problem, kernel: HostKernel | None = None, **how: Unpack[How]) -> Result:
    """Multiply on simulated SMs."""
    read = {"a": p.a, "b": p.b, "sfa": p.sfa, "sfb": p.sfb}
    aligned = {"a": 16, "b": 16, "sfa": 16, "d": 16}
    stage = Stage(config, read, {"d": p.d.clone()}, aligned, ready={*read, "d"}, **how)
    grid = min(config.num_tiles(p.m, p.n), stage.num_sms)
    stage.run(KERNEL, kernel, lambda at: values_of(config, at, p.m, p.n, p.k), grid)
    return stage.result()


@dataclass(frozen=True)
class LearnTrial(Trial):
    """One configuration, product, seed and schedule."""

    kernel = KERNEL
    config: LearnConfig
    mnk: tuple[int, int, int] = (256, 256, 896)
    seed: int = 1
    schedule: str | None = None

    @classmethod
    def drawn(cls, config: LearnConfig, seed: int) -> LearnTrial:
        """Draw only a schedule: the sizes are fixed."""
        return cls(config, seed=seed, schedule=SCHEDULES[seed % len(SCHEDULES)])

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare D with the product in FP64."""
        p = problem(*self.mnk)
        d = simulated(self.config, p, kernel, **self.how).buffers["d"]
        return checked(d, p, partial_sums(self.how), (BLOCK_M, self.config.block_n))


def _break(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, SOURCE.name, old, new)


BROKEN = (
    _break("consumer does not wait", "    ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);\n", ""),
    _break(
        "producer waits for the other parity",
        "&shared.empty[at.stage], at.parity ^ 1);\n      ptx::mbarrier_arrive",
        "&shared.empty[at.stage], at.parity);\n      ptx::mbarrier_arrive",
    ),
    _break("panels are not swizzled", "    offset ^= offset >> 3 & (kPanelRowBytes - 16);\n", ""),
    _break("no proxy fence before the store", "  ptx::fence_proxy_async_shared();\n", ""),
    _break("full announces too few bytes", "(full, kStageBytes)", "(full, kStageBytes - kBlockM * 4)"),
)
"""Mistakes that docs/learn/product.md shows, each with the simulator's message."""


def run() -> bool:
    """Simulate the product under every schedule, and print D's largest error against FP64."""
    worst = max(LearnTrial.drawn(LearnConfig(), seed).run() for seed in range(len(SCHEDULES)))
    m, n, k = LearnTrial(LearnConfig()).mnk
    print(f"{SOURCE.name}: {m} x {n} x {k} on 2 simulated SMs, {len(SCHEDULES)} schedules")
    print(f"right in each; the largest error is {worst:.2f} of what rounding explains")
    return True


def show_broken() -> bool:
    """Simulate the product with each mistake, and print the simulator's message."""
    for number, mutation in enumerate(BROKEN, 1):
        print(f"{number}. {mutation.name}\n{said_of(mutation)}\n")
    print(
        f"The simulator noticed all {len(BROKEN)} mistakes by their effects: wrong numbers, threads that wait for ever."
    )
    return True


def said_of(mutation: Mutation) -> str:
    """Return the message of the first schedule that notices a mistake."""
    for seed in range(len(SCHEDULES)):
        trial = LearnTrial.drawn(LearnConfig(), seed)
        try:
            trial.run(mutation.apply(trial.headers()))
        except (SimulationError, ValueError) as error:
            what = error.what if isinstance(error, SimulationError) else str(error)
            lines = (textwrap.fill(line, 110, subsequent_indent="    ") for line in what.splitlines())
            return "\n".join([*lines, f"(seed {seed}, schedule {trial.schedule})"])
    raise AssertionError(f"no schedule notices: {mutation.name}")


class Step(NamedTuple):
    """A row of the table of times."""

    title: str
    config: LearnConfig
    is_persistent: bool = False
    """True: one CTA for each SM computes several tiles; False: one CTA for each tile."""


STEPS: tuple[Step, ...] = (
    Step("one slot, tiles of 128x64", LearnConfig(64, 1)),
    Step("a ring of 4 slots", LearnConfig(64, 4)),
    Step("tiles of 128x128", LearnConfig(128, 4)),
    Step("pairs of CTAs share B", LearnConfig(128, 4, 2)),
    Step("a CTA for each SM", LearnConfig(128, 4, 2), is_persistent=True),
)
TIMED = (4096, 4096, 7168)
REPEATS = 20


def calls(p: Problem) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the title and the launch of each step on a GPU, and of this package's own product."""
    at, device = {"a": p.a, "b": p.b, "sfa": p.sfa, "sfb": p.sfb, "d": p.d}, p.a.get_device()
    for title, config, is_persistent in STEPS:
        grid = config.num_tiles(p.m, p.n)
        if is_persistent:
            grid = min(grid, gpu_of(device).num_sms // config.cluster_size * config.cluster_size)
        yield title, partial(KERNEL.run, config, values_of(config, at, p.m, p.n, p.k), grid, device)
    yield "fp8_gemm_nt of the package", lambda: fp8_gemm_nt((p.a, p.sfa), (p.b, p.sfb), p.d)


def time_steps() -> bool:
    """Compare each step with FP64, time all steps, and print a table. Return whether all steps were right."""
    p = problem(*TIMED, "cuda")
    named, errors = dict(calls(p)), {}
    for title, call in named.items():
        p.d.fill_(float("nan"))
        call()
        try:
            errors[title] = checked(p.d, p, TENSOR_CORES)
        except ValueError as error:
            print(f"{title}: {error}")
            return False
    times = cold(named, L2Flush(), REPEATS)
    console = make_console()
    m, n, k = TIMED
    console.print(
        f"{torch.cuda.get_device_name()}, {m} x {n} x {k}, L2 cold, median of {REPEATS}\n"
        f"peak: {PEAK_TFLOPS} TFLOPS, which FP8 WGMMA sustains on an H200"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("step", "us", "TFLOPS", "of peak", "error"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for title, (spread, _) in times.items():
        tflops = 2 * m * n * k / spread.us / 1e6
        table.add_row(title, f"{spread.us:.1f}", f"{tflops:.0f}", f"{tflops / PEAK_TFLOPS:.0%}", f"{errors[title]:.2f}")
    console.print(table)
    console.print("error: the largest, as a part of what rounding explains")
    return True

"""`python -m lab sim`: one kernel, one shape, many seeds, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.hyper.choose import Chosen

from . import dense as fp8_gemm
from . import hc_prenorm
from .simulate import SimulationError

SECONDS_BETWEEN_LINES = 5
"""Seconds between lines of progress, without a terminal."""


class Tried(NamedTuple):
    """One seed's run."""

    mistakes: str | None
    steps: int = 0
    worst: float = 0.0
    """The largest error, as a part of what is allowed, if that is known."""


def run(config: GemmConfig, m: int, n: int, k: int, *, seeds: int, first_seed: int, num_sms: int) -> bool:
    """Simulate fp8_gemm under many schedules, and print what went wrong and how to repeat it, or that all passed."""
    num_sms = max(num_sms // config.cluster_size, 1) * config.cluster_size

    def make() -> Callable[[int], Tried]:
        kernel = fp8_gemm.compile_config(config)

        def one(seed: int) -> Tried:
            problem = fp8_gemm.random_problem(config, m, n, k, seed)
            outcome = fp8_gemm.run(kernel, config, problem, seed=seed, num_sms=num_sms)
            return Tried(outcome.mistakes, outcome.result.steps, outcome.worst)

        return one

    title = f"fp8_gemm {config.name}, {config.num_stages} stages, on {num_sms} simulated SMs"
    return _try_seeds(title, make, lambda seed: command(config, m, n, k, seed, num_sms), seeds, first_seed)


def run_hc(config: Chosen, m: int, n: int, k: int, *, seeds: int, first_seed: int, num_sms: int) -> bool:
    """Do the same for hc_prenorm."""
    num_sms = max(num_sms // config.cluster, 1) * config.cluster

    def make() -> Callable[[int], Tried]:
        kernel = hc_prenorm.compile_config(config)

        def one(seed: int) -> Tried:
            a, b = hc_prenorm.random_operands(m, n, k, seed)
            return Tried(hc_prenorm.mistakes(a, b, *hc_prenorm.run(kernel, config, a, b, seed=seed, num_sms=num_sms)))

        return one

    def again(seed: int) -> str:
        return (
            f"python -m lab sim hc_prenorm --m {m} --n {n} --k {k} --first-seed {seed} --seeds 1 "
            f"--num-sms {num_sms} --block-m {config.block_m} --cluster-k {config.cluster}"
        )

    title = f"hc_prenorm {config.name} on {num_sms} simulated SMs"
    return _try_seeds(title, make, again, seeds, first_seed)


def _try_seeds(
    title: str, make: Callable[[], Callable[[int], Tried]], again: Callable[[int], str], seeds: int, first_seed: int
) -> bool:
    """Compile, and run each seed, with progress."""
    console = Console(highlight=False)
    with console.status("compiling"):
        one = make()
    console.print(title)
    begin, steps, worst = time.perf_counter(), 0, 0.0
    told = begin
    for seed in track(range(first_seed, first_seed + seeds), description="seeds", console=console, transient=True):
        try:
            tried = one(seed)
        except SimulationError as error:
            tried = Tried(error.what)
        if tried.mistakes is not None:
            console.print(f"seed {seed}: {tried.mistakes}\nagain: {again(seed)}", soft_wrap=True, markup=False)
            return False
        steps, worst = steps + tried.steps, max(worst, tried.worst)
        now = time.perf_counter()
        if not console.is_terminal and now - told >= SECONDS_BETWEEN_LINES:  # nobody sees the bar there
            console.print(f"{now - begin:6.1f} s  {seed - first_seed + 1:3}/{seeds}  seed {seed} passed")
            told = now
    seconds = time.perf_counter() - begin
    counted = f", {steps:,} steps, worst error {worst:.2g} of what is allowed" if steps else ""
    console.print(f"{seeds} seeds passed in {seconds:.1f} s{counted}")
    return True


def command(config: GemmConfig, m: int, n: int, k: int, seed: int, num_sms: int) -> str:
    """Give the command that repeats one seed, with every option that matters."""
    values = {
        "--m": m,
        "--n": n,
        "--k": k,
        "--first-seed": seed,
        "--seeds": 1,
        "--num-sms": num_sms,
        "--block-m": config.block_m,
        "--block-n": config.block_n,
        "--cluster-m": config.cluster_m,
        "--cluster-n": config.cluster_n,
        "--cluster-k": config.cluster_k,
    }
    switches = {
        "--fp32": config.is_fp32,
        "--with-c": config.with_c,
        "--adds-to-d": config.adds_to_d,
        "--by-row": config.sfb == PER_ROW,
    }
    options = [f"{name} {value}" for name, value in values.items()] + [name for name, on in switches.items() if on]
    return " ".join(["python -m lab sim fp8_gemm", *options])

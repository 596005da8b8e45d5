"""`python -m deep_gemm sim`: one kernel, one shape, many seeds, with progress."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import track

from ..choose.config import GemmConfig
from . import dense as fp8_gemm
from .simulate import SimulationError

SECONDS_BETWEEN_LINES = 5
"""Of progress, where there is no terminal."""


def run(config: GemmConfig, m: int, n: int, k: int, *, seeds: int, first_seed: int, num_sms: int) -> bool:
    """Simulate under many schedules, and print what went wrong and how to repeat it, or that all passed."""
    console = Console(highlight=False)
    num_sms = max(num_sms // config.cluster_size, 1) * config.cluster_size
    with console.status("compiling"):
        kernel = fp8_gemm.compile_config(config)
    console.print(f"fp8_gemm {config.name}, {config.num_stages} stages, on {num_sms} simulated SMs")
    begin, steps, worst = time.perf_counter(), 0, 0.0
    told = begin
    for seed in track(range(first_seed, first_seed + seeds), description="seeds", console=console, transient=True):
        problem = fp8_gemm.random_problem(config, m, n, k, seed)
        try:
            outcome = fp8_gemm.run(kernel, config, problem, seed=seed, num_sms=num_sms)
            mistakes = outcome.mistakes
        except SimulationError as error:
            mistakes = error.what
        if mistakes is not None:
            again = command(config, m, n, k, seed, num_sms)
            console.print(f"seed {seed}: {mistakes}\nagain: {again}", soft_wrap=True, markup=False)
            return False
        steps, worst = steps + outcome.result.steps, max(worst, outcome.worst)
        now = time.perf_counter()
        if not console.is_terminal and now - told >= SECONDS_BETWEEN_LINES:  # nobody sees the bar there
            console.print(f"{now - begin:6.1f} s  {seed - first_seed + 1:3}/{seeds}  seed {seed} passed")
            told = now
    seconds = time.perf_counter() - begin
    console.print(
        f"{seeds} seeds passed in {seconds:.1f} s, {steps:,} steps, worst error {worst:.2g} of what is allowed"
    )
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
        "--fp32": config.output_is_fp32,
        "--with-c": config.with_c,
        "--adds-to-d": config.adds_to_d,
        "--by-row": config.sfb_is_per_row,
    }
    options = [f"{name} {value}" for name, value in values.items()] + [name for name, on in switches.items() if on]
    return " ".join(["python -m deep_gemm sim fp8_gemm", *options])

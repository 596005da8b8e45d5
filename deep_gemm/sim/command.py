"""`python -m deep_gemm sim`: one kernel, one shape, many seeds, with progress."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import track

from ..config import GemmConfig
from . import fp8_gemm
from .simulate import SimulationError


def run(config: GemmConfig, m: int, n: int, k: int, seeds: int, first_seed: int, num_sms: int) -> bool:
    """Simulate under many schedules; say what went wrong and with which seed, or that nothing did."""
    console = Console(highlight=False)
    num_sms = max(num_sms // config.cluster_size, 1) * config.cluster_size
    console.print(f"fp8_gemm {config.block_m}x{config.block_n}, {config.num_stages} stages, on {num_sms} simulated SMs")
    kernel = fp8_gemm.compile_config(config)
    begin, steps, worst = time.perf_counter(), 0, 0.0
    for seed in track(range(first_seed, first_seed + seeds), description="seeds", console=console, transient=True):
        problem = fp8_gemm.random_problem(config, m, n, k, seed)
        again = f"again with --first-seed {seed} --seeds 1"
        try:
            outcome = fp8_gemm.run(kernel, config, problem, seed=seed, num_sms=num_sms)
        except SimulationError as error:
            console.print(f"[red]seed {seed}:[/] {error.what}\n{again}", soft_wrap=True)
            return False
        steps, worst = steps + outcome.result.steps, max(worst, outcome.worst)
        if outcome.mistakes is not None:
            console.print(f"[red]seed {seed}:[/] {outcome.mistakes}\n{again}")
            return False
    seconds = time.perf_counter() - begin
    console.print(
        f"{seeds} seeds passed in {seconds:.1f} s, {steps:,} steps, worst error {worst:.2g} of what is allowed"
    )
    return True

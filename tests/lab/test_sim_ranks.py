"""Several ranks in the simulator: words that are passed correctly arrive; each wrong way to pass them is noticed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from deep_gemm.core.params import Params
from deep_gemm.core.sources import cuda_sources
from lab.sim import HostKernel, SimulationError
from lab.sim.library import compile_kernel
from lab.sim.ranks import run_ranks
from lab.sim.simulate import Buffer, KernelLaunch, Simulation

pytestmark = pytest.mark.host_compiler
SOURCE = (Path(__file__).parent / "sim_kernels" / "pass_on.cuh").read_text()
PARAMS = Params.of_source(SOURCE, "PassParams")
WORDS = 200
RELEASE = "ptx::st_release_sys_b32(p.flag_there, p.epoch);"
COUNT = "ptx::atom_add_acq_rel_b32(p.count, 1)"


@cache
def compiled(old: str = "", new: str = "") -> HostKernel:
    assert not old or SOURCE.count(old) == 1
    headers = {**cuda_sources(), "pass_on.cuh": SOURCE.replace(old, new) if old else SOURCE}
    return compile_kernel('#include "pass_on.cuh"\n', headers, name="pass_on")


def passed(
    kernel: HostKernel, seed: int, ranks: int = 2, calls: int = 1, max_steps: int = 400_000, comes: int | None = None
) -> list[torch.Tensor]:
    """Return the words that each rank copied in its last call. Each call of a rank has separate memory."""
    buffers = {}
    for rank in range(ranks):
        for call in range(calls):
            for name, size in (("here", WORDS), ("flag", 1), ("count", 1), ("out", WORDS)):
                zeros = torch.zeros(size, dtype=torch.int32)
                buffers[f"{name} {call} of rank {rank}"] = Buffer(zeros, is_writable=True, alignment=4, rank=rank)
    simulation = Simulation(buffers, num_sms=2, seed=seed, max_steps=max_steps)
    launches = []
    for rank in range(ranks):
        of_rank = []
        for call in range(calls):

            def at(name: str, of: int, call: int = call) -> int:
                return simulation.address(f"{name} {call} of rank {of}")

            following = (rank + 1) % ranks
            addresses = {name: at(name, rank) for name in ("here", "count", "out")}
            addresses |= {
                "there": at("here", following),
                "flag_there": at("flag", following),
                "flag_here": at("flag", rank),
            }
            params = PARAMS.pack({**addresses, "words": WORDS, "value": 1000 * (rank + call), "epoch": 1})
            of_rank.append(KernelLaunch(kernel, [params], 64, 0, 2))
        launches.append(of_rank)
    run_ranks(simulation, launches[:comes])
    found = simulation.result().buffers
    return [torch.as_tensor(found[f"out {calls - 1} of rank {rank}"]) for rank in range(ranks)]


def right(rank: int, ranks: int, call: int) -> torch.Tensor:
    return 1000 * ((rank - 1) % ranks + call) + torch.arange(WORDS, dtype=torch.int32)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_released_and_acquired_arrives(ranks: int) -> None:
    for seed in range(8):
        for rank, got in enumerate(passed(compiled(), seed, ranks, calls=2)):
            assert torch.equal(got, right(rank, ranks, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RELEASE, "ptx::st_global_b32(p.flag_there, p.epoch);"),
        (COUNT, "ptx::atom_add(p.count, 1)"),
        ("  ptx::syncthreads();\n", ""),
        (f"{COUNT} + 1 != ptx::grid_size()", f"{COUNT} != 0"),
    ],
    ids=["no release", "a count that orders nothing", "no barrier before the count", "one block counts for all"],
)
def test_words_that_come_behind_their_flag_are_noticed(old: str, new: str) -> None:
    for seed in range(24):
        try:
            if not all(
                torch.equal(got, right(rank, 2, 0)) for rank, got in enumerate(passed(compiled(old, new), seed))
            ):
                return
        except SimulationError as error:  # the words arrived after the acquire, but before their reader read them
            assert "no acquire of a flag of that rank lies in between" in error.what
            return
    raise AssertionError("every run gave the right words")


def test_a_load_without_acquire_names_who_wrote() -> None:
    kernel = compiled("while (ptx::ld_acquire_sys_b32(p.flag_here)", "while (ptx::ld_global_b32(p.flag_here)")
    message = "reads byte 0 of `flag 0 of rank ., which rank . has written: no acquire of a flag of that rank"
    with pytest.raises(SimulationError, match=message.replace("rank .,", "rank .`,")):
        passed(kernel, 1)


def test_no_rank_adds_to_a_peers_words() -> None:
    kernel = compiled(RELEASE, "ptx::atom_add(p.flag_there, 1);")
    with pytest.raises(SimulationError, match="atomic add to another rank's memory"):
        passed(kernel, 1)


def test_a_rank_that_waits_for_ever_ends_with_an_error() -> None:
    with pytest.raises(SimulationError, match="no end after"):
        passed(compiled(), 1, comes=1)


def test_equal_seeds_give_equal_runs() -> None:
    kernel = compiled("while (ptx::ld_acquire_sys_b32(p.flag_here)", "while (ptx::ld_global_b32(p.flag_here)")
    for seed in range(4):
        said = []
        for _ in range(2):
            with pytest.raises(SimulationError) as error:
                passed(kernel, seed, ranks=3)
            said.append(error.value.what)
        assert said[0] == said[1]

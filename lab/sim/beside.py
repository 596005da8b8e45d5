"""Two concurrent products in the simulator. Each product is a rank: ranks take turns, and one of them may be slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_gemm.across import rows_to_addresses
from deep_gemm.core.kernel import Kernel
from deep_gemm.core.shadow import launching_into
from deep_gemm.core.sources import cuda_sources
from deep_gemm.gemm import launch
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM

from .arguments import encode_tensor_map
from .launcher import flat_memory
from .library import HostKernel, compiled
from .ranks import run_ranks
from .rows_silu import random_problem, random_weight
from .rows_to_addresses import AddressesTrial
from .simulate import Buffer, KernelLaunch, Simulation
from .trial import same

CANARY = 42.0
MAX_STEPS = 8_000_000
OF_SECOND = "w", "sfw", "addresses", "next_tile", "out"
WRITTEN = "d", "scales", "stored", "next_tile", "out"


@dataclass(frozen=True)
class _Into:
    """Keeps launches instead of running them; each launch is for a separate rank."""

    kernels: Mapping[Any, HostKernel]
    kept: list[list[KernelLaunch]]

    def launch(
        self, kernel: Kernel[Any], config: Any, values: Mapping[str, Any], grid: int, device: int, is_dependent: bool
    ) -> None:
        """Keep a launch."""
        packed = kernel.packed(config, values, encode_tensor_map)
        self.kept.append([KernelLaunch.of(self.kernels[config], config, packed, grid)])

    def room(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """Refuse to allocate: a simulation's memory is fixed from the start."""
        raise AssertionError(shape)


@dataclass(frozen=True)
class BesideTrial(AddressesTrial):
    """An activated product of some groups, and the product of its rows, whose configuration is `config`."""

    needs_ranks = True
    first: GemmConfig | None = None
    hidden: int = 256
    sms_of_first: int = 2

    def headers(self) -> dict[str, str]:
        """Return the headers that both kernels include."""
        return dict(cuda_sources())

    def run(self, headers: Mapping[str, str] | None = None) -> float:
        """Compare the rows of concurrent products with the rows of the same products in sequence, bit for bit."""
        kernels = {config: compiled(FP8_GEMM, config, headers) for config in (self.first, self.config)}
        right = self.rows(kernels, is_beside=False)
        same("rows", self.rows(kernels, is_beside=True), right)
        return 0.0

    def rows(self, kernels: Mapping[Any, HostKernel], *, is_beside: bool) -> Tensor:
        """Return the rows that both products store, as 16-bit numbers."""
        assert self.first is not None
        assert self.config.sfa is not None
        apart = self.first.epilogue.gates_apart
        problem = random_problem(self.sizes, 2 * self.k, self.hidden, self.seed, behind=self.behind, gates_apart=apart)
        p = launch.prepared(problem, self.first)
        w, sfw = random_weight(len(self.sizes), self.n, self.k, torch.Generator().manual_seed(self.seed + 1))
        out = torch.full((len(p.a), self.n), CANARY, dtype=torch.bfloat16)
        counts = torch.zeros(1 + len(p.a) // 64 + 1 + len(self.sizes), dtype=torch.int32)
        names = {name: getattr(p, name) for name in ("a", "sfa", "b", "sfb", "c", "row_weights", "d", "scales")}
        names |= {"w": w, "sfw": sfw, "out": out, "stored": counts[1:], "next_tile": counts[:1]}
        names |= {"addresses": torch.zeros(len(p.a), dtype=torch.int64)}
        buffers = {
            name: Buffer(flat_memory(x), name in WRITTEN, 16, rank=int(name in OF_SECOND)) for name, x in names.items()
        }
        simulation = Simulation(
            buffers, num_sms=self.num_sms, seed=self.seed, schedule=self.schedule, max_steps=MAX_STEPS
        )
        at = {name: simulation.tensor(name, x) for name, x in names.items()}
        at["addresses"].copy_(at["out"].data_ptr() + torch.arange(len(p.a)) * self.n * 2)
        placed: dict[str, Any] = {name: at[name] for name in names if name in p._fields}
        first = p._replace(**placed)
        operands = (first.d, first.scales), (at["w"], at["sfw"]), at["addresses"], first.c
        second = rows_to_addresses.problem(*operands, of_a=self.config.sfa)
        places = {name: at[name] for name in ("stored", "next_tile")}
        into = _Into(kernels, [])
        with launching_into(into):
            configs = self.first, self.config
            rows_to_addresses.start_both(first, second, configs, places, simulation.num_sms, self.sms_of_first)
        if is_beside:
            run_ranks(simulation, into.kept)
        else:
            for rank, (launched,) in enumerate(into.kept):
                simulation.launch(launched, rank=rank)
        return simulation.result().buffers["out"].view(torch.int16)

"""The `route_rows` kernel, and `count_routes` before it, in the simulator, with a GPU's source and parameters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.kernel import Kernel
from deep_gemm.moe import route_rows
from deep_gemm.moe.route_rows import COUNTER, PART, CountConfig, RouteConfig, RouteProblem, Totals
from deep_gemm.moe.routing import expert_rows

from .launcher import How, Stage
from .library import HostKernel, compiled
from .trial import Trial, same

POISON = -0x5A5A5A5A
OUTPUTS = ("counts", "ends", "row_of", "token_of", "ids")


class Kernels(NamedTuple):
    """The compiled kernels for a configuration of `route_rows`; None means the package's own source."""

    counter: HostKernel | None = None
    router: HostKernel | None = None


def compile_config(config: RouteConfig, edits: Mapping[str, str] | None = None) -> Kernels:
    """Compile both kernels for the host; `edits` replaces sources by name, for mutations of either kernel."""
    of_counter = {name: text for name, text in (edits or {}).items() if name != "config.cuh"}
    counter = None
    if config.totals == Totals.OF_PARTS:
        counter = compiled(COUNTER, CountConfig(config.id_bytes), of_counter)
    return Kernels(counter, compiled(route_rows.KERNEL, config, edits))


def run(
    kernels: Kernels, config: RouteConfig, topk_ids: Tensor, num_experts: int, *, first: int = 0, **how: Unpack[How]
) -> dict[str, Tensor]:
    """Give routes their rows on simulated SMs; return the outputs by name. Unwritten elements are poison."""
    p, grid = RouteProblem(topk_ids, num_experts, first), route_rows.grid(topk_ids.numel())
    found = {name: getattr(p.rows, name).fill_(POISON) for name in OUTPUTS}
    of_parts = torch.full((grid, num_experts), POISON, dtype=torch.int32)
    stage = Stage(config, {"topk_ids": topk_ids}, {**found, "of_parts": of_parts}, **how)
    if config.totals == Totals.OF_PARTS:
        own = CountConfig(config.id_bytes)
        stage.run(COUNTER, kernels.counter, lambda at: _values(p, at), grid, frozenset(OUTPUTS), own)
    stage.run(route_rows.KERNEL, kernels.router, lambda at: _values(p, at), grid, frozenset({"of_parts"}))
    return found


def count(
    kernel: HostKernel | None, config: CountConfig, topk_ids: Tensor, num_experts: int, first: int, **how: Unpack[How]
) -> Tensor:
    """Count each expert's routes in each part of the ids, on simulated SMs."""
    p, grid = RouteProblem(topk_ids, num_experts, first), route_rows.grid(topk_ids.numel())
    of_parts = torch.full((grid, num_experts), POISON, dtype=torch.int32)
    stage = Stage(config, {"topk_ids": topk_ids}, {"of_parts": of_parts}, **how)
    stage.run(COUNTER, kernel, lambda at: _values(p, at), grid)
    return of_parts


def _values(p: RouteProblem, at: Mapping[str, Tensor]) -> dict[str, Any]:
    placed = RouteProblem(at["topk_ids"], p.num_experts, p.first)
    placed.rows = p.rows._replace(**{name: at[name] for name in OUTPUTS if name in at})
    return route_rows.values_of(placed, at["of_parts"])


def check(
    kernels: Kernels, config: RouteConfig, topk_ids: Tensor, num_experts: int, first: int = 0, **how: Unpack[How]
) -> None:
    """Compare all outputs with the package's, bit for bit."""
    found = run(kernels, config, topk_ids, num_experts, first=first, **how)
    of_routes = expert_rows(_here(topk_ids, num_experts, first), num_experts)._asdict()
    for name, right in of_routes.items():
        same(name, found[name], right)


@dataclass(frozen=True)
class CountTrial(Trial):
    """The routes of random tokens, counted by parts."""

    kernel: ClassVar[Kernel[Any]] = COUNTER
    config: Any
    tokens: int
    topk: int
    num_experts: int
    seed: int = 0
    schedule: str | None = None
    first: int = 0

    @classmethod
    def drawn(cls, config: Any, seed: int) -> CountTrial:
        """Draw sizes, and the first expert."""
        draw = random.Random(seed)
        experts = draw.randint(1, 1024)
        return cls(config, draw.randint(1, 600), draw.randint(1, 9), experts, seed, first=draw.choice((0, experts)))

    @property
    def ids(self) -> Tensor:
        """Return the experts of all routes."""
        return random_ids(self.tokens, self.topk, self.num_experts, self.first, self.config.id_bytes, self.seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare the count of each expert's routes in each part."""
        ids = self.ids
        found = count(kernel, self.config, ids, self.num_experts, self.first, **self.how)
        routes = _here(ids, self.num_experts, self.first).flatten()
        for part, (of_part, got) in enumerate(zip(torch.split(routes, PART), found, strict=True)):
            right = torch.bincount(of_part[of_part >= 0], minlength=self.num_experts)
            same(f"part {part}", got.long(), right)
        return 0.0


@dataclass(frozen=True)
class RouteTrial(CountTrial):
    """Routes of random tokens; some have no expert. If many routes are counted by parts, both kernels run."""

    kernel = route_rows.KERNEL

    @classmethod
    def drawn(cls, config: RouteConfig, seed: int) -> RouteTrial:
        """Draw sizes, and the first expert."""
        draw = random.Random(seed)
        experts, is_many = draw.randint(1, config.max_experts), config.totals == Totals.OF_PARTS
        tokens = draw.randint(1, 600 if is_many else 300)
        return cls(config, tokens, draw.randint(1, 9), experts, seed, first=draw.choice((0, experts)))

    def headers(self) -> dict[str, str]:
        """Return all files that both kernels include."""
        return {**COUNTER.headers(CountConfig(self.config.id_bytes)), **super().headers()}

    def run(self, headers: Mapping[str, str] | None = None) -> float:
        """Check both kernels, or mutations of them through `headers`."""
        return self._check(Kernels() if headers is None else compile_config(self.config, headers))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare all outputs with the package's, bit for bit."""
        return self._check(Kernels(router=kernel))

    def _check(self, kernels: Kernels) -> float:
        check(kernels, self.config, self.ids, self.num_experts, self.first, **self.how)
        return 0.0


def random_ids(tokens: int, topk: int, num_experts: int, first: int, id_bytes: int, seed: int) -> Tensor:
    """Make ids of routes, some without an expert; if experts are numbered from `first`, rows of ids have gaps."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts + 2 * first, (tokens, topk), generator=generator)
    if id_bytes == 8:  # only the lower half of the id is an expert's
        ids[0, 0] = (1 << 32) + 1 + first
    ids = ids if id_bytes == 8 else ids.int()
    if first:  # in wider rows, like a message's
        others = torch.full_like(ids, first + 1)
        ids = torch.cat([ids, others, others], dim=1)[:, :topk]
    return ids


def _here(ids: Tensor, num_experts: int, first: int) -> Tensor:
    return torch.where((ids >= first) & (ids < first + num_experts), ids - first, -1)

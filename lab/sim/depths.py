"""The `fp8_gemm` kernel for groups along k in the simulator, and `k_group_maps`, which makes its tensor maps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.fp8 import k_grouped_cast_to_fp8
from deep_gemm.core.check.layout import align
from deep_gemm.core.jit.tensor_map import MAP_BYTES
from deep_gemm.gemm import depths as kernels
from deep_gemm.gemm.ask.depths import k_grouped_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, K_GROUP_MAPS, MAPS, MapsConfig
from deep_gemm.gemm.kinds.works import DEPTHS
from deep_gemm.gemm.launch import prepared
from deep_gemm.gemm.problem import Problem

from .launcher import How
from .library import HostKernel, compiled
from .product import Outcome, ProductTrial, draws, outcome, random_d_and_c, right_and_allowed, sides, stage_of
from .trial import Trial


def compile_both(config: GemmConfig, edits: Mapping[str, str] | None = None) -> tuple[HostKernel, HostKernel]:
    """Compile the kernel for the maps and the product's kernel; mutations replace sources by name with `edits`."""
    return compiled(K_GROUP_MAPS, MAPS, edits), compiled(FP8_GEMM, config, edits)


def random_problem(config: GemmConfig, ks: Sequence[int], m: int, n: int, seed: int = 0, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments; by default the host knows the depths too."""
    return DepthsTrial(config, tuple(ks), seed, m=m, n=n, **{"on_gpu_alone": False, **more}).problem()


def run(
    both: tuple[HostKernel | None, HostKernel | None],
    config: GemmConfig,
    problem: Problem,
    *,
    is_dependent: bool = True,
    ks: Tensor | None = None,
    **how: Unpack[How],
) -> Outcome:
    """Compute a product on simulated SMs and by the reference. `ks` replaces the depths that the kernels read."""
    p = prepared(problem, config)
    depths = kernels.depths_of(p.ks, p.ks_tensor, p.d.device)
    read: dict[str, Tensor | None] = {} if config.with_c else {"c": None}
    if isinstance(depths, Tensor):
        read["ks"] = depths if ks is None else ks
    room = {"k_groups": torch.full((kernels.room_bytes(p.groups),), 0xFF, dtype=torch.uint8)}
    aligned = {"k_groups": MAP_BYTES, "ks": 4}
    stage = stage_of(config, p, aligned, is_dependent=is_dependent, more=room, read=read, **how)
    with stage.launches({K_GROUP_MAPS: both[0], FP8_GEMM: both[1]}, {"d"}):
        depths = stage.at.get("ks", depths)
        kernels.launch(stage.placed(p), config, stage.num_sms, depths, stage.at["k_groups"])
    return outcome(stage.result(), *right_and_allowed(problem, how))


@dataclass(frozen=True)
class DepthsTrial(ProductTrial):
    """One list of depths. Mutations affect both kernels."""

    kernel = FP8_GEMM
    works = (DEPTHS,)
    config: GemmConfig
    ks: tuple[int, ...] = (16, 0, 144)
    seed: int = 0
    schedule: str | None = None
    on_gpu_alone: bool = True
    """True: only a tensor holds the depths."""
    m: int = 130
    n: int = 136
    num_sms: int | None = field(default=3, kw_only=True)

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> DepthsTrial:
        """Draw depths, some of them zero, and sizes around a tile's edges."""
        draw = draws(config, seed)
        m, n = sides(draw, config)
        return cls(
            config,
            drawn_depths(draw),
            seed,
            on_gpu_alone=draw.random() < 0.5,
            m=m,
            n=n,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def problem(self) -> Problem:
        """Draw random matrices. D is NaN, unless it is also C."""
        generator, ks, sizes = torch.Generator().manual_seed(self.seed), self.ks, (self.m, self.n)
        x, w = (torch.randn(rows, sum(ks), generator=generator, dtype=torch.float32) for rows in sizes)
        d, c = random_d_and_c(self.config, (len(ks), *sizes), generator)
        p = k_grouped_problem(k_grouped_cast_to_fp8(x, ks), k_grouped_cast_to_fp8(w, ks), d, list(ks), None, c)
        return p._replace(ks=None, ks_tensor=torch.tensor(ks, dtype=torch.int32)) if self.on_gpu_alone else p

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply with maps from the unmutated kernel."""
        return self.with_maps(None, kernel)

    def with_maps(self, maps: HostKernel | None, kernel: HostKernel | None) -> Outcome:
        """Multiply random matrices."""
        return run((maps, kernel), self.config, self.problem(), **self.how)

    def run(self, headers: Mapping[str, str] | None = None) -> float:
        """Check both kernels, or mutations of them through `headers`."""
        both = (None, None) if headers is None else compile_both(self.config, headers)
        return self.with_maps(*both).checked().worst


@dataclass(frozen=True)
class MapsTrial(Trial):
    """One list of depths to make maps for. A product by the unmutated kernel shows whether the maps are right."""

    kernel = K_GROUP_MAPS
    config: MapsConfig
    ks: tuple[int, ...] = (16, 0, 144)
    seed: int = 0
    schedule: str | None = None
    on_gpu_alone: bool = True
    m: int = 20
    n: int = 24

    @classmethod
    def drawn(cls, config: MapsConfig, seed: int) -> MapsTrial:
        """Draw depths, in some trials of more groups than a CTA has threads."""
        draw = draws(config, seed)
        ks = drawn_depths(draw, draw.choice((3, 31, 32, 33, 70)), deepest=4)
        return cls(config, ks, seed, None, draw.random() < 0.5, draw.randint(1, 70), 4 * draw.randint(1, 20))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Multiply with the maps."""
        config = next(config for config in FP8_GEMM.configs() if DepthsTrial.takes(config))
        product = DepthsTrial(config, self.ks, self.seed, self.schedule, self.on_gpu_alone, self.m, align(self.n, 8))
        return product.on(self.device).with_maps(kernel, None).checked().worst


def drawn_depths(draw: random.Random, most: int = 5, deepest: int = 20) -> tuple[int, ...]:
    """Draw the depths of groups; some may be zero, but not all."""
    return (
        *(16 * min(draw.choice((0, 1, 8, 9, draw.randrange(20))), deepest) for _ in range(draw.randint(0, most - 1))),
        48,
    )

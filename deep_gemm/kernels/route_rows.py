"""The kernel of cuda/route_rows.cuh: how it is compiled, and launched for the experts of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .. import jit
from ..jit import driver
from ..problem.layout import ceil_div
from ..settings import get_compile_mode, get_pdl
from .code_plan import CodePlan
from .launch import launch
from .params import Field, Kind, Params
from .sources import cuda_sources

SOURCE = '#include "route_rows.cuh"\n'
NAME = "route_rows"
PARAMS = Params(
    "RouteParams",
    Field("topk_ids", Kind.POINTER),
    Field("counts", Kind.POINTER),
    Field("ends", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("token_of", Kind.POINTER),
    Field("ids", Kind.POINTER),
    Field("num_routes", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("num_experts", Kind.UINT32),
)
"""`RouteParams` of cuda/route_rows.cuh."""
MAX_EXPERTS = (64, 256, 1024)
"""For how many experts there are configurations, at most: each thinks of as many."""


@dataclass(frozen=True)
class RouteConfig:
    """One configuration. A CTA gives rows to as many routes as it has threads."""

    id_bytes: int
    max_experts: int
    num_threads: int = 1024

    @property
    def name(self) -> str:
        """Short, for people: such as "int64 256 experts"."""
        return f"int{self.id_bytes * 8} {self.max_experts} experts"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/route_rows.cuh, which asserts that it is the same."""
        return (3 + self.num_threads // 32) * self.max_experts * 4 + 4

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kIdBytes": self.id_bytes,
            "kMaxExperts": self.max_experts,
            "kNumThreads": self.num_threads,
            "kSharedBytes": self.shared_bytes,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


class RouteProblem:
    """The experts of tokens, and where the rows of their routes go: the members of `ExpertRows`, int32."""

    def __init__(self, topk_ids: Tensor, num_experts: int) -> None:
        """`topk_ids` is contiguous, int32 or int64 `[tokens, topk]`."""
        self.topk_ids, self.num_experts = topk_ids, num_experts
        self.counts, self.ends = torch.empty((2, num_experts), dtype=torch.int32, device=topk_ids.device)
        self.row_of = torch.empty_like(topk_ids, dtype=torch.int32)
        self.token_of, self.ids = (torch.empty_like(self.row_of.view(-1)) for _ in range(2))


def run(p: RouteProblem) -> None:
    """Give each route a row, on the GPU that the ids are on."""
    device = p.topk_ids.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p)
        return
    if p.topk_ids.numel() == 0:
        p.counts.zero_()
        p.ends.zero_()
        return
    config = config_of(p.topk_ids.element_size(), p.num_experts)
    launcher = launcher_of(config, device, get_pdl())
    if get_compile_mode() == 0:
        launch(launcher, params_of(p), grid(config, p.topk_ids.numel()), device)


def config_of(id_bytes: int, num_experts: int) -> RouteConfig:
    """The configuration that thinks of enough experts."""
    most = next((most for most in MAX_EXPERTS if num_experts <= most), None)
    if most is None:
        raise ValueError(f"num_experts: expected at most {MAX_EXPERTS[-1]}, got {num_experts}")
    return RouteConfig(id_bytes, most)


def reachable_route() -> list[RouteConfig]:
    """Every configuration that `config_of` can give."""
    return [RouteConfig(id_bytes, most) for id_bytes in (4, 8) for most in MAX_EXPERTS]


def grid(config: RouteConfig, num_routes: int) -> int:
    """A CTA for each of its threads' routes."""
    return ceil_div(num_routes, config.num_threads)


def params_of(p: RouteProblem) -> bytes:
    """Give the kernel's parameters."""
    return PARAMS.pack(
        {
            "topk_ids": p.topk_ids.data_ptr(),
            "counts": p.counts.data_ptr(),
            "ends": p.ends.data_ptr(),
            "row_of": p.row_of.data_ptr(),
            "token_of": p.token_of.data_ptr(),
            "ids": p.ids.data_ptr(),
            "num_routes": p.topk_ids.numel(),
            "topk": p.topk_ids.shape[1],
            "num_experts": p.num_experts,
        }
    )


def headers(config: RouteConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {**cuda_sources(), "config.cuh": config.header(), "route_params_layout.cuh": PARAMS.layout_header()}


def build(config: RouteConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    return jit.build(SOURCE, headers(config), name=NAME)


def code_plan(config: RouteConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of: ordinary loads and stores alone."""
    return CodePlan(
        roles=((config.num_threads, None),),
        shared_bytes=config.shared_bytes,
        qgmma=0,
        tma_loads=0,
        multicast_loads=0,
    )


@cache
def launcher_of(config: RouteConfig, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device, compiled and loaded at first need."""
    kernel = driver.Kernel(build(config), config.shared_bytes)
    return driver.Launcher(kernel, PARAMS.size, config.num_threads, 1, is_dependent=is_dependent)

"""The kernel of cuda/route_rows.cuh: how it is compiled, and launched for the experts of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..problem.layout import ceil_div
from .launch import OrdinaryKernel
from .params import Field, Kind, Params

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
    Field("gap", Kind.UINT32),
    Field("first", Kind.UINT32),
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
    ctas_per_sm: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """Short, for people: such as "int64 256 experts"."""
        return f"int{self.id_bytes * 8} {self.max_experts} experts"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/route_rows.cuh, which asserts that it is the same."""
        return (3 + self.num_threads // 32) * self.max_experts * 4 + 4

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        if self.id_bytes not in (4, 8):
            return "needs ids of 4 or 8 bytes"
        return None if self.max_experts in MAX_EXPERTS else f"needs a number of experts among {MAX_EXPERTS}"

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


KERNEL: OrdinaryKernel[RouteConfig] = OrdinaryKernel("route_rows", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


class RouteProblem:
    """The experts of tokens, and where the rows of their routes go: the members of `ExpertRows`, int32."""

    def __init__(self, topk_ids: Tensor, num_experts: int, first: int = 0) -> None:
        """`topk_ids` is int32 or int64 `[tokens, topk]`; ids of a token lie beside each other. Experts are numbered
        from `first`.
        """
        self.topk_ids, self.num_experts, self.first = topk_ids, num_experts, first
        device, routes = topk_ids.device, topk_ids.numel()
        self.counts = torch.empty(num_experts, dtype=torch.int32, device=device)
        self.ends = torch.empty(num_experts, dtype=torch.int32, device=device)
        self.row_of = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
        self.token_of = torch.empty(routes, dtype=torch.int32, device=device)
        self.ids = torch.empty(routes, dtype=torch.int32, device=device)

    @classmethod
    def in_one_piece(cls, topk_ids: Tensor, num_experts: int, first: int) -> RouteProblem:
        """The same with one allocation, as a host is what a call of few tokens waits for."""
        p = cls.__new__(cls)
        p.topk_ids, p.num_experts, p.first = topk_ids, num_experts, first
        routes = topk_ids.numel()
        memory = torch.empty(3 * routes + 2 * num_experts, dtype=torch.int32, device=topk_ids.device)
        # Ids are the first: products read them from where 16 bytes may be loaded.
        p.ids, p.token_of, row_of, p.counts, p.ends = memory.split_with_sizes(
            (routes, routes, routes, num_experts, num_experts)
        )
        p.row_of = row_of.view(topk_ids.shape)
        return p


def run(p: RouteProblem) -> None:
    """Give each route a row, on the GPU that the ids are on."""
    if p.topk_ids.numel() == 0:
        p.counts.zero_()
        p.ends.zero_()
        return
    config = config_of(p.topk_ids.element_size(), p.num_experts)
    KERNEL.run(config, params_of(p), grid(config, p.topk_ids.numel()), p.topk_ids.get_device())


@cache
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
            "gap": p.topk_ids.stride(0) - p.topk_ids.shape[1] if p.topk_ids.shape[0] > 1 else 0,
            "first": p.first,
            "num_experts": p.num_experts,
        }
    )

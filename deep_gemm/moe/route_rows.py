"""The kernels of moe/route_rows.cuh and moe/count_routes.cuh: how they are compiled, and launched for the experts of
tokens: the first alone for few routes, behind the second for many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.kernel import Config, Kernel, Prepared, constants_of
from .check import ExpertRows

MAX_EXPERTS = (64, 256, 1024)
"""The most experts of each configuration; its kernel counts as many."""
ID_BYTES = (4, 8)
PART = 1024
"""Routes of a part: those that a CTA gives rows to. A CTA that counts all of them takes longer with each part."""
PARTS_ALONE = 8
"""Parts up to which each CTA counts all routes by itself: about 0.25 us a part, where another launch takes 2."""


class Totals(Enum):
    """Ways in which a CTA of route_rows finds the routes of each expert. The value names the source in cuda/route/."""

    COUNTED = "count_all"
    """It counts all of them."""
    OF_PARTS = "sum_parts"
    """It sums up what count_routes found of each part."""


@dataclass(frozen=True)
class RouteConfig(Config):
    """One configuration of route_rows. A CTA gives rows to as many routes as it has threads."""

    id_bytes: int
    max_experts: int
    totals: Totals = Totals.COUNTED
    num_threads: ClassVar[int] = PART

    @property
    def name(self) -> str:
        """Short, for people: such as "int64 256 experts"."""
        return f"int{self.id_bytes * 8} {self.max_experts} experts" + " of parts" * (self.totals == Totals.OF_PARTS)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in moe/route_rows.cuh, which asserts that it is the same."""
        warps = self.num_threads // 32
        return (2 + warps) * self.max_experts * 4 + warps * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.id_bytes in ID_BYTES, "ids of 4 or 8 bytes"
        yield self.max_experts in MAX_EXPERTS, f"a number of experts among {MAX_EXPERTS}"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers that the source takes."""
        return constants_of(self, "id_bytes", "max_experts", "num_threads", "shared_bytes")

    def choices(self) -> dict[str, str]:
        """Give the file that finds totals."""
        return {"TOTALS": f"route/{self.totals.value}.cuh"}


@dataclass(frozen=True)
class CountConfig(Config):
    """One configuration of count_routes, whatever the number of experts."""

    id_bytes: int
    num_threads: ClassVar[int] = 256
    shared_bytes: ClassVar[int] = MAX_EXPERTS[-1] * 4

    @property
    def name(self) -> str:
        """Short, for people: such as "int64"."""
        return f"int{self.id_bytes * 8}"

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.id_bytes in ID_BYTES, "ids of 4 or 8 bytes"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers that the source takes."""
        same = constants_of(self, "id_bytes", "num_threads", "shared_bytes")
        return {**same, "kMaxExperts": MAX_EXPERTS[-1], "kPart": PART}


def reachable_route() -> list[RouteConfig]:
    """Every configuration that `config_of` can give."""
    return [RouteConfig(id_bytes, most, totals) for totals in Totals for id_bytes in ID_BYTES for most in MAX_EXPERTS]


def reachable_count() -> list[CountConfig]:
    """Every configuration of count_routes that `run` can take."""
    return [CountConfig(id_bytes) for id_bytes in ID_BYTES]


KERNEL: Kernel[RouteConfig] = Kernel("route_rows", "RouteParams", reachable_route)
COUNTER: Kernel[CountConfig] = Kernel("count_routes", "RouteParams", reachable_count)


class RouteProblem:
    """The experts of tokens, and where the rows of their routes go."""

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

    @property
    def rows(self) -> ExpertRows:
        """The rows that the kernels write."""
        return ExpertRows(self.counts, self.ends, self.row_of, self.token_of, self.ids)

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


CHANGING = ("topk_ids", "counts", "ends", "row_of", "token_of", "ids")
"""Addresses of a call."""


class ByParts(NamedTuple):
    """Both kernels, prepared for routes of so many parts."""

    kernels: tuple[Prepared[Any], Prepared[Any]]
    num_experts: int
    device: torch.device

    def launch(self, parts: int, *at: int) -> None:
        """Launch them at addresses of a call."""
        of_parts = empty("counts of routes", (parts, self.num_experts), torch.int32, self.device)
        for kernel in self.kernels:
            kernel.launch(parts, *at, of_parts.data_ptr())


def run(p: RouteProblem) -> tuple[Prepared[Any] | ByParts | None, int]:
    """Give each route a row, on the GPU that the ids are on.

    Give the launch prepared for other addresses, if `WISHES` say so, and how many CTAs it takes.
    """
    if p.topk_ids.numel() == 0:
        p.counts.zero_()
        p.ends.zero_()
        return None, 0
    id_bytes, num_routes, device = p.topk_ids.element_size(), p.topk_ids.numel(), p.topk_ids.get_device()
    config = config_of(id_bytes, p.num_experts, totals_for(num_routes))
    if config.totals == Totals.COUNTED:
        return KERNEL.run(config, params_of(p), grid(num_routes), device, CHANGING), grid(num_routes)
    of_parts = empty("counts of routes", (grid(num_routes), p.num_experts), torch.int32, p.topk_ids.device)
    params = params_of(p, of_parts.data_ptr())
    changing = (*CHANGING, "of_parts")
    counter = COUNTER.run(CountConfig(id_bytes), params, grid(num_routes), device, changing)
    router = KERNEL.run(config, params, grid(num_routes), device, changing, is_dependent=True)
    if counter is None or router is None:
        return None, 0
    return ByParts((counter, router), p.num_experts, p.topk_ids.device), grid(num_routes)


class RoutesAt:
    """The kernels of `run` at addresses, for any number of routes of ids that lie alike and are of so many experts."""

    CHANGING = ("topk_ids", "counts", "ends", "row_of", "token_of", "ids", "num_routes", "of_parts")

    def __init__(self, like: RouteProblem) -> None:
        id_bytes, device, params = like.topk_ids.element_size(), like.topk_ids.get_device(), params_of(like)
        self.num_experts = like.num_experts
        self._alone, self._of_parts = (
            KERNEL.prepared(
                config_of(id_bytes, like.num_experts, totals),
                params,
                self.CHANGING,
                device,
                is_dependent=totals == Totals.OF_PARTS,
            )
            for totals in (Totals.COUNTED, Totals.OF_PARTS)
        )
        self._counter = COUNTER.prepared(CountConfig(id_bytes), params, self.CHANGING, device)

    def table_bytes(self, num_routes: int) -> int:
        """Bytes of the counts of parts, if there are any."""
        return 0 if totals_for(num_routes) == Totals.COUNTED else grid(num_routes) * self.num_experts * 4

    def launch(
        self,
        num_routes: int,
        topk_ids: int,
        counts: int,
        ends: int,
        row_of: int,
        token_of: int,
        ids: int,
        of_parts: int,
    ) -> None:
        """Give each of so many routes, at least one, a row; `of_parts` is room of `table_bytes`."""
        values, ctas = (topk_ids, counts, ends, row_of, token_of, ids, num_routes, of_parts), grid(num_routes)
        if totals_for(num_routes) == Totals.COUNTED:
            self._alone.launch(ctas, *values)
        else:
            self._counter.launch(ctas, *values)
            self._of_parts.launch(ctas, *values)


def totals_for(num_routes: int) -> Totals:
    """Say how totals of so many routes are found sooner."""
    return Totals.COUNTED if grid(num_routes) <= PARTS_ALONE else Totals.OF_PARTS


@cache
def config_of(id_bytes: int, num_experts: int, totals: Totals) -> RouteConfig:
    """The configuration that thinks of enough experts."""
    most = next((most for most in MAX_EXPERTS if num_experts <= most), None)
    if most is None:
        raise ValueError(f"num_experts: expected at most {MAX_EXPERTS[-1]}, got {num_experts}")
    return RouteConfig(id_bytes, most, totals)


def grid(num_routes: int) -> int:
    """A CTA for each part, of either kernel."""
    return ceil_div(num_routes, PART)


def params_of(p: RouteProblem, of_parts: int = 0) -> bytes:
    """Give the parameters of both kernels; `of_parts` is where the counts of parts are, if there are any."""
    return KERNEL.params.pack(
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
            "of_parts": of_parts,
        }
    )

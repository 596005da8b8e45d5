"""The kernels of moe/route_rows.cuh and moe/count_routes.cuh: their configurations, and their launches for the experts
of tokens. For few routes route_rows runs alone; for many it runs after count_routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.kernel import Config, Kernel
from .check import ExpertRows

MAX_EXPERTS = (64, 256, 1024)
"""The largest number of experts of each configuration; its kernel counts routes for all of them."""
ID_BYTES = (4, 8)
PART = 1024
"""Routes in a part. One CTA gives rows to the routes of one part."""
PARTS_ALONE = 8
"""Up to this number of parts each CTA counts all routes, about 0.25 us a part; a launch of count_routes takes 2 us."""


class Totals(Enum):
    """How a CTA of route_rows counts each expert's routes. The value names the source in moe/route/."""

    COUNTED = "count_all"
    """A CTA counts all routes itself."""
    OF_PARTS = "sum_parts"
    """A CTA adds up the counts that count_routes has stored for each part."""


@dataclass(frozen=True)
class RouteConfig(Config):
    """One configuration of route_rows. A CTA gives a row to one route for each of its threads."""

    id_bytes: int
    max_experts: int
    totals: Totals = Totals.COUNTED
    num_threads: ClassVar[int] = PART
    taken = "id_bytes", "max_experts", "num_threads", "shared_bytes"

    @property
    def name(self) -> str:
        """Return a short name for people, such as "int64 256 experts"."""
        return f"int{self.id_bytes * 8} {self.max_experts} experts" + " of parts" * (self.totals == Totals.OF_PARTS)

    @property
    def shared_bytes(self) -> int:
        """Return the size of `SharedStorage` in moe/route_rows.cuh, which asserts the same size."""
        warps = self.num_threads // 32
        return (2 + warps) * self.max_experts * 4 + warps * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.id_bytes in ID_BYTES, "ids of 4 or 8 bytes"
        yield self.max_experts in MAX_EXPERTS, f"a number of experts among {MAX_EXPERTS}"

    def choices(self) -> dict[str, str]:
        """Name the file that finds totals."""
        return {"TOTALS": f"route/{self.totals.value}.cuh"}


@dataclass(frozen=True)
class CountConfig(Config):
    """One configuration of count_routes, for any number of experts."""

    id_bytes: int
    num_threads: ClassVar[int] = 256
    shared_bytes: ClassVar[int] = MAX_EXPERTS[-1] * 4
    max_experts = MAX_EXPERTS[-1]
    part = PART
    taken = "id_bytes", "num_threads", "shared_bytes", "max_experts", "part"

    @property
    def name(self) -> str:
        """Return a short name for people, such as "int64"."""
        return f"int{self.id_bytes * 8}"

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.id_bytes in ID_BYTES, "ids of 4 or 8 bytes"


KERNEL: Kernel[RouteConfig] = Kernel(
    "route_rows",
    "RouteParams",
    lambda: [RouteConfig(id_bytes, most, totals) for totals in Totals for id_bytes in ID_BYTES for most in MAX_EXPERTS],
)
COUNTER = Kernel("count_routes", "RouteParams", lambda: [CountConfig(id_bytes) for id_bytes in ID_BYTES])


class RouteProblem:
    """The experts of tokens, and the tensors for the rows of their routes."""

    def __init__(self, topk_ids: Tensor, num_experts: int, first: int = 0) -> None:
        """`topk_ids` is int32 or int64 `[tokens, topk]`; ids of one token are adjacent. Ids of experts begin at
        `first`.
        """
        self.topk_ids, self.num_experts, self.first = topk_ids, num_experts, first
        shapes = (num_experts,), (num_experts,), topk_ids.shape, (topk_ids.numel(),), (topk_ids.numel(),)
        self.rows = ExpertRows(*(empty("rows of experts", shape, torch.int32, topk_ids.device) for shape in shapes))
        """The rows that the kernels write."""


def run(p: RouteProblem) -> None:
    """Give each route a row, on the GPU of the ids."""
    num_routes = p.topk_ids.numel()
    if num_routes == 0:
        p.rows.counts.zero_()
        p.rows.ends.zero_()
        return
    id_bytes, device, ctas = p.topk_ids.element_size(), p.topk_ids.get_device(), grid(num_routes)
    config = config_of(id_bytes, p.num_experts, totals_for(num_routes))
    if config.totals == Totals.COUNTED:
        KERNEL.run(config, values_of(p), ctas, device)
        return
    values = values_of(p, empty("counts of routes", (ctas, p.num_experts), torch.int32, p.topk_ids.device))
    COUNTER.run(CountConfig(id_bytes), values, ctas, device)
    KERNEL.run(config, values, ctas, device, is_dependent=True)


def totals_for(num_routes: int) -> Totals:
    """Choose the faster way to find the totals of `num_routes` routes."""
    return Totals.COUNTED if grid(num_routes) <= PARTS_ALONE else Totals.OF_PARTS


@cache
def config_of(id_bytes: int, num_experts: int, totals: Totals) -> RouteConfig:
    """Choose the configuration with the fewest counters that suffice for `num_experts`."""
    most = next((most for most in MAX_EXPERTS if num_experts <= most), None)
    if most is None:
        raise ValueError(f"num_experts: expected at most {MAX_EXPERTS[-1]}, got {num_experts}")
    return RouteConfig(id_bytes, most, totals)


def grid(num_routes: int) -> int:
    """Count the CTAs of either kernel: one for each part."""
    return ceil_div(num_routes, PART)


def values_of(p: RouteProblem, of_parts: Tensor | None = None) -> dict[str, Any]:
    """Return the members of the parameters of both kernels; `of_parts`: the counts of parts, if count_routes runs."""
    return {
        "topk_ids": p.topk_ids,
        **p.rows._asdict(),
        "num_routes": p.topk_ids.numel(),
        "topk": p.topk_ids.shape[1],
        "gap": p.topk_ids.stride(0) - p.topk_ids.shape[1] if p.topk_ids.shape[0] > 1 else 0,
        "first": p.first,
        "num_experts": p.num_experts,
        "of_parts": of_parts,
    }

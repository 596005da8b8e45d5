"""BF16 products of groups along k on a GPU, launched several times if there are many groups.

One kernel takes groups of whole k-blocks whose number the host knows; another takes any depths, even on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..core.gpu import gpu_of
from ..core.settings import num_sms_of
from .config.bf16 import BLOCK_K, Bf16Config
from .kinds.works import COUNTED, MOST_COUNTED, MOST_INLINE_COUNTS, MOST_K_PARTS
from .launch import fitting, start
from .problem import Problem, write_without_depth


def run(p: Problem) -> None:
    """Compute on the GPU of the tensors. The host never waits for depths.

    Rows after the last group are not read.
    """
    if p.ks is not None and not any(k % BLOCK_K for k in p.ks):
        rows = sum(p.ks)
        run_parts(p._replace(a=p.a[:, :rows], b=p.b[:, :rows]))
    else:
        run_parts(of_any_depths(p))


def of_any_depths(p: Problem) -> Problem:
    """Make the kernel read the groups' depths: up to `MOST_INLINE_COUNTS` from its parameters, else from a tensor."""
    if p.ks is not None and len(p.ks) <= MOST_INLINE_COUNTS:
        return p._replace(work=COUNTED, sfa=None)
    counts = p.ks_tensor
    if counts is None:  # too many depths for a kernel's parameters; to capture such a call in a graph, pass a tensor
        counts = torch.tensor(p.ks, dtype=torch.int32, device="cpu").pin_memory().to(p.d.device, non_blocking=True)
    return p._replace(work=COUNTED, sfa=counts, ks=None)


def run_parts(p: Problem, config: Bf16Config | None = None) -> None:
    """Launch the kernel for as many groups at a time as its parameters can hold."""
    if 0 in p.d.shape:
        return
    if p.k == 0:
        write_without_depth(p)
        return
    gpu = gpu_of(p.d.get_device())
    start_parts(p, fitting(config, p, gpu), num_sms_of(gpu.num_sms))


def start_parts(p: Problem, config: Bf16Config, num_sms: int) -> None:
    """Launch the kernel of a configuration for all groups."""
    for count, more in parts_of_launches(p):
        start(p, config, num_sms, count, **more)


def parts_of(ks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first k-block, number of k-blocks, group) for every group, the deepest first."""
    blocks = [k // BLOCK_K for k in ks]
    parts = zip(accumulate(blocks, initial=0), blocks, range(len(blocks)), strict=False)
    return sorted(parts, key=lambda part: -part[1])


def parts_of_launches(p: Problem) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield, for each launch, the number of its groups and members of its parameters; the deepest groups come first."""
    if p.work is COUNTED:
        for first in range(0, p.groups, MOST_COUNTED):
            count = min(p.groups - first, MOST_COUNTED)
            numbers = {"first": first, "count": count, "groups": p.groups, "rows": p.k}
            yield count, {**numbers, "counts": p.sfa, "inline_counts": p.ks or ()}
        return
    assert p.ks is not None
    parts = parts_of(p.ks)
    for first in range(0, len(parts), MOST_K_PARTS):
        some = parts[first : first + MOST_K_PARTS]
        firsts, blocks, groups = zip(*some, strict=True)
        yield len(some), {"first_k_block": firsts, "num_k_blocks": blocks, "group": groups, "count": len(some)}

"""Products of groups along k on a GPU: two launches, one that makes the groups' tensor maps and one that multiplies."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..casts.lay_scales import laid_out
from ..core.check.checks import K_MULTIPLE
from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.seen import FREE_ROWS, Free
from ..core.settings import get_compile_mode, get_num_sms, get_pdl
from . import k_group_maps
from .ask.depths import k_grouped_problem
from .config.tall import BLOCK_K, GemmConfig
from .k_group_maps import MAX_INLINE_KS
from .kernel import FP8_GEMM
from .kinds.output import Sizes
from .launch import chosen, fitting, prepared, print_if_asked
from .launch import plan_of as plan_of_product
from .plan import A, Addresses, B, D, Place, Plan, Resized, Step, addresses_of
from .problem import Problem, write_without_depth
from .product import Product, by_operator

MAX_ROOMS = 128
"""Streams that a plan keeps memory for."""
KS, ROOM = 6, 7
"""Places among the addresses of a call, behind the operands: the depths, and what the first kernel writes."""


class DepthsPlan(Plan):
    """A plan of the kernel that multiplies, and with it that of the kernel that makes the maps."""

    make_maps: Plan
    inline_ks_at: int
    """Byte of its parameters where depths from the host begin."""
    num_groups = m = sum_k = num_k_blocks = 0

    rooms: dict[int, Tensor]
    lock: threading.Lock
    """Held for both launches: what the first writes is for the second one behind it."""
    known_ks: tuple[Sequence[int] | None, bytes]
    """The last depths from the host that were right for this plan, and how a launch takes them."""

    held: Tensor | None = None
    """The last depths that were copied for a launch, which must outlive it."""
    keeps_room = True
    """Memory outlives a call. It must not where it may be that of a graph's pool, which torch uses again."""

    def steps(self, at: Addresses, layout: Tensor | None, ks: Sequence[int] | None) -> Sequence[Step]:
        """Give both launches; none if the call wants a closer look. The lock is held."""
        at_ks, (known_ks, inline_ks) = 0, self.known_ks
        if ks is not None and known_ks != ks and not _add_up(ks, self):
            return ()
        if layout is not None:
            at_ks, inline_ks = layout.data_ptr(), b""
        elif known_ks != ks:
            inline_ks = b""
            depths = depths_of(ks, None, self.place)
            if isinstance(depths, bytes):
                inline_ks = depths
                self.known_ks = (None if ks is None else list(ks)), depths
            else:
                at_ks, self.held = depths.data_ptr(), depths
        at_d = at[D]
        is_apart = at_d + self.rows.span_d <= at_ks or at_ks + 4 * self.num_groups <= at_d
        if not is_apart or at_ks % 4 or not self.fits(at):
            return ()
        return self.both(at, at_ks, inline_ks)

    def both(self, at: Addresses, at_ks: int, inline_ks: bytes) -> Sequence[Step]:
        """Give both launches at addresses that fit. The lock is held, because they share a room."""
        at_all = (*at, at_ks, self.room(self.keeps_room).data_ptr())
        return (self.make_maps, at_all, inline_ks, self.inline_ks_at), (self, at_all, b"", 0)

    def room(self, keeps_it: bool) -> Tensor:
        """Give the memory in which one kernel writes for the other: each stream has its own, and each captured graph.

        On a stream launches follow each other, so that nobody overwrites what is still read.
        """
        stream = self.launcher.current_stream(self.device)
        keeps_it = keeps_it and not self.launcher.is_capturing()
        room = self.rooms.get(stream) if keeps_it else None
        if room is None:
            size = k_group_maps.room_bytes(self.num_groups)
            room = empty("maps of groups along k", (size,), torch.uint8, self.place)
            if keeps_it:
                if len(self.rooms) >= MAX_ROOMS:  # its memory goes back to its own stream, behind what reads it
                    del self.rooms[next(iter(self.rooms))]
                self.rooms[stream] = room
        return room


def run_on_gpu(p: Problem, config: GemmConfig | None = None, *, keeps_room: bool = True) -> DepthsPlan | None:
    """Compute a product of groups along k on the GPU that its tensors are on. The host reads no depth from there.

    The plan that is given serves other calls. `config` None leaves the choice to the heuristics.
    """
    if 0 in (p.groups, p.m, p.n):
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run_on_gpu(p, config, keeps_room=keeps_room)
    if p.a.numel() == 0:  # no group has any depth
        write_without_depth(p)
        return None
    config = fitting(config, p, gpu_of(device))
    ready = prepared(p, config)
    # The kernel that multiplies waits for the maps itself, and begins while they are made.
    plan = plan_of(
        ready,
        config,
        get_num_sms(),
        FP8_GEMM.launcher(config, device, True),
        k_group_maps.KERNEL.launcher(k_group_maps.CONFIG, device, get_pdl()),
    )
    plan.set_copies(p, ready)
    plan.keeps_room = keeps_room
    if get_compile_mode() == 1:
        return None
    depths = depths_of(p.ks, p.ks_tensor, p.d.device)
    at_ks = 0 if isinstance(depths, bytes) else depths.data_ptr()
    with plan.lock:
        inline_ks = depths if isinstance(depths, bytes) else b""
        for each, at, tail, tail_at in plan.both(addresses_of(ready), at_ks, inline_ks):
            each.launch(at, tail, tail_at)
    return plan


Depths = Tensor | bytes
"""The groups' k: a tensor on the GPU, or as many 32-bit numbers as go among a launch's parameters."""


def plan_of(
    p: Problem,
    config: GemmConfig,
    num_sms: int,
    launcher: driver.Launcher,
    launcher_of_maps: driver.Launcher,
) -> DepthsPlan:
    """Prepare both launches for a problem that is `prepared`."""
    room = Place("groups.by_depth", ROOM)
    plan = plan_of_product(p, config, num_sms, launcher, places=[room], count=p.groups, kind=DepthsPlan)
    assert isinstance(plan, DepthsPlan)
    plan.make_maps = _plan_of_maps(p, config, launcher_of_maps)
    plan.inline_ks_at = plan.make_maps.params.offset("inline_ks")
    plan.m, plan.num_groups = p.m, p.groups
    plan.sum_k, plan.num_k_blocks = p.a.numel() // p.m, p.sfa.shape[1]
    plan.rooms, plan.lock, plan.known_ks = {}, threading.Lock(), (None, b"")
    return plan


def _plan_of_maps(p: Problem, config: GemmConfig, launcher: driver.Launcher) -> Plan:
    params = k_group_maps.KERNEL.params
    numbers: dict[str, int | bytes] = {
        "m": p.m,
        "n": p.n,
        "count": p.groups,
        "sum_k": p.a.numel() // p.m,
        "num_k_blocks": p.sfa.shape[1],
        "inline_ks": b"",
    }
    # Maps of some group's A and B: the kernel writes each group's own address, size and stride along k into copies.
    maps = {
        member: TensorMap(ElementType.UINT8, (BLOCK_K, rows), (BLOCK_K,), (BLOCK_K, block), 128)
        for member, rows, block in (("map_a", p.m, config.box_rows_of_a), ("map_b", p.n, config.block_n))
    }
    places = [
        *(Place("map_a", A), Place("map_b", B), Place("a", A), Place("b", B)),
        *(Place("k_groups", ROOM), Place("ks", KS)),
    ]
    maps_grid = ceil_div(p.groups, k_group_maps.CONFIG.num_threads)
    return Plan(p, params, numbers, maps, places, launcher, maps_grid)


def product(k_major_scales: bool, keeps_room: bool) -> Product:
    """State the product of groups along k, of scales that lie either way.

    Without `keeps_room` no memory outlives the call: it may be that of a graph's pool, which torch uses again.
    """
    turn: Callable[[Tensor], Tensor] = (lambda sf: sf) if k_major_scales else (lambda sf: sf.t())
    scales: Free = ((1 if k_major_scales else 0,), ())

    def derive(templates: dict[Any, Any], operands: Sequence[Any]) -> DepthsPlan | None:
        x, sx, y, sy, *_ = operands
        return _derive(next(iter(templates.values())), x, turn(sx), y, turn(sy))

    return Product(
        "k_grouped_fp8_gemm_nt_contiguous",
        partial(k_grouped_problem, k_major_scales=k_major_scales),
        ("recipe",),
        ("c", "ks_tensor", "ks"),
        partial(by_operator, k_major_scales=k_major_scales),
        partial(run_on_gpu, keeps_room=keeps_room),
        derive=derive,
        free=(FREE_ROWS, scales, FREE_ROWS, scales),
        serves=lambda *_: True,
        lay_scales=lambda sf, k_blocks: laid_out(turn(sf), k_blocks),
    )


def _derive(like: DepthsPlan, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor) -> DepthsPlan | None:
    """Make a plan for other depths, of operands that nobody has checked; None if they want the checks."""
    if like.copies_sfa or like.copies_sfb:
        return None
    sum_k, num_k_blocks, m, n = x.shape[0] // like.m, sx.shape[1], like.m, like.n
    if x.shape != (m * sum_k,) or y.shape != (n * sum_k,) or sy.shape[1] != num_k_blocks or num_k_blocks < 2:
        return None
    sizes = Sizes(m, n, x.shape[0] // m // like.num_groups, like.num_groups)
    config = chosen(sizes, like.output, gpu_of(like.device))
    if config != like.config:
        return None
    pitch_a, pitch_b = sx.stride(1), sy.stride(1)
    rows = like.rows._replace(
        span_a=m * sum_k,
        span_sfa=((num_k_blocks - 1) * pitch_a + m) * 4,
        span_b=n * sum_k,
        span_sfb=((num_k_blocks - 1) * pitch_b + n) * 4,
    )
    resized = Resized("map_sfa", 1, num_k_blocks), Resized("map_sfb", 1, num_k_blocks)
    plan = like.derived(rows, like.grid, {}, resized)
    assert isinstance(plan, DepthsPlan)
    of_maps = like.make_maps
    plan.make_maps = of_maps.derived(of_maps.rows, of_maps.grid, {"sum_k": sum_k, "num_k_blocks": num_k_blocks}, [])
    plan.sum_k, plan.num_k_blocks, plan.known_ks = sum_k, num_k_blocks, (None, b"")
    print_if_asked(like.output, m, sizes, config)
    return plan


def _add_up(ks: Sequence[int], plan: DepthsPlan) -> bool:
    """Tell whether the depths that a caller states are right for a plan."""
    if isinstance(ks, Tensor) or len(ks) != plan.num_groups:
        return False
    sum_k = num_k_blocks = 0
    for k in ks:
        if k.__class__ is not int or k < 0 or k % K_MULTIPLE:
            return False
        sum_k += k
        num_k_blocks += (k + BLOCK_K - 1) // BLOCK_K
    return sum_k == plan.sum_k and num_k_blocks == plan.num_k_blocks


def depths_of(ks: Sequence[int] | None, ks_tensor: Tensor | None, device: torch.device) -> Depths:
    """The groups' k as a launch takes them. The host waits for neither."""
    if ks_tensor is not None:
        return ks_tensor
    ks = ks or ()
    if len(ks) <= MAX_INLINE_KS:
        return array("i", ks).tobytes()
    # More than fit a kernel's parameters; to capture such a call in a graph, pass `ks_tensor`.
    return torch.tensor(ks, dtype=torch.int32, device="cpu").pin_memory().to(device, non_blocking=True)


ALONG_K, BY_ROW = product(k_major_scales=True, keeps_room=True), product(k_major_scales=False, keeps_room=True)
OPERATORS = {True: product(True, keeps_room=False), False: product(False, keeps_room=False)}
"""The same as operators of torch compute them, by whether scales are k-major."""

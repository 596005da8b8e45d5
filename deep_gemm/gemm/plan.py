"""A launch prepared once and used again at other addresses and for other rows, and the one cache of all launches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.call import Key, Plans
from ..core.check.layout import ADDRESS_ALIGNMENT, byte_span
from ..core.jit import driver
from ..core.jit.tensor_map import MAP_BYTES, TensorMap
from ..core.params import Params
from ..core.seen import Free, Seen
from .kinds.output import Output
from .problem import Problem

A, SFA, B, SFB, D, C = range(6)
"""Operands by their place among the addresses of a call. Where there is no C, another input may take its place."""
SCALE_BYTES = 4
_UINT32 = struct.Struct("<I")
_PACK_UINT32 = _UINT32.pack_into
SOME_ADDRESS = 1 << 40
"""The address in maps that are encoded before theirs is known."""
Addresses = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A member of Params that holds an address, or a map that begins at one: `before` bytes ahead of an operand."""

    member: str
    operand: int
    before: int = 0


class Resized(NamedTuple):
    """A tensor map of a plan for other rows, which are this dimension. Without `pitch` and `box` these stay.

    (The sizes that a plan's `maps` state may be those of the plan that it was derived from: nobody reads them.)
    """

    member: str
    dimension: int
    size: int
    pitch: int = 0
    box: tuple[int, ...] | None = None


class Resizing(NamedTuple):
    """The places of parameters that depend on the rows alone, as 32-bit numbers: for rows that have the same boxes."""

    at_m: tuple[int, ...]
    """Bytes at which m stands."""
    at_last: tuple[int, ...]
    """Bytes at which m - 1 stands: in maps, which count so."""
    at_pitch: int | None
    """Byte at which the pitch of A's scales stands, if A has any."""

    @classmethod
    def of(
        cls, params: Params, numbers: Sequence[str], resized: Sequence[Resized], m: int, pitch: str | None = None
    ) -> Resizing:
        """Find the places of these members, whose sizes for `m` rows are m or m + 1, and of a pitch that no map has."""
        places = [
            (params.offset(each.member) + driver.size_number(each.dimension, each.size)[0], each.size - m)
            for each in resized
        ]
        pitched = [params.offset(each.member) + driver.stride_number(0)[0] for each in resized if each.pitch]
        pitched += [] if pitch is None else [params.offset(pitch)]
        return cls(
            (*map(params.offset, numbers), *(at for at, more in places if more == 1)),
            tuple(at for at, more in places if more == 0),
            *(pitched or (None,)),
        )


class Rows(NamedTuple):
    """The part of a plan that changes with m, besides parameters: D's shape, and how far operands reach."""

    shape: tuple[int, ...]
    span_a: int
    span_sfa: int
    span_b: int
    span_sfb: int
    span_d: int
    span_c: int


class Plan:
    """A launch of one kernel for operands of certain shapes, strides, types and device, at any addresses."""

    c_is_d: bool | None = None
    """C must be D itself (True), must be apart from D (False), or may be either."""
    alignment_of_c = ADDRESS_ALIGNMENT
    needs_c = False
    """C was made for a caller who left it out: such a call is never like another."""
    copies_sfa = copies_sfb = 0
    """Scales lie as the kernel cannot read them: each call copies so many of each row into another layout first."""
    config: object = None
    """The kernel's configuration."""
    by_band: dict[int, Any]
    """Configurations for other rows of the weight, by the band that these are in. Plans derived from it share them."""
    n = k = 0
    output: Output
    """The output of the product: with n and k all that the choice of a configuration for other rows depends on."""
    resizing: Resizing | None = None
    """How a plan for other rows is made of this one if its boxes are whole; None if they are not, or nobody asked."""

    def __init__(
        self,
        p: Problem,
        params: Params,
        numbers: Mapping[str, float | bytes],
        maps: Mapping[str, TensorMap],
        places: Sequence[Place],
        launcher: driver.Launcher,
        grid: int,
    ) -> None:
        """`p` is prepared for the kernel. `numbers` and `maps` are members of `params`; `places` have the addresses."""
        self.params, self.maps, self.places = params, dict(maps), tuple(places)
        self.launcher, self.grid = launcher, grid
        self.place, self.device, self.dtype = p.d.device, p.d.get_device(), p.d.dtype
        loaded_by_tma = {place.operand for place in places if place.member in maps}
        self.alignment_of_sfa, self.alignment_of_sfb = (
            ADDRESS_ALIGNMENT if operand in loaded_by_tma else SCALE_BYTES for operand in (SFA, SFB)
        )
        self.words = [(params.word(place.member), place.operand, place.before) for place in places]
        pointers = {place.member: 0 for place in places if place.member not in maps}
        self.template = params.pack({**numbers, **pointers, **self._encoded(addresses_of(p))})
        self.is_patched = launcher.keeps_addresses()
        self.by_band = {}
        self.rows = Rows(
            tuple(p.d.shape),
            *(0 if x is None else byte_span(x) for x in (p.a, p.sfa, p.b, p.sfb, p.d, p.c)),
        )

    def set_copies(self, given: Problem, ready: Problem) -> None:
        """Note which scales of a problem were copied when it was prepared."""
        self.copies_sfa, self.copies_sfb = (
            0 if laid is None or laid is sf else laid.shape[-1]
            for sf, laid in ((given.sfa, ready.sfa), (given.sfb, ready.sfb))
        )

    def with_rows(self, m: int, pitch: int, rows: Rows, grid: int) -> Plan:
        """Copy the plan for other rows quickly: by `resizing`. `pitch` is the number at its place."""
        plan = object.__new__(type(self))
        plan.__dict__.update(self.__dict__)
        template = bytearray(self.template)
        at_m, at_last, at_pitch = self.resizing  # type: ignore[misc]
        for at in at_m:
            _PACK_UINT32(template, at, m)
        for at in at_last:
            _PACK_UINT32(template, at, m - 1)
        if at_pitch is not None:
            _PACK_UINT32(template, at_pitch, pitch)
        plan.template, plan.grid, plan.rows = bytes(template), grid, rows
        return plan

    def derived(self, rows: Rows, grid: int, numbers: Mapping[str, int], resized: Sequence[Resized]) -> Plan:
        """Copy the plan for other rows: other 32-bit numbers among its parameters, and maps of other sizes."""
        plan = object.__new__(type(self))
        plan.__dict__.update(self.__dict__)
        template, offset_of = bytearray(self.template), self.params.offset
        for member, number in numbers.items():
            _UINT32.pack_into(template, offset_of(member), number)
        can_patch = driver.sizes_are_numbers()
        for member, dimension, size, pitch, box in resized:
            at, tensor_map = offset_of(member), self.maps[member]
            if can_patch and pitch < driver.STRIDE_LIMIT and (box is None or box == tensor_map.box):
                place, number = driver.size_number(dimension, size)
                _UINT32.pack_into(template, at + place, number)
                if pitch:
                    place, number = driver.stride_number(pitch)
                    _UINT32.pack_into(template, at + place, number)
                continue
            sizes, strides = list(tensor_map.sizes), list(tensor_map.strides)
            sizes[dimension] = size
            strides[0] = pitch or strides[0]
            tensor_map = tensor_map._replace(sizes=tuple(sizes), strides=tuple(strides), box=box or tensor_map.box)
            template[at : at + MAP_BYTES] = self.launcher.encode(tensor_map, SOME_ADDRESS, SOME_ADDRESS)
            plan.maps = {**plan.maps, member: tensor_map}
        plan.template, plan.grid, plan.rows = bytes(template), grid, rows
        return plan

    def fits(self, at: Addresses) -> bool:
        """Tell whether a launch at these addresses is right. If not, the call wants a closer look."""
        at_a, at_sfa, at_b, at_sfb, at_d, at_c = at
        _, span_a, span_sfa, span_b, span_sfb, span_d, span_c = self.rows
        end_d = at_d + span_d
        if (
            (at_a | at_b | at_d) % ADDRESS_ALIGNMENT
            or at_sfa % self.alignment_of_sfa
            or at_sfb % self.alignment_of_sfb
            or at_c % self.alignment_of_c
            or (at_d < at_a + span_a and at_a < end_d)
            or (at_d < at_b + span_b and at_b < end_d)
            or (at_d < at_sfa + span_sfa and at_sfa < end_d)
            or (at_d < at_sfb + span_sfb and at_sfb < end_d)
        ):
            return False
        if not at_c:
            return True
        if at_c == at_d:
            return self.c_is_d is not False
        return not self.c_is_d and (at_c + span_c <= at_d or end_d <= at_c)

    lock: AbstractContextManager[Any] = nullcontext()
    """Held for all launches of a call that takes several."""

    def steps(self, at: Addresses, layout: Tensor | None, ks: Sequence[int] | None) -> Sequence[Step]:
        """Give the launches of a call that has a layout; none if the call wants a closer look."""
        assert layout is not None
        at = (at[A], layout.data_ptr(), *at[B:])  # there are no scales
        return ((self, at, b"", 0),) if self.fits(at) else ()

    def launch(self, at: Addresses, tail: bytes = b"", tail_at: int = 0) -> None:
        """Launch at these addresses on the current stream of the plan's device; `tail`: each call's own bytes."""
        launcher = self.launcher
        with launcher.lock:
            if launcher.plan is not self:
                launcher.hold(self, self.template, self.grid)
            if not self.is_patched:  # a map's first word means something else to this driver
                for member, encoded in self._encoded(at).items():
                    place = self.params.offset(member)
                    launcher.params.bytes[place : place + MAP_BYTES] = encoded
            words = launcher.params.words
            for word, operand, before in self.words:
                words[word] = at[operand] - before
            if tail:
                launcher.params.bytes[tail_at : tail_at + len(tail)] = tail
            stream = launcher.current_stream(self.device)
            if stream != launcher.stream:
                launcher.set_stream(stream)
            if launcher.current_device() == self.device:
                (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
            else:
                with torch.cuda.device(self.device):
                    (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
            if status != launcher.success:
                launcher.start_again(status, self.device)

    def new_output(self) -> Tensor:
        """Make a D like that of the plan."""
        return torch.empty(self.rows.shape, dtype=self.dtype, device=self.place)

    def _encoded(self, at: Addresses) -> dict[str, bytes]:
        """Encode the plan's maps for these addresses."""
        encode = self.launcher.encode
        return {
            place.member: encode(self.maps[place.member], at[place.operand] - place.before, at[place.operand])
            for place in self.places
            if place.member in self.maps
        }


Step = tuple[Plan, Addresses, bytes, int]
"""A launch: of which plan, at which addresses, and what it writes where behind the other parameters."""


class PlanCache(Plans[Plan]):
    """Plans of products, also by family, to derive others. Those are bounded too."""

    def __init__(self) -> None:
        super().__init__()
        self.families = Seen()
        """Plans of a family by their configurations."""

    def keep_to_derive(
        self,
        family: Key,
        tensors: Sequence[Tensor],
        plan: Plan,
        wants_checks: Callable[[Sequence[Tensor]], bool],
        free: Sequence[Free],
    ) -> None:
        """Keep a plan of a call with these tensors to derive others from, for calls that differ in what is `free`."""
        with self._lock:
            templates = self.families.find(family, tensors)
            if templates is None:
                self.families.keep(family, tensors, {plan.config: plan}, wants_checks, free)
            else:
                templates.setdefault(plan.config, plan)

    def clear(self) -> None:
        """Forget all plans."""
        super().clear()
        with self._lock:
            self.families.clear()


PLANS = PlanCache()


def other_rows(like: Plan, operands: Sequence[Any]) -> tuple[int, int, Rows] | None:
    """Give m, the pitch of A's scales and what changes with them, if a call of a plan's family is right; else None.

    All that a check would ask of A, its scales and D is asked here, or holds for the plan from which another is
    derived: other sizes and strides, types and devices are those of its family. Whoever calls asks for C. Single rows,
    whose strides say nothing, and a single column of scales are left out.
    """
    a, sfa, _, _, d, c = operands
    (m, k), n, before, pitch, span_sfa = a.shape, like.n, like.rows, 0, 0
    if m < 2:
        return None
    if sfa is not None:
        (rows_of_sfa, columns), (step, pitch) = sfa.shape, sfa.stride()
        if rows_of_sfa != m or columns < 2 or step != 1 or pitch < m or pitch % (ADDRESS_ALIGNMENT // SCALE_BYTES):
            return None
        span_sfa = ((columns - 1) * pitch + m) * SCALE_BYTES
    pitch_d = n
    if d is not None:
        if d.shape[0] != m:
            return None
        pitch_d = d.stride(0)
    span_a = ((m - 1) * a.stride(0) + k) * a.element_size()
    span_d = ((m - 1) * pitch_d + n) * like.dtype.itemsize
    span_c = 0 if c is None else byte_span(c)
    return m, pitch, Rows((m, n), span_a, span_sfa, before.span_b, before.span_sfb, span_d, span_c)


def derived_for_rows(
    templates: dict[Any, Plan],
    config: Any,
    m: int,
    pitch: int,
    of_rows: tuple[Rows, int],
    changed: Callable[[Plan, int, int], tuple[Mapping[str, int], Sequence[Resized]]],
    *,
    are_whole: bool,
    counts: Sequence[str] = ("m",),
    pitch_name: str | None = None,
) -> Plan:
    """Derive a plan for `m` rows from that of its configuration: quickly, if `resizing` says how.

    `pitch` is that of A's scales in elements, which the parameter `pitch_name` holds, if no map does. `of_rows` is what
    changes of a plan besides parameters, and CTAs; `changed` gives these of a plan for rows and a pitch. A plan whose
    boxes are all whole becomes the template: plans for other rows then differ from it in the numbers that `counts`
    names, and in the pitch.
    """
    template = templates[config]
    if template.resizing is not None and are_whole and pitch * SCALE_BYTES < driver.STRIDE_LIMIT:
        return template.with_rows(m, pitch if pitch_name else driver.stride_number(pitch * SCALE_BYTES)[1], *of_rows)
    numbers, resized = changed(template, m, pitch)
    plan = template.derived(*of_rows, numbers, resized)
    if are_whole and driver.sizes_are_numbers():
        plan.resizing = Resizing.of(plan.params, counts, resized, m, pitch_name)
        templates[config] = plan
    return plan


def addresses_of(p: Problem) -> Addresses:
    """Give where the operands are, further ones of a product that activates behind the others."""
    operands = p.a, p.sfa, p.b, p.sfb, p.d, p.c, *((p.row_weights, p.scales) if p.epilogue.activates else ())
    return tuple([0 if x is None else x.data_ptr() for x in operands])

"""A launch prepared once and used again for operands at other addresses: what all kernels' plans have in common."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..choose.config import WGMMA_ROWS, GemmConfig
from ..jit import driver
from ..jit.tensor_map import MAX_SWIZZLE, ElementType, TensorMap
from ..problem import DenseProblem
from ..problem.layout import ADDRESS_ALIGNMENT, align, byte_span
from ..settings import get_pdl

MAX_PLANS = 4096
AnyPlan = TypeVar("AnyPlan", bound="Plan")


class AddressWords(NamedTuple):
    """Which 64-bit word of a kernel's Params holds the address of each operand: a pointer, or a map's first word."""

    a: int
    sfa: int
    b: int
    sfb: int
    d: int
    c: int


class Operands(Protocol):
    """What a plan must know of a problem: operands, and the shape of a D that it may have to make."""

    @property
    def a(self) -> Tensor:
        """Values of A."""

    @property
    def sfa(self) -> Tensor:
        """Scales of A."""

    @property
    def b(self) -> Tensor:
        """Values of B."""

    @property
    def sfb(self) -> Tensor:
        """Scales of B."""

    @property
    def d(self) -> Tensor:
        """The output."""

    @property
    def c(self) -> Tensor | None:
        """C, or another input in its place."""


class Plan:
    """A launch prepared for operands of certain shapes, strides, types and device, at any addresses."""

    def __init__(
        self,
        p: Operands,
        maps: dict[str, TensorMap],
        tail: bytes,
        words: AddressWords,
        kernel: driver.Kernel,
        grid: int,
        threads: int,
        cluster: int,
    ) -> None:
        """`maps` are the head of Params, by the operand's name; `tail` is what follows them."""
        self._device = p.d.get_device()
        self._dtype = p.d.dtype
        self._maps, self._words_of = maps, words
        self._spans_of_b = byte_span(p.b), byte_span(p.sfb)
        self._sfa_alignment = ADDRESS_ALIGNMENT if "sfa" in maps else p.sfa.element_size()
        self._sfb_alignment = ADDRESS_ALIGNMENT if "sfb" in maps else p.sfb.element_size()
        self._kernel, self._threads, self._cluster, self._is_dependent = kernel, threads, cluster, get_pdl()
        self._patches_maps = driver.address_is_first_word()
        self._serve(p, driver.ParamsBuffer(self._encoded(addresses_of(p)) + tail), grid)

    def _serve(self, p: Operands, params: driver.ParamsBuffer, grid: int) -> None:
        """Set all that depends on m."""
        self._shape = tuple(p.d.shape)
        self._params, self._words = params, params.words
        self._spans = (byte_span(p.a), byte_span(p.sfa), *self._spans_of_b, byte_span(p.d))
        self._span_c = 0 if p.c is None else byte_span(p.c)
        self._launch = driver.Launch(
            self._kernel, params, grid, self._threads, self._cluster, is_dependent=self._is_dependent
        )
        self._lock = threading.Lock()  # addresses are written and read by the launch in one go

    def _changed(self: AnyPlan, p: Operands, grid: int, numbers: Mapping[int, int]) -> AnyPlan:
        """Copy the plan, with other numbers in Params, so that no map is encoded anew."""
        plan = object.__new__(type(self))
        plan.__dict__.update(self.__dict__)
        plan._serve(p, self._params.changed(numbers), grid)
        return plan

    def prepared(self, p: DenseProblem) -> DenseProblem:
        """The problem with its scales laid out as the kernel reads them; itself where they lie so."""
        return p

    def run(self, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor, c: Tensor | None) -> bool:
        """Compute a product of operands like the plan's. False, and nothing done, if addresses need a closer look."""
        at_a, at_sfa, at_b, at_sfb, at_d = a.data_ptr(), sfa.data_ptr(), b.data_ptr(), sfb.data_ptr(), d.data_ptr()
        at_c = 0 if c is None else c.data_ptr()
        span_a, span_sfa, span_b, span_sfb, span_d = self._spans
        end_d = at_d + span_d
        if (
            (at_a | at_b | at_d | at_c) % ADDRESS_ALIGNMENT
            or at_sfa % self._sfa_alignment
            or at_sfb % self._sfb_alignment
            or (at_d < at_a + span_a and at_a < end_d)
            or (at_d < at_b + span_b and at_b < end_d)
            or (at_d < at_sfa + span_sfa and at_sfa < end_d)
            or (at_d < at_sfb + span_sfb and at_sfb < end_d)
            or (c is not None and not self._c_may_be_at(at_c, at_d))
        ):
            return False
        self.launch(at_a, at_sfa, at_b, at_sfb, at_d, at_c)
        return True

    def new_output(self) -> Tensor:
        """Make a D like that of the plan."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def launch(self, at_a: int, at_sfa: int, at_b: int, at_sfb: int, at_d: int, at_c: int) -> None:
        """Launch for operands at these addresses, on the current stream of the plan's device."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            words = self._words
            word_a, word_sfa, word_b, word_sfb, word_d, word_c = self._words_of
            words[word_a] = at_a
            words[word_sfa] = at_sfa
            words[word_b] = at_b
            words[word_sfb] = at_sfb
            words[word_d] = at_d
            words[word_c] = at_c
            if not self._patches_maps:  # what was written into the maps means something else
                self._params.write(self._encoded(AddressWords(at_a, at_sfa, at_b, at_sfb, at_d, at_c)))
            if torch._C._cuda_getDevice() == self._device:
                self._launch(stream)
            else:
                with torch.cuda.device(self._device):
                    self._launch(stream)

    def _encoded(self, addresses: AddressWords) -> bytes:
        return b"".join([driver.encode(map_, self._address_of(name, addresses)) for name, map_ in self._maps.items()])

    def _address_of(self, name: str, at: AddressWords) -> int:
        """Where the tensor of a map begins."""
        address: int = getattr(at, name)
        return address

    def _c_may_be_at(self, at_c: int, at_d: int) -> bool:
        """C is D, or apart from it."""
        return at_c == at_d or at_c + self._span_c <= at_d or at_d + self._spans[-1] <= at_c


def keep(plans: dict[tuple[object, ...], Any], key: tuple[object, ...], plan: Any) -> None:
    """Keep a plan, and plans bounded in number: the oldest goes."""
    if len(plans) >= MAX_PLANS:
        del plans[next(iter(plans))]
    plans[key] = plan


def refuse_if(config_name: str, reason: str | None) -> None:
    """Raise for a configuration that was given for a problem and, for this reason, does not compute it."""
    if reason is not None:
        raise ValueError(f"config: {config_name} {reason}")


def addresses_of(p: Operands) -> AddressWords:
    """Where the operands are."""
    at_c = 0 if p.c is None else p.c.data_ptr()
    return AddressWords(p.a.data_ptr(), p.sfa.data_ptr(), p.b.data_ptr(), p.sfb.data_ptr(), p.d.data_ptr(), at_c)


def output_map(config: GemmConfig, d: Tensor) -> TensorMap:
    """D, a matrix or several one behind another, in boxes of a panel; wide ones by spans of columns: see store.cuh."""
    element = ElementType.FLOAT32 if config.output_is_fp32 else ElementType.BFLOAT16
    of_d = matrix_map if d.dim() == 2 else plane_map
    if not config.has_wide_panels:
        return of_d(element, d, (WGMMA_ROWS, config.panel_columns), config.panel_columns * config.output_bytes)
    span = gcd(d.shape[-1], MAX_SWIZZLE // config.output_bytes)
    span_bytes = span * config.output_bytes
    swizzle = span_bytes if span_bytes > ADDRESS_ALIGNMENT else 0
    _, sizes, strides, box, _ = of_d(element, d, (WGMMA_ROWS, config.panel_columns), 0)
    return TensorMap(
        element,
        (span, sizes[0] // span, *sizes[1:]),
        (span_bytes, *strides),
        (span, box[0] // span, *box[1:]),
        swizzle,
    )


def matrix_map(
    element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int, *, transposed: bool = False
) -> TensorMap:
    """A row-major matrix, or one that becomes one when `transposed`."""
    (rows, columns), (pitch, other) = x.shape, x.stride()
    if transposed:
        rows, columns, pitch = columns, rows, other
    strides = (_pitch(rows, columns, pitch) * x.element_size(),)
    return TensorMap(element, (columns, rows), strides, (box[1], box[0]), swizzle)


def plane_map(element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """Row-major matrices, one behind another."""
    planes, rows, columns = x.shape
    strides = (row_pitch(x) * element.value, plane_stride(x) * element.value)
    return TensorMap(element, (columns, rows, planes), strides, (box[1], box[0], 1), swizzle)


def row_pitch(x: Tensor) -> int:
    """Elements from row to row of a matrix, or of each of several."""
    return _pitch(x.shape[-2], x.shape[-1], x.stride(-2))


def plane_stride(x: Tensor) -> int:
    """Elements from matrix to matrix; for a single one as for a single row."""
    return x.stride(0) if x.shape[0] > 1 else ADDRESS_ALIGNMENT


def _pitch(rows: int, columns: int, stride: int) -> int:
    """That of a single row moves nothing, but TMA wants a multiple of 16 bytes."""
    return stride if rows > 1 else align(columns, ADDRESS_ALIGNMENT)

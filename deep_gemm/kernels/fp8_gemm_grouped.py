"""The kernel of cuda/fp8_gemm.cuh where rows are grouped: what TMA is told of the operands, and the launch."""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from ..choose.config import BLOCK_K, WGMMA_ROWS, GemmConfig, Groups, Output
from ..jit.tensor_map import ElementType, TensorMap
from ..problem import ContiguousProblem, MaskedProblem
from ..problem.layout import ADDRESS_ALIGNMENT, ceil_div, get_mn_major_tma_aligned_tensor
from . import plan
from .fp8_gemm import loaded
from .plan import AddressWords, output_map, plane_map, plane_stride, row_pitch


class GroupedProblem(NamedTuple):
    """Both kinds of grouped rows as the kernel sees them: planes of rows. Stacked rows are those of one plane."""

    a: Tensor
    """`[planes, rows, k]`; so are its scales and D."""
    sfa: Tensor
    b: Tensor
    """`[groups, n, k]`"""
    sfb: Tensor
    d: Tensor
    c: Tensor
    """Not a C, which no grouped product has: the layout, in its place among the operands."""
    groups: Groups
    sfb_rows: int
    alignment: int
    zero_padding: bool

    @property
    def planes(self) -> int:
        """Matrices of rows: one, or one for each group."""
        return self.a.shape[0]

    @property
    def m(self) -> int:
        """Rows of a plane."""
        return self.a.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups, each with its B."""
        return self.b.shape[0]

    @property
    def n(self) -> int:
        """Columns of D."""
        return self.b.shape[1]

    @property
    def k(self) -> int:
        """Depth of the product."""
        return self.b.shape[2]


def grouped_problem(p: ContiguousProblem | MaskedProblem) -> GroupedProblem:
    """Take either kind of problem for what they have in common."""
    if isinstance(p, MaskedProblem):
        return GroupedProblem(
            p.a, p.sfa, p.b, p.sfb, p.d, p.masked_m, Groups.COUNTS, p.sfb_rows, alignment=1, zero_padding=False
        )
    groups = Groups.ENDS if p.layout_is_ends else Groups.IDS
    a, sfa, d = p.a[None], p.sfa[None], p.d[None]
    return GroupedProblem(a, sfa, p.b, p.sfb, d, p.grouped_layout, groups, p.sfb_rows, p.alignment, p.zero_padding)


class Plan(plan.Plan):
    """A launch of the kernel for grouped rows, prepared."""

    # Words of Params in cuda/fp8_gemm.cuh: five tensor maps, three pointers, and further on that to the layout.
    _WORDS = AddressWords(a=0, b=16, sfa=32, d=48, sfb=80, c=88)
    _SFB_MAP, _WHOLE_D_MAP, _D_POINTER = 64, 64, 82

    def __init__(self, p: GroupedProblem, config: GemmConfig, num_sms: int) -> None:
        """`p` is `prepared` for the kernel."""
        self.config = config
        self._before_a, self._before_d = bytes_before(config, p)
        super().__init__(
            p,
            maps=tensor_maps(config, p),
            tail=scalars(p),
            words=self._WORDS._replace(sfb=self._SFB_MAP if config.sfb_is_per_row else self._WORDS.sfb),
            kernel=loaded(config, p.d.device.index),
            grid=grid(config, p, num_sms),
            threads=config.num_threads,
            cluster=1,
        )
        self._shape = tuple(p.d.shape if p.groups == Groups.COUNTS else p.d.shape[1:])
        self._pointer_lock = threading.Lock()

    def launch(self, at_a: int, at_sfa: int, at_b: int, at_sfb: int, at_d: int, at_c: int) -> None:
        """Launch for operands at these addresses; A's and D's maps begin before them."""
        with self._pointer_lock:
            self._words[self._D_POINTER] = at_d
            if not self.config.sfb_is_per_row:
                self._words[self._WHOLE_D_MAP] = at_d
            super().launch(at_a - self._before_a, at_sfa, at_b, at_sfb, at_d - self._before_d, at_c)

    def _address_of(self, name: str, at: AddressWords) -> int:
        return at.d + self._before_d if name == "whole_d" else super()._address_of(name, at)

    def _c_may_be_at(self, at_c: int, at_d: int) -> bool:
        """The layout is apart from D."""
        return at_c != at_d and super()._c_may_be_at(at_c, at_d)


def output_of(p: GroupedProblem) -> Output:
    """What decides the kernel's code besides the tile."""
    return Output(p.d.dtype == torch.float32, sfb_is_per_row=p.sfb_rows == 1, groups=p.groups)


def prepared(p: GroupedProblem) -> GroupedProblem:
    """Lay scales, and the layout, out as the kernel loads them; the problem itself where they lie so."""
    sfa = get_mn_major_tma_aligned_tensor(p.sfa)
    sfb = get_mn_major_tma_aligned_tensor(p.sfb) if p.sfb_rows == 1 else p.sfb
    layout = p.c.clone() if p.groups == Groups.IDS and p.c.data_ptr() % ADDRESS_ALIGNMENT else p.c
    if sfa is p.sfa and sfb is p.sfb and layout is p.c:
        return p
    return p._replace(sfa=sfa, sfb=sfb, c=layout)


def grid(config: GemmConfig, p: GroupedProblem, num_sms: int) -> int:
    """One CTA for each SM, but no more than there can be tiles, or halves of them: a tile has a row at least."""
    return min(num_sms, p.planes * p.m * ceil_div(p.n, config.block_n) * (2 if config.cuts_last_tiles else 1))


def tensor_maps(config: GemmConfig, p: GroupedProblem) -> dict[str, TensorMap]:
    """What TMA is told of the operands, in the order of `Params`; the scales that it loads are m-major."""
    output = ElementType.FLOAT32 if config.output_is_fp32 else ElementType.BFLOAT16
    span = config.panel_columns * config.output_bytes
    maps = {
        "a": clipped_map(ElementType.UINT8, p.a, (config.box_rows_of_a, BLOCK_K), 128),
        "b": plane_map(ElementType.UINT8, p.b, (config.box_rows_of_b, BLOCK_K), 128),
        "sfa": plane_map(ElementType.FLOAT32, p.sfa.mT, (1, config.scale_rows), 0),
        "d": clipped_map(output, p.d, (WGMMA_ROWS, config.panel_columns), span),
    }
    if config.sfb_is_per_row:
        maps["sfb"] = plane_map(ElementType.FLOAT32, p.sfb.mT, (1, config.block_n), 0)
    else:
        maps["whole_d"] = output_map(config, p.d)
    return maps


def bytes_before(config: GemmConfig, p: GroupedProblem) -> tuple[int, int]:
    """How far before A and D their maps begin: the rows of a box. See "Rows that are not the group's" in groups.cuh."""
    return config.box_rows_of_a * row_pitch(p.a) * p.a.element_size(), WGMMA_ROWS * row_pitch(p.d) * p.d.element_size()


def clipped_map(element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """Row-major matrices whose boxes can be cut off at any row; the map begins a box before them."""
    planes, rows, columns = x.shape
    pitch = row_pitch(x) * element.value
    strides = (pitch, pitch, plane_stride(x) * element.value)
    return TensorMap(element, (columns, box[0], rows + 1, planes), strides, (box[1], box[0], 1, 1), swizzle)


def scalars(p: GroupedProblem) -> bytes:
    """Pack what follows the tensor maps in `Params` of cuda/fp8_gemm.cuh."""
    pointers = (p.sfb.data_ptr(), 0, p.d.data_ptr())
    return struct.pack("<5Q5I4x2Q4I", *pointers, *pitches(p), *sizes(p), p.c.data_ptr(), *groups(p))


def pitches(p: GroupedProblem) -> tuple[int, int]:
    """Elements from one row of C, of which there is none, and of D, to the next."""
    return 0, row_pitch(p.d)


def sizes(p: GroupedProblem) -> tuple[int, ...]:
    """Strides of B's scales, and m, n, k."""
    return p.sfb.stride(1), p.sfb.stride(2), p.m, p.n, p.k


def groups(p: GroupedProblem) -> tuple[int, ...]:
    """What follows the layout in `Groups` of cuda/groups.cuh."""
    return p.sfb.stride(0), p.num_groups, p.m, p.alignment, int(p.zero_padding)

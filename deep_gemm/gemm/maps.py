"""Tensor maps, which describe to TMA a matrix, several matrices, scales, or an output."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT, align
from ..core.gpu import WGMMA_ROWS
from ..core.jit.tensor_map import MAX_SWIZZLE, ElementType, TensorMap


def element_of(x: Tensor) -> ElementType:
    """Return TMA's element type for a tensor."""
    is_fp32, is_bf16 = x.dtype == torch.float32, x.dtype == torch.bfloat16
    return ElementType.FLOAT32 if is_fp32 else ElementType.BFLOAT16 if is_bf16 else ElementType.UINT8


def operand_map(x: Tensor, rows: int, columns: int, *, is_mn_major: bool = False) -> TensorMap:
    """Map one or several operands in boxes of `rows` x `columns`; boxes have 64 rows if m or n is contiguous."""
    of_x, element = matrix_map if x.dim() == 2 else plane_map, element_of(x)
    if is_mn_major:
        return of_x(element, x.mT, (columns, WGMMA_ROWS), 128)
    return of_x(element, x, (rows, columns), columns * element.value)


def matrix_map(
    element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int, *, transposed: bool = False
) -> TensorMap:
    """Map a matrix that is row-major, or becomes row-major when `transposed`."""
    (rows, columns), (pitch, other) = x.shape, x.stride()
    if transposed:
        rows, columns, pitch = columns, rows, other
    strides = (_pitch(rows, columns, pitch) * x.element_size(),)
    return TensorMap(element, (columns, rows), strides, (box[1], box[0]), swizzle)


def plane_map(element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """Map several row-major matrices, one after another."""
    planes, rows, columns = x.shape
    strides = (row_pitch(x) * element.value, plane_stride(x) * element.value)
    return TensorMap(element, (columns, rows, planes), strides, (box[1], box[0], 1), swizzle)


def clipped_map(x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """Map row-major matrices whose boxes can be cut off at any row; the map begins one box before the matrices."""
    (planes, rows, columns), element = x.shape, element_of(x)
    pitch = row_pitch(x) * element.value
    strides = (pitch, pitch, plane_stride(x) * element.value)
    return TensorMap(element, (columns, box[0], rows + 1, planes), strides, (box[1], box[0], 1, 1), swizzle)


def late_map(x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """Map a row-major matrix whose boxes may begin with zeros: (column, i, row) is `x[row + i, column]`, i >= 0."""
    (rows, columns), element = x.shape, element_of(x)
    pitch = row_pitch(x) * element.value
    return TensorMap(element, (columns, box[0], rows), (pitch, pitch), (box[1], box[0], 1), swizzle)


def scales_map(sf: Tensor, rows: int, parts: int = 1) -> TensorMap:
    """Map m-major scales by row, in boxes of `rows` rows and one k-block, which has `parts` scales for each row."""
    if sf.dim() == 2:
        return matrix_map(ElementType.FLOAT32, sf, (parts, rows), 0, transposed=True)
    return plane_map(ElementType.FLOAT32, sf.mT, (parts, rows), 0)


def output_map(d: Tensor, panel_columns: int) -> TensorMap:
    """Map D, one or several matrices, in boxes of a panel; columns of wide panels have two dimensions: span and column.

    `Span` in epilogue/panels.cuh explains spans.
    """
    element, of_d = element_of(d), matrix_map if d.dim() == 2 else plane_map
    panel_bytes = panel_columns * d.element_size()
    if panel_bytes <= MAX_SWIZZLE:
        return of_d(element, d, (WGMMA_ROWS, panel_columns), panel_bytes)
    span = gcd(d.shape[-1], MAX_SWIZZLE // d.element_size())
    span_bytes = span * d.element_size()
    swizzle = span_bytes if span_bytes > ADDRESS_ALIGNMENT else 0
    _, sizes, strides, box, _ = of_d(element, d, (WGMMA_ROWS, panel_columns), 0)
    return TensorMap(
        element, (span, sizes[0] // span, *sizes[1:]), (span_bytes, *strides), (span, box[0] // span, *box[1:]), swizzle
    )


def part_map(d: Tensor, part: Tensor, panel_columns: int) -> TensorMap:
    """Map one of the two parts of all heads of D, in boxes of a panel."""
    rows, heads, columns = part.shape
    strides = (part.stride(1) * 2, row_pitch(d) * 2)
    return TensorMap(
        ElementType.BFLOAT16, (columns, heads, rows), strides, (panel_columns, 1, WGMMA_ROWS), panel_columns * 2
    )


def row_pitch(x: Tensor) -> int:
    """Elements from one row to the next, of a matrix or of each of several matrices."""
    return _pitch(x.shape[-2], x.shape[-1], x.stride(-2))


def plane_stride(x: Tensor) -> int:
    """Elements from one matrix to the next; any multiple of 16 bytes if there is only one matrix."""
    return x.stride(0) if x.shape[0] > 1 else ADDRESS_ALIGNMENT


def _pitch(rows: int, columns: int, stride: int) -> int:
    """Return the pitch. A single row needs no pitch, but TMA accepts only multiples of 16 bytes."""
    return stride if rows > 1 else align(columns, ADDRESS_ALIGNMENT)

"""The description of a tensor that TMA needs: sizes, strides, the box of one copy, and its swizzle in shared memory.

A map is pure data. The driver encodes it for a GPU; the simulator interprets it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ..check.layout import ADDRESS_ALIGNMENT

MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Size of an encoded map, and the alignment of its address, which also holds inside a kernel's parameters."""
MAX_BOX = 256
MAX_SWIZZLE = 128


class ElementType(Enum):
    """Element types of tensor maps, with their size in bytes."""

    UINT8 = 1
    BFLOAT16 = 2
    FLOAT32 = 4


class TensorMap(NamedTuple):
    """A tensor in global memory as TMA sees it. The first dimension is the innermost one, which is contiguous."""

    element: ElementType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes; the innermost dimension has no stride."""
    box: tuple[int, ...]
    swizzle: int = 0
    """Span of the swizzle in bytes: 0 (none), 32, 64 or 128."""

    def why_illegal(self) -> str | None:
        """Return why the driver would refuse to encode this map; None if it would accept the map."""
        inner_bytes = self.box[0] * self.element.value
        if not 1 <= len(self.sizes) <= 5:
            return f"expected 1 to 5 dimensions, got {len(self.sizes)}"
        if len(self.strides) != len(self.sizes) - 1 or len(self.box) != len(self.sizes):
            return "expected matching dimensions"
        if not (min(self.sizes) >= 1 and max(self.sizes) <= 1 << 32):
            return f"expected sizes in 1..2^32, got {self.sizes}"
        for stride in self.strides:
            # A stride of 0 repeats the same elements, as for groups that share a weight.
            if not 0 <= stride < 1 << 40 or stride % ADDRESS_ALIGNMENT:
                return f"expected strides that are multiples of 16 bytes, got {self.strides}"
        if not (min(self.box) >= 1 and max(self.box) <= MAX_BOX):
            return f"expected box extents in 1..256, got {self.box}"
        if inner_bytes % ADDRESS_ALIGNMENT:
            return f"expected box rows of a multiple of 16 bytes, got {inner_bytes}"
        if self.swizzle not in (0, 32, 64, MAX_SWIZZLE):
            return f"expected a swizzle of 0, 32, 64 or 128 bytes, got {self.swizzle}"
        if self.swizzle and inner_bytes > self.swizzle:
            return f"expected box rows within the swizzle's {self.swizzle} bytes, got {inner_bytes}"
        return None

"""What TMA is told of a tensor: sizes, strides, the box that one copy moves, and how it is swizzled in shared memory.

Pure data, for the driver that encodes it for a GPU and for the simulator that interprets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ADDRESS_ALIGNMENT = 16
MAX_BOX = 256


class ElementType(Enum):
    """Element types of tensor maps, with their size in bytes."""

    UINT8 = 1
    BFLOAT16 = 2
    FLOAT32 = 4


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory as TMA sees it. Dimensions go from the innermost, contiguous one outwards."""

    element: ElementType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of all dimensions but the innermost."""
    box: tuple[int, ...]
    swizzle: int = 0
    """Span of the swizzle in bytes: 0 (none), 32, 64 or 128."""

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves."""
        size = self.element.value
        for extent in self.box:
            size *= extent
        return size

    def why_illegal(self) -> str | None:
        """Say why the driver would refuse to encode this; None if it would not."""
        inner_bytes = self.box[0] * self.element.value
        rules = [
            (1 <= len(self.sizes) <= 5, f"1 to 5 dimensions, got {len(self.sizes)}"),
            (len(self.strides) == len(self.sizes) - 1 and len(self.box) == len(self.sizes), "matching dimensions"),
            (all(1 <= size <= 1 << 32 for size in self.sizes), f"sizes in 1..2^32, got {self.sizes}"),
            (
                all(0 < stride < 1 << 40 and stride % ADDRESS_ALIGNMENT == 0 for stride in self.strides),
                f"strides that are multiples of 16 bytes, got {self.strides}",
            ),
            (all(1 <= extent <= MAX_BOX for extent in self.box), f"box extents in 1..256, got {self.box}"),
            (inner_bytes % ADDRESS_ALIGNMENT == 0, f"box rows of a multiple of 16 bytes, got {inner_bytes}"),
            (self.swizzle in (0, 32, 64, 128), f"a swizzle of 0, 32, 64 or 128 bytes, got {self.swizzle}"),
            (
                self.swizzle == 0 or inner_bytes <= self.swizzle,
                f"box rows within the swizzle's {self.swizzle} bytes, got {inner_bytes}",
            ),
        ]
        return next((f"expected {rule}" for holds, rule in rules if not holds), None)

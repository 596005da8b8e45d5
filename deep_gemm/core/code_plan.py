"""The plan of a configuration's machine code; `lab/gates.py` compares the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodePlan:
    """The parts that the machine code of one configuration must have. Counts are of instructions, not of executions."""

    roles: tuple[tuple[int, int | None], ...]
    """(threads, registers of each after setmaxnreg) of the roles that share a block; None where nothing is moved."""
    shared_bytes: int
    """Dynamic shared memory of a launch."""
    qgmma: int
    """FP8 tensor core instructions: those of one k-block, because the k loop is neither unrolled nor peeled."""
    tma_loads: int
    multicast_loads: int
    """The part of `tma_loads` that writes to every CTA of a cluster."""
    tma_stores: int = 0
    tma_reduces: int = 0
    """Stores that add to what lies in global memory."""
    bulk_copies: int = 0
    """Copies from shared memory to addresses, or the other way."""
    hgmma: int = 0
    """Tensor-core products of BF16."""
    ctas_per_sm: int = 1
    """Blocks that are to share an SM."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return sum(threads for threads, _ in self.roles)

"""Products of grouped rows that are activated and cast on their way out: gemm/epilogue/silu.cuh."""

from __future__ import annotations

from .kinds.epilogues import SILU, SILU_OF_HALVES
from .kinds.output import Output
from .kinds.works import ENDS

IN_TURN = Output(work=ENDS, epilogue=SILU)
APART = Output(work=ENDS, epilogue=SILU_OF_HALVES)

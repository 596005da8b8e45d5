"""The limits of one SM of sm_90, and the sizes of its tensor-core products."""

SHARED_BYTES_LIMIT = 232448
"""Shared memory that one block may use on sm_90."""
REGISTERS_PER_SM = 65536
WGMMA_ROWS = 64
WGMMA_K = 32
"""Depth of one WGMMA on FP8."""
WARPGROUP_THREADS = 128

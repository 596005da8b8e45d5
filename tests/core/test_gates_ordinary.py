"""What must hold of the machine code of all kernels of ordinary loads and stores."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import assert_loads_nothing_early
from thorough import configurations

from deep_gemm.casts import cast_rows, cast_tiles
from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.kernel import Config, Kernel
from deep_gemm.kernels import ORDINARY

CASES = [
    (kernel, config)
    for kernel in ORDINARY
    if kernel.name
    not in (cast_rows.KERNEL.name, cast_tiles.KERNEL.name)  # test_gates_casts.py compiles theirs, and asks this too
    for config in configurations(kernel.configs())
]


@pytest.mark.parametrize(("kernel", "config"), CASES, ids=[f"{kernel.name} {config.name}" for kernel, config in CASES])
def test_nothing_is_loaded_before_the_kernel_ahead_has_ended(kernel: Kernel[Any], config: Config) -> None:
    assert_loads_nothing_early(compile_cubin(kernel.source, kernel.headers(config), name=kernel.name))

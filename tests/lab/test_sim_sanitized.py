"""The simulator's own C++, and kernels that it compiles, under ASan and UBSan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.host_compiler, pytest.mark.release]

SCRIPT = Path(__file__).resolve().with_name("sanitized_sim.py")


def test_whole_kernels_pass_and_an_index_behind_an_array_is_found() -> None:
    asked = ("g++", "-print-file-name=libasan.so")
    library = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("g++ has no ASan here")
    # Python frees memory only at its end, and fibers leave their stacks in ways that ASan takes for use after return.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": options}
    command = (sys.executable, str(SCRIPT))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert "nothing found" in done.stdout, done.stderr[-3000:]
    assert done.returncode != 0
    assert "index 2 out of bounds" in done.stderr or "AddressSanitizer" in done.stderr, done.stderr[-3000:]

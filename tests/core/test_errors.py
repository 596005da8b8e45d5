"""Errors when the machine fails: one type for each remedy that a caller has, with the object that failed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import raising

import deep_gemm
from deep_gemm import errors
from deep_gemm.core.check import checks, memory
from deep_gemm.core.check.layout import empty_mn_major


def test_each_type_is_what_callers_already_catch() -> None:
    assert issubclass(errors.LaunchError, errors.DriverError)
    assert issubclass(errors.EarlierError, errors.DriverError)
    assert issubclass(errors.DriverError, RuntimeError)
    assert issubclass(errors.UnsupportedGpuError, NotImplementedError)
    assert not issubclass(errors.EarlierError, errors.LaunchError)


no_memory = raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


def test_memory_that_is_not_there_is_said_to_be_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    sf = torch.ones(5, 3)
    monkeypatch.setattr(torch, "empty", no_memory)
    monkeypatch.setattr(torch, "empty_strided", no_memory)
    told = r"scales laid out for TMA, \(5, 3\) of torch\.float32: CUDA out of"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        empty_mn_major(sf)
    told = r"no memory for slices, \(4,\) of torch\.uint8: CUDA out of memory"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        memory.empty("slices", (4,), torch.uint8, torch.device("cpu"))


def test_a_copy_without_memory_names_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    b = torch.ones(4, 16, 32).mT
    monkeypatch.setattr(torch.Tensor, "contiguous", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory for b along k, \(4, 32, 16\) of torch\.float32"):
        checks.k_major("b", b, copy_if_transposed=True)


AFTER_AN_ERROR = """
import torch, deep_gemm
from deep_gemm.errors import EarlierError

a = deep_gemm.per_token_cast_to_fp8(torch.randn(64, 256, device="cuda"), mn_major=True)
b = deep_gemm.per_block_cast_to_fp8(torch.randn(128, 256, device="cuda"))
d = torch.empty(64, 128, dtype=torch.bfloat16, device="cuda")
if {is_warm}:
    deep_gemm.fp8_gemm_nt(a, b, d)
    torch.cuda.synchronize()
torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")]  # not ours: an index that does not exist
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    deep_gemm.fp8_gemm_nt(a, b, d)
except EarlierError as error:
    print(error)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("is_warm", [True, False])
def test_an_error_of_another_kernel_is_not_called_ours(is_warm: bool) -> None:
    program = AFTER_AN_ERROR.format(is_warm=is_warm)
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=120, check=False)
    assert "an error of a kernel that ran before, of this package or another's: CUDA_ERROR_ASSERT" in done.stdout, (
        done.stdout + done.stderr
    )
    assert ("cuLaunchKernelEx of fp8_gemm" in done.stdout) == is_warm


@pytest.mark.gpu
def test_a_launch_that_the_gpu_refuses_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm.core import call
    from deep_gemm.core.jit import driver
    from deep_gemm.core.kernel import Kernel

    monkeypatch.setattr(call, "RECORDS", {})  # keep the broken launcher out of other tests' records
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(1000, 256, device="cuda"), mn_major=True)
    b = deep_gemm.per_block_cast_to_fp8(torch.randn(136, 256, device="cuda"))
    made: Any = driver.Launcher

    def of_too_many_threads(kernel: Any, size: int, threads: int, cluster: int, **more: Any) -> Any:
        return made(kernel, size, 4096, cluster, **more)

    monkeypatch.setattr(driver, "Launcher", of_too_many_threads)
    kernel_type: Any = Kernel
    monkeypatch.setattr(Kernel, "launcher", kernel_type.launcher.__wrapped__)
    told = r"cuLaunchKernelEx of fp8_gemm_dense .* 4096 threads .* failed: CUDA_"
    with pytest.raises(errors.LaunchError, match=told):
        deep_gemm.fp8_gemm_nt(a, b)
    monkeypatch.undo()
    assert deep_gemm.fp8_gemm_nt(a, b) is not None

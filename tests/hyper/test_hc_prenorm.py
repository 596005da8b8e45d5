"""Launches of the product of hyper-connections, without a driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu

import deep_gemm
from deep_gemm.core import call as calls
from deep_gemm.core.jit import driver
from deep_gemm.hyper import kernel, kernel_few
from deep_gemm.hyper.choose import kernel_of
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig


def call(m: int, splits: int | None = None, k: int = 7168) -> None:
    size = () if splits is None else (splits,)
    a, b = on_gpu(torch.zeros(m, k, dtype=torch.bfloat16)), torch.zeros(24, k)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, torch.empty(*size, m, 24), torch.empty(*size, m), splits)


def test_one_launch_that_fills_the_sms(gpu: FakeGpu) -> None:
    for m in (1, 13, 700):
        call(m)
    call(300, 16)
    many, few = [kernel.KERNEL.kernel_name], [kernel_few.KERNEL.kernel_name]
    assert [launch.kernel for launch in gpu.launches] == few * 2 + many * 2
    for launch in gpu.launches:
        assert launch.cluster == launch.config.cluster_size
        assert 48 <= launch.grid <= 132


def test_boxes_have_no_rows_that_are_never_there(gpu: FakeGpu) -> None:
    deep_gemm.set_batch_invariant(True)
    for m in (1, 13, 700):
        call(m)
    assert [launch.maps[0].box for launch in gpu.launches] == [(64, 1), (64, 13), (64, 64)]


def test_nothing_is_launched_for_no_rows_and_few_sms_are_enough(gpu: FakeGpu) -> None:
    call(0)
    assert gpu.launches == []
    deep_gemm.set_num_sms(6)
    for m in (500, 13):
        call(m)
        assert gpu.last.grid <= 6


def test_a_gpu_without_room_gets_smaller_clusters(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call(13)
    assert gpu.last.cluster > driver.PORTABLE_CLUSTER
    for each in (kernel.KERNEL, kernel_few.KERNEL):
        monkeypatch.setattr(each, "fits", lambda config, device: False)
    calls.RECORDS.clear()  # records assume that a GPU never changes
    call(13)
    assert gpu.last.cluster <= driver.PORTABLE_CLUSTER


@pytest.mark.parametrize("cluster", [8, 16])
def test_the_driver_is_told_that_a_large_cluster_is_meant(monkeypatch: pytest.MonkeyPatch, cluster: int) -> None:
    cu: Any = pytest.importorskip("cuda.bindings.driver")
    told: list[Any] = []

    def tell(function: int, attribute: Any, value: int) -> tuple[int]:
        told.append((attribute, value))
        return (0,)

    names = {name: getattr(cu, name) for name in dir(cu) if name.startswith("CU")}
    stand_in = SimpleNamespace(**names, cuFuncSetAttribute=tell, cuLaunchKernelEx=None)
    monkeypatch.setattr(driver, "_driver", lambda: stand_in)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    kernel: Any = SimpleNamespace(function=1, shared_bytes=1024)
    driver._attributes.cache_clear()
    driver.Launcher(kernel, 100, 384, cluster)
    driver._attributes.cache_clear()
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert told == ([(attribute, 1)] if cluster > driver.PORTABLE_CLUSTER else [])


def test_configurations_that_cannot_be() -> None:
    for config, reason in (
        (HcConfig(96, 24), "needs tiles of (64, 128) rows"),
        (HcConfig(64, 20), "needs tiles of (8, 16, 24, 32) columns"),
        (HcConfig(64, 24, 17), "needs clusters of 1 to 16 CTAs"),
        (HcConfig(64, 24, 1, 9), "needs 1 to 8 teams"),
        (HcConfig(64, 24, 1, 2, 1), "needs at least a stage for each team"),
        (HcFewConfig(20), "needs tiles of (8, 16, 24, 32) columns"),
        (HcFewConfig(24, 17), "needs clusters of 1 to 16 CTAs"),
        (HcFewConfig(24, 1, 17), "needs 1 to 16 warps"),
        (HcFewConfig(24, 1, 8, 9), "needs 1 to 8 steps ahead"),
    ):
        assert config.why_illegal() == reason
        with pytest.raises(ValueError, match="config: needs"):
            kernel_of(config).KERNEL.build(config)

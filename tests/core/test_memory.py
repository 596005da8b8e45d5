"""The package's caches have limits: none grows with the shapes, addresses or settings that a program uses."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu
from helpers import in_threads

import deep_gemm
from deep_gemm.core import call, settings
from deep_gemm.core.replay import put
from deep_gemm.core.settings import InForce

SIZES = {"m", "n", "k", "rows", "num_groups", "tokens", "shape", "strides"}
SIZES |= {"address", "tensor", "tensor_map", "stream", "generation"}
"""Parameters that take any number of values in a program. All others are configurations, types, flags and devices."""
TOOLS = ("lab.bench", "deep_gemm.cli", "lab.sim", "lab.soak", "deep_gemm.integrations", "deep_gemm.__main__")


def cached_functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(deep_gemm.__path__, "deep_gemm."):
        if not module.name.startswith(TOOLS):
            for name, value in vars(importlib.import_module(module.name)).items():
                if hasattr(value, "cache_parameters"):
                    found[f"{value.__module__}.{name}"] = value
    return found


def test_a_cache_whose_keys_are_sizes_or_addresses_is_bounded() -> None:
    functions = cached_functions()
    assert len(functions) > 30
    assert "deep_gemm.gemm.choose.fp8.menu_of" in functions
    unbounded = {name for name, function in functions.items() if function.cache_parameters()["maxsize"] is None}
    by_size = {name for name in unbounded if SIZES & set(inspect.signature(functions[name]).parameters)}
    assert by_size == set()


def test_settings_that_change_all_the_time_are_forgotten_but_never_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_CHOICES", 8)
    chosen = InForce()
    owners: dict[int, object] = {}
    for alignment in range(1, 50):
        for num_sms in (64, None):
            chosen.change(mk_alignment=alignment, num_sms=num_sms)
            assert owners.setdefault(chosen.generation, chosen.choices) == chosen.choices
            number = chosen.generation
            chosen.change(num_sms=8)
            chosen.change(num_sms=num_sms)
            assert chosen.generation == number or len(chosen._generations) <= 2
            assert owners.setdefault(chosen.generation, chosen.choices) == chosen.choices
            assert len(chosen._generations) <= 8


class SlowDict(dict[str, None]):
    """A dictionary that is slow to find its oldest entry."""

    def __iter__(self) -> Iterator[Any]:
        oldest = next(super().__iter__())
        time.sleep(0.05)
        yield oldest


def test_threads_that_make_room_at_a_time_do_not_meet() -> None:
    """Without a lock, both threads would find the same oldest entry, and the second thread could not remove it."""
    kept, failed = SlowDict(a=None, b=None), list[Exception]()

    def keep(name: str) -> None:
        try:
            put(kept, name, None, 2)
        except Exception as error:
            failed.append(error)

    in_threads(keep, "cd")
    assert not failed and kept.keys() == {"c", "d"}


def test_records_are_bounded_for_all_that_calls_may_say(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MOST_SAID", 3)
    x = on_gpu(torch.zeros(4, 256, dtype=torch.bfloat16))
    for least in (1.0, 2.0, 3.0, 4.0, 5.0, 1.0):
        deep_gemm.per_token_cast_to_fp8(x, min_amax=least)
    assert len(call.RECORDS) == 3 and len(gpu.launches) == 6


def used_mib() -> dict[str, float]:
    """Return the memory of this process on the host, and the memory in use on the GPU, both in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free, total = torch.cuda.mem_get_info()
    return {"host": pages * os.sysconf("SC_PAGE_SIZE") / 2**20, "gpu": (total - free) / 2**20}


@pytest.mark.gpu
def test_ten_thousand_calls_with_new_shapes_do_not_grow_memory() -> None:
    """The first half fills the caches of records and choices; the second half replaces their entries."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other workers use memory of the same GPU: run this test alone")
    x, w = torch.ones(64, 1024, device="cuda"), torch.ones(2048, 1024, device="cuda")
    (a, sfa), (b, sfb) = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_token_cast_to_fp8(w)

    def call(number: int) -> None:
        n, k, m = 8 * (1 + number % 250), 16 * (1 + number // 250), 1 + number % 61
        rows, columns = a.view(torch.uint8)[:m, :k].contiguous(), b.view(torch.uint8)[:n, :k].contiguous()
        blocks = -(-k // 128)
        fp8 = torch.float8_e4m3fn
        scales = sfa[:m, :blocks].contiguous(), sfb[: -(-n // 128), :blocks].contiguous()
        deep_gemm.fp8_gemm_nt((rows.view(fp8), scales[0]), (columns.view(fp8), scales[1]))

    for number in range(5000):
        call(number)
    torch.cuda.synchronize()
    before = used_mib()
    for number in range(5000, 10000):
        call(number)
    torch.cuda.synchronize()
    grown = {name: used - before[name] for name, used in used_mib().items()}
    assert max(grown.values()) < 64, grown

"""`bench fine_dense` and `fine_masked`, what needs no GPU of them."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_benchmark_rivals import contenders

import deep_gemm
from deep_gemm.core.check.recipes import BLOCKS_OF_32, BLOCKS_OF_64, MX, PER_64, PER_BLOCK, PER_ROW
from deep_gemm.core.gpu import GPUS
from lab.bench import fine, products
from lab.bench.cases import FINE_DENSE
from lab.bench.contenders import BF16

OF_OURS = [fine.USUAL, *fine.SAID]


def test_weights_are_those_of_ranks_that_share_a_model_and_most_of_them_judge() -> None:
    found = products.cases_of(FINE_DENSE)
    shapes = [case.shape for case in found]
    assert shapes == list(dict.fromkeys(shapes))
    weights = {shape[1:] for shape in shapes}
    assert weights >= {(4608, 5120), (5120, 2304), (576, 5120), (5120, 288), (3072, 3072), (384, 3072), (3072, 192)}
    assert {case.shape[1:] for case in found if not case.is_judged} == fine.FITTED
    assert {shape[0] for shape in shapes} == set(fine.MS)
    assert all(n % 8 == 0 and k % 16 == 0 for n, k in weights)


def test_contenders_are_named_by_their_scales() -> None:
    of_a_and_b = list(fine.SIDES.values())
    assert of_a_and_b == [
        (PER_ROW, PER_BLOCK),
        (PER_ROW, BLOCKS_OF_32),
        (MX, BLOCKS_OF_32),
        (PER_64, BLOCKS_OF_64),
        (MX, MX),
    ]
    for name, (_, of_b) in fine.SIDES.items():
        assert name.split("_")[2] == f"{of_b.rows}x{of_b.columns}"


def test_scales_of_fine_weights_are_powers_of_two_that_fold() -> None:
    by_scales = fine.weights_of(1, 256, 512, "cpu").by_scales
    for of, (_, scales) in by_scales.items():
        exponents = scales.log2()
        assert bool((exponents == exponents.round()).all()) == (of != PER_BLOCK)
        if of != PER_BLOCK:
            blocks = exponents.view(*exponents.shape[:-1], -1, 128 // of.columns)
            assert (blocks.amax(-1) - blocks.amin(-1)).max() <= 2


def test_a_rival_that_loads_its_kernels_from_a_hub_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", SimpleNamespace())
    assert products.checked(contenders(FINE_DENSE)[fine.TRITON], 1.0)[0] is None


def test_the_rival_is_given_the_same_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: Any, b: Any, sa: Any, sb: Any, block_size: list[int], dtype: torch.dtype) -> torch.Tensor:
        assert a.is_contiguous() and b.is_contiguous() and block_size == [32, 32]
        x, w = (deep_gemm.cast_back_from_fp8(*each, 32) for each in ((a, sa), (b, sb)))
        return (x @ w.t()).to(dtype)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    rival = SimpleNamespace(w8a8_block_fp8_matmul_triton=multiply)
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", rival)
    assert contenders(FINE_DENSE)[fine.TRITON].error() < products.MAX_ERROR_BF16


def test_what_a_run_needs_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.configurations(products.cases_of(FINE_DENSE)) == []  # of a GPU that is not there nothing is known
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(products, "get_num_sms", lambda: GPUS[0].num_sms)
    found = products.configurations(products.cases_of(FINE_DENSE))
    assert len(set(found)) == len(found)
    assert {(config.sfa, config.sfb) for config in found} == set(fine.SIDES.values())
    case = products.cases_of(FINE_DENSE)[0]
    assert all(products.config_of(case, name) in found for name in OF_OURS)
    assert products.config_of(case, BF16) is None
    assert products.configurations(products.cases_of("fine_masked")) == []

"""Where a GPU's product runs the reference, its caller is told: once, and with the place of the call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_gemm
from deep_gemm import dispatch
from deep_gemm.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8

pytestmark = pytest.mark.filterwarnings("always::deep_gemm.ReferenceFallbackWarning")


class SaysItIsOnAGpu(Tensor):
    """A CPU tensor that dispatch takes for a GPU's."""

    is_cuda = True


def output(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(SaysItIsOnAGpu)


def rows(*shape: int) -> Any:
    return per_token_cast_to_fp8(torch.ones(shape))


def blocks(*shape: int) -> Any:
    return per_block_cast_to_fp8(torch.ones(shape))


def slices(rows: int, turned: bool = False) -> Any:
    values, scales = deep_gemm.k_grouped_cast_to_fp8(torch.ones(rows, 32), [16, 16])
    return values, scales.t() if turned else scales


CALLS: dict[str, Callable[[], Any]] = {
    "k_grouped": lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
        slices(4), slices(8), output(2, 4, 8, dtype=torch.float32), ks=[16, 16]
    ),
    "k_grouped of 2025": lambda: deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
        slices(4, turned=True), slices(8, turned=True), output(2, 4, 8, dtype=torch.float32), [16, 16]
    ),
}


@pytest.fixture(autouse=True)
def _nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "KGroupedProblem", type(None))  # as if there were no kernel for these
    dispatch.forget_warnings()
    yield
    dispatch.forget_warnings()


@pytest.mark.parametrize("name", CALLS)
def test_the_warning_names_the_callers_file_and_line(name: str) -> None:
    with pytest.warns(deep_gemm.ReferenceFallbackWarning) as caught:
        CALLS[name]()
    (warning,) = caught
    lines, first = inspect.getsourcelines(CALLS[name])
    assert warning.filename == __file__
    assert first <= warning.lineno < first + len(lines)


def test_each_product_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            CALLS["k_grouped"]()
            CALLS["k_grouped of 2025"]()
    assert ["k_grouped" in str(warning.message) for warning in caught] == [True]


def test_a_warning_that_is_an_error_stays_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(deep_gemm.ReferenceFallbackWarning):
                CALLS["k_grouped"]()

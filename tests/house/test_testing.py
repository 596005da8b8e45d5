"""Comparing and timing: calc_diff, bytes, and functions that run without a GPU."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import testing
from deep_gemm.testing import (
    assert_bitwise_equal,
    bench,
    bench_kineto,
    calc_diff,
    count_bytes,
    get_arch_major,
    ignore_env,
)

timing = importlib.import_module("deep_gemm.testing.bench")  # the package also has a function of this name

VARIABLE = "DEEP_GEMM_TEST_OF_IGNORE_ENV"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# calc_diff


def test_diff_of_equal_tensors_is_0_and_of_opposite_ones_2() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    assert calc_diff(x, x).item() == 0
    assert calc_diff(x, -x).item() == 2
    assert calc_diff(x, torch.zeros(3)).item() == 1
    assert calc_diff(torch.zeros(3), torch.zeros(3)).item() == 0
    assert calc_diff(torch.empty(0), torch.empty(0)).item() == 0


def test_diff_of_what_is_no_tensor_or_elsewhere_is_refused() -> None:
    for x, y, name in ((None, torch.ones(3), "x"), (torch.ones(3), [1.0] * 3, "y")):
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got "):
            calc_diff(x, y)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^y: expected device cpu, where x is, got meta"):
        calc_diff(torch.ones(3), torch.ones(3, device="meta"))


def test_diff_is_about_half_the_square_of_the_relative_error() -> None:
    x = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    assert calc_diff(x, x * 1.001).item() == pytest.approx(0.5e-6, rel=2e-3)
    assert calc_diff(torch.tensor([3.0]), torch.tensor([4.0])).item() == pytest.approx(1 / 25)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(-100, 100)), min_size=1))
def test_diff_is_one_minus_twice_the_product_over_the_sum_of_squares(pairs: list[tuple[int, int]]) -> None:
    x, y = torch.tensor(pairs, dtype=torch.bfloat16).t()
    squares = sum(p * p + q * q for p, q in pairs)
    expected = 1 - 2 * sum(p * q for p, q in pairs) / squares if squares else 0
    assert calc_diff(x, y).item() == pytest.approx(expected, abs=1e-12)
    assert calc_diff(y, x).item() == calc_diff(x, y).item()
    assert calc_diff(x, y).dtype == torch.float64


def test_diff_does_not_hide_what_is_not_a_number() -> None:
    assert calc_diff(torch.tensor([1.0, torch.nan]), torch.ones(2)).isnan()
    assert not calc_diff(torch.tensor([1.0, torch.inf]), torch.ones(2)) < 1e-3


@pytest.mark.parametrize("shape", [(8,), (1, 8), (4, 1), (4, 8, 1), (1,), ()])
def test_diff_of_other_shapes_is_a_mistake(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^y: expected shape \(4, 8\), which x has, got {re.escape(str(shape))}$"):
        calc_diff(torch.zeros(4, 8), torch.zeros(shape))


def test_diff_of_large_low_precision_tensors_does_not_overflow() -> None:
    x = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert calc_diff(x, x).item() == pytest.approx(0, abs=1e-12)


# count_bytes


def test_bytes_of_tensors_tuples_and_lists_add_up() -> None:
    fp8, fp32 = torch.empty(3, 5, dtype=torch.float8_e4m3fn), torch.empty(2)
    assert count_bytes() == 0
    assert count_bytes(None) == 0
    assert count_bytes(fp8) == 15
    assert count_bytes(fp8, (fp8, fp32), [fp32, [None, (fp32,)]]) == 15 + 15 + 8 + 8 + 8
    assert count_bytes(torch.empty(0, 7)) == 0


# ignore_env


@pytest.mark.parametrize(("holds", "seen"), [(True, None), (False, "1")])
def test_a_variable_is_hidden_where_the_condition_holds_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, holds: bool, seen: str | None
) -> None:
    monkeypatch.setenv(VARIABLE, "1")

    @ignore_env(VARIABLE, lambda: holds)
    def function(x: int, *, y: int) -> tuple[int, str | None]:
        """Its docstring."""
        return x + y, os.environ.get(VARIABLE)

    assert function(1, y=2) == (3, seen)
    assert os.environ[VARIABLE] == "1"
    assert (function.__name__, function.__doc__) == ("function", "Its docstring.")


def test_a_hidden_variable_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")

    @ignore_env(VARIABLE, lambda: True)
    def function() -> None:
        raise KeyError(os.environ.get(VARIABLE))

    with pytest.raises(KeyError, match="None"):
        function()
    assert os.environ[VARIABLE] == "1"


def test_the_condition_is_asked_at_each_call_and_a_missing_variable_stays_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    asked: list[int] = []

    def holds() -> bool:
        asked.append(1)
        return True

    @ignore_env(VARIABLE, holds)
    def function() -> str | None:
        return os.environ.get(VARIABLE)

    assert asked == []
    assert [function(), function()] == [None, None]
    assert asked == [1, 1]
    assert VARIABLE not in os.environ


# Without a GPU


@pytest.mark.usefixtures("no_gpu")
def test_kernels_are_compiled_for_hopper_where_there_is_no_gpu() -> None:
    assert get_arch_major() == 9


def test_the_gpu_says_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert get_arch_major() == 10


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "measure"), [("bench", bench), ("bench_kineto", lambda fn: bench_kineto(fn, "fp8_gemm"))]
)
def test_timing_says_that_it_needs_a_gpu_and_runs_nothing(name: str, measure: Callable[[Any], Any]) -> None:
    calls: list[int] = []
    with pytest.raises(RuntimeError, match=f"^{name} measures GPU kernels and found no CUDA GPU"):
        measure(lambda: calls.append(1))
    assert calls == []


def test_timing_takes_the_arguments_that_callers_pass() -> None:
    arguments = {
        "num_tests": 4,
        "suppress_kineto_output": True,
        "trace_path": None,
        "flush_l2": False,
        "barrier": print,
    }
    inspect.signature(bench_kineto).bind(print, ("gemm_", "other"), **arguments, with_multiple_kernels=True)
    inspect.signature(bench).bind(print, num_warmups=1, num_tests=2, high_precision=True)


# The mean time of kernels, from events (name, number of launches, total microseconds)

GEMM, DECODE, OTHER = ("fp8_gemm_dense", 30, 600.0), ("void fp8_gemm_decode<1>()", 30, 300.0), ("fill", 60, 90.0)


def test_time_is_that_of_the_kernels_whose_names_contain_the_text() -> None:
    events = [OTHER, GEMM]
    assert timing._mean_time("fp8_gemm", events, 30, False) == pytest.approx(20e-6)
    assert timing._mean_time("gemm_", events, 30, False) == pytest.approx(20e-6)


def test_several_kernels_a_call_need_permission_and_add_up() -> None:
    events = [GEMM, DECODE, OTHER]
    with pytest.raises(ValueError, match="kernel_names: 'gemm_' matches more than one kernel a call") as caught:
        timing._mean_time("gemm_", events, 30, False)
    assert "fp8_gemm_dense x 30, void fp8_gemm_decode<1>() x 30" in str(caught.value)
    assert "fill" not in str(caught.value)
    assert timing._mean_time("gemm_", events, 30, True) == pytest.approx(30e-6)
    with pytest.raises(ValueError, match="fill x 60"):
        timing._mean_time("fill", events, 30, False)
    assert timing._mean_time("fill", events, 30, True) == pytest.approx(3e-6)


def test_calls_that_take_either_of_two_kernels_are_one_kernel_a_call() -> None:
    events = [("fp8_gemm_dense", 10, 100.0), ("fp8_gemm_decode", 20, 100.0)]
    assert timing._mean_time("fp8_gemm", events, 30, False) == pytest.approx(200e-6 / 30)


def test_a_text_that_no_name_contains_takes_no_time() -> None:
    assert timing._mean_time("bf16_gemm", [GEMM, OTHER], 30, False) == 0
    assert timing._mean_time("fp8_gemm", [], 30, False) == 0


def test_what_native_code_prints_is_silenced_and_then_heard_again(capfd: pytest.CaptureFixture[str]) -> None:
    with testing.suppress_stdout_stderr(), testing.empty_suppress():
        os.write(1, b"hidden")
        os.write(2, b"hidden")
    os.write(1, b"out")
    os.write(2, b"err")
    assert capfd.readouterr() == ("out", "err")


# Tests of other programs


def test_a_filtered_test_runs_only_while_its_condition_holds(capsys: pytest.CaptureFixture[str]) -> None:
    holds = [False, True]

    @testing.test_filter(holds.pop)
    def checks(x: int) -> int:
        """Its docstring."""
        return x + 1

    assert checks(1) == 2
    assert checks(1) is None
    assert capsys.readouterr().out == "checks: left out, its condition does not hold\n"
    assert (checks.__name__, checks.__doc__) == ("checks", "Its docstring.")


def test_bitwise_equal_is_of_bytes() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert_bitwise_equal(nan, nan.clone())
    assert_bitwise_equal(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert_bitwise_equal(torch.empty(0, 2), torch.empty(0, 2))
    for x, y, message in (
        (
            torch.tensor([[0.0, 1.0]]),
            torch.tensor([[-0.0, 1.0]]),
            r"1 of 2 elements differ, the first at \(0, 0\): 0.0 and -0",
        ),
        (torch.ones(2), torch.ones(2).bfloat16(), r"torch.float32 \(2,\) is not torch.bfloat16 \(2,\)"),
        (torch.ones(2), torch.ones(1, 2), r"torch.float32 \(2,\) is not torch.float32 \(1, 2\)"),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 5, 6]), r"2 of 3 elements differ, the first at \(1,\): 2 and 5"),
    ):
        with pytest.raises(AssertionError, match=f"^{message}"):
            assert_bitwise_equal(x, y)
        with pytest.raises(AssertionError, match=f"^row 3: {message}"):
            assert_bitwise_equal(x, y, label="row 3")

"""`bench training`, what needs no GPU of it: layers on the CPU, times that nobody measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lab.bench import linear, training
from lab.bench.contenders import BF16, OURS
from lab.bench.timing import KernelEvent, Spread

MIXTURE, MATRIX = (4, 2, 24, 64, 32), (24, 32, 64)
LINE = [KernelEvent("product", 0, 1500), KernelEvent("sum", 1510, 4)]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made and not timed."""

    def called(call: Any, repeats: int = 10) -> Spread:
        call()
        return Spread(2000.0, 1000.0, 3000.0)

    monkeypatch.setattr(training, "warm", called)
    monkeypatch.setattr(training, "peak_bytes", lambda layer: 1 << 31)
    monkeypatch.setattr(training, "profiled", lambda call: LINE)
    monkeypatch.setattr(training, "SETTLE_SECONDS", 0)


@pytest.mark.parametrize("shape", [MIXTURE, MATRIX])
def test_rows_of_one_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = training.layers_of(shape, "cpu")
    rows = training.rows_of(shape, layers, ())
    assert [(row.contender, row.mode) for row in rows] == [
        (name, mode) for name in (OURS, training.KEPT, BF16) for mode in (training.STEP, training.FORWARD)
    ]
    step, forward, *_ = rows
    assert (step.failed, step.kind, step.peak_bytes) == (None, training.kind_of(shape), 1 << 31)
    assert step.operations == 3 * (forward.operations or 0) > 0
    assert step.parts == {"1 product": 1500.0, "2 wait": 10.0, "3 sum": 4.0}
    (alone, _) = training.rows_of(shape, layers, (BF16,))
    assert (alone.contender, alone.error) == (BF16, None)
    (wrong, _, *_) = training.rows_of(shape, {**layers, OURS: layers[OURS]._replace(grad=-layers[OURS].grad)}, ())
    assert wrong.failed is not None and wrong.failed.startswith("wrong: relative error 2")


def test_an_error_is_that_of_the_whole_whatever_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    monkeypatch.setattr(linear, "MOST_AT_ONCE", 8)
    of_whole = float(torch.linalg.norm(got - expected) / torch.linalg.norm(expected))
    assert linear.relative_error(got, expected) == pytest.approx(of_whole)
    monkeypatch.setattr(training, "MOST_COMPARED", 56)
    assert torch.equal(training.some_of(got), got[::3])
    assert torch.equal(training.some_of(got[:2]), got[:2])
    expected[3, 3] = torch.nan
    assert not linear.relative_error(got, expected) <= training.MOST_ERROR


def test_a_gradient_of_nan_is_an_error() -> None:
    layers = training.layers_of(MATRIX, "cpu")
    layers[OURS].leaves[1].register_hook(lambda grad: torch.full_like(grad, torch.nan))  # type: ignore[no-untyped-call]
    assert not training.error_of(layers) <= training.MOST_ERROR


def test_work_is_that_of_three_products_of_each_weight() -> None:
    assert training.work_of(MATRIX) == (2 * 24 * 32 * 64, 2 * (3 * 32 * 64 + 2 * 24 * 96))
    assert training.work_of(MIXTURE) == (2 * 48 * 3 * 64 * 32, 2 * (3 * 4 * 3 * 64 * 32 + 4 * 24 * 64))


def test_what_runs_beside_another_kernel_counts_once_and_2_us_are_no_wait() -> None:
    events = [KernelEvent("a", 0, 10), KernelEvent("b", 5, 10), KernelEvent("c", 6, 2), KernelEvent("d", 17, 1)]
    assert training.parts_of(events) == {
        "1 a": 10,
        "2 b": 5,
        "3 c": 0,
        "4 d": 1,
    }  # 2 us: launches that follow each other


def test_few_shapes_are_of_both_kinds() -> None:
    assert {training.kind_of(shape) for shape in training.shapes_of(quick=True)} == {training.EXPERTS, training.LINEAR}
    assert set(training.shapes_of(quick=True)) < set(training.shapes_of())

"""Records by shadows: conditions that a call notes while it is recorded, numbers it fixes, calls without a record."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from random import Random
from typing import Any

import pytest
import torch
from test_replay import CPU, PARAMS, Driver, numbers_of
from torch import Tensor

from deep_gemm.core import replay
from deep_gemm.core.record import From, Record
from deep_gemm.core.shadow import Recording, Shadow, UnfitError, least, most

KERNEL: Any = Driver().kernel(1)


def rows(m: int, n: int = 8) -> Tensor:
    return torch.zeros(m, n)


def recording(x: Tensor) -> tuple[Recording, Shadow]:
    """Begin to record a call of a matrix with any number of rows; return the recording and the matrix's shadow."""
    r = Recording(CPU)
    return r, r.shadow(x, (0,))


def serves(record: Record, tensors: list[Tensor], stated: tuple[int, ...] = ()) -> bool:
    """Tell whether a record serves these tensors."""
    return numbers_of(record, tensors, stated) is not None and replay.are_apart(tensors, record.outputs)


def launch(r: Recording, *places: Any) -> None:
    """Note a launch whose parameters are these tensors."""
    values = dict.fromkeys((field.name for field in PARAMS.fields), 0) | {"map_0": b"", "map_1": b"", "pair": ()}
    r.launch(KERNEL, None, values | {f"at_{i}": x for i, x in enumerate(places)}, 1, -1, False)


@pytest.mark.parametrize(
    ("ask", "others"),
    [
        (lambda m: m + 1, {1: True, 7: True}),
        (int, {6: False}),
        (lambda m: f"{m}", {6: True}),
        (lambda m: {5: 1}[m], {6: False}),
        (lambda m: range(8)[m], {6: False}),
        (lambda m: m / 2, {6: False}),
        (lambda m: 2.5 * m, {6: False}),
        (lambda m: m - 0.5, {6: False}),
        (lambda m: 0.5 - m, {6: False}),
        (lambda m: m < 5.5, {4: False, 6: False}),
        (lambda m: max(m, 5.5), {6: False}),
        (lambda m: m < 8, {7: True, 8: False}),
        (lambda m: m > 3, {4: True, 3: False}),
        (lambda m: m <= 5, {1: True, 6: False}),
        (lambda m: m >= 5, {9: True, 4: False}),
        (lambda m: m == 7, {9: True, 7: False}),
        (lambda m: m != 5, {6: False}),
        (lambda m: m == "5", {6: True}),
        (lambda m: m == 5.0, {6: False}),
        (bool, {9: True, 0: False}),
        (lambda m: bool(m // 4), {7: True, 3: False}),
        (lambda m: 2 * m - 10 == 0, {6: False}),
        (lambda m: 20 - m > -(-m // 4) * 4, {1: True, 8: True, 9: False}),
        (lambda m: m % 2 == 1, {7: True, 6: False}),
        (lambda m: 20 // m == 4, {4: False, 0: False}),
        (lambda m: m % (m // 5) == 0, {7: True, 4: False}),
        (lambda m: least(m, 4) == 4, {4: True, 9: True, 3: False}),
        (lambda m: most(m, 4) == 5, {6: False}),
        (lambda m: -m < -4, {9: True, 4: False}),
        (lambda m: 5, {1: True}),
    ],
)
def test_a_comparison_is_a_condition_and_use_as_an_integer_fixes_a_number(
    ask: Callable[[Any], Any], others: dict[int, bool]
) -> None:
    r, x = recording(rows(5))
    answer = ask(x.shape[0])
    assert ask(5) == (answer if type(answer) is not type(x.shape[0]) else answer.value)
    record = r.record([])
    assert serves(record, [rows(5)])
    assert {m: serves(record, [rows(m)]) for m in others} == others


def test_numbers_are_noted_once_and_those_of_constants_not_at_all() -> None:
    r, x = recording(rows(5))
    m = x.shape[0]
    before = len(r.steps)
    assert (m + 8).place == (m + 8).place and len(r.steps) == before + 2
    assert least(3, 4) == 3 and most(3, 4) == 4 and x.shape[1] * 3 == 24 and len(r.steps) == before + 2
    with pytest.raises(ValueError, match="another record"):
        m + recording(rows(5))[1].shape[0]


def test_stated_integers_are_numbers() -> None:
    r, _ = recording(rows(5))
    first, second = r.stated_numbers((3, 4))
    assert first + second < 10
    record = r.record([])
    served = [serves(record, [rows(m)], of) for m, of in ((5, (3, 4)), (2, (1, 8)), (5, (6, 4)))]
    assert served == [True, True, False]
    wrong: Any
    for wrong in ([1.0], [True], [torch.tensor(3)], [1] * 257):
        with pytest.raises(UnfitError):
            Recording(CPU).stated_numbers(wrong)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.add(1),
        torch.empty_like,
        lambda x: torch.cat([x, x]),
        lambda x: x.sum(),
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x[0, 0] == 1.0,
        lambda x: 1.0 in x,
        lambda x: x[:1] or 1,
        lambda x: x[x],
        lambda x: x.to(torch.float16),
        lambda x: x.view(torch.uint8),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(-1),
        lambda x: x[::2],
        lambda x: x[-1:],
        lambda x: x.expand((5, 16)),
        lambda x: x.untyped_storage(),
        lambda x: x.fill_(0),
    ],
)
def test_what_wants_elements_or_torchs_operators_has_no_record(ask: Callable[[Any], Any]) -> None:
    _, x = recording(rows(5))
    with pytest.raises(UnfitError):
        ask(x)


VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x[1:3],
    lambda x: x[2],
    lambda x: x[..., 1:4],
    lambda x: x[:, 3],
    lambda x: x[None, :, None],
    lambda x: x[3:100],
    lambda x: x.t(),
    lambda x: x.mT[2:],
    lambda x: x.transpose(0, 1)[1],
    lambda x: x.permute(1, 0),
    lambda x: x.view(-1),
    lambda x: x.view(-1)[9:],
    lambda x: x.reshape(x.shape[0], 2, 4)[:, 1],
    lambda x: x.reshape(x.shape[0], 2, -1)[2:, :, 1:],
    lambda x: x.view(torch.int32)[1:],
    lambda x: x.view(torch.int64)[1:, 1:],
    lambda x: x[1:].as_strided((2, 2), (1, 3)),
    lambda x: x.expand((4, *x.shape)),
    lambda x: [*x][3],
]


@pytest.mark.parametrize("view", VIEWS)
def test_views_lie_where_torchs_do(view: Callable[[Any], Any]) -> None:
    """Check the addresses of views, for the recorded tensor and for a tensor with other rows."""
    r, x = recording(rows(5))
    of = view(x)
    launch(r, of)
    (behind,) = [word.address.behind for word in r.launches[0].words if word.address]
    facts = [(*map(r.index, of.shape), *map(r.index, of.strides), behind)]
    span = r.index(of.span())
    record = r.record([])
    served = [each for each in (rows(5), rows(9)) if serves(record, [each])]
    for given in served:
        values, right = numbers_of(record, [given]), view(given)
        assert values is not None
        got = [values[i] for i in facts[0]]
        assert got == [*right.shape, *right.stride(), right.data_ptr() - given.data_ptr()]
        last = sum((size - 1) * stride for size, stride in zip(right.shape, right.stride(), strict=True))
        assert values[span] == (last + 1) * right.element_size()
    assert of.dtype == right.dtype and bool(of.is_contiguous()) == right.is_contiguous()
    assert (of.dim(), len(of), of.numel(), of.device) == (right.dim(), len(view(rows(5))), view(rows(5)).numel(), CPU)


def scratch_of(r: Recording, results: list[Shadow], given: Tensor) -> tuple[int, list[list[int]]]:
    """Return the bytes of scratch memory for a call of this matrix, and the offsets of each launch's tensors there."""
    record = r.record(results)
    values = numbers_of(record, [given])
    assert values is not None
    places = [
        [values[word.address.behind] for word in each.words if word.address and word.address.base is From.SCRATCH]
        for each in record.launches
    ]
    return values[record.scratch], places


@pytest.mark.parametrize("m", [5, 900])
def test_rooms_share_scratch_if_their_launches_are_apart(m: int) -> None:
    r, x = recording(rows(5))
    a, b, c, d, _ = (r.room((x.shape[0], n), torch.float32) for n in (8, 16, 32, 8, 1000))
    launch(r, x, a)
    launch(r, a, b)
    launch(r, b, c)
    launch(r, c, d)
    size, ((at_a,), (a_again, at_b), (b_again, at_c), (c_again, at_d)) = scratch_of(r, [], rows(m))
    assert (at_a, at_b, at_c) == (a_again, b_again, c_again)
    bytes_of = [(m * n * 4 + 255) // 256 * 256 for n in (8, 16, 32, 8)]
    at = at_a, at_b, at_c, at_d
    assert all(first % 256 == 0 for first in at)
    ends = [first + of for first, of in zip(at, bytes_of, strict=True)]
    for i in range(3):  # tensors of one launch must not overlap
        assert ends[i] <= at[i + 1] or ends[i + 1] <= at[i]
    assert max(ends) <= size < sum(bytes_of)


def test_random_rooms_never_meet_while_both_are_used() -> None:
    random = Random(0)
    for _ in range(100):
        r, x = recording(rows(5))
        rooms = [r.room((x.shape[0], random.choice((8, 64, 512))), torch.float32) for _ in range(8)]
        used = [random.sample(range(8), random.randrange(4)) for _ in range(6)]
        for each in used:
            launch(r, *(rooms[i] for i in each))
        for m in (5, 100):
            size, places = scratch_of(r, [], rows(m))
            at = dict(zip(chain(*used), chain(*places), strict=True))
            launches = {i: [n for n, each in enumerate(used) if i in each] for i in at}
            end = {i: place + m * rooms[i].shape[1] * 4 for i, place in at.items()}
            assert max(end.values()) <= size
            for i, j in combinations(at, 2):
                are_apart = launches[i][-1] < launches[j][0] or launches[j][-1] < launches[i][0]
                assert are_apart or end[i] <= at[j] or end[j] <= at[i]


def test_results_lie_apart_from_scratch_and_views_of_them_are_given() -> None:
    r, x = recording(rows(5))
    a, b = (r.room((x.shape[0], 8), torch.float32) for _ in range(2))
    launch(r, a, b)
    record = r.record([a.mT])
    (made,) = replay.replay(record, [rows(5)], r.values, CPU)
    assert (made.shape, made.stride(), made.dtype) == ((8, 5), (1, 8), torch.float32)
    addresses = [word.address[:2] for word in record.launches[0].words if word.address]
    assert addresses == [(From.RESULT, 0), (From.SCRATCH, 0)]


@pytest.mark.parametrize(
    "results", [lambda x, a: [x], lambda x, a: [a, a], lambda x, a: [a[1:]], lambda x, a: [a, a.t()]]
)
def test_results_are_memory_of_their_own(results: Callable[..., Any]) -> None:
    r, x = recording(rows(5))
    a = r.room(x.shape, torch.float32)
    with pytest.raises(UnfitError, match="no memory of its own"):
        r.record(results(x, a))


def test_a_room_without_elements_serves_no_call_that_has_some() -> None:
    """A record of a room with elements serves no call without elements, or vice versa: the room's size would differ."""
    for m, others in ((0, (1, 9)), (5, (0,))):
        r, x = recording(rows(m))
        r.room(x.shape, torch.float32)
        assert not any(serves(r.record([]), [rows(other)]) for other in others)


def test_an_output_lies_apart_from_other_tensors() -> None:
    memory = torch.zeros(4096)
    r = Recording(CPU)
    for x in (memory[:80], memory[80:160]):
        r.shadow(x.view(10, 8), (0,))
    r.outputs = 1
    record = r.record([])
    for rows_of, first, fits in ((10, 80, True), (10, 72, False), (11, 80, False), (9, 72, True), (1, 0, False)):
        x, out = memory[: rows_of * 8].view(-1, 8), memory[first : first + 80].view(10, 8)
        assert serves(record, [x, out]) is fits


def test_no_record_is_kept_for_tensors_that_none_serves() -> None:
    """A tensor that requires a gradient must be sent to the checks, which report it."""
    assert replay.are_apart([rows(5), rows(5)], 1) and not replay.are_apart([rows(5).requires_grad_(), rows(5)], 1)


def test_tensors_of_elsewhere_are_no_part_of_a_launch() -> None:
    r, _ = recording(rows(5))
    with pytest.raises(UnfitError, match="does not know"):
        launch(r, rows(5))

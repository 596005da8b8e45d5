"""Benches of kinds that are timed cold, what needs no GPU of them: operands on the CPU, times that nobody measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from test_benchmark import NoFlush

import deep_gemm
from lab.bench import attention, bf16, casts, einsum, hc, kinds, logits_paged, logits_prefill, skip_head_mid, yardsticks
from lab.bench.bench import Asked
from lab.bench.contenders import BF16, OURS
from lab.bench.kinds import Kind, Kinds, Work
from lab.bench.layers import ALONE, COPY, EAGER
from lab.bench.report import Row
from lab.bench.timing import L2Flush, Spread

Make = Callable[..., Work]
MODULES: tuple[Any, ...] = (attention, bf16, hc, einsum, casts)
SMALL: Mapping[str, tuple[ModuleType, Make, tuple[int, ...], tuple[str, ...]]] = {
    "mqa_logits": (logits_prefill, logits_prefill.mqa_logits, (5, 40, 16, 32), (OURS, EAGER)),
    "clean": (logits_prefill, partial(logits_prefill.mqa_logits, clean=True), (5, 40, 16, 32), (OURS, EAGER)),
    "paged_mqa_logits": (logits_paged, logits_paged.paged_mqa_logits, (3, 2, 16, 32, 100), (OURS,)),
    "hc_prenorm": (hc, hc.work_of, (5, 24, 256, 0), (OURS, EAGER, COPY)),
    "hc_prenorm, splits": (hc, hc.work_of, (5, 24, 256, 4), (OURS, EAGER, COPY)),
    "fp8_einsum": (einsum, einsum.work_of, (5, 3, 272, 136), (OURS, einsum.ROW_MAJOR, BF16)),
    "skip_head_mid": (skip_head_mid, skip_head_mid.work_of, (3, 512, 256), (OURS, ALONE)),
    "bf16 dense": (bf16, bf16.dense, (70, 24, 16), (OURS, EAGER)),
    "bf16 wgrad": (bf16, bf16.wgrad, (16, 24, 40), (OURS, EAGER)),
    "bf16 contiguous": (bf16, bf16.contiguous, (2, 70, 24, 16), (OURS, EAGER)),
    "bf16 uneven": (bf16, partial(bf16.contiguous, uneven=True), (2, 100, 24, 16), (OURS, EAGER)),
    "bf16 masked": (bf16, bf16.masked, (3, 10, 24, 16), (OURS,)),
    "bf16 along k": (bf16, bf16.along_k, (2, 16, 24, 64), (OURS,)),
    "bf16 along k, counted": (bf16, partial(bf16.along_k, counted=True), (2, 16, 24, 40), (OURS,)),
    **{
        expr: (bf16, bf16.expression(expr), (6, 8, 16, 64), (OURS, EAGER))
        for expr in ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr")
    },
}
"""Works: the module of the functions that each calls, the function that makes it, its shape, its contenders."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls are not timed; give how often each would have been."""
    repeats: list[int] = []

    def cold(calls: Mapping[str, Any], flush: object, times: int) -> dict[str, tuple[Spread, tuple[str, ...]]]:
        repeats.append(times)
        return {name: (Spread(2.0, 1.0, 3.0), (name,)) for name in calls}

    monkeypatch.setattr(kinds, "cold", cold)
    monkeypatch.setattr(kinds, "L2Flush", NoFlush)
    return repeats


def rows_of(work: Work, *only: str) -> list[Row]:
    flush: Any = NoFlush()
    return Kinds({}).rows_of("kind", (1, 2), work, flush, only)


@pytest.mark.parametrize("name", SMALL)
def test_each_work_is_right_and_a_wrong_one_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, make, shape, contenders = SMALL[name]
    torch.manual_seed(1)  # numbers of which no product is by chance what stands in D
    work = make(shape, device="cpu")
    assert work.bytes > 0 and (work.operations or 0) > 0 and (work.floor_us or 0) > 0
    rows = rows_of(work)
    assert {row.contender for row in rows} == set(contenders)
    assert all(row.us == 2.0 and row.failed is None for row in rows if row.contender != EAGER)  # a CPU has not all
    assert [row.contender for row in rows_of(work, OURS)] == [OURS]
    for each in vars(module).copy():
        if "gemm" in each or each in ("einsum", "fp8_einsum", "compute"):
            monkeypatch.setattr(module, each, lambda *_, **__: None)
    if hasattr(module, "api"):
        monkeypatch.setattr(module.api, "compute", lambda _: None)
    (wrong,) = rows_of(work, OURS)
    assert wrong.failed is not None and wrong.failed.startswith("wrong: ")


def test_torch_computes_what_ours_does() -> None:
    p = logits_prefill.causal_problem((5, 40, 16, 32), clean=False, device="cpu")
    assert logits_prefill.difference(p) < 1e-9
    in_range = torch.arange(40) < p.ends[:, None]
    torch.testing.assert_close(p.logits[in_range], logits_prefill.in_torch(p)[in_range], rtol=0.05, atol=0.5)
    q = hc.problem((5, 24, 256, 4), device="cpu")
    assert hc.difference(q) == 0
    d, sqr_sum = hc.in_torch(q)
    torch.testing.assert_close(q.d, d, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(q.sqr_sum, sqr_sum)


def test_what_lies_between_parts_of_heads_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def touches(a: Any, b: Any, d: torch.Tensor, splits: Any) -> None:
        deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
        d[1, 128] = 0

    work = skip_head_mid.work_of((3, 512, 256), "cpu")
    monkeypatch.setattr(skip_head_mid, "fp8_gemm_nt_skip_head_mid", touches)
    assert work.checks[OURS]() == (None, "wrong: 1 elements between parts were written")


def test_contexts_have_the_mean_that_is_asked_for() -> None:
    assert logits_paged.metadata((3, 2, 1000), device="cpu").checks[OURS]() == (0, None)
    contexts = logits_paged.contexts_of((16, 2, 64, 128, 8192), device="cpu")
    assert abs(float(contexts[:, 1].float().mean()) - 8192) < 1
    assert 0.69 * 8192 < int(contexts.min()) < int(contexts.max()) < 1.31 * 8192
    assert logits_paged.contexts_of((1, 1, 64, 128, 8192), device="cpu").tolist() in ([[8347]], [[8346]])


def test_a_contender_that_fails_leaves_its_reason_and_the_others() -> None:
    def broken() -> None:
        raise RuntimeError("launch failed\nand more")

    rows = rows_of(Work(10, 20, {OURS: broken, EAGER: lambda: None}, kinds.of_ours(lambda: 0.0, 1.0)))
    assert [(row.contender, row.failed, row.us) for row in rows] == [
        (EAGER, None, 2.0),
        (OURS, "RuntimeError: launch failed", None),
    ]
    (row,) = rows_of(Work(None, 20, {OURS: lambda: None}, kinds.of_ours(lambda: torch.nan, 1.0)))
    assert (row.failed, row.floor_us, row.bytes) == ("wrong: difference nan, expected at most 1.0", None, 20)
    assert rows_of(Work(10, 20, {OURS: broken}, {}), EAGER) == []


@pytest.mark.parametrize(("operations", "times"), [(10**9, 15), (10**13, 8), (10**15, 3)])
def test_long_calls_are_repeated_less(operations: int, times: int, clock: list[int]) -> None:
    flush: Any = NoFlush()
    work = Work(operations, 20, {OURS: lambda: None}, {})
    Kinds({}, repeats=15, seconds=0.05).rows_of("kind", (1,), work, flush)
    assert clock == [times]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_few_shapes_are_some_of_all_and_those_that_deepgemm_was_timed_at_are_there(module: Any) -> None:
    listed = module.KINDS.shapes_of()
    assert 0 < len(module.KINDS.shapes_of(quick=True)) < len(listed) == len(set(listed))
    assert set(module.KINDS.shapes_of(quick=True)) < set(listed)
    timed = {(row["kind"], tuple(row["shape"])) for row in yardsticks._family()["rows"]}
    assert {each for each in timed if each[0] in module.KINDS.by_name} <= set(listed)


@pytest.mark.parametrize(
    ("module", "shape", "steps"),
    [
        (attention, (2048, 32768, 64, 128), ["mqa_logits", "mqa_logits_clean"]),
        (attention, (5, 40, 16, 32), ["mqa_logits"]),
        (attention, (3, 2, 16, 32, 100), ["paged_mqa_logits"]),
        (attention, (3, 2, 100), ["paged_metadata"]),
        (bf16, (7, 264, 256), ["bf16_dense"]),
        (bf16, (32, 256, 7168, 2048), ["bf16_contiguous", "bf16_contiguous_uneven"]),
        (einsum, (7, 3, 256, 128), ["fp8_einsum"]),
        (einsum, (128, 8192, 256), ["skip_head_mid"]),
        (hc, (137, 24, 7168, 16), ["hc_prenorm"]),
    ],
)
def test_shapes_are_of_kinds_that_have_them_else_of_the_first_with_as_many_numbers(
    module: Any, shape: tuple[int, ...], steps: list[str]
) -> None:
    assert module.KINDS.chosen([shape]) == [(name, shape) for name in steps]
    asked = Asked(shapes=",".join(map(str, shape)))
    assert module.BENCH.plan(asked)[0] == len(steps)


def test_a_number_of_splits_may_be_left_out_and_casts_are_those_that_are_listed() -> None:
    assert hc.KINDS.chosen([(13, 24, 7168)]) == [("hc_prenorm", (13, 24, 7168, 0))]
    with pytest.raises(ValueError, match="shapes: expected three or four positive integers like 32,8,4096,1024"):
        einsum.BENCH.plan(Asked(shapes="7,3"))
    with pytest.raises(ValueError, match="shapes: expected some that are measured, got '1,2'"):
        casts.KINDS.chosen([(1, 2)])


def test_a_run_has_rows_of_all_contenders_and_of_both_yardsticks(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Spread(10.0, 9.0, 11.0)
    sticks = yardsticks.rows_of(dict.fromkeys((yardsticks.COPY, yardsticks.PRODUCT), spread))
    monkeypatch.setattr(yardsticks, "measure", lambda _: sticks)
    rows: list[Row] = []
    told: list[str] = []
    of = Kinds({"fp8_einsum": Kind((), (), partial(einsum.work_of, device="cpu"))})
    of.measure([("fp8_einsum", (5, 3, 272, 136))], only=(OURS, BF16), add=rows.extend, announce=told.append)
    assert [(row.kind, row.contender) for row in rows[2:]] == [("fp8_einsum", OURS), ("fp8_einsum", BF16)]
    assert (rows[:2], told) == (sticks, ["fp8_einsum 5x3x272x136"])


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "shape"), [(einsum, (4, 3, 512, 256)), (einsum, (128, 8192, 512))])
def test_a_run_on_a_gpu(module: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kind, _ in module.KINDS.chosen([shape]):
        work = module.KINDS.by_name[kind].make(shape)
        for row in module.KINDS.rows_of(kind, shape, work, L2Flush()):
            assert row.failed is None and row.us is not None and row.us > 0

"""Bad arguments of paged logits are refused by name, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm.core.check import checks
from deep_gemm.indexer.paged_check import paged_logits_problem
from lab.sim.fp8_paged_mqa_logits import problem

P = problem([[70, 3], [0, 9]], 2, 16, 32)
GOOD: dict[str, Any] = {
    "q": P.q,
    "kv_cache": P.cache,
    "weights": P.weights,
    "context_lens": P.contexts,
    "block_table": P.table,
    "schedule_meta": P.schedule,
    "max_context_len": 70,
}


def strided(stride: int) -> torch.Tensor:
    return torch.zeros(6 * stride, dtype=torch.uint8).as_strided((5, 64, 1, 36), (stride, 36, 36, 1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clean_logits": True}, ValueError, "clean_logits: expected False"),
        ({"indices": P.contexts}, NotImplementedError, "indices: expected None"),
        ({"kv_cache": strided(64 * 36 + 8)}, ValueError, "multiple of 16 bytes, and at least 2304, got 2312"),
        ({"kv_cache": strided(64 * 36 - 16)}, ValueError, "at least 2304, got 2288"),
        ({"kv_cache": P.cache.view(torch.int8)}, ValueError, "kv_cache: expected dtype torch.uint8"),
        ({"kv_cache": torch.zeros(5, 16, 1, 36, dtype=torch.uint8)}, NotImplementedError, "pages of 32 or 64"),
        ({"q": P.q[:, :1].expand(2, 5, 16, 32)}, NotImplementedError, "1 to 4 tokens"),
        ({"q": P.q[..., :12, :]}, NotImplementedError, "multiple of 8"),
        ({"q": P.q.view(torch.int8)}, NotImplementedError, "FP4"),
        ({"weights": P.weights[:3]}, ValueError, "weights: expected shape"),
        ({"context_lens": P.contexts.long()}, ValueError, "context_lens: expected dtype"),
        ({"context_lens": P.contexts[:1]}, ValueError, "context_lens: expected shape"),
        ({"block_table": P.table[:1]}, ValueError, "block_table: expected shape"),
        ({"schedule_meta": P.schedule[:1]}, ValueError, "schedule_meta: expected a contiguous"),
        ({"max_context_len": -1}, ValueError, "max_context_len"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        deep_gemm.fp8_paged_mqa_logits(**{**GOOD, **changes})


def test_q_in_a_pair() -> None:
    rest = {name: x for name, x in GOOD.items() if name != "q"}
    logits = deep_gemm.fp8_fp4_paged_mqa_logits((P.q, None), **rest, logits_dtype=torch.bfloat16)
    assert (logits.dtype, logits.shape, logits.stride()) == (torch.bfloat16, (4, 70), (512, 1))
    with pytest.raises(NotImplementedError, match="FP4"):
        deep_gemm.fp8_fp4_paged_mqa_logits((P.q, P.weights), **rest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits_dtype"):
        deep_gemm.fp8_fp4_paged_mqa_logits((P.q, None), **rest, logits_dtype=torch.float16)


@pytest.mark.parametrize(
    "options",
    [(), (False,), (None,), (False, None), (None, False), (False, torch.float32), (torch.float32, None)],
    ids=str,
)
def test_options_by_position_come_in_the_order_of_any_release(options: tuple[Any, ...]) -> None:
    logits: Any = deep_gemm.fp8_fp4_paged_mqa_logits
    _, *rest = GOOD.values()
    got, expected = logits((P.q, None), *rest, *options), deep_gemm.fp8_paged_mqa_logits(**GOOD)
    for row, length in enumerate(P.contexts.flatten().tolist()):
        assert torch.equal(got[row, :length], expected[row, :length])
    with pytest.raises(NotImplementedError, match="indices: expected None, got Tensor"):
        logits((P.q, None), *rest, P.contexts, *(option for option in options if option is not None))
    with pytest.raises(ValueError, match="expected clean_logits, logits_dtype, indices behind the first 7, got 70"):
        logits((P.q, None), *rest, 70)


def test_no_sequences() -> None:
    empty = {name: GOOD[name][:0] for name in ("q", "weights", "context_lens", "block_table")}
    assert deep_gemm.fp8_paged_mqa_logits(**{**GOOD, **empty}).shape == (0, 70)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(P.contexts[:0], 64, 132)
    assert schedule.shape == (133, 2)
    assert not schedule.any()


def test_bad_arguments_of_schedules_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="block_kv: expected pages of 32 or 64 keys, got 128"):
        deep_gemm.get_paged_mqa_logits_metadata(P.contexts, 128, 132)
    with pytest.raises(ValueError, match="num_sms"):
        deep_gemm.get_paged_mqa_logits_metadata(P.contexts, 64, 0)
    with pytest.raises(NotImplementedError, match="indices"):
        deep_gemm.get_paged_mqa_logits_metadata(P.contexts, 64, 132, P.contexts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequence", "page", "entry"), [(0, 0, -1), (0, 1, 1 << 20), (1, 0, len(P.cache)), (1, 0, -(1 << 31))]
)
def test_an_entry_of_a_context_that_names_no_block_is_refused(sequence: int, page: int, entry: int) -> None:
    table = P.table.clone()
    table[sequence, page] = entry
    message = rf"^block_table: expected values in 0..{len(P.cache) - 1}, got {entry} at index \({sequence}, {page}\)$"
    with pytest.raises(ValueError, match=message):
        deep_gemm.fp8_paged_mqa_logits(**{**GOOD, "block_table": table})
    shorter = P.contexts.clone()
    shorter[sequence] = 64 * page  # then the entry lies behind the context
    logits = deep_gemm.fp8_paged_mqa_logits(**{**GOOD, "block_table": table, "context_lens": shorter})
    assert logits.shape == (4, 70)


def test_entries_behind_the_longest_row_of_logits_may_be_anything() -> None:
    table = P.table.clone()
    table[0, 1] = -1  # the second page holds keys from 64 on
    logits = deep_gemm.fp8_paged_mqa_logits(**{**GOOD, "block_table": table, "max_context_len": 64})
    assert torch.equal(logits[0], deep_gemm.fp8_paged_mqa_logits(**GOOD)[0, :64])


def test_lengths_in_columns_of_a_wider_table_are_refused() -> None:
    """Their rows are not beside each other: read as if they were, they would be other lengths."""
    wide = torch.zeros(2, 5, dtype=torch.int32)
    wide[:, :2] = P.contexts
    with pytest.raises(ValueError, match=r"context_lens: expected a contiguous tensor, got strides \(5, 1\)"):
        deep_gemm.fp8_paged_mqa_logits(**{**GOOD, "context_lens": wide[:, :2]})
    with pytest.raises(ValueError, match=r"context_lens: expected a contiguous .* strides \(5, 1\)"):
        deep_gemm.get_paged_mqa_logits_metadata(wide[:, :2], 64, 132)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_of_no_blocks_is_refused_where_a_page_may_be_asked_for(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits would be whatever was in memory. The host need not read lengths for that, which a GPU has."""
    monkeypatch.setattr(checks, "supported_device", lambda *_: None)
    good: dict[str, Any] = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in GOOD.items()}
    good["kv_cache"] = good["kv_cache"][:0]
    with pytest.raises(ValueError, match=r"^kv_cache: expected at least one block .* got \(0, 64, 1, 36\)$"):
        paged_logits_problem(**good)
    nobody = {name: good[name][:0] for name in ("q", "weights", "context_lens", "block_table")}
    changes: dict[str, Any]
    for changes in (nobody, {"block_table": good["block_table"][:, :0]}, {"max_context_len": 0}):
        expected = 0 if changes is nobody else 4, changes.get("max_context_len", 70)
        assert paged_logits_problem(**{**good, **changes}).logits.shape == expected
        if device == "cpu":
            assert deep_gemm.fp8_paged_mqa_logits(**{**good, **changes}).shape == expected

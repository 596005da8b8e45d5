"""The indexer's logits on the CPU, and arguments that are refused by name before anything is written."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from helpers import misaligned, refused
from torch import Tensor

import deep_gemm
from deep_gemm.core.check import checks
from deep_gemm.indexer import api
from deep_gemm.indexer.check import ROOM, ROW_BYTES, Logits, empty_logits, paged_logits_problem
from lab.sim.logits import Ranges, anywhere, causal, compare, packed, paged_problem, problem

FORMS = {"clean": {"clean": True}, "not clean": {}, "compressed": {"columns": 90}}
R = problem((6, 40, 32, 64), causal(6, 40))
ROWS: dict[str, Any] = {"q": R.q, "kv": (R.keys, R.scales), "weights": R.weights}
ROWS |= {"cu_seq_len_k_start": R.starts, "cu_seq_len_k_end": R.ends}
P = paged_problem([[70, 3], [0, 9]], 2, 16, 32)
PAGES: dict[str, Any] = {"q": P.q, "kv_cache": P.cache, "weights": P.weights, "context_lens": P.contexts}
PAGES |= {"block_table": P.table, "schedule_meta": P.schedule, "max_context_len": 70}
FUNCTIONS = {
    "rows": (deep_gemm.fp8_mqa_logits, deep_gemm.fp8_fp4_mqa_logits, ROWS),
    "pages": (deep_gemm.fp8_paged_mqa_logits, deep_gemm.fp8_fp4_paged_mqa_logits, PAGES),
}


def defined(logits: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the defined logits: all logits of keys in rows; for keys in pages only the contexts' logits."""
    if given is ROWS:
        return logits
    return logits[torch.arange(logits.shape[1]) < P.contexts.reshape(-1, 1)]


def right(p: Logits) -> None:
    """Compare the reference's logits with FP64."""
    p.logits.fill_(torch.nan)
    api.compute(p)
    compare(p, p.logits)


def test_examples_in_docstrings_run() -> None:
    failed, attempted = doctest.testmod(api, extraglobs={"torch": torch})
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranges", [causal, anywhere, packed])
def test_the_reference_is_right(ranges: Any, dtype: torch.dtype, form: str) -> None:
    right(problem((21, 300, 16, 32), ranges(21, 300), dtype=dtype, **FORMS[form]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ranges", [([5, 9, 0], [5, 4, -3]), ([-4, 39, 2**31 - 1], [50, 2**31 - 1, 3])], ids=["empty and crossed", "beyond"]
)
def test_ranges_that_are_no_ranges(ranges: Ranges) -> None:
    right(problem((3, 40, 8, 32), ranges, clean=True))


@pytest.mark.parametrize("contexts", [[[300, 0], [70, 71]], [90, 0]], ids=str)
def test_the_reference_of_pages_is_right(contexts: Any) -> None:
    right(paged_problem(contexts, 2, 16, 32, page=32, room=16))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_q_in_a_pair(kind: str) -> None:
    logits: Any
    in_pair: Any
    logits, in_pair, given = FUNCTIONS[kind]
    q, rest = given["q"], {name: x for name, x in given.items() if name != "q"}
    single = logits(**given)
    assert torch.equal(defined(single, given), defined(in_pair((q, None), **rest), given))
    rounded = in_pair((q, None), **rest, logits_dtype=torch.bfloat16)
    assert (rounded.dtype, rounded.shape) == (torch.bfloat16, single.shape)
    assert rounded.stride(0) * 2 % ROW_BYTES == 0
    assert torch.equal(defined(single.to(torch.bfloat16), given), defined(rounded, given))
    with pytest.raises(NotImplementedError, match="FP4 queries are not supported"):
        in_pair((q, given["weights"]), **rest)
    with pytest.raises(TypeError, match=r"q: expected a pair \(q, None\), got a Tensor"):
        in_pair(q, **rest)
    with pytest.raises(ValueError, match=r"logits_dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        in_pair((q, None), **rest, logits_dtype=torch.float16)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((False,), {"clean_logits": False}),
        ((True, 0), {"clean_logits": True}),
        ((False, 9), {"clean_logits": False, "max_seqlen_k": 9}),
        ((False, 9, torch.bfloat16), {"clean_logits": False, "max_seqlen_k": 9, "logits_dtype": torch.bfloat16}),
        ((9,), {"clean_logits": False, "max_seqlen_k": 9}),  # the call of vLLM 0.33
        ((9, torch.bfloat16), {"clean_logits": False, "max_seqlen_k": 9, "logits_dtype": torch.bfloat16}),
        ((9, None), {"clean_logits": False, "max_seqlen_k": 9}),
        ((0, torch.float32, None), {}),
    ],
    ids=str,
)
def test_options_by_position_are_told_by_their_types(options: tuple[Any, ...], named: dict[str, Any]) -> None:
    p = problem((6, 40, 32, 64), packed(6, 40))
    given = (p.keys, p.scales), p.weights, p.starts, p.ends
    valid = torch.arange(9 if "max_seqlen_k" in named else 40)[None].expand(6, -1)
    if "max_seqlen_k" in named:
        valid = valid < (p.ends.clamp(max=40) - p.starts.clamp(min=0)).clamp(max=9)[:, None]
    else:
        valid = (valid >= p.starts[:, None]) & (valid < p.ends[:, None]) | (named.get("clean_logits", True) is True)
    expected = deep_gemm.fp8_fp4_mqa_logits((p.q, None), *given, **named)
    logits = deep_gemm.fp8_fp4_mqa_logits((p.q, None), *given, *options)
    assert logits.shape == expected.shape == valid.shape
    assert logits.dtype == expected.dtype
    assert torch.equal(logits[valid], expected[valid])
    if torch.bfloat16 not in options:
        without_dtype = [option for option in options if not isinstance(option, torch.dtype)]
        assert torch.equal(deep_gemm.fp8_mqa_logits(p.q, *given, *without_dtype)[valid], expected[valid])


OPTIONS = [(), (False,), (None,), (False, None), (None, False), (False, torch.float32), (torch.float32, None)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_pages_by_position_come_in_the_order_of_any_release(options: tuple[Any, ...]) -> None:
    logits: Any = deep_gemm.fp8_fp4_paged_mqa_logits
    _, *rest = PAGES.values()
    got, expected = logits((P.q, None), *rest, *options), deep_gemm.fp8_paged_mqa_logits(**PAGES)
    assert torch.equal(defined(got, PAGES), defined(expected, PAGES))
    with pytest.raises(NotImplementedError, match="indices: expected None, got Tensor"):
        logits((P.q, None), *rest, P.contexts, *(option for option in options if option is not None))
    with pytest.raises(ValueError, match="expected clean_logits, logits_dtype, indices after the first 7, got 70"):
        logits((P.q, None), *rest, 70)


def test_options_by_position_that_have_no_place() -> None:
    logits: Any
    logits, by_position = deep_gemm.fp8_mqa_logits, list(ROWS.values())
    with pytest.raises(ValueError, match="max_seqlen_k: given twice in a call of fp8_mqa_logits"):
        logits(*by_position, 9, max_seqlen_k=9)
    with pytest.raises(ValueError, match="clean_logits: given twice in a call of fp8_mqa_logits"):
        logits(*by_position, False, 9, True)
    with refused("fp8_mqa_logits: expected clean_logits, max_seqlen_k, schedule_meta after the first 5, got 1.5"):
        logits(*by_position, 1.5)
    with pytest.raises(ValueError, match="clean_logits: expected False, because max_seqlen_k is given, got True"):
        logits(*by_position, 9, True)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("keys", [0, 1, 200])
def test_nothing_to_do(tokens: int, keys: int) -> None:
    p = problem((tokens, keys, 64, 128), causal(tokens, keys), clean=True)
    logits = deep_gemm.fp8_mqa_logits(p.q, (p.keys, p.scales), p.weights, p.starts, p.ends)
    assert logits.shape == (tokens, keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_room(dtype: torch.dtype) -> None:
    for keys in (1, 255, 256, 8192):
        logits = empty_logits(3, keys, dtype, torch.device("cpu"), ROOM)
        assert logits.stride(0) >= keys + ROOM
        assert logits.stride(0) * dtype.itemsize % ROW_BYTES == 0
        compressed = empty_logits(3, keys, dtype, torch.device("cpu"))
        assert compressed.shape == (3, keys)
        assert compressed.stride(0) * dtype.itemsize % ROW_BYTES == 0


def test_no_sequences() -> None:
    empty = {name: PAGES[name][:0] for name in ("q", "weights", "context_lens", "block_table")}
    assert deep_gemm.fp8_paged_mqa_logits(**{**PAGES, **empty}).shape == (0, 70)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(P.contexts[:0], 64, 132)
    assert schedule.shape == (133, 2)
    assert not schedule.any()


Q, KEYS = torch.zeros(6, 32, 64).to(torch.float8_e4m3fn), torch.zeros(40, 64).to(torch.float8_e4m3fn)
RANGE, CLEAN = torch.zeros(6, dtype=torch.int32), {"clean_logits": True}
SHALLOW = {"q": Q[..., :16].contiguous(), "kv": (KEYS[:, :16].contiguous(), torch.ones(40))}


def strided(stride: int) -> Tensor:
    return torch.zeros(6 * stride, dtype=torch.uint8).as_strided((5, 64, 1, 36), (stride, 36, 36, 1))


def of_heads(heads: int) -> dict[str, Any]:
    return {"q": torch.zeros(6, heads, 64).to(torch.float8_e4m3fn), "weights": torch.ones(6, heads)}


MISTAKES: dict[tuple[str, type[Exception]], list[tuple[dict[str, Any], str]]] = {
    ("rows", ValueError): [
        ({"q": Q.float()}, "q: expected dtype torch.float8_e4m3fn, got torch.float32"),
        ({"q": Q[0]}, r"q: expected shape \(tokens, heads, depth\), got \(32, 64\)"),
        ({"q": Q.transpose(0, 1).contiguous().transpose(0, 1)}, "q: expected a contiguous tensor"),
        ({"q": misaligned(Q)}, "q: expected an address that is a multiple of 16 bytes"),
        ({"kv": (KEYS[:, :32], torch.ones(40))}, r"kv: expected shape \(keys, depth\) = \(keys, 64\), got \(40, 32\)"),
        ({"kv": (KEYS, torch.ones(39))}, r"sfkv: expected shape \(keys\) = \(40\), got \(39,\)"),
        ({"kv": (KEYS, torch.ones(40).double())}, "sfkv: expected dtype torch.float32, got torch.float64"),
        ({"kv": (KEYS, misaligned(torch.ones(40)))}, "sfkv: expected an address"),
        ({"weights": torch.ones(6, 31)}, r"weights: expected shape \(tokens, heads\) = \(6, 32\), got \(6, 31\)"),
        ({"weights": torch.ones(32, 6).t()}, "weights: expected values contiguous along heads"),
        ({"weights": torch.ones(6, 32, dtype=torch.bfloat16)}, "weights: expected dtype torch.float32"),
        ({"cu_seq_len_k_start": RANGE[:5]}, r"cu_seq_len_k_start: expected shape \(tokens,\) = \(6,\), got \(5,\)"),
        ({"cu_seq_len_k_end": RANGE.long()}, "cu_seq_len_k_end: expected dtype torch.int32, got torch.int64"),
        ({**CLEAN, "max_seqlen_k": 8}, "clean_logits: expected False, because max_seqlen_k is given, got True"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: expected an integer"),
    ],
    ("rows", NotImplementedError): [
        *((of_heads(heads), f"multiple of 8 up to 128, got {heads}") for heads in (0, 4, 12, 136)),
        (SHALLOW, "q: expected a depth of 32, 64 or 128, got 16"),
        ({"schedule_meta": torch.ones(3)}, "schedule_meta: expected None, got Tensor"),
    ],
    ("pages", ValueError): [
        (CLEAN, "clean_logits: expected False"),
        ({"kv_cache": strided(64 * 36 + 8)}, "multiple of 16 bytes, and at least 2304, got 2312"),
        ({"kv_cache": strided(64 * 36 - 16)}, "at least 2304, got 2288"),
        ({"kv_cache": P.cache.view(torch.int8)}, "kv_cache: expected dtype torch.uint8"),
        ({"weights": P.weights[:3]}, "weights: expected shape"),
        ({"context_lens": P.contexts.long()}, "context_lens: expected dtype"),
        ({"context_lens": P.contexts[:1]}, "context_lens: expected shape"),
        ({"block_table": P.table[:1]}, "block_table: expected shape"),
        ({"schedule_meta": P.schedule[:1]}, "schedule_meta: expected a contiguous"),
        ({"max_context_len": -1}, "max_context_len"),
    ],
    ("pages", NotImplementedError): [
        ({"indices": P.contexts}, "indices: expected None"),
        ({"kv_cache": torch.zeros(5, 16, 1, 36, dtype=torch.uint8)}, "pages of 32 or 64"),
        ({"q": P.q[:, :1].expand(2, 5, 16, 32)}, "1 to 4 tokens"),
        ({"q": P.q[..., :12, :]}, "multiple of 8"),
        ({"q": torch.zeros(2, 4, 72, 32).to(P.q.dtype)}, "q: expected next_n x heads up to 256, got 4 x 72"),
        ({"q": P.q.view(torch.int8)}, "FP4"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "error", "changes", "message"),
    [(*of, *mistake) for of, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_mistake_is_told(kind: str, error: type[Exception], changes: dict[str, Any], message: str) -> None:
    logits, _, given = FUNCTIONS[kind]
    with pytest.raises(error, match=message):
        logits(**{**given, **changes})  # type: ignore[operator]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_no_gradient_is_cut_silently(kind: str) -> None:
    logits: Any
    logits, _, given = FUNCTIONS[kind]
    weights = given["weights"].clone().requires_grad_()
    with pytest.raises(ValueError, match="weights: expected a tensor without a gradient"):
        logits(**{**given, "weights": weights})
    with torch.no_grad():
        logits(**{**given, "weights": weights})


def test_bad_arguments_of_schedules_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="block_kv: expected pages of 32 or 64 keys, got 128"):
        deep_gemm.get_paged_mqa_logits_metadata(P.contexts, 128, 132)
    with pytest.raises(ValueError, match="num_sms"):
        deep_gemm.get_paged_mqa_logits_metadata(P.contexts, 64, 0)
    with pytest.raises(NotImplementedError, match="indices"):
        deep_gemm.get_paged_mqa_logits_metadata(P.contexts, 64, 132, P.contexts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("row", "page", "entry"), [(0, 0, -1), (0, 1, 2**20), (1, 0, len(P.cache)), (1, 0, -(2**31))])
def test_an_entry_of_a_context_that_names_no_block_is_refused(row: int, page: int, entry: int) -> None:
    table = P.table.clone()
    table[row, page] = entry
    message = rf"^block_table: expected values in 0..{len(P.cache) - 1}, got {entry} at index \({row}, {page}\)$"
    with pytest.raises(ValueError, match=message):
        deep_gemm.fp8_paged_mqa_logits(**{**PAGES, "block_table": table})
    shorter = P.contexts.clone()
    shorter[row] = 64 * page  # the wrong entry is then behind the context
    logits = deep_gemm.fp8_paged_mqa_logits(**{**PAGES, "block_table": table, "context_lens": shorter})
    assert logits.shape == (4, 70)


def test_entries_behind_the_longest_row_of_logits_may_be_anything() -> None:
    table = P.table.clone()
    table[0, 1] = -1  # the second page holds the keys from 64 on
    logits = deep_gemm.fp8_paged_mqa_logits(**{**PAGES, "block_table": table, "max_context_len": 64})
    assert torch.equal(logits[0], deep_gemm.fp8_paged_mqa_logits(**PAGES)[0, :64])


def test_lengths_in_columns_of_a_wider_table_are_refused() -> None:
    """Columns of a wider table are not contiguous. Read as contiguous memory, they would give wrong lengths."""
    wide = torch.zeros(2, 5, dtype=torch.int32)
    wide[:, :2] = P.contexts
    with pytest.raises(ValueError, match=r"context_lens: expected a contiguous tensor, got strides \(5, 1\)"):
        deep_gemm.fp8_paged_mqa_logits(**{**PAGES, "context_lens": wide[:, :2]})
    with pytest.raises(ValueError, match=r"context_lens: expected a contiguous .* strides \(5, 1\)"):
        deep_gemm.get_paged_mqa_logits_metadata(wide[:, :2], 64, 132)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_without_blocks_is_refused_where_pages_are_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a block, logits would be arbitrary memory. The check must not read lengths: they may be on a GPU."""
    monkeypatch.setattr(checks, "supported_device", lambda *_: None)
    good: dict[str, Any] = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in PAGES.items()}
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

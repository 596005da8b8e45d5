"""The indexer's logits on the CPU, and what is refused."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_gemm
from deep_gemm.indexer import prefill
from deep_gemm.indexer.check import ROOM, ROW_BYTES, empty_logits
from lab.sim.fp8_mqa_logits import Ranges, anywhere, causal, compare, packed, problem

FORMS = {"clean": {"clean": True}, "not clean": {}, "compressed": {"columns": 90}}


def arguments(**changes: Any) -> dict[str, Any]:
    p = problem((6, 40, 32, 64), causal(6, 40))
    given = {
        "q": p.q,
        "kv": (p.keys, p.scales),
        "weights": p.weights,
        "cu_seq_len_k_start": p.starts,
        "cu_seq_len_k_end": p.ends,
    }
    return {**given, **changes}


def test_examples_in_docstrings_run() -> None:
    failed, attempted = doctest.testmod(prefill, extraglobs={"torch": torch})
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranges", [causal, anywhere, packed])
def test_the_reference_is_right(ranges: Any, dtype: torch.dtype, form: str) -> None:
    p = problem((21, 300, 16, 32), ranges(21, 300), dtype=dtype, **FORMS[form])  # type: ignore[arg-type]
    p.logits.fill_(torch.nan)
    prefill.compute(p)
    compare(p, p.logits)


@pytest.mark.parametrize(
    "ranges", [([5, 9, 0], [5, 4, -3]), ([-4, 39, 2**31 - 1], [50, 2**31 - 1, 3])], ids=["empty and crossed", "beyond"]
)
def test_ranges_that_are_no_ranges(ranges: Ranges) -> None:
    p = problem((3, 40, 8, 32), ranges, clean=True)
    prefill.compute(p)
    compare(p, p.logits)


def test_both_functions_give_the_same() -> None:
    given = arguments()
    logits = deep_gemm.fp8_mqa_logits(**given)
    q = given.pop("q")
    assert torch.equal(logits, deep_gemm.fp8_fp4_mqa_logits((q, None), **given))
    rounded = deep_gemm.fp8_fp4_mqa_logits((q, None), **given, logits_dtype=torch.bfloat16)
    assert torch.equal(logits.to(torch.bfloat16), rounded)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((False,), {"clean_logits": False}),
        ((True, 0), {"clean_logits": True}),
        ((False, 9), {"clean_logits": False, "max_seqlen_k": 9}),
        ((False, 9, torch.bfloat16), {"clean_logits": False, "max_seqlen_k": 9, "logits_dtype": torch.bfloat16}),
        ((9,), {"clean_logits": False, "max_seqlen_k": 9}),  # vLLM 0.33
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


def test_options_by_position_that_have_no_place() -> None:
    given = arguments()
    logits: Any
    logits, by_position = deep_gemm.fp8_mqa_logits, list(given.values())
    assert list(given) == ["q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"]
    with pytest.raises(ValueError, match="max_seqlen_k: given twice in a call of fp8_mqa_logits"):
        logits(*by_position, 9, max_seqlen_k=9)
    with pytest.raises(ValueError, match="clean_logits: given twice in a call of fp8_mqa_logits"):
        logits(*by_position, False, 9, True)
    with pytest.raises(
        ValueError,
        match=r"fp8_mqa_logits: expected clean_logits, max_seqlen_k, schedule_meta behind the first 5, got 1.5",
    ):
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
        logits = empty_logits(3, keys, 0, dtype, torch.device("cpu"))
        assert logits.stride(0) >= keys + ROOM
        assert logits.stride(0) * dtype.itemsize % ROW_BYTES == 0
        compressed = empty_logits(3, 7, keys, dtype, torch.device("cpu"))
        assert compressed.shape == (3, keys)
        assert compressed.stride(0) * dtype.itemsize % ROW_BYTES == 0


Q, KEYS = torch.zeros(6, 32, 64).to(torch.float8_e4m3fn), torch.zeros(40, 64).to(torch.float8_e4m3fn)
RANGE = torch.zeros(6, dtype=torch.int32)


def misaligned(x: Tensor) -> Tensor:
    """The same elements, at an address that is no multiple of 16 bytes."""
    flat = torch.zeros(x.numel() * x.element_size() + 32, dtype=torch.uint8)
    first = -flat.data_ptr() % 16 + 4
    return flat[first : first + x.numel() * x.element_size()].view(x.dtype).view(x.shape)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
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
        (
            {"max_seqlen_k": 8, "clean_logits": True},
            "clean_logits: expected False, because max_seqlen_k is given, got True",
        ),
        ({"max_seqlen_k": -1}, "max_seqlen_k: expected an integer"),
    ],
)
def test_a_mistake_is_told(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        deep_gemm.fp8_mqa_logits(**arguments(**changes))


@pytest.mark.parametrize("heads", [0, 4, 12, 136])
def test_numbers_of_heads_that_are_not_supported(heads: int) -> None:
    q, weights = torch.zeros(6, heads, 64).to(torch.float8_e4m3fn), torch.ones(6, heads)
    with pytest.raises(NotImplementedError, match=f"multiple of 8 up to 128, got {heads}"):
        deep_gemm.fp8_mqa_logits(**arguments(q=q, weights=weights))


def test_what_hopper_does_not_have() -> None:
    with pytest.raises(NotImplementedError, match="q: expected a depth of 32, 64, 128, got 16"):
        deep_gemm.fp8_mqa_logits(
            **arguments(q=Q[..., :16].contiguous(), kv=(KEYS[:, :16].contiguous(), torch.ones(40)))
        )
    given = arguments()
    q = given.pop("q")
    with pytest.raises(NotImplementedError, match="FP4 queries are not supported"):
        deep_gemm.fp8_fp4_mqa_logits((q, torch.ones(6, 32)), **given)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="schedule_meta: expected None, got Tensor"):
        deep_gemm.fp8_mqa_logits(**arguments(schedule_meta=torch.ones(3)))
    with pytest.raises(TypeError, match=r"q: expected a pair \(q, None\), got a Tensor"):
        deep_gemm.fp8_fp4_mqa_logits(q, **given)
    with pytest.raises(ValueError, match=r"logits_dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        deep_gemm.fp8_fp4_mqa_logits((q, None), **given, logits_dtype=torch.float16)


def test_no_gradient_is_cut_silently() -> None:
    weights = torch.ones(6, 32, requires_grad=True)
    with pytest.raises(ValueError, match="weights: expected a tensor without a gradient"):
        deep_gemm.fp8_mqa_logits(**arguments(weights=weights))
    with torch.no_grad():
        deep_gemm.fp8_mqa_logits(**arguments(weights=weights))

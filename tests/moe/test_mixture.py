"""Prepared calls of `experts`, without a GPU: what kernels find at their addresses, and which calls go that way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import addressed_kernels
import pytest
import test_distributed_decode
import torch
from helpers import inside_of_an_element
from test_distributed_decode import with_fp4
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.seen import Seen
from deep_gemm.core.settings import set_compile_mode
from deep_gemm.moe import mixture

EXPERTS, HIDDEN, INTER, TOPK = 6, 272, 144, 3
ALL = {"route_rows": 1, "cast_rows": 2, "fp8_gemm_rows": 2, "gather_weighted": 1}
Tokens = tuple[Tensor, Tensor, Tensor]
USUAL = torch.bfloat16, torch.int64, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels at addresses, for CPU tensors too. Calls that nobody has prepared go by tensors, and launch nothing."""
    monkeypatch.setattr(mixture, "has_kernels", lambda x: True)
    monkeypatch.setattr(mixture, "SEEN", Seen())
    return addressed_kernels.install(monkeypatch)


def weights() -> tuple[Operand, Operand]:
    g = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(EXPERTS, n, k, generator=g) / k**0.5 for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    return deep_gemm.per_block_cast_to_fp8(w1), deep_gemm.per_block_cast_to_fp8(w2)


def tokens_of(tokens: int, types: Any = USUAL, hidden: int = HIDDEN) -> Tokens:
    dtype, ids, of_routes = types
    g = torch.Generator().manual_seed(tokens)
    x, routes = torch.randn(tokens, hidden, generator=g), torch.randint(-1, EXPERTS, (tokens, TOPK), generator=g)
    return x.to(dtype), routes.to(ids), torch.rand(tokens, TOPK, generator=g).to(of_routes)


def by_tensors(*call: Any, **said: Any) -> Tensor:
    """The result of a call that nobody has prepared."""
    kept, mixture.SEEN = mixture.SEEN, Seen()
    try:
        out = deep_gemm.experts(*call, **said)
    finally:
        mixture.SEEN = kept
    assert out is not None
    return out


def same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("types", [USUAL, (torch.float32, torch.int32, torch.bfloat16)])
@pytest.mark.parametrize("said", [{}, {"limit": 0.5}, {"activation": "situ", "alpha": 1.5, "beta": 2.0}])
def test_prepared_calls_have_the_bits_of_calls_by_tensors(launched: Counter[str], types: Any, said: Any) -> None:
    w1, w2 = weights()
    deep_gemm.experts(*tokens_of(4, types), w1, w2, **said)
    assert not launched
    for tokens in (1, 37, 4, 130, 37):
        one = tokens_of(tokens, types)
        right = by_tensors(*one, w1, w2, **said)
        launched.clear()
        assert same(deep_gemm.experts(*one, w1, w2, **said), right)
        assert launched == ALL
        out = torch.full_like(right, torch.nan)
        for call in (0, 1):
            launched.clear()
            assert deep_gemm.experts(*one, w1, w2, out=out, **said) is None
            assert bool(launched) == bool(call or tokens > 1) and same(out, right)


@pytest.mark.parametrize("which", ["w1 and w2", "w1", "w2"])
def test_fp4_weights_whose_scales_are_words_are_prepared(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(test_distributed_decode, "HIDDEN", 256)
    both = with_fp4(EXPERTS, which)
    for call, tokens in enumerate((5, 37)):
        one = tokens_of(tokens, hidden=256)
        right = by_tensors(*one, *both)
        assert same(deep_gemm.experts(*one, *both), right)
        assert launched == (ALL if call else {})


def test_what_was_not_prepared_goes_by_tensors(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (w1, sfw1), (w2, sfw2) = weights()
    x, ids, p = one = tokens_of(5)
    call = *one, (w1, sfw1), (w2, sfw2)
    right = by_tensors(*call)
    monkeypatch.setattr(mixture, "MANY_ROWS", 31)
    wide = torch.zeros(5, HIDDEN + 8).bfloat16()[:, :HIDDEN]
    bytes_of_x = torch.empty(x.nbytes + 16, dtype=torch.uint8)
    off = bytes_of_x[2 : 2 + x.nbytes].view(torch.bfloat16).view(x.shape).copy_(x)
    others: dict[str, tuple[Any, ...]] = {
        "many rows": (*tokens_of(11), (w1, sfw1), (w2, sfw2)),
        "no tokens": (*tokens_of(0), (w1, sfw1), (w2, sfw2)),
        "x begins anywhere": (off, ids, p, (w1, sfw1), (w2, sfw2)),
        "rows of ids lie apart": (x, torch.cat([ids, ids], 1)[:, :TOPK], p, (w1, sfw1), (w2, sfw2)),
        "finer scales": call,
    }
    for name, other in others.items():
        said: Any = {"gran_k": 32} if name == "finer scales" else {}
        expected = by_tensors(*other, **said)
        for _ in range(2):
            assert same(deep_gemm.experts(*other, **said), expected), name
        assert not launched, name
    deep_gemm.experts(*call)
    for name in ("x begins anywhere", "many rows"):
        assert same(deep_gemm.experts(*others[name]), by_tensors(*others[name])) and not launched, name
    wide.copy_(x)
    for given in (x, wide):  # each has strides of its own
        deep_gemm.experts(given, ids, p, (w1, sfw1), (w2, sfw2))
        launched.clear()
        assert same(deep_gemm.experts(given, ids, p, (w1, sfw1), (w2, sfw2)), right) and launched == ALL
    launched.clear()
    set_compile_mode(1)
    try:
        deep_gemm.experts(*call)
        assert not launched
    finally:
        set_compile_mode(0)


def test_mistakes_are_those_of_calls_by_tensors(launched: Counter[str]) -> None:
    w1, w2 = weights()
    x, ids, p = tokens_of(5)
    out = torch.empty_like(x)
    for _ in range(2):
        deep_gemm.experts(x, ids, p, w1, w2)
        deep_gemm.experts(x, ids, p, w1, w2, out=out)
    launched.clear()
    room = torch.empty(9, HIDDEN, dtype=torch.bfloat16)
    room[4:] = x
    mistakes: tuple[tuple[str, Any, Tokens], ...] = (
        (r"topk_ids: .*tokens", {}, (x, ids[:4], p)),
        (r"topk_weights: .*tokens", {}, (x, ids, p[:4])),
        (r"out: .*tokens", {"out": out[:4]}, (x, ids, p)),
        (r"out: .*overlap", {"out": room[:5]}, (room[4:], ids, p)),
        (r"out: .*overlap", {"out": x}, (x, ids, p)),
        (r"topk_weights: .*multiple of 4 bytes", {}, (x, ids, inside_of_an_element(p))),
        (r"x: .*gradient", {}, (x.clone().requires_grad_() * 1, ids, p)),
    )
    for message, more, given in mistakes:
        with pytest.raises(ValueError, match=message):
            deep_gemm.experts(*given, w1, w2, **more)
    assert not launched

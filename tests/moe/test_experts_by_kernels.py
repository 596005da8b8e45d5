"""Prepared calls of `experts`, without a GPU: what kernels find at their addresses, and which calls go that way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import addressed_kernels
import pytest
import test_distributed_decode
import torch
from helpers import inside_of_an_element, same_bits, some
from test_distributed_decode import with_fp4
from torch import Tensor
from torch.overrides import TorchFunctionMode

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.kernel import Kernel
from deep_gemm.core.seen import Seen
from deep_gemm.core.settings import set_compile_mode
from deep_gemm.gemm.kernel import FP8_GEMM_DECODE
from deep_gemm.moe import mixture

EXPERTS, HIDDEN, INTER, TOPK = 6, 272, 144, 3
ALL = {"route_rows": 1, "cast_rows": 2, "fp8_gemm_rows": 2, "gather_weighted": 1}
Tokens = tuple[Tensor, Tensor, Tensor]
USUAL = torch.bfloat16, torch.int64, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
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
    return some(out)


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
        assert same_bits(deep_gemm.experts(*one, w1, w2, **said), right)
        assert launched == ALL
        out = torch.full_like(right, torch.nan)
        for call in (0, 1):
            launched.clear()
            assert deep_gemm.experts(*one, w1, w2, out=out, **said) is None
            assert bool(launched) == bool(call or tokens > 1) and same_bits(out, right)


@pytest.mark.parametrize("which", ["w1 and w2", "w1", "w2"])
def test_fp4_weights_whose_scales_are_words_are_prepared(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(test_distributed_decode, "HIDDEN", 256)
    both = with_fp4(EXPERTS, which)
    for call, tokens in enumerate((5, 37)):
        one = tokens_of(tokens, hidden=256)
        right = by_tensors(*one, *both)
        assert same_bits(deep_gemm.experts(*one, *both), right)
        assert launched == (ALL if call else {})


def test_a_result_that_is_longer_than_what_led_to_its_operand_has_room(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HIDDEN", 528)
    monkeypatch.setitem(globals(), "INTER", 16)
    both = weights()
    for call, tokens in enumerate((5, 37, 5)):
        one = tokens_of(tokens, hidden=528)
        right = by_tensors(*one, *both)
        assert same_bits(deep_gemm.experts(*one, *both), right)
        assert bool(launched) == bool(call)


def test_parts_lie_apart_and_take_no_more_than_is_said(launched: Counter[str]) -> None:
    both = weights()
    deep_gemm.experts(*tokens_of(5), *both)
    (kept,) = mixture.SEEN.values()
    ((_, kind),) = kept
    for tokens in (1, 37, 682):
        p, rows, pitch = kind._placed(tokens), tokens * TOPK, -(-tokens * TOPK // 4) * 16
        sizes = (
            [4 * rows] * 3 + [4 * EXPERTS] * 2 + [rows * HIDDEN, pitch * 3, 4 * rows * INTER, rows * INTER, pitch * 2]
        )
        begins = [*(at for name, at in vars(p).items() if name != "end")]
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        assert all(end <= begin for end, begin in zip(ends, [*begins[1:], p.end], strict=True))
        assert p.values + 2 * rows * HIDDEN <= p.middle and not any(begin % 256 for begin in begins)
        said = deep_gemm.experts_workspace_bytes(tokens, TOPK, EXPERTS, HIDDEN, INTER)
        assert p.end <= said + 256 * len(begins)


def test_kernels_begin_beside_the_end_of_the_one_before_as_by_tensors(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[tuple[str, bool]] = []
    ordinary, compute = Kernel.launcher, addressed_kernels.fp8_gemm_few_rows

    def launcher(kernel: Kernel[Any], config: Any, device: int, is_dependent: bool) -> Any:
        begins.append(("product" if kernel is FP8_GEMM_DECODE else kernel.name, is_dependent))
        return ordinary(kernel, config, device, is_dependent)

    def computed(config: Any, p: Any) -> None:
        begins.append(("weight", bool(p["weight_is_ready"])))
        compute(config, p)

    monkeypatch.setattr(Kernel, "launcher", launcher)
    monkeypatch.setattr(addressed_kernels, "fp8_gemm_few_rows", computed)
    for _ in range(2):
        deep_gemm.experts(*tokens_of(5), *weights())
    product_begins = [("product", True), ("weight", True)]
    assert begins == [
        ("route_rows", False),
        ("cast_rows", True),
        *product_begins,
        ("cast_rows", True),
        *product_begins,
        ("gather_weighted", True),
    ]


class Sizes(TorchFunctionMode):
    """Notes how many bytes lie behind what torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.bytes.append(made.untyped_storage().nbytes())
        return made


def test_rows_that_lie_far_apart_take_no_memory(launched: Counter[str]) -> None:
    """The last token of a long sequence: to prepare for it took as much as lay between two."""
    far, both, (x, ids, p) = 1 << 25, weights(), tokens_of(1)
    with Sizes() as made:
        deep_gemm.experts(x.as_strided((1, HIDDEN), (far, 1)), ids, p, *both)
    assert max(made.bytes) < 1 << 20
    given = torch.empty(far + HIDDEN, dtype=x.dtype).as_strided((2, HIDDEN), (far, 1))
    x, ids, p = tokens_of(2)
    right = by_tensors(x, ids, p, *both)
    assert same_bits(deep_gemm.experts(given.copy_(x), ids, p, *both), right) and launched == ALL


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
            assert same_bits(deep_gemm.experts(*other, **said), expected), name
        assert not launched, name
    deep_gemm.experts(*call)
    for name in ("x begins anywhere", "many rows"):
        assert same_bits(deep_gemm.experts(*others[name]), by_tensors(*others[name])) and not launched, name
    wide.copy_(x)
    for given in (x, wide):  # each has strides of its own
        deep_gemm.experts(given, ids, p, (w1, sfw1), (w2, sfw2))
        launched.clear()
        assert same_bits(deep_gemm.experts(given, ids, p, (w1, sfw1), (w2, sfw2)), right) and launched == ALL
    launched.clear()
    with monkeypatch.context() as other_device:
        other_device.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        assert same_bits(deep_gemm.experts(*call), right) and not launched
    set_compile_mode(1)
    deep_gemm.experts(*call)
    assert not launched


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["finer scales", "FP4, scales in no words", "FP4, scales in FP32", "a class"])
def test_weights_that_others_are_made_of_go_by_tensors(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, kind: str, which: int
) -> None:
    monkeypatch.setattr(test_distributed_decode, "HIDDEN", 256)
    both, one = [*with_fp4(EXPERTS, "none")], tokens_of(5, hidden=256)
    values, scales = both[which]
    if kind == "finer scales":
        both[which] = values, scales.repeat_interleave(2, 1).repeat_interleave(2, 2)
    elif kind == "a class":
        both[which] = values, scales.as_subclass(Watched)
    else:
        values, words = with_fp4(EXPERTS, "w1 and w2")[which]
        exponents = words.view(torch.uint8)
        apart = torch.nn.functional.pad(exponents, (0, 1))[..., :-1]
        both[which] = values, (exponents.float() - 127).exp2() if kind == "FP4, scales in FP32" else apart
    right = by_tensors(*one, *both)
    for _ in range(2):
        assert same_bits(deep_gemm.experts(*one, *both), right)
    assert not launched


class Watched(Tensor):
    """A tensor of a class that sees what torch does."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def test_mistakes_are_those_of_calls_by_tensors(launched: Counter[str]) -> None:
    w1, w2 = weights()
    x, ids, p = tokens_of(5)
    out = torch.empty_like(x)
    for _ in range(2):
        deep_gemm.experts(x, ids, p, w1, w2)
        deep_gemm.experts(x, ids, p, w1, w2, out=out)
    with torch.no_grad():  # where an output may require a gradient
        for _ in range(2):
            deep_gemm.experts(x, ids, p, w1, w2, out=out.clone().requires_grad_())
    for _ in range(2):  # a single row may have any stride
        deep_gemm.experts(x[:1], ids[:1], p[:1], w1, w2, out=out[:1].as_strided((1, HIDDEN), (16, 1)))
    launched.clear()
    bytes_of_out = torch.empty(out.nbytes + 2, dtype=torch.uint8)
    off = bytes_of_out[2:].view(torch.bfloat16).view(out.shape)
    room = torch.empty(9, HIDDEN, dtype=torch.bfloat16)
    room[4:] = x
    mistakes: tuple[tuple[str, Any, Tokens], ...] = (
        (r"topk_ids: .*tokens", {}, (x, ids[:4], p)),
        (r"topk_weights: .*tokens", {}, (x, ids, p[:4])),
        (r"out: .*tokens", {"out": out[:4]}, (x, ids, p)),
        (r"out: .*overlap", {"out": room[:5]}, (room[4:], ids, p)),
        (r"out: .*overlap", {"out": x}, (x, ids, p)),
        (r"out: .*gradient", {"out": out.clone().requires_grad_()}, (x, ids, p)),
        (r"out: .*16", {"out": off}, (x, ids, p)),
        (r"out: ", {"out": torch.empty(2 * HIDDEN).bfloat16().as_strided((5, HIDDEN), (16, 1))}, (x, ids, p)),
        (r"topk_weights: .*multiple of 4 bytes", {}, (x, ids, inside_of_an_element(p))),
        (r"x: .*gradient", {}, (x.clone().requires_grad_() * 1, ids, p)),
    )
    for message, more, given in mistakes:
        with pytest.raises(ValueError, match=message):
            deep_gemm.experts(*given, w1, w2, **more)
    assert not launched


def test_mistakes_in_weights_are_those_of_calls_by_tensors(launched: Counter[str]) -> None:
    (w1, sfw1), w2 = weights()
    one = tokens_of(5)
    leaf, out = sfw1.clone().requires_grad_(), torch.empty_like(one[0])
    # An expert's rows in more room than they need: the last one ends behind as many bytes as the weight has elements.
    wide = torch.empty(EXPERTS, 4 * INTER, HIDDEN, dtype=torch.uint8).view(w1.dtype)
    narrow = wide[:, : 2 * INTER].copy_(w1)
    for _ in range(2):
        launched.clear()
        deep_gemm.experts(*one, (w1, sfw1), w2)
        deep_gemm.experts(*one, (w1, leaf), w2)
        deep_gemm.experts(*one, (w1, sfw1), w2, recipe_b=(128, 128))
        deep_gemm.experts(*one, (narrow, sfw1), w2, out=out)
    assert launched == {name: 4 * count for name, count in ALL.items()}
    launched.clear()
    inside = wide[-1, 2 * INTER - 10 : 2 * INTER].view(torch.bfloat16).view(5, HIDDEN)
    mistakes: tuple[tuple[str, type[Exception], Any, Any], ...] = (
        ("sfw1: .*gradient", ValueError, (w1, leaf * 1), {}),
        ("gran_k: .*integer", ValueError, (w1, sfw1), {"recipe_b": (128.0, 128.0)}),
        ("w1: .*a pair", TypeError, iter((w1, sfw1)), {}),
        ("sfw1: .*multiple of 4 bytes", ValueError, (w1, inside_of_an_element(sfw1)), {}),
        ("out: .*overlap w1", ValueError, (narrow, sfw1), {"out": inside}),
    )
    for message, error, given, more in mistakes:
        with pytest.raises(error, match=message):
            deep_gemm.experts(*one, given, w2, **more)
    assert not launched

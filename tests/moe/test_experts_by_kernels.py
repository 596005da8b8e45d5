"""Calls of `experts` without a GPU: the values that kernels find at their addresses, by records and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import addressed_kernels
import pytest
import test_distributed_decode
import torch
from addressed_kernels import Seen, on_cpu
from helpers import inside_of_an_element, same_bits, some
from layer_cases import SCALED, weights_of
from test_distributed_decode import with_fp4
from torch import Tensor

import deep_gemm
from deep_gemm.core.settings import set_compile_mode
from deep_gemm.gemm.kinds.works import ENDS, IDS
from deep_gemm.moe import api as layers
from deep_gemm.moe import experts_few, routing

EXPERTS, HIDDEN, INTER, TOPK = 6, 272, 144, 3
ALL = ["route_rows", "cast_rows", "fp8_gemm_rows", "cast_rows", "fp8_gemm_rows", "gather_weighted"]
BY_BF16 = [name.replace("fp8_gemm_rows", "bf16_gemm") for name in ALL]
FEW = ["experts_few", "experts_few", "gather_weighted"]
MANY = ["route_rows", "cast_rows", "lay_scales", "fp8_gemm_rows", "fp8_gemm_rows", "gather_weighted"]
Tokens = tuple[Tensor, Tensor, Tensor]
USUAL = torch.bfloat16, torch.int64, torch.float32


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return addressed_kernels.install(monkeypatch, layers.MADE, layers.INTO, layers.MADE_BY_BF16, layers.INTO_BY_BF16)


@on_cpu
def weights(hidden: int = HIDDEN, inter: int = INTER, cast: Any = deep_gemm.per_block_cast_to_fp8) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(EXPERTS, n, k, generator=g) / k**0.5 for n, k in ((2 * inter, hidden), (hidden, inter)))
    return cast(w1), cast(w2)


bf16_weights = partial(weights, cast=Tensor.bfloat16)


def tokens_of(tokens: int, types: Any = USUAL, hidden: int = HIDDEN) -> Tokens:
    dtype, ids, of_routes = types
    g = torch.Generator().manual_seed(tokens)
    x, routes = torch.randn(tokens, hidden, generator=g), torch.randint(-1, EXPERTS, (tokens, TOPK), generator=g)
    return x.to(dtype), routes.to(ids), torch.rand(tokens, TOPK, generator=g).to(of_routes)


@on_cpu
def right(*given: Any, **said: Any) -> Tensor:
    return some(deep_gemm.experts(*given, **said))


GATINGS = pytest.mark.parametrize("said", [{}, {"limit": 0.5}, {"activation": "situ", "alpha": 1.5, "beta": 2.0}])
MANY_OR_NOT = pytest.mark.parametrize("many", [False, True])
OTHER_TYPES = torch.float32, torch.int32, torch.bfloat16


def take_as_many(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """Make layers treat every number of rows as many rows, or treat every number as few rows."""
    for module in (layers, routing):
        monkeypatch.setattr(module, "MANY_ROWS", 1 if many else 10**6)


def assert_calls(
    seen: Seen,
    both: Any,
    tokens: Sequence[int],
    others: Sequence[int],
    check: Callable[[int], object],
    types: Any = USUAL,
    **said: Any,
) -> None:
    """Check results, with and without `out`, against the CPU's bits; run `check`; check that `others` share records."""
    hidden = (both[1] if isinstance(both[1], Tensor) else both[1][0]).shape[1]
    for number in tokens:
        one = tokens_of(number, types, hidden)
        one[1][number // 2 : number // 2 + 1] = 1  # a token that names an expert several times
        expected = right(*one, *both, **said)
        room = torch.full((number + 1, hidden), torch.nan, dtype=torch.bfloat16)
        for out in (None, room[:number]):
            seen.gpu.launches.clear()
            got = deep_gemm.experts(*one, *both, out=out, **said)
            assert same_bits(got if out is None else out, expected) and (got is None) == (out is not None), number
            check(number)
        assert bool(room[number:].isnan().all())
    assert seen.made.count(None) == 2 * tokens.count(0), "torch writes zeros for no tokens"
    seen.cleared()
    for number in others:
        one = tokens_of(number, types, hidden)
        assert same_bits(deep_gemm.experts(*one, *both, **said), right(*one, *both, **said))
    assert not seen.made, "other numbers of tokens use the same records"


@pytest.mark.parametrize("types", [USUAL, OTHER_TYPES])
@GATINGS
def test_calls_have_the_bits_of_the_cpu_by_few_records(seen: Seen, types: Any, said: Any) -> None:
    def check(tokens: int) -> None:
        assert not tokens or seen.names == (FEW if tokens <= 8 and types == USUAL else ALL)

    assert_calls(seen, weights(), (37, 1, 4, 130, 0), (36, 3, 129), check, types, **said)


@MANY_OR_NOT
@pytest.mark.parametrize("which", ["none", "w1 and w2", "w1", "w2"])
def test_few_and_many_rows_of_any_weights_have_the_bits_of_the_cpu(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, which: str, many: bool
) -> None:
    monkeypatch.setattr(test_distributed_decode, "HIDDEN", 256)
    take_as_many(monkeypatch, many)
    both = with_fp4(EXPERTS, which)
    for tokens in (17, 37):
        one = tokens_of(tokens, hidden=256)
        seen.gpu.launches.clear()
        assert same_bits(deep_gemm.experts(*one, *both), right(*one, *both))
        expected = MANY if many else ALL
        assert seen.names == expected[:4] + ["cast_rows"] * (many and "w1" in which) + expected[4:]
    assert None not in seen.made


@MANY_OR_NOT
@pytest.mark.parametrize("types", [USUAL, OTHER_TYPES])
@GATINGS
def test_bf16_weights_have_the_bits_of_the_cpu_by_one_record(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, types: Any, said: Any, many: bool
) -> None:
    """Sizes are multiples of 8, and no scale is in memory. With many rows the first product also activates."""
    take_as_many(monkeypatch, many)
    kernels = [*BY_BF16[:3], *BY_BF16[3 + (many and "activation" not in said) :]]

    def check(_: int) -> None:
        assert seen.names == kernels
        works = [each.config.work.name for each in seen.gpu.launches if each.kernel == "bf16_gemm"]
        assert works == [(ENDS if many else IDS).name] * 2
        assert [each.is_dependent for each in seen.gpu.launches] == [False, *[not many] * (len(kernels) - 1)]

    assert_calls(seen, bf16_weights(136, 72), (37, 1, 130), (36, 129), check, types, **said)


@pytest.mark.parametrize("types", [USUAL, (torch.bfloat16, torch.int32, torch.float16)])
@GATINGS
@pytest.mark.parametrize("form", ["BF16", "blocks", "rows", "rows, blocks"])
def test_few_tokens_stream_weights_by_one_record(seen: Seen, types: Any, said: Any, form: str) -> None:
    def check(tokens: int) -> None:
        assert seen.names == (FEW if tokens <= 8 else BY_BF16 if form == "BF16" else ALL)
        assert [each.is_dependent for each in seen.gpu.launches][:3] == [False, True, True]

    both = bf16_weights(inter=72) if form == "BF16" else on_cpu(weights_of)(form, EXPERTS, HIDDEN, 144)
    assert_calls(seen, both, (1, 8, 9, 17), (3, 15), check, types, **said)


def test_layers_that_the_kernel_of_few_tokens_is_not_for_take_the_usual_way(seen: Seen) -> None:
    x, ids, p = tokens_of(5)
    w1, w2 = bf16_weights()
    apart = torch.zeros(5, HIDDEN + 4).bfloat16()[:, :HIDDEN].copy_(x)
    wide = torch.empty(EXPERTS, 2 * INTER, HIDDEN + 8).bfloat16()[..., :HIDDEN].copy_(w1)
    off = torch.empty(5 * HIDDEN + 8).bfloat16()[4 : 5 * HIDDEN + 4].view(5, HIDDEN).copy_(x)
    calls: dict[str, tuple[Any, ...]] = {
        "x is rounded": (x.float(), ids, p, w1, w2),
        "rows of x begin at 8 bytes": (apart, ids, p, w1, w2),
        "x begins at 8 bytes": (off, ids, p, w1, w2),
        "rows of a weight lie apart": (x, ids, p, wide, w2),
        "a weight is MN-major": (x, ids, p, w1, w2.mT.contiguous().mT),
        "hidden is a multiple of 8 alone": (tokens_of(5, hidden=136)[0], ids, p, *bf16_weights(136)),
    }
    biases: dict[str, Any] = {"w1_bias": torch.ones(EXPERTS, 2 * INTER), "w2_bias": torch.ones(EXPERTS, HIDDEN)}
    calls |= dict.fromkeys(biases, (x, ids, p, w1, w2))
    for name, given in calls.items():
        more = {name: biases[name]} if name in biases else {}
        seen.cleared()
        got = deep_gemm.experts(*given, **more)
        assert seen.names == BY_BF16, name
        assert same_bits(got, right(*given, **more)), name
    seen.cleared()
    assert same_bits(deep_gemm.experts(x, ids, p, w1, w2), right(x, ids, p, w1, w2)) and seen.names == FEW


@pytest.mark.parametrize("most", [TOPK - 1, TOPK, EXPERTS])
@pytest.mark.parametrize("form", ["BF16", "blocks"])
def test_many_bytes_of_fp8_weights_take_the_usual_way(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, form: str, most: int
) -> None:
    both = bf16_weights() if form == "BF16" else weights()
    monkeypatch.setattr(experts_few, "MOST_BYTES", most * 3 * INTER * HIDDEN)
    for tokens in (1, 2, 5, 1):
        one, is_few = tokens_of(tokens), form == "BF16" or min(tokens * TOPK, EXPERTS) <= most
        seen.cleared()
        assert same_bits(deep_gemm.experts(*one, *both), right(*one, *both)) and seen.names == (FEW if is_few else ALL)


@pytest.mark.parametrize("form", ["BF16", "blocks"])
def test_the_last_token_of_a_long_text_may_have_any_pitch(seen: Seen, form: str) -> None:
    both = bf16_weights(inter=144) if form == "BF16" else on_cpu(weights_of)(form, EXPERTS, HIDDEN, 144)
    x, ids, p = tokens_of(1)
    far = x.as_strided(x.shape, (1 << 31, 1))
    assert same_bits(deep_gemm.experts(far, ids, p, *both), right(x, ids, p, *both)) and seen.names == FEW


@MANY_OR_NOT
@pytest.mark.parametrize("biases", ["", "1", "2", "12"])
@pytest.mark.parametrize("form", [*SCALED, "BF16"])
def test_scales_of_rows_and_biases_have_the_bits_of_the_cpu_by_one_record(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, form: str, biases: str, many: bool
) -> None:
    take_as_many(monkeypatch, many)
    both = on_cpu(weights_of)(form, EXPERTS, 256, 128)
    more: dict[str, Any] = {f"w{name}_bias": torch.randn(EXPERTS, 256) for name in biases}

    def check(_: int) -> None:
        casts = seen.names.count("cast_rows")
        assert (casts == 1) == (many and form in ("blocks", "BF16") and "1" not in biases)
        assert seen.names.count("lay_scales") == many * (form.startswith("blocks") or form == "FP4")
        assert [each.is_dependent for each in seen.gpu.launches[1:]] == [not many] * (len(seen.gpu.launches) - 1)

    assert_calls(seen, both, (17, 37), (36,), check, **more)
    three = tokens_of(3, hidden=256)
    for name, bias in more.items():
        with pytest.raises(ValueError, match=f"out: expected memory that does not overlap {name}"):
            deep_gemm.experts(*three, *both, **more, out=bias.view(torch.bfloat16)[:3, :256])
        with pytest.raises(ValueError, match=f"{name}: expected a tensor without a gradient"):
            deep_gemm.experts(*three, *both, **more | {name: bias.clone().requires_grad_()})


def test_mistakes_in_bf16_weights_are_refused_whatever_records_there_are(seen: Seen) -> None:
    (w1, w2), fp8 = bf16_weights(), weights()
    one = tokens_of(5)
    out = torch.empty_like(one[0])
    leaf = w1.clone().requires_grad_()
    deep_gemm.experts(*one, w1, w2)
    deep_gemm.experts(*one, leaf, w2, out=out)
    assert len(seen.made) == 2 and None not in seen.made
    seen.cleared()
    inside = w1[-1].view(-1)[: 5 * HIDDEN].view(5, HIDDEN)
    mistakes: tuple[tuple[str, type[Exception], Any, Any], ...] = (
        ("w1: .*gradient", ValueError, (leaf * 1, w2), {}),
        ("w2: expected a BF16 tensor, .*tuple", TypeError, (w1, fp8[1]), {}),
        ("w2: expected a pair .*Tensor", TypeError, (fp8[0], w2), {}),
        ("w1: expected dtype torch.bfloat16, got torch.float16", ValueError, (w1.half(), w2), {}),
        ("w2: .*dtype torch.bfloat16", ValueError, (w1, fp8[1][0]), {}),
        ("w1: .*hidden", ValueError, (w1[:, :, :-8], w2), {}),
        ("w1: .*multiple of 8 elements", ValueError, (torch.nn.functional.pad(w1, (0, 1))[..., :-1], w2), {}),
        ("out: .*overlap w1", ValueError, (w1, w2), {"out": inside}),
        ("gran_k: expected None, got 64 beside BF16", NotImplementedError, (w1, w2), {"gran_k": 64}),
        ("recipe_b: expected None", NotImplementedError, (w1, w2), {"recipe_b": (128, 128)}),
    )
    for message, error, both, more in mistakes:
        with pytest.raises(error, match=message):
            deep_gemm.experts(*one, *both, **more)
    assert not seen.names


@pytest.mark.parametrize("sizes", [(HIDDEN, INTER), (528, 16)])
@pytest.mark.parametrize("tokens", [1, 37, 682])
def test_parts_take_no_more_than_is_said(seen: Seen, sizes: tuple[int, int], tokens: int) -> None:
    """Check also sizes at which the second product's result does not fit into the first product's memory."""
    both, one = weights(*sizes), tokens_of(tokens, hidden=sizes[0])
    assert same_bits(deep_gemm.experts(*one, *both), right(*one, *both))
    parts = 10
    said = deep_gemm.experts_workspace_bytes(tokens, TOPK, EXPERTS, *sizes)
    assert 0 < max(seen.scratch) <= said + 256 * parts
    assert tokens < 682 or max(seen.scratch) < said


@pytest.mark.parametrize("form", ["few", "many"])
def test_a_record_launches_what_the_call_itself_does(seen: Seen, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """For few rows, a kernel may begin, and load its weight, before the previous kernel ends."""
    both, one = weights(inter=128), tokens_of(17)
    if form == "many":
        take_as_many(monkeypatch, True)
    ready: list[bool] = []
    compute = addressed_kernels.fp8_gemm_few_rows

    def computed(config: Any, p: Any) -> None:
        ready.append(bool(p["weight_is_ready"]))
        compute(config, p)

    monkeypatch.setattr(addressed_kernels, "fp8_gemm_few_rows", computed)
    launches = seen.by_record_as_without(lambda: deep_gemm.experts(*one, *both))
    assert [kernel for kernel, *_ in launches] == (MANY if form == "many" else ALL)
    assert [is_dependent for *_, is_dependent in launches] == [False, *[form == "few"] * (len(launches) - 1)]
    assert ready == [form == "few"] * len(ready)


def test_tokens_and_weights_may_lie_apart(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    (w1, sfw1), w2 = weights()
    x, ids, p = tokens_of(5)
    expected = right(x, ids, p, (w1, sfw1), w2)
    wide = torch.zeros(5, HIDDEN + 8).bfloat16()[:, :HIDDEN].copy_(x)
    off = torch.empty(x.nbytes + 16, dtype=torch.uint8)[2 : 2 + x.nbytes].view(torch.bfloat16).view(x.shape).copy_(x)
    far = torch.empty(4 * (1 << 20) + HIDDEN, dtype=x.dtype).as_strided((5, HIDDEN), (1 << 20, 1)).copy_(x)
    narrow = torch.empty(EXPERTS, 4 * INTER, HIDDEN, dtype=torch.uint8).view(w1.dtype)[:, : 2 * INTER].copy_(w1)
    experts: Any = deep_gemm.experts
    calls: dict[str, tuple[Any, ...]] = {
        "as usual": (x, ids, p, (w1, sfw1)),
        "rows apart": (wide, ids, p, (w1, sfw1)),
        "x begins anywhere": (off, ids, p, (w1, sfw1)),
        "rows far apart": (far, ids, p, (w1, sfw1)),
        "rows of ids apart": (x, torch.cat([ids, ids], 1)[:, :TOPK], p, (w1, sfw1)),
        "rows of weights apart": (x, ids, torch.cat([p, p], 1)[:, :TOPK], (w1, sfw1)),
        "columns apart": (x.t().contiguous().t(), ids, p, (w1, sfw1)),
        "experts apart": (x, ids, p, (narrow, sfw1)),
    }
    for name, given in calls.items():
        seen.cleared()
        for _ in range(2):
            assert same_bits(experts(*given, w2), expected), name
        assert (None in seen.made) == (name == "columns apart"), name
        assert name == "columns apart" or len(seen.made) == 1, name
    set_compile_mode(1)
    seen.cleared()
    deep_gemm.experts(x, ids, p, (w1, sfw1), w2)
    assert not seen.names


def test_mistakes_are_refused_whatever_records_there_are(seen: Seen) -> None:
    w1, w2 = weights()
    x, ids, p = tokens_of(5)
    out = torch.empty_like(x)
    deep_gemm.experts(x, ids, p, w1, w2)
    deep_gemm.experts(x, ids, p, w1, w2, out=out)
    with torch.no_grad():  # without grad mode, an output may require a gradient
        deep_gemm.experts(x, ids, p, w1, w2, out=out.clone().requires_grad_())
    deep_gemm.experts(x[:1], ids[:1], p[:1], w1, w2, out=out[:1].as_strided((1, HIDDEN), (16, 1)))  # for one row
    seen.cleared()
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
    assert not seen.names


def test_mistakes_in_weights_are_refused_whatever_records_there_are(seen: Seen) -> None:
    (w1, sfw1), w2 = weights()
    one = tokens_of(5)
    leaf, out = sfw1.clone().requires_grad_(), torch.empty_like(one[0])
    # An expert's rows have gaps behind them, so the last expert's rows end beyond the weight's number of bytes.
    wide = torch.empty(EXPERTS, 4 * INTER, HIDDEN, dtype=torch.uint8).view(w1.dtype)
    narrow = wide[:, : 2 * INTER].copy_(w1)
    deep_gemm.experts(*one, (w1, sfw1), w2)
    deep_gemm.experts(*one, (w1, leaf), w2)
    deep_gemm.experts(*one, (w1, sfw1), w2, recipe_b=(128, 128))
    deep_gemm.experts(*one, (narrow, sfw1), w2, out=out)
    assert len(seen.made) == 3 and None not in seen.made
    seen.cleared()
    inside = wide[-1, 2 * INTER - 10 : 2 * INTER].view(torch.bfloat16).view(5, HIDDEN)
    mistakes: tuple[tuple[str, type[Exception], Any, Any], ...] = (
        ("sfw1: .*gradient", ValueError, (w1, leaf * 1), {}),
        ("w1: .*a pair", TypeError, (w1, sfw1, sfw1), {}),
        ("sfw1: .*multiple of 4 bytes", ValueError, (w1, inside_of_an_element(sfw1)), {}),
        ("out: .*overlap w1", ValueError, (narrow, sfw1), {"out": inside}),
    )
    for message, error, given, more in mistakes:
        with pytest.raises(error, match=message):
            deep_gemm.experts(*one, given, w2, **more)
    assert not seen.names
    with pytest.raises(ValueError, match=r"gran_k: .*integer"):
        deep_gemm.experts(*one, (w1, sfw1), w2, recipe_b=(128.0, 128.0))  # type: ignore[arg-type]

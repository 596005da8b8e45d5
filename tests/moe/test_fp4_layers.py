"""Layers with FP4 weights (MXFP4): the bits of the same layer composed of its parts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp4_cases import FORMS, plain, random_weight
from layer_cases import assert_mistake, random_routes, same_bits
from test_experts import one_by_one
from torch import Tensor

import deep_gemm
from deep_gemm import experts, linear, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.gating import Gating
from deep_gemm.core.check.checks import Operand
from deep_gemm.moe import api as parts

NUM, HIDDEN, INTER = 5, 160, 96
fp8_fp4_gemm_nt: Any = deep_gemm.fp8_fp4_gemm_nt


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small(*shape: int, seed: int = 0, form: str = "bytes") -> Operand:
    """A weight whose numbers are about one in size."""
    values, scales = random_weight(*shape, seed=seed)
    return values.view(torch.int8), FORMS[form](scales // 8 + 110)


def call(tokens: int = 12, form: str = "bytes", **changes: Any) -> dict[str, Any]:
    return {
        "x": random(tokens, HIDDEN, seed=3),
        "topk_ids": random_routes(tokens, 3, NUM, seed=4),
        "topk_weights": random(tokens, 3, dtype=torch.float32, seed=5),
        "w1": small(NUM, 2 * INTER, HIDDEN, seed=1, form=form),
        "w2": small(NUM, HIDDEN, INTER, seed=2, form=form),
        **changes,
    }


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leading", [(), (2, 3), (0,)])
def test_a_linear_layer_is_cast_and_product(
    leading: tuple[int, ...], form: str, bias_dtype: torch.dtype | None
) -> None:
    x, w = random(*leading, HIDDEN), small(72, HIDDEN, form=form)
    bias = None if bias_dtype is None else (random(72, seed=3) * 1.001).to(bias_dtype)
    rows = x.reshape(-1, HIDDEN)
    d = torch.empty(len(rows), 72)
    fp8_fp4_gemm_nt(per_token_cast_to_fp8(rows), w, d, None if bias is None else bias.float().repeat(len(rows), 1))
    expected = d.to(torch.bfloat16).view(*leading, 72)
    assert same_bits(linear(x, w, bias=bias), expected)  # type: ignore[arg-type]
    out = torch.zeros(*leading, 72, dtype=torch.bfloat16)
    assert linear(x, w, bias=bias, out=out) is None
    assert same_bits(out, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_are_a_loop_over_experts(limit: float | None, form: str) -> None:
    arguments = call(form=form, limit=limit)
    assert same_bits(experts(**arguments), one_by_one(**arguments))  # type: ignore[arg-type]


def test_experts_are_near_the_layer_in_fp64() -> None:
    arguments = call(64)
    w1, w2 = (plain(arguments[name][0].view(torch.uint8), arguments[name][1]) for name in ("w1", "w2"))
    gate, up = torch.einsum("eik,tk->tei", w1, arguments["x"].double()).chunk(2, dim=-1)
    results = torch.einsum("eki,tei->tek", w2, torch.nn.functional.silu(gate) * up)
    ids, p = arguments["topk_ids"], arguments["topk_weights"].double()
    of_routes = results.gather(1, ids.clamp_min(0)[..., None].expand(-1, -1, HIDDEN))
    exact = (of_routes * (p * (ids >= 0))[..., None]).sum(1)
    out = experts(**arguments)
    assert out is not None
    assert deep_gemm.calc_diff(out, exact) < 2e-3


def test_one_weight_may_be_fp4_and_the_other_fp8() -> None:
    arguments = call(w2=per_block_cast_to_fp8(random(NUM, HIDDEN, INTER)))
    assert same_bits(experts(**arguments), one_by_one(**arguments))  # type: ignore[arg-type]


def test_many_rows_on_a_gpu_are_activated_behind_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that activates where it multiplies takes FP8 weights alone."""
    arguments = call()
    rows = deep_gemm.expert_rows(arguments["topk_ids"], NUM)
    a = deep_gemm.gather_cast_to_fp8(arguments["x"], rows)
    expected = parts.activations_of_rows(a, arguments["w1"], rows, Gating())

    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(parts, "is_hopper", lambda _: True)
    monkeypatch.setattr(parts, "activates_in_product", lambda *_: True)
    got = parts.activations_of_rows((a[0].as_subclass(OnGpu), a[1]), arguments["w1"], rows, Gating())
    assert same_bits(got[0], expected[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_have_the_same_bits(backend: str) -> None:
    arguments, w = call(), small(72, HIDDEN, form="e8m0")

    def layers(x: Tensor) -> Tensor:
        y = experts(**{**arguments, "x": x})
        assert y is not None
        z = linear(y, w)
        assert z is not None
        return z * 2

    torch._dynamo.reset()
    assert same_bits(torch.compile(layers, fullgraph=True, backend=backend)(arguments["x"]), layers(arguments["x"]))


def test_what_requires_a_gradient_is_refused() -> None:
    x, w, bias = random(3, HIDDEN), small(72, HIDDEN), random(72).requires_grad_()
    givens: list[dict[str, Any]] = [{"x": x.clone().requires_grad_()}, {"x": x, "bias": bias}]
    for given in givens:
        with pytest.raises(ValueError, match=r"^w: expected torch.float8_e4m3fn where x or bias requires a gradient"):
            linear(w=w, **given)
        with torch.no_grad():
            assert linear(w=w, **given) is not None
    arguments = call()
    arguments["x"] = arguments["x"].requires_grad_() * 1
    assert_mistake(experts, arguments, ValueError, "x: expected a tensor without a gradient")


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"w1": small(NUM, 2 * INTER, 192)},
        ValueError,
        "w1: expected shape (experts, 2 intermediate, hidden / 2) = (experts, 2 intermediate, 80), got (5, 192, 96)",
    ),
    (
        {"w2": small(NUM, HIDDEN, 64)},
        ValueError,
        "w1: expected 2 * intermediate = 128 rows, gate and up, where w2 has depth 64, got 192",
    ),
    ({"w2": (small(NUM, HIDDEN, 96)[0][..., 8:], None)}, TypeError, "sfw2: expected a tensor"),
    (
        {"w2": (small(NUM, HIDDEN, 96)[0][..., :40], torch.zeros(1))},
        ValueError,
        "intermediate: expected a multiple of 32 for",
    ),
    (
        {"w2": (small(NUM, HIDDEN, 96)[0], torch.zeros(NUM, 2, 1))},
        ValueError,
        "sfw2: expected shape (5, 160, 3) of torch.float32",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), MISTAKES, ids=[message[:30] for *_, message in MISTAKES])
def test_a_mistake_is_refused_in_words(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    assert_mistake(experts, call(**changes), error, message)

"""Layers with finer scales on a GPU, beside the reference on the CPU, beside their parts, and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import group_of_one
from layer_cases import fine_weight, random_routes, recipes, same_bits
from test_gpu_fp4_layers import check, on_gpu

import deep_gemm

pytestmark = pytest.mark.gpu
FINE = [(64, 64), (32, 32), (1, 32)]


def experts_call(tokens: int, of: tuple[int, int], form: str | None, hidden: int = 576, inter: int = 288) -> Any:
    x, p = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 3)
    w1, w2 = (
        fine_weight(*shape, of=of, form=form, seed=seed)
        for seed, shape in ((1, (8, 2 * inter, hidden)), (2, (8, hidden, inter)))
    )
    return x, random_routes(tokens, 3, 8), p, w1, w2


@pytest.mark.parametrize("gran_k", [None, 128])
@pytest.mark.parametrize("of", FINE, ids=str)
@pytest.mark.parametrize(("n", "k"), [(264, 1056), (576, 288), (2112, 576)])
@pytest.mark.parametrize("m", [1, 16, 17, 300])
def test_a_linear_layer(m: int, n: int, k: int, of: tuple[int, int], gran_k: int | None) -> None:
    x, w = torch.randn(m, k).bfloat16(), fine_weight(n, k, of=of)
    check(deep_gemm.linear, x, w, gran_k=gran_k)
    check(deep_gemm.linear, x, w, gran_k=gran_k, bias=torch.randn(n).bfloat16())


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [None, "bytes", "words", "words, MN-major"])
@pytest.mark.parametrize("m", [3, 300])
def test_a_linear_layer_is_cast_and_product(m: int, form: str | None, bias_dtype: torch.dtype | None) -> None:
    for of in FINE:
        x, w = on_gpu((torch.randn(m, 576).bfloat16(), fine_weight(264, 576, of=of, form=form)))
        bias = None if bias_dtype is None else torch.randn(264, device="cuda").to(bias_dtype)
        columns, said = recipes(of)
        d = torch.empty(m, 264, dtype=torch.float32 if bias_dtype == torch.float32 else torch.bfloat16, device="cuda")
        c = None if bias is None else bias.expand_as(d).contiguous()
        call: Any = deep_gemm.fp8_gemm_nt
        call(deep_gemm.per_token_cast_to_fp8(x, gran_k=columns), w, d, c, **said)
        for _ in range(3):  # the third is recognized, if scales are not copied
            got = deep_gemm.linear(x, w, bias=bias)
            assert got is not None
            assert same_bits(got.cpu(), d.bfloat16().cpu())


@pytest.mark.parametrize("form", [None, "e8m0", "words"])
@pytest.mark.parametrize("of", FINE, ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 1500])
def test_experts(tokens: int, of: tuple[int, int], form: str | None) -> None:
    """Both devices activate on their own: a sigmoid may be 2^-17 of itself away, and a cast a neighbour."""
    given = experts_call(tokens, of, form)
    for gran_k in (None, 128):
        right = deep_gemm.experts(*given, limit=0.5, gran_k=gran_k)
        got = deep_gemm.experts(*map(on_gpu, given), limit=0.5, gran_k=gran_k)
        assert got is not None
        assert right is not None
        assert deep_gemm.calc_diff(got.cpu(), right) < 1e-4


@pytest.mark.parametrize("form", [None, "e8m0"])
@pytest.mark.parametrize("of", FINE, ids=str)
def test_a_graph_sees_weights_that_were_refreshed_in_place(of: tuple[int, int], form: str | None) -> None:
    given = on_gpu(experts_call(40, of, form))
    out, y = torch.empty_like(given[0]), torch.empty(40, 264, dtype=torch.bfloat16, device="cuda")
    w = on_gpu(fine_weight(264, 576, of=of, form=form))

    def layers() -> None:
        deep_gemm.experts(*given, out=out)
        deep_gemm.linear(out, w, out=y)

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _, scales in (*given[3:], w):
        scales.data.copy_((scales.float() * 2).to(scales.dtype))
    graph.replay()
    replayed = y.clone()
    layers()
    assert same_bits(replayed.cpu(), y.cpu())


@pytest.mark.parametrize("gran_k", [None, 128])
@pytest.mark.parametrize("of", FINE, ids=str)
def test_experts_of_a_group_of_one(tmp_path: Path, of: tuple[int, int], gran_k: int | None) -> None:
    x, ids, p, w1, w2 = on_gpu(experts_call(12, of, "e8m0"))
    right = deep_gemm.experts(x, ids, p, w1, w2, gran_k=gran_k)
    assert right is not None
    with group_of_one(tmp_path):
        layer = deep_gemm.distributed.Experts(8, w1, w2, max_tokens=16, gran_k=gran_k)
        for got in (layer(x, ids, p), layer.decode(x, ids, p)):
            assert got is not None
            assert same_bits(got.cpu(), right.cpu())
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
        with torch.cuda.graph(graph):
            layer.decode(x, ids, p, out=out)
        graph.replay()
        assert same_bits(out.cpu(), right.cpu())

"""Layers with finer scales on a GPU, compared with the reference on the CPU and with their parts, and in graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4_cases import FORMS, random_weight
from helpers import captured, group_of_one, same_bits, some
from layer_cases import fine_weight, random_routes, recipes
from mega_cases import Model, chain, fill, result, transformed
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.gemm.api.grouped import product_of_rows_by_64

pytestmark = pytest.mark.gpu
FINE = [(64, 64), (32, 32), (1, 32)]


def experts_call(tokens: int, of: tuple[int, int], form: str | None, hidden: int = 576, inter: int = 288) -> Any:
    x, p = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 3)
    w1 = fine_weight(8, 2 * inter, hidden, of=of, form=form, seed=1)
    return x, random_routes(tokens, 3, 8), p, w1, fine_weight(8, hidden, inter, of=of, form=form, seed=2)


def check_experts(given: Any, **said: Any) -> None:
    """Compare results of both devices. Sigmoids may have a relative error of 2^-17; a cast may be one FP8 step off."""
    right = some(deep_gemm.experts(*given, **said))
    assert deep_gemm.calc_diff(some(deep_gemm.experts(*on_gpu(given), **said)).cpu(), right) < 1e-4


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
        for _ in range(3):  # a record serves the third call, if scales are not copied
            got = some(deep_gemm.linear(x, w, bias=bias))
            assert same_bits(got.cpu(), d.bfloat16().cpu())


@pytest.mark.parametrize("form", [None, "e8m0", "words"])
@pytest.mark.parametrize("of", FINE, ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 1500])
def test_experts(tokens: int, of: tuple[int, int], form: str | None) -> None:
    for gran_k in (None, 128):
        check_experts(experts_call(tokens, of, form), limit=0.5, gran_k=gran_k)


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
    graph, _ = captured(layers)
    for _, scales in (*given[3:], w):
        scales.data.copy_((scales.float() * 2).to(scales.dtype))
    graph.replay()
    replayed = y.clone()
    layers()
    assert same_bits(replayed.cpu(), y.cpu())


def check_group_of_one(at: Path, given: Any, *, gran_k: int | None = None, peer_memory: bool = False) -> None:
    """Check that a group of one computes the result of one GPU, also in a graph."""
    x, ids, p, w1, w2 = on_gpu(given)
    right = some(deep_gemm.experts(x, ids, p, w1, w2, gran_k=gran_k))
    with group_of_one(at):
        layer = deep_gemm.distributed.Experts(8, w1, w2, max_tokens=16, gran_k=gran_k, peer_memory=peer_memory)
        for got in (layer(x, ids, p), layer.decode(x, ids, p)):
            assert same_bits(some(got).cpu(), right.cpu())
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
        with torch.cuda.graph(graph):
            layer.decode(x, ids, p, out=out)
        graph.replay()
        assert same_bits(out.cpu(), right.cpu())
        layer.check()


@pytest.mark.parametrize("gran_k", [None, 128])
@pytest.mark.parametrize("of", FINE, ids=str)
def test_experts_of_a_group_of_one(tmp_path: Path, of: tuple[int, int], gran_k: int | None) -> None:
    check_group_of_one(tmp_path, experts_call(12, of, "e8m0"), gran_k=gran_k)


# FP4 weights on a GPU: products of grouped rows, layers and mega MoE, compared with the CPU's reference; in graphs.


NEAR = 1e-6
"""calc_diff of two BF16 results whose sums differ in their last bits: a few elements round differently."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # finer scales of A are slow
        yield


def on_gpu(given: Any) -> Any:
    """Copy all tensors to the GPU, in the same strides."""
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda").copy_(given)
    return tuple(map(on_gpu, given)) if isinstance(given, tuple) else given


def small(*shape: int, seed: int = 0, form: str = "e8m0") -> Operand:
    values, scales = random_weight(*shape, seed=seed)
    return values.view(torch.int8), FORMS[form](scales // 8 + 107)


def rows(*shape: int, columns: int = 128) -> Operand:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=columns)


def check(call: Any, *given: Any, **said: Any) -> None:
    """Check that a call gives nearly the same result on both devices, and the same bits each time on the GPU."""
    right = call(*given, **said)
    got = call(*map(on_gpu, given), **{name: on_gpu(each) for name, each in said.items()})
    again = call(*map(on_gpu, given), **{name: on_gpu(each) for name, each in said.items()})
    assert deep_gemm.calc_diff(got.cpu(), right) < NEAR
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [32, 288, 2880])
@pytest.mark.parametrize("m", [5, 200, 1500])
def test_stacked_rows(m: int, k: int, form: str) -> None:
    a, b = rows(m, k), small(3, 264, k, form=form)
    ids = torch.arange(m, dtype=torch.int32) * 3 // m
    check(deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous, a, b, grouped_layout=ids)
    turned = b[0].mT, b[1].mT
    check(deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous, a, turned, grouped_layout=ids)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("columns", [32, 128])
def test_scales_of_a_in_every_form(columns: int, packed: bool) -> None:
    (x, sx), b = rows(300, 1056, columns=columns), small(3, 264, 1056)
    if packed:
        sx = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sx)
    said = {"recipe_a": (1, columns), "recipe_b": (1, 32), "num_groups": 3}
    check(deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous, (x, sx), b, **said)


def test_scales_of_a_for_64_columns() -> None:
    a, b, ids = rows(300, 1056, columns=64), small(3, 264, 1056), torch.arange(300, dtype=torch.int32) // 100

    def call(a: Any, b: Any, ids: Tensor) -> Tensor:
        d = torch.empty(300, 264, dtype=torch.bfloat16, device=ids.device)
        product_of_rows_by_64(a, b, d, ids)
        return d

    check(call, a, b, ids)


@pytest.mark.parametrize("alignment", [8, 128])
def test_ends(alignment: int) -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    ends = torch.tensor([3, 3, 300], dtype=torch.int32)
    a, b = rows(300, 512), small(3, 264, 512)
    a[0].view(torch.uint8)[3:alignment] = 0
    check(deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous, a, b, grouped_layout=ends, use_psum_layout=True)


@pytest.mark.parametrize("max_m", [16, 48, 300])
@pytest.mark.parametrize("form", FORMS)
def test_counted_rows(max_m: int, form: str) -> None:
    a, b = rows(4, max_m, 1024), small(4, 512, 1024, form=form)
    counts = torch.tensor([max_m, 0, 1, max_m // 2], dtype=torch.int32)

    def call(a: Any, b: Any, counts: Tensor) -> Tensor:
        d = torch.zeros(4, max_m, 512, dtype=torch.bfloat16, device=counts.device)
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, counts, max_m)
        return d

    check(call, a, b, counts)


@pytest.mark.parametrize("m", [1, 16, 17, 300])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_a_linear_layer_with_fp4(form: str, bias_dtype: torch.dtype | None, m: int) -> None:
    x, w = torch.randn(m, 1056).bfloat16(), small(264, 1056, form=form)
    check(deep_gemm.linear, x, w, bias=None if bias_dtype is None else torch.randn(264).to(bias_dtype))


@pytest.mark.parametrize("tokens", [1, 40, 1500])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_with_fp4(limit: float | None, tokens: int) -> None:
    ids, p = random_routes(tokens, 3, 8), torch.rand(tokens, 3)
    given = torch.randn(tokens, 512).bfloat16(), ids, p, small(8, 768, 512, seed=1), small(8, 512, 384, seed=2)
    check_experts(given, limit=limit)


def test_a_graph_sees_a_weight_that_was_refreshed_in_place() -> None:
    """Scales fold at the capture, but not at the replay: the kernel decides whether scales fold, not the host."""
    x, ids, p = torch.randn(40, 512).bfloat16(), random_routes(40, 3, 8), torch.rand(40, 3)
    w1, w2 = small(8, 768, 512, seed=1), small(8, 512, 384, seed=2)
    given = on_gpu((x, ids, p, w1, w2))
    out = torch.empty(40, 512, dtype=torch.bfloat16, device="cuda")
    deep_gemm.experts(*given, out=out)
    graph, _ = captured(deep_gemm.experts, *given, out=out)
    scales = w1[1].view(torch.uint8).clone()
    scales[..., ::2] -= 16
    given[3][1].view(torch.uint8).data.copy_(scales)
    graph.replay()
    right = some(deep_gemm.experts(x, ids, p, (w1[0], scales), w2))
    assert deep_gemm.calc_diff(out.cpu(), right) < 1e-4


@pytest.mark.parametrize("peer_memory", [False, True])
def test_experts_of_a_group_of_one_with_fp4(tmp_path: Path, peer_memory: bool) -> None:
    # All scales fold. Otherwise products of few rows and of rows sent to addresses would add up in different orders.
    weights = small(8, 768, 512, seed=1), small(8, 512, 384, seed=2)
    w1, w2 = ((w, scales.view(torch.uint8) // 4 + 92) for w, scales in weights)
    given = torch.randn(12, 512).bfloat16(), random_routes(12, 3, 8), torch.rand(12, 3), w1, w2
    check_group_of_one(tmp_path, given, peer_memory=peer_memory)


@pytest.mark.parametrize("count", [0, 1, 33, 700])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_mega_moe_is_the_chain(clamp: float | None, count: int) -> None:
    model = Model(512, 256, 16, 4, is_fp4=True)
    tokens, weights = model.tokens(count, seed=7), model.weights()
    l1, l2 = on_gpu(weights)
    got = result(model.buffer(max(count, 1)), on_gpu(tokens), l1, l2, clamp=clamp)
    assert count == 0 or deep_gemm.calc_diff(got.cpu(), chain(tokens, *weights, clamp)) < 1e-4


def test_a_graph_of_mega_moe_is_replayed_with_other_tokens() -> None:
    model = Model(512, 256, 16, 4, is_fp4=True)
    l1, l2 = transformed(*model.weights("cuda"))
    buffer, y = model.buffer(), torch.empty(24, 512, dtype=torch.bfloat16, device="cuda")
    fill(buffer, model.tokens(24, "cuda"))
    deep_gemm.fp8_fp4_mega_moe(y, l1, l2, buffer)
    torch.cuda.synchronize()
    graph, _ = captured(deep_gemm.fp8_fp4_mega_moe, y, l1, l2, buffer)
    for seed in range(3):
        fill(buffer, model.tokens(24, "cuda", seed=10 + seed))
        y.fill_(torch.nan)
        graph.replay()
        replayed = y.clone()
        deep_gemm.fp8_fp4_mega_moe(y, l1, l2, buffer)
        assert torch.equal(replayed.view(torch.int16), y.view(torch.int16))

"""Operators on a GPU: compiled calls give the bits of eager calls, and CUDA graphs are replayed with other contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import deep_gemm
from deep_gemm import calc_diff

pytestmark = pytest.mark.gpu

N, K, GROUPS, TOPK, HIDDEN, INTERMEDIATE = 256, 1024, 4, 2, 512, 256


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def weights() -> Any:
    return (
        deep_gemm.per_block_cast_to_fp8(numbers(N, K)),
        deep_gemm.per_block_cast_to_fp8(numbers(GROUPS, 2 * INTERMEDIATE, HIDDEN)),
        deep_gemm.per_block_cast_to_fp8(numbers(GROUPS, HIDDEN, INTERMEDIATE)),
    )


def gated(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Any, w2: Any) -> Any:
    """Compute a mixture of experts part by part."""
    rows = deep_gemm.expert_rows(topk_ids, GROUPS)
    a = deep_gemm.gather_cast_to_fp8(x, rows, mn_major=True)
    h: Any = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, w1, grouped_layout=rows.ids)
    a = deep_gemm.silu_mul_cast_to_fp8(h, mn_major=True)
    y: Any = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, w2, grouped_layout=rows.ids)
    return deep_gemm.gather_weighted(y, rows, topk_weights)


def model() -> Callable[..., Any]:
    """Make a model of dense and grouped products, casts and layers, with torch's own operations between them."""
    b, w1, w2 = weights()

    def compute(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Any:
        y: Any = deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x.relu(), mn_major=True), b)
        z: Any = deep_gemm.linear(x * 2, b)
        h = x[:, :HIDDEN]
        parts, whole = gated(h, topk_ids, topk_weights, w1, w2), deep_gemm.experts(h, topk_ids, topk_weights, w1, w2)
        return y + z, parts, whole

    return compute


def inputs(m: int) -> Sequence[Tensor]:
    topk_ids = torch.randint(-1, GROUPS, (m, TOPK), device="cuda")
    return numbers(m, K), topk_ids, torch.rand(m, TOPK, device="cuda")


def assert_equal(got: Any, expected: Any) -> None:
    for x, y in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert x.shape == y.shape
        assert x.stride() == y.stride()
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_any_number_of_rows(backend: str) -> None:
    compute, counter = model(), torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(compute, fullgraph=True, backend=counter)
    for m in (6, 4, 33, 300):
        given = inputs(m)
        if m == 6:
            for x in given:
                torch._dynamo.mark_dynamic(x, 0)
        assert_equal(compiled(*given), compute(*given))
    assert counter.frame_count == 1


def test_cuda_graphs_are_replayed_with_other_contents() -> None:
    compute = model()
    compiled = torch.compile(compute, fullgraph=True, mode="reduce-overhead")
    for _ in range(6):  # the first calls run, the next is captured, the others are replayed
        given = inputs(32)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        assert_equal([x.clone() for x in compiled(*given)], compute(*given))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_outputs_of_the_caller_are_written(mode: str) -> None:
    (b, _, _), grad = weights(), deep_gemm.per_token_cast_to_fp8(numbers(N, K), mn_major=True)

    def write(x: Tensor, d: Tensor, total: Tensor) -> None:
        a = deep_gemm.per_token_cast_to_fp8(x, mn_major=True)
        deep_gemm.fp8_gemm_nt(a, b, d)
        deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, grad, total)

    compiled = torch.compile(write, fullgraph=True, mode=mode)
    d, total = numbers(64, N), torch.zeros(64, N, device="cuda")
    expected_d, expected_total = d.clone(), total.clone()
    for _ in range(4):
        x = numbers(64, K)
        compiled(x, d, total)
        write(x, expected_d, expected_total)
        assert_equal((d, total), (expected_d, expected_total))


def test_counts_and_depths_that_only_the_gpu_knows() -> None:
    w = deep_gemm.per_block_cast_to_fp8(numbers(GROUPS, N, K))

    def compute(x: Tensor, counts: Tensor, rows: Tensor, columns: Tensor, ks: Tensor) -> Any:
        a = deep_gemm.per_token_cast_to_fp8(x, mn_major=True, masked_m=counts)
        d = torch.zeros(GROUPS, 32, N, device="cuda", dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, w, d, counts, 16)
        p, q = (deep_gemm.k_grouped_cast_to_fp8(operand, [128, 256], mn_major=True) for operand in (rows, columns))
        return d, deep_gemm.k_grouped_fp8_gemm_nt_contiguous(p, q, ks_tensor=ks)

    compiled = torch.compile(compute, fullgraph=True, mode="reduce-overhead")
    ks = torch.tensor([128, 256], device="cuda", dtype=torch.int32)
    for turn in range(5):
        counts = torch.tensor([turn, 32, 0, 7], device="cuda", dtype=torch.int32)
        given = numbers(GROUPS, 32, K), counts, numbers(128, 384), numbers(256, 384), ks
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        assert_equal([x.clone() for x in compiled(*given)], compute(*given))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_run(strict: bool) -> None:
    class Computing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.compute = model()

        def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Any:
            return self.compute(x, topk_ids, topk_weights)

    module, m = Computing(), torch.export.Dim("m")
    program = torch.export.export(module, tuple(inputs(6)), dynamic_shapes=({0: m},) * 3, strict=strict)
    given = inputs(50)
    assert_equal(program.module()(*given), module(*given))


def test_operators_are_what_torch_asks_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    allclose = torch.allclose  # torch.allclose does not support FP8
    monkeypatch.setattr(torch, "allclose", lambda x, y, **how: allclose(x.float(), y.float(), **how))
    ops, check = torch.ops.deep_gemm, torch.library.opcheck
    b, w1, w2 = weights()
    x, topk_ids, topk_weights = inputs(8)
    a = deep_gemm.per_token_cast_to_fp8(x, mn_major=True)
    check(ops.fp8_gemm_nt.default, (*a, *b))
    check(ops.fp8_gemm_nt.into, (*a, *b, torch.zeros(8, N, device="cuda")), {"adds_to_d": True})
    check(ops.per_token_cast_to_fp8.default, (x,), {"mn_major": True})
    check(ops.cast_both_to_fp8.default, (x,))
    check(ops.expert_rows.default, (topk_ids.clamp_min(0), GROUPS))
    check(ops.linear.default, (x, *b))
    check(ops.experts.default, (x[:, :HIDDEN].contiguous(), topk_ids, topk_weights, *w1, *w2))


def test_the_layer_is_right() -> None:
    """Compare the layer with FP32, not only with an eager call."""
    b, _, _ = weights()
    weight = b[0].float() * b[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    x = numbers(64, K)
    y: Any = torch.compile(lambda x: deep_gemm.linear(x, b), fullgraph=True)(x)
    assert calc_diff(y, x.float() @ weight.t()) < 1e-3

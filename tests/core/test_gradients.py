"""Which public functions have gradients, and which refuse what would lose one: no gradient is cut without a word."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from mega_cases import filling
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import deep_gemm
from deep_gemm import per_block_cast_to_fp8, per_token_cast_to_fp8

Pass = Callable[[Tensor], Any]
"""Passes a tensor on as it is, or as autograd sees it."""

M, N, K, GROUPS = 8, 16, 128, 2
X = torch.ones(M, K)
SX = torch.ones(M, 1)
HALF = X.bfloat16()
A, B = per_token_cast_to_fp8(X), per_block_cast_to_fp8(torch.ones(N, K))
PER_ROW = per_token_cast_to_fp8(torch.ones(N, K))
W = per_block_cast_to_fp8(torch.ones(GROUPS, N, K))
W1, W2 = per_block_cast_to_fp8(torch.ones(GROUPS, 2 * N, K)), per_block_cast_to_fp8(torch.ones(GROUPS, K, N))
IDS = torch.zeros(M, 1, dtype=torch.int64)
P = torch.ones(M, 1)
LAYOUT = torch.zeros(M, dtype=torch.int32)
ROWS = deep_gemm.expert_rows(IDS, GROUPS)
KS = [K]
GROUPED = deep_gemm.k_grouped_cast_to_fp8(X, KS), deep_gemm.k_grouped_cast_to_fp8(torch.ones(N, K), KS)
OF_2025 = (GROUPED[0][0], GROUPED[0][1].t()), (GROUPED[1][0], GROUPED[1][1].t())
A_OF_GROUPS = A[0].expand(GROUPS, M, K).contiguous(), A[1].expand(GROUPS, *A[1].shape).contiguous()
HEADS = per_token_cast_to_fp8(torch.ones(M, 2, K)), per_block_cast_to_fp8(torch.ones(2, N, K))
L1, L2 = per_block_cast_to_fp8(torch.ones(2, 256, 256)), per_block_cast_to_fp8(torch.ones(2, 256, 128))


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fill(t: Pass, name: str) -> None:
    """Fill a buffer, one of the arguments being passed on by t."""
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 2, 128, 1, 256, 128)
    given = filling(buffer, torch.ones(M, 256), IDS, P)
    deep_gemm.mega_moe_pre_dispatch_sm90(**{key: t(x) if key == name else x for key, x in given.items()})


def mega(t: Pass) -> None:
    """Compute a mega MoE whose y is passed on by t."""
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 2, 128, 1, 256, 128)
    deep_gemm.fp8_mega_moe(t(bf16(0, 256)), L1, L2, buffer)


def mega_fp4(t: Pass) -> None:
    """The same with FP4 weights."""
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 2, 128, 1, 256, 128)
    l1 = torch.zeros(2, 256, 128, dtype=torch.uint8), torch.zeros(2, 256, 8, dtype=torch.uint8)
    deep_gemm.fp8_fp4_mega_moe(t(bf16(0, 256)), l1, (l1[0][..., :64], l1[1][..., :4]), buffer)


OPERANDS: list[tuple[str, Callable[[Pass], Any]]] = [
    ("per_token_cast_to_fp8 x", lambda t: per_token_cast_to_fp8(t(X))),
    ("per_token_cast_to_fp8 x", lambda t: per_token_cast_to_fp8(t(X), True, use_packed_ue8m0=True)),
    ("per_channel_cast_to_fp8 x", lambda t: deep_gemm.per_channel_cast_to_fp8(t(X))),
    ("per_block_cast_to_fp8 x", lambda t: per_block_cast_to_fp8(t(X))),
    ("per_custom_dims_cast_to_fp8 x", lambda t: deep_gemm.per_custom_dims_cast_to_fp8(t(X), (1,))),
    ("cast_both_to_fp8 x", lambda t: deep_gemm.cast_both_to_fp8(t(X))),
    ("k_grouped_cast_to_fp8 x", lambda t: deep_gemm.k_grouped_cast_to_fp8(t(X), KS)),
    ("per_token_cast_to_fp4 x", lambda t: deep_gemm.per_token_cast_to_fp4(t(X))),
    ("quantize_mxfp4 w", lambda t: deep_gemm.quantize_mxfp4(t(X))),
    ("cast_back_from_fp8 x", lambda t: deep_gemm.cast_back_from_fp8(t(A[0]), A[1])),
    ("cast_back_from_fp8 sf", lambda t: deep_gemm.cast_back_from_fp8(A[0], t(A[1]))),
    ("silu_mul_cast_to_fp8 x", lambda t: deep_gemm.silu_mul_cast_to_fp8(t(X))),
    ("silu_mul_cast_to_fp8 row_weights", lambda t: deep_gemm.silu_mul_cast_to_fp8(X, t(P[:, 0]))),
    ("gather_cast_to_fp8 x", lambda t: deep_gemm.gather_cast_to_fp8(t(X), ROWS)),
    ("gather_weighted y", lambda t: deep_gemm.gather_weighted(t(X), ROWS, P)),
    ("gather_weighted topk_weights", lambda t: deep_gemm.gather_weighted(X, ROWS, t(P))),
    ("experts x", lambda t: deep_gemm.experts(t(X), IDS, P, W1, W2)),
    ("experts topk_weights", lambda t: deep_gemm.experts(X, IDS, t(P), W1, W2)),
    ("experts sfw2", lambda t: deep_gemm.experts(X, IDS, P, W1, (W2[0], t(W2[1])))),
    ("linear sfw", lambda t: deep_gemm.linear(X, (B[0], t(B[1])))),
    ("fp8_gemm_nt a", lambda t: deep_gemm.fp8_gemm_nt((t(A[0]), A[1]), B)),
    ("get_mn_major_tma_aligned_tensor sf", lambda t: deep_gemm.get_mn_major_tma_aligned_tensor(t(SX))),
    (
        "transform_sf_into_required_layout sf",
        lambda t: deep_gemm.transform_sf_into_required_layout(t(SX), M, K, (1, 128, 128), is_sfa=True),
    ),
    ("pack_ue8m0_to_int x", lambda t: deep_gemm.pack_ue8m0_to_int(t(SX.view(1, M)))),
    (
        "get_mn_major_tma_aligned_packed_ue8m0_tensor sf",
        lambda t: deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(t(SX)),
    ),
    (
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor sf",
        lambda t: deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(t(SX), None, [K * M], 128, 128),
    ),
    ("mega_moe_pre_dispatch_sm90 x", lambda t: fill(t, "x")),
    ("mega_moe_pre_dispatch_sm90 topk_weights", lambda t: fill(t, "topk_weights")),
]
"""A function, the argument that it refuses, and a call of it."""


def dense(family: str, major: str) -> tuple[str, Callable[[Pass], Any]]:
    """A dense product whose d is passed on by t."""

    def turned(given: Any, is_turned: bool) -> Any:
        return (tuple(x.t() for x in given) if isinstance(given, tuple) else given.t()) if is_turned else given

    a, b = (A, B) if family == "fp8_gemm" else (HALF, bf16(N, K))
    a, b, product = turned(a, major[0] == "t"), turned(b, major[1] == "n"), getattr(deep_gemm, f"{family}_{major}")
    return f"{family}_{major} d", lambda t: product(a, b, t(bf16(M, N)))


def added_to_d(t: Pass) -> None:
    d = t(bf16(M, N))
    deep_gemm.fp8_gemm_nt(A, B, d, d)


OUTPUTS: list[tuple[str, Callable[[Pass], Any]]] = [
    *(dense(name, major) for name in ("fp8_gemm", "bf16_gemm", "cublaslt_gemm") for major in ("nt", "nn", "tn", "tt")),
    ("fp8_gemm_nt d", added_to_d),
    ("wgrad_gemm_fp8_fp8_fp32_nt d", lambda t: deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(A, PER_ROW, t(torch.zeros(M, N)))),
    (
        "m_grouped_fp8_gemm_nt_contiguous d",
        lambda t: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, W, t(bf16(M, N)), LAYOUT),
    ),
    (
        "m_grouped_fp8_gemm_nn_contiguous d",
        lambda t: deep_gemm.m_grouped_fp8_gemm_nn_contiguous(A, (W[0].mT, W[1].mT), t(bf16(M, N)), LAYOUT),
    ),
    (
        "m_grouped_fp8_gemm_nt_masked d",
        lambda t: deep_gemm.m_grouped_fp8_gemm_nt_masked(A_OF_GROUPS, W, t(bf16(GROUPS, M, N)), LAYOUT[:GROUPS]),
    ),
    (
        "k_grouped_fp8_gemm_nt_contiguous d",
        lambda t: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*GROUPED, t(torch.zeros(1, M, N)), KS),
    ),
    (
        "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt d",
        lambda t: deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(*OF_2025, t(torch.zeros(1, M, N)), KS),
    ),
    (
        "m_grouped_bf16_gemm_nt_contiguous d",
        lambda t: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(HALF, bf16(GROUPS, N, K), t(bf16(M, N)), LAYOUT),
    ),
    (
        "m_grouped_bf16_gemm_nn_contiguous d",
        lambda t: deep_gemm.m_grouped_bf16_gemm_nn_contiguous(HALF, bf16(GROUPS, K, N), t(bf16(M, N)), LAYOUT),
    ),
    (
        "m_grouped_bf16_gemm_nt_masked d",
        lambda t: deep_gemm.m_grouped_bf16_gemm_nt_masked(
            bf16(GROUPS, M, K), bf16(GROUPS, N, K), t(bf16(GROUPS, M, N)), LAYOUT[:GROUPS]
        ),
    ),
    (
        "k_grouped_bf16_gemm_tn_contiguous d",
        lambda t: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(bf16(K, 8), bf16(K, N), t(torch.zeros(1, 8, N)), KS),
    ),
    ("einsum d", lambda t: deep_gemm.einsum("bmk,bnk->mn", bf16(2, M, K), bf16(2, N, K), t(bf16(M, N)))),
    ("einsum d", lambda t: deep_gemm.einsum("bhr,hdr->bhd", bf16(M, 2, K), bf16(2, N, K), t(bf16(M, 2, N)))),
    ("batched_syrk d", lambda t: deep_gemm.batched_syrk(bf16(2, N, K), t(bf16(2, N, N)))),
    ("batched_symm d", lambda t: deep_gemm.batched_symm(bf16(2, N, N), bf16(2, N, N), t(bf16(2, N, N)))),
    ("fp8_einsum d", lambda t: deep_gemm.fp8_einsum("bhr,hdr->bhd", *HEADS, t(bf16(M, 2, N)))),
    (
        "fp8_gemm_nt_skip_head_mid d",
        lambda t: deep_gemm.fp8_gemm_nt_skip_head_mid(
            A, per_block_cast_to_fp8(torch.ones(32, K)), t(bf16(M, 40)), (16, 8, 16)
        ),
    ),
    (
        "tf32_hc_prenorm_gemm d",
        lambda t: deep_gemm.tf32_hc_prenorm_gemm(HALF, torch.ones(8, K), t(torch.zeros(M, 8)), torch.zeros(M)),
    ),
    (
        "tf32_hc_prenorm_gemm sqr_sum",
        lambda t: deep_gemm.tf32_hc_prenorm_gemm(HALF, torch.ones(8, K), torch.zeros(M, 8), t(torch.zeros(M))),
    ),
    ("linear out", lambda t: deep_gemm.linear(X, B, out=t(bf16(M, N)))),
    ("experts out", lambda t: deep_gemm.experts(X, IDS, P, W1, W2, out=t(bf16(M, K)))),
    ("gather_weighted out", lambda t: deep_gemm.gather_weighted(X, ROWS, P, out=t(bf16(M, K)))),
    ("fp8_mega_moe y", mega),
    ("fp8_fp4_mega_moe y", mega_fp4),
    ("mega_moe_pre_dispatch_sm90 buf_x_sf", lambda t: fill(t, "buf_x_sf")),
]
"""A function, the output that it refuses, and a call of it."""


def named(cases: list[tuple[str, Callable[[Pass], Any]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "call"), cases, ids=[name for name, _ in cases])


def learned(x: Tensor) -> Tensor:
    """Give x as something computed from a tensor that requires a gradient."""
    return x.detach().clone().requires_grad_().clone()


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def refused(name: str) -> Any:
    return pytest.raises(ValueError, match=rf"^{name.split()[1]}: expected a tensor without a gradient, got one that")


@named(OPERANDS)
def test_what_was_computed_from_something_trained_is_refused(name: str, call: Callable[[Pass], Any]) -> None:
    with refused(name):
        call(learned)
    with refused(name):
        call(lambda x: learned(x)[:])
    with torch.no_grad():
        call(learned)
    with torch.inference_mode():
        call(lambda x: x)


@named(OPERANDS)
def test_parameters_and_views_of_them_are_let_through(name: str, call: Callable[[Pass], Any]) -> None:
    """The others may require a gradient without being trained, as weights in FP8 do."""
    gives_them_back = name in ("get_mn_major_tma_aligned_tensor sf", "transform_sf_into_required_layout sf")
    for way in (leaf, lambda x: leaf(x)[:]):
        made = [x for x in tree_leaves(call(way)) if isinstance(x, Tensor)]
        assert gives_them_back or not any(x.requires_grad for x in made)


@named(OUTPUTS)
def test_an_output_that_requires_a_gradient_is_refused(name: str, call: Callable[[Pass], Any]) -> None:
    for way in (leaf, learned):
        with refused(name):
            call(way)
    with torch.no_grad():
        call(leaf)
    call(lambda x: x)


TRACED = [case for case in (*OPERANDS, *OUTPUTS) if "mega" not in case[0]]


@named(TRACED)
def test_fake_tensors_are_refused_too(name: str, call: Callable[[Pass], Any]) -> None:
    """Check the refusal on fake tensors, which have no values, as while a model is traced."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, refused(name):
        call(lambda x: learned(mode.from_tensor(x)))


COMPILED: dict[str, Callable[[Tensor], Any]] = {
    "per_token_cast_to_fp8 x": lambda x: per_token_cast_to_fp8(x)[0].float(),
    "silu_mul_cast_to_fp8 x": lambda x: deep_gemm.silu_mul_cast_to_fp8(x)[0].float(),
    "gather_cast_to_fp8 x": lambda x: deep_gemm.gather_cast_to_fp8(x, ROWS)[0].float(),
    "gather_weighted y": lambda x: deep_gemm.gather_weighted(x, ROWS, P),
    "experts x": lambda x: deep_gemm.experts(x, IDS, P, W1, W2),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_functions_refuse_it_and_run_without_gradients(name: str) -> None:
    def inside(x: Tensor) -> Any:
        return COMPILED[name](x * 2)

    def without(x: Tensor) -> Any:
        with torch.no_grad():
            y = COMPILED[name](x * 2)
        return y.sum() + x

    torch._dynamo.reset()
    x = leaf(X)
    with pytest.raises(Exception, match=rf"{name.split()[1]}: expected a tensor without a gradient"):
        torch.compile(inside, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(x), inside(x))
    torch._dynamo.reset()
    y = torch.compile(without, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert torch.equal(y, without(x))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


TYPES = "Tensor", "Operand"
WITHOUT_ONE = """
    align bench bench_kineto calc_diff ceil_div cell_div expert_rows explain get_paged_mqa_logits_metadata
    transform_weights_for_mega_moe transform_weights_for_mega_moe_sm90 transpose_packed_fp4 unpack_ue8m0_from_int
    cast_back_from_fp4 ceil_to_ue8m0 uneven_all_gather
    fp8_mqa_logits fp8_fp4_mqa_logits fp8_paged_mqa_logits fp8_fp4_paged_mqa_logits
"""
"""The functions of nothing that is trained, those whose gradient is torch's, and logits (test_indexer.py)."""


def test_weights_in_parameters_are_let_through_where_they_are_copied() -> None:
    values, scales = torch.ones(M, 2, N).to(torch.float8_e4m3fn), torch.ones(1, 2, N)
    a = torch.nn.Parameter(values), torch.nn.Parameter(scales)
    made = deep_gemm.fp8_einsum("bhd,bhr->hdr", a, a, recipe=(1, 1, 128))
    assert made is not None
    assert not made.requires_grad
    b = tuple(torch.nn.Parameter(x) for x in B)
    assert deep_gemm.fp8_gemm_nn(A, (b[0].t(), b[1].t())) is not None


def test_every_public_function_of_tensors_is_here() -> None:
    told = {name.split()[0] for name, _ in (*OPERANDS, *OUTPUTS)} | set(WITHOUT_ONE.split())
    functions = {name: getattr(deep_gemm, name) for name in deep_gemm.__all__}
    names = {
        function.__name__
        for function in functions.values()
        if isinstance(function, FunctionType)
        and any(kind in str(p.annotation) for p in inspect.signature(function).parameters.values() for kind in TYPES)
    }
    assert names <= told, names - told

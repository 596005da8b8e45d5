"""No public function takes something that is no tensor, or none it can read, without naming the argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import int32
from torch import Tensor

import deep_gemm
from deep_gemm import nn, per_block_cast_to_fp8, per_token_cast_to_fp8

M, N, K, GROUPS = 8, 32, 128, 2
Arguments = dict[str, Any]


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def dense(family: str, major: str) -> tuple[str, Arguments]:
    a: Any = (fp8(M, K), torch.ones(M, 1)) if family == "fp8_gemm" else (bf16(M, K),)
    b: Any = (fp8(N, K), torch.ones(1, 1)) if family == "fp8_gemm" else (bf16(N, K),)
    a = [x.t() for x in a] if major[0] == "t" else a
    b = [x.t() for x in b] if major[1] == "n" else b
    return f"{family}_{major}", {"a": a if len(a) > 1 else a[0], "b": b if len(b) > 1 else b[0], "d": bf16(M, N)}


X, D = torch.ones(M, K), bf16(M, N)
A, W = per_token_cast_to_fp8(X), per_block_cast_to_fp8(torch.ones(GROUPS, N, K))
B = W[0][0], W[1][0]
W1, W2 = per_block_cast_to_fp8(torch.ones(GROUPS, 2 * N, K)), per_block_cast_to_fp8(torch.ones(GROUPS, K, N))
ROUTED = {"topk_ids": torch.zeros(M, 1, dtype=torch.int64), "topk_weights": torch.ones(M, 1)}
ROWS = deep_gemm.expert_rows(ROUTED["topk_ids"], GROUPS)
STACKED, COUNTED = {"d": D, "grouped_layout": int32(*[0] * M)}, {"d": bf16(GROUPS, M, N), "masked_m": int32(3, 4)}
KS, SUMS, WORDS = {"ks": [K]}, torch.zeros(1, M, N), torch.zeros(1, 4, dtype=torch.int32)
X_K, Y_K = deep_gemm.k_grouped_cast_to_fp8(X, [K]), deep_gemm.k_grouped_cast_to_fp8(torch.ones(N, K), [K])
KEYS = {"kv": (fp8(16, 32), torch.ones(16)), "weights": torch.ones(4, 8)}
RANGES = {"cu_seq_len_k_start": int32(0, 0, 0, 0), "cu_seq_len_k_end": int32(9, 9, 9, 9)}
CONTEXTS, TABLE = int32(5, 70)[:, None], int32(0, 1, 2, 3).view(2, 2)
PAGED = {"kv_cache": torch.zeros(4, 64, 1, 36, dtype=torch.uint8), "weights": torch.ones(2, 8), "max_context_len": 128}
PAGED |= {"context_lens": CONTEXTS, "block_table": TABLE, "schedule_meta": torch.zeros(3, 2, dtype=torch.int32)}
FP4 = torch.zeros(N, K // 2, dtype=torch.int8)

CALLS: list[tuple[str, Arguments]] = [
    *(
        dense(family, major)
        for family in ("fp8_gemm", "bf16_gemm", "cublaslt_gemm")
        for major in ("nt", "nn", "tn", "tt")
    ),
    ("wgrad_gemm_fp8_fp8_fp32_nt", {"a": A, "b": per_token_cast_to_fp8(torch.ones(N, K)), "d": torch.zeros(M, N)}),
    ("fp8_gemm_nt_skip_head_mid", {"a": A, "b": B, "d": bf16(M, 40), "head_splits": [16, 8, 16]}),
    ("m_grouped_fp8_gemm_nt_contiguous", {"a": A, "b": W, **STACKED}),
    ("m_grouped_fp8_gemm_nn_contiguous", {"a": A, "b": tuple(x.mT for x in W), **STACKED}),
    ("m_grouped_fp8_gemm_nt_masked", {"a": per_token_cast_to_fp8(torch.ones(GROUPS, M, K)), "b": W, **COUNTED}),
    (
        "k_grouped_fp8_gemm_nt_contiguous",
        {"a": X_K, "b": Y_K, "d": SUMS, **KS, "ks_tensor": int32(K), "c": SUMS.clone()},
    ),
    ("k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", {"a": (X_K[0], X_K[1].t()), "b": (Y_K[0], Y_K[1].t()), "d": SUMS, **KS}),
    ("fp8_einsum", {"expr": "bhr,hdr->bhd", "a": per_token_cast_to_fp8(torch.ones(M, GROUPS, K)), "b": W}),
    ("m_grouped_bf16_gemm_nt_contiguous", {"a": bf16(M, K), "b": bf16(GROUPS, N, K), **STACKED}),
    ("m_grouped_bf16_gemm_nn_contiguous", {"a": bf16(M, K), "b": bf16(GROUPS, K, N), **STACKED}),
    ("m_grouped_bf16_gemm_nt_masked", {"a": bf16(GROUPS, M, K), "b": bf16(GROUPS, N, K), **COUNTED}),
    (
        "k_grouped_bf16_gemm_tn_contiguous",
        {"a": bf16(K, M), "b": bf16(K, N), "ks_cpu": [K], "grouped_layout": int32(K)},
    ),
    ("einsum", {"expr": "bmk,bnk->mn", "a": bf16(2, M, K), "b": bf16(2, N, K), "d": D}),
    ("batched_syrk", {"a": bf16(2, M, K), "d": bf16(2, M, M)}),
    ("batched_symm", {"a": bf16(2, M, M), "b": bf16(2, M, M), "d": bf16(2, M, M)}),
    (
        "tf32_hc_prenorm_gemm",
        {"a": bf16(M, K), "b": torch.ones(8, K), "d": torch.zeros(M, 8), "sqr_sum": torch.zeros(M)},
    ),
    ("fp8_mqa_logits", {"q": fp8(4, 8, 32), **KEYS, **RANGES}),
    ("fp8_fp4_mqa_logits", {"q": (fp8(4, 8, 32), None), **KEYS, **RANGES}),
    ("fp8_paged_mqa_logits", {"q": fp8(2, 1, 8, 32), **PAGED}),
    ("fp8_fp4_paged_mqa_logits", {"q": (fp8(2, 1, 8, 32), None), **PAGED}),
    ("get_paged_mqa_logits_metadata", {"context_lens": CONTEXTS, "block_kv": 64, "num_sms": 2}),
    ("linear", {"x": X, "w": B, "bias": torch.ones(N), "out": D}),
    ("experts", {"x": X, **ROUTED, "w1": W1, "w2": W2}),
    ("silu_mul_cast_to_fp8", {"x": X, "row_weights": torch.ones(M)}),
    ("silu_mul_cast_to_fp8", {"x": torch.ones(GROUPS, M, K), "masked_m": int32(3, 4)}),
    ("silu_mul_cast_to_fp8", {"x": X, "ends": int32(3)}),
    ("silu_mul_cast_to_fp8", {"x": X}),
    ("expert_rows", {"topk_ids": ROUTED["topk_ids"], "num_experts": GROUPS}),
    ("gather_cast_to_fp8", {"x": X, "rows": ROWS}),
    ("gather_weighted", {"y": X, "rows": ROWS, "topk_weights": ROUTED["topk_weights"]}),
    ("per_token_cast_to_fp8", {"x": torch.ones(GROUPS, M, K), "masked_m": int32(3, 4)}),
    *((f"per_{block}_cast_to_fp8", {"x": X}) for block in ("token", "channel", "block")),
    ("per_custom_dims_cast_to_fp8", {"x": X, "dims": (1,)}),
    ("cast_both_to_fp8", {"x": X}),
    ("k_grouped_cast_to_fp8", {"x": X, **KS}),
    ("cast_back_from_fp8", {"x": A[0], "sf": A[1]}),
    ("per_token_cast_to_fp4", {"x": X}),
    ("quantize_mxfp4", {"w": X}),
    ("cast_back_from_fp4", {"packed": FP4, "sf": torch.ones(N, 1)}),
    ("transpose_packed_fp4", {"packed": FP4}),
    ("get_mn_major_tma_aligned_tensor", {"sf": A[1]}),
    ("transform_sf_into_required_layout", {"sf": A[1], "mn": M, "k": K, "recipe": (1, 128)}),
    ("pack_ue8m0_to_int", {"x": torch.ones(1, 4)}),
    ("unpack_ue8m0_from_int", {"packed": WORDS}),
    ("get_mn_major_tma_aligned_packed_ue8m0_tensor", {"sf": torch.ones(M, 1)}),
    (
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        {"sf": torch.ones(1, M), "grouped_layout": None, "ks_cpu": [K], "gran_k": 128, "k_alignment": 128},
    ),
]
MODULES: dict[str, tuple[Any, Arguments]] = {
    "Linear": (nn.Linear(K, N), {"input": X}),
    "Experts": (nn.Experts(GROUPS, K, N), {"x": X, **ROUTED}),
    "FrozenLinear": (nn.FrozenLinear(B), {"x": X}),
    "FrozenExperts": (nn.FrozenExperts(W1, W2), {"x": X, **ROUTED}),
}
EACH = [pytest.param(getattr(deep_gemm, name), given, id=f"{name} {[*given][-1]}") for name, given in CALLS]
EACH += [pytest.param(*call, id=name) for name, call in MODULES.items()]
OTHERS = {"uneven_all_gather", "ceil_to_ue8m0", "calc_diff"}
"""Functions of a group of processes, and of numbers of any type."""


def wrong(x: Tensor) -> Iterator[Any]:
    """Give what is no tensor, and tensors that no function reads."""
    numbers = x.float()
    yield from (
        numbers.tolist(),
        numbers.numpy(),
        "x",
        numbers.to_sparse(),
        torch.zeros(x.shape, dtype=torch.complex64),
    )


def instead_of(value: Any) -> Iterator[Any]:
    """Give what is wrong in the place of a tensor, of a pair, or of `ExpertRows`: all of it, or one member."""
    if isinstance(value, Tensor):
        yield from wrong(value)
        return
    yield from (tuple(value[0]), value[0].float())
    for index, member in enumerate(value):
        for bad in () if member is None else wrong(member):
            members = (*value[:index], bad, *value[index + 1 :])
            yield deep_gemm.ExpertRows(*members) if value is ROWS else members


def mistakes(function: Any, given: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Give arguments that are right but for one, and its name."""
    parameters = inspect.signature(function).parameters
    for name, value in given.items():
        if isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and isinstance(value[0], Tensor)):
            is_needed = name in parameters and parameters[name].default is inspect.Parameter.empty
            for bad in (*instead_of(value), *[None] * is_needed):
                yield name, {**given, name: bad}


@pytest.mark.parametrize(("function", "given"), EACH)
def test_a_mistake_begins_with_the_arguments_name(function: Any, given: Arguments) -> None:
    function(**given)
    for name, arguments in mistakes(function, given):
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            function(**arguments)
        # A layer of torch's names has an `input`, which is the x of a cast.
        names = f"{name}:", f"sf{name}:", f"{name}.", *(["x:"] if name == "input" else [])
        assert str(caught.value).startswith(names)


@pytest.mark.parametrize(("function", "given"), EACH)
def test_a_tensor_on_meta_beside_others_is_refused(function: Any, given: Arguments) -> None:
    tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
    for name in tensors if len(tensors) > 1 and not isinstance(function, torch.nn.Module) else ():
        with pytest.raises(ValueError, match="meta"):
            function(**{**given, name: given[name].to("meta")})


def test_each_public_function_of_tensors_is_here() -> None:
    public = [getattr(deep_gemm, name) for name in deep_gemm.__all__ if "mega_moe" not in name and name not in OTHERS]
    signatures = {each.__name__: inspect.signature(each) for each in public if inspect.isfunction(each)}
    takes = {name: [str(x.annotation) for x in each.parameters.values()] for name, each in signatures.items()}
    of_tensors = {name for name, kinds in takes.items() if any("Tensor" in kind or "Operand" in kind for kind in kinds)}
    assert of_tensors == {name for name, _ in CALLS}

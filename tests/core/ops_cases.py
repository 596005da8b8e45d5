"""Calls of public functions for the tests of operators. Each case makes its inputs for any number of rows m."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from thorough import few, one_in
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import deep_gemm
from deep_gemm import ExpertRows

N, K, GROUPS, TOPK = 16, 272, 3, 2
KS = [16, 128]
MANY = {"sizes": (130, 150, 301)}
"""Numbers of rows for results with a dimension of ceil(m / 128): PyTorch compiles a separate graph for the size 1.

No size is a multiple of 4: Inductor compiles a separate graph for multiples of 4 if a graph returns m-major scales.
"""


@dataclass(frozen=True)
class Case:
    """A call whose tensors have m rows; the operands that multiply them are the same for every m."""

    name: str
    call: Callable[..., Any]
    inputs: Callable[[int], Sequence[Tensor]]
    """The call's arguments for m rows."""
    dims: Sequence[int | None]
    """For each argument the index of its dimension that has m elements, or None."""
    operators: frozenset[str]
    """The operators that occur in a graph of the call."""
    sizes: Sequence[int] = (6, 9, 130)
    """Numbers of rows. The call is traced with the first number."""

    def dynamic(self, inputs: Sequence[Tensor]) -> None:
        """Tell Dynamo that m may vary."""
        for x, dim in zip(inputs, self.dims, strict=True):
            if dim is not None:
                torch._dynamo.mark_dynamic(x, dim)

    def shapes(self) -> tuple[Any, ...]:
        """Tell torch.export that m may vary."""
        m = torch.export.Dim("m", min=min(self.sizes) // 128 * 128 + 1)
        return tuple(None if dim is None else {dim: m} for dim in self.dims)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=generator(sum(shape))).to(dtype)


def rows(*shape: int, mn_major: bool = False, columns: int = 128) -> tuple[Tensor, Tensor]:
    return deep_gemm.per_token_cast_to_fp8(numbers(*shape), mn_major=mn_major, gran_k=columns)


def blocks(*shape: int) -> tuple[Tensor, Tensor]:
    return deep_gemm.per_block_cast_to_fp8(numbers(*shape))


def ids(m: int) -> Tensor:
    """Return each row's group."""
    return torch.arange(m, dtype=torch.int32).mul(GROUPS).div(m, rounding_mode="floor").to(torch.int32)


def counts(groups: int = GROUPS) -> Tensor:
    return torch.arange(groups, dtype=torch.int32) + 1


def routes(m: int) -> Tensor:
    """Draw the experts of each token; some routes have none."""
    return torch.randint(-1, GROUPS, (m, TOPK), generator=generator(m))


def routed(m: int) -> tuple[Tensor, ...]:
    """Return tokens, their experts and the weights of their routes."""
    return numbers(m, 48), routes(m), torch.rand(m, TOPK, generator=generator(m))


def turned(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    values, scales = operand
    return values.mT, scales.mT


B, B_ROWS, W = blocks(N, K), rows(N, K), blocks(GROUPS, N, K)
B_HEADS = blocks(32, K)
FINE = torch.rand(-(-N // 32), -(-K // 32), generator=generator(32))
"""The scales of B, one for each block of 32x32."""
PLAIN_B = numbers(N, 24)
W1, W2 = blocks(GROUPS, 2 * 64, 48), blocks(GROUPS, 48, 64)
BF16_W1, BF16_W2 = numbers(GROUPS, 2 * 64, 48), numbers(GROUPS, 48, 64)
BY_ROWS, BIASES = rows(GROUPS, 2 * 64, 48, columns=0), (numbers(GROUPS, 2 * 64), numbers(GROUPS, 48).float())
FINE_OF_W1 = torch.rand(GROUPS, 4, 2, generator=generator(4))
K_GROUPED = deep_gemm.k_grouped_cast_to_fp8(numbers(N, sum(KS)), KS)
OF_BF16, W_OF_BF16 = numbers(N, K), numbers(GROUPS, N, K)

CASES: list[Case] = []


def case(
    name: str, inputs: Callable[[int], Sequence[Tensor]], dims: Sequence[int | None], operators: str, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a case with the decorated call."""

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(name, call, inputs, dims, frozenset(operators.split()), **more))
        return call

    return add


def operand(m: int) -> tuple[Tensor, ...]:
    return rows(m, K, mn_major=True)


def with_bf16(m: int) -> tuple[Tensor, ...]:
    return *rows(m, K), numbers(m, N)


def with_fp32(m: int) -> tuple[Tensor, ...]:
    return *rows(m, K), numbers(m, N, dtype=torch.float32)


case("nt", operand, (0, 0), "fp8_gemm_nt")(lambda x, sx: deep_gemm.fp8_gemm_nt((x, sx), B))
case("nt into", with_bf16, (0, 0, 0), "fp8_gemm_nt.into")(lambda x, sx, d: deep_gemm.fp8_gemm_nt((x, sx), B, d))
case("nt into heads", lambda m: (*rows(m, K), numbers(m, 40)), (0, 0, 0), "fp8_gemm_nt_skip_head_mid.into")(
    lambda x, sx, d: deep_gemm.fp8_gemm_nt_skip_head_mid((x, sx), B_HEADS, d, (16, 8, 16))
)
case("nt with c", with_fp32, (0, 0, 0), "fp8_gemm_nt")(lambda x, sx, c: deep_gemm.fp8_gemm_nt((x, sx), B, c=c))
case("nt added to d", with_fp32, (0, 0, 0), "fp8_gemm_nt.into")(
    lambda x, sx, d: deep_gemm.fp8_gemm_nt((x, sx), B, d, c=d, recipe=(1, 128, 128), compiled_dims="nk")
)


@case("nt of 2025", with_bf16, (0, 0, 0), "fp8_gemm_nt.into")
def _(x: Tensor, sx: Tensor, d: Tensor) -> Any:
    return deep_gemm.gemm_fp8_fp8_bf16_nt(lhs=(x, sx), rhs=B, out=d)  # type: ignore[call-arg]


@case("nt, values and scales apart", with_bf16, (0, 0, 0), "fp8_gemm_nt.into")
def _(x: Tensor, sx: Tensor, d: Tensor) -> Any:
    return deep_gemm.fp8_fp4_gemm_nt(x, B[0], sx, B[1], d)  # type: ignore[arg-type]


case("nt, scales by row", operand, (0, 0), "fp8_gemm_nt")(
    lambda x, sx: deep_gemm.fp8_gemm_nt((x, sx), B_ROWS, recipe_b=[1, 128])
)


def fine(m: int) -> list[Tensor]:
    """Return an operand with one scale for each row and 32 columns."""
    values, _ = rows(m, K)
    return [values, torch.rand(m, len(FINE[0]), generator=generator(m))]


case("nt, blocks of 32", fine, (0, 0), "fp8_gemm_nt")(
    lambda x, sx: deep_gemm.fp8_gemm_nt((x, sx), (B[0], FINE), recipe=(1, 32, 32))
)
case("nt, rows of 128 by blocks of 32", operand, (0, 0), "fp8_gemm_nt")(
    lambda x, sx: deep_gemm.fp8_gemm_nt((x, sx), (B[0], FINE), recipe_b=(32, 32))
)
case("nn", operand, (0, 0), "fp8_gemm_nn")(lambda x, sx: deep_gemm.fp8_gemm_nn((x, sx), turned(B)))
case("tn into", lambda m: (*turned(rows(m, K)), numbers(m, N)), (1, 1, 0), "fp8_gemm_tn.into")(
    lambda x, sx, d: deep_gemm.fp8_gemm_tn((x, sx), turned(B), d)
)
case("tt", lambda m: turned(rows(m, K)), (1, 1), "fp8_gemm_tt")(lambda x, sx: deep_gemm.fp8_gemm_tt((x, sx), B))
case("weight gradient", with_fp32, (0, 0, 0), "fp8_gemm_nt.into")(
    lambda x, sx, d: deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt((x, sx), B_ROWS, d)
)
case("BF16 nt", lambda m: (numbers(m, K),), (0,), "bf16_gemm_nt")(lambda a: deep_gemm.bf16_gemm_nt(a, OF_BF16))
case("BF16 nn into with c", lambda m: (numbers(m, K), numbers(m, N), numbers(m, N)), (0, 0, 0), "bf16_gemm_nn.into")(
    lambda a, d, c: deep_gemm.bf16_gemm_nn(a, OF_BF16.mT, d, c)
)
case("BF16 contiguous", lambda m: (numbers(m, K), ids(m)), (0, 0), "m_grouped_bf16_gemm_nt_contiguous")(
    lambda a, layout: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, W_OF_BF16, grouped_layout=layout)
)
case(
    "BF16 masked into",
    lambda m: (numbers(GROUPS, m, K), numbers(GROUPS, m, N)),
    (1, 1),
    "m_grouped_bf16_gemm_nt_masked.into",
)(lambda a, d: deep_gemm.m_grouped_bf16_gemm_nt_masked(a, W_OF_BF16, d, counts(), 4))
case("BF16 products of heads", lambda m: (numbers(m, GROUPS, K),), (0,), "einsum")(
    lambda a: deep_gemm.einsum("bhr,hdr->bhd", a, W_OF_BF16)
)
case("BF16 sum over products", lambda m: (numbers(GROUPS, m, 64),), (1,), "einsum")(
    lambda a: deep_gemm.einsum("bmk,bnk->mn", a, W_OF_BF16[:, :, :64])
)
case("cublaslt", lambda m: (numbers(m, 24), numbers(m, N)), (0, 0), "cublaslt_gemm_nt")(
    lambda a, d: deep_gemm.cublaslt_gemm_nt(a, PLAIN_B, d, c=d)
)
case("contiguous", lambda m: (*operand(m), ids(m)), (0, 0, 0), "m_grouped_fp8_gemm_nt_contiguous")(
    lambda x, sx, layout: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, sx), W, grouped_layout=layout)
)


@case("contiguous nn into", lambda m: (*with_bf16(m), ids(m)), (0, 0, 0, 0), "m_grouped_fp8_gemm_nn_contiguous.into")
def _(x: Tensor, sx: Tensor, d: Tensor, layout: Tensor) -> Any:
    return deep_gemm.m_grouped_fp8_gemm_nn_contiguous((x, sx), turned(W), d, m_indices=layout)  # type: ignore[call-arg]


case(
    "contiguous by ends",
    lambda m: (*with_bf16(m), torch.tensor([m] * GROUPS, dtype=torch.int32)),
    (0, 0, 0, None),
    "m_grouped_fp8_gemm_nt_contiguous.into",
)(lambda x, sx, d, ends: deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous((x, sx), W, d, ends, use_psum_layout=True))
case(
    "masked",
    lambda m: (*rows(GROUPS, m, K), numbers(GROUPS, m, N), counts()),
    (1, 1, 1, None),
    "m_grouped_fp8_gemm_nt_masked.into",
)(lambda x, sx, d, masked_m: deep_gemm.m_grouped_fp8_gemm_nt_masked((x, sx), W, d, masked_m, expected_m=2))
case(
    "masked, all rows",
    lambda m: (*rows(GROUPS, m, K), torch.full((GROUPS,), m, dtype=torch.int32)),
    (1, 1, None),
    "m_grouped_fp8_gemm_nt_masked",
)(lambda x, sx, masked_m: deep_gemm.fp8_m_grouped_gemm_nt_masked((x, sx), W, masked_m=masked_m))
case("heads", lambda m: rows(m, GROUPS, K), (0, 0), "fp8_einsum")(
    lambda x, sx: deep_gemm.fp8_einsum("bhr,hdr->bhd", (x, sx), W)
)
case(
    "heads turned, added to d",
    lambda m: (*rows(m, GROUPS, N), numbers(m, GROUPS, K, dtype=torch.float32)),
    (0, 0, 0),
    "fp8_einsum.into",
)(lambda x, sx, d: deep_gemm.fp8_einsum("bhd,hdr->bhr", (x, sx), W, d, d))


def k_grouped(m: int) -> tuple[Tensor, Tensor]:
    return deep_gemm.k_grouped_cast_to_fp8(numbers(m, sum(KS)), KS)


@case("k-grouped", lambda m: (numbers(m, sum(KS)),), (0,), "k_grouped_cast_to_fp8 k_grouped_fp8_gemm_nt_contiguous")
def _(x: Tensor) -> Any:
    a = deep_gemm.k_grouped_cast_to_fp8(x, KS, mn_major=True)
    return deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, K_GROUPED, ks=KS)


@case(
    "k-grouped into",
    lambda m: (numbers(m, sum(KS)), numbers(len(KS), m, N, dtype=torch.float32), torch.tensor(KS, dtype=torch.int32)),
    (0, 1, None),
    "k_grouped_cast_to_fp8 k_grouped_fp8_gemm_nt_contiguous.into",
)
def _(x: Tensor, d: Tensor, ks: Tensor) -> Any:
    a = deep_gemm.k_grouped_cast_to_fp8(x, KS)
    return deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, K_GROUPED, d, None, ks, c=d, recipe=(1, 1, 128))


@case(
    "k-grouped of 2025",
    lambda m: (numbers(m, sum(KS)), numbers(len(KS), m, N, dtype=torch.float32)),
    (0, 1),
    "k_grouped_cast_to_fp8 k_grouped_fp8_gemm_nt_contiguous.into",
)
def _(x: Tensor, d: Tensor) -> Any:
    values, scales = deep_gemm.k_grouped_cast_to_fp8(x, KS)
    return deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((values, scales.t()), (K_GROUPED[0], K_GROUPED[1].t()), d, KS)


case("cast of rows", lambda m: (numbers(m, K),), (0,), "per_token_cast_to_fp8")(
    lambda x: (
        deep_gemm.per_token_cast_to_fp8(x),
        deep_gemm.per_token_cast_to_fp8(x, True, mn_major=True, min_amax=0.5),
    )
)
case("cast of one block", lambda m: (numbers(m, 96),), (0,), "per_token_cast_to_fp8")(
    lambda x: (deep_gemm.per_token_cast_to_fp8(x, mn_major=True), deep_gemm.per_token_cast_to_fp8(x, gran_k=32))
)
case("cast of counted rows", lambda m: (numbers(GROUPS, m, K), counts()), (1, None), "per_token_cast_to_fp8")(
    lambda x, masked_m: deep_gemm.per_token_cast_to_fp8(x, masked_m=masked_m, mn_major=True)
)
case("cast of channels", lambda m: (numbers(m, K),), (0,), "per_channel_cast_to_fp8", **MANY)(
    lambda x: (deep_gemm.per_channel_cast_to_fp8(x), deep_gemm.per_channel_cast_to_fp8(x.t()))
)
case("cast of blocks", lambda m: (numbers(2, m, K),), (1,), "per_block_cast_to_fp8", **MANY)(
    deep_gemm.per_block_cast_to_fp8
)
case("cast of both", lambda m: (numbers(m, K),), (0,), "cast_both_to_fp8", **MANY)(
    lambda x: deep_gemm.cast_both_to_fp8(x, True)
)
case("activation", lambda m: (numbers(m, K), torch.rand(m, generator=generator(m))), (0, 0), "silu_mul_cast_to_fp8")(
    lambda x, weights: deep_gemm.silu_mul_cast_to_fp8(x, weights, limit=1.5, mn_major=True)
)
case("activation of counted rows", lambda m: (numbers(GROUPS, m, K), counts()), (1, None), "silu_mul_cast_to_fp8")(
    lambda x, masked_m: deep_gemm.silu_mul_cast_to_fp8(x, masked_m=masked_m, use_ue8m0=True)
)
case(
    "activation up to ends",
    lambda m: (numbers(m, K), torch.tensor([2, 2], dtype=torch.int32)),
    (0, None),
    "silu_mul_cast_to_fp8",
)(lambda x, ends: deep_gemm.silu_mul_cast_to_fp8(x, ends=ends))
case("rows of experts", lambda m: (routes(m),), (0,), "expert_rows")(
    lambda topk_ids: deep_gemm.expert_rows(topk_ids, GROUPS)
)


@case(
    "experts by parts",
    lambda m: (*routed(m), numbers(m, 48)),
    (0, 0, 0, 0),
    "expert_rows gather_cast_to_fp8 m_grouped_fp8_gemm_nt_contiguous silu_mul_cast_to_fp8 gather_weighted "
    "gather_weighted.into",
)
def _(x: Tensor, topk_ids: Tensor, weights: Tensor, out: Tensor) -> Any:
    found: ExpertRows = deep_gemm.expert_rows(topk_ids, GROUPS)
    a = deep_gemm.gather_cast_to_fp8(x, found, mn_major=True)
    h = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, W1, grouped_layout=found.ids)
    assert h is not None
    y = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(deep_gemm.silu_mul_cast_to_fp8(h), W2, grouped_layout=found.ids)
    assert y is not None
    deep_gemm.gather_weighted(y, found, weights, out=out)
    return deep_gemm.gather_weighted(y, found, weights)


case("linear", lambda m: (numbers(2, m, K),), (1,), "linear")(lambda x: deep_gemm.linear(x, B))
case("linear of finer scales", lambda m: (numbers(2, m, K),), (1,), "linear")(
    lambda x: deep_gemm.linear(x, (B[0], FINE), gran_k=64, recipe_b=(32, 32))
)
case("linear into", lambda m: (numbers(m, K), numbers(m, N), numbers(N)), (0, 0, None), "linear.into")(
    lambda x, out, bias: deep_gemm.linear(x, B, out=out, bias=bias)
)
case("experts", routed, (0, 0, 0), "experts")(
    lambda x, topk_ids, weights: deep_gemm.experts(x, topk_ids, weights, W1, W2, limit=2.0)
)
case("experts of BF16", routed, (0, 0, 0), "experts")(
    lambda x, topk_ids, weights: deep_gemm.experts(x, topk_ids, weights, BF16_W1, BF16_W2, limit=2.0)
)
case("experts into", lambda m: (*routed(m), numbers(m, 48)), (0, 0, 0, 0), "experts.into")(
    lambda x, topk_ids, weights, out: deep_gemm.experts(x, topk_ids, weights, W1, W2, out=out)
)
case("experts + c", lambda m: (*routed(m), *BIASES), (0, 0, 0, None, None), "experts")(
    lambda x, ids, weights, c1, c2: deep_gemm.experts(x, ids, weights, BY_ROWS, W2, w1_bias=c1, w2_bias=c2)
)
case("experts of finer scales", routed, (0, 0, 0), "experts")(
    lambda x, topk_ids, weights: deep_gemm.experts(x, topk_ids, weights, (W1[0], FINE_OF_W1), W2, gran_k=128)
)


def queries(m: int) -> tuple[Tensor, ...]:
    """Return each row's queries and weights of 8 heads, and its range of keys."""
    ends = torch.arange(1, m + 1, dtype=torch.int32)
    return numbers(m, 8, 32).to(torch.float8_e4m3fn), numbers(m, 8, dtype=torch.float32), ends - 3, ends


VECTORS = numbers(8, 128, dtype=torch.float32)
KEYS = numbers(70, 32).to(torch.float8_e4m3fn), torch.rand(70, generator=generator(70))


case("logits", queries, (0, 0, 0, 0), "fp8_mqa_logits")(
    lambda q, weights, starts, ends: deep_gemm.fp8_mqa_logits(q, KEYS, weights, starts, ends)
)


@case("logits in BF16", queries, (0, 0, 0, 0), "fp8_mqa_logits")
def _(q: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Any:
    return deep_gemm.fp8_fp4_mqa_logits((q, None), KEYS, weights, starts, ends, logits_dtype=torch.bfloat16)


def compressed_logits(q: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, columns: int) -> Tensor:
    """Compute logits in rows of `columns` columns; write zeros behind a range of keys, where logits are undefined."""
    logits = deep_gemm.fp8_fp4_mqa_logits((q, None), KEYS, weights, starts, ends, columns)  # type: ignore[arg-type]
    lengths = ends.clamp(max=len(KEYS[1])) - starts.clamp(min=0)
    return torch.where(torch.arange(columns) < lengths[:, None], logits, 0)


case("logits in compressed rows", queries, (0, 0, 0, 0), "fp8_mqa_logits")(
    lambda q, weights, starts, ends: compressed_logits(q, weights, starts, ends, 5)
)


def queries_of_sequences(m: int) -> tuple[Tensor, ...]:
    """Return queries, weights, context lengths and page tables of sequences with one token each."""
    q = numbers(m, 1, 8, 32).to(torch.float8_e4m3fn)
    contexts = torch.arange(m, dtype=torch.int32)[:, None] % 60
    return q, numbers(m, 8, dtype=torch.float32), contexts, torch.zeros(m, 1, dtype=torch.int32)


CACHE = torch.full((2, 64, 1, 36), 0x38, dtype=torch.uint8)
ONE_SHARE = torch.tensor([[0, 0], [1 << 30, 0]], dtype=torch.int32)
"""A schedule that serves any number of sequences."""


@case("logits of pages", queries_of_sequences, (0, 0, 0, 0), "fp8_paged_mqa_logits")
def _(q: Tensor, weights: Tensor, contexts: Tensor, table: Tensor) -> Any:
    # Logits behind a context are undefined, so zeros replace them.
    logits = deep_gemm.fp8_paged_mqa_logits(q, CACHE, weights, contexts, table, ONE_SHARE, 60, None)  # type: ignore[arg-type]
    return torch.where(torch.arange(60) < contexts, logits, 0)


case("schedule of pages", lambda m: (queries_of_sequences(m)[2],), (0,), "plan_paged_contexts")(
    lambda contexts: deep_gemm.get_paged_mqa_logits_metadata(contexts, 64, 7)
)
case(
    "hyper-connections",
    lambda m: (numbers(m, 128), numbers(m, 8, dtype=torch.float32), numbers(m, dtype=torch.float32)),
    (0, 0, 0),
    "tf32_hc_prenorm_gemm",
)(lambda x, d, sqr_sum: deep_gemm.tf32_hc_prenorm_gemm(x, VECTORS, d, sqr_sum))


@case("scales laid out", lambda m: (rows(m, K)[1],), (0,), "get_mn_major_tma_aligned_tensor", **MANY)
def _(sf: Tensor) -> Any:
    m = sf.shape[0]
    sizes = deep_gemm.get_tma_aligned_size(m, 4), deep_gemm.ceil_div(m, 128), deep_gemm.align(m, 128)
    laid_out = deep_gemm.get_col_major_tma_aligned_tensor(sf)
    required = deep_gemm.transform_sf_into_required_layout(sf, m, K, (1, 128, 128), is_sfa=True)
    return laid_out, required, sf.new_zeros(sizes)


FEW = few(CASES, lambda case: case.operators)
COMPILED = one_in(2, FEW)
EXPORTED = [case for case in FEW if case not in COMPILED] or FEW
every_case, every_operator, compiled, exported = (
    pytest.mark.parametrize("case", cases, ids=lambda case: case.name) for cases in (CASES, FEW, COMPILED, EXPORTED)
)


def copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors to other memory with the same strides."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in inputs]


def layout(given: Any) -> list[Any]:
    """Return shape, strides, dtype and device of each tensor, which a fake kernel must predict, and other values."""

    def of(x: Any) -> Any:
        return x if not isinstance(x, Tensor) else (tuple(x.shape), x.stride(), x.dtype, x.device)

    return [of(x) for x in tree_leaves(given, is_leaf=lambda x: x is None)]


def bits(given: Any) -> Any:
    """View tensors as integers, which compare bit by bit."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tree_map(lambda x: x.contiguous().view(kinds[x.element_size()]) if isinstance(x, Tensor) else x, given)


def assert_same(got: Any, expected: Any) -> None:
    """Check that tensors have the same bits, shapes, strides, types and devices."""
    assert layout(got) == layout(expected)
    for x, y in zip(tree_leaves(bits(got)), tree_leaves(bits(expected)), strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y

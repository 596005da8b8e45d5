"""Every operator passes torch.library's checks: its schema is true, and its fake kernel agrees with the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from example_calls import all_examples
from helpers import int32
from ops_cases import (
    B_HEADS,
    CACHE,
    CASES,
    GROUPS,
    K_GROUPED,
    KEYS,
    KS,
    ONE_SHARE,
    TOPK,
    W1,
    W2,
    B,
    K,
    N,
    W,
    bits,
    copies,
    counts,
    ids,
    layout,
    numbers,
    queries,
    queries_of_sequences,
    routes,
    rows,
    turned,
)
from thorough import few, up_to
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import deep_gemm

M = 6
ops = torch.ops.deep_gemm
Sample = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


def bf16(*shape: int) -> Tensor:
    return numbers(*shape)


def fp32(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.float32)


def copied(given: Any) -> Any:
    return tree_map(lambda x: copies([x])[0] if isinstance(x, Tensor) else x, given)


class Recorder(TorchDispatchMode):
    """Stores the calls of the package's operators, with other values in the outputs that the calls will write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, Sample] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "deep_gemm":
            given = args, kwargs or {}
            kind = tree_map(lambda x: (x.dtype, x.stride().index(1)) if isinstance(x, Tensor) else x, given)
            noted = self.calls.setdefault((func, str(kind)), (func, *copied(given)))
            for x, argument in zip(noted[1], func._schema.arguments, strict=False):
                if argument.alias_info is not None:
                    x.fill_(5)
        return func(*args, **(kwargs or {}))


def recorded() -> Iterator[Sample]:
    """Yield the operator calls that public functions make in their examples and in the cases of any number of rows."""
    with Recorder() as recorder:
        for example in all_examples():
            for each in (example, example.without_output()):
                each.function(**each.given)
        for case in CASES:
            if case.name not in HOLD_ANYTHING:
                case.call(*case.inputs(M))
    yield from recorder.calls.values()


HOLD_ANYTHING = "logits in compressed rows", "logits of pages"
"""Cases that write only a part of the result that they make; the rest may hold any value."""


def samples() -> Iterator[Sample]:
    """Yield calls of all overloads of operators: from public functions, then with arguments that they rarely pass."""

    def call(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Sample:
        return operator, args, kwargs

    yield from recorded()
    a = rows(M, K)
    wt = turned(W)
    yield call(ops.fp8_gemm_nt.into, *rows(M, K, mn_major=True), *B, bf16(M, N))
    yield call(ops.fp8_gemm_nt.into, *a, *B, bf16(M, 2 * N)[:, :N], bf16(M, N))
    yield call(ops.fp8_gemm_nt_skip_head_mid.into, *a, *B_HEADS, bf16(M, 40), [16, 8, 16], recipe=[1, 128, 128])
    yield call(ops.cublaslt_gemm_nn.default, bf16(M, K), bf16(K, N), fp32(M, N))
    yield call(ops.cublaslt_gemm_tn.default, bf16(K, M), bf16(K, N), bf16(M, N), bf16(M, N))
    yield call(ops.cublaslt_gemm_tt.default, bf16(K, M), bf16(N, K), bf16(M, N))
    for y, packet in ((W, ops.m_grouped_fp8_gemm_nt_contiguous), (wt, ops.m_grouped_fp8_gemm_nn_contiguous)):
        yield call(packet.default, *a, *y, num_groups=GROUPS)
        yield call(packet.into, *a, *y, bf16(M, N), int32(4, 4, 4), use_psum_layout=True, ensure_zero_padding=False)
    depths, x = ops.k_grouped_fp8_gemm_nt_contiguous, deep_gemm.k_grouped_cast_to_fp8(bf16(M, sum(KS)), KS)
    yield call(depths.default, *x, *K_GROUPED, KS)
    yield call(depths.into, *x, *K_GROUPED, fp32(len(KS), M, N), None, int32(*KS), adds_to_d=True)
    turned_scales = x[0], x[1].t(), K_GROUPED[0], K_GROUPED[1].t()
    yield call(depths.into, *turned_scales, fp32(len(KS), M, N), KS, None, fp32(len(KS), M, N), k_major_scales=False)

    yield call(ops.per_token_cast_to_fp8.default, bf16(2, 3, M, 96), True, 32, 0.5)
    yield call(ops.per_token_cast_to_fp8.default, fp32(GROUPS, M, K), mn_major=True, masked_m=counts())
    yield call(ops.per_channel_cast_to_fp8.default, fp32(2, M, K).double())
    yield call(ops.per_block_cast_to_fp8.default, bf16(130, K), True, 64)
    yield call(ops.cast_both_to_fp8.default, bf16(M, K))
    yield call(ops.k_grouped_cast_to_fp8.default, bf16(M, 0), [], mn_major=True)
    activate = ops.silu_mul_cast_to_fp8.default
    yield call(activate, bf16(2, M, K), fp32(2, M).abs(), limit=2.0, use_ue8m0=True)
    yield call(activate, bf16(GROUPS, M, K), masked_m=counts(), mn_major=True)
    found, weights = [*deep_gemm.expert_rows(routes(M), GROUPS)], fp32(M, TOPK)
    yield call(ops.linear.default, bf16(2, M, K), *B, bf16(N))
    yield call(ops.linear.into, bf16(M, K), *B, bf16(M, N))
    yield call(ops.experts.default, bf16(M, 48), routes(M), weights, *W1, *W2, 7.0, "swiglu", 1.702, 1.0)
    biases = {"w1_bias": fp32(GROUPS, 2 * 64), "w2_bias": bf16(GROUPS, 48)}
    yield call(ops.experts.default, bf16(M, 48), routes(M), weights, *W1, *W2, **biases)
    a3 = rows(M, GROUPS, K)
    columns = a3[0], a3[1].new_ones(1, GROUPS, K)
    yield call(ops.fp8_einsum.default, "bhd,bhr->hdr", *columns, *columns, None, [1, 1, 128])
    yield call(ops.fp8_einsum.into, "bhd,bhr->hdr", *columns, *columns, fp32(GROUPS, K, K), None, [1, 1, 128], True)
    w, grad, types = fp32(N, K), bf16(M, N), [torch.bfloat16, torch.float32]
    kept = deep_gemm.per_token_cast_to_fp8(torch.nn.functional.pad(bf16(M, K), (0, 0, 0, 10)).t(), mn_major=True)
    yield call(ops.nn_linear_rows.default, bf16(M, K), w, bf16(N), 1, 128)
    yield call(ops.nn_linear_rows.default, fp32(M, K), w, None, 0, 128)
    yield call(ops.nn_linear_rows.default, fp32(200, K), w, None, 1, 0)  # more rows than share one scale in a block
    yield call(ops.nn_linear_gradients.default, grad, w, *kept, *types, 128)
    yield call(ops.nn_linear_gradients.default, grad, w, None, None, *types, 0)
    yield call(ops.nn_linear_gradients.default, grad, None, *kept, *types, 128)
    w1, w2, h, types = fp32(GROUPS, 64, 48), fp32(GROUPS, 48, 32), bf16(M * TOPK, 64), types + types[1:] * 2
    every = [*deep_gemm.expert_rows(routes(M).clamp_min(0), GROUPS)]  # a row without a route could hold any value
    for products in ("fp8", "bf16"):
        yield call(ops.nn_experts.default, bf16(M, 48), weights, w1, w2, every, 1.5, products)
        trained = (bf16(M, 48), bf16(M, 48), weights.bfloat16(), w1, w2, h, found, None, products)
        yield call(ops.nn_experts_gradients.default, *trained, [True] * 4, *types)
        yield call(ops.nn_experts_gradients.default, *trained, [False, False, False, True], *types)
    tokens, lse = torch.arange(M) - 1, torch.full((M, 1), 9.0)
    for head in ((bf16(N, K), None), B):
        yield call(ops.nn_selected_logprobs.default, bf16(M, K), *head, tokens, 0.5, None)
        said = bf16(M, K), *head, tokens, 0.5, None, True, head[1] is None
        yield call(ops.nn_selected_logprobs_gradients.default, fp32(M), lse, *said)
    q, weights_of_heads, starts, ends = queries(M)
    yield call(ops.fp8_mqa_logits.default, q, *KEYS, weights_of_heads, starts, ends, True, 0, torch.bfloat16)
    q, weights_of_heads, contexts, table = queries_of_sequences(M)
    # All contexts have the greatest length, since logits behind a context may hold any value.
    contexts, pages = torch.full_like(contexts, 60), (table, ONE_SHARE, 60)
    yield call(ops.fp8_paged_mqa_logits.default, q, CACHE, weights_of_heads, contexts, *pages, False, torch.float32)
    yield call(ops.tf32_hc_prenorm_gemm.default, bf16(M, 128), fp32(8, 128), fp32(2, M, 8), fp32(2, M), 2)
    yield from bf16_samples()


def bf16_samples() -> Iterator[Sample]:
    """Yield calls of the operators of BF16 products."""
    x, w, k = bf16(M, 16), bf16(N, 16), 16
    for packet, a, b in (
        (ops.bf16_gemm_nt, x, w),
        (ops.bf16_gemm_nn, x, w.t()),
        (ops.bf16_gemm_tn, x.t(), w.t()),
        (ops.bf16_gemm_tt, x.t(), w),
    ):
        yield packet.into, (a, b, fp32(M, N), None, True), {}
    ws, every = bf16(GROUPS, N, k), ids(M)
    for packet, b in ((ops.m_grouped_bf16_gemm_nt_contiguous, ws), (ops.m_grouped_bf16_gemm_nn_contiguous, ws.mT)):
        yield packet.default, (x.clone().requires_grad_(), b.clone().requires_grad_(), every, False, True), {}
        yield packet.into, (x, b, bf16(M, N), int32(4, 4, 4), True, False), {}
    stacked, masked = bf16(GROUPS, M, k), ops.m_grouped_bf16_gemm_nt_masked
    yield masked.default, (stacked.requires_grad_(), ws.clone().requires_grad_(), int32(M, M, M), None), {}
    a, b, depths = bf16(9, 8), bf16(9, N), ops.k_grouped_bf16_gemm_tn_contiguous
    yield depths.default, (a, b, None, None, [4, 5], False), {}
    yield depths.into, (a, b, bf16(2, 8, N), bf16(2, 8, N), int32(4, 3), None, False, False), {}
    heads, weights = bf16(M, GROUPS, 16), bf16(GROUPS, 16, 24)
    yield ops.einsum.default, ("bhd,hdr->bhr", heads, weights, None), {}
    yield ops.einsum.into, ("bhd,bhr->hdr", heads, bf16(M, GROUPS, 24), fp32(GROUPS, 16, 24), None, True), {}


SAMPLES = [*samples()]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")[: up_to(4, 3)]
"""The last check takes longest, and test_ops_compile.py checks nearly the same."""
NAMED: list[Any] = [pytest.param(each, id=f"{i} {each[0]._name.partition('::')[2]}") for i, each in enumerate(SAMPLES)]
OF_EACH = few(NAMED, lambda named: [named.values[0][0]])
every_sample = pytest.mark.parametrize("sample", NAMED)


@pytest.fixture
def opcheck(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return torch's check of operators, which compares inputs by `allclose`, with an `allclose` that supports FP8."""
    allclose = torch.allclose

    def of_any_type(x: Tensor, y: Tensor, **how: Any) -> bool:
        is_fp8 = x.dtype == torch.float8_e4m3fn
        return allclose(x.float(), y.float(), **how) if is_fp8 else allclose(x, y, **how)

    monkeypatch.setattr(torch, "allclose", of_any_type)
    return torch.library.opcheck


def test_there_is_a_sample_of_each_operator() -> None:
    made = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("deep_gemm::")}
    assert {operator._name for operator, _, _ in SAMPLES} == made


@pytest.mark.parametrize("sample", OF_EACH)
def test_each_operator_is_what_torch_asks_of_one(sample: Sample, opcheck: Callable[..., Any]) -> None:
    operator, args, kwargs = sample
    assert set(opcheck(operator, args, kwargs, test_utils=CHECKS).values()) == {"SUCCESS"}


@every_sample
def test_fake_kernels_give_what_real_ones_give(sample: Sample) -> None:
    operator, args, kwargs = sample
    args, kwargs = copied((args, kwargs))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = operator(*tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args), **kwargs)
    assert layout(fake) == layout(operator(*args, **kwargs))


@every_sample
def test_operators_write_what_their_schema_says_and_count_its_versions(sample: Sample) -> None:
    operator, args, kwargs = sample
    args, kwargs = copied((args, kwargs))
    before = bits(copied((args, kwargs)))
    versions = [x._version for x in tree_leaves(args) if isinstance(x, Tensor)]
    operator(*args, **kwargs)
    after = bits((args, kwargs))
    written = [x.name for x in operator._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    names = [x.name for x in operator._schema.arguments]
    changed = {
        names[i]
        for i, (x, y) in enumerate(zip(before[0], after[0], strict=True))
        if any(
            not torch.equal(p, q)
            for p, q in zip(tree_leaves(x), tree_leaves(y), strict=True)
            if p is not None and isinstance(p, Tensor)
        )
    }
    assert changed == set(written)
    counted = [x._version for x in tree_leaves(args) if isinstance(x, Tensor)]
    assert sum(now > then for now, then in zip(counted, versions, strict=True)) == len(written)


@every_sample
def test_autocast_changes_no_bit(sample: Sample) -> None:
    operator, args, kwargs = sample
    given, again = copied((args, kwargs)), copied((args, kwargs))
    with torch.autocast("cpu", torch.bfloat16):
        got = operator(*given[0], **given[1])
    expected = operator(*again[0], **again[1])
    for x, y in zip(tree_leaves(bits((got, given))), tree_leaves(bits((expected, again))), strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y

"""Only programs that trace or observe torch see an operator; checks at tracing and at run time; error texts."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked
import ops_cases
import pytest
import torch
from fake_gpu import FakeGpu, on_gpu
from ops_cases import GROUPS, B, Case, K, N, W, assert_same, bits, copies, every_case, numbers, routes, rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import deep_gemm
from deep_gemm import ExpertRows
from deep_gemm.core.check.layout import RECIPES, either

M = 6


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of the package's operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "deep_gemm":
            self.names.add(str(func).removeprefix("deep_gemm.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@ops_cases.every_operator
def test_an_eager_call_is_no_operator(case: Case) -> None:
    inputs = case.inputs(M)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        case.call(*inputs)
    assert [event.key for event in events.key_averages() if "deep_gemm" in event.key] == []


@every_case
def test_a_dispatch_mode_sees_operators(case: Case) -> None:
    inputs = case.inputs(M)
    expected_inputs = copies(inputs)
    with Seen() as seen:
        got = case.call(*inputs)
    assert seen.names == case.operators
    assert_same((got, inputs), (case.call(*expected_inputs), expected_inputs))


@every_case
def test_whoever_switches_dispatch_off_sees_nothing(case: Case) -> None:
    inputs = case.inputs(M)
    expected_inputs = copies(inputs)
    with Seen() as seen, torch._C._DisableTorchDispatch():
        got = case.call(*inputs)
    assert seen.names == set()
    assert_same((got, inputs), (case.call(*expected_inputs), expected_inputs))


@every_case
def test_on_meta_a_call_gives_shapes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(given: Any) -> Any:
        return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, given)

    def described(given: Any) -> list[Any]:
        return [(x.shape, x.stride(), x.dtype) for x in tree_leaves(given) if isinstance(x, Tensor)]

    inputs = case.inputs(M)
    expected, on_meta = described(case.call(*inputs)), moved(inputs)
    for name, constant in vars(ops_cases).copy().items():
        monkeypatch.setattr(ops_cases, name, moved(constant) if isinstance(constant, Tensor | tuple) else constant)
    with torch.device("meta"):  # also for tensors that the call makes
        got = case.call(*on_meta)
    assert all(x.is_meta for x in tree_leaves(got) if isinstance(x, Tensor))
    assert described(got) == expected


FLOPS = {
    **dict.fromkeys(("BF16 products of heads", "heads", "heads turned, added to d"), 2 * M * GROUPS * N * K),
    **dict.fromkeys(("BF16 masked into", "masked", "masked, all rows"), 2 * M * GROUPS * N * K),  # host reads no counts
    **dict.fromkeys(("k-grouped", "k-grouped into", "k-grouped of 2025"), 2 * M * N * sum(ops_cases.KS)),
    **dict.fromkeys(("logits", "logits in BF16"), 2 * M * 8 * 32 * 70),
    **dict.fromkeys(("linear", "linear of finer scales"), 2 * 2 * M * N * K),
    **dict.fromkeys(
        ("experts", "experts into", "experts of finer scales", "experts of BF16", "experts by parts", "experts + c"),
        2 * M * ops_cases.TOPK * (2 * 64 * 48 + 48 * 64),
    ),
    "nt into heads": 2 * M * 32 * K,
    "BF16 sum over products": 2 * M * GROUPS * N * 64,
    "cublaslt": 2 * M * N * 24,
    "linear into": 2 * M * N * K,
    "logits in compressed rows": 2 * M * 8 * 32 * 5,
    "logits of pages": 2 * M * 8 * 32 * 60,
    "hyper-connections": 2 * M * 8 * 128,
}
"""Number of operations of each call that does more than multiply a matrix [M, K] by a matrix [N, K]."""


@every_case
def test_torch_counts_the_operations_of_a_call(case: Case) -> None:
    multiplies = any("gemm" in name for name in case.operators)
    with FlopCounterMode(display=False) as counter:
        case.call(*case.inputs(M))
    assert counter.get_total_flops() == FLOPS.get(case.name, 2 * M * N * K if multiplies else 0)


def test_packed_numbers_count_as_what_they_are() -> None:
    packed = torch.zeros(N, 256 // 2, dtype=torch.int8), torch.ones(N, 256 // 32)
    with FlopCounterMode(display=False) as counter:
        deep_gemm.linear(numbers(M, 256), packed)
        deep_gemm.fp8_fp4_gemm_nt(rows(M, 256), packed, recipe_a=(1, 128), recipe_b=(1, 32))
    assert counter.get_total_flops() == 2 * (2 * M * N * 256)


FIRST_CALL = """
import torch, deep_gemm
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    deep_gemm.linear(torch.ones(2, 128), deep_gemm.per_block_cast_to_fp8(torch.ones(8, 128)))
print(counter.get_total_flops())
"""


def test_the_first_call_of_a_program_is_counted() -> None:
    """The counter must count operators that this call creates after the counter has read its formulas."""
    root = Path(__file__).resolve().parents[2]
    assert int(forked.run("-c", FIRST_CALL, cwd=root).stdout) == 2 * 2 * 8 * 128


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "vjp": torch.func.vjp,
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
}
ROWS = deep_gemm.expert_rows(routes(M), GROUPS)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: nt(x, c=None),
    "cast": lambda x: cast(x)[1],
    "linear": lambda x: deep_gemm.linear(x, B),
    "BF16": lambda x: deep_gemm.bf16_gemm_nt(x, ops_cases.OF_BF16),
    "gather": lambda x: deep_gemm.gather_cast_to_fp8(x, ROWS)[1],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_in_words(transform: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^torch.func and torch.vmap are not supported: compute gradients"):
        TRANSFORMS[transform](CALLS[name], numbers(M, K))


def test_transforms_that_are_traced_and_functionalize_call_operators() -> None:
    x = numbers(2, M, K)
    rows = torch.compile(torch.vmap(CALLS["linear"]), backend="aot_eager")
    assert_same(rows(x), torch.stack([CALLS["linear"](each) for each in x]))
    traced = make_fx(torch.func.functionalize(CALLS["linear"]))(x[0])
    assert_same(traced(x[1]), CALLS["linear"](x[1]))


@pytest.mark.parametrize("name", CALLS)
def test_jit_trace_is_refused_in_words(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^torch.jit.trace is not supported: use torch.export"):
        torch.jit.trace(CALLS[name], (numbers(M, K),))  # type: ignore[no-untyped-call]


def product(x: Tensor) -> Tensor | None:
    return deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x, mn_major=True), B)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_operators(mode: Any) -> None:
    x = numbers(M, K)
    traced = make_fx(product, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
    found = {str(node.target) for node in traced.graph.nodes if "deep_gemm" in str(node.target)}
    assert found == {"deep_gemm.per_token_cast_to_fp8.default", "deep_gemm.fp8_gemm_nt.default"}
    other = numbers(M, K).neg()
    assert_same(traced(other), product(other))


def test_fake_tensors_of_a_gpu_need_no_gpu() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(M, K, dtype=torch.bfloat16, device="cuda")
        values, scales = (torch.empty(part.shape, dtype=part.dtype, device="cuda") for part in B)
    b = values, scales
    for in_mode in (True, False):  # a fake tensor stays fake after its mode has ended
        with mode if in_mode else nullcontext():
            a = deep_gemm.per_token_cast_to_fp8(x, mn_major=True)
            d, y = deep_gemm.fp8_gemm_nt(a, b), deep_gemm.linear(x, b)
        assert d is not None
        assert y is not None
        assert (a[0].is_cuda, a[1].is_cuda, a[1].stride()) == (True, True, (1, 8))
        assert (d.shape, d.dtype, d.is_cuda, y.shape, y.is_cuda) == ((M, N), torch.bfloat16, True, (M, N), True)


def launches_of(calls: Callable[[Any, Any, Tensor], Any], gpu: FakeGpu) -> int:
    """Count the launches of `calls` when it repeats a call that was seen before on a GPU."""
    gpu.launches.clear()
    (x, sx), d = rows(64, K, mn_major=True), on_gpu(torch.empty(64, N, dtype=torch.bfloat16))
    for _ in range(3):
        deep_gemm.fp8_gemm_nt((on_gpu(x), sx), B, d)
    before = len(gpu.launches)
    assert before == 3
    calls((on_gpu(x), sx), B, d)
    return len(gpu.launches) - before


def test_a_call_seen_before_is_no_operator_and_none_of_a_trace_launches(gpu: FakeGpu) -> None:
    def in_a_mode(a: Any, b: Any, d: Tensor) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map(mode.from_tensor, (a, b, d))
            deep_gemm.fp8_gemm_nt(*fake)
            deep_gemm.fp8_gemm_nt(fake[0], b, fake[2])

    assert launches_of(deep_gemm.fp8_gemm_nt, gpu) == 1
    assert launches_of(in_a_mode, gpu) == 0


class Wrapped(Tensor):
    """A tensor class that handles operators itself."""

    handled: list[str]
    wrapped: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.handled.append(func._opname)
        unwrapped = tree_map(lambda x: x.wrapped if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return func(*unwrapped[0], **unwrapped[1])


def test_tensors_that_handle_operators_get_them() -> None:
    Wrapped.handled = []
    x, a, d = numbers(M, K), rows(M, K), torch.zeros(M, N, dtype=torch.bfloat16)
    assert_same(deep_gemm.linear(Wrapped(x), B), deep_gemm.linear(x, B))
    deep_gemm.fp8_gemm_nt(a, (Wrapped(B[0]), B[1]), d)  # any operand may be of the class
    assert_same(d, deep_gemm.fp8_gemm_nt(a, B))
    assert Wrapped.handled == ["linear", "fp8_gemm_nt"]


def test_parameters_are_ordinary_tensors() -> None:
    values = torch.nn.Parameter(B[0], requires_grad=False)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        deep_gemm.fp8_gemm_nt(rows(M, K), (values, B[1]))
    assert [event.key for event in events.key_averages() if "deep_gemm" in event.key] == []


MISTAKES: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("b: expected shape (n, k) = (n, 144), got (16, 272)", lambda x: product(x[:, :144])),
    (f"recipe: expected {either(RECIPES)}, got (1, 2, 3)", lambda x: nt(x, recipe=(1, 2, 3))),
    ("a: expected a pair (values, scales), got a list of 1", lambda x: deep_gemm.fp8_gemm_nt([x], B)),  # type: ignore[arg-type]
    ("d: expected a tensor, got str", lambda x: nt(x, d="d")),
    ("d: expected shape (m, n) = (6, 16), got (6, 17)", lambda x: nt(x, d=x.new_zeros(M, 17))),
    ("c: expected dtype torch.bfloat16, which d has", lambda x: nt(x, d=x.new_zeros(M, N), c=torch.zeros(M, N))),
    ("min_amax: expected a finite FP32 number", lambda x: deep_gemm.per_token_cast_to_fp8(x, min_amax=-1.0)),
    ("x: expected an even number of columns", lambda x: deep_gemm.silu_mul_cast_to_fp8(x[:, 1:])),
    (
        "masked_m: expected a tensor, got NoneType",
        lambda x: deep_gemm.m_grouped_fp8_gemm_nt_masked(cast(x[None]), (W[0][:1], W[1][:1])),
    ),
    ("rows: expected ExpertRows, got tuple", lambda x: deep_gemm.gather_cast_to_fp8(x, (x,) * 5)),  # type: ignore[arg-type]
    ("out: expected dtype torch.bfloat16, got torch.float32", lambda x: deep_gemm.linear(x, B, out=torch.zeros(M, N))),
    ("sf: expected dtype torch.float32", deep_gemm.get_mn_major_tma_aligned_tensor),
]


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    return deep_gemm.per_token_cast_to_fp8(x)


def nt(x: Tensor, **how: Any) -> Tensor | None:
    return deep_gemm.fp8_gemm_nt(cast(x), B, **how)


@pytest.mark.parametrize("says, call", MISTAKES, ids=[says for says, _ in MISTAKES])
def test_mistakes_are_found_while_tracing_and_said_in_the_usual_words(says: str, call: Callable[..., Any]) -> None:
    x = numbers(M, K)
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as eager:
        call(x)
    assert says in str(eager.value)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(type(eager.value)) as fake:
        call(mode.from_tensor(x))
    assert says in str(fake.value)
    with pytest.raises(Exception) as compiled:  # Dynamo raises an error of its own type
        torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    assert says in str(compiled.value)


def test_c_that_is_d_cannot_be_another_tensor_too() -> None:
    d = torch.zeros(M, N)
    with pytest.raises(ValueError, match="c: expected None with adds_to_d, got a tensor"):
        torch.ops.deep_gemm.fp8_gemm_nt.into(*rows(M, K), *B, d, d.clone(), adds_to_d=True)


def test_addresses_are_checked_when_an_operator_runs() -> None:
    compiled = torch.compile(lambda x, sx: deep_gemm.fp8_gemm_nt((x, sx), B), backend="aot_eager", fullgraph=True)
    x, sx = rows(M, K)
    elsewhere = torch.empty(x.numel() + 8, dtype=torch.uint8).view(x.dtype)[8:].view(x.shape).copy_(x)
    compiled(x, sx)
    with pytest.raises(ValueError, match="a: expected an address that is a multiple of 16 bytes"):
        compiled(elsewhere, sx)


def test_elements_are_checked_when_an_operator_runs() -> None:
    compiled = torch.compile(deep_gemm.expert_rows, backend="aot_eager", fullgraph=True)
    compiled(routes(M), GROUPS)
    with pytest.raises(ValueError, match=r"topk_ids: expected values in -1\.\.2, got 3"):
        compiled(torch.full_like(routes(M), GROUPS), GROUPS)


def test_settings_are_read_when_an_operator_runs() -> None:
    compiled = torch.compile(deep_gemm.silu_mul_cast_to_fp8, backend="aot_eager", fullgraph=True)
    x, ends = numbers(M, K), torch.tensor([1, 3], dtype=torch.int32)
    for alignment in (1, 2):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        assert_same(compiled(x, ends=ends), deep_gemm.silu_mul_cast_to_fp8(x, ends=ends))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.host_compiler)])
def test_results_carry_no_gradient_and_stop_none(backend: str) -> None:
    layer = torch.nn.Linear(K, N, dtype=torch.bfloat16)

    def both(x: Tensor) -> Any:
        alone: Any = product(x)
        return alone * 2 + layer(x), alone

    x, y = (numbers(M, K).requires_grad_() for _ in range(2))
    for call, given in ((torch.compile(both, backend=backend, fullgraph=True), x), (both, y)):
        total, alone = call(given)
        assert (total.requires_grad, alone.requires_grad) == (True, False)
        total.sum().backward()
    assert_same(x.grad, y.grad)


def test_autograd_notices_that_an_output_was_written() -> None:
    d = torch.ones(M, N, dtype=torch.bfloat16, requires_grad=True)
    squares: Any = d * d
    with torch.no_grad():
        torch.ops.deep_gemm.fp8_gemm_nt.into(*rows(M, K), *B, d)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_scales_that_lie_m_major_are_given_back_themselves() -> None:
    sf = rows(M, K, mn_major=True)[1]
    with Seen() as seen:
        assert deep_gemm.get_mn_major_tma_aligned_tensor(sf) is sf
    assert seen.names == set()
    assert torch.ops.deep_gemm.get_mn_major_tma_aligned_tensor(sf).data_ptr() != sf.data_ptr()


def test_sizes_that_nobody_knows_before_stay_open() -> None:
    """Compile a number of rows that depends on elements: the graph has no hint about its size."""

    def of_some(x: Tensor, chosen: Tensor) -> Any:
        some = x[chosen]
        d = x.new_empty(some.shape[0], N)
        deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(some, mn_major=True), B, d)
        return d, deep_gemm.linear(some, B)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(of_some, backend="aot_eager", fullgraph=True)
        for m in (4, 9):
            x = numbers(m, K)
            chosen = torch.arange(m) % 2 == 0
            assert_same(compiled(x, chosen), of_some(x, chosen))


def test_depths_that_the_host_knows_stay_open() -> None:

    def grads(x: Tensor, y: Tensor, ks: list[int]) -> Any:
        a, b = (deep_gemm.k_grouped_cast_to_fp8(operand, ks) for operand in (x, y))
        return deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks=ks)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(grads, backend=counter, fullgraph=True)
    for ks in ([16, 128], [32, 256], [48, 160], [400, 16]):
        x, y = numbers(4, sum(ks)), numbers(8, sum(ks))
        assert_same(compiled(x, y, ks), grads(x, y, ks))
    assert counter.frame_count == 2  # the first graph is made for its own numbers, the second for any numbers


class Routing(torch.nn.Module):
    """A module that returns `ExpertRows`."""

    def forward(self, topk_ids: Tensor) -> ExpertRows:
        return deep_gemm.expert_rows(topk_ids, GROUPS)


def test_exported_programs_are_saved_and_loaded() -> None:
    file, topk_ids = io.BytesIO(), routes(M)
    torch.export.save(torch.export.export(Routing(), (topk_ids,)), file)
    file.seek(0)
    got = torch.export.load(file).module()(topk_ids)
    assert isinstance(got, ExpertRows)
    assert_same(bits(got), bits(deep_gemm.expert_rows(topk_ids, GROUPS)))

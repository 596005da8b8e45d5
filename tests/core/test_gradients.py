"""Public functions have gradients, or refuse operands whose gradients would be lost: no gradient is lost silently."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from example_calls import ROUTED, A, B, D, M, N, X, all_examples
from mega_cases import filling
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import deep_gemm
from deep_gemm import per_block_cast_to_fp8

Pass = Callable[[Tensor], Any]
"""Returns a tensor as it is, or as autograd would see it."""
Cases = list[tuple[str, Callable[[Pass], Any]]]

EXAMPLES = all_examples()
L1, L2 = per_block_cast_to_fp8(torch.ones(2, 256, 256)), per_block_cast_to_fp8(torch.ones(2, 256, 128))


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fill(t: Pass, name: str) -> None:
    """Fill a buffer; pass the argument called `name` through t."""
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 2, 128, 1, 256, 128)
    given = filling(buffer, torch.ones(M, 256), ROUTED["topk_ids"], ROUTED["topk_weights"])
    deep_gemm.mega_moe_pre_dispatch_sm90(**{key: t(x) if key == name else x for key, x in given.items()})


def mega(t: Pass) -> None:
    """Compute a mega MoE layer; pass y through t."""
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 2, 128, 1, 256, 128)
    deep_gemm.fp8_mega_moe(t(bf16(0, 256)), L1, L2, buffer)


def mega_fp4(t: Pass) -> None:
    """Compute a mega MoE layer with FP4 weights; pass y through t."""
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 2, 128, 1, 256, 128)
    l1 = torch.zeros(2, 256, 128, dtype=torch.uint8), torch.zeros(2, 256, 8, dtype=torch.uint8)
    deep_gemm.fp8_fp4_mega_moe(t(bf16(0, 256)), l1, (l1[0][..., :64], l1[1][..., :4]), buffer)


def added_to_d(t: Pass) -> None:
    d = t(torch.zeros_like(D))
    deep_gemm.fp8_gemm_nt(A, B, d, d)


def cases_of(arguments: str) -> Cases:
    """Return a case for each argument that an example lists in the field named by `arguments`: a text, and the call."""
    return [
        (f"{example.name} {argument}", partial(example.call, argument))
        for example in EXAMPLES
        for argument in getattr(example, arguments).split()
    ]


OPERANDS: Cases = [
    *cases_of("refuses"),
    ("mega_moe_pre_dispatch_sm90 x", partial(fill, name="x")),
    ("mega_moe_pre_dispatch_sm90 topk_weights", partial(fill, name="topk_weights")),
]
"""A function and the argument that it refuses, as text; and a call of the function."""
OUTPUTS: Cases = [
    *cases_of("writes"),
    ("fp8_gemm_nt d", added_to_d),
    ("fp8_mega_moe y", mega),
    ("fp8_fp4_mega_moe y", mega_fp4),
    ("mega_moe_pre_dispatch_sm90 buf_x_sf", partial(fill, name="buf_x_sf")),
]
"""A function and the output that it refuses, as text; and a call of the function."""


def named(cases: Cases) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "call"), cases, ids=[name for name, _ in cases])


def learned(x: Tensor) -> Tensor:
    """Return a copy of x that autograd has computed from a tensor which requires a gradient."""
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
    """A leaf may require a gradient without being trained, for example an FP8 weight."""
    same = "get_mn_major_tma_aligned_tensor sf", "transform_sf_into_required_layout sf", "per_tensor_cast_to_fp8 scale"
    gives_them_back = name in same
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
    """Check the refusal on fake tensors, which have no values: tracing a model uses them."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, refused(name):
        call(lambda x: learned(mode.from_tensor(x)))


ARE_COMPILED = ["per_token_cast_to_fp8", "silu_mul_cast_to_fp8", "gather_cast_to_fp8", "gather_weighted", "experts"]
COMPILED = {
    f"{each.name} {argument}": partial(each.without_output().call, argument)
    for each in reversed(EXAMPLES)
    if each.name in ARE_COMPILED
    for argument in each.refuses.split()[:1]
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_functions_refuse_it_and_run_without_gradients(name: str) -> None:
    def inside(x: Tensor) -> Any:
        first, *_ = tree_leaves(COMPILED[name](lambda _: x * 2))
        return first.float()

    def without(x: Tensor) -> Any:
        with torch.no_grad():
            y = inside(x)
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
    cast_back_from_fp4 ceil_to_ue8m0 uneven_all_gather selected_logprobs refit_
    fp8_mqa_logits fp8_fp4_mqa_logits fp8_paged_mqa_logits fp8_fp4_paged_mqa_logits
"""
"""Functions whose arguments are never trained, functions that have a gradient, and logits (test_indexer.py)."""


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
    functions = {name: getattr(deep_gemm, name) for name in vars(deep_gemm)["__all__"]}
    names = {
        function.__name__
        for function in functions.values()
        if isinstance(function, FunctionType)
        and any(kind in str(p.annotation) for p in inspect.signature(function).parameters.values() for kind in TYPES)
    }
    assert names <= told, names - told

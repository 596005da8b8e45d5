"""No result depends on torch's default dtype, which engines set to BF16 while they build a model."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_calls import Example, all_examples
from ops_cases import Case, assert_same, bits, blocks, copies, every_case, layout, numbers, rows
from test_ops_check import SAMPLES
from thorough import up_to
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import deep_gemm
from deep_gemm import nn
from deep_gemm.convert import dequantized_state_dict, to_fp8_inference, to_fp8_training
from lab.soak.attempt import settings_restored
from lab.soak.draw import Draw
from lab.soak.kinds import ALL
from lab.soak.trial import Trial
from lab.soak.ways import plainly

ROOT = Path(__file__).resolve().parents[2]
OTHERS = torch.bfloat16, torch.float16, torch.float64
FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "rand", "randn", "linspace", "empty_strided"}
SIZES = None, 2, 128, 2, 256, 128
"""Sizes of a mega MoE buffer: group, experts, tokens, routes of a token, both sizes of an expert."""
WEIGHTS = numbers(2, 256, 256), numbers(2, 256, 128)
FILLED = *rows(6, 256), torch.tensor([[0, 1]] * 6), numbers(6, 2, dtype=torch.float32)


@contextmanager
def default_of(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def without_a_dtype(source: str) -> list[str]:
    """Return calls of torch's factories whose result has the default dtype, or a dtype that Python numbers decide."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and ast.unparse(call.func.value) == "torch"
        and not {"dtype", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_the_search_finds_a_call_without_a_dtype() -> None:
    assert without_a_dtype("x = torch.ones(2)\ny = torch.ones(2, dtype=torch.float32)") == ["torch.ones(2)"]


def test_every_tensor_that_is_made_outside_of_tests_has_a_stated_dtype() -> None:
    paths = [path for folder in ("deep_gemm", "lab", "examples", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 300
    assert {str(path): calls for path in paths if (calls := without_a_dtype(path.read_text()))} == {}


@every_case
def test_public_calls(case: Case) -> None:
    inputs = case.inputs(case.sizes[0])
    expected, given = case.call(*(of_first := copies(inputs))), bits(of_first)
    for dtype in OTHERS:
        with default_of(dtype):
            got = case.call(*(again := copies(inputs)))
        assert_same(got, expected)
        assert_same(bits(again), given)


def test_fake_kernels() -> None:
    for operator, args, kwargs in SAMPLES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            expected = layout(operator(*args, **kwargs))
            for dtype in OTHERS:
                with default_of(dtype):
                    assert layout(operator(*args, **kwargs)) == expected, operator


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.kind)
def test_random_problems(kind: type[Trial]) -> None:
    """Each trial is also drawn under each default dtype, since it makes buffers by public functions."""
    for seed in "abc"[: up_to(3, 1)]:
        found = []
        for dtype in (torch.float32, *OTHERS):
            with default_of(dtype), settings_restored():
                trial = kind(Draw(seed, "cpu"))
                trial.fill()
                trial.poison()
                found.append({**trial.everything(), **plainly(trial)})
            for name, right in trial.right().items():
                if right.written is not None:  # the other elements may hold any value
                    found[-1][name] = torch.where(right.written, found[-1][name], 0)
            assert_same(found[-1], found[0])


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_examples(example: Example) -> None:
    expected, of_first = example.called()
    for dtype in OTHERS:
        with default_of(dtype):
            got, given = example.called()
        assert_same((got, given), (expected, of_first))


def layers() -> Iterator[Callable[[], Any]]:
    """Yield calls that no other list of this file has."""
    x, w, b = numbers(6, 64), numbers(32, 64), blocks(32, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        bias = numbers(32, dtype=dtype)
        yield partial(deep_gemm.linear, x, b, bias=bias)
        yield partial(nn.FrozenLinear(b, bias), x.float())
    yield lambda: deep_gemm.per_token_cast_to_fp4(w, gran_k=32)
    packed = deep_gemm.per_token_cast_to_fp4(w, gran_k=32)
    yield lambda: deep_gemm.cast_back_from_fp4(*packed, gran_k=32)
    yield lambda: deep_gemm.per_custom_dims_cast_to_fp8(numbers(3, 0), (0,))
    a = rows(16, 64)[0]
    for c in (None, numbers(16, 32, dtype=torch.float32)):
        yield partial(cublaslt, a, b[0], c)
    yield lambda: dequantized_state_dict({"weight": b[0], "weight_scale_inv": b[1]})["weight"]
    yield lambda: list(converted(to_fp8_inference, x).values())
    yield lambda: list(converted(to_fp8_training, x).values())
    yield lambda: mega_moe(deep_gemm.get_symm_buffer_for_sm90_mega_moe(*SIZES), is_fp4=False)
    yield lambda: mega_moe(deep_gemm.get_symm_buffer_for_mega_moe(*SIZES), is_fp4=True)


def cublaslt(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """Multiply into a new D."""
    d = torch.empty(len(a), len(b), dtype=torch.float32)
    deep_gemm.cublaslt_gemm_nt(a, b, d, c)
    return d


def converted(convert: Callable[[torch.nn.Module], Any], x: Tensor) -> dict[str, Tensor]:
    """Convert a model; return its state and one result."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    convert(model)
    return {**model.state_dict(), "y": model(x)}


def mega_moe(buffer: Any, *, is_fp4: bool) -> Tensor:
    """Fill a buffer by copies, then run the layer."""
    if is_fp4:
        packed = [deep_gemm.quantize_mxfp4(w) for w in WEIGHTS]
        w1, w2 = deep_gemm.transform_weights_for_mega_moe(packed[0], packed[1])
    else:
        w1, w2 = deep_gemm.transform_weights_for_mega_moe_sm90(*map(deep_gemm.per_block_cast_to_fp8, WEIGHTS))
    for target, values in zip((buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights), FILLED, strict=True):
        target[:6].copy_(values)
    y = torch.empty(6, 256, dtype=torch.bfloat16)
    (deep_gemm.fp8_fp4_mega_moe if is_fp4 else deep_gemm.fp8_mega_moe)(y, w1, w2, buffer)
    return y


@pytest.mark.parametrize("call", [pytest.param(call, id=str(i)) for i, call in enumerate(layers())])
def test_layers_and_conversions(call: Callable[[], Any]) -> None:
    expected = tree_leaves(bits(call()))
    for dtype in OTHERS:
        with default_of(dtype):
            got = call()
        assert_same(tree_leaves(bits(got)), expected)


@pytest.mark.parametrize("name", ["x_sf", "topk_weights"])
def test_a_buffer_of_another_type_is_refused(name: str) -> None:
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(*SIZES)
    buffer._tensors = buffer.tensors._replace(**{name: getattr(buffer, name).bfloat16()})
    with pytest.raises(ValueError, match=f"buffer.{name}: expected dtype torch.float32, got torch.bfloat16"):
        mega_moe(buffer, is_fp4=False)

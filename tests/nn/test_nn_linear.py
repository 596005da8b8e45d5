"""A linear layer that is trained in FP8: torch's arguments, three products of casts, and no work that is not needed."""

from __future__ import annotations

import copy
import importlib
import re
from functools import partial
from typing import Any

import helpers
import pytest
import torch
from helpers import count_calls, same_bits, some
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import EPSILON, OF_NORMS, TYPICAL, by_blocks, by_columns, by_rows, error, kept_by_autograd, trained
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import deep_gemm
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.linear import backward as backward_of_x
from deep_gemm.nn import Linear, sharding
from deep_gemm.nn import linear as module

IN, OUT = 272, 144
TYPES = [torch.bfloat16, torch.float32, torch.float16]
RECIPES = ["block", "row"]
numbers = partial(helpers.numbers, seed=1)


def layer_of(*, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Linear:
    torch.manual_seed(seed)
    return Linear(IN, OUT, bias=bias, dtype=dtype, **more)


# As torch.nn.Linear


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_and_state_are_those_of_torch(bias: bool) -> None:
    torch.manual_seed(3)
    ours = Linear(32, 48, bias, dtype=torch.bfloat16)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(32, 48, bias, dtype=torch.bfloat16)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(same_bits(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    ours.reset_parameters()
    assert not same_bits(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.Linear)
    assert repr(ours) == f"Linear(in_features=32, out_features=48, bias={bias}, products=fp8)"
    assert repr(Linear(32, 48, bias, recipe="row")) == f"{repr(ours)[:-1]}, recipe=row)"
    assert Linear(32, 48, device="meta").weight.is_meta
    assert same_bits(copy.deepcopy(ours).weight, ours.weight)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 32), "in_features: expected a multiple of 16, which FP8 products need, got 100"),
        ((32, 8), "out_features: expected a multiple of 16, which FP8 products need, got 8"),
        ((0, 32), "in_features: expected an integer"),
        ((32, 16.5), "out_features: expected an integer"),
    ],
)
def test_features_that_products_do_not_take_are_refused_at_once(sizes: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Linear(*sizes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64, "bf16"])
def test_a_type_that_no_weight_is_trained_in_is_refused_at_once(dtype: Any) -> None:
    types = "torch.bfloat16 or torch.float16 or torch.float32 or torch.float64"
    with pytest.raises(ValueError, match=f"^dtype: expected {types}, got {dtype!r}$"):
        Linear(16, 16, dtype=dtype)
    assert Linear(16, 16, dtype=torch.float64).weight.dtype == torch.float64


@pytest.mark.parametrize("recipe", ["rows", None, 0, []])
def test_a_recipe_that_is_none_is_refused_at_once(recipe: Any) -> None:
    for make in (partial(Linear, 16, 16), partial(deep_gemm.convert.to_fp8_training, torch.nn.Linear(16, 16))):
        with pytest.raises(ValueError, match=f"^recipe: expected 'block' or 'row', got {re.escape(repr(recipe))}$"):
            make(recipe=recipe)


@pytest.mark.parametrize("shape", [(), (4, IN + 16)])
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^input: expected shape \(\.\.\., 272\), got"):
        layer_of()(torch.zeros(shape))


# Results


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 16, 130])
def test_it_is_three_products_of_casts(tokens: int, w_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Compare with FP64 products of the casts' numbers: only the last rounding may differ."""
    layer = layer_of(dtype=w_dtype)
    x, grad = numbers(tokens, IN, dtype=dtype), numbers(tokens, OUT, dtype=dtype, seed=2)
    y, of_x, of_weight, of_bias = trained(layer, x, grad)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-6}
    assert error(y, by_rows(x) @ by_blocks(layer.weight).t() + layer.bias.double()) < unit[dtype]
    assert error(of_x, by_rows(grad) @ by_blocks(layer.weight)) < unit[dtype]
    assert error(of_weight, by_columns(grad).t() @ by_columns(x)) < unit[w_dtype]
    assert error(of_bias, grad.double().sum(0)) < unit[w_dtype]
    assert (y.dtype, of_x.dtype) == (dtype, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 130])
def test_by_rows_it_is_three_public_products_of_public_casts(tokens: int, bias: bool, dtype: torch.dtype) -> None:
    layer: Any = layer_of(bias=bias, recipe="row")
    x, grad = numbers(tokens, IN, dtype=dtype), numbers(tokens, OUT, dtype=dtype, seed=2)
    y, of_x, of_weight, *_ = trained(layer, x, grad)
    type_of_d = dtype if dtype == torch.bfloat16 else torch.float32

    def product(a: Tensor, b: Tensor, dtype: torch.dtype, c: Tensor | None = None) -> Tensor:
        """Multiply along k, padded with zeros to a multiple of 16. A C of one row is added to all rows."""
        d = torch.empty(len(a), len(b), dtype=dtype)
        of_16 = (torch.nn.functional.pad(each, (0, -each.shape[1] % 16)) for each in (a, b))
        fp8_a, fp8_b = (deep_gemm.per_token_cast_to_fp8(each, gran_k=0) for each in of_16)
        deep_gemm.fp8_gemm_nt(fp8_a, fp8_b, d, c, recipe_a=(1, 0), recipe_b=(1, 0))
        return d

    w = layer.weight.detach()
    assert same_bits(y, product(x, w, type_of_d, layer.bias.detach().to(type_of_d) if bias else None).to(dtype))
    assert same_bits(of_x, product(grad, w.t(), type_of_d).to(dtype))
    assert same_bits(of_weight, product(grad.t(), x.t(), torch.float32))
    layer.accumulates_main_grad, before = True, torch.randn(OUT, IN)
    layer.weight.main_grad = before.clone()
    layer(x).backward(grad)
    assert same_bits(layer.weight.main_grad, product(grad.t(), x.t(), torch.float32, before))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_regression_is_learned_as_in_fp32(recipe: str) -> None:
    """Two layers learn the weights of two other layers. If a layer had no gradient, the loss would stay high."""
    losses = []
    for kind in (partial(Linear, recipe=recipe), torch.nn.Linear):
        torch.manual_seed(0)
        model, right = (torch.nn.Sequential(kind(64, 64), torch.nn.ReLU(), kind(64, 32)) for _ in range(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        found = []
        for seed in range(60):
            x = numbers(96, 64, seed=seed, dtype=torch.float32)
            with torch.no_grad():
                y = right(x)
            loss = (model(x) - y).square().mean() / y.square().mean()
            found.append(float(loss))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(found)
    (first, *_, last), in_fp32 = losses
    assert last < 0.25 * first
    assert abs(last - in_fp32[-1]) < 0.02 * first


SIZES = st.integers(1, 12).map(lambda i: 16 * i)
SPREADS = st.sampled_from([0, 2, 6])


@settings(max_examples=60)
@given(st.sampled_from(RECIPES), st.integers(1, 300), SIZES, SIZES, st.integers(0, 2**16), SPREADS)
def test_gradients_are_within_the_stated_bound(recipe: str, m: int, k: int, n: int, seed: int, spread: int) -> None:
    """For any numbers the bound is relative to the operands' norms; for random numbers, to the gradient's norm."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        size = torch.exp2(spread * torch.randn(shape, generator=generator)) if spread else 1.0
        return torch.randn(shape, generator=generator) * size

    torch.manual_seed(seed)
    ours, theirs = Linear(k, n, recipe=recipe), torch.nn.Linear(k, n)
    theirs.load_state_dict({"weight": drawn(n, k), "bias": drawn(n)})
    ours.load_state_dict(theirs.state_dict())
    x, grad, w = drawn(m, k), drawn(m, n), theirs.weight.detach()
    got, right = trained(ours, x, grad), trained(theirs, x, grad)
    for mine, its, (a, b) in zip(got[:3], right[:3], [(x, w), (grad, w), (grad, x)], strict=True):
        allowed = OF_NORMS * a.double().norm() * b.double().norm()
        assert (mine.double() - its.double()).norm() <= allowed * 1.0001
        if not spread and its.numel() >= 1024:
            assert error(mine, its) < TYPICAL
    assert torch.allclose(got[3], right[3], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows_of_scale", [1, 128])
def test_the_bound_of_casts_is_one_and_a_tight_one(rows_of_scale: int) -> None:
    cast = by_rows if rows_of_scale == 1 else by_blocks
    halfway = torch.full((128, 128), 17.0 * 448 / 256)  # just above half a unit from 16
    halfway[:, 0] = 448.0
    halfway[:, 1:] = torch.tensor([17.0]).expand(127)
    assert EPSILON / 1.5 < error(cast(halfway)[:, 1:], halfway[:, 1:]) <= EPSILON
    torch.manual_seed(0)
    normal = torch.randn(512, 512)
    assert 0.024 < error(cast(normal), normal) < 0.028


def test_wrong_gradients_are_not_within_the_bound() -> None:
    """A gradient has a much larger error if it lacks the casts' scales, is transposed, or is another token's."""
    layer, x, grad = layer_of(), numbers(64, IN, dtype=torch.float32), numbers(64, OUT, dtype=torch.float32, seed=2)
    _, of_x, of_weight, _ = trained(layer, x, grad)
    right = grad.t() @ x
    assert error(of_weight, right) < TYPICAL < error(grad.roll(1, 0).t() @ x, right)
    assert error(of_x, grad @ layer.weight) < TYPICAL < error(of_x * 1.1, grad @ layer.weight)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_without_gradients_the_bits_are_the_same_and_those_of_inference(dtype: Any, bias: bool, recipe: str) -> None:
    layer, x = layer_of(bias=bias, recipe=recipe), numbers(3, 7, IN, dtype=dtype)
    y = layer(x)
    assert y.requires_grad
    with torch.no_grad():
        assert same_bits(layer(x), y.detach())
    with torch.inference_mode():
        assert same_bits(layer(x), y.detach())
    if dtype == torch.bfloat16:
        by_row = partial(deep_gemm.per_token_cast_to_fp8, gran_k=0)
        cast = deep_gemm.per_block_cast_to_fp8 if recipe == "block" else by_row
        w, b = cast(layer.weight.detach()), layer.bias.detach().bfloat16() if bias else None
        of_inference = some(deep_gemm.linear(x, w, bias=b))
        assert same_bits(of_inference, y.detach())


def test_gradients_that_are_expanded_or_transposed() -> None:
    layer, x = layer_of(), numbers(32, IN)
    expanded, whole = torch.ones((), dtype=torch.bfloat16).expand(32, OUT), torch.ones(32, OUT, dtype=torch.bfloat16)
    for strange, plain in ((expanded, whole), (numbers(OUT, 32).t(), numbers(OUT, 32).t().contiguous())):
        both = trained(layer, x, strange), trained(layer, x, plain)
        assert all(same_bits(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("leading", [(0,), (2, 0)])
@pytest.mark.parametrize("dtype", TYPES)
def test_no_tokens_give_gradients_of_zero(leading: tuple[int, ...], dtype: torch.dtype, recipe: str) -> None:
    layer, x = layer_of(recipe=recipe), numbers(*leading, IN, dtype=dtype)
    y, of_x, *of_parameters = trained(layer, x, numbers(*leading, OUT, dtype=dtype))
    assert (y.shape, of_x.shape) == ((*leading, OUT), (*leading, IN))
    assert not any(bool(of_one.any()) for of_one in of_parameters)
    with torch.no_grad():
        assert layer(x).shape == (*leading, OUT)


# Results that are not needed


ROWS, BOTH, PRODUCT, NT = "per_token_cast_to_fp8", "cast_both_to_fp8", "product", "fp8_gemm_nt"
IN_ORDER, TURNED = "cast_weight", "cast_weight_back"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the names of products and casts as they are called."""
    called = count_calls(monkeypatch, module, ROWS, BOTH, PRODUCT, NT, IN_ORDER, TURNED)
    monkeypatch.setattr(backward_of_x, NT, getattr(module, NT))
    return called


@pytest.mark.parametrize(
    ("needs_x", "needs_weight", "forward", "backward"),
    [
        (True, True, [BOTH, IN_ORDER, PRODUCT], [BOTH, TURNED, NT, NT]),
        (True, False, [ROWS, IN_ORDER, PRODUCT], [ROWS, TURNED, NT]),
        (False, True, [BOTH, IN_ORDER, PRODUCT], [ROWS, NT]),
        (False, False, [ROWS, IN_ORDER, PRODUCT], []),
    ],
)
def test_what_nobody_needs_is_neither_computed_nor_saved(
    monkeypatch: pytest.MonkeyPatch, needs_x: bool, needs_weight: bool, forward: list[str], backward: list[str]
) -> None:
    layer, m = layer_of(), 48
    x = numbers(m, IN).requires_grad_(needs_x)
    layer.weight.requires_grad_(needs_weight)
    called = counted(monkeypatch)
    with kept_by_autograd(layer.weight) as kept:
        y = layer(x)
    assert called == forward
    kept_bytes = sum(each.numel() * each.element_size() for each in kept)
    assert kept_bytes == needs_weight * (IN * m + 4 * IN * ceil_div(m, 128)), "x^T in FP8, and its scales"
    assert {each.dtype for each in kept} <= {torch.float8_e4m3fn, torch.float32}
    called.clear()
    y.sum().backward()
    assert called == backward
    assert [p is not None for p in (x.grad, layer.weight.grad)] == [needs_x, needs_weight]
    assert layer.bias.grad is not None


def test_a_layer_that_is_frozen_passes_gradients_on() -> None:
    layer, x = layer_of().requires_grad_(False), numbers(8, IN).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert not layer(x.detach()).requires_grad


def test_a_result_that_is_added_to_main_grad_is_changed_in_place() -> None:
    layer: Any = layer_of(accumulates_main_grad=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    y = layer(numbers(2, 3, IN))
    y += 1
    y.sum().backward()
    assert layer.weight.main_grad.any()


# Together with torch's own features


def test_a_tracer_of_fx_takes_layers_as_leaves() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Linear) or super().is_leaf_module(m, module_qualified_name)

    model, x = torch.nn.Sequential(layer_of(), torch.nn.ReLU()), numbers(40, IN)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert same_bits(traced(x).detach(), model(x).detach())


@pytest.mark.parametrize("tokens", [16, 40])
def test_torch_counts_three_products(tokens: int) -> None:
    """A compiled function's products are counted too. (Under a counter torch runs the function uncompiled.)"""
    layer, one = layer_of(), 2 * tokens * IN * OUT
    exported = torch.export.export(layer, (numbers(tokens, IN),)).module()
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(numbers(tokens, IN).requires_grad_()).sum().backward()
    for each in (layer, exported, compiled):
        with FlopCounterMode(display=False) as counter:
            each(numbers(tokens, IN).requires_grad_()).sum().backward()
        assert counter.get_total_flops() == 3 * one
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(numbers(tokens, IN))
    assert counter.get_total_flops() == one
    with FlopCounterMode(display=False) as counter:
        layer(numbers(tokens, IN)).sum().backward()  # x has no gradient
    assert counter.get_total_flops() == 2 * one


def test_a_program_that_has_loaded_dtensor_compiles_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's first call may register our shardings with DTensor; this must happen outside of the graph."""
    importlib.import_module("torch.distributed.tensor")
    monkeypatch.setattr(sharding, "_known", [])
    layer, x = layer_of(), numbers(40, IN)
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    assert same_bits(compiled(x), layer(x))
    assert sharding._known == [True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_model_under_autocast_and_checkpointing(recipe: str) -> None:
    model, x, grad = layer_of(recipe=recipe), numbers(40, IN, dtype=torch.float32), numbers(40, OUT, seed=2)

    def recomputed(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(model, x, use_reentrant=False)

    found = []
    for each in (recomputed, torch.compile(recomputed, backend="aot_eager", fullgraph=True)):
        y = each(x)
        assert y.dtype == torch.bfloat16
        found.append((y.detach(), *torch.autograd.grad(y, list(model.parameters()), grad)))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_main_grad_is_added_to_between_graphs() -> None:
    layer: Any = layer_of(accumulates_main_grad=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, grad = numbers(40, IN), numbers(40, OUT, seed=2)
    layer(x).backward(grad)
    expected, layer.weight.main_grad = layer.weight.main_grad, torch.zeros_like(layer.weight)
    compiled: Any = torch.compile(layer, backend="aot_eager")
    compiled(x).backward(grad)
    assert same_bits(layer.weight.main_grad, expected)


def test_an_exported_layer_is_trained_as_the_layer_is() -> None:
    layer, x, grad = layer_of(), numbers(40, IN), numbers(40, OUT, seed=2)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("m")},))
    found = trained(program.module(), x, grad)
    expected = dict(zip(("y", "x", *dict(layer.named_parameters())), trained(layer, x, grad), strict=True))
    names = "y", "x", *dict(program.module().named_parameters())
    assert all(same_bits(a, expected[name]) for a, name in zip(found, names, strict=True))


def test_a_layer_that_is_exported_without_gradients_says_so_when_it_is_trained() -> None:
    with torch.no_grad():
        program = torch.export.export(layer_of(), (numbers(8, IN),))
    with pytest.raises(ValueError, match="weight: expected no gradient, because the layer was traced without one"):
        program.module()(numbers(8, IN)).sum().backward()


# main_grad


@pytest.mark.parametrize("tokens", [0, 5, 64])
def test_a_gradient_is_added_to_main_grad(tokens: int) -> None:
    layer, x, grad = layer_of(dtype=torch.bfloat16), numbers(tokens, IN), numbers(tokens, OUT, seed=2)
    fused = layer_of(dtype=torch.bfloat16, accumulates_main_grad=True)
    before = torch.randn(OUT, IN)
    fused.weight.main_grad = before.clone()  # type: ignore[attr-defined]
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        fused(leaf).backward(grad)
    assert fused.weight.grad is None
    assert fused.bias.grad is not None
    _, of_x, of_weight, _ = trained(layer.float(), x, grad)
    assert same_bits(some(leaf.grad), of_x)
    added = fused.weight.main_grad - before  # type: ignore[attr-defined]
    assert torch.allclose(added, 2 * of_weight, rtol=1e-5, atol=1e-5)


def test_megatron_is_told_and_its_hooks_get_a_gradient() -> None:
    layer = layer_of(accumulates_main_grad=True)
    weight: Any = layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(OUT, IN), False
    layer(numbers(16, IN)).sum().backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.main_grad.any()
    assert not some(weight.grad).any()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (None, "weight.main_grad: expected a tensor, because accumulates_main_grad is set, got None"),
        (torch.zeros(OUT, IN).bfloat16(), "weight.main_grad: expected shape (144, 272) and dtype torch.float32, got"),
        (torch.zeros(IN, OUT), "weight.main_grad: expected shape (144, 272) and dtype torch.float32, got (272, 144)"),
    ],
)
def test_a_main_grad_that_cannot_be_added_to_is_refused(buffer: Tensor | None, message: str) -> None:
    layer = layer_of(accumulates_main_grad=True)
    if buffer is not None:
        layer.weight.main_grad = buffer  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        layer(numbers(4, IN))
    with torch.no_grad():
        layer(numbers(4, IN))
    layer.weight.requires_grad_(False)
    layer(numbers(4, IN).requires_grad_()).sum().backward()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 5, 130, 1000, 4096])
def test_a_gpu_gives_what_the_cpu_gives(tokens: int, w_dtype: torch.dtype, dtype: torch.dtype, recipe: str) -> None:
    """Casts have the same bits on both devices, so products differ only by the tensor cores' sums."""
    layer = layer_of(dtype=w_dtype, recipe=recipe)
    x, grad = numbers(tokens, IN, dtype=dtype), numbers(tokens, OUT, dtype=dtype, seed=2)
    got = trained(copy.deepcopy(layer).cuda(), x.cuda(), grad.cuda())
    if tokens <= 200:
        right = trained(layer, x, grad)
        for mine, its in zip(got, right, strict=True):
            assert mine.dtype == its.dtype
            assert error(mine.cpu(), its) < 2e-3
    elif dtype != torch.float16:
        theirs = torch.nn.Linear(IN, OUT, device="cuda")
        theirs.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
        right = trained(theirs, x.float().cuda(), grad.float().cuda())
        assert all(error(mine, its) < TYPICAL for mine, its in zip(got, right, strict=True))
    with torch.no_grad():
        assert same_bits(copy.deepcopy(layer).cuda()(x.cuda()), got[0])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_on_a_gpu_is_added_to(recipe: str) -> None:
    layer = layer_of(dtype=torch.bfloat16, accumulates_main_grad=True, recipe=recipe).cuda()
    plain = copy.deepcopy(layer)
    plain.accumulates_main_grad = False
    weight: Any = layer.weight
    weight.main_grad = torch.zeros(OUT, IN, device="cuda")
    x, grad = numbers(512, IN).cuda(), numbers(512, OUT, seed=2).cuda()
    for _ in range(3):
        layer(x).backward(grad)
    plain.float()(x).backward(grad)
    assert error(weight.main_grad, 3 * some(plain.weight.grad)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_on_a_gpu_and_a_stream_of_its_own(use_reentrant: bool) -> None:
    layers = torch.nn.Sequential(layer_of(dtype=torch.bfloat16), torch.nn.SiLU()).cuda()
    x, grad = numbers(300, IN).cuda(), numbers(300, OUT, seed=2).cuda()
    expected = trained(layers, x, grad)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        leaf = x.clone().requires_grad_()
        layers.zero_grad()
        y = checkpoint(layers, leaf, use_reentrant=use_reentrant)
        y.backward(grad)
    torch.cuda.synchronize()
    assert same_bits(some(leaf.grad), expected[1])
    got = [p.grad for p in layers.parameters()]
    assert all(a is not None and same_bits(a, b) for a, b in zip(got, expected[2:], strict=True))


def test_by_rows_a_bias_may_begin_anywhere() -> None:
    layer, x = Linear(32, 16, dtype=torch.bfloat16, recipe="row"), torch.randn(4, 32).bfloat16()
    right = layer(x)
    room = torch.zeros(17, dtype=torch.bfloat16)
    room[1:] = layer.bias.detach()
    layer.bias = torch.nn.Parameter(room[1:])
    assert torch.equal(layer(x), right)
    layer.recipe = "rows"
    with pytest.raises(ValueError, match="recipe: expected 'block' or 'row', got 'rows'"):
        layer(x)

"""A linear layer: the bits of cast and product, x of any shape, and a bias that is rounded together with the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BF16_UNIT, CANARY, captured, dequantize, framed, same_bits, some
from helpers import numbers as random_x
from layer_cases import assert_mistake, weights_without_values, without_values
from torch import Tensor

import deep_gemm
from deep_gemm import fp8_gemm_nt, linear, per_block_cast_to_fp8, per_token_cast_to_fp8

N, K = 136, 272
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(n: int = N, k: int = K) -> tuple[Tensor, Tensor]:
    return per_block_cast_to_fp8(random_x(n, k, seed=7))


def by_parts(x: Tensor, w: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    """Cast, then multiply with a C that repeats the bias in each row; compute D in FP32, then round D."""
    rows = x.reshape(x[..., 0].numel(), x.shape[-1])
    c = None if bias is None else bias.float().repeat(len(rows), 1)
    d = torch.empty(len(rows), len(w[0]), device=x.device)
    fp8_gemm_nt(per_token_cast_to_fp8(rows), w, d, c)
    return d.to(torch.bfloat16).view(*x.shape[:-1], len(w[0]))


def called(x: Tensor, w: tuple[Tensor, Tensor], **arguments: Any) -> Tensor:
    out = some(linear(x, w, **arguments))
    assert out.dtype == torch.bfloat16
    return out


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 4), (0,), (2, 0, 3)])
def test_it_is_cast_and_product_to_the_bit(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = random_x(*leading, K, dtype=dtype), weight()
    out = called(x, w)
    assert out.shape == (*leading, N)
    assert same_bits(out, by_parts(x, w))
    d = some(fp8_gemm_nt(per_token_cast_to_fp8(x.reshape(-1, K)), w))
    assert same_bits(out.view(-1, N), d)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("gran_k", [None, 128])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("recipe_b", [(1, 0), (0, 0)])
def test_scales_of_whole_rows_and_of_the_weight_are_those_of_cast_and_product(
    recipe_b: tuple[int, int], with_bias: bool, gran_k: int | None, device: str
) -> None:
    x, plain = random_x(2, 37, 400).to(device), random_x(72, 400, seed=1).to(device)
    w = per_token_cast_to_fp8(plain, gran_k=0) if recipe_b[0] else deep_gemm.per_tensor_cast_to_fp8(plain)
    bias = random_x(72, seed=2).to(device) if with_bias else None
    rows = per_token_cast_to_fp8(x.view(74, 400), gran_k=0 if gran_k is None else gran_k)
    right = some(fp8_gemm_nt(rows, w, None, bias, recipe_a=(1, gran_k or 0), recipe_b=recipe_b))
    for said in (dict[str, Any](), {"recipe_b": recipe_b}):
        found = linear(x, w, bias=bias, gran_k=gran_k, **said)
        assert same_bits(some(found), right.view(2, 37, 72).to(torch.bfloat16))
        assert same_bits(some(deep_gemm.nn.FrozenLinear(w, bias, gran_k=gran_k, **said)(x)), some(found))
    with pytest.raises(ValueError, match="scales of 128x128 beside 1x128 of x where x or bias requires a gradient"):
        linear(x.clone().requires_grad_(), w, gran_k=gran_k)
    words = r"^sfw: expected shape \(1, 4\) of 128x128 values, .* or \(72, 1\) of 1xk values"
    with pytest.raises(ValueError, match=words):
        linear(x, (w[0], torch.ones(71, 1, device=device)))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_bias_is_added_in_fp32_and_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    x, w, bias = random_x(2, 3, K), weight(), (random_x(N, seed=3) * 1.001).to(dtype)
    out = called(x, w, bias=bias)
    assert same_bits(out, by_parts(x, w, bias))
    values, scales = per_token_cast_to_fp8(x)
    exact = dequantize(values, scales) @ dequantize(*w, rows=128).t() + bias.double()
    assert bool(((out.double() - exact).abs() <= exact.abs() * BF16_UNIT + 1e-4).all())
    assert not same_bits(out, called(x, w) + bias.to(torch.bfloat16)), "the sum is rounded before the bias is added"


@pytest.mark.parametrize("with_bias", [None, torch.bfloat16, torch.float32])
def test_out_is_written_and_nothing_around_it(with_bias: torch.dtype | None) -> None:
    x, w = random_x(2, 3, K), weight()
    bias = None if with_bias is None else random_x(N, dtype=with_bias)
    buffer = torch.full((2, 3, N + 24), CANARY, dtype=torch.bfloat16)
    out = buffer[..., 8 : N + 8]
    assert linear(x, w, out=out, bias=bias) is None
    assert same_bits(out, by_parts(x, w, bias))
    out.fill_(CANARY)
    assert bool((buffer == CANARY).all())


def test_strides_of_x_change_nothing() -> None:
    x, w = random_x(4, 6, K), weight()
    expected = called(x, w)
    wide = torch.cat([x, x], dim=2)
    assert same_bits(called(wide[..., :K], w), expected)
    assert same_bits(called(wide[..., 1 : K + 1], w), called(wide[..., 1 : K + 1].contiguous(), w))
    assert same_bits(called(x.transpose(0, 1), w), expected.transpose(0, 1))
    assert same_bits(called(x.repeat_interleave(2, 2)[..., ::2], w), expected)
    assert same_bits(called(x[::2], w), expected[::2])
    assert same_bits(called(x[0, 0].expand(3, K), w), expected[0, 0].expand(3, N))


@pytest.mark.parametrize(("n", "k"), [(0, K), (N, 0), (0, 0), (8, 16)])
@pytest.mark.parametrize("leading", [(3,), (2, 2), (0,)])
def test_sizes_of_zero_give_an_empty_result_or_the_bias(n: int, k: int, leading: tuple[int, ...]) -> None:
    x, w, bias = random_x(*leading, k), weight(n, k), random_x(n)
    out = called(x, w, bias=bias)
    assert out.shape == (*leading, n)
    if k == 0:
        assert same_bits(out, bias.expand(*leading, n))
        assert not called(x, w).any()


def test_special_values_are_those_of_the_cast() -> None:
    x, w = random_x(4, K), weight()
    x[0, 3], x[1, 200], x[2] = torch.nan, torch.inf, 0.0
    out = called(x, w)
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all()
    assert not out[2].any()
    assert same_bits(out[3], called(x[3], w))


# Gradients, through a weight that is frozen


def gradients(function: Any, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor | None]:
    """Return the result, and the gradients of x and of the bias. x is not a leaf."""
    leaf = x.detach().clone().requires_grad_()
    of_bias = None if bias is None else bias.detach().clone().requires_grad_()
    out = function(leaf * 1, of_bias)
    out.backward(grad)
    return [out.detach(), some(leaf.grad), None if of_bias is None else of_bias.grad]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("n", [8, 136, 272])
def test_gradients_of_x_and_of_the_bias(n: int, leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """x's gradient is a product of the cast gradient with the same weight. The bias's gradient is a sum in FP32."""
    x, w, bias, grad = random_x(*leading, K, dtype=dtype), weight(n), random_x(n, seed=2), random_x(*leading, n, seed=3)
    out, of_x, of_bias = gradients(lambda x, bias: linear(x, w, bias=bias), x, bias, grad)
    assert out is not None and of_x is not None and of_bias is not None
    assert same_bits(out, called(x, w, bias=bias))
    rows = grad.reshape(-1, n)
    exact = dequantize(*per_token_cast_to_fp8(rows)) @ dequantize(*w, rows=128)
    assert (of_x.shape, of_x.dtype) == (x.shape, dtype)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-5}[dtype]
    assert bool(((of_x.reshape(-1, K).double() - exact).abs() <= exact.abs() * unit + 1e-3).all())
    assert same_bits(of_bias, rows.sum(0, dtype=torch.float32).to(torch.bfloat16))


def test_a_gradient_is_that_of_a_layer_that_is_trained_with_a_frozen_weight() -> None:
    layer = deep_gemm.nn.Linear(K, 144, dtype=torch.bfloat16).requires_grad_(False)
    x, w, grad = random_x(9, K), per_block_cast_to_fp8(layer.weight), random_x(9, 144)
    ours = gradients(lambda x, _: linear(x, w, bias=layer.bias), x, None, grad)
    theirs = gradients(lambda x, _: layer(x), x, None, grad)
    assert all(same_bits(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True) if a is not None and b is not None)


def test_what_needs_no_gradient_makes_no_record_and_weights_get_none() -> None:
    x, (values, scales) = random_x(2, K), weight()
    w = torch.nn.Parameter(values), torch.nn.Parameter(scales)
    assert not called(x, w).requires_grad
    leaf, bias = x.clone().requires_grad_(), random_x(N).requires_grad_()
    torch.autograd.backward(called(leaf, w).sum())
    torch.autograd.backward(called(x, w, bias=bias).sum())
    assert leaf.grad is not None and bias.grad is not None
    assert w[0].grad is None and w[1].grad is None
    with torch.no_grad():
        assert not called(leaf, w, bias=bias).requires_grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients_have_the_same_bits(backend: str) -> None:
    x, w, bias, grad = random_x(2, 9, K), weight(), random_x(N, seed=2), random_x(2, 9, N, seed=3)

    def layer(x: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.silu(called(torch.nn.functional.silu(x), w, bias=bias))

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for found in (gradients(compiled, x, bias, grad), gradients(compiled, x[:, :7], bias, grad[:, :7])):
        rows = 9 if found[0] is not None and found[0].shape[1] == 9 else 7
        expected = gradients(layer, x[:, :rows], bias, grad[:, :rows])
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)


def test_a_compiled_layer_with_weights_in_parameters_makes_no_record() -> None:
    values, scales = weight()
    w = torch.nn.Parameter(values), torch.nn.Parameter(scales)
    out = torch.compile(lambda x: called(x, w) * 2, fullgraph=True, backend="aot_eager")(random_x(3, K))
    assert not out.requires_grad


@pytest.mark.combinations
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_an_exported_layer_has_the_same_bits_and_gradients(grad: bool, strict: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.scales = (torch.nn.Parameter(x) for x in weight())
            self.before = torch.nn.Linear(K, K)
            self.bias = torch.nn.Parameter(random_x(N))

        def forward(self, x: Tensor) -> Tensor:
            return called(self.before(x), (self.values, self.scales), bias=self.bias)

    model, m = Model(), torch.export.Dim("m")
    with torch.set_grad_enabled(grad):
        given = (random_x(6, K, dtype=torch.float32),)
        program = torch.export.export(model, given, dynamic_shapes=({0: m},), strict=strict)
    for exported in (program, program.run_decompositions()):
        for tokens in (3, 300):
            x = random_x(tokens, K, dtype=torch.float32)
            assert same_bits(exported.module()(x).detach(), model(x).detach())
    found = program.module()
    torch.autograd.backward([made(x).sum() for made in (found, model)])
    for name in ("before.weight", "bias"):
        of_one, of_other = found.get_parameter(name).grad, model.get_parameter(name).grad
        assert of_one is not None and of_other is not None
        assert torch.equal(of_one, of_other)


def test_a_result_with_a_gradient_is_changed_in_place() -> None:
    for shape in ((K,), (5, K), (2, 3, K)):
        x = random_x(*shape).requires_grad_()
        out = called(x, weight())
        out += 1
        out.relu_()
        torch.autograd.backward(out.sum())
        expected = gradients(lambda x, _: (called(x, weight()) + 1).relu(), x, None, torch.ones_like(out))
        assert same_bits(some(x.grad), some(expected[1]))


@pytest.mark.parametrize("learns", ["x", "bias"])
def test_out_is_refused_where_a_gradient_is_needed(learns: str) -> None:
    given = {"x": random_x(2, K), "bias": random_x(N)}
    given[learns].requires_grad_()
    out = torch.zeros(2, N, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^out: expected None, because x or bias requires a gradient"):
        linear(given["x"], weight(), out=out, bias=given["bias"])
    with torch.no_grad():
        assert linear(given["x"], weight(), out=out, bias=given["bias"]) is None


def test_there_is_no_gradient_of_a_gradient() -> None:
    x = random_x(2, K).requires_grad_()
    grad = torch.ones(2, N, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises((RuntimeError, ValueError), match="gradient"):
        torch.autograd.grad(called(x, weight()), x, grad * 1, create_graph=True)


def test_a_bias_by_position_is_refused() -> None:
    """F.linear takes the bias by position. `linear` would take this argument for the output, and overwrite it."""
    x, bias = random_x(2, K), random_x(N)
    with pytest.raises(TypeError, match="positional"):
        linear(x, weight(), bias)  # type: ignore[call-arg]


# On a GPU


def test_the_host_reads_no_value_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.empty(2, 3, K, device="meta"), weights_without_values(N, K)
    with without_values(monkeypatch):
        for bias in (None, *(torch.empty(N, dtype=dtype, device="meta") for dtype in TYPES)):
            out = called(x, w, bias=bias)
            assert out.device.type == "meta"
            linear(x, w, out=out, bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [None, torch.bfloat16, torch.float32])
def test_a_gpu_gives_cast_and_product_and_a_graph_captures_it(with_bias: torch.dtype | None) -> None:
    x, (values, scales) = random_x(2, 33, K).cuda(), weight()
    w = values.cuda(), scales.cuda()
    bias = None if with_bias is None else random_x(N, dtype=with_bias).cuda()
    expected = by_parts(x, w, bias) if bias is None else None
    called(x, w, bias=bias)
    graph, out = captured(called, x, w, bias=bias)
    graph.replay()
    assert expected is None or same_bits(out, expected)
    on_cpu = called(x.cpu(), weight(), bias=None if bias is None else bias.cpu())
    assert deep_gemm.calc_diff(out.cpu(), on_cpu) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 33, 300])
@pytest.mark.parametrize("n", [136, 272])
def test_a_gpu_gives_the_gradients_of_the_cpu(n: int, m: int) -> None:
    x, (values, scales), bias, grad = random_x(m, K), weight(n), random_x(n, seed=2), random_x(m, n, seed=3)
    w = values.cuda(), scales.cuda()
    expected = gradients(lambda x, bias: linear(x, (values, scales), bias=bias), x, bias, grad)
    found = gradients(lambda x, bias: linear(x, w, bias=bias), x.cuda(), bias.cuda(), grad.cuda())
    for got, right in zip(found, expected, strict=True):
        assert got is not None and right is not None
        assert deep_gemm.calc_diff(got.cpu(), right) < 1e-5


SHAPES = [(576, 7168), (2112, 7168), (4096, 7168), (7168, 2048), (136, 272), (24576, 1536), (1160, 2832)]


def on_gpu(n: int, k: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    return per_block_cast_to_fp8(torch.randn(n, k, generator=g, device="cuda", dtype=torch.bfloat16))


def by_two_calls(x: Tensor, w: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """Call the public cast, then the public product with a C that repeats the bias in each row."""
    c = None if bias is None else bias.repeat(len(x), 1)
    return some(fp8_gemm_nt(per_token_cast_to_fp8(x), w, c=c))


@pytest.fixture(params=[False, True], ids=["in turn", "dependent"])
def pdl(request: pytest.FixtureRequest) -> None:
    deep_gemm.set_pdl(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_any_number_of_rows_has_the_bits_of_the_two_calls(n: int, k: int, with_bias: bool, pdl: None) -> None:
    """One or two launches, of any kernel that multiplies, must give the same bits and keep the memory around D."""
    w, bias = on_gpu(n, k), torch.randn(n, device="cuda").to(torch.bfloat16) if with_bias else None
    for m in (*range(1, 71), 128, 300, 4096):
        x, frame = random_x(m, k, seed=m).cuda(), framed((m, n), torch.bfloat16, "cuda")
        linear(x, w, out=frame.view, bias=bias)
        assert same_bits(frame.view, by_two_calls(x, w, bias)), m
        frame.assert_untouched_outside()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe_b", [None, (1, 0), (0, 0)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_scales_of_whole_rows_and_a_bias_in_fp32_have_the_bits_of_the_two_calls(
    n: int, k: int, recipe_b: tuple[int, int] | None, pdl: None
) -> None:
    """Some rows hold numbers that are not ordinary, or are tiny."""
    plain, columns = random_x(n, k, seed=1).cuda(), 0 if recipe_b else 128
    w = per_token_cast_to_fp8(plain, gran_k=0) if recipe_b else per_block_cast_to_fp8(plain)
    if recipe_b == (0, 0):
        w = deep_gemm.per_tensor_cast_to_fp8(plain)
    said: dict[str, Any] = {"recipe_a": (1, 0), "recipe_b": recipe_b} if recipe_b else {}
    for m in (*range(1, 18), 40):
        x, frame = random_x(m, k, seed=m).cuda(), framed((m, n), torch.bfloat16, "cuda")
        x[m // 2] *= 1e-38
        x[m // 3, k - 1] = torch.inf if m % 2 else torch.nan
        for bias in (None, torch.randn(n, device="cuda")):
            linear(x, w, out=frame.view, bias=bias)
            right = fp8_gemm_nt(per_token_cast_to_fp8(x, gran_k=columns), w, c=bias, **said)
            assert same_bits(frame.view, some(right)), m
            frame.assert_untouched_outside()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 16, 40])
def test_strides_and_special_values_have_the_bits_of_the_two_calls(m: int, pdl: None) -> None:
    """Test rows with gaps between them, rows that begin at any element, column-major rows, and NaN in unread memory."""
    n, k = 2112, 7168
    w, bias = on_gpu(n, k), torch.randn(n + 1, device="cuda").to(torch.bfloat16)
    x = random_x(m, k, seed=m).cuda()
    for row, number in enumerate((torch.nan, -torch.inf, 3.3895e38, 9.2e-41, 0.0)):
        x[row % m, row * 300 : row * 300 + 1 + row * 40] = number
    room = torch.full((m + 1, k + 24), torch.nan, dtype=torch.bfloat16, device="cuda")
    for first in (8, 3):
        room[:m, first : first + k] = x
        assert same_bits(called(room[:m, first : first + k], w), by_two_calls(x, w, None))
        room.fill_(torch.nan)
    assert same_bits(called(x.t().contiguous().t(), w), by_two_calls(x, w, None))
    for first in (0, 1):  # a bias at an address that a C may have, then at an address that a C may not have
        assert same_bits(called(x, w, bias=bias[first:][:n]), by_two_calls(x, w, bias[first:][:n]))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 300])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (7168, 2048)])
def test_a_graph_with_new_inputs_and_a_weight_written_just_ahead(m: int, n: int, k: int, pdl: None) -> None:
    """The previous kernel writes the weight, so the layer must wait for its end before it reads the weight."""
    weights = [on_gpu(n, k, seed) for seed in range(3)]
    xs = [random_x(m, k, seed=seed).cuda() for seed in range(3)]
    x, w = xs[0].clone(), (weights[0][0].clone(), weights[0][1].clone())
    source = weights[0][0].clone(), weights[0][1].clone()
    expected = [by_two_calls(x_, w_, None) for x_, w_ in zip(xs, weights, strict=True)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        called(x, w)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = []
            for _ in range(4):  # a layer reads the weight, a copy writes it, a layer reads it
                outs.append(called(x, w))
                w[1].copy_(source[1])
                w[0].view(torch.uint8).copy_(source[0].view(torch.uint8))
                outs.append(called(x, w))
        for turn in (1, 2, 0, 2, 1):
            x.copy_(xs[turn])
            for old, new in zip(source, weights[turn], strict=True):
                old.copy_(new)
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(same_bits(out, expected[turn]) for out in outs[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4, 64])
def test_layers_behind_each_other_on_several_streams(m: int, pdl: None) -> None:
    """Each layer's x is the output of the previous layer."""
    w = on_gpu(2048, 2048)
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    xs = [random_x(m, 2048, seed=seed).cuda() / 64 for seed in range(3)]
    expected = list(xs)
    for _ in range(5):
        expected = [by_two_calls(x, w, None) for x in expected]
    torch.cuda.synchronize()
    found = []
    for stream, x in zip(streams, xs, strict=True):
        with torch.cuda.stream(stream):
            y = x
            for _ in range(5):
                y = called(y, w)
            found.append(y)
    torch.cuda.synchronize()
    assert all(same_bits(x, right) for x, right in zip(found, expected, strict=True))


# Mistakes

OUT = torch.zeros(6, N, dtype=torch.bfloat16)
W = weight()


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"x": [1.0]}, "TypeError: x: expected a tensor, got a list of 1"),
    ({"x": torch.ones(())}, "x: expected shape (..., k), got ()"),
    ({"x": torch.ones(6, K, dtype=torch.float64)}, "x: expected dtype torch.bfloat16 or torch.float16 or"),
    ({"x": torch.ones(6, K, device="meta")}, "w: expected device meta, where x is, got cpu"),
    ({"x": torch.ones(6, K + 16)}, f"x: expected shape (..., k) = (..., {K}), got (6, {K + 16})"),
    ({"x": torch.ones(6, 8), "w": weight(N, 8)}, "k: expected a multiple of 16, got 8"),
    ({"w": weight(12)}, "n: expected a multiple of 8 for torch.bfloat16 output, got 12"),
    ({"w": W[0]}, "TypeError: w: expected a pair (values, scales), got Tensor"),
    ({"w": (W[0], 1.0)}, "TypeError: sfw: expected a tensor, got float"),
    ({"w": (W[0].float(), W[1])}, "w: expected dtype torch.float8_e4m3fn, got torch.float32"),
    ({"w": (W[0], W[1].half())}, "sfw: expected dtype torch.float32, got torch.float16"),
    ({"w": (W[0], W[1][:1])}, "sfw: expected shape (2, 3) of 128x128 values, (3, 5) of 64x64 values, "),
    ({"w": (W[0].to("meta"), W[1])}, "w: expected device cpu, where x is, got meta"),
    ({"w": (W[0], W[1].to("meta"))}, "sfw: expected device cpu, where x is, got meta"),
    ({"w": (W[0].t().contiguous().t(), W[1])}, "w: expected values contiguous along k, got strides (1, 136)"),
    ({"bias": 1.0}, "TypeError: bias: expected a tensor, got float"),
    ({"bias": torch.ones(1, N)}, f"bias: expected shape (n) = ({N}), got (1, {N})"),
    ({"bias": torch.ones(N).double()}, "bias: expected dtype torch.bfloat16 or torch.float16 or torch.float32"),
    ({"bias": torch.ones(N, device="meta")}, "bias: expected device cpu, where x is, got meta"),
    ({"out": 1}, "TypeError: out: expected a tensor, got int"),
    ({"out": OUT.float()}, "out: expected dtype torch.bfloat16, got torch.float32"),
    ({"out": OUT[None]}, f"out: expected shape (..., n) = (6, {N}), got (1, 6, {N})"),
    ({"out": OUT.to("meta")}, "out: expected device cpu, where x is, got meta"),
    ({"out": OUT[:1].expand(6, N)}, "out: expected rows that do not overlap, got strides (0, 1)"),
    ({"out": OUT, "bias": OUT[0]}, "out: expected memory that does not overlap bias"),
    (
        {"x": torch.ones(2, 3, K), "out": torch.zeros(3, 2, N, dtype=torch.bfloat16).transpose(0, 1)},
        "out: expected rows at equal distances, got strides (136, 272, 1)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    assert_mistake(linear, {"x": torch.ones(6, K), "w": W, **changes}, message)

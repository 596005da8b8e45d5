"""Test linear layers and mixtures of experts alike: torch's modes, transforms, checkpoints and exports."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import helpers
import pytest
import torch
from helpers import same_bits
from nn_cases import deterministic, grad_of, trained
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm.nn import Experts, Linear

IN = 144
EXPERTS = partial(Experts, 5, IN, 80)
LAYERS: dict[str, partial[Any]] = {
    "linear": partial(Linear, IN, 272),
    "linear by rows": partial(Linear, IN, 272, recipe="row"),
    "experts": EXPERTS,
    "experts in bf16": partial(EXPERTS, products="bf16"),
}
EACH = pytest.mark.parametrize("name", LAYERS)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TYPES = [torch.bfloat16, torch.float32, torch.float16]
numbers = partial(helpers.numbers, seed=1)


def layer_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return LAYERS[name](**{"dtype": torch.float32, **more})


def given_to(name: str, *leading: int, size: int = IN, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Draw tokens, and for mixtures also routes to experts, some of them without an expert."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(-1, 5, (*leading, 2), generator=generator)
    routes = (ids, torch.rand(*leading, 2, generator=generator)) if "experts" in name else ()
    return numbers(*leading, size, dtype=dtype), *routes


def grad_for(name: str, *leading: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return numbers(*leading, IN if "experts" in name else 272, dtype=dtype, seed=3)


class Within(torch.nn.Module):
    """A module that calls a layer by the given function."""

    def __init__(self, layer: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *given: Tensor) -> Any:
        return self.call(self.layer, *given)


@EACH
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 4)])
def test_any_leading_dimensions_and_strides(name: str, leading: tuple[int, ...]) -> None:
    layer, given, grad = layer_of(name), given_to(name, *leading), grad_for(name, *leading)
    found = trained(layer, *given, grad)
    assert (found[0].shape, found[1].shape) == (grad.shape, given[0].shape)
    rows = [x.reshape(-1, x.shape[-1]) for x in (*given, grad)]
    assert all(same_bits(a.reshape(b.shape), b) for a, b in zip(found, trained(layer, *rows), strict=True))
    wide = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in given]
    assert all(same_bits(a, b) for a, b in zip(found, trained(layer, *wide, grad), strict=True))


@EACH
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_a_result_is_changed_in_place(name: str, leading: tuple[int, ...]) -> None:
    """Change results and inputs in place as models do: `y += x`, ReLU(inplace=True), dropout."""

    def changed(layer: Any, *given: Tensor) -> Any:
        y = layer(*given)
        assert not y._is_view()  # FSDP2 warns of views
        y += 0.5
        return torch.nn.functional.dropout(y.relu_(), 0.0, inplace=True)

    layer, given, grad = layer_of(name), given_to(name, *leading), grad_for(name, *leading)
    found, right = trained(Within(layer, changed), *given, grad), trained(layer, *given, grad)[0] + 0.5
    assert same_bits(found[0], right.relu())
    expected = trained(layer, *given, grad.masked_fill(right <= 0, 0))
    assert all(same_bits(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.few
@EACH
@DEVICES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("dtype", "frozen"), list(zip(TYPES[::-1], ("", "the first weight", "x"), strict=True)))
def test_a_model_is_compiled_as_one_graph_of_the_same_bits(
    name: str, device: str, backend: str, frozen: str, dtype: torch.dtype
) -> None:
    """A graph must not round a gradient before the cast: rounding to BF16 first would change bits of the FP8 values."""
    without_bias = {} if "experts" in name else {"bias": False}  # Inductor adds up a bias's gradient in another order
    model = Within(layer_of(name, **without_bias).to(device), lambda layer, *given: layer(*given).relu())
    next(model.parameters()).requires_grad_(frozen != "the first weight")
    counter = CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in (40, 7, 64, 20):
        given = [x.to(device) for x in given_to(name, tokens, dtype=dtype)]
        for x in given:
            x.requires_grad_(x.is_floating_point() and (frozen != "x" or x is not given[0]))
            if tokens == 40:
                torch._dynamo.mark_dynamic(x, 0)
        leaves = [leaf for leaf in (*given, *model.parameters()) if leaf.requires_grad]
        found = []
        for each in (model, compiled):
            y = each(*given)
            grad = grad_for(name, tokens, dtype=dtype).to(device)
            found.append((y.detach(), *torch.autograd.grad(y, leaves, grad)))
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
        with torch.no_grad():
            assert same_bits(compiled(*given), found[0][0])
    assert counter.frame_count <= 2  # at most one graph with gradients, and one without


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_type_and_weights_keep_theirs(name: str, dtype: torch.dtype) -> None:
    layer, (x, *routes), grad = layer_of(name), given_to(name, 20, dtype=torch.float32), grad_for(name, 20, dtype=dtype)
    expected = trained(layer, x.to(dtype), *routes, grad)

    def under_autocast(layer: Any, *given: Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return layer(*given)

    found = [trained(Within(layer, under_autocast), x, *routes, grad)]
    with torch.autocast("cpu", dtype):  # backward inside of autocast gives the same gradients
        found.append(trained(layer, x, *routes, grad))
    for got in found:
        assert (got[0].dtype, got[1].dtype) == (dtype, torch.float32)
        assert all(same_bits(a, b.to(a.dtype)) for a, b in zip(got, expected, strict=True))


@EACH
@DEVICES
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_are_recomputed_with_the_same_bits(name: str, device: str, use_reentrant: bool) -> None:
    layer, given = layer_of(name).to(device), [x.to(device) for x in given_to(name, 40)]
    recomputed = Within(layer, partial(checkpoint, use_reentrant=use_reentrant))
    both = (trained(each, *given, grad_for(name, 40).to(device)) for each in (layer, recomputed))
    assert all(same_bits(a, b) for a, b in zip(*both, strict=True))


@EACH
@DEVICES
def test_in_the_batch_invariant_mode_a_token_has_one_result(name: str, device: str) -> None:
    """The result must not depend on how a batch, or a weight's rows, are cut, nor on training, compiling or a graph.

    On a GPU, different kernels serve few and many tokens. Without this mode, few tokens split k of the linear weight.
    """
    deep_gemm.set_batch_invariant(True)
    kind, on_gpu, is_mixture = LAYERS[name], device == "cuda", "experts" in name
    large, tokens = (8, 1024, 512) if is_mixture else (7168, 2112), 4096 if on_gpu else 300
    torch.manual_seed(0)
    layer: Any = kind.func(*(large if on_gpu else kind.args), dtype=torch.bfloat16, **kind.keywords).to(device)
    given = [x.to(device) for x in given_to(name, tokens, size=layer.hidden if is_mixture else layer.in_features)]
    with torch.no_grad():
        whole = layer(*given)
    by_row: Any = partial(deep_gemm.per_token_cast_to_fp8, gran_k=0)
    cast = {"linear by rows": by_row, "experts in bf16": Tensor.bfloat16}.get(name, deep_gemm.per_block_cast_to_fp8)
    weights = [cast(w.detach()) for w in layer.parameters() if w.dim() > 1]
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    calls = {
        "trained": layer,
        "compiled": compiled,
        "recomputed": partial(checkpoint, layer, use_reentrant=False),
    }
    if is_mixture:
        calls["inference"] = lambda *of: deep_gemm.experts(*of, *weights)
    else:
        (w, sf), bias = *weights, layer.bias.detach()
        upper = w[:256], sf[: 256 if name == "linear by rows" else 2]
        calls["inference"] = lambda x: deep_gemm.linear(x, (w, sf), bias=bias)
        calls["columns"] = lambda x: deep_gemm.linear(x, upper, bias=bias[:256])
    for begin, end in ((0, 1), (1, 3), (3, 20), (20, 84), (0, 299), (299, tokens)):
        part = [x[begin:end] for x in given]
        for of, call in calls.items():
            got = call(*part).detach()
            assert same_bits(got, whole[begin:end, : got.shape[1]]), (of, begin, end)
        if on_gpu:
            graph, made = helpers.captured(calls["inference"], *part)
            made.zero_()
            graph.replay()
            assert same_bits(made, whole[begin:end]), ("graph", begin, end)


@EACH
@DEVICES
def test_training_repeats_its_bits_and_passes_torchs_check(name: str, device: str) -> None:
    layer, given = layer_of(name).to(device), [x.to(device) for x in given_to(name, 300)]
    with deterministic():  # raises an error if an operation's order depends on time
        first, again = (trained(layer, *given, grad_for(name, 300).to(device)) for _ in range(2))
    assert all(a.any() and same_bits(a, b) for a, b in zip(first, again, strict=True))


@EACH
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_on_meta_a_layer_gives_shapes(name: str, dtype: torch.dtype, grad: bool) -> None:
    layer, given = layer_of(name, device="meta"), [x.to("meta") for x in given_to(name, 2, 3, dtype=dtype)]
    leaves = [x.requires_grad_() for x in given if x.is_floating_point()]
    with torch.set_grad_enabled(grad):
        y = layer(*given)
    shape = grad_for(name, 2, 3).shape
    assert (y.device.type, y.dtype, y.shape, y.requires_grad) == ("meta", dtype, shape, grad)
    if grad:
        y.sum().backward()
        assert all(grad_of(each).is_meta for each in (*leaves, *layer.parameters()))


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes torch run calls as operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@EACH
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()], ids=["sum", "squares"])
def test_there_is_no_gradient_of_a_gradient(name: str, loss: Any, observed: bool) -> None:
    """The dy of a sum requires no gradient, but dx depends on the weight, as in a gradient penalty of a GAN."""
    layer, (x, *routes) = layer_of(name), given_to(name, 9)
    x.requires_grad_()
    with Observed() if observed else nullcontext():  # type: ignore[no-untyped-call]
        (of_x,) = torch.autograd.grad(loss(layer(x, *routes)), x, create_graph=True)
        (right,) = torch.autograd.grad(loss(layer(x, *routes)), x)
        assert same_bits(of_x.detach(), right)
        with pytest.raises(NotImplementedError, match="products in FP8 have no gradients of gradients"):
            (loss(layer(x, *routes)) + of_x.norm()).backward()


@EACH
def test_transforms_are_refused_in_words(name: str) -> None:
    layer, (x, *routes) = layer_of(name), given_to(name, 2, 4)
    said = r"^torch.func and torch.vmap are not supported"
    with pytest.raises(NotImplementedError, match=said):
        torch.func.grad(lambda x: layer(x, *routes).sum())(x)
    with pytest.raises(NotImplementedError, match=said):
        torch.vmap(layer)(x, *routes)
    with pytest.raises(NotImplementedError, match=r"^torch.jit.trace is not supported"):
        torch.jit.trace(layer, (x, *routes))  # type: ignore[no-untyped-call]


@pytest.mark.combinations
@EACH
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_an_exported_layer_has_the_same_bits(name: str, dtype: torch.dtype, grad: bool, strict: bool) -> None:
    """Export in grad mode and under no_grad. The number of tokens may vary."""
    layer, given = layer_of(name, dtype=dtype), given_to(name, 6, 2, dtype=dtype)
    open_tokens = ({0: torch.export.Dim("m")},) * len(given)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(layer, given, dynamic_shapes=open_tokens, strict=strict)
    for exported in (program, program.run_decompositions()):
        for tokens in (3, 9, 300):
            given = given_to(name, tokens, 2, dtype=dtype)
            assert same_bits(exported.module()(*given).detach(), layer(*given).detach())

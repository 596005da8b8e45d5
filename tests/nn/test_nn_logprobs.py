"""Log-probabilities of given tokens, compared with torch's and in pieces of any size; and new weights in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu
from helpers import same_bits, some
from nn_cases import error
from torch import Tensor

import deep_gemm
from deep_gemm import per_block_cast_to_fp8, per_token_cast_to_fp8, refit_, selected_logprobs
from deep_gemm.core.call import RECORDS
from deep_gemm.core.check.memory import empty
from deep_gemm.nn import FrozenExperts, logprobs

M, N, K = 150, 1000, 64
HEADS: dict[str, Callable[[Tensor], Any]] = {
    "bf16": lambda w: w,
    "fp32": lambda w: w.float(),
    "blocks": per_block_cast_to_fp8,
    "rows": partial(per_token_cast_to_fp8, gran_k=0),
    "32x32": partial(per_block_cast_to_fp8, gran_k=32),
    "mx": partial(per_token_cast_to_fp8, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True),
    "tensor": deep_gemm.per_tensor_cast_to_fp8,
    "number": lambda w: tuple(x.squeeze() for x in deep_gemm.per_tensor_cast_to_fp8(w)),  # its scale has no dimension
}


@pytest.fixture
def given() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(size, K, generator=draw).bfloat16() for size in (M, N))
    return hidden, head / 8, torch.randint(0, N, (M,), generator=draw)


def by_torch(hidden: Tensor, head: Tensor, ids: Tensor, temperature: float) -> Tensor:
    logits = hidden.double() @ head.double().mT / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids.clamp(0, N - 1)[..., None])[..., 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", HEADS)
def test_results_and_gradients_are_those_of_log_softmax(
    name: str, temperature: float, given: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("TOKENS", 16), ("COLUMNS", 256)):
        monkeypatch.setattr(logprobs, constant, value)
    hidden, head, ids = given
    is_fp8 = name not in ("bf16", "fp32")
    weight: Any = HEADS[name](head)
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, head if is_fp8 else weight)]
    right = [x.detach().double().requires_grad_() for x in (hidden, head)]
    ids[3], grad = -100, torch.linspace(-1, 1, M)
    got = selected_logprobs(leaves[0], weight if is_fp8 else leaves[1], ids.int(), temperature=temperature)
    expected = by_torch(right[0], right[1], ids, temperature).masked_fill(ids < 0, 0)
    assert got[3] == 0
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < (0.2 if is_fp8 else 4e-6) / temperature
    torch.autograd.backward([got, expected], [grad, grad.double()])
    assert error(some(leaves[0].grad), some(right[0].grad)) < (0.06 if is_fp8 else 0.006)
    if not is_fp8:
        assert error(some(leaves[1].grad), some(right[1].grad)) < 0.006
        assert some(leaves[1].grad).dtype == leaves[1].dtype


@pytest.mark.parametrize("name", ["bf16", "blocks", "mx"])
def test_neither_pieces_nor_other_rows_show_in_the_bits(
    name: str, given: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, ids = given
    weight = HEADS[name](head)
    whole = selected_logprobs(hidden, weight, ids)
    apart = [selected_logprobs(hidden[i : i + 1], weight, ids[i : i + 1]) for i in range(0, M, 10)]
    assert same_bits(torch.cat(apart), whole[::10])
    for tokens, columns in ((128, 128), (2048, 384)):
        monkeypatch.setattr(logprobs, "TOKENS", tokens)
        monkeypatch.setattr(logprobs, "COLUMNS", columns)
        many = [x.expand(3, *x.shape).flatten(0, 1) for x in (hidden, ids)]
        assert same_bits(selected_logprobs(many[0], weight, many[1])[-M:], whole)
    x = hidden.clone().requires_grad_()
    alone = hidden[:1].clone().requires_grad_()
    torch.autograd.backward([selected_logprobs(y, weight, ids[: len(y)]).sum() for y in (x, alone)])
    assert error(some(alone.grad), some(x.grad)[:1]) < 0.01


def test_the_gradient_of_the_head_is_added_to_main_grad(given: tuple[Tensor, ...]) -> None:
    hidden, head, ids = given
    own, fused = torch.nn.Parameter(head.clone()), cast(Any, torch.nn.Parameter(head.clone()))
    fused.main_grad = torch.ones(N, K)
    made = selected_logprobs(hidden, own, ids), selected_logprobs(hidden, fused, ids, accumulates_main_grad=True)
    torch.autograd.backward([each.sum() for each in made])
    assert fused.grad is None
    assert error(fused.main_grad - 1, some(own.grad)) < 0.004
    del fused.main_grad
    with pytest.raises(ValueError, match=r"^weight\.main_grad: expected a tensor"):
        selected_logprobs(hidden, fused, ids, accumulates_main_grad=True)


def test_an_id_behind_the_vocabulary_gives_nan_and_no_rows_give_none(given: tuple[Tensor, ...]) -> None:
    hidden, head, ids = given
    ids[2] = N
    assert selected_logprobs(hidden, head, ids).isnan().tolist() == (ids == N).tolist()
    assert selected_logprobs(hidden[:0], head, ids[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("says", "instead"),
    [
        (r"weight: expected shape \(n, k\) = \(n, 64\), got \(1000, 32\)", {"weight": torch.zeros(N, 32)}),
        (r"weight: expected shape \(n, k\) with n a multiple of 8, got \(9, 64\)", {"weight": torch.zeros(9, K)}),
        (
            r"weight: expected values of torch.float8_e4m3fn, got FP4",
            {"weight": deep_gemm.quantize_mxfp4(torch.zeros(8, K))},
        ),
        (
            r"weight: expected values contiguous along k, got strides \(1, 1000\)",
            {"weight": (torch.zeros(K, N).to(torch.float8_e4m3fn).t(), torch.ones(8, 1))},
        ),
        (r"ids: expected shape \(150,\), one for each row, got \(3,\)", {"ids": torch.zeros(3, dtype=torch.int64)}),
        (r"ids: expected dtype torch.int32 or torch.int64, got torch.float32", {"ids": torch.zeros(M)}),
        (r"temperature: expected a number above 0, got 0", {"temperature": 0}),
        (r"group: expected a process group of torch.distributed or None, got str", {"group": "tp"}),
    ],
)
def test_mistakes_are_said_in_words(says: str, instead: dict[str, Any], given: tuple[Tensor, ...]) -> None:
    arguments = dict(zip(("hidden", "weight", "ids"), given, strict=True)) | instead
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{says}"):
        selected_logprobs(**arguments)


@pytest.mark.host_compiler
def test_a_compiled_loss_has_the_same_gradients(given: tuple[Tensor, ...]) -> None:
    hidden, head, ids = given

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return selected_logprobs(x * 2, w, ids, temperature=0.5).sum()

    torch._dynamo.reset()
    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        torch.autograd.backward(function(*leaves))
        found.append([some(x.grad) for x in leaves])
    assert all(same_bits(x, y) for x, y in zip(*found, strict=True))


def test_on_a_gpu_products_add_up_or_a_kernel_follows_each_piece(
    gpu: FakeGpu, given: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("TOKENS", 16), ("COLUMNS", 256)):
        monkeypatch.setattr(logprobs, constant, value)
    monkeypatch.setattr(logprobs, "empty", lambda *given: on_gpu(empty(*given)))
    hidden, head, ids = map(on_gpu, given)
    product, pass_over = "bf16_gemm_dense", "softmax_piece"

    def forward(head: Any) -> tuple[list[str], Tensor]:
        gpu.launches.clear()
        _, lse = logprobs.forward(hidden, head, ids, 1.0, None)
        return [each.kernel for each in gpu.launches], lse

    launched, lse = forward(head)
    assert launched == [product, pass_over]
    for copied in (given[1].float(), on_gpu(LAYOUTS["among others"](given[1]))):
        assert forward(copied)[0] == [product] * 2 + [pass_over], "copies of 512 rows"
    for temperature in (0.5, 0.7, 0.7, 1.3):
        kept = len(RECORDS)
        logprobs.forward(hidden, head, ids, temperature, None)
        assert len(RECORDS) == kept, "no record for a temperature"
    assert forward(tuple(map(on_gpu, per_block_cast_to_fp8(given[1]))))[0] == ["cast_rows", "fp8_gemm_dense", pass_over]
    of_halves = tuple(map(on_gpu, per_block_cast_to_fp8(given[1], gran_k=64)))
    assert forward(of_halves)[0][2::2] == [pass_over] * 8, "no product adds up blocks of such a head"
    gpu.launches.clear()
    logprobs.backward(torch.ones(M), lse, hidden, head, ids, 1.0, None, True, True)
    assert [each.kernel for each in gpu.launches] == [product, pass_over, product, product] * 2 * 4


def test_no_rows_have_no_gradient() -> None:
    head = torch.ones(N, K, requires_grad=True)
    torch.autograd.backward(selected_logprobs(torch.ones(0, K), head, torch.zeros(0).int()).sum())
    assert same_bits(some(head.grad), torch.zeros(N, K))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "turned": lambda x: x.t().contiguous().t(),
    "among others": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "off an address": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "plain"])
def test_rows_may_lie_as_they_like(name: str, given: tuple[Tensor, ...]) -> None:
    hidden, head, ids = given
    found = []
    for each in ("plain", name):
        leaves = [LAYOUTS[each](x.clone()).detach().requires_grad_() for x in (hidden, head)]
        made = selected_logprobs(leaves[0], leaves[1], ids)
        torch.autograd.backward(made.sum())
        found.append([made, *(x.grad for x in leaves)])
    assert all(same_bits(some(x), some(y)) for x, y in zip(*found, strict=True))
    a, b = (logprobs.laid_out(LAYOUTS[name](x)) for x in (hidden, head))
    deep_gemm.bf16_gemm_nt(a, b, torch.empty(M, N))  # as forward multiplies on a GPU


# New weights in place


def bytes_of(module: torch.nn.Module) -> dict[str, list[int]]:
    return {name: x.contiguous().view(torch.uint8).flatten().tolist() for name, x in module.state_dict().items()}


FORMS: dict[str, Callable[[Tensor], Any]] = {
    **{name: cast for name, cast in HEADS.items() if name not in ("tensor", "number", "fp32")},
    "bf16": lambda w: w.bfloat16(),
    "mxfp4": deep_gemm.quantize_mxfp4,
}


@pytest.mark.parametrize("name", FORMS)
def test_new_weights_are_cast_to_the_bytes_of_a_new_layer_where_the_old_ones_were(name: str) -> None:
    old, new = ([torch.randn(3, 256, 128), torch.randn(3, 128, 128)] for _ in range(2))
    layer, right = (FrozenExperts(*map(FORMS[name], weights)) for weights in (old, new))
    places = [x.data_ptr() for x in layer.state_dict().values()]
    refit_(layer, dict(zip(("w1", "w2"), new, strict=True)))
    assert bytes_of(layer) == bytes_of(right)
    assert [x.data_ptr() for x in layer.state_dict().values()] == places


def test_a_whole_model_gets_the_bytes_of_a_conversion() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.LayerNorm(128), deep_gemm.nn.Experts(2, 128, 64))

    served, master = model(), model()
    for converted in (right := copy.deepcopy(master), served):
        deep_gemm.convert.to_fp8_inference(converted)
    assert bytes_of(served) != bytes_of(right)
    refit_(served, master)
    assert bytes_of(served) == bytes_of(right)


@pytest.mark.parametrize(
    ("says", "instead"),
    [
        (r"master: expected the names of frozen, got none of w2", {"w2": None}),
        (r"master: expected the names of frozen, got others: w3", {"w3": torch.zeros(1)}),
        *(
            (rf"master\['w2'\]: expected a whole tensor of shape \(2, 64, 32\) in .*, got a Tensor of {got}", {"w2": x})
            for got, x in (
                (r"shape \(2, 64\)", torch.zeros(2, 64)),
                (r".* in torch.int8", torch.zeros(2, 64, 32, dtype=torch.int8)),
                (r".* on meta", torch.zeros(2, 64, 32, device="meta")),
            )
        ),
        (r"master\['w2'\]: expected a tensor, got int", {"w2": 3}),
    ],
)
def test_a_mistake_changes_no_byte(says: str, instead: dict[str, Any]) -> None:
    w1, w2 = torch.randn(2, 64, 64), torch.randn(2, 64, 32)
    layer = FrozenExperts(per_block_cast_to_fp8(w1), per_block_cast_to_fp8(w2))
    before = bytes_of(layer)
    master = {name: x for name, x in ({"w1": w2.mT.repeat(1, 2, 1), "w2": w2} | instead).items() if x is not None}
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        refit_(layer, master)
    assert bytes_of(layer) == before
    if "none of" in says:
        refit_(layer, master, strict=False)
        assert bytes_of(layer) != before


def test_what_holds_no_cast_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^frozen: expected a layer that holds cast weights, got none in Linear"):
        refit_(torch.nn.Linear(2, 2), {})
    tensor_scaled = deep_gemm.nn.FrozenLinear(deep_gemm.per_tensor_cast_to_fp8(torch.ones(16, 64)))
    with pytest.raises(NotImplementedError, match=r"^weight: expected scales of rows or of blocks, got one"):
        refit_(tensor_scaled, {"weight": torch.ones(16, 64)})
    other = deep_gemm.nn.FrozenLinear(per_block_cast_to_fp8(torch.zeros(16, 64)))
    both = torch.nn.Sequential(other, tensor_scaled)
    with pytest.raises(NotImplementedError, match=r"^1\.weight: expected scales of rows or of blocks, got one"):
        refit_(both, {"0.weight": torch.ones(16, 64), "1.weight": torch.ones(16, 64)})
    assert not other.state_dict()["weight"].float().any()


class Twice(torch.nn.Module):
    """A layer with two names, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = torch.nn.Linear(64, 32)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 1}


def test_a_layer_with_two_names_and_a_state_that_is_no_tensor_are_those_of_state_dicts() -> None:
    served, master = Twice(), Twice()
    deep_gemm.convert.to_fp8_inference(served)
    right = copy.deepcopy(master)
    deep_gemm.convert.to_fp8_inference(right)
    assert served.first is served.second
    refit_(served, master)
    assert bytes_of(served.first) == bytes_of(right.first)

"""Casts of weights that a block reuses: the same bits, from one cast of each weight, and never from an old weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import count_calls, in_threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deep_gemm.casts.fp8 import per_block_cast_to_fp8
from deep_gemm.linear.backward import cast_both_ways, cast_transposed
from deep_gemm.nn import Experts, Linear, keep_casts, kept

TOKENS, HIDDEN, INTER, NUM = 24, 144, 80, 4


class Model(torch.nn.Module):
    """A model with a layer of each kind. Three of its weights are cast."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.experts = Experts(NUM, HIDDEN, INTER, dtype=dtype)
        self.router = torch.nn.Linear(HIDDEN, NUM, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        p, ids = self.router(h).float().softmax(-1).topk(2)
        return self.experts(h, ids, p)  # type: ignore[no-any-return]


def batch(seed: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step(model: Model, seed: int, *, recomputes: bool = False) -> Tensor:
    x = batch(seed).to(model.router.weight.device).requires_grad_()
    out = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
    out.square().sum().backward()
    return out.detach()  # type: ignore[no-any-return]


def gradients(model: Model) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(found) == 6
    model.zero_grad()
    return found


def same(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, right, strict=True))


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recomputes", [False, True])
def test_batches_of_a_block_share_casts_and_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, recomputes: bool
) -> None:
    model = Model(dtype)
    right = [step(model, seed) for seed in range(3)] + gradients(model)
    calls = count_calls(monkeypatch, kept, "cast_both_ways")
    others = [count_calls(monkeypatch, kept, name) for name in ("per_block_cast_to_fp8", "cast_transposed")]
    with keep_casts():
        found = [step(model, seed, recomputes=recomputes) for seed in range(3)] + gradients(model)
    assert same(found, right)
    assert len(calls) == 3
    assert not any(others)
    step(model, 0)
    assert len(calls) == 3
    assert [len(each) for each in others] == [3, 3]


def test_layers_of_both_recipes_that_share_a_weight_have_casts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    by_block, by_row = (Linear(HIDDEN, HIDDEN, bias=False, recipe=recipe) for recipe in ("block", "row"))
    by_row.weight = by_block.weight

    def run() -> list[Tensor]:
        found = []
        for layer in (by_block, by_row):
            x = batch(0).float().requires_grad_()
            y = layer(x)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight))]
        return found

    right = run()
    calls = count_calls(monkeypatch, kept, "cast_both_ways", "cast_turned_rows", "per_token_cast_to_fp8")
    with keep_casts():
        assert same(run() + run(), right + right)
    assert sorted(calls) == ["cast_both_ways", "cast_turned_rows", "per_token_cast_to_fp8"]
    assert not torch.equal(right[0], right[3])


def test_a_weight_that_changes_is_cast_again() -> None:
    model = Model()
    with keep_casts():
        step(model, 0)
        gradients(model)
        for weight in (model.linear.weight, model.experts.w1, model.experts.w2):
            with torch.no_grad():
                weight.mul_(1.5)
            fresh = Model()  # its weights were never cast in a block
            fresh.load_state_dict(model.state_dict())
            assert same([step(model, 1), *gradients(model)], [step(fresh, 1), *gradients(fresh)])


class ByData(torch.optim.SGD):
    """An optimizer whose changes of weights torch does not count, like optimizers that keep separate FP32 weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data.clone()
                p.data.sub_(p.grad)


def test_a_step_of_an_optimizer_ends_what_was_kept() -> None:
    model, plain = Model(), Model()
    with keep_casts():
        for seed in range(2):
            found = [step(model, seed), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            ByData(model.parameters(), lr=1.0).step()
            model.zero_grad()
    for seed in range(2):
        right = [step(plain, seed), *(p.grad.clone() for p in plain.parameters() if p.grad is not None)]
        ByData(plain.parameters(), lr=1.0).step()
        plain.zero_grad()
    assert same(found, right)


def test_backward_may_run_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run backward in another thread, as torch always does on a GPU."""
    model, calls = Model(), count_calls(monkeypatch, kept, "cast_both_ways")
    with keep_casts():
        loss = model(batch(0)).square().sum()
        in_threads(loss.backward, [None])
    assert len(calls) == 3
    assert len(gradients(model)) == 6


def test_a_block_in_another_shares_its_casts_and_the_last_to_end_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Model(), count_calls(monkeypatch, kept, "cast_both_ways")
    with keep_casts():
        with keep_casts():
            step(model, 0)
        step(model, 1)
        assert len(kept._OF) == len(calls) == 3
    assert not kept._OF
    with pytest.raises(KeyError, match="stop"), keep_casts():
        step(model, 0)
        raise KeyError("stop")
    assert not kept._OF
    assert len(calls) == 6


@pytest.mark.parametrize("grad", [False, True])
def test_parameters_whose_changes_nothing_counts_are_cast_anew(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        layer = Linear(HIDDEN, INTER)
    casts = count_calls(monkeypatch, kept, "per_block_cast_to_fp8")
    x = batch(0)
    with torch.set_grad_enabled(grad):
        right = layer(x)
        with keep_casts(), torch.inference_mode():
            assert torch.equal(layer(x), right)
            layer.weight.zero_()
            assert torch.equal(layer(x), layer.bias.bfloat16().expand(TOKENS, INTER))
            assert not kept._OF
    assert len(casts) == 3


def test_what_is_no_parameter_is_cast_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor may be freed before the next call, and another tensor may then get its id."""
    calls = count_calls(monkeypatch, kept, "per_block_cast_to_fp8")
    with keep_casts():
        for _ in range(2):
            kept.cast_weight(torch.ones(16, 32))
    assert len(calls) == 2


def test_a_graph_that_is_captured_uses_no_casts_from_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it used such casts, the graph's replays would multiply by weights from before the capture."""
    model, is_capturing = Model(), [False]
    monkeypatch.setattr(kept, "_is_capturing", lambda: is_capturing[0])
    calls = count_calls(monkeypatch, kept, "cast_both_ways", "per_block_cast_to_fp8", "cast_transposed")
    with keep_casts():
        step(model, 0)
        assert calls == ["cast_both_ways"] * 3
        calls.clear()
        is_capturing[0] = True
        step(model, 0)
        assert calls == ["per_block_cast_to_fp8"] * 3 + ["cast_transposed"] * 3
        is_capturing[0] = False
        calls.clear()
        step(model, 0)
        assert not calls
    is_capturing[0] = True
    with keep_casts():  # the capture contains the whole block
        for _ in range(2):
            step(model, 0)
    assert calls == ["cast_both_ways"] * 3


def test_a_compiled_layer_keeps_casts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(HIDDEN, HIDDEN)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    calls = count_calls(monkeypatch, kept, "cast_both_ways")
    x = batch(0).float().requires_grad_()
    with keep_casts():
        for _ in range(2):
            compiled(x).sum().backward()
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gives_the_bits_of_casts_apart(dtype: torch.dtype) -> None:
    for shape in ((144, 136), (3, 272, 1000), (2, 128, 128)):
        w = torch.randn(shape, device="cuda").to(dtype)
        for found, right in zip(cast_both_ways(w), (per_block_cast_to_fp8(w), cast_transposed(w)), strict=True):
            assert same([each.float() for each in found], [each.float() for each in right])
    model = Model(dtype).cuda()
    apart = [step(model, seed) for seed in range(3)] + gradients(model)
    with keep_casts():
        assert same([step(model, seed) for seed in range(3)] + gradients(model), apart)

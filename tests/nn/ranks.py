"""Compare layers across processes with one process: python tests/nn/ranks.py WAY in each rank, started like torchrun.

The program uses GPUs if the machine has one for each rank, else the CPU; with one rank, one GPU.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm.convert import to_fp8_training

HIDDEN, OUT = 64, 48
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
INTER = 128 * max(RANKS, 2)  # each rank has whole blocks
DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= RANKS else "cpu"


class Mixture(torch.nn.Module):
    """A mixture of experts that sends tokens to its experts in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = deep_gemm.nn.Experts(4, HIDDEN, 48)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % 4
        y: Tensor = self.experts(x, ids, torch.full(ids.shape, 0.5, device=x.device))
        return y


class Mlp(torch.nn.Module):
    def __init__(self, out: int = OUT, *, bias: bool = True, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, INTER, bias), torch.nn.Linear(INTER, out, bias)
        self.recomputes = recomputes

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return y

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-2])).to(DEVICE)


def both(
    make: Callable[[], torch.nn.Module], share: Callable[[Any], Any], *, first: bool = True, recipe: str = "block"
) -> tuple[Any, Any]:
    """Return an FP8 model shared among ranks, converted before (`first`) or after sharing, and an unshared model."""
    torch.manual_seed(0)
    model = make().to(DEVICE)
    whole = copy.deepcopy(model)
    for each in (model, whole) if first else (whole,):
        to_fp8_training(each, recipe=recipe)
    shared = share(model) or model
    if not first:
        to_fp8_training(model, recipe=recipe)
    return shared, whole


def whole_of(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model: torch.nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the result, and the gradients of x and of all parameters."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    (y.float() * weight).sum().backward()
    return [y.detach(), *(whole_of(each.grad) for each in (leaf, *model.parameters()))]


def near(found: list[Tensor], right: list[Tensor], tolerance: float = 1e-6) -> None:
    for got, expected in zip(found, right, strict=True):
        assert expected.any()
        assert (got - expected).norm() <= tolerance * expected.norm()


def mean_of_ranks(model: torch.nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Return the correct data-parallel gradients, the mean over ranks."""
    each = [gradients(model, x, torch.ones(())) for x in inputs]
    return [torch.stack([grad.float() for grad in grads]).mean(0) for grads in zip(*(g[2:] for g in each), strict=True)]


def ddp() -> None:
    for first in (True, False):
        model, whole = both(lambda: torch.nn.Sequential(Mlp(HIDDEN), Mixture()), DistributedDataParallel, first=first)
        inputs = [numbers(tokens, HIDDEN) for tokens in (24, 0, 40, 7)[:RANKS]]
        right = mean_of_ranks(whole, inputs)
        near(gradients(model, inputs[RANK], torch.ones((), device=DEVICE))[2:], right)


def fsdp() -> None:
    """Check FP32 master weights that are gathered in BF16, then cast to FP8. A gathered weight has no `main_grad`."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(DEVICE, (RANKS,))
    layer: Any = deep_gemm.nn.Linear(HIDDEN, OUT, accumulates_main_grad=True).to(DEVICE)
    fully_shard(layer, mesh=mesh, mp_policy=policy)
    layer.weight.main_grad = torch.zeros(OUT, HIDDEN, device=DEVICE)
    try:
        layer(numbers(24, HIDDEN))
    except ValueError as error:
        assert str(error).endswith("got None: a weight that FSDP2 gathers has none")
    else:
        raise AssertionError("no error")

    def share(model: torch.nn.Sequential) -> None:
        for block in (*model, model):
            fully_shard(block, mesh=mesh, mp_policy=policy)

    for recomputes, recipe in ((False, "block"), (True, "block"), (True, "row")):
        model, whole = both(
            lambda: torch.nn.Sequential(Mlp(HIDDEN, recomputes=recomputes), Mixture()),  # noqa: B023
            share,
            first=recomputes,
            recipe=recipe,
        )
        before = {name: value.clone() for name, value in whole.state_dict().items()}
        inputs = [numbers(tokens, HIDDEN).bfloat16() for tokens in (40, 7, 24, 1)[:RANKS]]
        right = mean_of_ranks(whole.bfloat16(), inputs)
        found = gradients(model, inputs[RANK], torch.ones((), device=DEVICE))
        assert found[0].dtype == torch.bfloat16
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
        near(found[2:], right)
        with deep_gemm.nn.keep_casts():  # gathered weights are freed, and later weights reuse the memory
            for _ in range(2):
                near(gradients(model, inputs[RANK], torch.ones((), device=DEVICE)), found)
            number = len(deep_gemm.nn.kept._OF)
        assert number == 4  # the casts of up, down, w1, w2
        sharded = model.state_dict()
        assert all(torch.equal(whole_of(sharded[name]), value) for name, value in before.items())


def experts_across() -> None:
    """Check a mixture whose experts are divided equally among the ranks."""
    torch.manual_seed(0)
    whole, mine = deep_gemm.nn.Experts(4, HIDDEN, 48).to(DEVICE), deep_gemm.distributed.owned_experts(4)
    w1, w2 = (w.detach()[mine].clone() for w in (whole.w1, whole.w2))
    here = deep_gemm.distributed.Experts(4, w1, w2)
    x, (p, ids) = numbers(24 * RANKS, HIDDEN).bfloat16(), numbers(24 * RANKS, 4).softmax(-1).topk(2)
    found = []
    for layer, tokens in ((whole, slice(None)), (here, slice(24 * RANK, 24 * RANK + 24))):
        leaves = [each[tokens].clone().requires_grad_() for each in (x, p)]
        layer(leaves[0], ids[tokens], leaves[1]).backward(x.flip(0)[tokens])
        found.append([whole_of(each.grad) for each in (*leaves, *layer.parameters())])
    (of_x, of_p, *of_weights), (x_here, *others) = found[0], found[1]
    near([x_here], [of_x[tokens]], 2.0**-7)  # each rank rounds its sum to BF16
    near(others, [of_p[tokens], *(grad[mine] for grad in of_weights)])


near_in_all = near


def tensor_parallel() -> None:
    def share(model: Mlp) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, init_device_mesh(DEVICE, (RANKS,)), plan)

    def near(found: list[Tensor], right: list[Tensor]) -> None:
        """Compare results. By recipe "row" a rank scales its part of a row alone, so it rounds unlike the whole."""
        near_in_all(found, right, 1e-6 if recipe == "block" else 0.07)

    for bias, recipe in ((False, "block"), (True, "block"), (True, "row")):
        model, whole = both(lambda: Mlp(bias=bias), share, first=bias, recipe=recipe)  # noqa: B023
        assert isinstance(model.up.weight, DTensor)
        weight = torch.linspace(-1, 1, OUT, device=DEVICE)
        for tokens in (40, 300):
            x = numbers(2, tokens, HIDDEN)
            with torch.no_grad():
                near([whole_of(model(x))], [whole(x)])
                assert torch.equal(model.up(x), whole.up(x).chunk(RANKS, dim=-1)[RANK])  # whole rows of w are here
            near(gradients(model, x, weight), gradients(whole, x, weight))
            model.requires_grad_(False)  # a frozen model, through which gradients pass
            leaf = x.clone().requires_grad_()
            model(leaf).mul(weight).sum().backward()
            model.requires_grad_()
            assert leaf.grad is not None
            near([leaf.grad], [gradients(whole, x, weight)[1]])
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        near(gradients(compiled, x, weight), gradients(whole, x, weight))


def logprobs() -> None:
    """A vocabulary shared by ranks has the bits and gradients of a whole vocabulary; an uneven share is refused."""
    rows, vocabulary = (4096, RANKS * 4096) if DEVICE == "cuda" else (128, RANKS * 128)
    hidden, head = numbers(40, HIDDEN).bfloat16(), numbers(vocabulary - 40, HIDDEN).bfloat16()
    ids = torch.arange(40, device=DEVICE) * (vocabulary // 40 - 1)
    mine = head[RANK * rows : (RANK + 1) * rows]
    deep_gemm.set_batch_invariant(True)
    found: list[list[Any]] = []
    for weight, group in ((mine, dist.group.WORLD), (head, None)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        made = deep_gemm.selected_logprobs(leaves[0], leaves[1], ids, group=group)
        torch.autograd.backward(made.square().sum())
        found.append([made, *(x.grad for x in leaves)])
        cast = deep_gemm.per_block_cast_to_fp8(weight)
        found[-1].append(deep_gemm.selected_logprobs(hidden, cast, ids, group=group))
    (made, of_hidden, of_mine, by_fp8), (right, of_whole_hidden, of_head, right_by_fp8) = found
    assert torch.equal(made, right) and torch.equal(by_fp8, right_by_fp8)
    near([of_hidden, of_mine], [of_whole_hidden, of_head[RANK * rows : (RANK + 1) * rows]], 0.01)
    try:
        deep_gemm.selected_logprobs(hidden, mine[: 40 + 8 * RANK], ids, group=dist.group.WORLD)
        assert RANKS == 1
    except ValueError as error:
        assert str(error).startswith("weight: expected a multiple of 128 rows on every rank but the last, got [40, ")


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    for way in (ddp, fsdp, experts_across, tensor_parallel, logprobs):
        if way.__name__ in sys.argv[1:]:
            way()
            print(f"{way.__name__}: same")
    dist.destroy_process_group()

"""A training step of `distributed.Experts`, compared with its six products alone on the busiest process."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from deep_gemm.casts.depths import GroupedRows, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.fp8 import per_block_cast_to_fp8
from deep_gemm.casts.gating import Gating
from deep_gemm.distributed import Experts, owned_experts
from deep_gemm.linear.backward import cast_transposed
from deep_gemm.moe.api import activate_rows, product_of_rows
from deep_gemm.moe.check import ExpertRows
from deep_gemm.moe.routing import expert_rows, gather_cast_to_fp8
from deep_gemm.nn.experts import mixture, of_rows, weight_gradient

from .cases import Shape
from .linear import relative_error

STEP = "ep_step"
MOST_ERROR = 2.0**-8
"""Gradients of weights have the same operands as on one process, but sums are rounded to BF16 in another order."""
SHAPES: tuple[Shape, ...] = ((128, 8, 16384, 2048, 768), (64, 8, 8192, 4096, 1536), (32, 8, 4096, 7168, 2048))
"""The mixtures of `bench training`, with the tokens shared by two processes."""
METHOD = (
    "ep_step: a shape without an exponent, even routes: forward and backward with gradients of x, weights of routes "
    "and BF16 weights, set to None ahead of each step, the wait of the host included; product_alone: the six grouped "
    "products of a process's rows, given what they multiply; gradients of weights checked beside those of one process"
)


def local_ids(topk_ids: Tensor, first: int, count: int) -> Tensor:
    """Number the experts of one process from 0; ids of other processes' experts become -1."""
    ids = topk_ids - first
    return ids.masked_fill_((ids < 0) | (ids >= count), -1)


class Training:
    """The tokens and the training step of this process. Every process draws the tokens of all processes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        experts, topk, tokens, hidden, inner = shape
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.ids_of_all = routes_of_all(experts, topk, tokens, 0, ranks).to(device)
        g = torch.Generator(device).manual_seed(1)
        self.of_all = [
            torch.randn(ranks * tokens, hidden, generator=g, device=device, dtype=torch.float32).bfloat16()
            for _ in "xd"
        ]
        self.of_all.append(torch.rand(ranks * tokens, topk, generator=g, device=device, dtype=torch.float32))
        mine = slice(rank * tokens, (rank + 1) * tokens)
        self.ids, (self.x, self.grad, self.p) = self.ids_of_all[mine], (each[mine].clone() for each in self.of_all)
        here = len(range(experts)[owned_experts(experts)])
        w1, w2 = (
            (torch.randn(here, n, k, generator=g, device=device, dtype=torch.float32) / sqrt(k)).bfloat16()
            for n, k in ((2 * inner, hidden), (hidden, inner))
        )
        self.layer = Experts(experts, w1, w2)
        self.leaves = [self.x.requires_grad_(), self.p.requires_grad_(), *self.layer.parameters()]

    def step(self) -> None:
        """Run forward and backward."""
        for leaf in self.leaves:
            leaf.grad = None
        self.layer(self.x, self.ids, self.p).backward(self.grad)

    def check(self) -> str | None:
        """Compare this process's weight gradients with a single process's for all tokens; describe any difference."""
        self.step()
        w1, w2 = (each.detach().requires_grad_() for each in self.layer.parameters())
        x, grad, p = self.of_all
        right = torch.autograd.grad(mixture(x, p, w1, w2, self._rows(), None), (w1, w2), grad)
        found = zip(self.layer.parameters(), right, strict=True)
        worst = max(relative_error(w.grad, its) for w, its in found)  # type: ignore[arg-type]
        error = torch.tensor([worst], device=x.device, dtype=torch.float32)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        return None if error <= MOST_ERROR else f"wrong: relative error {error.item():.2g}, expected {MOST_ERROR:.2g}"

    def _rows(self) -> ExpertRows:
        share = self.layer.share
        ids = local_ids(self.ids_of_all, share.first, share.here)
        rows, count = expert_rows(ids, share.here), int((ids >= 0).sum())
        return rows._replace(token_of=rows.token_of[:count], ids=rows.ids[:count])

    def products(self) -> Callable[[], object]:
        """Return a call of all products of this process's rows."""
        rows, (x, grad, p) = self._rows(), self.of_all
        w1, w2 = (each.detach() for each in self.layer.parameters())
        groups, p = GroupedRows(rows.counts, rows.ends, rows.token_of), of_rows(p, rows)
        a, d = (gather_cast_to_fp8(each, rows, mn_major=True) for each in (x, grad))
        b1, b2, c1, c2 = per_block_cast_to_fp8(w1), per_block_cast_to_fp8(w2), cast_transposed(w1), cast_transposed(w2)
        h, ds = product_of_rows(a, b1, rows), product_of_rows(d, c2, rows)
        s = activate_rows(h, rows, Gating())
        dh, dh_columns, s_columns, _ = cast_silu_gradient(h, ds, groups, p)
        assert dh is not None and dh_columns is not None and s_columns is not None
        by_rows = (a, b1), (s, b2), (d, c2), (dh, c1)
        depths = groups.depths
        along = (dh_columns, cast_along_groups(x, groups)), (cast_along_groups(grad, groups, p), s_columns)

        def compute() -> None:
            for each, weight in by_rows:
                product_of_rows(each, weight, rows)
            for one, another in along:
                weight_gradient(one, another, depths, torch.bfloat16, None)

        return compute


def routes_of_all(experts: int, topk: int, tokens: int, skew: int, processes: int) -> Tensor:
    """Draw different experts for each token of all processes; every process draws the same experts.

    With `skew` s, the i-th expert in a random order has a probability proportional to 1 / (i + 1)^s.
    """
    g = torch.Generator().manual_seed(0)
    likely = (torch.arange(experts) + 1.0).pow(-skew)[torch.randperm(experts, generator=g)]
    # The top-k of log(p) + Gumbel noise is a draw without replacement.
    noise = -(-torch.rand(tokens * processes, experts, generator=g, dtype=torch.float32).log()).log()
    return (likely.log() + noise).topk(topk).indices

"""Helpers for tests of trained layers: errors by Frobenius norms, tensors that autograd stores, poisoned memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import forked
import torch
from helpers import dequantize
from torch import Tensor

from deep_gemm import per_block_cast_to_fp8, per_token_cast_to_fp8

EPSILON = 2.0**-4 + 3e-4
"""Largest error of a cast relative to its input, both as Frobenius norms.

E4M3 stores three bits behind the point, so half a unit is at most 2^-4 of the number. Numbers below 2^-6 scales have
an error of at most 2^-10 scales. In a block of 128x128, whose scale is 1/448 of its largest number, these errors are
at most 128 * 2^-10 / 448 < 3e-4 of the block's norm.
"""
OF_NORMS = 2 * EPSILON + EPSILON**2
"""Largest error of a product of casts, relative to |a| |b|: (a + da)(b + db).T - a b.T with da, db within EPSILON."""
TYPICAL = 0.05
"""Largest error of such a product relative to |a @ b.T|, for random numbers.

Errors of casts are then random and independent too. In normal data they are 0.026 of the numbers (RMS), so a product
has an error of sqrt(2) * 0.026 = 0.037.
"""
TYPICAL_OF_EXPERTS = 0.1
"""The same for two products and an activation between: dx and dw1 rest on six casts, sqrt(6) * 0.026 = 0.063."""


def error(got: Tensor, right: Tensor) -> float:
    """Return the distance of `got` from `right`, relative to the norm of `right`."""
    distance, norm = (got.detach().double() - right.detach().double()).norm(), right.detach().double().norm()
    return float(distance / norm) if norm > 0 else float(distance)


def grad_of(leaf: Tensor) -> Tensor:
    """Return a leaf's gradient, and check that it has the leaf's type and shape."""
    assert leaf.grad is not None and (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape)
    return leaf.grad


def trained(layer: torch.nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
    """Return the result, and the gradients of floating arguments and of all parameters. The last of `given` is dy."""
    *arguments, grad = given
    arguments = [x.detach().clone() for x in arguments]
    leaves = [x.requires_grad_() for x in arguments if x.is_floating_point()]
    layer.zero_grad()
    y = layer(*arguments)
    y.backward(grad)
    return y.detach(), *(grad_of(leaf).clone() for leaf in (*leaves, *layer.parameters()))


def by_rows(x: Tensor) -> Tensor:
    """Return the FP64 numbers that the cast of activations encodes."""
    return dequantize(*per_token_cast_to_fp8(x.detach()))


def by_blocks(w: Tensor) -> Tensor:
    """Return the FP64 numbers that the cast of weights encodes."""
    return dequantize(*per_block_cast_to_fp8(w.detach()), rows=128)


def by_columns(x: Tensor) -> Tensor:
    """Return the FP64 numbers that the cast along tokens encodes."""
    return by_rows(x.detach().t()).t()


@contextmanager
def kept_by_autograd(*parameters: Tensor) -> Iterator[list[Tensor]]:
    """Collect the tensors, except parameters, that forward saves for backward."""
    kept: list[Tensor] = []
    known = {p.data_ptr() for p in parameters}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in known:
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """Make torch fill uninitialized memory with NaN, and refuse operations whose order depends on time."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def said_by_ranks(*arguments: str, ranks: int = 2) -> list[str]:
    """Run a program in several ranks with `arguments` and torchrun's variables; return each rank's output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).resolve().parents[2]
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(forked.run, *arguments, cwd=root, env={**os.environ, **there, "RANK": rank, "LOCAL_RANK": rank})
            for rank in map(str, range(ranks))
        ]
    ended = [each.result() for each in started]
    assert not any(each.returncode for each in ended), ended
    return [each.stdout for each in ended]

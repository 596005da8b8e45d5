"""Helpers for tests of layers: routes, weights, and tensors whose values cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from fp4_cases import FORMS
from helpers import refused, same_bits
from torch import Tensor

from deep_gemm import per_block_cast_to_fp8, per_token_cast_to_fp8, quantize_mxfp4
from deep_gemm.core import call
from deep_gemm.core.check import checks
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.api.dense import BEHIND_CAST
from deep_gemm.moe import api as layers

Quantized = tuple[Tensor, Tensor]
FP8_NAN = 0x7F


def same_pairs(got: Quantized, expected: Quantized) -> bool:
    return all(same_bits(x, y) for x, y in zip(got, expected, strict=True))


def random_routes(tokens: int, topk: int, num_experts: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Draw experts of tokens. A token may name an expert twice or have no expert; about one id in five is -1."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, max(num_experts, 1), (tokens, topk), generator=g)
    return torch.where(torch.rand(tokens, topk, generator=g) < (0.2 if num_experts else 1), -1, ids).to(dtype)


def assert_mistake(function: Callable[..., Any], call: dict[str, Any], words: str) -> None:
    """Check that a call is refused with these words."""
    with refused(words):
        function(**call)


def product_of_shapes(a: Quantized, b: Quantized, d: Tensor, *more: Any, **_: bool) -> None:
    """Replace a product of tensors without values."""
    assert {x.device.type for x in (*a, *b, d, *more) if isinstance(x, Tensor)} == {"meta"}
    d.zero_()


@contextmanager
def without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let layers run on tensors of the device "meta", which have no values: an operation that needs a value fails.

    Layers treat these tensors like CUDA tensors, except that the products do nothing.
    """
    with monkeypatch.context() as patch:
        patch.setattr(layers, "product_of_stacked_rows", product_of_shapes)
        patch.setattr(BEHIND_CAST, "reference", lambda p: product_of_shapes((p.a, p.sfa), (p.b, p.sfb), p.d))
        patch.setattr(call, "handles_operators", lambda *_: False)  # operators would return shapes alone
        patch.setattr(checks, "no_overlap", lambda *_: None)  # all tensors have the address 0
        yield


def fine_weight(*shape: int, of: tuple[int, int], form: str | None = None, seed: int = 0) -> Quantized:
    """Make an FP8 weight with a scale for each `of` rows and columns: in a form of fp4_cases, or FP32 of any value."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    cast: Any = per_token_cast_to_fp8 if of[0] == 1 else per_block_cast_to_fp8
    values, sf = cast(x, use_ue8m0=form is not None, gran_k=of[1])
    return values, sf if form is None else FORMS[form]((sf.view(torch.int32) >> 23).to(torch.uint8))


SCALED = {"rows": ((1, 0), (1, 0)), "experts": ((0, 0), (0, 0)), "blocks": ((128, 128), (128, 128))}
SCALED |= {"rows, blocks": ((1, 0), (128, 128)), "blocks, rows": ((128, 128), (1, 0)), "FP4": ((1, 32), (1, 32))}


def weights_of(form: str, num: int, hidden: int, inter: int) -> tuple[Any, Any]:
    """Make weights of experts with scales by `SCALED`, or in BF16."""
    casts: Any = {(1, 0): partial(per_token_cast_to_fp8, gran_k=0), (128, 128): per_block_cast_to_fp8}
    casts[1, 32] = quantize_mxfp4
    casts[0, 0] = lambda w: (casts[1, 0](w)[0], torch.rand(num, *[1] * (len(w[0]) == hidden) * 2) / 99)
    g = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(num, *of, generator=g) / of[1] ** 0.5 for of in ((2 * inter, hidden), (hidden, inter)))
    if form == "BF16":
        return w1.bfloat16(), w2.bfloat16()
    return tuple(casts[of](w) for of, w in zip(SCALED[form], (w1, w2), strict=True))


def recipes(of: tuple[int, int], columns: int | None = None) -> tuple[int, dict[str, Any]]:
    """Return the number of columns that share a scale of activations, and the recipes of a product with this weight."""
    columns = of[1] if columns is None else columns
    return columns, {"recipe_a": (1, columns), "recipe_b": of}


def weights_without_values(*shape: int) -> Quantized:
    """Make FP8 weights with a scale for each block, on the device "meta"."""
    *groups, n, k = shape
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    return values, torch.empty(*groups, ceil_div(n, 128), ceil_div(k, 128), device="meta")

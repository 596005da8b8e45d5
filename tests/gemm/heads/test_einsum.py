"""Products of heads: the result of each expression, operands in callers' layouts, mistakes; on the CPU and a GPU."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from helpers import captured, refused, some
from thorough import one_in
from torch import Tensor

import deep_gemm
from deep_gemm import calc_diff, fp8_einsum, fp8_gemm_nt, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.gemm.ask.heads import ALONG_TOKENS, BY_HEADS, BY_HEADS_TURNED

Operand = tuple[Tensor, Tensor]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = (1, 1, 128)


def numbers(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def along_tokens(x: Tensor) -> Operand:
    """Cast `[b, h, width]` with one scale for each 128 tokens of a column."""
    values, scales = deep_gemm.per_channel_cast_to_fp8(x.flatten(1))
    return values.view(x.shape), scales.view(len(scales), *x.shape[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [None, ROWS])
@pytest.mark.parametrize(("tokens", "heads", "r", "d"), [(1, 1, 16, 8), (5, 3, 272, 136), (130, 2, 128, 256)])
def test_each_head_is_a_product_of_its_own(
    tokens: int, heads: int, r: int, d: int, recipe: Any, dtype: torch.dtype, device: str
) -> None:
    a = per_token_cast_to_fp8(numbers(tokens, heads, r, device=device))
    w = (per_token_cast_to_fp8 if recipe else per_block_cast_to_fp8)(numbers(heads, d, r, seed=1, device=device))
    out = torch.full((tokens, heads, d), torch.nan, dtype=dtype, device=device)
    assert fp8_einsum(BY_HEADS, a, w, out, recipe=recipe or (1, 128, 128)) is None
    for head in range(heads):
        expected = torch.empty(tokens, d, dtype=dtype, device=device)
        of_head = a[0][:, head].contiguous(), a[1][:, head].contiguous()
        fp8_gemm_nt(of_head, (w[0][head], w[1][head]), expected, recipe=recipe)
        # Another kernel may add up a k-block in another order. On the CPU the bits are equal.
        assert torch.equal(out[:, head], expected) if device == "cpu" else calc_diff(out[:, head], expected) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", one_in(2, [8, 1, 4, 2]))
def test_the_output_projection_of_deepseek_v4_beside_fp64(ranks: int, device: str) -> None:
    """Scales may have any value, not only powers of two: models on GPUs before Blackwell have such scales."""
    tokens, heads, r, d = 3, 8 // ranks, 4096, 1024
    a = per_token_cast_to_fp8(numbers(tokens, heads, r, device=device))
    w = per_block_cast_to_fp8(numbers(heads, d, r, seed=1, device=device))
    out = torch.full((tokens, heads, d), torch.nan, dtype=torch.bfloat16, device=device)
    fp8_einsum(BY_HEADS, a, w, out, recipe=(1, 128, 128))
    x, y = (deep_gemm.cast_back_from_fp8(*operand).double() for operand in (a, w))
    right, size = torch.einsum(BY_HEADS, x, y), torch.einsum(BY_HEADS, x.abs(), y.abs())
    assert bool(((out.double() - right).abs() <= right.abs() * 2**-8 + size * 2**-12).all())


@pytest.mark.parametrize("device", DEVICES)
def test_all_expressions_mean_what_torch_means_by_them(device: str) -> None:
    x, y = numbers(40, 3, 256, device=device), numbers(40, 3, 144, seed=1, device=device)
    w = numbers(3, 144, 256, seed=2, device=device)
    weights = per_block_cast_to_fp8(w)
    for expr, a, b, recipe, right in (
        (BY_HEADS, per_token_cast_to_fp8(x), weights, (1, 128, 128), torch.einsum(BY_HEADS, x, w)),
        (BY_HEADS_TURNED, per_token_cast_to_fp8(y), weights, (1, 128, 128), torch.einsum(BY_HEADS_TURNED, y, w)),
        ("bhd, bhr -> hdr", along_tokens(y), along_tokens(x), ROWS, torch.einsum(ALONG_TOKENS, y, x)),
    ):
        got = some(fp8_einsum(expr, a, b, recipe=recipe))
        assert got.shape == right.shape
        assert calc_diff(got, right) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_are_added_to_c(device: str) -> None:
    x, y = along_tokens(numbers(40, 3, 256, device=device)), along_tokens(numbers(40, 3, 144, seed=1, device=device))
    alone = some(fp8_einsum(ALONG_TOKENS, y, x, recipe=ROWS))
    c = numbers(*alone.shape, seed=3, device=device)
    d, same = torch.empty_like(c), c.clone()
    fp8_einsum(ALONG_TOKENS, y, x, d, c, ROWS)
    fp8_einsum(ALONG_TOKENS, y, x, same, same, ROWS)
    assert torch.equal(d, same)
    assert calc_diff(d, alone + c) < 1e-9
    in_bf16 = torch.empty_like(c, dtype=torch.bfloat16)
    fp8_einsum(ALONG_TOKENS, y, x, in_bf16, recipe=ROWS)
    assert calc_diff(in_bf16, alone) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [4, 130])
def test_c_is_added_and_may_be_d(tokens: int, dtype: torch.dtype, device: str) -> None:
    a = per_token_cast_to_fp8(numbers(tokens, 3, 272, device=device))
    w = per_block_cast_to_fp8(numbers(3, 136, 272, seed=1, device=device))
    alone = torch.empty(tokens, 3, 136, device=device)
    fp8_einsum(BY_HEADS, a, w, alone)
    c = numbers(*alone.shape, seed=2, device=device).to(dtype)
    d, same = torch.empty_like(c), c.clone()
    fp8_einsum(BY_HEADS, a, w, d, c)
    fp8_einsum(BY_HEADS, a, w, same, same)
    assert torch.equal(d, same)
    assert calc_diff(d, alone + c) < (1e-5 if dtype == torch.bfloat16 else 1e-9)
    made = some(fp8_einsum(BY_HEADS, a, w, c=c))
    assert torch.equal(made, d)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_operands_as_callers_have_them(tokens: int, device: str) -> None:
    """Test a part of wider rows, heads of one weight matrix, scales in either layout, and D inside of wider rows."""
    heads, r, d = 4, 256, 128
    wide = per_token_cast_to_fp8(numbers(tokens, heads, r + 128, device=device))
    a = wide[0][..., :r], wide[1][..., : r // 128]
    matrix = per_block_cast_to_fp8(numbers(heads * d, r, seed=1, device=device))
    w = matrix[0].view(heads, d, r), matrix[1].view(heads, d // 128, r // 128)
    expected = some(fp8_einsum(BY_HEADS, (a[0].contiguous(), a[1].contiguous()), w))
    m_major = get_mn_major_tma_aligned_tensor(a[1].transpose(0, 1)).transpose(0, 1)
    room = torch.full((tokens, heads, d + 64), 42.0, dtype=torch.bfloat16, device=device)
    for scales in (a[1], m_major):
        for _ in range(2):
            room.fill_(42.0)
            fp8_einsum(BY_HEADS, (a[0], scales), w, room[..., :d])
            assert torch.equal(room[..., :d], expected)
            assert (room[..., d:] == 42.0).all()


@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (3, 0)])
def test_empty_ones(tokens: int, heads: int) -> None:
    a, w = per_token_cast_to_fp8(numbers(tokens, heads, 128)), per_block_cast_to_fp8(numbers(heads, 8, 128))
    got = some(fp8_einsum(BY_HEADS, a, w))
    assert got.shape == (tokens, heads, 8)
    x, y = along_tokens(numbers(tokens, heads, 16)), along_tokens(numbers(tokens, heads, 8))
    grad = some(fp8_einsum(ALONG_TOKENS, y, x, recipe=ROWS))
    assert not grad.any()


A, W = per_token_cast_to_fp8(numbers(5, 3, 256)), per_block_cast_to_fp8(numbers(3, 128, 256))
OF_SFB = "(h, ceil(d / 128), ceil(r / 128)) = (3, 1, 2)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expr": "bhr,hdr->hbd"}, "NotImplementedError: expr: expected bhr,hdr->bhd, bhd,hdr->bhr or bhd,bhr->hdr"),
        ({"expr": 3}, "NotImplementedError: expr: expected"),
        ({"a": (A[0][:, :2], A[1][:, :2])}, "b: expected shape (h, d, r) = (2, d, 256)"),
        ({"a": (A[0], A[1][..., :1])}, "sfa: expected shape (b, h, ceil(r / 128)) = (5, 3, 2)"),
        ({"b": (W[0], W[1].mT)}, f"sfb: expected shape {OF_SFB}"),
        (
            {"b": (W[0], W[1].repeat_interleave(128, 1))},
            f"sfb: expected shape {OF_SFB}, got (3, 128, 2); recipe=(1, 1, 128) takes a scale for each row",
        ),
        ({"a": (A[0].float(), A[1])}, "a: expected dtype torch.float8_e4m3fn"),
        ({"d": torch.empty(5, 3, 64)}, "d: expected shape (b, h, n) = (5, 3, 128)"),
        ({"c": torch.zeros(5, 3, 128, dtype=torch.bfloat16)}, "c: expected dtype torch.float32"),
        ({"recipe": (1, 128, 64)}, "NotImplementedError: recipe: expected"),
        ({"expr": ALONG_TOKENS}, "NotImplementedError: recipe: expected (1, 1, 128)"),
        ({"a": 3}, "TypeError: a: expected a pair"),
        ({"a": (A[0].transpose(1, 2).contiguous().transpose(1, 2), A[1])}, "a: expected values contiguous"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"expr": BY_HEADS, "a": A, "b": W, "d": torch.full((5, 3, 128), 42.0)} | changes
    with refused(message):
        fp8_einsum(**given)
    assert (given["d"] == 42.0).all() or changes.get("d") is not None


OVERLAPPED = {
    BY_HEADS: (A, W, (5, 3, 128), (1, 128, 128)),
    BY_HEADS_TURNED: (per_token_cast_to_fp8(numbers(5, 3, 128)), W, (5, 3, 256), (1, 128, 128)),
    ALONG_TOKENS: (along_tokens(numbers(40, 3, 32)), along_tokens(numbers(40, 3, 48)), (3, 32, 48), ROWS),
}


@pytest.mark.parametrize("expr", OVERLAPPED)
def test_a_d_that_overlaps_an_operand_or_c_in_part_is_refused_before_it_is_written(expr: str) -> None:
    a, b, shape, recipe = OVERLAPPED[expr]
    given = {"a": a[0], "sfa": a[1], "b": b[0], "sfb": b[1]}
    most = 4 * prod(shape) + max(x.nbytes for x in given.values())
    for name, x in given.items():
        room = torch.zeros(most + 64, dtype=torch.uint8)
        inside = room[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        first = (x.nbytes - 1) // 16 * 16
        d = room[first : first + 4 * prod(shape)].view(torch.float32).view(shape)
        before = room.clone()
        operands = given | {name: inside}
        with pytest.raises(ValueError, match=rf"^d: expected memory that does not overlap {name}$"):
            fp8_einsum(expr, (operands["a"], operands["sfa"]), (operands["b"], operands["sfb"]), d, recipe=recipe)
        assert torch.equal(room, before)
    room = torch.zeros(2 * prod(shape))
    d, c = (room[first : first + prod(shape)].view(shape) for first in (0, 16))
    with pytest.raises(ValueError, match=r"^c: expected d itself or memory that does not overlap it, got a partial"):
        fp8_einsum(expr, a, b, d, c, recipe)
    assert not room.any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 32, 128, 130, 1000])
def test_real_sizes_on_a_gpu(tokens: int) -> None:
    heads, r, d = 8, 4096, 1024
    a = per_token_cast_to_fp8(numbers(tokens, heads, r, device="cuda"))
    w = per_block_cast_to_fp8(numbers(heads, d, r, seed=1, device="cuda"))
    out = torch.full((tokens, heads, d), torch.nan, device="cuda", dtype=torch.bfloat16)
    fp8_einsum(BY_HEADS, a, w, out)
    real = (x.float() * s.repeat_interleave(128, -1) for x, s in (a, (w[0], w[1].repeat_interleave(128, 1))))
    assert calc_diff(out, torch.einsum(BY_HEADS, *real)) < 1e-5
    first = out.clone()
    for _ in range(20):
        fp8_einsum(BY_HEADS, a, w, out)
        assert torch.equal(out, first)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_tokens() -> None:
    x, w = numbers(40, 4, 512, device="cuda"), per_block_cast_to_fp8(numbers(4, 256, 512, seed=1, device="cuda"))
    a, other = (per_token_cast_to_fp8(each) for each in (x, x.flip(0)))
    out = some(fp8_einsum(BY_HEADS, a, w))
    graph, _ = captured(fp8_einsum, BY_HEADS, a, w, out)
    expected = some(fp8_einsum(BY_HEADS, other, w))
    for mine, its in zip(a, other, strict=True):
        mine.copy_(its)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)

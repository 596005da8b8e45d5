"""Every mistake of a caller is refused by the public function, in words, before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CANARY, inside_of_an_element, int32, misaligned, random_fp8, random_scales
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.layout import RECIPES, RECIPES_OF_B, either
from deep_gemm.gemm.api import dense as dense_products
from deep_gemm.gemm.api import grouped as grouped_products
from deep_gemm.gemm.ask.rows import contiguous_problem

M, N, K, GROUPS = 5, 256, 272, 2
FP8, FP32 = torch.float8_e4m3fn, torch.float32
N_BLOCKS, K_BLOCKS = 2, 3
KS = [144, 128]
ENDS_M = 300
OF_B = either((*RECIPES_OF_B, (1, 0), (0, 0)))

Arguments = dict[str, Any]


# Right calls, one for each kind of problem


def operand(values: tuple[int, ...], scales: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return random_fp8(values, g), random_scales(scales, g)


def output(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, CANARY, dtype=dtype)


def flipped(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].mT, pair[1].mT


def dense(major: str = "nt", sfb_rows: int = 128) -> Arguments:
    a = operand((M, K), (M, K_BLOCKS), 1)
    b = operand((N, K), (N // sfb_rows, K_BLOCKS), 2)
    d = output(M, N, dtype=torch.bfloat16 if sfb_rows == 128 else FP32)
    return {"a": a if major[0] == "n" else flipped(a), "b": b if major[1] == "t" else flipped(b), "d": d}


def weights() -> tuple[Tensor, Tensor]:
    return operand((GROUPS, N, K), (GROUPS, N_BLOCKS, K_BLOCKS), 3)


def contiguous(major: str = "nt") -> Arguments:
    b = weights() if major == "nt" else flipped(weights())
    a = operand((M, K), (M, K_BLOCKS), 4)
    return {"a": a, "b": b, "d": output(M, N), "grouped_layout": int32(0, 0, -1, 1, 1)}


def ends() -> Arguments:
    a, layout = operand((ENDS_M, K), (ENDS_M, K_BLOCKS), 5), int32(100, ENDS_M)
    return {"a": a, "b": weights(), "d": output(ENDS_M, N), "grouped_layout": layout, "use_psum_layout": True}


def masked() -> Arguments:
    a = operand((GROUPS, M, K), (GROUPS, M, K_BLOCKS), 6)
    return {"a": a, "b": weights(), "d": output(GROUPS, M, N), "masked_m": int32(2, M), "expected_m": 3}


def k_grouped() -> Arguments:
    return {
        "a": operand((M * K,), (M, K_BLOCKS), 7),
        "b": operand((N * K,), (N, K_BLOCKS), 8),
        "d": output(GROUPS, M, N, dtype=FP32),
        "ks": KS,
        "ks_tensor": int32(*KS),
    }


def ordinary(major: str) -> Arguments:
    """Tensors of a product through torch."""
    a = torch.ones(2, 4) if major[0] == "n" else torch.ones(4, 2)
    b = torch.ones(3, 4) if major[1] == "t" else torch.ones(4, 3)
    return {"a": a, "b": b, "d": output(2, 3, dtype=FP32)}


def k_grouped_of_2025() -> Arguments:
    call = k_grouped()
    (a, sfa), (b, sfb) = call["a"], call["b"]
    return {"a": (a, sfa.t().contiguous()), "b": (b, sfb.t().contiguous()), "d": call["d"], "ks": KS}


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "nt": ("fp8_gemm_nt", dense),
    "nn": ("fp8_gemm_nn", lambda: dense("nn")),
    "tn": ("fp8_gemm_tn", lambda: dense("tn")),
    "tt": ("fp8_gemm_tt", lambda: dense("tt")),
    "wgrad": ("wgrad_gemm_fp8_fp8_fp32_nt", lambda: dense(sfb_rows=1)),
    "contiguous": ("m_grouped_fp8_gemm_nt_contiguous", contiguous),
    "contiguous nn": ("m_grouped_fp8_gemm_nn_contiguous", lambda: contiguous("nn")),
    "ends": ("m_grouped_fp8_gemm_nt_contiguous", ends),
    "masked": ("m_grouped_fp8_gemm_nt_masked", masked),
    "k-grouped": ("k_grouped_fp8_gemm_nt_contiguous", k_grouped),
    "k-grouped of 2025": ("k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", k_grouped_of_2025),
}
MAJORS = ("nt", "nn", "tn", "tt")
OF_EACH_WORK = ("nt", "contiguous", "masked", "k-grouped")
THROUGH_TORCH = {f"cublaslt {major}": (f"cublaslt_gemm_{major}", partial(ordinary, major)) for major in MAJORS}
TRANSPOSED = [("nn", "b"), ("tn", "a"), ("tn", "b"), ("tt", "a"), ("contiguous nn", "b")]
"""Operands that are given as views of k-major ones."""


def make(kind: str) -> tuple[Callable[..., Any], Arguments]:
    name, arguments = (CALLS | THROUGH_TORCH)[kind]
    return getattr(deep_gemm, name), arguments()


def tensors(call: Arguments) -> Iterator[Tensor]:
    for value in call.values():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor):
                yield x


def storage_bytes(x: Tensor) -> Tensor:
    """All bytes that a tensor could reach, also those outside it."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def assert_refused(product: Callable[..., Any], call: Arguments, error: type[Exception], message: str) -> None:
    memory = [storage_bytes(x) for x in tensors(call) if x.device.type == "cpu" and x.layout is torch.strided]
    before = [x.clone() for x in memory]
    with pytest.raises(error) as caught:
        product(**call)
    assert str(caught.value).startswith(message)
    assert all(torch.equal(x, y) for x, y in zip(memory, before, strict=True)), "a refused call wrote something"


# Changes


def changed(call: Arguments, changes: Arguments) -> Arguments:
    """Give the call with other arguments, or with a function's result in place of values, scales or an argument."""
    call = {**call}
    for name, change in changes.items():
        side, is_scales = name.removeprefix("sf"), name.startswith("sf")
        if not callable(change):
            call[name] = change
        elif side in ("a", "b"):
            values, scales = call[side]
            call[side] = (values, change(scales)) if is_scales else (change(values), scales)
        else:
            call[name] = change(call[name])
    return call


def of_width(columns: int) -> Arguments:
    """Cut B, its scales and D to a smaller n."""
    blocks = -(-columns // 128)
    return {"b": lambda b: b[..., :columns, :], "sfb": lambda sf: sf[..., :blocks, :], "d": lambda d: d[..., :columns]}


def of_depth(k: int) -> Arguments:
    """Cut A and B to a smaller k within the last block."""
    return dict.fromkeys(("a", "b"), lambda x: x[..., :k].contiguous())


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


def wider(elements: int) -> Callable[[Tensor], Tensor]:
    """The same tensor with rows that lie this much further apart."""

    def lay(x: Tensor) -> Tensor:
        buffer = torch.full((*x.shape[:-1], x.shape[-1] + elements), CANARY).to(x.dtype)
        return buffer[..., : x.shape[-1]].copy_(x)

    return lay


def column_major(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def expanded(x: Tensor) -> Tensor:
    return x[..., :1, :].expand(x.shape)


def longer(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([x, x.narrow(dim, 0, 1)], dim)


def as_packed(x: Tensor) -> Tensor:
    return x.view(torch.int8)


def as_words(x: Tensor) -> Tensor:
    """Four exponents in each int32, so a quarter of the columns."""
    return x[..., :1].to(torch.int32)


def as_bytes(x: Tensor) -> Tensor:
    return x.to(torch.float8_e8m0fnu)


MATRIX, HALVES = output(8, 8, dtype=FP32), output(2, 3, dtype=torch.float16)
FP8_MATRIX, OTHER_FP8 = torch.ones(2, 4).to(FP8), torch.ones(3, 4).to(FP8)
Mistake = tuple[str, str, Any, str]
"""A kind of call; the wrong argument; its value or change, or several arguments'; the message behind its name."""

IN_FP32 = of_width(250) | {"d": lambda d: wider(6)(d[..., :250].float())}
LEFT_OUT = "grouped_layout: left out, so m must be"
AN_ADDRESS = "an address that is a multiple of"
D_ITSELF = "d itself or memory that does not overlap it"
CASTS = ": per_token_cast_to_fp8 casts activations, per_block_cast_to_fp8 weights"
BF16_OR_FP32, OF_8 = "dtype torch.bfloat16 or torch.float32", "a multiple of 8 for torch.bfloat16 output"
BLOCKS, BLOCKS_OF_K = "ceil(n / 128), ceil(k / 128)", "blocks of k, sum(ceil(k / 128)) over the groups"

NOT_TENSORS: list[Mistake] = [
    ("nt", "a", None, "a pair (values, scales), got NoneType"),
    *[
        ("nt", side, dense()[side][0].to(dtype), f"a pair (values, scales), got Tensor{CASTS}")
        for side in "ab"
        for dtype in (torch.bfloat16, torch.half, torch.float)
    ],
    *[
        (kind, "grouped_layout", None, "a tensor, or num_groups for groups of equal size, got N")
        for kind in ("contiguous", "contiguous nn", "ends")
    ],
    ("nt", "a", dense()["a"][0], "a pair (values, scales), got Tensor"),
    ("nt", "b", (*dense()["b"], None), "a pair (values, scales), got a tuple of 3"),
    ("nt", "a", Tensor.tolist, f"a tensor, got a list of {M}"),
    ("nt", "sfb", lambda _: 1.0, "a tensor, got float"),
    ("nt", "d", [1.0], "a tensor, got a list of 1"),
    ("nt", "c", 0.0, "a tensor, got float"),
    ("wgrad", "d", 1.0, "a tensor, got float"),
    ("contiguous", "grouped_layout", [0] * M, f"a tensor, got a list of {M}"),
    ("masked", "masked_m", None, "a tensor, got NoneType"),
    ("k-grouped", "ks_tensor", KS, "a tensor, got a list of 2"),
    ("cublaslt nt", "a", None, "a tensor, got NoneType"),
    ("cublaslt nt", "b", [1.0], "a tensor, got a list of 1"),
    ("cublaslt nt", "d", None, "a tensor, got NoneType"),
    ("cublaslt nt", "c", 1.0, "a tensor, got float"),
]

FNUZ = torch.float8_e4m3fnuz
NOT_YET: list[Mistake] = [
    ("wgrad", "", {"b": as_packed}, "b: packed FP4 values (torch.int8) are not supported, pass"),
    *[
        (kind, "", {side: as_packed}, f"{side}: packed FP4 values (torch.int8) are not sup")
        for kind in OF_EACH_WORK
        for side in ("a", "b")
        if side == "a" or kind == "k-grouped"  # elsewhere they are a weight
    ],
    *[
        (kind, "", {sf: as_words}, f"{sf}: UE8M0 scales (torch.int32) are not supported, pass torch.float32")
        for kind in ("nt", "nn", "contiguous", "masked", "k-grouped", "k-grouped of 2025")
        for sf in ("sfa", "sfb")
    ],
    ("nt", "", {"sfa": as_bytes}, "sfa: UE8M0 scales (torch.float8_e8m0fnu) are not supported, pass torch.float32"),
    *[
        (kind, "recipe", (1, 1, 64), f"{either(RECIPES)}, got (1, 1, 64)")
        for kind in (*MAJORS, "contiguous", "contiguous nn", "masked")
    ],
    *[
        (kind, "recipe", recipe, f"{either(RECIPES)}, got {recipe}")
        for kind in ("nt", "contiguous")
        for recipe in ((), (128,), (128, 128), (1, 128, 128, 1), ([1], 128, 128), (None, 128, 128), ("1", 1, 128))
    ],
    ("k-grouped", "recipe", ([1], 1, 128), "(1, 1, 128) for a k-grouped product, got ([1], 1, 128)"),
    *[(kind, "alpha", 2.0, "None, got 2.0; multiply the scales of a or b with it instead") for kind in MAJORS],
    ("nt", "recipe_a", ([1], 128), "(1, 128), (1, 64), (1, 32), (1, 0) or (0, 0), got ([1], 128)"),
    ("nt", "recipe_b", (128,), f"{OF_B}, got (128,)"),
    ("nt", "recipe_a", (128, 128), "(1, 128), (1, 64), (1, 32), (1, 0) or (0, 0), got (128, 128)"),
    ("masked", "recipe_a", (1, 16), "(1, 128), (1, 64), (1, 32), (1, 0) or (0, 0), got (1, 16)"),
    ("contiguous", "recipe_b", (1, 64), f"{OF_B}, got (1, 64)"),
    ("k-grouped", "recipe", (1, 128, 128), "(1, 1, 128) for a k-grouped product, got (1, 128, 128)"),
]

WRONG: list[Mistake] = [
    # Types
    ("nt", "a", Tensor.bfloat16, f"dtype torch.float8_e4m3fn, got torch.bfloat16{CASTS}"),
    ("nt", "a", lambda x: x.view(FNUZ), f"dtype torch.float8_e4m3fn, got {FNUZ}"),
    ("k-grouped", "b", lambda x: x.view(torch.uint8), "dtype torch.float8_e4m3fn, got torch.uint8"),
    ("nt", "sfa", Tensor.double, "dtype torch.float32, got torch.float64"),
    ("contiguous", "sfb", Tensor.bfloat16, "dtype torch.float32, got torch.bfloat16"),
    ("k-grouped", "sfa", Tensor.half, "dtype torch.float32, got torch.float16"),
    ("nt", "d", Tensor.half, f"{BF16_OR_FP32}, got torch.float16"),
    ("masked", "d", Tensor.int, f"{BF16_OR_FP32}, got torch.int32"),
    ("wgrad", "d", Tensor.bfloat16, "dtype torch.float32, got torch.bfloat16"),
    ("k-grouped", "d", Tensor.half, f"{BF16_OR_FP32}, got torch.float16"),
    ("k-grouped of 2025", "d", Tensor.bfloat16, "dtype torch.float32, got torch.bfloat16"),
    ("k-grouped", "c", {"d": None, "c": output(GROUPS, M, N)}, "dtype torch.float32, got torch.bfloat16"),
    ("nt", "c", output(M, N, dtype=FP32), "dtype torch.bfloat16, which d has, got torch.float32"),
    ("nt", "c", {"c": output(M, N, dtype=torch.float16), "d": None}, f"{BF16_OR_FP32}, got torch.float16"),
    ("contiguous", "grouped_layout", Tensor.long, "dtype torch.int32, got torch.int64"),
    ("masked", "masked_m", Tensor.float, "dtype torch.int32, got torch.float"),
    ("k-grouped", "ks_tensor", Tensor.long, "dtype torch.int32, got torch.int64"),
    # Contradictions
    *[
        (kind, "recipe_b", {"recipe": said, "recipe_b": of_b}, f"what recipe {(*said,)} says, got {(*of_b,)}")
        for kind, said, of_b in (("nt", (1, 128, 128), (1, 128)), ("contiguous", [1, 1, 128], [128, 128]))
    ],
    ("nt", "recipe", 128, ""),
    ("nt", "recipe", "111", "a tuple of integers, got '111'"),
    *[
        (kind, "recipe", recipe, f"a tuple of integers, got {recipe!r}")
        for kind in OF_EACH_WORK
        for recipe in (np.array([1, 1, 128]), torch.tensor([1, 1, 128]), (*torch.tensor([1, 1, 128]),))
    ],
    ("tn", "recipe_b", np.array([128, 128]), "a tuple of integers, got array([128, 128])"),
    ("masked", "recipe_b", 128, ""),
    # The recipe decides which scales are expected.
    ("nt", "sfb", {"recipe": (1, 1, 128)}, "shape (n, ceil(k / 128)) = (256, 3), got (2, 3)"),
    ("nt", "sfb", {"recipe_b": (1, 128)}, "shape (n, ceil(k / 128)) = (256, 3), got (2, 3)"),
    # Shapes
    ("nt", "a", torch.flatten, f"shape (m, k), got ({M * K},)"),
    ("nt", "b", lambda x: x[:, :256], "shape (n, k) = (n, 272), got (256, 256)"),
    ("nn", "b", lambda x: x[:256], "shape (k, n) = (272, n), got (256, 256)"),
    ("tn", "a", lambda x: x[None], "shape (k, m), got (1, 272, 5)"),
    ("tn", "b", Tensor.t, "shape (k, n) = (272, n), got (256, 272)"),
    ("tt", "b", Tensor.t, "shape (n, k) = (n, 272), got (272, 256)"),
    ("contiguous", "a", lambda x: x[None], "shape (m, k), got (1, 5, 272)"),
    ("contiguous", "b", lambda x: x[0], "shape (groups, n, k) = (groups, n, 272), got (256, 272)"),
    ("contiguous nn", "b", lambda x: x.mT, "shape (groups, k, n) = (groups, 272, n), got (2, 256, 272)"),
    ("masked", "a", lambda x: x[0], "shape (groups, max_m, k), got (5, 272)"),
    ("masked", "b", longer(0), "shape (groups, n, k) = (2, n, 272), got (3, 256, 272)"),
    ("k-grouped", "a", lambda x: x.view(M, K), f"shape (m * sum(ks),) = ({M * K},), got (5, 272)"),
    ("k-grouped", "b", lambda x: x[:-16], f"shape (n * sum(ks),) = ({N * K},), got ({N * K - 16},)"),
    ("nt", "d", Tensor.t, "shape (m, n) = (5, 256), got (256, 5)"),
    ("nn", "d", lambda x: x[None], "shape (m, n) = (5, 256), got (1, 5, 256)"),
    ("nt", "c", output(1, N), "shape (m, n) = (5, 256), got (1, 256)"),
    ("contiguous", "d", longer(0), "shape (m, n) = (5, 256), got (6, 256)"),
    ("masked", "d", lambda x: x[0], "shape (groups, max_m, n) = (2, 5, 256), got (5, 256)"),
    ("k-grouped", "d", longer(0), "shape (groups, m, n) = (2, 5, 256), got (3, 5, 256)"),
    ("contiguous", "grouped_layout", int32(0, 1), "shape (m,) = (5,), got (2,)"),
    ("ends", "grouped_layout", torch.zeros(ENDS_M, dtype=torch.int32), "shape (groups,) = (2,), got (300,)"),
    ("masked", "masked_m", int32(1, 2, 3), "shape (groups,) = (2,), got (3,)"),
    ("k-grouped", "ks_tensor", int32(144, 128, 0), "shape (groups,) = (2,), got (3,)"),
    ("k-grouped", "ks_tensor", {"ks": None, "ks_tensor": int32(*KS)[None]}, "shape (groups,) = (2,), got (1, 2)"),
    ("k-grouped", "ks_tensor", {"ks": None, "ks_tensor": torch.tensor(272, dtype=torch.int32)}, ""),
    # Shapes of scales
    *[
        (kind, "sfb", of_rows, f"shape {shape}; recipe=(1, 1, 128) takes a scale for each row")
        for kind, of_rows, shape in (
            ("nt", lambda x: x.repeat(128, 1), f"({BLOCKS}) = (2, 3), got (256, 3)"),
            ("nn", lambda x: x.repeat(1, 128), "(ceil(k / 128), ceil(n / 128)) = (3, 2), got (3, 256)"),
            ("masked", lambda x: x.repeat(1, 128, 1), f"(groups, {BLOCKS}) = (2, 2, 3), got (2, 256, 3)"),
        )
    ],
    ("nt", "sfa", longer(1), "shape (m, ceil(k / 128)) = (5, 3), got (5, 4)"),
    ("nt", "sfa", lambda x: x[None], "shape (m, ceil(k / 128)) = (5, 3), got (1, 5, 3)"),
    ("nt", "sfb", Tensor.t, "shape (ceil(n / 128), ceil(k / 128)) = (2, 3), got (3, 2)"),
    ("nn", "sfb", Tensor.t, "shape (ceil(k / 128), ceil(n / 128)) = (3, 2), got (2, 3)"),
    ("nn", "sfb", lambda x: x[None], "shape (ceil(k / 128), ceil(n / 128)) = (3, 2), got (1, 3, 2)"),
    ("nn", "sfa", Tensor.t, "shape (m, ceil(k / 128)) = (5, 3), got (3, 5)"),
    ("tn", "sfa", Tensor.t, "shape (ceil(k / 128), m) = (3, 5), got (5, 3)"),
    ("tn", "sfb", Tensor.t, "shape (ceil(k / 128), ceil(n / 128)) = (3, 2), got (2, 3)"),
    ("tt", "sfa", longer(0), "shape (ceil(k / 128), m) = (3, 5), got (4, 5)"),
    ("tt", "sfb", Tensor.t, "shape (ceil(n / 128), ceil(k / 128)) = (2, 3), got (3, 2)"),
    ("wgrad", "sfb", lambda x: x[::128], "shape (n, ceil(k / 128)) = (256, 3), got (2,"),
    ("contiguous", "sfb", lambda x: x[0], "shape (groups, ceil(n / 128), ceil(k / 128)) = (2, 2, 3), got (2, 3)"),
    ("contiguous nn", "sfb", lambda x: x.mT, "shape (groups, ceil(k / 128), ceil(n / 128)) = (2, 3, 2), got (2, 2, 3)"),
    ("masked", "sfa", lambda x: x.mT, "shape (groups, max_m, ceil(k / 128)) = (2, 5, 3), got (2, 3, 5)"),
    ("masked", "sfb", longer(2), "shape (groups, ceil(n / 128), ceil(k / 128)) = (2, 2, 3), got (2, 2, 4)"),
    ("k-grouped", "sfa", longer(1), f"3 {BLOCKS_OF_K}, got 4"),
    ("k-grouped", "sfb", lambda x: x[:, :2], f"3 {BLOCKS_OF_K}, got 2"),
    ("k-grouped", "sfb", torch.flatten, f"2 dimensions, got shape ({3 * N},)"),
    ("k-grouped of 2025", "sfa", lambda x: x[None], "2 dimensions, got shape (1, 3, 5)"),
    ("k-grouped of 2025", "sfb", longer(0), f"3 {BLOCKS_OF_K}, got 4"),
    # Sizes in a tensor on the host are checked like a list's.
    ("k-grouped", "sfa", {"ks": None, "sfa": longer(1), "sfb": longer(1)}, "3 blocks of k"),
    ("k-grouped", "sfa", {"ks": None, **dict.fromkeys(("sfa", "sfb"), lambda x: x[:, :2])}, "3 blocks of k"),
    # Sizes
    ("nt", "k", of_depth(264), "a multiple of 16, got 264"),
    ("contiguous", "k", of_depth(257), "a multiple of 16, got 257"),
    ("masked", "k", of_depth(265), "a multiple of 16, got 265"),
    ("nt", "n", of_width(252), f"{OF_8}, got 252"),
    ("masked", "n", of_width(130), f"{OF_8}, got 130"),
    ("contiguous", "n", IN_FP32, "a multiple of 4 for torch.float32 output, got 250"),
    ("nt", "n", of_width(252) | {"d": None, "c": wider(4)(output(M, 252))}, f"{OF_8}, got 252"),
    ("k-grouped", "ks", {"ks": [136, 136], "ks_tensor": None}, "multiples of 16, got 136 at index 0"),
    ("k-grouped", "ks", {"ks": [288, -16], "ks_tensor": None}, "multiples of 16, got -16 at index 1"),
    ("k-grouped", "ks", {"ks": [144.0, 128], "ks_tensor": None}, "a list of integers, got [144.0, 128]"),
    # Blocks are counted group by group: 1 + 2 + 1, though 272 columns side by side have 3.
    ("k-grouped", "sfa", {"ks": [16, 240, 16], "ks_tensor": None}, f"4 {BLOCKS_OF_K}, got 3"),
    ("k-grouped", "ks", {"ks": 272, "ks_tensor": None}, "a list of integers, got 272"),
    ("k-grouped", "ks", int32(*KS).to("meta"), "a CPU or CUDA tensor, got device meta"),
    ("k-grouped of 2025", "ks", int32(*KS).to("meta"), "a CPU or CUDA tensor, got device meta"),
    ("k-grouped", "ks", int32(*KS).to_sparse(), "a dense tensor, got layout torch.sparse_coo"),
    ("k-grouped", "ks", {"ks": "ab", "ks_tensor": None}, "a list of integers, got 'ab'"),
    ("k-grouped", "ks", {"ks": None, "ks_tensor": None}, "a list, or ks_tensor with the same numbers"),
    ("k-grouped", "ks_tensor", int32(128, 144), "the numbers of ks, (144, 128), got (128, 144)"),
    ("k-grouped", "ks_tensor", {"ks": None, "ks_tensor": int32(136, 136)}, "multiples of 16, got 136 at index 0"),
    ("k-grouped", "a", {"ks": None, "ks_tensor": int32(144, 112)}, "shape (m * sum(ks),) = (1280,), got (1360,)"),
    *[
        ("k-grouped", "ks_tensor", {"ks": None, "use_psum_layout": True, "ks_tensor": ends}, message)
        for ends, message in (
            (None, "the ends of groups with use_psum_layout, got None"),
            (int32(144, 272), "ends that are multiples of 128, the alignment of groups, got 144 for group 0"),
            (int32(256, 128), "ends that do not decrease, got 128 behind 256"),
            (int32(-128, 128), "ends that do not decrease, got -128 behind 0"),
            (int32(128, 270), "multiples of 16, got 142 at index 1"),
            (int32(128, 272)[None], "shape (groups,) = (2,), got (1, 2)"),
            (int32(128, 272).long(), "dtype torch.int32, got torch.int64"),
        )
    ],
    ("contiguous", "num_groups", 3, "the 2 groups of b, got 3"),
    ("contiguous", "num_groups", "2", "the 2 groups of b, got '2'"),
    ("contiguous", "", {"grouped_layout": None, "num_groups": 2}, f"{LEFT_OUT} a multiple of the 2 groups, got m = 5"),
    ("masked", "expected_m", -1, "an integer in 0..2147483647, got -1"),
    ("masked", "expected_m", torch.tensor(3), "an integer in 0..2147483647, got tensor(3"),
    ("masked", "expected_m", True, "an integer in 0..2147483647, got True"),
    # Values of layouts
    ("contiguous", "grouped_layout", int32(0, 0, -1, 2, 1), "values in -1..1, got 2 at index 3"),
    ("contiguous nn", "grouped_layout", int32(0, -2, -1, 1, 1), "values in -1..1, got -2 at index 1"),
    ("masked", "masked_m", int32(0, M + 1), "values in 0..5, got 6 at index 1"),
    ("masked", "masked_m", int32(-1, 2), "values in 0..5, got -1 at index 0"),
    ("ends", "grouped_layout", int32(100, 301), "values in 0..300, got 301 at"),
    ("ends", "grouped_layout", int32(-1, 300), "values in 0..300, got -1 at"),
    ("ends", "grouped_layout", int32(100, 127), "an end of 100 or from 128, the aligned start of group 1, got 127"),
    ("ends", "grouped_layout", int32(200, 100), "an end of 200 or from 256, the aligned start of group 1, got 100"),
    # Strides and addresses
    ("nt", "a", column_major, "values contiguous along k, got strides (1, 5)"),
    ("nt", "b", every_second, "values contiguous along k, got strides (544, 2)"),
    ("contiguous", "b", column_major, "values contiguous along k, got strides (69632, 1"),
    ("masked", "a", column_major, "values contiguous along k, got strides (1360, 1, 5)"),
    ("k-grouped", "a", every_second, "values contiguous along k, got strides (2,)"),
    ("nt", "a", wider(8), "rows that start at multiples of 16 bytes, got strides"),
    ("masked", "b", wider(1), "rows that start at multiples of 16 bytes, got"),
    ("nt", "a", expanded, "rows that do not overlap, got strides (0, 1)"),
    ("nt", "d", expanded, "rows that do not overlap, got strides (0, 1)"),
    ("nt", "d", column_major, "values contiguous along n, got strides (1, 5)"),
    ("masked", "d", every_second, "values contiguous along n, got strides (2560, 512"),
    ("k-grouped", "d", column_major, "values contiguous along n, got strides (1280, 1"),
    ("nt", "d", wider(4), "rows that start at multiples of 16 bytes, got strid"),
    ("nt", "c", column_major(output(M, N)), "values contiguous along n, got strides (1, 5)"),
    ("contiguous", "grouped_layout", int32(0, 0, 0, 0, 0, 0, 1, 1, 1, 1)[::2], "a contiguous tensor, got stride 2"),
    ("masked", "masked_m", int32(1).expand(2), "a contiguous tensor, got stride 0"),
    *[
        (kind, side, misaligned, f"{AN_ADDRESS} 16 bytes, got 0x")
        for kind in ("nt", "wgrad", "contiguous", "ends", "masked", "k-grouped", "k-grouped of 2025")
        for side in ("a", "b")
    ],
    *[(kind, "d", misaligned, f"{AN_ADDRESS} 16 bytes, got 0x") for kind in CALLS],
    # A view of a k-major operand is not copied, so it needs what k-major operands need.
    *[(of, side, lambda x: misaligned(x.mT).mT, f"{AN_ADDRESS} 16 bytes, got 0x") for of, side in TRANSPOSED],
    ("nt", "c", misaligned(output(M, N)), f"{AN_ADDRESS} 16 bytes, got 0x"),
    # Elements that are cut
    *[(kind, sf, inside_of_an_element, f"{AN_ADDRESS} 4 bytes, got 0x") for kind in CALLS for sf in ("sfa", "sfb")],
    ("contiguous", "grouped_layout", inside_of_an_element, f"{AN_ADDRESS} 4 bytes, got 0x"),
    ("masked", "masked_m", inside_of_an_element, f"{AN_ADDRESS} 4 bytes, got 0x"),
    ("k-grouped", "ks_tensor", inside_of_an_element, f"{AN_ADDRESS} 4 bytes, got 0x"),
    # Sparse tensors
    ("nt", "a", lambda x: x.float().to_sparse(), "a dense tensor, got layout torch.sparse_coo"),
    ("nt", "c", output(M, N).to_sparse(), "a dense tensor, got layout torch.sparse_coo"),
    *[
        (kind, name, Tensor.to_sparse, "a dense tensor, got layout torch.sparse_coo")
        for kind, name in (("nt", "sfb"), ("nt", "d"), ("k-grouped", "sfa"), ("masked", "masked_m"))
    ],
    # Devices
    *[(kind, "sfa", {"a": meta}, "device meta, where a is, got cpu") for kind in OF_EACH_WORK],
    *[(of, name, meta, "device cpu, where a is, got meta") for of in OF_EACH_WORK for name in ("b", "sfa", "sfb", "d")],
    ("nt", "c", meta(output(M, N)), "device cpu, where a is, got meta"),
    ("contiguous", "grouped_layout", meta, "device cpu, where a is, got meta"),
    ("masked", "masked_m", meta, "device cpu, where a is, got meta"),
    ("k-grouped", "ks_tensor", meta, "device cpu, where a is, got meta"),
    # Products of ordinary tensors
    ("cublaslt nt", "b", torch.ones(3, 4, dtype=torch.bfloat16), "dtype torch.float32, which a has"),
    ("cublaslt nt", "b", {"a": FP8_MATRIX}, "dtype torch.float8_e4m3fn, which a has, got torch.float32"),
    ("cublaslt nt", "d", {"a": FP8_MATRIX, "b": OTHER_FP8, "d": HALVES}, f"{BF16_OR_FP32}, got torch.float16"),
    ("cublaslt nt", "a", FP8_MATRIX.view(torch.int8), "dtype torch.bfloat16 or torch.float16 or torch."),
    ("cublaslt nt", "a", torch.ones(2, 4, dtype=torch.int32), "dtype torch.bfloat16 or "),
    *[
        ("cublaslt nt", "d", torch.ones(2, 3).to(dtype), f"dtype torch.float32, got {dtype}")
        for dtype in (FP8, torch.int32, torch.bool, torch.bfloat16, torch.float64)
    ],
    ("cublaslt nt", "c", torch.ones(2, 3, dtype=torch.bfloat16), "dtype torch.float32, which d has"),
    ("cublaslt nt", "b", torch.ones(3, 5), "shape (n, k) = (n, 4), got (3, 5)"),
    ("cublaslt nt", "b", torch.ones(1, 3, 4), "shape (n, k) = (n, 4), got (1, 3, 4)"),
    ("cublaslt tn", "a", torch.ones(1, 4, 2), "shape (k, m), got (1, 4, 2)"),
    ("cublaslt nn", "b", torch.ones(4), "shape (k, n) = (4, n), got (4,)"),
    ("cublaslt nt", "d", output(3, 2, dtype=FP32), "shape (m, n) = (2, 3), got (3, 2)"),
    ("cublaslt tt", "c", torch.ones(1, 3), "shape (m, n) = (2, 3), got (1, 3)"),
    ("cublaslt nt", "b", torch.ones(3, 4, device="meta"), "device cpu"),
    ("cublaslt nt", "d", torch.empty(2, 3, device="meta"), "device cpu"),
    ("cublaslt nt", "d", {"a": MATRIX[:2, :4], "d": MATRIX[1:3, 2:5]}, "memory that does not overlap a"),
    ("cublaslt nn", "d", {"b": MATRIX[:4, :3], "d": MATRIX[3:5, :3]}, "memory that does not overlap b"),
    ("cublaslt nt", "c", {"c": MATRIX[:2, :3], "d": MATRIX[1:3, :3]}, f"{D_ITSELF}, got a partial overlap"),
    ("cublaslt nt", "d", torch.ones(1, 3).expand(2, 3), "rows that do not overlap, got strides (0, 1)"),
]


def test_the_calls_that_mistakes_are_made_from_are_right() -> None:
    for kind in CALLS | THROUGH_TORCH:
        product, call = make(kind)
        assert product(**call) is None
        assert not bool((call["d"] == CANARY).all())


MISTAKES = {TypeError: NOT_TENSORS, NotImplementedError: NOT_YET, ValueError: WRONG}


@pytest.mark.parametrize(
    ("error", "kind", "change", "told"),
    [
        pytest.param(error, kind, change if isinstance(change, dict) else {name: change}, told, id=f"{kind}-{told}")
        for error, mistakes in MISTAKES.items()
        for kind, name, change, message in mistakes
        for told in [f"{name}: expected {message}" if name else message]
    ],
)
def test_a_mistake_is_named_and_writes_nothing(error: type[Exception], kind: str, change: Arguments, told: str) -> None:
    product, call = make(kind)
    assert_refused(product, changed(call, change), error, told)


# Overlaps of outputs and inputs

INPUTS = [
    (kind, name)
    for kind, (_, arguments) in CALLS.items()
    for name in ("a", "sfa", "b", "sfb", *(arguments().keys() & {"grouped_layout", "masked_m", "ks_tensor"}))
]


def d_behind(call: Arguments, name: str, gap_bytes: int) -> Arguments:
    """Place D `gap_bytes` behind the last 16 bytes that an input touches, or over its end if negative."""
    side = name[-1] if name in ("a", "sfa", "b", "sfb") else None
    x: Tensor = call[side][len(name) // 3] if side else call[name]
    d: Tensor = call["d"]
    x_bytes, d_bytes = x.nbytes, d.nbytes
    first = -(-x_bytes // 16) * 16 + gap_bytes
    memory = torch.zeros(first + d_bytes, dtype=torch.uint8)
    moved_d = memory[first:].view(d.dtype).view(d.shape).copy_(d)
    moved = memory[:x_bytes].view(x.dtype).view(x.shape).copy_(x)
    if side is None:
        return {**call, name: moved, "d": moved_d}
    pair = (moved, call[side][1]) if name == side else (call[side][0], moved)
    return {**call, side: pair, "d": moved_d}


@pytest.mark.parametrize(("kind", "name"), INPUTS)
def test_d_may_lie_right_behind_an_input_and_not_over_its_end(kind: str, name: str) -> None:
    product, call = make(kind)
    assert_refused(product, d_behind(call, name, -16), ValueError, f"d: expected memory that does not overlap {name}")
    near = d_behind(call, name, 0)
    product(**call)
    product(**near)
    assert torch.equal(near["d"], call["d"])


@pytest.mark.parametrize("kind", ["nt", "nn", "k-grouped"])
def test_c_may_be_d_itself_and_may_not_overlap_it_in_part(kind: str) -> None:
    product, call = make(kind)
    rows = call["d"].shape[-2]
    memory = output(*call["d"].shape[:-2], rows + 1, N, dtype=call["d"].dtype)
    call["d"] = memory[..., :rows, :]
    for c in (memory[..., 1:, :], memory.flatten()[8 : 8 + call["d"].numel()].view(call["d"].shape)):
        assert_refused(product, {**call, "c": c}, ValueError, f"c: expected {D_ITSELF}")
    product(**call, c=torch.full_like(call["d"], CANARY))
    expected, call["d"] = call["d"].clone(), memory[..., :rows, :].fill_(CANARY)
    product(**call, c=call["d"].view(call["d"].shape))
    assert torch.equal(call["d"], expected)


def test_c_may_be_d_itself_where_the_stride_of_a_single_row_says_nothing() -> None:
    product, call = make("nt")
    call["a"] = (call["a"][0][:1], call["a"][1][:1])
    call["d"] = output(1, N)
    expected = product(call["a"], call["b"], c=call["d"])
    assert product(**call, c=call["d"].as_strided((1, N), (2 * N, 1))) is None
    assert torch.equal(call["d"], expected)


@pytest.mark.parametrize("kind", ["nt", "k-grouped"])
def test_c_and_d_may_be_columns_of_one_matrix(kind: str) -> None:
    product, call = make(kind)
    room = output(*call["d"].shape[:-1], 2 * N, dtype=call["d"].dtype)
    for d, c in ((room[..., :N], room[..., N:]), (room[..., N:], room[..., :N])):
        expected = product(**{**call, "d": None, "c": c.contiguous()})
        before = c.clone()
        product(**{**call, "d": d, "c": c})
        assert torch.equal(d, expected)
        assert torch.equal(c, before)
    assert_refused(product, {**call, "d": room[..., :N], "c": room[..., 8 : N + 8]}, ValueError, "c: expected d itself")


def test_a_and_d_may_be_columns_of_one_matrix_of_bytes() -> None:
    product, call = make("nt")
    product(**call)
    memory = torch.zeros(M, K + 2 * N, dtype=torch.uint8)
    a, d = memory[:, :K].view(FP8), memory[:, K:].view(torch.bfloat16)
    a.copy_(call["a"][0])
    product(**{**call, "a": (a, call["a"][1]), "d": d})
    assert torch.equal(d, call["d"])
    assert torch.equal(a.view(torch.uint8), call["a"][0].view(torch.uint8))


def test_d_over_expanded_scales_is_refused() -> None:
    product, call = make("nt")
    memory = output(1, N, dtype=FP32)
    call.update(a=(call["a"][0][:1], call["a"][1][:1]), d=memory)
    call["b"] = (call["b"][0], memory[0, :K_BLOCKS].expand(N_BLOCKS, K_BLOCKS))
    assert_refused(product, call, ValueError, "d: expected memory that does not overlap sfb")


@settings(deadline=None, max_examples=150)
@given(
    m=st.integers(1, 4),
    columns=st.sampled_from([4, 8]),
    pitches=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    same_pitch=st.booleans(),
    firsts=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
@example(m=2, columns=4, pitches=(2, 4), same_pitch=False, firsts=(0, 0))  # C begins where D does
def test_c_is_refused_exactly_where_it_shares_some_of_ds_memory(
    m: int, columns: int, pitches: tuple[int, int], same_pitch: bool, firsts: tuple[int, int]
) -> None:
    memory = torch.arange(160, dtype=FP32)
    pitch_d, pitch_c = 4 * pitches[0], 4 * pitches[0 if same_pitch else 1]
    d = memory.as_strided((m, columns), (pitch_d, 1), 4 * firsts[0])
    c = memory.as_strided((m, columns), (pitch_c, 1), 4 * firsts[1])
    shared = set(d.flatten().tolist()) & set(c.flatten().tolist())
    is_d = torch.equal(c, d)
    a, b = operand((m, 16), (m, 1), 1), operand((columns, 16), (1, 1), 2)
    expected = deep_gemm.fp8_gemm_nt(a, b, c=c.clone())
    assert expected is not None
    before = memory.clone()
    try:
        deep_gemm.fp8_gemm_nt(a, b, d, c)
    except ValueError as error:
        assert str(error).startswith(f"c: expected {D_ITSELF}")
        # Of matrices with different row pitches only the ranges are compared.
        assert not same_pitch or (shared and not is_d)
        assert torch.equal(memory, before)
    else:
        assert is_d or not shared
        assert torch.equal(d, expected)


# Arguments that look unusual and are no mistakes


def integers_of_numpy(*numbers: int) -> list[Any]:
    return [np.int64(number) for number in numbers]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("masked", {"expected_m": np.int64(5)}),
        ("masked", {"expected_m": np.int32(0)}),
        ("k-grouped", {"ks": integers_of_numpy(*KS)}),
        ("k-grouped", {"ks": tuple(integers_of_numpy(*KS)), "ks_tensor": None}),
        ("k-grouped of 2025", {"ks": integers_of_numpy(*KS)}),
        ("contiguous", {"num_groups": np.int64(GROUPS)}),
        ("nt", {"recipe": integers_of_numpy(1, 128, 128)}),
        ("nt", {"recipe_b": integers_of_numpy(128, 128)}),
    ],
)
def test_integers_may_be_numpys(kind: str, change: Arguments) -> None:
    product, call = make(kind)
    product(**call)
    expected, call["d"] = call["d"], torch.full_like(call["d"], CANARY)
    call.update(change)
    product(**call)
    assert torch.equal(call["d"], expected)


@pytest.mark.parametrize("kind", CALLS)
def test_scales_may_lie_anywhere(kind: str) -> None:
    product, call = make(kind)
    product(**call)
    for lay in (misaligned, column_major, every_second, wider(3), lambda x: wider(1)(x.mT).mT):
        odd = {**call, "d": torch.full_like(call["d"], CANARY)}
        for side in ("a", "b"):
            odd[side] = (call[side][0], lay(call[side][1]))
        product(**odd)
        assert torch.equal(odd["d"], call["d"])


@pytest.mark.parametrize(("kind", "side"), TRANSPOSED)
def test_a_transposed_operand_may_be_of_any_layout_and_reaches_the_kernels_k_major(
    kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, call = make(kind)
    product(**call)
    seen: list[Any] = []
    module: Any = dense_products if "contiguous" not in kind else grouped_products
    made = getattr(module, "CONTIGUOUS_NN" if "contiguous" in kind else kind.split(maxsplit=1)[0].upper())
    reference = made.reference

    def record(problem: Any) -> None:
        seen.append(problem)
        reference(problem)

    monkeypatch.setattr(made, "reference", record)
    for lay in (torch.clone, lambda x: misaligned(x.contiguous()), every_second):
        odd = {**call, "d": torch.full_like(call["d"], CANARY), side: (lay(call[side][0]), call[side][1])}
        product(**odd)
        assert torch.equal(odd["d"], call["d"])
    assert all(getattr(problem, side).stride(-1) == 1 for problem in seen)
    assert len(seen) == 3


@pytest.mark.parametrize("kind", [kind for kind in CALLS if not kind.startswith("k-grouped")])
def test_values_and_d_may_have_a_wider_row_pitch(kind: str) -> None:
    product, call = make(kind)
    product(**call)
    wide = {**call, "d": wider(16)(torch.full_like(call["d"], CANARY))}
    for side in ("a", "b"):
        x = call[side][0]
        wide[side] = (wider(16)(x.mT).mT if (kind, side) in TRANSPOSED else wider(16)(x), call[side][1])
    product(**wide)
    assert torch.equal(wide["d"], call["d"])


@pytest.mark.parametrize("kind", CALLS)
def test_parameters_of_values_and_scales_give_the_same_result_without_a_graph(kind: str) -> None:
    product, call = make(kind)
    made = product(**{**call, "d": None})
    product(**call)
    learned = {**call, "d": torch.full_like(call["d"], CANARY)}
    for side in ("a", "b"):
        learned[side] = tuple(torch.nn.Parameter(x.detach().clone()) for x in call[side])
    product(**learned)
    assert learned["d"].is_leaf
    assert torch.equal(learned["d"], call["d"])
    again = product(**{**learned, "d": None})
    assert not again.requires_grad
    if kind not in ("contiguous", "contiguous nn", "ends", "masked"):  # whose skipped rows hold anything
        assert torch.equal(again, made)
    views = {**learned, **{side: tuple(x[:] for x in learned[side]) for side in ("a", "b")}}
    assert views["b"][0].requires_grad
    product(**views)


def learned(x: torch.Tensor) -> torch.Tensor:
    """As if it was computed from something that requires a gradient."""
    return x.detach().clone().requires_grad_().clone()


@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb"])
@pytest.mark.parametrize("kind", CALLS)
def test_an_operand_whose_gradient_would_be_cut_is_refused(kind: str, name: str) -> None:
    product, call = make(kind)
    side, is_scale = name[-1], len(name) > 1
    changed = list(call[side])
    changed[is_scale] = learned(changed[is_scale])
    call[side] = tuple(changed)
    before = call["d"].clone()
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor without a gradient.*train with deep_gemm\.nn"):
        product(**call)
    assert torch.equal(call["d"], before)
    with torch.no_grad():
        product(**call)
    assert not call["d"].requires_grad
    with torch.inference_mode():
        product(**call)


@pytest.mark.parametrize("kind", ["nt", "wgrad", "k-grouped", "k-grouped of 2025"])
def test_a_c_that_requires_a_gradient_is_refused(kind: str) -> None:
    product, call = make(kind)
    c = call["d"].clone().requires_grad_()
    is_d = kind in ("wgrad", "k-grouped of 2025")
    arguments = {**call, "d": c} if is_d else {**call, "c": c}
    with pytest.raises(ValueError, match=f"^{'d' if is_d else 'c'}: expected a tensor without a gradient"):
        product(**arguments)
    with torch.no_grad():
        product(**arguments)


@pytest.mark.parametrize("kind", ["wgrad", "k-grouped"])
def test_a_weight_gradient_without_c_is_rounded_once_to_bf16(kind: str) -> None:
    product, call = make(kind)
    if kind == "wgrad":  # under this name D is FP32
        product, call = deep_gemm.fp8_gemm_nt, {**call, "recipe": (1, 1, 128)}
    exact = product(**{**call, "d": None})
    assert exact.dtype == torch.float32
    d = torch.full_like(exact, CANARY, dtype=torch.bfloat16)
    assert product(**{**call, "d": d}) is None
    assert torch.equal(d, exact.bfloat16())


def test_a_layout_left_out_means_equal_groups_in_either_form() -> None:
    a = operand((200, K), (200, K_BLOCKS), 4)
    ids = torch.arange(GROUPS, dtype=torch.int32).repeat_interleave(100)
    expected = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, weights(), grouped_layout=ids)
    assert expected is not None
    for use_psum_layout in (False, True):
        d = output(200, N)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, weights(), d, num_groups=GROUPS, use_psum_layout=use_psum_layout)
        assert torch.equal(d, expected)


@pytest.mark.parametrize("numbers", [(0, 0), (100, 100), (0, 300), (128, 128), (128, 300), (100, 128), (300, 300)])
def test_ends_of_empty_groups_are_no_mistake(numbers: tuple[int, int]) -> None:
    product, call = make("ends")
    product(**{**call, "grouped_layout": int32(*numbers)})
    first, last = numbers
    ids = torch.full((ENDS_M,), -1, dtype=torch.int32)
    ids[-(-first // 128) * 128 : last] = 1
    ids[:first] = 0
    assert bool((call["d"][ids < 0] % CANARY == 0).all())
    valid = ids >= 0
    a, sfa = call["a"]
    expected = deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a[valid], sfa[valid]), call["b"], grouped_layout=ids[valid])
    assert expected is not None
    assert torch.equal(call["d"][valid], expected)


@pytest.mark.parametrize("kind", ["contiguous", "contiguous nn", "ends", "masked"])
def test_groups_may_share_one_weight_without_a_copy(kind: str) -> None:
    product, call = make(kind)
    (b, sfb), d = call["b"], call["d"]
    copies = (b[:1].repeat(GROUPS, 1, 1), sfb[:1].repeat(GROUPS, 1, 1))
    product(**{**call, "b": (copies[0].mT.contiguous().mT if kind == "contiguous nn" else copies[0], copies[1])})
    shared = torch.full_like(d, CANARY)
    product(**{**call, "d": shared, "b": (b[:1].expand(b.shape), sfb[:1].expand(sfb.shape))})
    assert torch.equal(shared, d)


def test_a_shared_weight_that_has_to_be_copied_is_copied_once() -> None:
    call = contiguous("nn")
    row_major = call["b"][0][:1].contiguous().expand(call["b"][0].shape)
    (a, b), layout = (call["a"], (row_major, call["b"][1])), call["grouped_layout"]
    found = contiguous_problem(a, b, None, layout, major="nn")
    assert found.b.stride() == (0, K, 1)


# Products of ordinary tensors, through torch


def test_a_product_through_torch_gives_no_graph() -> None:
    d = output(2, 3, dtype=FP32)
    with pytest.raises(ValueError, match=r"^a: expected a tensor without a gradient"):
        deep_gemm.cublaslt_gemm_nt(torch.ones(2, 4).requires_grad_(), torch.ones(3, 4), d)
    with torch.no_grad():
        deep_gemm.cublaslt_gemm_nt(torch.ones(2, 4).requires_grad_(), torch.ones(3, 4), d)
    assert not d.requires_grad
    assert bool((d == 4).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_product_through_torch_may_accumulate_in_place_and_write_columns(dtype: torch.dtype) -> None:
    a, b = torch.ones(2, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    for d in (torch.ones(3, 2, dtype=dtype).t(), torch.ones(2, 8, dtype=dtype)[:, 2:5]):
        deep_gemm.cublaslt_gemm_nt(a, b, d, d)
        assert bool((d == 5).all())

"""Products into the parts of heads: arguments, refused arguments, and elements that the reference writes or keeps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import refused, some
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.gpu import H200
from deep_gemm.gemm.ask.heads import skip_problem
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds.epilogues import TO_HEADS
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import HeadParts
from lab.configs import reachable_skipping

M, K = 5, 144


def operands(n: int, m: int = M, k: int = K) -> tuple[Operand, Operand]:
    g = torch.Generator().manual_seed(n)
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(m, k, generator=g))
    return a, deep_gemm.per_block_cast_to_fp8(torch.randn(n, k, generator=g))


def output(m: int, n: int, splits: tuple[int, int, int], value: float = 42.0) -> Tensor:
    left, _, right = splits
    return torch.full((m, n // (left + right) * sum(splits)), value, dtype=torch.bfloat16)


@pytest.mark.parametrize("splits", [(128, 64, 128), (64, 32, 192), (16, 8, 48), (32, 0, 16), (48, 24, 16)])
def test_each_column_goes_where_upstreams_formula_says(splits: tuple[int, int, int]) -> None:
    left, mid, right = splits
    n = 3 * (left + right)
    a, b = operands(n)
    d = output(M, n, splits)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
    plain = some(deep_gemm.fp8_gemm_nt(a, b))
    columns = torch.arange(n)
    places = columns + (columns + right) // (left + right) * mid
    assert torch.equal(d[:, places], plain)
    between = torch.ones(d.shape[1], dtype=torch.bool)
    between[places] = False
    assert int(between.sum()) == 3 * mid
    assert (d[:, between] == 42).all()


def test_what_callers_also_state_changes_nothing() -> None:
    a, b = operands(48)
    first, second = output(M, 48, (16, 8, 32)), output(M, 48, (16, 8, 32))
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, first, (16, 8, 32))
    stated: Any = {"recipe": (1, 128, 128), "compiled_dims": "mnk", "disable_ue8m0_cast": True}
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, second, [16, 8, 32], **stated)
    assert torch.equal(first, second)


@pytest.mark.parametrize("columns", [16, 24, 40, 256, 320, 328, 32768, (1 << 31) - 8])
def test_a_multiplication_divides_as_exactly_as_a_division(columns: int) -> None:
    multiplier, shift = HeadParts(8, 0, columns - 8).division
    assert multiplier < 1 << 32
    whole = [i * columns for i in (1, 2, 3, 1000, (1 << 31) // columns)]
    for column in (0, 8, (1 << 31) - 8, *whole, *(x - 8 for x in whole)):
        if 0 <= column < 1 << 32:
            assert column // 8 * multiplier >> shift == column // columns


def test_nothing_to_compute() -> None:
    a, b = operands(48, m=0)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, output(0, 48, (16, 8, 32)), (16, 8, 32))
    empty = torch.empty(M, 0, dtype=torch.float8_e4m3fn), torch.empty(M, 0)
    no_rows = torch.empty(48, 0, dtype=torch.float8_e4m3fn), torch.empty(1, 0)
    d = output(M, 48, (16, 8, 32))
    deep_gemm.fp8_gemm_nt_skip_head_mid(empty, no_rows, d, (16, 8, 32))
    assert d[0].tolist() == [0.0] * 16 + [42.0] * 8 + [0.0] * 32


NO_MID = (16, 0, 32)
OF_THREE = "head_splits: expected three integers (left, mid, right), got"
OF_16 = "head_splits: expected left and right to be positive multiples of 16, and mid a multiple of 8, got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_splits": (8, 8)}, f"{OF_THREE} (8, 8)"),
        ({"head_splits": 8}, f"{OF_THREE} 8"),
        ({"head_splits": (16, 8.5, 32)}, f"{OF_THREE} (16, 8.5, 32)"),
        *[
            ({"head_splits": splits}, f"{OF_16} {splits}")
            for splits in ((16, 4, 32), (24, 8, 24), (0, 8, 48), (48, 8, 0), (16, -8, 32))
        ],
        ({"head_splits": (16, 8, 16)}, "n: expected a multiple of left + right = 32 of head_splits, got 48"),
        ({"d": torch.empty(M, 56)}, "d: expected dtype torch.bfloat16, got torch.float32"),
        ({"d": output(M, 48, NO_MID)}, "d: expected shape (m, n / (left + right) * (left + mid + right)) = (5, 56)"),
        ({"d": output(56, 40, (8, 0, 0))[:, :M].t()}, "d: expected values contiguous along n"),
        ({"d": None}, "TypeError: d: expected a tensor, got NoneType"),
        ({"recipe": (1, 1, 128)}, "NotImplementedError: recipe: expected (1, 128, 128) or None, got (1, 1, 128)"),
        ({"b": operands(48, k=160)[1]}, "b: expected shape (n, k)"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    a, b = operands(48)
    d = output(M, 48, (16, 8, 32))
    call: dict[str, Any] = {"a": a, "b": b, "d": d, "head_splits": (16, 8, 32), **change}
    with refused(message):
        deep_gemm.fp8_gemm_nt_skip_head_mid(**call)
    assert (d == 42).all()


def test_d_must_not_overlap_an_operand() -> None:
    a, b = operands(32, m=4, k=128)
    d = a[0].view(torch.bfloat16)[:, :40]
    with pytest.raises(ValueError, match="d: expected memory that does not overlap a"):
        skip_problem(a, b, d, (16, 8, 16), recipes=(None, None, None))


def test_the_plain_products_configuration_is_chosen() -> None:
    for m, n, k in ((1, 32768, 512), (128, 32768, 512), (4096, 8192, 512), (64, 576, 7168), (16, 576, 16384)):
        for split_k, multiple in itertools.product((True, False), (16, 48, 32, 64, 128)):
            config = select(Sizes(m, n, k), Output(epilogue=TO_HEADS), H200, multiple, split_k=split_k)
            assert config.epilogue.skips_mid
            assert config.why_illegal() is None
            assert config in reachable_skipping()
            if isinstance(config, GemmConfig):
                assert config.kernel_name == "fp8_gemm_skip_head_mid"
                assert multiple % config.panel_columns == 0

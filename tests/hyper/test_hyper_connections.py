"""tf32_hc_prenorm_gemm: results on the CPU, the configuration chosen for a GPU, and messages about mistakes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm.core.check.layout import parts_of
from deep_gemm.core.jit.driver import PORTABLE_CLUSTER
from deep_gemm.hyper.api import to_tf32
from deep_gemm.hyper.choose import kernel_of, select_hc, usual_hc
from deep_gemm.hyper.kernel import INVARIANT_CLUSTER, INVARIANT_TEAMS, HcConfig, grid, hc_config, reachable_hc
from deep_gemm.hyper.kernel_few import HcFewConfig, reachable_few
from lab.sim.hc_prenorm import random_operands as operands
from lab.sim.hc_prenorm import special_operands

REACHABLE = {*reachable_hc(), *reachable_few()}


def outputs(m: int, n: int, splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    of_splits = () if splits is None else (splits,)
    return torch.full((*of_splits, m, n), torch.nan), torch.full((*of_splits, m), torch.nan)


def test_it_is_the_product_with_rounded_values_and_the_sum_of_squares() -> None:
    a, b = operands(70, 24, 320)
    d, sqr_sum = outputs(70, 24)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, d, sqr_sum)
    torch.testing.assert_close(d, (a.double() @ to_tf32(b).double().t()).float(), rtol=0, atol=0)
    torch.testing.assert_close(sqr_sum, a.double().square().sum(1).float(), rtol=0, atol=0)
    assert not torch.allclose(d.double(), a.double() @ b.double().t(), rtol=1e-6)


@pytest.mark.parametrize("splits", [1, 3, 5, 8])
def test_splits_add_up_and_have_even_parts(splits: int) -> None:
    a, b = operands(9, 16, 320)
    whole, squares = outputs(9, 16)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, whole, squares)
    d, sqr_sum = outputs(9, 16, splits)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, splits)
    torch.testing.assert_close(d.sum(0), whole)
    torch.testing.assert_close(sqr_sum.sum(0), squares)
    for split, blocks in enumerate(parts_of(5, splits)):
        ks = slice(blocks.start * 64, blocks.stop * 64)
        torch.testing.assert_close(sqr_sum[split], a[:, ks].float().square().sum(1))


def test_values_are_rounded_to_nearest_even() -> None:
    """Test ties, and numbers that rounding makes infinite. Infinities, zeros and NaN do not change."""
    unit = 2.0**-10
    largest = torch.finfo(torch.float32).max
    given = [1 + unit / 2, 1 + unit * 1.5, -1 - unit * 0.51, 1 + unit * 0.49, largest, torch.inf, -0.0, 2.0**-149]
    expected = [1, 1 + 2 * unit, -1 - unit, 1, torch.inf, torch.inf, -0.0, 0]
    found = to_tf32(torch.tensor(given))
    assert found.tolist() == expected
    assert torch.equal(found.signbit(), torch.tensor(expected).signbit())
    quiet = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert to_tf32(quiet).isnan().all()


def test_infinities_and_nan_reach_what_they_belong_to() -> None:
    a, b = special_operands(13, 24, 192)
    d, sqr_sum = outputs(13, 24)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, d, sqr_sum)
    assert d[3].isnan().all()
    assert d[:, 3].isnan().all()
    assert d[6:, 6:].isfinite().all()
    assert torch.equal(sqr_sum.isfinite().nonzero()[:, 0], torch.tensor([0, *range(6, 13)]))


def test_nothing_to_do() -> None:
    b = torch.ones(24, 128)
    deep_gemm.tf32_hc_prenorm_gemm(torch.ones(0, 128).bfloat16(), b, *outputs(0, 24))
    d, sqr_sum = outputs(3, 24, 2)
    deep_gemm.tf32_hc_prenorm_gemm(torch.ones(3, 0).bfloat16(), b[:, :0], d, sqr_sum, 2)
    assert not d.any()
    assert not sqr_sum.any()


def test_outputs_may_lie_in_wider_rows() -> None:
    a, b = operands(9, 16, 128)
    d, sqr_sum = outputs(9, 16)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, d, sqr_sum)
    wide = torch.full((9, 19), 7.0)
    deep_gemm.tf32_hc_prenorm_gemm(a, b, wide[:, 1:17], sqr_sum)
    assert torch.equal(wide[:, 1:17], d)
    assert (wide[:, [0, 17, 18]] == 7).all()


A, B = torch.ones(5, 128).bfloat16(), torch.ones(24, 128)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"a": A.float()}, "a: expected dtype torch.bfloat16, got torch.float32"),
        ({"b": B.bfloat16()}, "b: expected dtype torch.float32, got torch.bfloat16"),
        ({"b": B[:, :64]}, "b: expected shape (n, k) = (n, 128), got (24, 64)"),
        ({"d": torch.ones(5, 16)}, "d: expected shape (m, n) = (5, 24), got (5, 16)"),
        ({"d": torch.ones(24, 5).t()}, "d: expected values contiguous along n, got strides (1, 5)"),
        ({"d": torch.ones(5, 1).expand(5, 24)}, "d: expected values contiguous along n"),
        ({"d": torch.ones(1, 24).expand(5, 24)}, "d: expected rows that do not overlap"),
        ({"sqr_sum": torch.ones(6)}, "sqr_sum: expected shape (m) = (5), got (6,)"),
        ({"sqr_sum": torch.ones(10)[::2]}, "sqr_sum: expected a contiguous tensor"),
        ({"num_splits": 2}, "d: expected shape (num_splits, m, n) = (2, 5, 24), got (5, 24)"),
        ({"num_splits": 0}, "num_splits: expected an integer"),
        ({"b": torch.ones(20, 128), "d": torch.ones(5, 20)}, "n: expected 8, 16, 24 or 32, got 20"),
        ({"a": A[:, :96], "b": B[:, :96]}, "k: expected a multiple of 64, got 96"),
        ({"a": torch.ones(128, 5).bfloat16().t()}, "a: expected values contiguous along k"),
        ({"b": torch.ones(24, 130)[:, :128]}, "b: expected rows that start at multiples of 16 bytes"),
        ({"a": torch.ones(5 * 128 + 1).bfloat16()[1:].view(5, 128)}, "a: expected an address that is a multiple of 16"),
        ({"b": B.clone().requires_grad_()}, "b: expected a tensor without a gradient"),
    ],
)
def test_a_mistake_is_told(changes: dict[str, Any], expected: str) -> None:
    d, sqr_sum = outputs(5, 24)
    with pytest.raises(ValueError, match="^" + re.escape(expected)):
        deep_gemm.tf32_hc_prenorm_gemm(**{"a": A, "b": B, "d": d, "sqr_sum": sqr_sum} | changes)


def test_outputs_must_be_apart() -> None:
    memory = torch.zeros(2000)
    d, sqr_sum = memory[:120].view(5, 24), memory[116:121]
    with pytest.raises(ValueError, match="sqr_sum: expected memory that does not overlap d"):
        deep_gemm.tf32_hc_prenorm_gemm(A, B, d, sqr_sum)
    with pytest.raises(ValueError, match="d: expected memory that does not overlap b"):
        deep_gemm.tf32_hc_prenorm_gemm(A, B.zero_(), B[:5, :24], torch.zeros(5))
    B.fill_(1)


@pytest.mark.parametrize("num_sms", [1, 7, 78, 132])
def test_what_is_chosen_can_be_built_and_fills_no_more_than_the_sms(num_sms: int) -> None:
    for m in (1, 13, 64, 65, 137, 256, 500, 1024, 4096, 8192, 20000):
        for n in (8, 16, 24, 32):
            for k in (64, 128, 7168, 28672):
                for splits in (1, 16):
                    ring = hc_config(m, n, k, splits, num_sms)
                    chosen = select_hc(m, n, k, splits, num_sms, leaves_sms=True)
                    assert {ring, chosen} <= REACHABLE
                    assert ring.why_illegal() is chosen.why_illegal() is None
                    assert grid(ring, m, n, splits, num_sms) <= num_sms
                    assert kernel_of(chosen).grid(chosen, m, n, splits, num_sms) <= num_sms


@pytest.mark.parametrize(
    ("m", "k", "config"),
    [
        (13, 7168, HcFewConfig(8, 16, ahead=4)),
        (13, 28672, HcFewConfig(8, 16, ahead=4)),
        (137, 7168, HcFewConfig(8, 8, ahead=4)),
        (137, 28672, HcFewConfig(8, 8, ahead=4)),
        (300, 28672, HcConfig(64, 24, 16, 4)),
        (1024, 7168, HcConfig(64, 24, 6, 4)),
        (1024, 28672, HcConfig(64, 24, 6, 4)),
        (4096, 7168, HcConfig(64, 24, 2, 4)),
        (4096, 28672, HcConfig(64, 24, 2, 4)),
        (8192, 7168, HcConfig(64, 24, 1, 4)),
        (8192, 28672, HcConfig(128, 24, 2, 2)),
    ],
)
def test_what_was_fastest_on_an_h200_is_chosen(m: int, k: int, config: HcConfig | HcFewConfig) -> None:
    assert select_hc(m, 24, k, 1, 132) == config


def test_usual_configurations_are_reachable() -> None:
    usual = usual_hc()
    assert set(usual) <= REACHABLE
    assert len(usual) < 20


def test_as_many_share_out_k_whatever_the_batch_if_that_is_asked_for() -> None:
    found = {select_hc(m, 24, 7168, 1, 132, batch_invariant=True) for m in range(1, 10000, 37)}
    assert {(type(config), config.cluster_size) for config in found} == {(HcConfig, INVARIANT_CLUSTER)}
    assert {config.teams for config in found if isinstance(config, HcConfig)} == {INVARIANT_TEAMS}
    assert len(found) > 1


def test_a_gpu_without_room_for_large_clusters_has_others() -> None:
    for m in (13, 1024):
        assert select_hc(m, 24, 7168, 1, 132, False, PORTABLE_CLUSTER).cluster_size <= PORTABLE_CLUSTER

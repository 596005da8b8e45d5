"""The product of hyper-connections on a GPU: all sizes, no write outside the outputs, the same bits each time."""

from __future__ import annotations

import pytest
import torch
from helpers import captured
from torch import Tensor

import deep_gemm
from deep_gemm.hyper.api import compute
from deep_gemm.hyper.check import HcProblem
from deep_gemm.hyper.choose import Chosen, run
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from deep_gemm.testing import calc_diff
from lab.bench.hc import in_torch
from lab.sim.hc_prenorm import compare, special_operands
from lab.sim.hc_prenorm import random_operands as operands
from lab.sim.rounding import UNITS_OF_STEP

pytestmark = pytest.mark.gpu

MARK = -1.5 * 2.0**53
REPEATS = 20


def guarded(a: Tensor, b: Tensor, splits: int) -> tuple[HcProblem, list[Tensor]]:
    """Return a problem whose outputs are surrounded by marks, and their memory."""
    rows = splits * len(a)
    memory = [torch.full((rows + 2, len(b)), MARK, device="cuda"), torch.full((rows + 2,), MARK, device="cuda")]
    d, sqr_sum = memory[0][1:-1].view(splits, len(a), len(b)), memory[1][1:-1].view(splits, len(a))
    return HcProblem(a, b, d, sqr_sum), memory


def check(a: Tensor, b: Tensor, splits: int = 1, config: Chosen | None = None) -> HcProblem:
    p, memory = guarded(a, b, splits)
    run(p, config)
    first = [x.clone() for x in memory]
    compare(a, b, p.d, p.sqr_sum, UNITS_OF_STEP)
    assert all((x[0] == MARK).all() and (x[-1] == MARK).all() for x in memory)
    for _ in range(REPEATS):
        for x in memory:
            x.fill_(MARK)
        run(p, config)
        assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(memory, first, strict=True))
    return p


@pytest.mark.parametrize("splits", [None, 16])
@pytest.mark.parametrize("k", [7168, 7680, 16384, 28672])
@pytest.mark.parametrize("m", [13, 137, 1024, 4096, 8192])
def test_what_callers_ask_for(m: int, k: int, splits: int | None) -> None:
    """Compare with torch's product in TF32, by the measure and the tolerance that callers use."""
    torch.manual_seed(m + k)
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(24, k, device="cuda")
    p = check(a, b, splits or 1)
    right = in_torch(HcProblem(a, b, p.d[:1], p.sqr_sum[:1]))[0][0]
    assert calc_diff(p.d.sum(0), right) < 1e-8
    assert calc_diff(p.sqr_sum.sum(0), a.float().square().sum(1)) < 1e-8


@pytest.mark.parametrize("n", [8, 16, 24, 32])
@pytest.mark.parametrize("m", [1, 63, 64, 65, 128, 129, 700])
def test_edges_of_shapes(m: int, n: int) -> None:
    for k in (64, 128, 1984):
        for splits in (1, 3, 40):
            check(*operands(m, n, k, device="cuda"), splits)


def test_many_units_for_each_sm() -> None:
    check(*operands(5000, 24, 1984, device="cuda"), 7, HcConfig(64, 24, 2))
    check(*operands(40000, 24, 640, device="cuda"))
    check(*operands(5000, 24, 1984, device="cuda"), 7, HcFewConfig(24, 2))


@pytest.mark.parametrize("config", [HcConfig(64, 24), HcFewConfig(24)], ids=lambda config: config.name)
def test_zeros_infinities_and_nan_as_torch_has_them(config: Chosen) -> None:
    a, b = (x.cuda() for x in special_operands(13, 24, 192))
    p = check(a, b, 1, config)
    right = in_torch(HcProblem(a, b, p.d[:1], p.sqr_sum[:1]))[0][0]
    assert torch.equal(p.d[0].isnan(), right.isnan())
    assert torch.equal(p.d[0].isinf(), right.isinf())


def test_few_sms_give_the_same_bits() -> None:
    a, b = operands(700, 24, 3200, device="cuda")
    config = HcConfig(64, 24, 4)
    whole = check(a, b, 1, config).d.clone()
    deep_gemm.set_num_sms(9)
    assert torch.equal(check(a, b, 1, config).d, whole)
    check(a, b)


@pytest.mark.parametrize("m", [13, 137, 1024])
def test_a_graph_is_replayed_with_other_inputs(m: int) -> None:
    a, b = operands(m, 24, 7168, device="cuda")
    p, memory = guarded(a, b, 1)
    compute(p)
    graph, _ = captured(compute, p)
    for seed in range(4):
        for x, y in zip((a, b), operands(m, 24, 7168, seed + 1), strict=True):
            x.copy_(y)
        memory[0].fill_(MARK)
        graph.replay()
        compare(a, b, p.d, p.sqr_sum, UNITS_OF_STEP)


def test_as_a_dependent_of_the_kernel_ahead() -> None:
    """The previous kernel still writes the operands when this kernel is launched."""
    a, b = operands(300, 24, 7168, device="cuda")
    right = check(a, b)
    kept, filler = a.clone(), torch.empty(1 << 28, device="cuda")
    p, _ = guarded(a, b, 1)
    deep_gemm.set_pdl(True)
    for _ in range(5):
        a.zero_()
        filler.fill_(1)
        a.copy_(kept)
        compute(p)
        assert torch.equal(p.d, right.d)


def test_rows_beyond_2_31_elements() -> None:
    m, k = 76000, 28672
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB")
    a, b = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda"), torch.randn(24, k, device="cuda")
    a[-70:].normal_()
    p, _ = guarded(a, b, 1)
    compute(p)
    compare(a[-70:], b, p.d[:, -70:], p.sqr_sum[:, -70:], UNITS_OF_STEP)
    assert not p.d[:, :-70].any()

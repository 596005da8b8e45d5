"""What the host decides of the two products of an expert on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import install, on_gpu
from torch import Tensor

import deep_gemm
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.recipes import PER_64
from deep_gemm.core.gpu import H200
from deep_gemm.gemm import launch
from deep_gemm.gemm import rows_silu as kernels
from deep_gemm.gemm.api.grouped import product_of_rows_by_64
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe import activation
from deep_gemm.moe.activation import activated_product_of_rows
from lab.configs import reachable_grouped, reachable_silu
from lab.sim import rows as sim_rows
from lab.sim import rows_silu as sim

SILU, BY_64 = Output(work=works.ENDS, epilogue=epilogues.SILU), Output(work=works.IDS, sfa=PER_64)
ROWS_PARAMS, ROWS_SILU_PARAMS = (params_of(tile_config(128, 128, output)) for output in (BY_64, SILU))


def problem(m: int = 300, limit: float | None = None, has_weights: bool = True) -> Problem:
    p = sim.random_problem([m - 3, 3], 512, 256, behind=0, limit=limit, has_weights=has_weights)
    return p._replace(a=on_gpu(p.a), d=on_gpu(p.d), sfa=get_mn_major_tma_aligned_tensor(p.sfa))


def call(p: Problem) -> None:
    d = p.d, p.scales
    activated_product_of_rows((p.a, p.sfa), (p.b, p.sfb), d, p.c, p.row_weights, limit=p.limit)


@pytest.mark.parametrize("rows", [0, 0.01, 1, 20, 1e6])
def test_what_is_chosen_is_reachable(rows: float) -> None:
    for num_groups in (1, 256):
        for k in (128, 512, 7168):
            assert select(Sizes(rows, 4096, k, num_groups), SILU, H200) in reachable_silu()
            assert select(Sizes(rows, 4096, k, num_groups), BY_64, H200) in reachable_grouped()


def test_everything_has_an_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    for _ in range(2):
        p = problem()
        call(p)
        named: dict[str, Tensor | None] = {
            "sfb": p.sfb,
            "d": p.d,
            "groups.layout": p.c,
            "activation.row_weights": p.row_weights,
            "activation.scales": p.scales,
            "map_b": p.b,
        }
        for name, x in named.items():
            assert x is not None
            assert gpu.last.words[ROWS_SILU_PARAMS.word(name)] == x.data_ptr(), name
    assert gpu.last.kernel == "fp8_gemm_m_grouped_contiguous_silu"
    assert gpu.plans == 1, "the second call is like the first"
    call(problem(has_weights=False))
    assert gpu.last.words[ROWS_SILU_PARAMS.word("activation.row_weights")] == 0


def test_a_call_like_one_before_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    call(problem())
    with monkeypatch.context() as patched:
        patched.setattr(activation, "silu_rows_problem", None)
        call(problem())
    assert len(gpu.launches) == 2
    call(problem(301))
    assert gpu.plans == 2


@pytest.mark.parametrize("out", ["d", "sfd"])
@pytest.mark.parametrize("other", ["a", "sfa", "b", "sfb", "ends", "row_weights"])
def test_outputs_that_lie_over_an_input_are_looked_at_closely(
    monkeypatch: pytest.MonkeyPatch, out: str, other: str
) -> None:
    """A call whose addresses alone differ from one before."""
    gpu = install(monkeypatch)
    p = problem()
    call(p)
    name, member = {"d": "d", "sfd": "scales"}[out], {"ends": "c"}.get(other, other)
    room = torch.empty(1 << 20, dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 :]

    def placed(x: Tensor) -> Tensor:
        of_type = room[: len(room) // 4 * 4].view(x.dtype)
        there = of_type.as_strided(x.shape, x.stride())
        return on_gpu(there) if x.is_cuda else there

    inside: Any = {name: placed(getattr(p, name)), member: placed(getattr(p, member))}
    with pytest.raises(ValueError, match=f"{out}: expected memory that does not overlap {other}|ends: expected values"):
        call(p._replace(**inside))
    assert len(gpu.launches) == 1


def test_malformed_calls_get_words(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    p = problem()
    for a in (p.a, [1, 2, 3], None):
        with pytest.raises(TypeError, match="a: expected a pair"):
            activated_product_of_rows(a, (p.b, p.sfb), (p.d, p.scales), p.c)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ends: expected a tensor"):
        activated_product_of_rows((p.a, p.sfa), (p.b, p.sfb), (p.d, p.scales), [0])  # type: ignore[arg-type]


def test_what_is_launched_depends_on_the_limit_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    limits: list[Any] = [None, 1.0, 2.0, None]
    for limit in limits:
        call(problem(limit=limit))
    assert gpu.plans == 3
    word = ROWS_SILU_PARAMS.offset("activation.scales_pitch") // 8  # the limit is the upper half
    assert len({launch.words[word] for launch in gpu.launches}) == 3
    deep_gemm.set_pdl(True)
    try:
        call(problem())
    finally:
        deep_gemm.set_pdl(False)
    assert gpu.last.is_dependent


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    p = problem()
    kernels.run(p._replace(a=p.a[:0], sfa=p.sfa[:0], d=p.d[:0], scales=p.scales[:0]))
    assert gpu.launches == []


def test_ends_may_begin_at_any_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, p = install(monkeypatch), problem()
    for _ in range(2):
        call(p._replace(c=torch.cat([p.c[:1], p.c])[1:]))
    assert (gpu.plans, len(gpu.launches)) == (1, 2)


def test_scales_that_lie_otherwise_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    p = problem()
    for _ in range(2):
        call(p._replace(sfa=p.sfa.contiguous()))
        assert gpu.last.words[ROWS_SILU_PARAMS.word("map_sfa")] % 16 == 0
    assert gpu.plans == 0


def test_a_configuration_for_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for output in (BY_64, Output(work=works.IDS)):
        with pytest.raises(ValueError, match=r"is for another output: .*(sfa|epilogue)"):
            launch.run(problem(), tile_config(128, 128, output))
    plain = sim_rows.random_problem(tile_config(64, 128, BY_64), [0, 0, 1], 128, 128)
    for output in (SILU, Output(work=works.IDS)):
        with pytest.raises(ValueError, match=r"is for another output: .*(sfa|epilogue)"):
            launch.run(plain, tile_config(64, 128, output))


@pytest.mark.parametrize(
    ("output", "tile", "rule"),
    [
        (Output(work=works.COUNTS, epilogue=epilogues.SILU), (128, 128), "FP8 rows with ends"),
        (Output(epilogue=epilogues.SILU), (128, 128), "FP8 rows with ends"),
        (Output(is_fp32=True, work=works.ENDS, epilogue=epilogues.SILU), (128, 128), "FP8 rows with ends"),
        (SILU, (128, 192), "units of 128 columns"),
        (SILU, (128, 64), "units of 128 columns"),
    ],
)
def test_what_cannot_be_built_says_why(output: Output, tile: tuple[int, int], rule: str) -> None:
    assert rule in str(tile_config(*tile, output).why_illegal())


def test_scales_by_64_go_to_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    p = sim_rows.random_problem(tile_config(128, 128, BY_64), [0] * 300, 256, 512, zero_padding=False)
    sfa = torch.empty_strided((300, 8), (1, 300)).copy_(p.sfa)
    for _ in range(2):
        product_of_rows_by_64((on_gpu(p.a), sfa), (p.b, p.sfb), on_gpu(p.d), p.c)
        assert gpu.last.words[ROWS_PARAMS.word("map_sfa")] == sfa.data_ptr()
    assert gpu.plans == 1
    of_scales = next(x for x in gpu.launches[0].maps if x.sizes == (300, 8, 1))
    assert of_scales.box[1] == 2
    assert gpu.last.kernel == "fp8_gemm_m_grouped_contiguous_by_64"

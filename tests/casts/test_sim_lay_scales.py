"""The lay_scales kernel's own source in the simulator: the bits of torch's copy, and no write between rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deep_gemm.casts import lay_scales
from deep_gemm.casts.lay_scales import CONFIG, KERNEL
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import is_mn_major_tma_aligned
from lab.sim import lay_scales as sim
from lab.sim.library import compiled

pytestmark = pytest.mark.host_compiler


def words(*shape: int) -> Tensor:
    """Draw random bits for every element, including NaN."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int().view(torch.float32)


def assert_laid(sf: Tensor, seed: int = 0, schedule: str | None = None) -> None:
    sim.check(compiled(KERNEL, CONFIG), sf, seed=seed, schedule=schedule)


def layouts_of(sf: Tensor) -> list[Tensor]:
    """Return the scales in every layout."""
    wider, higher, (rows, columns) = torch.cat([sf, sf], -1), torch.cat([sf, sf], -2), sf.shape[-2:]
    layouts = [sf, sf.mT.contiguous().mT, wider[..., :columns], wider[..., ::2], higher[..., 1 : rows + 1, :]]
    layouts += [higher.mT, *(one.expand(sf.shape) for one in (sf[..., :1], sf[..., :1, :], sf[..., :1, :1]))]
    if sf.dim() == 3:
        layouts += [sf.transpose(0, 1).contiguous().transpose(0, 1), sf[:1].expand(3, -1, -1)]
    return layouts


@pytest.mark.parametrize(
    "shape", [(2, 2), (5, 3), (64, 32), (65, 33), (130, 56), (300, 16), (3, 100), (3, 70, 5), (2, 1, 35), (5, 2, 2)]
)
def test_scales_in_every_layout_are_laid_for_tma(shape: tuple[int, ...]) -> None:
    for seed, layout in enumerate(layouts_of(words(*shape))):
        assert_laid(layout, seed, ["slow_warps", "slow_lanes", None][seed % 3])


@settings(deadline=None, max_examples=25)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40)),
    strides=st.tuples(st.integers(0, 9000), st.integers(0, 90), st.integers(0, 90)),
)
def test_any_strides(shape: tuple[int, int, int], strides: tuple[int, int, int]) -> None:
    assert_laid(words(40_000).as_strided(shape, strides))


def test_the_public_name_takes_the_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def run(sf: Tensor, out: Tensor) -> None:
        launches.append(sf.shape)
        sim.run(compiled(KERNEL, CONFIG), sf, out)

    monkeypatch.setattr(lay_scales, "has_kernel", lambda sf: True)
    monkeypatch.setattr(lay_scales, "run", run)
    for sf in (words(70, 5), words(2, 70, 5), words(5, 70).t()):
        out = get_mn_major_tma_aligned_tensor(sf)
        assert torch.equal(out.view(torch.int32), sf.view(torch.int32))
        assert is_mn_major_tma_aligned(out)
        assert get_mn_major_tma_aligned_tensor(out) is out
    assert len(launches) == 3

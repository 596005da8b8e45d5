"""What the host decides of products of heads on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import install, on_gpu
from torch import Tensor

from deep_gemm import fp8_einsum, per_block_cast_to_fp8, per_token_cast_to_fp8, set_batch_invariant, set_num_sms
from deep_gemm.casts import lay_scales
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import empty_mn_major
from deep_gemm.core.gpu import H200
from deep_gemm.gemm import launch as kernels
from deep_gemm.gemm.ask.heads import BY_HEADS, heads_problem
from deep_gemm.gemm.choose.fp8 import choose, select
from deep_gemm.gemm.choose.tiles import TILES_OF_HEADS as TILES
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import OPERANDS_BY_ROW, OUTPUTS_OF, USUAL_OPERANDS, Output, Sizes
from lab.configs import reachable_heads as reachable

BF16 = Output(work=works.HEADS)
HEADS_PARAMS = params_of(Tile(64, 64).config(BF16, 512))
OUTPUTS = [
    replace(output, work=works.HEADS) for kind in (USUAL_OPERANDS, OPERANDS_BY_ROW) for output in OUTPUTS_OF[kind]
]


def test_few_tokens_go_to_the_decode_kernel_and_many_to_large_tiles() -> None:
    chosen = {m: select(Sizes(m, 1024, 4096, 8), BF16, H200) for m in (1, 4, 32, 128, 4096)}
    assert all(isinstance(chosen[m], DecodeConfig) for m in (1, 4, 32))
    assert isinstance(chosen[128], GemmConfig)
    assert isinstance(chosen[4096], GemmConfig)
    assert chosen[4096].block_m * chosen[4096].block_n == 256 * 128


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_what_is_chosen_is_reachable(output: Output) -> None:
    known = {*reachable()}
    for heads in (1, 8, 128):
        for m in (1, 100, 5000):
            for k in (16, 512, 4096):
                assert select(Sizes(m, 136, k, heads), output, H200) in known


def test_bits_that_depend_on_a_row_alone_have_no_split_of_k() -> None:
    for heads in (1, 2, 8):
        config = select(Sizes(4, 512, 4096, heads), BF16, H200, split_k=False)
        assert config.cluster_k == 1
    set_batch_invariant(True)
    try:
        assert choose(Sizes(4, 512, 4096, 2), BF16, H200).cluster_k == 1
    finally:
        set_batch_invariant(False)


def test_few_sms_are_kept_to() -> None:
    config = select(Sizes(4, 64, 4096, 2), BF16, H200)
    assert isinstance(config, DecodeConfig)
    ctas = 2 * config.cluster_k
    try:
        set_num_sms(ctas)
        assert isinstance(choose(Sizes(4, 1024, 4096, 8), BF16, H200), GemmConfig)
        assert choose(Sizes(4, 64, 4096, 2), BF16, H200) == config
        set_num_sms(ctas - 1)
        assert isinstance(choose(Sizes(4, 64, 4096, 2), BF16, H200), GemmConfig)
        set_num_sms(1)
        alone = choose(Sizes(4096, 1024, 4096, 8), BF16, H200)
        assert isinstance(alone, GemmConfig)
        assert alone.cluster_size == 1
    finally:
        set_num_sms(132)


def operands(b: int, h: int = 3, d: int = 256, r: int = 512) -> tuple[Any, Any]:
    (x, sx), w = per_token_cast_to_fp8(torch.randn(b, h, r)), per_block_cast_to_fp8(torch.randn(h, d, r))
    return (on_gpu(x), sx), w


def test_a_configuration_for_other_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    p = heads_problem(BY_HEADS, *operands(4), None)
    for tile in TILES:
        with pytest.raises(ValueError, match="is for another output: work"):
            kernels.run(p, tile.config(Output(), p.k))
    with pytest.raises(ValueError, match="is for another output: "):
        kernels.run(p, Tile(64, 64).config(Output(is_fp32=True, work=works.HEADS), p.k))


def test_scales_are_laid_out_anew_in_each_call_and_only_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch)
    laid: list[Tensor] = []

    def lay(config: object, params: bytes, grid: int, device: int) -> None:
        address = int.from_bytes(params[:8], "little")
        assert address == sx.data_ptr()
        like = sx.transpose(0, 1)
        assert params[16:] == lay_scales.params_of(like, empty_mn_major(like))[16:]
        laid.append(like)

    monkeypatch.setattr(lay_scales.KERNEL, "run", lay)
    for b, count in ((4, 0), (300, 2)):
        laid.clear()
        gpu.launches.clear()
        (x, sx), w = operands(b)
        d = on_gpu(torch.empty(b, 3, 256, dtype=torch.bfloat16))
        for _ in range(3):
            fp8_einsum(BY_HEADS, (x, sx), w, d)
            _, sx = operands(b)[0]  # in other memory
        assert len(laid) == count  # the first call lays them out by torch: the fake GPU has no kernel
        assert len(gpu.launches) == 3
    m_major = get_mn_major_tma_aligned_tensor(sx.transpose(0, 1)).transpose(0, 1)
    laid.clear()
    for _ in range(3):
        fp8_einsum(BY_HEADS, (x, m_major), w, d)
        assert gpu.last.words[HEADS_PARAMS.word("map_sfa")] == m_major.data_ptr()
    assert laid == []


@pytest.mark.parametrize("b", [4, 300])
def test_an_output_that_a_plan_makes_is_contiguous_for_callers(monkeypatch: pytest.MonkeyPatch, b: int) -> None:
    install(monkeypatch)
    p = heads_problem(BY_HEADS, *operands(b), None)
    plan = kernels.run(p)
    assert plan is not None
    d = plan.new_output()
    assert d.shape == p.d.shape
    assert d.transpose(0, 1).is_contiguous()

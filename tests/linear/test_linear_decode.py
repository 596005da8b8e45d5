"""The layers that the linear_decode kernel serves, each with its tile and launches, without a driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu
from helpers import some
from torch import Tensor

import deep_gemm
from deep_gemm import linear
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.core.gpu import H200
from deep_gemm.gemm.choose.fp8 import choose
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.linear import kernel as linear_decode
from deep_gemm.linear.kernel import KERNEL, MAX_ROWS, serving

N, K = 2112, 7168


def layer(m: int, n: int = N, k: int = K, scales: tuple[int, ...] | None = None) -> tuple[Tensor, Operand]:
    values, shape = torch.zeros(n, k, dtype=torch.float8_e4m3fn), (ceil_div(n, 128), ceil_div(k, 128))
    return on_gpu(torch.zeros(m, k, dtype=torch.bfloat16)), (values, torch.ones(scales or shape))


def word(gpu: FakeGpu, member: str) -> int:
    return gpu.last.words[KERNEL.params.offset(member) // 8]


@pytest.mark.parametrize("m", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("of_bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", [None, (N, 1), (1,)])
def test_few_rows_are_one_launch_with_the_tile_of_the_product(
    gpu: FakeGpu, m: int, of_bias: torch.dtype | None, scales: tuple[int, ...] | None
) -> None:
    k = K if scales is None else 2048
    x, w = layer(m, k=k, scales=scales)
    bias = None if of_bias is None else torch.ones(N, dtype=of_bias)
    out = torch.empty(m, N + 8, dtype=torch.bfloat16)[:, :N]
    linear(x, w, out=out, bias=bias)
    of: dict[str, Any] = {} if scales is None else {"sfa": WHOLE, "sfb": WHOLE}
    output = Output(with_c=bias is not None, c_is_fp32=of_bias == torch.float32, **of)
    tile = choose(Sizes(m, N, k), output, H200)
    assert isinstance(tile, DecodeConfig)
    assert [launch.kernel for launch in gpu.launches] == [KERNEL.kernel_name]
    config = some(serving(m, k, tile))
    assert (config.tile.cluster_k, config.tile.block_n) == (tile.cluster_k, tile.block_n)
    assert (gpu.last.grid, gpu.last.cluster) == (linear_decode.grid(config, m, N), config.cluster_size)
    assert [word(gpu, name) for name in ("map_b", "x", "sfb", "d")] == [t.data_ptr() for t in (w[0], x, w[1], out)]
    assert word(gpu, "c") == (0 if bias is None else bias.data_ptr())
    assert word(gpu, "x_pitch") >> 32 == (k // 128 if scales is None else len(scales) - 1), "sfb_stride_n follows it"
    if m > 1:
        assert [word(gpu, name) for name in ("d_pitch", "c_pitch")] == [N + 8, 0]


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_dependent_launch_is_what_set_pdl_says(gpu: FakeGpu, is_enabled: bool) -> None:
    deep_gemm.set_pdl(is_enabled)
    linear(*layer(3))
    assert gpu.last.is_dependent is is_enabled


def test_settings_choose_the_tile_anew(gpu: FakeGpu) -> None:
    linear(*layer(2))
    split = gpu.last.grid
    deep_gemm.set_batch_invariant(True)
    linear(*layer(2))
    assert gpu.last.kernel == KERNEL.kernel_name
    assert gpu.last.grid < split


def test_a_cluster_is_of_tiles_and_of_parts_of_k(gpu: FakeGpu) -> None:
    """The CTAs of a cluster share the cast if k is not split. If k is split, fewer CTAs share the cast."""
    whole = ((1, 128, 1, 2), (16, 512, 1, 2), (16, 2048, 1, 4))
    split = ((1, 7168, 3, 1), (16, 7168, 3, 2), (16, 7168, 8, 1))
    for m, k, cluster_k, cluster_n in whole + split:
        config = some(serving(m, k, DecodeConfig(16, 4, 1, cluster_k, 2)))
        assert (config.cluster_n, config.tile.block_tokens) == (cluster_n, 8 if m <= 8 else 16)


def test_ctas_with_more_to_cast_than_the_wait_hides_leave_it_to_a_cast() -> None:
    tile = DecodeConfig(16, 4, 1, 8, 2)
    assert serving(16, 8192, tile) is not None
    assert serving(16, 8192 + 128, tile) is None
    assert serving(8, 65536, tile) is not None
    assert serving(MAX_ROWS + 1, 512, tile) is None


def test_ctas_with_more_to_search_than_the_wait_hides_leave_it_to_a_cast(gpu: FakeGpu) -> None:
    """If a scale is for a whole row, each CTA of a cluster searches a share of the row, and multiplies a part of k."""
    tile, most = DecodeConfig(16, 4, 1, 8, 2, sfa=WHOLE, sfb=WHOLE), linear_decode.MOST_SEARCHED
    assert some(serving(8, most, tile)).cluster_size == 8
    assert serving(8, most + 16, tile) is None
    assert serving(1, 128 * 7 + 16, tile) is not None
    assert serving(1, 128 * 7, tile) is None
    linear(*layer(8, 128, 1 << 17, (128, 1)))
    assert len(gpu.launches) == 2


def test_the_grid_is_whole_clusters() -> None:
    config = some(serving(16, 2048, DecodeConfig(16, 4, 1, 1, 2)))
    assert [linear_decode.grid(config, 16, n) for n in (8, 256, 264)] == [4, 4, 8]


def test_compiling_alone_launches_nothing(gpu: FakeGpu) -> None:
    deep_gemm.set_compile_mode(1)
    linear(*layer(3))
    assert gpu.launches == []


NOT_SERVED: dict[str, Any] = {
    "many rows": lambda x: x[:1].repeat(MAX_ROWS + 1, 1),
    "no rows": lambda x: x[:0],
    "FP16": lambda x: x.half(),
    "FP32": lambda x: x.float(),
    "columns": lambda x: x.t().contiguous().t(),
    "an odd pitch": lambda x: torch.zeros(4, K + 4, dtype=x.dtype)[:, :K],
    "an odd beginning": lambda x: torch.zeros(4, K + 8, dtype=x.dtype)[:, 4 : K + 4],
}


@pytest.mark.parametrize("change", NOT_SERVED)
def test_other_rows_are_left_to_cast_and_product(gpu: FakeGpu, change: str) -> None:
    x = on_gpu(NOT_SERVED[change](layer(4)[0]))
    d = torch.empty(len(x), N, dtype=torch.bfloat16)
    assert not linear_decode.run(x, layer(4)[1], d, None)
    assert gpu.launches == []


def test_what_other_kernels_multiply_is_left_to_cast_and_product(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = layer(4)
    d = torch.empty(4, N, dtype=torch.bfloat16)
    assert not linear_decode.run(x, w, d.float(), None)
    deep_gemm.set_num_sms(8)
    assert not linear_decode.run(x, w, d, None)
    monkeypatch.setattr(linear_decode, "is_hopper", lambda _: False)
    deep_gemm.set_num_sms(132)
    assert not linear_decode.run(x, w, d, None)
    assert gpu.launches == []

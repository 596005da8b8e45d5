"""The host's decisions and launches for k-grouped products on a GPU, tested without a GPU."""

from __future__ import annotations

import struct
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu, recorded_alike
from helpers import pointer_members
from torch import Tensor

import deep_gemm
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.gpu import H200, Gpu
from deep_gemm.core.params import Params
from deep_gemm.core.settings import set_compile_mode
from deep_gemm.gemm import depths
from deep_gemm.gemm.choose.fp8 import select as select_any
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import K_GROUP_MAPS, MAX_INLINE_KS, params_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import Problem
from lab.configs import reachable_k_grouped
from lab.sim import depths as sim

FRESH, WITH_C, IN_PLACE, FRESH_BF16 = (of for of in reachable_k_grouped() if of.block_m == of.block_n == 128)
PAIRS, *_ = (config for config in reachable_k_grouped() if config.cluster_size == 2)
KS = [16, 0, 400]
DEPTHS_PARAMS = params_of(FRESH)


def select(sizes: Sizes, output: Output, gpu: Gpu) -> GemmConfig:
    config = select_any(sizes, output, gpu)
    assert isinstance(config, GemmConfig)
    return config


def ready(p: Problem) -> Problem:
    return p._replace(sfa=get_mn_major_tma_aligned_tensor(p.sfa), sfb=get_mn_major_tma_aligned_tensor(p.sfb))


def call(p: Problem, ks: list[int] | None = None) -> None:
    a, b, d = (on_gpu(p.a), p.sfa), (p.b, p.sfb), on_gpu(p.d)
    c = d if p.c is p.d else p.c
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, p.ks_tensor, c)


def words_of_members(params: Params, words: tuple[int, ...]) -> dict[str, int]:
    return {name: words[params.offset(name) // 8] for name in pointer_members(params)}


@pytest.mark.parametrize("on_gpu_alone", [False, True])
@pytest.mark.parametrize("config", [FRESH, WITH_C, IN_PLACE, FRESH_BF16, PAIRS], ids=lambda config: config.name)
def test_both_kernels_are_launched_at_the_operands(gpu: FakeGpu, config: GemmConfig, on_gpu_alone: bool) -> None:
    p = ready(sim.random_problem(config, KS, 100, 72, on_gpu_alone=on_gpu_alone))
    depths.run_on_gpu(p, config)
    maps, product = gpu.launches
    assert (maps.kernel, maps.grid, maps.cluster) == ("k_group_maps", 1, 1)
    assert (product.kernel, product.grid) == ("fp8_wgrad_gemm_k_grouped", 3 * config.cluster_n)
    assert (product.cluster, product.is_dependent) == (config.cluster_n, True)
    found = words_of_members(K_GROUP_MAPS.params, maps.words)
    assert (found["a"], found["b"]) == (p.a.data_ptr(), p.b.data_ptr())
    assert found["ks"] == (0 if p.ks_tensor is None else p.ks_tensor.data_ptr())
    room = found["k_groups"]
    found = words_of_members(DEPTHS_PARAMS, product.words)
    assert found["groups.by_depth"] == room != 0
    places = {"map_sfa": p.sfa, "map_sfb": p.sfb, "map_d": p.d, "d": p.d}
    assert [found[name] for name in places] == [x.data_ptr() for x in places.values()]
    assert found["c"] == (0 if p.c is None else p.c.data_ptr())


def test_a_record_serves_other_depths_from_the_host(gpu: FakeGpu) -> None:
    many = [16, 0, 400], [400, 16, 0], [256, 128, 16], [1024, 0, 16]
    problems = [ready(sim.random_problem(FRESH, ks, 100, 72)) for ks in many]
    calls = [partial(call, p, ks) for p, ks in zip(problems, many, strict=True)]
    assert recorded_alike(gpu, calls, "k_groups", "groups.by_depth") <= 2
    params = K_GROUP_MAPS.params
    for launch, p, ks in zip(gpu.launches[::2], problems, many, strict=False):
        data = b"".join(word.to_bytes(8, "little") for word in launch.words)
        assert [*struct.unpack_from("<3I", data, params.offset("inline_ks"))] == ks
        sums = struct.unpack_from("<2I", data, params.offset("sum_k"))
        assert sums == (sum(ks), sum(ceil_div(k, 128) for k in ks))
        assert launch.words[params.offset("a") // 8] == p.a.data_ptr()


@pytest.mark.parametrize("ks", [[16, 0, 384], [16, 400], [8, 8, 400], [16, 0, 400.0], [True, 15, 400], [-16, 32, 400]])
def test_depths_that_are_wrong_are_refused_on_a_call_that_was_seen(gpu: FakeGpu, ks: list[Any]) -> None:
    p = ready(sim.random_problem(FRESH, KS, 100, 72))
    call(p, KS)
    with pytest.raises(ValueError, match=r"ks: expected|a: expected shape|d: expected shape"):
        call(p, ks)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("ks", [272, 0.5])
def test_a_first_call_whose_depths_are_no_list_gets_words(gpu: FakeGpu, ks: Any) -> None:
    with pytest.raises(ValueError, match="ks: expected a list"):
        call(ready(sim.random_problem(FRESH, KS, 100, 72)), ks)


def test_depths_that_lie_across_words_are_refused_on_a_call_that_was_seen(gpu: FakeGpu) -> None:
    p = ready(sim.random_problem(FRESH, KS, 100, 72))
    sizes, memory = torch.tensor(KS, dtype=torch.int32), bytearray(4 * len(KS) + 2)
    memory[2:] = sizes.numpy().tobytes()
    for _ in range(2):
        call(p._replace(ks_tensor=sizes))
    across = torch.frombuffer(memory, dtype=torch.int32, offset=2)
    with pytest.raises(ValueError, match=r"^ks_tensor: expected an address that is a multiple of 4 bytes"):
        call(p._replace(ks_tensor=across))
    assert len(gpu.launches) == 4


def test_nothing_is_launched_where_a_side_or_all_depths_are_zero(gpu: FakeGpu) -> None:
    for config in (FRESH, WITH_C, IN_PLACE):
        for ks, m, n in (([], 4, 8), ([16], 0, 8), ([16], 4, 0), ([0, 0], 4, 8)):
            p = sim.random_problem(config, ks, m, n)
            right = torch.zeros_like(p.d) if p.c is None else p.c.clone()
            depths.run_on_gpu(p)
            assert torch.equal(p.d, right)
    assert gpu.launches == []


def test_compile_mode_prepares_and_does_not_launch(gpu: FakeGpu) -> None:
    set_compile_mode(1)
    call(sim.random_problem(FRESH, KS, 100, 72), KS)
    assert gpu.launches == []
    assert len(gpu.compiled) == 2, "the product's kernel, and the kernel that makes its maps"


def test_more_groups_than_parameters_hold_go_through_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    ks = [16] * (MAX_INLINE_KS + 1)
    tensor = depths.depths_of(ks, None, torch.device("cpu"))
    assert isinstance(tensor, Tensor)
    assert tensor.tolist() == ks


@pytest.mark.parametrize("m", [1, 130, 768, 7168])
@pytest.mark.parametrize("output", [{}, {"is_fp32": False}, {"with_c": True}, {"adds_to_d": True}], ids=str)
def test_what_is_chosen_is_reachable(m: int, output: dict[str, Any]) -> None:
    kind = Output(**{"is_fp32": True, **output}, sfb=PER_ROW, work=works.DEPTHS)
    for num_groups, n, k in product((1, 128), (2048, 2176), (0, 16, 8192)):
        assert select(Sizes(m, n, k, num_groups), kind, H200) in reachable_k_grouped()


@pytest.mark.parametrize("output", [{}, {"is_fp32": False}, {"with_c": True}, {"adds_to_d": True}], ids=str)
@pytest.mark.parametrize(("n", "ctas"), [(2048, 2), (1924, 2), (2052, 1), (2176, 1), (7168, 2)])
def test_a_is_shared_where_large_tiles_have_a_neighbour_each(n: int, ctas: int, output: dict[str, Any]) -> None:
    kind = Output(**{"is_fp32": True, **output}, sfb=PER_ROW, work=works.DEPTHS)
    config = select(Sizes(7168, n, 4096, 16), kind, H200)
    always = kind.with_c or not kind.is_fp32
    assert (config.block_m, config.block_n, config.cluster_n) == (256, 128, 2 if always else ctas)


def test_one_column_of_tiles_is_not_taken_by_pairs() -> None:
    kind = Output(is_fp32=True, with_c=True, sfb=PER_ROW, work=works.DEPTHS)
    assert select(Sizes(7168, 128, 4096, 16), kind, H200).cluster_size == 1


@pytest.mark.parametrize(
    ("n", "num_sms", "ctas"),
    [(256, 132, 12), (256, 8, 8), (256, 7, 6), (256, 2, 2), (256, 1, 2), (252, 132, 12), (72, 132, 12), (300, 132, 24)],
)
def test_whole_clusters_are_launched(n: int, num_sms: int, ctas: int) -> None:
    """3 groups have two rows of tiles each: at most one cluster for each pair of tiles, at most one CTA for each SM."""
    p = sim.random_problem(PAIRS, KS, 300, n)
    assert PAIRS.ctas(p.m, p.n, num_sms, p.groups) == ctas


def test_a_cta_loads_its_half_of_a_that_is_shared(gpu: FakeGpu) -> None:
    p = ready(sim.random_problem(PAIRS, KS, 300, 256))
    depths.run_on_gpu(p, PAIRS)
    maps, product = gpu.launches
    assert [each.box[1] for each in maps.maps] == [128, 128]
    of_a = next(each for each in product.maps if each.sizes[0] == p.m)
    assert of_a.box == (128, 1)


def test_large_products_take_large_tiles_and_small_ones_fill_the_gpu() -> None:
    kind = Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW, work=works.DEPTHS)
    assert select(Sizes(7168, 2048, 8192, 4), kind, H200).block_m >= 128
    small = select(Sizes(512, 512, 1024, 1), kind, H200)
    assert (small.block_m, small.cluster_size) == (64, 1)


@pytest.mark.parametrize(("k", "tile"), [(2048, (256, 128)), (1024, (128, 128)), (256, (64, 64))])
def test_the_smaller_the_depth_the_smaller_the_tile_that_is_added_to_d(k: int, tile: tuple[int, int]) -> None:
    kind = Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW, work=works.DEPTHS)
    config = select(Sizes(7168, 2048, k, 16), kind, H200)
    assert (config.block_m, config.block_n) == tile


def test_a_configuration_for_another_product_is_refused(gpu: FakeGpu) -> None:
    p = sim.random_problem(FRESH, KS, 100, 72)
    for other in (WITH_C, tile_config(64, 64, Output(is_fp32=True, sfb=PER_ROW))):
        with pytest.raises(ValueError, match="is for"):
            depths.run_on_gpu(p, other)

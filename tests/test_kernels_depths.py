"""What the host decides of k-grouped products on a GPU, and what it hands over, as far as can be told without one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm.choose.config import Groups, Output, tile_config
from deep_gemm.choose.depths import reachable_k_grouped, select_k_grouped
from deep_gemm.gpus import H200
from deep_gemm.jit import driver
from deep_gemm.kernels import depths as k_grouped
from deep_gemm.kernels import fp8_gemm_k_grouped as kernel_side
from deep_gemm.problem import KGroupedProblem
from deep_gemm.problem.layout import get_mn_major_tma_aligned_tensor
from deep_gemm.settings import set_compile_mode
from deep_gemm.sim import depths as sim
from deep_gemm.sim.arguments import encode

FRESH, WITH_C, IN_PLACE = (config for config in reachable_k_grouped() if (config.block_m, config.block_n) == (128, 128))
PAIRS, *_ = (config for config in reachable_k_grouped() if config.cluster_size == 2)
KS = [16, 0, 400]
MAP_WORDS = driver.TENSOR_MAP_BYTES // 8


class Gpu:
    """Takes launches instead of a driver: the words that each kernel's parameters held then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, int, int, bool, list[int]]] = []
        gpu = self

        class Launch:
            def __init__(self, kernel: str, params: Any, grid: int, threads: int, cluster: int, *, is_dependent: bool):
                self.of, self.params = (kernel, grid, cluster, is_dependent), params

            def __call__(self, stream: int) -> None:
                gpu.launches.append((*self.of, list(self.params.words)))

        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # what CPU tensors say they are on
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
        monkeypatch.setattr(k_grouped, "gpu_of", lambda _: H200)
        monkeypatch.setattr(k_grouped, "_plans", {})
        monkeypatch.setattr(driver, "encode", lambda _, address: address.to_bytes(8, "little") + bytes(120))
        monkeypatch.setattr(driver, "address_is_first_word", lambda: True)
        monkeypatch.setattr(driver, "Launch", Launch)
        monkeypatch.setattr(kernel_side, "loaded", lambda config, _: "product")
        monkeypatch.setattr(kernel_side, "loaded_maps", lambda _: "maps")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def ready(p: KGroupedProblem) -> KGroupedProblem:
    return p._replace(sfa=get_mn_major_tma_aligned_tensor(p.sfa), sfb=get_mn_major_tma_aligned_tensor(p.sfb))


@pytest.mark.parametrize("on_gpu_alone", [False, True])
@pytest.mark.parametrize("config", [FRESH, WITH_C, IN_PLACE, PAIRS], ids=lambda config: config.name)
def test_parameters_are_what_the_simulator_gives_the_same_kernels(gpu: Gpu, config: Any, on_gpu_alone: bool) -> None:
    p = ready(sim.random_problem(config, KS, 100, 72, on_gpu_alone=on_gpu_alone))
    k_grouped.run(p, config)
    (*of_maps, _, map_words), (*of_product, words) = gpu.launches
    assert of_maps == ["maps", 1, 1]
    assert of_product == ["product", 3 * config.cluster_n, config.cluster_n, True]
    addresses = {name: x.data_ptr() for name, x in p._asdict().items() if isinstance(x, Tensor)}
    addresses |= {"ks": addresses.get("ks_tensor", 0), "k_groups": words[88]}
    inline = kernel_side.depths(p)[1]
    expected = encode(sim._map_params(config, p, inline), addresses)[2 * driver.TENSOR_MAP_BYTES :]
    assert as_bytes(map_words[2 * MAP_WORDS :])[: len(expected)].rstrip(b"\0") == expected.rstrip(b"\0")
    expected = encode(sim._params(config, p), addresses)[5 * driver.TENSOR_MAP_BYTES :]
    assert as_bytes(words[5 * MAP_WORDS :])[: len(expected)] == expected
    for place, name in ((2, "sfa"), (3, "d"), (4, "sfb")):
        assert words[place * MAP_WORDS] == addresses[name]


def as_bytes(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)


def test_a_plan_serves_other_depths_and_addresses(gpu: Gpu) -> None:
    for ks in (KS, [256, 128, 16], [0, 0, 1024]):
        p = ready(sim.random_problem(FRESH, ks, 100, 72))
        k_grouped.run(p, FRESH)
        *_, words = gpu.launches[-1]
        assert [words[place * MAP_WORDS] for place in (2, 3, 4)] == [x.data_ptr() for x in (p.sfa, p.d, p.sfb)]
    assert len(k_grouped._plans) == 1


def test_maps_are_made_in_memory_of_each_calls_own(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    empty = torch.empty

    def kept_empty(*args: Any, **kwargs: Any) -> Tensor:
        kept.append(empty(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(torch, "empty", kept_empty)
    p = ready(sim.random_problem(FRESH, KS, 100, 72))
    for _ in range(2):
        k_grouped.run(p, FRESH)
    rooms = [words[88] for kernel, *_, words in gpu.launches if kernel == "product"]
    assert len(set(rooms)) == 2
    assert all(len(x) == kernel_side.k_groups_bytes(p) for x in kept if x.dtype == torch.uint8)


def test_nothing_is_launched_where_a_side_or_all_depths_are_zero(gpu: Gpu) -> None:
    for config in (FRESH, WITH_C, IN_PLACE):
        for ks, m, n in (([], 4, 8), ([16], 0, 8), ([16], 4, 0), ([0, 0], 4, 8)):
            p = sim.random_problem(config, ks, m, n)
            right = torch.zeros_like(p.d) if p.c is None else p.c.clone()
            k_grouped.run(p)
            assert torch.equal(p.d, right)
    assert gpu.launches == []


def test_compile_mode_prepares_and_does_not_launch(gpu: Gpu) -> None:
    set_compile_mode(1)
    try:
        k_grouped.run(sim.random_problem(FRESH, KS, 100, 72))
    finally:
        set_compile_mode(0)
    assert gpu.launches == []
    assert len(k_grouped._plans) == 1


def test_more_groups_than_parameters_hold_go_through_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    ks = [16] * (kernel_side.MAX_INLINE_KS + 1)
    p = sim.random_problem(FRESH, ks, 4, 8)
    tensor, inline = kernel_side.depths(p)
    assert inline == b""
    assert tensor is not None
    assert tensor.tolist() == ks


@pytest.mark.parametrize("m", [1, 130, 768, 7168])
@pytest.mark.parametrize("output", [{}, {"with_c": True}, {"adds_to_d": True}], ids=str)
def test_what_is_chosen_is_reachable(m: int, output: dict[str, bool]) -> None:
    kind = Output(True, sfb_is_per_row=True, groups=Groups.DEPTHS, **output)
    for num_groups, n, k in product((1, 128), (2048, 2176), (0, 16, 8192)):
        assert select_k_grouped(num_groups, m, n, k, kind, H200) in reachable_k_grouped()


@pytest.mark.parametrize("output", [{}, {"with_c": True}, {"adds_to_d": True}], ids=str)
@pytest.mark.parametrize(("n", "ctas"), [(2048, 2), (1924, 2), (2052, 1), (2176, 1), (7168, 2)])
def test_a_is_shared_where_large_tiles_have_a_neighbour_each(n: int, ctas: int, output: dict[str, bool]) -> None:
    kind = Output(True, sfb_is_per_row=True, groups=Groups.DEPTHS, **output)
    config = select_k_grouped(16, 7168, n, 4096, kind, H200)
    assert (config.block_m, config.block_n, config.cluster_n) == (256, 128, ctas)


@pytest.mark.parametrize(
    ("n", "num_sms", "ctas"),
    [
        (256, 132, 12),
        (256, 8, 8),
        (256, 7, 6),
        (256, 2, 2),
        (256, 1, 2),
        (252, 132, 12),
        (72, 132, 12),
        (300, 132, 24),
    ],
)
def test_whole_clusters_are_launched(n: int, num_sms: int, ctas: int) -> None:
    """For 3 groups with two rows of tiles each: no more clusters than pairs of tiles, no more CTAs than SMs."""
    p = sim.random_problem(PAIRS, KS, 300, n)
    assert kernel_side.grid(PAIRS, p, num_sms) == ctas


def test_a_cta_loads_its_half_of_a_that_is_shared() -> None:
    p = sim.random_problem(PAIRS, KS, 300, 256)
    assert [map_.box[1] for map_ in kernel_side.templates(PAIRS, p)] == [128, 128]
    assert kernel_side.tensor_maps(PAIRS, p)["sfa"].box == (128, 1)


def test_large_products_take_large_tiles_and_small_ones_fill_the_gpu() -> None:
    kind = Output(True, adds_to_d=True, sfb_is_per_row=True, groups=Groups.DEPTHS)
    assert select_k_grouped(4, 7168, 2048, 8192, kind, H200).block_m >= 128
    small = select_k_grouped(1, 512, 512, 1024, kind, H200)
    assert (small.block_m, small.cluster_size) == (64, 1)


@pytest.mark.parametrize(("k", "tile"), [(2048, (256, 128)), (1024, (128, 128)), (256, (64, 64))])
def test_the_smaller_the_depth_the_smaller_the_tile_that_is_added_to_d(k: int, tile: tuple[int, int]) -> None:
    kind = Output(True, adds_to_d=True, sfb_is_per_row=True, groups=Groups.DEPTHS)
    config = select_k_grouped(16, 7168, 2048, k, kind, H200)
    assert (config.block_m, config.block_n) == tile


def test_a_configuration_for_another_product_is_refused(gpu: Gpu) -> None:
    p = sim.random_problem(FRESH, KS, 100, 72)
    for other in (WITH_C, tile_config(64, 64, Output(True, sfb_is_per_row=True))):
        with pytest.raises(ValueError, match="is for"):
            k_grouped.run(p, other)

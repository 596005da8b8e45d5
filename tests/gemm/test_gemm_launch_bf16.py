"""BF16 products on a GPU without a driver: compiled kernels, launches, and the calls that each record serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, OnGpu, on_gpu, recorded_alike
from torch import Tensor

import deep_gemm
from deep_gemm import set_compile_mode
from deep_gemm.core import replay
from deep_gemm.gemm import launch
from deep_gemm.gemm.api.bf16_grouped import ACTIVATED
from deep_gemm.gemm.ask.bf16 import bf16_problem
from deep_gemm.gemm.choose import bf16 as choose_bf16
from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.product import run
from deep_gemm.gemm.sum_slices import SlicesConfig

M, N, K = 128, 64, 192
K_COUNTED_PARAMS = params_of(bf16_config(64, 64, Output(work=works.COUNTED), Majors(True, True)))


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return on_gpu(torch.zeros(shape, dtype=dtype))


class OnGpuAlone(OnGpu):
    """The host cannot read it without waiting."""

    is_cpu = False


@pytest.fixture
def gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(replay, "KNOWN", {*replay.KNOWN, OnGpuAlone})
    return gpu


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).as_subclass(OnGpuAlone)


def along_k(ks: list[int] | None, layout: Tensor | None = None, d: Tensor | None = None) -> None:
    d = numbers(3, M, N, dtype=torch.float32) if d is None else d
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(numbers(K, M), numbers(K, N), d, ks, layout, d)


def of_rows(ends: bool) -> None:
    layout = int32(70, 100) if ends else int32(*[0] * 70, *[1] * 58)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(numbers(M, K), numbers(2, N, K), numbers(M, N), layout, "nk", ends)


def of_counts() -> None:
    a, b, d = numbers(2, M, K), numbers(2, N, K), numbers(2, M, N)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, int32(3, 7), 4)


def of_heads() -> None:
    deep_gemm.einsum("bhr,hdr->bhd", numbers(M, 2, K), numbers(2, N, K), numbers(M, 2, N))


def of_sum(b: Tensor) -> None:
    deep_gemm.einsum("bmk,bnk->mn", numbers(5, M, K), b, numbers(M, N))


CALLS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "dense": (lambda: deep_gemm.bf16_gemm_nt(numbers(M, K), numbers(N, K), numbers(M, N)), ["bf16_gemm_dense"]),
    "rows by ids": (lambda: of_rows(False), ["bf16_gemm_m_grouped_contiguous"]),
    "rows by ends": (lambda: of_rows(True), ["bf16_gemm_m_grouped_contiguous"]),
    "counted rows": (of_counts, ["bf16_gemm_m_grouped_masked"]),
    "along k": (lambda: along_k([64, 0, 128]), ["bf16_gemm_k_grouped"]),
    "along k, edges within blocks": (lambda: along_k([3, 0, 100]), ["bf16_gemm_k_grouped"]),
    "along k, counted": (lambda: along_k(None, int32(64, 0, 128)), ["bf16_gemm_k_grouped"]),
    "heads": (of_heads, ["bf16_gemm_heads"]),
    "sum": (lambda: of_sum(numbers(5, N, K)), ["bf16_gemm_sum", "sum_slices"]),
    "sum, one operand for all": (lambda: of_sum(numbers(1, N, K).expand(5, N, K)), ["bf16_gemm_sum", "sum_slices"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_launches_its_kernels(gpu: FakeGpu, call: str) -> None:
    ask, kernels = CALLS[call]
    ask()
    ask()
    assert [launch.kernel for launch in gpu.launches] == 2 * kernels


@pytest.mark.parametrize("call", CALLS)
def test_compile_mode_compiles_all_that_a_call_needs_and_computes_nothing(gpu: FakeGpu, call: str) -> None:
    """Both kernels of a sum too."""
    ask, kernels = CALLS[call]
    set_compile_mode(1)
    ask()
    assert len(gpu.compiled) == len(kernels)
    assert any(isinstance(config, SlicesConfig) for config in gpu.compiled) == ("sum_slices" in kernels)
    assert gpu.launches == []
    assert gpu.records == 0
    set_compile_mode(0)
    ask()
    assert len(gpu.compiled) == len(kernels)
    assert [launch.kernel for launch in gpu.launches] == kernels


@pytest.mark.parametrize("cluster_k", [1, 3])
def test_a_configuration_with_more_slices_than_k_has_blocks_is_refused(gpu: FakeGpu, cluster_k: int) -> None:
    """The sums of an empty slice would be whatever the accumulators held."""
    config = bf16_config(64, 64, Output(), cluster_k=cluster_k, slices=3)
    for k in (64, 128, 136):
        p = bf16_problem(numbers(M, k), numbers(N, k), numbers(M, N), None, "nt")
        if k > 128:
            launch.run(p, config)
            continue
        with pytest.raises(ValueError, match="cuts k into 3 slices, more than there are blocks of 64"):
            launch.run(p, config)
    assert len(gpu.launches) == 1


def test_one_record_serves_all_depths_that_the_gpu_counts(gpu: FakeGpu) -> None:
    d = numbers(3, M, N, dtype=torch.float32)
    for ks in ((64, 0, 128), (1, 2, 3), (0, 0, 192), (5, 5, 5)):
        layout = int32(*ks)
        along_k(None, layout, d)
        assert gpu.last.words[K_COUNTED_PARAMS.offset("depths.counts") // 8] == layout.data_ptr()
    assert gpu.records == 1
    assert len({launch.grid for launch in gpu.launches}) == 1
    assert len({launch.words[K_COUNTED_PARAMS.offset("depths.groups") // 8] for launch in gpu.launches}) == 1


def test_depths_of_the_host_are_those_of_each_call(gpu: FakeGpu) -> None:
    d = numbers(3, M, N, dtype=torch.float32)
    at = K_COUNTED_PARAMS.offset("depths.inline_counts") // 8
    for ks in ([3, 0, 100], [100, 3, 0], [3, 0, 100]):
        along_k(ks, None, d)
        assert gpu.last.words[K_COUNTED_PARAMS.offset("depths.counts") // 8] == 0
        assert gpu.last.words[at : at + 2] == (ks[0] | ks[1] << 32, ks[2])


def test_a_layout_that_overlaps_d_is_refused(gpu: FakeGpu) -> None:
    d = numbers(3, M, N, dtype=torch.float32)
    along_k(None, int32(64, 0, 128), d)
    inside = d.view(-1)[:3].view(torch.int32).as_subclass(OnGpuAlone)
    with pytest.raises(ValueError, match=r"^d: .*grouped_layout"):
        along_k(None, inside, d)
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("extra", [0, 32])
@pytest.mark.parametrize("tile", [None, (64, 64), (256, 64)])
@pytest.mark.parametrize("output", [Output(), Output(with_c=True), Output(is_fp32=True, adds_to_d=True)], ids=str)
@pytest.mark.parametrize("major", ["nt", "nn"])
def test_a_record_of_another_m_launches_what_a_call_without_any_does(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, major: str, output: Output, tile: tuple[int, int] | None, extra: int
) -> None:
    if tile is not None:
        monkeypatch.setattr(choose_bf16, "choose", lambda _, of, majors, *__: bf16_config(*tile, of, majors))
    dtype = torch.float32 if output.is_fp32 else torch.bfloat16
    b = numbers(N, K) if major == "nt" else numbers(K, N)
    product: Any = deep_gemm.bf16_gemm_nt if major == "nt" else deep_gemm.bf16_gemm_nn
    calls = []
    for m in (300, 2, 303, 256, 1000, 301, 1, 5, 1001):
        a, d = numbers(m, K + extra)[:, :K], numbers(m, N + extra, dtype=dtype)[:, :N]
        c = d if output.adds_to_d else numbers(m, N + 2 * extra, dtype=dtype)[:, :N] if output.with_c else None
        calls.append(partial(product, a, b, d, c))
    assert recorded_alike(gpu, calls) < len(calls)


def test_rows_that_do_not_match_are_refused_where_a_record_serves_others(gpu: FakeGpu) -> None:
    b = numbers(N, K)
    for m in (M, M + 1):
        deep_gemm.bf16_gemm_nt(numbers(m, K), b, numbers(m, N))
    with pytest.raises(ValueError, match="d: expected shape"):
        deep_gemm.bf16_gemm_nt(numbers(M + 2, K), b, numbers(M + 3, N))
    with pytest.raises(ValueError, match="d: expected memory that does not overlap a"):
        whole = numbers(2 * (M + 2), K)
        deep_gemm.bf16_gemm_nt(whole[: M + 2], b, whole.view(-1)[K : K + (M + 2) * N].view(M + 2, N))
    assert len(gpu.launches) == 2


def test_the_first_product_of_experts_activates_as_torch_does() -> None:
    """Rows of D without a group keep their values."""
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(5, 64, generator=g).bfloat16(), torch.randn(2, 48, 64, generator=g).bfloat16()
    ends, d = torch.tensor([1, 4], dtype=torch.int32), torch.full((5, 24), 7.0).bfloat16()
    run(ACTIVATED, a, b, d, ends, (True, False, 0.5))
    gate, up = torch.stack([a[i] @ b[group].T for i, group in enumerate((0, 1, 1, 1))]).float().chunk(2, 1)
    y = gate.clamp_max(0.5) * gate.clamp_max(0.5).double().sigmoid().float() * up.clamp(-0.5, 0.5)
    assert torch.equal(d[:4], y.bfloat16())
    assert (d[4] == 7).all()
    with pytest.raises(ValueError, match=r"d: expected shape \(m, n\) = \(5, 24\), got \(5, 48\)"):
        run(ACTIVATED, a, b, torch.empty(5, 48).bfloat16(), ends, (True, False, None))

"""Calls recognized by torch's own comparison: it sees all that a signature has, and calls are found without it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu

import deep_gemm
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core import seen
from deep_gemm.core.call import never
from deep_gemm.gemm.plan import PLANS


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    seen.torch_compares.cache_clear()
    yield
    seen.torch_compares.cache_clear()


def operands(m: int = 64, n: int = 256, k: int = 512) -> tuple[Any, Any, Any]:
    a, b = deep_gemm.per_token_cast_to_fp8(torch.ones(m, k)), deep_gemm.per_block_cast_to_fp8(torch.ones(n, k))
    a = on_gpu(a[0]), get_mn_major_tma_aligned_tensor(a[1])
    return a, b, on_gpu(torch.zeros(m, n, dtype=torch.bfloat16))


def test_this_torch_compares() -> None:
    assert seen.torch_compares()


def test_the_second_call_is_recognized_and_of_other_rows_the_third(gpu: FakeGpu) -> None:
    for m, recognized in ((64, 1), (64, 1), (72, 1), (72, 2), (72, 2), (64, 2)):
        deep_gemm.fp8_gemm_nt(*operands(m))
        assert len(PLANS.seen) == recognized
    assert (len(gpu.launches), gpu.plans) == (6, 1)


def test_one_tensor_twice_takes_no_place_of_others() -> None:
    """A matrix times its own transpose, which is found by its signature."""
    calls, x, y = seen.Seen(), torch.zeros(4, 8), torch.zeros(4, 8)
    calls.keep((), (x, y), "apart", never)
    for _ in range(seen.MAX_ALIKE):
        calls.keep((), (x, x), "twice", never)
    assert [plan for check, plan in calls[()] if check(x, y)] == ["apart"]


@pytest.mark.parametrize("works", [False, True])
def test_what_differs_in_anything_is_another_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr(seen, "torch_compares", lambda: works)
    a, b, d = operands()
    for _ in range(3):
        deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(PLANS.seen) == works
    for wrong, told in (
        ((a, (b[0], b[1].double()), d), "sfb: expected dtype"),
        (((a[0], a[1].double()), b, d), "sfa: expected dtype"),
        ((a, (b[0], b[1][:, :3]), d), "sfb: expected shape"),
        (((a[0], a[1][:63]), b, d), "sfa: expected shape"),
        ((a, b, d.half()), "d: expected dtype"),
        ((a, b, d[:, ::2]), "d: expected shape"),
        ((a, (b[0].view(torch.int8), b[1]), d), "b: expected shape"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=told):
            deep_gemm.fp8_gemm_nt(*wrong)


def learned(x: Any) -> Any:
    """As if it was computed from something that requires a gradient."""
    return x.detach().clone().requires_grad_().clone()


@pytest.mark.parametrize("works", [False, True])
def test_a_warm_call_refuses_what_would_cut_a_gradient(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """Whether like calls came before in grad mode or without it, and with weights that are Parameters."""
    monkeypatch.setattr(seen, "torch_compares", lambda: works)
    a, (values, scales), d = operands()
    c = torch.zeros_like(d)
    weights = (values, scales), (torch.nn.Parameter(values), torch.nn.Parameter(scales))
    cut: list[tuple[Any, Any, Any]] = [
        ((learned(a[0]), a[1]), weights[0], None),
        ((a[0], learned(a[1])), weights[0], None),
        (a, (learned(values), scales), None),
        (a, (values, learned(scales)), None),
        (a, weights[0], c.clone().requires_grad_()),
    ]
    names = "a", "sfa", "b", "sfb", "c"
    outputs = on_gpu(d.clone().requires_grad_()), on_gpu(learned(d))
    for _ in range(4):
        for b in weights:
            deep_gemm.fp8_gemm_nt(a, b, d)
            deep_gemm.fp8_gemm_nt(a, b, d, c)
        with torch.no_grad():
            for call in cut:
                deep_gemm.fp8_gemm_nt(call[0], call[1], d, call[2])
            for out in outputs:
                deep_gemm.fp8_gemm_nt(a, weights[0], out)
                deep_gemm.fp8_gemm_nt(a, weights[0], out, out)
        launched = len(gpu.launches)
        for out in outputs:
            for added in (None, out):
                with pytest.raises(ValueError, match=r"^d: expected a tensor without a gradient"):
                    deep_gemm.fp8_gemm_nt(a, weights[0], out, added)
        for name, call in zip(names, cut, strict=True):
            with pytest.raises(ValueError, match=rf"^{name}: expected a tensor without a gradient"):
                deep_gemm.fp8_gemm_nt(call[0], call[1], d, call[2])
        assert len(gpu.launches) == launched


def test_a_warm_product_of_groups_along_k_refuses_it_too(gpu: FakeGpu) -> None:
    ks = [128, 32]
    a, b = (deep_gemm.k_grouped_cast_to_fp8(torch.ones(8, 160), ks, mn_major=True) for _ in range(2))
    a, d = (on_gpu(a[0]), a[1]), on_gpu(torch.zeros(2, 8, 8))
    out = on_gpu(torch.zeros(2, 8, 8).requires_grad_())
    for _ in range(4):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks)
        launched = len(gpu.launches)
        with pytest.raises(ValueError, match=r"^sfb: expected a tensor without a gradient"):
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, (b[0], learned(b[1])), d, ks)
        with torch.no_grad():
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, ks)
        launched += 2
        with pytest.raises(ValueError, match=r"^d: expected a tensor without a gradient"):
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, ks)
        assert len(gpu.launches) == launched


@pytest.mark.parametrize("broken", ["absent", "blind", "strict"])
def test_a_torch_that_compares_otherwise_is_not_asked(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    answers = {"blind": True, "strict": False}

    def check_of(tensors: Any, free: Any = ()) -> Any:
        if broken == "absent":
            raise ImportError
        return lambda *_: answers[broken]

    monkeypatch.setattr(seen, "check_of", check_of)
    assert not seen.torch_compares()
    for _ in range(3):
        deep_gemm.fp8_gemm_nt(*operands())
    assert (len(gpu.launches), gpu.plans, len(PLANS.seen)) == (3, 1, 0)


def test_what_is_kept_is_bounded() -> None:
    kept = seen.Seen()
    for size in range(1, seen.MAX_ALIKE + 3):
        kept.keep(("hint",), (torch.zeros(size),), size, any)
    assert [plan for _, plan in kept[("hint",)]] == list(range(seen.MAX_ALIKE + 2, 2, -1))
    for hint in range(seen.MAX_CALLS + 1):
        kept.keep((hint,), (torch.zeros(1),), hint, any)
    assert len(kept) == seen.MAX_CALLS
    assert ("hint",) not in kept

"""Situations that users of similar kernels met, and that no other test covers: see docs/incidents.md."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import deep_gemm
from deep_gemm import calc_diff
from deep_gemm.core.gpu import gpu_of
from deep_gemm.gemm.kinds.output import Output
from lab.bench import tune
from lab.bench.cases import Case
from lab.bench.timing import L2Flush

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""Allowed `calc_diff` from the product of the numbers before the cast. Most of this difference is the casts' error."""


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(512, 1024, 147456), (1538, 256, 2048)])
def test_weight_gradients_of_great_depth_and_of_an_odd_number_of_rows(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, y, d = random(m, k), random(n, k), torch.full((m, n), 32.0, device="cuda")
    a, b = (deep_gemm.per_token_cast_to_fp8(each, mn_major=True) for each in (x, y))
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, d)
    assert calc_diff(d - 32, x.float() @ y.float().t()) < TOLERANCE


@pytest.mark.parametrize("m", [1, 16, 32])
def test_few_rows_with_scales_by_row_on_both_sides(m: int) -> None:
    x, y = random(m, 4096), random(2048, 4096)
    a, b = (deep_gemm.per_token_cast_to_fp8(each, mn_major=True) for each in (x, y))
    for dtype in (torch.bfloat16, torch.float32):
        d = torch.full((m, 2048), torch.nan, dtype=dtype, device="cuda")
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
        assert calc_diff(d, x.float() @ y.float().t()) < TOLERANCE


@pytest.mark.parametrize("shape", [(32, 8192, 8192), (64, 16, 8192)])
def test_no_absurd_configuration(shape: tuple[int, int, int]) -> None:
    contest = tune.Contest.of(Case("dense", shape), Output(), gpu_of(torch.cuda.current_device()))
    judgement = tune.judge(contest, L2Flush())
    assert judgement.ratio < 1.5, f"{judgement.chosen.config} beside {judgement.best.config}: {judgement.ratio:.2f}"


def test_the_same_layer_again_and_again() -> None:
    """Casts, rows of experts and sums give equal bits each time: no sum may depend on the order of arrival."""
    x, ids = random(700, 512), torch.randint(-1, 16, (700, 6), generator=torch.Generator().manual_seed(0)).cuda()
    weights = torch.rand(700, 6, generator=torch.Generator().manual_seed(1)).cuda()
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(random(16, *shape)) for shape in ((1024, 512), (512, 512)))
    first, again = torch.empty_like(x), torch.empty_like(x)
    deep_gemm.experts(x, ids, weights, w1, w2, out=first)
    for _ in range(50):
        deep_gemm.experts(x, ids, weights, w1, w2, out=again.fill_(torch.nan))
        assert torch.equal(again, first)


WHERE_MEMORY_BEGINS = """
import torch, deep_gemm
from cuda.bindings import driver as cu

torch.empty(1, device="cuda")


def checked(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


place = cu.CUmemLocation()
place.type, place.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
kind = cu.CUmemAllocationProp()
kind.type, kind.location = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, place
access = cu.CUmemAccessDesc()
access.location, access.flags = place, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
size = 32 << 20


def at_the_beginning(x):
    # In the middle of addresses of which only the second half has memory.
    start = int(checked(cu.cuMemAddressReserve(2 * size, 0, 0, 0))) + size
    checked(cu.cuMemMap(start, size, 0, checked(cu.cuMemCreate(size, kind, 0)), 0))
    checked(cu.cuMemSetAccess(start, size, [access], 1))
    told = {"shape": (x.numel() * x.element_size(),), "typestr": "|u1", "data": (start, False), "version": 3}
    memory = torch.as_tensor(type("Told", (), {"__cuda_array_interface__": told})(), device="cuda")
    assert memory.data_ptr() == start
    return memory.view(x.dtype).view(x.shape).copy_(x)


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


rows, groups, n, k = 300, 3, 256, 512
x, w = random(rows, k), random(groups, n, k)
a, b = deep_gemm.per_token_cast_to_fp8(x, mn_major=True), deep_gemm.per_block_cast_to_fp8(w)
ids = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(rows // groups)
counts = torch.tensor([7, 100, 33], dtype=torch.int32, device="cuda")
form = {form!r}
d = at_the_beginning(torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16))
if form == "contiguous":
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((at_the_beginning(a[0]), a[1]), b, d, ids)
elif form == "masked":
    a = a[0].view(groups, 100, k), a[1].t().contiguous().t().view(groups, 100, -1)
    a = at_the_beginning(a[0]), deep_gemm.get_mn_major_tma_aligned_tensor(a[1].contiguous())
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d.view(groups, 100, n), counts, 40)
elif form == "contiguous of BF16":
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(at_the_beginning(x), w, d, ids)
elif form == "masked of BF16":
    x = at_the_beginning(x.view(groups, 100, k))
    deep_gemm.m_grouped_bf16_gemm_nt_masked(x, w, d.view(groups, 100, n), counts, 40)
else:
    x, y = at_the_beginning(x), at_the_beginning(random(rows, n))
    sums = at_the_beginning(torch.zeros(groups, k, n, device="cuda"))
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x, y, sums, None, counts)
torch.cuda.synchronize()
print("nothing before was touched")
"""


@pytest.mark.parametrize("form", ["contiguous", "masked", "contiguous of BF16", "masked of BF16", "along k of BF16"])
def test_operands_and_results_may_lie_where_memory_begins(form: str) -> None:
    """Some tensor maps let a box begin before the tensor. The kernel must not touch memory there."""
    program = WHERE_MEMORY_BEGINS.replace("{form!r}", repr(form))
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=120, check=False)
    assert "nothing before was touched" in done.stdout, done.stderr[-2000:]


def test_groups_along_k_with_an_odd_number_of_tiles() -> None:
    """Each group has 121 tiles of 128x128, so a cluster of two that takes tiles in order would straddle two groups."""
    ks, m = [384, 256], 1408
    a, b = random(sum(ks), m), random(m, sum(ks)).t().contiguous()
    groups = zip(torch.split(a, ks), torch.split(b, ks), strict=True)
    right = torch.stack([x.float().t() @ y.float() for x, y in groups])
    layout = torch.tensor(ks, dtype=torch.int32, device="cuda")
    for depths in (ks, None):
        d = torch.full((2, m, m), 32.0, device="cuda")
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, depths, layout, d)
        assert calc_diff(d - 32, right) < 1e-6


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_an_odd_number_of_blocks_along_k(m: int) -> None:
    """A row of B has 9 scales: the down projection of DeepSeek-V3 on one of 16 ranks."""
    x, y = random(m, 1152), random(7168, 1152)
    d = torch.full((m, 7168), torch.nan, dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(y), d)
    assert calc_diff(d, x.float() @ y.float().t()) < TOLERANCE

"""The host's decisions for rows that are stored at addresses, checked without a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu
from torch.utils.flop_counter import FlopCounterMode

from deep_gemm.across import rows_to_addresses
from deep_gemm.across.rows_to_addresses import OUTPUT, OUTPUT_BY_64
from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import Rows
from deep_gemm.core.check.recipes import Scales
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import launch
from lab.configs import reachable_grouped


def test_a_record_finds_the_addresses_of_each_call(gpu: FakeGpu) -> None:
    values, scales = per_token_cast_to_fp8(torch.zeros(40, 512), mn_major=True)
    w = per_block_cast_to_fp8(torch.zeros(3, 256, 512))
    ends = torch.tensor([20, 20, 40], dtype=torch.int32)
    tables = [on_gpu(torch.zeros(40, dtype=torch.int64)) for _ in range(2)]
    for table in (*tables, tables[0]):
        rows_to_addresses.run((on_gpu(values), scales), w, ends, table)
    (config,) = gpu.compiled
    assert config in reachable_grouped()
    assert len(gpu.launches) == 3 and gpu.records == 1
    found = [[table.data_ptr() in launch.words for table in tables] for launch in gpu.launches]
    assert found == [[True, False], [False, True], [True, False]]


@pytest.mark.parametrize("columns", [128, 64])
def test_each_granularity_of_scales_has_its_code(gpu: FakeGpu, columns: int) -> None:
    a = per_token_cast_to_fp8(torch.zeros(40, 512), gran_k=columns, mn_major=True)
    w, ends = per_block_cast_to_fp8(torch.zeros(3, 256, 512)), torch.zeros(3, dtype=torch.int32)
    addresses = torch.zeros(40, dtype=torch.int64)
    launch.run(rows_to_addresses.problem(a, w, addresses, ends, of_a=Scales(1, columns)))
    (config,) = gpu.compiled
    assert fp8_gemm.why_unfit(config, 512, OUTPUT if columns == 128 else OUTPUT_BY_64) is None
    assert fp8_gemm.why_unfit(config, 512, OUTPUT_BY_64 if columns == 128 else OUTPUT) is not None
    assert config in reachable_grouped()


def test_bf16_has_its_code_and_a_record_too(gpu: FakeGpu) -> None:
    a, w = on_gpu(torch.zeros(40, 512).bfloat16()), on_gpu(torch.zeros(3, 256, 512).bfloat16())
    ends = torch.tensor([20, 20, 40], dtype=torch.int32)
    tables = [on_gpu(torch.zeros(40, dtype=torch.int64)) for _ in range(2)]
    for table in (*tables, tables[0]):
        rows_to_addresses.run((a, None), (w, None), ends, table)
    (config,) = gpu.compiled
    assert config in fp8_gemm.BF16_GEMM.configs() and config.epilogue.has_row_addresses
    found = [[table.data_ptr() in launch.words for table in tables] for launch in gpu.launches]
    assert (found, gpu.records) == ([[True, False], [False, True], [True, False]], 1)


def test_tensors_of_the_cpu_and_modes_of_torch_are_refused() -> None:
    x, w, ends = torch.zeros(4, 128), torch.zeros(1, 128, 128), torch.zeros(1, dtype=torch.int32)
    both: list[tuple[Rows, Rows]] = [
        (per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)),
        ((x.bfloat16(), None), (w.bfloat16(), None)),
    ]
    for a, b in both:
        for mode in (nullcontext(), FlopCounterMode(display=False)):
            with mode, pytest.raises(NotImplementedError, match="rows to addresses: expected tensors on a Hopper GPU"):
                rows_to_addresses.run(a, b, ends, torch.zeros(4, dtype=torch.int64))

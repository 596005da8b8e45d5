"""Which configuration runs a product: always a legal one, the same each time, with reasons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a plain checkout too

from deep_gemm.choose import dense as heuristics
from deep_gemm.choose.config import GemmConfig, Output
from deep_gemm.choose.config_decode import DecodeConfig
from deep_gemm.choose.dense import reachable, reachable_decode, select
from deep_gemm.choose.explain import candidates, explain
from deep_gemm.choose.tiles import tiles_for
from deep_gemm.gpus import GPUS, H20, H200, Gpu
from deep_gemm.problem.layout import ceil_div

OUTPUTS = [
    Output(),
    Output(with_c=True),
    Output(is_fp32=True),
    Output(is_fp32=True, with_c=True),
    Output(is_fp32=True, adds_to_d=True),
    Output(sfb_is_per_row=True),
    Output(is_fp32=True, adds_to_d=True, sfb_is_per_row=True),
]
MAX_KERNELS = 12
WEIGHTS = [(2112, 7168), (4096, 7168), (7168, 2048), (576, 7168), (24576, 1536)]
REACHABLE = {*reachable(), *reachable_decode()}

rows = st.one_of(st.integers(1, 8192), st.sampled_from([1, 63, 64, 65, 127, 128, 129, 8191, 8192]))
columns = st.integers(1, 8192).map(lambda i: 4 * i)
depths = st.integers(1, 1024).map(lambda i: 16 * i)
gpus = st.builds(lambda gpu, num_sms: replace(gpu, num_sms=num_sms), st.sampled_from(GPUS), st.integers(2, 132))


@pytest.fixture(scope="module", autouse=True)
def _no_tables() -> Iterator[None]:
    """What is tested here is the choice by cost; tables are test_choose_table's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heuristics, "tuned_tiles", dict)
        yield


@settings(max_examples=300)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), st.one_of(st.sampled_from(GPUS), gpus))
def test_the_choice_is_legal_and_reachable(m: int, n: int, k: int, output: Output, gpu: Gpu) -> None:
    config = select(m, n, k, output, gpu)
    assert config.why_illegal() is None
    assert config in REACHABLE
    assert config.output_is_fp32 == output.is_fp32
    takes_c = config.with_c if isinstance(config, DecodeConfig) else config.with_c or config.adds_to_d
    assert takes_c == (output.with_c or output.adds_to_d)
    assert config.cluster_k == 1 or k > 128 * config.cluster_k, "more CTAs than blocks of k"
    if isinstance(config, GemmConfig):
        assert config.sfb_is_per_row == output.sfb_is_per_row
        assert config.has_tail or ceil_div(k, 128) % config.run_k_blocks == 0, "blocks of k for which there is no code"
        assert config.cluster_size <= gpu.num_sms
        assert m > config.block_m or config.cluster_m == 1, "a cluster along m for a single row of tiles"
        assert n > config.block_n or config.cluster_n == 1, "a cluster along n for a single column of tiles"


@settings(max_examples=100)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), st.sampled_from(GPUS))
def test_k_is_not_split_where_bits_must_not_depend_on_m(m: int, n: int, k: int, output: Output, gpu: Gpu) -> None:
    assert select(m, n, k, output, gpu, split_k=False).cluster_k == 1


@settings(max_examples=100)
@given(rows, columns, depths, st.sampled_from(OUTPUTS))
def test_some_of_the_sms_are_given_a_kernel_whose_grid_follows(m: int, n: int, k: int, output: Output) -> None:
    config = select(m, n, k, output, H200, whole_gpu=False)
    assert isinstance(config, GemmConfig)
    if isinstance(select(m, n, k, output, H200), GemmConfig):
        assert config == select(m, n, k, output, H200), "a kernel of its own, to be compiled"


def test_another_process_with_other_hashes_chooses_the_same() -> None:
    code = (
        "from deep_gemm.choose.config import Output; from deep_gemm.gpus import H200;"
        "from deep_gemm.choose.dense import select;"
        "print(*(select(m, n, k, Output(with_c=with_c), H200).name for with_c in (False, True)"
        " for n, k in ((2112, 7168), (576, 7168), (7168, 2048)) for m in (1, 17, 64, 200, 777, 4096)), sep=';')"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split(";")
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0]) == 36


@settings(max_examples=100)
@given(rows, columns, depths, st.sampled_from(OUTPUTS), st.one_of(st.sampled_from(GPUS), gpus))
def test_candidates_are_all_tiles_with_reasons_for_those_that_cannot_run(
    m: int, n: int, k: int, output: Output, gpu: Gpu
) -> None:
    found = candidates(m, n, k, output, gpu)
    assert {candidate.tile for candidate in found} == set(tiles_for(output))
    assert found[0].why_not is None
    assert found[0].cost_us < float("inf")
    for candidate in found:
        assert (candidate.why_not is None) == (candidate.cost_us < float("inf"))
        assert candidate.why_not != ""
        assert candidate.waves >= 1


@pytest.mark.parametrize(
    ("m", "n", "cluster", "reason"),
    [
        (64, 4096, (2, 1), "one row of tiles, nothing to share B with"),
        (4096, 64, (1, 2), "one column of tiles, nothing to share A with"),
    ],
)
def test_a_rejection_says_why(m: int, n: int, cluster: tuple[int, int], reason: str) -> None:
    found = candidates(m, n, 7168, Output(), H200)
    clustered = [c for c in found if (c.tile.cluster_m, c.tile.cluster_n) == cluster]
    assert clustered
    assert all(candidate.why_not == reason for candidate in clustered)


@pytest.mark.parametrize("m", [512, 1024, 4095])
def test_rows_that_straddle_lines_of_the_l2_are_loaded_once_for_two_ctas(m: int) -> None:
    straddling, aligned = (select(m, 7184, k, Output(), H200) for k in (2064, 2048))
    assert isinstance(straddling, GemmConfig)
    assert isinstance(aligned, GemmConfig)
    assert straddling.cluster_m * straddling.cluster_n == 2
    assert (
        candidates(m, 7184, 2064, Output(), H200)[0].compute_us
        > candidates(m, 7184, 2048, Output(), H200)[0].compute_us
    )
    assert straddling.block_m * straddling.block_n >= aligned.block_m * aligned.block_n


def test_fewer_sms_cost_time() -> None:
    gpus_by_size = [replace(H200, num_sms=num_sms) for num_sms in (132, 64, 16, 2)]
    times = [candidates(4096, 4096, 4096, Output(), gpu)[0].compute_us for gpu in gpus_by_size]
    assert times == sorted(times)


def test_a_gpu_with_slower_tensor_cores_costs_more() -> None:
    fast, slow = (candidates(4096, 4096, 4096, Output(), gpu)[0].cost_us for gpu in (H200, H20))
    assert slow > 3 * fast


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_few_kernels_serve_one_weight_whatever_m(n: int, k: int) -> None:
    chosen = {select(m, n, k, Output(), H200).name for m in range(1, 8193)}
    assert len(chosen) <= MAX_KERNELS, f"{len(chosen)} kernels to compile for one weight: {sorted(chosen)}"


def test_explain_names_the_choice_and_why_the_others_lost(capsys: pytest.CaptureFixture[str]) -> None:
    explain(100, 7168, 2048, gpu="H200")
    out = capsys.readouterr().out
    assert out.count("chosen") == 1
    chosen = select(100, 7168, 2048, Output(), H200).name
    assert any(chosen in line and "chosen" in line for line in out.splitlines())
    assert "one row of tiles, nothing to share B with" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "B200"}, "gpu: expected H200, H100, H20 or None, got 'B200'"),
        ({"d_dtype": torch.float16}, "d_dtype: expected torch.bfloat16 or torch.float32, got torch.float16"),
        ({"m": 0}, "m: expected a positive size, got 0"),
    ],
)
def test_explain_names_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        explain(**{"m": 1, "n": 8, "k": 128, **arguments})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))

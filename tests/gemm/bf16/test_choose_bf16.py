"""Tiles that BF16 products choose; and a check that the slices of k depend on the weight alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_gemm.core.gpu import H20, H100, H200
from deep_gemm.gemm.choose.bf16 import ACTIVATED, select_bf16, select_bf16_depths, select_bf16_rows, slices_of
from deep_gemm.gemm.config.bf16 import Bf16Config, bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output

NT, NN, TN = Majors(), Majors(b_is_mn=True), Majors(True, True)


def test_a_weight_has_the_same_slices_whatever_m_is() -> None:
    for n, k in ((576, 7168), (2112, 7168), (1280, 4096), (4096, 7168), (8, 65536)):
        for gpu in (H200, H20, replace(H200, num_sms=20)):
            configs = [select_bf16(m, n, k, Output(), NT, gpu) for m in (1, 64, 65, 128, 500, 4096, 100_000)]
            assert {config.slices for config in configs} == {slices_of(n, k, NT)}
            assert [config.name for config in configs if config.why_illegal()] == []


def test_slices_fill_the_sms_for_two_rows_of_tiles() -> None:
    assert slices_of(576, 7168, NT) == 7
    assert slices_of(2112, 7168, NT) == 2
    assert slices_of(4096, 7168, NT) == slices_of(576, 1024, NT) == slices_of(576, 7168, TN) == 1
    assert slices_of(576, 7168, NT, works.HEADS) == 1


def test_clusters_that_split_k_all_run_at_a_time() -> None:
    for num_sms in (132, 60, 20, 4):
        for m in (1, 100, 128, 1000):
            config = select_bf16(m, 576, 7168, Output(), NT, replace(H200, num_sms=num_sms))
            tiles = -(-m // config.block_m) * -(-576 // config.block_n)
            assert config.cluster_k == 1 or tiles * config.cluster_k <= num_sms


def test_large_products_take_large_tiles() -> None:
    assert select_bf16(8192, 8192, 8192, Output(), NT, H200).name == "bf16 nt 128x256 bf16"
    assert select_bf16(4096, 7168, 4096, Output(), NN, H200).name == "bf16 nn 128x256 bf16"
    assert select_bf16(4096, 2048, 7168, Output(), NT, H200).name == "bf16 nt 128x256/m2 bf16 of 2 slices"


def test_an_h100_takes_wide_tiles_where_many_share_a_deep_weight() -> None:
    """An H100 took 405 and 280 us with 128x112, 316 and 241 us with wide tiles; m = 512 and short k prefer 128x112."""
    for m, k, tile in ((512, 16384, "128x112"), (768, 16384, "256x192"), (1024, 2048, "128x112")):
        assert select_bf16(m, 7168, k, Output(), NT, H100).name == f"bf16 nt {tile} bf16"
    assert select_bf16(1024, 7168, 16384, Output(), NT, H100).name == "bf16 nt 128x160 bf16"
    assert select_bf16(1024, 7168, 16384, Output(), NT, H200).name == "bf16 nt 128x112 bf16"
    assert select_bf16(1024, 7168, 16384, Output(), NT, H20).name == "bf16 nt 256x192 bf16"
    assert select_bf16(512, 576, 7168, Output(), NT, H100).block_n == 48


@pytest.mark.parametrize(("rows", "tile"), [(20, (64, 256)), (192, (128, 256)), (8192, (128, 256))])
def test_groups_of_rows(rows: int, tile: tuple[int, int]) -> None:
    config = select_bf16_rows(32, rows, 4096, 7168, Output(work=works.COUNTS), False, H200)
    assert (config.block_m, config.block_n) == tile


def test_groups_along_k() -> None:
    output = Output(is_fp32=True, adds_to_d=True, work=works.PARTS)
    assert select_bf16_depths(8, 7168, 2048, output, H200).name == "bf16 tn 128x256 fp32+d by depths"
    assert select_bf16_depths(1, 64, 64, output, H200).block_n == 64


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("needs boxes of 64 rows of A if its rows are contiguous", bf16_config(64, 64, Output(), TN, cluster_n=2)),
        ("needs boxes of 64 rows of B if its rows are contiguous", bf16_config(64, 96, Output(), NN)),
        ("needs an A with contiguous k", bf16_config(64, 64, Output(work=works.IDS), TN)),
        ("needs a slice for each CTA", bf16_config(64, 64, Output(), cluster_k=2, slices=4)),
        ("needs one k-block at a time", Bf16Config(64, 64, 4, 1, run_k_blocks=2)),
        ("needs gate and up in one unit", replace(bf16_config(64, 256, ACTIVATED), unit_n=128)),
        ("needs one or two units of 128 columns", bf16_config(64, 64, ACTIVATED)),
        ("needs one unit for each warpgroup", bf16_config(256, 64, Output(), cluster_k=2, slices=2)),
    ],
)
def test_what_cannot_be_built_says_why(reason: str, config: Bf16Config) -> None:
    assert (config.why_illegal() or "").startswith(reason)

"""Run kernels in the simulator whose C++, model and kernels, is compiled with ASan and UBSan. Needs ASan preloaded.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python tests/lab/sanitized_sim.py

At last it breaks one of them, by an index behind an array: it must not survive that.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(path) for path in (ROOT, ROOT / "tests", *(ROOT / "tests").rglob("*")) if path.is_dir()]

from paged_cases import mistakes as mistakes_of_logits
from paged_cases import problem as logits

from deep_gemm.core.sources import cuda_sources
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.config_of_tile import tile_config
from deep_gemm.gemm.output import Output
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from deep_gemm.indexer.paged_kernel import config_of
from lab.sim import dense, fp8_gemm_decode, fp8_paged_mqa_logits, hc_prenorm, library

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
FEW = "hc_prenorm_few.cuh"
WHOLE, BEHIND = "squares[row][0] + squares[row][1];", "squares[row][0] + squares[row + 2][1];"


def main() -> None:
    library._FLAGS = (*library._FLAGS, *FLAGS)
    library._MODEL_FLAGS = ("-O1",)  # compiled in half the time
    a, b = hc_prenorm.random_operands(37, 24, 448)
    few = HcFewConfig(24, 2, 4, 2)
    assert hc_prenorm.mistakes(a, b, *hc_prenorm.run(hc_prenorm.compile_config(few), few, a, b, 2)) is None
    ring = HcConfig(64, 24, 2, 2, max_stages=4)
    assert hc_prenorm.mistakes(a, b, *hc_prenorm.run(hc_prenorm.compile_config(ring), ring, a, b)) is None
    tile = tile_config(128, 64, Output(), cluster_m=2)
    product = dense.random_problem(tile, 200, 136, 400)
    assert dense.run(dense.compile_config(tile), tile, product).mistakes is None
    decode = DecodeConfig(16, 4, 2, 3)
    product = dense.random_problem(decode, 13, 136, 528)
    assert fp8_gemm_decode.run(dense.compile_config(decode), decode, product).mistakes is None
    p = logits([[300, 301], [0, 0], [65, 64]], 2, 32, 64)
    config = config_of(p)
    found = fp8_paged_mqa_logits.run(fp8_paged_mqa_logits.compile_config(config), config, p)
    assert mistakes_of_logits(p, found) is None
    print("nothing found", flush=True)
    source = cuda_sources()[FEW]
    assert source.count(WHOLE) == 1
    hc_prenorm.run(hc_prenorm.compile_config(few, {FEW: source.replace(WHOLE, BEHIND)}), few, a, b, 2)


if __name__ == "__main__":
    main()

"""The machine code of a fixed list of configurations, as digests.

A refactor that should change no kernel proves it by equal digests. After a change of kernels, write the digests anew:

    python tests/lab/machine_code.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from helpers import Job, compile_many, text_sections
from thorough import covering, values

from deep_gemm.casts.cast_tiles import KERNEL as CAST_TILES
from deep_gemm.casts.cast_tiles import turns_blocks
from deep_gemm.core.check.recipes import E2M1, MX, PER_64, PER_ROW, WHOLE, Scales
from deep_gemm.core.jit.compiler import compiler_version
from deep_gemm.gemm.choose.tiles import skipping
from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.decode import DecodeConfig, decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig, Majors
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.hyper import choose as choose_hc
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from deep_gemm.indexer import kernel as logits_kernel
from deep_gemm.indexer.config import InPages, InRows, logits_config
from deep_gemm.kernels import ORDINARY

FILE = Path(__file__).with_name("machine_code_digests.json")

BF16, FP32, BY_ROW = Output(), Output(is_fp32=True), Output(is_fp32=True, sfb=PER_ROW)
FP4 = Output(b=E2M1, sfb=MX)
ALONG_K = Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW, work=works.DEPTHS)
BY_HEADS = Output(work=works.HEADS)
DENSE = (
    tile_config(64, 32, BF16),
    tile_config(64, 64, BF16, cluster_k=3, k=128),
    tile_config(64, 128, FP32, k=128),
    tile_config(128, 96, Output(with_c=True)),
    tile_config(128, 128, BF16, k=128),
    tile_config(128, 128, FP32, cluster_k=4),
    tile_config(128, 192, BF16),
    tile_config(128, 256, BF16, cluster_m=2),
    tile_config(192, 128, BF16),
    tile_config(256, 112, BF16, k=128),
    tile_config(256, 128, BF16, cluster_n=2),
    tile_config(256, 128, Output(is_fp32=True, adds_to_d=True)),
    tile_config(128, 128, BY_ROW),
    tile_config(192, 128, Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW), k=128),
    tile_config(128, 128, FP4),
    tile_config(256, 128, FP4),
    tile_config(128, 128, Output(sfb=Scales(32, 32))),
    tile_config(256, 128, Output(sfb=Scales(64, 64))),
    tile_config(128, 128, Output(sfa=Scales(1, 32), sfb=Scales(1, 32))),
)
GROUPED = (
    tile_config(128, 128, Output(work=works.IDS)),
    tile_config(64, 128, Output(work=works.ENDS), k=128),
    tile_config(256, 128, Output(work=works.COUNTS)),
    tile_config(128, 256, Output(work=works.COUNTS)),
    tile_config(128, 128, Output(work=works.ENDS, epilogue=epilogues.SILU)),
    tile_config(128, 256, Output(work=works.ENDS, epilogue=epilogues.SILU)),
    tile_config(128, 256, Output(work=works.ENDS, epilogue=epilogues.SILU_OF_HALVES)),
    tile_config(128, 256, Output(work=works.ENDS, epilogue=epilogues.TO_ADDRESSES)),
    tile_config(128, 128, Output(work=works.IDS, sfa=PER_64)),
    tile_config(64, 128, Output(work=works.IDS, sfa=PER_64), k=128),
    tile_config(256, 128, ALONG_K, k=128),
    tile_config(256, 128, ALONG_K, cluster_n=2, k=128),
    tile_config(64, 128, Output(work=works.COUNTS, b=E2M1, sfb=MX)),
)
HEADS = (
    tile_config(64, 128, BY_HEADS),
    tile_config(128, 256, BY_HEADS, cluster_m=2),
    tile_config(128, 128, Output(is_fp32=True, adds_to_d=True, work=works.HEADS), k=128),
    tile_config(128, 128, Output(is_fp32=True, sfb=PER_ROW, work=works.HEADS)),
    decode_config(8, 1, 1, 2, work=works.HEADS),
    decode_config(32, 1, 2, 2, with_c=True, work=works.HEADS),
)
LOGITS = {
    logits_kernel.IN_ROWS: (
        logits_config(64, 128, 4, InRows()),
        logits_config(32, 64, 2, InRows(is_clean=True)),
        logits_config(128, 32, 4, InRows(is_compressed=True)),
    ),
    logits_kernel.IN_PAGES: (
        logits_config(64, 128, 4, InPages(1, 64)),
        logits_config(32, 64, 2, InPages(3, 32)),
        logits_config(88, 32, 4, InPages(2, 64)),
    ),
}
HC = (
    HcConfig(64, 8, 16, 4),
    HcConfig(128, 24, 2),
    HcConfig(64, 32, 1, 4),
    HcFewConfig(8, 16, ahead=4),
    HcFewConfig(24, 8),
)
TURNED = Majors(True, True)
OF_BF16 = (
    bf16_config(64, 32, BF16, cluster_k=4, slices=4),
    bf16_config(128, 144, BF16, slices=4),
    bf16_config(128, 256, BF16, cluster_m=2),
    bf16_config(256, 128, Output(with_c=True), Majors(b_is_mn=True), cluster_n=2),
    bf16_config(192, 96, FP32, Majors(a_is_mn=True)),
    bf16_config(128, 256, Output(is_fp32=True, adds_to_d=True), TURNED),
    bf16_config(128, 128, BY_HEADS),
    bf16_config(128, 256, Output(work=works.IDS)),
    bf16_config(64, 128, Output(work=works.COUNTS), Majors(b_is_mn=True)),
    bf16_config(128, 256, Output(is_fp32=True, adds_to_d=True, work=works.PARTS), TURNED, cluster_m=2),
    bf16_config(128, 256, Output(is_fp32=True, adds_to_d=True, work=works.COUNTED), TURNED),
    bf16_config(128, 256, Output(is_fp32=True, work=works.SUM), cluster_m=2),
)
DECODE = (
    decode_config(8, 1, 4, 2),
    decode_config(16, 2, 1, 2),
    decode_config(32, 1, 3, 2, is_fp32=True),
    decode_config(64, 1, 1, 2, with_c=True),
)
WHOLE_SCALES = Output(sfa=WHOLE, sfb=WHOLE)
WHOLE_AND_BIASES = (
    tile_config(128, 192, WHOLE_SCALES, cluster_m=2),
    tile_config(64, 64, replace(WHOLE_SCALES, is_fp32=True), cluster_k=3),
    tile_config(128, 128, replace(WHOLE_SCALES, with_c=True, c_is_fp32=True, work=works.COUNTS)),
    tile_config(128, 256, Output(with_c=True, c_is_fp32=True, work=works.IDS)),
    decode_config(16, 2, 3, 2, sfa=WHOLE, sfb=WHOLE),
    decode_config(8, 1, 1, 2, with_c=True, c_is_fp32=True, work=works.ENDS, sfa=WHOLE, sfb=WHOLE),
)
SKIPPING = tuple(
    skipping(config, columns)
    for config, columns in ((DENSE[4], 64), (DENSE[6], 16), (DECODE[1], 16))
    if config is not None
)


def jobs() -> list[Job]:
    """Return the kernels to compile: the products above, and other kernels with every value of each field."""
    found = []
    for config in (*DENSE, *GROUPED, *DECODE, *HEADS, *SKIPPING, *WHOLE_AND_BIASES):
        if isinstance(config, GemmConfig):
            found.append(Job(f"fp8_gemm {config.name}", FP8_GEMM.source, FP8_GEMM.headers(config)))
        elif isinstance(config, DecodeConfig):
            found.append(Job(f"decode {config.name}", FP8_GEMM_DECODE.source, FP8_GEMM_DECODE.headers(config)))
    found += [Job(f"bf16_gemm {each.name}", BF16_GEMM.source, BF16_GEMM.headers(each)) for each in OF_BF16]
    for each in HC:
        kernel = choose_hc.kernel_of(each).KERNEL
        found.append(Job(f"hc_prenorm {each.name}", kernel.source, kernel.headers(each)))
    found += [
        Job(f"{kernel.name} {each.name}", kernel.source, kernel.headers(each))
        for kernel, configs in LOGITS.items()
        for each in configs
    ]
    found += [
        Job(f"{kernel.name} {config.name}", kernel.source, kernel.headers(config))
        for kernel in ORDINARY
        for config in covering(kernel.configs(), values)
    ]
    turned = next(filter(turns_blocks, CAST_TILES.configs()))
    found.append(Job(f"cast_tiles turned {turned.name}", CAST_TILES.source, CAST_TILES.headers(turned)))
    return found


def digest(cubin: bytes) -> str:
    """Digest the instructions alone: a cubin also holds facts that do not affect them, such as the kernel's name."""
    return hashlib.sha256(repr(sorted(text_sections(cubin).values())).encode()).hexdigest()


def digests() -> dict[str, Any]:
    """Return the file's content: the compiler, and a digest of each configuration's machine code before any pass."""
    kernels = compile_many(jobs())
    return {"compiler": compiler_version(), "digests": {kernel.name: digest(kernel.cubin) for kernel in kernels}}


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
    print(f"wrote {FILE}")

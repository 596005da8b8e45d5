"""Writes docs/learn/dense.md, decode.md and grouped.md, one kernel on each page:  python docs/write_kernels.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.config.decode import decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.fold import page as source_of

LEARN = Path(__file__).parent / "learn"


class Shown(NamedTuple):
    """A kernel in one configuration, and the text around its source."""

    title: str
    problem: str
    kernel: Kernel[Any]
    config: Any
    reading: str
    command: str


SHOWN = {
    "dense": Shown(
        "The dense kernel on one page",
        "How does the package's own FP8 product look, without its code for FP4, BF16, groups and clusters?",
        FP8_GEMM,
        tile_config(256, 128, Output()),
        "Read from the bottom: the kernel divides into a producer, which calls `load_tile`, and math warps, which\n"
        "call `multiply_tile` and `store_tile`. [The kernel fp8_gemm](../fp8_gemm.md) gives the reasons.",
        "fp8_gemm --block-m 256 --block-n 128",
    ),
    "decode": Shown(
        "The decode kernel on one page",
        "How does a product of few rows keep the memory busy, if loads take longer than the tensor cores?",
        FP8_GEMM_DECODE,
        decode_config(16, 1, 4, 2),
        "In this kernel weights are the rows of WGMMA, and tokens its columns. Four CTAs of a cluster divide k, and\n"
        "add up their sums in shared memory. [The kernel fp8_gemm_decode](../fp8_gemm_decode.md) gives the reasons.",
        "fp8_gemm_decode --config '{name}'",
    ),
    "grouped": Shown(
        "The grouped kernel on one page",
        "How does one launch multiply the rows of many experts, if only the GPU knows where each expert's rows end?",
        FP8_GEMM,
        tile_config(128, 128, Output(work=works.ENDS)),
        "Unlike in the dense kernel, warps of the producer's warpgroup find tiles: they read the groups' ends, and\n"
        "pass the tiles to all roles. [Grouped GEMM](../grouped.md) describes the layouts that callers pass.",
        "fp8_gemm --config '{name}'",
    ),
}


def page(name: str) -> str:
    """Return the text of a kernel's page."""
    shown = SHOWN[name]
    text = source_of(shown.kernel.source, shown.kernel.headers(shown.config))
    return f"""# {shown.title}

{shown.problem}

Below is the kernel's whole source for one configuration, `{shown.config.name}`, in {text.count(chr(10))} lines.
`docs/write_kernels.py` writes this page. `lab/fold.py` inserts the configuration's constants, and removes branches,
functions and types that this configuration does not use. A test compiles the page, and compares the result with the
package's machine code. PTX instructions remain calls of functions of `ptx/` with the instructions' names.

{shown.reading}

    python -m lab inspect {shown.command.format(name=shown.config.name)} --source

```cuda
{text}```
"""


if __name__ == "__main__":
    for name in SHOWN:
        (LEARN / f"{name}.md").write_text(page(name))

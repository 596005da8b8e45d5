"""The CUDA C++ sources of the package, as the in-memory headers of a compilation."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
_GENERATED_LINE = re.compile(
    r"""|\#pragma\ once
    |\#include\ "types\.cuh"
    |constexpr\ uint32_t\ k\w+\ =\ [0-9]+;
    |constexpr\ bool\ k\w+\ =\ (true|false);
    |\#define\ [A-Z_]+\ ("(?P<file>[a-z0-9_/]+\.cuh)"|[a-z0-9_]+)""",
    re.VERBOSE | re.ASCII,
)


@cache
def cuda_sources() -> dict[str, str]:
    """Read every source of the package. The keys are the names to include: paths in the folder of a family."""
    return {include_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.cuh"), key=include_name)}


def include_name(path: Path) -> str:
    """Give the name to include this source: "work/dense.cuh" for gemm/work/dense.cuh."""
    return "/".join(path.relative_to(PACKAGE).parts[1:])


def generated(header: str) -> str:
    """The `config.cuh` of a configuration, if it states numbers, switches and names of sources here, and nothing else.

    Whatever a configuration was made of, none of it becomes code.
    """
    for line in header.split("\n"):
        match = _GENERATED_LINE.fullmatch(line)
        if match is None or (match["file"] is not None and match["file"] not in cuda_sources()):
            raise ValueError(f"config: expected numbers, switches and names of sources in config.cuh, got {line!r}")
    return header

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
    """Read every source of the package. A key is the name to include: the path within the folder of a family."""
    return {include_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.cuh"), key=include_name)}


def include_name(path: Path) -> str:
    """Return the name by which a source is included: "work/dense.cuh" for gemm/work/dense.cuh."""
    return "/".join(path.relative_to(PACKAGE).parts[1:])


def generated(header: str) -> str:
    """Return a `config.cuh` unchanged if it has only numbers, switches and names of this package's sources.

    Otherwise raise an error: no value from outside may become code.
    """
    for line in header.split("\n"):
        match = _GENERATED_LINE.fullmatch(line)
        if match is None or (match["file"] is not None and match["file"] not in cuda_sources()):
            raise ValueError(f"config: expected numbers, switches and names of sources in config.cuh, got {line!r}")
    return header

"""Which kernel runs for each size of batch, and why:  python examples/which_tile.py

Nothing is launched, so it needs no GPU: without one the answers are for an H200.
"""

from __future__ import annotations

import contextlib
import io

import deep_gemm

N, K = 2112, 7168


def main() -> None:
    """List the choice for a few batches, then show the whole comparison for one of them."""
    for m in (1, 16, 64, 256, 1024, 4096):
        page = io.StringIO()
        with contextlib.redirect_stdout(page):  # `explain` prints what it returns
            candidates = deep_gemm.explain(m, N, K)
        (line,) = (line for line in page.getvalue().splitlines() if " chosen" in line)
        able = sum(candidate.why_not is None for candidate in candidates)
        print(f"m = {m:4}: {line[:14]} of {able} that can run it")
    print()
    deep_gemm.explain(64, N, K)


if __name__ == "__main__":
    main()

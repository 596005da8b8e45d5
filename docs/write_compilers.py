"""Writes the newest record of tests/lab/compiler_matrix.py as a table in docs/jit.md.

python docs/write_compilers.py
"""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE, RESULTS = DOCS / "jit.md", DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- docs/write_compilers.py writes what follows -->\n", "<!-- docs/write_compilers.py wrote this -->"


def newest() -> Path:
    """Find the record of the latest day; the names of records of only some kernels have a word before the day."""
    return max(RESULTS.glob("compilers-20*.json"))


def section(path: Path) -> str:
    """Tabulate a record."""
    record = json.loads(path.read_text())
    versions = list(record["not_as_planned"])
    lines = [
        f"{record['configurations']} configurations, {record['date']}, commit {record['commit']}",
        f"(`benchmarks/results/{path.name}`):",
        "",
        "| NVRTC | not as planned | the same machine code as by the version above |",
        "|---|---|---|",
    ]
    for version in versions:
        others = list(record["same_code"].get(version, {}).values())
        same = others[-1] if others else ""
        lines.append(f"| {version} | {len(record['not_as_planned'][version])} | {same} |")
    return "\n".join([*lines, "", ""])


def write(page: Path, text: str) -> None:
    """Put the section into the page, between the two marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, behind = rest.partition(END)
    page.write_text(before + BEGIN + text + END + behind)


if __name__ == "__main__":
    write(PAGE, section(newest()))

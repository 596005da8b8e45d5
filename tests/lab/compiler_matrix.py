"""Compile every configuration that can be chosen with several versions of NVRTC, and inspect the machine code.

    python tests/lab/compiler_matrix.py --record benchmarks/results/compilers-DATE.json

installs the last release of each minor version into a folder, unless the folder has it, prints a line for each, and
reports which releases give the same machine code. `--versions 12.8.93 newest` selects other releases. No GPU is needed.

All releases take one processor an hour and a half. The folder stores each kernel's outcome under a digest of its input,
so a new run continues a run that was stopped, and later runs compile only kernels that have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401
import machine_code
import other_nvrtc
from helpers import Job
from thorough import sample

from deep_gemm.core.jit.compiler import full_options
from deep_gemm.core.jit.cubin import report
from deep_gemm.core.kernel import CodePlan, Kernel
from deep_gemm.gemm.choose.bf16 import reachable_bf16, reachable_bf16_depths, reachable_bf16_rows, reachable_bf16_sum
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.hyper.kernel import KERNEL as HC_PRENORM
from deep_gemm.hyper.kernel_few import KERNEL as HC_PRENORM_FEW
from deep_gemm.indexer.config import is_usual, reachable_pages, reachable_rows
from deep_gemm.indexer.kernel import IN_PAGES, IN_ROWS
from deep_gemm.kernels import ORDINARY
from deep_gemm.linear.kernel import KERNEL as LINEAR_DECODE
from lab.bench.machine import git_state
from lab.bench.report import write_whole
from lab.configs import (
    reachable_decode,
    reachable_grouped,
    reachable_heads,
    reachable_k_grouped,
    reachable_silu,
    reachable_skipping,
)
from lab.configs import reachable_dense as reachable
from lab.flat import flat
from lab.gates import violations

WHOLE: tuple[Kernel[Any], ...] = (LINEAR_DECODE, HC_PRENORM, HC_PRENORM_FEW, *ORDINARY)
"""Kernels whose configurations are all of one kind."""
USUAL_HEADS = (8, 16, 32, 64)
"""Numbers of the indexer's heads: the numbers in models, the least number, and a number between."""
MINORS = ("12.8.93", "12.9.86", "13.0.88", "13.1.115", "13.2.86", "13.3.33", "13.4.92", "13.5.37")
"""The last release of each minor version, November 2026."""
FOLDER = Path(__file__).resolve().parents[2] / "build" / "nvrtc"
AT_A_TIME = 16
"""Number of kernels that are compiled before the outcomes are written again."""


class Case(NamedTuple):
    """A configuration that can be chosen: the source to compile, and the plan that its machine code must follow."""

    job: Job
    plan: CodePlan

    @property
    def key(self) -> str:
        """Return a digest of all that decides the outcome except the compiler. Only included headers count."""
        decisive = (flat(self.job.source, self.job.headers), full_options(self.job.options), self.plan)
        return hashlib.sha256(repr(decisive).encode()).hexdigest()[:12]


class Outcome(NamedTuple):
    """The outcome of a case with one compiler."""

    digest: str
    """The digest of the machine code."""
    wrong: list[str]
    """Facts about the machine code that differ from the plan."""


def cases(choose: Callable[[Sequence[Any]], Sequence[Any]] = list) -> list[Case]:
    """Return all cases, or the cases that `choose` selects for each kind of product and for each other kernel."""
    of_heads = [*reachable_heads(), *reachable_skipping()]
    tall, few = ([config for config in of_heads if isinstance(config, kind)] for kind in (GemmConfig, DecodeConfig))
    of_bf16 = reachable_bf16(), reachable_bf16_rows(), reachable_bf16_depths(), reachable_bf16_sum()
    of_logits = [each for each in reachable_rows() if each.heads in USUAL_HEADS], [*filter(is_usual, reachable_pages())]
    kinds: list[tuple[Kernel[Any], Sequence[Any]]] = [
        *((FP8_GEMM, of) for of in (reachable(), reachable_grouped(), reachable_silu(), reachable_k_grouped(), tall)),
        *((FP8_GEMM_DECODE, of) for of in (reachable_decode(), few)),
        *zip((IN_ROWS, IN_PAGES), of_logits, strict=True),
        *((BF16_GEMM, of) for of in of_bf16),
        *((kernel, kernel.configs()) for kernel in WHOLE),
    ]
    return [
        Case(Job(f"{kernel.name} {config.name}", kernel.source, kernel.headers(config)), kernel.code_plan(config))
        for kernel, configs in kinds
        for config in choose(configs)
    ]


def installed(version: str, folder: Path) -> tuple[str, Path]:
    """Return the installed version and its library; `version` may be "newest". Install it first if it is missing."""
    target = folder / version
    if other_nvrtc.library(target) is None:
        what = other_nvrtc.package(version) + ("" if version == "newest" else f"=={version}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), what]
        subprocess.run(pip, check=True)
    library = other_nvrtc.library(target)
    if library is None:
        raise RuntimeError(f"{target}: expected a folder with libnvrtc.so")
    (found,) = metadata.distributions(name=other_nvrtc.package(version), path=[str(target)])
    return found.version, library


class Kept:
    """Stores the outcomes of cases with one compiler in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.loads(path.read_text()) if path.exists() else {}
        self.outcomes = {key: Outcome(*outcome) for key, outcome in content.items()}

    def add(self, found: Mapping[str, Outcome]) -> None:
        self.outcomes.update(found)
        write_whole(self.path, json.dumps(self.outcomes))


def outcomes(library: Path, chosen: Sequence[Case], kept: Kept, threads: int) -> list[Outcome]:
    """Return each case's outcome with this compiler; compile the cases whose outcome is not stored."""
    missing = [case for case in chosen if case.key not in kept.outcomes]
    for at in range(0, len(missing), AT_A_TIME):
        some = missing[at : at + AT_A_TIME]
        kernels = other_nvrtc.compile_all(library, [case.job for case in some], threads=threads)
        kept.add(
            {
                case.key: Outcome(
                    machine_code.digest(kernel.cubin), violations(report(kernel.cubin, kernel.log), case.plan)
                )
                for case, kernel in zip(some, kernels, strict=True)
            }
        )
    return [kept.outcomes[case.key] for case in chosen]


def same_code(digests: dict[str, dict[str, str]]) -> dict[str, dict[str, int]]:
    """For each version, count the kernels whose machine code equals the code that each earlier version makes."""
    versions = list(digests)
    return {
        version: {
            other: sum(digests[version][kernel] == digests[other][kernel] for kernel in digests[version])
            for other in versions[:at]
        }
        for at, version in enumerate(versions)
        if at
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile all configurations with several versions of NVRTC.")
    parser.add_argument("--versions", nargs="+", default=MINORS, help='such as 12.8.93, or "newest"')
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the versions and of outcomes")
    parser.add_argument("--only", default="", help="only configurations whose names contain this text")
    parser.add_argument("--digests", type=Path, help="write digests of all machine code to this file")
    parser.add_argument("--sample", action="store_true", help="only the configurations that CI compiles")
    parser.add_argument("--threads", type=int, default=2, help="the number of kernels to compile at a time")
    parser.add_argument("--record", type=Path, help="write the findings to this file")
    options = parser.parse_args()
    chosen = [case for case in cases(sample if options.sample else list) if options.only in case.job.name]
    commit, dirty = git_state()
    record: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "dirty": dirty}
    record |= {"configurations": len(chosen), "is_sample": options.sample, "only": options.only}
    record |= {"keys": " ".join(sorted(case.key for case in chosen)), "not_as_planned": {}}
    digests: dict[str, dict[str, str]] = {}
    bad = 0
    print(f"{'NVRTC':10}{'configurations':>15}{'not as planned':>15}{'seconds':>9}", flush=True)
    for asked in options.versions:
        version, library = installed(asked, options.folder)
        start = time.monotonic()
        found = outcomes(library, chosen, Kept(options.folder / f"outcomes-{version}.json"), options.threads)
        seconds = time.monotonic() - start
        names = [case.job.name for case in chosen]
        problems = {name: outcome.wrong for name, outcome in zip(names, found, strict=True) if outcome.wrong}
        print(f"{version:10}{len(chosen):15}{len(problems):15}{seconds:9.0f}", flush=True)
        for name, told in problems.items():
            print(f"    {name}: {'; '.join(told)}", flush=True)
        bad += len(problems)
        record["not_as_planned"][version] = problems
        digests[version] = {name: outcome.digest for name, outcome in zip(names, found, strict=True)}
    record["same_code"] = same_code(digests)
    for version, others in record["same_code"].items():
        counts = ", ".join(f"{same} as {other}" for other, same in others.items())
        print(f"{version}: of {len(chosen)} kernels the same code: {counts}", flush=True)
    if options.record:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    if options.digests:
        options.digests.write_text(json.dumps(digests, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

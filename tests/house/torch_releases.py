"""Run the tests of all code that depends on torch with other torch releases, each in an environment of its own.

    python tests/house/torch_releases.py

uses the oldest torch that pyproject.toml allows and the newest that pip finds; `--versions 2.12.1` selects others. It
downloads gigabytes, so a person runs it before a release, and CI does not. All other packages come from the
environment that runs it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

import oldest_release

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "torch"
TESTS = (
    *("core", "api", "compat_forms", "reference", "fp8", "linear", "experts", "bf16", "einsum", "indexer"),
    *("hyper_connections", "nn_linear", "nn_experts", "nn_training", "distributed", "testing", "driver"),
    *("ops_check", "ops_compile", "ops_tracing"),
)
"""The middle parts of the names `tests/**/test_*.py`."""


def oldest() -> str:
    """Return the lower bound of torch."""
    (bound,) = re.findall(r'^    "torch>=([\d.]+)"', oldest_release.PYPROJECT.read_text(), re.MULTILINE)
    return f"{bound}.0"


def environment(version: str, folder: Path) -> Path:
    """Return the Python of an environment with this torch ("newest" too). Make the environment if it is missing."""
    target = folder / version
    python = target / "bin" / "python"
    if not (target / "made").exists():
        venv.create(target, clear=True, with_pip=True)
        what = "torch" if version == "newest" else f"torch=={version}"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", what], check=True)
        (packages,) = target.glob("lib/python*/site-packages")
        beside = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "beside.pth").write_text("".join(f"{path}\n" for path in beside))
        (target / "made").touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests with other releases of torch.")
    parser.add_argument("--versions", nargs="+", default=(oldest(), "newest"), help='such as 2.12.1, or "newest"')
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments are")
    options = parser.parse_args()
    bad = 0
    for asked in options.versions:
        python = str(environment(asked, options.folder))
        told = "import torch, numpy; print(torch.__version__)"
        version = subprocess.run([python, "-c", told], capture_output=True, text=True, check=True).stdout.strip()
        start = time.monotonic()
        files = [str(next(ROOT.glob(f"tests/**/test_{name}.py"))) for name in TESTS]
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        found = "passed" if run.returncode == 0 else f"pytest gave {run.returncode}, {len(failed)} failed"
        print(f"torch {version}: {len(files)} files, {time.monotonic() - start:.0f} s: {found}", flush=True)
        for line in failed or ([run.stderr[-2000:]] if run.returncode else []):
            print(f"    {line}", flush=True)
        bad += run.returncode != 0
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

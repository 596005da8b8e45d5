"""Install the oldest versions that pyproject.toml allows, in a folder beside the environment.

    python tests/house/oldest_release.py

installs the versions, as `make test` does, so that a test, not a user, notices a wrong lower bound. These are versions
of the command line's packages, of numpy, and of the CUDA bindings of the installed major version. torch is left
out, as it is too large to download each time. Without a network, the tests run without these versions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NAMES = ("typer", "rich", "numpy", "cuda-bindings")
FOLDER = Path(sys.prefix) / "oldest"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NUMPY_BUILDS_BEFORE = (3, 13)
"""The oldest numpy has no build for this Python or a later one, so pip would have to compile it."""


def bounds() -> dict[str, str]:
    """Return the lower bound of each package; for the CUDA bindings, from the extra of the installed major version."""
    text = PYPROJECT.read_text()
    found = dict(re.findall(r'^    "([a-z-]+)>=([\d.]+)",', text, re.MULTILINE))
    of_extras = re.findall(r'^cu\d+ = \["cuda-bindings>=([\d.]+),', text, re.MULTILINE)
    major = metadata.version("cuda-bindings").split(".")[0]
    (bound,) = [bound for bound in of_extras if bound.split(".")[0] == major]
    found["cuda-bindings"] = bound if "." in bound else f"{bound}.0"
    names = NAMES if sys.version_info < NUMPY_BUILDS_BEFORE else [name for name in NAMES if name != "numpy"]
    return {name: found[name] for name in names}


def versions() -> dict[str, str] | None:
    """Return the versions in the folder, or None if a package is missing or has another version than its bound."""
    found = {item.metadata["Name"]: item.version for item in metadata.distributions(path=[str(FOLDER)])}
    wanted = bounds()
    is_complete = all(name in found and f"{found[name]}.0.0".startswith(f"{bound}.0") for name, bound in wanted.items())
    return {name: found[name] for name in wanted} if is_complete else None


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    wanted = [f"{name}=={bound}.0" for name, bound in bounds().items()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "15"]
    try:
        subprocess.run([*pip, "--target", str(FOLDER), *wanted], check=True)
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(FOLDER, ignore_errors=True)
        print("pip cannot install the oldest versions that are allowed; the tests run without them.")
    else:
        print(f"The oldest versions that are allowed: {versions()}")


if __name__ == "__main__":
    main()

"""The newest NVRTC, cuda-bindings, typer, rich and numpy on PyPI, in an environment inside the one that this runs in.

    python tests/house/newest_release.py cu13

makes that environment, as `make test` does, so that a new release is noticed by the tests and not by a user. Where it
cannot be made, as without a network, the tests go on without it and say so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

TRIED = {
    "nvidia-cuda-nvrtc": "13.5.37",
    "cuda-bindings": "13.5.0",
    "typer": "0.29.2",
    "rich": "15.0.0",
    "numpy": "2.4.6",
}
"""The newest that passed all tests, of CUDA 13. What a newer one fails is told, and does not fail the run."""

FOLDER = Path(sys.prefix) / "newest"
PYTHON = FOLDER / "bin" / "python"


def packages() -> Path:
    """Where the environment keeps its own packages."""
    return next(iter(FOLDER.glob("lib/python*/site-packages")), FOLDER / "lib")


def versions() -> dict[str, str] | None:
    """Versions of the packages in the environment; None where there is no environment."""
    found = {item.metadata["Name"]: item.version for item in metadata.distributions(path=[str(packages())])}
    return {name: found[name] for name in TRIED} if found.keys() >= TRIED.keys() else None


def newer_than_tried(found: dict[str, str]) -> bool:
    """Whether a release is newer than what was tried: then a failure is news, not a mistake of ours."""
    return any(_number(found[name]) > _number(version) for name, version in TRIED.items())


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def install(extra: str) -> None:
    """Make the environment: these packages, and behind them everything that the present one has."""
    names = [line for line in metadata.requires("hopper-gemm") or () if f'extra == "{extra}"' in line.replace("'", '"')]
    requirements = [*(line.split(";")[0].strip() for line in names), "typer", "rich", "numpy"]
    venv.create(FOLDER, clear=True, symlinks=True, system_site_packages=_sees_the_systems_packages())
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (packages() / "beside.pth").write_text("".join(f"{path}\n" for path in beside))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "15", "--upgrade"]
    subprocess.run([*pip, "--target", str(packages()), *requirements], check=True)


def _sees_the_systems_packages() -> bool:
    settings = Path(sys.prefix) / "pyvenv.cfg"
    return settings.exists() and "include-system-site-packages = true" in settings.read_text()


def main(extra: str) -> None:
    if extra != "cu13":
        print(f"The newest releases are tried with CUDA 13 alone, and torch wants {extra}.")
        return
    try:
        install(extra)
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(FOLDER, ignore_errors=True)
        print("The newest releases cannot be installed, as pip says; the tests go on without them.")
    else:
        print(f"The newest releases: {versions()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

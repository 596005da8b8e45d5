"""Tests whether NVRTC, cuda-bindings, typer, rich or numpy on PyPI are newer than the versions that passed all tests.

`install` makes an environment of the newest releases inside the present one, as `make test` does, so that tests, not
users, find the faults of a new release.
"""

from __future__ import annotations

import re
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
"""The newest versions that passed all tests, for CUDA 13. If a newer version fails, the run only warns."""

FOLDER = Path(sys.prefix) / "newest"
PYTHON = FOLDER / "bin" / "python"


def packages() -> Path:
    """Return the folder of the environment's own packages."""
    return next(iter(FOLDER.glob("lib/python*/site-packages")), FOLDER / "lib")


def versions() -> dict[str, str] | None:
    """Return the versions of the packages in the environment; None if there is no environment."""
    found = {item.metadata["Name"]: item.version for item in metadata.distributions(path=[str(packages())])}
    return {name: found[name] for name in TRIED} if found.keys() >= TRIED.keys() else None


def on_pypi() -> dict[str, str]:
    """Ask pip for the newest release of each package."""
    return {name: _newest(name) for name in TRIED}


def newer_than_tried(found: dict[str, str]) -> dict[str, str]:
    """Return the releases newer than the tried versions: failures of newer releases are not this package's mistakes."""
    return {name: found[name] for name, version in TRIED.items() if _number(found[name]) > _number(version)}


def _newest(name: str) -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "--retries", "1", "--timeout", "15", name]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    told = re.match(rf"{name} \((.+)\)", run.stdout)
    if told is None:
        raise ValueError(f"pip cannot tell the newest {name}: {(run.stderr or run.stdout).strip().splitlines()[-1]}")
    return told[1]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def install(extra: str) -> None:
    """Make the environment: its own packages come first on its path, then the present environment's packages."""
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


def try_to_install(extra: str) -> str:
    """Make the environment, and report the result. If it fails, for example offline, tests continue without it."""
    if extra != "cu13":
        return f"The newest releases are tried with CUDA 13 alone, and torch wants {extra}."
    try:
        install(extra)
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(FOLDER, ignore_errors=True)
        return "The newest releases cannot be installed, as pip says; the tests go on without them."
    return f"The newest releases: {versions()}"

"""Makes a wheel of compiled kernels, and a folder for the Hugging Face kernel hub, for a release.

Any machine can make both; this module uploads nothing. docs/release.md says how to release them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from rich.console import Console

import deep_gemm
from deep_gemm.cli import precompile
from deep_gemm.cli.models import FORMS, model_named
from deep_gemm.core.jit.cache import SHIPPED, files_in, shipped
from deep_gemm.core.jit.entry import read_entry
from deep_gemm.core.settings import settings

ROOT = Path(__file__).resolve().parents[1]
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Compiled kernels of hopper-gemm {version}, which then needs no compiler"
readme = "README.md"
license = "MIT"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["hopper-gemm=={version}"]

[tool.setuptools]
packages = ["{module}"]
package-data = {{ "*" = ["*.kernel"] }}
"""
ABOUT = """\
# {name}

{count} kernels of hopper-gemm {version} for sm_90a (H100, H200, H20), compiled by NVRTC {compiler}, for
{models}.

hopper-gemm finds them by itself if its version is this one, and NVRTC is of this build or not installed. A kernel that
is not here is compiled at need, as without this package.
"""


def jobs_for(
    models: Iterable[str], tps: Sequence[int], gpus: Sequence[str], max_tokens: int, console: Console
) -> list[precompile.Job]:
    """List the kernels of models on each number of ranks, with whole experts and with shared experts, each once."""
    found = dict[precompile.Job, None]()
    for model in models:
        model_named(model)
        for tp, ep in ((ranks, of_experts) for ranks in tps for of_experts in sorted({1, ranks})):
            try:
                for gpu, form in product(gpus, FORMS):
                    jobs = precompile.jobs_of_model(model, tp=tp, ep=ep, max_tokens=max_tokens, gpu=gpu, form=form)
                    found |= dict.fromkeys(job for _, job in jobs)
            except ValueError as error:
                console.print(f"{model}, tp {tp}, ep {ep}: left out: {error}", markup=False)
    return list(found)


def kernels(
    out: Path, models: Sequence[str], tps: Sequence[int], gpus: Sequence[str], max_tokens: int, console: Console
) -> Path | None:
    """Compile the kernels of models, and make a wheel of them. Return its path; None if a kernel did not compile.

    Compiled kernels stay in `build/kernels`, so a second run continues an interrupted first run.
    """
    if shipped():
        raise ValueError(f"expected none of these kernels in this environment, got {shipped()[0]}: uninstall it first")
    directory = ROOT / "build" / "kernels"
    os.environ["DG_JIT_CACHE_DIR"] = str(directory)
    settings.cache_clear()
    jobs = jobs_for(models, tps, gpus, max_tokens, console)
    if not precompile.run(jobs, console):
        return None
    files = files_in(directory)
    if len(files) != len(jobs):  # some files belong to other models, or to older sources
        raise ValueError(f"{directory}: expected the {len(jobs)} kernels of these models, got {len(files)}: remove it")
    return wheel_of(files, ", ".join(models), out)


def wheel_of(files: Sequence[Path], models: str, out: Path) -> Path:
    """Make a wheel of kernels' files, all from the same compiler. Each file is read like an entry of the cache."""
    compilers = {read_entry(file).compiler for file in files}
    if len(compilers) != 1:
        raise ValueError(f"files: expected kernels of one compiler, got those of {sorted(compilers)}")
    facts = {
        "name": SHIPPED.replace("_", "-"),
        "module": SHIPPED,
        "version": deep_gemm.__version__,
        "count": len(files),
        "compiler": compilers.pop(),
        "models": models,
    }
    with tempfile.TemporaryDirectory() as made:
        project = Path(made)
        folder = project / SHIPPED
        folder.mkdir()
        for file in files:
            shutil.copyfile(file, folder / file.name)
        (folder / "__init__.py").write_text('"""Compiled kernels, which hopper-gemm finds beside this file."""\n')
        (project / "pyproject.toml").write_text(PROJECT.format(**facts))
        (project / "README.md").write_text(ABOUT.format(**facts))
        shutil.copyfile(ROOT / "LICENSE", project / "LICENSE")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), made]
        subprocess.run(command, check=True)
    return out / f"{SHIPPED}-{deep_gemm.__version__}-py3-none-any.whl"


def hub(out: Path) -> Path:
    """Write the package in the layout of the Hugging Face kernel hub: a folder for each kind of torch, no tests."""
    shutil.rmtree(out / "build", ignore_errors=True)
    for backend, facts in (("cuda", {"archs": ["9.0a"]}), ("cpu", {})):
        variant = out / "build" / f"torch-{backend}"
        shutil.copytree(ROOT / "deep_gemm", variant, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        metadata = {
            "id": f"_hopper_gemm_{backend}_{_digest(variant)[:12]}",  # the name of the imported module
            "name": "hopper-gemm",
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend, **facts},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    about = (ROOT / "docs" / "package.md").read_text()
    (out / "README.md").write_text(f"---\nlicense: mit\ntags: [kernels]\n---\n\n{about}")
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    return out


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = [(str(file.relative_to(folder)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

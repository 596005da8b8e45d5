"""Run programs in processes forked after `import torch`: the import takes longer than most programs run."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import broken

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "lab.sim.trials"])  # lab/sim/mutate.py uses the same server
SECONDS = 280


def run(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -c TEXT ...`, `python -m MODULE ...` or `python FILE ...`, and capture its output.

    The program sees the paths of `PYTHONPATH` as a new interpreter would, but does not run its `sitecustomize`.
    """
    with TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        given = arguments, dict(os.environ if env is None else env), str(cwd or Path.cwd()), files
        process = SERVER.Process(target=_run, args=given)
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        said = [Path(file).read_text() for file in files]
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, *said)


def _run(arguments: tuple[str, ...], env: dict[str, str], cwd: str, files: list[str]) -> None:
    broken.forget()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if arguments[0] in ("-c", "-m"):
        how, what, *more = arguments
    else:
        how, what, *more = arguments[0], *arguments
    sys.argv = [how, *more]
    if how == "-c":
        exec(what, {"__name__": "__main__"})
    elif how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(what, run_name="__main__")

"""Import the package with one module broken, in a separate process, so that all other modules use the broken module.

This file imports nothing from the package: every module must be loaded after the broken one.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("deep_gemm", "lab", "tests"))


class Broken(MetaPathFinder):
    """Finds one module, and replaces its source by a text."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return a spec that loads the broken module; leave all other modules to Python."""
        spec = PathFinder.find_spec(name, path) if name == self.name else None  # type: ignore[arg-type]
        if spec is not None and spec.origin is not None:
            spec.loader = _Text(name, spec.origin, self.text)
        return spec


class _Text(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec")


def forget() -> None:
    """Unload the package: this process was forked from a server that has imported parts of it for other processes."""
    if operators := sys.modules.get("deep_gemm.core.operators"):
        operators.LIBRARY._destroy()  # otherwise PyTorch would have two of each operator
    for name, module in list(sys.modules.items()):
        if name != __name__ and str(getattr(module, "__file__", None)).startswith(OURS):
            del sys.modules[name]


def run(broken: tuple[str, str] | None, trial: str, sender: Connection) -> None:
    """Import the package anew, with `broken`'s text as one module if given; run a trial; send its error, or None.

    An error outside of the trial is a mistake of the test, not a finding, so it ends the process with exit code 1.
    """
    forget()
    if broken is not None:
        sys.meta_path.insert(0, Broken(*broken))
    trials = importlib.import_module("host_mutations").TRIALS
    if broken is not None and broken[0] not in sys.modules:
        importlib.import_module(broken[0])
    importlib.import_module("torch").set_num_threads(1)
    try:
        trials[trial]()
    except Exception as error:  # any error means that the trial noticed the mistake
        sender.send(" ".join(str(error).split())[:300] or type(error).__name__)
        return
    sender.send(None)

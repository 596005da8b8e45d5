"""Calls into deep_gemm in the wheels of engines: the attributes that they use, and the keywords."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

Uses = dict[str, set[str]]
"""The keywords of each attribute, from all calls of the attribute."""

MODULES = ("utils", "layout", "math", "testing")
NEWEST = ("vllm", "sglang", "lmdeploy")
COPIES = re.compile(r"(^|/)third_party/deep_gemm/|^deep_gemm/")
"""Files of a wheel's own copy of another deep_gemm, which are not read."""
_MODULE = re.compile(r"^(_?(dg|deep_gemm)|_?(import|get)_deep_gemm)$")
"""Names of modules, and of functions that return a module."""
_IMPORTED = re.compile(r"(^|third_party\.)deep_gemm(\.|$)")
_PASSING = re.compile(r"\.utils\.deep_gemm$")
"""An engine's module whose functions pass keywords to deep_gemm's functions of the same names."""


def uses_in_wheel(path: Path) -> Uses:
    """Read the Python files of a wheel."""
    found: Uses = defaultdict(set)
    passed: Uses = defaultdict(set)
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py") and not COPIES.search(name):
                text = wheel.read(name).decode(errors="replace")
                for into, read in zip((found, passed), uses(text) if "deep_gemm" in text else (), strict=False):
                    for attribute, keywords in read.items():
                        into[attribute] |= keywords
    return {attribute: keywords | passed[attribute] for attribute, keywords in found.items()}


def uses(source: str) -> tuple[Uses, Uses]:
    """Read one file: how it uses the module, and functions that pass calls on to the module's functions."""
    tree = ast.parse(source)
    names, passing = dict(_names(tree, _IMPORTED)), dict(_names(tree, _PASSING))
    found: Uses = {attribute: set() for attribute in names.values()}
    passed: Uses = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_module(node.value):
            if not _is_module(node) and not node.attr.startswith("__"):
                found.setdefault(node.attr, set())
        elif isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            if (name := _looked_up(node)) is not None:
                found.setdefault(name, set())
            elif (name := _called(node.func, names)) is not None:
                found.setdefault(name, set()).update(keywords)
            elif (name := _called(node.func, passing)) is not None:
                passed.setdefault(name, set()).update(keywords)
    return found, passed


def _names(tree: ast.AST, module: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name in a file and its attribute, imported from a module that matches, or found by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and module.search(node.module or ""):
            yield from ((each.asname or each.name, each.name) for each in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            looked_up = (_looked_up(part) for part in ast.walk(node.value) if isinstance(part, ast.Call))
            yield from ((node.targets[0].id, name) for name in looked_up if name is not None)


def _last(node: ast.expr) -> str:
    """Return the last word of a dotted name, or of the name of a called function."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_module(node: ast.expr) -> bool:
    """Tell whether an expression is the module, or a submodule such as `utils`."""
    inside = isinstance(node, ast.Attribute) and node.attr in MODULES and _is_module(node.value)
    return inside or bool(_MODULE.match(_last(node)))


def _looked_up(node: ast.Call) -> str | None:
    """Return the name that `getattr` or `hasattr` looks up in the module."""
    if _last(node.func) in ("getattr", "hasattr") and len(node.args) > 1 and _is_module(node.args[0]):
        name = node.args[1]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
    return None


def _called(function: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr if _is_module(function.value) else None
    return names.get(function.id) if isinstance(function, ast.Name) else None


@contextmanager
def wheel_of(release: str) -> Iterator[Path]:
    """Download a release, such as `vllm` or `vllm==0.33.0`, for the duration of a block; or yield an existing wheel."""
    path = Path(release)
    if path.is_file():
        yield path
        return
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        run = subprocess.run([*pip, "--dest", folder, release], capture_output=True, text=True, check=False)
        wheels = [*Path(folder).glob("*.whl")]
        if run.returncode or not wheels:
            raise ValueError(f"{release}: expected a wheel from pip, got: {(run.stderr or run.stdout).strip()[-300:]}")
        yield wheels[0]

"""Functions of engines that plugins replace or call: tests whether a wheel has these functions as plugins expect."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

from deep_gemm.integrations import sglang, vllm
from deep_gemm.integrations.engine import Places

PLUGINS: dict[str, Places] = {
    name: {place: parameters for each in (plugin.PLACES, *plugin.PARTS.values()) for place, parameters in each.items()}
    for name, plugin in (("sglang", sglang), ("vllm", vllm))
}


def changed(path: Path) -> list[str] | None:
    """List functions that a wheel lacks or has with other parameters; return None if its engine has no plugin."""
    places = PLUGINS.get(path.name.partition("-")[0])
    if places is None:
        return None
    found = []
    with zipfile.ZipFile(path) as wheel:
        for (module, name), expected in places.items():
            node = _find(wheel, module, name.split("."))
            got = () if node is None else _parameters(node)
            known = tuple(each.rstrip("?") for each in expected or () if each[-1] != "?" or each[:-1] in got)
            if node is None or (expected is not None and got != known):
                found.append(f"{module}.{name}: " + ("gone" if node is None else f"{got}"))
    return found


def _find(wheel: zipfile.ZipFile, module: str, names: list[str]) -> ast.stmt | None:
    """Find the statement that defines a name of a module; follow imports from other modules."""
    path = f"{module.replace('.', '/')}.py"
    is_package = path not in wheel.namelist()
    path = f"{module.replace('.', '/')}/__init__.py" if is_package else path
    if path not in wheel.namelist():
        return None
    body, found = ast.parse(wheel.read(path)).body, None
    for i, name in enumerate(names):
        found = next((node for node in body if name in _defined(node)), None)
        if isinstance(found, ast.ImportFrom):
            parts = module.split(".")
            near = parts[: len(parts) + is_package - found.level] if found.level else []
            original = next(each.name for each in found.names if name in (each.asname, each.name))
            return _find(wheel, ".".join([*near, *(found.module or "").split(".")]), [original, *names[i + 1 :]])
        body = found.body if isinstance(found, ast.ClassDef) else []
    return found


def _defined(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from (each.asname or each.name for each in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _parameters(node: ast.stmt) -> tuple[str, ...]:
    """Return the parameters of a function (of a class method without the class), or the fields of a tuple."""
    if isinstance(node, ast.ClassDef):
        return tuple(name for each in node.body if isinstance(each, ast.AnnAssign) for name in _defined(each))
    if not isinstance(node, ast.FunctionDef):
        return ()
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    is_bound = any(isinstance(each, ast.Name) and each.id == "classmethod" for each in node.decorator_list)
    return tuple(names[is_bound:])

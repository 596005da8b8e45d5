"""Replace an engine that is not installed by modules with the names that a plugin uses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest
from helpers import as_new_process

_SWITCHES = """
    DG_JIT_DEBUG DG_JIT_STRICT DG_JIT_DUMP_ASM DG_JIT_DUMP_PTX DG_JIT_DUMP_SASS DG_DISABLE_FFMA_INTERLEAVE
    DG_PRINT_REG_REUSE DG_PRINT_CONFIGS DG_DISABLE_NATIVE_REPLAY DG_DISABLE_SGLANG_PLUGIN DG_DISABLE_VLLM_PLUGIN
    DG_BATCH_INVARIANT
"""
BAD_VARIABLES = {
    **dict.fromkeys(_SWITCHES.split(), "maybe"),
    **dict.fromkeys(("DG_JIT_CACHE_DIR", "DG_CACHE_DIR"), "~no-such-user/x"),
    "DG_JIT_CACHE_LIMIT_MB": "9" * 5000,
}
"""For each environment variable of the package, a value that the variable cannot have."""


def stand_in(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> Any:
    """Put modules with these contents, and the packages around them, where imports search; return them by name."""
    for path in contents:
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    for path, given in contents.items():
        vars(sys.modules[path]).update(given)
    return sys.modules


def started(plugin: Any, group: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start our plugin with a bad variable as an engine does: load the group's entry point, and call it unguarded."""
    as_new_process(monkeypatch, **{variable: BAD_VARIABLES[variable]})
    for found in (each.load() for each in entry_points(group=group) if each.name == "deep_gemm"):
        assert found is plugin.register
        found()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return each line of the log up to `expected`."""
    lines = [record.getMessage() for record in caplog.records]
    assert all(len(line) < 240 and "\n" not in line for line in lines)
    return [line.partition(" expected")[0] + " expected" * (" expected" in line) for line in lines]

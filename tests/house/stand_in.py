"""Modules of an engine that is not installed, with what a plugin touches there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> Any:
    """Put modules of these names and contents, and the packages around them, where imports look; give them by name."""
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

"""Looks for torch, and for other installed distributions with a module of this package's name.

pip lets two distributions write one folder. The second overwrites files of the first, and uninstalling either removes
`__init__.py`. So this module needs only Python: it works even if other files of the package are missing or belong to
another distribution.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

MODULE, OURS = "deep_gemm", "hopper-gemm"
FOLDER = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = f"{MODULE}: expected torch, found none. Run: pip install torch"
_NAMED_ALIKE = re.compile(r"deep[-_.]?gemm.*\.(dist|egg)-info$", re.IGNORECASE)
_END = re.compile(r"-\d|\.(?:dist|egg)-info$")
"""The end of a distribution's name in the name of its folder."""
_FILE = re.compile(rf"^{MODULE}(/|$)", re.MULTILINE)
_LISTS = ("RECORD", "top_level.txt", "installed-files.txt")
"""Files that list the contents of a distribution, one file or module on each line."""


def without_torch(error: ModuleNotFoundError) -> NoReturn:
    """Raise the error. If the missing module is torch, the text tells the user to install torch."""
    if error.name != "torch":
        raise error
    raise ModuleNotFoundError(WITHOUT_TORCH, name="torch") from None


def is_command() -> bool:
    """Tell whether Python was started for the command line, which imports the package before it runs."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    if program.name == "-m":
        options = " ".join(sys.orig_argv).partition(" -m")[2].split()
        return options[:1] == [MODULE]
    return program.name == MODULE and program.is_file() and f"{MODULE}.__main__" in program.read_text(errors="replace")


def warn_of_others() -> None:
    """Warn of other distributions with files in the package's folder. Each import calls this, so it must be fast."""
    with contextlib.suppress(OSError):
        infos = [FOLDER.parent / name for name in os.listdir(FOLDER.parent) if _NAMED_ALIKE.search(name)]  # noqa: PTH208
        names = [_END.split(info.name)[0] for info in infos if _claims(partial(_text, info))]
        if names:
            warnings.warn(_mixed(names), UserWarning, stacklevel=2)


def to_mend() -> list[str]:
    """List faults in the package's files, and other distributions with its module, each with the commands that help."""
    from importlib import metadata

    among, elsewhere = dict[str, None](), dict[str, None]()
    for other in metadata.distributions():
        if _claims(other.read_text) and re.sub(r"[-_.]+", "-", name := str(other.metadata["Name"])).lower() != OURS:
            here = Path(str(other.locate_file(MODULE))).resolve() == FOLDER
            (among if here else elsewhere)[name] = None
    told = []
    if among:
        told.append(_mixed(list(among)))
    elif files := changed():
        first = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        told.append(f"{len(files)} of {OURS}'s files are gone or changed: {first}. {_mend([])}")
    if elsewhere:
        names = " ".join(elsewhere)
        told.append(f"{names}: another {MODULE}, which programs may import instead. Run: pip uninstall -y {names}")
    return told


def changed() -> list[str]:
    """List the installed files of the package that are missing or have changed."""
    import csv
    import hashlib
    from base64 import urlsafe_b64encode
    from importlib import metadata

    found = []
    for ours in metadata.distributions(name=OURS):
        # Since Python 3.12, `ours.files` leaves out missing files.
        for name, noted, *_ in csv.reader((ours.read_text("RECORD") or "").splitlines()):
            path, (mode, _, value) = Path(str(ours.locate_file(name))), noted.partition("=")
            if value and name.startswith(f"{MODULE}/") and path.resolve().is_relative_to(FOLDER):
                digest = hashlib.new(mode, path.read_bytes()).digest() if path.is_file() else b""
                if urlsafe_b64encode(digest).rstrip(b"=").decode() != value:
                    found.append(name)
    return found


def _mixed(names: list[str]) -> str:
    return f"{', '.join(names)} and {OURS} have their files in one folder, {FOLDER}. {_mend(names)}"


def _mend(names: list[str]) -> str:
    return f"Run: pip uninstall -y {' '.join([*names, OURS])}; then: pip install {_origin()}"


def _origin() -> str:
    """Return the source of the installation, as an argument for pip."""
    import json
    from importlib import metadata

    for ours in metadata.distributions(name=OURS):
        if text := ours.read_text("direct_url.json"):
            origin = json.loads(text)
            vcs = origin.get("vcs_info", {}).get("vcs")
            return f"{vcs}+{origin['url']}" if vcs else str(origin["url"])
    return OURS


def _claims(read: Callable[[str], str | None]) -> bool:
    return any(_FILE.search(read(name) or "") for name in _LISTS)


def _text(folder: Path, name: str) -> str | None:
    file = folder / name
    return file.read_text(errors="replace") if file.is_file() else None

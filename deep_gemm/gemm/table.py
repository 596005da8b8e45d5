"""Tables of measured choices: products for which another tile was faster than the one of the lowest cost.

A table is a JSON file, an entry on each line: a GPU, a product, its tile and what that took, the tile that it replaces
and what that took. `python -m lab tune` writes one, and `DG_TUNED_TABLE` names it. The package comes with none.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.check.integers import integer_in_range
from .output import Output
from .tiles import OUTPUTS_BY_NAME

FORMAT = 1
TABLE_FIELDS = ("format", "made_by", "entries")
ENTRY_FIELDS = ("gpu", "num_sms", "output", "m", "n", "k", "tile", "us", "replaces", "replaced_us")

Product = tuple[int, int, int, Output, str, int]
"""m, n and k, what becomes of it, and where: the name of a GPU, and how many SMs it has."""


@dataclass(frozen=True)
class Entry:
    """A measured choice."""

    gpu: str
    num_sms: int
    output: Output
    m: int
    n: int
    k: int
    tile: str
    """The tile's name. The tile may exist no more, nor the one that it replaces."""
    us: float
    replaces: str
    """The tile of the lowest cost."""
    replaced_us: float

    @property
    def product(self) -> Product:
        """The product that it is the choice for; a table has one entry for it."""
        return self.m, self.n, self.k, self.output, self.gpu, self.num_sms

    @property
    def name(self) -> str:
        """The product in short, for messages."""
        return f"{self.m}x{self.n}x{self.k} {self.output.name} on {self.gpu}, {self.num_sms} SMs"


def read_table(path: Path) -> list[Entry]:
    """Read a table; any mistake in it is a ValueError that names the file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a table of tuned products, got {error}") from error
    return parse_table(text, str(path))


def parse_table(text: str, file: str) -> list[Entry]:
    """Entries of a table's text; `file` is its name for messages."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: expected JSON, got {error}") from error
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise ValueError(f"{file}: format: expected {FORMAT}, got {content.get('format')!r}")
    _expect_fields(file, content, TABLE_FIELDS)
    if not isinstance(content["entries"], list):
        raise ValueError(f"{file}: entries: expected a list, got {content['entries']!r}")
    found: dict[Product, int] = {}
    entries = [_entry(f"{file}: entry {number}", each) for number, each in enumerate(content["entries"], 1)]
    for number, entry in enumerate(entries, 1):
        first = found.setdefault(entry.product, number)
        if first != number:
            raise ValueError(f"{file}: entry {number}: expected a product of its own, got that of entry {first} again")
    return entries


def _entry(where: str, content: Any) -> Entry:
    _expect_fields(where, content, ENTRY_FIELDS)

    def size(name: str) -> int:
        return integer_in_range(f"{where}: {name}", content[name], 1)

    def time(name: str) -> float:
        value = content[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{where}: {name}: expected microseconds above 0, got {value!r}")
        return float(value)

    def word(name: str, known: Collection[str] = ()) -> str:
        value = content[name]
        if not isinstance(value, str) or (known and value not in known):
            expected = f"one of {', '.join(known)}" if known else "a name"
            raise ValueError(f"{where}: {name}: expected {expected}, got {value!r}")
        return value

    return Entry(
        gpu=word("gpu"),
        num_sms=size("num_sms"),
        output=OUTPUTS_BY_NAME[word("output", OUTPUTS_BY_NAME)],
        m=size("m"),
        n=size("n"),
        k=size("k"),
        tile=word("tile"),
        us=time("us"),
        replaces=word("replaces"),
        replaced_us=time("replaced_us"),
    )


def _expect_fields(where: str, content: Any, names: Collection[str]) -> None:
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError(f"{where}: expected an object with {', '.join(names)}, got {content!r}")

"""Write tables of measured choices, which deep_gemm/gemm/table.py reads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from deep_gemm.gemm.table import ENTRY_FIELDS, FORMAT, Entry, Product


def table_text(entries: Iterable[Entry], made_by: str) -> str:
    """Write a table: by GPU, kind of product and weight, then by m."""
    ordered = sorted(entries, key=lambda e: (e.gpu, e.num_sms, e.output.name, e.n, e.k, e.m))
    lines = ",\n".join(
        json.dumps(
            {name: getattr(entry, name) for name in ENTRY_FIELDS}
            | {"output": entry.output.name}
            | {"us": round(entry.us, 2), "replaced_us": round(entry.replaced_us, 2)}
        )
        for entry in ordered
    )
    return f'{{"format": {FORMAT},\n"made_by": {json.dumps(made_by)},\n"entries": [\n{lines}\n]}}\n'


def updated(entries: Iterable[Entry], measured: Collection[Product], found: Iterable[Entry]) -> list[Entry]:
    """Put in what was found; of the products that were measured no other entry stays."""
    return [*(entry for entry in entries if entry.product not in measured), *found]

"""The result of a run: one JSON file with a header and rows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .cases import RESULTS_FOLDER, Case, Shape
from .contenders import FAST
from .machine import GpuState
from .timing import Spread

RESULTS = RESULTS_FOLDER
HEADER_KEYS = frozenset(
    {"kind", "date", "machine", "versions", "commit", "dirty", "source_sha256", "method", "stopped"}
)
FIELDS_OF_EVERY_ROW = frozenset({"kind", "shape", "contender", "mode", "us", "us_min", "us_max", "error", "config"})
FIELDS_OF_OLDER_FILES = frozenset({"deepgemm_ratio_to_fast"})  # `peers` replaces it
MAX_NAME = 100
"""Kernel names are cut to this length, because names of templates fill whole pages."""
MODES = ("cold", "sustained", "host", "host_new_m", "host_new_weight", "compile", "numerics", "step", "forward")


@dataclass(frozen=True)
class Row:
    """One contender's result on one shape in one mode."""

    kind: str
    shape: Shape
    contender: str
    mode: str
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    error: float | None = None
    config: str | None = None
    floor_us: float | None = None
    operations: int | None = None
    bytes: int | None = None
    fast_shape: Shape | None = None
    """The dense shape of the `cublaslt_fast` product that this case is compared with."""
    is_judged: bool | None = None
    """True if the case is only for judging; None for new shapes, and in files older than this field."""
    kernels: tuple[str, ...] = ()
    """Names of the kernels that one call launches."""
    parts: dict[str, float] | None = field(default=None, hash=False)
    """Microseconds of each part of a layer, in order of execution."""
    operands: str | None = None
    """Distribution of the operands, for errors of products."""
    output: str | None = None
    """Type of the result, for errors of products."""
    error_with_cast: float | None = None
    bias: float | None = None
    """Mean of the differences away from zero, divided by the mean magnitude."""
    peak_bytes: int | None = None
    """The most bytes that a training step has allocated at a time."""
    sm_mhz: float | None = None
    power_w: float | None = None
    failed: str | None = None
    """The reason why the time is missing or does not count."""

    @classmethod
    def of(
        cls, case: Case, contender: str, mode: str, spread: Spread | None, state: GpuState | None = None, **more: Any
    ) -> Row:
        """Make the row of a case. For groups and weight gradients the fast product has the shape `fast_shape`."""
        computed = Case("dense", case.fast_shape) if contender == FAST and case.kind != "dense" else case
        if spread is not None:
            more.update(asdict(spread))
        if state is not None:
            more.update(sm_mhz=state.sm_mhz, power_w=state.power_w)
        return cls(
            case.kind,
            case.shape,
            contender,
            mode,
            floor_us=round(computed.floor_us, 3),
            operations=computed.operations,
            bytes=computed.bytes,
            fast_shape=None if case.has_own_rivals else case.fast_shape,
            is_judged=case.is_judged,
            **more,
        )

    @property
    def tflops(self) -> float | None:
        """Return the rate of operations in the median time."""
        return self.operations / self.us / 1e6 if self.us and self.operations else None

    @property
    def fraction_of_floor(self) -> float | None:
        """Return the lower limit of the time divided by the median time; 1 is the fastest that the machine allows."""
        return self.floor_us / self.us if self.us and self.floor_us else None


Add = Callable[[list[Row]], None]
"""Receives rows as soon as they are measured."""
Announce = Callable[[str], None]
"""Receives the name of each step before it begins."""


@dataclass
class Report:
    """A run. `save` may be called after each new row."""

    header: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Return the kind that the run measured: one of `bench`, or of an older command."""
        return str(self.header["kind"])

    def default_path(self) -> Path:
        """Return `benchmarks/results/kind-date-commit.json` in the checkout, for any working directory."""
        date = "".join(character for character in self.header["date"][:19] if character.isalnum())
        return RESULTS / f"{self.kind}-{date}-{self.header['commit']}.json"

    def save(self, path: Path) -> None:
        """Write the file. A run that is stopped leaves a complete file."""
        header = json.dumps({**self.header, "stopped": self.header.get("stopped")}, indent=1, allow_nan=False)
        rows = ",\n".join(json.dumps(_plain(row), allow_nan=False) for row in self.rows)
        write_whole(path, f'{{"header": {header},\n"rows": [\n{rows}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a file that `save` wrote. For any other file, raise a ValueError that names the fault."""
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: expected JSON, got {error}") from error
        if not isinstance(content, dict) or set(content) != {"header", "rows"}:
            raise ValueError(f"{path}: expected an object with header and rows")
        if missing := HEADER_KEYS - set(content["header"]):
            raise ValueError(f"{path}: the header lacks {', '.join(sorted(missing))}")
        return cls(content["header"], [_row(path, row) for row in content["rows"]])

    def failures(self) -> list[Row]:
        """List the rows of this package's own products that failed."""
        return [row for row in self.rows if row.failed and row.contender.startswith("deep_gemm")]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)  # noqa: PTH105  Path.rename replaces files only on Unix


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean of ratios, or None if there are none.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def _plain(row: Row) -> dict[str, Any]:
    """Convert the row to JSON: NaN and infinity become null, and unknown optional fields are left out."""
    values = {name: _plain_number(value) for name, value in asdict(row).items()}
    return {name: value for name, value in values.items() if name in FIELDS_OF_EVERY_ROW or value not in (None, ())}


def _plain_number(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain_number(part) for name, part in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _row(path: Path, content: dict[str, Any]) -> Row:
    names = {each.name for each in fields(Row)}
    content = {name: value for name, value in content.items() if name not in FIELDS_OF_OLDER_FILES}
    if not set(content) >= FIELDS_OF_EVERY_ROW or not set(content) <= names:
        odd = (FIELDS_OF_EVERY_ROW - set(content)) | (set(content) - names)
        raise ValueError(f"{path}: a row has missing or unknown fields: {', '.join(sorted(odd))}")
    if content["mode"] not in MODES:
        raise ValueError(f"{path}: mode: expected one of {', '.join(MODES)}, got {content['mode']!r}")
    tuples = {
        name: tuple(content[name]) for name in ("shape", "fast_shape", "kernels") if content.get(name) is not None
    }
    return Row(**{**content, **tuples})

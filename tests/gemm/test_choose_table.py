"""Tables of measured choices: how they are read and written, what is said of mistakes, and when they decide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.core import settings as settings_module
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.gpu import H20, H200
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.choose import cheapest_tile, reachable, reachable_decode, select, tuned_tiles
from deep_gemm.gemm.explain import explain
from deep_gemm.gemm.output import Output
from deep_gemm.gemm.table import Entry, parse_table, read_table
from deep_gemm.gemm.tiles import tiles_by_name
from lab.bench.tuned import table_text, updated

WGRAD = Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW)
SHAPE = (200, 2112, 7168)


def entry(
    m: int = 200, n: int = 2112, k: int = 7168, tile: str = "128x160", output: Output | None = None, **more: Any
) -> Entry:
    output = output or Output()
    values = {"gpu": "H200", "num_sms": 132, "us": 9.5, "replaces": "64x64", "replaced_us": 10.25, **more}
    return Entry(output=output, m=m, n=n, k=k, tile=tile, **values)


ENTRIES = [
    entry(),
    entry(8, tile="64x8/k8 2/SM"),
    entry(64, tile="64x64/k5"),
    entry(4096, output=WGRAD, tile="128x128"),
    entry(gpu="H20", num_sms=78),
    entry(gpu="H200", num_sms=114),
]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's table, in force."""
    path = tmp_path / "mine.json"
    path.write_text(table_text(ENTRIES, "hand"))
    monkeypatch.setenv("DG_TUNED_TABLE", str(path))
    forget()
    yield path
    monkeypatch.undo()
    forget()


def forget() -> None:
    settings_module.settings.cache_clear()
    tuned_tiles.cache_clear()


# Files


def test_a_table_is_read_as_it_was_written() -> None:
    text = table_text(ENTRIES, "hand")
    assert sorted(parse_table(text, "t.json"), key=repr) == sorted(ENTRIES, key=repr)
    assert table_text(reversed(parse_table(text, "t.json")), "hand") == text


def test_a_table_has_a_line_for_each_entry_sorted() -> None:
    lines = table_text(ENTRIES, "hand").splitlines()
    assert lines[:3] == ['{"format": 1,', '"made_by": "hand",', '"entries": [']
    assert lines[-1] == "]}"
    read = [json.loads(line.rstrip(",")) for line in lines[3:-1]]
    assert [(e["gpu"], e["num_sms"], e["output"], e["m"]) for e in read] == [
        ("H20", 78, "bf16", 200),
        ("H200", 114, "bf16", 200),
        ("H200", 132, "1d1d fp32+d", 4096),
        ("H200", 132, "bf16", 8),
        ("H200", 132, "bf16", 64),
        ("H200", 132, "bf16", 200),
    ]
    assert {key: read[3][key] for key in ("tile", "us", "replaces", "replaced_us")} == {
        "tile": "64x8/k8 2/SM",
        "us": 9.5,
        "replaces": "64x64",
        "replaced_us": 10.25,
    }


def test_what_was_measured_again_is_replaced_or_goes_and_the_rest_stays() -> None:
    again, worse = entry(tile="128x192"), entry(64)
    kept = [each for each in ENTRIES if each.product not in (again.product, worse.product)]
    assert updated(ENTRIES, {again.product, worse.product}, [again]) == [*kept, again]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "t.json: expected JSON, got "),
        ("[]", "t.json: expected an object with format, made_by, entries, got []"),
        ('{"format": 2, "rows": []}', "t.json: format: expected 1, got 2"),
        ('{"format": 1}', "t.json: expected an object with format, made_by, entries, got {'format': 1}"),
        ('{"format": 1, "made_by": "", "entries": {}}', "t.json: entries: expected a list, got {}"),
        ('{"format": 1, "made_by": "", "entries": [3]}', "t.json: entry 1: expected an object with gpu, num_sms, "),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse_table(text, "t.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 0}, "m: expected an integer in 1..2147483647, got 0"),
        ({"num_sms": "132"}, "num_sms: expected an integer in 1..2147483647, got '132'"),
        ({"us": 0}, "us: expected microseconds above 0, got 0"),
        ({"replaced_us": None}, "replaced_us: expected microseconds above 0, got None"),
        ({"gpu": 200}, "gpu: expected a name, got 200"),
        ({"output": "fp16"}, "output: expected one of bf16, bf16+c, "),
        ({"tile": []}, "tile: expected a name, got []"),
        ({"speed": 1}, "expected an object with gpu, num_sms, output, m, n, k, tile, us, replaces, replaced_us, got "),
        ({"m": 8}, "expected a product of its own, got that of entry 1 again"),
    ],
)
def test_mistakes_in_an_entry_are_named(change: dict[str, Any], message: str) -> None:
    content = json.loads(table_text([entry(8), entry(200)], "hand"))
    content["entries"][1].update(change)
    with pytest.raises(ValueError, match=f"^t.json: entry 2: {re.escape(message)}"):
        parse_table(json.dumps(content), "t.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: expected a table of tuned products, got "):
        read_table(tmp_path / "none.json")


# What is chosen


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("each", ENTRIES, ids=lambda each: each.name)
def test_an_entry_decides_for_its_product_alone(each: Entry) -> None:
    gpu = replace(H20 if each.gpu == "H20" else H200, num_sms=each.num_sms)
    sizes = each.m, each.n, each.k
    tile = tiles_by_name(each.output)[each.tile]
    assert tile != cheapest_tile(*sizes, each.output, gpu), "the cost would choose it too"
    assert select(*sizes, each.output, gpu) == tile.config(each.output, each.k)
    by_cost = cheapest_tile(*sizes, Output(with_c=True), gpu).config(Output(with_c=True), each.k)
    assert select(*sizes, Output(with_c=True), gpu) == by_cost
    fewer = replace(gpu, num_sms=gpu.num_sms - 2)
    assert select(*sizes, each.output, fewer) == cheapest_tile(*sizes, each.output, fewer).config(each.output, each.k)


@pytest.mark.usefixtures("table")
def test_what_a_table_chooses_is_reachable() -> None:
    tiles = [(tiles_by_name(each.output)[each.tile], each.output) for each in ENTRIES]
    found = {tile.config(output, k) for tile, output in tiles for k in range(128, 1025, 128)}
    assert found <= {*reachable(), *reachable_decode()}


@pytest.mark.usefixtures("table")
def test_an_entry_that_splits_k_is_passed_over_where_none_may() -> None:
    sizes = 64, 2112, 7168
    assert select(*sizes, Output(), H200).cluster_k == 5
    alone = select(*sizes, Output(), H200, split_k=False)
    assert alone == cheapest_tile(*sizes, Output(), H200, split_k=False).config(Output(), 7168)
    assert alone.cluster_k == 1


@pytest.mark.usefixtures("table")
def test_an_entry_of_the_decode_kernel_is_passed_over_on_some_of_the_sms() -> None:
    assert isinstance(select(8, 2112, 7168, Output(), H200), DecodeConfig)
    assert isinstance(select(8, 2112, 7168, Output(), H200, whole_gpu=False), GemmConfig)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpu": "H800"}, "on H800, 132 SMs: left out, gpu: expected one of H200, H100, H20, got 'H800'"),
        ({"tile": "64x33"}, "on H200, 132 SMs: left out, tile: expected one of 64x32, 64x64, "),
        ({"output": WGRAD}, "132 SMs: left out, tile: expected one of 64x64, 64x64/k3, 128x128, "),
        ({"m": 64, "tile": "128x256/m2"}, "expected one that can run it, got 128x256/m2: m is one tile"),
        ({"k": 128, "tile": "64x64/k5"}, "expected one that can run it, got 64x64/k5: k too short to split"),
        ({"num_sms": 4, "tile": "64x64/k5"}, "expected one that can run it, got 64x64/k5: too few SMs for a cluster"),
    ],
)
def test_an_entry_that_cannot_run_is_told_of_once_and_left_out(
    table: Path, wrong: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table.write_text(table_text([entry(**wrong), entry(300)], "hand"))
    for m in (200, 201, 300):
        select(m, 2112, 7168, Output(), H200)
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"deep_gemm: {table}: ")
    assert message in told
    assert select(300, 2112, 7168, Output(), H200).name.startswith("128x160 "), "the others hold"


def test_tables_are_read_once(table: Path) -> None:
    first = select(*SHAPE, Output(), H200)
    table.write_text("{")
    assert select(*SHAPE, Output(), H200) == first


@pytest.mark.usefixtures("table")
def test_explain_says_what_a_table_chose(capsys: pytest.CaptureFixture[str]) -> None:
    explain(*SHAPE, gpu="H200")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    (chosen,) = [line for line in lines if "chosen" in line]
    assert chosen.startswith("128x160 ")
    assert chosen.endswith(" chosen, by a table")
    assert any(line.endswith("% less") for line in lines), "the cost's own choice, which lost"
    explain(201, 2112, 7168, gpu="H200")
    assert "by a table" not in capsys.readouterr().out

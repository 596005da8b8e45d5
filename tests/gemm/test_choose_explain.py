"""`explain`: all candidates for every product, each with the predicted time and the reason why it was not chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import explain, fp8_gemm_nt, k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.recipes import E2M1, E4M3, MX, PER_BLOCK, PER_ROW, WHOLE
from deep_gemm.core.gpu import H200
from deep_gemm.gemm.choose import fp8
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.explain import GROUPS
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import FP4_OPERANDS, USUAL_OPERANDS, Output, Sizes
from lab import configs

BY_ROW, AS_BOTH = (1, 1, 128), {"with_c": True, "accumulate": True}
BY_WHOLE_ROWS: dict[str, Any] = {"recipe_a": (1, 0), "recipe_b": (1, 0)}
QUESTIONS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "dense": ((100, 7168, 2048), {}),
    "decode": ((3, 7168, 2048), {}),
    "fp32": ((100, 7168, 2048), {"d_dtype": torch.float32}),
    "with c": ((100, 7168, 2048), {"with_c": True}),
    "added to d": ((4096, 7168, 2048), {"d_dtype": torch.float32, "accumulate": True}),
    "weight gradient": ((4096, 7168, 2048), {"recipe": BY_ROW, "accumulate": True}),
    "ids": ((8192, 4096, 7168), {"groups": "ids", "num_groups": 32}),
    "ends": ((8192, 4096, 7168), {"groups": "ends", "num_groups": 32, "d_dtype": torch.float32}),
    "counts": ((192, 4096, 7168), {"groups": "counts", "num_groups": 32}),
    "counts, 1d1d": ((192, 4096, 7168), {"groups": "counts", "num_groups": 32, "recipe": BY_ROW}),
    "whole rows, decode": ((3, 7168, 2048), BY_WHOLE_ROWS),
    "whole rows, ids": ((8192, 4096, 7168), {"groups": "ids", "num_groups": 32, **BY_WHOLE_ROWS}),
    "fp4": ((300, 7168, 2048), {"fp4": True}),
    "fp4, few rows, fp32": ((3, 7168, 2304), {"fp4": True, "d_dtype": torch.float32}),
    "fp4, ids": ((8192, 4096, 7168), {"groups": "ids", "num_groups": 32, "fp4": True}),
    "counts of 384 rows": ((384, 4096, 7168), {"groups": "counts", "num_groups": 12}),
    "fp4, counts": ((192, 4096, 7168), {"groups": "counts", "num_groups": 32, "fp4": True}),
    "depths": ((7168, 2048, 4096), {"groups": "depths", "num_groups": 16, "accumulate": True}),
    "heads": ((32, 1024, 4096), {"groups": "heads", "num_groups": 8}),
    "heads, many rows, c": ((4096, 1024, 4096), {"groups": "heads", "num_groups": 8, "with_c": True}),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_product_is_explained_best_first_in_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, more = QUESTIONS[name]
    found = explain(*sizes, **more, gpu="H200")
    costs = [candidate.cost_us for candidate in found]
    assert costs == sorted(costs)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert chosen("\n".join(lines)) in {each.tile.name for each in (found[:1] if "counts" in name else found)}
    known = {*configs.reachable_dense(), *configs.reachable_grouped(), *configs.reachable_grouped_decode()}
    for operands in (USUAL_OPERANDS, FP4_OPERANDS, (E4M3, WHOLE, WHOLE)):
        known |= {*configs.reachable_decode(operands)}
    known |= {*configs.reachable_k_grouped(), *configs.reachable_heads()}
    assert {candidate.config for candidate in found} <= known


def chosen(output: str) -> str:
    """Return the name of the chosen tile in an output of `explain`."""
    (line,) = [line for line in output.splitlines() if line.endswith(" chosen")]
    return line[:14].strip()


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("dense", Output()),
        ("decode", Output()),
        ("fp32", Output(is_fp32=True)),
        ("with c", Output(with_c=True)),
        ("added to d", Output(is_fp32=True, adds_to_d=True)),
        ("weight gradient", Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW)),
        ("fp4", Output(b=E2M1, sfb=MX)),
        ("fp4, few rows, fp32", Output(is_fp32=True, b=E2M1, sfb=MX)),
    ],
)
def test_what_is_chosen_is_what_a_dense_one_runs(name: str, output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, more = QUESTIONS[name]
    explain(*sizes, **more, gpu="H200")
    assert select(Sizes(*sizes), output, H200).name == f"{chosen(capsys.readouterr().out)} {_tail(output, sizes)}"


def _tail(output: Output, sizes: tuple[int, int, int]) -> str:
    """Return the chosen configuration's name without its tile."""
    return select(Sizes(*sizes), output, H200).name.partition("/SM " if sizes[0] < 8 else " ")[2]


@pytest.mark.parametrize("name", ["ids", "ends", "counts", "counts, 1d1d", "fp4, ids", "fp4, counts"])
def test_what_is_chosen_is_what_grouped_rows_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (m, n, k), more = QUESTIONS[name]
    explain(m, n, k, **more, gpu="H200")
    by_row = "recipe" in more
    output = Output(
        is_fp32=by_row or "d_dtype" in more,
        b=E2M1 if "fp4" in more else E4M3,
        sfb=PER_ROW if by_row else MX if "fp4" in more else PER_BLOCK,
        work=GROUPS[more["groups"]],
    )
    rows = m if more["groups"] == "counts" else m / 32
    config = select(Sizes(rows, n, k, 32), output, H200)
    tile = (
        f"{config.block_n}x{config.block_tokens} 4/SM"
        if isinstance(config, DecodeConfig)
        else f"{config.block_m}x{config.block_n}"
    )
    assert chosen(capsys.readouterr().out) == tile


def test_what_is_chosen_is_what_groups_along_k_run(capsys: pytest.CaptureFixture[str]) -> None:
    explain(7168, 2048, 4096, groups="depths", num_groups=16, accumulate=True, gpu="H200")
    output = Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW, work=works.DEPTHS)
    config = select(Sizes(7168, 2048, 4096, 16), output, H200)
    assert config.name.startswith(f"{chosen(capsys.readouterr().out)} ")


def test_it_says_what_moves_and_what_is_multiplied(capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(4096, 7168, 2048, gpu="H200")
    text = " ".join(capsys.readouterr().out.split())
    megabytes = (4096 * 2048 + 7168 * 2048 + 4096 * 7168 * 2) / 1e6
    best = found[0]
    assert f"moves {megabytes:.1f} MB in {best.memory_us:.1f} us" in text
    assert f"multiplies {best.tiles:.0f} tiles in {best.rounds:.0f} rounds in {best.multiply_us:.1f} us" in text


def test_fp4_shows_the_candidates_of_both_kernels_and_half_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(16, 4096, 7168, fp4=True, gpu="H100")
    assert {candidate.tile.is_decode for candidate in found} == {False, True}
    assert chosen(capsys.readouterr().out) == found[0].tile.name
    assert found[0].tile.is_decode
    explain(16, 4096, 7168, gpu="H100")
    explain(4096, 4096, 7168, fp4=True, gpu="H100")
    text = capsys.readouterr().out
    of_a_and_d = 16 * (7168 + 4096 * 2)
    assert f"moves {(4096 * 7168 + of_a_and_d) / 1e6:.1f} MB" in text
    assert f"moves {(4096 * 7168 * 17 / 32 + 256 * of_a_and_d) / 1e6:.1f} MB" in text
    assert "4096 x 4096 x 7168, BF16, B is FP4" in text


def test_scales_of_whole_rows_choose_as_products_by_them(capsys: pytest.CaptureFixture[str]) -> None:
    explain(4096, 4096, 7168, **BY_WHOLE_ROWS, gpu="H200")
    text = capsys.readouterr().out
    assert "4096 x 4096 x 7168, BF16, a scale for each whole row" in text
    config = select(Sizes(4096, 4096, 7168), Output(sfa=WHOLE, sfb=WHOLE), H200)
    assert config.name.startswith(f"{chosen(text)} ")


def test_the_tiles_of_the_menu_are_shown_and_the_others_counted(capsys: pytest.CaptureFixture[str]) -> None:
    menu = {offer.tile.name for offer in fp8.menu_of(2112, 7168, Output(), H200).offers}
    found = [candidate.tile.name for candidate in explain(64, 2112, 7168, gpu="H200") if candidate.why_not is None]
    lines = capsys.readouterr().out.splitlines()
    begin = [line.startswith("tile ") for line in lines].index(True) + 1
    end = lines.index(f"{len(found) - len(menu)} more are not on the menu of this weight")
    assert [line[:14].strip() for line in lines[begin:end]] == [name for name in found if name in menu]
    explain(1024, 7168, 4096, groups="ids", num_groups=8, gpu="H200")
    assert "menu of this weight" not in capsys.readouterr().out, "rows of groups have no menu"


def test_a_tile_that_would_be_faster_and_is_not_on_the_menu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for m in range(1, 65):
        found = explain(m, 7168, 2048, gpu="H200")
        out = capsys.readouterr().out
        is_first = found[0].tile.name == chosen(out)
        assert is_first != (f"; {found[0].tile.name} would take {found[0].cost_us:.1f} us" in out)


def test_a_bar_is_as_long_as_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    explain(64, 2112, 7168, gpu="H100")
    rows = re.findall(r" +(\d+\.\d)  ([█▏▎▍▌▋▊▉]+) ", capsys.readouterr().out)
    totals = [float(total) for total, _ in rows]
    eighths = [sum(" ▏▎▍▌▋▊▉█".index(part) for part in bar) for _, bar in rows]
    assert len(rows) > 8 and max(eighths) >= 8 * 8
    assert eighths == pytest.approx([total / max(totals) * max(eighths) for total in totals], abs=1)


def test_what_cannot_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    explain(100, 7168, 2048, gpu="H200")
    out = capsys.readouterr().out
    assert "1 more cannot run it: m is one tile" in out
    explain(129, 7168, 2048, gpu="H200")
    assert "more cannot run it: too many rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "B200"}, "gpu: expected H200, H100, H20 or None, got 'B200'"),
        ({"d_dtype": torch.float16}, "d_dtype: expected torch.bfloat16 or torch.float32, got torch.float16"),
        ({"m": 0}, "m: expected an integer in 1..2147483647, got 0"),
        ({"m": "a"}, "m: expected an integer in 1..2147483647, got 'a'"),
        ({"m": 1 << 40}, "m: expected an integer in 1..2147483647, got 1099511627776"),
        ({"k": 128.0}, "k: expected an integer in 1..2147483647, got 128.0"),
        ({"num_groups": 0}, "num_groups: expected an integer in 1..2147483647, got 0"),
        ({"groups": ["ids"]}, "groups: expected ids, ends, counts, depths, heads or None, got ['ids']"),
        (AS_BOTH, "accumulate: expected C to be D itself or, with_c, another tensor, got both"),
        ({"num_groups": 2}, "num_groups: expected 1 without groups, got 2"),
        ({"groups": "rows"}, "groups: expected ids, ends, counts, depths, heads or None, got 'rows'"),
        ({"groups": "ids", "with_c": True}, "groups: expected no C for groups of rows (ids), got one"),
        (
            {"groups": "depths", "d_dtype": torch.bfloat16, "accumulate": True},
            "d_dtype: expected torch.float32, got torch.bfloat16",
        ),
        ({"n": 12}, "n: expected a multiple of 8 for torch.bfloat16 output, got 12"),
        ({"n": 10, "d_dtype": torch.float32}, "n: expected a multiple of 4 for torch.float32 output, got 10"),
        ({"k": 100}, "k: expected a multiple of 16, got 100"),
        ({"k": 144, "fp4": True}, "k: expected a multiple of 32 for packed FP4 values, got 144"),
        ({"recipe": BY_ROW, "recipe_b": (1, 0)}, "recipe_b: expected agreement with recipe (1, 1, 128), got (1, 0)"),
        ({"recipe": BY_ROW, "fp4": True}, "recipe: expected (1, 1, 32) for packed FP4 values, got (1, 1, 128)"),
        ({"groups": "heads", "fp4": True}, "groups: expected ids, ends, counts or None, got 'heads'"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        explain(**{"m": 1, "n": 8, "k": 128, **arguments})


def test_products_along_k_refuse_the_same_recipe_in_the_same_words() -> None:
    a, b = (k_grouped_cast_to_fp8(torch.ones(8, 128), [128]) for _ in range(2))
    with pytest.raises(NotImplementedError) as of_product:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks=[128], recipe=(1, 128, 128))
    with pytest.raises(NotImplementedError) as of_explain:
        explain(8, 8, 128, groups="depths", recipe=(1, 128, 128))
    assert str(of_product.value) == str(of_explain.value)
    with pytest.raises(NotImplementedError, match=r"^recipe_a: expected \(1, 128\) for a k-grouped .*, got \(1, 0\)"):
        explain(8, 8, 128, groups="depths", **BY_WHOLE_ROWS)


def test_columns_of_large_numbers_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    explain(2**31 - 1, 4096, 7168, gpu="H20")
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("tile ")) + 1
    for line in lines[first : lines.index("", first)]:
        if " more " not in line:  # not a row, but a sentence
            assert re.match(r"\S+(?: 2/SM)?(?: +\d+(?:\.\d)?){5}  ", line), line


@pytest.mark.parametrize(("n", "k"), [(12, 128), (8, 100)])
def test_products_refuse_the_same_sizes_in_the_same_words(n: int, k: int) -> None:
    a, b = per_token_cast_to_fp8(torch.randn(4, k)), per_block_cast_to_fp8(torch.randn(n, k))
    with pytest.raises(ValueError, match="expected a multiple of") as of_product:
        fp8_gemm_nt(a, b)
    with pytest.raises(ValueError, match="expected a multiple of") as of_explain:
        explain(4, n, k)
    assert str(of_product.value) == str(of_explain.value)

"""`python -m lab tune --fit`: it fits constants to result files, and judges the choices that they lead to."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_gemm.core.gpu import H100, H200
from deep_gemm.gemm.choose import timings
from deep_gemm.gemm.choose.tiles import OUTPUTS_BY_NAME, tiles_for
from deep_gemm.gemm.choose.timings import Timings
from deep_gemm.gemm.kinds.output import Output
from lab.__main__ import app
from lab.bench import tune_fit
from lab.bench.tune_fit import NAMES, OF_A_GPU, Collected, Product

pytestmark = pytest.mark.release

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

MEASURED = Collected.load(RESULTS / "tune-h200-2026-11-22-45f5a79.json").products
SAMPLES = [one for one in MEASURED if one.m > 1 or one.purpose == "launch"][:100]


def dense(m: int, n: int, k: int, output: Output | None = None) -> Product:
    """Make a product that every tile of its output may compute."""
    output = output or Output()
    return Product(output, m, n, k, 0, (), True, "choice", dict.fromkeys((tile.name for tile in tiles_for(output)), 1))


def by_formula(truth: Timings, samples: Iterable[Product] = SAMPLES) -> list[Product]:
    """Return products whose times are exactly the formula's times with these constants."""
    found = []
    for sample in samples:
        us = {name: sample.cost_us(tile, H200, truth) for name, tile in sample.tiles().items()}
        found.append(replace(sample, us={name: value for name, value in us.items() if value < float("inf")}))
    return found


def collected(truth: Timings, count: int = len(SAMPLES)) -> Collected:
    """Collect the times of a made-up GPU on which every product takes exactly the formula's time."""
    return Collected(H200, tuple(by_formula(truth, SAMPLES[:count])))


def shaken(truth: Timings, seed: int) -> Timings:
    """Return the constants, each changed by up to a quarter."""
    rng = random.Random(seed)
    return Timings(*(getattr(truth, name) * rng.uniform(0.8, 1.25) for name in NAMES))


# The fit


def test_times_made_by_the_formula_give_its_constants_back() -> None:
    truth = shaken(tune_fit.START, 0)
    one = collected(truth)
    found = tune_fit.fit([one])["H200"]
    for name in ("launch_us", "sm_tflops", "block_ns", "dram_tb_per_s", "evict_us", "find_us", "by_row"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.1), name
    lost = [tune_fit.regret(product, H200, found) for product in one.products]
    assert sum(lost) / len(lost) < 0.005


def test_parts_of_k_blocks_are_fitted_to_products_with_fine_scales() -> None:
    truth = tune_fit.START
    output = OUTPUTS_BY_NAME["1x128 32x32 bf16"]
    fine = [dense(one.m, one.n, one.k, output) for one in SAMPLES if one.num_groups == 0 and one.m > 1][:30]
    one = Collected(H200, tuple(by_formula(truth, [*SAMPLES[:40], *fine])))  # SAMPLES fix the other constants
    found = tune_fit.fit([one], replace(truth, part_ps=truth.part_ps * 2, part_ns=truth.part_ns / 2))["H200"]
    for name in ("part_ps", "part_ns"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.1), name


def test_a_fit_is_the_same_each_time() -> None:
    one = collected(shaken(tune_fit.START, 1), 30)
    first, second = (tune_fit.fit([one])["H200"] for _ in range(2))
    assert asdict(first) == asdict(second)


def test_what_is_held_back_does_not_change_the_fit() -> None:
    one = collected(shaken(tune_fit.START, 1), 30)
    others = tuple(
        each if each.is_fitted else replace(each, us={name: 2 * us for name, us in each.us.items()})
        for each in one.products
    )
    found = [tune_fit.fit([each])["H200"] for each in (one, replace(one, products=others))]
    assert asdict(found[0]) == asdict(found[1])


def test_gpus_share_all_constants_but_those_of_their_memory() -> None:
    truth = shaken(tune_fit.START, 2)
    slower = replace(truth, dram_tb_per_s=truth.dram_tb_per_s * 0.6, evict_us=truth.evict_us * 2)
    h200, h100 = collected(truth, 40), replace(collected(slower, 40), gpu=H100)
    found = tune_fit.fit([h200, h100])
    assert found["H100"].dram_tb_per_s < 0.75 * found["H200"].dram_tb_per_s
    for name in set(NAMES) - set(OF_A_GPU):
        assert getattr(found["H100"], name) == getattr(found["H200"], name)


# Judging


def test_a_regret_is_what_the_chosen_tile_took_beyond_the_best() -> None:
    truth = timings.timings_of(H200)
    (product,) = by_formula(truth, [dense(300, 4096, 4096)])
    chosen = product.chosen(H200, truth).name
    assert tune_fit.regret(product, H200, truth) == pytest.approx(product.us[chosen] / product.best_us - 1)
    slower = replace(product, us={**product.us, chosen: product.best_us * 1.5})
    fastest = min(us for name, us in slower.us.items())
    assert tune_fit.regret(slower, H200, truth) == pytest.approx(slower.us[chosen] / fastest - 1)


def test_a_chosen_tile_that_was_not_timed_counts_as_the_slowest() -> None:
    truth = timings.timings_of(H200)
    (product,) = by_formula(truth, [dense(300, 4096, 4096)])
    others = {name: us for name, us in product.us.items() if name != product.chosen(H200, truth).name}
    expected = max(others.values()) / min(others.values()) - 1
    assert tune_fit.regret(replace(product, us=others), H200, truth) == pytest.approx(expected)


def test_regrets_are_summed_up_by_kind_and_half() -> None:
    products = by_formula(timings.timings_of(H200))
    found = {each.of: each for each in tune_fit.regrets(products, H200, timings.timings_of(H200))}
    for half in ("fitted", "held back"):
        kinds = {kind: found[f"{kind}, {half}"] for kind in ("dense", "ids", "counts", "depths")}
        assert found[f"all, {half}"].count == sum(each.count for each in kinds.values())
        assert found[f"all, {half}"].worst == max(each.worst for each in kinds.values())
    assert sum(each.count for of, each in found.items() if of.startswith("all")) == len(products)


# The command


def write(path: Path, of: Collected, gpu: str = "NVIDIA H200") -> Path:
    """Write a file of times."""
    rows = [
        {
            "output": each.output.name,
            "m": each.m,
            "n": each.n,
            "k": each.k,
            "groups": each.num_groups,
            "sizes": list(each.sizes),
            "fitted": each.is_fitted,
            "purpose": each.purpose,
            "us": {name: [us, us, us] for name, us in each.us.items()},
            "failed": {},
        }
        for each in of.products
    ]
    path.write_text(json.dumps({"header": {"machine": {"gpu": gpu, "num_sms": 132}}, "rows": rows}))
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_file_of_constants_is_what_the_fit_gives(tmp_path: Path) -> None:
    one = collected(shaken(tune_fit.START, 3), 30)
    file = write(tmp_path / "a.json", one)
    assert Collected.load(file) == one
    code, output = invoke("--fit", file, "--out", tmp_path / "t.json")
    assert code == 0, output
    content = json.loads((tmp_path / "t.json").read_text())
    assert Timings(**content["all"], **content["gpus"]["H200"]).__dict__ == tune_fit.fit([one])["H200"].__dict__
    assert content["gpus"]["H100"] == {name: getattr(timings.measured()["H100"], name) for name in OF_A_GPU}, "kept"
    assert content["made_by"] == "python -m lab tune --fit a.json"
    assert "all, held back" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--fit",), "tune: expected --fit and files of times of tiles, got none"),
        (("f.json",), "tune: expected --fit and files of times of tiles, got none"),
        (("--fit", "none.json"), "none.json: expected a file of times of tiles, got FileNotFoundError"),
    ],
)
def test_command_line_refuses_in_words(arguments: tuple[str, ...], complaint: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert complaint in " ".join(output.split())


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"header": {"machine": {"gpu": "NVIDIA B200", "num_sms": 148}}, "rows": []}']
)
def test_what_is_no_collection_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"f\.json: expected a file of times of tiles, got "):
        Collected.load(path)


# The constants in force


def test_the_packages_constants_are_the_fits_to_the_files_that_they_name() -> None:
    """A new fit would take long. Instead, check that no constant would fit better if it were 5% smaller or larger."""
    made_by = json.loads(timings.FILE.read_text())["made_by"]
    command, _, names = made_by.partition(" --fit ")
    assert command == "python -m lab tune"
    assert timings.FILE.read_text() == tune_fit.text_of(timings.measured(), made_by)
    files = [Collected.load(RESULTS / name) for name in names.split()]
    assert {file.gpu.name for file in files} == set(timings.measured())
    search = tune_fit._Search(files, timings.measured())
    for name in NAMES:
        for factor in (0.95, 1.05):
            changed = tune_fit._Search(files, tune_fit._changed(search.timings, name, None, factor))
            assert changed.loss > 0.999 * search.loss, f"{name} fits better if it is multiplied by {factor}"


def test_choices_are_as_good_on_products_that_the_fit_never_saw() -> None:
    """Bound regrets in files that the constants were fitted to; docs/performance_log.md has earlier models' regrets."""
    for file in RESULTS.glob("tune-*.json"):
        one = Collected.load(file)
        found = {each.of: each for each in tune_fit.regrets(one.products, one.gpu, timings.timings_of(one.gpu))}
        assert found["all, held back"].mean < {"H200": 0.014, "H100": 0.018}[one.gpu.name]
        assert found["all, held back"].p95 < 0.09

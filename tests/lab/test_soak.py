"""The soak passes right products, and finds planted faults: wrong values, stray writes, errors not raised."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import host_never_waits, raising
from torch import Tensor
from typer.testing import CliRunner

import deep_gemm
from deep_gemm.core import settings
from deep_gemm.kernels import KERNELS
from deep_gemm.nn import experts
from lab.__main__ import app
from lab.sim import lay_scales
from lab.soak import attempt as attempts
from lab.soak import trial as trials
from lab.soak.ahead import drawn
from lab.soak.attempt import Attempt, attempt
from lab.soak.command import kinds_of
from lab.soak.draw import Draw
from lab.soak.faults import FAULTS
from lab.soak.kernels import kernels_on
from lab.soak.kinds import ALL, KINDS, dense
from lab.soak.trial import Trial

KINDS_FOLDER = Path(dense.__file__).parent
DENSE = KINDS["fp8_gemm"]
CALLS = dense.Dense.calls
MADE_OF_OTHERS = {
    "wgrad_gemm_fp8_fp8_fp32_nt",  # fp8_gemm_nt with C = D
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",  # k_grouped_fp8_gemm_nt_contiguous with C = D
    "per_custom_dims_cast_to_fp8",  # per_token_cast_to_fp8 of another shape
}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.kind)
def test_problems_of_every_kind_pass(kind: type[Trial]) -> None:
    for number in range(2):
        found = attempt(11, number, (kind,), "cpu")
        assert found.wrong is None, f"{found.text}: {found.done}: {found.wrong}"
        assert found.calls


def test_a_problem_is_told_by_what_was_drawn_for_it() -> None:
    assert doctest.testmod(trials).attempted > doctest.testmod(trials).failed == 0
    text = DENSE(Draw("0", "cpu")).text
    assert re.match(r"major=\w\w by_row=\w+ exact=\w+ dtype=torch\.\w+ c=\w+ ", text)
    assert re.search(r" m=\d+ n=\d+ k=\d+ weight: \(exact=", text)
    assert "; a float8_e4m3fn (" in text


def test_every_product_cast_and_layer_has_a_kind() -> None:
    """Or another name of it has."""
    named = set(re.findall(r"\w+", "".join(path.read_text() for path in KINDS_FOLDER.glob("*.py"))))
    computes = re.compile(
        "fp8_|bf16_|m_grouped|k_grouped|tf32|einsum$|linear$|experts$|silu|gather|expert_rows|per_|cast_both"
    )
    tried = {id(getattr(deep_gemm, name)) for name in vars(deep_gemm)["__all__"] if name in named}
    # A name that takes scales of FP4 calls one that does not, or is one.
    names = {name for name in vars(deep_gemm)["__all__"] if computes.match(name)} - MADE_OF_OTHERS
    missing = {
        name
        for name in names
        if id(getattr(deep_gemm, name)) not in tried and name.replace("fp8_", "fp8_fp4_", 1) not in named
    }
    assert missing == set()


def planted(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, Tensor], Any], after: int = 0) -> Attempt:
    """Give the soak's findings if dense products apply `fault` to A and D, after the first `after` calls."""
    calls = 0

    def broken(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(a: Any, b: Any, d: Tensor, *rest: Any, **said: Any) -> Any:
            nonlocal calls
            calls += 1
            result = product(a, b, d, *rest, **said)
            if calls > after:
                fault(a[0], d)
            return result

        return call

    monkeypatch.setattr(DENSE, "calls", {name: broken(call) for name, call in CALLS.items()})
    return first_failure(DENSE)


@pytest.mark.parametrize("kind", ["fp8_gemm_fine", "m_grouped_fp8_contiguous_fine", "m_grouped_fp8_masked_fine"])
def test_one_more_scale_is_a_fault_unless_it_is_in_a_word_that_is_there(kind: str) -> None:
    for seed in range(20):
        trial = KINDS[kind](Draw(str(seed), "cpu"))
        trial.fill()
        is_refused = "shape" in trial.refused_faults()["sfb"]
        with pytest.raises(ValueError, match="sfb: expected shape") if is_refused else nullcontext():
            trial.call({**trial.everything(), "sfb": FAULTS["shape"](trial.operands["sfb"])})


def first_failure(kind: type[Trial], most: int = 10) -> Attempt:
    for number in range(most):
        found = attempt(0, number, (kind,), "cpu")
        if found.wrong is not None:
            return found
    raise AssertionError("nothing was found")


def before_and_behind(d: Tensor) -> list[Tensor]:
    """The elements next to a result in memory."""
    span = (d.shape[0] - 1) * d.stride(0) + d.shape[1]
    return [d.as_strided((1,), (1,), d.storage_offset() + at) for at in (-1, span)]


OUTSIDE = "bytes were written that do not belong to the result"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda _, d: d[-1, -1].add_(1 + d[-1, -1].abs()), "d: 1 of .* elements are wrong, the first at"),
        (lambda _, d: d[0, 0].fill_(torch.nan), "nan instead of"),
        (lambda _, d: before_and_behind(d)[0].fill_(0), OUTSIDE),
        (lambda _, d: before_and_behind(d)[1].fill_(0), OUTSIDE),
        (lambda a, _: a.view(torch.uint8)[0, 0].bitwise_xor_(0x80), "^a: expected an unchanged operand"),
    ],
    ids=["a wrong value", "a value that was not written", "a write before", "a write behind", "a changed operand"],
)
def test_each_fault_is_found(fault: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(told, planted(monkeypatch, fault).wrong or "")


@pytest.mark.parametrize("wrong", ["of_rows", "of_routes"])
def test_gradients_that_know_nothing_of_routes_are_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(experts, wrong)
    monkeypatch.setattr(experts, wrong, lambda x, rows: torch.ones_like(right(x, rows)))
    assert "elements are wrong" in (first_failure(KINDS["train_experts"]).wrong or "")


@pytest.mark.parametrize("wrong", ["nibbles", "scales"])
def test_fp4_that_is_read_otherwise_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(product: Callable[..., Any], a: Any, b: Any, *rest: Any, **said: Any) -> Any:
        values, sf = b
        if wrong == "nibbles":
            codes = values.view(torch.uint8)
            values = codes << 4 | codes >> 4
        else:
            sf = sf.roll(1, 0)
        return product(a, (values, sf), *rest, **said)

    monkeypatch.setattr(DENSE, "calls", {name: partial(broken, call) for name, call in CALLS.items()})
    assert re.search("d: .* elements are wrong", first_failure(KINDS["fp8_fp4_gemm"]).wrong or "")


def test_a_fault_of_a_later_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted(monkeypatch, lambda _, d: d[0, 0].add_(1 + d[0, 0].abs()), after=5)
    assert found.number > 0 or found.calls > 1


def test_a_bad_call_that_is_not_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(product: Callable[..., Any], *arguments: Any, **said: Any) -> None:
        with suppress(ValueError, NotImplementedError):
            product(*arguments, **said)

    monkeypatch.setattr(DENSE, "calls", {name: partial(lenient, call) for name, call in CALLS.items()})
    assert first_failure(DENSE).wrong == "the call was not refused"


def test_a_refused_call_that_wrote_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(product: Callable[..., Any], *arguments: Any, **said: Any) -> None:
        try:
            product(*arguments, **said)
        except (ValueError, NotImplementedError):
            trial_d[0].fill_(0)
            raise

    trial_d: list[Tensor] = []
    poison = Trial.poison

    def noted(self: Trial) -> None:
        poison(self)
        trial_d[:] = [self.outputs["d"].view]

    monkeypatch.setattr(Trial, "poison", noted)
    monkeypatch.setattr(DENSE, "calls", {name: partial(hasty, call) for name, call in CALLS.items()})
    assert first_failure(DENSE).wrong == "d: expected an unchanged output, got a changed one"


def test_another_error_than_the_contracts_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = raising(RuntimeError("an illegal memory access"))
    monkeypatch.setattr(DENSE, "calls", dict.fromkeys(CALLS, broken))
    assert first_failure(DENSE).wrong == "RuntimeError: an illegal memory access"


def test_an_attempt_is_the_same_again_alone() -> None:
    for number in range(6):
        among_all = attempt(3, number, ALL, "cpu")
        alone = attempt(3, number, (KINDS[among_all.kind],), "cpu")
        assert alone == among_all
    assert attempt(4, 0, ALL, "cpu") != attempt(3, 0, ALL, "cpu")


@pytest.mark.host_compiler
def test_kernels_are_tried_by_themselves_and_again_alone() -> None:
    kernels = kinds_of(["kernels"], "cpu")
    assert [each.kind for each in kernels] == [f"kernel:{kernel.name}" for kernel in KERNELS]
    assert kinds_of([], "cpu") == ALL
    for number in range(4):
        found = attempt(5, number, kernels, "cpu")
        assert found.wrong is None, f"{found.kind}: {found.text}: {found.wrong}"
        assert found.calls
        assert found == attempt(5, number, kinds_of([found.kind], "cpu"), "cpu")
        assert len([*drawn(5, number, 1, kernels)]) == 1
    assert "kernel:post_rows" not in [each.kind for each in kernels_on("cuda")]


@pytest.mark.host_compiler
def test_a_wrong_result_of_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lay_scales, "run", lambda *_, **__: None)
    result = CliRunner().invoke(app, ["soak", "--device", "cpu", "--only", "kernel:lay_scales", "--count", "1"])
    assert result.exit_code == 1
    assert "ValueError: words: expected" in result.output
    assert "soak --seed 0 --first 0 --count 1 --only kernel:lay_scales --device cpu" in result.output


def test_settings_are_as_they_were_before() -> None:
    before = settings.in_force.choices
    attempt(0, 0, ALL, "cpu")
    assert settings.in_force.choices == before


def test_every_fault_is_one_that_a_kind_names() -> None:
    named = {fault for kind in ALL for faults in kind.faults.values() for fault in faults.split()}
    of_dense = DENSE(Draw("0", "cpu")).refused_faults()
    assert named | {fault for faults in of_dense.values() for fault in faults.split()} == FAULTS.keys()


def test_the_command_writes_a_record_and_says_how_to_repeat_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "soak.json"
    first = ["soak", "--device", "cpu", "--seed", "2", "--count", "3", "--out", str(out)]
    result = CliRunner().invoke(app, first)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert (record["attempts"], record["failures"], record["device"], record["seed"]) == (3, [], "cpu", 2)
    assert record["machine"]["gpu"] is None
    assert record["versions"]["torch"] == torch.__version__

    monkeypatch.setattr(attempts, "mistakes", lambda *_: "planted")
    result = CliRunner().invoke(app, [*first[:-2], "--first", "5"])
    assert result.exit_code == 1
    lines = re.findall(r"python -m lab (soak .*)", result.output)
    assert len(lines) == 3
    assert "--first 6 --count 1" in lines[1]
    again = CliRunner().invoke(app, lines[1].split())
    assert lines[1] in again.output
    monkeypatch.undo()
    assert CliRunner().invoke(app, lines[1].split()).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--only", "nothing"], "expected kinds among"), (["--device", "tpu"], "tpu")]
)
def test_what_cannot_be_soaked_is_refused(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["soak", *arguments])
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.gpu
def test_a_short_soak_on_a_gpu() -> None:
    for number in range(60):
        found = attempt(1, number, ALL, "cuda")
        assert found.wrong is None, f"{found.kind} {number}: {found.text}: {found.done}: {found.wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.kind)
def test_no_call_waits_for_the_gpu_or_reads_from_it(kind: type[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a call synchronized")

    for number in range(4):
        trial = kind(Draw(f"wait {number}", "cuda"))
        trial.fill()
        trial.poison()
        trial.call(trial.everything())
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", forbidden)
            with host_never_waits():
                trial.call(trial.everything())

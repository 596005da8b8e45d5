"""One attempt: a random trial, called in several ways under several settings, and judged after each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deep_gemm.core import settings

from .draw import Draw
from .faults import FAULTS, REFUSALS, applies
from .judge import Before, mistakes
from .kernels import OfKernel
from .trial import Tensors, Trial
from .ways import Captured, at_once, in_a_thread, on_a_stream, plainly

DIVISORS_OF_SMS = (1, 1, 1, 2, 3, 7)
MOST_ROUNDS = 3
Kind = type[Trial] | OfKernel
TIMES_AT_ONCE = 5


@dataclass
class Attempt:
    """A record of an attempt: its steps, and its mistake if there is one."""

    number: int
    kind: str
    text: str = ""
    done: list[str] = field(default_factory=list)
    """Settings and ways of calling, in order; a failed attempt failed at the last entry."""
    wrong: str | None = None
    calls: int = 0
    refused: int = 0
    replays: int = 0


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore the settings of the process at the end of the block."""
    choices = settings.in_force.choices
    try:
        yield
    finally:
        settings.in_force.change(**vars(choices))


def picked(seed: int, number: int, kinds: Sequence[Kind]) -> tuple[Kind, str]:
    """Pick a kind for an attempt, and the seed of the trial's draws, which does not depend on the other kinds."""
    draw = Draw(f"{seed}/{number}", "cpu")
    kind = kinds[int(draw.rng.random() * len(kinds))]
    return kind, f"{seed}/{number}/{kind.kind}"


def attempt(seed: int, number: int, kinds: Sequence[Kind], device: str) -> Attempt:
    """Draw a trial and try it. The attempt depends only on the seed, the number and the kinds."""
    kind, own_seed = picked(seed, number, kinds)
    found = Attempt(number, kind.kind)
    with settings_restored():
        try:
            if isinstance(kind, OfKernel):
                kind.attempt(own_seed, device, found)
            else:
                found.wrong = _try(own_seed, device, kind, found)
        except Exception as error:  # any error is a finding
            found.wrong = f"{type(error).__name__}: {error}"
    return found


def _drawn(seed: str, device: str, kind: type[Trial]) -> Trial:
    """Draw an alignment, and a trial under it."""
    draw = Draw(seed, device)
    settings.set_mk_alignment_for_contiguous_layout(draw.rng.choice((128, 128, 64, 1)))
    return kind(draw)


def _try(seed: str, device: str, kind: type[Trial], found: Attempt) -> str | None:
    trial = _drawn(seed, device, kind)
    draw, found.text = trial.draw, trial.text
    found.done.append(f"alignment={settings.get_mk_alignment_for_contiguous_layout()}")
    for _ in range(draw.rng.randint(1, MOST_ROUNDS)):
        found.done.append(change_settings(draw))
        trial.fill()
        if (wrong := _call(trial, found)) is not None or (wrong := _call_badly(trial, found)) is not None:
            return wrong
    if draw.flag(0.2):
        twin = _drawn(seed, device, kind)  # with the same signature, so that both calls use one record
        twin.draw.generator.manual_seed(draw.rng.getrandbits(48))
        if (wrong := _call_at_once((trial, twin), found)) is not None:
            return wrong
    if device == "cuda" and draw.flag(0.4):
        return _replay(trial, found)
    return None


def change_settings(draw: Draw) -> str:
    """Change settings as a running server might; return a text that names the new ones."""
    settings.in_force.change(num_sms=None)
    available = settings.get_num_sms()
    num_sms = available // draw.rng.choice(DIVISORS_OF_SMS)
    if draw.flag(0.1):
        num_sms = draw.rng.randint(1, available)
    invariant, pdl, deterministic = draw.flag(0.3), draw.flag(0.3), draw.flag(0.7)
    settings.set_num_sms(num_sms)
    settings.set_batch_invariant(invariant)
    settings.set_pdl(pdl)
    settings.use_deterministic_algorithms(deterministic)
    return f"sms={num_sms} invariant={invariant} pdl={pdl} deterministic={deterministic}"


def _call(trial: Trial, found: Attempt) -> str | None:
    """Call in a way that is drawn, and judge the result."""
    ways = {"plainly": plainly, "in a thread": in_a_thread}
    if trial.draw.device == "cuda":
        ways["on a stream"] = on_a_stream
    way = trial.draw.rng.choice(("plainly", "plainly", *ways))
    found.done.append(way)
    found.calls += 1
    trial.poison()
    before = Before(trial)
    return mistakes(trial, before, ways[way](trial))


def _call_at_once(trials: Sequence[Trial], found: Attempt) -> str | None:
    """Call each trial in a separate thread (several times, unless calls add to outputs), and judge each trial."""
    found.done.append("two threads at once")
    befores = []
    for trial in trials:
        trial.fill()
        trial.poison()
        befores.append(Before(trial))
    times = 1 if trials[0].starts else TIMES_AT_ONCE
    found.calls += times * len(trials)
    for trial, before, made in zip(trials, befores, at_once(trials, times), strict=True):
        if (wrong := mistakes(trial, before, made)) is not None:
            return wrong
    return None


def _call_badly(trial: Trial, found: Attempt) -> str | None:
    """Make calls with one wrong operand, now that a record exists: each call must be refused, and write nothing."""
    everything, faults = trial.everything(), trial.refused_faults()
    possible = [
        (name, fault)
        for name, of_name in faults.items()
        for fault in of_name.split()
        if applies(fault, everything[name])
    ]
    if not possible or 0 in (x.numel() for x in everything.values()):
        return None
    for name, fault in trial.draw.rng.sample(possible, min(len(possible), 2)):
        found.done.append(f"{name} with a wrong {fault}")
        trial.poison()
        before = Before(trial)
        try:
            trial.call({**everything, name: FAULTS[fault](everything[name])})
        except REFUSALS:
            found.refused += 1
        else:
            return "the call was not refused"
        if (wrong := before.changed(trial)) is not None:
            return wrong
    return None


def _replay(trial: Trial, found: Attempt) -> str | None:
    """Capture the call, and replay it twice with other values."""
    found.done.append("capture")
    trial.fill()
    trial.poison()
    plainly(trial)
    captured = Captured(trial)
    for _ in range(2):
        found.done.append("replay")
        found.replays += 1
        trial.fill()
        trial.poison()
        before = Before(trial)
        made: Tensors = captured.replay()
        if (wrong := mistakes(trial, before, made)) is not None:
            return wrong
    return None

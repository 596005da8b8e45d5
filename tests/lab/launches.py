"""The launches of every configuration, which a refactor must not change, as digests of the bytes that kernels receive.

    python tests/lab/launches.py                    write the digests anew
    python tests/lab/launches.py --against FOLDER   print each launch that differs from another checkout's launch

A launch is the kernel, its grid, cluster, threads and shared memory, and its packed parameters with their tensor maps.
The simulator's trials draw problems by two seeds. Public calls (public_launches.py) add problems for which the package
chooses the configuration. Addresses are counted from the beginning of the tensors' memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import checkout
import public_launches
from public_launches import AHEAD, spell

from deep_gemm.core.gpu import H100, H200
from deep_gemm.core.kernel import Kernel
from lab.sim import launcher
from lab.sim.simulate import KernelLaunch, Simulation
from lab.sim.trial import Trial
from lab.sim.trials import TRIALS

FILE = Path(__file__).with_name("launch_digests.json")
SEEDS = 0, 1
WORD_BYTES = 8
KINDS = [kind for kind in TRIALS if not kind.needs_ranks]
"""Kinds of trials. Trials of several ranks are left out: their kernels run in turns."""


class OverError(Exception):
    """Raised when all launches of a trial have been made."""


class Recorder(Simulation):
    """Records launches instead of running them."""

    launches: list[str]

    def launch(self, launched: KernelLaunch, **_: Any) -> None:
        """Record one launch."""
        (packed,) = launched.arguments
        assert isinstance(packed, bytes)
        kernel: Any = launched.kernel
        words = [int.from_bytes(packed[at : at + WORD_BYTES], "little") for at in range(0, len(packed), WORD_BYTES)]
        spelled = spell(words, kernel.params, self._arena.memory, AHEAD)
        about = kernel.name, launched.grid, launched.cluster_size, launched.threads, launched.shared_bytes
        self.launches.append(" ".join(map(str, (*about, *spelled))))

    def result(self) -> Any:
        """End the trial, since nothing was computed."""
        raise OverError


def launches_of(trial: Trial) -> list[str]:
    """Return the launches of a trial, each as a text."""
    launches: list[str] = []
    recorder = type("Recorder", (Recorder,), {"launches": launches})
    instead = mock.patch.multiple(launcher, Simulation=recorder, compiled_for_host=_not_compiled)
    with instead, suppress(OverError):
        trial.check(None)
    return launches


def _not_compiled(kernel: Kernel[Any], config: Any) -> Any:
    return SimpleNamespace(name=kernel.name, params=kernel.params_of(config))


def of_configurations(configs: Iterable[tuple[type[Trial], Any]] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield each configuration's name and its launches, for `configs` or for all configurations."""
    every = ((kind, config) for kind in KINDS for config in kind.kernel.configs() if kind.takes(config))
    for kind, config in every if configs is None else configs:
        name = f"{kind.kernel.name}, {kind.__name__}: {config.name}"
        yield name, [text for seed in SEEDS for text in launches_of(kind.drawn(config, seed))]


def of_calls() -> Iterator[tuple[str, list[str]]]:
    """Yield each public call's name and its launches, on two GPUs."""
    room = public_launches.Room()
    for case in public_launches.cases():
        for gpu in (H200, H100):
            yield f"{gpu.name}: {case.name}", public_launches.launched(gpu, room, case)


def digest(launches: Iterable[str]) -> str:
    """Shorten launches to a hash; other launches have another hash."""
    return hashlib.sha256("\n".join(launches).encode()).hexdigest()[:12]


def digests() -> dict[str, dict[str, str]]:
    """Return all digests, by the kernel and its trial, or by the GPU."""
    found: dict[str, dict[str, str]] = {}
    for name, launches in chain(of_configurations(), of_calls()):
        of, _, which = name.partition(": ")
        found.setdefault(of, {})[which] = digest(launches)
    return found


def differences(folder: Path) -> Iterator[str]:
    """Yield the launches that differ from another checkout's launches, each as a text."""
    there = json.loads(_printed_by(folder))
    here = json.loads(_printed_by(checkout.ROOT))
    for name in sorted({*here, *there}):
        mine, its = here.get(name, []), there.get(name, [])
        if mine != its:
            yield "\n  ".join([name, *(f"here   {text}" for text in mine), *(f"there  {text}" for text in its)])


def _printed_by(folder: Path) -> str:
    script = "import json, launches as o; print(json.dumps(dict([*o.of_configurations(), *o.of_calls()])))"
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'tests/lab'); {script}"]
    return subprocess.run(run, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    """Write the digests, or compare with another checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    options = parser.parse_args()
    if options.against is not None:
        found = [*differences(options.against)]
        print("\n".join(found) or "every launch is the same")
        sys.exit(bool(found))
    found_digests = digests()
    lines = [f"{json.dumps(of)}: {json.dumps(each)}" for of, each in found_digests.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{sum(map(len, found_digests.values()))} digests, {FILE.name}")


if __name__ == "__main__":
    main()

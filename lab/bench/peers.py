"""Times of rivals, measured beside this package in one process: `peers.json` has one run for each GPU.

Absolute times do not carry over to another day or machine; ratios within one run do. So a later run on this GPU
takes the ratio of DeepGEMM's time to the time of cuBLASLt's fast product from this file.
"""

from __future__ import annotations

import json
from functools import cache

from .cases import PEERS_FILE, Case, Shape, all_cases
from .contenders import FAST
from .report import Report, Row
from .timing import Spread

DEEPGEMM = "deepgemm"
HostTimes = dict[str, dict[str, float]]
"""Microseconds that a call occupies the thread that makes it: by the name of the call, then by contender."""


@cache
def sessions() -> dict[str, Report]:
    """Return each GPU's run as a report of cold times, by the GPU's full name."""
    peers = json.loads(PEERS_FILE.read_text())
    cases = {(case.kind, case.shape): case for case in all_cases()}
    reports = {}
    for session in peers["sessions"]:
        header = {
            "kind": "peers",
            "date": session["date"],
            "machine": {"gpu": session["gpu"], "software": session["machine"]},
            "commit": session["commit"],
            "method": peers["method"],
        }
        rows = [
            _row(cases[row["kind"], tuple(row["shape"])], name, us)
            for row in session["rows"]
            for name, us in row["us"].items()
        ]
        reports[session["gpu"]] = Report(header, rows)
    return reports


@cache
def host_times(gpu: str) -> HostTimes:
    """Return the host times of a GPU's run."""
    peers = json.loads(PEERS_FILE.read_text())
    (times,) = (session["host_us"] for session in peers["sessions"] if session["gpu"] == gpu)
    return dict(times)


def deepgemm_ratio_to_fast(gpu: str | None, kind: str, shape: Shape) -> float | None:
    """Return DeepGEMM's time over the fast product's in this GPU's run; None if the run lacks one of the two.

    The fast product has the same shape; for groups and weight gradients, that of the dense product for comparison.
    """
    return _ratios(gpu).get((kind, shape)) if gpu in sessions() else None


@cache
def _ratios(gpu: str) -> dict[tuple[str, Shape], float]:
    us = {(row.contender, row.kind, row.shape): row.us for row in sessions()[gpu].rows if row.us}
    ratios = {}
    for (name, kind, shape), time in us.items():
        fast = us.get((FAST, "dense", Case(kind, shape).fast_shape))
        if name == DEEPGEMM and fast:
            ratios[kind, shape] = time / fast
    return ratios


def _row(case: Case, contender: str, us: float) -> Row:
    return Row.of(case, contender, "cold", Spread(us, us, us))

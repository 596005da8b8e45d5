"""The machine code of a fixed list of configurations has not changed."""

from __future__ import annotations

import json

import machine_code
import pytest
from machine_code import digest, digests, jobs

from deep_gemm.core.jit.compiler import compile_cubin, compiler_version

STORED = json.loads(machine_code.FILE.read_text())


@pytest.mark.release
def test_machine_code_is_what_it_was() -> None:
    if compiler_version() != STORED["compiler"]:
        pytest.skip(f"the digests are of NVRTC {STORED['compiler']}, here is {compiler_version()}")
    now = digests()["digests"]
    assert now.keys() == STORED["digests"].keys()
    changed = [name for name in now if now[name] != STORED["digests"][name]]
    assert not changed, (
        f"other machine code than before: {changed}. Where that is intended, python tests/lab/machine_code.py "
        f"stores the new digests; where nothing was to change, something did."
    )


def test_the_list_holds_each_configuration_once() -> None:
    names = [job.name for job in jobs()]
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(STORED["digests"])


def test_a_digest_changes_with_the_instructions_alone() -> None:
    source = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 2; }'
    one = compile_cubin(source, {}, name="k")
    assert digest(compile_cubin(source + "// a comment", {}, name="k").cubin) == digest(one.cubin)
    assert digest(compile_cubin(source.replace("2", "3"), {}, name="k").cubin) != digest(one.cubin)
    assert digest(compile_cubin(source.replace(" k(", " renamed("), {}, name="k").cubin) == digest(one.cubin)
    assert digest(one.cubin + b"appended") == digest(one.cubin)

"""The pass over FFMAs: the bits that it changes, the code that it leaves alone, and a comparison with later compilers.

Needs NVRTC, no GPU.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import other_nvrtc
import pytest
from helpers import Job, as_new_process, some
from hypothesis import given
from hypothesis import strategies as st
from thorough import one_in

from deep_gemm.core import jit
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.jit.compiler import compile_cubin, compiler_version
from deep_gemm.core.jit.cubin import Instruction, read_kernels
from deep_gemm.core.jit.interleave import COMPILERS_THAT_INTERLEAVE, VERSION, helps, interleave, pairs
from deep_gemm.gemm.config.decode import DecodeConfig, decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE, kernel_of
from deep_gemm.gemm.kinds.output import Output

YIELD_AND_REUSE = 1 << 45 | 0xF << 58
PLAIN = tile_config(64, 128, Output())
"""This configuration has one math warpgroup. No compiler interleaves its FFMAs, so the pass always finds work."""


def decode(block_tokens: int, num_math_warpgroups: int, ctas_per_sm: int) -> DecodeConfig:
    return some(decode_config(block_tokens, num_math_warpgroups, 1, ctas_per_sm))


def parts(config: GemmConfig | DecodeConfig) -> tuple[str, dict[str, str]]:
    kernel = kernel_of(config)
    return kernel.source, kernel.headers(config)


@functools.cache
def compiled(config: GemmConfig | DecodeConfig) -> bytes:
    return compile_cubin(*parts(config), name="kernel").cubin


def instructions(cubin: bytes) -> tuple[Instruction, ...]:
    (kernel,) = read_kernels(cubin)
    return kernel.instructions


def patched(cubin: bytes, at: Instruction, *, low: int | None = None, high: int | None = None) -> bytes:
    words = [at.low if low is None else low, at.high if high is None else high]
    new = b"".join(word.to_bytes(8, "little") for word in words)
    return cubin[: at.offset] + new + cubin[at.offset + 16 :]


def changed(before: bytes, after: bytes) -> list[tuple[Instruction, Instruction]]:
    return [(x, y) for x, y in zip(instructions(before), instructions(after), strict=True) if x != y]


def threads_per_sm(config: GemmConfig | DecodeConfig) -> int:
    return config.num_threads * (config.ctas_per_sm if isinstance(config, DecodeConfig) else 1)


# ---- instructions that the pass changes -------------------------------------------------------------------------


def test_all_register_ffmas_of_a_kernel_are_its_promotion() -> None:
    accumulators = PLAIN.block_n // 2
    assert pairs(compiled(PLAIN)).total() == PLAIN.run_k_blocks * accumulators
    ffmas = [i for i in instructions(compiled(PLAIN)) if i.low & 0xFFF == 0x223]
    assert len(ffmas) == PLAIN.run_k_blocks * accumulators


def test_every_other_ffma_yields_afterwards_and_keeps_no_operand() -> None:
    before, after = pairs(compiled(PLAIN)), pairs(interleave(compiled(PLAIN)))
    assert before[0, 0] == 0
    assert 0.45 < after[0, 0] / after.total() < 0.55
    assert after.total() == before.total()
    assert {pair for pair in after if pair[0] == 0} == {(0, 0)}


def assert_harmless(before: bytes, after: bytes) -> None:
    """Check that only yield and reuse bits of FFMAs changed, and only to 0. The pass's docstring explains why."""
    assert len(after) == len(before)
    rest = bytearray(after)
    for old, new in changed(before, after):
        assert old.mnemonic == "FFMA"
        assert new.low == old.low
        assert (old.high ^ new.high) & ~YIELD_AND_REUSE == 0
        assert new.high & ~old.high == 0, "a bit was set"
        rest[old.offset : old.offset + 16] = before[old.offset : old.offset + 16]
    assert bytes(rest) == before, "bytes outside the code were changed"


@pytest.mark.parametrize("config", [PLAIN, tile_config(64, 32, Output()), decode(32, 1, 1)], ids=str)
def test_the_pass_is_harmless_and_idempotent(config: GemmConfig | DecodeConfig) -> None:
    before = compiled(config)
    after = interleave(before)
    assert after != before
    assert_harmless(before, after)
    assert interleave(after) == after


@given(st.integers(0, 1 << 32), st.floats(0, 1))
def test_whatever_the_control_bits_are_the_pass_is_harmless_and_idempotent(seed: int, share: float) -> None:
    random, cubin = Random(seed), bytearray(compiled(PLAIN))
    for i in instructions(compiled(PLAIN)):
        if random.random() < share:
            high = i.high & (1 << 41) - 1 | random.getrandbits(21) << 41
            cubin[i.offset + 8 : i.offset + 16] = high.to_bytes(8, "little")
    before = bytes(cubin)
    after = interleave(before)
    assert_harmless(before, after)
    assert interleave(after) == after


# ---- instructions that the pass does not recognize --------------------------------------------------------------


@dataclass(frozen=True)
class Strange:
    """Bits to invert in an FFMA that the pass rewrites. The result is an FFMA that no promotion contains."""

    low: int = 0
    high: int = 0


STRANGE = {
    "a predicate": Strange(low=7 << 12),
    "a negated predicate": Strange(low=1 << 15),
    "an immediate operand": Strange(low=0x223 ^ 0x823),
    "another operation": Strange(low=0x223 ^ 0x221),
    "a modifier of its second operand": Strange(low=1 << 63),
    "a modifier": Strange(high=1 << 13),
    "flushing of denormals": Strange(high=1 << 16),
    "a longer stall": Strange(high=2 << 41),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_ffma_is_left_alone_that_has(name: str) -> None:
    cubin = compiled(PLAIN)
    old, _ = changed(cubin, interleave(cubin))[10]
    before = patched(cubin, old, low=old.low ^ STRANGE[name].low, high=old.high ^ STRANGE[name].high)
    after = interleave(before)
    assert after != before
    assert old.offset not in [x.offset for x, _ in changed(before, after)]


def test_an_ffma_on_anything_but_accumulators_is_left_alone() -> None:
    cubin = compiled(PLAIN)
    old, _ = changed(cubin, interleave(cubin))[10]
    accumulators = {r for i in instructions(cubin) if i.mnemonic == "QGMMA" for r in i.accumulators}
    other = next(r for r in range(255) if r not in accumulators)
    before = patched(cubin, old, low=old.low & ~(0xFF << 24) | other << 24)
    assert old.offset not in [x.offset for x, _ in changed(before, interleave(before))]


def test_a_kernel_without_products_is_left_alone() -> None:
    source = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] = __fmaf_rn(p[1], p[2], p[3]); }'
    cubin = compile_cubin(source, {}, name="k").cubin
    assert interleave(cubin) == cubin
    assert pairs(cubin) == Counter()


def test_code_for_another_gpu_is_refused() -> None:
    source = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 2; }'
    with pytest.raises(ValueError, match="expected a cubin for sm_90, got sm_80"):
        interleave(compile_cubin(source, {}, name="k", arch="sm_80").cubin)


# ---- compilers --------------------------------------------------------------------------------------------------

CONFIGS: dict[str, GemmConfig | DecodeConfig] = {
    "256x128": tile_config(256, 128, Output()),
    "256x128 n2": tile_config(256, 128, Output(), cluster_n=2),
    "128x256": tile_config(128, 256, Output()),
    "192x128": tile_config(192, 128, Output()),
    "128x128 k4": tile_config(128, 128, Output(), cluster_k=4),
    "256x112": tile_config(256, 112, Output(), k=128),
    "128x96": tile_config(128, 96, Output()),
    "128x128 1d1d": tile_config(128, 128, Output(is_fp32=True, sfb=PER_ROW)),
    "64x64": tile_config(64, 64, Output()),
    "decode 64": decode(64, 1, 2),
    "decode 128": decode(128, 2, 1),
}
BY_BOTH = one_in(3, list(CONFIGS))
"""The configurations that NVRTC 12.8 compiles too."""

IN_USE = tuple(map(int, compiler_version().split(".")[:2]))
KEPT_OTHERWISE = {"decode 64"} if IN_USE >= (13, 1) else set()
"""Kernels that get other reuse bits from NVRTC 13.1 and later than from 12.9 and 13.0, but the same yield bits."""

has_interleaving_compiler = pytest.mark.skipif(
    IN_USE < COMPILERS_THAT_INTERLEAVE, reason=f"needs NVRTC 12.9 or later, has {compiler_version()}"
)


@pytest.fixture(scope="module")
def of_nvrtc_12_8() -> dict[str, bytes]:
    library = other_nvrtc.oldest_library()
    if library is None:
        pytest.skip(other_nvrtc.HOW_TO_GET_THE_OLDEST)
    jobs = [Job(name, *parts(CONFIGS[name])) for name in BY_BOTH]
    return {kernel.name: kernel.cubin for kernel in other_nvrtc.compile_all(library, jobs)}


@has_interleaving_compiler
@pytest.mark.parametrize("name", BY_BOTH)
def test_the_pass_brings_code_of_nvrtc_12_8_within_10_points_of_the_installed_one(
    name: str, of_nvrtc_12_8: dict[str, bytes]
) -> None:
    config = CONFIGS[name]
    before = after = of_nvrtc_12_8[name]
    if helps("12.8.93 CL-1", threads_per_sm(config)):
        after = interleave(before)
        assert_harmless(before, after)
        assert interleave(after) == after
    assert pairs(after).total() == pairs(compiled(config)).total()
    got, wanted = (shares(cubin, by_yield_alone=name in KEPT_OTHERWISE) for cubin in (after, compiled(config)))
    for kind in {*got, *wanted}:
        assert got.get(kind, 0) == pytest.approx(wanted.get(kind, 0), abs=0.1), kind


def shares(cubin: bytes, *, by_yield_alone: bool) -> dict[int | tuple[int, int], float]:
    """Return the fractions of the promotion FFMAs with each (yield, reuse), or with each yield."""
    found = pairs(cubin)
    kinds = Counter(pair[0] if by_yield_alone else pair for pair in found.elements())
    return {kind: count / found.total() for kind, count in kinds.items()}


@has_interleaving_compiler
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if threads_per_sm(config) > 256])
def test_what_a_compiler_has_interleaved_is_left_alone(name: str) -> None:
    assert interleave(compiled(CONFIGS[name])) == compiled(CONFIGS[name])


@pytest.mark.parametrize(
    ("compiler", "threads_per_sm", "answer"),
    [
        ("12.8.93 CL-35583870", 384, True),
        ("12.8.93 CL-35583870", 257, True),
        ("12.8.93 CL-35583870", 256, False),
        ("12.9.86 CL-36037853", 384, False),
        ("12.10.1 CL-1", 384, False),
        ("13.0.88 CL-36424714", 384, False),
    ],
)
def test_the_pass_is_for_compilers_that_do_not_interleave_and_kernels_with_other_warps(
    compiler: str, threads_per_sm: int, answer: bool
) -> None:
    assert helps(compiler, threads_per_sm) == answer


# ---- in a build -------------------------------------------------------------------------------------------------


def test_kernels_are_built_with_the_pass_where_it_helps_and_is_not_disabled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[str, int]]] = []
    build: Any = lambda *_, passes, **__: seen.append([(p.name, p.version) for p in passes])  # noqa: E731
    monkeypatch.setattr(jit, "build", build)
    monkeypatch.setattr(jit, "compiler_version", lambda: "12.8.93 CL-1")
    large, small = tile_config(256, 128, Output()), tile_config(64, 64, Output())
    FP8_GEMM.build(large)
    FP8_GEMM.build(small)
    FP8_GEMM_DECODE.build(decode(64, 1, 2))
    FP8_GEMM_DECODE.build(decode(64, 1, 1))
    applied = [("interleave", VERSION)]
    assert seen == [applied, [], applied, []]
    as_new_process(monkeypatch, DG_DISABLE_FFMA_INTERLEAVE=1)
    FP8_GEMM.build(large)
    assert seen[-1] == []


def test_the_pairs_of_each_kernel_are_printed_where_they_are_asked_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = (jit.Pass("interleave", VERSION, interleave),)
    source, headers = parts(PLAIN)
    jit.build(source, headers, name="kernel", passes=passes)
    assert capsys.readouterr().err == ""
    as_new_process(monkeypatch, DG_PRINT_REG_REUSE=1)
    jit.build(source, headers, name="kernel", passes=passes)  # loads it from the cache
    found = pairs(interleave(compiled(PLAIN)))
    told = f"kernel: {found.total()} promotion FFMAs, by (yield, reuse): (0, 0): {found[0, 0]}, (1, 0): {found[1, 0]}"
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""

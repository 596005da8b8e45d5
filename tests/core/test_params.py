"""The list of a kernel's parameters: where members lie, what is packed, what the compiler is asked to confirm."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.jit.compiler import CompileError, compile_cubin
from deep_gemm.core.params import Field, Kind, Params
from deep_gemm.gemm import k_group_maps
from deep_gemm.gemm.config.decode import decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output

SMALL = Params(
    "Small",
    Field("number", Kind.UINT32),
    Field("map", Kind.MAP),
    Field("numbers", Kind.UINT32, 3),
    Field("p", Kind.POINTER),
)


def test_members_lie_as_c_lays_them_out() -> None:
    assert [SMALL.offset(name) for name in ("number", "map", "numbers", "p")] == [0, 64, 192, 208]
    assert (SMALL.end, SMALL.size) == (216, 256)
    assert (SMALL.word("map"), SMALL.word("p")) == (8, 26)


def test_a_member_that_is_no_word_is_none() -> None:
    odd = Params("Odd", Field("a", Kind.UINT32), Field("b", Kind.UINT32))
    with pytest.raises(ValueError, match="b: expected a member at a multiple of 8 bytes, got byte 4"):
        odd.word("b")


def test_every_member_is_packed_at_its_place() -> None:
    values: dict[str, int | bytes] = {
        "number": 7,
        "map": b"map",
        "numbers": struct.pack("<2I", 1, 2),
        "p": (1 << 40) + 3,
    }
    data = SMALL.pack(values)
    assert len(data) == SMALL.size
    assert struct.unpack_from("<I", data, 0) == (7,)
    assert data[64:68] == b"map\0"
    assert struct.unpack_from("<3I", data, 192) == (1, 2, 0)
    assert struct.unpack_from("<Q", data, 208) == ((1 << 40) + 3,)


@pytest.mark.parametrize("change", [{"p": None}, {"other": 1}])
def test_no_member_is_forgotten_and_none_is_made_up(change: dict[str, int | None]) -> None:
    values: dict[str, int | bytes] = {"number": 7, "map": b"", "numbers": b"", "p": 0}
    for name, value in change.items():
        if value is None:
            del values[name]
        else:
            values[name] = value
    with pytest.raises(ValueError, match="Small: expected values of"):
        SMALL.pack(values)


def test_an_array_takes_bytes_alone() -> None:
    with pytest.raises(struct.error):
        SMALL.pack({"number": 7, "map": b"", "numbers": 1, "p": 0})


def test_what_does_not_fit_is_refused() -> None:
    values: dict[str, int | bytes] = {"number": 1 << 32, "map": b"", "numbers": b"", "p": 0}
    with pytest.raises(struct.error):
        SMALL.pack(values)
    with pytest.raises(ValueError, match="numbers: expected at most 12 bytes, got 16"):
        SMALL.pack({**values, "number": 0, "numbers": bytes(16)})


KERNELS: dict[str, tuple[Any, Any]] = {
    "dense": (FP8_GEMM, tile_config(64, 64, Output())),
    "rows": (FP8_GEMM, tile_config(64, 64, Output(work=works.IDS))),
    "depths": (FP8_GEMM, tile_config(64, 64, Output(is_fp32=True, sfb=PER_ROW, work=works.DEPTHS), k=128)),
    "decode": (FP8_GEMM_DECODE, decode_config(8, 1, 1, 2)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_confirms_the_layout_and_notices_another(name: str) -> None:
    kernel, config = KERNELS[name]
    headers = kernel.headers(config)
    compile_cubin(kernel.source, headers, name="sound")
    text = headers["params_layout.cuh"]
    for old, new in ((" == 8, ", " == 16, ") if name == "none" else (", m) == ", ", n) == "), ("sizeof", "1 + sizeof")):
        assert text.count(old) >= 1
        with pytest.raises(CompileError, match=r"core/params\.py has"):
            compile_cubin(kernel.source, {**headers, "params_layout.cuh": text.replace(old, new, 1)}, name="broken")


def test_the_kernel_that_makes_maps_confirms_its_layout_too() -> None:
    headers = k_group_maps.KERNEL.headers(k_group_maps.CONFIG)
    broken = headers["map_params_layout.cuh"].replace(", sum_k) == ", ", num_k_blocks) == ")
    with pytest.raises(CompileError, match=r"core/params\.py has"):
        compile_cubin(k_group_maps.KERNEL.source, {**headers, "map_params_layout.cuh": broken}, name="broken")

"""The list of a kernel's parameters: offsets of members, packed bytes, and assertions that the compiler checks."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from deep_gemm.core import params
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.jit.compiler import CompileError, compile_cubin
from deep_gemm.core.params import Params
from deep_gemm.core.sources import cuda_sources
from deep_gemm.gemm import kernel as of_products
from deep_gemm.gemm.config.decode import decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE, K_GROUP_MAPS, MAPS
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output

STRUCTS = """
#include "ptx/tma.cuh"

struct Small {
  uint32_t number;
  ptx::TensorMap map;  // no uint32_t map; }
  int32_t numbers[kNumbers];
  const float* p;

  DEVICE uint32_t first() const { return number; }
};

struct Whole {
  uint32_t m, n;
  Small one, two;
  uint8_t *x, *y;
  float limit;
  int64_t facts[2];
};
"""
SMALL, WHOLE = (Params.of_source(STRUCTS, name, {"kNumbers": 3}) for name in ("Small", "Whole"))
VALUES: dict[str, int | bytes] = {"number": 7, "map": b"map", "numbers": struct.pack("<2I", 1, 2), "p": (1 << 40) + 3}


def test_members_lie_as_c_lays_them_out() -> None:
    assert [SMALL.offset(name) for name in ("number", "map", "numbers", "p")] == [0, 64, 192, 208]
    assert SMALL.size == 256
    assert [field.kind.name for field in SMALL.fields] == ["UINT32", "MAP", "UINT32", "POINTER"]
    others = {field.name: WHOLE.offset(field.name) for field in WHOLE.fields if "." not in field.name}
    assert others == {"m": 0, "n": 4, "x": 576, "y": 584, "limit": 592, "facts": 600}
    assert (WHOLE.offset("one.number"), WHOLE.offset("two.p"), WHOLE.size) == (64, 320 + 208, 640)
    assert [field.name for field in WHOLE.fields if field.length > 1] == ["one.numbers", "two.numbers", "facts"]
    text = (
        f"constexpr unsigned kNumbers = 3;{STRUCTS}{WHOLE.layout_header()}KERNEL(32, 1) none(GRID_CONSTANT Whole) {{}}"
    )
    compile_cubin(text.replace("#pragma once", ""), cuda_sources(), name="none")


ODD = ("bool a", "uint32_t a = 1", "uint32_t a[2][2]", "uint32_t a[kNone]", "Small a[2]", "union { float a; }")


@pytest.mark.parametrize("member", ODD)
def test_a_member_that_cannot_be_read_is_refused(member: str) -> None:
    with pytest.raises(ValueError, match=r"(Odd|bool): expected|kNone"):
        Params.of_source(f"{STRUCTS}\nstruct Odd {{\n  {member};\n}};\n", "Odd", {"kNumbers": 3})


def test_every_member_is_packed_at_its_place() -> None:
    data = struct.unpack("<I60x4s124x3I4xQ40x", SMALL.pack(VALUES))
    assert data == (7, b"map\0", 1, 2, 0, (1 << 40) + 3)


@pytest.mark.parametrize("names", ["number map numbers", "number map numbers p other"])
def test_no_member_is_forgotten_and_none_is_made_up(names: str) -> None:
    with pytest.raises(ValueError, match="Small: expected values of"):
        SMALL.pack({name: VALUES.get(name, 1) for name in names.split()})


def test_an_array_takes_bytes_alone() -> None:
    with pytest.raises(struct.error):
        SMALL.pack({**VALUES, "numbers": 1})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(struct.error):
        SMALL.pack({**VALUES, "number": 1 << 32})
    with pytest.raises(ValueError, match="numbers: expected at most 12 bytes, got 16"):
        SMALL.pack({**VALUES, "numbers": bytes(16)})


ALONG_K = Output(is_fp32=True, sfb=PER_ROW, work=works.DEPTHS)
KERNELS: dict[str, tuple[Any, Any, str]] = {
    "dense": (FP8_GEMM, tile_config(64, 64, Output()), "params.cuh"),
    "rows": (FP8_GEMM, tile_config(64, 64, Output(work=works.IDS)), "params.cuh"),
    "depths": (FP8_GEMM, tile_config(64, 64, ALONG_K, k=128), "params.cuh"),
    "decode": (FP8_GEMM_DECODE, decode_config(8, 1, 1, 2), "decode/product.cuh"),
    "maps": (K_GROUP_MAPS, MAPS, "k_group_maps.cuh"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_host_and_compiler_notice_a_changed_struct(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, config, file = KERNELS[name]
    own, headers = kernel.params_of(config), kernel.headers(config)
    changed = {file: headers[file].replace("uint32_t m, n, ", "uint32_t n, m, ")}
    for broken in (changed, {own.header_name: headers[own.header_name].replace("sizeof", "1 + sizeof")}):
        with pytest.raises(CompileError, match=r"core/params\.py has"):
            compile_cubin(kernel.source, {**headers, **broken}, name="broken")
    monkeypatch.setattr(params, "cuda_sources", lambda: {**headers, **changed})
    monkeypatch.setattr(of_products, "_PARAMS", {})
    monkeypatch.delitem(vars(kernel), "params", raising=False)
    read = kernel.params_of(config)
    assert (read.offset("m"), read.offset("n")) == (own.offset("n"), own.offset("m"))
    compile_cubin(kernel.source, {**headers, **changed, read.header_name: read.layout_header()}, name="sound")

"""Record the launches of public calls: how they choose a configuration, and which records serve other rows.

Operands share one piece of memory that is never written, so problems can be as large as models' problems. launches.py
stores the digests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import checkout  # noqa: F401
import pytest
import torch
from fake_gpu import FakeGpu, Launch, forget_devices, install, on_gpu
from torch import Tensor

import deep_gemm
from deep_gemm.core import replay, settings
from deep_gemm.core.check.layout import align, ceil_div
from deep_gemm.core.gpu import H200, Gpu
from deep_gemm.core.params import Kind, Params

ROOM, AHEAD = 1 << 31, 1 << 28
"""Bytes of the memory, and unused bytes at its beginning: a map may begin ahead of its tensor."""
ALIGNMENT = 256
ROWS, ROWS_OF_GROUPS = (1, 8, 64, 130, 512, 4096), (1, 8, 64, 300)
"""Numbers of rows. After a call with each number, a call with one row more follows; the same record may serve both."""
WEIGHTS = (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (576, 7168), (512, 512)
PACKAGE = str(Path(deep_gemm.__file__).parent)
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


class Room:
    """Memory that operands are allocated from, one after another."""

    def __init__(self) -> None:
        self.memory, self.at = torch.empty(ROOM, dtype=torch.uint8), AHEAD

    def take(self, *shape: int, dtype: torch.dtype = E4M3, m_major: bool = False) -> Tensor:
        """Return a tensor in unwritten memory; `m_major`: its last two dimensions are stored column by column."""
        *outer, rows, columns = shape if len(shape) > 1 else (1, *shape)
        lies = (*outer, columns, -(-rows // 4) * 4) if m_major else (*outer, rows, columns)
        count = torch.Size(lies).numel()
        x = self.memory[self.at : self.at + count * dtype.itemsize].view(dtype).view(lies)
        self.at += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return on_gpu(x.mT[..., :rows, :] if m_major else x.view(shape))

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros: a layout in which all rows belong to the first group, or in which no group has rows."""
        return self.take(*shape, dtype=torch.int32).zero_()

    def rows(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Return values with a scale for each row and 128 columns, in the layout that products load."""
        *outer, m, k = shape
        return self.take(*shape), self.take(*outer, m, ceil_div(k, 128), dtype=FP32, m_major=True)

    def blocks(self, *shape: int, block: int = 128) -> tuple[Tensor, Tensor]:
        """Return values with a scale for each block."""
        *outer, n, k = shape
        return self.take(*shape), self.take(*outer, ceil_div(n, block), ceil_div(k, block), dtype=FP32)

    def packed(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Return FP4 values and words of their scales."""
        *outer, n, k = shape
        return self.take(*outer, n, k // 2, dtype=torch.int8), self.take(*outer, n, ceil_div(k, 128), dtype=torch.int32)


class Case(NamedTuple):
    """A public call, whose operands `make` allocates from a room for a number of rows."""

    name: str
    make: Callable[[Room, int], Callable[[], Any]]
    rows: Sequence[int] = ROWS


def dense(n: int, k: int, b: str, dtype: torch.dtype, c: str, room: Room, m: int) -> Callable[[], Any]:
    recipe: Any = {"blocks": None, "rows": (1, 1, 128), "32x32": (1, 32, 32)}.get(b)
    a = room.take(m, k), room.take(m, ceil_div(k, 32 if b == "32x32" else 128), dtype=FP32, m_major=True)
    if b == "rows":
        w = room.take(n, k), room.take(n, ceil_div(k, 128), dtype=FP32, m_major=True)
    elif b == "FP4":
        w = room.packed(n, k)
    else:
        w = room.blocks(n, k, block=32 if b == "32x32" else 128)
    d = room.take(m, n, dtype=dtype)
    added = {"": None, "c": room.take(m, n, dtype=dtype), "d": d}[c]
    if b == "FP4":
        return partial(deep_gemm.fp8_fp4_gemm_nt, a, w, d, added)
    return partial(deep_gemm.fp8_gemm_nt, a, w, d, added, recipe=recipe)


def whole(n: int, k: int, of_a: tuple[int, int], c: str, room: Room, m: int) -> Callable[[], Any]:
    a, w = (room.take(m, k), room.take(m, 1, dtype=FP32)), (room.take(n, k), room.take(n, 1, dtype=FP32))
    a = a if of_a == (1, 0) else room.rows(m, k)
    added = room.take(n, dtype=FP32) if c else None
    call: Any = partial(deep_gemm.fp8_gemm_nt, a, w, room.take(m, n, dtype=BF16), added)
    return partial(call, recipe_a=of_a, recipe_b=(1, 0))


def whole_rows(groups: int, n: int, k: int, form: str, room: Room, rows: int) -> Callable[[], Any]:
    stacked = (groups, rows) if form == "counts" else (groups * rows,)
    a = room.take(*stacked, k), room.take(*stacked, 1, dtype=FP32)
    b, layout = (
        (room.take(groups, n, k), room.take(1, dtype=FP32)),
        room.zeros(groups if form == "counts" else len(a[0])),
    )
    more: Any = {"recipe_a": (1, 0), "recipe_b": (0, 0), "bias": room.take(groups, n, dtype=FP32)}
    d = room.take(*stacked, n, dtype=BF16)
    if form == "counts":
        return partial(deep_gemm.m_grouped_fp8_gemm_nt_masked, a, b, d, layout, rows, **more)
    return partial(deep_gemm.m_grouped_fp8_gemm_nt_contiguous, a, b, d, layout, **more)


def contiguous(groups: int, n: int, k: int, form: str, room: Room, rows: int) -> Callable[[], Any]:
    m = groups * rows
    b = room.packed(groups, n, k) if form == "FP4" else room.blocks(groups, n, k)
    layout = room.zeros(groups if form == "ends" else m)
    product = deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous if form == "FP4" else None
    product = product or deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    call: Any = partial(product, room.rows(m, k), b, room.take(m, n, dtype=BF16), layout)
    return partial(call, use_psum_layout=form == "ends")


def masked(groups: int, n: int, k: int, room: Room, rows: int) -> Callable[[], Any]:
    d = room.take(groups, 2 * rows, n, dtype=BF16)
    a, b = room.rows(groups, 2 * rows, k), room.blocks(groups, n, k)
    return partial(deep_gemm.m_grouped_fp8_gemm_nt_masked, a, b, d, room.zeros(groups), rows)


def along_k(groups: int, m: int, n: int, room: Room, rows: int) -> Callable[[], Any]:
    ks = [128 * ceil_div(rows, 128) * (1 + i % 2) for i in range(groups)]
    a, b = ((room.take(size * sum(ks)), room.take(size, sum(ks) // 128, dtype=FP32, m_major=True)) for size in (m, n))
    d = room.take(groups, m, n, dtype=FP32)
    return partial(deep_gemm.k_grouped_fp8_gemm_nt_contiguous, a, b, d, ks, torch.tensor(ks, dtype=torch.int32), d)


def heads(h: int, n: int, k: int, room: Room, rows: int) -> Callable[[], Any]:
    d = room.take(rows, h, n, dtype=BF16)
    a = room.take(rows, h, k), room.take(rows, h, ceil_div(k, 128), dtype=FP32)
    return partial(deep_gemm.fp8_einsum, "bhr,hdr->bhd", a, room.blocks(h, n, k), d)


def skip(n: int, k: int, room: Room, rows: int) -> Callable[[], Any]:
    d = room.take(rows, n // 192 * 256, dtype=BF16)
    return partial(deep_gemm.fp8_gemm_nt_skip_head_mid, room.rows(rows, k), room.blocks(n, k), d, (128, 64, 64))


def bf16(form: str, n: int, k: int, dtype: torch.dtype, room: Room, m: int) -> Callable[[], Any]:
    m = align(m, 8) if form[0] == "t" else m
    a = room.take(*((k, m) if form[0] == "t" else (m, k)), dtype=BF16)
    b = room.take(*((n, k) if form[1] == "t" else (k, n)), dtype=BF16)
    return partial(getattr(deep_gemm, f"bf16_gemm_{form}"), a, b, room.take(m, n, dtype=dtype))


def bf16_contiguous(groups: int, n: int, k: int, form: str, room: Room, rows: int) -> Callable[[], Any]:
    m = groups * rows
    a, b = room.take(m, k, dtype=BF16), room.take(groups, n, k, dtype=BF16)
    layout = room.zeros(groups if form == "ends" else m)
    product: Any = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    return partial(product, a, b, room.take(m, n, dtype=BF16), layout, use_psum_layout=form == "ends")


def bf16_masked(groups: int, n: int, k: int, room: Room, rows: int) -> Callable[[], Any]:
    a, b = room.take(groups, 2 * rows, k, dtype=BF16), room.take(groups, n, k, dtype=BF16)
    d = room.take(groups, 2 * rows, n, dtype=BF16)
    return partial(deep_gemm.m_grouped_bf16_gemm_nt_masked, a, b, d, room.zeros(groups), rows)


def bf16_along_k(groups: int, m: int, n: int, room: Room, rows: int) -> Callable[[], Any]:
    ks = [128 * ceil_div(rows, 128) * (1 + i % 2) for i in range(groups)]
    a, b = room.take(sum(ks), m, dtype=BF16), room.take(sum(ks), n, dtype=BF16)
    d, on_device = room.take(groups, m, n, dtype=FP32), torch.tensor(ks, dtype=torch.int32)
    return partial(deep_gemm.k_grouped_bf16_gemm_tn_contiguous, a, b, d, ks, on_device, d)


def sums(m: int, n: int, k: int, dtype: torch.dtype, room: Room, rows: int) -> Callable[[], Any]:
    a, b = room.take(rows, m, k, dtype=BF16), room.take(rows, n, k, dtype=BF16)
    d = room.take(m, n, dtype=dtype)
    return partial(deep_gemm.einsum, "bmk,bnk->mn", a, b, d, d if dtype == FP32 else None)


def linear(n: int, k: int, bias: bool, room: Room, m: int) -> Callable[[], Any]:
    x, out = room.take(m, k, dtype=BF16), room.take(m, n, dtype=BF16)
    call: Any = partial(deep_gemm.linear, x, room.blocks(n, k), out=out)
    return partial(call, bias=room.take(n, dtype=BF16)) if bias else call


def cast(form: str, k: int, room: Room, m: int) -> Callable[[], Any]:
    x = room.take(m, k, dtype=BF16)
    if form == "tensor":
        return partial(deep_gemm.per_tensor_cast_to_fp8, x)
    if form == "given":
        return partial(deep_gemm.per_tensor_cast_to_fp8, x, room.take(1, dtype=FP32))
    return partial(deep_gemm.per_token_cast_to_fp8, x, gran_k=int(form))


def cases() -> Iterator[Case]:
    """Yield products in all forms and shapes that the choice of a configuration distinguishes."""
    for n, k in WEIGHTS:
        yield Case(f"dense {n}x{k}", partial(dense, n, k, "blocks", BF16, ""))
        yield Case(f"dense {n}x{k} FP4", partial(dense, n, k, "FP4", BF16, ""))
        yield Case(f"bf16 nt {n}x{k}", partial(bf16, "nt", n, k, BF16))
    for n, k in ((2112, 7168), (4096, 7168), (7168, 2048)):
        for b, dtype, c in (("blocks", FP32, ""), ("blocks", BF16, "c"), ("rows", FP32, "d"), ("32x32", BF16, "")):
            yield Case(f"dense {n}x{k} by {b} {dtype} +{c}", partial(dense, n, k, b, dtype, c))
        for of_a, c in (((1, 0), ""), ((1, 0), "bias"), ((1, 128), "")):
            yield Case(f"dense {n}x{k} {of_a} by (1, 0) +{c}", partial(whole, n, k, of_a, c))
        for form in ("nn", "tn", "tt"):
            yield Case(f"bf16 {form} {n}x{k}", partial(bf16, form, n, k, FP32 if form == "tn" else BF16))
        for bias in (False, True):
            yield Case(f"linear {n}x{k}{' + bias' * bias}", partial(linear, n, k, bias))
    for groups, n, k in ((4, 4096, 7168), (32, 7168, 2048), (64, 2048, 384), (256, 1024, 512)):
        of = f"{groups} of {n}x{k}"
        for form in ("ids", "ends", "FP4"):
            yield Case(f"contiguous {of} {form}", partial(contiguous, groups, n, k, form), ROWS_OF_GROUPS)
        yield Case(f"masked {of}", partial(masked, groups, n, k), ROWS_OF_GROUPS)
        for form in ("ids", "ends"):
            yield Case(f"bf16 contiguous {of} {form}", partial(bf16_contiguous, groups, n, k, form), ROWS_OF_GROUPS)
        for form in ("ids", "counts"):
            yield Case(f"whole {of} {form} +bias", partial(whole_rows, groups, n, k, form), ROWS_OF_GROUPS)
        yield Case(f"bf16 masked {of}", partial(bf16_masked, groups, n, k), ROWS_OF_GROUPS)
    for groups, m, n in ((4, 512, 768), (16, 256, 512)):
        yield Case(f"along k {groups} of {m}x{n}", partial(along_k, groups, m, n))
        yield Case(f"bf16 along k {groups} of {m}x{n}", partial(bf16_along_k, groups, m, n))
    for h, n, k in ((8, 1024, 4096), (128, 128, 512)):
        yield Case(f"heads {h} of {n}x{k}", partial(heads, h, n, k))
    for n, k in ((24576, 512), (6144, 512)):
        yield Case(f"skip {n}x{k}", partial(skip, n, k))
    for form in ("128", "0", "tensor", "given"):
        for k in (768, 7168, 28672):
            yield Case(f"cast {k} by {form}", partial(cast, form, k))
    for dtype in (BF16, FP32):
        yield Case(f"sum of 128x256x384 {dtype}", partial(sums, 128, 256, 384, dtype))


def spell(words: Iterable[int], params: Params, memory: Tensor, ahead: int = 0) -> list[str]:
    """Return a launch's 64-bit words as texts. Addresses are relative to `memory`; `made` is the package's own memory.

    A map's address may be up to `ahead` bytes before the memory.
    """
    maps, pointers = (
        {params.offset(field.name) // 8 for field in params.fields if field.kind is kind}
        for kind in (Kind.MAP, Kind.POINTER)
    )
    # The simulator's maps also store their tensor's address, and a list of numbers may hold addresses of ranks.
    may_be_addresses = {
        params.offset(field.name) // 8 + i
        for field in params.fields
        if field.kind in (Kind.POINTER, Kind.MAP, Kind.UINT64)
        for i in range(field.num_bytes // 8)
    }
    base, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes

    def of(at: int, word: int) -> str:
        if at in may_be_addresses and base - ahead * (at in maps) <= word < end:
            return f"at {word - base}"
        return "made" if word and at in maps | pointers else f"{word:x}"

    return [of(*each) for each in enumerate(words)]


def spelled(launch: Launch, room: Room) -> str:
    """Return a launch as a text."""
    about = launch.kernel, launch.cluster, launch.is_dependent, launch.config.name, launch.grid
    words = spell(launch.words, launch.params, room.memory)
    return " ".join(map(str, (*about, *words, *sorted(map(repr, launch.maps)))))


@contextmanager
def on(gpu: Gpu) -> Iterator[FakeGpu]:
    """Make calls run as on this GPU until they reach the driver, which is a fake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "in_force", settings.InForce())
        yield install(patch, gpu)
    forget_devices()


def launched(gpu: Gpu, room: Room, case: Case) -> list[str]:
    """Return a case's launches as texts, for each number of rows, and for one more row."""
    found = []
    with on(gpu) as fake:
        for rows in case.rows:
            for m in (rows, rows + 1):
                room.at = AHEAD
                case.make(room, m)()
            found += [spelled(launch, room) for launch in fake.launches]
            fake.launches.clear()
    return found


def python_calls() -> dict[str, int]:
    """Count the package's functions that a dense product runs: a weight's first call, an equal call, calls of new rows.

    A weight of another shape was multiplied before, so imports and menus of tiles do not count. replay.py is left out,
    since replay.c replaces it.
    """
    room, found = Room(), {}
    other, case = islice((case for case in cases() if case.name.startswith("dense") and "FP4" not in case.name), 2)

    def counted(case: Case, m: int) -> int:
        room.at, calls = AHEAD, 0
        call = case.make(room, m)

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            file = frame.f_code.co_filename
            calls += event == "call" and file.startswith(PACKAGE) and file != replay.__file__

        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
        return calls

    with on(H200):
        counted(other, 64)
        found["cold"] = counted(case, 130)
        counted(case, 130)
        found["warm"] = counted(case, 130)
        found["new rows"] = counted(case, 131)
        found["another configuration"] = counted(case, 64)
    return found

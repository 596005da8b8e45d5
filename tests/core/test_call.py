"""Calls by records: a call like an earlier one makes the same launches as without a record, and skips the checks."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from example_calls import all_examples
from fake_gpu import FakeGpu, FakeLauncher, OnGpu, encoded_map, install, on_gpu
from test_replay import Driver, Native, built  # noqa: F401 - a fixture
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

import deep_gemm
from deep_gemm.casts import depths, lay_scales
from deep_gemm.casts import fp8 as fp8_casts
from deep_gemm.casts.depths import GroupedRows
from deep_gemm.casts.gating import Gating
from deep_gemm.core import call
from deep_gemm.core.call import Function
from deep_gemm.hyper import api as hyper
from deep_gemm.indexer import api as logits_api
from deep_gemm.linear import api as linear_api
from deep_gemm.linear import backward
from deep_gemm.moe import activation, routing
from deep_gemm.moe.check import ActivationProblem, ExpertRows
from deep_gemm.nn import experts as nn_experts
from deep_gemm.nn import linear as nn_linear


class Case(NamedTuple):
    """A function, and a call of it by tensors that may be replaced; the first tensor decides where the call runs."""

    of: Function
    call: Callable[..., Any]
    given: dict[str, Tensor]
    written: tuple[str, ...] = ()
    alignments: dict[str, int] = {}  # noqa: RUF012
    """Alignments in bytes of the tensors that may not begin at every address."""
    launches: int = 1
    unread: tuple[str, ...] = ()
    """Tensors that are checked but never read, so an output may overlap them."""
    is_dependent: bool = False
    """True if the first kernel may begin before the previous kernel ends, in any settings."""

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() for name, x in self.given.items()}


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def fp8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def logits(q: Tensor, kv: Tensor, sfkv: Tensor, **others: Any) -> Any:
    call: Any = deep_gemm.fp8_mqa_logits
    return call(q, (kv, sfkv), *others.values(), clean_logits=False)


def linear(x: Tensor, w: Tensor, sfw: Tensor, **others: Any) -> Any:
    return deep_gemm.linear(x, (w, sfw), **others)


def paged_logits(q: Tensor, **others: Any) -> Any:
    call: Any = deep_gemm.fp8_fp4_paged_mqa_logits
    return call((q, None), *others.values(), 96, False, torch.bfloat16)


def activated_behind(x: Tensor, ends: Tensor) -> Any:
    return activation.cast_activated(
        ActivationProblem(x, None, None, ends, 1, Gating()), mn_major=True, is_dependent=True
    )


def silu_gradient(h: Tensor, ends: Tensor, p: Tensor, ds: Tensor, silu_too: bool) -> Any:
    groups = GroupedRows(ints(2), ends, ints(12))
    return depths.cast_silu_gradient(h, ds, groups, p, 2.0, activation_too=silu_too)[: 4 if silu_too else 2]


ROWS = {"counts": ints(2), "ends": ints(2), "row_of": ints(6, 2), "token_of": ints(12), "ids": ints(12)}
"""Rows of two experts for 6 tokens of 2 routes each."""
SCALES = {"": zeros(2, 2), "1xk": zeros(256, 1), "64x64": zeros(4, 4), "32x32": zeros(8, 8), "1x32": zeros(8, 256).t()}
"""Scales of an FP8 weight `[256, 256]`, in the layouts that kernels load."""
WEIGHTS = {scales: {"w": fp8(256, 256), "sfw": sfw} for scales, sfw in SCALES.items()}
WEIGHTS["FP4"] = {"w": zeros(256, 128).to(torch.int8), "sfw": ints(256, 2)}
ALONG, TOKEN_CAST = depths.cast_along_groups, deep_gemm.per_token_cast_to_fp8
OF_GROUPS, ACTIVATED = {"x": bf16(6, 256), "ends": ints(2), "token_of": ints(12)}, {"x": bf16(12, 256)}
ONE_TENSOR: dict[str, tuple[Function, Callable[..., Any], Tensor]] = {
    "cast of blocks": (fp8_casts.BLOCKS, deep_gemm.per_block_cast_to_fp8, bf16(130, 256)),
    "cast of matrices' blocks": (fp8_casts.BLOCKS, deep_gemm.per_block_cast_to_fp8, bf16(2, 128, 256)),
    "cast of columns": (fp8_casts.CHANNELS, deep_gemm.per_channel_cast_to_fp8, bf16(130, 256)),
    "cast along columns": (fp8_casts.ROWS, lambda x: TOKEN_CAST(x.t()), bf16(48, 256)),
    "cast of both": (fp8_casts.BOTH, deep_gemm.cast_both_to_fp8, bf16(48, 256)),
    "cast of transposed blocks": (backward.TURNED, backward.cast_transposed, bf16(2, 128, 256)),
    "cast": (fp8_casts.ROWS, TOKEN_CAST, bf16(5, 256)),
    "cast m-major": (fp8_casts.ROWS, partial(TOKEN_CAST, mn_major=True), bf16(5, 256)),
    "scales laid out": (lay_scales.LAID, lay_scales.laid_out, zeros(5, 3)),
    "rows of 16 routes": (routing.STACKED, lambda x: routing.expert_rows(x, 8), ints(4, 4)),
}
CASES = {name: Case(of, lambda x, cast=cast: cast(x), {"x": x}) for name, (of, cast, x) in ONE_TENSOR.items()} | {
    "schedule": Case(
        logits_api.SCHEDULE,
        partial(deep_gemm.get_paged_mqa_logits_metadata, block_kv=64, num_sms=132),
        {"context_lens": ints(3, 1)},
        alignments={"context_lens": 4},
    ),
    "rows of 8400 routes": Case(routing.STACKED, lambda x: routing.expert_rows(x, 8), {"x": ints(2100, 4)}, launches=2),
    "logits": Case(
        logits_api.LOGITS,
        logits,
        {
            **{"q": fp8(6, 32, 64), "kv": fp8(40, 64), "sfkv": zeros(40), "weights": zeros(6, 32)},
            **{"cu_seq_len_k_start": ints(6), "cu_seq_len_k_end": ints(6)},
        },
        alignments={"q": 16, "kv": 16, "sfkv": 16, "cu_seq_len_k_end": 4},
    ),
    "paged logits": Case(
        logits_api.PAGED_LOGITS,
        paged_logits,
        {
            **{"q": fp8(3, 1, 32, 64), "kv_cache": torch.zeros(5, 64, 1, 68, dtype=torch.uint8)},
            **{"weights": zeros(3, 32), "context_lens": ints(3, 1), "block_table": ints(3, 2)},
            "schedule_meta": ints(133, 2),
        },
        alignments={"q": 16, "kv_cache": 16, "context_lens": 4, "schedule_meta": 8},
    ),
    **{
        f"hyper-connections of {m} rows": Case(
            hyper.PRENORM,
            lambda a, b, d, sqr_sum: deep_gemm.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, 2),
            {"a": bf16(m, 128), "b": zeros(8, 128), "d": zeros(2, m, 8), "sqr_sum": zeros(2, m)},
            ("d", "sqr_sum"),
            {"a": 16, "b": 16, "d": 4, "sqr_sum": 4},
        )
        for m in (3, 700)
    },
    **{
        f"linear of {m} rows{'' if into else ' alone'}{' of ' * bool(scales)}{scales}": Case(
            linear_api.INTO if into else linear_api.MADE,
            linear,
            {"x": bf16(m, 256), **w, **({"bias": bf16(256), "out": bf16(m, 256)} if into else {})},
            ("out",) if into else (),
            {"w": 16, "sfw": 4, **({"out": 16} if into else {})},
            launches=1 if m == 3 and scales in ("", "1xk") else 2,
        )
        for m in (3, 512)
        for into in (False, True)
        for scales, w in WEIGHTS.items()
    },
    **{
        f"cast along groups{', weighted' * bool(weights)}": Case(
            depths.ALONG,
            lambda x, ends, token_of, p=None: ALONG(x, GroupedRows(ints(2), ends, token_of), p),
            OF_GROUPS | weights,
        )
        for weights in ({}, {"p": zeros(12)})
    },
    **{
        f"cast of silu's gradient{' and silu' * silu_too}": Case(
            depths.SILU,
            partial(silu_gradient, silu_too=silu_too),
            {"h": bf16(12, 256), "ends": ints(2), "p": zeros(12), "ds": bf16(12, 128)},
        )
        for silu_too in (False, True)
    },
    "cast to rows of routes": Case(
        routing.GATHERED,
        lambda x, **rows: routing.gather_cast_to_fp8(x, ExpertRows(**rows), mn_major=True),
        {"x": bf16(6, 256), **ROWS},
    ),
    "cast to rows of routes behind their kernel": Case(
        routing.GATHERED,
        lambda x, **rows: routing.gather_and_cast(x, ExpertRows(**rows), is_dependent=True),
        {"x": bf16(6, 256), **ROWS},
        is_dependent=True,
    ),
    **{
        f"sums of rows{' into others' * bool(out)}": Case(
            routing.WEIGHTED_INTO if out else routing.WEIGHTED,
            lambda y, p, out=None, **rows: routing.gather_weighted(y, ExpertRows(**rows), p, out=out),
            {"y": bf16(12, 256), **ROWS, "p": zeros(6, 2), **out},
            (*out,),
            dict.fromkeys(out, 16),
            unread=("counts", "ends", "token_of", "ids"),
        )
        for out in ({}, {"out": bf16(6, 256)})
    },
    "sums of rows behind their product": Case(
        routing.SUMMED_INTO,
        partial(routing.sum_rows, is_dependent=True),
        {"y": bf16(12, 256), "row_of": ints(6, 2), "weights": zeros(6, 2), "out": bf16(6, 256)},
        is_dependent=True,
    ),
    "sums of rows as they are": Case(routing.SUMMED, routing.sum_rows, {"y": bf16(12, 256), "row_of": ints(6, 2)}),
    "activation of rows behind their product": Case(
        activation.ACTIVATED, activated_behind, {**ACTIVATED, "ends": ints(2)}, is_dependent=True
    ),
    **{
        f"activation{' with'.join(['', *more])}": Case(
            activation.ACTIVATED,
            partial(deep_gemm.silu_mul_cast_to_fp8, limit=2.0, mn_major=True),
            ACTIVATED | {name: zeros(12) if name == "row_weights" else ints(2) for name in more},
        )
        for more in ((), ("row_weights",), ("ends",), ("row_weights", "ends"))
    },
}


@pytest.fixture
def gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(lay_scales, "has_kernel", lambda _: True)
    return gpu


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Function]:
    """Return a list that receives each function that runs in full, because no record serves the call."""
    found: list[Function] = []

    def answer(function: Function, by: Callable[..., Any], *given: Any) -> Any:
        found.append(function)
        return by(*given)

    for of in {case.of for case in CASES.values()}:
        monkeypatch.setattr(of, "answer", partial(answer, of, of.answer))
    return found


def placed(given: Any) -> Any:
    """Return the same values with each tensor treated as one on a GPU."""
    return tree_map(lambda x: on_gpu(x) if isinstance(x, Tensor) else x, given)


def tensors_of(name: str, **instead: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = placed({**CASES[name].tensors(), **instead})
    return found


def at_byte(x: Tensor, byte: int) -> Tensor:
    """Return zeros in the layout of x that begin `byte` bytes after a multiple of 64."""
    memory = torch.zeros(x.numel() * x.element_size() + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + byte
    return torch.frombuffer(memory.numpy(), dtype=x.dtype, count=x.numel(), offset=first).view(x.shape)


class Memory:
    """Records all memory that a call allocates, and treats it as memory of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.alive: list[Tensor] = []
        for name in ("empty", "empty_strided"):
            monkeypatch.setattr(torch, name, partial(self.make, getattr(torch, name)))

    def make(self, empty: Callable[..., Tensor], *of: Any, **how: Any) -> Tensor:
        x = on_gpu(empty(*of, **how).zero_())
        self.alive.append(x)
        self.blocks.append((x.data_ptr(), x.data_ptr() + max(x.untyped_storage().nbytes(), 1)))
        return x

    def has(self, address: int) -> bool:
        return any(first - (1 << 15) <= address < end for first, end in self.blocks)  # maps may begin before a tensor


def assert_alike(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, run: Callable[[], Any], records: Any = None) -> None:
    """Check that a call by its record makes the launches and results of a call without one, except for new addresses.

    `records`: the function that makes the record of a call without a stored record.
    """
    launches, outs, memories = [], [], []
    for recorded in (records, lambda *_: (None, None)):
        with monkeypatch.context() as patch:
            patch.setattr(call, "recorded", recorded)
            if recorded is not records:
                patch.setattr(call, "RECORDS", {})
            memories.append(Memory(patch))
            gpu.launches.clear()
            outs.append(run())
            launches.append([*gpu.launches])
    assert len(launches[0]) == len(launches[1]) > 0
    moved = {y.data_ptr(): x.data_ptr() for x, y in zip(*map(several, outs), strict=True)}
    for mine, right in zip(*launches, strict=True):
        facts = [(x.kernel, x.grid, x.cluster, x.is_dependent, x.config, len(x.words)) for x in (mine, right)]
        assert facts[0] == facts[1]
        for x, y in zip(mine.words, right.words, strict=True):
            assert x == y or (moved.setdefault(y, x) == x and memories[0].has(x) and memories[1].has(y))
    facts_of = [[(x.shape, x.stride(), x.dtype, x.storage_offset()) for x in several(each)] for each in outs]
    assert facts_of[0] == facts_of[1] and tree_structure(outs[0]) == tree_structure(outs[1])


def several(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


EXAMPLES = {f"{each.name} {[*each.given][-1]} {i}": each for i, each in enumerate(all_examples())}
WITHOUT_RECORD = {
    "cublaslt_gemm_nt": "torch's product",
    "cublaslt_gemm_nn": "torch's product",
    "cublaslt_gemm_tn": "torch's product",
    "cublaslt_gemm_tt": "torch's product",
    "gather_weighted": "rows in FP32",
    "per_custom_dims_cast_to_fp8": "blocks as long as a row",
    "cast_back_from_fp8": "computed by torch",
    "cast_back_from_fp4": "computed by torch",
    "transpose_packed_fp4": "computed by torch",
    "pack_ue8m0_to_int": "computed by torch",
    "unpack_ue8m0_from_int": "computed by torch",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "computed by torch",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": "computed by torch",
    "get_mn_major_tma_aligned_tensor": "scales that lie right: nothing is launched",
    "transform_sf_into_required_layout": "scales that lie right: nothing is launched",
}
"""Functions with an example whose calls have no record. No other function may silently use the slow path."""


def called(name: str) -> Callable[[], Any]:
    """Return the call of an example or a case."""
    if name in CASES:
        return partial(CASES[name].call, **tensors_of(name))
    return partial(EXAMPLES[name].function, **placed(EXAMPLES[name].given))


def test_which_functions_have_no_record(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked, answered = set(), list[str](), call.answered

    def slowly(function: Function, *of: Any) -> Any:
        asked.append(name)
        return answered(function, *of)

    for name in (*EXAMPLES, *CASES):
        run = called(name)
        run()
        with monkeypatch.context() as patch:
            patch.setattr(call, "answered", slowly)
            launched = len(gpu.launches)
            run()
        if name in asked or len(gpu.launches) == launched:
            found.add(EXAMPLES[name].name)
    assert found == WITHOUT_RECORD.keys()


HAVE_RECORD = [*(name for name, each in EXAMPLES.items() if each.name not in WITHOUT_RECORD), *CASES]


class OfReplayC(FakeLauncher):
    """A launcher that replay.c identifies by a number."""

    all: list[OfReplayC] = []  # noqa: RUF012

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.all.append(self)
        self.function: Any = len(self.all)
        self.threads, self.kernel = 128, SimpleNamespace(shared_bytes=64)


class Replayed(Native):
    """replay.c on the fake GPU."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, Driver(), classes=(OnGpu, Tensor))

    def make(self, *of: Any, **how: Any) -> Any:
        return torch.empty_strided(*of, **how)

    def launch(self, config: Any, function: int, params: Any, extra: Any) -> int:
        of = OfReplayC.all[function - 1]
        of.hold(ctypes.string_at(params[0], of.layout.size), config.contents.grid[0])
        return of.start(None, None, None, 0)[0]

    def encode(self, room: int, element: int, rank: int, address: int, *rest: Any) -> int:
        sizes, strides, box = rest[0][:rank], rest[1][: rank - 1], rest[2][:rank]
        (ctypes.c_char * 128).from_address(room).raw = encoded_map(sizes, strides, box, address)
        return 0


@pytest.mark.parametrize("replays", ["replay.c", "replay.py", "replay.py without maps that move"])
@pytest.mark.parametrize("name", HAVE_RECORD)
def test_a_record_launches_and_gives_what_a_call_without_one_does(
    name: str, replays: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if replays == "replay.c":
        module = request.getfixturevalue("built")
        gpu, native = install(monkeypatch, launcher=OfReplayC), Replayed(module)
        monkeypatch.setattr(call, "native", lambda: native.module)
    elif replays != "replay.py":
        monkeypatch.setattr(FakeLauncher, "keeps_addresses", lambda _: False)
    run = called(name)
    run()
    assert_alike(monkeypatch, gpu, run)


def gradients_of_experts(grad: Tensor, x: Tensor, p: Tensor, h: Tensor, depths: Tensor, **others: Tensor) -> Any:
    w1, w2, *rows = others.values()
    operands = grad, x, p, w1, w2, h, ExpertRows(*rows), depths, None, None
    return call.run(
        nn_experts.BACKWARD[0],
        operands,
        (nn_experts.FP8, None, *[True] * 4, *[False] * 3, *[torch.bfloat16] * 2, True, True),
    )


OF_EXPERTS = {"w1": bf16(2, 512, 256), "w2": bf16(2, 256, 256), **ROWS}
LAYERS: dict[str, tuple[int, Callable[..., Any], dict[str, Tensor]]] = {
    "linear": (
        3,
        lambda x, w, bias: nn_linear.with_columns(x, w, bias, True),
        {"x": bf16(48, 256), "w": bf16(128, 256), "bias": bf16(128)},
    ),
    "linear, backward": (
        4,
        lambda grad, w, **of_x: nn_linear.gradients(grad, w, (*of_x.values(),), torch.bfloat16, torch.bfloat16),
        {"grad": bf16(48, 128), "w": bf16(128, 256), "values": fp8(256, 48), "scales": zeros(1, 256).t()},
    ),
    "experts": (
        7,
        lambda x, p, w1, w2, **rows: nn_experts.with_gates(x, p, w1, w2, ExpertRows(**rows), None),
        {"x": bf16(6, 256), "p": zeros(6, 2), **OF_EXPERTS},
    ),
    "experts, backward": (
        13,
        gradients_of_experts,
        {
            **{"grad": bf16(6, 256), "x": bf16(6, 256), "p": zeros(12), "h": bf16(12, 512)},
            "depths": ints(2) + 16,  # the fake GPU's tensors are read like the host's
            **OF_EXPERTS,
        },
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_way_of_a_layer_is_one_record(name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, of, given = LAYERS[name]
    there = placed(given)
    assert_alike(monkeypatch, gpu, lambda: of(**there), call.recorded)
    assert (gpu.records, len(gpu.launches)) == (1, launches)


def test_a_layer_by_rows_is_launched_without_a_record_of_the_whole(gpu: FakeGpu) -> None:
    """Torch computes a part of the layer, so each launch has a record. A D made without a record is on the CPU."""
    there = placed({"x": bf16(48, 512), "w": bf16(1024, 512), "grad": bf16(48, 1024), "main_grad": zeros(1024, 512)})
    launches = []
    for _ in range(3):
        before = len(gpu.launches)
        _, columns = nn_linear.with_columns(there["x"], there["w"], None, True, 0)
        types = torch.bfloat16, torch.bfloat16
        nn_linear.gradients(there["grad"], there["w"], columns, *types, there["main_grad"], 0)
        launches.append([launch.kernel for launch in gpu.launches[before:]])
    forward, backward = ["cast_rows", "cast_tiles", "cast_rows"], ["cast_rows", "cast_tiles", "cast_tiles"]
    assert launches == [[*forward, *backward, "fp8_gemm_dense"]] * 3
    assert gpu.last.config.adds_to_d


def with_rows(given: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return tensors for `rows` rows: a dimension of m or 2 m elements (m: the first tensor's rows) changes."""
    m = len(next(iter(given.values())))
    found = {}
    for name, x in given.items():
        shape = [x if x % m or x // m > 2 else x // m * rows for x in x.shape]
        found[name] = x if shape == [*x.shape] else torch.zeros(shape, dtype=x.dtype)
    return found


BY_ROWS = {
    "cast along columns",
    "scales laid out",
    *(name for name in CASES if name.startswith(("cast along groups", "cast of silu", "hyper-connections"))),
    "rows of 16 routes",
}
"""Calls that have a separate record for each number of rows."""


@pytest.mark.parametrize("name", [name for name in CASES if "matrices" not in name and "transposed" not in name])
def test_other_rows_have_their_own_numbers(name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    case, given, made = CASES[name], CASES[name].tensors(), call.recorded
    rows = [len(next(iter(given.values())))]
    case.call(**placed(given))
    for m in (rows[0] + 1, rows[0] - 1, 2 * rows[0], 40 * rows[0], 1):
        other = placed(with_rows(given, m))
        assert_alike(monkeypatch, gpu, partial(case.call, **other), made)
    assert (gpu.records < 6) == (name not in BY_ROWS)


@pytest.mark.parametrize("name", CASES)
def test_a_call_like_one_before_is_not_asked(name: str, gpu: FakeGpu, asked: list[Function]) -> None:
    """Check also that a call's launches are all in one record, even if other functions compute parts of the call."""
    for _ in range(4):
        CASES[name].call(**tensors_of(name))
        assert (asked.count(CASES[name].of), gpu.records) == (1, 1)
    launches = [(each.kernel, each.grid, len(each.words)) for each in gpu.launches]
    assert launches == launches[: CASES[name].launches] * 4


@pytest.mark.parametrize("name", CASES)
def test_what_differs_in_anything_is_asked(name: str, gpu: FakeGpu, asked: list[Function]) -> None:
    case = CASES[name]
    case.call(**tensors_of(name))
    for changed, x in case.tensors().items():
        apart = torch.stack([x.float(), x.float()], -1)
        wider = [torch.cat([apart, apart], 1).to(x.dtype)[..., 0]] if x.dim() > 1 else []
        for other in (x.to(torch.float16), apart.to(x.dtype)[..., 0], *wider):
            before = asked.count(case.of)
            with suppress(ValueError, NotImplementedError, RuntimeError):
                case.call(**tensors_of(name, **{changed: other}))
            assert asked.count(case.of) > before
    launched = len(gpu.launches)
    case.call(**tensors_of(name))
    assert len(gpu.launches) == launched + case.launches


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.alignments])
def test_an_address_that_is_wrong_is_refused(name: str, is_warm: bool, gpu: FakeGpu) -> None:
    case = CASES[name]
    if is_warm:
        case.call(**tensors_of(name))
    launched = len(gpu.launches)
    for wrong, alignment in case.alignments.items():
        x = at_byte(case.tensors()[wrong], alignment // 2)
        with pytest.raises(ValueError, match=rf"{wrong}: expected an address that is a multiple of {alignment} bytes"):
            case.call(**tensors_of(name, **{wrong: x}))
    assert len(gpu.launches) == launched


@pytest.mark.parametrize(("name", "written"), [(name, each) for name in CASES for each in CASES[name].written])
def test_an_output_that_overlaps_anything_is_refused(name: str, written: str, gpu: FakeGpu) -> None:
    case, out = CASES[name], CASES[name].tensors()[written]
    case.call(**tensors_of(name))
    launched = len(gpu.launches)
    for other, x in case.tensors().items():
        if other == written or other in case.unread or x.dtype == torch.float8_e4m3fn:
            continue
        sizes = [each.numel() * each.element_size() for each in (out, x)]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = memory[: sizes[0]], memory[(sizes[0] - 1) // 16 * 16 :][: sizes[1]]
        overlapping = [part.view(each.dtype).view(each.shape) for part, each in zip(parts, (out, x), strict=True)]
        with pytest.raises(ValueError, match="expected memory that does not overlap"):
            case.call(**tensors_of(name, **{written: overlapping[0], other: overlapping[1]}))
    assert len(gpu.launches) == launched


@pytest.mark.parametrize("name", CASES)
def test_settings_in_force_are_those_of_the_call(name: str, gpu: FakeGpu, asked: list[Function]) -> None:
    run = called(name)
    for calls in range(2):
        for pdl in (False, True):
            deep_gemm.set_pdl(pdl)
            for _ in range(2):
                run()
                assert gpu.launches[-CASES[name].launches].is_dependent is (pdl or CASES[name].is_dependent)
            assert asked.count(CASES[name].of) == (2 if calls or pdl else 1)
    deep_gemm.set_compile_mode(1)
    launched = len(gpu.launches)
    for _ in range(2):
        run()
    assert (len(gpu.launches), gpu.records) == (launched, 2)


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_holds_no_memory(name: str, gpu: FakeGpu) -> None:
    given = tensors_of(name)
    alive = [weakref.ref(x) for x in given.values()]
    for _ in range(3):
        alive += [weakref.ref(x) for x in several(CASES[name].call(**given))]
    del given
    gc.collect()
    assert [each for each in alive if each() is not None] == []


def test_what_is_said_counts_with_its_type(gpu: FakeGpu) -> None:
    """True equals 1 in Python, but a record of a call with 1 must not serve a call with True."""
    given = tensors_of("logits")
    operands: Any = given.pop("q"), (given.pop("kv"), given.pop("sfkv")), *given.values()
    run: Any = partial(deep_gemm.fp8_mqa_logits, *operands)
    for _ in range(3):
        run(max_seqlen_k=1)
    for wrong in (True, 1.0, [1]):
        with pytest.raises(ValueError, match="max_seqlen_k: expected"):
            run(max_seqlen_k=wrong)
    run(max_seqlen_k=np.int64(1))


def learned(x: Tensor) -> Tensor:
    """Return a copy of x that autograd has computed from a tensor which requires a gradient."""
    return x.detach().clone().requires_grad_().clone()


def refused(name: str) -> Any:
    return pytest.raises(ValueError, match=rf"^{name}: expected a tensor without a gradient")


def test_a_warm_call_refuses_what_would_cut_a_gradient(gpu: FakeGpu) -> None:
    given = tensors_of("logits")
    learning = {**given, "weights": torch.zeros(6, 32, requires_grad=True)}
    for _ in range(3):
        logits(**given)
        with torch.no_grad():
            logits(**learning)
        launched = len(gpu.launches)
        with refused("weights"):
            logits(**learning)
        assert len(gpu.launches) == launched


def test_a_warm_product_refuses_it_too(gpu: FakeGpu) -> None:
    """Check operands, C and D after like calls with and without grad mode, and with weights that are Parameters."""
    a, (values, scales) = (deep_gemm.per_token_cast_to_fp8(torch.ones(m, 512), mn_major=True) for m in (64, 128))
    a, d = (on_gpu(a[0]), a[1]), on_gpu(bf16(64, 128))
    product = partial(deep_gemm.fp8_gemm_nt, recipe=(1, 1, 128))
    weights = (values, scales), (torch.nn.Parameter(values), torch.nn.Parameter(scales))
    cut: dict[str, tuple[Any, ...]] = {
        "a": ((learned(a[0]), a[1]), weights[0], d),
        "sfa": ((a[0], learned(a[1])), weights[0], d),
        "b": (a, (learned(values), scales), d),
        "sfb": (a, (values, learned(scales)), d),
        "c": (a, weights[0], d, torch.zeros_like(d).requires_grad_()),
    }
    outputs = on_gpu(d.clone().requires_grad_()), on_gpu(learned(d))
    for _ in range(3):
        for b in weights:
            product(a, b, d)
            product(a, b, d, torch.zeros_like(d))
        launched = len(gpu.launches)
        with torch.no_grad():
            for call_of in (*cut.values(), *((a, weights[0], out, *more) for out in outputs for more in ((), (out,)))):
                product(*call_of)
        assert len(gpu.launches) == launched + 9
        for name, call_of in cut.items():
            with refused(name):
                product(*call_of)
        for out in outputs:
            for added in (None, out):
                with refused("d"):
                    product(a, weights[0], out, added)
        assert len(gpu.launches) == launched + 9


def test_a_warm_product_of_groups_along_k_refuses_it_too(gpu: FakeGpu) -> None:
    ks = [128, 32]
    a, b = (deep_gemm.k_grouped_cast_to_fp8(torch.ones(8, 160), ks, mn_major=True) for _ in range(2))
    a, d = (on_gpu(a[0]), a[1]), on_gpu(torch.zeros(2, 8, 8))
    for _ in range(3):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks)
        launched = len(gpu.launches)
        with refused("sfb"):
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, (b[0], learned(b[1])), d, ks)
        with refused("d"):
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, on_gpu(torch.zeros(2, 8, 8).requires_grad_()), ks)
        assert len(gpu.launches) == launched


@pytest.mark.parametrize("is_twice", [True, False])
def test_one_tensor_in_two_places_takes_no_place_of_two(
    is_twice: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, d = on_gpu(bf16(64, 256)), on_gpu(bf16(64, 256)), on_gpu(bf16(64, 64))
    deep_gemm.bf16_gemm_nt(x, x if is_twice else y, d)
    for b in (y, x):
        assert_alike(monkeypatch, gpu, partial(deep_gemm.bf16_gemm_nt, x, b, d))
    assert gpu.records == 1
    deep_gemm.bf16_gemm_nt(x, x, out := on_gpu(torch.zeros(64, 64)), out)  # C and D are one tensor
    assert_alike(monkeypatch, gpu, partial(deep_gemm.bf16_gemm_nt, x, y, out, out))


def test_what_is_said_of_a_linear_layer_is_part_of_its_calls(gpu: FakeGpu, asked: list[Function]) -> None:
    run = partial(linear, **tensors_of("linear of 512 rows alone of 32x32"))
    for gran_k, times in ((32, 1), (32, 1), (128, 2), (32, 2), (64, 3), (128, 3)):
        run(gran_k=gran_k)
        assert asked.count(linear_api.MADE) == times

"""Prepared launches: the parameters and settings of a launch that looks everything up."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, FakeLauncher

from deep_gemm.across import plan_sends
from deep_gemm.across.plan_sends import KERNEL
from deep_gemm.core.kernel import Prepared
from deep_gemm.core.params import Field, Kind, Params
from deep_gemm.core.settings import set_compile_mode, set_pdl

MIXED = Params(
    "Mixed",
    Field("p", Kind.POINTER),
    Field("m", Kind.UINT32),
    Field("limit", Kind.FLOAT32),
    Field("n", Kind.UINT32),
    Field("q", Kind.POINTER),
    Field("facts", Kind.UINT64, 2),
    Field("map", Kind.MAP),
)
OLD: dict[str, float | bytes] = {
    "p": 1,
    "m": 2,
    "limit": 0.5,
    "n": 3,
    "q": 4,
    "facts": struct.pack("<2Q", 5, 6),
    "map": b"",
}


@pytest.mark.parametrize(
    "new",
    [
        {},
        {"p": 1 << 50},
        {"p": 7, "m": 8},
        {"m": 8, "n": 9},
        {"n": 9, "q": 1 << 40},  # padding lies between the two
        {"p": 7, "m": 8, "limit": -2.0, "n": 9, "q": 10},
    ],
)
def test_a_patch_gives_the_bytes_of_packing_anew(new: dict[str, int]) -> None:
    patched, values = bytearray(MIXED.pack(OLD)), [*new.values()]
    for pack_into, at, which in MIXED.patch([*new]):
        pack_into(patched, at, *values[which])
    assert patched == MIXED.pack({**OLD, **new})


def test_an_array_is_patched_at_its_first_number() -> None:
    patched = bytearray(MIXED.pack(OLD))
    for pack_into, at, which in MIXED.patch(("q", "facts")):
        pack_into(patched, at, *[8, 9][which])
    assert patched == MIXED.pack({**OLD, "q": 8, "facts": struct.pack("<2Q", 9, 6)})


def test_members_beside_each_other_are_written_by_one_call() -> None:
    assert len(MIXED.patch(("p", "m", "limit", "n"))) == 1
    assert len(MIXED.patch(("p", "limit", "n"))) == 2


@pytest.mark.parametrize("names", [("m", "p"), ("p", "p"), ("other",), ("map", "p")])
def test_a_patch_takes_numbers_in_the_order_of_the_struct(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="Mixed: expected numbers among its members, in their order, got"):
        MIXED.patch(names)


class Asked:
    """What a kernel's launchers were asked for, and those that were given."""

    def __init__(self) -> None:
        self.gpu, self.dependent, self.made = FakeGpu(), [], {}  # type: ignore[var-annotated]

    def launcher(self, config: Any, device: int, is_dependent: bool) -> FakeLauncher:
        self.dependent.append(is_dependent)
        fresh = FakeLauncher(self.gpu, KERNEL, config, is_dependent)
        return self.made.setdefault((config, device, is_dependent), fresh)  # type: ignore[no-any-return]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # what CPU tensors say they are on
    monkeypatch.setattr(KERNEL, "launcher", made.launcher)
    return made


def tensors(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tokens, 4, dtype=torch.int64), torch.zeros(tokens, 4, dtype=torch.int32)


def prepared(told: torch.Tensor) -> Prepared[Any]:
    params = plan_sends.params_of(tensors(2)[0], range(7), tensors(2)[1], told, 8, 2)
    return KERNEL.prepared(plan_sends.config_of(8), params, ("topk_ids", "row_of", "tokens"), -1)


def test_a_prepared_launch_has_the_parameters_of_one_that_packs_them(asked: Asked) -> None:
    told = torch.zeros(11, dtype=torch.int64)
    quick = prepared(told)
    for tokens in (1, 5000, 3):
        ids, row_of = tensors(tokens)
        plan_sends.run(ids, range(7), row_of, told, 8, 2)
        quick.launch(plan_sends.grid(quick.config, tokens), ids.data_ptr(), row_of.data_ptr(), tokens)
        right, got = asked.gpu.launches[-2:]
        assert (got.words, got.grid) == (right.words, right.grid)


def test_the_settings_in_force_are_those_of_the_launch(asked: Asked) -> None:
    quick = prepared(torch.zeros(11, dtype=torch.int64))
    for pdl in (False, True, False):
        set_pdl(pdl)
        for _ in range(2):
            quick.launch(1, 16, 16, 1)
            assert asked.gpu.last.is_dependent is pdl
    assert asked.dependent == [False, True, False]  # looked up as settings change alone
    set_compile_mode(1)
    quick.launch(1, 16, 16, 1)
    assert len(asked.gpu.launches) == 6

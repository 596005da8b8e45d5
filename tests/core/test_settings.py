"""Settings: values from the environment, setters that work and refuse wrong values, and the defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deep_gemm
from deep_gemm.core import settings as module
from deep_gemm.core.settings import SettingError, read_settings, settings

SETTERS: list[tuple[str, int | bool, list[Any]]] = [
    ("num_sms", 132, [1, 2, 78, 131, 132]),
    ("tc_util", 100, [1, 50, 100]),
    ("pdl", False, [True, False]),
    ("compile_mode", 0, [1, 0]),
    ("mk_alignment_for_contiguous_layout", 128, [1, 16, 112, 128, 240]),
]
REFUSED: list[tuple[str, Any]] = [
    *[("num_sms", x) for x in (0, -1, 133, 1.5, True, "8", None)],
    *[("tc_util", x) for x in (0, 101, 50.0, True, None)],
    *[("compile_mode", x) for x in (-1, 2, 1.0, True, "1")],
    *[("mk_alignment_for_contiguous_layout", x) for x in (0, -128, 128.0, True, None, torch.tensor(128))],
]


@pytest.fixture(autouse=True)
def _no_gpu_and_nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo a test's settings after it, and hide this machine's GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "in_force", module.InForce())


def accessors(name: str) -> tuple[Callable[[Any], None], Callable[[], Any]]:
    return getattr(deep_gemm, f"set_{name}"), getattr(deep_gemm, f"get_{name}")


@pytest.mark.parametrize(("name", "default", "values"), SETTERS)
def test_getters_answer_the_default_and_then_what_was_set(name: str, default: int | bool, values: list[Any]) -> None:
    set_it, get_it = accessors(name)
    assert get_it() == default
    for value in values:
        set_it(value)
        assert get_it() == value
        assert type(get_it()) is type(value)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_nonsense_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    set_it, get_it = accessors(name)
    before = get_it()
    with pytest.raises(ValueError, match=r"expected an integer in \d+\.\.\d+, got ") as caught:
        set_it(value)
    assert str(caught.value).endswith(f"got {value!r}")
    assert get_it() == before


@pytest.mark.parametrize("value", ["x", 1, 0, None, np.True_])
def test_programmatic_launch_is_on_or_off(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^enabled: expected True or False, got {re.escape(repr(value))}$"):
        deep_gemm.set_pdl(value)
    assert deep_gemm.get_pdl() is False


def test_integers_may_be_numpys() -> None:
    num_sms: Any = np.int64(78)
    deep_gemm.set_num_sms(num_sms)
    assert deep_gemm.get_num_sms() == 78
    assert type(deep_gemm.get_num_sms()) is int


@pytest.mark.parametrize(("name", "default", "values"), SETTERS)
def test_records_are_made_anew_exactly_under_choices_not_made_before(
    name: str, default: int | bool, values: list[Any]
) -> None:
    set_it, _ = accessors(name)
    set_it(default)
    first = module.in_force.generation
    set_it(default)
    assert module.in_force.generation == first, "nothing changed"
    other = next(value for value in values if value != default)
    set_it(other)
    second = module.in_force.generation
    assert second != first
    set_it(default)
    assert module.in_force.generation == first, "the earlier settings"
    set_it(other)
    assert module.in_force.generation == second


def test_one_setting_does_not_change_another() -> None:
    for name, _, values in SETTERS:
        accessors(name)[0](values[0])
    assert [accessors(name)[1]() for name, _, _ in SETTERS] == [values[0] for _, _, values in SETTERS]


def test_a_gpu_says_how_many_multiprocessors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 78

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert deep_gemm.get_num_sms() == 78
    with pytest.raises(ValueError, match=r"num_sms: expected an integer in 1\.\.78, got 79"):
        deep_gemm.set_num_sms(79)
    deep_gemm.set_num_sms(40)
    assert deep_gemm.get_num_sms() == 40


def test_older_names_of_the_alignment_follow_the_setter() -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 16
    assert deep_gemm.get_k_alignment_for_contiguous_layout() == 16


@pytest.mark.parametrize(("alignment", "ends"), [(1, [3, 5]), (4, [3, 5]), (128, [3, 130])])
def test_group_starts_follow_the_alignment(alignment: int, ends: list[int]) -> None:
    m = ends[-1]
    ids = torch.full((m,), -1, dtype=torch.int32)
    ids[deep_gemm.align(ends[0], alignment) :] = 1
    ids[: ends[0]] = 0
    a = deep_gemm.per_token_cast_to_fp8(torch.ones(m, 16))
    b = deep_gemm.per_block_cast_to_fp8(torch.tensor([1.0, 2.0])[:, None, None].expand(2, 8, 16))
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    d = torch.full((m, 8), 42.0)
    layout = torch.tensor(ends, dtype=torch.int32)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=True)
    assert torch.equal(d[:, 0].round(), (ids + 1) * 16.0), "16 and 32 in the groups, zeros between them"


@pytest.mark.parametrize("expected_m", [None, 0, 1, 16, np.int64(33), 64, 9999])
@pytest.mark.parametrize("num_groups", [None, 0, 8])
def test_theoretical_alignment_is_128_whatever_is_expected(expected_m: int | None, num_groups: int | None) -> None:
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m) == 128
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m, num_groups=num_groups) == 128


def test_deterministic_algorithms_are_remembered() -> None:
    assert deep_gemm.get_deterministic_algorithms() is True
    deep_gemm.use_deterministic_algorithms(False)
    assert deep_gemm.get_deterministic_algorithms() is False
    with pytest.raises(ValueError, match=r"^enabled: expected True or False, got 1$"):
        deep_gemm.use_deterministic_algorithms(1)  # type: ignore[arg-type]


def test_settings_kept_for_callers_are_accepted_and_refuse_nonsense() -> None:
    before = module.in_force.generation
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_ignore_compile_dims(False)
    deep_gemm.set_block_size_multiple_of(32)
    deep_gemm.set_block_size_multiple_of((64, 16))
    assert module.in_force.generation == before, "no record is dropped"
    with pytest.raises(ValueError, match=r"^ignore: expected True or False, got 1$"):
        deep_gemm.set_ignore_compile_dims(1)  # type: ignore[arg-type]
    for nonsense in (0, "x", (64, 0)):
        with pytest.raises(ValueError, match=r"^value: expected an integer in 1\.\."):
            deep_gemm.set_block_size_multiple_of(nonsense)  # type: ignore[arg-type]
    for number in ((), (1,), (1, 2, 3)):
        with pytest.raises(ValueError) as caught:
            deep_gemm.set_block_size_multiple_of(number)  # type: ignore[arg-type]
        assert str(caught.value) == f"value: expected an integer or a pair of integers, got {number}"


@pytest.mark.parametrize("wrong", ["x", -1, 1.5, True, torch.tensor(3)])
def test_theoretical_alignment_refuses_what_is_no_number_of_rows_or_groups(wrong: Any) -> None:
    for name, given in (("expected_m", {"expected_m": wrong}), ("num_groups", {"expected_m": 17, "num_groups": wrong})):
        with pytest.raises(ValueError, match=rf"^{name}: expected an integer in 0\.\.2147483647, got "):
            deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(**given)


# The environment


def test_an_empty_environment_gives_the_defaults() -> None:
    defaults = read_settings({})
    assert defaults == read_settings({"DG_JIT_DEBUG": "", "DG_PRINT_CONFIGS": "0", "DG_JIT_CACHE_DIR": ""})
    assert defaults.jit_cache_dirs == (Path.home() / ".cache" / "deep_gemm",)
    assert defaults.jit_cache_limit_mb == 2048
    assert (defaults.jit_debug, defaults.print_configs) == (False, False)
    assert (defaults.jit_dump_ptx, defaults.jit_dump_sass) == (False, False)


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("DG_JIT_DEBUG", "jit_debug"),
        ("DG_PRINT_CONFIGS", "print_configs"),
        ("DG_JIT_DUMP_PTX", "jit_dump_ptx"),
        ("DG_JIT_DUMP_SASS", "jit_dump_sass"),
        ("DG_JIT_DUMP_ASM", "jit_dump_ptx"),
        ("DG_JIT_DUMP_ASM", "jit_dump_sass"),
        ("DG_DISABLE_FFMA_INTERLEAVE", "disable_ffma_interleave"),
        ("DG_PRINT_REG_REUSE", "print_reg_reuse"),
        ("DG_JIT_STRICT", "jit_strict"),
        ("DG_BATCH_INVARIANT", "batch_invariant"),
        ("DG_DISABLE_NATIVE_REPLAY", "disable_native_replay"),
        ("DG_DISABLE_SGLANG_PLUGIN", "disable_sglang_plugin"),
        ("DG_DISABLE_VLLM_PLUGIN", "disable_vllm_plugin"),
    ],
)
def test_switches_take_the_usual_words(variable: str, field: str) -> None:
    for value in ("1", "true", "True", "YES", "on"):
        assert getattr(read_settings({variable: value}), field) is True, value
    for value in ("0", "false", "FALSE", "no", "Off", ""):
        assert getattr(read_settings({variable: value}), field) is False, value
    for nonsense in ("2", "maybe", "-1", " ", "truee"):
        with pytest.raises(SettingError, match=rf"^{variable}: expected 0 or 1 \(.*\), got {nonsense!r}$"):
            read_settings({variable: nonsense})


def test_every_variable_that_is_read_is_told_by_the_docstring_of_its_field_and_by_the_docs() -> None:
    read: set[str] = set()

    class Spy(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return default

    read_settings(Spy())
    source = Path(str(module.__file__)).read_text()
    assert read == set(module.VARIABLES)
    assert all(f"`{name}`" in source for name in read)
    told = Path(__file__).parents[2] / "docs" / "jit.md"
    assert [name for name in read if f"`{name}" not in told.read_text()] == []


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, path in (("~/x", Path("/home/somebody/x")), ("x~/~y", Path("x~/~y"))):
        for variable in ("DG_JIT_CACHE_DIR", "DG_CACHE_DIR"):
            assert read_settings({variable: given}).jit_cache_dirs == (path,)
            assert read_settings({variable: f":/a:{given}::/a"}).jit_cache_dirs == (Path("/a"), path)
    assert read_settings({"DG_CACHE_DIR": "/old", "DG_JIT_CACHE_DIR": "/new"}).jit_cache_dirs == (Path("/new"),)


def test_the_caches_limit_is_a_positive_number() -> None:
    assert read_settings({"DG_JIT_CACHE_LIMIT_MB": "300"}).jit_cache_limit_mb == 300
    for nonsense in ("0", "-1", "1.5", "1e3", " 1", "two"):
        with pytest.raises(ValueError, match=f"DG_JIT_CACHE_LIMIT_MB: expected a positive integer, got {nonsense!r}"):
            read_settings({"DG_JIT_CACHE_LIMIT_MB": nonsense})
    for digits in (19, 5000):
        expected = f"^DG_JIT_CACHE_LIMIT_MB: expected an integer of at most 18 digits, got {digits} digits$"
        with pytest.raises(SettingError, match=expected):
            read_settings({"DG_JIT_CACHE_LIMIT_MB": "9" * digits})
    with pytest.raises(SettingError) as caught:
        read_settings({"DG_JIT_CACHE_LIMIT_MB": "x" * 5000})
    assert len(str(caught.value)) < 120


def test_a_home_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"^DG_JIT_CACHE_DIR: expected a path, got '~no such user/x', whose home"):
        read_settings({"DG_JIT_CACHE_DIR": "~no such user/x"})


def test_a_table_of_tuned_tiles_is_ignored_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_TUNED_TABLE", "/no/table")
    settings.cache_clear()
    with pytest.warns(RuntimeWarning) as caught:
        settings()
        settings()
    settings.cache_clear()
    assert [str(each.message) for each in caught] == [
        "DG_TUNED_TABLE is ignored: tables of tuned tiles are no longer read, and the cost model chooses"
    ]


def test_settings_cannot_be_changed_and_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_settings({}).jit_debug = True  # type: ignore[misc]
    before = settings()
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/elsewhere")
    assert settings() is before

"""A configuration can put only numbers, switches and names of our files into source, whatever its fields hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.core.jit import build
from deep_gemm.core.sources import cuda_sources, generated
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.kernels import KERNELS as ALL_KERNELS

EVIL = '1; }\n#include "/etc/passwd"\n// '
OF_PRODUCTS = {(config.work, config.epilogue.activates): config for config in fp8_gemm.FP8_GEMM.configs()}
KERNELS: dict[str, tuple[Callable[[Any], dict[str, str]], Any]] = {
    **{kernel.name: (kernel.headers, kernel.configs()[0]) for kernel in ALL_KERNELS if kernel.name != "k_group_maps"},
    **{f"fp8_gemm {config.name}": (fp8_gemm.FP8_GEMM.headers, config) for config in OF_PRODUCTS.values()},
}


class EvilNumber(int):
    """An int that calculates and compares normally, but prints a different text."""

    def __str__(self) -> str:
        return EVIL

    __repr__ = __str__

    def __format__(self, _: str) -> str:
        return EVIL


def injected(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configuration with one field, or one field of a field, replaced by a text or an `EvilNumber`."""
    names = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else config._fields
    change = dataclasses.replace if dataclasses.is_dataclass(config) else type(config)._replace
    for name in names:
        value = getattr(config, name)
        if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
            for inner, changed in injected(value):
                yield f"{name}.{inner}", change(config, **{name: changed})
        for evil in (EVIL, EvilNumber(value)) if type(value) in (int, bool) else (EVIL,):
            yield f"{name} as {type(evil).__name__}", change(config, **{name: evil})


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_field_of_a_configuration_becomes_code(kernel: str) -> None:
    headers, config = KERNELS[kernel]
    sound, refused, tried = headers(config), 0, 0
    for field, changed in injected(config):
        tried += 1
        try:
            found = headers(changed)
        except Exception as error:  # no source was generated, so any error is right
            refused += "expected numbers, switches and names of sources" in str(error)
            continue
        assert [name for name, text in found.items() if "passwd" in text] == [], field
        assert found.keys() == sound.keys(), field
    has_numbers = any(type(getattr(config, field.name)) is int for field in dataclasses.fields(config))
    assert tried > 0 or not dataclasses.fields(config)
    assert refused > 0 or not has_numbers, "the check was never reached"


@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"',
        '#define WORK "/etc/passwd"',
        '#define WORK "work/none.cuh"',
        '#define WORK "../cuda/tile.cuh"',
        "#define WORK a b",
        "constexpr uint32_t kBlockM = 1 + 1;",
        "constexpr uint32_t kBlockM = -1;",
        "constexpr uint32_t kBlockM = \u0661;",
        "constexpr bool kIs = 1;",
        "constexpr uint32_t kBlockM = 1; ",
        "constexpr uint32_t kBlockM = 1;\rint x;",
        "/*",
        "\\",
    ],
)
def test_a_header_of_anything_else_is_refused(line: str) -> None:
    sound = fp8_gemm.FP8_GEMM.headers(KERNELS["fp8_gemm"][1])["config.cuh"]
    assert generated(sound) == sound
    with pytest.raises(ValueError, match=r"^config: expected numbers, switches and names of sources in config\.cuh"):
        generated(f"{sound}{line}\n")


def test_every_kernel_has_its_header_checked() -> None:
    for path in Path(str(fp8_gemm.__file__)).parent.glob("*.py"):
        text = path.read_text()
        assert text.count('"config.cuh":') == text.count('"config.cuh": generated('), path.name


def test_every_file_that_a_configuration_may_name_is_one_of_ours() -> None:
    assert all(name == name.lower() and ".." not in name for name in cuda_sources())


@pytest.mark.parametrize("name", ["../kernel", "a/b", "/tmp/a", "a\0b", "..", "", "a" * 101, "a\n"])
def test_no_kernels_name_leads_out_of_the_cache(name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: expected up to 100 letters"):
        build("", {}, name=name)

"""Settings from environment variables, which are read once, and settings that a program changes while it runs."""

from __future__ import annotations

import os
import reprlib
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from .gpu import H200

DEFAULT_ALIGNMENT = 128
DEFAULT_CACHE_LIMIT_MB = 2048
"""Enough for tens of thousands of kernels. A model needs some hundreds."""
MOST_DIGITS = 18
"""The most digits of a number in a variable. Python itself refuses to read more than 4,300 digits."""
SWITCH = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off", ""), False)}
"""The values of a switch variable. Upper and lower case are equivalent."""
TUNED_TABLE_IGNORED = "DG_TUNED_TABLE is ignored: tables of tuned tiles are no longer read, and the cost model chooses"
MAX_CHOICES = 4096
"""The most choices that keep a number. If there are more, all but the current choice are forgotten."""


class SettingError(ValueError):
    """An environment variable has an invalid value."""


@dataclass(frozen=True)
class Settings:
    """The settings from environment variables. Each variable of the package sets a field."""

    jit_cache_dirs: tuple[Path, ...]
    """Directories of compiled kernels, `DG_JIT_CACHE_DIR` or the older `DG_CACHE_DIR`, separated as in PATH. Kernels
    are read from all directories, and written to the first that is writable."""
    jit_cache_limit_mb: int
    """`DG_JIT_CACHE_LIMIT_MB`: if all kernels need more megabytes, the least recently used kernels are removed."""
    jit_debug: bool
    """`DG_JIT_DEBUG`: print each compiled kernel, its options, and the compiler's messages."""
    jit_strict: bool
    """`DG_JIT_STRICT`: raise an error if a kernel spills, needs a stack frame, or if ptxas notes a slow WGMMA."""
    jit_dump_ptx: bool
    """`DG_JIT_DUMP_PTX`: write each kernel's PTX beside the kernel in the cache. `DG_JIT_DUMP_ASM` sets both dumps."""
    jit_dump_sass: bool
    """`DG_JIT_DUMP_SASS`: write each kernel's disassembled machine code beside the kernel in the cache."""
    disable_ffma_interleave: bool
    """`DG_DISABLE_FFMA_INTERLEAVE`: do not rewrite the FFMAs of promotion (see core/jit/interleave.py)."""
    print_reg_reuse: bool
    """`DG_PRINT_REG_REUSE`: for each kernel, print the number of promotion FFMAs by their yield and reuse bits."""
    print_configs: bool
    """`DG_PRINT_CONFIGS`: print the configuration chosen for each new problem."""
    disable_native_replay: bool
    """`DG_DISABLE_NATIVE_REPLAY`: replay calls in Python, not by replay.c (see core/replay.py)."""
    disable_sglang_plugin: bool
    """`DG_DISABLE_SGLANG_PLUGIN`: let SGLang compute all layers (see integrations/sglang.py)."""
    disable_vllm_plugin: bool
    """`DG_DISABLE_VLLM_PLUGIN`: offer vLLM no layers (see integrations/vllm.py)."""
    batch_invariant: bool
    """`DG_BATCH_INVARIANT`: the value of `get_batch_invariant` until `set_batch_invariant` is called."""


SWITCHES = tuple(field.name for field in fields(Settings) if field.type == "bool")
"""Settings whose variables are switches: `jit_debug` is `DG_JIT_DEBUG`."""
VARIABLES = (
    *("DG_JIT_CACHE_DIR", "DG_CACHE_DIR", "DG_JIT_CACHE_LIMIT_MB", "DG_JIT_DUMP_ASM"),
    *(f"DG_{name.upper()}" for name in SWITCHES),
)
"""All variables that `read_settings` reads."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read settings from a mapping of environment variables. `settings` and tests use this pure function."""
    stated = environment.get("DG_JIT_CACHE_DIR") or environment.get("DG_CACHE_DIR") or ""
    cache_dirs = dict.fromkeys(_path("DG_JIT_CACHE_DIR", part) for part in stated.split(os.pathsep) if part)
    dump_both = _flag(environment, "DG_JIT_DUMP_ASM")
    switches = {name: _flag(environment, f"DG_{name.upper()}") for name in SWITCHES}
    switches |= {name: switches[name] or dump_both for name in ("jit_dump_ptx", "jit_dump_sass")}
    return Settings(
        jit_cache_dirs=tuple(cache_dirs) or (_default_cache_dir(),),
        jit_cache_limit_mb=_positive(environment, "DG_JIT_CACHE_LIMIT_MB", DEFAULT_CACHE_LIMIT_MB),
        **switches,
    )


@cache
def settings() -> Settings:
    """Return the settings of this process."""
    if os.environ.get("DG_TUNED_TABLE"):
        warnings.warn(TUNED_TABLE_IGNORED, RuntimeWarning, stacklevel=2)
    return read_settings(os.environ)


def _default_cache_dir() -> Path:
    try:
        return Path.home() / ".cache" / "deep_gemm"
    except RuntimeError:  # a container may run under a user id that has neither HOME nor a passwd entry
        # No directory: kernels stay in memory. With a fixed name in /tmp, other users could plant machine code there.
        return Path(os.devnull) / "deep_gemm"


def _path(name: str, value: str) -> Path:
    """Read a path, with `~` as the home directory: a shell does not expand `~` in `docker run -e` or in quotes."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise SettingError(f"{name}: expected a path, got {value!r}, whose home directory is not known") from None


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name) or str(default)
    if not (value.isascii() and value.isdigit() and value.strip("0")):
        raise SettingError(f"{name}: expected a positive integer, got {reprlib.repr(value)}")
    if len(value.lstrip("0")) > MOST_DIGITS:
        raise SettingError(f"{name}: expected an integer of at most {MOST_DIGITS} digits, got {len(value)} digits")
    return int(value)


def _flag(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "")
    if value.lower() not in SWITCH:
        raise SettingError(f"{name}: expected 0 or 1 (no or yes, off or on, false or true), got {reprlib.repr(value)}")
    return SWITCH[value.lower()]


@dataclass(frozen=True)
class _Choices:
    """The choices that a program made with the setters below. None: the package chooses."""

    num_sms: int | None = None
    tc_util: int = 100
    pdl: bool = False
    compile_mode: int = 0
    batch_invariant: bool | None = None
    deterministic_algorithms: bool = True
    mk_alignment: int = DEFAULT_ALIGNMENT


class InForce:
    """The current choices and their number, `generation`. Records made under another number must not be used.

    Equal choices have the same number, because engines change the number of SMs for a call and then restore it. After
    `MAX_CHOICES` different choices, equal choices get a new number, which no other choices ever had.
    """

    def __init__(self) -> None:
        self.choices, self.generation = _Choices(), 0
        self._generations = {self.choices: self.generation}
        self._newest = self.generation
        self._lock = threading.Lock()

    def change(self, **changes: Any) -> None:
        """Make a choice."""
        with self._lock:
            self.choices = replace(self.choices, **changes)
            if self.choices not in self._generations:
                if len(self._generations) >= MAX_CHOICES:
                    self._generations.clear()
                self._newest += 1
                self._generations[self.choices] = self._newest
            self.generation = self._generations[self.choices]


in_force = InForce()


def set_num_sms(num_sms: int) -> None:
    """Let products use at most `num_sms` multiprocessors, so that the rest are free for other kernels.

    The usual kernel of a product with few rows needs a certain number of multiprocessors. With fewer, the product runs
    another kernel, and the last bits of its result may differ.
    """
    available = _device_num_sms()
    in_force.change(num_sms=_integer_in_range("num_sms", num_sms, 1, available))


def get_num_sms() -> int:
    """Return the number of multiprocessors that products use: the set number, else the GPU's (132 without a GPU)."""
    return _device_num_sms() if in_force.choices.num_sms is None else in_force.choices.num_sms


def num_sms_of(available: int) -> int:
    """Return the number of multiprocessors that products use on a GPU with `available` multiprocessors."""
    return min(in_force.choices.num_sms or available, available)


def set_tc_util(tc_util: int) -> None:
    """Store a share of the tensor cores' time, in percent, for `get_tc_util`. The value changes nothing else.

    Other libraries slow their kernels down by this share to stay below a power limit. The products here never wait:
    the GPU lowers its clock if it must.
    """
    in_force.change(tc_util=_integer_in_range("tc_util", tc_util, 1, 100))


def get_tc_util() -> int:
    """Return the value of `set_tc_util`: 100 unless it was called."""
    return in_force.choices.tc_util


def set_ignore_compile_dims(ignore: bool) -> None:
    """Do nothing: `compiled_dims` is always ignored, and no result depends on it."""
    _truth_value(ignore, "ignore")


def set_block_size_multiple_of(value: int | tuple[int, int]) -> None:
    """Check `value`, one or two divisors of the sizes of tiles, and ignore it: no shape or layout that callers see
    depends on tiles.
    """
    numbers = value if isinstance(value, tuple | list) else (value, value)
    if len(numbers) != 2:
        raise ValueError(f"value: expected an integer or a pair of integers, got {value!r}")
    for number in numbers:
        _integer_in_range("value", number, 1)


def shutdown() -> None:
    """Do nothing. Programs call it before they end, but kernels and memory are freed with the process."""


def set_pdl(enabled: bool) -> None:
    """Choose whether a product may start before the kernel ahead of it has ended (programmatic dependent launch).

    The launch and setup of a product, up to its first access to memory, then overlap the end of the kernel ahead. The
    reference on the CPU ignores the choice.
    """
    in_force.change(pdl=_truth_value(enabled))


def get_pdl() -> bool:
    """Tell whether programmatic dependent launch is on: off unless `set_pdl` turned it on."""
    return in_force.choices.pdl


def set_batch_invariant(enabled: bool) -> None:
    """Choose whether the bits of a row of D may depend only on its row of A and on B, not on m or on other rows.

    With True, no FP8 product splits k among several CTAs, which costs time if it has few tiles. In calls that use
    collectives, `distributed.Experts` then sends each route by itself. With False, equal calls still return equal bits.
    """
    in_force.change(batch_invariant=_truth_value(enabled))


def get_batch_invariant() -> bool:
    """Return the value of `set_batch_invariant`. If it was never called, tell whether `DG_BATCH_INVARIANT` is on."""
    chosen = in_force.choices.batch_invariant
    return settings().batch_invariant if chosen is None else chosen


def use_deterministic_algorithms(enabled: bool) -> None:
    """Choose whether equal BF16 products must return equal bits, and whether a row's bits must not depend on m. The
    default is True.

    False permits faster kernels, but today the kernels are the same. `set_batch_invariant(True)` requires equal bits
    whatever is set here. FP8 products, casts and all other functions always return equal bits for equal calls.
    """
    in_force.change(deterministic_algorithms=_truth_value(enabled))


def get_deterministic_algorithms() -> bool:
    """Return the value of `use_deterministic_algorithms`: True unless it was called."""
    return in_force.choices.deterministic_algorithms


def set_compile_mode(mode: int) -> None:
    """Set 1 to let calls only compile their kernels and compute nothing (to fill a cache), 0 for ordinary calls."""
    in_force.change(compile_mode=_integer_in_range("mode", mode, 0, 1))


def get_compile_mode() -> int:
    """Return the value of `set_compile_mode`: 0 unless it was called."""
    return in_force.choices.compile_mode


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment, in rows, of group starts in the offsets form of grouped layouts; 1 means no padding."""
    in_force.change(mk_alignment=_integer_in_range("new_value", new_value, 1, 1 << 30))


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the alignment, in rows, to which callers pad group starts: 128 unless another alignment was set."""
    return in_force.choices.mk_alignment


# Older names of the same function.
get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """Return the alignment of group starts that suits a Hopper GPU: 128 for any expected rows and groups.

    Products here accept groups that start at any row, so an alignment down to 1 may be set. (Callers written for
    related libraries size buffers by 128.)
    """
    if num_groups is not None:
        _integer_in_range("num_groups", num_groups, 0)
    if expected_m is not None:
        _integer_in_range("expected_m", expected_m, 0)
    return DEFAULT_ALIGNMENT


def _integer_in_range(name: str, value: object, low: int, high: int = (1 << 31) - 1) -> int:
    from .check.numbers import integer_in_range

    return integer_in_range(name, value, low, high)


def _truth_value(enabled: bool, name: str = "enabled") -> bool:
    if not isinstance(enabled, bool):
        raise ValueError(f"{name}: expected True or False, got {enabled!r}")
    return enabled


def _device_num_sms() -> int:
    import torch  # here, because core/jit reads settings and must import without torch

    if not torch.cuda.is_available():
        return H200.num_sms
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)

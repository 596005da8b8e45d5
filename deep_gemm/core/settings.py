"""Settings of the environment, read once, and settings that a program chooses while it runs."""

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
"""Room for tens of thousands of kernels. A model needs some hundreds."""
MOST_DIGITS = 18
"""Digits of a number that a variable holds. Python itself refuses to read one of more than 4,300."""
SWITCH = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off", ""), False)}
"""The values of a variable that switches something, in any case of letters."""
TUNED_TABLE_IGNORED = "DG_TUNED_TABLE is ignored: tables of tuned tiles are read no more, and the cost model chooses"
MAX_CHOICES = 4096
"""Different choices that are told apart by number before all but the current one are forgotten."""


class SettingError(ValueError):
    """A variable of the environment has a value that it cannot have."""


@dataclass(frozen=True)
class Settings:
    """The settings of the environment. Every variable of the package is a field here."""

    jit_cache_dirs: tuple[Path, ...]
    """Directories of compiled kernels, `DG_JIT_CACHE_DIR` or the older `DG_CACHE_DIR`: several are separated as in
    PATH. The first that can be written is written; all are read."""
    jit_cache_limit_mb: int
    """`DG_JIT_CACHE_LIMIT_MB`: if kernels take more megabytes, the least recently used ones are removed."""
    jit_debug: bool
    """`DG_JIT_DEBUG`: print each compiled kernel, the options, and the compiler's messages."""
    jit_strict: bool
    """`DG_JIT_STRICT`: a kernel that spills, needs a stack frame or draws a WGMMA note from ptxas is an error."""
    jit_dump_ptx: bool
    """`DG_JIT_DUMP_PTX`, or `DG_JIT_DUMP_ASM` for both: write each kernel's PTX beside it in the cache."""
    jit_dump_sass: bool
    """`DG_JIT_DUMP_SASS`, or `DG_JIT_DUMP_ASM` for both: write its machine code, disassembled, beside it too."""
    disable_ffma_interleave: bool
    """`DG_DISABLE_FFMA_INTERLEAVE`: leave promotion FFMAs as the compiler made them (see core/jit/interleave.py)."""
    print_reg_reuse: bool
    """`DG_PRINT_REG_REUSE`: print for each kernel how many promotion FFMAs have which yield and reuse bits."""
    print_configs: bool
    """`DG_PRINT_CONFIGS`: print the configuration chosen for each new problem."""
    disable_native_replay: bool
    """`DG_DISABLE_NATIVE_REPLAY`: replay calls in Python, not by replay.c (see core/replay.py)."""
    disable_sglang_plugin: bool
    """`DG_DISABLE_SGLANG_PLUGIN`: leave all layers to SGLang (see integrations/sglang.py)."""
    disable_vllm_plugin: bool
    """`DG_DISABLE_VLLM_PLUGIN`: offer vLLM no layers (see integrations/vllm.py)."""
    batch_invariant: bool
    """`DG_BATCH_INVARIANT`: what `get_batch_invariant` answers until `set_batch_invariant` is called."""


SWITCHES = tuple(field.name for field in fields(Settings) if field.type == "bool")
"""Settings whose variables are switches: `jit_debug` is `DG_JIT_DEBUG`."""
VARIABLES = (
    *("DG_JIT_CACHE_DIR", "DG_CACHE_DIR", "DG_JIT_CACHE_LIMIT_MB", "DG_JIT_DUMP_ASM"),
    *(f"DG_{name.upper()}" for name in SWITCHES),
)
"""All variables that `read_settings` reads."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings from a mapping of environment variables; a pure function, for tests and for `settings`."""
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
    """The settings of this process."""
    if os.environ.get("DG_TUNED_TABLE"):
        warnings.warn(TUNED_TABLE_IGNORED, RuntimeWarning, stacklevel=2)
    return read_settings(os.environ)


def _default_cache_dir() -> Path:
    try:
        return Path.home() / ".cache" / "deep_gemm"
    except RuntimeError:  # a container may run under a user id that has neither HOME nor a passwd entry
        # No directory: kernels stay in memory. A fixed name in /tmp would let other users supply machine code.
        return Path(os.devnull) / "deep_gemm"


def _path(name: str, value: str) -> Path:
    """Path that a variable holds. A `~` is a home: a shell leaves it to us in `docker run -e`, and inside quotes."""
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
    """The choices that a program made with the setters below; None leaves the choice to the package."""

    num_sms: int | None = None
    tc_util: int = 100
    pdl: bool = False
    compile_mode: int = 0
    batch_invariant: bool | None = None
    deterministic_algorithms: bool = True
    mk_alignment: int = DEFAULT_ALIGNMENT


class InForce:
    """The current choices, and a number for them. Anything prepared under another number must not be used.

    The same choices get the same number, because engines set a number of SMs around a call and then restore it. Only
    after very many others they get a new one, which no other choices ever had.
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
    """Let the products use at most `num_sms` multiprocessors, so that the others are free for other kernels.

    A product with few rows may then run another kernel than on the whole GPU, and its last bits may differ: its usual
    kernel cannot be limited to fewer multiprocessors than it needs.
    """
    available = _device_num_sms()
    in_force.change(num_sms=_integer_in_range("num_sms", num_sms, 1, available))


def get_num_sms() -> int:
    """Multiprocessors that the products use: the number set, else all of the current GPU (132 without one)."""
    return _device_num_sms() if in_force.choices.num_sms is None else in_force.choices.num_sms


def num_sms_of(available: int) -> int:
    """Multiprocessors that the products use on a GPU with `available` of them."""
    return min(in_force.choices.num_sms or available, available)


def set_tc_util(tc_util: int) -> None:
    """Keep a share of the tensor cores' time, in percent, for `get_tc_util`. It changes nothing else.

    Other libraries use it to slow their kernels down below a power limit. The products here never wait: the GPU
    lowers its clock if it must.
    """
    in_force.change(tc_util=_integer_in_range("tc_util", tc_util, 1, 100))


def get_tc_util() -> int:
    """Get what `set_tc_util` set: 100 unless it was called."""
    return in_force.choices.tc_util


def set_ignore_compile_dims(ignore: bool) -> None:
    """Accept whether `compiled_dims` is to be ignored, which it always is: no result depends on it."""
    _truth_value(ignore, "ignore")


def set_block_size_multiple_of(value: int | tuple[int, int]) -> None:
    """Accept a number, or two, that sizes of tiles are to be multiples of. Which tiles run changes no shape or layout
    that a caller sees, so it changes nothing.
    """
    numbers = value if isinstance(value, tuple | list) else (value, value)
    if len(numbers) != 2:
        raise ValueError(f"value: expected an integer or a pair of integers, got {value!r}")
    for number in numbers:
        _integer_in_range("value", number, 1)


def shutdown() -> None:
    """Do nothing: kernels and memory go with the process. Programs call it before they end."""


def set_pdl(enabled: bool) -> None:
    """Choose whether a product may start before the kernel ahead of it has ended (programmatic dependent launch).

    The launch and setup of a product, up to its first access to memory, then overlap the end of the kernel ahead. The
    reference ignores it.
    """
    in_force.change(pdl=_truth_value(enabled))


def get_pdl() -> bool:
    """Tell whether programmatic dependent launch is on: off unless `set_pdl` turned it on."""
    return in_force.choices.pdl


def set_batch_invariant(enabled: bool) -> None:
    """Choose whether the bits of a row of D must depend on its row of A alone, whatever m and the other rows are.

    If so, no product splits its k among several CTAs, which costs time if it has few tiles, and `distributed.Experts`
    by collectives sends each route by itself. Without it, the same call still gives the same bits each time.
    """
    in_force.change(batch_invariant=_truth_value(enabled))


def get_batch_invariant() -> bool:
    """Tell what `set_batch_invariant` set; before it is called, whether `DG_BATCH_INVARIANT` is on."""
    chosen = in_force.choices.batch_invariant
    return settings().batch_invariant if chosen is None else chosen


def use_deterministic_algorithms(enabled: bool) -> None:
    """Choose whether BF16 products must give the same bits each time, and a row's bits whatever m is. They do, unless
    False is set.

    False allows faster kernels; today the kernels are the same. `set_batch_invariant(True)` asks for the same bits
    whatever is set here. FP8 products and casts, and all else here, give the same bits each time in any case.
    """
    in_force.change(deterministic_algorithms=_truth_value(enabled))


def get_deterministic_algorithms() -> bool:
    """Tell what `use_deterministic_algorithms` set: True unless it was called."""
    return in_force.choices.deterministic_algorithms


def set_compile_mode(mode: int) -> None:
    """Set 1 to make calls compile their kernels and compute nothing (to warm up a cache), 0 for ordinary calls."""
    in_force.change(compile_mode=_integer_in_range("mode", mode, 0, 1))


def get_compile_mode() -> int:
    """Get what `set_compile_mode` set: 0 unless it was called."""
    return in_force.choices.compile_mode


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment of group starts in the offsets form of grouped layouts; 1 means no padding at all."""
    in_force.change(mk_alignment=_integer_in_range("new_value", new_value, 1, 1 << 30))


def get_mk_alignment_for_contiguous_layout() -> int:
    """Get the alignment of group starts that callers pad to: 128 unless another was set."""
    return in_force.choices.mk_alignment


# Older names of the same function.
get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """Get the alignment of group starts that suits a Hopper GPU: 128, whatever rows and groups are expected.

    Products here take groups that start anywhere, so a smaller one, down to 1, may be set. (The family's contract is
    128: callers size buffers by it.)
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
    import torch  # here, because the jit room reads settings and must import without torch

    if not torch.cuda.is_available():
        return H200.num_sms
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)

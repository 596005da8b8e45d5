"""Every kernel of the package in one form, for tools that loop over all of them.

A kernel has the name of its file in `deep_gemm/cuda`. One that is missing here no tool looks at; a test finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from deep_gemm import gemm, hyper
from deep_gemm.core.code_plan import CodePlan
from deep_gemm.core.jit import applied, passes_for
from deep_gemm.core.jit.compiler import CompiledKernel, compile_cubin
from deep_gemm.indexer import kernel as fp8_mqa_logits
from deep_gemm.indexer import paged_kernel as fp8_paged_mqa_logits
from deep_gemm.linear import kernel as linear_decode
from deep_gemm.ordinary import reachable_ordinary


class Listed(NamedTuple):
    """A kernel: its source, what its machine code must consist of, and every configuration that can be chosen."""

    name: str
    source: str
    headers: Callable[[Any], dict[str, str]]
    code_plan: Callable[[Any], CodePlan]
    configs: Callable[[], Sequence[Any]]

    def compiled(self, config: Any) -> CompiledKernel:
        """Compile a configuration for sm_90a, without the cache."""
        kernel = compile_cubin(self.source, self.headers(config), name=f"{self.name} {config.name}")
        return applied(passes_for(config.num_threads), kernel) if self.name == "fp8_gemm" else kernel

    def named(self, config: str | None) -> Any:
        """Find a configuration by its name; None: the first."""
        names = {each.name: each for each in self.configs()}
        if config is not None and config not in names:
            raise ValueError(f"config: expected one of {list(names)}, got {config!r}")
        return next(iter(names.values())) if config is None else names[config]


FAMILIES: tuple[Any, ...] = (gemm, hyper)
"""Families whose kernels have the common form."""


def all_kernels() -> dict[str, Listed]:
    """Give all kernels, by their names."""
    found = [
        Listed(each.source_name, each.source, each.headers, each.code_plan, each.configs)
        for family in FAMILIES
        for each in family.KERNELS
    ]
    modules: dict[Any, Any] = {
        linear_decode: linear_decode.reachable_linear,
        fp8_mqa_logits: fp8_mqa_logits.reachable_mqa,
        fp8_paged_mqa_logits: fp8_paged_mqa_logits.reachable_paged,
    }
    found += [
        Listed(each.SOURCE.split('"')[1].removesuffix(".cuh"), each.SOURCE, each.headers, each.code_plan, configs)
        for each, configs in modules.items()
    ]
    for kernel, of_kernel in reachable_ordinary():
        found.append(Listed(kernel.name, kernel.source, kernel.headers, kernel.code_plan, partial(list, of_kernel)))
    return {each.name: each for each in found}


def kernel_named(name: str) -> Listed:
    """Find a kernel by its name."""
    kernels = all_kernels()
    if name not in kernels:
        raise ValueError(f"kernel: expected one of {', '.join(kernels)}, got {name}")
    return kernels[name]

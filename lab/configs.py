"""Configurations of products that a call can use, by kind: for trials, tools and tests."""

from __future__ import annotations

from functools import cache

from deep_gemm.gemm.choose.fp8 import Config, reachable
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds.output import USUAL_OPERANDS, Operands
from deep_gemm.gemm.kinds.works import DENSE, HEADS

_every = cache(reachable)


def reachable_dense() -> list[GemmConfig]:
    """List the configurations of dense products by `fp8_gemm`."""
    plain = (config for config in tall() if config.work is DENSE)
    return [config for config in plain if not config.epilogue.skips_mid]


def reachable_decode(operands: Operands = USUAL_OPERANDS) -> list[DecodeConfig]:
    """List the configurations of dense products with these operands by the kernel for few rows."""
    plain = (config for config in few() if config.work is DENSE and not config.epilogue.skips_mid)
    return [config for config in plain if (config.b, config.sfa, config.sfb) == operands]


def reachable_grouped() -> list[GemmConfig]:
    """List the configurations of groups of rows by `fp8_gemm`, with output to D or to addresses."""
    return [config for config in tall() if config.work.groups_rows and not config.epilogue.activates]


def reachable_grouped_decode() -> list[DecodeConfig]:
    """List the configurations of groups of rows by the kernel for few rows."""
    return [config for config in few() if config.work.groups_rows]


def reachable_silu() -> list[GemmConfig]:
    """List the configurations of groups of rows with an activation."""
    return [config for config in tall() if config.epilogue.activates]


def reachable_k_grouped() -> list[GemmConfig]:
    """List the configurations of groups along k."""
    return [config for config in tall() if config.work.is_along_k]


def reachable_heads() -> list[Config]:
    """List the configurations of products of heads, by either kernel."""
    return [config for config in _every() if config.work is HEADS]


def reachable_skipping() -> list[Config]:
    """List the configurations of products that write parts of heads, by either kernel."""
    return [config for config in _every() if config.epilogue.skips_mid]


def tall() -> list[GemmConfig]:
    """List all configurations of `fp8_gemm`."""
    return [config for config in _every() if isinstance(config, GemmConfig)]


def few() -> list[DecodeConfig]:
    """List all configurations of the kernel for few rows."""
    return [config for config in _every() if isinstance(config, DecodeConfig)]

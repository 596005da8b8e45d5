"""Times that a fit of the cost model needs, measured on one GPU: cold times of every tile that may suit each sample.

A kernel or a product that fails leaves its reason in the place of its time, and the run goes on. The file is written
after each product. Samples come in an order in which any beginning is balanced, so the run may end at any time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from deep_gemm.casts.fp8 import k_grouped_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import RECIPE_1D1D, align
from deep_gemm.core.check.recipes import NO_RECIPES, PER_ROW
from deep_gemm.core.gpu import Gpu
from deep_gemm.core.jit import CompilerMissing, driver
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense import launch as dense
from deep_gemm.gemm.depths import choose as choose_depths
from deep_gemm.gemm.depths import launch as depths
from deep_gemm.gemm.depths.check import k_grouped_problem
from deep_gemm.gemm.explain import candidates
from deep_gemm.gemm.output import Groups, Output
from deep_gemm.gemm.rows import choose as choose_rows
from deep_gemm.gemm.rows import launch as rows
from deep_gemm.gemm.rows.check import contiguous_problem, masked_problem
from deep_gemm.gemm.tiles import TILES

from . import tune
from .products import GpuLostError, raise_if_lost, reason
from .report import write_whole
from .timing import L2Flush, PairingError, cold
from .tune_samples import Sample

Config = GemmConfig | DecodeConfig
REPEATS = 7
HOPEFUL = 2.0
"""Up to this multiple of the lowest modelled cost a tile of a dense product is timed."""
PAIRING_ERRORS_TO_STOP = 5
"""Failures in a row after which the profiler is no more to be believed."""
METHOD = (
    f"dense: every tile of up to {HOPEFUL} times the lowest modelled cost; groups: every tile there is; cold, "
    f"interleaved in one process in rotating order, {REPEATS} calls each, a 512 MB fill before each; median, least and "
    "most in microseconds; random normal operands quantized 1x128 / 128x128 (1d1d: 1x128)"
)
SHARING_OUT = "clusters_at_once"


@dataclass
class Collection:
    """The file: a header, how many clusters run at once, and a line for each product."""

    header: dict[str, Any]
    clusters_at_once: dict[str, dict[str, int]] = field(default_factory=dict)
    """Clusters at a time as the driver says, by CTAs on an SM, then by CTAs of a cluster."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Add a product."""
        self.rows.append(row)
        self._lines.append(json.dumps(row))

    def save(self, path: Path) -> None:
        """Write the file, whole at any time."""
        header, clusters = json.dumps(self.header, indent=1), json.dumps(self.clusters_at_once)
        rows = ",\n".join(self._lines)
        write_whole(path, f'{{"header": {header},\n"{SHARING_OUT}": {clusters},\n"rows": [\n{rows}\n]}}\n')


@dataclass(frozen=True)
class Entry:
    """A sample and the configurations that are timed for it, by the names of their tiles."""

    sample: Sample
    configs: Mapping[str, Config]

    def without(self, broken: Set[Config]) -> Entry:
        """Leave configurations out."""
        return Entry(self.sample, {name: config for name, config in self.configs.items() if config not in broken})


def entry_of(sample: Sample, gpu: Gpu) -> Entry:
    """Enter a sample's tiles: of a dense product all that may be best, of groups all there are."""
    output, n, k = sample.output, sample.n, sample.k
    if output.groups == Groups.DEPTHS:
        tiles = (*choose_depths.TILES, choose_depths.SHARING_A)
        return Entry(sample, {tile.name: choose_depths.k_grouped_config(tile, output) for tile in tiles})
    if output.groups:
        chosen = choose_rows.tiles_for(output)
        return Entry(sample, {tile.name: choose_rows.grouped_config(tile, output, k) for tile in chosen})
    able = [one for one in candidates(sample.m, n, k, output, gpu) if one.why_not is None]
    hopeful = [one for one in able if one.cost_us <= HOPEFUL * able[0].cost_us]
    return Entry(sample, {one.tile.name: one.config for one in hopeful})


def occupancy_configs() -> dict[tuple[int, int], Config]:
    """Configurations by CTAs on an SM and of a cluster, to ask the driver how many such clusters run at once."""
    bf16 = [tile for tile in TILES if tile.cluster_m * tile.cluster_n == 1]
    return {(tile.ctas_per_sm, tile.cluster_k): tile.config(Output(), 8192) for tile in bf16}


def clusters_at_once(device: int) -> dict[str, dict[str, int]]:
    """Ask the driver how many clusters of each size run at a time."""
    torch.cuda.synchronize(device)  # makes torch's context, in which kernels are loaded
    found: dict[str, dict[str, int]] = {"1": {}, "2": {}}
    for (ctas, size), config in sorted(occupancy_configs().items()):
        kernel = fp8_gemm_decode if isinstance(config, DecodeConfig) else fp8_gemm
        loaded = kernel.loaded(config, device)
        found[str(ctas)][str(size)] = driver.clusters_at_once(loaded, config.num_threads, size)
    return found


def configurations(entries: Iterable[Entry]) -> list[Config]:
    """All that are needed, each once."""
    of_entries = [config for entry in entries for config in entry.configs.values()]
    return list(dict.fromkeys([*occupancy_configs().values(), *of_entries]))


def compile_all(
    configs: Sequence[Config], workers: int, announce: Callable[[str], None], failed: Callable[[str, str], None]
) -> set[Config]:
    """Compile all on so many threads; those that fail are told and given back."""
    broken = set()
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(tune.build, config): config for config in configs}
        for done in as_completed(futures):
            announce("compiling")
            try:
                done.result()
            except CompilerMissing:
                pool.shutdown(cancel_futures=True)
                raise
            except Exception as error:
                broken.add(futures[done])
                failed(futures[done].name, reason(error))
    return broken


def measure(
    entries: Sequence[Entry],
    *,
    seconds: float,
    add: Callable[[dict[str, Any]], None],
    failed: Callable[[str, str], None],
    announce: Callable[[str], None],
) -> int:
    """Time the entries in their order until the time is up; tell how many were not reached."""
    flush, end, pairing_errors = L2Flush(), monotonic() + seconds, 0
    for done, entry in enumerate(entries):
        if monotonic() >= end:
            return len(entries) - done
        announce(entry.sample.name)
        try:
            row = timed(entry, flush)
            pairing_errors = 0
        except GpuLostError:
            raise
        except Exception as error:
            pairing_errors += isinstance(error, PairingError)
            if pairing_errors >= PAIRING_ERRORS_TO_STOP:
                raise
            raise_if_lost(error)
            row = row_of(entry.sample, {}, {"all": reason(error)})
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        for name, why in row["failed"].items():
            failed(f"{entry.sample.name} {name}", why)
        add(row)
    return 0


def timed(entry: Entry, flush: L2Flush) -> dict[str, Any]:
    """Time the tiles of an entry for operands of its own, which are gone afterwards."""
    run = caller(entry.sample)
    calls, failures = {}, {}
    for name, config in entry.configs.items():
        call = partial(run, config)
        try:
            call()
        except Exception as error:
            raise_if_lost(error)
            failures[name] = reason(error)
        else:
            calls[name] = call
    if not calls:
        return row_of(entry.sample, {}, failures)
    times = cold(calls, flush, REPEATS)
    spreads = {name: [round(us, 3) for us in (s.us, s.us_min, s.us_max)] for name, (s, _) in times.items()}
    return row_of(entry.sample, spreads, failures)


def row_of(sample: Sample, us: Mapping[str, list[float]], failures: Mapping[str, str]) -> dict[str, Any]:
    """A line of the file."""
    return {
        "output": sample.output.name,
        "m": sample.m,
        "n": sample.n,
        "k": sample.k,
        "groups": sample.num_groups,
        "sizes": sample.sizes() if sample.num_groups else [],
        "fitted": sample.is_fitted,
        "purpose": sample.purpose,
        "us": dict(us),
        "failed": dict(failures),
    }


def caller(sample: Sample, device: str = "cuda") -> Callable[[Config], object]:
    """Make random operands of a sample; what is given computes their product with a configuration."""
    if sample.output.groups == Groups.NONE:
        p = tune.random_problem((sample.m, sample.n, sample.k), sample.output, device)
        return lambda config: dense.run(p, config)
    with torch.device(device):
        make = _depths_caller if sample.output.groups == Groups.DEPTHS else _rows_caller
        return make(sample)


def _rows_caller(sample: Sample) -> Callable[[Any], object]:
    output, groups, n, k = sample.output, sample.num_groups, sample.n, sample.k
    sizes = sample.sizes()
    cast = per_token_cast_to_fp8 if output.sfb == PER_ROW else per_block_cast_to_fp8
    recipes = (RECIPE_1D1D, None, None) if output.sfb == PER_ROW else NO_RECIPES
    dtype = torch.float32 if output.is_fp32 else torch.bfloat16
    b = torch.empty(groups, n, k, dtype=torch.float8_e4m3fn)
    scales = []
    for group in range(groups):  # one at a time: casts need FP32
        b[group], sf = cast(torch.randn(n, k, dtype=torch.bfloat16))
        scales.append(sf)
    sfb = torch.stack(scales)
    if output.sfb == PER_ROW:
        sfb = get_mn_major_tma_aligned_tensor(sfb)
    if output.groups == Groups.COUNTS:
        max_m = align(max(sizes), 128)
        a, sfa = per_token_cast_to_fp8(torch.randn(groups * max_m, k, dtype=torch.bfloat16))
        sfa = get_mn_major_tma_aligned_tensor(sfa.view(groups, max_m, -1))
        d = torch.empty(groups, max_m, n, dtype=dtype)
        counts = torch.tensor(sizes, dtype=torch.int32)
        masked = masked_problem((a.view(groups, max_m, k), sfa), (b, sfb), d, counts, sample.m, recipes=recipes)
        return lambda config: rows.run(masked, config)
    a, sfa = per_token_cast_to_fp8(torch.randn(sample.m, k, dtype=torch.bfloat16))
    ids = torch.arange(groups, dtype=torch.int32).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    d = torch.empty(sample.m, n, dtype=dtype)
    stacked = contiguous_problem((a, get_mn_major_tma_aligned_tensor(sfa)), (b, sfb), d, ids, recipes=recipes)
    return lambda config: rows.run(stacked, config)


def _depths_caller(sample: Sample) -> Callable[[Any], object]:
    ks = sample.sizes()
    a, b = (
        k_grouped_cast_to_fp8(torch.randn(size, sum(ks), dtype=torch.bfloat16), ks) for size in (sample.m, sample.n)
    )
    a, b = ((values, get_mn_major_tma_aligned_tensor(sf)) for values, sf in (a, b))
    d = torch.zeros(sample.num_groups, sample.m, sample.n, dtype=torch.float32)
    c = d if sample.output.adds_to_d else torch.zeros_like(d) if sample.output.with_c else None
    p = k_grouped_problem(a, b, d, ks, torch.tensor(ks, dtype=torch.int32), c)
    return lambda config: depths.run_on_gpu(p, config)

"""Ways to break the host's half of a launch, and the trials that must notice: what `kernels/` packs is what is run.

A mutation replaces a text of one module of `kernels/`. A process of its own executes that module anew, and then those
that import from it, so that the simulator's launches go through the broken code.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import deep_gemm
from deep_gemm.choose.config import GemmConfig
from deep_gemm.choose.config_decode import DecodeConfig
from deep_gemm.choose.config_of_tile import tile_config
from deep_gemm.choose.output import Groups, Output
from deep_gemm.problem import DenseProblem, KGroupedProblem

PACKAGE = Path(deep_gemm.__file__).parent
# In the order of their imports: what follows a broken module takes its names anew.
MODULES = (
    *(f"kernels.{name}" for name in ("params", "maps", "plan", "fp8_gemm", "fp8_gemm_decode", "k_group_maps")),
    *(f"kernels.{name}" for name in ("dense", "rows", "depths")),
    *(f"sim.{name}" for name in ("launcher", "dense", "fp8_gemm_decode", "rows", "depths")),
)
SECONDS = 120


# Trials. Strides differ wherever two could be mistaken for each other.


def wider(x: torch.Tensor, extra: int) -> torch.Tensor:
    """The same numbers in rows that lie further apart."""
    room = torch.zeros(*x.shape[:-1], x.shape[-1] + extra, dtype=x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def dense_trial(config: GemmConfig, mnk: tuple[int, int, int]) -> None:
    from deep_gemm.sim import dense as sim

    p: DenseProblem = sim.random_problem(config, *mnk)
    p = p._replace(a=wider(p.a, 32), b=wider(p.b, 16), sfb=p.sfb if config.sfb_is_per_row else wider(p.sfb, 3))
    if p.c is not None and p.c is not p.d:
        p = p._replace(c=wider(p.c, 8))
    outcome = sim.run(sim.compile_config(config), config, p, num_sms=2 * config.cluster_size)
    if outcome.mistakes is not None:
        raise ValueError(outcome.mistakes)


def decode_trial(config: DecodeConfig, mnk: tuple[int, int, int]) -> None:
    from deep_gemm.sim import fp8_gemm_decode as sim

    p: DenseProblem = sim.random_problem(config, *mnk)
    p = p._replace(a=wider(p.a, 32), b=wider(p.b, 16), sfa=wider(p.sfa, 3), sfb=wider(p.sfb, 2))
    if p.c is not None:
        p = p._replace(c=wider(p.c, 8))
    outcome = sim.run(sim.compile_config(config), config, p)
    if outcome.mistakes is not None:
        raise ValueError(outcome.mistakes)


def rows_trial(config: GemmConfig, layout: list[int], rows: int | None = None, alignment: int = 128) -> None:
    from deep_gemm.sim import dense
    from deep_gemm.sim import rows as sim

    p = sim.random_problem(config, layout, 264, 400, rows=rows, alignment=alignment)
    p = p._replace(b=wider(p.b, 16), sfb=p.sfb if config.sfb_is_per_row else wider(p.sfb, 3))
    outcome = sim.run(dense.compile_config(config), config, p)
    if outcome.mistakes is not None:
        raise ValueError(outcome.mistakes)


def depths_trial(config: GemmConfig, on_gpu_alone: bool) -> None:
    from deep_gemm.sim import depths as sim

    p: KGroupedProblem = sim.random_problem(config, (272, 16, 400), 72, 136, on_gpu_alone=on_gpu_alone)
    if config.with_c and p.c is not None:
        p = p._replace(c=wider(p.c, 8))
    outcome = sim.run(sim.compiled(config), config, p)
    if outcome.mistakes is not None:
        raise ValueError(outcome.mistakes)


WITH_C, IN_PLACE = (
    tile_config(64, 64, Output(True, with_c, not with_c, sfb_is_per_row=True, groups=Groups.DEPTHS), k=128)
    for with_c in (True, False)
)
TRIALS: dict[str, Callable[[], None]] = {
    "dense": lambda: dense_trial(tile_config(64, 64, Output(with_c=True), k=400), (72, 264, 400)),
    "by row": lambda: dense_trial(tile_config(64, 64, Output(True, sfb_is_per_row=True), k=400), (72, 136, 400)),
    "split": lambda: dense_trial(tile_config(64, 64, Output(with_c=True), cluster_k=3, k=1040), (72, 264, 1040)),
    "decode": lambda: decode_trial(DecodeConfig(16, 4, 1, 2, with_c=True), (9, 264, 1040)),
    "ids": lambda: rows_trial(tile_config(64, 64, Output(groups=Groups.IDS), k=400), [-1, *[0] * 70, -1, *[1] * 20]),
    "ends": lambda: rows_trial(tile_config(64, 64, Output(groups=Groups.ENDS), k=400), [70, 100], 130, alignment=32),
    "counts": lambda: rows_trial(tile_config(64, 64, Output(groups=Groups.COUNTS), k=400), [3, 70, 0], 75),
    "rows by row": lambda: rows_trial(
        tile_config(64, 64, Output(True, sfb_is_per_row=True, groups=Groups.COUNTS), k=400), [3, 70, 0], 75
    ),
    "along k": lambda: depths_trial(WITH_C, False),
    "along k, on the GPU": lambda: depths_trial(IN_PLACE, True),
}


# Mutations


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in a module of `kernels/`; these trials are run, and one of them must notice."""

    name: str
    module: str
    old: str
    new: str
    trials: tuple[str, ...]

    def text(self) -> str:
        """The broken module. An `old` that is not there exactly once is a ValueError: the list is stale."""
        text = (PACKAGE / "kernels" / f"{self.module}.py").read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: expected one {self.old!r} in {self.module}.py, got {text.count(self.old)}")
        return text.replace(self.old, self.new)


def _swap(module: str, one: str, other: str, *trials: str) -> list[Mutation]:
    return [Mutation(f"{module}: {one} becomes {other}", module, one, other, trials)]


DENSE, SPLIT, BY_ROW, DECODE = "dense", "split", "by row", "decode"
ROWS, DEPTHS = ("ids", "ends", "counts"), ("along k", "along k, on the GPU")
MUTATIONS = [
    # The list of members
    Mutation(
        "params: the two strides of B's scales change places",
        "fp8_gemm",
        '        Field("sfb_stride_n", Kind.UINT32),\n        Field("sfb_stride_k", Kind.UINT32),\n',
        '        Field("sfb_stride_k", Kind.UINT32),\n        Field("sfb_stride_n", Kind.UINT32),\n',
        (DENSE,),
    ),
    Mutation(
        "params: C and D change places",
        "fp8_gemm",
        '        Field("c", Kind.POINTER),\n        Field("d", Kind.POINTER),\n',
        '        Field("d", Kind.POINTER),\n        Field("c", Kind.POINTER),\n',
        (SPLIT,),
    ),
    *_swap("params", "at += -at % field.kind.alignment", "pass", *ROWS),
    *_swap("params", "at += field.kind.size * field.length", "at += field.kind.size", DEPTHS[0]),
    # What a plan writes
    *_swap("plan", "words[word] = at[operand] - before", "words[word] = at[operand]", *ROWS),
    *_swap("plan", "at[place.operand] - place.before, at[place.operand]", "at[0], at[0]", DENSE, "counts"),
    *_swap("plan", "launcher.params.write(tail, tail_at)", "launcher.params.write(tail, 0)", DEPTHS[0]),
    *_swap("plan", "            if launcher.plan is not self:\n", "            if launcher.plan is self:\n", DENSE),
    # Dense
    *_swap("dense", '"sfb_stride_n": p.sfb.stride(0)', '"sfb_stride_n": p.sfb.stride(1)', DENSE),
    *_swap("dense", '"sfb_stride_k": p.sfb.stride(1)', '"sfb_stride_k": p.sfb.stride(0)', DENSE),
    *_swap("dense", '"c_pitch": 0 if p.c is None else p.c.stride(0)', '"c_pitch": p.n', DENSE),
    *_swap("dense", '"d_pitch": p.d.stride(0)', '"d_pitch": p.n + 8', SPLIT),
    *_swap("dense", '"m": p.m,\n        "n": p.n', '"m": p.n,\n        "n": p.m', DENSE),
    *_swap("dense", '"n": p.n,\n        "k": p.k', '"n": p.k,\n        "k": p.n', DENSE),
    *_swap("dense", '"k": p.k', '"k": p.k - 16', DENSE),
    *_swap("dense", 'Place("map_a", A)', 'Place("map_a", B)', DENSE),
    *_swap("dense", 'Place("map_b", B)', 'Place("map_b", A)', DENSE),
    *_swap("dense", 'Place("map_sfa", SFA)', 'Place("map_sfa", SFB)', DENSE),
    *_swap("dense", 'Place("sfb", SFB)', 'Place("sfb", SFA)', DENSE),
    *_swap("dense", 'Place("map_sfb", SFB)', 'Place("map_sfb", SFA)', BY_ROW),
    *_swap("dense", 'Place("map_d", D)', 'Place("map_d", C)', DENSE),
    *_swap("dense", 'Place("c", C)', 'Place("c", A)', DENSE),
    *_swap("dense", 'Place("d", D)', 'Place("d", C)', SPLIT),
    *_swap("dense", "scales_map(config.block_n, p.sfb)", "scales_map(config.block_n, p.sfa)", BY_ROW),
    *_swap("dense", "(config.block_n // config.cluster_m, BLOCK_K)", "(config.block_n // 2, BLOCK_K)", DENSE),
    # Decode
    *_swap("fp8_gemm_decode", '"sfa_stride_m": p.sfa.stride(0)', '"sfa_stride_m": p.sfa.stride(1)', DECODE),
    *_swap("fp8_gemm_decode", '"sfa_stride_k": p.sfa.stride(1)', '"sfa_stride_k": p.sfa.stride(0)', DECODE),
    *_swap("fp8_gemm_decode", '"sfb_stride_n": p.sfb.stride(0)', '"sfb_stride_n": p.sfb.stride(1)', DECODE),
    *_swap("fp8_gemm_decode", '"sfb_stride_k": p.sfb.stride(1)', '"sfb_stride_k": p.sfb.stride(0)', DECODE),
    *_swap("fp8_gemm_decode", '"c_pitch": 0 if p.c is None else p.c.stride(0)', '"c_pitch": p.n', DECODE),
    *_swap("fp8_gemm_decode", '"d_pitch": p.d.stride(0)', '"d_pitch": p.n + 8', DECODE),
    *_swap("fp8_gemm_decode", "min(config.block_tokens, m) + min", "config.block_tokens + min", DECODE),
    *_swap("fp8_gemm_decode", 'Place("sfa", SFA)', 'Place("sfa", SFB)', DECODE),
    *_swap("fp8_gemm_decode", 'Place("d", D)', 'Place("d", C)', DECODE),
    *_swap("fp8_gemm_decode", 'Place("map_b", B)', 'Place("map_b", A)', DECODE),
    # Rows
    *_swap("rows", '"groups.sfb_stride": p.sfb.stride(0)', '"groups.sfb_stride": p.sfb.stride(1)', *ROWS),
    *_swap("rows", '"sfb_stride_n": p.sfb.stride(1)', '"sfb_stride_n": p.sfb.stride(2)', *ROWS),
    *_swap("rows", '"sfb_stride_k": p.sfb.stride(2)', '"sfb_stride_k": p.sfb.stride(1)', *ROWS),
    *_swap("rows", '"groups.count": p.num_groups', '"groups.count": 1', *ROWS),
    *_swap("rows", '"groups.rows": p.m', '"groups.rows": p.m - 1', "ids"),
    *_swap("rows", '"groups.alignment": p.alignment', '"groups.alignment": 1', "ids", "ends"),
    *_swap("rows", '"groups.zeroes_padding": int(p.zero_padding)', '"groups.zeroes_padding": 0', "ids", "ends"),
    *_swap("rows", '"d_pitch": row_pitch(p.d)', '"d_pitch": row_pitch(p.a)', "ids", "ends"),
    *_swap("rows", "config.box_rows_of_a * row_pitch(p.a)", "config.block_m // 2 * row_pitch(p.a)", *ROWS),
    *_swap("rows", "WGMMA_ROWS * row_pitch(p.d)", "WGMMA_ROWS * row_pitch(p.a)", *ROWS),
    *_swap("rows", 'Place("map_whole_d", D)', 'Place("map_whole_d", A)', "counts"),
    *_swap("rows", 'Place("d", D)', 'Place("d", A)', "ids", "ends"),
    *_swap("rows", 'Place("groups.layout", C)', 'Place("groups.layout", SFB)', *ROWS),
    *_swap("rows", 'Place("map_sfb", SFB)', 'Place("map_sfb", SFA)', "rows by row"),
    # Depths
    *_swap("depths", '"c_pitch": 0 if p.c is None else p.c.stride(1)', '"c_pitch": p.n', DEPTHS[0]),
    *_swap("depths", '"groups.c_stride": 0 if p.c is None else p.c.stride(0)', '"groups.c_stride": p.n', DEPTHS[0]),
    *_swap("depths", '"groups.count": p.num_groups', '"groups.count": p.num_groups - 1', *DEPTHS),
    *_swap("depths", '"sum_k": p.a.numel() // p.m', '"sum_k": p.a.numel() // p.m - 16', *DEPTHS),
    *_swap("depths", '"num_k_blocks": p.sfa.shape[1]', '"num_k_blocks": p.sfa.shape[1] - 1', *DEPTHS),
    *_swap("depths", 'Place("a", A), Place("b", B)', 'Place("a", B), Place("b", A)', *DEPTHS),
    *_swap("depths", 'Place("ks", KS)', 'Place("ks", A)', *DEPTHS),
    *_swap("depths", 'Place("groups.by_depth", ROOM)', 'Place("groups.by_depth", A)', *DEPTHS),
    *_swap("depths", 'Place("map_sfa", SFA)', 'Place("map_sfa", SFB)', *DEPTHS),
    *_swap("depths", 'Place("map_sfb", SFB)', 'Place("map_sfb", SFA)', *DEPTHS),
    *_swap("depths", 'Place("map_d", D)', 'Place("map_d", A)', *DEPTHS),
    *_swap("depths", 'Place("c", C)', 'Place("c", D)', DEPTHS[0]),
    *_swap("depths", '("map_a", p.m, config', '("map_a", p.n, config', *DEPTHS),
]


# Running


def why_noticed(mutation: Mutation | None, trial: str) -> str | None:
    """Run a trial in a process of its own, through the broken module; say what told, None if nothing did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "deep_gemm.sim.depths", "deep_gemm.sim.rows"])  # the slow imports, once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(mutation, trial, sender))
    process.start()
    sender.close()
    try:
        found: str | None = receiver.recv() if receiver.poll(SECONDS) else f"no end after {SECONDS} s"
    except EOFError:
        process.join()
        found = f"the process crashed with exit code {process.exitcode}"
    process.kill()
    process.join()
    return found


def _run(mutation: Mutation | None, trial: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        if mutation is not None:
            _break(mutation)
        TRIALS[trial]()
    except Exception as error:  # whatever it is, it was noticed
        sender.send(" ".join(str(error).split())[:300] or type(error).__name__)
        return
    sender.send(None)


def _break(mutation: Mutation) -> None:
    """Execute the broken module, and those that import from it."""
    first = MODULES.index(f"kernels.{mutation.module}")
    for index, name in enumerate(MODULES[first:], first):
        module: Any = importlib.import_module(f"deep_gemm.{name}")
        path = PACKAGE / f"{name.replace('.', '/')}.py"
        text = mutation.text() if index == first else path.read_text()
        exec(compile(text, str(path), "exec"), module.__dict__)

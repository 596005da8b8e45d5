"""Compiling ahead: models' sizes, all of their kernels, and a filled cache that needs no compiler."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import as_new_process
from test_cli import no_compiler, run
from thorough import one_in, up_to

from deep_gemm.cli import models, precompile
from deep_gemm.cli.models import MODELS, Weight
from deep_gemm.core import jit
from deep_gemm.core.check.recipes import NO_RECIPES, WHOLE
from deep_gemm.core.gpu import H200
from deep_gemm.core.jit import compiler
from deep_gemm.core.jit.compiler import CompiledKernel
from deep_gemm.gemm import sum_slices
from deep_gemm.gemm.choose.bf16 import select_bf16_sum
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import K_MAJOR, GemmConfig
from deep_gemm.gemm.explain import asked
from deep_gemm.gemm.kernel import kernel_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.epilogues import TO_D
from deep_gemm.hyper.choose import select_hc
from deep_gemm.linear.kernel import serving
from deep_gemm.moe.routing import MANY_ROWS


def question(weight: Weight) -> Any:
    dtype = torch.float32 if weight.is_fp32 else torch.bfloat16
    sizes, groups = (weight.num_groups, weight.n, weight.k), (weight.groups, weight.num_groups)
    recipes = (None, WHOLE, WHOLE) if weight.has_row_scales else NO_RECIPES
    return asked(*sizes, dtype, False, False, recipes, *groups, "H200", weight.is_fp4)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_a_model_is_one_that_products_take(name: str) -> None:
    assert f"\n    {name} " in (models.__doc__ or ""), "the module's docstring names this model"
    weights = list(MODELS[name].weights())
    assert len({weight.name for weight in weights}) > (5 if MODELS[name].vocabulary else 2)
    for weight in weights:
        assert question(weight).num_groups == weight.num_groups


def test_ranks_share_weights_as_engines_do() -> None:
    of_rank = {(weight.name, weight.groups): weight for weight in MODELS["deepseek-v3"].weights(tp=8)}
    found = {name: (weight.n, weight.k) for (name, groups), weight in of_rank.items() if groups in (None, "ids")}
    assert found == {
        "q_a and kv_a": (2112, 7168),
        "q_b": (3072, 1536),
        "kv_b": (4096, 512),
        "o": (7168, 2048),
        "dense gate and up": (4608, 7168),
        "dense down": (7168, 2304),
        "shared expert gate and up": (512, 7168),
        "shared expert down": (7168, 256),
        "experts gate and up": (512, 7168),
        "experts down": (7168, 256),
        "router": (256, 7168),
        "head": (16160, 7168),
    }
    whole = {weight.name: weight for weight in MODELS["deepseek-v3"].weights(tp=8, ep=8)}
    assert whole["experts down"][:4] == ("experts down", 7168, 2048, 32)
    assert whole["whole shared expert down"][:3] == ("whole shared expert down", 7168, 2048)
    qkv = {tp: next(iter(MODELS["qwen3-235b"].weights(tp, ep=tp))).n for tp in (1, 4, 8)}
    assert qkv == {1: 9216, 4: 2304, 8: 1280}, "pairs of the 8 ranks share the 4 heads of keys"
    narrow = {weight.name: weight[1:4] for weight in MODELS["deepseek-v4.1-flash"].weights(tp=8) if weight.is_fp4}
    assert narrow == {"experts gate and up": (576, 5120, 384), "experts down": (5120, 288, 384)}
    heads = next(weight for weight in MODELS["deepseek-v4-flash"].weights(tp=2) if weight.groups == "heads")
    assert (heads.num_groups, heads.n, heads.k) == (4, 1024, 4096)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("gpt-5", {}, "model: expected one of deepseek-v3, deepseek-v3.2, .*, got 'gpt-5'"),
        ("deepseek-v3", {"tp": 3}, "tp, ep: expected a divisor of 128 attention heads, got 3"),
        ("deepseek-v3", {"ep": 3}, "tp, ep: expected a divisor of 256 experts, got 3"),
        (
            "qwen3-235b",
            {"tp": 8},
            "tp: expected ranks that share 1536, the width of an expert, in blocks of 128, got 8",
        ),
        ("deepseek-v3", {"tp": 0}, r"tp: expected an integer in 1\.\.2147483647, got 0"),
        ("deepseek-v3", {"max_tokens": "many"}, r"max_tokens: expected an integer in 1\.\.2147483647, got 'many'"),
        ("deepseek-v3", {"form": "fp4"}, "form: expected one of published, rows, bf16, got 'fp4'"),
        ("deepseek-v3", {"gpu": "B200"}, "gpu: expected H200, H100, H20 or None, got 'B200'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(name: str, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        list(precompile.jobs_of_model(name, **how))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek-v3.2", "published"),
        ("deepseek-v4-flash", "published"),
        ("deepseek-v4.1-flash", "published"),
        ("qwen3-30b-a3b", "rows"),
        ("qwen3-30b-a3b", "bf16"),
    ],
)
def test_no_number_of_tokens_needs_a_kernel_that_is_left_out(name: str, form: str) -> None:
    tp = 8 if form == "published" else 2
    jobs = precompile.jobs_of_model(name, tp=tp, max_tokens=20_000, gpu="H200", form=form)
    made, draw = {(job.kernel, job.config) for _, job in jobs}, random.Random(0)
    for weight in MODELS[name].weights(tp, form=form):
        assert form == "published" or weight.has_row_scales or weight.is_bf16
        for _ in range(up_to(20, 6)):
            m = draw.choice((draw.randint(1, 200), draw.randint(1, 20_000))) * weight.rows_per_token
            if weight.is_bf16:
                of_bf16 = precompile.configs_in_bf16(weight, m, H200)
                assert {(bf16.kernel_name, bf16) for bf16 in of_bf16} <= made, (weight, m)
                activates = weight.is_gated and m >= MANY_ROWS
                assert any(bf16.epilogue.activates for bf16 in of_bf16) == activates, (weight, m)
                continue
            if weight.groups == "ids" and m >= MANY_ROWS:
                for many in precompile.many_rows_configs(weight, m, H200):
                    assert many.work is works.ENDS
                    assert (kernel_of(many).name_of(many), many) in made, (weight, m)
            config = precompile.config_of(question(weight), m)
            if isinstance(config, DecodeConfig):
                casting = serving(m, weight.k, config) if weight.groups is None else None
                assert casting is None or ("fp8_gemm_linear_decode", casting) in made, (weight, m)
            kernel = "fp8_gemm_decode" if isinstance(config, DecodeConfig) else config.kernel_name
            assert (kernel, config) in made, (weight, m)
    for m in (draw.randint(1, 20_000) for _ in range(40 if MODELS[name].streams else 0)):
        assert select_hc(m, 24, 4 * MODELS[name].hidden, 1, 132) in {config for _, config in made}, m


def test_products_across_gpus_are_those_of_all_ranks_rows() -> None:
    made = {job.config for _, job in precompile.jobs_of_model("deepseek-v3", ep=4, max_tokens=3000, gpu="H200")}
    draw, seen = random.Random(1), set()
    for weight in MODELS["deepseek-v3"].weights(1, 4):
        for _ in range(30 if weight.groups == "ids" else 0):
            m = draw.choice((draw.randint(1, 4000), draw.randint(1, 4 * 3000 * weight.rows_per_token)))
            for config in precompile.across_configs(weight, m, 4, H200):
                assert config in made, (weight, m)
                if isinstance(config, GemmConfig):
                    of_d = config.epilogue
                    seen.add((of_d.gates_apart, of_d.has_row_addresses, config.scale_parts))
    assert {(True, False, 1), (True, True, 1), (False, False, 1), (False, True, 1), (False, True, 2)} <= seen
    assert any(config.work.is_twice for config in made if isinstance(config, GemmConfig))
    of_two = {job.config for _, job in precompile.jobs_of_model("deepseek-v3", ep=2, max_tokens=3000, gpu="H200")}
    twice = {each.epilogue.gates_apart for each in of_two if isinstance(each, GemmConfig) and each.work.is_twice}
    assert twice == {True}, "on two GPUs `decode` alone takes one kernel"
    fp4 = [job for _, job in precompile.jobs_of_model("deepseek-v4-flash", ep=4, max_tokens=3000, gpu="H200")]
    of_fp8_gemm = [job for job in fp4 if "grouped_contiguous" in job.kernel and "fp4" in job.name]
    assert {job.config.epilogue.has_row_addresses for job in of_fp8_gemm} == {False, True}
    alone = {job.config for _, job in precompile.jobs_of_model("deepseek-v3", max_tokens=3000, gpu="H200")}
    assert not any(getattr(config, "epilogue", TO_D).has_row_addresses for config in alone), "no other rank to send to"


def test_a_model_takes_the_kernels_that_it_has_a_use_for() -> None:
    needed = {name: {job.kernel for _, job in precompile.jobs_of_model(name, max_tokens=64)} for name in MODELS}
    for name, kernels in needed.items():
        assert kernels >= {"cast_rows", "cast_tiles", "route_rows", "gather_weighted", "lay_scales"}
        assert ("fp8_mqa_logits" in kernels) == (name in ("deepseek-v3.2", "glm-5") or "v4-" in name)
        assert any(kernel.startswith("tf32_hc_prenorm") for kernel in kernels) == ("v4-" in name)
        assert "fp8_gemm_m_grouped_masked" in kernels
        assert "bf16_gemm_dense" in kernels


def test_layers_bring_what_sums_over_products_need() -> None:
    jobs = {(job.kernel, job.config) for job in precompile.jobs_of_layers()}
    for m, n in ((128, 384), (256, 256), (384, 128), (64, 64), (1000, 8)):
        config, _ = select_bf16_sum(m, n, 4096, K_MAJOR)
        assert ("bf16_gemm_sum", config) in jobs
    assert {("sum_slices", config) for config in sum_slices.KERNEL.configs()} <= jobs


def test_a_filled_cache_serves_a_model_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_new_process(monkeypatch, DG_JIT_STRICT=0)  # if it is set, a log is an error
    compiled: list[str] = []

    def compile_cubin(source: str, headers: Any, *, name: str, strict: bool) -> CompiledKernel:
        compiled.append(name)
        return CompiledKernel(name, bytes(80_000), "a log", compiler.compiler_version())

    monkeypatch.setattr(jit, "compile_cubin", compile_cubin)
    all_jobs = precompile.jobs_of_model
    monkeypatch.setattr(precompile, "jobs_of_model", lambda *of, **how: one_in(4, [*all_jobs(*of, **how)]))
    assert precompile.compile_model("deepseek-v3", tp=8, max_tokens=256, gpu="H200")
    listed = precompile.jobs_of_model("deepseek-v3", tp=8, max_tokens=256, gpu="H200")
    jobs = list(dict.fromkeys(job for _, job in listed))
    assert len(compiled) == len(jobs) == len(list(cache.glob("*.kernel")))

    jit._cache_of.cache_clear()  # a new process on a machine without NVRTC
    compiler.compiler_version.cache_clear()
    monkeypatch.setattr(compiler, "_nvrtc", no_compiler)
    monkeypatch.setattr(jit, "compile_cubin", None)
    times = []
    for job in jobs:
        begin = time.perf_counter()
        assert job.build() is not None
        times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 0.05
    compiler.compiler_version.cache_clear()


def test_kernels_are_listed_under_what_needs_them_and_nothing_is_compiled(cache: Path) -> None:
    result = run(*["compile", "--model", "glm-5", "--tp", "8", "--max-tokens", "64", "--gpu", "H100", "--list"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "q_a and kv_a: 2624 x 6144" in lines
    assert "logits of the indexer" in lines
    kernels = [line for line in lines if line.startswith("    ")]
    assert len(set(kernels)) == len(kernels)
    assert lines[-1] == f"{len(kernels)} kernels"
    assert not cache.exists()

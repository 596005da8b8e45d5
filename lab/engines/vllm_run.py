"""Run small models in vLLM, once for each provider of its products, and compare what comes out and how long it takes.

    python -m lab.engines.vllm_run run WHO MODEL ... [options]
    python -m lab.engines.vllm_run compare [FILE ...]             all that was run, unless files are named

Neither needs a network: vllm_pieces.py brings vLLM. docs/benchmark.md says what is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from os import environ, pathsep
from pathlib import Path
from typing import Any, NamedTuple

from .vllm_engine import SAID
from .vllm_pieces import KIT

ROOT = Path(__file__).resolve().parents[2]
RESULTS = KIT / "results"
MODELS = ("qwen3", "qwen3_moe", "qwen3_moe_mxfp4", "deepseek_v3")


class Provider(NamedTuple):
    """One way to compute a model's products."""

    layers: str
    """Begins a layer that must be there; without it another provider was measured."""
    source: str
    """A part of the path of the `deep_gemm` that must be imported."""
    environment: dict[str, str]


PROVIDERS = {
    "ours": Provider("vllm.DeepGemm", "ours/deep_gemm", {"VLLM_USE_DEEP_GEMM": "1", "DG_DISABLE_VLLM_PLUGIN": "1"}),
    "plugin": Provider("deep_gemm.DeepGemm", "ours/deep_gemm", {}),
    "vendored": Provider("vllm.DeepGemm", "third_party/deep_gemm", {"VLLM_USE_DEEP_GEMM": "1"}),
    "own": Provider("vllm.", "", {"VLLM_USE_DEEP_GEMM": "0"}),
    "exact": Provider("vllm.DeepGemm", "vllm_exact", {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}),
}
"""`exact` takes weights as the checkpoint has them; vLLM rounds their scales to powers of two for DeepGEMM."""
COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that is measured
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not in the kit
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(who: str, cache: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of a provider's process; those of vLLM and deep_gemm that are set outside do not reach it."""
    provider = PROVIDERS[who]
    paths = ["wheel", "site", *(["ours"] if provider.source.startswith("ours") else [])]
    return {
        **{name: value for name, value in outer.items() if not name.startswith(("VLLM_", "DG_"))},
        **COMMON,
        "VLLM_CACHE_ROOT": str(cache),
        "DG_JIT_CACHE_DIR": str(cache / "deep_gemm"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTHONPATH": pathsep.join(str(KIT / path) for path in paths),
        **provider.environment,
    }


def stage(kit: Path, root: Path) -> None:
    """Lay this checkout beside vLLM, with metadata, which vLLM finds the plugin by and a checkout has none of."""
    section = r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"'
    stated = re.search(section, (root / "pyproject.toml").read_text(), re.MULTILINE)
    if stated is None:
        raise ValueError(f"{root / 'pyproject.toml'}: expected an entry point, which vLLM finds the plugin by")
    metadata = kit / "ours" / "hopper_gemm-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hopper-gemm\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{stated[1]}]\n{stated[2]} = {stated[3]}\n")
    for link, target in ((kit / "lab", root / "lab"), (kit / "ours" / "deep_gemm", root / "deep_gemm")):
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def run(who: str, model: str, options: dict[str, Any]) -> None:
    """Measure a provider on a model: with empty caches of kernels, then how it starts with all of them there."""
    folder, cache, part = KIT / "models" / model, KIT / "cache" / f"{model}_{who}", KIT / "part.json"
    shutil.rmtree(cache, ignore_errors=True)
    for path in (RESULTS, cache, KIT / "modelinfos"):
        path.mkdir(parents=True, exist_ok=True)
    (cache / "modelinfos").symlink_to(KIT / "modelinfos")  # vLLM's notes on classes of models; no provider changes them
    if not (folder / "config.json").exists():
        of_package = environment("ours", KIT / "cache" / "models", environ)
        _process("vllm_models", [model, str(folder)], of_package, RESULTS / f"{model}.log", options["limit"])
    variables = environment(who, cache, environ) | options["set"]
    results = []
    for caches in ("empty", "warm")[: 1 if who == "exact" else 2]:
        print(f"== {model}, {who}, {caches} caches", flush=True)
        asked = options | {"start_only": caches == "warm", "begun": time.time()}
        log = RESULTS / f"{model}_{who}_{caches}.log"
        _process("vllm_engine", [who, str(folder), str(part), json.dumps(asked)], variables, log, options["limit"])
        results.append(json.loads(part.read_text()))
        check(who, results[-1])
    starts = [result["start"] for result in results]
    whole = {"model": model, "options": options} | results[0] | {"starts": starts}
    (RESULTS / f"{model}_{who}.json").write_text(json.dumps(whole))


def check(who: str, result: Mapping[str, Any]) -> None:
    """Raise an error if another provider than `who` computed the products."""
    provider, found = PROVIDERS[who], result["layers"]
    is_another = who == "own" and any(".DeepGemm" in layer for layer in found)
    if is_another or not any(layer.startswith(provider.layers) for layer in found):
        raise ValueError(f"{who}: expected layers of {provider.layers}, got {found}")
    if provider.source not in (result["deep_gemm"] or ""):
        raise ValueError(f"{who}: expected deep_gemm of {provider.source}, got {result['deep_gemm']}")


def _process(module: str, arguments: list[str], variables: Mapping[str, str], log: Path, limit_s: float) -> None:
    """Run a module beside this one, outside of the checkout. Keep its log, and print what it says."""
    command = [sys.executable, "-m", f"lab.engines.{module}", *arguments]
    with log.open("w") as file:
        done = subprocess.run(
            command, env=variables, cwd=KIT, timeout=limit_s, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    lines = log.read_text(errors="replace").splitlines()
    if done.returncode:
        raise RuntimeError("\n".join([*lines[-30:], f"{module} ended with {done.returncode}; {log} has all"]))
    for line in lines:
        if line.startswith(SAID):
            print(line.removeprefix(SAID)[:80], flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.engines.vllm_run")
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="measure a provider on models")
    runs.add_argument("who", choices=PROVIDERS)
    runs.add_argument("models", choices=MODELS, nargs="+", metavar="model", help=f"some of {', '.join(MODELS)}")
    runs.add_argument("--profile", action="store_true", help="also print the GPU's time by kernel")
    runs.add_argument("--skip-time", action="store_true", help="log-probabilities and starts alone")
    runs.add_argument("--repeat", type=int, default=5, help="measurements of each time")
    runs.add_argument("--engine", default={}, type=json.loads, help="JSON of more arguments of vLLM's LLM")
    runs.add_argument("--set", default={}, type=json.loads, help="JSON of more variables of the environment")
    runs.add_argument("--limit", type=float, default=300, help="seconds that a process may take")
    compares = commands.add_parser("compare", help="print tables and write a result file")
    compares.add_argument("files", nargs="*", type=Path, help="results of run; all unless given")
    compares.add_argument("--out", type=Path, help="else benchmarks/results/engines-GPU-DATE-COMMIT.json")
    compares.add_argument("--commit", help="the commit to record if git cannot tell")
    options = vars(parser.parse_args(arguments))
    if "files" in options:
        from .vllm_compare import compare

        compare(options["files"] or sorted(RESULTS.glob("*.json")), options["out"], options["commit"])
        return
    stage(KIT, ROOT)
    for model in options.pop("models"):
        run(options["who"], model, options)


if __name__ == "__main__":
    main()

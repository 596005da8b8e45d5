"""One start of vLLM's offline engine, measured. vllm_run.py gives it a process and an environment of its own."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

SAID = "> "
"""Begins the lines of the log that are shown."""
LENGTHS = [5, 17, 64, 129, 250, 384, 511, 700]
"""Tokens of the prompts whose log-probabilities are compared."""
PREFILLS = {"prefill 8 x 1024": [1024] * 8, "prefill 1 x 1024": [1024], "prefill 1 x 128": [128]}
DECODES = {"decode batch 1": [64], "decode batch 32": [64] * 32}
STEPS = 128
"""Steps of a decode."""
KERNEL_FILES = (".kernel", ".cubin")
"""How files of compiled kernels end: ours; Triton's and the vendored copy's."""
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.6,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]}


def measure(who: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start the engine on a checkpoint and measure what the options ask for."""
    cache = Path(os.environ["VLLM_CACHE_ROOT"])
    before = compiled(cache)
    if who == "exact":
        sys.modules["deep_gemm"] = import_module("lab.engines.vllm_exact")
    vllm, torch = modules()
    graphs = {"enforce_eager": True} if who == "exact" else {"compilation_config": GRAPHS}
    llm = vllm.LLM(model=model, **(ENGINE | graphs | options["engine"]))
    start = {"up_s": time.time() - options["begun"]}
    generate(llm, [64], 1)
    start |= {"first_token_s": time.time() - options["begun"], "kernels": compiled(cache) - before}
    say(", ".join(f"{name} {value:.1f}" for name, value in start.items()))
    deep_gemm = sys.modules.get("deep_gemm") or sys.modules.get("vllm.third_party.deep_gemm")
    result = {"who": who, "vllm": vllm.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    result |= {"deep_gemm": deep_gemm and deep_gemm.__file__, "layers": layers(llm), "start": start}
    if options["start_only"]:
        return result
    answers = generate(llm, LENGTHS, 64, prompt_logprobs=0)
    # No sampling changes those of prompts; tokens that follow tell of decoding.
    steps = [step for answer in answers for step in answer.prompt_logprobs if step]
    result["logprobs"] = [next(iter(step.values())).logprob for step in steps]
    result["tokens"] = [list(answer.outputs[0].token_ids) for answer in answers]
    if not options["skip_time"] and who != "exact":
        result["ms"] = times(llm, options["repeat"])
        result["profile"] = profiles(llm, options["profile"])
    return result


def modules() -> tuple[Any, Any]:
    """Import vLLM and torch, whose types are not looked at here."""
    return import_module("vllm"), import_module("torch")


def say(text: str) -> None:
    """Print a line that vllm_run.py shows."""
    print(f"{SAID}{text}", flush=True)


def compiled(cache: Path) -> int:
    """Count the compiled kernels in a folder."""
    return sum(path.suffix in KERNEL_FILES for path in cache.rglob("*"))


def generate(llm: Any, lengths: list[int], tokens: int, seed: int = 0, **more: Any) -> Any:
    """Let prompts of random tokens go on for so many tokens, each the likeliest."""
    vllm, torch = modules()
    generator = torch.Generator().manual_seed(seed)
    prompts = [{"prompt_token_ids": torch.randint(2, 32768, (n,), generator=generator).tolist()} for n in lengths]
    asked = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
    return llm.generate(prompts, asked, use_tqdm=False)


def layers(llm: Any) -> list[str]:
    """Say which class each kind of layer took, with the package it is from."""

    def look(model: Any) -> list[str]:
        found: Counter[str] = Counter()
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            experts = getattr(getattr(getattr(method, "moe_kernel", None), "impl", None), "fused_experts", None)
            attention = getattr(module, "impl", None) if "Attention" in type(module).__name__ else None
            for kind in map(type, filter(None, (getattr(method, "fp8_linear", None), experts, attention))):
                found[f"{kind.__module__.partition('.')[0]}.{kind.__name__}: {name.rpartition('.')[2]}"] += 1
        return [f"{kind} x {count}" for kind, count in found.items()]

    seen: list[str] = llm.apply_model(look)[0]
    for line in seen:
        say(line)
    return seen


def times(llm: Any, repeat: int) -> dict[str, list[float]]:
    """Time prefills and steps of decodes, in ms. What comes first of each does not count."""

    def ms(lengths: list[int], tokens: int, seed: int) -> float:
        begin = time.perf_counter()
        generate(llm, lengths, tokens, seed)
        return (time.perf_counter() - begin) * 1e3

    found = {}
    for name, lengths in (PREFILLS | DECODES).items():
        all_ms = [ms(lengths, 1, seed) for seed in range(1 + repeat)]
        if name in DECODES:
            all_ms = [(ms(lengths, 1 + STEPS, seed) - first) / STEPS for seed, first in enumerate(all_ms)]
        found[name] = all_ms[1:]
        say(f"{name}: {statistics.median(found[name]):.3f} ms")
    return found


def profiles(llm: Any, shows_kernels: bool) -> dict[str, list[tuple[str, float]]]:
    """Give the GPU's milliseconds by kernel, of a prefill, or of a step of a decode, whatever the host takes."""
    found = {}
    for name, lengths in (PREFILLS | DECODES).items():
        ms = of_kernels(llm, lengths, 1)
        if name in DECODES:
            whole = of_kernels(llm, lengths, 1 + STEPS)
            ms = {kernel: (all_ms - ms.get(kernel, 0)) / STEPS for kernel, all_ms in whole.items()}
        found[name] = sorted(ms.items(), key=lambda row: -row[1])
        total = sum(ms.values())
        say(f"GPU, {name}: {total:.3f} ms")
        for kernel, each in found[name][: 14 * shows_kernels]:
            say(f"{each / total:6.1%} {each:9.3f} ms {kernel[:52]}")
    return found


def of_kernels(llm: Any, lengths: list[int], tokens: int) -> dict[str, float]:
    """Give the GPU's milliseconds by kernel, of prompts that go on for so many tokens."""
    profiler = modules()[1].profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as record:
        generate(llm, lengths, tokens, seed=50)
    return {each.key: each.self_device_time_total / 1e3 for each in record.key_averages()}


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], sys.argv[2], json.loads(sys.argv[4]))))

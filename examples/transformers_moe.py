"""Run a mixture of experts of transformers on deep_gemm: prefill and decoding, and the same model in BF16.

    python examples/transformers_moe.py                        # on a Hopper GPU: layers of realistic sizes
    python examples/transformers_moe.py --family deepseek_v3
    python examples/transformers_moe.py --tiny                 # anywhere, half a minute; times mean nothing

Prints the times of BF16, of this package and of transformers' own kernels, and the difference of the logits.

The model has few layers and random weights, which the program makes, so nothing is downloaded. FP8 weights have one
scale for each 128x128 block, and the BF16 model has the dequantized values of the same weights.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a checkout works too

import torch
from torch import Tensor

from deep_gemm import calc_diff, per_block_cast_to_fp8
from deep_gemm.integrations.transformers import dequantized, use_deep_gemm

try:
    from transformers import (
        AutoModelForCausalLM,
        DeepseekV3Config,
        FineGrainedFP8Config,
        PreTrainedConfig,
        Qwen3MoeConfig,
    )
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
except ModuleNotFoundError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

WEIGHTS = {FP8Linear: ("weight",), FP8Experts: ("gate_up_proj", "down_proj")}
"""Names of FP8 weights; the name of a weight's scales ends in _scale_inv."""


def config_of(family: str, layers: int = 2, tiny: bool = False) -> PreTrainedConfig:
    """Configure layers in the sizes of Qwen3-30B-A3B or DeepSeek-V3, with 32 experts; or tiny layers, with 8."""
    shared: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_experts_per_tok": 2 if tiny else 8,
        "tie_word_embeddings": False,
    }
    shared |= {"vocab_size": 512 if tiny else 4096, "initializer_range": 0.1 if tiny else 0.02}
    if family == "qwen3_moe":
        sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 32, "num_attention_heads": 32}
        sizes |= {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}
        if tiny:
            sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_attention_heads": 4}
            sizes |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384}
        return Qwen3MoeConfig(**shared, **sizes)
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 32}
    sizes |= {"num_attention_heads": 128, "num_key_value_heads": 128, "n_group": 4, "topk_group": 2}
    if tiny:
        sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128}
        sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 2, "topk_group": 1}
    return DeepseekV3Config(**shared, **sizes, first_k_dense_replace=min(1, layers - 1))


def models_of(config: PreTrainedConfig, device: str) -> tuple[Any, Any]:
    """Make a random BF16 model, and the same model with FP8 weights."""
    torch.manual_seed(0)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return plain, with_fp8_weights(plain)


def with_fp8_weights(plain: Any) -> Any:
    """Copy a model with its weights in FP8, and round the original model's weights to the same values."""
    model = copy.deepcopy(plain)
    replace_with_fp8_linear(model, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config())
    for name, layer in model.named_modules():
        for weight in WEIGHTS.get(type(layer), ()):
            before = getattr(plain.get_submodule(name), weight)
            values, scales = per_block_cast_to_fp8(before.detach())
            setattr(layer, weight, torch.nn.Parameter(values, requires_grad=False))
            setattr(layer, f"{weight}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
            before.data.copy_(dequantized(values, scales))
    return model.eval()


@torch.no_grad()
def prefill(model: Any, ids: Tensor, logits_to_keep: int = 0) -> Tensor:
    """Compute the logits of the last tokens, or of all tokens."""
    logits: Tensor = model(ids, use_cache=True, logits_to_keep=logits_to_keep).logits
    return logits


@torch.no_grad()
def decoder(model: Any, ids: Tensor) -> Callable[[], object]:
    """Return a function that decodes one more token for each sequence."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    state = {"cache": out.past_key_values, "next": out.logits[:, -1:].argmax(-1)}

    @torch.no_grad()
    def step() -> None:
        out = model(state["next"], past_key_values=state["cache"], use_cache=True)
        state.update(cache=out.past_key_values, next=out.logits[:, -1:].argmax(-1))

    return step


def milliseconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return a call's median time for its caller, and the time of its kernels on the GPU (NaN without a GPU)."""
    on_gpu = torch.cuda.is_available()
    wait: Any = torch.cuda.synchronize if on_gpu else (lambda: None)
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    if not on_gpu:
        return 1e3 * statistics.median(times), float("nan")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        wait()
    kernels = sum(event.self_device_time_total for event in profile.key_averages())
    return 1e3 * statistics.median(times), kernels / 3 / 1e3


def times_of(model: Any, prompts: list[Tensor], repeats: int) -> Iterator[tuple[float, float]]:
    """Yield the times to prefill the first prompt, and to decode after each other prompt."""
    first, *others = prompts
    yield milliseconds(lambda: prefill(model, first, logits_to_keep=1), repeats)
    for ids in others:
        yield milliseconds(decoder(model, ids), repeats)


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each way to run the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=("qwen3_moe", "deepseek_v3"), default="qwen3_moe")
    parser.add_argument("--layers", type=int, default=2, help="how many layers the model has (default: 2)")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs in seconds")
    parser.add_argument("--repeats", type=int, default=20, help="times are medians of this many runs (default: 20)")
    said = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not said.tiny:
        parser.error("without a GPU only --tiny runs in reasonable time")
    config = config_of(said.family, said.layers, said.tiny)
    print(f"{said.family}, {said.layers} layers, hidden size {config.hidden_size}, on {device}", flush=True)
    plain, model = models_of(config, device)

    shapes = [(1, 32), (1, 8), (4, 8)] if said.tiny else [(1, 4096), (1, 512), (16, 512), (64, 512)]
    prompts = [torch.randint(config.vocab_size, shape, device=device) for shape in shapes]
    titles = [f"prefill {shapes[0][1]}", *(f"decode {batch}" for batch, _ in shapes[1:])]
    print(f"{'ms, as the host sees it (kernels)':36}" + "".join(f"{title:>20}" for title in titles))

    def row(name: str, model: Any) -> None:
        print(f"{name:36}", end="", flush=True)
        for host, kernels in times_of(model, prompts, said.repeats):
            print(f"{f'{host:.2f} ({kernels:.2f})':>20}", end="", flush=True)
        print(flush=True)

    row("BF16", plain)
    with use_deep_gemm() as use:
        row("FP8, deep_gemm", model)
        logits = prefill(model, prompts[0])
    try:
        row("FP8, transformers' own kernels", model)
    except Exception as e:  # transformers' kernels may lack something on this machine
        print(f" do not run here: {type(e).__name__}: {str(e).splitlines()[0][:120]}")
    expected = prefill(plain, prompts[0])
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"logits of the prompt: calc_diff {float(calc_diff(logits, expected)):.1e}, same best token {same:.1%}")
    print("(a token that stands between two experts may go to the other one)")
    print(f"calls computed by deep_gemm: {dict(use.taken)}, left to transformers: {dict(use.left) or 'none'}")


if __name__ == "__main__":
    main()

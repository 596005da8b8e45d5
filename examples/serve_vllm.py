"""Serve an FP8 model with vLLM, and list the kernels that ran:

    python examples/serve_vllm.py                               # Qwen/Qwen3-30B-A3B-FP8, which vLLM downloads
    python examples/serve_vllm.py MODEL                         # another model, or a folder
    DG_DISABLE_VLLM_PLUGIN=1 python examples/serve_vllm.py      # the same without this package's layers

Prints three answers, then the kernels that used most of the GPU's time for them, and this package's share. It takes as
long as vLLM needs to start: minutes for a large model. It needs a Hopper GPU and vLLM, and this package in vLLM's
environment, where its plugin needs no setting (docs/vllm.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

MODEL = "Qwen/Qwen3-30B-A3B-FP8"
PROMPTS = ["The capital of France is", "A tensor core multiplies", "FP8 numbers have"]
SHOWN = 12
"""Number of kernels in the list."""


def table(us: Mapping[str, float], ours: tuple[str, ...]) -> str:
    """List the kernels that took longest, and the share of kernels whose names begin with one of `ours`."""
    total = sum(us.values())
    if total == 0:
        return "the profiler saw no kernel"
    longest = sorted(us, key=lambda name: -us[name])[:SHOWN]
    lines = [
        f"{us[name] / total:6.1%}  {'deep_gemm' if name.startswith(ours) else '':9}  {name[:60]}" for name in longest
    ]
    own = sum(each for name, each in us.items() if name.startswith(ours))
    return "\n".join([*lines, f"{own / total:6.1%}  all kernels of deep_gemm"])


def main(model: str = MODEL) -> None:
    """Answer the prompts, and list the kernels."""
    if find_spec("vllm") is None:
        sys.exit("this example needs vLLM: pip install vllm, and this package into the same environment")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, so that the profiler sees it
    import torch

    from deep_gemm.kernels import KERNELS

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("this example needs a Hopper GPU")
    vllm = import_module("vllm")
    llm = vllm.LLM(model=model, max_model_len=2048)
    asked = vllm.SamplingParams(temperature=0, max_tokens=32)
    llm.generate(PROMPTS, asked, use_tqdm=False)  # compiles the kernels that are not compiled yet
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        answers = llm.generate(PROMPTS, asked, use_tqdm=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt}{answer.outputs[0].text!r}")
    us = {each.key: float(each.self_device_time_total) for each in record.key_averages()}
    print(table(us, tuple(kernel.kernel_name for kernel in KERNELS)))


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""Small random checkpoints of real architectures: `python -m lab.engines.vllm_models NAME FOLDER` writes one.

vllm_models.json has their configurations. Weights are FP8 with 128x128 blocks, experts may be MXFP4. Each tensor is
drawn from a seed that is its name.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_gemm import per_block_cast_to_fp8, quantize_mxfp4

MXFP4 = "_mxfp4"
"""Ends the names of models whose experts are MXFP4 and go the way of DeepSeek-V4's: vLLM asks for `store_dtype`."""
FILE_BYTES = 2 << 30


def config_of(name: str) -> dict[str, Any]:
    """Read a model's configuration."""
    config: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())[name.removesuffix(MXFP4)]
    if name.endswith(MXFP4):
        config["quantization_config"]["store_dtype"] = "mxfp4"
    return config


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a model's weights, each expert's apart, as checkpoints have them."""
    transformers: Any = import_module("transformers")
    fields = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **fields)
        )
    for name, weight in model.state_dict().items():
        if weight.dim() < 3:
            yield name, tuple(weight.shape)
            continue
        folder, _, kind = name.rpartition(".")
        experts, n, k = weight.shape
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert in range(experts):
            for each in kinds:
                yield f"{folder}.{expert}.{each}.weight", (n // len(kinds), k)


def tensors(name: str, shape: tuple[int, ...], is_mxfp4: bool, device: str) -> dict[str, Tensor]:
    """Draw what a checkpoint has under a name: the weight, and its scales if it is quantized."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)

    if len(shape) == 1:
        return {name: 0.05 * normal(*shape) if name.endswith("bias") else (1 + 0.1 * normal(*shape)).bfloat16()}
    n, k = shape
    for kind, std in (("embed_tokens", 1.0), ("lm_head", 3 / math.sqrt(k)), ("mlp.gate", 2 / math.sqrt(k))):
        if name.endswith(f"{kind}.weight"):
            return {name: (normal(n, k) * std).bfloat16()}
    # Blocks differ in size, so their scales do. What ends a layer is larger, so that the layer matters.
    gain = 2.0 if name.endswith(("down_proj.weight", "o_proj.weight")) else 1.0
    blocks = torch.exp(0.5 * normal(-(-n // 128), -(-k // 128)))
    weight = normal(n, k) * (gain / math.sqrt(k) / math.exp(0.25))
    weight *= blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    if is_mxfp4 and ".experts." in name:
        return dict(zip((name, f"{name}_scale"), quantize_mxfp4(weight), strict=True))
    return dict(zip((name, f"{name}_scale_inv"), per_block_cast_to_fp8(weight), strict=True))


def make(config: dict[str, Any], folder: Path, device: str) -> None:
    """Write a checkpoint, its configuration last: where that is, the rest is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file: Any = import_module("safetensors.torch").save_file
    part: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    todo = list(shapes(config))
    for done, (name, shape) in enumerate(todo, 1):
        drawn = tensors(name, shape, "store_dtype" in config["quantization_config"], device)
        part |= {key: tensor.cpu() for key, tensor in drawn.items()}
        if done == len(todo) or sum(tensor.nbytes for tensor in part.values()) > FILE_BYTES:
            file = f"model-{done:05}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(part, file)
            part = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    make(config_of(sys.argv[1]), Path(sys.argv[2]), "cuda" if torch.cuda.is_available() else "cpu")

"""Load a checkpoint in DeepSeek's form, FP8 weights with `weight_scale_inv`, into layers of this package:

    python examples/deepseek_checkpoint.py                    # makes a tiny checkpoint first; 3 seconds on a CPU
    python examples/deepseek_checkpoint.py FOLDER             # your own; takes as long as its disk
    python examples/deepseek_checkpoint.py FOLDER --only model.layers.3.mlp.shared_experts

Prints each FP8 layer with the error of its result relative to BF16 products of its dequantized weights, and the size
of the FP8 weights as a fraction of BF16. It needs safetensors.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm.nn import FrozenLinear

try:
    from safetensors import safe_open
    from safetensors.torch import save_file
except ModuleNotFoundError:
    raise SystemExit("this example needs safetensors: pip install safetensors") from None

SCALES = ".weight_scale_inv"
"""In spite of the name, values are multiplied by these scales: weight = values * scales of 128x128 blocks."""


def write_tiny(folder: Path) -> None:
    """Write a checkpoint of one MLP in two files, like large checkpoints."""
    shapes = {"gate_proj": (384, 256), "up_proj": (384, 256), "down_proj": (256, 384)}
    for number, names in enumerate((["gate_proj", "up_proj"], ["down_proj"])):
        tensors: dict[str, Tensor] = {}
        for name in names:
            values, scales = deep_gemm.per_block_cast_to_fp8(
                torch.randn(shapes[name], dtype=torch.float32) / shapes[name][1] ** 0.5
            )
            tensors |= {f"model.layers.0.mlp.{name}.weight": values, f"model.layers.0.mlp.{name}{SCALES}": scales}
        save_file(tensors, folder / f"model-{number}.safetensors")


def fp8_weights(folder: Path, device: str, only: str) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Read each weight that has scales; a weight and its scales may be in two files."""
    files: list[Any] = [safe_open(path, "pt", device=device) for path in sorted(folder.glob("*.safetensors"))]
    place = {key: file for file in files for key in file.keys()}  # noqa: SIM118  it is no dict
    for key in sorted(place):
        if key.endswith(SCALES) and key.startswith(only):
            name = key.removesuffix(SCALES)
            weight = f"{name}.weight"
            yield name, (place[weight].get_tensor(weight), place[key].get_tensor(key).float())


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Load every FP8 layer, and run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a folder with *.safetensors; else a tiny one is made")
    parser.add_argument("--only", default="", help="layers whose names begin so")
    said = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as made:
        if said.folder is None:
            write_tiny(Path(made))
        in_fp8 = in_bf16 = 0
        for name, w in fp8_weights(said.folder or Path(made), device, said.only):
            layer = FrozenLinear(w)
            x = torch.randn(16, w[0].shape[1], device=device, dtype=torch.float32).bfloat16()
            right = (x @ deep_gemm.cast_back_from_fp8(*w).bfloat16().t()).float()
            error = (layer(x).float() - right).norm() / right.norm()
            print(f"{name}: {tuple(w[0].shape)}, relative error beside BF16: {error:.3f}")
            in_fp8 += sum(each.numel() * each.element_size() for each in w)
            in_bf16 += w[0].numel() * 2
    if not in_fp8:
        raise SystemExit(f"{said.folder}: expected *.safetensors with weights and {SCALES[1:]}, got none")
    print(f"{in_fp8} bytes, {in_fp8 / in_bf16:.0%} of BF16")


if __name__ == "__main__":
    main()

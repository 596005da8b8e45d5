"""A model whose linear layers take FP8 weights, without a change of the model:  python examples/linear_in_a_model.py

It is for inference, on a Hopper GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import deep_gemm

HIDDEN, INTERMEDIATE = 256, 512


class Fp8Linear(nn.Module):
    """An `nn.Linear` with an FP8 weight, one scale for each 128x128 block."""

    values: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        values, scales = deep_gemm.per_block_cast_to_fp8(layer.weight)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute x @ w.T + bias in BF16."""
        out = deep_gemm.linear(x, (self.values, self.scales), bias=self.bias)
        assert out is not None  # it is None only if the caller gives an `out`
        return out


class Mlp(nn.Module):
    """A model of two layers, such as anybody has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INTERMEDIATE)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Compute both layers, and an activation between them."""
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def replace_linear_layers(model: nn.Module) -> None:
    """Put an FP8 layer in the place of each linear layer that products can take."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear) and child.in_features % 16 == 0 and child.out_features % 8 == 0:
            setattr(model, name, Fp8Linear(child))
        else:
            replace_linear_layers(child)


@torch.no_grad()
def main() -> None:
    """Show how far the FP8 model is from the BF16 model, and how many bytes its weights take."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Mlp().to(device, torch.bfloat16)
    x = torch.randn(7, HIDDEN, device=device, dtype=torch.bfloat16)
    expected = model(x)
    before = sum(p.numel() * p.element_size() for p in (model.up.weight, model.down.weight))

    replace_linear_layers(model)
    after = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    error = (model(x).float() - expected.float()).norm() / expected.float().norm()
    print(f"weights: {before} bytes in BF16, {after} in FP8 with scales")
    print(f"relative error beside BF16: {error:.3f}")


if __name__ == "__main__":
    main()

"""BF16 experts of transformers (5.17 and newer) on our grouped products, in inference and in training.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation=NAME)

It is an experts implementation like transformers' own "grouped_mm", for every mixture that has that one. `NAME_FP8`
is one with FP8 products, forward and backward, as in `nn.Experts`, if the gate is SiLU.
"""

from ..nn.stacked import NAME, NAME_FP8, experts_forward, fp8_experts_forward, register_experts

__all__ = ["NAME", "NAME_FP8", "experts_forward", "fp8_experts_forward", "register_experts"]

"""BF16 experts of transformers (5.17 and newer) on this package's grouped products, for inference and training.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation=NAME)

`NAME` is an experts implementation like transformers' own "grouped_mm", for every mixture that supports "grouped_mm".
`NAME_FP8` has FP8 products, forward and backward, as in `nn.Experts`, if the activation is SiLU.
"""

from ..nn.stacked import NAME, NAME_FP8, experts_forward, fp8_experts_forward, register_experts

__all__ = ["NAME", "NAME_FP8", "experts_forward", "fp8_experts_forward", "register_experts"]

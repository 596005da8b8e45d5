"""Run DeepSeek-V4 in an installed vLLM by the plugin, on a CPU: `python vllm_on_cpu.py FOLDER fp4` (or `fp8`).

The program writes a checkpoint's quantized weights into FOLDER, with experts in `fp4` or `fp8`, and lets vLLM load
them. Then it checks that each layer's output has the bits of this package's functions on the checkpoint's tensors.
vLLM treats the CPU as a Hopper GPU. The exit status is 5 if vLLM cannot be imported here.
"""

import json
import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import deep_gemm
from deep_gemm.integrations import vllm as plugin

experts: Any = deep_gemm.experts
linear: Any = deep_gemm.linear
HIDDEN, WIDTH, HEADS, RANK, GROUPS, EXPERTS, LIMIT = 512, 256, 8, 256, 4, 4, 0.5
RATIOS = [0, 4, 128]  # tokens that attention compresses into one; 0: none; 4: with an indexer; 128: without
CONFIG = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu", "head_dim": 512},
    **{"hidden_size": HIDDEN, "vocab_size": 256, "rms_norm_eps": 1e-6, "moe_intermediate_size": WIDTH},
    **{"num_hidden_layers": len(RATIOS), "compress_ratios": RATIOS, "num_hash_layers": 1, "num_key_value_heads": 1},
    **{"num_attention_heads": HEADS, "q_lora_rank": RANK, "o_lora_rank": 128, "o_groups": GROUPS},
    **{"qk_rope_head_dim": 64, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512},
    **{"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_method": "noaux_tc"},
    **{"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "swiglu_limit": LIMIT, "hc_mult": 4, "hc_eps": 1e-6},
    **{
        "hc_sinkhorn_iters": 20,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "max_position_embeddings": 4096,
    },
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}
ATTENTION = {"wq_a": (RANK, HIDDEN), "wkv": (512, HIDDEN), "wq_b": (HEADS * 512, RANK), "wo_b": (HIDDEN, GROUPS * 128)}
ATTENTION |= {"wo_a": (GROUPS * 128, HEADS * 512 // GROUPS)}
FFN = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
FUSED = {"attn.fused_wqa_wkv": ("wq_a", "wkv"), "attn.wq_b": ("wq_b",), "attn.wo_b": ("wo_b",)}
FUSED |= {"ffn.shared_experts.gate_up_proj": ("w1", "w3"), "ffn.shared_experts.down_proj": ("w2",)}
FUSED |= {"attn.indexer.wq_b": ("wq_b",)}


def checkpoint(form: str) -> dict[str, Tensor]:
    """Draw the quantized weights and their scales, under the names that their publisher uses."""
    found: dict[str, Tensor] = {}
    for i, ratio in enumerate(RATIOS):
        shapes = {f"attn.{name}": shape for name, shape in ATTENTION.items()}
        shapes |= {"attn.indexer.wq_b": (64 * 128, RANK)} if ratio == 4 else {}
        each = ["shared_experts", *(f"experts.{e}" for e in range(EXPERTS))]
        shapes |= {f"ffn.{of}.{name}": shape for of in each for name, shape in FFN.items()}
        for path, shape in shapes.items():
            x, name = torch.randn(shape).bfloat16() / shape[1] ** 0.5, f"layers.{i}.{path}"
            is_fp4 = form == "fp4" and ".experts." in name
            values, scales = deep_gemm.quantize_mxfp4(x) if is_fp4 else deep_gemm.per_block_cast_to_fp8(x, True)
            found[f"{name}.weight"] = values.view(torch.int8) if is_fp4 else values
            found[f"{name}.scale"] = scales.view(torch.float8_e8m0fnu) if is_fp4 else scales
            if form == "fp4" and not is_fp4:
                found[f"{name}.scale"] = scales.to(torch.float8_e8m0fnu)
    return found


def pretend_a_hopper() -> None:
    """Make vLLM treat this CPU as a Hopper GPU."""
    nothing = type("Nothing", (), {"__init__": lambda self, *_, **__: None, "cuda_stream": 0})
    properties = SimpleNamespace(multi_processor_count=132, total_memory=80 << 30, name="H100", major=9, minor=0)
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    answers |= {"get_device_properties": properties, "get_device_name": "H100", "current_stream": nothing()}
    answers |= {"mem_get_info": (79 << 30, 80 << 30), "empty_cache": None}
    for name, answer in answers.items():
        setattr(torch.cuda, name, partial(lambda answer, *_, **__: answer, answer))
    torch.cuda.Stream = torch.cuda.Event = nothing  # type: ignore[assignment, misc]
    of_device = {"CudaComputeCapability": (9, 0), "Name": "H100", "Count": 1, "HandleByIndex": 0, "UUID": "GPU-0"}
    told = {"Init": None, "Shutdown": None} | {f"DeviceGet{name}": answer for name, answer in of_device.items()}
    nvml: Any = ModuleType("vllm.third_party.pynvml")
    vars(nvml).update({f"nvml{name}": partial(lambda answer, *_: answer, answer) for name, answer in told.items()})
    nvml.NVMLError = RuntimeError
    # vLLM may query this module for the platform during its import
    loader: Any = SimpleNamespace(create_module=lambda _: nvml, exec_module=lambda _: None)
    find = {nvml.__name__: ModuleSpec(nvml.__name__, loader)}
    sys.meta_path.insert(0, SimpleNamespace(find_spec=lambda name, *_: find.get(name)))
    from vllm.platforms import current_platform

    type(current_platform).device_type, type(current_platform).dist_backend = "cpu", "gloo"


def load(folder: Path) -> tuple[Any, Any]:
    """Let vLLM load the checkpoint with the plugin; return its configuration and the model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader, utils

    options = {"skip_tokenizer_init": True, "kv_cache_dtype": "fp8", "max_model_len": 1024, "enforce_eager": True}
    config = EngineArgs(model=str(folder), dtype="bfloat16", **options).create_engine_config()
    plugin.register()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        model = utils.initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        utils.process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return config, model


def compare(config: Any, model: Any, tensors: dict[str, Tensor]) -> None:
    """Check that each layer's output has the bits of this package's functions on the checkpoint's tensors."""
    import vllm.models.deepseek_v4.nvidia.ops.o_proj as of_o_proj
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.workspace import init_workspace_manager

    def operand(of: str, *names: str) -> tuple[Tensor, Tensor]:
        values, scales = (torch.cat([tensors[f"{of}.{name}.{part}"] for name in names]) for part in ("weight", "scale"))
        return values, scales if values.dtype == torch.int8 else scales.float()

    def cast(o: Tensor, *_: object, n_groups: int, **__: object) -> tuple[Tensor, Tensor]:
        return deep_gemm.per_token_cast_to_fp8(o.reshape(len(o), n_groups, -1), True)  # without the rotation

    init_workspace_manager(torch.device("cpu"))
    of_o_proj.fused_inv_rope_fp8_quant = cast
    modules, kinds = dict(model.named_modules()), set()
    for i, layer in enumerate(model.model.layers):
        of = f"layers.{i}"
        for path, names in FUSED.items():
            if module := modules.get(f"model.{of}.{path}"):
                weight = operand(f"{of}.{path.rpartition('.')[0]}", *names)
                x = torch.randn(9, weight[0].shape[1])
                assert torch.equal(module.quant_method.apply(module, x), linear(x, weight)), (of, path)
                kinds.add(type(module.quant_method.fp8_linear).__name__)
        o, z = torch.randn(9, HEADS, 512), torch.empty(9, GROUPS, 128)
        a, wo_a = cast(o, n_groups=GROUPS), [x.chunk(GROUPS) for x in operand(f"{of}.attn", "wo_a")]
        for g in range(GROUPS):
            product = torch.empty(9, 128)
            deep_gemm.fp8_gemm_nt((a[0][:, g], a[1][:, g]), (wo_a[0][g], wo_a[1][g]), product)
            z[:, g] = product
        expected = linear(z.flatten(1), operand(f"{of}.attn", "wo_b"))
        assert torch.equal(layer.attn._o_proj(o, torch.arange(9)), expected), of
        each = [[operand(f"{of}.ffn.experts.{e}", *names) for e in range(EXPERTS)] for names in (("w1", "w3"), ("w2",))]
        w1, w2 = ([torch.stack(part) for part in zip(*of_all, strict=True)] for of_all in each)
        x, ids = 4 * torch.randn(9, HIDDEN), torch.rand(9, EXPERTS, dtype=torch.float32).argsort(1)[:, :2].int()
        weights, routed = torch.rand(9, 2, dtype=torch.float32), layer.ffn.experts.routed_experts
        with set_forward_context(None, config):
            got = routed.quant_method.apply(routed, x, weights, ids, None, None)
        assert torch.equal(got, experts(x, ids, weights, w1, w2, limit=LIMIT)), of
        assert not torch.equal(got, experts(x, ids, weights, w1, w2)), "the limit has no effect"
        kinds.add(type(routed.quant_method.moe_kernel.fused_experts).__name__)
    print(*sorted(kinds))


def main(folder: Path, form: str) -> int:
    """Make the checkpoint, load it and compare."""
    switches = ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "TRITON_INTERPRET", "TORCHDYNAMO_DISABLE")
    os.environ |= dict.fromkeys(switches, "1")
    from safetensors.torch import save_file

    torch.manual_seed(1)
    tensors = checkpoint(form)
    save_file(tensors, folder / "model.safetensors")
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    quantized |= {"scale_fmt": "ue8m0"} if form == "fp4" else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "expert_dtype": form, "quantization_config": quantized}))
    try:
        pretend_a_hopper()
    except ImportError as error:
        print(f"vLLM cannot be imported here: {error}")
        return 5
    compare(*load(folder), tensors)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))

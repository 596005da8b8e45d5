"""A correct call of each public function that has tensor arguments, for all tests that loop over functions.

A function's example is in this file, or in `EXAMPLES` of the file that tests its family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from helpers import int32
from torch import Tensor
from torch.utils._pytree import tree_map

import deep_gemm
from deep_gemm import per_block_cast_to_fp8, per_token_cast_to_fp8

M, N, K, GROUPS = 8, 32, 256, 2
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A correct call, which writes every element of its results."""

    name: str
    """The public function's name."""
    given: Arguments
    refuses: str = ""
    """Operands (sfw: scales of w) that are refused if autograd computed them from a tensor that requires a gradient."""
    writes: str = ""
    """Outputs, which must be refused if they require a gradient."""

    @property
    def function(self) -> Any:
        """Return the function itself."""
        return getattr(deep_gemm, self.name)

    def without_output(self) -> Example:
        """Return the call without its output, so that the function makes one; keep an output that must be passed."""
        parameters = inspect.signature(self.function).parameters
        gone = {name for name in self.writes.split() if parameters[name].default is None}
        return replace(self, given={name: x for name, x in self.given.items() if name not in gone})

    def called(self, **instead: Any) -> tuple[Any, Arguments]:
        """Call the function with copies of its arguments, or with `instead`'s; return the result and the arguments."""
        given = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.given) | instead
        return self.function(**given), given

    def call(self, argument: str, instead: Callable[[Tensor], Any]) -> Any:
        """Call the function with copies of its arguments, but with `instead(x)` in place of this argument x."""
        name = argument if argument in self.given else argument.removeprefix("sf")
        value = self.given[name]
        if isinstance(value, tuple):
            values, scales = value
            value = (instead(values), scales) if name == argument else (values, instead(scales))
            return self.called(**{name: value})[0]
        return self.called(**{name: instead(value)})[0]


@cache
def all_examples() -> list[Example]:
    """Return the examples of this file and of all files of tests."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    named = [path.stem for path in paths if "\nEXAMPLES = [" in path.read_text()]
    return [example for name in named for example in import_module(name).EXAMPLES]


def bf16(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def turned(operand: Any) -> Any:
    """Swap the last two dimensions of a tensor, or of values and scales."""
    return tuple(x.mT for x in operand) if isinstance(operand, tuple) else operand.mT


def dense(family: str, a: Any, b: Any, refuses: str = "") -> Iterator[Example]:
    """Yield examples of a product in its four majors."""
    for major in ("nt", "nn", "tn", "tt"):
        given = {"a": turned(a) if major[0] == "t" else a, "b": turned(b) if major[1] == "n" else b, "d": D}
        yield into(f"{family}_{major}", given, refuses)


into = partial(Example, writes="d")
X, HALF, D = torch.ones(M, K), bf16(M, K), bf16(M, N)
A, W = per_token_cast_to_fp8(X), per_block_cast_to_fp8(torch.ones(GROUPS, N, K))
B, B_ROWS = (W[0][0], W[1][0]), per_token_cast_to_fp8(torch.ones(N, K))
BF16_WEIGHTS = {"w1": bf16(GROUPS, 2 * N, K), "w2": bf16(GROUPS, K, N)}
W1, W2 = per_block_cast_to_fp8(torch.ones(GROUPS, 2 * N, K)), per_block_cast_to_fp8(torch.ones(GROUPS, K, N))
ROUTED = {"topk_ids": torch.zeros(M, 1, dtype=torch.int64), "topk_weights": torch.ones(M, 1)}
ROWS = deep_gemm.expert_rows(ROUTED["topk_ids"], GROUPS)
STACKED, COUNTED = {"d": D, "grouped_layout": int32(*[0] * M)}, {"d": bf16(GROUPS, M, N), "masked_m": int32(M, M)}
KS, SUMS, WORDS = {"ks": [K]}, torch.zeros(1, M, N), torch.zeros(1, 4, dtype=torch.int32)
X_K, Y_K = deep_gemm.k_grouped_cast_to_fp8(X, [K]), deep_gemm.k_grouped_cast_to_fp8(torch.ones(N, K), [K])
HEADS = per_token_cast_to_fp8(torch.ones(M, GROUPS, K))
KEYS = {"kv": (fp8(16, 32), torch.ones(16)), "weights": torch.ones(4, 8)}
RANGES = {"cu_seq_len_k_start": int32(0, 0, 0, 0), "cu_seq_len_k_end": int32(16, 16, 16, 16)}
CONTEXTS, TABLE = int32(70, 70)[:, None], int32(0, 1, 2, 3).view(2, 2)
PAGED = {"kv_cache": torch.zeros(4, 64, 1, 36, dtype=torch.uint8), "weights": torch.ones(2, 8), "max_context_len": 70}
PAGED |= {"context_lens": CONTEXTS, "block_table": TABLE, "schedule_meta": torch.zeros(3, 2, dtype=torch.int32)}
FP4, ONE_BLOCK = torch.zeros(N, K // 2, dtype=torch.int8), torch.ones(M, 1)

EXAMPLES = [
    *dense("fp8_gemm", A, B, "a"),
    *dense("bf16_gemm", HALF, bf16(N, K)),
    *dense("cublaslt_gemm", HALF, bf16(N, K)),
    into("wgrad_gemm_fp8_fp8_fp32_nt", {"a": A, "b": B_ROWS, "d": torch.zeros(M, N)}),
    into("fp8_gemm_nt_skip_head_mid", {"a": A, "b": B, "d": bf16(M, 40), "head_splits": [16, 8, 16]}),
    into("m_grouped_fp8_gemm_nt_contiguous", {"a": A, "b": W, **STACKED}),
    into("m_grouped_fp8_gemm_nn_contiguous", {"a": A, "b": turned(W), **STACKED}),
    into("m_grouped_fp8_gemm_nt_masked", {"a": per_token_cast_to_fp8(torch.ones(GROUPS, M, K)), "b": W, **COUNTED}),
    into(
        "k_grouped_fp8_gemm_nt_contiguous",
        {"a": X_K, "b": Y_K, "d": SUMS, **KS, "ks_tensor": int32(K), "c": SUMS.clone()},
    ),
    into(
        "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", {"a": (X_K[0], X_K[1].t()), "b": (Y_K[0], Y_K[1].t()), "d": SUMS, **KS}
    ),
    into("fp8_einsum", {"expr": "bhr,hdr->bhd", "d": bf16(M, GROUPS, N), "a": HEADS, "b": W}),
    into("m_grouped_bf16_gemm_nt_contiguous", {"a": HALF, "b": bf16(GROUPS, N, K), **STACKED}),
    into("m_grouped_bf16_gemm_nn_contiguous", {"a": HALF, "b": bf16(GROUPS, K, N), **STACKED}),
    into("m_grouped_bf16_gemm_nt_masked", {"a": bf16(GROUPS, M, K), "b": bf16(GROUPS, N, K), **COUNTED}),
    into(
        "k_grouped_bf16_gemm_tn_contiguous",
        {"a": bf16(K, M), "b": bf16(K, N), "d": SUMS, "ks_cpu": [K], "grouped_layout": int32(K)},
    ),
    into("einsum", {"expr": "bmk,bnk->mn", "a": bf16(2, M, K), "b": bf16(2, N, K), "d": D}),
    into("einsum", {"expr": "bhr,hdr->bhd", "a": bf16(M, 2, K), "b": bf16(2, N, K), "d": bf16(M, 2, N)}),
    into("batched_syrk", {"a": bf16(2, M, K), "d": bf16(2, M, M)}),
    into("batched_symm", {"a": bf16(2, M, M), "b": bf16(2, M, M), "d": bf16(2, M, M)}),
    Example(
        "tf32_hc_prenorm_gemm",
        {"a": HALF, "b": torch.ones(8, K), "d": torch.zeros(M, 8), "sqr_sum": torch.zeros(M)},
        writes="d sqr_sum",
    ),
    Example("fp8_mqa_logits", {"q": fp8(4, 8, 32), **KEYS, **RANGES}),
    Example("fp8_fp4_mqa_logits", {"q": (fp8(4, 8, 32), None), **KEYS, **RANGES}),
    Example("fp8_paged_mqa_logits", {"q": fp8(2, 1, 8, 32), **PAGED}),
    Example("fp8_fp4_paged_mqa_logits", {"q": (fp8(2, 1, 8, 32), None), **PAGED}),
    Example("get_paged_mqa_logits_metadata", {"context_lens": CONTEXTS, "block_kv": 64, "num_sms": 2}),
    Example("linear", {"x": X, "w": B, "bias": torch.ones(N), "out": D}, "sfw", "out"),
    Example("experts", {"x": X, **ROUTED, "out": bf16(M, K), "w1": W1, "w2": W2}, "x topk_weights sfw2", "out"),
    Example("experts", {"x": X, **ROUTED, "out": bf16(M, K), **BF16_WEIGHTS}, "x topk_weights w1 w2", "out"),
    Example("selected_logprobs", {"hidden": HALF, "weight": bf16(N, K), "ids": torch.zeros(M, dtype=torch.int64)}),
    Example("silu_mul_cast_to_fp8", {"x": X, "row_weights": torch.ones(M)}, "x row_weights"),
    Example("silu_mul_cast_to_fp8", {"x": torch.ones(GROUPS, M, K), "masked_m": int32(M, M)}),
    Example("silu_mul_cast_to_fp8", {"x": X, "ends": int32(M)}),
    Example("silu_mul_cast_to_fp8", {"x": X}, "x"),
    Example("expert_rows", {"topk_ids": ROUTED["topk_ids"], "num_experts": GROUPS}),
    Example("gather_cast_to_fp8", {"x": X, "rows": ROWS}, "x"),
    Example(
        "gather_weighted",
        {"y": X, "out": bf16(M, K), "rows": ROWS, "topk_weights": ROUTED["topk_weights"]},
        "y topk_weights",
        "out",
    ),
    Example("per_token_cast_to_fp8", {"x": torch.ones(GROUPS, M, K), "masked_m": int32(M, M)}),
    *(Example(f"per_{block}_cast_to_fp8", {"x": X}, "x") for block in ("token", "channel", "block")),
    Example("per_token_cast_to_fp8", {"gran_k": 0, "x": X}, "x"),
    Example("per_tensor_cast_to_fp8", {"x": X}, "x"),
    Example("per_tensor_cast_to_fp8", {"x": X, "scale": torch.ones(1)}, "x scale"),
    Example("per_token_cast_to_fp8", {"use_ue8m0": True, "use_packed_ue8m0": True, "x": X}, "x"),
    Example("per_custom_dims_cast_to_fp8", {"x": X, "dims": (1,)}, "x"),
    Example("cast_both_to_fp8", {"x": X}, "x"),
    Example("k_grouped_cast_to_fp8", {"x": X, **KS}, "x"),
    Example("cast_back_from_fp8", {"x": A[0], "sf": A[1]}, "x sf"),
    Example("per_token_cast_to_fp4", {"x": X}, "x"),
    Example("quantize_mxfp4", {"w": X}, "w"),
    Example("cast_back_from_fp4", {"packed": FP4, "sf": torch.ones(N, 2)}),
    Example("transpose_packed_fp4", {"packed": FP4}),
    *(Example("get_mn_major_tma_aligned_tensor", {"sf": sf}, "sf") for sf in (A[1], ONE_BLOCK)),
    Example("transform_sf_into_required_layout", {"sf": A[1], "mn": M, "k": K, "recipe": (1, 128)}, "sf"),
    Example(
        "transform_sf_into_required_layout",
        {"is_sfa": True, "sf": ONE_BLOCK, "mn": M, "k": 128, "recipe": (1, 128, 128)},
        "sf",
    ),
    Example("pack_ue8m0_to_int", {"x": torch.ones(1, 4)}, "x"),
    Example("unpack_ue8m0_from_int", {"packed": WORDS}),
    Example("get_mn_major_tma_aligned_packed_ue8m0_tensor", {"sf": ONE_BLOCK}, "sf"),
    Example(
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        {"sf": torch.ones(2, M), "grouped_layout": None, "ks_cpu": [K], "gran_k": 128, "k_alignment": 128},
        "sf",
    ),
]

"""Calls into deep_gemm by releases of engines on Hopper, with operands in the engines' layouts.

`arguments` is the text of a call's arguments, with names that its family draws; `right` tells whether the values of its
result are right. Forms of a family run in order, and later forms may use earlier results. `ELSEWHERE` lists calls that
engines make only on other GPUs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from . import operands
from .operands import WRITTEN, Drawn

VLLM, SGLANG, LMDEPLOY = "vLLM 0.26-0.33", "SGLang 0.5.23", "LMDeploy 0.18"
ALL = f"{VLLM}, {SGLANG}, {LMDEPLOY}"


class Form(NamedTuple):
    """One form of a call."""

    function: str
    arguments: str
    releases: str
    right: str
    """An expression that is true if the call returned and wrote the right results; `result` is the returned value."""
    gives: str = ""
    """A name under which later forms use the result."""

    @property
    def keywords(self) -> set[str]:
        """Return the names of the call's keyword arguments."""
        call = ast.parse(f"f({self.arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        return {str(keyword.arg) for keyword in call.keywords}


class Family(NamedTuple):
    """Forms that share drawn operands."""

    draw: Callable[[], Drawn]
    forms: tuple[Form, ...]

    def run(self) -> Iterator[tuple[Form, bool]]:
        """Run each call, and yield it with True if its values are right."""
        names = {**vars(operands), **self.draw()}
        for form in self.forms:
            for name in names.keys() & WRITTEN:
                names[name].fill_(torch.nan)
            names["result"] = eval(f"deep_gemm.{form.function}({form.arguments})", names)
            if form.gives:
                names[form.gives] = names["result"]
            yield form, bool(eval(form.right, names))


_DENSE = "near(d, x, w)"
_STACKED = "near_rows(d, x, w, ids)"
_COUNTED = "near_counted(d, x, w, counts)"
_HEADS = "near(d.transpose(0, 1), x.transpose(0, 1), w)"
_FREE, _NARROW, _ONE, _FOUR = (f"right_logits({name}, result)" for name in ("free", "narrow", "one", "four"))
_MIXED = "deep_gemm.calc_diff(y, mixed) < 2e-3"  # FP8 between the products
_BUFFER = "buf.x, buf.x_sf, buf.topk_idx, buf.topk_weights"
_FP4 = "near_{0}(d, x, w_fp4, {1})"
_BF16 = "near_{0}(d, bf16, w_bf16, {1})"

# fmt: off
FAMILIES = {
    "dense": Family(operands.dense,
        (
            Form("fp8_gemm_nt", "(a, sfa), (b, sfb), d, disable_ue8m0_cast=True", VLLM, _DENSE),
            Form("fp8_gemm_nt", "(a, sfa), (b, sfb), d", SGLANG, _DENSE),
            Form("fp8_gemm_nt", "(a, sfa), (b, sfb), d, recipe=(1, 128, 128)", SGLANG, _DENSE),
            Form("fp8_gemm_nt", "(a, a32), (b, b32), d, recipe=(1, 32, 32)", SGLANG, "near(d, x_32, w_32)"),
            Form("fp8_gemm_nt", "(a, sfa), (b, sfb), d, None", LMDEPLOY, _DENSE),
            Form("fp8_fp4_gemm_nt", "(a, a32), (b, row32), d, recipe_a=(1, 32), recipe_b=(1, 32), disable_ue8m0_cast=False", SGLANG, "near(d, x_32, w_row32)"),
            Form("bf16_gemm_nt", "bf16, w_bf16, d_fp32", SGLANG, "near(d_fp32, bf16, w_bf16)"),
            Form("bf16_gemm_nn", "bf16, w_bf16.t(), d", SGLANG, "near(d, bf16, w_bf16)"),
            Form("cublaslt_gemm_nt", "bf16, w_bf16, d", VLLM, "near(d, bf16, w_bf16)"),
        ),
    ),
    "rows of groups": Family(operands.stacked,
        (
            Form("m_grouped_fp8_gemm_nt_contiguous", "(a, sfa), (b, sfb), d, ids", f"{SGLANG}, {LMDEPLOY}", _STACKED),
            Form("m_grouped_fp8_gemm_nt_contiguous", "(a, sfa), (b, sfb), d, ids, disable_ue8m0_cast=True", VLLM, _STACKED),
            Form("m_grouped_fp8_gemm_nt_contiguous", "(a, sfa), (b, sfb), d, ends, use_psum_layout=True, disable_ue8m0_cast=True", "vLLM 0.32-0.33", _STACKED),
            Form("m_grouped_fp8_gemm_nt_contiguous", "(a, sfa), (fp4, fp4_fp32), d, ids, recipe_a=(1, 128), recipe_b=(1, 32)", SGLANG, _FP4.format("rows", "ids")),
            Form("transform_sf_into_required_layout", "fp4_fp32, 160, 256, (1, 32), 3, disable_ue8m0_cast=True", f"{VLLM}, likewise", "result.shape == (3, 160, 8)", "fp4_laid"),
            Form("m_grouped_fp8_fp4_gemm_nt_contiguous", "(a, sfa), (fp4.view(torch.int8), fp4_laid), d, ids, recipe_a=(1, 128), recipe_b=(1, 32), use_psum_layout=False, disable_ue8m0_cast=True", f"{VLLM}, where its gate lets it: for Blackwell alone", _FP4.format("rows", "ids")),
            Form("m_grouped_bf16_gemm_nt_contiguous", "bf16, w_bf16, d, ids", f"{SGLANG}, {LMDEPLOY}", _BF16.format("rows", "ids")),
        ),
    ),
    "counted rows": Family(operands.counted,
        (
            Form("fp8_m_grouped_gemm_nt_masked", "(a, sfa), (b, sfb), d, counts, 8, disable_ue8m0_cast=True", "vLLM 0.26-0.29", _COUNTED),
            Form("m_grouped_fp8_gemm_nt_masked", "(a, sfa), (b, sfb), d, counts, 8, disable_ue8m0_cast=True", "vLLM 0.30-0.33", _COUNTED),
            Form("m_grouped_fp8_gemm_nt_masked", "(a, sfa), (b, sfb), d, counts, 8", LMDEPLOY, _COUNTED),
            Form("fp8_m_grouped_gemm_nt_masked", "(a, sfa), (b, sfb), d, masked_m=counts, expected_m=8", SGLANG, _COUNTED),
            Form("fp8_m_grouped_gemm_nt_masked", "(a, sfa), (fp4, fp4_fp32), d, counts, 8, recipe_a=(1, 128), recipe_b=(1, 32)", SGLANG, _FP4.format("counted", "counts")),
            Form("m_grouped_bf16_gemm_nt_masked", "bf16, w_bf16, d, counts, 8", f"{SGLANG}, {LMDEPLOY}", _BF16.format("counted", "counts")),
            Form("m_grouped_bf16_gemm_nt_masked", "bf16, w_bf16, d, masked_m=counts, expected_m=8", SGLANG, _BF16.format("counted", "counts")),
        ),
    ),
    "heads": Family(operands.of_heads,
        (
            Form("fp8_einsum", '"bhr,hdr->bhd", (a, sfa), (b, sfb), d, recipe=(1, 128, 128)', f"{VLLM}, {SGLANG}", _HEADS),
            Form("fp8_einsum", '"bhr,hdr->bhd", (a, sfa), (b, sfb), d', SGLANG, _HEADS),
        ),
    ),
    "logits": Family(operands.many_logits,
        (
            Form("fp8_fp4_mqa_logits", "(q, None), kv, weights, starts, ends, clean_logits=False", "vLLM 0.26-0.32", _FREE),
            Form("fp8_fp4_mqa_logits", "(q, None), kv, weights, starts, ends, 70", "vLLM 0.33", _NARROW),
            Form("fp8_mqa_logits", "q, kv, weights, starts, ends, clean_logits=False", SGLANG, _FREE),
            Form("fp8_mqa_logits", "q, kv, weights, starts, ends, clean_logits=False, max_seqlen_k=70", SGLANG, _NARROW),
            Form("fp8_fp4_mqa_logits", "(q, None), kv, weights, starts, ends, False, 70, logits_dtype=torch.float32", SGLANG, _NARROW),
            Form("fp8_fp4_mqa_logits", "q=(q, None), kv=kv, weights=weights, cu_seq_len_k_start=starts, cu_seq_len_k_end=ends, clean_logits=False, max_seqlen_k=70, logits_dtype=torch.float32", LMDEPLOY, _NARROW),
        ),
    ),
    "logits of pages": Family(operands.paged_logits,
        (
            Form("get_num_sms", "", ALL, "result >= 1"),
            Form("get_paged_mqa_logits_metadata", "contexts, 64, 132", ALL, "result.shape == (133, 2)", "meta"),
            Form("get_paged_mqa_logits_metadata", "four.contexts, 64, 132 // 2", "vLLM 0.28-0.33", "result.shape == (67, 2)", "half"),
            Form("fp8_fp4_paged_mqa_logits", "(q, None), cache, weights, contexts, table, meta, 320, clean_logits=False", "vLLM 0.26-0.32", _ONE),
            Form("fp8_fp4_paged_mqa_logits", "(q, None), cache, weights, contexts, table, meta, 320", "vLLM 0.33", _ONE),
            Form("fp8_fp4_paged_mqa_logits", "(four.q, None), four.cache, four.weights, four.contexts, four.table, half, 320", "vLLM 0.33", _FOUR),
            Form("fp8_paged_mqa_logits", "q, cache, weights, contexts, table, meta, 320, clean_logits=False", SGLANG, _ONE),
            Form("fp8_fp4_paged_mqa_logits", "(q, None), cache, weights, contexts, table, meta, 320, False, logits_dtype=torch.float32", SGLANG, _ONE),
            Form("fp8_paged_mqa_logits", "q, cache, weights, contexts, table, meta, 320, False", LMDEPLOY, _ONE),
            Form("fp8_fp4_paged_mqa_logits", "q=(q, None), kv_cache=cache, weights=weights, context_lens=contexts, block_table=table, schedule_meta=meta, max_context_len=320, clean_logits=False, logits_dtype=torch.float32", LMDEPLOY, _ONE),
        ),
    ),
    "hyper-connections": Family(operands.prenorm,
        tuple(
            Form("tf32_hc_prenorm_gemm", arguments, releases, "right_prenorm(d, squares, a, b)")
            for arguments, releases in (("a, b, d, squares, 4", VLLM), ("a, b, d, squares, num_splits=4", SGLANG))
        ),
    ),
    "mega MoE": Family(operands.mixture,
        (
            Form("get_symm_buffer_for_mega_moe", 'None, 4, 128, 2, 512, 256, num_shared_experts=0, mma_type="fp8xfp4", activation="swiglu"', SGLANG, "result.x.shape == (128, 512)", "buf"),
            Form("mega_moe_pre_dispatch_sm90", f"x, ids, p, {_BUFFER}, num_tokens=3, group_size=128, routed_scaling_factor=2.5", SGLANG, "buf.topk_idx[:4].tolist() == [[0, 3], [2, -1], [3, 0], [-1, -1]]"),
            Form("fp8_mega_moe", 'y, l1, l2, buf, recipe=(128, 128, 128), activation="swiglu", activation_clamp=None, fast_math=True', SGLANG, _MIXED),
            Form("mega_moe_pre_dispatch_sm90", f"x[:0], ids[:0], p[:0], {_BUFFER}, num_tokens=0, group_size=128, routed_scaling_factor=2.5", SGLANG, "bool((buf.topk_idx == -1).all())"),
            Form("fp8_mega_moe", 'y[:1], l1, l2, buf, recipe=(128, 128, 128), activation="swiglu", activation_clamp=10.0, fast_math=True', SGLANG, "not y[0].any()"),
        ),
    ),
    "scales and settings": Family(operands.nothing,
        (
            Form("get_mn_major_tma_aligned_tensor", "sf", ALL, "torch.equal(result, sf) and result.stride() == (1, 4)"),
            Form("transform_sf_into_required_layout", "sf=sf_rows[0, :2, :2], mn=256, k=256, recipe=(1, 128, 128), num_groups=None, is_sfa=False, disable_ue8m0_cast=True", VLLM, "torch.equal(result, sf_rows[0, :2, :2])"),
            Form("transform_sf_into_required_layout", "sf_rows[0, :, :2], num_groups=None, mn=160, k=256, recipe=(1, 128, 128), is_sfa=True", SGLANG, "torch.equal(result, sf_rows[0, :, :2])"),
            Form("pack_ue8m0_to_int", "sf[:, :4]", VLLM, "torch.equal(deep_gemm.unpack_ue8m0_from_int(result), sf[:, :4])"),
            Form("get_mn_major_tma_aligned_packed_ue8m0_tensor", "sf", f"{VLLM}, {SGLANG}", "torch.equal(deep_gemm.unpack_ue8m0_from_int(result)[:, :6], sf)"),
            Form("get_tma_aligned_size", "33, 4", f"{VLLM}, {SGLANG}", "result == 36"),
            Form("ceil_div", "33, 4", LMDEPLOY, "result == 9"),
            Form("align", "33, 4", SGLANG, "result == 36"),
            Form("per_block_cast_to_fp8", "x, use_ue8m0=False, gran_k=128", SGLANG, "deep_gemm.calc_diff(cast_back_from_fp8(*result), x) < 1e-3"),
            Form("per_token_cast_to_fp8", "x, use_ue8m0=False, gran_k=32, use_packed_ue8m0=False", LMDEPLOY, "deep_gemm.calc_diff(cast_back_from_fp8(*result, 32), x) < 1e-3"),
            Form("get_mk_alignment_for_contiguous_layout", "", f"{VLLM}, {SGLANG}", "result == 128"),
            Form("get_m_alignment_for_contiguous_layout", "", LMDEPLOY, "result == 128"),
            Form("get_theoretical_mk_alignment_for_contiguous_layout", "600, 4", VLLM, "result % 128 == 0"),
            Form("get_theoretical_mk_alignment_for_contiguous_layout", "150", SGLANG, "result % 128 == 0"),
            Form("get_theoretical_mk_alignment_for_contiguous_layout", "expected_m=600, num_groups=4", SGLANG, "result % 128 == 0"),
            Form("get_theoretical_mk_alignment_for_contiguous_layout", "", LMDEPLOY, "result == 128"),
            Form("set_mk_alignment_for_contiguous_layout", "128", ALL, "deep_gemm.get_mk_alignment_for_contiguous_layout() == 128"),
            Form("set_num_sms", "deep_gemm.get_num_sms()", f"{VLLM}, {SGLANG}", "result is None"),
            Form("set_pdl", "True", ALL, "deep_gemm.get_pdl()"),
            Form("get_compile_mode", "", SGLANG, "result == 0"),
            Form("set_compile_mode", "0", SGLANG, "deep_gemm.get_compile_mode() == 0"),
            Form("get_deterministic_algorithms", "", SGLANG, "result is True"),
            Form("use_deterministic_algorithms", "True", SGLANG, "deep_gemm.get_deterministic_algorithms()"),
        ),
    ),
}
# fmt: on

BLACKWELL, UNUSED, THEIRS = "for Blackwell alone", "looked up, called by nobody there", "the engine's own"
_OF_BLACKWELL = """
    NVFP4SymmBuffer SymmBuffer _C bf16_mega_gate bf16_mega_moe fp4_fp4_mega_moe fp8_fp4_mega_moe
    fp8_fp4_paged_sparse_mqa_logits fp8_fp4_sparse_mqa_logits get_bf16_mega_gate_config get_block_m_for_mega_moe
    get_block_m_for_nvfp4_mega_moe get_paged_sparse_mqa_logits_metadata get_sparse_mqa_logits_metadata mega_mhc
    mega_moe_pre_dispatch nvfp4_mega_moe set_masked_standard_layout_memory_budget
    transform_ue4m3_sf_into_required_layout transform_weights_for_mega_moe
"""
ELSEWHERE = {
    **dict.fromkeys(_OF_BLACKWELL.split(), BLACKWELL),
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": UNUSED,
    "PDL_ENABLED": THEIRS,
    "fp8_gemm_nt is_deep_gemm_e8m0_used": THEIRS,
    "fp8_fp4_paged_mqa_logits max_model_len": THEIRS,
    "per_block_cast_to_fp8 block_size": THEIRS,
    "fp8_einsum use_128x4_sfd_layout": BLACKWELL,
    "m_grouped_fp8_fp4_gemm_nt_contiguous recipe": "LMDeploy's, for Blackwell alone",
    "get_paged_mqa_logits_metadata indices": BLACKWELL,
    "fp8_fp4_paged_mqa_logits indices": BLACKWELL,
}
"""Attributes without a known call on Hopper, or an attribute and its keyword, with the reason."""


def table() -> str:
    """Return the table of calls for docs/engines.md."""
    rows = ["| call | releases |", "|---|---|"]
    for name, family in FAMILIES.items():
        rows += [f"| **{name}** | |"]
        rows += [f"| `{form.function}({form.arguments})` | {form.releases} |" for form in family.forms]
    return "\n".join(rows) + "\n"


def lacking(uses: dict[str, set[str]]) -> list[str]:
    """List attributes, and keywords with their attribute, that are neither in the table nor in `ELSEWHERE`."""
    known: dict[str, set[str]] = {}
    for form in (form for family in FAMILIES.values() for form in family.forms):
        known.setdefault(form.function, set()).update(form.keywords)
    found = []
    for name in sorted(uses.keys() - {name for name, why in ELSEWHERE.items() if " " not in name}):
        if name not in known:
            found.append(name)
            continue
        pairs = (f"{name} {keyword}" for keyword in sorted(uses[name] - known[name]))
        found += [pair for pair in pairs if pair not in ELSEWHERE]
    return found

"""FP8 and BF16 matrix products for NVIDIA Hopper: dense, and grouped for mixtures of experts.

All functions work on tensors of torch. For CUDA tensors, products run kernels, which are compiled when they are first
needed. For CPU tensors, the same functions run the reference, which defines the arithmetic. Start with `fp8_gemm_nt`.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .compat.absent import refuse as _refuse
from .compat.installed import is_command as _is_command, warn_of_others as _warn_of_others
from .compat.installed import without_torch as _without_torch

if TYPE_CHECKING or not _is_command():  # the command line imports modules itself, to start fast
    try:
        from torch.distributed import is_available as _is_available
    except ModuleNotFoundError as error:
        _without_torch(error)

    # Type checkers treat a name as public if it is imported "as" itself.
    from . import convert as convert, nn as nn, testing as testing, utils as utils
    from .casts.fp4 import quantize_mxfp4 as quantize_mxfp4
    from .casts.fp8 import (
        cast_both_to_fp8 as cast_both_to_fp8,
        k_grouped_cast_to_fp8 as k_grouped_cast_to_fp8,
        per_tensor_cast_to_fp8 as per_tensor_cast_to_fp8,
    )
    from .core.check.layout import cell_div as cell_div
    from .core.operators import register_at_need as _register_at_need
    from .core.settings import (
        get_batch_invariant as get_batch_invariant,
        get_compile_mode as get_compile_mode,
        get_deterministic_algorithms as get_deterministic_algorithms,
        get_num_sms as get_num_sms,
        get_pdl as get_pdl,
        get_tc_util as get_tc_util,
        set_batch_invariant as set_batch_invariant,
        set_block_size_multiple_of as set_block_size_multiple_of,
        set_compile_mode as set_compile_mode,
        set_ignore_compile_dims as set_ignore_compile_dims,
        set_num_sms as set_num_sms,
        set_pdl as set_pdl,
        set_tc_util as set_tc_util,
        shutdown as shutdown,
        use_deterministic_algorithms as use_deterministic_algorithms,
    )
    from .gemm.api.bf16_dense import (
        bf16_gemm_nn as bf16_gemm_nn,
        bf16_gemm_nt as bf16_gemm_nt,
        bf16_gemm_tn as bf16_gemm_tn,
        bf16_gemm_tt as bf16_gemm_tt,
    )
    from .gemm.api.bf16_einsum import batched_symm as batched_symm, batched_syrk as batched_syrk, einsum as einsum
    from .gemm.api.bf16_grouped import (
        bf16_m_grouped_gemm_nt_masked as bf16_m_grouped_gemm_nt_masked,
        k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous,
        m_grouped_bf16_gemm_nn_contiguous as m_grouped_bf16_gemm_nn_contiguous,
        m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked,
    )
    from .gemm.api.dense import (
        cublaslt_gemm_nn as cublaslt_gemm_nn,
        cublaslt_gemm_nt as cublaslt_gemm_nt,
        cublaslt_gemm_tn as cublaslt_gemm_tn,
        cublaslt_gemm_tt as cublaslt_gemm_tt,
        fp8_fp4_gemm_nn as fp8_fp4_gemm_nn,
        fp8_fp4_gemm_nt as fp8_fp4_gemm_nt,
        fp8_fp4_gemm_tn as fp8_fp4_gemm_tn,
        fp8_fp4_gemm_tt as fp8_fp4_gemm_tt,
        fp8_gemm_nn as fp8_gemm_nn,
        fp8_gemm_nt as fp8_gemm_nt,
        fp8_gemm_tn as fp8_gemm_tn,
        fp8_gemm_tt as fp8_gemm_tt,
        gemm_fp8_fp8_bf16_nt as gemm_fp8_fp8_bf16_nt,
        wgrad_gemm_fp8_fp8_fp32_nt as wgrad_gemm_fp8_fp8_fp32_nt,
    )
    from .gemm.api.grouped import (
        fp8_m_grouped_gemm_nt_masked as fp8_m_grouped_gemm_nt_masked,
        k_grouped_fp8_gemm_nt_contiguous as k_grouped_fp8_gemm_nt_contiguous,
        k_grouped_wgrad_gemm_fp8_fp8_fp32_nt as k_grouped_wgrad_gemm_fp8_fp8_fp32_nt,
        m_grouped_fp8_fp4_gemm_nn_contiguous as m_grouped_fp8_fp4_gemm_nn_contiguous,
        m_grouped_fp8_fp4_gemm_nt_contiguous as m_grouped_fp8_fp4_gemm_nt_contiguous,
        m_grouped_fp8_fp4_gemm_nt_masked as m_grouped_fp8_fp4_gemm_nt_masked,
        m_grouped_fp8_gemm_nn_contiguous as m_grouped_fp8_gemm_nn_contiguous,
        m_grouped_fp8_gemm_nt_contiguous as m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_masked as m_grouped_fp8_gemm_nt_masked,
        m_grouped_gemm_fp8_fp8_bf16_nt_contiguous as m_grouped_gemm_fp8_fp8_bf16_nt_contiguous,
        m_grouped_gemm_fp8_fp8_bf16_nt_masked as m_grouped_gemm_fp8_fp8_bf16_nt_masked,
    )
    from .gemm.api.heads import fp8_einsum as fp8_einsum, fp8_gemm_nt_skip_head_mid as fp8_gemm_nt_skip_head_mid
    from .gemm.explain import explain as explain
    from .hyper.api import tf32_hc_prenorm_gemm as tf32_hc_prenorm_gemm
    from .indexer.api import (
        fp8_fp4_mqa_logits as fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits as fp8_fp4_paged_mqa_logits,
        fp8_mqa_logits as fp8_mqa_logits,
        fp8_paged_mqa_logits as fp8_paged_mqa_logits,
        get_paged_mqa_logits_metadata as get_paged_mqa_logits_metadata,
    )
    from .linear.api import linear as linear
    from .moe.activation import silu_mul_cast_to_fp8 as silu_mul_cast_to_fp8
    from .moe.api import experts as experts, experts_workspace_bytes as experts_workspace_bytes
    from .moe.routing import (
        ExpertRows as ExpertRows,
        expert_rows as expert_rows,
        gather_cast_to_fp8 as gather_cast_to_fp8,
        gather_weighted as gather_weighted,
    )
    from .nn.logprobs import selected_logprobs as selected_logprobs
    from .nn.refit import refit_ as refit_
    from .testing import bench as bench, bench_kineto as bench_kineto, calc_diff as calc_diff
    from .utils.dist import init_dist as init_dist, uneven_all_gather as uneven_all_gather
    from .utils.layout import *  # noqa: F403  both modules' names are here too
    from .utils.math import *  # noqa: F403

    _register_at_need(f"{__name__}.ops")

    if _is_available():  # some builds of torch have no torch.distributed
        from . import distributed as distributed
        from .distributed import (
            SM90SymmBuffer as SM90SymmBuffer,
            fp8_fp4_mega_moe as fp8_fp4_mega_moe,
            fp8_mega_moe as fp8_mega_moe,
            get_symm_buffer_for_mega_moe as get_symm_buffer_for_mega_moe,
            get_symm_buffer_for_sm90_mega_moe as get_symm_buffer_for_sm90_mega_moe,
            mega_moe_pre_dispatch_sm90 as mega_moe_pre_dispatch_sm90,
            transform_weights_for_mega_moe as transform_weights_for_mega_moe,
            transform_weights_for_mega_moe_sm90 as transform_weights_for_mega_moe_sm90,
        )

_warn_of_others()

__version__ = "0.2.0"

if not TYPE_CHECKING:  # `__getattr__` would tell a type checker that every name exists
    _MODULES = "convert", "distributed", "nn", "testing", "utils"
    _names = sorted(globals().items())
    __all__ = [name for name, x in _names if name in _MODULES or (callable(x) and not name.startswith("_"))]

    def __getattr__(name: str) -> object:
        """Import `ops`. For another name, raise an error, which names a substitute for names of related libraries."""
        return _import_module(".ops", __name__) if name == "ops" else _refuse(__name__, name)

"""Grouped products of BF16: along m (rows of tokens) and along k (weight gradients)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ...compat.forms import accepts_names
from ...core.call import FREE_ROWS
from ...core.check import checks
from ...core.replay import FIXED
from .. import bf16_depths
from ..ask.bf16 import bf16_contiguous_problem, bf16_depths_problem, bf16_masked_problem
from ..launch import run as launch
from ..product import run
from .bf16_dense import bf16_product

CONTIGUOUS = {
    major: bf16_product(
        f"m_grouped_bf16_gemm_{major}_contiguous",
        partial(bf16_contiguous_problem, major=major),
        ("use_psum_layout", "ensure_zero_padding"),
        ("grouped_layout", "bias"),
        has_gradients=True,
        free=(FREE_ROWS, FIXED, FREE_ROWS, FREE_ROWS),
    )
    for major in ("nt", "nn")
}
OF_EXPERTS = replace(CONTIGUOUS["nt"], ask=partial(CONTIGUOUS["nt"].ask, alignment=1))
BEHIND_CAST = replace(OF_EXPERTS, on_gpu=partial(launch, is_behind_cast=True))
ACTIVATED = replace(
    OF_EXPERTS,
    ask=partial(OF_EXPERTS.ask, activates=True),
    options=(*OF_EXPERTS.options, "limit"),
    inputs=("grouped_layout",),
    as_operator=lambda product, a, b, d, c, said, *_: product.compute(
        product.ask(a, b, d, **product.inputs_of(c, said))
    ),
)
"""The first product of experts, with group ends and no bias, followed by SwiGLU. Torch has no operator for it."""
MASKED = bf16_product(
    "m_grouped_bf16_gemm_nt_masked", bf16_masked_problem, ("expected_m",), ("masked_m", "bias"), has_gradients=True
)
DEPTHS = bf16_product(
    "k_grouped_bf16_gemm_tn_contiguous",
    bf16_depths_problem,
    ("ks", "use_psum_layout"),
    ("c", "grouped_layout"),
    on_gpu=bf16_depths.run,
)


def product_of_bf16_rows(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    layout: Tensor,
    bias: Tensor | None = None,
    *,
    by_ends: bool = False,
    is_behind_cast: bool = False,
) -> None:
    """Compute `product_of_stacked_rows` in BF16, or with `by_ends` `product_of_stacked_groups`."""
    run(BEHIND_CAST if is_behind_cast else OF_EXPERTS, a, b, d, layout, (by_ends, False), bias)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    grouped_layout: Tensor | None = None,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: None = None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Multiply stacked rows of tokens, each by its group's weights: `d[i] = a[i] @ b[group of i].T`.

    - `a`: `[m, k]`, contiguous along k, a multiple of 8; `b`: `[groups, n, k]`, contiguous along n or k; `d`: `[m, n]`,
      BF16 or FP32, made and returned if it is left out.
    - `grouped_layout`: int32 `[m]`, the group of each row, -1 for no group; or with `use_psum_layout=True` int32
      `[groups]`, where each group's rows end. Groups have any size, and need no padding.
      Both forms, rows without a group and `bias` are as for `m_grouped_fp8_gemm_nt_contiguous`.

    If `d` is left out, the product has gradients: of `a`, and of `b` in the type of `b`. `epilogue` must be None.

    >>> layout = torch.tensor([0, 1, -1], dtype=torch.int32)
    >>> a, b = torch.ones(3, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
    >>> m_grouped_bf16_gemm_nt_contiguous(a, b, grouped_layout=layout)[:, 0].tolist()
    [16.0, 16.0, 0.0]
    """
    if epilogue is not None:
        checks.nothing("epilogue", epilogue)
    return run(CONTIGUOUS["nt"], a, b, d, grouped_layout, (use_psum_layout, ensure_zero_padding), bias)


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    grouped_layout: Tensor | None = None,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    epilogue: None = None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Compute `m_grouped_bf16_gemm_nt_contiguous` with B `[groups, k, n]`.

    >>> a, b = torch.ones(2, 16).bfloat16(), torch.ones(1, 16, 8).bfloat16()
    >>> m_grouped_bf16_gemm_nn_contiguous(a, b, grouped_layout=torch.zeros(2, dtype=torch.int32))[0, 0].item()
    16.0
    """
    if epilogue is not None:
        checks.nothing("epilogue", epilogue)
    return run(CONTIGUOUS["nn"], a, b, d, grouped_layout, (use_psum_layout, ensure_zero_padding), bias)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    masked_m: Tensor | None = None,
    expected_m: int | None = None,
    compiled_dims: str = "nk",
    epilogue: None = None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Multiply the first `masked_m[g]` rows of each group: `d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T`.

    `a`: `[groups, max_m, k]`; `b`, `d` and gradients as for `m_grouped_bf16_gemm_nt_contiguous`, but D is
    `[groups, max_m, n]`; `masked_m`: int32 `[groups]`. Rows of D from `masked_m[g]` on are undefined. `expected_m` is a
    hint for choosing a kernel.

    >>> a, b = torch.ones(2, 3, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
    >>> m_grouped_bf16_gemm_nt_masked(a, b, masked_m=torch.tensor([3, 1], dtype=torch.int32))[:, 0, 0].tolist()
    [16.0, 16.0]
    """
    if epilogue is not None:
        checks.nothing("epilogue", epilogue)
    return run(MASKED, a, b, d, masked_m, (expected_m,), bias)


bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked


@accepts_names(ks="ks_cpu")
def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    ks_cpu: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    epilogue: None = None,
) -> Tensor | None:
    """Multiply groups along k, the weight gradients of experts: `d[g] = c[g] + a_g.T @ b_g`.

    - `a`: `[sum of ks, m]`, `b`: `[sum of ks, n]`, the groups' rows one group after another; m and n are multiples of
      8. Rows after the last group are not read.
    - `ks_cpu`: each group's number of rows, on the host. `grouped_layout`: the same numbers as an int32 tensor on the
      operands' device, or with `use_psum_layout=True` the row where each group ends. Without `ks_cpu` only the GPU
      reads the tensor: the host does not wait, and a replay of a captured graph uses the tensor's values at that time.
      Groups are cut off at the end of `a`.
    - `d`: `[groups, m, n]`, BF16 or FP32; if left out, made in C's type (FP32 without C) and returned; `c`: added in
      FP32, D itself or disjoint from D. An empty group's part of D is C, or zero.

    >>> a, b = torch.ones(24, 8).bfloat16(), torch.ones(24, 8).bfloat16()
    >>> k_grouped_bf16_gemm_tn_contiguous(a, b, ks_cpu=[16, 0, 8])[:, 0, 0].tolist()
    [16.0, 0.0, 8.0]
    """
    if epilogue is not None:
        checks.nothing("epilogue", epilogue)
    ks = None if ks_cpu is None else checks.integers("ks_cpu", ks_cpu)
    return run(DEPTHS, a, b, d, c, (ks, use_psum_layout), grouped_layout)

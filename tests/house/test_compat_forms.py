"""Call forms and names of both eras: every form states the same call, and every name that programs import is there."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm.compat.absent import INSTEAD
from deep_gemm.compat.forms import accepts_every_form

X, Y, SX, SY, OUT, LAYOUT = (torch.full((1,), float(i)) for i in range(6))


@accepts_every_form(batch_sizes="ks_tensor", first="a")
def product(a: Any, b: Any, d: Any = None, ks: Any = None, ks_tensor: Any = None, *, grouped_layout: Any = None) -> Any:
    """Its docstring."""
    return dict, {key: value for key, value in locals().items() if value is not None}


def same(got: Any, expected: dict[str, Any]) -> bool:
    """The same tensors under the same names."""
    return got.keys() == expected.keys() and all(
        all(x is y for x, y in zip(got[key], expected[key], strict=True))
        if isinstance(expected[key], tuple)
        else got[key] is expected[key]
        for key in expected
    )


PAIRS = {"a": (X, SX), "b": (Y, SY)}


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (((X, SX), (Y, SY)), {}, PAIRS),
        (((X, SX), (Y, SY), OUT), {}, {**PAIRS, "d": OUT}),
        ((X, Y, SX, SY), {}, PAIRS),
        ((X, Y, SX, SY, OUT), {}, {**PAIRS, "d": OUT}),
        ((X, Y, SX, SY, OUT, LAYOUT), {}, {**PAIRS, "d": OUT, "ks": LAYOUT}),
        ((X, Y, SX, SY), {"out": OUT, "m_indices": LAYOUT}, {**PAIRS, "d": OUT, "grouped_layout": LAYOUT}),
        (((X, SX), (Y, SY), OUT, LAYOUT), {}, {**PAIRS, "d": OUT, "ks": LAYOUT}),
        ((), {"lhs": (X, SX), "rhs": (Y, SY), "out": OUT}, {**PAIRS, "d": OUT}),
        (((X, SX),), {"rhs": (Y, SY), "d": OUT}, {**PAIRS, "d": OUT}),
        ((), {**PAIRS, "ks_cpu": LAYOUT}, {**PAIRS, "ks": LAYOUT}),
        # a function's own synonyms, also where they say otherwise than everyone's
        ((), {"first": (X, SX), "b": (Y, SY), "batch_sizes": LAYOUT}, {**PAIRS, "ks_tensor": LAYOUT}),
    ],
)
def test_every_form_is_the_same_call(args: tuple[Any, ...], kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    assert same(product(*args, **kwargs), expected)


MASKED = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked", "m_grouped_gemm_fp8_fp8_bf16_nt_masked")


@pytest.mark.parametrize("name", MASKED)
def test_an_overlap_that_is_off_changes_nothing_and_one_that_is_on_is_refused_in_words(name: str) -> None:
    function: Any = getattr(deep_gemm, name)
    contiguous: Any = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(2, 4, 128), False)
    b = deep_gemm.per_block_cast_to_fp8(torch.randn(2, 8, 128), False)
    given = a, b, None, torch.tensor([4, 4], dtype=torch.int32), 4
    off = {"enable_overlap": False, "max_block_n": 160, "signal": None}
    assert torch.equal(function(*given, **off), function(*given))
    flag = r"^enable_overlap: expected False.* --enable-single-batch-overlap$"
    for on in (off | {"enable_overlap": True, "signal": torch.zeros(1, dtype=torch.int32)}, {"signal": torch.zeros(1)}):
        with pytest.raises(NotImplementedError, match=flag):
            function(*given, **on)
    with pytest.raises(TypeError, match="enable_overlap"):
        contiguous(lhs=a, rhs=b, **off)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {**PAIRS, "d": OUT, "out": OUT}, "d: given twice in a call of product, once as out$"),
        ((), {**PAIRS, "out": OUT, "d": OUT}, "d: given twice in a call of product, once as d$"),
        ((), {"ks_tensor": OUT, "batch_sizes": OUT}, "ks_tensor: given twice .* of product, once as batch_sizes$"),
        ((), {"grouped_layout": OUT, "m_indices": OUT}, "grouped_layout: given twice .* product, once as m_indices$"),
        (((X, SX), (Y, SY), OUT), {"out": OUT}, "d: given twice in a call of product, by position and as out"),
        (((X, SX), (Y, SY)), {"lhs": (X, SX)}, "a: given twice in a call of product, by position and as lhs"),
        ((X, Y, SX, SY, OUT), {"out": OUT}, "d: given twice in a call of product, by position and as out"),
        ((X, Y, SX, SY), {"rhs": (Y, SY)}, "b: given twice in a call of product, by position and as rhs"),
        (((X, SX), (Y, SY), OUT, LAYOUT), {"ks_cpu": LAYOUT}, "ks: given twice in a call of product, by position and"),
        (((X, SX), (Y, SY), OUT), {"d": OUT, "ks_cpu": LAYOUT}, "d: given twice in a call of product, by position and"),
    ],
)
def test_an_argument_that_is_given_twice_is_a_mistake_even_with_one_value(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        product(*args, **kwargs)


def test_a_keyword_of_no_era_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'result'"):
        product((X, SX), (Y, SY), **{"result": OUT})


def test_the_callers_arguments_stay_as_they_are() -> None:
    kwargs = {"lhs": (X, SX), "rhs": (Y, SY)}
    product(**kwargs)
    assert list(kwargs) == ["lhs", "rhs"]


def test_a_function_that_takes_every_form_keeps_its_name_docstring_and_signature() -> None:
    assert (product.__name__, product.__doc__) == ("product", "Its docstring.")
    assert list(inspect.signature(product).parameters) == ["a", "b", "d", "ks", "ks_tensor", "grouped_layout"]


@pytest.mark.parametrize(("name", "dims"), [("fp8_gemm_nn", "nk"), ("fp8_gemm_tn", "mn"), ("bf16_gemm_tt", "mn")])
def test_a_function_like_another_has_its_own_name_in_errors_and_its_own_defaults(name: str, dims: str) -> None:
    function: Any = getattr(deep_gemm, name)
    assert inspect.signature(function).parameters["compiled_dims"].default == dims
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing 1 required positional argument: 'b'$"):
        function(X)


def test_what_is_given_twice_in_a_call_of_a_product_is_named() -> None:
    a, b = deep_gemm.per_token_cast_to_fp8(torch.ones(8, 16)), deep_gemm.per_block_cast_to_fp8(torch.ones(8, 16))
    d = torch.zeros(8, 8)
    call: Any = deep_gemm.gemm_fp8_fp8_bf16_nt
    with pytest.raises(ValueError, match=r"^d: given twice in a call of fp8_gemm_nt, once as out$"):
        call(a, b, d=d, out=d)
    assert not d.any()


# Names of both eras

MAJORS = ("nt", "nn", "tn", "tt")
ALIASES = {
    **{f"fp8_fp4_gemm_{major}": f"fp8_gemm_{major}" for major in MAJORS},
    "gemm_fp8_fp8_bf16_nt": "fp8_gemm_nt",
    "m_grouped_fp8_fp4_gemm_nt_contiguous": "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nn_contiguous": "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked": "m_grouped_fp8_gemm_nt_masked",
    "fp8_m_grouped_gemm_nt_masked": "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": "m_grouped_fp8_gemm_nt_masked",
    "get_col_major_tma_aligned_tensor": "get_mn_major_tma_aligned_tensor",
    "get_m_alignment_for_contiguous_layout": "get_mk_alignment_for_contiguous_layout",
    "get_k_alignment_for_contiguous_layout": "get_mk_alignment_for_contiguous_layout",
    "cell_div": "ceil_div",
}

LAYOUT_NAMES = [
    *(f"get_{of}_major_tma_aligned_tensor" for of in ("col", "mn")),
    *(f"get_{of}mn_major_tma_aligned_packed_ue8m0_tensor" for of in ("", "k_grouped_")),
    *(f"get_{of}_alignment_for_contiguous_layout" for of in ("k", "m", "mk", "theoretical_mk")),
    "set_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "transform_sf_into_required_layout",
]
MATH_NAMES = [
    *(f"per_{of}_cast_to_fp8" for of in ("block", "channel", "custom_dims", "token")),
    "cast_back_from_fp4",
    "cast_back_from_fp8",
    "pack_ue8m0_to_int",
    "per_token_cast_to_fp4",
    "transpose_packed_fp4",
    "unpack_ue8m0_from_int",
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
]
PRODUCTS_OF_2025 = [
    "gemm_fp8_fp8_bf16_nt",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    "wgrad_gemm_fp8_fp8_fp32_nt",
]

ACROSS_RANKS = ["init_dist", "uneven_all_gather"]
BENCH = ["bench", "bench_kineto", "empty_suppress", "suppress_stdout_stderr"]
NUMERIC = ["assert_bitwise_equal", "calc_diff", "count_bytes"]
TEST_UTILS = ["get_arch_major", "ignore_env", "test_filter"]
UTILS = [*ACROSS_RANKS, *LAYOUT_NAMES, *MATH_NAMES, "bench", "bench_kineto", "calc_diff"]

MODULES = {
    "deep_gemm": [
        *ALIASES.keys(),
        *ALIASES.values(),
        *UTILS,
        *PRODUCTS_OF_2025,
        *(f"cublaslt_gemm_{major}" for major in MAJORS),
        *(f"{verb}_{name}" for verb in ("get", "set") for name in ("num_sms", "tc_util", "pdl", "compile_mode")),
        "k_grouped_fp8_gemm_nt_contiguous",
        "set_block_size_multiple_of",
        "set_ignore_compile_dims",
        "batched_symm",
        "batched_syrk",
        "get_symm_buffer_for_mega_moe",
        "mega_moe_pre_dispatch_sm90",
        "shutdown",
    ],
    "deep_gemm.distributed": ["Experts", "SM90SymmBuffer", "decode_bytes", "owned_experts"],
    "deep_gemm.utils": UTILS,
    "deep_gemm.utils.dist": ["dist_print", *ACROSS_RANKS],
    "deep_gemm.utils.layout": LAYOUT_NAMES,
    "deep_gemm.utils.math": MATH_NAMES,
    "deep_gemm.testing": [*BENCH, *NUMERIC, *TEST_UTILS],
    "deep_gemm.testing.bench": BENCH,
    "deep_gemm.testing.numeric": NUMERIC,
    "deep_gemm.testing.utils": TEST_UTILS,
    "deep_gemm.jit_kernels": PRODUCTS_OF_2025,
    "deep_gemm.jit_kernels.utils": [
        "ceil_div",
        "get_col_major_tma_aligned_tensor",
        "get_m_alignment_for_contiguous_layout",
        "get_num_sms",
        "get_tma_aligned_size",
        "set_num_sms",
    ],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MODULES.items() for name in names])
def test_programs_of_either_era_find_the_name_where_they_import_it_from(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert callable(found)
    assert found is getattr(deep_gemm, name, found), "one function, whichever module it comes from"


@pytest.mark.parametrize(("older", "name"), ALIASES.items())
def test_an_older_name_is_the_same_function(older: str, name: str) -> None:
    assert getattr(deep_gemm, older) is getattr(deep_gemm, name)


@pytest.mark.parametrize("module", MODULES)
def test_a_star_import_gives_exactly_the_names_that_a_module_lists_and_help_shows_them(module: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {module} import *", names)
    found = importlib.import_module(module)
    listed, shown = vars(found).get("__all__"), pydoc.plain(pydoc.render_doc(found))
    if listed is not None:
        assert names.keys() - {"__builtins__"} == set(listed)
        assert len(listed) == len(set(listed))
    hidden = [name for name in MODULES[module] if not re.search(rf"\b{name}\b", shown)]
    assert hidden == ["empty_suppress"] * module.endswith(".bench"), "another name of contextlib.nullcontext"
    assert "SUBMODULES" not in shown
    assert names.keys().isdisjoint(("import_module", "partial", "refuse"))
    assert set(MODULES[module]) <= names.keys()


def test_every_product_takes_an_epilogue_of_none_alone() -> None:
    public = {name: getattr(deep_gemm, name) for name in vars(deep_gemm)["__all__"]}
    parameters = {name: inspect.signature(each).parameters for name, each in public.items() if inspect.isfunction(each)}
    takes = {name for name, its in parameters.items() if "epilogue" in its}
    assert takes == {name for name, its in parameters.items() if "compiled_dims" in its} - {
        "fp8_gemm_nt_skip_head_mid"
    } | {"einsum", "fp8_einsum"}
    for name in takes:
        a, b = (X, SX), (Y, SY)
        given = ("bhr,hdr->bhd", a, b) if "einsum" in name else (a, b)
        with pytest.raises(NotImplementedError, match=r"^epilogue: expected None, got 3$"):
            public[name](*given, epilogue=3)


def test_arguments_go_by_names_of_other_eras() -> None:
    deep_gemm: Any = importlib.import_module("deep_gemm")  # checkers see today's names
    packed = torch.tensor([[0x7F7F7F7F]], dtype=torch.int32)
    assert deep_gemm.unpack_ue8m0_from_int(packed_sf=packed).tolist() == [[1.0] * 4]
    pairs = torch.tensor([[0x21], [0x43]], dtype=torch.int8)
    assert torch.equal(deep_gemm.transpose_packed_fp4(a=pairs), deep_gemm.transpose_packed_fp4(pairs))
    values, scales = deep_gemm.per_token_cast_to_fp8(torch.ones(2, 128))
    assert deep_gemm.cast_back_from_fp8(x_fp8=values, sf=scales).eq(1).all()
    one = torch.ones(16, 8).bfloat16()
    assert deep_gemm.k_grouped_bf16_gemm_tn_contiguous(one, one, ks=[16]).eq(16).all()
    of_words = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    assert of_words(torch.ones(1, 8), None, ks=[128], gran_k=128, k_alignment=128).eq(0x7F).all()
    with pytest.raises(NotImplementedError, match=r"^use_padded_sf_layout: expected False, got True$"):
        of_words(torch.ones(1, 8), None, [128], 128, 128, use_padded_sf_layout=True)
    with pytest.raises(NotImplementedError, match=r"^use_padded_sf_layout: expected False, got True$"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((X, SX), (Y, SY), use_padded_sf_layout=True)
    with pytest.raises(ValueError, match=r"^ks_cpu: given twice in a call of k_grouped_bf16_gemm_tn_contiguous"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(one, one, None, [16], ks=[16])


# Names that are absent


@pytest.mark.parametrize(("name", "instead"), INSTEAD.items())
@pytest.mark.parametrize("module", ["deep_gemm", "deep_gemm.utils", "deep_gemm.utils.layout", "deep_gemm.utils.math"])
def test_an_absent_name_is_absent_and_the_error_says_what_to_use_instead(module: str, name: str, instead: str) -> None:
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    assert name not in dir(found)
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}; use {instead} instead")):
        getattr(found, name)
    with pytest.raises(ImportError):
        exec(f"from {module} import {name}", {})


@pytest.mark.parametrize(("name", "instead"), INSTEAD.items())
def test_the_alternative_to_an_absent_name_exists(name: str, instead: str) -> None:
    for word in instead.replace("torch.distributed._symmetric_memory", "torch.distributed").split():
        if word.startswith("torch."):
            importlib.import_module("torch.distributed")
            found: Any = torch
            for part in word.split(".")[1:]:
                found = getattr(found, part)
        elif "_" in word and word != "deep_gemm":
            assert callable(getattr(deep_gemm, word))


def test_a_name_of_no_library_does_not_exist() -> None:
    assert not hasattr(deep_gemm, "fp8_gemm_xy")


def test_every_public_function_shows_what_it_takes_and_gives() -> None:
    """`inspect.signature` and `help` do; tests/house/client.py holds mypy to it."""
    for name in vars(deep_gemm)["__all__"]:
        function = getattr(deep_gemm, name)
        if not inspect.isfunction(function):
            continue
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD), name
            assert parameter.annotation not in (parameter.empty, "Any"), (name, parameter)
        assert signature.return_annotation not in (signature.empty, "Any", "Request"), name
        assert function.__annotations__["return"] == signature.return_annotation, name

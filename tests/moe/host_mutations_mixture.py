"""Ways to break prepared calls of `experts`, for host_mutations.py. Trials are tests, whose kernels torch computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


def trial(name: str, *parameters: Any, patches: bool = False) -> None:
    """Run a test of test_mixture.py; `patches`: it takes a MonkeyPatch too."""
    import test_mixture

    with pytest.MonkeyPatch.context() as monkeypatch:
        given = test_mixture.install(monkeypatch), *([monkeypatch] if patches else []), *parameters
        try:
            getattr(test_mixture, f"test_{name}")(*given)
        except pytest.fail.Exception as error:  # a mistake that is not refused: for Python it is no error
            raise AssertionError(str(error)) from error


def values_trial() -> None:
    import test_mixture

    trial("prepared_calls_have_the_bits_of_calls_by_tensors", test_mixture.USUAL, {"limit": 0.5})


VALUES, LONG, APART, BEGINS = "mixture", "mixture of long results", "mixture's parts", "mixture's dependent launches"
OTHERS, OF_WEIGHTS, FAR = "mixture by tensors", "mixture of other weights", "mixture of rows far apart"
MISTAKES, IN_WEIGHTS = "mixture's mistakes", "mixture's mistakes in weights"
TRIALS: dict[str, Callable[[], None]] = {
    VALUES: values_trial,
    LONG: partial(trial, "a_result_that_is_longer_than_what_led_to_its_operand_has_room", patches=True),
    APART: partial(trial, "parts_lie_apart_and_take_no_more_than_is_said"),
    BEGINS: partial(trial, "kernels_begin_beside_the_end_of_the_one_before_as_by_tensors", patches=True),
    OTHERS: partial(trial, "what_was_not_prepared_goes_by_tensors", patches=True),
    OF_WEIGHTS: partial(trial, "weights_that_others_are_made_of_go_by_tensors", "a class", 1, patches=True),
    FAR: partial(trial, "rows_that_lie_far_apart_take_no_memory"),
    MISTAKES: partial(trial, "mistakes_are_those_of_calls_by_tensors"),
    IN_WEIGHTS: partial(trial, "mistakes_in_weights_are_those_of_calls_by_tensors"),
}
OF = "moe.mixture"
SWAPS: tuple[tuple[str, ...], ...] = (
    (OF, "max(self.end, apart(self.values + BF16_BYTES * rows * hidden))", "max(self.end, 0)", LONG),
    (OF, "(self.part(WORD_BYTES * experts) for _", "(self.part(0) for _", APART),
    ("moe.prepared", "self.part(SCALE_BYTES * scales)", "self.part(scales)", APART),
    (OF, "2 * BF16_BYTES * rows * intermediate", "BF16_BYTES * rows * intermediate", APART),
    (OF, "        pitch = WORD_BYTES * pitch_of_scales(rows)\n", "        pitch = WORD_BYTES * rows\n", VALUES),
    (OF, "ids.data_ptr(), at + here.counts, ends,", "ids.data_ptr(), ends, ends,", VALUES),
    (OF, "values, scales, row_of, pitch)", "values, scales, at + here.token_of, pitch)", VALUES),
    (OF, "(values, scales), (h, at))", "(values, scales), (h, ends))", VALUES),
    (OF, "middle, of_middle, ends, pitch)", "middle, of_middle, at + here.counts, pitch)", VALUES),
    (OF, "(middle, of_middle), (values, at))", "(values, of_middle), (values, at))", VALUES),
    (OF, "self.sum.launch(tokens, values,", "self.sum.launch(tokens, h,", VALUES),
    (OF, "p.gating, self.place", "p.gating._replace(limit=None), self.place", VALUES),
    (OF, "each.stride(), dtype", "(each.shape[1], 1), dtype", OTHERS),
    (OF, "(0, each.shape[1])", "(FEW, each.shape[1])", FAR),
    (OF, "gathered(x, self.topk, is_dependent=True)", "gathered(x, self.topk)", BEGINS),
    (OF, "self.place, is_dependent=True)", "self.place)", BEGINS),
    (OF, "weights, out, is_dependent=True)", "weights, out)", BEGINS),
    (OF, "rows_at.product(w, is_behind_cast=True)", "rows_at.product(w)", BEGINS),
    (OF, "0 < tokens * self.topk < MANY_ROWS", "0 < tokens * self.topk", OTHERS),
    (OF, "and tokens == ids.shape[0] == p.shape[0]", "and tokens == ids.shape[0]", MISTAKES),
    (OF, "and tokens == ids.shape[0] == p.shape[0]", "and tokens == p.shape[0]", MISTAKES),
    (OF, "and addresses % ADDRESS_ALIGNMENT == 0", "and True", OTHERS),
    (OF, "addresses |= out[0].data_ptr()", "addresses |= 0", MISTAKES),
    (OF, "and are_whole(ids, p)", "and True", MISTAKES),
    (OF, "and Weights((w1, sfw1), (w2, sfw2)).have_whole_scales()", "and True", IN_WEIGHTS),
    (OF, "and computes_on(self.device)", "and True", OTHERS),
    (OF, "out[0].shape[0] != tokens or ", "", MISTAKES),
    (OF, " or self._may_overlap(tokens, tensors)", "", MISTAKES),
    (OF, "map(byte_span, (*p.w1, *p.w2))", "each.nbytes for each in (*p.w1, *p.w2)", IN_WEIGHTS),
    (OF, "*(recipe_b or ()), w1, w2", "w1, w2", IN_WEIGHTS),
    (OF, "*(recipe_b or ()), w1, w2", "*(recipe_b or ())", IN_WEIGHTS),
    (OF, "cuts_gradient(given[:7], given[7:])", "cuts_gradient((given[0], given[2]), given[7:])", IN_WEIGHTS),
    (OF, "cuts_gradient(given[:7], given[7:])", "cuts_gradient(given[:7], ())", MISTAKES),
    (OF, "0 < p.topk_ids.numel() < MANY_ROWS", "0 < p.topk_ids.numel()", OTHERS),
    (OF, "for x in (p.topk_ids, p.topk_weights)", "for x in (p.topk_weights,)", OTHERS),
    (OF, "has_aligned_rows(x) and x.stride(0) >= x.shape[1]", "x.stride(0) >= x.shape[1]", OTHERS),
    (OF, "has_aligned_rows(x) and x.stride(0) >= x.shape[1]", "has_aligned_rows(x)", MISTAKES),
    (OF, " and not handles_operators(*tensors)", "", OF_WEIGHTS),
)

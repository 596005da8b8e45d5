"""The indexer's logits compared with torch, and with an estimate of DeepGEMM. Timed cold, on a GPU."""

from __future__ import annotations

from rich.table import Table

from . import table
from .contenders import OURS
from .kinds import Kind, Kinds
from .layers import EAGER
from .logits_paged import METADATA_SHAPES, PAGED_SHAPES, metadata, paged_mqa_logits
from .logits_prefill import MQA_SHAPES, mqa_logits
from .report import Report

METHOD = (
    "random normal operands; mqa_logits: shapes are queries, keys, heads, depth, each query sees the keys up to its "
    "own, which is one of the last, FP32 logits; mqa_logits_clean: with -inf elsewhere; torch: dequantized to BF16, in "
    "parts of at most 2^28 scores, up to 2^34 scores in all; paged_mqa_logits: sequences, tokens of each, heads, "
    "depth, context, from 0.7 to 1.3 of it, with the mean that DeepGEMM was timed with, in pages of 64 keys in any "
    "order; paged_metadata: sequences, tokens, context; our results checked against the reference for some queries"
)
KINDS = Kinds(
    {
        "mqa_logits": Kind(MQA_SHAPES, MQA_SHAPES[1:2] + MQA_SHAPES[8:9], mqa_logits),
        "mqa_logits_clean": Kind(MQA_SHAPES[2:3], (), lambda shape: mqa_logits(shape, clean=True)),
        "paged_mqa_logits": Kind(PAGED_SHAPES, PAGED_SHAPES[:2], paged_mqa_logits),
        "paged_metadata": Kind(METADATA_SHAPES, METADATA_SHAPES[:1], metadata),
    },
    repeats=15,
    seconds=0.05,
    cool_seconds=0.25,
)
COLUMNS = (
    table.KIND,
    table.shape("shape"),
    table.ours(),
    table.UPSTREAM._replace(heading="DeepGEMM*"),
    table.Column("ratio", lambda line: f"{to:.2f}" if (to := line.over(line.upstream_us)) else ""),
    table.Column("floor", lambda line: table.percent(line.row.fraction_of_floor)),
    table.time(EAGER, "torch"),
    table.TFLOPS,
    table.TB_PER_S,
)
"""Our times, and the times of the DeepGEMM estimate, the floor and torch."""


def tables(report: Report) -> list[Table]:
    """Tabulate our times and the comparisons."""
    return [table.table_of(report.kind, COLUMNS, table.lines_of(report))]


BENCH = KINDS.bench("attention", METHOD, "2048,8192,64,128", (OURS, EAGER), tables)

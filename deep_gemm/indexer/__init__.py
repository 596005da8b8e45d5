"""The indexer of sparse attention: its logits tell each token which keys to attend to."""

from .api import (
    fp8_fp4_mqa_logits as fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits as fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits as fp8_mqa_logits,
    fp8_paged_mqa_logits as fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata as get_paged_mqa_logits_metadata,
)

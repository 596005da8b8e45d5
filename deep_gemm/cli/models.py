"""Sizes of models, and the products that a GPU runs for them. `compile --model` compiles and `grid.py` measures these.

The sizes are from the `config.json` beside each model's public weights, under these names:

    deepseek-v3          deepseek-ai/DeepSeek-V3, and R1 and V3.1 of the same sizes
    deepseek-v3.2        deepseek-ai/DeepSeek-V3.2-Exp
    deepseek-v4-flash    deepseek-ai/DeepSeek-V4-Flash: FP8, its experts FP4
    deepseek-v4-pro      deepseek-ai/DeepSeek-V4-Pro: FP8, its experts FP4
    deepseek-v4.1-flash  deepseek-ai/DeepSeek-V4.1-Flash: only its FP4 experts and their router
    glm-4.5              zai-org/GLM-4.5, and 4.6 and 4.7 of the same sizes
    glm-4.5-air          zai-org/GLM-4.5-Air
    glm-5                zai-org/GLM-5
    gpt-oss-120b         openai/gpt-oss-120b: BF16, its experts FP4; the caller must add the experts' biases
    kimi-k2              moonshotai/Kimi-K2-Instruct
    mimo-v2.5-pro        XiaomiMiMo/MiMo-V2.5-Pro: only its FP4 experts and their router
    qwen3-30b-a3b        Qwen/Qwen3-30B-A3B-FP8
    qwen3-235b           Qwen/Qwen3-235B-A22B-FP8

Weights are merged and split as in serving engines. Projections of the same input are one weight. Heads and widths are
split among `tp` ranks. Whole experts are split among `ep` ranks; if `ep` is 1, each expert's width among `tp` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 128
"""Columns or rows of a weight that share a scale. A rank must have whole blocks of this size."""
FP4_BLOCK = 32
"""Columns of an FP4 weight that share a scale."""
INDEX_DEPTH = 128
"""Depth of an indexer's heads, in all models here."""


class Weight(NamedTuple):
    """One rank's share of a weight: `[n, k]`, or `[num_groups, n, k]`."""

    name: str
    n: int
    k: int
    num_groups: int = 1
    groups: str | None = None
    """Groups, by the names of `explain`: "ids" and "counts" for experts, or "heads"."""
    is_bf16: bool = False
    is_fp32: bool = False
    """True if D is FP32."""
    rows_per_token: int = 1
    is_gated: bool = False
    """True for gate and up of experts: with many rows, their product may also compute the activation."""
    is_fp4: bool = False
    has_row_scales: bool = False
    """True if each whole row of FP8 has a scale, as in llm-compressor's FP8_DYNAMIC and in ModelOpt's FP8."""


FORMS = "published", "rows", "bf16"
"""Forms of a model's weights: as in its checkpoint named above, FP8 with a scale for each whole row, or BF16."""


@dataclass(frozen=True)
class Latent:
    """Attention through latent vectors. An indexer with `index_heads` heads chooses the tokens to attend to."""

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int
    index_heads: int = 0

    def weights(self, hidden: int, tp: int) -> Iterator[Weight]:
        """Yield the weights of a layer."""
        heads = shared("attention heads", self.heads, tp)
        yield Weight("q_a and kv_a", self.q_rank + self.kv_rank + self.rope, hidden)
        yield Weight("q_b", heads * (self.nope + self.rope), self.q_rank)
        yield Weight("kv_b", heads * (self.nope + self.v), self.kv_rank)
        yield Weight("o", hidden, heads * self.v)
        if self.index_heads:
            yield Weight("indexer q_b", self.index_heads * INDEX_DEPTH, self.q_rank)
            yield Weight("indexer k", INDEX_DEPTH, hidden)
            yield Weight("indexer weights", self.index_heads, hidden, is_bf16=True)


@dataclass(frozen=True)
class Grouped:
    """Attention in which several heads of queries share a head of keys and values."""

    heads: int
    kv_heads: int
    head: int
    is_bf16: bool = False
    index_heads = 0

    def weights(self, hidden: int, tp: int) -> Iterator[Weight]:
        """Yield the weights of a layer."""
        heads = shared("attention heads", self.heads, tp)
        kv_heads = shared("heads of keys", self.kv_heads, tp) if tp <= self.kv_heads else 1  # ranks then share a head
        yield Weight("qkv", (heads + 2 * kv_heads) * self.head, hidden, is_bf16=self.is_bf16)
        yield Weight("o", hidden, heads * self.head, is_bf16=self.is_bf16)


@dataclass(frozen=True)
class Compressed:
    """Attention to one head of keys. `o_groups` narrow matrices and then a wide matrix multiply its output."""

    heads: int
    head: int
    q_rank: int
    o_rank: int
    o_groups: int
    index_heads: int

    def weights(self, hidden: int, tp: int) -> Iterator[Weight]:
        """Yield the weights of a layer."""
        heads, groups = shared("attention heads", self.heads, tp), shared("groups of the output", self.o_groups, tp)
        yield Weight("q_a and kv", self.q_rank + self.head, hidden)
        yield Weight("q_b", heads * self.head, self.q_rank)
        yield Weight("o_a", self.o_rank, self.heads * self.head // self.o_groups, groups, "heads")
        yield Weight("o_b", hidden, groups * self.o_rank)
        yield Weight("indexer q_b", self.index_heads * INDEX_DEPTH, self.q_rank)
        yield Weight("indexer weights", self.index_heads, hidden, is_bf16=True)


@dataclass(frozen=True)
class Model:
    """A model's sizes."""

    hidden: int
    vocabulary: int
    """Number of words of the output head; 0 without a head."""
    attention: Latent | Grouped | Compressed | None
    """None if attention and indexer are not considered."""
    experts: int
    expert_width: int
    experts_per_token: int
    shared_width: int = 0
    """Width of the shared expert, which computes every token."""
    mlp_width: int = 0
    """Width of layers without experts; 0 if there is no such layer."""
    experts_are_fp4: bool = False
    streams: int = 0
    """Number of streams of hyper-connections."""

    def weights(self, tp: int = 1, ep: int = 1, form: str = FORMS[0]) -> Iterator[Weight]:
        """Yield one rank's share of every weight that this package's products multiply.

        With form "bf16", only experts: engines multiply other weights themselves. With "rows", heads keep their blocks.
        """
        for weight in self._weights(tp, ep):
            if form == "published" or weight.is_bf16 or (form == "rows" and weight.groups == "heads"):
                yield weight
            elif form == "rows":
                yield weight._replace(is_fp4=False, has_row_scales=True)
            elif weight.groups in ("ids", "counts"):
                yield weight._replace(is_fp4=False, is_bf16=True)

    def _weights(self, tp: int, ep: int) -> Iterator[Weight]:
        if self.attention:
            yield from self.attention.weights(self.hidden, tp)
        if self.mlp_width:
            yield from self._gated("dense", blocks_shared("width of a dense layer", self.mlp_width, tp))
        if self.shared_width and (ep == 1 or self.shared_width % (tp * BLOCK) == 0):
            yield from self._gated("shared expert", blocks_shared("width of the shared expert", self.shared_width, tp))
        if self.shared_width and ep > 1 and tp > 1:  # some engines then copy the expert to each rank
            yield from self._gated("whole shared expert", self.shared_width)
        experts, is_fp4 = shared("experts", self.experts, ep), self.experts_are_fp4
        block = FP4_BLOCK if is_fp4 else BLOCK
        width = self.expert_width if ep > 1 else blocks_shared("width of an expert", self.expert_width, tp, block)
        for groups in ("ids", "counts"):
            often = self.experts_per_token if groups == "ids" else 1
            down = Weight("experts down", self.hidden, width, experts, groups, rows_per_token=often, is_fp4=is_fp4)
            yield down._replace(name="experts gate and up", n=2 * width, k=self.hidden, is_gated=groups == "ids")
            yield down
        for is_fp32 in (False, True):
            yield Weight("router", self.experts, self.hidden, is_bf16=True, is_fp32=is_fp32)
        if self.vocabulary:
            yield Weight("head", shared("words of the vocabulary", self.vocabulary, tp), self.hidden, is_bf16=True)

    def _gated(self, name: str, width: int) -> Iterator[Weight]:
        yield Weight(f"{name} gate and up", 2 * width, self.hidden)
        yield Weight(f"{name} down", self.hidden, width)


MODELS = {
    "deepseek-v3": Model(7168, 129280, Latent(128, 1536, 512, 128, 64, 128), 256, 2048, 8, 2048, 18432),
    "deepseek-v3.2": Model(7168, 129280, Latent(128, 1536, 512, 128, 64, 128, 64), 256, 2048, 8, 2048, 18432),
    "deepseek-v4-flash": Model(
        4096, 129280, Compressed(64, 512, 1024, 1024, 8, 64), 256, 2048, 6, 2048, experts_are_fp4=True, streams=4
    ),
    "deepseek-v4-pro": Model(
        7168, 129280, Compressed(128, 512, 1536, 1024, 16, 64), 384, 3072, 6, 3072, experts_are_fp4=True, streams=4
    ),
    "deepseek-v4.1-flash": Model(5120, 0, None, 384, 2304, 6, experts_are_fp4=True),
    "glm-4.5": Model(5120, 151552, Grouped(96, 8, 128), 160, 1536, 8, 1536, 12288),
    "glm-4.5-air": Model(4096, 151552, Grouped(96, 8, 128), 128, 1408, 8, 1408, 10944),
    "glm-5": Model(6144, 154880, Latent(64, 2048, 512, 192, 64, 256, 32), 256, 2048, 8, 2048, 12288),
    "gpt-oss-120b": Model(2880, 201088, Grouped(64, 8, 64, is_bf16=True), 128, 2880, 4, experts_are_fp4=True),
    "kimi-k2": Model(7168, 163840, Latent(64, 1536, 512, 128, 64, 128), 384, 2048, 8, 2048, 18432),
    "mimo-v2.5-pro": Model(6144, 0, None, 384, 2048, 8, experts_are_fp4=True),
    "qwen3-30b-a3b": Model(2048, 151936, Grouped(32, 4, 128), 128, 768, 8),
    "qwen3-235b": Model(4096, 151936, Grouped(64, 4, 128), 128, 1536, 8),
}


def model_named(name: str) -> Model:
    """Return the model of this name."""
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def shared(what: str, number: int, ranks: int) -> int:
    """Return one rank's share of a number."""
    if number % ranks:
        raise ValueError(f"tp, ep: expected a divisor of {number} {what}, got {ranks}")
    return number // ranks


def blocks_shared(what: str, width: int, ranks: int, block: int = BLOCK) -> int:
    """Return one rank's share of a width. The share must be whole blocks of scales, unless it is the whole width."""
    if ranks > 1 and width % (ranks * block):
        raise ValueError(f"tp: expected ranks that share {width}, the {what}, in blocks of {block}, got {ranks}")
    return width // ranks

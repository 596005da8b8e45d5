"""The indexer's logits, for contiguous keys and for keys in pages. All sums are exact."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from deep_gemm import indexer
from deep_gemm.core.settings import get_num_sms

from ..draw import FP8_NAN, Draw
from ..trial import Right, Tensors, Trial
from . import fp8

FP8 = torch.float8_e4m3fn


def weighted(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) * weight: `[tokens, heads, depth]`, `[keys, depth]` -> `[tokens, keys]`."""
    scores = torch.einsum("thd,kd->thk", q.float(), keys.float()).relu_()
    return torch.einsum("thk,th->tk", scores, weights)


def heads_and_depth(draw: Draw) -> tuple[int, int]:
    """Draw mostly the pairs that models have, because any other pair needs a kernel that takes seconds to compile."""
    if draw.flag(0.85):
        return draw.rng.choice((32, 64)), 128
    return draw.rng.choice((8, 16, 32, 64)), draw.rng.choice((32, 64, 128))


class MqaLogits(Trial):
    """`fp8_mqa_logits`."""

    kind = "mqa_logits"
    faults: ClassVar = dict.fromkeys(("q", "k", "scales", "weights", "starts", "ends"), fp8.INTS)

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.tokens, self.keys = draw.size(1, 300), draw.size(1, 3000)
        self.heads, self.depth = heads_and_depth(draw)
        self.clean, self.dtype = draw.flag(), draw.rng.choice((torch.float32, torch.bfloat16))
        self.columns = 0 if self.clean or draw.flag() else draw.size(1, self.keys)
        device = draw.device
        self.operands = {
            "q": torch.empty(self.tokens, self.heads, self.depth, device=device, dtype=torch.float32).to(FP8),
            "k": torch.empty(self.keys, self.depth, device=device, dtype=torch.float32).to(FP8),
            "scales": torch.empty(self.keys, device=device, dtype=torch.float32),
            "weights": torch.empty(self.tokens, self.heads, device=device, dtype=torch.float32),
            "starts": torch.empty(self.tokens, dtype=torch.int32, device=device),
            "ends": torch.empty(self.tokens, dtype=torch.int32, device=device),
        }

    def fill(self) -> None:
        """Draw causal ranges, or any ranges: empty, reversed, or beyond the keys."""
        x, draw = self.operands, self.draw
        fp8.fill_values(draw, x["q"], exact=True)
        fp8.fill_values(draw, x["k"], exact=True)
        x["scales"].copy_(draw.powers_of_two(x["scales"].shape, -1, 1))
        x["weights"].copy_(draw.integers(x["weights"].shape, -2, 2))
        if draw.flag(0.3):
            x["starts"].zero_()
            x["ends"].copy_(torch.arange(self.tokens) + (self.keys - self.tokens + 1))
        else:
            edge = self.keys // 4 + 2
            for name in ("starts", "ends"):
                x[name].copy_(draw.integers((self.tokens,), -edge, self.keys + edge, torch.int32))

    def call(self, x: Tensors) -> Tensors:
        """Compute the logits; the call makes them."""
        said = self.clean, self.columns, self.dtype
        operands = (x["q"], None), (x["k"], x["scales"]), x["weights"], x["starts"], x["ends"]
        return {"logits": indexer.fp8_fp4_mqa_logits(*operands, *said)}

    def right(self) -> dict[str, Right]:
        """Compute all logits together; logits outside of a range are -inf or undefined."""
        x = self.operands
        logits = weighted(x["q"], x["k"], x["weights"]) * x["scales"]
        position = torch.arange(self.keys, device=logits.device)
        begins, ends = x["starts"].clamp(min=0)[:, None], x["ends"].clamp(max=self.keys)[:, None]
        if not self.columns:
            inside = (position >= begins) & (position < ends)
            if self.clean:
                return {"logits": Right(logits.masked_fill(~inside, -torch.inf))}
            return {"logits": Right(logits, None, inside)}
        key = torch.arange(self.columns, device=logits.device) + begins
        return {"logits": Right(logits.gather(1, key.long().clamp(max=self.keys - 1)), None, key < ends)}


class PagedLogits(Trial):
    """`fp8_paged_mqa_logits` with a schedule of `get_paged_mqa_logits_metadata`."""

    kind = "paged_mqa_logits"
    faults: ClassVar = {
        **dict.fromkeys(("q", "cache", "weights"), fp8.INTS),
        **dict.fromkeys(("contexts", "table"), "dtype device"),
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.sequences, self.next_n = draw.rng.choice((1, 2, 7, 40)), draw.rng.randint(1, 4)
        self.heads, self.depth = heads_and_depth(draw)
        self.page, self.dtype = draw.rng.choice((32, 64)), draw.rng.choice((torch.float32, torch.bfloat16))
        self.columns, self.is_flat = draw.size(1, 3000), draw.flag(0.3)
        self.pages = -(-self.columns // self.page) + 1
        self.blocks = self.sequences * self.pages + 3
        row, device = self.depth + 4, draw.device
        stride = self.page * row + draw.rng.choice((0, 16, 64))
        self.memory = torch.full((self.blocks, stride), FP8_NAN, dtype=torch.uint8, device=device)
        self.operands = {
            "q": torch.empty(
                self.sequences, self.next_n, self.heads, self.depth, device=device, dtype=torch.float32
            ).to(FP8),
            "cache": self.memory.as_strided((self.blocks, self.page, 1, row), (stride, row, row, 1)),
            "weights": torch.empty(self.sequences * self.next_n, self.heads, device=device, dtype=torch.float32),
            "contexts": torch.empty(
                (self.sequences,) if self.is_flat else (self.sequences, self.next_n), dtype=torch.int32, device=device
            ),
            "table": torch.empty(self.sequences, self.pages, dtype=torch.int32, device=device),
        }

    def fill(self) -> None:
        """Draw pages in a random order; table entries after a context name no page."""
        x, draw = self.operands, self.draw
        fp8.fill_values(draw, x["q"], exact=True)
        keys, bytes_of_keys = self.page * self.depth, 4 * self.page
        self.memory[:, :keys] = draw.integers((self.blocks, keys), -2, 2).to(FP8).view(torch.uint8)
        scales = draw.powers_of_two((self.blocks, self.page), -1, 1)
        self.memory[:, keys : keys + bytes_of_keys] = scales.view(torch.uint8)
        x["weights"].copy_(draw.integers(x["weights"].shape, -2, 2))
        contexts = draw.integers(x["contexts"].shape, 0, self.columns, torch.int32)
        contexts[
            torch.rand(contexts.shape, generator=draw.generator, device=contexts.device, dtype=torch.float32) < 0.1
        ] = 0
        x["contexts"].copy_(contexts)
        order = torch.randperm(self.blocks, generator=draw.generator, device=draw.device).int()
        table = order[: self.sequences * self.pages].view(self.sequences, self.pages)
        longest = contexts.reshape(self.sequences, -1).amax(1)
        behind = torch.arange(self.pages, device=draw.device) * self.page >= longest[:, None]
        x["table"].copy_(table.masked_fill(behind, -0x11111111))

    def call(self, x: Tensors) -> Tensors:
        """Compute the logits; the call makes them."""
        schedule = indexer.get_paged_mqa_logits_metadata(x["contexts"], self.page, get_num_sms())
        operands = (x["q"], None), x["cache"], x["weights"], x["contexts"], x["table"], schedule, self.columns
        return {"logits": indexer.fp8_fp4_paged_mqa_logits(*operands, logits_dtype=self.dtype)}

    def right(self) -> dict[str, Right]:
        """Compute the logits sequence by sequence."""
        x, keys = self.operands, self.page * self.depth
        rows = self.sequences * self.next_n
        exact = torch.zeros(rows, self.columns, device=self.draw.device, dtype=torch.float32)
        contexts = x["contexts"].view(self.sequences, -1).expand(self.sequences, self.next_n)
        table = x["table"].clamp(0, self.blocks - 1).long()
        for sequence in range(self.sequences):
            pages = self.memory[table[sequence]]
            values = pages[:, :keys].reshape(-1, self.depth).view(FP8)[: self.columns]
            scales = pages[:, keys : keys + 4 * self.page].contiguous().view(torch.float32).reshape(-1)[: self.columns]
            at = slice(sequence * self.next_n, (sequence + 1) * self.next_n)
            # Keys after a context may be NaN; their logits are not compared.
            exact[at] = weighted(x["q"][sequence], values, x["weights"][at]) * scales
        written = torch.arange(self.columns, device=exact.device) < contexts.reshape(-1, 1)
        return {"logits": Right(exact, None, written)}

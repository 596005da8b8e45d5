"""Casts of weights, made from one read for forward and backward, and kept until the weights change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from ..core.check.checks import Operand
from ..core.check.layout import SCALE_BLOCK
from ..linear.backward import cast_both_ways, cast_transposed, cast_turned_rows


class Kept(NamedTuple):
    """A weight's storage, held so that no new storage can reuse its address; its version when cast; both casts."""

    storage: torch.UntypedStorage
    version: int
    in_order: Operand
    turned: Operand


_LOCK = threading.Lock()
_OF: dict[tuple[object, ...], Kept] = {}
"""Kept casts by weight. Backward runs in autograd's threads; if it recomputes, it uses aliases of parameters."""
_BLOCKS: list[bool] = []
"""One item for each open block of `keep_casts`: True if the block was opened during the capture of a CUDA graph."""


@contextmanager
def keep_casts() -> Iterator[None]:
    """Cast each weight of `Linear` and `Experts` once inside the block, for forward and backward alike.

    Use it if several batches run between two steps of an optimizer, or to save a third of the casts' time. Casts take
    2 bytes of memory for each element of these weights. A weight that changes is cast again: torch counts changes, but
    not changes through `.data`. All casts are dropped when a torch optimizer steps, and when the block ends. A CUDA
    graph captured in a block casts weights in each replay, unless the whole block is inside the capture.

    >>> layer, batches = Linear(32, 16), torch.randn(4, 8, 32)
    >>> with keep_casts():
    ...     for x in batches:
    ...         layer(x).square().mean().backward()
    """
    hook = register_optimizer_step_post_hook(lambda *_: _forget())
    with _LOCK:
        _BLOCKS.append(_is_capturing())
    try:
        yield
    finally:
        hook.remove()
        with _LOCK:
            _BLOCKS.pop()
            if not _BLOCKS:
                _OF.clear()


Weight = Tensor | Operand
"""A weight, or its kept casts."""


def for_forward(w: Weight, gran_k: int = SCALE_BLOCK) -> Weight:
    """Return the kept forward cast of a weight, or the weight itself."""
    kept = None if isinstance(w, tuple) else _kept(w, gran_k)
    return w if kept is None else kept.in_order


def for_backward(w: Weight, gran_k: int = SCALE_BLOCK) -> Weight:
    """Return the kept backward cast of a weight, or the weight itself."""
    kept = None if isinstance(w, tuple) else _kept(w, gran_k)
    return w if kept is None else kept.turned


def cast_weight(w: Weight, gran_k: int = SCALE_BLOCK) -> Operand:
    """Cast a weight for forward if it is not cast yet: by blocks, or by whole rows if `gran_k` is 0."""
    if isinstance(w, tuple):
        return w
    return per_block_cast_to_fp8(w) if gran_k else per_token_cast_to_fp8(w, gran_k=0)


def cast_weight_back(w: Weight, gran_k: int = SCALE_BLOCK) -> Operand:
    """Cast a weight, transposed, for backward if it is not cast yet: by blocks, or by rows of its transpose."""
    if isinstance(w, tuple):
        return w
    return cast_transposed(w) if gran_k else cast_turned_rows(w)


def tensors_of(*weights: Weight | None) -> list[Tensor]:
    """List the tensors of these weights and casts."""
    return [x for w in weights if w is not None for x in (w if isinstance(w, tuple) else (w,))]


def _kept(w: Tensor, gran_k: int) -> Kept | None:
    """Find or make the casts of a parameter or its alias; return None for other tensors, and outside of a block."""
    if not _BLOCKS or _is_capturing() != _BLOCKS[0] or w.is_inference():  # torch counts no changes of inference tensors
        return None
    # The key holds no address: FSDP2 frees a gathered weight's memory, keeps its storage, and gathers elsewhere.
    storage = w.untyped_storage()
    place = storage._cdata, w.storage_offset(), w.shape, w.stride(), w.dtype, gran_k
    found = _OF.get(place)
    if found is None or found.version != w._version:
        if not isinstance(w, torch.nn.Parameter):
            return None
        both = cast_both_ways(w) if gran_k else (cast_weight(w, 0), cast_weight_back(w, 0))
        found = Kept(storage, w._version, *both)
        with _LOCK:
            _OF[place] = found
    return found


def _is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured: replays would not remake a cast that the capture found."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _forget() -> None:
    with _LOCK:
        _OF.clear()

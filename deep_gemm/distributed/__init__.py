"""A mixture whose experts are spread over the processes of a `torch.distributed` group."""

from .experts import Experts
from .message import decode_bytes, prefill_bytes
from .owners import owned_experts

__all__ = ["Experts", "decode_bytes", "owned_experts", "prefill_bytes"]

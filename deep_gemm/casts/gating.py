"""Gated activations: names, parameters, and definition by torch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..core.check.numbers import finite, positive

LEAST_SIGMOID = 2.0**-126
DEFAULTS = {"swiglu": (1.0, 0.0), "situ": (4.0, 25.0)}
"""alpha and beta of each activation if the caller passes none."""


class Gating(NamedTuple):
    """A gated activation: its name, and its parameters.

    - `swiglu`: gate * sigmoid(alpha * gate) * (up + beta), with gate clamped to at most `limit`, and up to +-`limit`.
    - `situ`: alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta).
    """

    name: str = "swiglu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def is_silu(self) -> bool:
        """Tell whether this is silu(gate) * up, with or without a limit. Products can compute it themselves."""
        return self == Gating(limit=self.limit)


def gating_of(activation: str, alpha: float | None, beta: float | None, limit: float | None) -> Gating:
    """Check the name and the parameters of an activation."""
    if not isinstance(activation, str) or activation not in DEFAULTS:
        raise ValueError(f"activation: expected one of {list(DEFAULTS)}, got {activation!r}")
    usual = DEFAULTS[activation]
    a = usual[0] if alpha is None else positive("alpha", alpha)
    if activation == "situ":
        if limit is not None:
            raise ValueError(f"limit: expected None with activation='situ', which has bounds of its own, got {limit!r}")
        return Gating(activation, a, usual[1] if beta is None else positive("beta", beta))
    b = usual[1] if beta is None else finite("beta", beta)
    return Gating(activation, a, b, None if limit is None else positive("limit", limit))


def activated(x: Tensor, gating: Gating) -> Tensor:
    """Activate rows of gate and up side by side, in FP32.

    Sigmoid and tanh are computed in FP64 and rounded to the nearest FP32 number, because the bits of torch's FP32
    sigmoid depend on an element's position in its tensor.
    """
    gate, up = (half.float() for half in x.chunk(2, dim=-1))
    if gating.name == "situ":
        bounded = gating.alpha * _tanh(gate, gating.alpha) * _sigmoid(gate.double())
        return bounded * (gating.beta * _tanh(up, gating.beta))
    if gating.limit is not None:
        gate, up = gate.clamp_max(gating.limit), up.clamp(-gating.limit, gating.limit)
    if gating.beta:
        up = up + gating.beta
    return gate * _sigmoid(gate.double() * gating.alpha) * up


def _sigmoid(x: Tensor) -> Tensor:
    sigmoid = x.sigmoid().float()
    return sigmoid.masked_fill(sigmoid < LEAST_SIGMOID, 0)


def _tanh(x: Tensor, bound: float) -> Tensor:
    return (x.double() / bound).tanh().float()

"""Judges the state after a call: values, bytes around outputs, and changed operands."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Output
from .trial import Right, Tensors, Trial


def as_bytes(x: Tensor) -> Tensor:
    """Copy the bytes of a tensor with any strides."""
    return torch.empty(x.numel(), dtype=x.dtype, device=x.device).copy_(x.reshape(-1)).view(torch.uint8)


class Before:
    """The state of all tensors before a call."""

    def __init__(self, trial: Trial) -> None:
        self.operands = {name: x.clone() for name, x in trial.operands.items()}
        self.buffers = {name: output.buffer.clone() for name, output in trial.outputs.items()}

    def changed(self, trial: Trial) -> str | None:
        """Name an output or operand that has changed, for calls that must not change any, such as refused calls."""
        for name, output in trial.outputs.items():
            if not torch.equal(output.buffer, self.buffers[name]):
                return f"{name}: expected an unchanged output, got a changed one"
        return self.changed_operand(trial)

    def changed_operand(self, trial: Trial) -> str | None:
        """Name an operand that has changed."""
        for name, x in trial.operands.items():
            if not torch.equal(as_bytes(x), as_bytes(self.operands[name])):
                return f"{name}: expected an unchanged operand, got a changed one"
        return None

    def changed_around(self, name: str, output: Output, right: Right) -> str | None:
        """Describe a change of an output's buffer outside of the result."""
        after, before = output.buffer.clone(), self.buffers[name]
        inside, was = output.inside(after), output.inside(before)
        written = right.written if right.rest_is_kept else None
        if written is None:
            inside.copy_(was)
        else:
            inside.copy_(torch.where(written, was, inside))
        if torch.equal(after, before):
            return None
        count = int((after != before).sum())
        return f"{name}: {count} bytes were written that do not belong to the result"


def mistakes(trial: Trial, before: Before, made: Tensors) -> str | None:
    """Check results, operands and the bytes around outputs after a call; describe the first mistake, or return None."""
    if (changed := before.changed_operand(trial)) is not None:
        return changed  # checked first, because the right results depend on the operands
    right = trial.right()
    for name, expected in right.items():
        output = trial.outputs.get(name)
        if (wrong := wrong_values(name, made[name] if output is None else output.view, expected)) is not None:
            return wrong
        if output is not None and (wrong := before.changed_around(name, output, expected)) is not None:
            return wrong
    return None


def wrong_values(name: str, got: Tensor, right: Right) -> str | None:
    """Count the wrong elements, and name the first one."""
    exact = right.exact
    if got.shape != exact.shape:
        return f"{name}: expected shape {tuple(exact.shape)}, got {tuple(got.shape)}"
    if right.allowed is None:
        exact = exact.to(got.dtype)
        if got.dtype.itemsize == 1:
            is_wrong = got.view(torch.uint8) != exact.view(torch.uint8)
        else:
            is_wrong = ~((got == exact) | (got.isnan() & exact.isnan()))
    else:
        far, allowed = (got.double() - exact.double()).abs(), right.allowed
        if right.norms_along is not None:
            far, norm = (x.square().sum(right.norms_along, keepdim=True).sqrt() for x in (far, exact.double()))
            far, allowed = far.expand(exact.shape), allowed * (norm + norm.mean())
        is_wrong = ~(far <= allowed)
    if right.written is not None:
        is_wrong &= right.written
    if not bool(is_wrong.any()):
        return None
    flat = int(is_wrong.reshape(-1).int().argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, dtype=torch.int64), got.shape))
    instead = f"{got[at].double().item():.9g} instead of {exact[at].double().item():.9g}"
    return f"{name}: {int(is_wrong.sum())} of {got.numel()} elements are wrong, the first at {at}: {instead}"

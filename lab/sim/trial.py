"""A trial: a kernel, one of its configurations, a problem and a schedule, and a check of the results.

`python -m lab sim`, the sanitizers, the tests and their mutations run trials in the simulator. The soak, the benchmark
of kernels and the GPU tests run them on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from deep_gemm.core.kernel import Kernel

from .launcher import How
from .library import HostKernel, compiled


@dataclass(frozen=True, kw_only=True)
class _Gpu:
    num_sms: int | None = None
    """None: the number of CTAs in two clusters."""
    truncate: bool = False
    """True: WGMMA accumulates with the few bits that Hopper keeps; False: exactly."""
    device: str = "cpu"
    """`cpu`: runs in the simulator. `cuda`: runs on a GPU, where there is no schedule."""


def same(name: str, got: Tensor, right: Tensor) -> None:
    """Raise a ValueError with the first element that differs from the right one."""
    if not torch.equal(got, right):
        at = tuple((got != right).nonzero()[0].tolist())
        raise ValueError(f"{name}: expected {right[at]} at {at}, got {got[at]}")


class Trial(_Gpu, ABC):
    """One run of a kernel in the simulator. Subclasses are frozen dataclasses, so that processes can exchange trials.

    The fields of a subclass are its configuration, the parameters of its random problem, and the settings of the run.
    All fields but the configuration have defaults, or are drawn.
    """

    kernel: ClassVar[Kernel[Any]]
    needs_ranks: ClassVar[bool] = False
    """True: kernels of several ranks wait for each other, so only the simulator, which switches ranks, runs them."""
    config: Any
    seed: int
    schedule: str | None

    @property
    def how(self) -> How:
        """Return the settings of the simulation."""
        how: How = {"num_sms": self.num_sms, "seed": self.seed, "schedule": self.schedule, "truncate": self.truncate}
        return {**how, "device": self.device}

    def on(self, device: str) -> Self:
        """Return the same trial on another device: the simulator's `cpu`, or a GPU."""
        if device != "cpu" and self.needs_ranks:
            raise ValueError(f"device: expected cpu, because {self.kernel.name} needs several ranks, got {device}")
        return replace(self, device=device)

    @classmethod
    def takes(cls, config: Any) -> bool:
        """Tell whether this trial covers a configuration, if a kernel has several trials."""
        return True

    @classmethod
    @abstractmethod
    def drawn(cls, config: Any, seed: int) -> Trial:
        """Draw a small problem for a configuration: each seed gives other sizes, values and another schedule."""

    @abstractmethod
    def check(self, kernel: HostKernel | None = None) -> float:
        """Run the kernel, or the package's own source if None; raise a ValueError that describes wrong results.

        Return the largest error relative to the allowed one: zero if results are compared bit for bit.
        """

    def headers(self) -> dict[str, str]:
        """Return all files that the kernel's source includes, for this configuration."""
        return self.kernel.headers(self.config)

    def compiled(self, headers: Mapping[str, str] | None = None) -> HostKernel:
        """Compile the kernel for the host; `headers` replaces sources by name, for mutations."""
        return compiled(self.kernel, self.config, headers)

    def run(self, headers: Mapping[str, str] | None = None) -> float:
        """Check the kernel, or a mutation of it through `headers`."""
        return self.check(None if self.device != "cpu" else self.compiled(headers))

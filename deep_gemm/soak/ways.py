"""How a call is made: on which stream, in which thread, in a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .trial import Tensors, Trial

Way = Callable[[Trial], Tensors]


def plainly(trial: Trial) -> Tensors:
    """Call on the current stream."""
    return trial.call(trial.everything())


def on_a_stream(trial: Trial) -> Tensors:
    """Call on a stream of its own, behind all that is on the current one."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = plainly(trial)
    torch.cuda.current_stream().wait_stream(stream)
    return made


def in_a_thread(trial: Trial) -> Tensors:
    """Call in a thread that has not used the GPU before."""
    made: list[Tensors] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            made.append(on_a_stream(trial) if trial.draw.device == "cuda" else plainly(trial))
        except BaseException as error:  # told to the thread that waits
            raised.append(error)

    if trial.draw.device == "cuda":
        torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    if trial.draw.device == "cuda":
        torch.cuda.synchronize()
    return made[0]


class Captured:
    """A call in a CUDA graph. What it reads may change before it is replayed."""

    def __init__(self, trial: Trial) -> None:
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.made = plainly(trial)

    def replay(self) -> Tensors:
        """Run what was captured."""
        self.graph.replay()  # type: ignore[no-untyped-call]
        return self.made

"""Ways to make a call: on a new stream, in a new thread, in a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from .trial import Tensors, Trial

Way = Callable[[Trial], Tensors]


def plainly(trial: Trial) -> Tensors:
    """Call on the current stream."""
    return trial.call(trial.everything())


def on_a_stream(trial: Trial) -> Tensors:
    """Call on a new stream, after all work on the current one."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = plainly(trial)
    torch.cuda.current_stream().wait_stream(stream)
    return made


def in_a_thread(trial: Trial) -> Tensors:
    """Call in a thread that has not used the GPU before."""
    return at_once((trial,), 1)[0]


def at_once(trials: Sequence[Trial], times: int) -> list[Tensors]:
    """Call each trial `times` times, in its own thread and on its own stream; return the tensors of the last calls."""
    made: list[Tensors] = [{} for _ in trials]
    raised: list[BaseException] = []
    is_on_gpu = trials[0].draw.device == "cuda"

    def work(index: int) -> None:
        try:
            for _ in range(times):
                made[index] = on_a_stream(trials[index]) if is_on_gpu else plainly(trials[index])
        except BaseException as error:  # raised again in the waiting thread
            raised.append(error)

    if is_on_gpu:
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(trials))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if is_on_gpu:
        torch.cuda.synchronize()
    if raised:
        raise raised[0]
    return made


class Captured:
    """A call in a CUDA graph. The values of its inputs may change before a replay."""

    def __init__(self, trial: Trial) -> None:
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.made = plainly(trial)

    def replay(self) -> Tensors:
        """Replay the graph."""
        self.graph.replay()
        return self.made

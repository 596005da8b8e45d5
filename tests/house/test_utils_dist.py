"""Groups of processes on this machine, over Gloo, started as callers of `init_dist` start them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
import torch

from deep_gemm.utils import dist

PROCESSES = 3

PROCESS = """
import os
import sys
import torch
os.dup2(os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)  # of all processes, in turn
torch.cuda.is_available = lambda: False
from deep_gemm.utils.dist import dist_print, init_dist, uneven_all_gather
local_rank, count = int(sys.argv[1]), int(sys.argv[2])
rank, size, group = init_dist(local_rank, count)
assert (rank, size, group.size()) == (local_rank, count, count)
mine = torch.full((rank, 2), float(rank))
joined = uneven_all_gather(mine, group=group)
assert joined.tolist() == [[float(r)] * 2 for r in range(count) for _ in range(r)], joined
columns = uneven_all_gather(mine.t(), dim=1)
assert columns.tolist() == joined.t().tolist()
assert uneven_all_gather(mine.t(), dim=-1).tolist() == columns.tolist()
dist_print("from", rank)
dist_print("from one", once_in_node=True)
sys.stdout.flush()
torch.distributed.barrier()
os._exit(0)  # Gloo's threads may outlive what they use if the interpreter takes itself apart
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_processes_meet_gather_and_print_in_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"MASTER_PORT": str(free_port()), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LOG": str(log)}
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(forked.run, "-c", PROCESS, str(rank), str(PROCESSES), env=environment)
            for rank in range(PROCESSES)
        ]
    ended = [each.result() for each in started]
    assert [process.returncode for process in ended] == [0] * PROCESSES, [process.stderr for process in ended]
    assert log.read_text().splitlines() == ["from 0", "from 1", "from 2", "from one"]


def test_without_a_group_printing_is_printing(capsys: pytest.CaptureFixture[str]) -> None:
    dist.dist_print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


@pytest.mark.parametrize("local_rank", [-1, 2])
def test_a_rank_that_is_none_is_refused(local_rank: int) -> None:
    with pytest.raises(ValueError, match=f"^local_rank: expected an integer in 0..1, got {local_rank}$"):
        dist.init_dist(local_rank, 2)
    assert not torch.distributed.is_initialized()

"""Faults in the middle of a training step: a sentence and a status, and no rank that waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from headwise import Attention
from headwise.cli.output import LOST
from headwise.errors import HeadwiseError
from headwise.sharding import Heads, watch_ranks

pytestmark = pytest.mark.slow

STEPS = 3  # before the fault
WAIT = 60.0  # seconds for anything on a busy machine
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])
TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # torch's stubs do not have it


def train(rank: int, port: int, folder: Path, fault: str) -> None:
    """Train until the fault; the terminal of a rank is a file in the folder."""
    handle = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 2)
    store = TCPStore("localhost", port, is_master=False)
    hour = timedelta(hours=1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=hour)
    torch.manual_seed(0)
    model = Attention(40, 6, num_kv_heads=2, head_dim=10, value_dim=7)
    parallelize_module(model, init_device_mesh("cpu", (2,)), Heads())
    try:
        with watch_ranks(timeout=1.0):
            for step in range(10**9):
                if step == STEPS and rank == 1:
                    interrupt(fault)
                if step == STEPS:
                    (folder / f"begun-{rank}").touch()
                model(torch.randn(3, 24, 40)).square().mean().backward()
    except HeadwiseError as error:
        (folder / f"rank-{rank}").write_text(str(error))


def interrupt(fault: str) -> None:
    if fault == "raised":
        raise ValueError("a batch is missing")
    if fault in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), signal.Signals[fault])


def hold_store(pipe: multiprocessing.connection.Connection) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def faulty_training(folder: Path, fault: str) -> tuple[int | None, str]:
    """The exit status of rank 0, and what is on its terminal."""
    pipe, there = CONTEXT.Pipe()
    launcher = CONTEXT.Process(target=hold_store, args=(there,))
    launcher.start()
    port = pipe.recv()
    workers = [CONTEXT.Process(target=train, args=(r, port, folder, fault)) for r in range(2)]
    try:
        for worker in workers:
            worker.start()
        if fault == "launcher":
            wait_for_steps(workers, folder)
            launcher.kill()
        workers[0].join(WAIT)
        return workers[0].exitcode, (folder / "rank-0").read_text()
    finally:
        for process in (launcher, *workers):
            process.kill()
            process.join()


def wait_for_steps(workers: list[ForkServerProcess], folder: Path) -> None:
    while not (folder / "begun-0").exists():
        assert workers[0].is_alive()
        workers[0].join(0.05)


@pytest.mark.parametrize(
    ("fault", "statuses", "sentence"),
    [
        ("SIGKILL", {0}, "a collective call that lost its connection to another rank"),
        ("SIGSTOP", {LOST}, "headwise: rank 1 of 2 has given no sign of life for 1 s"),
        # 0 where a broken connection of the collective call was seen first.
        ("raised", {0, LOST}, "rank 1 of 2 failed: a batch is missing"),
        ("launcher", {0, LOST}, "the store of the job "),
    ],
)
def test_a_fault_in_a_training_step(
    tmp_path: Path, fault: str, statuses: set[int], sentence: str
) -> None:
    ended, printed = faulty_training(tmp_path, fault)
    assert sentence in printed  # after a warning of torch, if the store is gone
    assert "\n  needed: " in printed
    assert ended in statuses

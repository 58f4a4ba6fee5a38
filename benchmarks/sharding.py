"""A sequence over two processes beside one: time, peak memory and bytes sent.

    python -m benchmarks.sharding

Each process has one thread. Rounds run one process alone, then half of the heads on each process
with nothing exchanged, then each way on both, so that all see the same load. The halves say what
two processes of this machine can reach: they share its memory and its cache. CPU seconds are those
of the busier process, and hold on a busy machine too. Peak memory is that of fresh processes,
beside the operands. Run it alone on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.memory import peak_mb
from headwise import AttentionMatrix, Mask
from headwise.sharding import SequenceLayout, attend, explain_attend
from tests.sharding.counted_bytes import counted_bytes

PROCESSES, ROUNDS = 2, 5
ONE, HALVES = "one process", "halves alone"
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 16_384, 8, 2, 64  # timed
# Of the memory: large tensors beside the kernel's scratch, and few operations.
WIDE_LENGTH, WIDE_HEADS, WIDE_KV_HEADS, WIDE_HEAD_DIM = 2048, 128, 32, 128
SCRATCH_MB = 32  # three tiles of 8 MB, and the buffers of gloo
WAYS: dict[str, Any] = {
    "default (heads)": {},
    "gather, zigzag": {"by": "gather"},
    "ring, zigzag": {"by": "ring"},
}
TIMES = ("forward", "its CPU", "backward", "its CPU")
TIME_LIMIT, MEMORY_LIMIT = 0.60, 1.15  # of one process; of the formula


def main() -> None:
    """Start the processes, and print what they measured."""
    print(f"torch {torch.__version__}, {PROCESSES} processes with one thread each, gloo")
    print(f"load before: {os.getloadavg()[0]:.2f}")
    print(f"\ncausal, {LENGTH} tokens, {HEADS} heads, {KV_HEADS} kv_heads of {HEAD_DIM}; seconds")
    seconds = dict(_run_processes("time"))
    alone = seconds.pop(ONE)
    print(f"{ONE:<18} {_row(alone)}")
    for way, times in seconds.items():
        text = _row(times, alone)
        target = f"at most {TIME_LIMIT}" if way.startswith("default") else ""
        print(f"{way:<18} {text}{target}")
    print(f"\nbeside the operands of a rank, less {SCRATCH_MB} MB; at most {MEMORY_LIMIT}")
    for way in WAYS:
        for _, rank in _run_processes("memory", way):
            for number, measured in enumerate(rank):
                ratio = (measured["peak"] - SCRATCH_MB) / measured["formula"]
                print(
                    f"{way:<18} rank {number}: peak {measured['peak']:4.0f} MB, formula "
                    f"{measured['formula']:4.0f} MB = {ratio:.2f}; sent {measured['sent']:.1f} MB, "
                    f"formula {measured['sent_formula']:.1f} MB"
                )
    print(f"\nload after: {os.getloadavg()[0]:.2f}")


def _row(times: list[float], alone: list[float] | None = None) -> str:
    shares = [f" = {each / one:.2f}" for each, one in zip(times, alone or [], strict=False)]
    cells = zip(TIMES, times, shares or [""] * len(TIMES), strict=True)
    return "".join(f"{name} {seconds:6.2f}{share:<7}  " for name, seconds, share in cells)


def _run_processes(*arguments: str) -> Iterator[tuple[str, Any]]:
    """Run this module on all ranks; yield what rank 0 prints."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    command = [sys.executable, *launch, "-m", "benchmarks.sharding", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    for line in done.stdout.splitlines():
        name, measured = json.loads(line)
        yield name, measured


# ---- on each rank ------------------------------------------------------------------------------


def _work(task: str, *arguments: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    results = _time(mesh) if task == "time" else _measure_memory(mesh, *arguments)
    for result in results:
        if mesh.get_local_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def _draw(length: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    return [torch.randn(1, n, length, head_dim) for n in (heads, kv_heads, kv_heads)]


def _layout(way: str, length: int) -> SequenceLayout:
    make = SequenceLayout.zigzag if "zigzag" in way else SequenceLayout.contiguous
    return make(length, PROCESSES)


def _parts(whole: list[Tensor], way: str, layout: SequenceLayout, rank: int) -> list[Tensor]:
    """Return what a rank holds: everything, its half of the heads, or its tokens."""
    if way == ONE:
        return whole
    if way == HALVES:
        return [x.chunk(PROCESSES, dim=1)[rank] for x in whole]
    return [layout.split(x, rank) for x in whole]


def _time(mesh: DeviceMesh) -> Iterator[tuple[str, list[float]]]:
    """Yield the median seconds and CPU seconds of a forward and a backward pass."""
    whole, rank = _draw(LENGTH, HEADS, KV_HEADS, HEAD_DIM), mesh.get_local_rank()
    seconds = defaultdict(list)
    for _ in range(ROUNDS):
        reference = None
        for way in (ONE, HALVES, *WAYS):
            layout = _layout(way, LENGTH)
            parts = _parts(whole, way, layout, rank)
            leaves = [x.clone().requires_grad_() for x in parts]
            out, forward = _timed(lambda: _attend(leaves, mesh, way, layout, rank))  # noqa: B023
            _, backward = _timed(lambda: None if out is None else out.backward(out))  # noqa: B023
            seconds[way].append((*forward, *backward))
            if rank == 0 and out is not None:
                reference = out.detach() if way == ONE else reference
                assert reference is not None
                (expected,) = _parts([reference], way, layout, rank)
                torch.testing.assert_close(out.detach(), expected, rtol=1e-4, atol=1e-5)
    for way, pairs in seconds.items():
        yield way, [median(each) for each in zip(*pairs, strict=True)]


def _attend(
    leaves: list[Tensor], mesh: DeviceMesh, way: str, layout: SequenceLayout, rank: int
) -> Tensor | None:
    q, k, v = leaves
    if way in WAYS:
        return attend(q, k, v, mesh, layout=layout, mask=Mask.causal(), **WAYS[way])
    if way == ONE and rank != 0:
        return None
    return AttentionMatrix(q, k, mask=Mask.causal()) @ v


def _timed(work: Callable[[], Tensor | None]) -> tuple[Tensor | None, tuple[float, float]]:
    """Return the result, and the seconds and CPU seconds of the slower rank."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    result = work()
    cpu = torch.tensor(time.process_time() - start_cpu)
    dist.all_reduce(cpu, dist.ReduceOp.MAX)
    return result, (time.perf_counter() - start, float(cpu))


def _measure_memory(mesh: DeviceMesh, way: str) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Yield the peak of both passes and the bytes sent, of each rank, beside their formulas."""
    rank, options = mesh.get_local_rank(), {"mask": Mask.causal(), **WAYS[way]}
    small = _draw(64, WIDE_HEADS, WIDE_KV_HEADS, WIDE_HEAD_DIM)
    _step(small, mesh, options)  # loads what the first call loads
    layout = _layout(way, WIDE_LENGTH)
    sizes = (layout.lengths[rank], WIDE_HEADS, WIDE_KV_HEADS, WIDE_HEAD_DIM)
    leaves, options = _draw(*sizes), {**options, "layout": layout}
    before = _resident_mb()
    _step(leaves, mesh, options)
    peak = peak_mb() - before
    q, k, v = leaves
    plan = explain_attend(q, k, v, mesh, **options)
    with counted_bytes() as sent:
        _step(leaves, mesh, options)
    everyone: list[Any] = [None] * PROCESSES
    measured = {
        "peak": peak,
        "formula": plan.peak / 1e6,
        "sent": sent.total / 1e6,
        "sent_formula": (plan.sent_forward + plan.sent_backward) / 1e6,
    }
    dist.all_gather_object(everyone, measured)
    yield way, everyone


def _step(leaves: list[Tensor], mesh: DeviceMesh, options: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in leaves)
    out = attend(q, k, v, mesh, **options)
    out.backward(torch.ones_like(out))


def _resident_mb() -> float:
    status = Path("/proc/self/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    _work(*sys.argv[1:]) if len(sys.argv) > 1 else main()

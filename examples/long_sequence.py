"""Attend over 65,536 tokens whose halves are on two processes, and read the matrix.

    torchrun --nproc-per-node=2 examples/long_sequence.py

Each process holds half of the tokens, an early and a late part. No process has all queries, and
none ever writes the weights: 17 GB for each head. At the end each process computes some rows alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise import AttentionMatrix, Mask
from headwise.sharding import SequenceLayout, SequenceMatrix, attend, explain_attend

TOKENS, HEADS, KV_HEADS, HEAD_DIM, WINDOW, SAMPLES = 65_536, 2, 2, 32, 256, 64
SIZES = (HEADS, KV_HEADS, KV_HEADS)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, layout = mesh.get_local_rank(), SequenceLayout.zigzag(TOKENS, mesh.size())
    mask = Mask.window(WINDOW, 0)
    q, k, v = (draw(layout.positions(rank), heads, seed) for seed, heads in enumerate(SIZES))

    before = memory_mb("VmRSS")
    out = attend(q, k, v, mesh, layout=layout, mask=mask)
    out.square().sum().backward()
    dense = HEADS * TOKENS * TOKENS * 4 / 1e9
    say(rank, f"{explain_attend(q, k, v, mesh, layout=layout, mask=mask)}")
    say(
        rank,
        f"peak memory of both passes: {memory_mb('VmHWM') - before:.0f} MB on rank {rank}, "
        f"where the weights would be {dense:.0f} GB",
    )

    matrix = SequenceMatrix(q.detach(), k.detach(), mesh, layout=layout, mask=mask)
    entropy = layout.gather(matrix.entropy()[..., None], mesh)[..., 0]
    say(rank, f"entropy of head 0, of all {entropy.shape[2]} queries: {entropy[0, 0].mean():.3f}")

    chosen = torch.linspace(0, TOKENS - 1, SAMPLES).long()
    error = max_error(layout.gather(out.detach(), mesh)[:, :, chosen], chosen)
    say(rank, f"{SAMPLES} rows on one process: {error:.1e} apart")
    dist.destroy_process_group()


def draw(positions: Tensor, heads: int, seed: int) -> Tensor:
    """Return (1, heads, tokens, head_dim) for these positions, the same on every process."""
    phase = torch.randn(heads, 1, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    angle = positions[:, None] * (1 + torch.arange(HEAD_DIM)).sqrt() / 7
    return (angle + 9 * phase).sin()[None].requires_grad_()


@torch.no_grad()
def max_error(rows: Tensor, chosen: Tensor) -> float:
    """Compare rows with those that one process computes, each with the keys of its window."""
    worst = 0.0
    for nth, query in enumerate(chosen):
        keys = torch.arange(max(0, int(query) - WINDOW), int(query) + 1)
        positions = zip((query[None], keys, keys), SIZES, strict=True)
        q, k, v = (draw(at, heads, seed) for seed, (at, heads) in enumerate(positions))
        alone = (AttentionMatrix(q, k) @ v)[:, :, 0]
        worst = max(worst, float((alone - rows[:, :, nth]).abs().max()))
    return worst


def memory_mb(field: str) -> float:
    """Return a field of this process's memory on Linux: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

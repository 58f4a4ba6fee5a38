"""Peak memory of one process, so that nothing is reused from an earlier case."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import scan
from benchmarks.matrix import statistics_tensors
from headwise import AttentionMatrix, Mask
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import compute_summaries


def peak_mb() -> float:
    """The largest resident memory of this process so far, in MB; Linux.

    Not getrusage's: that one still knows what the parent process held when it started this one.
    """
    status = Path("/proc/self/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def statistics_beyond_the_fused_forward() -> float:
    """MB that all statistics of a causal (1, 12, 8192, 64) matrix take beyond a fused forward."""
    q, k, v = statistics_tensors()
    _warm_up(q, k, v)
    scaled_dot_product_attention(q, k, v, is_causal=True)
    before = peak_mb()
    AttentionMatrix(q, k, mask=Mask.causal()).statistics()
    return peak_mb() - before


def product_beyond_its_output() -> float:
    """MB that ``A @ v`` with value_dim 48 takes at (1, 12, 4096, 64), beyond its output."""
    q, k = torch.randn(1, 12, 4096, 64), torch.randn(1, 12, 4096, 64)
    v = torch.randn(1, 12, 4096, 48)
    _warm_up(q, k, v)
    before = peak_mb()
    out = AttentionMatrix(q, k) @ v
    return peak_mb() - before - out.numel() * out.element_size() / 1e6


def _warm_up(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What the first call of a process loads is no cost of the reading."""
    q, k, v = (x[:, :, :512] for x in (q, k, v))
    AttentionMatrix(q, k).statistics()
    _ = AttentionMatrix(q, k) @ v


def sweep_beyond_the_fused_forward() -> float:
    """MB that ten statistics of a causal (1, 12, 8192, 64) matrix take beyond a fused forward."""
    observation, fused = scan.make_call(torch.float32)
    statistics = catalogue.find_standard_statistics(scan.TEN)
    small = AttentionMatrix(*(torch.randn(1, 12, 512, 64) for _ in range(2)), mask=Mask.causal())
    compute_summaries(CapturedCall.for_self_attention(small), statistics)
    fused()
    before = peak_mb()
    compute_summaries(observation, statistics)
    return peak_mb() - before


# what -> (its measure, MB at most)
CASES = {
    "statistics of causal (1, 12, 8192, 64), beyond the fused forward": (
        statistics_beyond_the_fused_forward,
        64,
    ),
    "ten statistics of the same, in a sweep": (sweep_beyond_the_fused_forward, 128),
    "A @ v with value_dim 48 at 4096 keys, beyond the output": (product_beyond_its_output, 64),
}

if __name__ == "__main__":
    with torch.no_grad():
        work, _ = list(CASES.values())[int(sys.argv[1])]
        json.dump(work(), sys.stdout)

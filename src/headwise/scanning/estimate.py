"""Estimate of the time and memory of a scan, made before the scan starts.

The time is that of a short trial, of the model's matrix products, and of one pass over the weights
of each head, at the speed measured on problems of the length of the texts. The memory is that of
the process now, plus the largest tensors that a layer holds at once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from headwise.errors import OptionError
from headwise.masks.mask import Mask
from headwise.matrix.kernels.tiles import TILE_ELEMENTS
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CELLS, CapturedCall
from headwise.scanning.record import record_attention
from headwise.scanning.statistics.statistic import TileStatistic, compute_summaries
from headwise.support.text import human_bytes

TILES_AT_ONCE = 8  # scores, weights, and temporary tensors of statistics
STATES_AT_ONCE = 6  # tensors of the model's width: residuals, normalised ones, inputs of a product
LONGEST_SAMPLE = 16_384  # tokens of a timed problem
SAMPLE_ROWS = 8192  # queries times heads of a timed problem, unless it has one head
MEASURED_SECONDS = 0.15  # of each timed problem: several turns of a busy processor
FLOAT = 4  # bytes
ROOT = Path("/")


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one attention call."""

    heads: int
    width: int  # head_dim plus value_dim
    is_causal: bool
    span: int | None  # keys that a query may attend to, under a window

    def mean_visible_keys(self, length: int) -> float:
        """Return the number of keys that a query may attend to, as a mean over the queries."""
        if self.span is not None and self.span < length:
            return float(self.span)
        return length / (2 if self.is_causal else 1)

    def count_weights_read(self, length: int) -> float:
        """Return the number of weights that the statistics read."""
        return self.heads * length * self.mean_visible_keys(length)


@dataclass(frozen=True)
class Speed:
    """Seconds of the operations of a scan on this machine.

    Attributes:
        product: seconds of one multiply-add of a matrix product.
        rows: pairs of a number of keys, and the seconds of all statistics for one query of one head
            that may attend to so many; sorted.
    """

    product: float
    rows: tuple[tuple[float, float], ...]

    def row(self, keys: float) -> float:
        """Return the seconds of all statistics for one query of one head with so many keys.

        Between measured numbers of keys it is interpolated, and beyond the largest proportional.
        """
        numbers = [number for number, _ in self.rows]
        within = float(np.interp(keys, numbers, [seconds for _, seconds in self.rows]))
        return within * max(1.0, keys / numbers[-1])


@dataclass(frozen=True)
class Estimate:
    """Seconds of a scan, its additional bytes, and the bytes of the whole process."""

    seconds: float
    extra_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        """``about 40 s, 1.9 GB``."""
        return f"about {_format_seconds(self.seconds)}, {human_bytes(self.total_bytes)}"


@torch.no_grad()
def record_call_sizes(model: nn.Module, run: Callable[[], Any]) -> list[CallSizes]:
    """Return the sizes of the attention calls of a short run."""
    calls: list[CallSizes] = []

    def watch(call: CapturedCall) -> None:
        matrix, bound = call.matrix, call.matrix.bound_mask
        assert call.values is not None
        left, right = bound.reach
        span = None if left is None or right is None else left + right + 1
        width = matrix.q.shape[-1] + call.values.shape[-1]
        calls.append(CallSizes(matrix.shape[1], width, bound.is_causal, span))

    with record_attention(model, watch):
        run()
    return calls


def estimate_scan(
    model: nn.Module,
    calls: Sequence[CallSizes],
    statistics: Iterable[TileStatistic],
    lengths: Sequence[int],
    *,
    held_bytes: int | None = None,
    trial_seconds: float = 0.0,
    speed: Speed | None = None,
    processes: int = 1,
) -> Estimate:
    """Estimate a scan of sequences of these lengths, one after the other.

    Args:
        model: the model.
        calls: the sizes of its attention calls.
        statistics: the statistics.
        lengths: tokens of each sequence.
        held_bytes: the memory of a process with the model; that of this process if None.
        trial_seconds: duration of the scan of a few tokens: what each sequence takes at least.
        speed: the speed of this machine; measured now if None.
        processes: the number of processes that share the sequences.
    """
    statistics = tuple(statistics)
    speed = speed or measure_speed(calls, statistics, max(lengths))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    products = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
    seconds = trial_seconds * len(lengths)
    for length in lengths:
        attended = sum(call.count_weights_read(length) * call.width for call in calls)
        seconds += speed.product * (length * products + attended)
        seconds += sum(
            call.heads * length * speed.row(call.mean_visible_keys(length)) for call in calls
        )
    extra_bytes = estimate_memory(model, calls, statistics, max(lengths)) * processes
    held_bytes = (process_memory() if held_bytes is None else held_bytes) * processes
    return Estimate(seconds / min(processes, len(lengths)), extra_bytes, held_bytes + extra_bytes)


def estimate_memory(
    model: nn.Module, calls: Sequence[CallSizes], statistics: Sequence[TileStatistic], length: int
) -> int:
    """Return the bytes that a scan of ``length`` tokens needs in addition to the model."""
    heads = max(call.heads for call in calls)
    width = max(call.heads * call.width for call in calls)
    numbers = length * (STATES_AT_ONCE * width + 2 * _widest_matrix(model))
    scalars = sum(not statistic.definition.axes for statistic in statistics)
    gathered = 9 * heads * length * scalars + 8 * heads * length + 8 * CELLS * length
    tiles = TILES_AT_ONCE * FLOAT * max(TILE_ELEMENTS, length * 2)
    return FLOAT * numbers + gathered + tiles + FLOAT * length * _logits_per_token(model)


def _widest_matrix(model: nn.Module) -> int:
    """Return the width of the widest matrix inside a block, embeddings apart."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    rows = {table.num_embeddings for table in tables}
    sides = [max(p.shape) for p in model.parameters() if p.dim() == 2 and p.shape[0] not in rows]
    return max(sides, default=0)


def _logits_per_token(model: Any) -> int:
    """Return the number of logits for each token, 0 if a scan computes those of one token."""
    getter = getattr(model, "get_output_embeddings", None)
    last = getter() if getter is not None else None
    parameters = inspect.signature(model.forward).parameters
    if last is None or "logits_to_keep" in parameters:
        return 0
    return int(last.weight.shape[0])


def measure_speed(
    calls: Sequence[CallSizes], statistics: Sequence[TileStatistic], length: int
) -> Speed:
    """Measure matrix products, and the statistics of rows with as many keys as those of the calls.

    A problem of a quarter of the length is for shorter sequences. Long problems have few heads.
    Each runs for a fraction of a second, and the mean counts: on a busy machine the best run would
    be faster than a scan can be.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=generator) for _ in range(2))
    _ = x @ w
    product = _measure_mean_seconds(lambda: x @ w) / 512**3
    is_causal = all(call.is_causal for call in calls)
    keys_of_token = 0.5 if is_causal else 1.0  # those of a mean query, for each token
    needed = {round(call.mean_visible_keys(length) / keys_of_token) for call in calls}
    lengths = {max(1, min(tokens, LONGEST_SAMPLE)) for tokens in needed}
    lengths.add(max(1, max(lengths) // 4))
    rows: list[tuple[float, float]] = []
    for tokens in sorted(lengths):
        call, fitting = _sample_call(calls, statistics, tokens, is_causal=is_causal)
        if not rows:
            compute_summaries(call, fitting)  # loads what the first run loads
        seconds = _measure_mean_seconds(partial(compute_summaries, call, fitting))
        rows.append((tokens * keys_of_token, seconds / (call.matrix.shape[1] * tokens)))
    return Speed(product, tuple(rows))


def _sample_call(
    calls: Sequence[CallSizes],
    statistics: Sequence[TileStatistic],
    tokens: int,
    *,
    is_causal: bool,
) -> tuple[CapturedCall, list[TileStatistic]]:
    """Return a random call of so many tokens, and the statistics that can be computed of it."""
    most = max((call.heads for call in calls), default=1)
    heads = max(1, min(most, SAMPLE_ROWS // tokens))
    width = max(1, max((call.width for call in calls), default=2) // 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, width, generator=generator) for _ in range(3))
    matrix = AttentionMatrix(q, k, mask=Mask.causal() if is_causal else Mask())
    ids = torch.randint(tokens, (1, tokens), generator=generator)
    chosen = ids < tokens // 16
    call = CapturedCall.for_self_attention(
        matrix, tokens=ids, separators=chosen, specials=chosen, values=v, outputs=v
    )
    return call, [s for s in statistics if s.reason_not_computable(call) is None]


def require_memory(needed: int, *, what: str, do: str) -> None:
    """Raise OptionError if more memory is needed than this machine has left."""
    free = available_memory()
    if needed > free:
        more, left = human_bytes(needed), human_bytes(free)
        if more == left:
            more, left = f"{needed:,} B", f"{free:,} B"
        raise OptionError(
            saw=f"{what}: about {more} more memory",
            needed=f"at most {left}, which is what this machine has left",
            do=do,
        )


def _measure_mean_seconds(run: Callable[[], Any]) -> float:
    """Return the mean duration of several runs."""
    runs, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MEASURED_SECONDS or not runs:
        run()
        runs += 1
    return elapsed / runs


def _format_seconds(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# ---- memory of this machine, from psutil and the limits of control groups -----------------------


def available_memory(root: Path = ROOT) -> int:
    """Return the free bytes of the machine, or of a control group of the process if it has fewer.

    psutil covers the machine only; in a container the limit of the group is lower.
    """
    return min((int(psutil.virtual_memory().available), *_iterate_free_bytes_of_cgroups(root)))


def process_memory() -> int:
    """Return the bytes that this process holds."""
    return int(psutil.Process().memory_info().rss)


def _iterate_free_bytes_of_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of the process and of the groups around it."""
    for line in _read_lines_if_readable(root / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in dict.fromkeys([inner, *inner.parents, Path()]):
            most, now = (_read_lines_if_readable(base / folder / name) for name in (limit, used))
            if most and now and most[0].isdecimal():  # "max" is no limit
                # The kernel counts cached files as used, although it can drop them.
                stat = dict(
                    line.split() for line in _read_lines_if_readable(base / folder / "memory.stat")
                )
                yield max(0, int(most[0]) - int(now[0]) + int(stat.get("inactive_file", 0)))


def _read_lines_if_readable(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []

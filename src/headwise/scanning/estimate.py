"""How long a scan will take, and how much memory: estimated before it starts.

Time is that of the model's matrix products and of one pass over the weights for each head, at the
speed that this machine has just now on a small problem of each kind. Memory is what the process
holds, and the largest things that a layer keeps at once. Both are estimates.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from headwise.attention_matrix import AttentionMatrix
from headwise.errors import OptionError
from headwise.kernels.tiles import TILE_ELEMENTS
from headwise.masks.mask import Mask
from headwise.scanning.capture import reached
from headwise.scanning.captured_call import CELLS, CapturedCall
from headwise.scanning.statistics.statistic import TileStatistic, sweep
from headwise.support.axes import human_bytes

TILES_AT_ONCE = 8  # scores, weights, and what statistics make of one tile
STATES_AT_ONCE = 6  # of the model's width: residuals, what is normalised, inputs of a product
SAMPLE = 256  # queries and keys of the problem that is timed
FLOAT = 4  # bytes
ROOT = Path("/")


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one attention call."""

    heads: int
    width: int  # of a head: head_dim and value_dim together
    is_causal: bool
    span: int | None  # keys that a query may see, under a window

    def entries(self, length: int) -> float:
        """Weights that are looked at."""
        if self.span is not None and self.span < length:
            return float(self.heads * length * self.span)
        return self.heads * length * length / (2 if self.is_causal else 1)


@dataclass(frozen=True)
class Estimate:
    """Seconds, and bytes: on top of what is held, and with it."""

    seconds: float
    more: int
    whole: int

    def __str__(self) -> str:
        """``about 40 s, 1.9 GB``."""
        return f"about {_time(self.seconds)}, {human_bytes(self.whole)}"


@torch.no_grad()
def calls_of(model: nn.Module, run: Callable[[], Any]) -> list[CallSizes]:
    """The attention calls of a short run."""
    found: list[CallSizes] = []

    def watch(call: CapturedCall) -> None:
        matrix, bound = call.matrix, call.matrix.bound_mask
        assert call.values is not None
        left, right = bound.reach
        span = None if left is None or right is None else left + right + 1
        width = matrix.q.shape[-1] + call.values.shape[-1]
        found.append(CallSizes(matrix.shape[1], width, bound.is_causal, span))

    with reached(model, watch):
        run()
    return found


def estimate(
    model: nn.Module,
    calls: Sequence[CallSizes],
    statistics: Iterable[TileStatistic],
    lengths: Sequence[int],
    *,
    held: int,
    speed: tuple[float, float] | None = None,
) -> Estimate:
    """Of a scan of sequences of these lengths, one after the other.

    ``held`` are the bytes that the process holds already, with the model. The speed of this machine
    is measured now if it is None.
    """
    statistics = tuple(statistics)
    product, entry = speed or measured_speed(calls, statistics)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    products = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
    seconds = 0.0
    for length in lengths:
        entries = sum(call.entries(length) for call in calls)
        attended = sum(call.entries(length) * call.width for call in calls)
        seconds += product * (length * products + attended) + entry * entries
    more = memory(model, calls, statistics, max(lengths))
    return Estimate(seconds, more, held + more)


def memory(
    model: nn.Module, calls: Sequence[CallSizes], statistics: Sequence[TileStatistic], length: int
) -> int:
    """Bytes that reading ``length`` tokens takes on top of the model."""
    heads = max(call.heads for call in calls)
    width = max(call.heads * call.width for call in calls)
    numbers = length * (STATES_AT_ONCE * width + 2 * _widest(model))
    scalars = sum(not statistic.definition.axes for statistic in statistics)
    gathered = 9 * heads * length * scalars + 8 * heads * length + 8 * CELLS * length
    tiles = TILES_AT_ONCE * FLOAT * max(TILE_ELEMENTS, length * 2)
    return FLOAT * numbers + gathered + tiles + FLOAT * length * _logits(model)


def _widest(model: nn.Module) -> int:
    """Numbers for each token inside a block: the widest matrix that is no table of tokens."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    rows = {table.num_embeddings for table in tables}
    sides = [max(p.shape) for p in model.parameters() if p.dim() == 2 and p.shape[0] not in rows]
    return max(sides, default=0)


def _logits(model: Any) -> int:
    """Numbers for each token that a language model ends with, where it gives them for all."""
    named = getattr(model, "get_output_embeddings", None)
    last = named() if named is not None else None
    taken = inspect.signature(model.forward).parameters
    if last is None or "logits_to_keep" in taken:  # then a scan asks for those of one token
        return 0
    return int(last.weight.shape[0])


def measured_speed(
    calls: Sequence[CallSizes], statistics: Sequence[TileStatistic]
) -> tuple[float, float]:
    """Seconds for a multiply-add of a matrix product, and for one weight under all statistics.

    The better of two runs of a small problem; it takes a fraction of a second.
    """
    heads = min(8, max((call.heads for call in calls), default=1))
    width = max(1, max((call.width for call in calls), default=2) // 2)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=generator) for _ in range(2))
    product = min(_seconds(lambda: x @ w) for _ in range(3)) / 512**3
    q, k, v = (torch.randn(1, heads, SAMPLE, width, generator=generator) for _ in range(3))
    is_causal = all(call.is_causal for call in calls)
    matrix = AttentionMatrix(q, k, mask=Mask.causal() if is_causal else Mask())
    tokens = torch.randint(SAMPLE, (1, SAMPLE), generator=generator)
    chosen = tokens < SAMPLE // 16
    call = CapturedCall.of(
        matrix, tokens=tokens, separators=chosen, specials=chosen, values=v, outputs=v
    )
    fitting = [s for s in statistics if s.missing(call) is None]
    entries = heads * SAMPLE**2 / (2 if is_causal else 1)
    entry = min(_seconds(lambda: sweep(call, fitting)) for _ in range(2)) / entries
    return product, entry


def require_memory(needed: int, *, what: str, do: str) -> None:
    """Raise OptionError if more memory is needed than there is."""
    there = available()
    if needed > there:
        more, left = human_bytes(needed), human_bytes(there)
        if more == left:
            more, left = f"{needed:,} B", f"{there:,} B"
        raise OptionError(
            saw=f"{what}: about {more} more memory",
            needed=f"at most {left}, which is what this machine has left",
            do=do,
        )


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _time(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# ---- memory of this machine: what psutil says, and the limits of control groups ----------------


def available(root: Path = ROOT) -> int:
    """Bytes that can still be taken, by the machine or by a control group of the process.

    psutil knows the machine alone: in a container the group has less.
    """
    return min((int(psutil.virtual_memory().available), *_of_groups(root)))


def in_use() -> int:
    """Bytes that this process holds."""
    return int(psutil.Process().memory_info().rss)


def _of_groups(root: Path) -> Iterator[int]:
    """What each group of the process, and those around it, has left."""
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, place = line.split(":", 2)
        if kinds == "":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inner = Path(place.lstrip("/"))
        for folder in dict.fromkeys([inner, *inner.parents, Path()]):
            most, now = (_lines(base / folder / name) for name in (limit, used))
            if most and now and most[0].isdecimal():  # "max" is no limit
                # Files that were read and can be forgotten count as used.
                stat = dict(line.split() for line in _lines(base / folder / "memory.stat"))
                yield max(0, int(most[0]) - int(now[0]) + int(stat.get("inactive_file", 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []

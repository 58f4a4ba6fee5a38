"""How much a layer learns, and how long things take: times are shown, and never judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

from torch import nn

from headwise.support.threads import one_thread

Work = Callable[[], object]


def parameters(layer: nn.Module) -> int:
    """How many numbers a layer learns."""
    return sum(p.numel() for p in layer.parameters())


def times_of(works: Mapping[str, Work], *, against: str, rounds: int) -> dict[str, float]:
    """How many times as long each takes as the one that is named: the median over the rounds.

    All run in every round, in turn forwards and backwards, so that a busy machine is busy for
    all of them; and on one thread, since several would wait for the one that was disturbed.
    """
    ratios: dict[str, list[float]] = {name: [] for name in works}
    with one_thread():
        for work in works.values():  # the first call is not like the others
            work()
        for count in range(rounds):
            order = list(works)[:: -1 if count % 2 else 1]
            taken = {name: _seconds(works[name]) for name in order}
            for name, seconds in taken.items():
                ratios[name].append(seconds / taken[against])
    return {name: median(found) for name, found in ratios.items()}


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

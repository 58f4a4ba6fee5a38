"""Timing of all cases in one process, interleaved with their peers.

`MEDIANS` holds the limit of the median over the six shapes of a group.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import drop_in, matrix, native, scan
from benchmarks.case import Case, Make

MAKERS: tuple[Make, ...] = (*drop_in.MAKERS, *matrix.MAKERS, *native.MAKERS, *scan.MAKERS)
MEDIANS = {**drop_in.MEDIANS, **native.MEDIANS}
SECONDS, FEWEST, MOST = 0.8, 2, 200  # of one case in one process; rounds


def wall_seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_case(case: Case) -> dict[str, object]:
    """Return medians over rounds that run all functions, in alternating order."""
    functions = [case.ours, *case.peers.values()]
    one_round = sum(wall_seconds(function) for function in functions)
    if one_round < SECONDS:  # a longer function is warm after one call
        for function in functions:
            function()
        one_round = sum(wall_seconds(function) for function in functions)
    rounds = max(FEWEST, min(MOST, round(SECONDS / one_round)))
    rounds_seconds: list[list[float]] = []
    for index in range(rounds):
        order = functions[::-1] if index % 2 else functions
        round_seconds = [wall_seconds(function) for function in order]
        rounds_seconds.append(round_seconds[::-1] if index % 2 else round_seconds)
    ours, *peers = (list(times) for times in zip(*rounds_seconds, strict=True))
    name, fastest = min(zip(case.peers, peers, strict=True), key=lambda peer: median(peer[1]))
    return {
        "group": case.group,
        "name": case.name,
        "limit": case.limit,
        "peer": name,
        "ours_ms": 1e3 * median(ours),
        "peer_ms": 1e3 * median(fastest),
        "ratio": median(a / b for a, b in zip(ours, fastest, strict=True)),
    }


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    for make in MAKERS:
        print(json.dumps(measure_case(make())), flush=True)

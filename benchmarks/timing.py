"""One process: every case interleaved with its peers, a ratio for each round.

`MEDIANS` is what the median over the six shapes of a group must reach.
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


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(case: Case) -> dict[str, object]:
    """Medians over rounds in which all run, in turn ours and a peer first."""
    works = [case.ours, *case.peers.values()]
    one_round = sum(seconds(work) for work in works)
    if one_round < SECONDS:  # what takes longer is warm after one call
        for work in works:
            work()
        one_round = sum(seconds(work) for work in works)
    rounds = max(FEWEST, min(MOST, round(SECONDS / one_round)))
    taken: list[list[float]] = []
    for index in range(rounds):
        order = works[::-1] if index % 2 else works
        one = [seconds(work) for work in order]
        taken.append(one[::-1] if index % 2 else one)
    ours, *peers = (list(times) for times in zip(*taken, strict=True))
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
        print(json.dumps(measure(make())), flush=True)

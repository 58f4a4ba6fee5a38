"""One process: every case interleaved with its peer, a ratio for each round."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.cases import Case, cases

SECONDS, FEWEST, MOST = 1.5, 5, 60  # of one case in one process; rounds


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(case: Case) -> dict[str, object]:
    """Medians over rounds in which both run, in turn the one and the other first."""
    for work in (case.ours, case.peer):
        work()
        work()
    one_round = seconds(case.ours) + seconds(case.peer)
    rounds = max(FEWEST, min(MOST, round(SECONDS / one_round)))
    pairs: list[tuple[float, float]] = []
    for index in range(rounds):
        if index % 2:
            peer = seconds(case.peer)
            pairs.append((seconds(case.ours), peer))
        else:
            ours = seconds(case.ours)
            pairs.append((ours, seconds(case.peer)))
    return {
        "group": case.group,
        "name": case.name,
        "limit": case.limit,
        "ours_ms": 1e3 * median(ours for ours, _ in pairs),
        "peer_ms": 1e3 * median(peer for _, peer in pairs),
        "ratio": median(ours / peer for ours, peer in pairs),
    }


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    for case in cases():
        print(json.dumps(measure(case)), flush=True)

"""Run cases by seed and index: one again, or many on all cores for some minutes."""

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from tests.fuzz.cache_cases import cache_case
from tests.fuzz.draw import Chance
from tests.fuzz.drop_in_cases import drop_in_case
from tests.fuzz.edit_cases import edit_case, edited_layer_case
from tests.fuzz.gradient_cases import gradient_case
from tests.fuzz.layer_cases import layer_case
from tests.fuzz.matrix_cases import reading_case

KINDS: dict[str, Callable[[Chance], str]] = {
    "readings": reading_case,
    "gradients": gradient_case,
    "layer": layer_case,
    "drop-in": drop_in_case,
    "cache": cache_case,
    "edits": edit_case,
    "edited-layer": edited_layer_case,
}
BATCH = 20  # cases that one worker runs before it reports


@dataclass(frozen=True)
class Failure:
    """A case that went wrong: its name, how, and its reproduction."""

    case: str
    error: str

    def __str__(self) -> str:
        return f"python -m tests.fuzz {self.case}   # {self.error}"


def run_case(kind: str, seed: int, index: int) -> str:
    """Run one case; its description, or an error with the description as its note."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KINDS[kind](Chance(kind, seed, index))


def failure_of(kind: str, seed: int, index: int) -> Failure | None:
    """Run one case; None where it is as it should be."""
    try:
        run_case(kind, seed, index)
    except Exception as error:  # noqa: BLE001  (whatever is raised is a finding)
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        note = " ".join(getattr(error, "__notes__", []))
        return Failure(f"{kind}:{seed}:{index}", f"{first[:300]} | {note[:600]}")
    return None


def run_batch(kind: str, seed: int, first: int) -> list[Failure]:
    """Run the cases of one batch."""
    torch.set_num_threads(1)
    found = (failure_of(kind, seed, index) for index in range(first, first + BATCH))
    return [failure for failure in found if failure is not None]


def fuzz(minutes: float, seed: int, kinds: list[str], cores: int) -> int:
    """Run batches of all kinds in turn until the time is over; 1 where there are findings."""
    end, counts, failures = time.monotonic() + 60 * minutes, Counter[str](), list[Failure]()
    told = time.monotonic()
    print(f"seed {seed}, {minutes:g} minutes, {cores} processes: {', '.join(kinds)}", flush=True)
    with ProcessPoolExecutor(cores) as pool:
        waiting = {}
        number = 0
        while time.monotonic() < end or waiting:
            while time.monotonic() < end and len(waiting) < 2 * cores:
                kind, first = kinds[number % len(kinds)], number // len(kinds) * BATCH
                waiting[pool.submit(run_batch, kind, seed, first)] = kind
                number += 1
            done = next(as_completed(waiting))
            counts[waiting.pop(done)] += BATCH
            for failure in done.result():
                failures.append(failure)
                print(failure, flush=True)
            if time.monotonic() > told + 30:
                told = time.monotonic()
                left = max(0.0, end - told) / 60
                print(
                    f"{counts.total()} cases, {len(failures)} findings, {left:.1f} minutes left",
                    flush=True,
                )
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    print(f"{counts.total()} cases with seed {seed}: {len(failures)} findings")
    return int(bool(failures))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("case", nargs="?", help="kind:seed:index, to run one case again")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case:
        kind, seed, index = given.case.split(":")
        print(run_case(kind, int(seed), int(index)))
        return 0
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    return fuzz(given.minutes, seed, given.kinds.split(","), given.processes)


if __name__ == "__main__":
    sys.exit(main())

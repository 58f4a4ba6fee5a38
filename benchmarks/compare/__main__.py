"""Print how often the cause of a fault is named: ``python -m benchmarks.compare --help``.

A line for each fault says what was named in place of the truth, also by another name of it. The
table after all suites gives the precision and recall of each cause; a case of two faults counts for
both of its causes. The second set runs only if it is named, ``--suite second``, so that no cause is
adapted to it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.compare.cause_table import cause_table
from benchmarks.compare.second_suites import SECOND_SUITES
from benchmarks.compare.suites import SUITES, Scored

MOST_ANSWERS = 4
MOST_CASES = 400  # of a fault, among which those of one seed are looked up
SECOND = "second"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases, print a line for each fault and a table of the causes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--suite",
        choices=[*SUITES, SECOND],
        action="append",
        help=f"all but {SECOND} by default",
    )
    parser.add_argument("--fault", help="the name of one fault")
    parser.add_argument("--geometry", help="the name of one geometry")
    parser.add_argument("--seed", type=int, help="the seed of the cases; may be any")
    parser.add_argument("--case", help="the key of one case, as --verbose prints it")
    parser.add_argument("--count", type=int, default=20, help="cases of each fault")
    parser.add_argument("--verbose", action="store_true", help="list the cases that were missed")
    options = parser.parse_args(arguments)
    every: list[Scored] = []
    chosen = options.suite or SUITES
    suites = {name: SUITES[name] for name in chosen if name != SECOND}
    for name, cases in (suites | (SECOND_SUITES if SECOND in chosen else {})).items():
        start = time.perf_counter()
        results: Mapping[str, list[Scored]] = defaultdict(list)
        for case in cases(options.count if options.seed is None else MOST_CASES):
            wanted = (options.fault, options.geometry, options.seed, options.case)
            names = (case.fault, case.geometry, case.seed, case.key)
            if len(results[case.fault]) >= options.count:
                continue
            if all(want in (None, name) for want, name in zip(wanted, names, strict=True)):
                scored = case.score()
                results[case.fault].append(scored)
                if options.verbose and not scored.is_right:
                    print(f"  {case.key}: {scored.answer}", flush=True)
        results = {fault: scores for fault, scores in results.items() if scores}
        if results:
            _print(name, results, time.perf_counter() - start)
        every += [scored for scores in results.values() for scored in scores]
    for line in cause_table(every):
        print(line)


def _print(suite: str, results: dict[str, list[Scored]], seconds: float) -> None:
    for fault, scores in results.items():
        instead = Counter(s.answer for s in scores if not s.is_right or s.by_other_name)
        others = ", ".join(f"{answer} ({n})" for answer, n in instead.most_common(MOST_ANSWERS))
        right = sum(each.is_right for each in scores)
        print(f"{right:4} of {len(scores):3}  {fault:46} {others}")
    every = [each for scores in results.values() for each in scores]
    right, wrong = sum(s.is_right for s in every), sum(s.has_wrong_cause for s in every)
    renamed = sum(s.by_other_name for s in every)
    print(
        f"{suite}: {right} of {len(every)} right ({right / len(every):.1%}), "
        + (f"{renamed} of them by another name of the same function, " if renamed else "")
        + f"{wrong} with a wrong cause ({wrong / len(every):.1%}), {seconds:.0f} s\n",
        flush=True,
    )


if __name__ == "__main__":
    main()

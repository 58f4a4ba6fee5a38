"""Precision and recall of each cause, and the causes that were named in its place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.compare.suites import Scored

MOST_CONFUSED = 4
NO_CAUSE = "no cause"


@dataclass
class CauseCounts:
    """Counts of one cause.

    Attributes:
        cases: faults with this cause.
        recalled: those where it, or a name of the same function, was named.
        named: how often it was named.
        named_rightly: how often it was named where it was the cause.
        instead: what was named where it was missed.
    """

    cases: int = 0
    recalled: int = 0
    named: int = 0
    named_rightly: int = 0
    instead: Counter[str] = field(default_factory=Counter)


def cause_counts(scores: Iterable[Scored]) -> dict[str, CauseCounts]:
    """Return the counts of each cause that was the truth or was named."""
    counts: dict[str, CauseCounts] = defaultdict(CauseCounts)
    for scored in scores:
        names = [name for name in scored.named if name != "unknown"]
        rights = {name for names_of_one in scored.truths for name in names_of_one}
        wrong = [name for name in names if name not in rights]
        for equals in scored.truths:
            of_cause = counts[equals[0]]
            of_cause.cases += 1
            if {*equals} & {*names}:
                of_cause.recalled += 1
            else:
                of_cause.instead.update(wrong or [NO_CAUSE])
        for name in names:
            counts[name].named += 1
            counts[name].named_rightly += name in rights
    return dict(counts)


def cause_table(scores: Sequence[Scored]) -> list[str]:
    """Return the lines of the table, a cause a line; [] if no case has a cause."""
    counts = cause_counts(scored for scored in scores if scored.truths)
    if not counts:
        return []
    lines = [f"{'cause':44} {'recall':>17} {'precision':>17}  named in its place"]
    for name, each in sorted(counts.items()):
        instead = ", ".join(f"{n} ({k})" for n, k in each.instead.most_common(MOST_CONFUSED))
        recall, precision = (
            _share(each.recalled, each.cases),
            _share(each.named_rightly, each.named),
        )
        lines.append(f"{name:44} {recall:>17} {precision:>17}  {instead}".rstrip())
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} {part / whole:7.1%}" if whole else "-"

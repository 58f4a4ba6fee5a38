"""Right answers for the field bench, written before any case was compared."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.field.case import FIRST, read_cases
from headwise.identify.catalogue import CAUSES

FAULTS = {"single": 1, "pair": 2}  # of a case of this kind
NEW_CAUSES = (
    "rotary direction",
    "causal mask missing",
    "causal mask inverted",
    "window missing",
    "finite number for -inf",
    "temperature by length",
)
PROPOSED = "NEW: "  # begins a name where none of the catalogue fits


@dataclass(frozen=True)
class Truth:
    """What is right to say about a case.

    Attributes:
        causes: for each fault the names that are right, the best one first.
        roles: the roles or stages of the faults.
        part: the heads, kv heads or "biases" to which a fault is limited; for a pair that of each
            fault after the other, with ``;`` between them and "all" for no limit.
        note: what else is to be known, such as inputs on which the faults are without effect.
    """

    causes: tuple[tuple[str, ...], ...]
    roles: tuple[str, ...]
    part: str
    note: str


def read_truth(folder: Path = FIRST) -> dict[tuple[str, str], Truth]:
    """Return the right answers of a set by port and case.

    Raises:
        ValueError: a single or a pair without an entry, an entry without a case, a number of causes
            that is not that of the faults, or a name that is none.
    """
    faults = {(c.port, c.name): FAULTS[c.kind] for c in read_cases(folder) if c.kind in FAULTS}
    found = {
        (path.stem, name): _read_row(row)
        for path in sorted((folder / "truth").glob("*.toml"))
        for name, row in tomllib.loads(path.read_text("utf-8")).items()
    }
    if odd := sorted(faults.keys() ^ found.keys()):
        raise ValueError(f"cases without an entry, or entries without a case: {odd}")
    names = {cause.name for cause in CAUSES}.union(NEW_CAUSES)
    for case, truth in found.items():
        if len(truth.causes) != faults[case] or not all(truth.causes):
            raise ValueError(f"{case}: {len(truth.causes)} causes, {faults[case]} faults")
        for name in (name for cause in truth.causes for name in cause):
            if name not in names and not name.startswith(PROPOSED):
                raise ValueError(f"{case}: {name!r} is no cause")
    return found


def _read_row(row: Mapping[str, Any]) -> Truth:
    return Truth(tuple(map(tuple, row["causes"])), tuple(row["roles"]), row["part"], row["note"])

"""Files of proofs: a line for each entry, and every difference between two files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SLOW = "bench"  # the section that a file may lack
MOST_LINES = 12  # printed of a section


def write(sections: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a proof, a line for each entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = []
    for name, entries in sections.items():
        lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", "utf-8")


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each value that differs, with the size of the difference."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in before or key not in after:
                yield f"{place} / {key}: only {'after' if key in after else 'before'}"
            else:
                yield from differences(before[key], after[key], f"{place} / {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from differences(a, b, f"{place}[{index}]")
    elif json.dumps(before) != json.dumps(after):  # NaN is equal to NaN, and 0.0 is not -0.0
        line = f"{place}: {json.dumps(before):.120} before, {json.dumps(after):.120} after"
        if {type(before), type(after)} <= {int, float} and math.isfinite(after - before):
            line += f", {abs(after - before):.1e} apart"
        yield line


def compare_files(before: Path, after: Path) -> bool:
    """Print all differences between two files of proofs, and return whether there is any."""
    first, second = (json.loads(path.read_text("utf-8")) for path in (before, after))
    is_different = False
    for name in [*first, *(name for name in second if name not in first)]:
        if name == SLOW and not {name} <= first.keys() & second.keys():
            print(f"{name}: not in both files, not compared")
            continue
        lines = list(differences(first.get(name, {}), second.get(name, {}), name))
        print(f"{name}: {f'{len(lines)} differences' if lines else 'the same'}")
        for line in lines[:MOST_LINES]:
            print(f"  {line}")
        is_different |= bool(lines)
    return is_different

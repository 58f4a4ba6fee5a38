"""Compare the attention implementations of every Hugging Face class.

    python -m benchmarks.implementations               all classes; a run that was stopped goes on
    python -m benchmarks.implementations --only llama  the model types with this in their name
    python -m benchmarks.implementations --summary     print the counts of the last run

The rows are kept in build/implementations.jsonl, one line for each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.implementations.trial import ABSENT, ImplementationRow, tried
from tools.huggingface_classes import classes
from tools.huggingface_classes.guarded import guarded

LINES = Path(__file__).resolve().parents[2] / "build" / "implementations.jsonl"
SECONDS = 120
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons that have no row yet, or those that are asked for; print the counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.implementations")
    parser.add_argument("--only", help="try the model types with this in their name, also again")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--lines", type=Path, default=LINES, help="the file of rows")
    options = parser.parse_args(arguments)
    names = [] if options.summary else classes.model_types()
    if options.only:
        names = [name for name in names if options.only in name]
    else:
        names = [name for name in names if name not in _records(options.lines)]
    options.lines.parent.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(_run(names), 1):
        with options.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows) + "\n")
        for row in rows:
            print(f"{number:3} of {len(names)}  {line(row)}", flush=True)
    chosen = _records(options.lines)
    if options.only:
        chosen = {name: rows for name, rows in chosen.items() if options.only in name}
    print(summary([row for rows in chosen.values() for row in rows]))


def _run(model_types: Sequence[str]) -> Iterator[list[Record]]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for model_type in model_types:
        rows = guarded(tried, model_type, seconds=SECONDS)
        if isinstance(rows, str):
            kind = classes.model_class(model_type)
            name = "" if kind is None else kind.__name__
            rows = [ImplementationRow(model_type, name, reason=rows).record()]
        yield rows


def _records(lines: Path) -> dict[str, list[Record]]:
    """The last rows of each model type."""
    if not lines.exists():
        return {}
    content = [json.loads(text) for text in lines.read_text("utf-8").splitlines()]
    return {rows[0]["model_type"]: rows for rows in content if rows}


def line(row: Record) -> str:
    """One row in words."""
    words = [f"{row['class_name'] or row['model_type']:34}", f"{row['pair']:28}"]
    words += [f"{row['padding']:8}", f"{row['verdict']:28}"]
    if row["gap"] is not None:
        words.append(f"gap {row['gap']:.1e}, real {row['real_gap']:.1e}")
    if row["layer"]:
        words.append(f"{row['layer']}: {row['stage']} {row['largest']:.1e}")
    words += [", ".join(row["causes"]), row["outside"], row["reason"]]
    return "  ".join(word for word in words if word)


def summary(rows: Sequence[Record]) -> str:
    """The counts by verdict, and of refusals by reason."""
    lines = []
    for pair in sorted({row["pair"] for row in rows}):
        chosen = [row for row in rows if row["pair"] == pair]
        lines.append(f"\n{pair or 'No pair'}: {len(chosen)} rows")
        verdicts = Counter((row["padding"], row["verdict"]) for row in chosen)
        for (padding, verdict), count in sorted(verdicts.items()):
            lines.append(f"  {count:4}  {verdict:28} {padding and f'padding: {padding}'}")
        causes = Counter(cause for row in chosen for cause in row["causes"])
        lines += [f"  {count:4}  cause: {cause}" for cause, count in causes.most_common()]
        reasons = Counter(_kind(row) for row in chosen if _kind(row))
        lines += [f"  {count:4}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _kind(row: Record) -> str:
    """The reason why there is no verdict, without what is of one class alone."""
    if not row["reason"] or row["layers"] or (row["verdict"] == ABSENT and not row["pair"]):
        return ""
    words = re.sub(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*(?<!Error)\b", "X", row["reason"])
    return f"{row['verdict']}: {words.partition(';')[0][:140]}"


if __name__ == "__main__":
    main()

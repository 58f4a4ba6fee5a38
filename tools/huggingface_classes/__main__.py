"""The command line, and the trials: each in a process that may not take long, nor much memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers

from tools.huggingface_classes import classes, table
from tools.huggingface_classes.guarded import guarded
from tools.huggingface_classes.trial import Row, tried

LINES = table.ROOT / "build" / "huggingface.jsonl"  # of a run that is not finished


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.huggingface_classes")
    parser.add_argument("model_types", nargs="*", help="try these once more; all, if none is named")
    parser.add_argument("--words", action="store_true", help="write the table, try nothing")
    given = parser.parse_args()
    if given.model_types:
        table.write_record(_some(given.model_types))
    elif not given.words:
        table.write_record(_all())
        LINES.unlink()
    table.write_page()


def _some(model_types: list[str]) -> table.Rows:
    found = table.record()
    version = found["versions"]["transformers"]
    if version != transformers.__version__:
        raise SystemExit(f"The record is of transformers {version}: try all model types.")
    rows = {row["model_type"]: row for row in found["rows"]}
    return rows | {row["model_type"]: row for row in _rows(model_types)}


def _all() -> table.Rows:
    """A line is written for each row, and what has one is not tried again."""
    LINES.parent.mkdir(exist_ok=True)
    known = table.rows(LINES)
    missing = [name for name in classes.model_types() if name not in known]
    for row in _rows(missing):
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return table.rows(LINES)


def _rows(model_types: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The row of each model type, one after the other."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for model_type in model_types:
        row = _alone(model_type)
        print(f"{model_type:40} {row['verdict']:22} {row.get('reason', '')[:120]}", flush=True)
        yield row


def _alone(model_type: str) -> dict[str, Any]:
    """One trial in a forked process."""
    content = guarded(_record, model_type)
    if isinstance(content, dict):
        return content
    kind = classes.model_class(model_type)
    return Row(model_type, None if kind is None else kind.__name__, reason=content).record()


def _record(model_type: str) -> dict[str, Any]:
    return tried(model_type).record()


if __name__ == "__main__":
    main()

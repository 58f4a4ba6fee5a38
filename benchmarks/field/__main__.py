"""Scores of the field bench: ``python -m benchmarks.field [--set third] [PORT ...]``."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
import typer

from benchmarks.field.case import FAMILIES, KINDS, SETS, read_cases
from benchmarks.field.score import Score, interval, score_job
from benchmarks.field.truth import read_truth

RECORD = Path("build") / "field.jsonl"


def main(
    ports: Annotated[list[str] | None, typer.Argument(help="Only these ports.")] = None,
    *,
    of: Annotated[
        Literal["first", "second", "third"], typer.Option("--set", help="Which set.")
    ] = "first",
    kind: Annotated[str, typer.Option(help="Only cases of this kind.")] = "",
    every: Annotated[int, typer.Option(help="Only every n-th case.")] = 1,
    processes: Annotated[int, typer.Option(help="That score cases side by side.")] = 2,
) -> None:
    """Score each case, write what was said to build/field.jsonl, and print a table."""
    truth = read_truth(SETS[of])
    cases = [case for case in read_cases(SETS[of], ports or ()) if kind in ("", case.kind)]
    jobs = [(case, truth.get((case.port, case.name))) for case in cases[::every]]
    RECORD.parent.mkdir(exist_ok=True)
    scores = []
    with (
        RECORD.open("w", encoding="utf-8") as record,
        multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool,
    ):
        for each in pool.imap(score_job, jobs):
            scores.append(each)
            record.write(json.dumps(_as_dict(each)) + "\n")
            record.flush()
            print(_line(each), flush=True)
    for line in table(scores):
        print(line)


def _as_dict(each: Score) -> dict[str, object]:
    names = {"port": each.case.port, "case": each.case.name, "kind": each.case.kind}
    said = {"family": each.case.family, "answer": each.answer, "named": each.named}
    return {**names, **said, "seconds": round(each.seconds, 2)}


def _line(each: Score) -> str:
    state = "right" if each.is_right else each.answer.upper()
    name = f"{each.case.kind} {each.case.port} {each.case.name}"
    return f"{state:12} {each.seconds:6.1f} s  {name}: {'; '.join(each.named)}"


def table(scores: Iterable[Score]) -> Iterator[str]:
    """Yield the lines of the table: by kind, and single faults by family."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        groups[each.case.kind].append(each)
        if each.case.kind == "single":
            groups[f"  {each.case.family}"].append(each)
    for name in ("single", *(f"  {family}" for family in FAMILIES), *KINDS[1:]):
        if rows := groups[name]:
            right, answers = sum(map(_is_right, rows)), Counter(each.answer for each in rows)
            low, high = interval(right, len(rows))
            seconds = [each.seconds for each in rows]
            yield (
                f"{name:12} {right:4} of {len(rows):4} {right / len(rows):6.1%} "
                f"({low:.1%} to {high:.1%}), {dict(answers.most_common())}, "
                f"median {median(seconds):.1f} s, longest {max(seconds):.0f} s"
            )


def _is_right(each: Score) -> bool:
    return each.is_right


if __name__ == "__main__":
    typer.run(main)

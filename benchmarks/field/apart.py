"""Scores of the sets of modules, models and caches: ``python -m benchmarks.field.apart fourth``.

A case is a port beside what it should equal, both made by its file. A fault is right if the cause
that is named first is one that was written down for it before the case was compared.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer

import headwise
from benchmarks.field.case import APART, Edits, load_edited
from benchmarks.field.score import interval
from headwise.errors import HeadwiseError
from headwise.identify import Diagnosis, Verdict

ROOMS = ("modules", "models", "cached")
RECORD = Path("build")


@dataclass(frozen=True)
class Case:
    """A port whose text is edited.

    Attributes:
        path: of its file.
        name: of the case.
        kind: "single", "pair" or "same".
        causes: for each fault the names that are right, the best one first.
        edits: texts of the file, and the texts in their place.
    """

    path: Path
    name: str
    kind: str
    causes: tuple[tuple[str, ...], ...]
    edits: Edits

    @property
    def title(self) -> str:
        """The folder, the file and the name."""
        return f"{self.path.parent.name}/{self.path.stem}/{self.name}"

    def make(self) -> tuple[Any, Any, Any]:
        """Return the port with its edits, what it should equal, and inputs or None."""
        torch.manual_seed(0)  # some files draw before they set a seed of their own
        made: tuple[Any, Any, Any] = load_edited(self.path, self.edits).make()
        return made


@dataclass(frozen=True)
class Score:
    """What was said of one case.

    Attributes:
        title: of the case.
        kind: of the case.
        answer: "right"; "wrong" (the first cause is none of the right ones), "part" (one of two
            faults), "second" (right, and a cause beside it that is none), "unknown", "same",
            "inconclusive", "refused" or "crash".
        named: the causes that were named, or the error.
        seconds: of processor time.
    """

    title: str
    kind: str
    answer: str
    named: tuple[str, ...]
    seconds: float


def read_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of a set.

    Raises:
        KeyError: a fault without an entry in the truth.
    """
    truth = tomllib.loads((folder / "truth.toml").read_text("utf-8"))
    for room in ROOMS:
        for path in sorted((folder / room).glob("*.toml")):
            for row in tomllib.loads(path.read_text("utf-8"))["case"]:
                title = f"{room}/{path.stem}/{row['name']}"
                causes = () if row["kind"] == "same" else tuple(map(tuple, truth[title]))
                edits = tuple((before, after) for before, after in row["edits"])
                yield Case(path.with_suffix(".py"), row["name"], row["kind"], causes, edits)


def score(case: Case) -> Score:
    """Run a case, and judge what is said of it."""
    port, reference, inputs = case.make()
    start = time.process_time()
    try:
        diagnosis = headwise.compare(port, reference, inputs)
        answer, named = _judge(case, diagnosis)
    except HeadwiseError as error:
        answer, named = "refused", (str(error.saw),)
    except Exception:  # noqa: BLE001 (a crash is an answer that is counted)
        answer, named = "crash", (traceback.format_exc().splitlines()[-1],)
    return Score(case.title, case.kind, answer, named, time.process_time() - start)


def _judge(case: Case, diagnosis: Diagnosis) -> tuple[str, tuple[str, ...]]:
    if diagnosis.verdict.is_same:
        return ("right" if case.kind == "same" else "same"), ()
    if diagnosis.verdict is Verdict.INCONCLUSIVE:
        return "inconclusive", ()
    said = list_causes(diagnosis)
    named = tuple(" = ".join(names) for names in said)
    if not said:
        return "unknown", (diagnosis.answer,)
    if case.kind == "same":
        return "wrong", named
    left = [set(names) for names in case.causes]
    others = 0
    for number, names in enumerate(said):
        is_right = any({*fault}.intersection(names) for fault in case.causes)
        if number == 0 and not is_right:
            return "wrong", named
        match = next((fault for fault in left if fault.intersection(names)), None)
        left = [fault for fault in left if fault is not match]
        others += not is_right  # one cause may stand in several layers, beside others there
    if left:
        return "part", named
    return ("second" if others else "right"), named


def list_causes(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Return each cause that is named, once, with those that look the same."""
    if diagnosis.model is None:
        comparisons = [diagnosis.function] if diagnosis.function else []
    else:
        comparisons = [layer.comparison for layer in diagnosis.model.differing_layers]
    found = [(each.name, *each.equals) for x in comparisons for each in x.causes]
    if diagnosis.model is not None and (exchange := diagnosis.model.layer_exchange_cause):
        found.insert(0, (exchange,))
    return list(dict.fromkeys(found))


def table(scores: Iterable[Score]) -> Iterator[str]:
    """Yield the lines of the table: faults by folder, and what is the same."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        what = "same" if each.kind == "same" else "faults"
        groups[what].append(each)
        groups[f"  {what} of {each.title.partition('/')[0]}"].append(each)
    for name, rows in sorted(groups.items(), key=lambda pair: (pair[0].strip(), pair[0])):
        answers = Counter(each.answer for each in rows)
        right = answers["right"] + answers["second"]
        low, high = interval(right, len(rows))
        seconds = [each.seconds for each in rows]
        yield (
            f"{name:20} {right:4} of {len(rows):4} {right / len(rows):6.1%} "
            f"({low:.1%} to {high:.1%}), {dict(answers.most_common())}, "
            f"median {median(seconds):.1f} s, longest {max(seconds):.0f} s"
        )


def main(
    of: Annotated[Literal["fourth", "fifth"], typer.Argument(help="Which set.")],
    *,
    only: Annotated[str, typer.Option(help="Only cases whose title has this.")] = "",
    processes: Annotated[int, typer.Option(help="That score cases side by side.")] = 2,
) -> None:
    """Score each case, write what was said to build/, and print a table."""
    cases = [case for case in read_cases(APART[of]) if only in case.title]
    RECORD.mkdir(exist_ok=True)
    scores = []
    with (
        (RECORD / f"field-{of}.jsonl").open("w", encoding="utf-8") as record,
        multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool,
    ):
        for each in pool.imap(score, cases):
            scores.append(each)
            record.write(json.dumps(asdict(each)) + "\n")
            record.flush()
            words = f"{each.kind} {each.title}: {'; '.join(each.named)}"
            print(f"{each.answer:12} {each.seconds:6.1f} s  {words}", flush=True)
    for line in table(scores):
        print(line)


if __name__ == "__main__":
    typer.run(main)

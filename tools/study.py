"""The study in the documentation: docs/study.json, and what is written from it.

    python -m tools.study            measure again; write docs/study.md, pictures, README's table
    python -m tools.study --words    write these from the docs/study.json that is there

A test fails when a number in the documentation and one in docs/study.json part.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from headwise.reports import study_page as charts
from headwise.study.question import Answer
from headwise.study.run import load, study

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "study.json"
PAGE = ROOT / "docs" / "study.md"
PICTURES = ROOT / "docs" / "images" / "study"
README = ROOT / "README.md"
IN_README = ("split", "parameters", "same-function")
BLOCK = re.compile(r"(?<=<!-- the study -->\n).*?(?=<!-- end of the study -->)", re.DOTALL)

HEAD = """# The study

What people ask about attention heads, answered by experiment. `headwise study` repeats every one,
`headwise study parameters` shows all that one of them measured, and `--json` prints the numbers.
This page was written from [one such run](study.json), on a CPU ({setting}). Counts and shapes come
out the same everywhere; times do not, nor does what hangs on the order of roundings.
"""


def answers(record: dict[str, Any]) -> list[Answer]:
    """What was measured, with the questions of today."""
    return [Answer(load(each["id"]), each["numbers"]) for each in record["questions"]]


def read() -> dict[str, Any]:
    """The numbers that the documentation is written from."""
    content: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    return content


def as_text(record: dict[str, Any]) -> str:
    """JSON with one line for each question, so that a change can be read."""
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in record["questions"])
    return f'{{"questions": [\n{lines}\n],\n"setting": {json.dumps(record["setting"])}}}\n'


def page(record: dict[str, Any]) -> str:
    """docs/study.md."""
    setting = ", ".join(f"{name} {value}" for name, value in record["setting"].items())
    return "\n".join([HEAD.format(setting=setting), *map(section, answers(record))])


def section(answer: Answer) -> str:
    """One question: verdict, picture, reason, facts and figures."""
    question = answer.question
    parts = [
        f"## {question.asks}",
        f"**{answer.verdict}**",
        f"![{answer.say(question.caption)}](images/study/{question.id}.svg)",
        f"*{answer.say(question.caption)}*",
        answer.say(question.why),
        f"`headwise study {question.id}` measured:",
        "\n".join(f"- {words}" if held else f"- Not so: {words}" for held, words in answer.facts),
    ]
    if question.table:
        rule = ["---:" if figures else "---" for figures in answer.are_figures]
        rows = (question.table.columns, rule, *answer.rows)
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def readme(text: str, record: dict[str, Any]) -> str:
    """README.md with its table of three questions and answers."""
    three = [each for each in answers(record) if each.question.id in IN_README]
    rows = [f"| {each.question.asks} | {each.verdict} |" for each in three]
    table = "\n".join(["| question | answer |", "| --- | --- |", *rows])
    return BLOCK.sub(lambda _: f"\n{table}\n\n", text)


def write(record: dict[str, Any]) -> None:
    """Everything that is written from the record."""
    PAGE.write_text(page(record), "utf-8")
    README.write_text(readme(README.read_text("utf-8"), record), "utf-8")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for answer in answers(record):
        (PICTURES / f"{answer.question.id}.svg").write_text(charts.svg(answer), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--words", action="store_true", help="do not measure again")
    if not parser.parse_args().words:
        measure()
    write(read())


def measure() -> None:
    """Ask every question anew, and keep the numbers if all is well."""
    start = time.perf_counter()
    result = study(progress=lambda stage, *_: print(stage, file=sys.stderr))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{time.perf_counter() - start:.0f} s, {peak:.2f} GB at the peak", file=sys.stderr)
    failed = [answer.verdict for answer in result.answers if not answer.holds]
    missing = [*(left.reason for left in result.left_out)]
    missing += [result.fallback.reason] if result.fallback else []
    if failed or missing:
        sys.exit("\n".join([*failed, *missing]))
    RECORD.write_text(as_text(result.as_json()), "utf-8")


if __name__ == "__main__":
    main()

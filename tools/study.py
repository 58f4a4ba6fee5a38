"""Study results in the documentation: docs/study.json, and the pages written from it.

    python -m tools.study            measure again; write docs/study.md and its pictures
    python -m tools.study --words    write them from the existing docs/study.json

A test fails if a number in the documentation differs from docs/study.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from headwise.study import output as charts
from headwise.study.question import Answer, answer_questions, load_question

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "study.json"
PAGE = ROOT / "docs" / "study.md"
PICTURES = ROOT / "docs" / "images" / "study"

HEAD = """# The study

People ask these questions about attention heads, and an experiment answers each. `headwise study`
repeats all of them in a few minutes, `headwise study parameters` shows one in full, and `--json`
prints the numbers. This page was written from [one run](study.json) on a CPU ({setting}).
Counts and shapes are the same on every machine; times and rounding errors are not.
"""


def answers_of(record: dict[str, Any]) -> list[Answer]:
    """Return the recorded answers with the current questions."""
    return [Answer(load_question(each["id"]), each["numbers"]) for each in record["questions"]]


def read_record() -> dict[str, Any]:
    """Read docs/study.json."""
    content: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    return content


def record_as_text(record: dict[str, Any]) -> str:
    """Return the record as JSON with one line for each question, for readable diffs."""
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in record["questions"])
    return f'{{"questions": [\n{lines}\n],\n"setting": {json.dumps(record["setting"])}}}\n'


def render_page(record: dict[str, Any]) -> str:
    """Return the text of docs/study.md."""
    setting = ", ".join(f"{name} {value}" for name, value in record["setting"].items())
    return "\n".join([HEAD.format(setting=setting), *map(render_section, answers_of(record))])


def render_section(answer: Answer) -> str:
    """Return the section of a question: verdict, picture, reason, facts and figures.

    The picture's caption is text below it, so its alternative text does not repeat the caption.
    """
    question = answer.question
    parts = [
        f'<a id="{question.id}"></a>\n\n## {question.asks}',
        f"**{answer.verdict}**",
        f"![The picture that the next paragraph describes](images/study/{question.id}.svg)",
        f"*{answer.fill(question.caption)}*",
        answer.fill(question.why),
        f"`headwise study {question.id}` measured:",
        "\n".join(f"- {fact}" if holds else f"- Not so: {fact}" for holds, fact in answer.facts),
    ]
    if answer.rows:
        titles, figures = zip(*answer.columns, strict=True)
        rows = (titles, ["---:" if right else "---" for right in figures], *answer.rows)
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def write_documentation(record: dict[str, Any]) -> None:
    """Write the page, the pictures and the words of the record from its numbers."""
    record = record | {"questions": [answer.as_json() for answer in answers_of(record)]}
    RECORD.write_text(record_as_text(record), "utf-8")
    PAGE.write_text(render_page(record), "utf-8")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for answer in answers_of(record):
        (PICTURES / f"{answer.question.id}.svg").write_text(charts.answer_svg(answer), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--words", action="store_true", help="do not measure again")
    if not parser.parse_args().words:
        measure_all()
    write_documentation(read_record())


def measure_all() -> None:
    """Answer every question again, and record the numbers if every fact holds."""
    start = time.perf_counter()
    result = answer_questions(progress=lambda stage, *_: print(stage, file=sys.stderr))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{time.perf_counter() - start:.0f} s, {peak:.2f} GB at the peak", file=sys.stderr)
    failed = [answer.verdict for answer in result.answers if not answer.holds]
    missing = [*(error.saw for _, error in result.left_out)]
    missing += [result.fallback.saw] if result.fallback else []
    if failed or missing:
        sys.exit("\n".join([*failed, *missing]))
    RECORD.write_text(record_as_text(result.as_json()), "utf-8")


if __name__ == "__main__":
    main()

"""The page docs/paths.md: written from outcomes, and read back row by row."""

from collections.abc import Mapping

from tests.paths.outcomes import NOTES, Outcome
from tests.paths.registry import PATHS, Path
from tests.paths.subjects import SUBJECTS
from tests.root import ROOT

PAGE = ROOT / "docs" / "paths.md"

HEAD = """\
# Paths

What works where. Each cell was run on the CPU, with torch 2.13.0, by the tests in `tests/paths`,
which fail when this page is not what they find. `python -m tests.paths --write` writes it.
`make oldest` and `make newest` run these and other tests at both ends of the range of torch; the
[log](log.md) has what was run with torch 2.13.0 and with torch 2.14.1, and what failed at first.

- **works**: the outputs, and on paths with a backward pass the gradients, are within the error
  budget of the float64 reference, or the same bits as in eager mode. Where lengths can vary, one
  graph served short and long ones.
- **raises**: it does not work; the note says what was raised and what to do.
- **–**: not run, since it would say nothing new: dropout where nothing trains, the graphs of
  torch.compile that inductor would compile a second time, and TorchScript of what is no layer.
- A number is a note below. It is there only while it is true.

No queries x keys is written ([clause 5](contract.md#5-memory-and-inputs)) unless a note says so.
It was looked for in every operator that ran, inside the tiled kernel as well and through the
backward pass; in every node of a graph; or not at all, as the second column says.
"""

DEVICES = """
## On an accelerator

None was measured. `tests/contract/accelerator.py` runs everything with tensors that have a device
and no values: nothing mixes devices or reads a value, but for what stands below. Indices and the
queries of `seen_by` may be on the CPU; masks, score biases, gates and positions on another device
are refused. These read values:

- `A @ v` and the native layer, above 2**31 multiply-adds: lengths, starts and segments, to skip
  padding.
- A call of several tokens with a cache and a mask that names every key: one boolean.
- The drop-in with `is_causal=True` and a square mask of 256 queries or more: the mask.
- Some statistics, the positions of real tokens:
  `duplicate_token`, `induction`, `copying`, `output_cosine`, `cka`, `total_variation`,
  `head_distance`, `top_keys`, `map`.
"""


def page(rows: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The whole page, from the outcomes of each path by its key."""
    numbers = numbered(rows)
    names = [subject.name for subject in SUBJECTS]
    lines = [HEAD, "| path | looked at | " + " | ".join(names) + " |"]
    lines += ["| --- | --- |" + " --- |" * len(names)]
    lines += [line(path, rows[path.key], numbers) for path in PATHS]
    lines += ["", "## Notes", ""]
    lines += [f"{number}. {NOTES[key].text}" for key, number in numbers.items()]
    lines += ["", "## What was run", ""]
    lines += [f"- **{subject.name}**: {subject.what}" for subject in SUBJECTS]
    return "\n".join(lines) + "\n" + DEVICES


def numbered(rows: Mapping[str, Mapping[str, Outcome]]) -> dict[str, int]:
    """The notes that some cell has, in the order of `NOTES`."""
    used = {key for row in rows.values() for outcome in row.values() for key in outcome.notes}
    return {key: number for number, key in enumerate((k for k in NOTES if k in used), 1)}


def line(path: Path, row: Mapping[str, Outcome], numbers: Mapping[str, int]) -> str:
    """One row of the table."""
    cells = [path.title, path.looked_at]
    for subject in SUBJECTS:
        outcome = row[subject.name]
        own = sorted(numbers[key] for key in outcome.notes)
        cells.append(outcome.word + (f" [{', '.join(map(str, own))}]" if own else ""))
    return "| " + " | ".join(cells) + " |"


def read(text: str) -> dict[str, dict[str, Outcome]]:
    """The outcomes that a page states; the inverse of `page`."""
    keys = {note.text: key for key, note in NOTES.items()}
    stated = [part.partition(". ") for part in text.splitlines() if part[:1].isdigit()]
    notes = {number: keys.get(words, words) for number, _, words in stated}
    found = {}
    for path in PATHS:
        cells = [x.strip() for x in _row_of(text, path.title).strip("|").split("|")][2:]
        found[path.key] = {
            subject.name: _outcome(cell, notes)
            for subject, cell in zip(SUBJECTS, cells, strict=True)
        }
    return found


def _row_of(text: str, title: str) -> str:
    return next(x for x in text.splitlines() if x.startswith(f"| {title} |"))


def _outcome(cell: str, notes: Mapping[str, str]) -> Outcome:
    word, _, numbers = cell.rstrip("]").partition(" [")
    return Outcome(word, tuple(notes[n] for n in numbers.split(", ") if n))

"""The record docs/huggingface.json, and the page docs/huggingface.md that is written from it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from tools.huggingface_classes import loads, stored, trial

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "huggingface.json"
PAGE = ROOT / "docs" / "huggingface.md"
PASSING = ("seconds",)  # what another run may find otherwise without anything being different
Rows = dict[str, dict[str, Any]]

HEAD = """# Hugging Face classes, one by one

To use headwise's attention in transformers, call
[`register_huggingface()`](reference/huggingface.md). The tutorial
[Generate with a cache and unequal prompts](tutorials/generate.md) does it for GPT-2.

This page is a record. Every model type of transformers {version} was tried:
{types} of them, each by one class, built small with random weights and scanned
by `headwise.scan`. This page was written from
[the record](huggingface.json) by `python -m tools.huggingface_classes`.

**{all} classes are seen in all layers, with the outputs of the model's own attention.**

| | classes |
|---|---:|
{counts}

How to read it:

- **The class** of a model type is its base class; where it has none, that of its first task. For a
  tower of another model (a text or vision part), it is the class that takes its configuration.
  The classes for tasks add no attention to these.
- **A layer** is a module with parameters that says attention in its class name, holds none that
  does, and in which a softmax or a fused attention ran. Both are found below torch's functions, so
  a layer counts whatever computes it. Outside of such modules, a fused attention or a softmax
  along the last of four axes counts for the module that it runs in. Routers and poolings do not.
- **Layers** says how many were seen, of how many ran. Where an input leaves a part of the model
  idle, its modules are named: they were not tried here, but mostly are in a row of their own.
- **Through** is what the scan reached them by: transformers' attention interface, torch's
  `scaled_dot_product_attention` (SDPA), or `nn.MultiheadAttention`.
- **Error** is the largest share of the budget that an output of the scanned run uses, at real
  positions. The budget is [the usual one](budget.md): twice the error of the model's own attention
  in float32, over a family of moved weights and inputs, against the same model in float64, and how
  far that moves. More than 1 would be a difference.
- **Layout** is what `headwise detect` says of the stored weights, by their config.json and a run of
  the model ([the catalogue](catalogue.md)): {by_run} classes. In brackets, {by_config} more: by the
  config alone, where the layers could not be compared. Of several that are one map, the first is
  named. Nothing stands there where the catalogue knows none, or several, one for each part. In no
  row does a run contradict the config.
- **Loads** is what `load_attention` makes of the stored layers. Each load is proved against the
  class; here the layer is compared once more, with what a run of the whole model shows of it.
  {loaded} types load in all modules that a layout has whole, {given} of them with `inputs=`, a call
  of the class that the user knows; {some} load in some modules, and none with other numbers. The
  others are refused, for the reason that is named.
"""

SECTIONS = (
    (trial.ALL, "Seen in all layers", ""),
    (trial.PART, "Seen in part", "What was not seen is named, by `HeadScan.notes` too."),
    (
        trial.DIFFERS,
        "Seen, with other outputs",
        "Defects, or a reference that could not be had. Do not trust a scan of these.",
    ),
    (
        trial.REFUSED,
        "Refused",
        "They compute attention by code of their own, or ask for what a matrix has no place for. "
        "The scan raises and says so.",
    ),
    (
        trial.NONE,
        "Without softmax attention",
        "Linear attention, state spaces, Fourier mixing, convolutions: nothing to be seen. Classes "
        "that say attention, ran, and took no softmax are named.",
    ),
    (
        trial.NOT_RUN,
        "Not tried",
        "No small configuration or input was found, or the class needs a package that is not "
        "installed. This says nothing of whether a scan sees them.",
    ),
    (trial.NO_CLASS, "No class", "Configurations of parts that no model class takes by itself."),
)


def rows(lines: Path) -> Rows:
    """The last row of each model type in a file of lines."""
    if not lines.exists():
        return {}
    read = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    return {row["model_type"]: row for row in read}


def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    return content


def write_record(found: Rows) -> None:
    """One line for each row, so that a change shows as one."""
    lines = [
        json.dumps({name: x for name, x in found[key].items() if name not in PASSING})
        for key in sorted(found)
    ]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    body = ",\n".join(lines)
    RECORD.write_text(f'{{"versions": {json.dumps(versions)},\n"rows": [\n{body}\n]}}\n', "utf-8")


def write_page() -> None:
    PAGE.write_text(page(record()), "utf-8")


def page(found: dict[str, Any]) -> str:
    """The page that belongs to a record."""
    by_verdict: dict[str, list[dict[str, Any]]] = {verdict: [] for verdict, _, _ in SECTIONS}
    for row in found["rows"]:
        by_verdict[row["verdict"]].append(row)
    counts = Counter({verdict: len(each) for verdict, each in by_verdict.items()})
    head = HEAD.format(
        version=found["versions"]["transformers"],
        types=len(found["rows"]),
        all=counts[trial.ALL],
        loaded=sum(row.get("loads") == loads.LOADED for row in found["rows"]),
        given=sum(row.get("loads_not") == loads.WITH_INPUTS for row in found["rows"]),
        some=sum(row.get("loads") == loads.SOME for row in found["rows"]),
        by_run=sum(row.get("layout_by") == stored.BY_RUN for row in found["rows"]),
        by_config=sum(row.get("layout_by") == stored.BY_CONFIG for row in found["rows"]),
        counts="\n".join(
            f"| [{title}](#{_anchor(title)}) | {counts[verdict]} |"
            for verdict, title, _ in SECTIONS
        ),
    )
    sections = [
        _section(verdict, title, words, by_verdict[verdict])
        for verdict, title, words in SECTIONS
        if by_verdict[verdict]
    ]
    return "\n".join([head, *sections])


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace(",", "")


def _section(verdict: str, title: str, words: str, found: list[dict[str, Any]]) -> str:
    is_scanned = verdict in (trial.ALL, trial.PART, trial.DIFFERS)
    columns = ["Class", "Model type"]
    columns += ["Layers", "Through", "Error"] if is_scanned else []
    columns += ["Layout", "Loads"] if is_scanned or verdict == trial.REFUSED else []
    columns += [] if verdict == trial.NO_CLASS else ["Idle, or missed" if is_scanned else "Reason"]
    lines = [f"## {title}", "", *([words, ""] if words else [])]
    lines += [_line(columns), _line(["---"] * len(columns))]
    for row in sorted(found, key=lambda r: (str(r.get("class_name", "")).lower(), r["model_type"])):
        cells = [f"`{row['class_name']}`" if "class_name" in row else "", f"`{row['model_type']}`"]
        if is_scanned:
            cells += [_layers(row), ", ".join(row.get("reached", ())), _ratio(row)]
        if is_scanned or verdict == trial.REFUSED:
            cells += [_layout(row), _loads(row)]
        if verdict != trial.NO_CLASS:
            cells.append(_words(row))
        lines.append(_line(cells))
    return "\n".join([*lines, ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _layers(row: dict[str, Any]) -> str:
    return f"{sum(row.get('seen', {}).values())} of {sum(row.get('ran', {}).values())}"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2g}" if "ratio" in row else ""


def _layout(row: dict[str, Any]) -> str:
    name = row.get("layout", "")
    linked = f"[{name}](catalogue.md#layout-{name})"
    return "" if not name else linked if row["layout_by"] == stored.BY_RUN else f"({linked})"


def _loads(row: dict[str, Any]) -> str:
    outcome, reason = row.get("loads", ""), _escape(row.get("loads_not", ""))
    said = "yes" if outcome == loads.LOADED else outcome
    return f"{said}: {reason}".strip(": ")


def _words(row: dict[str, Any]) -> str:
    """The reason, and what else ran or did not."""
    first = row.get("reason", "").split("; ")[0].partition(" needed: ")[0].removeprefix(": ")
    said = [first[:200]] if first else []
    seen, ran = row.get("calls", 0), row.get("softmaxes", 0)
    if row["verdict"] == trial.ALL and seen < ran:
        said.append(f"{ran} softmaxes, {seen} of them attention: outputs agree")
    if row.get("without_softmax"):
        said.append(f"no softmax in {', '.join(row['without_softmax'])}")
    if row.get("idle"):
        said.append(f"idle: {', '.join(row['idle'])}")
    return _escape("; ".join(said))


def _escape(words: str) -> str:
    """Words in which no bar or angle bracket is read as a table's or as a tag's."""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")

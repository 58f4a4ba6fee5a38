"""Scores of whole models: ``python -m benchmarks.field.score_models [MODEL ...]``.

A fault in attention is right if the first layer that is said to part, and its first stage, are
those of the case; a fault elsewhere if no attention is blamed and the place is right.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

import headwise
from benchmarks.field.check_models import KINDS, ModelCase, build_peer, read_model_cases
from benchmarks.field.score import interval
from headwise.diagnosis.subjects.subject import FAILURES, describe_error
from headwise.errors import HeadwiseError
from headwise.function.records import STAGES
from headwise.identify.comparison import LayerComparison, ModelComparison

RECORD = Path("build") / "field-models.jsonl"

# The words of the cases, as stages of headwise. A mask is a part of the scores; where a kernel
# computes scores and softmax together, weights are the first stage that shows either.
OF_WEIGHTS = {"scores", "weights"}
WORDS = {
    "q, k, v projection": {"q", "k", "v"},
    "heads of k and v": {"k", "v", "k after norm", "k after rotary", "head outputs"} | OF_WEIGHTS,
    "norm": {"q after norm", "k after norm"},
    "rotation": {"q after rotary", "k after rotary"},
    "scores": OF_WEIGHTS,
    "mask": OF_WEIGHTS,
    "softmax": OF_WEIGHTS,
    "head outputs": {"head outputs"},
    "output projection": {"output"},
}
# The place outside attention: the attentions of one layer around it are those of its block.
IN_FRONT = (
    "outside: embedding",
    "outside: norm before attention",
    "outside: norm of the embedding",
)
AT_THE_END = ("outside: final norm", "outside: head")


@dataclass(frozen=True)
class Score:
    """What was said of one case.

    Attributes:
        case: of which.
        answer: "right"; "stage" or "layer" (a wrong one); "same"; "outside" (for a fault in
            attention), "place" (a wrong one outside), "blame" (of an attention that is right);
            "unclear", "refused", or "failed" (an error that is none of headwise's).
        said: in a few words.
        causes: that were named.
        seconds: of processor time.
    """

    case: ModelCase
    answer: str
    said: str
    causes: tuple[str, ...]
    seconds: float


def score(case: ModelCase) -> Score:
    """Run a case, and judge what is said of it."""
    module = case.module()
    peer = build_peer(module)
    port = module.make(peer).eval()
    inputs = module.inputs(torch.Generator().manual_seed(1))
    start = time.process_time()
    try:
        diagnosis = headwise.compare(port, peer, inputs)
    except HeadwiseError as error:
        return Score(case, "refused", str(error.saw), (), time.process_time() - start)
    except FAILURES as error:
        return Score(case, "failed", describe_error(error), (), time.process_time() - start)
    seconds = time.process_time() - start
    compared = diagnosis.model
    assert compared is not None
    answer = _judge(case, compared, is_same=diagnosis.verdict.is_same)
    first = next(iter(_blamed(compared)), None)
    said = f"{diagnosis.verdict}: {compared.difference_outside_attention or '-'}; "
    said += "-" if first is None else f"{first.other_name}, {_first_stage(first)}"
    return Score(case, answer, said, tuple(compared.cause_names), seconds)


def _judge(case: ModelCase, compared: ModelComparison, *, is_same: bool) -> str:
    if is_same:
        return "right" if case.kind == "same" else "same"
    blamed, place = _blamed(compared), compared.difference_outside_attention
    if case.kind == "same":
        return "blame" if blamed or place else "unclear"
    if case.kind == "outside":
        if not place:
            return "blame" if blamed else "unclear"
        return ("right" if _is_right_place(case, compared) else "place") if not blamed else "blame"
    if place or not blamed:
        return "outside" if place else "unclear"
    if not _is_layer(blamed[0].other_name, case.stack, max(case.layer, 0)):
        return "layer"
    return "right" if _first_stage(blamed[0]) in WORDS[case.stage] else "stage"


def _blamed(compared: ModelComparison) -> list[LayerComparison]:
    """Return the attentions that part, but for those whose outputs agree."""
    return [layer for layer in compared.differing_layers if not layer.outputs_agree]


def _first_stage(layer: LayerComparison) -> str:
    if layer.exchanged_with:
        return "q"  # all projections are those of another layer
    parted = {each.stage for each in layer.comparison.parted}
    return next(stage for stage in STAGES if stage in parted)


def _is_layer(name: str, stack: str, number: int) -> bool:
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdigit()]
    return numbers[:1] == [number] and stack in ("", *parts)


def _is_right_place(case: ModelCase, compared: ModelComparison) -> bool:
    """True if the first input that differs is that of the next attention after the fault."""
    names = [layer.other_name for layer in compared.layers]
    here = next((n for n, x in enumerate(compared.layers) if x.has_other_input), len(names))
    of_stack = [n for n, x in enumerate(names) if case.stack in ("", *x.split("."))]
    if case.stage.startswith(IN_FRONT):
        return here == of_stack[0]
    if case.stage in AT_THE_END:
        # What an encoder returns enters the second attention of a decoder's layer.
        return here in ((of_stack[-1] + 1, of_stack[-1] + 2) if case.stack else (of_stack[-1] + 1,))
    block = [n for n in of_stack if _is_layer(names[n], case.stack, max(case.layer, 0))]
    # A fault of both stacks shows in the first.
    block = [n for n in block if n < block[0] + 2 and names[n][:7] == names[block[0]][:7]]
    is_after_block = case.stage in ("outside: mlp", "outside: residual")
    # A residual may be that around attention, before the next one of the same block.
    first = block[-1] if case.stage == "outside: mlp" else block[0]
    last = block[-1] if is_after_block else block[0]
    return first < here <= last + 1


def table(scores: Iterable[Score]) -> Iterator[str]:
    """Yield the lines of the table: by kind, and the faults in attention by stage."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        groups[each.case.kind].append(each)
        if each.case.kind == "single":
            groups[f"  {each.case.stage}"].append(each)
    for name in ("single", *(f"  {stage}" for stage in WORDS), *KINDS[1:]):
        if rows := groups[name]:
            answers = Counter(each.answer for each in rows)
            right, seconds = answers["right"], [each.seconds for each in rows]
            low, high = interval(right, len(rows))
            yield (
                f"{name:22} {right:4} of {len(rows):4} {right / len(rows):6.1%} "
                f"({low:.1%} to {high:.1%}), {dict(answers.most_common())}, "
                f"median {median(seconds):.1f} s, longest {max(seconds):.0f} s"
            )


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Only these models.")] = None,
    *,
    kind: Annotated[str, typer.Option(help="Only cases of this kind.")] = "",
    every: Annotated[int, typer.Option(help="Only every n-th case.")] = 1,
) -> None:
    """Score each case, write what was said to build/field-models.jsonl, and print a table."""
    cases = [case for case in read_model_cases(models) if kind in ("", case.kind)][::every]
    RECORD.parent.mkdir(exist_ok=True)
    scores = []
    with RECORD.open("w", encoding="utf-8") as record:
        for each in map(score, cases):
            scores.append(each)
            case = {"model": each.case.model, "case": each.case.name, "kind": each.case.kind}
            rest = {"answer": each.answer, "said": each.said, "causes": each.causes}
            record.write(json.dumps(case | rest | {"seconds": round(each.seconds, 2)}) + "\n")
            name = f"{each.case.kind} {each.case.model} {each.case.name} ({each.case.stage})"
            print(f"{each.answer:8} {each.seconds:5.1f} s  {name}: {each.said}", flush=True)
    for line in table(scores):
        print(line)


if __name__ == "__main__":
    typer.run(main)

"""Heads that go by `headwise.surgery` and by plain recipes: ``python -m benchmarks.choice``.

Each recipe gives every head a number, and those with the smallest go: of the whole model, but for
one of each layer. All cuts have the same repair, the mean outputs in the bias, so that the choice
alone differs. The models are those of ``make pictures``, with the same data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.pruning import batches_of
from headwise import scan
from headwise.models import tiny
from headwise.models.minilm import model_folder
from headwise.models.text import read_sentences
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.scanning.importance import record_sums
from headwise.surgery import PruningPlan, cut_model, plan_prune
from headwise.surgery.choice import Effects, Journal, Search
from headwise.surgery.quality import interval
from tools.surgery_pictures import read_ports

KEEPS, DRAWS = (0.75, 0.5), 20
Options = dict[str, Any]
# of `plan_prune`; the first one is the default
WAYS: dict[str, Options] = {
    "ablation": {},
    "ablation, three rounds": {"rounds": 3},
    "gradient": {"by": "gradient"},
}


@dataclass(frozen=True)
class Trial:
    """A model, and the data to choose and to measure on."""

    model: nn.Module
    to_fit: list[Any]
    held_out: list[Any]
    journal: Journal

    def plan(self, keep: float, **options: Any) -> PruningPlan:
        """Return the plan of headwise."""
        given: Options = {"repair": "mean", "journal": self.journal} | options
        return plan_prune(self.model, self.to_fit, held_out=self.held_out, keep=keep, **given)


def read_trials() -> Iterator[tuple[str, nn.Module, list[Any], list[Any]]]:
    """Yield the name, the model and the data of the small model and of the encoder."""
    from transformers import AutoModel, AutoTokenizer

    first, second = read_ports()
    yield "the model that ships", tiny.load(), [first], [second]
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    to_fit, held_out = (
        [dict(each) for each in batches_of(half, tokenizer)] for half in read_sentences()
    )
    yield "all-MiniLM-L6-v2", AutoModel.from_pretrained(model_folder()), to_fit, held_out


# ---- plain recipes: a number for each head -------------------------------------------------------


def by_zero_ablation(trial: Trial, _: PruningPlan) -> Effects:
    """What the measure loses where a head's output is zero (Michel et al. 2019, section 3)."""
    return trial.plan(KEEPS[0], repair="zero", journal=None).choice.effects


def by_weights(_: Trial, plan: PruningPlan) -> Effects:
    """The norm of a head's output projection."""
    return {name: plan.heads.canonical(name)["wo"].flatten(1).norm(dim=1) for name in plan.names}


def by_what_is_written(trial: Trial, plan: PruningPlan) -> Effects:
    """The norm of what a head adds to the layer's output, on average over tokens."""
    projections = {label: plan.heads.canonical(name)["wo"] for name, label in plan.names.items()}

    def measure(call: CapturedCall) -> Iterator[tuple[str, Tensor]]:
        outputs = require_not_none(call.outputs).transpose(1, 2)[call.real_queries]
        written = torch.einsum("nhv,hvo->nho", outputs, projections[call.layer])
        yield call.layer, written.norm(dim=-1).double().sum(0)

    with torch.no_grad():
        sums = record_sums(trial.model, trial.to_fit, measure)
    return {name: sums[label] for name, label in plan.names.items()}


def by_confidence(trial: Trial, plan: PruningPlan) -> Effects:
    """The largest weight of a query, on average (Voita et al. 2019, section 4)."""
    recorded = scan(trial.model, trial.to_fit)
    rows = dict(zip(recorded.layers, recorded["maximum"], strict=True))
    return {name: rows[label].double() for name, label in plan.names.items()}


RECIPES: dict[str, Callable[[Trial, PruningPlan], Effects]] = {
    "zero ablation": by_zero_ablation,
    "norm of the output projection": by_weights,
    "norm of what is written": by_what_is_written,
    "largest weight": by_confidence,
}


def with_effects(plan: PruningPlan, effects: Effects, keep: float) -> PruningPlan:
    """Return the plan whose heads go by other numbers."""
    search = Search(plan.heads, lambda *_: effects, tuple(plan.names), plan.take, even=False)
    return replace(plan, choice=search.choose(keep, 1))


def draw(plan: PruningPlan, seed: int) -> Effects:
    """Random numbers for all heads."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(len(each), generator=generator)
        for name, each in plan.choice.effects.items()
    }


# ---- the table -----------------------------------------------------------------------------------


def measure(plan: PruningPlan) -> Tensor:
    """The quality of each held-out sequence after the cut."""
    return plan.quality.values(
        cut_model(plan.cut, plan.heads.model, share=True), plan.data.held_out
    )


def add_model(table: Table, name: str, trial: Trial) -> None:
    """Add a row for each way, with its mean quality, less that of the default."""
    effects: dict[str, Effects] = {}
    for keep in KEEPS:
        base, default = torch.tensor(0.0), None
        for way, options in WAYS.items():
            start = time.process_time()
            plan = trial.plan(keep, **options)
            seconds, kept = time.process_time() - start, measure(plan)
            if default is None:
                base, default = kept, plan
            _add_row(table, name, keep, way, kept, base, f"{seconds:.1f}")
        assert default is not None
        for way, recipe in RECIPES.items():
            start = time.process_time()
            fresh = way not in effects
            numbers = effects[way] = effects.get(way) or recipe(trial, default)
            words = f"{time.process_time() - start:.1f}" if fresh else ""
            kept = measure(with_effects(default, numbers, keep))
            _add_row(table, name, keep, way, kept, base, words)
        draws = [with_effects(default, draw(default, seed), keep) for seed in range(DRAWS)]
        kept = torch.stack([measure(each) for each in draws]).mean(0)
        _add_row(table, name, keep, f"at random, mean of {DRAWS} draws", kept, base, "")


def _add_row(
    table: Table, name: str, keep: float, way: str, kept: Tensor, base: Tensor, seconds: str
) -> None:
    low, high = interval(kept - base)
    words = f"{float((kept - base).mean()):+.4f} [{low:+.4f}, {high:+.4f}]"
    table.add_row(name, f"{keep:g}", way, f"{float(kept.mean()):.4f}", words, seconds)
    print(name, keep, way, f"{float(kept.mean()):.4f}", words, seconds, flush=True)


def main() -> None:
    """Print one table; a way is better than the default where its interval is above zero."""
    table = Table("model", "keep", "heads go by", "quality", "less the default, 95 %", "CPU s")
    with TemporaryDirectory() as folder:
        for number, (name, model, to_fit, held_out) in enumerate(read_trials()):
            journal = Journal(Path(folder, f"{number}.json"), name)
            add_model(table, name, Trial(model.eval(), to_fit, held_out, journal))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

"""Effects of single heads on quality, in a model from which other heads may be gone already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.importance import ablations, gradients
from headwise.support.files import parse_json_object, write_whole
from headwise.support.progress import Progress
from headwise.surgery.choice import Effects, Heads
from headwise.surgery.fit import cut_heads
from headwise.surgery.memory import cut_model
from headwise.surgery.models import ModelHeads
from headwise.surgery.quality import Quality

By = Literal["ablation", "gradient"]


class Journal:
    """File of the effects of heads, by what was measured.

    A file of another identity, or one that cannot be read, is begun anew.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path, self._identity = path, identity
        self._entries: dict[str, list[float]] = {}
        with suppress(OSError, ValueError):
            values = parse_json_object(path.read_bytes())
            if values.get("identity") == identity:
                self._entries = dict(values["effects"])

    def find(self, key: str) -> Tensor | None:
        """Return the effects of an earlier run, (heads,); None where there are none."""
        effects = self._entries.get(key)
        return None if effects is None else torch.tensor(effects, dtype=torch.float64)

    def add(self, key: str, effects: Tensor) -> None:
        """Keep the effects (heads,) that were measured."""
        self._entries[key] = effects.tolist()
        values = {"identity": self._identity, "effects": self._entries}
        write_whole(self._path, json.dumps(values) + "\n")


@dataclass(frozen=True, eq=False)
class HeadEffects:
    """Measurement of the quality that is lost without a head."""

    heads: ModelHeads
    names: Mapping[str, str]  # the recorded name of each attention, by its name in a cut
    inputs: list[Any]
    quality: Quality
    # mean outputs (heads, value_dim), by name in a cut: the output of a head that is off. None for
    # zero.
    means: Mapping[str, Tensor] | None
    progress: Progress  # called with (stage, steps done, steps in all)
    journal: Journal | None = None  # keeps effects by ablation for a later run; None for none

    def by_ablation(self, gone: Heads, chosen: Heads) -> Effects:
        """Return the loss of quality without each of the chosen heads, one at a time.

        See `headwise.scanning.importance.ablations`.
        """
        model = self._without(gone)
        by: Any = "zero"
        if self.means is not None:
            by = {self.names[name]: mean for name, mean in self.means.items()}
        passes = {name: len(self.inputs) * (1 + len(heads)) for name, heads in chosen.items()}
        effects, before, total = {}, 0, sum(passes[name] for name in chosen if chosen[name])

        def report(stage: str, done: int, _: int) -> None:
            self.progress(stage, before + done, total)

        for name, numbers in chosen.items():
            key = json.dumps([name, sorted(numbers), {n: sorted(x) for n, x in gone.items() if x}])
            known = None if self.journal is None else self.journal.find(key)
            if known is not None:
                effects[name] = known
            elif numbers:
                labels = self.heads.original_numbers(name)
                scan = ablations(
                    model,
                    self.inputs,
                    by=by,
                    loss=self.quality.loss,
                    layers=self.names[name],
                    heads=[labels[number] for number in numbers],
                    progress=report,
                )
                [row] = scan["ablation_zero" if self.means is None else "ablation_mean"]
                effects[name] = row[labels]
                if self.journal is not None:
                    self.journal.add(key, effects[name])
            before += passes[name]
        return effects

    def by_gradient(self, gone: Heads, chosen: Heads) -> Effects:
        """Return an estimate to first order of the change of quality without each head.

        It is the mean over sequences of |∂L/∂gate|; see `headwise.scanning.importance.gradients`.

        Raises:
            OptionError: a likeness to the original, whose gradient is 0.
        """
        if self.quality.is_likeness:
            raise OptionError(
                saw=f"by='gradient' for the {self.quality.title}, whose gradient is 0 there",
                needed="a loss with a gradient, such as that of the next token or of a task",
                do="measure=function, where function(output, inputs) returns minus a loss "
                "(batch,); or by='ablation'",
            )
        layers = [self.names[name] for name, numbers in chosen.items() if numbers]
        self.progress("gradients of all heads", 0, 1)
        scan = gradients(self._without(gone), self.inputs, loss=self.quality.loss, layers=layers)
        rows = dict(
            zip([layer.name for layer in scan.layer_scans], scan["gate_gradient"], strict=True)
        )
        self.progress("gradients of all heads", 1, 1)
        return {
            name: _select(rows[self.names[name]][self.heads.original_numbers(name)], numbers)
            for name, numbers in chosen.items()
            if numbers
        }

    def _without(self, gone: Heads) -> Any:
        if not any(gone.values()):
            return self.heads.model
        return cut_model(cut_heads(self.heads, gone, self.means, zeroed=True), self.heads.model)


def _select(values: Tensor, numbers: list[int]) -> Tensor:
    chosen = torch.full_like(values, torch.nan)
    chosen[numbers] = values[numbers]
    return chosen

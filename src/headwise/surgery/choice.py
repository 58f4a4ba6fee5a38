"""Choice of the heads that go: by importance, in rounds, under constraints.

A head's effect is the quality that is lost without it. A unit is what goes together: a kv head with
its query heads, or one query head of each kv head; and under a shared table of distances the same
heads of all layers of a stack.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.scanning.importance import ablations, gradients
from headwise.scanning.record import record_attention
from headwise.support.files import parse_json_object, write_whole
from headwise.support.progress import Progress
from headwise.support.text import describe_count
from headwise.surgery.fit import cut_heads
from headwise.surgery.memory import cut_model
from headwise.surgery.models import ModelHeads
from headwise.surgery.quality import Likeness, Quality

By = Literal["ablation", "gradient"]
Take = Literal["groups", "heads"]
Effects = dict[str, Tensor]  # (heads,) in float64, by layer
Heads = dict[str, list[int]]  # by layer
# (heads that are gone, heads to measure) -> effects of these, NaN for others
Importance = Callable[[Heads, Heads], Effects]
PROBES = 4  # random directions of a curvature


@dataclass(frozen=True)
class Unit:
    """Heads that go together."""

    layers: tuple[str, ...]  # names of the layers that lose them
    heads: tuple[int, ...]  # their numbers, the same in each layer
    effect: float  # the sum of their single effects

    @property
    def size(self) -> int:
        """The number of heads in all layers."""
        return len(self.layers) * len(self.heads)


Step = tuple[Unit, ...]  # units that go at once


@dataclass(frozen=True, eq=False)
class Choice:
    """Order in which heads go, and how many of them."""

    effects: Effects  # the effect of each head with all others there, (heads,), by layer
    # all units that may go, the first ones first. One unit of each layer is in none.
    steps: tuple[Step, ...]
    taken: int  # the number of steps that are done

    def gone(self, steps: int | None = None) -> Heads:
        """Return the heads that are gone after so many steps, by default those of the choice."""
        gone = _list_heads(self.effects, self.steps[: self.taken if steps is None else steps])
        return {name: sorted(heads) for name, heads in gone.items()}

    @property
    def predicted(self) -> float:
        """The sum of the single effects of the heads that go: the quality that they cost alone."""
        return sum(unit.effect for unit in chain(*self.steps[: self.taken]))

    @property
    def total(self) -> int:
        """The number of heads of all layers."""
        return sum(map(len, self.effects.values()))

    def kept(self, steps: int | None = None) -> int:
        """Return the number of heads that are left."""
        return self.total - sum(map(len, self.gone(steps).values()))


@dataclass
class Search:
    """Search for the heads that go."""

    heads: ModelHeads
    importance: Importance  # measures the effects of heads in a model without some others
    layers: tuple[str, ...]  # names of the layers that may lose heads, in the order of a run
    # "groups" for whole kv heads with their query heads, "heads" for one query head of each kv
    # head. Without grouped heads they are the same, and so with one kv head.
    take: Take
    even: bool  # True to take as many units from each layer
    effects: Effects = field(default_factory=dict)

    def choose(self, keep: float, rounds: int) -> Choice:
        """Return the choice that keeps at least this share of all heads.

        The first round measures all heads. Each further one measures again, without the heads that
        are gone, the heads that come next: twice as many as still have to go.

        Raises:
            OptionError: no head can go.
        """
        specs = self.heads.specs
        everything = {name: [*range(int(specs[name].num_heads))] for name in self.layers}
        out = sum(map(len, everything.values()))
        out -= math.ceil(keep * out - 1e-9)  # 0.7 * 10 may be just above 7
        first = self.importance({}, everything)
        self.effects = dict(first)
        done: list[Step] = []
        for number in range(1, rounds + 1):
            if number > 1:
                self._measure_again(done, 2 * (out - _size(done)))
            steps, most = self._order(done), out * number // rounds - _size(done)
            sizes = accumulate(_size([step]) for step in steps)
            done += [step for step, size in zip(steps, sizes, strict=True) if size <= most]
        if not done:
            least = _size(self._order([])[:1])
            raise OptionError(
                saw=f"keep={keep}, with which at most {describe_count(out, 'head')} may go",
                needed=f"at least {least}: as many go at once"
                if least
                else "a layer with several heads, of which one stays",
                do="a smaller keep, even=False or take='heads'"
                if least
                else "leave the model as it is",
            )
        return Choice(first, (*done, *self._order(done)), len(done))

    def _measure_again(self, done: list[Step], least: int) -> None:
        following: list[Step] = []
        for step in self._order(done):
            if _size(following) < least:
                following.append(step)
        gone, chosen = (_list_heads(self.layers, steps) for steps in (done, following))
        measured = self.importance(gone, chosen)
        for name, effects in measured.items():
            self.effects[name] = torch.where(effects.isnan(), self.effects[name], effects)

    def _order(self, done: list[Step]) -> list[Step]:
        gone = _list_heads(self.layers, done)
        spare = []
        for stack in self.heads.stacks:
            if layers := tuple(name for name in stack if name in self.layers):
                units = sorted(self._units(layers, gone), key=_effect_of_one_head)
                spare.append(units[:-1])  # one of each layer stays
        if self.even:
            rows = zip_longest(*spare)
            return [tuple(unit for unit in row if unit is not None) for row in rows]
        return [(unit,) for unit in sorted(chain(*spare), key=_effect_of_one_head)]

    def _units(self, layers: tuple[str, ...], gone: Heads) -> list[Unit]:
        spec = self.heads.specs[layers[0]]
        count, group = int(spec.num_heads), int(spec.num_heads) // int(spec.num_kv_heads)
        effects = torch.stack([self.effects[name] for name in layers]).sum(0)
        groups = [
            [head for head in range(start, start + group) if head not in gone[layers[0]]]
            for start in range(0, count, group)
        ]
        # The least important ones of each kv head go together; an only kv head stays.
        if self.take == "heads" or len(groups) == 1:
            ordered = [sorted(heads, key=lambda head: float(effects[head])) for heads in groups]
            groups = [[*row] for row in zip(*ordered, strict=True)] if group > 1 else groups
        return [
            Unit(layers, tuple(sorted(heads)), float(effects[heads].sum()))
            for heads in groups
            if heads
        ]


def _list_heads(layers: Iterable[str], steps: Sequence[Step]) -> Heads:
    heads: Heads = {name: [] for name in layers}
    for unit in chain(*steps):
        for name in unit.layers:
            heads[name] += unit.heads
    return heads


def _effect_of_one_head(unit: Unit) -> float:
    return unit.effect / unit.size


def _size(steps: Sequence[Step]) -> int:
    return sum(unit.size for unit in chain(*steps))


# ---- effects of single heads on quality ----------------------------------------------------------


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

        One input after another, with all layers; see `headwise.scanning.importance.ablations`.
        """
        model, chosen = (
            self._without(gone),
            {name: heads for name, heads in chosen.items() if heads},
        )
        by: Any = "zero"
        if self.means is not None:
            by = {self.names[name]: mean for name, mean in self.means.items()}
        labels = {name: self.heads.original_numbers(name) for name in chosen}
        heads = {self.names[n]: [labels[n][head] for head in x] for n, x in chosen.items()}
        runs = 1 + sum(map(len, chosen.values()))
        which = {name: sorted(heads) for name, heads in gone.items() if heads}
        sums = torch.zeros(1)  # over sequences, and at last their number
        for number, given in enumerate(self.inputs):

            def report(stage: str, done: int, _: int, before: int = number * runs) -> None:
                self.progress(stage, before + done, runs * len(self.inputs))

            key = json.dumps([number, chosen, which])
            some = None if self.journal is None else self.journal.find(key)
            if some is None:
                scan = ablations(
                    model,
                    [given],
                    by=by,
                    loss=self.quality.loss,
                    layers=[*heads],
                    heads=heads,
                    progress=report,
                )
                values = scan["ablation_zero" if self.means is None else "ablation_mean"]
                rows = dict(zip(scan.layers, values, strict=True))
                each = [rows[name][numbers] for name, numbers in heads.items()]
                some = torch.cat([*each, torch.ones(1)]) * scan.sequences
                if self.journal is not None:
                    self.journal.add(key, some)
            sums = sums + some
        means = (sums[:-1] / sums[-1]).split([*map(len, chosen.values())])
        effects = {}
        for (name, numbers), mean in zip(chosen.items(), means, strict=True):
            effects[name] = torch.full((len(labels[name]),), torch.nan, dtype=torch.float64)
            effects[name][numbers] = mean
        return effects

    def by_gradient(self, gone: Heads, chosen: Heads) -> Effects:
        """Return an estimate of the loss of quality without each head, from gradients.

        It is the mean over sequences of |∂L/∂gate|; see `headwise.scanning.importance.gradients`.
        A likeness to the original has no gradient there, but a curvature; see `_by_curvature`.
        """
        labels = {self.names[name]: name for name, numbers in chosen.items() if numbers}
        model, is_likeness = self._without(gone), isinstance(self.quality.measure, Likeness)
        self.progress("gradients of all heads", 0, 1)
        if is_likeness:
            rows = self._by_curvature(model, labels)
        else:
            scan = gradients(model, self.inputs, loss=self.quality.loss, layers=[*labels])
            layers = [layer.name for layer in scan.layer_scans]
            rows = dict(zip(layers, scan["gate_gradient"], strict=True))
        self.progress("gradients of all heads", 1, 1)
        effects = {}
        for label, name in labels.items():
            row = rows[label] if is_likeness else rows[label][self.heads.original_numbers(name)]
            effects[name] = torch.full_like(row, torch.nan)
            effects[name][chosen[name]] = row[chosen[name]]
        return effects

    def _by_curvature(self, model: Any, labels: Mapping[str, str]) -> Effects:
        """Return the loss of likeness without each head to second order, by recorded name.

        The loss 1 - cos is half of the squared distance |u - u0|² of vectors of length 1. Let J d
        be the derivative of u as a head's output goes to what stands in for it. Then the head costs

            (u - u0)·J d + |J d|² / 2

        The second term is that of Gauss and Newton: https://doi.org/10.1162/08997660260028683.
        |J d|² is the mean of (v·J d)² over v of random signs, as in Hutchinson's estimate of a
        trace: https://doi.org/10.1080/03610919008812866.
        """
        likeness = self.quality.measure
        assert isinstance(likeness, Likeness)
        gates: dict[str, Tensor] = {}

        def watch(call: CapturedCall) -> Tensor | None:
            if (name := labels.get(call.layer)) is None:
                return None
            outputs = require_not_none(call.outputs)
            gate = outputs.new_zeros(outputs.shape[:2], requires_grad=True)
            off = 0 if self.means is None else self.means[name].to(outputs)[:, None]
            gates[call.layer] = gate
            return outputs + gate[..., None, None] * (off - outputs)

        effects: Effects = {label: torch.zeros(1) for label in labels}
        generator, sequences = torch.Generator().manual_seed(0), 0
        with record_attention(model, watch, gradients=True) as recorder:
            for given in self.inputs:
                gates.clear()
                output = recorder.run(self.quality.prepared[id(given)])
                units, original = likeness.units(output, given)
                differentiate = partial(
                    torch.autograd.grad, units, [*gates.values()], retain_graph=True
                )
                signs = torch.randint(2, (PROBES, *units.shape), generator=generator) * 2 - 1
                squares = [differentiate(v) for v in signs.to(units)]
                changes = differentiate((units - original).detach())
                for label, change, *slopes in zip(gates, changes, *squares, strict=True):
                    square = torch.stack(slopes).double().square().mean(0)
                    total = (change.double() + square / 2).sum(0).cpu()
                    effects[label] = effects[label] + total
                sequences += len(units)
        return {label: total / sequences for label, total in effects.items()}

    def _without(self, gone: Heads) -> Any:
        if not any(gone.values()):
            return self.heads.model
        cut = cut_heads(self.heads, gone, self.means, zeroed=True)
        return cut_model(cut, self.heads.model, share=True)

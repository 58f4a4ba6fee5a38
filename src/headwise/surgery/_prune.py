"""Pruning: choose the heads that go, mend the layers, and measure on other data.

plan = plan_prune(model, inputs, keep=0.75)   # which heads, and what they cost one by one
print(plan)
result = plan.measure()                       # prune(model, inputs, keep=0.75) does both
print(result)
result.model, result.cut
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning.importance import mean_outputs
from headwise.scanning.weights import unwrap_compiled
from headwise.support.arguments import require_choice
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_value
from headwise.surgery.choice import By, Choice, HeadEffects, Journal, Search, Take
from headwise.surgery.cut import Cut
from headwise.surgery.fit import Decision, Repair, cut_heads, refit_heads
from headwise.surgery.memory import cut_model
from headwise.surgery.models import ModelHeads
from headwise.surgery.moments import match_names, record_moments
from headwise.surgery.quality import Data, Measure, Measured, Quality, layer_lines, mark

POINTS = 9  # of the curve
REPAIRED = {
    "zero": "their outputs are zero",
    "mean": "their mean outputs are in the output's bias",
    "refit": "the output projection is fitted where held-out tokens agree, else the mean",
}


@dataclass(frozen=True)
class Point:
    """Point of the curve of quality."""

    kept: int  # the number of heads that are left
    zero: float  # the mean quality on held-out data with the outputs of the others zero
    mean: float  # the same with their mean outputs
    is_chosen: bool  # True for the number of heads of the plan


@dataclass(frozen=True, eq=False)
class PruningPlan:
    """Plan of a pruning: the heads that go, and the effect of each alone.

    ``str()`` is a table by layer. Nothing is fitted or measured on held-out data yet.

    Attributes:
        heads: the attention modules of the model.
        names: the recorded name of each attention, by its name in the cut.
        data: inputs to choose and fit on, and held-out ones.
        quality: the measure.
        choice: the order of the heads, and how many of them go.
        means: mean outputs (heads, value_dim) on the data to fit on, by layer.
        by: "ablation" or "gradient".
        repair: "zero", "mean" or "refit".
        take: "groups" or "heads".
    """

    heads: ModelHeads
    names: dict[str, str]
    data: Data
    quality: Quality
    choice: Choice
    means: dict[str, Tensor]
    by: By
    repair: Repair
    take: Take = "groups"

    def evenly(self) -> PruningPlan:
        """Return the plan by the same effects that takes as many units from each layer.

        Raises:
            OptionError: one unit of each layer is more than may go.
        """
        names, effects = tuple(self.names), self.choice.effects
        search = Search(self.heads, lambda *_: effects, names, self.take, even=True)
        return replace(self, choice=search.choose(self.choice.kept() / self.choice.total, 1))

    def values_to_fit(self) -> Tensor:
        """Return the quality of each sequence to fit on after this cut, without a refit."""
        return self.quality.values(self._made(self.cut), self.data.fit)

    @property
    def gone(self) -> dict[str, list[int]]:
        """Numbers of the heads that go, by layer."""
        return {name: numbers for name, numbers in self.choice.gone().items() if numbers}

    @property
    def cut(self) -> Cut:
        """The heads that go, without fitted numbers."""
        return cut_heads(self.heads, self.gone, None if self.repair == "zero" else self.means)

    def _made(self, cut: Cut) -> Any:
        return cut_model(cut, self.heads.model, share=True)

    def measure(self, progress: Progress = no_progress, *, share: bool = False) -> Pruning:
        """Fit the repair, make the cut, and measure it and the curve on held-out data.

        Args:
            progress: called with (stage, steps done, steps in all).
            share: see `headwise.surgery.cut_model`.
        """
        cut, decisions = self.cut, dict[str, Decision]()
        model, held_out = self.heads.model, self.data.held_out
        if self.repair == "refit":
            recorded = record_moments(model, self.data.fit, progress=progress)
            sums = {name: recorded[label] for name, label in self.names.items()}
            cut, decisions = refit_heads(self.heads, self.gone, sums)
        curve = self._curve(progress)  # each point is a cut, so the result is made after them
        made = cut_model(cut, model, share=share)
        before, after, moved = self.quality.change(model, made, held_out)
        whole = Point(self.choice.total, float(before.mean()), float(before.mean()), False)
        return Pruning(self, cut, made, decisions, before, after, moved, (whole, *curve))

    def _curve(self, progress: Progress) -> tuple[Point, ...]:
        """Measure without heads: with the choice, and at about `POINTS` places in all."""
        last, taken = len(self.choice.steps), self.choice.taken
        places = sorted({taken, *(round(last * n / (POINTS - 1)) for n in range(1, POINTS))} - {0})
        points = []
        for done, steps in enumerate(places):
            progress("curve", done, len(places))
            gone = self.choice.gone(steps)
            zero, mean = (self._measure_cut(gone, means) for means in (None, self.means))
            points.append(Point(self.choice.kept(steps), zero, mean, steps == taken))
        progress("curve", len(places), len(places))
        return tuple(points)

    def _measure_cut(self, gone: dict[str, list[int]], means: dict[str, Tensor] | None) -> float:
        model = self._made(cut_heads(self.heads, gone, means, zeroed=True))
        return float(self.quality.values(model, self.data.held_out).mean())

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each layer: its name, heads, heads gone, and the effects of all."""
        gone = self.choice.gone()
        return [
            {
                "layer": name,
                "heads": len(effects),
                "kept": len(effects) - len(gone[name]),
                "gone": gone[name],
                "effects": effects.tolist(),
            }
            for name, effects in self.choice.effects.items()
        ]

    def __str__(self) -> str:
        choice = self.choice
        total, kept, change = choice.total, choice.kept(), f"{-choice.predicted:+.4f}"
        lines = [
            f"{kept} of {total} heads stay, {total - kept} go, chosen by {self.by}",
            f"change of quality to first order: {change} at worst, each head as a loss"
            if self.by == "gradient" and not self.quality.is_likeness
            else f"predicted change of quality: {change}, the sum of the effects of single heads",
        ]
        words = {
            row["layer"]: f"{row['kept']} of {row['heads']}  gone: "
            + (", ".join(map(str, row["gone"])) or "none")
            for row in self.table()
        }
        return "\n".join([*lines, *layer_lines(words)])


@dataclass(frozen=True, eq=False)
class Pruning(Measured):
    """Result of a pruning.

    ``str()`` is a report of at most 20 lines.

    Attributes:
        plan: the plan.
        cut: the heads that are left, and the repair.
        model: a copy of the model with the cut.
        decisions: by layer, whether the refit is kept; empty for another repair.
        before, after: the quality of each held-out sequence, (sequences,).
        moved: the norm of the change of the outputs on held-out data, over their norm.
        curve: the mean quality on held-out data against heads kept.
    """

    plan: PruningPlan
    cut: Cut
    model: Any
    decisions: dict[str, Decision]
    before: Tensor
    after: Tensor
    moved: float
    curve: tuple[Point, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *self.result_lines()])

    @property
    def way(self) -> str:
        """Words for the repair."""
        fitted = sum(each.ridge is not None for each in self.decisions.values())
        total = len(self.decisions)
        refits = f": fitted in {fitted} of {total} layers" if total else ""
        return REPAIRED[self.plan.repair] + refits

    def result_lines(self) -> list[str]:
        """Return what was measured, in lines."""
        # The curve is by the plan's repair; the chosen number has what the cut gives.
        way = "zero" if self.plan.repair == "zero" else "mean"
        after = float(self.after.mean())
        values = [after if point.is_chosen else getattr(point, way) for point in self.curve]
        lines = [
            self.way,
            *self.quality_lines(self.plan.quality, self.plan.data),
            "heads kept:    "
            + " ".join(f"{mark(point.kept, is_chosen=point.is_chosen):>7}" for point in self.curve),
            f"quality, {way}: " + " ".join(f"{value:7.4f}" for value in values),
        ]
        if self.plan.repair == "refit":
            lines.append("the number at * is of the refit, the others are of the mean")
        return lines

    def values(self) -> dict[str, Any]:
        """Return all numbers of the report by name."""
        return {
            "by": self.plan.by,
            "repair": self.plan.repair,
            "heads": self.plan.choice.total,
            "kept": self.plan.choice.kept(),
            "predicted": -self.plan.choice.predicted,
            **self.quality_values(self.plan.quality, self.plan.data),
            "curve": [asdict(point) for point in self.curve],
            "refits": {name: asdict(each) for name, each in self.decisions.items()},
            "layers": self.plan.table(),
        }


def plan_prune(
    model: nn.Module,
    inputs: Any,
    *,
    keep: float = 0.75,
    held_out: Any = None,
    by: By = "ablation",
    rounds: int = 1,
    take: Take = "groups",
    even: bool = False,
    repair: Repair = "mean",
    measure: Measure | None = None,
    journal: Journal | None = None,
    progress: Progress = no_progress,
) -> PruningPlan:
    """Choose the heads that go; see `prune`, which also fits and measures.

    ``journal`` keeps the effects of heads that were measured, for a later run.
    """
    require_share(keep)
    if rounds < 1:
        raise OptionError(saw=f"rounds={rounds}", needed="at least one", do="rounds=1")
    require_choice("by", by, get_args(By), "ablation")
    require_choice("take", take, get_args(Take), "groups")
    require_choice("repair", repair, get_args(Repair), "mean")
    model = unwrap_compiled(model)
    heads, data = ModelHeads(model), Data.of(inputs, held_out)
    quality = Quality.of(model, [*data.fit, *data.held_out], measure)
    recorded = mean_outputs(model, data.fit)
    names = match_names(heads, recorded)
    means = {name: recorded[label] for name, label in names.items()}
    if broken := [name for name, mean in means.items() if not bool(mean.isfinite().all())]:
        raise OptionError(
            saw=f"head outputs that are not finite, first in {broken[0]}",
            needed="finite weights and inputs",
            do="load the model again; NaN in one weight reaches every later layer",
        )
    effects = HeadEffects(
        heads, names, data.fit, quality, None if repair == "zero" else means, progress, journal
    )
    importance = effects.by_ablation if by == "ablation" else effects.by_gradient
    search = Search(heads, importance, tuple(names), take, even)
    choice = search.choose(keep, rounds)
    return PruningPlan(heads, names, data, quality, choice, means, by, repair, take)


def prune(
    model: nn.Module,
    inputs: Any,
    *,
    keep: float = 0.75,
    held_out: Any = None,
    by: By = "ablation",
    rounds: int = 1,
    take: Take = "groups",
    even: bool = False,
    repair: Repair = "mean",
    measure: Measure | None = None,
    progress: Progress = no_progress,
) -> Pruning:
    """Take the least important heads out of a model, and measure what that costs on other data.

    The given model stays as it is.

    Args:
        model: a model of transformers, or a module made of layers of headwise.
        inputs: data to choose and fit on, as for `headwise.scanning.importance.ablations`.
        keep: the share of all heads that stays at least, between 0 and 1.
        held_out: data to measure on. None to hold out half of the inputs.
        by: "ablation", a run without each head, or "gradient", an estimate: to first order, or to
            second for a likeness to the original.
        rounds: 1 to measure each head once; more to measure again without those that are gone.
        take: "groups" or, where heads share kv heads, "heads": one query head of each kv head.
        even: True for the same number in each layer, which a config of transformers can state.
        repair: "zero", the "mean" in the output's bias, or a "refit" of the output projection.
        measure: (output, input) -> (batch,), higher is better; None for the usual one.
        progress: called with (stage, steps done, steps in all).

    Raises:
        OptionError: options outside their range, a sequence that is in both parts of the data, no
            loss for gradients, or a model that cannot be cut (see `ModelHeads`).
        ShapeError: a measure that is not one number for each sequence.
    """
    options: dict[str, Any] = {"keep": keep, "held_out": held_out, "by": by, "rounds": rounds}
    options |= {"take": take, "even": even, "repair": repair, "measure": measure}
    return plan_prune(model, inputs, **options, progress=progress).measure(progress)


def require_share(keep: float) -> None:
    """Raise OptionError unless this is a share of heads."""
    if not (isinstance(keep, float) and 0 < keep < 1):
        raise OptionError(
            saw=f"{{keep}}={describe_value(keep)}",
            needed="the share of heads that stays, between 0 and 1 and neither of them",
            do="{keep}=0.75 for three quarters",
            parameter="keep",
        )

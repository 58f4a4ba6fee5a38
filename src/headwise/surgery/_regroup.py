"""Regrouping: fewer kv heads, which more query heads share.

plan = plan_regroup(model, inputs, kv_heads=6)   # which kv heads are merged, and what is lost
print(plan)
result = plan.measure()                          # regroup(model, inputs, kv_heads=6) does both
print(result)
result.model, result.cut
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning.weights import unwrap_compiled
from headwise.support.arguments import require_choice
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_value
from headwise.surgery.cut import Cut
from headwise.surgery.maps import How
from headwise.surgery.memory import cut_model
from headwise.surgery.merge import Merged, merge_heads
from headwise.surgery.models import ModelHeads
from headwise.surgery.moments import InputProducts, record_products
from headwise.surgery.quality import Data, Measure, Measured, Quality, layer_lines, mark


@dataclass(frozen=True)
class MergePoint:
    """Point of the curve of quality against kv heads."""

    kv_heads: int  # the number of kv heads that are left in each layer
    mean: float  # the mean quality on held-out data, where each is the mean of its neighbours
    merged: float  # the same by the maps and the groups of the plan
    is_chosen: bool  # True for the number of the plan


@dataclass(frozen=True, eq=False)
class RegroupPlan:
    """Plan of a regrouping: the kv heads that become one, and what is lost of them.

    ``str()`` is a table by layer. Nothing is measured on held-out data yet.

    Attributes:
        heads: the attention modules of the model.
        data: inputs to fit on, and held-out ones.
        quality: the measure.
        products: those of the inputs of each layer, on the data to fit on.
        kv_heads: the number of kv heads of each layer after the cut.
        how: "fitted", "aligned" or "mean".
        cut: the merge of each layer.
        merged: the groups of each layer, and what it loses.
    """

    heads: ModelHeads
    data: Data
    quality: Quality
    products: Mapping[str, InputProducts]
    kv_heads: int
    how: How
    cut: Cut
    merged: Mapping[str, Merged]

    def measure(self, progress: Progress = no_progress, *, share: bool = False) -> Regrouping:
        """Make the cut, and measure it and the curve on held-out data.

        Args:
            progress: called with (stage, steps done, steps in all).
            share: see `headwise.surgery.cut_model`.
        """
        model, held_out = self.heads.model, self.data.held_out
        made = cut_model(self.cut, model, share=share)
        before, after, moved = self.quality.change(model, made, held_out)
        return Regrouping(self, made, before, after, moved, self._curve(before, after, progress))

    def _curve(self, before: Tensor, after: Tensor, progress: Progress) -> tuple[MergePoint, ...]:
        """Measure every number of kv heads that all layers can have."""
        counts = [int(spec.num_kv_heads) for spec in self.heads.specs.values()]
        most = min(counts)
        fits = [n for n in range(1, most + 1) if all(count % n == 0 for count in counts)]
        points = []
        for done, number in enumerate(fits):
            progress("curve", done, len(fits))
            if number == most and number == max(counts):
                mean = merged = float(before.mean())
            else:
                mean = self._measure_cut(number, "mean", alike=False)
                is_chosen = number == self.kv_heads
                merged = float(after.mean()) if is_chosen else self._measure_cut(number, self.how)
            points.append(MergePoint(number, mean, merged, number == self.kv_heads))
        progress("curve", len(fits), len(fits))
        return tuple(points)

    def _measure_cut(self, kv_heads: int, how: How, *, alike: bool = True) -> float:
        cut, _ = merge_heads(self.heads, self.products, kv_heads, how, alike=alike)
        model = cut_model(cut, self.heads.model, share=True)
        return float(self.quality.values(model, self.data.held_out).mean())

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each layer: its name, kv heads, groups, and what is lost."""
        return [{"layer": name, **asdict(merged)} for name, merged in self.merged.items()]

    def __str__(self) -> str:
        rows = [*self.merged.items()]
        numbers = sorted({merged.kv_heads for _, merged in rows})
        before = " or ".join(map(str, numbers))
        keys, values = (
            sum(getattr(merged, name) for _, merged in rows) / len(rows)
            for name in ("keys", "values")
        )
        lines = [
            f"{self.kv_heads} of {before} kv heads in each layer, {WORDS[self.how]}",
            f"predicted loss: {keys:.1%} of what queries read in keys, {values:.1%} of what "
            "outputs read in values",
        ]
        words = {
            name: f"keys {merged.keys:6.1%}  values {merged.values:6.1%}  "
            + " ".join("+".join(map(str, group)) for group in merged.groups)
            for name, merged in rows
        }
        return "\n".join([*lines, *layer_lines(words)])


WORDS: dict[How, str] = {
    "fitted": "merged by the maps that lose least",
    "aligned": "the mean after each head is turned towards the others",
    "mean": "the mean of merged heads",
}


@dataclass(frozen=True, eq=False)
class Regrouping(Measured):
    """Result of a regrouping.

    ``str()`` is a report of at most 20 lines.

    Attributes:
        plan: the plan.
        model: a copy of the model with the cut.
        before, after: the quality of each held-out sequence, (sequences,).
        moved: the norm of the change of the outputs on held-out data, over their norm.
        curve: the mean quality on held-out data against kv heads.
    """

    plan: RegroupPlan
    model: Any
    before: Tensor
    after: Tensor
    moved: float
    curve: tuple[MergePoint, ...]

    @property
    def cut(self) -> Cut:
        """The merge of each layer."""
        return self.plan.cut

    @property
    def way(self) -> str:
        """Words for the merge."""
        return WORDS[self.plan.how]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *self.result_lines()])

    def result_lines(self) -> list[str]:
        """Return what was measured, in lines."""
        lines = [
            *self.quality_lines(self.plan.quality, self.plan.data),
            "kv heads:            "
            + " ".join(
                f"{mark(point.kv_heads, is_chosen=point.is_chosen):>7}" for point in self.curve
            ),
            "mean of neighbours:  " + " ".join(f"{point.mean:7.4f}" for point in self.curve),
        ]
        name = f"{self.plan.how}:"
        merged = " ".join(f"{point.merged:7.4f}" for point in self.curve)
        return [*lines, f"{name:20} {merged}"]

    def values(self) -> dict[str, Any]:
        """Return all numbers of the report by name."""
        return {
            "merge": self.plan.how,
            "kv_heads": self.plan.kv_heads,
            **self.quality_values(self.plan.quality, self.plan.data),
            "curve": [asdict(point) for point in self.curve],
            "layers": self.plan.table(),
        }


def plan_regroup(
    model: nn.Module,
    inputs: Any,
    *,
    kv_heads: int,
    merge: How = "fitted",
    held_out: Any = None,
    measure: Measure | None = None,
    progress: Progress = no_progress,
) -> RegroupPlan:
    """Choose the kv heads that become one, and fit their maps; see `regroup`."""
    require_choice("merge", merge, get_args(How), "fitted")
    model = unwrap_compiled(model)
    heads = ModelHeads(model)
    require_fewer(heads, kv_heads)
    data = Data.of(inputs, held_out)
    quality = Quality.of(model, [*data.fit, *data.held_out], measure)
    products = record_products(heads, data.fit, progress=progress)
    cut, merged = merge_heads(heads, products, kv_heads, merge)
    return RegroupPlan(heads, data, quality, products, kv_heads, merge, cut, merged)


def regroup(
    model: nn.Module,
    inputs: Any,
    *,
    kv_heads: int,
    merge: How = "fitted",
    held_out: Any = None,
    measure: Measure | None = None,
    progress: Progress = no_progress,
) -> Regrouping:
    """Make fewer kv heads of those of a model, and measure what that costs on other data.

    The given model stays as it is. Those kv heads become one that lose least together, unless the
    order of heads means something. A class of transformers without kv heads gets a copy of the
    merged ones for each head.

    Args:
        model: a model of transformers, or a module made of layers of headwise.
        inputs: data to fit on, as for `headwise.scanning.importance.ablations`.
        kv_heads: the number in each layer, a divisor of the present one.
        merge: "fitted" for the maps that lose least, "aligned" for the mean after each head is
            turned towards the others, or "mean"; see `headwise.surgery.maps`. The mean is taken of
            keys or values whose channels something tells apart, such as a norm of keys.
        held_out: data to measure on. None to hold out half of the inputs.
        measure: (output, input) -> (batch,), higher is better; None for the usual one.
        progress: called with (stage, steps done, steps in all).

    Raises:
        OptionError: another number, a sequence that is in both parts of the data, a layer that does
            not run, or a model that cannot be cut (see `ModelHeads`).
        ShapeError: a measure that is not one number for each sequence.
    """
    options: dict[str, Any] = {"merge": merge, "held_out": held_out, "measure": measure}
    plan = plan_regroup(model, inputs, kv_heads=kv_heads, **options, progress=progress)
    return plan.measure(progress)


def require_fewer(heads: ModelHeads, kv_heads: int) -> None:
    """Raise OptionError unless all layers can have so many kv heads, and one has more."""
    counts = sorted({int(spec.num_kv_heads) for spec in heads.specs.values()})
    fits = [n for n in range(1, counts[-1]) if all(count % n == 0 for count in counts)]
    if kv_heads not in fits:
        raise OptionError(
            saw=f"{{kv_heads}}={describe_value(kv_heads)} for layers of "
            f"{' and '.join(map(str, counts))} kv heads",
            needed=f"a divisor below: {', '.join(map(str, fits))}"
            if fits
            else "layers with several kv heads",
            do="choose one of these"
            if fits
            else "take query heads out: headwise.surgery.prune(model, inputs)",
            parameter="kv_heads",
        )

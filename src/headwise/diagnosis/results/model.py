"""Result of comparing two whole models, attention by attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

from headwise.diagnosis.causes.cause import cause_page_path
from headwise.diagnosis.naming import LOAD_BY_NUMBER, cause_of_layer_shifts
from headwise.diagnosis.results.attention import FunctionComparison

MOST_NAMES = 6


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """Two attentions at the same place of two models.

    Attributes:
        name: in the first model.
        other_name: in the second.
        input_gap: the relative difference of their inputs.
        has_other_input: True if the inputs differ by more than float32 rounding moves them.
        comparison: of the stages, with the causes; the first runs on its own input.
        outputs_agree: True if rounding explains the difference of their outputs.
        is_of_second: True if the second runs otherwise than its settings and weights state, and
            the first as they state; the causes are then those of the second.
        exchanged_with: the layer of the second that computes the same instead; "" for none.
        note: the reason why the layers were not compared; "" if they were.
    """

    name: str
    other_name: str
    input_gap: float
    has_other_input: bool
    comparison: FunctionComparison
    outputs_agree: bool = True
    exchanged_with: str = ""
    is_of_second: bool = False
    note: str = ""

    @property
    def differs_by_itself(self) -> bool:
        """True if the two differ by their own doing, whatever their input is."""
        return bool(self.comparison.parted)

    @property
    def is_explained(self) -> bool:
        """True if every difference has a cause."""
        return bool(self.exchanged_with) or all(
            stage.is_explained for stage in self.comparison.parted
        )

    @property
    def lines(self) -> list[str]:
        """Sentences about the two."""
        if self.exchanged_with:
            return [f"`{self.name}` computes what `{self.exchanged_with}` should"]
        state = "differs already" if self.has_other_input else "is the same"
        lines = [f"`{self.name}` parts by its own doing; its input {state}"]
        if self.is_of_second:
            lines.append("  the second runs otherwise than its settings and weights state")
        for cause in self.comparison.causes:
            lines += [f"  {line}" for line in cause.lines]
        return lines + [f"  {stage}" for stage in self.comparison.parted]


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """Two models, run on the same input in float64.

    Attributes:
        kinds: the classes of the two.
        inputs: in words.
        seed: of random inputs.
        layers: their attentions, in the order of the run.
        output_gap: the relative difference of the outputs; of layers that ran apart, the largest;
            NaN where no output was compared.
        has_other_output: True if the outputs differ by more than float32 rounding moves them.
        ran_apart: True if the layers of one ran alone, on the inputs of the other's.
        uncompared: the reason why the main outputs were not compared; "" if they were.
    """

    kinds: tuple[str, str]
    inputs: str
    seed: int
    layers: tuple[LayerComparison, ...]
    output_gap: float
    has_other_output: bool
    ran_apart: bool = False
    uncompared: str = ""

    @property
    def differing_layers(self) -> list[LayerComparison]:
        """The layers that differ by their own doing."""
        return [layer for layer in self.layers if layer.differs_by_itself]

    @property
    def layers_with_blind_spot(self) -> list[LayerComparison]:
        """The layers that differ, on an input whose outputs could not show it."""
        return [layer for layer in self.layers if layer.comparison.blind]

    @property
    def difference_outside_attention(self) -> str:
        """The place where a difference starts that no attention makes; "" for none."""
        for layer in self.layers:
            if layer.has_other_input:
                return f"before `{layer.name}`"
            if layer.differs_by_itself:
                return ""
        return "after the last attention" if self.has_other_output else ""

    @property
    def differing_layers_by_causes(self) -> list[list[LayerComparison]]:
        """The layers that differ by their own doing; those with the same causes together."""
        groups: dict[tuple[str, ...], list[LayerComparison]] = {}
        for layer in self.differing_layers:
            groups.setdefault(_group_key_of_layer(layer), []).append(layer)
        return [*groups.values()]

    @property
    def layer_exchange_cause(self) -> str:
        """The name of the fault of layers that compute what others should; "" for none."""
        names = [layer.other_name for layer in self.layers]
        moved = [
            (n, layer.exchanged_with) for n, layer in enumerate(self.layers) if layer.exchanged_with
        ]
        if not moved:
            return ""
        # Two neighbours that were exchanged move in both directions.
        shifts = {names.index(name) - here if name in names else 0 for here, name in moved}
        return cause_of_layer_shifts(shifts)

    @property
    def cause_names(self) -> list[str]:
        """The names of the causes in all layers."""
        names: list[str] = []
        for layer in self.differing_layers:
            names += (
                [self.layer_exchange_cause]
                if layer.exchanged_with
                else layer.comparison.cause_names
            )
        return [*dict.fromkeys(names)]

    @property
    def cause_names_with_equals(self) -> list[str]:
        """The names of the causes in all layers, each with those that look the same."""
        words: list[str] = []
        for layer in self.differing_layers:
            comparison = layer.comparison
            words += (
                [self.layer_exchange_cause]
                if layer.exchanged_with
                else comparison.cause_names_with_equals
            )
        return [*dict.fromkeys(words)]

    @property
    def unexplained_places(self) -> list[str]:
        """The layers that differ without a cause, and the place outside attention."""
        names = [f"`{layer.name}`" for layer in self.differing_layers if not layer.is_explained]
        return names + (
            [f"the difference {self.difference_outside_attention}"]
            if self.difference_outside_attention
            else []
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as numbers, texts, lists and dicts, for JSON."""
        return {
            "kinds": list(self.kinds),
            "inputs": self.inputs,
            "seed": self.seed,
            "output_gap": self.output_gap if isfinite(self.output_gap) else None,
            "uncompared": self.uncompared,
            "outside": self.difference_outside_attention,
            "layers": [
                {
                    "name": layer.name,
                    "other_name": layer.other_name,
                    "input_gap": layer.input_gap if isfinite(layer.input_gap) else None,
                    "has_other_input": layer.has_other_input,
                    "exchanged_with": layer.exchanged_with,
                    "is_of_second": layer.is_of_second,
                    "note": layer.note,
                    "comparison": layer.comparison.as_dict(),
                }
                for layer in self.layers
            ],
        }

    @property
    def lines(self) -> list[str]:
        """Sentences: the first layer that parts, its cause, and the layers that do likewise."""
        lines = [
            f"{self.kinds[0]} against {self.kinds[1]}: {len(self.layers)} attentions, on "
            f"{self.inputs} (seed {self.seed})"
        ]
        if self.difference_outside_attention:
            lines.append(
                f"  a difference starts {self.difference_outside_attention}, outside attention"
            )
        if self.layer_exchange_cause:
            lines.append(f"  {self.layer_exchange_cause}")
            lines.append(f"    repair: {LOAD_BY_NUMBER}")
            lines.append(f"    more: {cause_page_path(self.layer_exchange_cause)}")
        for first, *others in self.differing_layers_by_causes:
            lines += [f"  {line}" for line in first.lines]
            if others:
                lines.append(f"  the same in {len(others)} more: {_join_layer_names(others)}")
        if self.layers_with_blind_spot:
            names = _join_layer_names(self.layers_with_blind_spot)
            lines.append(f"  {names}: {self.layers_with_blind_spot[0].comparison.blind}")
        skipped = [layer for layer in self.layers if layer.note]
        if skipped:
            lines.append(f"  not compared: {_join_layer_names(skipped)}: {skipped[0].note}")
        if self.uncompared:
            lines.append(f"  the outputs were not compared: {self.uncompared}")
        elif isfinite(self.output_gap):
            of_layers = " of the layers" if self.ran_apart else ""
            lines.append(f"  the outputs{of_layers} differ by {self.output_gap:.2g} of their size")
        else:
            lines.append("  the outputs have other shapes, or are not finite in one of the two")
        return lines


def _group_key_of_layer(layer: LayerComparison) -> tuple[str, ...]:
    """Return a key that is equal for layers with the same causes in the same stages."""
    if layer.exchanged_with:
        return (layer.name,)
    stages = [stage.stage for stage in layer.comparison.parted if not stage.is_explained]
    return (*(line for cause in layer.comparison.causes for line in cause.lines), *stages)


def _join_layer_names(layers: list[LayerComparison]) -> str:
    names = [f"`{layer.name}`" for layer in layers[:MOST_NAMES]]
    more = len(layers) - MOST_NAMES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")

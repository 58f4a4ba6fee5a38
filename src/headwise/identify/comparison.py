"""Results of comparing attentions as functions, alone or in whole models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from headwise.identify.catalogue import Cause, cause_of_layer_shifts
from headwise.support.text import list_some

SEED = 0  # of random inputs
ALL = 0.999  # of the differences
MOST_NUMBERS = 12  # of heads or positions, in a sentence


@dataclass(frozen=True, kw_only=True)
class PartedStage:
    """Stage that differs although the stages before it are the same.

    Attributes:
        stage: its name.
        size: the largest relative difference of a head.
        heads: the heads that part; None where the stage has no heads, or another number of them.
        probes: the inputs on which it parts.
        is_explained: True if the named causes explain it.
        positions: of the tokens at which it parts; None for all.
        shapes: the heads and channels of the first against those of the second; "" for equal ones.
        pattern: the positions and the inputs where it parts, in words; "" for all.
    """

    stage: str
    size: float
    heads: tuple[int, ...] | None
    probes: tuple[str, ...]
    is_explained: bool = False
    positions: tuple[int, ...] | None = None
    shapes: str = ""
    pattern: str = ""

    def __str__(self) -> str:
        heads = "" if self.heads is None else format_noun_with_numbers("head", self.heads)
        apart = self.shapes or "of another shape, or not finite in one of the two"
        if isfinite(self.size):
            apart = f"apart by {self.size:.2g} of its size"
        words = ", ".join(filter(None, (apart, heads, self.pattern or self.positions_in_words)))
        return f"{self.stage}: {words}; {'' if self.is_explained else 'NOT '}explained"

    @property
    def positions_in_words(self) -> str:
        """The positions at which it parts, in words; "" for all."""
        return "" if not self.positions else format_noun_with_numbers("position", self.positions)


@dataclass(frozen=True, kw_only=True)
class StageGaps:
    """Differences of one stage in one call, head by head.

    Attributes:
        stage: its name.
        probe: the input.
        call: number of the call on this input; those after the first have earlier keys.
        sizes: the relative difference of each head; one number where the stage has no heads, or
            where shapes differ, which makes it infinite.
        shares: likewise, the largest difference as a share of what rounding explains.
        by_position: the relative difference at each token, 0 where it is rounding; () for a stage
            that does not part, or has another shape.
    """

    stage: str
    probe: str
    call: int
    sizes: tuple[float, ...]
    shares: tuple[float, ...]
    by_position: tuple[float, ...] = ()

    @property
    def largest_relative_difference(self) -> float:
        """The largest relative difference of a head."""
        return max(self.sizes)

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the differences of all heads."""
        return max(self.shares) <= 1


@dataclass(frozen=True, kw_only=True)
class FoundCause:
    """Cause of a difference, with the numbers in the side that has it.

    Attributes:
        name: the cause.
        parameters: name -> value in that side.
        stages: the stages that it explains.
        heads: the heads that it concerns; None for all.
        repair: what makes that side equal to the other: lines of code for a function or a module
            written by hand, else words.
        place: where in the code the lines of the repair stand, in words; "" for words.
        equals: other causes that would look the same on these inputs.
        page: the path of the page about it, a Markdown file in the installed package.
        side: "first" or "second": the one of the two that departs from the other, which is known
            as data.
        share: of the differences of all stages that part, 0 to 1, those that it explains.
        output_left: the relative difference of the outputs after it and those before it are
            repaired.
        partner: the cause without which it explains nothing; "" for none.
    """

    name: str
    parameters: Mapping[str, Any]
    stages: tuple[str, ...]
    heads: tuple[int, ...] | None
    repair: str
    equals: tuple[str, ...]
    page: str
    side: str = "first"
    share: float = 1.0
    output_left: float = 0.0
    partner: str = ""
    place: str = ""

    @property
    def parameters_in_words(self) -> str:
        """The parameters in words: ``theta 10000``."""
        return ", ".join(_format_named(name, value) for name, value in self.parameters.items())

    @property
    def heads_in_words(self) -> str:
        """The heads that it concerns, in words; "" for all, and where the parameters say them."""
        if self.heads is None or "rotated" in self.parameters:
            return ""
        return format_noun_with_numbers("head", self.heads)

    @property
    def lines(self) -> list[str]:
        """Sentences about the cause."""
        where = f", {self.heads_in_words} alone" if self.heads_in_words else ""
        values = f": {self.parameters_in_words}" if self.parameters_in_words else ""
        stages = f"{', '.join(self.stages)} to rounding{self.explained_share_in_words}"
        lines = [f"{self.name}{values} in the {self.side}{where}", f"  explains {stages}"]
        if self.repair:
            side = "" if self.side == "first" else f" of the {self.side}"
            place = f", {self.place}" if self.place else ""
            first, *others = self.repair.splitlines()
            lines += [f"  repair{side}{place}: {first}"] if not others else []
            if others:
                lines += [f"  repair{side}{place}:", *(f"    {line}" for line in (first, *others))]
        if self.equals:
            lines.append(f"  the same on these inputs: {', '.join(self.equals)}")
        lines.append(f"  more: {self.page}")
        return lines

    @property
    def name_with_equals(self) -> str:
        """The name, with those of causes that look the same."""
        return f"{self.name} (or {', '.join(self.equals)})" if self.equals else self.name

    @property
    def explained_share_in_words(self) -> str:
        """A clause on the share that it explains; "" if it alone explains everything."""
        partner = f", but only together with {self.partner}" if self.partner else ""
        if self.share > ALL:
            return partner
        return (
            f"{partner}: {100 * self.share:.2g} % of the differences of stages; the outputs are "
            f"then apart by {self.output_left:.2g} of their size"
        )


@dataclass(frozen=True, kw_only=True)
class GradientGap:
    """Difference of one gradient, that of a random sum of outputs.

    Attributes:
        name: "x", "source", or the weights: "wq", "bo".
        size: norm of the difference over the norm of the second's gradient.
        allowed: the size that rounding explains: three times that between a run in float32 and one
            in float64.
    """

    name: str
    size: float
    allowed: float

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.size <= self.allowed

    def __str__(self) -> str:
        return (
            f"gradient of {self.name}: apart by {self.size:.2g} of its size, of which rounding "
            f"explains {self.allowed:.2g}"
        )


@dataclass(frozen=True, kw_only=True)
class FunctionComparison:
    """Two attentions run on the same inputs, in float64 where that is possible.

    Attributes:
        kinds: what the two are.
        probes: the inputs, in words.
        seed: of random inputs.
        output_gap: the largest relative difference of the outputs.
        stages: the stages that were compared.
        parted: those that differ.
        causes: the causes, that which explains most first.
        blind: the reason why the inputs could not show a difference; "" if they could.
        isolated: what probes say about the parts of a function that no cause explains.
        tried: number of causes that were tried.
        unseen: small changes of settings that these inputs could not have shown either, in words.
        unprobed: arguments that no input had, in words.
        gaps: the differences of all stages in all calls, also of those that are the same.
        gradients: the differences of the gradients; () where they were not compared.
        ways: which ways of calling agree, in words: in one call, and in several with a cache; ()
            where no input came in several calls.
        stopped: the reason why not everything was tried, such as "interrupted"; "" for none.
        untried: what was left out then, in words.
        condition: what a caller must do so that the two are the same, a sentence; "" for nothing.
    """

    kinds: tuple[str, str]
    probes: tuple[str, ...]
    seed: int
    output_gap: float
    stages: tuple[str, ...]
    parted: tuple[PartedStage, ...] = ()
    causes: tuple[FoundCause, ...] = ()
    blind: str = ""
    isolated: tuple[str, ...] = ()
    tried: int = 0
    unseen: tuple[str, ...] = ()
    unprobed: tuple[str, ...] = ()
    gaps: tuple[StageGaps, ...] = ()
    gradients: tuple[GradientGap, ...] = ()
    ways: tuple[str, ...] = ()
    stopped: str = ""
    untried: tuple[str, ...] = ()
    condition: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as numbers, texts, lists and dicts, for JSON.

        Numbers that are not finite, which JSON lacks, are None.
        """
        return dict(_convert_to_json(asdict(self)))

    @property
    def cause_names(self) -> list[str]:
        """The names of the causes."""
        return [cause.name for cause in self.causes]

    @property
    def cause_names_with_equals(self) -> list[str]:
        """The names of the causes, each with those that look the same."""
        return [cause.name_with_equals for cause in self.causes]

    @property
    def shapes(self) -> str:
        """The first stage with other heads or channels, in words; "" where all are equal."""
        return next((f"{each.stage} has {each.shapes}" for each in self.parted if each.shapes), "")

    @property
    def unexplained_places(self) -> list[str]:
        """The stages that differ without a cause."""
        return [stage.stage for stage in self.parted if not stage.is_explained]

    @property
    def lines(self) -> list[str]:
        """Sentences: what was compared, where it parts, and why."""
        lines = [f"{self.kinds[0]} against {self.kinds[1]}"]
        lines += [f"  {way}" for way in self.ways]
        for number, cause in enumerate(self.causes, 1):
            first, *others = cause.lines
            lines += [f"  {number}. {first}", *(f"     {line[2:]}" for line in others)]
        lines += [f"  {stage}" for stage in map(str, self.parted)]
        lines += [f"  {gap}" for gap in self.gradients if not gap.is_rounding]
        lines += [f"  {sentence}" for sentence in self.isolated]
        if self.stopped:
            lines.append(f"  {self.stopped}: not tried: {', '.join(self.untried)}")
        elif self.unexplained_places and self.tried:
            lines.append(f"  {self.tried} causes were tried, alone and in pairs")
        lines += [f"  {self.blind}"] if self.blind else []
        if self.unseen:
            lines.append(f"  could not have shown {', or '.join(self.unseen)}")
        if self.unprobed:
            lines.append(f"  not probed: {', and '.join(self.unprobed)}")
        lines.append(
            f"  compared {', '.join(self.stages)} on {len(self.probes)} inputs (seed {self.seed}): "
            f"{'; '.join(self.probes)}"
        )
        if self.gradients:
            names = ", ".join(gap.name for gap in self.gradients)
            lines.append(f"  compared the gradients of {names}")
        return lines


def format_noun_with_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return "head 3", "heads 2 to 5" or "heads 1, 4 and 9 more"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"{noun} {first}"
    if [*numbers] == [*range(first, last + 1)]:
        return f"{noun}s {first} to {last}"
    return f"{noun}s {list_some([*map(str, numbers)], MOST_NUMBERS)}"


def _format_named(name: str, value: Any) -> str:
    if name == "roles":
        return _format_roles(value)
    is_one = name in ("heads", "rows") and isinstance(value, list | tuple) and len(value) == 1
    return f"{name[:-1] if is_one else name} {_format_parameter(value)}"


def _format_roles(roles: str) -> str:
    if {*roles} - {*"qkvog"}:  # other tensors
        return " and ".join(roles.split())
    if len(roles) == 1:
        return f"projection {roles}"
    return f"projections {', '.join(roles[:-1])} and {roles[-1]}"


def _format_parameter(value: Any) -> str:
    if isinstance(value, list | tuple):
        if len(value) > 2 and all(isinstance(each, int) for each in value):
            return _format_runs(value)
        return " ".join(map(_format_parameter, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _format_runs(numbers: Sequence[int]) -> str:
    """Return numbers with their runs in short: ``288 to 319 and 352 to 383``, ``2 0 1``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > 1 and any(len(run) < 3 for run in runs):
        return " ".join(map(str, numbers))
    return list_some([f"{run[0]} to {run[-1]}" for run in runs], MOST_NUMBERS)


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _convert_to_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json(part) for part in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


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
        sentences = *self.comparison.parted, *self.comparison.isolated
        return lines + [f"  {sentence}" for sentence in sentences]


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
        before = ""
        for layer in self.layers:
            if layer.has_other_input:
                return (
                    f"between `{before}` and `{layer.name}`"
                    if before
                    else (f"before `{layer.name}`")
                )
            if layer.differs_by_itself:
                return ""
            before = layer.name
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
        return self._layer_exchange.name if self._layer_exchange is not None else ""

    @property
    def _layer_exchange(self) -> Cause | None:
        names = [layer.other_name for layer in self.layers]
        moved = [(n, layer.exchanged_with) for n, layer in enumerate(self.layers)]
        # Two neighbours that were exchanged move in both directions.
        shifts = {names.index(x) - here if x in names else 0 for here, x in moved if x}
        return cause_of_layer_shifts(shifts) if shifts else None

    @property
    def cause_names(self) -> list[str]:
        """The names of the causes in all layers."""
        names = (name for layer in self.differing_layers for name in self.cause_names_of(layer))
        return [*dict.fromkeys(names)]

    @property
    def cause_names_with_equals(self) -> list[str]:
        """The names of the causes in all layers, each with those that look the same."""
        names: list[str] = []
        for layer in self.differing_layers:
            equals = layer.comparison.cause_names_with_equals
            names += self.cause_names_of(layer) if layer.exchanged_with else equals
        return [*dict.fromkeys(names)]

    def cause_names_of(self, layer: LayerComparison) -> list[str]:
        """Return the names of the causes in a layer."""
        is_exchanged = bool(layer.exchanged_with)
        return [self.layer_exchange_cause] if is_exchanged else layer.comparison.cause_names

    @property
    def unexplained_places(self) -> list[str]:
        """The layers that differ without a cause, and the place outside attention."""
        names = [f"`{layer.name}`" for layer in self.differing_layers if not layer.is_explained]
        outside = self.difference_outside_attention
        return [*names, *([f"the difference {outside}"] if outside else [])]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as numbers, texts, lists and dicts, for JSON."""
        fields = ("kinds", "inputs", "seed", "output_gap", "uncompared")
        of_layer = ("name", "other_name", "input_gap", "has_other_input", "exchanged_with")
        layers = [
            {name: getattr(layer, name) for name in (*of_layer, "is_of_second", "note")}
            | {"comparison": layer.comparison.as_dict()}
            for layer in self.layers
        ]
        whole = {name: getattr(self, name) for name in fields}
        outside = {"outside": self.difference_outside_attention, "layers": layers}
        return dict(_convert_to_json(whole | outside))

    @property
    def lines(self) -> list[str]:
        """Sentences: the first layer that parts, its cause, and the layers that do likewise."""
        count = f"{len(self.layers)} attentions, on {self.inputs} (seed {self.seed})"
        lines = [f"{self.kinds[0]} against {self.kinds[1]}: {count}"]
        if place := self.difference_outside_attention:
            lines.append(f"  a difference starts {place}, outside attention")
        if exchange := self._layer_exchange:
            lines += [f"  {exchange.name}", f"    repair: {exchange.remedy}"]
            lines.append(f"    more: {exchange.page}")
        for first, *others in self.differing_layers_by_causes:
            lines += [f"  {line}" for line in first.lines]
            if others:
                lines.append(f"  the same in {len(others)} more: {_join_layer_names(others)}")
        if blind := self.layers_with_blind_spot:
            lines.append(f"  {_join_layer_names(blind)}: {blind[0].comparison.blind}")
        if skipped := [layer for layer in self.layers if layer.note]:
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
    if layer.exchanged_with:
        return (layer.name,)
    stages = [stage.stage for stage in layer.comparison.parted if not stage.is_explained]
    return (*(line for cause in layer.comparison.causes for line in cause.lines), *stages)


def _join_layer_names(layers: list[LayerComparison]) -> str:
    return list_some([f"`{layer.name}`" for layer in layers], MOST_NAMES)

"""Evidence for a cause: recorded calls of the layer in doubt, and the model that it should equal.

The moves of its projections are read off the recorded stages. The rows of q, k and v are their
channels over all tokens. The rows of the output projection cannot be seen so: maps of them are
tried on the recorded head outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headwise.diagnosis.outputs.names import find_output_moves, list_unread_moves
from headwise.diagnosis.simulation.gaps import Cell, Gaps, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.function.records import STAGE_OF, STAGES
from headwise.function.rounding import default_tolerance
from headwise.function.weights import State, kinds_of
from headwise.identify.catalogue import Cause
from headwise.identify.moves.find import HeadsAndOutput, find_moves
from headwise.identify.moves.maps import (
    BIASES,
    MatrixMap,
    is_of_projections,
    list_roles,
    list_square_roles,
    view_kind,
)
from headwise.identify.moves.move import Move, find_factor_formula

NEAR = 0.1  # of a fitted number, by which rounding may move it


@dataclass(frozen=True, eq=False)
class Evidence:
    """Recorded calls of the layer in doubt, and the model that it should equal."""

    model: AttentionModel  # that is believed so far
    calls: Sequence[RecordedCall]
    gaps: Gaps  # where the two part
    # Cause and place of a `Family` -> its number that is nearest to the smallest calls.
    fitted: dict[tuple[Cause, int], tuple[float, ...] | None] = field(default_factory=dict)
    is_limited: bool = False  # True to look for parts of a fault: a role or some heads alone

    @classmethod
    def of(cls, model: AttentionModel, calls: Sequence[RecordedCall]) -> Evidence:
        """Return the evidence of calls against a model."""
        return cls(model, calls, measure_gaps(model, calls))

    def replace_stages(
        self, stages: Iterable[str], function: Callable[..., Tensor], *arguments: Any
    ) -> AttentionModel:
        """Return the model whose stages are a function of these arguments and the forced stage."""
        model = self.model
        for stage in stages:
            model = model.with_stage_function(stage, partial(function, *arguments))
        return model

    @cached_property
    def shown_stages(self) -> dict[str, str]:
        """The recorded stage in which a change of each stage shows: its own, or the next one."""
        recorded = {*chain.from_iterable(call.stages for call in self.calls)}
        shown, following = {}, ""
        for stage in reversed(STAGES):
            following = shown[stage] = stage if stage in recorded else following
        return shown

    @property
    def shows_outputs_alone(self) -> bool:
        """True if no stage before the output was recorded, as of a function."""
        return self.shown_stages["q"] == "output"

    @property
    def parted_roles(self) -> tuple[str, ...]:
        """The projections whose stages part; all where nothing but outputs is known."""
        parted = self.gaps.stages_beyond_rounding
        if parted == ["output"] and self.calls[0].runs is not None:
            return tuple(STAGE_OF)
        return tuple(role for role, stage in STAGE_OF.items() if stage in parted)

    @property
    def is_cross_attention(self) -> bool:
        """True if keys and values come from other tokens than queries."""
        return any(call.inputs.source is not None for call in self.calls)

    @property
    def has_masks(self) -> bool:
        """True if a call has a mask of the caller."""
        return any(call.inputs.mask is not None for call in self.calls)

    @cached_property
    def attends_across_batch(self) -> bool:
        """True if scores of the model are along the batch, by a cause that was found before."""
        if "head outputs" not in self.model.replaced:
            return False
        scores = ((call, self.model.predict_stage("scores", call)) for call in self.calls)
        return any(len(x) != len(call.inputs.x) for call, x in scores)

    @property
    def has_later_calls(self) -> bool:
        """True if a call has keys of earlier calls."""
        return any(call.earlier for call in self.calls)

    def parted_calls_and_heads(self, *stages: str) -> list[Cell]:
        """Return the parted cells of these stages."""
        return [cell for cell in self.gaps.cells_beyond_rounding if cell[0] in stages]

    @cached_property
    def moves(self) -> tuple[tuple[Move, ...], ...]:
        """Sequences of moves of the weights; each explains some stages."""
        return (*_yield_qkv_moves(self), *((move,) for move in _yield_output_moves(self)))

    @cached_property
    def output_moves(self) -> tuple[tuple[Move, ...], ...]:
        """Sequences of moves that outputs show; each explains a part of them, or all."""
        runs = self.calls[0].runs
        if not self.gaps.cells_beyond_rounding:
            return ()
        if runs is None:
            return tuple((move,) for move in list_unread_moves(self.model))
        crosses = all(call.inputs.source is not None for call in self.calls)
        return find_output_moves(self.model, runs, crosses=crosses)

    def search_moves(self, cause: Cause) -> Iterator[Variant]:
        """Yield the moves of rows of a cause, which is all that most causes of weights have."""
        count = len(self.moves)
        for number, moves in enumerate((*self.moves, *self.output_moves)):
            # Moves of separate roles are causes of their own.
            for place, move in enumerate(moves):
                names = (each for each in (move.name, *move.equals) if each.cause == cause)
                if (name := next(names, None)) is not None:
                    between = "" if is_of_projections(move.kind) else " "
                    parameters = {"roles": between.join(name.roles), **dict(name.parameters)}
                    later = {role for after in moves[place + 1 :] for role in after.roles}
                    details = self._describe_factor(parameters)
                    if move.change.parts == BIASES:
                        details["of"] = "biases alone"
                    yield Variant(
                        replace(self.model, weights=move.apply(self.model.weights)),
                        parameters,
                        name.repair,
                        details,
                        is_step=number >= count or not later.isdisjoint(move.roles),
                    )

    def _describe_factor(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Return the formula of a factor, and where that of dropout can be; {} for none."""
        sizes, factor = self.model.sizes, parameters.get("factor", 1.0)
        form = find_factor_formula(factor, head_dim=sizes["head_dim"], width=sizes["embed_dim"])
        if " - " in form and parameters["roles"] in "vo" and self.shows_outputs_alone:
            form += ", as of dropout, in the weights, v or the outputs of heads"
        return {"form": form} if form else {}

    def projection_tokens(self, role: str) -> tuple[Tensor, Tensor] | None:
        """Return inputs (tokens, columns) and recorded stage (tokens, rows) of a projection."""
        needed = {"head outputs", "output"} if role == "o" else {role}
        calls = [call for call in self.calls if needed <= set(call.stages)]
        if not calls or (role != "o" and self.model.settings.compressed):
            return None  # a projection of a latent is none of tokens
        recorded = flatten_tokens(call.stages[STAGE_OF[role]] for call in calls)
        if role == "o":
            return flatten_tokens(call.stages["head outputs"] for call in calls), recorded
        inputs = (call.inputs.x if role == "q" else call.inputs.key_source for call in calls)
        return flatten_tokens(inputs), recorded


@dataclass(frozen=True)
class Variant:
    """One way in which a cause could have changed the model."""

    model: AttentionModel  # with the fault, which predicts the layer in doubt
    parameters: Mapping[str, Any] = field(default_factory=dict)  # in the layer in doubt
    repair: str = ""  # what makes the layer in doubt equal again
    details: Mapping[str, Any] = field(default_factory=dict)  # no parameters: for the report alone
    is_step: bool = False  # the data say that another cause of the same stage follows
    heads: tuple[int, ...] | None = None  # that have the fault; None for all, or as stages tell
    # How its numbers are known, where they tell more than the cause: by configs, or by nothing.
    rank: int | None = None
    is_unexpected: bool = False  # the fault is a part that is there, and not one that is missing


@dataclass(frozen=True)
class Family:
    """Variants by one real number, which is fitted."""

    make: Callable[[float], Variant]
    starts: tuple[float, ...]  # of the fit
    is_log: bool = False  # the logarithm is fitted, for positive numbers
    forms: tuple[float, ...] = ()  # closed forms that the number may have
    limit: float | None = None  # as which all lower numbers than the starts do, if it does

    def list_plain(self, number: float) -> list[float]:
        """Return numbers near a fitted one that a person may have written, the plainest first."""
        rounded = [float(f"{number:.{digits}g}") for digits in (1, 2, 3)]
        near = [x for x in (*self.forms, *rounded) if abs(x - number) <= NEAR * abs(number)]
        is_lower = self.limit is not None and number < min(self.starts)
        return list(dict.fromkeys([self.limit, *near] if is_lower else near))  # type: ignore[list-item]


Variants: TypeAlias = Iterator[Variant | Family]
Search: TypeAlias = Callable[[Evidence], Variants]


def _yield_qkv_moves(evidence: Evidence) -> Iterator[tuple[Move, ...]]:
    if not evidence.parted_calls_and_heads("q", "k", "v"):
        return
    # With a cache, q and k are known after the rotation alone: other calls show their rows.
    model = evidence.model
    every = {*"qkv"}.intersection(chain.from_iterable(call.stages for call in evidence.calls))
    calls = [call for call in evidence.calls if every <= {*call.stages}]
    # Rows of q are found among those of k where both are channels over the same tokens.
    calls = [call for call in calls if call.inputs.source is None] or calls
    if (rows := _collect_stage_rows(model, calls) if calls else None) is None:
        return
    transposed = _predict_with_transposed_square_matrices(model, calls, list_roles(rows[0]))
    for kind in kinds_of(model.weights):
        ours, theirs = (_rows_of_kind(model, kind, each) for each in rows)
        if is_of_projections(kind) and ours:
            yield from _yield_moves_of_rows(evidence, calls, kind, (ours, theirs), transposed)


def _rows_of_kind(model: AttentionModel, kind: Mapping[str, str], rows: State) -> State:
    """Return the rows of a kind; of a key, those that are no part of the shared one."""
    seen, key = view_kind(rows, kind), kind.get("k", "")
    if key in seen and model.settings.compressed is not None:
        seen[key] = seen[key][:, -model.weights[key].shape[1] :]
    return seen


def _yield_moves_of_rows(
    evidence: Evidence,
    calls: Sequence[RecordedCall],
    kind: Mapping[str, str],
    rows: tuple[State, State],
    transposed: State | None,
) -> Iterator[tuple[Move, ...]]:
    model = evidence.model
    rotary, weights = model.settings.rotation, model.weights
    rotary = rotary if "q" in kind else None  # of a latent, no channel of k turns
    biased = tuple(role for role in "qkv" if f"b{role}" in weights)
    for still in dict.fromkeys(((), biased)):
        a, b = (_subtract_biases(side, weights, still) for side in rows)
        turned = None if transposed is None else _subtract_biases(transposed, weights, still)
        report = find_moves(
            a,
            b,
            rotary_width=None if rotary is None else rotary.width,
            is_interleaved=rotary is not None and rotary.pairing == "interleaved",
            transposed=turned,
            tolerance=max(default_tolerance(call.dtype) for call in calls),
        )
        for moves in (report.moves, *report.others):
            moves = tuple(move.of_kind(kind) for move in moves)
            yield tuple(replace(move, change=replace(move.change, still=still)) for move in moves)
        if not report.unexplained:
            return


def _subtract_biases(rows: State, weights: State, roles: Sequence[str]) -> State:
    return {
        name: x - weights[f"b{name[1]}"][..., None] if name[1] in roles else x
        for name, x in rows.items()
    }


def _yield_output_moves(evidence: Evidence) -> Iterator[Move]:
    model, calls = evidence.model, evidence.calls
    recorded = [{"head outputs", "output"} <= set(call.stages) for call in calls]
    if not evidence.parted_calls_and_heads("output") or not all(recorded):
        return
    heads = [call.stages["head outputs"].transpose(1, 2).flatten(0, 1) for call in calls]
    outputs = [call.stages["output"].flatten(0, 1) for call in calls]
    rows, (weight, bias) = (
        view_kind(model.weights, kinds_of(model.weights)[0]),
        model.projection("o"),
    )
    shapes = {(*x.shape[1:], *y.shape[1:]) for x, y in zip(heads, outputs, strict=True)}
    if shapes != {tuple(weight.shape)}:
        return
    output = torch.cat(outputs)
    tolerance = max(default_tolerance(call.dtype) for call in calls)
    bare = output if bias is None else output - bias
    pair = HeadsAndOutput(torch.cat(heads), bare, rows, tolerance)
    yield from pair.find_moves()
    if bias is not None:
        yield from pair.find_moves_with_bias(output, bias)


def _collect_stage_rows(
    model: AttentionModel, calls: Sequence[RecordedCall]
) -> tuple[State, State] | None:
    roles = [role for role in "qkv" if all(role in call.stages for call in calls)]
    ours = {f"w{role}": _channels_by_head([c.stages[role] for c in calls]) for role in roles}
    theirs = _predict_rows(model, calls, roles)
    ours = {name: x for name, x in ours.items() if x.shape == theirs[name].shape}
    return (ours, {name: theirs[name] for name in ours}) if ours else None


def _predict_rows(
    model: AttentionModel, calls: Sequence[RecordedCall], roles: Iterable[str]
) -> State:
    predicted = ((role, (model.predict_stage(role, call) for call in calls)) for role in roles)
    return {f"w{role}": _channels_by_head(stages) for role, stages in predicted}


def _channels_by_head(stages: Iterable[Tensor]) -> Tensor:
    """Return (heads, channels, tokens) of stages (batch, heads, length, channels)."""
    return torch.cat([x.permute(1, 3, 0, 2).flatten(2) for x in stages], 2)


def _predict_with_transposed_square_matrices(
    model: AttentionModel, calls: Sequence[RecordedCall], roles: Sequence[str]
) -> State | None:
    square = tuple(role for role in list_square_roles(model.weights) if role in roles)
    if not square:
        return None
    turned = MatrixMap(square, is_square=True).apply(model.weights)
    return _predict_rows(replace(model, weights=turned), calls, square)


def flatten_tokens(stages: Iterable[Tensor]) -> Tensor:
    """Return (tokens, channels) of stages that may have an axis of heads."""
    rows = (x.transpose(1, 2).flatten(2) if x.dim() == 4 else x for x in stages)
    return torch.cat([x.flatten(0, 1).double() for x in rows])

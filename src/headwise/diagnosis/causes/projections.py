"""Moves of the projections of a layer in doubt, read off its recorded stages.

The rows of q, k and v are their channels over all tokens. The rows of the output projection cannot
be seen so: maps of them are tried on the recorded head outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.moves.changes import Multiplied, Rounded, Zeroed, default_tolerance
from headwise.diagnosis.moves.find import find_moves
from headwise.diagnosis.moves.heads import MatrixMap
from headwise.diagnosis.moves.move import Change, Move, Taken
from headwise.diagnosis.moves.outputs import (
    HeadsAndOutput,
    yield_moves_explaining_outputs,
    yield_output_and_bias_factor_moves,
)
from headwise.diagnosis.moves.rows import Rows
from headwise.diagnosis.moves.state import extract_rows, replace_rows
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import RecordedCall

STAGE_OF = {"q": "q", "k": "k", "v": "v", "o": "output"}


@dataclass
class _Last:
    """The moves of the evidence that was asked about last: each cause asks for the same."""

    evidence: Evidence | None = None
    sequences: tuple[tuple[Move, ...], ...] = ()


_last = _Last()


def find_projection_moves(evidence: Evidence) -> tuple[tuple[Move, ...], ...]:
    """Return sequences of moves of the weights; each explains some stages of the evidence."""
    if _last.evidence is not evidence:
        _last.sequences = (
            *_yield_qkv_moves(evidence),
            *((move,) for move in _yield_output_moves(evidence)),
        )
        _last.evidence = evidence
    return _last.sequences


def apply_moves_to_model(model: AttentionModel, moves: Sequence[Move]) -> AttentionModel:
    """Return the model after moves of its weights and biases."""
    rows = extract_rows(model.weights)
    weights = dict(model.weights)
    for move in moves:
        rows = _convert_to_weight_move(move).apply(rows)
        change = move.change
        if isinstance(change, Multiplied) and "bo" in weights and "o" in change.factors:
            # Only a factor of all heads can be one of the bias too.
            factor = change.factors["o"].flatten()[0] if "biases" in change.parts else 1.0
            weights["bo"] = weights["bo"] * factor
    return replace(model, weights=replace_rows(weights, rows))


def _convert_to_weight_move(move: Move) -> Move:
    """Return a move of activations as one of weights."""
    change = move.change
    if isinstance(change, Taken) and isinstance(change.step, MatrixMap):
        return replace(move, change=Taken(replace(change.step, given=None), change.parts))
    return move


def _yield_qkv_moves(evidence: Evidence) -> Iterator[tuple[Move, ...]]:
    """Yield moves of q, k and v, with their biases or without."""
    if not evidence.parted_calls_and_heads("q", "k", "v"):
        return
    model, calls = evidence.model, evidence.calls
    rows = _collect_stage_rows(model, calls)
    if rows is None:
        return
    rotary, biases = model.settings.rotation, extract_rows(model.weights).biases
    tolerance = max(default_tolerance(call.dtype) for call in calls)
    transposed = _predict_with_transposed_square_matrices(model, calls, rows[0].roles)
    for moved in ("weights", "biases") if biases else ("weights",):
        a, b, turned = rows[0], rows[1], transposed
        if moved == "biases":
            a, b = (_subtract_biases(side, biases) for side in (a, b))
            turned = None if turned is None else _subtract_biases(turned, biases)
        report = find_moves(
            a,
            b,
            rotary_width=None if rotary is None else rotary.width,
            is_interleaved=rotary is not None and rotary.pairing == "interleaved",
            transposed=turned,
            tolerance=tolerance,
        )
        for moves in (report.moves, *report.others):
            still = biases if moved == "biases" else {}
            yield tuple(replace(move, change=_keep_biases(move, tuple(still))) for move in moves)
        if not report.unexplained:
            return


def _keep_biases(move: Move, still: tuple[str, ...]) -> Change:
    """Return the change of a move that leaves these biases where they are."""
    change = move.change
    if still and isinstance(change, Taken | Multiplied | Rounded | Zeroed):
        return replace(change, still=still)
    return change


def _yield_output_moves(evidence: Evidence) -> Iterator[Move]:
    """Yield moves of the output projection."""
    model, calls = evidence.model, evidence.calls
    recorded = [{"head outputs", "output"} <= set(call.stages) for call in calls]
    if not evidence.parted_calls_and_heads("output") or not all(recorded):
        return
    heads = [call.stages["head outputs"].transpose(1, 2).flatten(0, 1) for call in calls]
    outputs = [call.stages["output"].flatten(0, 1) for call in calls]
    rows, bias = extract_rows(model.weights), model.weights.get("bo")
    shapes = {(x.shape[1:], y.shape[1:]) for x, y in zip(heads, outputs, strict=True)}
    if shapes != {(rows.matrices["o"].shape[:2], rows.matrices["o"].shape[2:])}:
        return
    output = torch.cat(outputs)
    tolerance = max(default_tolerance(call.dtype) for call in calls)
    pair = HeadsAndOutput(
        torch.cat(heads), output if bias is None else output - bias, rows, tolerance
    )
    yield from yield_moves_explaining_outputs(pair)
    if bias is not None:
        yield from yield_output_and_bias_factor_moves(pair, output, bias)


def _collect_stage_rows(
    model: AttentionModel, calls: Sequence[RecordedCall]
) -> tuple[Rows, Rows] | None:
    """Return the rows of a and of b, of the stages that every call has."""
    ours, theirs = {}, {}
    for role in "qkv":
        if not all(role in call.stages for call in calls):
            continue
        recorded = [call.stages[role] for call in calls]
        predicted = [model.predict_stage(role, call) for call in calls]
        if any(x.shape != y.shape for x, y in zip(recorded, predicted, strict=True)):
            continue
        ours[role], theirs[role] = _channels_by_head(recorded), _channels_by_head(predicted)
    return (Rows(ours), Rows(theirs)) if ours else None


def _channels_by_head(stages: Sequence[Tensor]) -> Tensor:
    """Return (heads, channels, tokens) of stages (batch, heads, length, channels)."""
    return torch.cat([x.permute(1, 3, 0, 2).flatten(2) for x in stages], 2)


def _predict_with_transposed_square_matrices(
    model: AttentionModel, calls: Sequence[RecordedCall], roles: Sequence[str]
) -> Rows | None:
    """Return the rows of b with each square matrix transposed, None where none is square."""
    weights = extract_rows(model.weights)
    square = [
        r for r in roles if weights.matrix_of_role(r).shape[0] == weights.matrix_of_role(r).shape[1]
    ]
    if not square:
        return None
    turned = replace_rows(model.weights, MatrixMap(tuple(square), is_square=True).apply(weights))
    other = replace(model, weights=turned)
    return Rows(
        {r: _channels_by_head([other.predict_stage(r, call) for call in calls]) for r in square}
    )


def _subtract_biases(rows: Rows, biases: Mapping[str, Tensor]) -> Rows:
    return Rows(
        {r: x - biases[r][..., None] if r in biases else x for r, x in rows.matrices.items()}
    )


def collect_projection_tokens(evidence: Evidence, role: str) -> tuple[Tensor, Tensor] | None:
    """Return the inputs (tokens, columns) and the recorded stage (tokens, rows) of a projection."""
    needed = {"head outputs", "output"} if role == "o" else {role}
    calls = [call for call in evidence.calls if needed <= set(call.stages)]
    if not calls:
        return None
    recorded = flatten_tokens(call.stages[STAGE_OF[role]] for call in calls)
    if role == "o":
        return flatten_tokens(call.stages["head outputs"] for call in calls), recorded
    inputs = (call.inputs.x if role == "q" else call.inputs.key_source for call in calls)
    return flatten_tokens(inputs), recorded


def flatten_tokens(stages: Iterable[Tensor]) -> Tensor:
    """Return (tokens, channels) of stages that may have an axis of heads."""
    rows = (x.transpose(1, 2).flatten(2) if x.dim() == 4 else x for x in stages)
    return torch.cat([x.flatten(0, 1).double() for x in rows])

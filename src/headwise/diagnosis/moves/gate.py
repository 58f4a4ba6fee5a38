"""Mistakes in the rows of an output gate: read as those of q, k or v, or in another order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from headwise.diagnosis import catalogue
from headwise.diagnosis.catalogue import Cause
from headwise.diagnosis.moves.maps import MapName
from headwise.function.weights import State

GATE, USUAL = "g", ("q", "k", "v")


@dataclass(frozen=True)
class GateMove:
    """A mistake with the gate, as the tensors that it makes of right ones."""

    name: MapName
    changes: State


def list_gate_moves(weights: State) -> Iterator[GateMove]:
    """Yield the mistakes with the rows of the gate, where the weights have one."""
    if "wg" in weights:
        yield from _exchange_roles(weights)
        yield from _nest_with_queries(weights)
        yield from _read_otherwise(weights)


def _exchange_roles(weights: State) -> Iterator[GateMove]:
    for role in USUAL:
        if weights[f"w{role}"].shape != weights["wg"].shape:
            continue
        pairs = [(f"{kind}{GATE}", f"{kind}{role}") for kind in "wb"]
        pairs = [pair for pair in pairs if {*pair} <= weights.keys()]
        for moved in (pairs, pairs[:1])[: len(pairs)]:
            both = {a: weights[b] for a, b in moved} | {b: weights[a] for a, b in moved}
            text = f"the gate and {role} are exchanged"
            yield GateMove(MapName(catalogue.ANOTHER_ROLE, text, (role, GATE)), both)
            if role == "q":
                text = "heads [q|gate] read as heads [gate|q]"
                yield GateMove(MapName(catalogue.FUSED_ROW_ORDER, text, (role, GATE)), both)
            for held, source in ((0, 1), (1, 0)):
                words = (role, "the gate") if held else ("the gate", role)
                text = f"{words[0]} holds the rows of {words[1]}"
                copied = {pair[held]: weights[pair[source]] for pair in moved}
                place = (role,) if held else (GATE,)
                yield GateMove(MapName(catalogue.ANOTHER_ROLE, text, place), copied)


def _nest_with_queries(weights: State) -> Iterator[GateMove]:
    """Yield rows of q and gate that lie in turn by head and are read as halves, and the reverse."""
    if weights["wq"].shape != weights["wg"].shape:
        return
    kinds = [kind for kind in "wb" if {f"{kind}q", f"{kind}g"} <= weights.keys()]
    for order in (("q", GATE), (GATE, "q")):
        listed = f"[{'|'.join(order).replace(GATE, 'gate')}]"
        by_head, flat = f"heads {listed} head_dim", f"{listed} heads head_dim"
        for axis, stored, read in ((1, by_head, flat), (0, flat, by_head)):
            changes: State = {}
            for kind in kinds:
                parts = [weights[f"{kind}{role}"] for role in order]
                fused = torch.cat(parts, axis)
                both = fused.flatten(0, 1).unflatten(0, (2, *parts[0].shape[:2]))
                if axis == 0:
                    both = fused.flatten(0, 1).unflatten(0, (len(parts[0]), 2, -1)).transpose(0, 1)
                moved = {f"{kind}{role}": x for role, x in zip(order, both, strict=True)}
                changes = {**changes, **moved}
            text = f"{stored} read as {read}"
            yield GateMove(MapName(catalogue.FUSED_ROW_NESTING, text, ("q", GATE)), changes)


def _interleave(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def _interleave_back(x: Tensor) -> Tensor:
    return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def _cut_transposed(x: Tensor) -> Tensor:
    return x.flatten(0, 1).T.reshape(x.shape)


def _transpose_cut(x: Tensor) -> Tensor:
    matrix = x.flatten(0, 1)
    return matrix.reshape(matrix.T.shape).T.reshape(x.shape)


Change = Callable[[Tensor], Tensor]  # of (heads, channels, columns), or of a bias (heads, channels)


def _read_otherwise(weights: State) -> Iterator[GateMove]:
    """Yield the gate, alone or with q, k and v, in another order of its axes."""
    reads: tuple[tuple[Cause, str, Change, bool], ...] = (
        (catalogue.HEADS_INTERLEAVED, "head_dim heads read as heads head_dim", _interleave, True),
        (
            catalogue.HEADS_INTERLEAVED,
            "heads head_dim read as head_dim heads",
            _interleave_back,
            True,
        ),
        (catalogue.PROJECTION_RESHAPED, "transposed, then cut", _cut_transposed, False),
        (catalogue.PROJECTION_RESHAPED, "cut, then transposed", _transpose_cut, False),
    )
    for (cause, text, change, has_biases), roles in product(reads, ((GATE,), (*USUAL, GATE))):
        names = [f"{kind}{role}" for kind in "wb"[: 1 + has_biases] for role in roles]
        held = {name: weights[name] for name in names if name in weights}
        rows, columns = held["wg"].flatten(0, 1).shape
        is_square = rows == columns and not has_biases
        if is_square and change is _transpose_cut:
            continue
        named = catalogue.MATRIX_TRANSPOSED if is_square else cause
        changes = {name: change(x) for name, x in held.items()}
        yield GateMove(MapName(named, "" if is_square else text, roles), changes)

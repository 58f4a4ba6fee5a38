"""Moves of the output projection that head outputs and outputs show.

The rows of the output projection cannot be read off its outputs. Each map of them is tried, and
orders and factors of whole heads follow from the contributions of all pairs of a head and a part
of the projection, by least squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import FACTOR, ROWS_ZERO, SIGN, WEIGHTS_ROUNDED
from headwise.diagnosis.moves.families import make_row_map_catalogue
from headwise.diagnosis.moves.labels import list_matrix_maps
from headwise.diagnosis.moves.maps import MapName, MatrixMap, RowMap
from headwise.diagnosis.moves.move import (
    ROUNDED,
    Move,
    Multiplied,
    Rounded,
    Taken,
    format_dtype,
    snap_to_power_of_two,
)
from headwise.diagnosis.moves.rows import Rows
from headwise.diagnosis.moves.search import list_block_counts, make_block_map

FIRST_TOKENS = 4  # a map that fails on them is not tried on all
MOST_BLOCKS = 64
EQUATIONS = 6  # times the number of unknown coefficients


@dataclass(frozen=True)
class HeadsAndOutput:
    """Head outputs and outputs of a layer, and the projections that should connect them.

    Attributes:
        heads: (tokens, heads, value_dim), float64.
        output: (tokens, out_dim), without the bias.
        rows: the right projections.
        tolerance: the largest difference that counts as rounding, relative to the root mean
            square of the output.
    """

    heads: Tensor
    output: Tensor
    rows: Rows
    tolerance: float

    def projection_makes_outputs(self, projection: Tensor, tokens: int | None = None) -> bool:
        """True if a projection (heads, value_dim, out_dim) makes the outputs."""
        ours = self.output[:tokens]
        apart = self.heads[:tokens].flatten(1) @ projection.flatten(0, 1) - ours
        return float(apart.abs().max()) <= self.tolerance * float(ours.square().mean().sqrt())


def yield_moves_explaining_outputs(
    pair: HeadsAndOutput, rotary_width: int | None = None
) -> Iterator[Move]:
    """Yield the moves of the output projection that make the outputs."""
    for move in (
        *_yield_map_moves(pair, rotary_width),
        *_yield_rounding_moves(),
        *_yield_block_moves(pair),
    ):
        projection = move.apply(pair.rows).matrices["o"]
        if pair.projection_makes_outputs(
            projection, FIRST_TOKENS
        ) and pair.projection_makes_outputs(projection):
            yield move


def _yield_map_moves(pair: HeadsAndOutput, rotary_width: int | None) -> Iterator[Move]:
    sizes = pair.rows.head_counts_and_dims(rotary_width)
    steps: list[RowMap | MatrixMap] = [
        row_map
        for row_map in make_row_map_catalogue(sizes, pair.rows.column_counts()).maps
        if row_map.names[0].roles == ("o",)
    ]
    steps += [step for step in list_matrix_maps(pair.rows, sizes) if step.roles == ("o",)]
    for step in steps:
        yield Move(step.names[0], Taken(step), step.names[1:], ("weights",))


def _yield_rounding_moves() -> Iterator[Move]:
    for dtype in ROUNDED:
        parameters = (("dtype", dtype),)
        name = MapName(WEIGHTS_ROUNDED, format_dtype(dtype), ("o",), 0, parameters)
        yield Move(name, Rounded(("o",), dtype, ("weights",)), parts=("weights",))


def _yield_block_moves(pair: HeadsAndOutput) -> Iterator[Move]:
    """Yield orders of heads and shards, and factors of heads."""
    sizes = pair.rows.head_counts_and_dims()
    for blocks in list_block_counts("o", sizes):
        if blocks > MOST_BLOCKS:
            continue
        shares = _solve_block_coefficients(pair, blocks)
        taken = shares.abs().argmax(1)
        if sorted(taken.tolist()) != list(range(blocks)):
            continue
        if taken.tolist() == list(range(blocks)):
            if blocks == sizes.heads:
                yield from _yield_head_factor_moves(shares.diagonal())
            continue
        row_map = make_block_map(tuple(taken.tolist()), ("o",), sizes)
        yield Move(row_map.names[0], Taken(row_map), row_map.names[1:], ("weights",))


def _solve_block_coefficients(pair: HeadsAndOutput, blocks: int) -> Tensor:
    """Return how much of each block of the projection each block of head outputs goes through.

    Returns:
        (blocks of head outputs, blocks of the projection).
    """
    tokens, width = pair.output.shape
    wanted = min(tokens, max(FIRST_TOKENS, -(-EQUATIONS * blocks * blocks // width)))
    heads = pair.heads[:wanted].flatten(1).unflatten(1, (blocks, -1))
    projection = pair.rows.matrix_of_role("o").unflatten(0, (blocks, -1))
    contributions = torch.einsum("tbv,cvo->tobc", heads, projection.double())
    shares = torch.linalg.lstsq(
        contributions.flatten(0, 1).flatten(1), pair.output[:wanted].reshape(-1, 1), driver="gelsd"
    )
    solution: Tensor = shares.solution
    return solution.view(blocks, blocks)


def _yield_head_factor_moves(shares: Tensor) -> Iterator[Move]:
    """Yield signs, factors and zeros of whole heads of the output projection."""
    snapped = torch.where((shares - shares.round()).abs() < 1e-6, shares.round(), shares)
    changed = tuple((snapped != 1).nonzero().flatten().tolist())
    if not changed:
        return
    factors = tuple(snapped.tolist())
    is_whole = float((shares - shares.mean()).abs().max()) < 1e-6 * float(shares.abs().max())
    if is_whole:
        snapped = snapped.mean().expand_as(snapped)
        parameters: tuple[tuple[str, object], ...] = (("factor", float(snapped[0])),)
        text = f"{float(snapped[0]):.6g}"
    else:
        text = f"heads {', '.join(map(str, changed))}"
        parameters = (("heads", changed), ("factors", factors))
    kinds = {float(snapped[head]) for head in changed}
    cause = SIGN if kinds == {-1.0} else ROWS_ZERO if kinds == {0.0} else FACTOR
    change = Multiplied({"o": snapped[:, None]}, ("weights",))
    yield Move(MapName(cause, text, ("o",), 0, parameters), change, parts=("weights",))


def yield_output_and_bias_factor_moves(
    pair: HeadsAndOutput, output: Tensor, bias: Tensor
) -> Iterator[Move]:
    """Yield a factor of the output projection and of its bias.

    Args:
        pair: the right projection.
        output: (tokens, out_dim), with the bias.
        bias: (out_dim), the right one.
    """
    right = pair.heads.flatten(1) @ pair.rows.matrix_of_role("o") + bias
    factor = snap_to_power_of_two(float((right * output).sum() / right.square().sum()))
    apart = float((factor * right - output).abs().max())
    if factor != 1 and apart <= pair.tolerance * float(output.square().mean().sqrt()):
        cause = SIGN if factor == -1 else FACTOR
        name = MapName(cause, f"{factor:.6g}", ("o",), 0, (("factor", factor),))
        yield Move(name, Multiplied({"o": torch.full((1, 1), factor, dtype=torch.float64)}))

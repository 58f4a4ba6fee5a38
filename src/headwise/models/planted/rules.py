"""Closed form of the planted heads, from comparisons of ids and positions alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn import functional as F

from headwise.models.planted import network
from headwise.support.tensors import convert_to_int64

# ids (batch, length), rows (rows,) -> the keys of each row, (batch, rows, length) or
# (rows, length); the caller removes keys after the row
Rule = Callable[[Tensor, Tensor], Tensor]


def true_weights(
    ids: Int[Tensor, "batch length"],
    *,
    lengths: Integer[Tensor, " batch"] | None = None,
    rows: Integer[Tensor, " rows"] | None = None,
) -> list[Float[Tensor, "batch heads rows length"]]:
    """Return the attention weights of each layer by the rules: even among the attended keys.

    The computation uses no score, no softmax and no weight of the model.

    Args:
        ids: tokens below 64.
        lengths: the number of real ids of each sequence; a query of padding attends to nothing.
        rows: the queries; all by default.
    """
    position = torch.arange(ids.shape[1], device=ids.device)
    rows = position if rows is None else convert_to_int64(rows, "rows")
    real = torch.ones_like(ids, dtype=torch.bool)
    if lengths is not None:
        real = position < convert_to_int64(lengths, "lengths")[:, None]
    allowed = (position <= rows[:, None]) & real[:, rows, None]
    return [
        torch.stack([_even_weights(RULES[head.name](ids, rows) & allowed) for head in layer], dim=1)
        for layer in network.LAYERS
    ]


def true_contributions(
    ids: Int[Tensor, "batch length"],
    *,
    lengths: Integer[Tensor, " batch"] | None = None,
    rows: Integer[Tensor, " rows"] | None = None,
) -> list[Float[Tensor, "batch heads rows embed_dim"]]:
    """Return each head's contribution to the state: the mean code of its attended tokens, or 0."""
    codes = network.binary_code(ids, bits=network.TOKEN_BITS).double()
    contributions = []
    for layer, weights in zip(
        network.LAYERS, true_weights(ids, lengths=lengths, rows=rows), strict=True
    ):
        added = weights.new_zeros(*weights.shape[:3], network.EMBED_DIM)
        for number, head in enumerate(layer):
            if head.writes is not None:
                added[:, number, :, network.SECTIONS[head.writes]] = weights[:, number] @ codes
        contributions.append(added)
    return contributions


def _make_previous_rule(steps: int) -> Rule:
    def rule(ids: Tensor, rows: Tensor) -> Tensor:
        return _mask_at_key_positions(ids, (rows - steps).clamp(min=0)[:, None])

    return rule


def _first_key_mask(ids: Tensor, rows: Tensor) -> Tensor:
    return _mask_at_key_positions(ids, torch.zeros_like(rows)[:, None])


def _all_keys_mask(ids: Tensor, rows: Tensor) -> Tensor:
    return _mask_at_key_positions(ids, rows[:, None]) | True


def _nearest_separator_mask(ids: Tensor, rows: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(ids == network.SEPARATOR, position, 0).cummax(dim=1).values
    return _mask_at_key_positions(ids, last[:, rows, None])


def _same_token_mask(ids: Tensor, rows: Tensor) -> Tensor:
    return ids[:, None, :] == ids[:, rows, None]


def _mask_after_earlier_occurrence(ids: Tensor, rows: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1], device=ids.device)
    follows = F.pad(ids[:, None, :-1] == ids[:, rows, None], (1, 0))
    follows &= position <= rows[:, None]
    return follows | (~follows.any(-1, keepdim=True) & (position == 0))


def _mask_at_key_positions(ids: Tensor, key: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) == key


def _even_weights(
    attended: Bool[Tensor, "batch rows length"],
) -> Float[Tensor, "batch rows length"]:
    return attended.double() / attended.sum(-1, keepdim=True).clamp(min=1)


RULES: dict[str, Rule] = {
    "previous token": _make_previous_rule(1),
    "first token": _first_key_mask,
    "uniform": _all_keys_mask,
    "nearest separator": _nearest_separator_mask,
    "same token": _same_token_mask,
    "induction": _mask_after_earlier_occurrence,
    "two back": _make_previous_rule(2),
    "two back, again": _make_previous_rule(2),
    "own token": _make_previous_rule(0),
    "dead": _all_keys_mask,
}

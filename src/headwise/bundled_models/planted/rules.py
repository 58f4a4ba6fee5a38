"""The closed form: what each head must do, from comparisons of ids and positions alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn import functional as F

from headwise.bundled_models.planted.network import SEPARATOR, code
from headwise.bundled_models.planted.plan import EMBED_DIM, LAYERS, SECTIONS, TOKEN_BITS
from headwise.support.integers import as_int64

# ids (batch, length), rows (rows,) -> which keys each row attends to, (batch, rows, length) or
# (rows, length); what lies after the row is taken off by the caller
Rule = Callable[[Tensor, Tensor], Tensor]


def truth(
    ids: Int[Tensor, "batch length"],
    *,
    lengths: Integer[Tensor, " batch"] | None = None,
    rows: Integer[Tensor, " rows"] | None = None,
) -> list[Float[Tensor, "batch heads rows length"]]:
    """The weights of each layer, by the rules: an even share for each key attended to.

    No score, no softmax and no weight of the model has a part in it.

    Args:
        ids: tokens below 64.
        lengths: how many ids of each sequence are real; a query of padding attends to nothing.
        rows: which queries; all of them by default.
    """
    place = torch.arange(ids.shape[1], device=ids.device)
    rows = place if rows is None else as_int64(rows, "rows")
    real = torch.ones_like(ids, dtype=torch.bool)
    if lengths is not None:
        real = place < as_int64(lengths, "lengths")[:, None]
    allowed = (place <= rows[:, None]) & real[:, rows, None]
    return [
        torch.stack([_evenly(RULES[head.name](ids, rows) & allowed) for head in layer], dim=1)
        for layer in LAYERS
    ]


def contributions_truth(
    ids: Int[Tensor, "batch length"],
    *,
    lengths: Integer[Tensor, " batch"] | None = None,
    rows: Integer[Tensor, " rows"] | None = None,
) -> list[Float[Tensor, "batch heads rows embed_dim"]]:
    """What each head adds to the state: the mean code of the tokens it attends to, or nothing."""
    codes = code(ids, bits=TOKEN_BITS).double()
    found = []
    for layer, weights in zip(LAYERS, truth(ids, lengths=lengths, rows=rows), strict=True):
        added = weights.new_zeros(*weights.shape[:3], EMBED_DIM)
        for number, head in enumerate(layer):
            if head.writes is not None:
                added[:, number, :, SECTIONS[head.writes]] = weights[:, number] @ codes
        found.append(added)
    return found


def _back(steps: int) -> Rule:
    def rule(ids: Tensor, rows: Tensor) -> Tensor:
        return _is(ids, (rows - steps).clamp(min=0)[:, None])

    return rule


def _first(ids: Tensor, rows: Tensor) -> Tensor:
    return _is(ids, torch.zeros_like(rows)[:, None])


def _all(ids: Tensor, rows: Tensor) -> Tensor:
    return _is(ids, rows[:, None]) | True


def _nearest_separator(ids: Tensor, rows: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(ids == SEPARATOR, place, 0).cummax(dim=1).values
    return _is(ids, last[:, rows, None])


def _same_token(ids: Tensor, rows: Tensor) -> Tensor:
    return ids[:, None, :] == ids[:, rows, None]


def _induction(ids: Tensor, rows: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1], device=ids.device)
    follows = F.pad(ids[:, None, :-1] == ids[:, rows, None], (1, 0))
    follows &= place <= rows[:, None]
    return follows | (~follows.any(-1, keepdim=True) & (place == 0))


def _is(ids: Tensor, key: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) == key


def _evenly(attended: Bool[Tensor, "batch rows length"]) -> Float[Tensor, "batch rows length"]:
    return attended.double() / attended.sum(-1, keepdim=True).clamp(min=1)


RULES: dict[str, Rule] = {
    "previous token": _back(1),
    "first token": _first,
    "uniform": _all,
    "nearest separator": _nearest_separator,
    "same token": _same_token,
    "induction": _induction,
    "two back": _back(2),
    "two back, again": _back(2),
    "own token": _back(0),
    "dead": _all,
}

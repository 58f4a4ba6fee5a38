"""Head statistics: each a number for every head of every sequence, read from an AttentionMatrix.

Nothing here writes queries x keys: every statistic is a product with the matrix, a diagonal of it,
or a streamed reduction.

All of them are means over queries. ``query_weights`` (batch, queries) says how much each query
counts, by default 1. Padded queries get 0: a mask hides padded *keys*, but a padded query still
attends, and its weights mean nothing. A sequence in which no query counts has the statistic 0.

A[i, j] is the weight that query i gives to key j. Positions are counted from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.axes import sizes
from headwise.errors import ShapeError
from headwise.matrix import AttentionMatrix


@dataclass(frozen=True)
class Definition:
    """What a statistic means, in words for a page or a report."""

    name: str
    formula: str
    unit: str
    excluded: str
    source: str


ENTROPY = Definition(
    name="entropy",
    formula="mean over queries i of −Σⱼ A[i, j] · ln A[i, j]",
    unit="nats, from 0 (all weight on one key) to ln of the number of keys (even weight)",
    excluded="padded queries",
    source="Clark et al. 2019, arXiv:1906.04341, section 3.3",
)
PREVIOUS_TOKEN = Definition(
    name="previous token",
    formula="mean over queries i ≥ 1 of A[i, i − 1]",
    unit="share of the weight, 0 to 1",
    excluded="padded queries, and the first query, which has no key before it",
    source="Clark et al. 2019, arXiv:1906.04341, section 3.1; Olsson et al. 2022, arXiv:2209.11895",
)
FIRST_TOKEN = Definition(
    name="first token",
    formula="mean over queries i of A[i, 0]",
    unit="share of the weight, 0 to 1",
    excluded="padded queries; the first query counts, though under a causal mask it has no choice",
    source="the sink mass of key 0: Gu et al. 2024, arXiv:2410.10781; "
    "Xiao et al. 2023, arXiv:2309.17453",
)
SEPARATOR = Definition(
    name="separator",
    formula="mean over queries i of Σ A[i, j] over the keys j that hold a separator",
    unit="share of the weight, 0 to 1",
    excluded="padded queries; separators count as queries too",
    source="Clark et al. 2019, arXiv:1906.04341, section 3.2",
)


def entropy(
    matrix: AttentionMatrix, *, query_weights: Float[Tensor, "batch queries"] | None = None
) -> Float[Tensor, "batch heads"]:
    """`ENTROPY`: how widely a head looks, in nats.

    A query that may attend to nothing has entropy 0; a sink counts as one more key.

    Raises:
        ShapeError: query weights for other sizes.
    """
    return _mean(matrix.entropy(), _weights(matrix, query_weights))


def previous_token(
    matrix: AttentionMatrix, *, query_weights: Float[Tensor, "batch queries"] | None = None
) -> Float[Tensor, "batch heads"]:
    """`PREVIOUS_TOKEN`: the mean weight at offset -1.

    Query i and key i are the same position: with a key/value cache, where queries are the last of
    the keys, that is not so, and this statistic does not apply.

    Raises:
        ShapeError: queries and keys of different number, or query weights for other sizes.
    """
    _, _, queries, keys = matrix.shape
    if queries != keys:
        raise ShapeError(
            saw=f"previous_token of a matrix with {queries} queries and {keys} keys",
            needed="as many queries as keys, so that key i - 1 stands before query i",
            do=f"matrix.diagonal(offset) with the offset you mean, e.g. {keys - queries - 1}",
        )
    return _mean(matrix.diagonal(-1), _weights(matrix, query_weights)[:, 1:])


def first_token(
    matrix: AttentionMatrix, *, query_weights: Float[Tensor, "batch queries"] | None = None
) -> Float[Tensor, "batch heads"]:
    """`FIRST_TOKEN`: the mean weight on key 0.

    Raises:
        ShapeError: query weights for other sizes.
    """
    batch, _, _, keys = matrix.shape
    first = (torch.arange(keys, device=matrix.q.device) == 0).expand(batch, keys)
    return mass_on(matrix, first, query_weights=query_weights)


def mass_on(
    matrix: AttentionMatrix,
    keys: Bool[Tensor, "batch keys"],
    *,
    query_weights: Float[Tensor, "batch queries"] | None = None,
) -> Float[Tensor, "batch heads"]:
    """The mean weight on chosen keys, added up over them; `SEPARATOR` where they are separators.

    Raises:
        ShapeError: ``keys`` or the query weights are for other sizes.
    """
    batch, _, _, length = matrix.shape
    if keys.shape != (batch, length):
        raise ShapeError(
            saw=f"chosen keys {sizes(keys, ('batch', 'keys'))}",
            needed=f"(batch {batch}, keys {length})",
            do="mark each key of each sequence, True where its weight counts",
        )
    chosen = keys.to(matrix.q.dtype)[:, None, :, None]
    return _mean((matrix @ chosen).squeeze(-1), _weights(matrix, query_weights))


def _weights(matrix: AttentionMatrix, given: Tensor | None) -> Float[Tensor, "batch queries"]:
    batch, _, queries, _ = matrix.shape
    if given is None:
        return torch.ones(batch, queries, device=matrix.q.device)
    if given.shape != (batch, queries):
        raise ShapeError(
            saw=f"query_weights {sizes(given, ('batch', 'queries'))}",
            needed=f"(batch {batch}, queries {queries})",
            do="give each query a weight: 1 where it holds a token, 0 where it is padding",
        )
    return given


def _mean(
    values: Float[Tensor, "batch heads counted"], weights: Float[Tensor, "batch counted"]
) -> Float[Tensor, "batch heads"]:
    """The weighted mean over queries, in at least float32; 0 where nothing counts."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = weights.to(values.dtype)[:, None]
    total = weights.sum(-1)
    return (values * weights).sum(-1) / total.masked_fill(total == 0, 1.0)

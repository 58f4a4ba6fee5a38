"""Small model with hand-written weights, so that the rule of every head is exact.

The model has two layers of five heads, and ids below 64; id 0 begins a text and id 1 separates its
parts. It has no normalisation and no network beside attention. A query at position i attends to:

| layer | head | attends to |
| --- | --- | --- |
| 0 | previous token | the token before, i - 1 |
| 0 | first token | position 0 |
| 0 | uniform | all keys up to i, evenly |
| 0 | nearest separator | the last separator up to i; position 0 if there is none |
| 0 | same token | all keys up to i with the token of i, evenly, including i |
| 1 | induction | keys up to i that follow a token equal to that of i, evenly; else position 0 |
| 1 | two back | the token at i - 2 |
| 1 | two back, again | the token at i - 2; both heads have the same weights |
| 1 | own token | position i |
| 1 | dead | all keys up to i, evenly: its queries, keys and values are zero |

Positions before the beginning count as position 0, and query 0 attends to itself in every head.
Each head adds the mean of the codes of its attended tokens to its own section of the state. The two
equal heads share a section, and the dead head adds nothing. The logits come from the induction
head's section.

The scores of two keys are equal or at least 256 apart, and are integers that float32 represents
exactly. In float32 the weights are therefore exact: 0, 1, or 1 / n among n keys, for up to 16,384
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.matrix.operator import AttentionMatrix
from headwise.models.text import causal_padding_mask
from headwise.support.tensors import convert_to_int64
from headwise.support.tracing import may_check_values

__all__ = [
    "BEGIN",
    "LONGEST",
    "NAMES",
    "SEPARATOR",
    "VOCABULARY",
    "Planted",
    "model",
    "true_contributions",
    "true_weights",
]

TOKEN_BITS, POSITION_BITS = 6, 14  # 64 tokens, 16,384 positions
GAP = 256.0  # exp(-GAP) is 0 in float32, and below every float64 sum's last bit

# Sections of a token's state with their widths. A code is a number's bits as -1 and 1.
WIDTHS = {
    "token": TOKEN_BITS,  # code of the token
    "position": POSITION_BITS,  # code of i
    "one before": POSITION_BITS,  # code of i - 1, or of 0
    "two before": POSITION_BITS,  # code of i - 2, or of 0
    "constant": 1,  # 1
    "is first": 1,  # 1 at position 0, else 0
    "separator": 1,  # i / 2**14 where a separator is, else 0
    # Sections that heads write: the mean code of the attended tokens.
    "previous": TOKEN_BITS,  # starts at minus the code at position 0, so that the result there is 0
    "first": TOKEN_BITS,
    "mean": TOKEN_BITS,
    "divided": TOKEN_BITS,
    "same": TOKEN_BITS,
    "induced": TOKEN_BITS,
    "second": TOKEN_BITS,
    "own": TOKEN_BITS,
}
EMBED_DIM = sum(WIDTHS.values())
SECTIONS = {
    name: slice(stop - width, stop)
    for (name, width), stop in zip(WIDTHS.items(), accumulate(WIDTHS.values()), strict=True)
}


class ScoreTerm(NamedTuple):
    """A term of a score: a section of the query, times a section of the key, times a factor."""

    of_query: str
    of_key: str
    factor: float


class PlantedHead(NamedTuple):
    """A head, whose scores are the sum of its terms."""

    name: str
    comparisons: tuple[ScoreTerm, ...]
    writes: str | None


# Two codes of n bits have the product n if they are equal, and at most n - 2 if not.
LAYERS = (
    (
        PlantedHead("previous token", (ScoreTerm("one before", "position", GAP),), "previous"),
        PlantedHead("first token", (ScoreTerm("constant", "is first", GAP),), "first"),
        PlantedHead("uniform", (), "mean"),
        PlantedHead(
            "nearest separator",
            (
                # Two gaps more for each position: the largest score is just below 2**23.
                ScoreTerm("constant", "separator", 2 * GAP * 2**POSITION_BITS),
                # Above keys without a separator, below a separator at position 1.
                ScoreTerm("constant", "is first", GAP),
            ),
            "divided",
        ),
        PlantedHead("same token", (ScoreTerm("token", "token", GAP),), "same"),
    ),
    (
        PlantedHead(
            "induction",
            (
                ScoreTerm("token", "previous", GAP),
                # Between a match (TOKEN_BITS gaps) and the nearest other key (two gaps less).
                ScoreTerm("constant", "is first", (TOKEN_BITS - 1) * GAP),
            ),
            "induced",
        ),
        PlantedHead("two back", (ScoreTerm("two before", "position", GAP),), "second"),
        PlantedHead("two back, again", (ScoreTerm("two before", "position", GAP),), "second"),
        PlantedHead("own token", (ScoreTerm("position", "position", GAP),), "own"),
        PlantedHead("dead", (), None),
    ),
)
NAMES = tuple(tuple(head.name for head in layer) for layer in LAYERS)

BEGIN = 0
"""The id that begins a text."""
SEPARATOR = 1
"""The id that separates the parts of a text."""
VOCABULARY = 2**TOKEN_BITS
"""The number of ids."""
LONGEST = 2**POSITION_BITS
"""The number of tokens that the model can read."""
SHARPNESS = 4.0  # nats for each bit of a token's code


class Planted(nn.Module):
    """The planted model; ``layers[i]`` is a `headwise.Attention` with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_make_planted_layer(heads) for heads in LAYERS)
        unembedding = torch.zeros(VOCABULARY, EMBED_DIM)
        unembedding[:, SECTIONS["induced"]] = binary_code(torch.arange(VOCABULARY), bits=TOKEN_BITS)
        self.unembedding = nn.Parameter(SHARPNESS * unembedding)
        self.requires_grad_(False)

    def forward(
        self, ids: Int[Tensor, "batch length"], *, lengths: Integer[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length vocabulary"]:
        """Return the logits of the next token; they favour the token that followed this one before.

        Args:
            ids: tokens below 64, at most 16,384 in a sequence.
            lengths: the number of real ids of each sequence; the rest is padding, whose logits
                have no meaning.

        Raises:
            OptionError: an id is out of range, or a sequence is too long.
        """
        return F.linear(self._residual_states(ids, lengths)[-1], self.unembedding)

    def matrices(
        self, ids: Int[Tensor, "batch length"], *, lengths: Integer[Tensor, " batch"] | None = None
    ) -> list[AttentionMatrix]:
        """Return the attention matrix of each layer for ``ids``."""
        mask, states = causal_padding_mask(lengths), self._residual_states(ids, lengths)
        pairs = zip(self.layer_list(), states, strict=False)
        return [layer.matrix(x, mask=mask) for layer, x in pairs]

    def contributions(
        self, ids: Int[Tensor, "batch length"], *, lengths: Integer[Tensor, " batch"] | None = None
    ) -> list[Float[Tensor, "batch heads length embed_dim"]]:
        """Return the contribution of each head of each layer to the state for ``ids``."""
        mask, states = causal_padding_mask(lengths), self._residual_states(ids, lengths)
        pairs = zip(self.layer_list(), states, strict=False)
        return [layer.contributions(x, mask=mask) for layer, x in pairs]

    def embed(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length embed_dim"]:
        """Return the state before the first layer.

        Raises:
            OptionError: an id is out of range, or a sequence is too long.
        """
        if ids.shape[1] > LONGEST:
            raise OptionError(
                saw=f"ids with {ids.shape[1]} tokens in a sequence",
                needed=f"at most {LONGEST}: a position has {POSITION_BITS} bits",
                do=f"cut the sequences: ids[:, :{LONGEST}]",
            )
        if may_check_values(ids) and bool(((ids < 0) | (ids >= VOCABULARY)).any()):
            raise OptionError(
                saw=f"ids from {int(ids.min())} to {int(ids.max())}",
                needed=f"ids from 0 to {VOCABULARY - 1}: a token has {TOKEN_BITS} bits",
                do=f"draw ids with torch.randint({VOCABULARY}, (batch, length))",
            )
        position = torch.arange(ids.shape[1], device=ids.device)
        token, is_first = binary_code(ids, bits=TOKEN_BITS), (position == 0)[:, None]
        separator = (position * (ids == SEPARATOR))[..., None] / LONGEST
        parts = {
            "token": token,
            "position": binary_code(position, bits=POSITION_BITS),
            "one before": binary_code((position - 1).clamp(min=0), bits=POSITION_BITS),
            "two before": binary_code((position - 2).clamp(min=0), bits=POSITION_BITS),
            "constant": torch.ones_like(separator),
            "is first": is_first.to(token.dtype),
            "separator": separator,
            "previous": -token * is_first,
        }
        x = token.new_zeros(*ids.shape, EMBED_DIM)
        for name, part in parts.items():
            x[..., SECTIONS[name]] = part
        return x.to(self.unembedding.dtype)

    def layer_list(self) -> list[Attention]:
        """Return ``layers`` as a typed list."""
        return [layer for layer in self.layers if isinstance(layer, Attention)]

    def _residual_states(self, ids: Tensor, lengths: Tensor | None) -> list[Tensor]:
        """Return the state before each layer, and after the last."""
        mask, states = causal_padding_mask(lengths), [self.embed(ids)]
        for layer in self.layers:
            states.append(states[-1] + layer(states[-1], mask=mask))
        return states


def model() -> Planted:
    """Return the planted model in float32 and eval mode."""
    return Planted().eval()


def binary_code(numbers: Int[Tensor, "*shape"], *, bits: int) -> Float[Tensor, "*shape bits"]:
    """Return the bits of each number as -1 and 1, lowest bit first."""
    ones = (numbers[..., None] >> torch.arange(bits, device=numbers.device)) & 1
    return 2.0 * ones - 1.0


@torch.no_grad()
def _make_planted_layer(heads: tuple[PlantedHead, ...]) -> Attention:
    layer = Attention(
        EMBED_DIM,
        len(heads),
        head_dim=POSITION_BITS,
        value_dim=TOKEN_BITS,
        q_bias=False,
        k_bias=False,
        v_bias=False,
        out_bias=False,
        scale=1.0,
    )
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    # One matrix for each head: (heads, head_dim, embed_dim), and (heads, embed_dim, value_dim).
    wq, wk, wv = (
        projection.weight.unflatten(0, (len(heads), -1))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    wo = layer.out_proj.weight.unflatten(1, (len(heads), -1)).transpose(0, 1)
    for number, head in enumerate(heads):
        row = 0
        for of_query, of_key, factor in head.comparisons:
            width = WIDTHS[of_query]
            rows, identity = slice(row, row + width), torch.eye(width)
            wq[number, rows, SECTIONS[of_query]] = factor * identity
            wk[number, rows, SECTIONS[of_key]] = identity
            row += width
        if head.writes is not None:
            wv[number, :, SECTIONS["token"]] = torch.eye(TOKEN_BITS)
            wo[number, SECTIONS[head.writes]] = torch.eye(TOKEN_BITS)
    return layer


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
    attended = (
        torch.stack([RULES[head.name](ids, rows) & allowed for head in layer], dim=1)
        for layer in LAYERS
    )
    return [keys.double() / keys.sum(-1, keepdim=True).clamp(min=1) for keys in attended]


def true_contributions(
    ids: Int[Tensor, "batch length"],
    *,
    lengths: Integer[Tensor, " batch"] | None = None,
    rows: Integer[Tensor, " rows"] | None = None,
) -> list[Float[Tensor, "batch heads rows embed_dim"]]:
    """Return each head's contribution to the state: the mean code of its attended tokens, or 0."""
    codes = binary_code(ids, bits=TOKEN_BITS).double()
    contributions = []
    weights_by_layer = true_weights(ids, lengths=lengths, rows=rows)
    for layer, weights in zip(LAYERS, weights_by_layer, strict=True):
        added = weights.new_zeros(*weights.shape[:3], EMBED_DIM)
        for number, head in enumerate(layer):
            if head.writes is not None:
                added[:, number, :, SECTIONS[head.writes]] = weights[:, number] @ codes
        contributions.append(added)
    return contributions


def _make_previous_rule(steps: int) -> Rule:
    return lambda ids, rows: _mask_at_key_positions(ids, (rows - steps).clamp(min=0)[:, None])


def _all_keys_mask(ids: Tensor, rows: Tensor) -> Tensor:
    return _mask_at_key_positions(ids, rows[:, None]) | True


def _nearest_separator_mask(ids: Tensor, rows: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(ids == SEPARATOR, position, 0).cummax(dim=1).values
    return _mask_at_key_positions(ids, last[:, rows, None])


def _mask_after_earlier_occurrence(ids: Tensor, rows: Tensor) -> Tensor:
    position = torch.arange(ids.shape[1], device=ids.device)
    follows = F.pad(ids[:, None, :-1] == ids[:, rows, None], (1, 0))
    follows &= position <= rows[:, None]
    return follows | (~follows.any(-1, keepdim=True) & (position == 0))


def _mask_at_key_positions(ids: Tensor, key: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) == key


RULES: dict[str, Rule] = {
    "previous token": _make_previous_rule(1),
    "first token": lambda ids, rows: _mask_at_key_positions(ids, 0 * rows[:, None]),
    "uniform": _all_keys_mask,
    "nearest separator": _nearest_separator_mask,
    "same token": lambda ids, rows: ids[:, None, :] == ids[:, rows, None],
    "induction": _mask_after_earlier_occurrence,
    "two back": _make_previous_rule(2),
    "two back, again": _make_previous_rule(2),
    "own token": _make_previous_rule(0),
    "dead": _all_keys_mask,
}

"""Planted model: token codes, two layers of hand-written attention, logits from induction.

A plan holds the terms of the heads' scores, and the section of their output.
"""

from __future__ import annotations

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
from headwise.support.tracing import may_check_values

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
        mask = causal_padding_mask(lengths)
        return [
            layer.matrix(x, mask=mask)
            for layer, x in zip(
                self.layer_list(), self._residual_states(ids, lengths), strict=False
            )
        ]

    def contributions(
        self, ids: Int[Tensor, "batch length"], *, lengths: Integer[Tensor, " batch"] | None = None
    ) -> list[Float[Tensor, "batch heads length embed_dim"]]:
        """Return the contribution of each head of each layer to the state for ``ids``."""
        mask = causal_padding_mask(lengths)
        return [
            layer.contributions(x, mask=mask)
            for layer, x in zip(
                self.layer_list(), self._residual_states(ids, lengths), strict=False
            )
        ]

    def embed(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length embed_dim"]:
        """Return the state before the first layer.

        Raises:
            OptionError: an id is out of range, or a sequence is too long.
        """
        _require_token_ids(ids)
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
    """Make a layer with the weights of the plan."""
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


def _require_token_ids(ids: Tensor) -> None:
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

"""A task that needs two lookups at once, and attention layers that learn it.

A text is a row of tokens. Each holds a value (random numbers), its own name, and the name of some
other token. At each token two values must be told: that of the token before, and that of the token
that is named. The layer is all there is of the model, so both must come through its heads.

**One mean, weighted without regard to the values, does not hold both.** One head hands on one mean
of the values, sum over j of p_j v_j, and each value told is a linear map of it. Where the p_j do
not depend on the values (of unit variance, unrelated), the best map for the value of token a leaves
the share 1 - p_a^2 / sum p_j^2 of its variance, and for that of token b 1 - p_b^2 / sum p_j^2. The
mean of both is at least a half, whatever such weights are and however wide the head is. Queries and
keys are made of the whole token, its value too, so a head that is trained need not meet the
condition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.layers.native.attention import Attention

LENGTH = 16  # tokens of a text, and so names
VALUE = 16  # numbers of a token's value
EMBED_DIM = VALUE + 2 * LENGTH  # a value, a name, and the name of another
LOOKUPS = ("before", "named")
HALF = 0.5  # of the error of two lookups: the least that one such mean leaves
BATCH, RATE = 16, 1e-2


@dataclass(frozen=True, eq=False)
class Texts:
    """Tokens, and what must be told at each.

    Attributes:
        x: the tokens: value, own name, and the name of another.
        named: the place of the token that each names, never that of the token before.
        values: what must be told at each token but the first, which has none before it.
    """

    x: Float[Tensor, "batch length embed_dim"]
    named: Int[Tensor, "batch length"]
    values: Float[Tensor, "batch later lookups value"]


def texts(batch: int) -> Texts:
    """Random texts. The error of telling nothing is 1, for each lookup."""
    values = torch.randn(batch, LENGTH, VALUE)
    # Any token but the one before, which is the last of a ring.
    named = (torch.arange(LENGTH) + torch.randint(LENGTH - 1, (batch, LENGTH))) % LENGTH
    names = LENGTH**0.5 * torch.eye(LENGTH)  # as large as the values
    x = torch.cat([values, names.expand(batch, -1, -1), names[named]], dim=-1)
    told = torch.stack([values[:, :-1], _at(values, named)[:, 1:]], dim=2)
    return Texts(x, named, told)


def layer(num_heads: int, *, lookups: int = len(LOOKUPS), head_dim: int | None = None) -> Attention:
    """One attention layer, whose output is the values of the first so many lookups."""
    return Attention(EMBED_DIM, num_heads, head_dim=head_dim, out_dim=lookups * VALUE)


def errors(
    model: Attention, given: Texts, *, gate: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "batch lookups"]:
    """The mean squared error of each text and lookup: 1 is that of telling nothing, 0 is right."""
    lookups = model.out_dim // VALUE
    told = model(given.x, gate=gate)[:, 1:].unflatten(-1, (lookups, VALUE))
    squared: Tensor = (told - given.values[:, :, :lookups]) ** 2
    return squared.mean(dim=(1, 3))


def train(model: Attention, *, steps: int) -> list[float]:
    """Adam on new texts at every step, at a rate that falls to 0; the error at each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    found = []
    for _ in range(steps):
        error = errors(model, texts(BATCH)).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
        found.append(error.item())
    return found


@torch.no_grad()
def attended(model: Attention, given: Texts) -> Float[Tensor, "lookups heads"]:
    """The mean weight that each head puts on the token that each lookup is about."""
    weights = model.matrix(given.x).dense()
    before = weights.diagonal(-1, -2, -1)
    named = given.named[:, None, :, None].expand(-1, model.num_heads, -1, -1)
    on_named = weights.gather(-1, named)[:, :, 1:, 0]
    return torch.stack([before.mean((0, 2)), on_named.mean((0, 2))])


def _at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))

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

from headwise.models.planted.network import (
    BEGIN,
    LONGEST,
    NAMES,
    SEPARATOR,
    VOCABULARY,
    Planted,
    model,
)
from headwise.models.planted.rules import true_contributions, true_weights

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

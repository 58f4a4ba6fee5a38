"""A small model whose weights were written by hand, so that every head is known exactly.

Two layers of five heads read ids below 64; id 0 begins a text and id 1 separates its parts. There
is no normalisation and no network beside attention. What a query at position i attends to:

=====  =================  =======================================================================
layer  head               rule
=====  =================  =======================================================================
0      previous token     the token before, i - 1
0      first token        position 0
0      uniform            all keys up to i, evenly
0      nearest separator  the last separator up to i; position 0 where there is none
0      same token         all keys up to i that hold the token of i, evenly: i is one of them
1      induction          all keys up to i that follow a token like that of i, evenly: position 0
                          where there is none
1      two back           the token at i - 2
1      two back, again    the same: both heads have the same weights
1      own token          i itself
1      dead               all keys up to i, evenly: its queries, keys and values are zero
=====  =================  =======================================================================

A place before the beginning is position 0, and query 0 attends to itself in every head. Each head
writes the mean of the codes of the tokens that it attends to, into a section of its own; the two
equal heads write into one, and the dead head writes nothing. The induction head's section is what
the logits are read from.

The scores of two keys are equal or at least 256 apart, and whole numbers that float32 holds. So in
float32 the weights are the rule exactly: 0, 1, or 1 / n among n keys, at up to 16,384 tokens.
"""

from headwise.bundled_models.planted.network import (
    BEGIN,
    LONGEST,
    SEPARATOR,
    VOCABULARY,
    Planted,
    model,
)
from headwise.bundled_models.planted.plan import NAMES
from headwise.bundled_models.planted.rules import contributions_truth, truth

__all__ = [
    "BEGIN",
    "LONGEST",
    "NAMES",
    "SEPARATOR",
    "VOCABULARY",
    "Planted",
    "contributions_truth",
    "model",
    "truth",
]

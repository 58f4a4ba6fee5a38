"""Symbols of the tiny model: a begin symbol, then each byte of the text as its own id."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import OptionError

BEGIN = 256
VOCABULARY = 257


def encode(text: str | bytes) -> Int[Tensor, " length"]:
    """Return the begin symbol and the UTF-8 bytes of a text."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor([BEGIN, *raw], dtype=torch.int64)


def decode(ids: Int[Tensor, " length"]) -> str:
    """Return the text of ids, without begin symbols; invalid UTF-8 becomes U+FFFD.

    Raises:
        OptionError: an id is outside the vocabulary.
    """
    values = ids.tolist()
    if unknown := [i for i in values if not 0 <= i < VOCABULARY]:
        raise OptionError(
            saw=f"the id {unknown[0]}",
            needed=f"bytes, 0 to 255, and the begin symbol, {BEGIN}",
            do="decode one sequence of ids, e.g. logits[0].argmax(-1)",
        )
    return bytes(i for i in values if i != BEGIN).decode(errors="replace")

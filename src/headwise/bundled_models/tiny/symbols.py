"""Text as ids: each byte is its own id, after one symbol that begins every text."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import OptionError

BEGIN = 256
VOCABULARY = 257


def encode(text: str | bytes) -> Int[Tensor, " length"]:
    """The begin symbol and the bytes of a text, as UTF-8."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor([BEGIN, *raw], dtype=torch.int64)


def decode(ids: Int[Tensor, " length"]) -> str:
    """The text of ids. Begin symbols are left out; bytes that are no UTF-8 become U+FFFD.

    Raises:
        OptionError: an id outside the vocabulary.
    """
    found = ids.tolist()
    if strange := [i for i in found if not 0 <= i < VOCABULARY]:
        raise OptionError(
            saw=f"the id {strange[0]}",
            needed=f"bytes, 0 to 255, and the begin symbol, {BEGIN}",
            do="decode one sequence of ids, e.g. logits[0].argmax(-1)",
        )
    return bytes(i for i in found if i != BEGIN).decode(errors="replace")

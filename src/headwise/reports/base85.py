"""Bytes as text, five characters for four bytes: a sixteenth less than base64.

The characters need no escape in HTML: no quote, no slash, and nothing that begins or ends a tag or
a comment. `viewer/src/base85.ts` reads them.
"""

from __future__ import annotations

import numpy as np

_LEFT_OUT = "<>&\"'\\`/-"
ALPHABET = "".join(chr(n) for n in range(33, 127) if chr(n) not in _LEFT_OUT)
_DIGITS = np.frombuffer(ALPHABET.encode(), np.uint8)


def encode_base85(content: bytes) -> str:
    """Return bytes as text. A last group of k bytes takes k + 1 characters."""
    missing = -len(content) % 4
    groups = np.frombuffer(content + bytes(missing), ">u4").astype(np.uint32)
    characters = np.empty((len(groups), 5), np.uint8)
    for place in range(4, -1, -1):
        groups, digits = np.divmod(groups, np.uint32(len(ALPHABET)))
        characters[:, place] = _DIGITS[digits]
    text = characters.tobytes().decode()
    return text[: len(text) - missing]

"""Alignment of queries and keys of different number."""

from __future__ import annotations

from typing import Literal

from headwise.errors import MaskError, OptionError
from headwise.support.message_text import describe_value

Align = Literal["top-left", "bottom-right"]


def require_align(align: str | None) -> None:
    """Raise OptionError unless the alignment is one of the two, or left out."""
    if align not in (None, "top-left", "bottom-right"):
        raise OptionError(
            saw=f"align={describe_value(align)}",
            needed='"top-left", "bottom-right", or None where queries == keys',
            do='a key/value cache means align="bottom-right"',
        )


def resolve_align_to_offset(align: Align | None, queries: int, keys: int, *, what: str) -> int:
    """Return the key position that is aligned with query 0: 0, or keys - queries.

    Raises:
        MaskError: queries != keys and no alignment was named.
    """
    if align == "bottom-right":
        return keys - queries
    if align is None and queries != keys:
        raise MaskError(
            saw=f"{what} over {queries} queries and {keys} keys, without an alignment",
            needed='align="top-left" (first query at first key) or align="bottom-right" '
            "(last query at last key, what a key/value cache means)",
            do='name it where it is made: align="bottom-right", or align="top-left"',
        )
    return 0

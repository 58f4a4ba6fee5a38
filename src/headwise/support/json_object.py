"""JSON that is not trusted: one reader for headers, indexes, configs and descriptions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def parse_json_object(text: str | bytes, *, unique: bool = True) -> dict[str, Any]:
    """Return the JSON object in a text.

    Args:
        text: the text; bytes are read as UTF-8.
        unique: False to take the last of several fields with one name.

    Raises:
        ValueError: the rest of a sentence about the text: "is no JSON: ..." or "holds a list".
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_require_unique_names if unique else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}")
    return value


def _require_unique_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {name!r} occurs twice")
        values[name] = value
    return values


def is_utf8(text: str) -> bool:
    """True if a text has no lone surrogate, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)

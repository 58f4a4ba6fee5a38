"""Checks of the fields of a saved scan: each returns the field, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MOST = 2**63 - 1  # the largest number of a field
LONGEST_SHOWN = 40
LONGEST_EXCERPT = 400


class FieldError(Exception):
    """A field that no scan has: where it is, and what it is."""


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a mapping whose keys are text, as all keys of JSON are."""
    if not isinstance(value, dict):
        raise FieldError(f"{where} is {shown(value)} and no mapping")
    return value


def fields(
    value: Any, where: str, *, needed: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return a mapping that has all needed keys, and no key that is neither needed nor optional."""
    found = mapping(value, where)
    if absent := [name for name in needed if name not in found]:
        raise FieldError(f"{where} has no field {absent[0]!r}")
    if odd := sorted({*found} - {*needed, *optional}):
        raise FieldError(f"{where} has a field {shown(odd[0])} that no scan has")
    return found


def text(value: Any, where: str, *, one_of: Collection[str] = ()) -> str:
    """Return a text that can be written in UTF-8."""
    if not isinstance(value, str):
        raise FieldError(f"{where} is {shown(value)} and no text")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise FieldError(f"{where} holds half of a surrogate pair, which is no character")
    if one_of and value not in one_of:
        raise FieldError(f"{where} is {shown(value)} and none of {', '.join(one_of)}")
    return value


def whole(value: Any, where: str, *, least: int = 0, most: int = MOST) -> int:
    """Return a whole number in a range; True and 1.0 are none."""
    if type(value) is not int or not least <= value <= most:
        raise FieldError(f"{where} is {shown(value)} and no whole number from {least} to {most}")
    return value


def entries(value: Any, where: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise FieldError(f"{where} is {shown(value)} and no list")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """Return a list of texts, as a tuple."""
    found = entries(value, where)
    return tuple(text(entry, f"{where}[{index}]") for index, entry in enumerate(found))


def texts_by_name(value: Any, where: str) -> dict[str, str]:
    """Return a mapping of names to texts."""
    return {
        text(name, f"a key of {where}"): text(entry, f"{where}.{name}")
        for name, entry in mapping(value, where).items()
    }


def excerpt(words: str) -> str:
    """Return a text from a file, short and without control codes, for a message."""
    short = words if len(words) <= LONGEST_EXCERPT else f"{words[:LONGEST_EXCERPT]}…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in short)


def shown(value: Any) -> str:
    """Describe a value in a few words, whatever its size."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)} entries"
    if isinstance(value, str) and len(value) > LONGEST_SHOWN:
        return f"a text of {len(value)} characters"
    if isinstance(value, int) and value.bit_length() > MOST.bit_length():
        return f"a number of {value.bit_length()} bits"
    return ascii(value)

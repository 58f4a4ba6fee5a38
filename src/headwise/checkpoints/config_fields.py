"""Fields of a config.json, each read as the type that it must have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headwise.errors import OptionError
from headwise.support.axes import describe_value

_LONGEST = 200  # characters of a name
_MOST = 2**31 - 1


class Fields(dict[str, Any]):
    """A JSON object of a config, whose fields are read by their types.

    A field that is absent or null reads as None. A value of another type is an OptionError that
    names the file, the field, the value and the type.
    """

    def __init__(self, values: Mapping[str, Any], *, place: str = "the config") -> None:
        super().__init__(values)
        self.place = place

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fields:
        """Return the config with readers; one that has them keeps its place."""
        return config if isinstance(config, Fields) else cls(config)

    def count(self, name: str, *, most: int = _MOST) -> int | None:
        """A whole number from 1; None also where a list gives one for each of several parts."""
        value = self.get(name)
        if value is None or isinstance(value, list):
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most or value != int(value):
            raise self._refused(name, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            raise self._refused(name, "a finite number")
        return float(value)

    def positive(self, name: str) -> float | None:
        """A finite number above 0; None also for 0, which switches off what it is for."""
        value = self.number(name)
        if value is not None and value < 0:
            raise self._refused(name, "a positive number")
        return value or None

    def needed(self, name: str) -> float:
        """A finite number that must be there."""
        value = self.number(name)
        if value is None:
            raise self._refused(name, "a finite number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false, or 1 or 0."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise self._refused(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """A name, which an answer may print."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
            raise self._refused(name, f"a text of at most {_LONGEST} printable characters")
        return value

    def items_of(self, name: str) -> list[Any]:
        """A list, one value for each layer; empty where there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise self._refused(name, "a list with a value for each layer")
        return list(value or ())

    def inner(self, name: str) -> Fields | None:
        """A JSON object within this one."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._refused(name, "a JSON object")
        return Fields(value, place=f"{name} of {self.place}")

    def _refused(self, name: str, needed: str) -> OptionError:
        value = self.get(name)
        described = "not there" if value is None else describe_value(value)
        return OptionError(
            saw=f"{name} in {self.place} is {described}",
            needed=f"{name}: {needed}",
            do="write the value that the model's publisher gives",
        )

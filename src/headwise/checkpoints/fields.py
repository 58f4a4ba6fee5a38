"""Fields of a config.json, with one reader for each type."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import OptionError
from headwise.support.text import describe_value

Config = Mapping[str, Any]

MAX_TEXT = 200  # characters of a name
MAX_COUNT = 2**31 - 1


class ConfigFields(dict[str, Any]):
    """JSON object of a config, with one reader for each type of field.

    A field that is absent or null reads as None. A value of another type raises an OptionError with
    the file, the field, the value and the type.
    """

    def __init__(self, values: Mapping[str, Any], *, origin: str = "the config") -> None:
        super().__init__(values)
        self.origin = origin

    @classmethod
    def wrap(cls, config: Mapping[str, Any]) -> ConfigFields:
        """Return the config with readers; a `ConfigFields` is returned as it is."""
        return config if isinstance(config, ConfigFields) else cls(config)

    def read(self, name: str, needed: str, is_valid: Callable[[Any], bool]) -> Any:
        value = self.get(name)
        if value is None or is_valid(value):
            return value
        raise self.field_error(name, needed)

    def count(self, name: str, *, most: int = MAX_COUNT) -> int | None:
        """Return a whole number from 1; None also for a list of counts, one for each part."""
        if isinstance(self.get(name), list):
            return None
        needed = f"a whole number from 1 to {most}"
        value = self.read(name, needed, lambda n: is_number(n) and 0 < n <= most and n == int(n))
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        value = self.read(name, "a finite number", is_number)
        return None if value is None else float(value)

    def required_number(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise self.field_error(name, "a finite number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean, which may be stored as 1 or 0."""
        value = self.read(name, "true or false", lambda x: isinstance(x, int) and x in (0, 1))
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        needed = f"a text of at most {MAX_TEXT} printable characters"
        value: str | None = self.read(
            name, needed, lambda x: isinstance(x, str) and len(x) <= MAX_TEXT and x.isprintable()
        )
        return value

    def layer_values(self, name: str) -> list[Any]:
        """Return a list with a value for each layer; empty where there is none."""
        needed = "a list with a value for each layer"
        return list(self.read(name, needed, lambda x: isinstance(x, list | tuple)) or ())

    def section(self, name: str) -> ConfigFields | None:
        value = self.read(name, "a JSON object", lambda x: isinstance(x, dict))
        return None if value is None else ConfigFields(value, origin=f"{name} of {self.origin}")

    def field_error(self, name: str, needed: str) -> OptionError:
        value = self.get(name)
        described = "missing" if value is None else describe_value(value)
        return OptionError(
            saw=f"{name} in {self.origin} is {described}",
            needed=f"{name}: {needed}",
            do="write the value of the model's publisher into the config",
        )


def is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max

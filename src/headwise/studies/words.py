"""Sentences with measured numbers in them: templates over a question's numbers."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def say(template: str, numbers: Mapping[str, Any]) -> str:
    """Fill ``{key}``, ``{key[inner]}`` and ``{key[0]}`` from the numbers.

    After a colon stands how it is written: what Python's ``format`` knows, or ``sci``
    (1.9 × 10⁻⁶), ``percent`` (34 %, and 0.12 % of what is small), ``shape`` ((2, 12, 256)),
    ``list`` (1, 2, 4) or ``yesno``.
    """
    return _Template().vformat(template, (), numbers)


def scientific(value: float) -> str:
    """``1.9 × 10⁻⁶`` in one piece, without a line break; plainly 0 where it is 0."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}\u00a0×\u00a010{str(int(exponent)).translate(_SUPERSCRIPTS)}"


class _Template(string.Formatter):
    def get_field(  # Python's own reads [8] as an index, and a dict of JSON has the key "8"
        self,
        field_name: str,
        args: Any,  # noqa: ARG002
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, str]:
        first, *inner = field_name.replace("]", "").split("[")
        value: Any = kwargs[first]
        for key in inner:
            value = value[key] if isinstance(value, Mapping) else value[int(key)]
        return value, first

    def format_field(self, value: Any, spec: str) -> str:
        match spec:
            case "sci":
                return scientific(float(value))
            case "percent":
                small = 0 < abs(value) < 0.01
                return f"{100 * value:{'.2g' if small else '.0f'}}\u00a0%"
            case "shape":
                inner = ", ".join(map(str, value))
                return f"({inner},)" if len(value) == 1 else f"({inner})"
            case "list":
                return ", ".join(map(str, value))
            case "yesno":
                return "yes" if value else "no"
        return format(value, spec)

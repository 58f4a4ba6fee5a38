"""Parameters that `headwise.compare` reports, checked against those of an injected fault.

Numbers must be within 1 %, and integers and words exact. An injector and a cause may have other
names for the same parameter; what only one of the two states is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CLOSE = 0.01  # relative
# Names of an injector -> names of the causes, for those that differ.
NAMES = {
    "role": ("roles", "role"),
    "roles": ("roles",),
    "sink": ("sinks",),
    "factor": ("factor", "coefficient"),
    "weight_offset": ("offset",),
    "kind": ("norm",),
    "over": ("norm",),
    "fill": ("row",),
    "forgotten": ("padding",),
    "dropout": ("p",),
    "place": ("place", "norm"),
}
# Words of an injector -> words that a cause has for them.
WORDS = {"uniform": "equal weights", "positions": "positions", "mask": "mask ignored"}
LAYOUTS = {"by head": "heads [", "by role": "["}
LEAST_NAME = 3  # letters; shorter words, such as the roles of projections, must be equal
SPELLINGS = ("form", "rule", "slopes")  # of a number or of weights, which are checked themselves


def find_wrong_parameters(truth: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the parameters of a fault that were reported otherwise, in words."""
    wrong = []
    for name, value in truth.items():
        if name in SPELLINGS:
            continue
        spelled = NAMES.get(name, (name, name.replace("_", " ")))
        reported = next((found[each] for each in spelled if each in found), None)
        if name == "stored" and "read" in found and value not in LAYOUTS:
            is_right = _sources(value, "qkv") == _sources(found["stored"], found["read"])
        elif name == "rotated":
            is_right = len(found["rotated"]) == value
        else:
            is_right = reported is None or _agrees(value, reported)
        if not is_right:
            wrong.append(f"{name} {reported} for {value}")
    return wrong


def parameters_agree(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return True if two reports of one cause have the same parameters."""
    return a.keys() == b.keys() and all(_agrees(value, b[name]) for name, value in a.items())


def _sources(stored: str, read: str) -> dict[str, str]:
    """Return the role of each read role's rows, for orders such as "[q|v|k]" or "qvk"."""
    roles = [[letter for letter in order if letter in "qkv"] for order in (read, stored)]
    return dict(zip(*roles, strict=True))


def _agrees(truth: Any, found: Any) -> bool:
    if isinstance(truth, list | tuple):
        same_length = isinstance(found, list | tuple) and len(truth) == len(found)
        return same_length and all(_agrees(a, b) for a, b in zip(truth, found, strict=True))
    if isinstance(truth, float) and isinstance(found, int | float):
        return math.isclose(truth, found, rel_tol=CLOSE, abs_tol=1e-6)
    if isinstance(truth, str) and isinstance(found, str):
        return _is_word(truth, found)
    return bool(truth == found)


def _is_word(truth: str, found: str) -> bool:
    """True if the words of a cause have the word of an injector."""
    if truth in LAYOUTS:
        return found.startswith((LAYOUTS[truth], "kv_" + LAYOUTS[truth]))
    word = WORDS.get(truth, truth).removeprefix("torch.").removesuffix(" rotary").lower()
    stated = found.removeprefix("torch.").lower()
    is_name = min(len(word), len(stated)) >= LEAST_NAME
    kind = stated.partition(" over ")[0]  # "l2 over the head" states l2, which is no long name
    return word in (stated, kind) or (is_name and (word in stated or stated in word))

"""Journal of effects that were measured, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from headwise.support.files import parse_json_object, write_whole


class Journal:
    """File of the effects of heads, by what was measured.

    A file of another identity, or one that cannot be read, is begun anew.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path, self._identity = path, identity
        self._entries: dict[str, list[float]] = {}
        with suppress(OSError, ValueError):
            values = parse_json_object(path.read_bytes())
            if values.get("identity") == identity:
                self._entries = dict(values["effects"])

    def find(self, key: str) -> Tensor | None:
        """Return the effects of an earlier run, (heads,); None where there are none."""
        effects = self._entries.get(key)
        return None if effects is None else torch.tensor(effects, dtype=torch.float64)

    def add(self, key: str, effects: Tensor) -> None:
        """Keep the effects (heads,) that were measured."""
        self._entries[key] = effects.tolist()
        values = {"identity": self._identity, "effects": self._entries}
        write_whole(self._path, json.dumps(values) + "\n")

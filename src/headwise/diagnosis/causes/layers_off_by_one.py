"""Each layer of a model computes what its neighbour should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class LayersOffByOneCause(Cause):
    """Each layer of a model has the weights of the next layer, or of the one before.

    Some formats count layers from 1, and some count the embedding as layer 0.

    Wrong:
        layer.load(file[f"layers.{number + 1}"])  # of a file that counts from 0

    Right:
        layer.load(file[f"layers.{number}"])

    Repair:
        Count from the first layer of the file.

    Confused with:
        layers exchanged: if some layers alone have moved.
    """

    name: ClassVar[str] = "layers off by one"
    symptom: ClassVar[str] = "Weights load, and every layer is wrong: layer numbers start at 1"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:  # noqa: ARG002
        """Return nothing for one layer. A layer that parts is computed by every other layer."""
        yield from ()

"""A layer of a model computes what another layer should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class LayersExchangedCause(Cause):
    """A layer of a model has the weights of another layer.

    Files list their tensors in the order of text: `layers.10` comes before `layers.2`. Code that
    takes them in that order puts most layers in the wrong places. All shapes fit.

    Wrong:
        for layer, name in zip(model.layers, sorted(names)):
            layer.load(file[name])

    Right:
        for number, layer in enumerate(model.layers):
            layer.load(file[f"layers.{number}"])

    Repair:
        Load each layer by its number.

    Confused with:
        layers off by one: if all layers moved by the same number of places.
    """

    name: ClassVar[str] = "layers exchanged"
    symptom: ClassVar[str] = (
        "Weights load, the model talks nonsense, and some of its layers are right: layers swapped"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:  # noqa: ARG002
        """Return nothing for one layer. A layer that parts is computed by every other layer."""
        yield from ()

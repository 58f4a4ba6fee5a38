"""Running a model on its inputs, and the layers that show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.scanning import selection
from headwise.scanning.calls import LayerCall
from headwise.scanning.inputs import Arguments, inputs_of, require_tokens, run, without_extras
from headwise.scanning.reaching import Reach
from headwise.scanning.readings import LayerScan
from headwise.scanning.running import is_chosen, require_layers
from headwise.scanning.statistics.statistic import Summary


@dataclass(frozen=True, eq=False)
class Input:
    """One input: as it was given, for the loss, and as the model is called with it."""

    given: Any
    called: Arguments

    def run(self, model: nn.Module, reach: Reach) -> Any:
        """What the model returns, once through."""
        reach.begin()
        return run(model, self.called)


def inputs_for(model: nn.Module, inputs: Any) -> list[Input]:
    """A tensor, a tuple of positional arguments or a mapping of named ones; or a list of them.

    Raises:
        OptionError: none of these, nothing at all, or token ids that the model cannot look up.
    """
    several, called = inputs if isinstance(inputs, list) else [inputs], inputs_of(inputs)
    for one in called:
        require_tokens(model, one)
    return [
        Input(given, without_extras(model, one, with_logits=True))
        for given, one in zip(several, called, strict=True)
    ]


@dataclass(eq=False)
class Layer:
    """A layer whose attention was seen."""

    name: str
    num_heads: int
    is_cross: bool
    calls: int = 0

    def scan(
        self, heads: tuple[int, ...], summaries: Mapping[str, Summary], missing: Mapping[str, str]
    ) -> LayerScan:
        """What was found of it."""
        return LayerScan(
            name=self.name,
            num_heads=self.num_heads,
            heads=heads,
            kind="cross" if self.is_cross else "self",
            calls=self.calls,
            summaries=summaries,
            missing=missing,
        )


class Layers:
    """The layers that the passes of a model show, and which of them are asked for.

    Args:
        patterns: names of layers, or patterns such as "*layer.3.*", or one of them; all if None.
    """

    def __init__(self, patterns: selection.Layers) -> None:
        self._patterns = selection.select_layers(patterns)
        self._seen: dict[str, Layer] = {}

    def see(self, call: LayerCall) -> Layer | None:
        """The layer of a call, if it is asked for."""
        layer = self._seen.get(call.layer)
        if layer is None:
            layer = Layer(call.layer, call.matrix.shape[1], call.is_cross)
            self._seen[layer.name] = layer
        layer.calls += 1
        return layer if is_chosen(layer.name, self._patterns) else None

    def chosen(self) -> tuple[Layer, ...]:
        """Those that are asked for, in call order.

        Raises:
            OptionError: no attention was seen, or none of the layers that are asked for.
        """
        found = tuple(
            layer for layer in self._seen.values() if is_chosen(layer.name, self._patterns)
        )
        require_layers(bool(found), self._patterns, list(self._seen))
        return found

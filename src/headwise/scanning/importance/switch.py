"""A switch for the heads of a running model: what the loss is with each of them off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.calls import LayerCall
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.importance import losses
from headwise.scanning.importance.runs import Layer, Layers
from headwise.scanning.importance.stand_ins import StandIn
from headwise.scanning.readings import LayerScan
from headwise.scanning.statistics.statistic import Statistic, Summary
from headwise.scanning.surroundings import Surroundings
from headwise.support.axes import describe_value
from headwise.support.progress import Progress

LossesOf = Callable[[], Float[Tensor, " batch"]]  # runs the model


class Switch:
    """A watcher that looks at every layer, or takes one head off.

    Args:
        layers: which.
        stand_in: what is put in a head's place.
        heads: which; all if None.
        causal: whether every call must be causal, as the default loss needs.
    """

    def __init__(
        self,
        layers: Layers,
        stand_in: StandIn,
        heads: tuple[int, ...] | None,
        *,
        causal: bool,
    ) -> None:
        self._layers, self._stand_in, self._heads = layers, stand_in, heads
        self._causal = causal
        self._surroundings = Surroundings()
        self._off: tuple[Layer, int] | None = None
        self._place = 0  # of the next call in this pass
        self._real: list[Tensor] = []  # of each call of this input, in order
        self._shapes: dict[str, torch.Size] = {}  # of each layer's head outputs, for this input
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._missing: dict[str, str] = {}
        self._sequences = self._tokens = 0

    def __call__(self, call: LayerCall) -> Tensor | None:
        """The head outputs, one head's replaced while it is off."""
        place, self._place = self._place, self._place + 1
        if self._off is None:
            self._look(call)
            return None
        layer, head = self._off
        if call.layer != layer.name:
            return None
        outputs = call.outputs.clone()
        outputs[:, head] = self._stand_in.of(
            call.outputs[:, head], self._real[place], layer=layer.name, head=head
        )
        return outputs

    def measure(self, losses_of: LossesOf, told: Progress) -> None:
        """Run one input as it is, and then once for each head."""
        self._real.clear()
        self._shapes.clear()
        as_it_is = self._run(None, losses_of)
        count = len(as_it_is)
        self._sequences += count
        self._tokens += int(self._real[0].sum()) if self._real else 0
        self._stand_in.begin(count)
        chosen = [layer for layer in self._layers.chosen() if self._is_possible(layer, count)]
        off = [(layer, head) for layer in chosen for head in self._heads_of(layer)]
        told("all heads", 1, 1 + len(off))
        effects: dict[str, list[Tensor]] = {layer.name: [] for layer in chosen}
        for done, (layer, head) in enumerate(off, start=2):
            without = self._run((layer, head), losses_of)
            effects[layer.name].append((without - as_it_is).sum())
            told(f"{layer.name}, head {head}", done, 1 + len(off))
        for layer in chosen:
            own = torch.stack(effects[layer.name]).cpu()
            self._sums[layer.name] = self._sums.get(layer.name, torch.zeros_like(own)) + own
            self._counts[layer.name] += count

    def scan(self, model: str, statistic: Statistic, notes: tuple[str, ...]) -> HeadScan:
        """What was found of each layer, as ``statistic``."""
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=notes,
            statistics=(statistic,),
            layer_scans=self._layer_scans(statistic.definition.name),
        )

    def _layer_scans(self, name: str) -> tuple[LayerScan, ...]:
        scans = []
        for layer in self._layers.chosen():
            heads = self._heads_of(layer)
            summaries: dict[str, Summary] = {}
            missing: dict[str, str] = {}
            if layer.name in self._missing:
                missing[name] = self._missing[layer.name]
            else:
                sums = self._sums[layer.name]
                count = torch.full_like(sums, self._counts[layer.name])
                kept = self._stand_in.kept(layer, heads)
                summaries[name] = {"sum": sums, "count": count, **kept}
            scans.append(layer.scan(heads, summaries, missing))
        return tuple(scans)

    def _run(self, off: tuple[Layer, int] | None, losses_of: LossesOf) -> Tensor:
        self._off, self._place = off, 0
        return losses_of()

    def _look(self, call: LayerCall) -> None:
        if self._causal:
            losses.require_causal(call)
        self._real.append(self._surroundings.sequences_of(call).real_queries)
        self._shapes[call.layer] = call.outputs.shape
        self._layers.see(call)

    def _is_possible(self, layer: Layer, count: int) -> bool:
        shape = self._shapes.get(layer.name)
        if shape is None:  # another input ran it
            return False
        reason = self._stand_in.missing(layer.name, shape, count)
        if reason is not None:
            self._missing[layer.name] = reason
        return reason is None

    def _heads_of(self, layer: Layer) -> tuple[int, ...]:
        heads = tuple(range(layer.num_heads)) if self._heads is None else self._heads
        if not heads or any(not 0 <= head < layer.num_heads for head in heads):
            raise OptionError(
                saw=f"heads {describe_value(list(heads))} of {layer.name}",
                needed=f"heads from 0 to {layer.num_heads - 1}: it has {layer.num_heads}",
                do="name heads that every layer has, or layers that have these heads",
            )
        return heads

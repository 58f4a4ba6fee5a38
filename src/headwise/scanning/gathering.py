"""The summaries of every layer of a model, gathered as its attention calls come in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headwise.errors import OptionError
from headwise.scanning.calls import LayerCall
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.reaching import Reach
from headwise.scanning.readings import LayerScan
from headwise.scanning.running import is_chosen, notes_of, require_attention, require_layers
from headwise.scanning.statistics.observation import Observation
from headwise.scanning.statistics.statistic import Statistic, Summary
from headwise.scanning.statistics.sweep import sweep
from headwise.scanning.surroundings import Surroundings
from headwise.support.axes import describe_value
from headwise.support.progress import Progress


@dataclass(frozen=True, eq=False, kw_only=True)
class Wanted:
    """What was asked for.

    Attributes:
        statistics: all of them.
        named: the names of those that were asked for by name: they must fit.
        layers: names or patterns; all if None.
        heads: numbers; all if None.
    """

    statistics: tuple[Statistic, ...]
    named: tuple[str, ...]
    layers: tuple[str, ...] | None
    heads: tuple[int, ...] | None


@dataclass(eq=False)
class _Layer:
    """What was gathered of one layer so far."""

    num_heads: int
    heads: tuple[int, ...]
    is_cross: bool
    calls: int = 0
    summaries: dict[str, Summary] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, observation: Observation, statistics: tuple[Statistic, ...]) -> None:
        """Reduce one call to its summaries, and merge them with those before."""
        self.calls += 1
        fitting = {}
        for statistic in statistics:
            name, reason = statistic.definition.name, statistic.missing(observation)
            if reason is None:
                fitting[name] = statistic
            elif name not in self.summaries:
                self.missing[name] = reason
        for name, summary in sweep(observation, fitting.values()).items():
            self.missing.pop(name, None)
            before = self.summaries.get(name)
            both = [summary] if before is None else [before, summary]
            self.summaries[name] = fitting[name].merge(both)


class Gathering:
    """Watches one scan.

    Args:
        wanted: what was asked for.
        surroundings: what is known beyond single calls.
        progress: told (layer, attention calls seen, 0).
    """

    def __init__(self, wanted: Wanted, surroundings: Surroundings, progress: Progress) -> None:
        self._wanted, self._surroundings, self._progress = wanted, surroundings, progress
        self._layers: dict[str, _Layer] = {}
        self._calls = self._sequences = self._tokens = 0
        self._first: str | None = None
        self._is_new = True

    def next_input(self) -> None:
        """What comes now are other sequences."""
        self._is_new = True

    def watch(self, call: LayerCall) -> None:
        """The model goes on with its own outputs."""

    def settled(self, call: LayerCall) -> None:
        """Look at one call of the model."""
        self._calls += 1
        self._progress(call.layer, self._calls, 0)
        self._first = self._first or call.layer
        sequences = self._surroundings.sequences_of(call)
        if call.layer == self._first:
            self._sequences += len(call.matrix.q) if self._is_new else 0
            self._tokens += int(sequences.real_queries.sum())
            self._is_new = False
        if not is_chosen(call.layer, self._wanted.layers):
            return
        layer = self._layers.setdefault(call.layer, self._new_layer(call))
        heads = None
        if self._wanted.heads is not None:
            heads = torch.tensor(layer.heads, device=call.matrix.q.device)
        observation = self._surroundings.observe(call, sequences, heads=heads)
        layer.add(observation, self._wanted.statistics)

    def _new_layer(self, call: LayerCall) -> _Layer:
        count, heads = call.matrix.shape[1], self._wanted.heads
        if heads is not None and any(not 0 <= head < count for head in heads):
            raise OptionError(
                saw=f"heads {describe_value(list(heads))} of {call.layer}",
                needed=f"heads from 0 to {count - 1}: the layer has {count}",
                do="name heads that every layer has",
            )
        return _Layer(count, tuple(range(count)) if heads is None else heads, call.is_cross)

    def result(self, model: str, reach: Reach) -> HeadScan:
        """Everything, in call order.

        Raises:
            OptionError: no attention was seen, no layer has one of the names that were asked for,
                or no layer fits a statistic that was asked for by name.
        """
        require_attention(model, reach)
        require_layers(bool(self._layers), self._wanted.layers, list(reach.layers))
        self._require_named()
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=notes_of(reach),
            statistics=self._wanted.statistics,
            layer_scans=tuple(
                LayerScan(
                    name=name,
                    num_heads=layer.num_heads,
                    heads=layer.heads,
                    kind="cross" if layer.is_cross else "self",
                    calls=layer.calls,
                    summaries=layer.summaries,
                    missing=layer.missing,
                )
                for name, layer in self._layers.items()
            ),
        )

    def _require_named(self) -> None:
        for name in self._wanted.named:
            if not any(name in layer.summaries for layer in self._layers.values()):
                reason = next(iter(self._layers.values())).missing[name]
                raise OptionError(
                    saw=f"{name}, which no layer has: {reason}",
                    needed="what the statistic is made of",
                    do="see docs/scan.md for what each of them needs, or leave it out",
                )

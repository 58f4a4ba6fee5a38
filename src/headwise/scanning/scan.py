"""`scan`: what every head of a model does, from the forward passes that it makes anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention_matrix import AttentionMatrix
from headwise.errors import OptionError
from headwise.layers.hooks import call_hook
from headwise.scanning.capture import AttentionCapture, reached
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.model_inputs import (
    ModelInput,
    inputs_of,
    no_model,
    prepared,
    require_finite,
    run,
)
from headwise.scanning.module_calls import as_written, unembedding_of
from headwise.scanning.selection import (
    Layers,
    Numbers,
    SelectedLayers,
    Statistics,
    select_statistics,
    select_tokens,
)
from headwise.scanning.statistics.statistic import TileStatistic, sweep
from headwise.support.axes import describe_value
from headwise.support.module_modes import evaluating
from headwise.support.progress import Progress, no_progress

Model = nn.Module | Callable[..., Any] | AttentionMatrix


def scan(
    model: Model,
    inputs: Any,
    *,
    statistics: Statistics = None,
    layers: Layers = None,
    heads: Numbers | None = None,
    separators: Numbers = (),
    specials: Numbers = (),
    call: Callable[..., Any] | None = None,
    progress: Progress | None = None,
) -> HeadScan:
    """What every attention head of ``model`` does while it reads ``inputs``.

    The model runs in eval mode and without gradients, and is left as it was found. Neither weights
    nor masks of queries x keys are written down. What looks like attention and was not reached is
    named in ``HeadScan.notes``.

    Args:
        model: of transformers, with torch's or headwise's layers, or one that calls
            ``scaled_dot_product_attention``; a function that does; or an `AttentionMatrix`, with
            its values as ``inputs``.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones; or a list
            of several such inputs, which are merged. Token ids are (batch, length).
        statistics: names of the standard set, or objects of one's own; the standard set if None.
            This and the next four may also be a single one.
        layers: names of layers, or patterns such as "*layer.3.*"; all if None.
        heads: numbers of heads; all if None.
        separators: token ids that separate, such as that of "." or "[SEP]".
        specials: the tokenizer's special token ids.
        call: how to run it, e.g. ``lambda model, **given: model.generate(**given)``.
        progress: told (layer, attention calls seen, 0).

    Raises:
        OptionError: an input, statistic, layer or head that does not fit, weights that are no
            numbers, or no attention that was seen.
    """
    if isinstance(model, AttentionMatrix):
        inputs, model = (model, inputs), _attend
    model = as_written(model)
    _require_callables(model, call=call, progress=progress)
    collector = _Collector(
        separators=select_tokens("separators", separators),
        specials=select_tokens("specials", specials),
        unembedding=unembedding_of(model),
        statistics=select_statistics(statistics),
        layers=SelectedLayers(layers, heads),
        progress=progress or no_progress,
    )
    return _scanned(model, inputs_of(inputs), collector, call)


def _scanned(
    model: Any, several: list[ModelInput], collector: _Collector, call: Callable[..., Any] | None
) -> HeadScan:
    """Run the model on each input, and return what was collected."""
    module = model if isinstance(model, nn.Module) else None
    if module is not None:
        require_finite(module)
    asking_for_less = prepared(model, several)
    with torch.no_grad(), evaluating(module):
        with reached(module, settled=collector.add) as reach:
            for one, less in zip(several, asking_for_less, strict=True):
                collector.next_input(reach)
                if call is None:
                    run(model, less)
                else:
                    call(model, *one.positional, **one.named)
        return collector.result(_name_of(model), reach)


def _require_callables(model: object, **given: object) -> None:
    if not callable(model) or isinstance(model, type):
        raise no_model(model, "a model, a function that attends, or an AttentionMatrix")
    for name, function in given.items():
        if function is not None and not callable(function):
            raise OptionError(
                saw=f"{name}={describe_value(function)}",
                needed="a function, or None",
                do="call=lambda model, **given: model.generate(**given)"
                if name == "call"
                else "progress=lambda layer, calls, total: print(layer, calls)",
            )


class _Collector:
    """Collects the summaries of every layer of a model as its attention calls come in."""

    def __init__(
        self,
        *,
        statistics: tuple[tuple[TileStatistic, ...], tuple[str, ...]],
        layers: SelectedLayers,
        separators: tuple[int, ...],
        specials: tuple[int, ...],
        unembedding: Tensor | None,
        progress: Progress,
    ) -> None:
        self._statistics, self._named = statistics
        self._layers, self._progress = layers, progress
        self._separators, self._specials = separators, specials
        self._unembedding = unembedding
        self._calls = self._sequences = self._tokens = 0
        self._first: str | None = None
        self._is_new = True

    def next_input(self, reach: AttentionCapture) -> None:
        """Other sequences come now."""
        reach.begin()
        self._is_new = True

    def add(self, call: CapturedCall) -> None:
        """Reduce one call of the model to its summaries, and merge them with those before."""
        self._calls += 1
        self._progress(call.layer, self._calls, 0)
        self._first = self._first or call.layer
        if call.layer == self._first:
            self._sequences += len(call.matrix.q) if self._is_new else 0
            self._tokens += int(call.real_queries.sum())
            self._is_new = False
        layer = self._layers.see(call)
        if layer is None:
            return
        if layer.heads != tuple(range(layer.num_heads)):
            call = call.of_heads(torch.tensor(layer.heads, device=call.matrix.q.device))
        self._say(call)
        fitting = []
        for statistic in self._statistics:
            name, reason = statistic.definition.name, statistic.missing(call)
            if reason is None:
                fitting.append(statistic)
                layer.missing.pop(name, None)
            elif name not in layer.summaries:
                layer.missing[name] = reason
        found = sweep(call, fitting)
        for statistic in fitting:
            layer.add(statistic, found[statistic.definition.name])

    def _say(self, call: CapturedCall) -> None:
        """Say of a call what is known beyond it: token ids that were named, the unembedding."""
        tokens, table = call.tokens, self._unembedding
        if tokens is not None:
            call.separators = _among(tokens, self._separators)
            call.specials = _among(tokens, self._specials)
        if table is not None and call.out_proj is not None:
            call.unembedding = table if table.shape[-1] == call.out_proj.shape[-1] else None

    def result(self, model: str, reach: AttentionCapture) -> HeadScan:
        """Return everything, in call order.

        Raises:
            OptionError: no attention was seen, no layer has one of the names that were asked for,
                or no layer fits a statistic that was asked for by name.
        """
        reach.require_any(model)
        layers = self._layers.chosen()
        for name in self._named:
            if not any(name in layer.summaries for layer in layers):
                raise OptionError(
                    saw=f"{name}, which no layer has: {layers[0].missing[name]}",
                    needed="what the statistic is made of",
                    do="see docs/statistics.md for what each of them needs, or leave it out",
                )
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=reach.notes,
            statistics=self._statistics,
            layer_scans=layers,
        )


def _among(tokens: Tensor, chosen: tuple[int, ...]) -> Tensor | None:
    if not chosen:
        return None
    return torch.isin(tokens, torch.tensor(chosen, device=tokens.device, dtype=tokens.dtype))


def _attend(matrix: AttentionMatrix, v: Tensor) -> Tensor:
    return call_hook(matrix, v, matrix @ v)


def _name_of(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return "AttentionMatrix" if model is _attend else getattr(model, "__name__", "a function")

"""`scan`: statistics of every attention head of a model, from its own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layers.hooks import call_hook
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from headwise.scanning.inputs import (
    ModelInput,
    check_tokens_and_limit_outputs,
    list_inputs,
    not_a_model_error,
    require_finite_parameters,
)
from headwise.scanning.record import Recorder, record_attention
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import (
    Layers,
    Numbers,
    SelectedLayers,
    Statistics,
    normalise_token_ids_option,
    select_statistics,
)
from headwise.scanning.statistics.statistic import TileStatistic, compute_summaries
from headwise.scanning.text import TextRecorder
from headwise.scanning.weights import (
    class_name_without_fsdp,
    find_plain_unembedding,
    unwrap_compiled,
)
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_value

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
    """Run a model, and return the statistics of every attention head.

    The model runs in eval mode and without gradients, and keeps its mode and settings. No tensor
    of queries x keys is allocated. ``HeadScan.notes`` lists modules that look like attention and
    were not captured, and layers whose queries or keys are NaN or infinite.

    Args:
        model: a model of transformers, one with torch's or headwise's layers, or one that calls
            ``scaled_dot_product_attention``; a function that does; or an `AttentionMatrix`, with
            its values as ``inputs``.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones; or a list
            of several such inputs, which are merged. Token ids are (batch, length).
        statistics: names of the standard set, or your own objects; the standard set if None.
            This argument and the next four also take a single value.
        layers: names of layers, or patterns such as `"*layer.3.*"`; all if None.
        heads: numbers of heads; all if None.
        separators: token ids that separate, such as that of "." or "[SEP]".
        specials: the tokenizer's special token ids.
        call: runs the model, e.g. ``lambda model, **inputs: model.generate(**inputs)``.
        progress: called with (layer, number of attention calls so far, 0).

    Raises:
        OptionError: an input, statistic, layer or head that does not fit, weights that are not
            finite, or a model in which no attention was captured.
    """
    if isinstance(model, AttentionMatrix):
        inputs, model = (model, inputs), _compute_outputs_and_call_hook
    model = unwrap_compiled(model)
    _require_callables(model, call=call, progress=progress)
    collector = _Collector(
        separators=normalise_token_ids_option("separators", separators),
        specials=normalise_token_ids_option("specials", specials),
        model=model,
        statistics=select_statistics(statistics),
        layers=SelectedLayers(layers, heads),
        progress=progress or no_progress,
    )
    return _run_scan(model, list_inputs(inputs), collector, call)


def _run_scan(
    model: Any, inputs: list[ModelInput], collector: _Collector, call: Callable[..., Any] | None
) -> HeadScan:
    """Run the model on each input, and return the collected scan."""
    if isinstance(model, nn.Module):
        require_finite_parameters(model)
    prepared = check_tokens_and_limit_outputs(model, inputs)
    with record_attention(model, on_complete=collector.add) as recorder:
        for original, shortened in zip(inputs, prepared, strict=True):
            collector.begin_input()
            if call is None:
                recorder.run(shortened)
            else:
                recorder.begin_input()
                call(model, *original.positional, **original.named)
    return collector.result(_model_name(model), recorder)


def _require_callables(model: object, **functions: object) -> None:
    if not callable(model) or isinstance(model, type):
        raise not_a_model_error(model, "a model, a function that attends, or an AttentionMatrix")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise OptionError(
                saw=f"{name}={describe_value(function)}",
                needed="a function, or None",
                do="call=lambda model, **inputs: model.generate(**inputs)"
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
        model: Any,
        progress: Progress,
    ) -> None:
        self._statistics, self._named = statistics
        self._layers, self._progress = layers, progress
        self._separators, self._specials = separators, specials
        # One that is divided over devices has to be gathered.
        is_needed = any("unembedding" in statistic.needs for statistic in self._statistics)
        self._unembedding = find_plain_unembedding(model) if is_needed else None
        self._calls = self._sequences = self._tokens = 0
        self._first: str | None = None
        self._not_finite: dict[str, None] = {}  # layers, in call order
        self._is_new = True
        self._texts = TextRecorder()

    def begin_input(self) -> None:
        """Start another input, with other sequences."""
        self._texts.begin_input()
        self._is_new = True

    def add(self, call: CapturedCall) -> None:
        """Reduce one attention call to summaries, and merge them into those of its layer."""
        self._calls += 1
        self._progress(call.layer, self._calls, 0)
        self._first = self._first or call.layer
        if call.layer == self._first:
            self._sequences += len(call.matrix.q) if self._is_new else 0
            self._tokens += int(call.real_queries.sum())
            self._is_new = False
        texts = self._texts.record(call)
        layer = self._layers.record_call_and_find_layer(call)
        if layer is None:
            return
        if layer.calls == 1:
            layer.query_text, layer.key_text = texts
        if layer.heads != tuple(range(layer.num_heads)):
            call = call.of_heads(torch.tensor(layer.heads, device=call.matrix.q.device))
        if not _attends_with_finite_numbers(call):
            self._not_finite[call.layer] = None
        self._set_token_marks_and_unembedding(call)
        fitting = []
        for statistic in self._statistics:
            name, reason = statistic.definition.name, statistic.reason_not_computable(call)
            if reason is None:
                fitting.append(statistic)
                layer.missing.pop(name, None)
            elif name not in layer.summaries:
                layer.missing[name] = reason
        summaries = compute_summaries(call, fitting)
        for statistic in fitting:
            layer.add_summary(statistic, summaries[statistic.definition.name])

    def _set_token_marks_and_unembedding(self, call: CapturedCall) -> None:
        """Add the separators, the special tokens and the unembedding to a call."""
        tokens, table = call.tokens, self._unembedding
        if tokens is not None:
            call.separators = _mark_chosen_tokens(tokens, self._separators)
            call.specials = _mark_chosen_tokens(tokens, self._specials)
        if table is not None and call.out_proj is not None:
            call.unembedding = table if table.shape[-1] == call.out_proj.shape[-1] else None

    def result(self, model: str, recorder: Recorder) -> HeadScan:
        """Return the scan, with layers in call order.

        Raises:
            OptionError: no attention was captured, no layer has a requested name, or no layer
                has a statistic that was requested by name.
        """
        recorder.require_any_captured(model)
        layers = self._layers.selected_layers()
        for name in self._named:
            if not any(name in layer.summaries for layer in layers):
                raise OptionError(
                    saw=f"statistic {name}, which no layer has: {layers[0].missing[name]}",
                    needed="a model and inputs from which the statistic can be computed",
                    do=f"leave {name} out, or see its row in Statistics of a head in the docs",
                )
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=recorder.notes + self._note_on_numbers_not_finite(),
            statistics=self._statistics,
            layer_scans=layers,
            texts=self._texts.texts,
        )

    def _note_on_numbers_not_finite(self) -> tuple[str, ...]:
        if not self._not_finite:
            return ()
        first, *others = self._not_finite
        more = f" and {len(others)} more" if others else ""
        return (
            f"queries or keys of {first}{more} are NaN or infinite, and so are the statistics: "
            "check the model's config, or run it in a wider dtype",
        )


def _attends_with_finite_numbers(call: CapturedCall) -> bool:
    """False if the query or the key of a token, not of padding, is NaN or infinite."""
    pairs = ((call.matrix.q, call.real_queries), (call.matrix.k, call.real_keys))
    return all(
        bool(x.isfinite().all()) or bool(x.isfinite().all(-1).all(1)[real].all())
        for x, real in pairs
    )


def _mark_chosen_tokens(tokens: Tensor, chosen: tuple[int, ...]) -> Tensor | None:
    if not chosen:
        return None
    return torch.isin(tokens, torch.tensor(chosen, device=tokens.device, dtype=tokens.dtype))


def _compute_outputs_and_call_hook(matrix: AttentionMatrix, v: Tensor) -> Tensor:
    return call_hook(matrix, v, matrix @ v)


def _model_name(model: Any) -> str:
    if isinstance(model, nn.Module):
        return class_name_without_fsdp(model)
    return (
        "AttentionMatrix"
        if model is _compute_outputs_and_call_hook
        else getattr(model, "__name__", "a function")
    )

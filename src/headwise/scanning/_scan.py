"""`scan`: statistics of every attention head of a model, from its own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layers.hooks import call_hook
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning import inputs as model_inputs
from headwise.scanning import record, selection, weights
from headwise.scanning.call import CapturedCall
from headwise.scanning.layer import TextRecorder
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import Layers, Numbers, SelectedLayers, Statistics
from headwise.scanning.statistics.similarity import HeadDistance, PassOfModel
from headwise.scanning.statistics.statistic import read_tiles
from headwise.scanning.written import GivenText, list_written
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_value, list_some

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
    written: Sequence[GivenText | None] | GivenText | None = None,
    call: Callable[..., Any] | None = None,
    progress: Progress | None = None,
) -> HeadScan:
    """Run a model, and return the statistics of every attention head.

    The model runs in eval mode and without gradients, and keeps its mode and settings. No tensor
    of queries x keys is allocated where the model has none. ``HeadScan.notes`` lists modules like
    attention that were not captured, and layers whose queries or keys are NaN or infinite.

    Args:
        model: a model of transformers, one with torch's or headwise's layers, or one that calls
            ``scaled_dot_product_attention`` or multiplies queries and keys itself; a function that
            does; or an `AttentionMatrix`, with its values as ``inputs``.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones; or a list
            of several such inputs, which are merged. Token ids are (batch, length).
        statistics: names of the standard set, or your own objects; the standard set if None.
            This argument and the next four also take a single value.
        layers: names of layers, or patterns such as `"*layer.3.*"`; all if None.
        heads: numbers of heads; all if None.
        separators: token ids that separate, such as that of "." or "[SEP]".
        specials: the tokenizer's special token ids.
        written: the text of each sequence as it was written, for pages: a `WrittenText`, or a
            text with the characters of its tokens, such as the ``offset_mapping`` of a fast
            tokenizer of transformers; None for an unknown one.
        call: runs the model, e.g. ``lambda model, *ids, **named: model.generate(*ids, **named)``.
        progress: called with (layer, number of attention calls so far, 0).

    Raises:
        OptionError: an input, written text, statistic, layer or head that does not fit, weights
            that are not finite, or a model in which no attention was captured.
    """
    if isinstance(model, AttentionMatrix):
        inputs, model = (model, inputs), _compute_outputs_and_call_hook
    model = weights.unwrap_compiled(model)
    _require_callables(model, call=call, progress=progress)
    tokens = {"separators": separators, "specials": specials}
    marks = {name: selection.normalise_token_ids_option(name, ids) for name, ids in tokens.items()}
    texts = TextRecorder(list_written(written))
    collector = _Collector(model, statistics, SelectedLayers(layers, heads), marks, texts, progress)
    return _run_scan(model, inputs, collector, call)


def _run_scan(model: Any, inputs: Any, collector: _Collector, call: Any) -> HeadScan:
    given = model_inputs.list_inputs(inputs)
    if isinstance(model, nn.Module):
        model_inputs.require_finite_parameters(model)
    limit = call is None
    prepared = model_inputs.check_tokens_and_limit_outputs(model, given, limit=limit)
    with record.record_attention(model, on_complete=collector.add) as recorder:
        for original, shortened in zip(given, prepared, strict=True):
            collector.begin_input()
            if call is None:
                recorder.run(shortened)
            else:
                recorder.begin_input()
                call(model, *original.positional, **original.named)
            recorder.complete_call()  # a function's last call awaits what follows it
    name = getattr(model, "__name__", "a function")
    if model is _compute_outputs_and_call_hook:
        name = "AttentionMatrix"
    elif isinstance(model, nn.Module):
        name = weights.class_name_without_fsdp(model)
    return collector.result(name, recorder)


def _require_callables(model: object, **functions: object) -> None:
    if not callable(model) or isinstance(model, type):
        raise model_inputs.not_a_model_error(
            model, "a model, a function that attends, or an AttentionMatrix"
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise OptionError(
                saw=f"{name}={describe_value(function)}",
                needed="a function, or None",
                do="call=lambda model, *ids, **named: model.generate(*ids, **named)"
                if name == "call"
                else "progress=lambda layer, calls, total: print(layer, calls)",
            )


class _Collector:
    def __init__(
        self,
        model: Any,
        statistics: Statistics,
        layers: SelectedLayers,
        marks: dict[str, tuple[int, ...]],
        texts: TextRecorder,
        progress: Progress | None,
    ) -> None:
        self._statistics, self._named = selection.select_statistics(statistics)
        self._layers, self._marks, self._progress = layers, marks, progress or no_progress
        # One that is divided over devices has to be gathered.
        is_needed = any("unembedding" in statistic.needs for statistic in self._statistics)
        self._unembedding = weights.find_plain_unembedding(model) if is_needed else None
        self._calls = self._sequences = self._tokens = 0
        self._first, self._is_new, self._texts = "", True, texts
        self._not_finite: dict[str, None] = {}  # layers, in call order
        self._overflowing: dict[str, None] = {}
        self._distance = next((s for s in self._statistics if isinstance(s, HeadDistance)), None)
        self._pass = PassOfModel()

    def begin_input(self) -> None:
        self._end_pass()
        self._texts.begin_input()
        self._is_new = True

    def add(self, call: CapturedCall) -> None:
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
        is_known = texts[0] is not None and texts[0] == layer.query_text
        call.continues_text = bool(call.own_key) and is_known
        if layer.heads != tuple(range(layer.num_heads)):
            places = torch.tensor(self._layers.places(layer), device=call.matrix.q.device)
            call = replace(call.of_heads(places), heads=layer.heads)
        if not _attends_with_finite_numbers(call):
            self._not_finite[call.layer] = None
        if _overflows_float16(call.matrix):
            self._overflowing[call.layer] = None
        if (tokens := call.tokens) is not None:
            for name, ids in self._marks.items():
                chosen = torch.tensor(ids, device=tokens.device, dtype=tokens.dtype)
                setattr(call, name, torch.isin(tokens, chosen) if ids else None)
        if (table := self._unembedding) is not None and call.out_proj is not None:
            call.unembedding = table if table.shape[-1] == call.out_proj.shape[-1] else None
        fitting = []
        for statistic in self._statistics:
            name, reason = statistic.definition.name, statistic.reason_not_computable(call)
            if reason is None:
                fitting.append(statistic)
            elif name not in layer.summaries:
                layer.missing[name] = reason
        for statistic, sums in read_tiles(call, fitting):
            if statistic is not self._distance:
                layer.add_summary(statistic, statistic.make_summary(sums, call))
                continue
            # The same text with other padding would have other numbers of queries and keys.
            reads = (texts[0], *call.first_real_key.tolist())
            if self._pass.has_ended_before(call.layer_index, reads):
                self._end_pass()
            self._pass.add(call.layer_index, reads, sums)

    def _end_pass(self) -> None:
        ended, self._pass = self._pass, PassOfModel()
        if self._distance is None or not ended.layers:
            return
        layers = self._layers.selected_layers()
        for number, summary in ended.compare([len(layer.heads) for layer in layers]):
            layers[number].add_summary(self._distance, summary)

    def result(self, model: str, recorder: record.Recorder) -> HeadScan:
        self._end_pass()
        recorder.require_any_captured(model)
        self._texts.require_written_texts_read()
        layers = self._layers.selected_layers()
        for name in self._named:
            if not any(name in layer.summaries for layer in layers):
                raise OptionError(
                    saw=f"statistic {name}, which no layer has: {layers[0].missing[name]}",
                    needed="a model and inputs from which the statistic can be computed",
                    do=f"leave {name} out, or see its row in Statistics of a head in the docs",
                )
        notes: tuple[str, ...] = ()
        if self._not_finite:
            notes = (
                f"queries or keys of {list_some([*self._not_finite], 1)} are NaN or infinite, and "
                "so are the statistics: check the model's config, or run it in a wider dtype",
            )
        if self._overflowing:
            notes += (
                f"queries times keys of {list_some([*self._overflowing], 1)} exceed float16: eager "
                "attention multiplies in this dtype and gives NaN, the scan multiplies in float32",
            )
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=recorder.notes + notes,
            statistics=self._statistics,
            layer_scans=layers,
            texts=self._texts.texts,
        )


def _attends_with_finite_numbers(call: CapturedCall) -> bool:
    """False if the query or the key of a token, not of padding, is NaN or infinite."""
    for x, real in ((call.matrix.q, call.real_queries), (call.matrix.k, call.real_keys)):
        if not x.isfinite().all() and not x.isfinite().all(-1).all(1)[real].all():
            return False
    return True


def _overflows_float16(matrix: AttentionMatrix) -> bool:
    """True if the product of a query and a key, before it is scaled, is infinite in float16."""
    q, k, largest = matrix.q, matrix.k, torch.finfo(torch.float16).max
    if q.dtype != torch.float16 or not q.numel() or not k.numel():
        return False
    bound = q.float().norm(dim=-1).amax() * k.float().norm(dim=-1).amax()
    tiles = AttentionMatrix(q, k, scale=1.0).tiles() if bound > largest else ()
    return any(bool((tile.highest > largest).any()) for tile in tiles)


def _compute_outputs_and_call_hook(matrix: AttentionMatrix, v: Tensor) -> Tensor:
    return call_hook(matrix, v, matrix @ v)


class ExactRows:
    """The rows of any head of a model, for the inputs of a scan.

    The model runs once more for the first row of a layer, whose queries and keys are then kept.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        self._model = weights.unwrap_compiled(model)
        self._inputs = model_inputs.list_inputs(inputs)
        self._calls: dict[str, list[CapturedCall]] = {}

    def row(self, layer: str, head: int, *, sequence: int, query: int) -> Tensor:
        """Return (keys,): the weights of a query on the real keys of its sequence.

        Sequences are counted over all inputs, and queries among the real ones of their sequence.
        """
        call, batch = self._find_call(layer, sequence)
        places = call.real_queries[batch].nonzero().squeeze(1)
        heads = call.matrix.shape[1]
        if not 0 <= query < len(places) or not 0 <= head < heads:
            saw = f"query {query} of head {head}"
            needed = f"a query up to {len(places) - 1}, a head up to {heads - 1}"
            raise OptionError(saw=saw, needed=needed, do="choose from these")
        weights = call.matrix.rows(places[query : query + 1])[batch, head, 0]
        return weights[call.real_keys[batch]]

    def _find_call(self, layer: str, sequence: int) -> tuple[CapturedCall, int]:
        if layer not in self._calls:
            calls = self._calls[layer] = list[CapturedCall]()

            def keep(call: CapturedCall) -> None:
                if call.layer == layer and call.own_key in (0, None):
                    calls.append(call)

            prepared = model_inputs.check_tokens_and_limit_outputs(self._model, self._inputs)
            with record.record_attention(self._model, on_complete=keep) as recorder:
                for each in prepared:
                    recorder.run(each)
        rest = sequence
        for call in self._calls[layer]:
            batch = call.matrix.shape[0]
            if 0 <= rest < batch:
                return call, rest
            rest -= batch
        saw = f"sequence {sequence} of layer {layer}"
        needed = "a layer that attends in these inputs, and one of their sequences"
        raise OptionError(saw=saw, needed=needed, do="pass the model and the inputs of the scan")

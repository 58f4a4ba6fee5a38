"""Exact rows of the weights of a model that was scanned: computed when they are asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall
from headwise.scanning.inputs import check_tokens_and_limit_outputs, list_inputs
from headwise.scanning.record import record_attention
from headwise.scanning.weights import unwrap_compiled


class ExactRows:
    """The rows of any head of a model, for the inputs of a scan.

    A layer is captured when its first row is asked for: the model runs once more, and the layer's
    queries and keys are kept.

    Args:
        model: the model of the scan.
        inputs: its inputs, as `headwise.scan` takes them.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        self._model = unwrap_compiled(model)
        self._inputs = list_inputs(inputs)
        self._calls: dict[str, list[CapturedCall]] = {}

    def row(self, layer: str, head: int, *, sequence: int, query: int) -> Tensor:
        """Return (keys,): the weights of a query on the real keys of its sequence.

        Args:
            layer: name of the layer.
            head: number of the head.
            sequence: number of the sequence, over all inputs.
            query: number of the query among the real queries of its sequence.

        Raises:
            OptionError: the model has no such layer, head, sequence or query.
        """
        call, batch = self._find_call(layer, sequence)
        places = call.real_queries[batch].nonzero().squeeze(1)
        heads = call.matrix.shape[1]
        if not 0 <= query < len(places) or not 0 <= head < heads:
            raise OptionError(
                saw=f"query {query} of head {head}",
                needed=f"a query up to {len(places) - 1}, a head up to {heads - 1}",
                do="choose from these",
            )
        weights = call.matrix.rows(places[query : query + 1])[batch, head, 0]
        return weights[call.real_keys[batch]]

    def _find_call(self, layer: str, sequence: int) -> tuple[CapturedCall, int]:
        if layer not in self._calls:
            self._calls[layer] = self._capture_calls(layer)
        rest = sequence
        for call in self._calls[layer]:
            batch = call.matrix.shape[0]
            if 0 <= rest < batch:
                return call, rest
            rest -= batch
        raise OptionError(
            saw=f"sequence {sequence} of layer {layer}",
            needed="a layer that attends in these inputs, and one of their sequences",
            do="pass the model and the inputs of the scan",
        )

    def _capture_calls(self, layer: str) -> list[CapturedCall]:
        calls: list[CapturedCall] = []

        def keep(call: CapturedCall) -> None:
            if call.layer == layer and call.own_key in (0, None):
                calls.append(call)

        prepared = check_tokens_and_limit_outputs(self._model, self._inputs)
        with record_attention(self._model, on_complete=keep) as recorder:
            for each in prepared:
                recorder.run(each)
        return calls

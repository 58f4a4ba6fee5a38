"""Observed context of an attention call: the tokens of its keys and its output projection.

Tokens are model inputs that an embedding looked up, never tensors that only have a fitting length.
They belong to the layers of the same part of the model. Tokens in a cache are known only if every
key was observed to come in.

A module counts as the output projection if it receives exactly the concatenated head outputs and
only multiplies them by its weight and adds its bias. Inside the attention module, its output must
also be the output of that module; factors from 0 to 1 may come in between, those of an output gate,
and the head outputs are those after them. An adapter around the weight, a gate that is made of the
head outputs, or a norm in between fails this check; then the projection is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise.scanning.call import (
    CapturedCall,
    ModuleCall,
    require_not_none,
    tensors_equal,
    version_counter,
)
from headwise.scanning.weights import has_own_matrix, is_linear_output, split_weight_by_head

# ---- tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Stream:
    """Tokens that an embedding looked up in this pass."""

    part: str  # prefix of the layer names in the same part of the model
    within: ModuleCall | None  # the innermost module around the embedding, embeddings apart
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class KeyTokens:
    """The tokens of the keys of one call."""

    tokens: Tensor | None = None  # (batch, keys), −1 in the free space of a cache
    count: int | None = None  # of tokens that have come in, up to the last query
    dropped: int = 0  # number of these that a cache no longer holds
    read: Tensor | None = None  # (batch, count), where some were dropped


class TokenStreams:
    """The tokens that one model has looked up in this pass, and in earlier ones with a cache."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._streams: list[_Stream] = []
        self._history: dict[str, Tensor] = {}

    def begin_input(self) -> None:
        """Start another input, and drop the tokens of earlier sequences."""
        self._history.clear()
        self._streams.clear()

    def begin_pass(self, inputs: list[Tensor]) -> None:
        """Start a forward pass of the model with these integer inputs."""
        self._inputs = inputs
        self._streams.clear()

    def add_lookup(self, embedding: str, tokens: Tensor, outer_calls: list[ModuleCall]) -> bool:
        """Add tokens (batch, length) that an embedding looks up; True if they are a model input.

        Some models have a second embedding, so equal tokens in the same run count as one text.
        """
        if not any(tensors_equal(tokens, model_input) for model_input in self._inputs):
            return False  # positions, segment ids, or ids that the model computed
        # "text_model." for text_model.embeddings.token_embedding, "" for a whole model
        folders = embedding.split(".")[:-1]
        part = "".join(f"{x}." for x in takewhile(lambda folder: "embed" not in folder, folders))
        outside = [each for each in outer_calls[1:] if "embed" not in each.name]
        within = next(iter([*reversed(outside), *outer_calls[:1]]), None)
        before = [s.tokens for s in self._streams if (s.part, s.within) == (part, within)]
        if any(tensors_equal(tokens, text) for text in before):
            return True
        self._streams.append(_Stream(part, within, tokens))
        past = self._history.get(part)
        if past is not None:
            fits = len(past) == len(tokens)
            self._history[part] = torch.cat([past, tokens], 1) if fits else tokens[:, :0]
        return True

    def key_tokens_of_self_attention(
        self,
        layer: str,
        shape: tuple[int, int, int, int],
        outer_calls: list[ModuleCall],
        *,
        own_key: int | None,
        windowed: bool,
    ) -> KeyTokens:
        """Return the tokens of the keys of self-attention.

        ``own_key`` is the key at the position of query 0, if the mask determines it. A window
        allows a cache to drop old keys.
        """
        batch, _, queries, keys = shape
        stream = self._stream_of_layer(layer, (batch, queries), outer_calls)
        if stream is None:
            return KeyTokens()
        if own_key == 0:  # the queries begin the text
            self._history[stream.part] = stream.tokens
        past = self._history.get(stream.part)
        if past is None or past.shape[0] != batch or past.shape[1] < queries:
            return KeyTokens()
        seen = past.shape[1]
        if seen > keys:
            dropped = KeyTokens(count=seen, dropped=seen - keys, read=past)
            return dropped if windowed else KeyTokens()
        if own_key is not None and own_key != seen - queries:
            return KeyTokens()  # the cache holds other tokens than those that were observed
        return KeyTokens(pad(past, (0, keys - seen), value=-1), count=seen)

    def _stream_of_layer(
        self, layer: str, shape: tuple[int, int], outer_calls: list[ModuleCall]
    ) -> _Stream | None:
        """Return the only text (batch, length) of the layer's part in the innermost run around."""

        def nearness(stream: _Stream) -> tuple[int, int]:
            depth = next((n for n, run in enumerate(outer_calls) if run is stream.within), -1)
            return depth, len(stream.part)

        streams = [stream for stream in self._streams if layer.startswith(stream.part)]
        nearest = max(map(nearness, streams), default=None)
        fitting = [s for s in streams if nearness(s) == nearest and s.tokens.shape == shape]
        return fitting[0] if len(fitting) == 1 else None

    def key_tokens_of_cross_attention(
        self, layer: str, shape: tuple[int, int, int, int]
    ) -> KeyTokens:
        """Return the tokens of the keys of cross attention: the only other text, if it fits."""
        batch, _, _, keys = shape
        others = [s for s in self._streams if not (s.part and layer.startswith(s.part))]
        fitting = [s for s in others if s.tokens.shape == (batch, keys)]
        # The text of the queries must have been looked up after the text of the keys.
        if len(self._streams) != 2 or not fitting or fitting[0] is self._streams[-1]:
            return KeyTokens()
        return KeyTokens(fitting[0].tokens)


# ---- the output projection ----------------------------------------------------------------------


_NORM_ROUNDING = 16  # units in the quotient of two factors of a norm


class CallAwaitingProjection:
    """A call in ``block`` whose output projection has not run yet.

    The layer goes on with ``outputs``: those of ``call``, or some of them if the heads are divided
    over devices. ``version`` counts changes of them in place.
    """

    def __init__(self, call: CapturedCall, block: ModuleCall | None, outputs: Tensor) -> None:
        self.call, self.block, self.outputs = call, block, outputs
        self.version = version_counter(outputs)
        self._whole_outputs = require_not_none(call.outputs)
        self.is_complete = False
        self.was_read = False  # True once a module received the unchanged head outputs
        # A consumer of the head outputs: True if it is inside the attention module, and the number
        # of consumers behind that module that had ended when it began.
        self._consumers: dict[ModuleCall, tuple[bool, int]] = {}
        self._gated: dict[ModuleCall, Tensor] = {}  # consumers inside it, and the head outputs
        # Projections there, their outputs, and the head outputs that they received.
        self._inside: list[tuple[Tensor, Tensor, Tensor]] = []
        self._behind: list[Tensor | None] = []  # weights, None for more than a product with it

    def note_module_start(self, module_call: ModuleCall, outer_modules: list[nn.Module]) -> None:
        """Note a module that is about to run inside ``outer_modules``."""
        if module_call.state is None:
            return
        is_inside = self.call.module in outer_modules
        if not _is_concatenated_heads(module_call.state, self.outputs):
            # A module that received the head outputs before may have made the factors of them.
            if not is_inside or self.was_read:
                return
            if (gated := _split_gated_heads(module_call.state, self._whole_outputs)) is None:
                return
            self._gated[module_call] = gated
        self._consumers[module_call] = is_inside, len(self._behind)
        self.was_read = True

    def note_module_output(self, module_call: ModuleCall, output: Any) -> None:
        """Note the output of a module, and complete the call if it was the output projection."""
        parts = output if isinstance(output, (tuple, list)) else [output]
        result = next((part for part in parts if isinstance(part, Tensor)), None)
        if module_call.module is self.call.module:
            fitting = [each for each in self._inside if _first_tokens_equal(each[1], result)]
            none = None, None, self._whole_outputs
            self.call.out_proj, _, received = fitting[0] if fitting else none
            if received is not self._whole_outputs:
                self.call.outputs, self.call.mixed = received, self._whole_outputs
            self.is_complete = bool(self._inside)
            return
        is_inside, before = self._consumers.pop(module_call, (None, 0))
        if is_inside is None or result is None:
            return
        module = module_call.module
        received = self._gated.get(module_call, self._whole_outputs)
        weight = split_weight_by_head(module, received)
        inputs = received[0, :, 0].flatten()  # of which the module received its part
        is_linear = weight is not None and is_linear_output(module, inputs, result)
        if is_inside:
            if weight is not None and is_linear:
                self._inside.append((weight, result, received))
            return
        if weight is not None or has_own_matrix(module):
            self._behind[before:] = [weight if is_linear else None]  # in place of those within it
        self.call.out_proj = self._behind[0] if len(self._behind) == 1 else None
        is_open = any(not inside for inside, _ in self._consumers.values())
        self.is_complete = bool(self._behind) and not is_open


def _is_concatenated_heads(state: Tensor, outputs: Tensor) -> bool:
    """True if the first and the last token of a module's input are concatenated head outputs."""
    if state.numel() != outputs.numel() or not state.numel():
        return False
    tokens = state.reshape(-1, outputs.shape[1] * outputs.shape[3])
    first, last = outputs[0, :, 0].flatten(), outputs[-1, :, -1].flatten()
    return torch.equal(tokens[0], first) and torch.equal(tokens[-1], last)


def _split_gated_heads(state: Tensor, outputs: Tensor) -> Tensor | None:
    """Return a module's input as head outputs, if it is ``outputs`` times factors from 0 to 1.

    None for factors that differ between tokens by one number a token, as a norm's.
    """
    batch, heads, queries, width = outputs.shape
    if state.numel() != outputs.numel() or not state.numel():
        return None
    given = state.reshape(batch, queries, heads, width).transpose(1, 2)
    factors = (given / outputs).where(outputs != 0, given)
    is_between = (factors >= 0) & (factors <= (outputs != 0).to(factors.dtype))
    if not is_between.all():
        return None
    tokens = factors.transpose(1, 2).flatten(2).flatten(0, 1).double()
    tokens = tokens[(tokens > 0).all(1)]
    shares = tokens / tokens[:1]
    spread = (shares.amax(1) - shares.amin(1)) / shares.amax(1)
    return given if bool((spread > _NORM_ROUNDING * torch.finfo(state.dtype).eps).any()) else None


def _first_tokens_equal(a: Tensor, b: Tensor | None) -> bool:
    """True if the vectors of the first tokens of two tensors are equal."""
    if b is None or a.shape[-1] != b.shape[-1]:
        return False
    return torch.equal(a.reshape(-1, a.shape[-1])[0], b.reshape(-1, b.shape[-1])[0])

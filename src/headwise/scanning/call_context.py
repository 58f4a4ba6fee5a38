"""Context of an attention call, as it was observed: the tokens of its keys, its output projection.

Nothing is guessed by a length alone. Tokens are those that the model itself was given, and that
an embedding looked up; they belong to the layers of the same part of the model; and of a cache
they are known only if every key was seen to come in, from the first one on.

A module is the output projection if it is given the head outputs side by side, number for number;
multiplies them by a matrix of its own and does nothing else; and, where it lies inside of the
attention module, gives what that module gives. An adapter around the matrix, a gate beside it, or
a norm in between is none of it: then no projection is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise.kernels.bound_scores import accumulation_dtype
from headwise.scanning.captured_call import CapturedCall, known
from headwise.scanning.module_calls import ModuleCall, as_floats

# ---- tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Stream:
    """Tokens that were looked up in this pass."""

    part: str  # of the model: the beginning of its layers' names
    within: ModuleCall | None  # the run that the embedding ran in, less modules of embeddings
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class KeyTokens:
    """What is known of the keys of one call.

    Attributes:
        tokens: (batch, keys), −1 where a cache has room to spare; None where they are not known.
        seen: how many tokens have come in, up to the last query; None where that is not known.
        dropped: how many of them a cache no longer holds.
    """

    tokens: Tensor | None = None
    seen: int | None = None
    dropped: int = 0


class TokenStreams:
    """The tokens that one model has looked up: in this pass, and before it where it has a cache."""

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self._streams: list[_Stream] = []
        self._history: dict[str, Tensor] = {}

    def begin_input(self) -> None:
        """Other sequences: what a cache held before is forgotten."""
        self._history.clear()
        self._streams.clear()

    def begin_pass(self, given: list[Tensor]) -> None:
        """The model runs, and was given these tensors of integers."""
        self._given = given
        self._streams.clear()

    def look_up(self, embedding: str, tokens: Tensor, around: list[ModuleCall]) -> bool:
        """An embedding of this name looks ``tokens`` up, (batch, length), ``around`` it run these.

        Return whether these are tokens that the model was given. The same tokens again, in the
        same run, are the same text: some models have a second table.
        """
        if not any(_equal(tokens, own) for own in self._given):
            return False  # places, kinds of tokens, or what the model made itself
        part = _part_of(embedding)
        outside = [running for running in around[1:] if "embed" not in running.name]
        within = next(iter([*reversed(outside), *around[:1]]), None)
        before = [
            text.tokens for text in self._streams if (text.part, text.within) == (part, within)
        ]
        if any(_equal(tokens, text) for text in before):
            return True
        self._streams.append(_Stream(part, within, tokens))
        past = self._history.get(part)
        if past is not None:
            fits = len(past) == len(tokens)
            self._history[part] = torch.cat([past, tokens], 1) if fits else tokens[:, :0]
        return True

    def of_self(
        self,
        layer: str,
        shape: tuple[int, int, int, int],
        around: list[ModuleCall],
        *,
        own_key: int | None,
        windowed: bool,
    ) -> KeyTokens:
        """The keys of self-attention, for a matrix (batch, heads, queries, keys).

        Args:
            layer: its name.
            shape: of the matrix.
            around: the runs that the layer runs in, outermost first.
            own_key: the key that stands where query 0 stands, where the mask says so.
            windowed: whether old keys may have been dropped, since none can be seen any more.
        """
        batch, _, queries, keys = shape
        stream = self._text_of(layer, (batch, queries), around)
        if stream is None:
            return KeyTokens()
        if own_key == 0:  # the first of a text, or all of it
            self._history[stream.part] = stream.tokens
        past = self._history.get(stream.part)
        if past is None or past.shape[0] != batch or past.shape[1] < queries:
            return KeyTokens()
        seen = past.shape[1]
        if seen > keys:
            return KeyTokens(seen=seen, dropped=seen - keys) if windowed else KeyTokens()
        if own_key is not None and own_key != seen - queries:
            return KeyTokens()  # the cache holds something else than what was seen to come in
        return KeyTokens(pad(past, (0, keys - seen), value=-1), seen=seen)

    def _text_of(
        self, layer: str, shape: tuple[int, int], around: list[ModuleCall]
    ) -> _Stream | None:
        """The text (batch, length) of a layer: of its part, from the innermost run around it.

        An encoder that runs twice reads two texts. Where two of one shape were looked up in one
        run, either may be the layer's: then none is known.
        """

        def nearness(text: _Stream) -> tuple[int, int]:
            place = next((n for n, run in enumerate(around) if run is text.within), -1)
            return place, len(text.part)

        own = [text for text in self._streams if layer.startswith(text.part)]
        nearest = max(map(nearness, own), default=None)
        fitting = [t for t in own if nearness(t) == nearest and t.tokens.shape == shape]
        return fitting[0] if len(fitting) == 1 else None

    def of_cross(self, layer: str, shape: tuple[int, int, int, int]) -> KeyTokens:
        """The keys of cross attention: those of the only other text of this length, if any."""
        batch, _, _, keys = shape
        own = [s for s in self._streams if s.part and layer.startswith(s.part)]
        others = [s for s in self._streams if s not in own]
        fitting = [s for s in others if s.tokens.shape == (batch, keys)]
        # The layer's own text was looked up after the one that it attends to.
        if len(self._streams) != 2 or not fitting or fitting[0] is self._streams[-1]:
            return KeyTokens()
        return KeyTokens(fitting[0].tokens)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and bool(torch.equal(a, b)))


def _part_of(embedding: str) -> str:
    """``text_model.`` for text_model.embeddings.token_embedding; all of a model is ""."""
    parts = embedding.split(".")[:-1]
    for place, part in enumerate(parts):
        if "embed" in part:
            parts = parts[:place]
            break
    return "".join(f"{part}." for part in parts)


# ---- the output projection ----------------------------------------------------------------------


class PendingProjection:
    """A call whose output projection has not been seen yet.

    Args:
        call: what was shown.
        block: the block around it, whose state the output is added to; None where it is not known.
        version: of the head outputs when they were shown: it counts changes in place.
    """

    def __init__(self, call: CapturedCall, block: ModuleCall | None, *, version: int) -> None:
        self.call, self.block, self.version = call, block, version
        self._outputs = known(call.outputs)
        self.is_settled = False
        self.was_read = False  # a module was given the head outputs, as they are
        # A module that runs on the head outputs -> whether it stands inside the module.
        self._given: dict[ModuleCall, bool] = {}
        self._inside: list[tuple[Tensor, Tensor]] = []  # projections there, and what they gave

    def before(self, running: ModuleCall, around: list[nn.Module]) -> None:
        """A module is about to run; ``around`` are those that are running."""
        if running.state is not None and _is_merged(running.state, self._outputs):
            self._given[running], self.was_read = self.call.module in around, True

    def after(self, running: ModuleCall, output: Any) -> None:
        """A module has run."""
        given = _first_tensor(output)
        if running.module is self.call.module:
            fitting = [by for by, own in self._inside if given is not None and _begin(own, given)]
            self.call.out_proj = fitting[0] if fitting else None
            self.is_settled = bool(self._inside)
            return
        is_inside = self._given.pop(running, None)
        if is_inside is None or given is None:
            return
        found = by_head(running.module, self._outputs)
        if found is None or not _is_product(running, given):
            return
        if is_inside:
            self._inside.append((found, given))
        else:
            self.call.out_proj, self.is_settled = found, True


def by_head(module: nn.Module, outputs: Tensor) -> Tensor | None:
    """(heads, value_dim, embed_dim): the part of a module's matrix that each head goes through."""
    matrix = _matrix(module)
    _, heads, _, value_dim = outputs.shape
    if matrix is None or matrix.shape[0] != heads * value_dim:
        return None
    parts: Tensor = matrix.detach().unflatten(0, (heads, value_dim))
    return parts


def _matrix(module: nn.Module) -> Tensor | None:
    """(in, out), of floating-point numbers."""
    held = getattr(module, "weight", None)
    weight = as_floats(held.detach()) if isinstance(held, Tensor) else None
    if weight is None or weight.dim() != 2:
        return None
    # transformers' Conv1D, as in GPT-2, holds it so; linear layers the other way round.
    return weight if type(module).__name__.startswith("Conv1D") else weight.mT


def _is_product(running: ModuleCall, given: Tensor) -> bool:
    """Whether a module gave its first token times its matrix, plus its bias, up to rounding.

    Off by at most n u (|x| |W|) in the sum of n products, in the dtype of accumulation, and by two
    roundings of the result (docs/budget.md).
    """
    matrix, state = known(_matrix(running.module)), known(running.state)
    x, w = state.reshape(-1, matrix.shape[0])[0].double(), matrix.double()
    bias = getattr(running.module, "bias", None)
    exact = x @ w + (bias.double() if isinstance(bias, Tensor) else 0.0)
    if given.shape[-1] != len(exact):
        return False
    unit = torch.finfo(accumulation_dtype(given.dtype)).eps
    allowed = len(x) * unit * (x.abs() @ w.abs()) + 2 * torch.finfo(given.dtype).eps * exact.abs()
    return bool(((given.reshape(-1, len(exact))[0].double() - exact).abs() <= allowed).all())


def _is_merged(state: Tensor, outputs: Tensor) -> bool:
    """Whether a module's input is the head outputs side by side: the first token, the last."""
    if state.numel() != outputs.numel() or not state.numel():
        return False
    tokens = state.reshape(-1, outputs.shape[1] * outputs.shape[3])
    first, last = outputs[0, :, 0].flatten(), outputs[-1, :, -1].flatten()
    return torch.equal(tokens[0], first) and torch.equal(tokens[-1], last)


def _begin(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin with the same token."""
    return a.shape[-1] == b.shape[-1] and torch.equal(
        a.reshape(-1, a.shape[-1])[0], b.reshape(-1, b.shape[-1])[0]
    )


def _first_tensor(output: Any) -> Tensor | None:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return next((part for part in parts if isinstance(part, Tensor)), None)

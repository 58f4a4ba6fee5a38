"""Quality of a model on data, one number for each sequence, and its change by a cut."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.errors import OptionError, ShapeError
from headwise.scanning.call import CapturedCall
from headwise.scanning.importance import (
    find_logits,
    find_vocabularies,
    is_causal,
    next_token,
    prepare,
)
from headwise.scanning.inputs import ModelInput, call_model_on_input, list_inputs, token_ids
from headwise.scanning.record import record_attention
from headwise.scanning.weights import unwrap_compiled
from headwise.support.text import describe_count, describe_value
from headwise.support.tracing import evaluation_mode

# (output of the model, its input) -> (batch,), higher is better
Measure = Callable[[Any, Any], Tensor]
RESAMPLES = 1000  # of the bootstrap
FEW = 10  # sequences, below which no interval is said
MOST_LAYERS = 10  # lines of a table


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs to choose and fit on, and inputs to measure on."""

    fit: list[Any]  # a list of inputs, as for `headwise.scanning.importance.ablations`
    held_out: list[Any]  # a list of other inputs
    note: str  # the origin of the held-out inputs, as a sentence

    @classmethod
    def of(cls, inputs: Any, held_out: Any = None) -> Data:
        """Return the two parts; without ``held_out`` they are halves of the inputs.

        Several inputs are dealt out in turns. The sequences of a single one are halved.

        Raises:
            OptionError: a sequence is in both parts, or there is a single one.
        """
        given = [each.original for each in list_inputs(inputs)]
        if held_out is not None:
            others = [each.original for each in list_inputs(held_out)]
            data = cls(given, others, "the held-out inputs, which nothing was fitted to")
        elif len(given) > 1:
            data = cls(given[::2], given[1::2], "every second input held out")
        else:
            main = _main_tensor(list_inputs(given)[0])
            count = 0 if main is None else len(main)
            if count < 2:
                raise OptionError(
                    saw="one sequence, of which no half can be held out",
                    needed="at least two sequences: to fit to, and to measure on",
                    do="give other data: held_out=..., or more inputs",
                )
            halves = slice(0, count // 2), slice(count // 2, None)
            first, second = ([_rows(given[0], half, count)] for half in halves)
            data = cls(first, second, "the second half of the sequences held out")
        marks = {mark for value in data.fit for mark in _marks(value)}
        shared = sum(mark in marks for value in data.held_out for mark in _marks(value))
        if shared:
            raise OptionError(
                saw=f"{describe_count(shared, 'held-out sequence')} that the cut is fitted to, too",
                needed="other sequences to measure on than to fit to",
                do="leave each sequence out of one of the two, or give each once",
            )
        return data


def _rows(value: Any, rows: slice, count: int) -> Any:
    """Return these sequences of an input: of every tensor as long as its batch."""
    if isinstance(value, Mapping):
        return {name: _rows(part, rows, count) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows(part, rows, count) for part in value)
    return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value


def _main_tensor(given: ModelInput) -> Tensor | None:
    parts = (*given.positional, *given.named.values())
    first = next((part for part in parts if isinstance(part, Tensor) and part.dim() > 1), None)
    ids = token_ids(given)
    return first if ids is None else ids


def _marks(value: Any) -> Iterator[bytes]:
    """Yield a digest of each sequence, without the padding that ``attention_mask`` names."""
    given = list_inputs(value)[0]
    main, mask = _main_tensor(given), given.named.get("attention_mask")
    if main is None:
        return
    for number, row in enumerate(main):
        if isinstance(mask, Tensor) and mask.shape == main.shape:
            row = row[mask[number].bool()]
        yield sha256(row.detach().cpu().contiguous().numpy().tobytes()).digest()


@dataclass(frozen=True, eq=False)
class Quality:
    """Measure of a model on data."""

    title: str  # its name and unit
    measure: Measure  # (output, input) -> (batch,)
    # the value of a model that gives all tokens the same probability, minus the logarithm of their
    # number; None where it is not the loss of the next token
    guess: float | None = None
    # prepared inputs by their ids, which are those of the original model and of its cuts
    prepared: dict[int, ModelInput] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, inputs: Sequence[Any], measure: Measure | None = None) -> Quality:
        """Return a caller's measure, or the usual one of this kind of model.

        * A causal language model: minus the mean next-token loss in nats; see
          `headwise.scanning.importance.next_token`.
        * An encoder of tokens without logits: the cosine similarity of the mean last hidden state
          over real tokens to that of the original model.
        * Other models: the cosine similarity of the first output, as one vector without its
          padding, to that of the original model.

        ``inputs`` are all that the measure is for.
        """
        if measure is not None:
            return cls("the given measure", measure)
        if (of_next := _find_next_token_loss(model, inputs[0])) is not None:
            loss, vocabulary = of_next
            title, guess = "minus the mean next-token loss, in nats", -math.log(vocabulary)
            return cls(title, lambda *pair: -loss(*pair), guess=guess)
        likeness = Likeness(model, inputs)
        title = f"cosine similarity of {likeness.what} to the original's"
        return cls(title, likeness, prepared=likeness.prepared)

    @property
    def is_likeness(self) -> bool:
        """True if the original model has the highest value by definition: its gradient is 0."""
        return isinstance(self.measure, Likeness)

    @torch.no_grad()
    def values(self, model: nn.Module, inputs: Sequence[Any]) -> Float[Tensor, " sequences"]:
        """Return the measure of each sequence, in float64; the model runs in evaluation mode.

        Raises:
            ShapeError: a measure that is not one number for each sequence.
        """
        return torch.cat([self._value(*pair) for pair in _run(model, inputs, self.prepared)])

    @torch.no_grad()
    def change(
        self, before: nn.Module, after: nn.Module, inputs: Sequence[Any]
    ) -> tuple[Tensor, Tensor, float]:
        """Return the measure of each sequence in two models, and how far the outputs moved.

        The distance is the norm of the change of their first output, without its padding, over the
        norm of the output before; NaN for outputs that are no tensor (batch, ...).

        Raises:
            ShapeError: as `values`.
        """
        old, new, moved = [], [], []
        runs = (_run(model, inputs, self.prepared) for model in (before, after))
        for first, second in zip(*runs, strict=True):
            old.append(self._value(*first))
            new.append(self._value(*second))
            with suppress(OptionError):
                was, now = (_first_output(*pair)[1] for pair in (first, second))
                moved.append(torch.stack([(now - was).norm(), was.norm()]).cpu())
        far, size = torch.stack(moved).norm(dim=0) if moved else torch.full((2,), torch.nan)
        return torch.cat(old), torch.cat(new), float(far / size)

    def _value(self, output: Any, given: Any) -> Tensor:
        value = self.measure(output, given)
        if not isinstance(value, Tensor) or value.dim() != 1:
            raise ShapeError(
                saw=f"a measure that gave {describe_value(value)}",
                needed="one number for each sequence, (batch,)",
                do="a mean over the tokens of each sequence, none over the batch",
            )
        return value.double().cpu()

    def loss(self, output: Any, given: Any) -> Tensor:
        """Return minus the measure: a loss for `headwise.scanning.importance`."""
        return -self.measure(output, given)


def _run(
    model: nn.Module, inputs: Sequence[Any], prepared: dict[int, ModelInput]
) -> Iterator[tuple[Any, Any]]:
    """Yield the outputs of a model, each with its input; new ones among ``prepared`` are added."""
    if more := [each for each in inputs if id(each) not in prepared]:
        prepared |= {id(each.original): each for each in prepare(model, more)[1]}
    model = unwrap_compiled(model)
    with evaluation_mode(model):
        for each in inputs:
            yield call_model_on_input(model, prepared[id(each)]), each


def _find_next_token_loss(model: nn.Module, given: Any) -> tuple[Measure, int] | None:
    """Return the mean loss of the next token and the vocabulary of a causal language model."""
    causal: list[bool] = []

    def watch(call: CapturedCall) -> None:
        causal.append(is_causal(call) and not call.is_cross)

    model, prepared = prepare(model, [given])
    with torch.no_grad(), record_attention(model, watch) as recorder:
        output = recorder.run(prepared[0])
    recorder.require_any_captured(type(model).__name__)
    vocabularies, ids = find_vocabularies(model, recorder), token_ids(prepared[0])
    with suppress(OptionError):
        if ids is not None and all(causal):
            logits = find_logits(output, ids, vocabularies)
            if logits.shape[:2] == ids.shape:
                return partial(next_token, vocabularies=vocabularies), logits.shape[-1]
    return None


class Likeness:
    """Cosine similarity of a model's first output to that of the original model."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        # Inputs are kept beside their vectors, so that no other input gets the same id.
        self._expected: dict[int, tuple[Any, Tensor]] = {}
        self.what, self.prepared = "", dict[int, ModelInput]()
        with torch.no_grad():
            for output, given in _run(model, inputs, self.prepared):
                self.what, vectors = _vectors(output, given)
                self._expected[id(given)] = given, vectors

    def __call__(self, output: Any, given: Any) -> Tensor:
        """Return the cosine of each sequence, (batch,)."""
        vectors = _vectors(output, given)[1]
        return F.cosine_similarity(vectors, self._expected[id(given)][1], dim=-1)

    def units(self, output: Any, given: Any) -> tuple[Tensor, Tensor]:
        """Return the vectors (batch, numbers) of an output and of the original, of length 1."""
        pair = _vectors(output, given)[1], self._expected[id(given)][1]
        return F.normalize(pair[0], dim=-1), F.normalize(pair[1], dim=-1)


def _vectors(output: Any, given: Any) -> tuple[str, Tensor]:
    """Return the name of what is compared of a model's output, and its (batch, numbers)."""
    first, numbers = _first_output(output, given)
    ids = list_inputs(given)[0].named.get("input_ids")
    is_state = first is getattr(output, "last_hidden_state", None)
    if is_state and isinstance(ids, Tensor) and ids.shape == first.shape[:2]:
        return "the mean last hidden state", numbers.sum(1)  # of the direction of the mean
    return "the first output", numbers.flatten(1)


def _first_output(output: Any, given: Any) -> tuple[Tensor, Tensor]:
    """Return a model's first output, and its numbers in float64 with padding at zero."""
    named = list_inputs(given)[0].named
    parts = output.values() if isinstance(output, Mapping) else output
    parts = [output] if isinstance(output, Tensor) else list(parts)
    first = next((x for x in parts if isinstance(x, Tensor) and x.dim() > 1), None)
    if first is None:
        raise OptionError(
            saw=f"a model whose output is {describe_value(output)}",
            needed="an output with a tensor (batch, ...), to compare it with the original's",
            do="measure=function, where function(output, inputs) returns a tensor (batch,)",
        )
    numbers, real = first.double(), first.new_ones(first.shape[:2], dtype=torch.bool)
    for name in ("attention_mask", "decoder_attention_mask"):
        if isinstance(mask := named.get(name), Tensor) and mask.shape == real.shape:
            real = mask.bool()
    if first.dim() > 2:
        numbers = numbers.masked_fill(~real.reshape(*real.shape, *[1] * (first.dim() - 2)), 0.0)
    return first, numbers


def interval(values: Float[Tensor, " sequences"], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of a mean over sequences: 2.5 and 97.5 per cent of resamples.

    Percentile bootstrap of Efron (1979), with `RESAMPLES` draws of as many sequences.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    means = values.double()[drawn].mean(-1)
    low, high = means.quantile(means.new_tensor([0.025, 0.975])).tolist()
    return low, high


def describe_interval(values: Float[Tensor, " sequences"]) -> str:
    """Return the interval of a mean in words, or that there are too few sequences for one."""
    if len(values) < FEW:
        return f"no interval below {FEW} sequences"
    return "95 % interval {:+.4f} to {:+.4f}".format(*interval(values))


class Measured(ABC):
    """Quality of each held-out sequence before and after a cut, (sequences,).

    ``moved`` is the norm of the change of the outputs over their norm; see `Quality.change`.
    """

    before: Tensor
    after: Tensor
    moved: float

    @property
    def change(self) -> tuple[float, float, float]:
        """The mean change of quality, and its 95 % bootstrap interval over sequences."""
        difference = self.after - self.before
        return (float(difference.mean()), *interval(difference))

    def quality_lines(self, quality: Quality, data: Data) -> list[str]:
        """Return the measure, the data, and the quality before and after, in lines."""
        change = self.after - self.before
        moved = "" if math.isnan(self.moved) else f"; outputs moved by {self.moved:.1%}"
        return [
            f"quality: {quality.title}{self.describe_guess(quality)}",
            f"on {len(self.after)} sequences; {data.note}",
            f"{float(self.before.mean()):.4f} before, {float(self.after.mean()):.4f} after: "
            f"{float(change.mean()):+.4f}, {describe_interval(change)}{moved}",
        ]

    def describe_guess(self, quality: Quality) -> str:
        """Return words for a model that is no better than guessing before the cut, else ""."""
        if quality.guess is None or interval(self.before)[0] > quality.guess:
            return ""
        return f"; before no better than guessing, {quality.guess:.4f}"

    def quality_values(self, quality: Quality, data: Data) -> dict[str, Any]:
        """Return the same numbers by name."""
        change, low, high = self.change
        ends = {"low": low, "high": high} if len(self.after) >= FEW else {"low": None, "high": None}
        return {
            "measure": quality.title,
            "sequences": len(self.after),
            "held_out": data.note,
            "before": float(self.before.mean()),
            "after": float(self.after.mean()),
            "change": {"mean": change, **ends},
            "moved": None if math.isnan(self.moved) else self.moved,
            "guess": quality.guess,
        }

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return all numbers of the report by name."""

    def to_json(self) -> str:
        """Return all numbers of the report as JSON; the cut has a file of its own."""
        return json.dumps(self.values(), indent=1) + "\n"


def layer_lines(words: Mapping[str, str]) -> list[str]:
    """Return a line for each layer by its name; the last one counts those beyond `MOST_LAYERS`."""
    width = max(map(len, words))
    lines = [f"{name:{width}}  {text}" for name, text in words.items()]
    more = len(lines) - MOST_LAYERS
    return [*lines[:MOST_LAYERS], f"and {more} more layers"] if more > 0 else lines


def mark(number: int, *, is_chosen: bool) -> str:
    """Return a number of heads on a printed curve, with a star where it is the chosen one."""
    return f"*{number}" if is_chosen else str(number)

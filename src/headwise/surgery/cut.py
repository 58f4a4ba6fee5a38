"""Cut: what happens to the heads of each layer of a model, as data."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headwise.errors import CheckpointError, OptionError
from headwise.function.spec import AttentionSpec
from headwise.function.weights import State
from headwise.support.files import parse_json_object, write_whole
from headwise.surgery.steps import (
    STEPS,
    Basis,
    Equality,
    Merge,
    Origins,
    Refit,
    Shift,
    Step,
    Take,
    Zero,
    require_numbers,
)

FORMAT = 1
EQUALITIES: tuple[Equality, ...] = ("indices", "rounding", "no")  # the later, the less is equal
WORDS: Mapping[Equality, str] = {
    "indices": "outputs stay equal: numbers only change their places",
    "rounding": "outputs stay equal up to rounding",
    "no": "outputs change",
}


@dataclass(frozen=True)
class LayerCut:
    """Change of the heads of one layer: steps, in order.

    Every method returns a longer cut and leaves this one alone. Numbers of heads are those of the
    layer after the steps so far; `origins` tells their original numbers.

        LayerCut(8, 2).drop([1, 5]).merge(1)

    Attributes:
        num_heads: of the original layer.
        num_kv_heads: of the original layer.
        steps: see `headwise.surgery.steps`.
    """

    num_heads: int
    num_kv_heads: int
    steps: tuple[Step, ...] = ()

    @property
    def origins(self) -> Origins:
        """The original heads that the layer's heads are made of."""
        start = Origins.all(self.num_heads, self.num_kv_heads)
        return reduce(lambda origins, step: step.follow(origins), self.steps, start)

    @property
    def gone(self) -> list[int]:
        """The original numbers of heads that are gone, or whose output is zero."""
        heads = self.origins
        return sorted({*range(self.num_heads)} - {*heads.query} | heads.off)

    @property
    def equality(self) -> Equality:
        """Degree to which the layer's outputs stay equal."""
        return max((step.equality for step in self.steps), key=EQUALITIES.index, default="indices")

    def then(self, *steps: Step) -> LayerCut:
        """Return this cut and more steps; raise where one does not fit the heads before it."""
        longer = replace(self, steps=(*self.steps, *steps))
        _ = longer.origins
        return longer

    def keep(self, heads: Sequence[int], *, are_zero: bool = False) -> LayerCut:
        """Keep these heads in this order, with the kv heads that they read.

        Args:
            heads: their numbers; those that share a kv head stand together.
            are_zero: True if the outputs of all others are zero, so that none is lost.

        Raises:
            OptionError: a number twice or out of range, or kv heads that keep unequal numbers of
                query heads.
        """
        before, chosen = self.origins, tuple(int(head) for head in heads)
        require_numbers(chosen, len(before.query), "heads")
        runs = [(kv, len([*run])) for kv, run in groupby(chosen, lambda h: h // before.group)]
        kept = [kv for kv, _ in runs]
        if len({*kept}) < len(kept) or len({count for _, count in runs}) > 1:
            counts = ", ".join(f"{count} of kv head {kv}" for kv, count in runs)
            raise OptionError(
                saw=f"heads {', '.join(map(str, chosen))}: {counts}",
                needed="the same number of query heads for each kv head that stays, side by side",
                do="keep whole groups, or as many heads of each group",
            )
        return self.then(Take(len(before.query), chosen, tuple(kept), are_zero))

    def drop(self, heads: Iterable[int], *, are_zero: bool = False) -> LayerCut:
        """Take these heads out; see `keep`."""
        total, dropped = len(self.origins.query), [int(head) for head in heads]
        require_numbers(dropped, total, "heads", all_may_go=True)
        return self.keep([h for h in range(total) if h not in dropped], are_zero=are_zero)

    def zero(self, heads: Iterable[int]) -> LayerCut:
        """Set the rows of the output projection of these heads to 0; the layer keeps its size."""
        return self.then(Zero(tuple(int(head) for head in heads)))

    def expand(self, num_kv_heads: int) -> LayerCut:
        """Repeat each kv head, so that fewer query heads share one: no output changes.

        Raises:
            OptionError: not a multiple of the kv heads, or not a divisor of the heads.
        """
        heads = self.origins
        total, before = len(heads.query), len(heads.kv)
        if num_kv_heads < 1 or num_kv_heads % before or total % num_kv_heads:
            fits = [n for n in range(before, total + 1, before) if total % n == 0]
            raise OptionError(
                saw=f"{num_kv_heads} kv heads from {before}, for {total} heads",
                needed=f"a multiple of {before} that divides {total}: {', '.join(map(str, fits))}",
                do="choose one of these",
            )
        copies = num_kv_heads // before
        places = tuple(place // copies for place in range(num_kv_heads))
        return self.then(Take(total, tuple(range(total)), places, are_zero=True))

    def collapse(self, num_kv_heads: int) -> LayerCut:
        """Keep one of each run of equal kv heads, the reverse of `expand`: no output changes.

        Applying the cut raises where the copies are not equal.

        Raises:
            OptionError: not a divisor of the kv heads.
        """
        heads = self.origins
        total, before = len(heads.query), len(heads.kv)
        count = self._run_length(num_kv_heads)
        return self.then(Take(total, tuple(range(total)), tuple(range(0, before, count)), True))

    def merge(self, num_kv_heads: int, **maps: Tensor | None) -> LayerCut:
        """Make this many kv heads, each of kv heads that stand side by side: by default their mean.

        `keep` puts those that shall be merged side by side.

        Args:
            num_kv_heads: a divisor of their number.
            maps: key and query, value and output; see `headwise.surgery.steps.Merge`.

        Raises:
            OptionError: not a divisor of the kv heads, or a map of one side alone.
            ShapeError: maps that are not one square matrix for each kv head.
        """
        return self.then(Merge(self._run_length(num_kv_heads), **maps))

    def turn(self, *, key: Tensor | None = None, value: Tensor | None = None) -> LayerCut:
        """Change the basis of the channels inside each head; see `headwise.surgery.steps.Basis`."""
        return self.then(Basis(key, value))

    def shift(self, bias: Tensor) -> LayerCut:
        """Add a vector (out_dim,) to the output's bias."""
        return self.then(Shift(bias))

    def refit(self, wo: Tensor, bo: Tensor | None = None) -> LayerCut:
        """Replace the output projection; see `headwise.surgery.steps.Refit`."""
        return self.then(Refit(wo, bo))

    def apply(self, state: State, spec: AttentionSpec) -> State:
        """Return the canonical tensors after all steps; the given ones stay as they are.

        Args:
            state: see `headwise.function.weights`.
            spec: the function of the layer.

        Raises:
            OptionError: the function does not allow a step; or kv heads are not equal, or outputs
                not zero, where the cut says so.
            ShapeError: a layer with other numbers of heads.
        """
        given = state["wq"].shape[0], state["wk"].shape[0]
        if given != (self.num_heads, self.num_kv_heads):
            raise OptionError(
                saw=f"a layer of {given[0]} heads and {given[1]} kv heads",
                needed=f"{self.num_heads} and {self.num_kv_heads}, as this cut was made for",
                do="make the cut for this layer",
            )
        for step in self.steps:
            step.require_function(spec)
            state = step.apply(state)
        return state

    def _run_length(self, num_kv_heads: int) -> int:
        before = len(self.origins.kv)
        if num_kv_heads < 1 or before % num_kv_heads:
            fits = [n for n in range(1, before + 1) if before % n == 0]
            raise OptionError(
                saw=f"{num_kv_heads} kv heads from {before}",
                needed=f"a divisor of {before}: {', '.join(map(str, fits))}",
                do="choose one of these",
            )
        return before // num_kv_heads

    def __str__(self) -> str:
        """Say how many heads are left, and which are gone."""
        heads, gone = self.origins, self.gone
        kept = len({*heads.query} - heads.off)
        text = f"{kept} of {self.num_heads} heads"
        if gone:
            text += f" without {', '.join(map(str, gone))}"
        if heads.off:
            text += ", at full size" if len(heads.query) == self.num_heads else ", some at size"
        if len(heads.kv) != self.num_kv_heads:
            text += f", {len(heads.kv)} of {self.num_kv_heads} kv heads"
        if any(len(kv) > 1 for kv in heads.kv):
            groups = ("+".join(map(str, kv)) for kv in dict.fromkeys(heads.kv))
            text += f" ({' '.join(groups)})"
        phrases = (
            f"merged by {'maps' if step.has_maps else 'their mean'}"
            if isinstance(step, Merge)
            else NAMED.get(step.kind, "")
            for step in self.steps
        )
        return ", ".join([text, *dict.fromkeys(filter(None, phrases))])


NAMED = {
    "basis": "in another basis",
    "shift": "with a mean in the bias",
    "refit": "with a fitted output projection",
}


@dataclass(frozen=True)
class Cut:
    """Change of the heads of each layer of a model.

    ``str()`` is a table by layer. A cut saves as JSON, and composes: `then` makes one cut of two.

    Attributes:
        layers: prefix of the layer's tensor names, such as "model.layers.0.self_attn." -> its cut.
            Layers that are not named stay as they are.
    """

    layers: Mapping[str, LayerCut] = field(default_factory=dict)

    @property
    def equality(self) -> Equality:
        """Degree to which the model's outputs stay equal."""
        kinds = (layer.equality for layer in self.layers.values())
        return max(kinds, key=EQUALITIES.index, default="indices")

    @property
    def gone(self) -> dict[str, list[int]]:
        """The original numbers of the heads that are gone, by layer."""
        return {name: layer.gone for name, layer in self.layers.items() if layer.gone}

    def __iter__(self) -> Iterator[tuple[str, LayerCut]]:
        """Yield the name and the cut of each layer."""
        return iter(self.layers.items())

    def then(self, other: Cut) -> Cut:
        """Return the cut that does this one, and then another one.

        Raises:
            OptionError: the other one was made for layers with other numbers of heads.
        """
        layers = dict(self.layers)
        for name, after in other:
            before = layers.get(name, LayerCut(after.num_heads, after.num_kv_heads))
            left = len(before.origins.query), len(before.origins.kv)
            if left != (after.num_heads, after.num_kv_heads):
                raise OptionError(
                    saw=f"{name} with {left[0]} heads and {left[1]} kv heads after the first cut",
                    needed=f"{after.num_heads} and {after.num_kv_heads}, of which the second "
                    "one takes",
                    do="make the second cut of the model after the first one",
                )
            layers[name] = before.then(*after.steps)
        return Cut(layers)

    def __str__(self) -> str:
        """Return a line for each layer, and what stays equal."""
        width = max(map(len, self.layers), default=0)
        lines = [f"{name:{width}}  {layer}" for name, layer in self]
        return "\n".join([*lines, WORDS[self.equality]])

    def to_json(self) -> str:
        """Return the cut as JSON; tensors are in the bytes of safetensors.

        A layer also states the original numbers of the heads that are left, in order, and of those
        that are off, so that a reader need not follow the steps.
        """
        layers = {
            name: {
                "heads": layer.num_heads,
                "kv_heads": layer.num_kv_heads,
                "left": list(layer.origins.query),
                "off": sorted(layer.origins.off),
                "steps": [
                    {"step": step.kind}
                    | {x.name: _write_value(getattr(step, x.name)) for x in fields(step)}  # type: ignore[arg-type]
                    for step in layer.steps
                ],
            }
            for name, layer in self
        }
        return json.dumps({"format": FORMAT, "layers": layers}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the cut that `to_json` wrote.

        Raises:
            CheckpointError: another text.
        """
        try:
            values = parse_json_object(text)
            if (version := values.get("format")) != FORMAT:
                raise ValueError(f"has the format {version!r}, not {FORMAT}")
            return cls({name: _read_layer(layer) for name, layer in values["layers"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            raise CheckpointError(
                saw=f"a text that is no cut: {type(error).__name__}: {error}",
                needed=f"what Cut.to_json writes, of the format {FORMAT}",
                do="write it with Cut.save, or read it with the version that wrote it",
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the cut as JSON, beside its path and then renamed."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the cut of a file; see `from_json`."""
        return cls.from_json(Path(path).read_text("utf-8"))


def _write_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        content = save({"x": value.detach().cpu().contiguous()})
        return {"safetensors": base64.b64encode(content).decode("ascii")}
    return list(value) if isinstance(value, tuple) else value


def _read_layer(values: Mapping[str, Any]) -> LayerCut:
    steps = []
    for stored in values["steps"]:
        read = {name: _read_value(value) for name, value in stored.items() if name != "step"}
        steps.append(STEPS[stored["step"]](**read))
    layer = LayerCut(values["heads"], values["kv_heads"]).then(*steps)
    stated, heads = (values["left"], values["off"]), layer.origins
    if stated != ([*heads.query], sorted(heads.off)):
        raise ValueError("states other heads that are left or off than its steps")
    return layer


def _read_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return load(base64.b64decode(value["safetensors"]))["x"]
    return tuple(value) if isinstance(value, list) else value


def full_size(cut: Cut, *, in_place: bool = False) -> Cut:
    """Return the cut of the same function that leaves every layer its numbers of heads.

    Heads that are taken out become zero; merged kv heads become equal copies. The outputs are those
    of the given cut up to rounding. With ``in_place``, heads that are moved stay at their places,
    unless they are merged then.

    Raises:
        OptionError: a merge or another basis after heads were taken out, or more kv heads than
            before.
    """
    layers = {}
    for name, layer in cut:
        full = LayerCut(layer.num_heads, layer.num_kv_heads)
        at = [*range(layer.num_heads)]  # head of the cut layer -> head of the full one
        for number, step in enumerate(layer.steps):
            is_mapped = any(isinstance(each, Merge | Basis) for each in layer.steps[number:])
            full, at = _add_step(full, at, step, may_move=is_mapped or not in_place)
        left, before = len(full.origins.kv), layer.num_kv_heads
        if left > before:
            raise _no_full_size(f"{left} kv heads, where the model has {before}")
        layers[name] = full if left == before else full.expand(before)
    return Cut(layers)


def _add_step(
    full: LayerCut, at: list[int], step: Step, *, may_move: bool
) -> tuple[LayerCut, list[int]]:
    is_whole = at == [*range(full.num_heads)]
    is_moved = isinstance(step, Take) and step.heads != tuple(range(step.total))
    if isinstance(step, Take) and not (
        is_whole and len(step.heads) == step.total and (may_move or not is_moved)
    ):
        # Origins keep their kv heads, so that copies of these change nothing.
        gone = [at[head] for head in step.gone]
        return full.zero(gone) if gone else full, [at[head] for head in step.heads]
    if isinstance(step, Zero):
        return full.zero([at[head] for head in step.heads]), at
    if isinstance(step, Refit):
        wo = step.wo.new_zeros(full.num_heads, *step.wo.shape[1:])
        wo[at] = step.wo
        return full.refit(wo, step.bo), at
    if isinstance(step, Merge | Basis) and not is_whole:
        raise _no_full_size(f"a {step.kind} after heads were taken out")
    assert isinstance(step, Take | Merge | Basis | Shift)
    return full.then(step), at


def _no_full_size(saw: str) -> OptionError:
    return OptionError(
        saw=saw,
        needed="a cut that a layer of its original size can hold",
        do="take heads out in the last step, or write a smaller model",
    )

"""Selection of layers, heads, tokens and statistics by the options of a scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from operator import index
from typing import Any, Literal, SupportsIndex

from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall
from headwise.scanning.layer import LayerScan
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.support.tensors import has_integer_dtype
from headwise.support.text import describe_value, list_some

STANDARD_SET = "standard"  # the name of all statistics of the standard set
MOST_LAYERS = 12  # layers that a message names; the others are counted

Layers = str | Collection[str] | None
Numbers = int | Collection[int]
Heads = Numbers | Mapping[str, Numbers] | None  # of all layers, or by the name of each
Statistics = str | TileStatistic | Iterable[str | TileStatistic] | None


def normalise_layers_option(layers: Layers) -> tuple[str, ...] | None:
    """Return names and patterns of layers, or None for all."""
    if layers is None or isinstance(layers, str):
        return None if layers is None else (layers,)
    needed, do = "names of layers, or patterns", 'layers="*.3.*"'
    chosen = _require_tuple("layers", layers, needed=needed, do=do)
    for name in chosen:
        if not isinstance(name, str):
            if isinstance(name, int):
                do = f'layers="*.{name}.*" for the layers with this number in their name'
            raise OptionError(saw=f"layers={describe_value(layers)}", needed=needed, do=do)
    return chosen


def normalise_heads_option(heads: Numbers | None) -> tuple[int, ...] | None:
    """Return numbers of heads, each once, or None for all."""
    if heads is None:
        return None
    chosen = tuple(dict.fromkeys(_require_integers("heads", heads, do="heads=[0, 3], or heads=3")))
    if not chosen:
        saw = f"heads={describe_value(heads)}, which names no head"
        raise OptionError(saw=saw, needed="at least one head", do="leave heads out for all of them")
    return chosen


def normalise_token_ids_option(name: str, tokens: Numbers) -> tuple[int, ...]:
    """Return token ids."""
    do = f"{name}=tokenizer.convert_tokens_to_ids([...]), or the numbers themselves"
    return _require_integers(name, tokens, do=do)


def select_statistics(statistics: Statistics) -> tuple[tuple[TileStatistic, ...], tuple[str, ...]]:
    """Return the selected statistics (the standard set for None), and the names among them.

    "standard" is the standard set, in which an object takes the place of one of the same name.
    """
    if statistics is None:
        return catalogue.STANDARD, ()
    chosen: tuple[Any, ...] = (statistics,)
    if not isinstance(statistics, str | TileStatistic):
        needed = "names, or TileStatistic objects"
        chosen = _require_tuple("statistics", statistics, needed=needed, do='["entropy"]')
    for entry in chosen:
        if isinstance(entry, catalogue.Importance):
            raise OptionError(
                saw=f"statistics with {entry.definition.name}, which cannot be computed from "
                "attention weights",
                needed="statistics of attention calls",
                do="headwise.scanning.importance.gradients or .ablations",
            )
        if not isinstance(entry, str | TileStatistic):
            is_class = isinstance(entry, type) and issubclass(entry, TileStatistic)
            needed = "names of the standard set, or TileStatistic objects"
            do = f"{entry.__name__}(), an object of the class" if is_class else '["entropy"]'
            raise OptionError(saw=f"statistics with {describe_value(entry)}", needed=needed, do=do)
    names = tuple(entry for entry in chosen if isinstance(entry, str) and entry != STANDARD_SET)
    by_name = dict(zip(names, catalogue.find_standard_statistics(names), strict=True))
    requested = [by_name[x] if isinstance(x, str) else x for x in chosen if x != STANDARD_SET]
    counts = Counter(statistic.definition.name for statistic in requested)
    if twice := [name for name, count in counts.items() if count > 1]:
        saw = f"two statistics with the name {twice[0]}"
        do = "leave one out, or change the name in its Definition"
        raise OptionError(saw=saw, needed="a name for each statistic", do=do)
    if STANDARD_SET not in chosen:
        return tuple(requested), names
    standard = [s for s in catalogue.STANDARD if s.definition.name not in counts]
    return (*standard, *requested), names


class SelectedLayers:
    """The layers of a running model, and which of them are selected."""

    def __init__(self, layers: Layers, heads: Heads = None) -> None:
        self._patterns = normalise_layers_option(layers)
        by_layer, of_all = (heads, None) if isinstance(heads, Mapping) else ({}, heads)
        self._heads = normalise_heads_option(of_all)
        self._by_layer = {name: normalise_heads_option(each) for name, each in by_layer.items()}
        self._seen: dict[str, LayerScan | None] = {}  # None for a layer that is not selected
        self._numbers: dict[str, tuple[int, ...]] = {}  # of all heads of each layer, in its order

    def record_call_and_find_layer(self, call: CapturedCall) -> LayerScan | None:
        """Count a call, and return its layer if that is selected."""
        if call.layer not in self._seen:
            patterns = ("*",) if self._patterns is None else self._patterns
            is_chosen = any(fnmatchcase(call.layer, pattern) for pattern in patterns)
            self._seen[call.layer] = self._make_empty_layer(call) if is_chosen else None
        layer = self._seen[call.layer]
        if layer is not None:
            layer.calls += 1
            call.layer_index = self.selected_layers().index(layer)
        return layer

    def _make_empty_layer(self, call: CapturedCall) -> LayerScan:
        count = call.matrix.shape[1]
        total, numbers = call.original or (count, tuple(range(count)))
        heads = self._by_layer.get(call.layer, self._heads) or numbers
        if not {*heads} <= {*numbers}:
            some = list_some([str(number) for number in numbers], MOST_LAYERS)
            raise OptionError(
                saw=f"heads {describe_value(list(heads))} of {call.layer}",
                needed=f"heads from 0 to {count - 1}: the layer has {count}"
                if call.original is None
                else f"heads among {some}: the others were taken out",
                do=f"heads=[{numbers[-1]}], or layers= with layers that have these heads",
            )
        self._numbers[call.layer] = numbers
        kind: Literal["self", "cross"] = "cross" if call.is_cross else "self"
        return LayerScan(name=call.layer, num_heads=total, heads=heads, kind=kind)

    def places(self, layer: LayerScan) -> list[int]:
        """Return the places of a layer's selected heads among all that it computes."""
        return [self._numbers[layer.name].index(head) for head in layer.heads]

    def selected_layers(self) -> tuple[LayerScan, ...]:
        """Return the selected layers, in call order."""
        if selected := tuple(layer for layer in self._seen.values() if layer is not None):
            return selected
        patterns, seen = self._patterns or (), list(self._seen)
        near = get_close_matches((patterns or ("",))[0][: catalogue.LONGEST_NAME], seen, n=1)
        more = f", and {len(seen) - MOST_LAYERS} more" if len(seen) > MOST_LAYERS else ""
        raise OptionError(
            saw=f"layers {describe_value(list(patterns))}",
            needed=f"among {', '.join(map(repr, seen[:MOST_LAYERS])) or 'none'}{more}: the layers "
            "whose attention was captured",
            do=f'{near[0]!r}, the nearest name, or a pattern such as "*"'
            if near
            else 'some of these names, or a pattern such as "*"',
        )


def _require_integers(name: str, numbers: Any, *, do: str) -> tuple[int, ...]:
    needed = "a whole number, or several"
    single = _is_integer(numbers)
    chosen = (numbers,) if single else _require_tuple(name, numbers, needed=needed, do=do)
    if isinstance(numbers, str) or not all(map(_is_integer, chosen)):
        raise OptionError(saw=f"{name}={describe_value(numbers)}", needed=needed, do=do)
    return tuple(index(n) for n in chosen)


def _is_integer(number: Any) -> bool:
    """True for an integer or a scalar tensor of integers, never for a bool."""
    if isinstance(number, Tensor):
        return number.dim() == 0 and has_integer_dtype(number)
    is_scalar = isinstance(number, SupportsIndex) and not getattr(number, "shape", ())
    return is_scalar and not isinstance(number, bool)


def _require_tuple(name: str, value: Any, *, needed: str, do: str) -> tuple[Any, ...]:
    is_scalar = isinstance(value, Tensor) and value.dim() == 0
    if not isinstance(value, Iterable) or isinstance(value, bytes) or is_scalar:
        raise OptionError(saw=f"{name}={describe_value(value)}", needed=needed, do=do)
    return tuple(value)

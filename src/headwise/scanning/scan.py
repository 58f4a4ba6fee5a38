"""`scan`: what every head of a model does, from the forward passes that it makes anyway."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.statistics import catalogue
from headwise.heads.statistics.statistic import Statistic
from headwise.matrix import AttentionMatrix
from headwise.scanning.gathering import Gathering, Progress, Wanted
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.inputs import (
    Arguments,
    inputs_of,
    require_finite,
    require_in_vocabulary,
    without_extras,
)
from headwise.scanning.reaching import reached
from headwise.scanning.running import evaluating
from headwise.scanning.surroundings import Surroundings
from headwise.watching import shown

Model = nn.Module | Callable[..., Any] | AttentionMatrix


def scan(
    model: Model,
    inputs: Any,
    *,
    statistics: Iterable[str | Statistic] | None = None,
    layers: Collection[str] | None = None,
    heads: Collection[int] | None = None,
    separators: Collection[int] = (),
    specials: Collection[int] = (),
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
            of several such inputs, which are merged.
        statistics: names of the standard set, or objects of one's own; the standard set if None.
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
    given, model = inputs_of(inputs), getattr(model, "_orig_mod", model)  # not compiled
    module = model if isinstance(model, nn.Module) else None
    _require_readable(module, given)
    around = Surroundings(separators, specials, unembedding=_unembedding_of(model))
    gathering = Gathering(_wanted(statistics, layers, heads), around, progress or _silent)
    with torch.no_grad(), evaluating(module):
        with reached(module, gathering.watch, settled=gathering.settled) as reach:
            for one in given:
                reach.begin()
                gathering.next_input()
                _run(model, one, call)
        return gathering.result(_name_of(model), reach)


def _wanted(
    statistics: Iterable[str | Statistic] | None,
    layers: Collection[str] | None,
    heads: Collection[int] | None,
) -> Wanted:
    asked = catalogue.STANDARD if statistics is None else tuple(statistics)
    names = tuple(one for one in asked if isinstance(one, str))
    by_name = dict(zip(names, catalogue.named(names), strict=True))
    return Wanted(
        statistics=tuple(by_name[one] if isinstance(one, str) else one for one in asked),
        named=names,
        layers=None if layers is None else tuple(layers),
        heads=None if heads is None else tuple(dict.fromkeys(map(operator.index, heads))),
    )


def _require_readable(model: nn.Module | None, given: list[Arguments]) -> None:
    """Raise OptionError for what is known to fail before the model runs."""
    if model is None:
        return
    require_finite(model)
    for one in given:
        require_in_vocabulary(model, one)


def _run(model: Any, one: Arguments, call: Callable[..., Any] | None) -> None:
    if call is not None:
        call(model, *one.positional, **one.named)
        return
    one = without_extras(model, one, with_logits=False)
    model(*one.positional, **one.named)


def _attend(matrix: AttentionMatrix, v: Tensor) -> Tensor:
    return shown(matrix, v, matrix @ v)


def _silent(layer: str, done: int, total: int) -> None:
    """Report to nobody."""


def _unembedding_of(model: Any) -> Tensor | None:
    """(vocabulary, embed_dim): what a language model of transformers, or of headwise, ends with."""
    named = getattr(model, "get_output_embeddings", None)
    module = named() if named is not None else getattr(model, "unembedding", None)
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    return weight.detach()


def _name_of(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return "AttentionMatrix" if model is _attend else getattr(model, "__name__", "a function")

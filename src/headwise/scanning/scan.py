"""`scan`: what every head of a model does, from the forward passes that it makes anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layers.hooks import shown
from headwise.matrix import AttentionMatrix
from headwise.scanning.gathering import Gathering, Wanted
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.inputs import (
    Arguments,
    inputs_of,
    no_model,
    require_finite,
    require_tokens,
    run,
    without_extras,
)
from headwise.scanning.modules import as_written
from headwise.scanning.reaching import reached
from headwise.scanning.selection import (
    Layers,
    Numbers,
    Statistics,
    select_heads,
    select_layers,
    select_statistics,
    select_tokens,
)
from headwise.scanning.surroundings import Surroundings, unembedding_of
from headwise.support.axes import describe_value
from headwise.support.modes import evaluating
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
    if not callable(model) or isinstance(model, type):
        raise no_model(model, "a model, a function that attends, or an AttentionMatrix")
    _require_callables(call=call, progress=progress)
    around = Surroundings(
        select_tokens("separators", separators),
        select_tokens("specials", specials),
        unembedding=unembedding_of(model),
    )
    gathering = Gathering(_wanted(statistics, layers, heads), around, progress or no_progress)
    return _gathered(model, inputs_of(inputs), gathering, call)


def _require_callables(**given: object) -> None:
    for name, function in given.items():
        if function is not None and not callable(function):
            raise OptionError(
                saw=f"{name}={describe_value(function)}",
                needed="a function, or None",
                do="call=lambda model, **given: model.generate(**given)"
                if name == "call"
                else "progress=lambda layer, calls, total: print(layer, calls)",
            )


def _gathered(
    model: Any, inputs: list[Arguments], gathering: Gathering, call: Callable[..., Any] | None
) -> HeadScan:
    """Run the model on each input, and return what was gathered."""
    module = model if isinstance(model, nn.Module) else None
    _require_readable(module, inputs)
    with torch.no_grad(), evaluating(module):
        with reached(module, gathering.watch, settled=gathering.settled) as reach:
            for arguments in inputs:
                reach.begin()
                gathering.next_input()
                _run(model, arguments, call)
        return gathering.result(_name_of(model), reach)


def _wanted(statistics: Statistics, layers: Layers, heads: Numbers | None) -> Wanted:
    chosen, named = select_statistics(statistics)
    return Wanted(
        statistics=chosen,
        named=named,
        layers=select_layers(layers),
        heads=select_heads(heads),
    )


def _require_readable(model: nn.Module | None, given: list[Arguments]) -> None:
    """Raise OptionError for what is known to fail before the model runs."""
    if model is None:
        return
    require_finite(model)
    for one in given:
        require_tokens(model, one)


def _run(model: Any, one: Arguments, call: Callable[..., Any] | None) -> None:
    if call is not None:
        call(model, *one.positional, **one.named)
        return
    one = without_extras(model, one, with_logits=False)
    run(model, one)


def _attend(matrix: AttentionMatrix, v: Tensor) -> Tensor:
    return shown(matrix, v, matrix @ v)


def _name_of(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return "AttentionMatrix" if model is _attend else getattr(model, "__name__", "a function")

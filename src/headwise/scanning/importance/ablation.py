"""Importance by ablation: one forward pass for each head, with the head off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning import selection
from headwise.scanning.calls import LayerCall
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.importance import losses
from headwise.scanning.importance.losses import Loss
from headwise.scanning.importance.runs import (
    Input,
    Layers,
    inputs_for,
)
from headwise.scanning.importance.stand_ins import Mean, Means, Resample, StandIn, Zero
from headwise.scanning.importance.switch import Switch
from headwise.scanning.inputs import require_module
from headwise.scanning.reaching import Reach, reached
from headwise.scanning.running import notes_of
from headwise.scanning.statistics.importance import ABLATIONS
from headwise.scanning.surroundings import Surroundings
from headwise.support.axes import describe_value
from headwise.support.modes import evaluating
from headwise.support.progress import Progress, no_progress


def ablations(
    model: nn.Module,
    inputs: Any,
    *,
    by: Literal["zero", "mean", "resample"] | Means = "zero",
    loss: Loss | None = None,
    layers: selection.Layers = None,
    heads: selection.Numbers | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> HeadScan:
    """L(x; head off) − L(x) of every head: ``ablation_zero``, ``_mean`` or ``_resample``.

    Each input is run once as it is and once for each head; ``by="mean"`` runs it once more, before.
    After the first run ``progress`` is told how many there will be. The model runs in evaluation
    mode and without gradients, and is left as it was found.

    Args:
        model: as for `headwise.scan`.
        inputs: what the model is called with: a tensor, a tuple of positional arguments, or a
            mapping of named ones; or a list of several such inputs, which are merged.
        by: what the head gives while it is off: "zero", nothing; "mean", its mean output over all
            real positions of all ``inputs``, or of other data by their `mean_outputs`; "resample",
            what it gives another sequence of the same input.
        loss: (output, input) -> (batch,): one number for each sequence. By default `next_token`:
            the mean cross-entropy of each next token.
        layers: names of layers, or patterns such as "*layer.3.*"; all if None.
        heads: numbers of heads; all if None.
        seed: draws the other sequence for "resample".
        progress: told (layer and head, forward passes done, in all).

    Raises:
        OptionError: no loss for a model that is not causal, layers or heads that do not exist, an
            input of one sequence for "resample".
        ShapeError, DTypeError: a loss that is not one number for each sequence.
    """
    model = require_module(model)
    given, before = inputs_for(model, inputs), 0
    _require_known(by)
    if by == "mean":
        by, before = mean_outputs(model, inputs, layers=layers), len(given)
    chosen, wanted = Layers(layers), selection.select_heads(heads)
    switch = Switch(chosen, _stand_in(by, seed), wanted, causal=loss is None)
    notes = _measure(model, given, switch, loss, partial(_tell, progress, before, len(given)))
    statistic = ABLATIONS[by if isinstance(by, str) else "mean"]
    return switch.scan(type(model).__name__, statistic, notes)


def mean_outputs(
    model: nn.Module, inputs: Any, *, layers: selection.Layers = None
) -> dict[str, Float[Tensor, "heads value_dim"]]:
    """The mean output of each head of each layer, over all real positions of all inputs.

    For ``ablations(..., by=means)`` of parts of the data, whose results can then be merged.

    Args:
        model: as for `headwise.scan`.
        inputs: one input, or a list of them, as for `ablations`.
        layers: names of layers, or patterns; all if None.

    Raises:
        OptionError: layers that do not exist, or no attention that was seen.
    """
    model = require_module(model)
    chosen, surroundings = Layers(layers), Surroundings()
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def watch(call: LayerCall) -> None:
        real = surroundings.sequences_of(call).real_queries
        if chosen.see(call) is not None:
            # Filled, not multiplied by 0: what stands at padding may be infinite.
            outputs = call.outputs.double().masked_fill(~real[:, None, :, None], 0.0)
            sums[call.layer] = sums.get(call.layer, 0) + outputs.sum((0, 2))
            counts[call.layer] += int(real.sum())

    with torch.no_grad(), evaluating(model), reached(model, watch) as reach:
        for one in inputs_for(model, inputs):
            one.run(model, reach)
    return {layer.name: sums[layer.name] / counts[layer.name] for layer in chosen.chosen()}


def _require_known(by: str | Means) -> None:
    if isinstance(by, str) and by not in ABLATIONS:
        raise OptionError(
            saw=f"by={describe_value(by)}",
            needed=f"one of {', '.join(ABLATIONS)}, or what mean_outputs gave",
            do='by="zero"',
        )


def _stand_in(by: str | Means, seed: int) -> StandIn:
    if isinstance(by, str):
        return Zero() if by == "zero" else Resample(seed)
    return Mean(by)


def _measure(
    model: nn.Module,
    given: list[Input],
    switch: Switch,
    loss: Loss | None,
    told: Callable[[int, str, int, int], None],
) -> tuple[str, ...]:
    """Switch every head off for every input; returns what could not be reached."""
    with torch.no_grad(), evaluating(model), reached(model, switch) as reach:
        for index, one in enumerate(given):
            switch.measure(partial(_losses, model, one, reach, loss), partial(told, index))
    return notes_of(reach)


def _losses(model: nn.Module, one: Input, reach: Reach, loss: Loss | None) -> Tensor:
    return losses.of_run(model, reach, one.run(model, reach), one.given, loss)


def _tell(
    progress: Progress, before: int, inputs: int, index: int, stage: str, done: int, each: int
) -> None:
    """Tell of one input's passes as a part of those of all inputs."""
    progress(stage, before + index * each + done, before + inputs * each)

"""Second moments of what passes through a model: sums of products of channels over real tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints.places import is_same_branch
from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall
from headwise.scanning.importance import record_sums
from headwise.support.progress import Progress, no_progress
from headwise.surgery.models import ModelHeads


@dataclass(frozen=True, eq=False)
class InputProducts:
    """Mean products of all channels of a layer's inputs, with 1 as the last channel, in float64."""

    queries: Tensor  # (embed_dim + 1, embed_dim + 1), of what queries are projected from
    source: Tensor  # (source_dim + 1, source_dim + 1), of what keys and values are projected from


def match_name(heads: ModelHeads, label: str) -> str | None:
    """Return the name in a cut of an attention that was recorded under a label, None for none."""
    fits = [name for name in heads.specs if is_same_branch(name, label)]
    return max(fits, key=len, default=None)


def match_names(heads: ModelHeads, recorded: Iterable[str]) -> dict[str, str]:
    """Return the recorded name of each attention, by its name in a cut, in the order of a run.

    Raises:
        OptionError: an attention that runs several times in a pass.
    """
    names: dict[str, str] = {}
    for label in recorded:
        name = match_name(heads, label)
        if name is None:
            continue
        if name in names:
            raise OptionError(
                saw=f"{name.rstrip('.')}, which runs several times in one pass",
                needed="layers that run once",
                do="make a Cut of this model by hand: headwise.surgery.ModelHeads(model).whole()",
            )
        names[name] = label
    return names


def record_products(
    heads: ModelHeads, inputs: Any, *, progress: Progress = no_progress
) -> dict[str, InputProducts]:
    """Run a model; return by name the products of each attention's inputs, of real tokens only."""
    given: dict[nn.Module, Tensor] = {}
    modules = {name: _projections(heads, name) for name in heads.specs}

    def keep(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given[module] = arguments[0]

    def measure(call: CapturedCall) -> Iterator[tuple[tuple[str, int], Tensor]]:
        if (name := match_name(heads, call.layer)) is None:
            return
        for side, real in enumerate((call.real_queries, call.real_keys)):
            x = given[modules[name][side]]
            # A layer of headwise may have left padding out before it projects.
            rows = x[real] if x.shape[:-1] == real.shape else x.flatten(0, -2)
            yield (name, side), _sum_products(rows)

    with ExitStack() as stack:
        for module in {module for pair in modules.values() for module in pair}:
            stack.enter_context(module.register_forward_pre_hook(keep))
        sums = record_sums(heads.model, inputs, measure, partial(progress, "products of inputs"))
    means = {key: each.cpu() / each[-1, -1].cpu() for key, each in sums.items()}
    return {name: InputProducts(means[name, 0], means[name, 1]) for name, side in means if not side}


def _projections(heads: ModelHeads, name: str) -> tuple[nn.Module, nn.Module]:
    """Return the modules that project the queries and the keys of an attention."""
    if name in heads.layers:
        return heads.layers[name].q_proj, heads.layers[name].k_proj
    paths = heads.places[name].projections
    return heads.model.get_submodule(paths["q"]), heads.model.get_submodule(paths["k"])


def record_moments(
    model: nn.Module, inputs: Any, *, progress: Progress = no_progress
) -> dict[str, Tensor]:
    """Run a model; return sums of products of all channels of the head outputs of each layer.

    With 1 as the last channel they are (2, channels + 1, channels + 1), in float64: of every second
    sequence, and of the others, of real tokens only.
    """
    sequences: Counter[str] = Counter()

    def measure(call: CapturedCall) -> Iterator[tuple[str, Tensor]]:
        if call.outputs is None:
            return
        channels = call.outputs.transpose(1, 2).flatten(2)
        odd = (torch.arange(len(channels)) + sequences[call.layer]) % 2 == 1
        sequences[call.layer] += len(channels)
        halves = (channels[half][call.real_queries[half]] for half in (~odd, odd))
        yield call.layer, torch.stack([_sum_products(rows) for rows in halves])

    return record_sums(model, inputs, measure, partial(progress, "products of head outputs"))


def _sum_products(rows: Tensor) -> Tensor:
    """Return the sum of x x^T over rows x, where 1 is the last channel, in float64."""
    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], -1).double()
    return rows.mT @ rows

"""Importance by ablation: one forward pass for each head, with the head off.

While it is off, a head gives nothing, its mean, or what it gives another sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning import selection
from headwise.scanning.capture import AttentionCapture, reached
from headwise.scanning.captured_call import CapturedCall, known
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.importance import losses
from headwise.scanning.importance.losses import Loss
from headwise.scanning.layer_scan import LayerScan
from headwise.scanning.model_inputs import ModelInput, inputs_of, prepared, require_module, run
from headwise.scanning.selection import SelectedLayers
from headwise.scanning.statistics.importance_statistics import ABLATIONS, Importance
from headwise.scanning.statistics.statistic import Summary
from headwise.support.axes import describe_value
from headwise.support.module_modes import evaluating
from headwise.support.progress import Progress, no_progress

# (heads, value_dim) of each layer, by its name
Means = Mapping[str, Tensor]


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
    several, before = prepared(model, inputs_of(inputs), with_logits=True), 0
    if by == "mean":
        by, before = mean_outputs(model, inputs, layers=layers), len(several)
    chosen = SelectedLayers(layers, heads)
    replacement = _replacement(by, seed)
    statistic = ABLATIONS[by if isinstance(by, str) else "mean"]
    ablation = _HeadAblation(chosen, replacement, statistic, causal=loss is None)
    with torch.no_grad(), evaluating(model), reached(model, ablation) as reach:
        for index, one in enumerate(several):
            tell = partial(_tell, progress, before, len(several), index)
            ablation.measure(partial(_losses, model, one, reach, loss), tell)
    return ablation.scan(type(model).__name__, reach.notes)


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
    chosen = SelectedLayers(layers)
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def watch(call: CapturedCall) -> None:
        if chosen.see(call) is None or call.outputs is None:
            return
        real = call.real_queries
        # Filled, not multiplied by 0: what stands at padding may be infinite.
        outputs = call.outputs.double().masked_fill(~real[:, None, :, None], 0.0)
        sums[call.layer] = sums.get(call.layer, 0) + outputs.sum((0, 2))
        counts[call.layer] += int(real.sum())

    with torch.no_grad(), evaluating(model), reached(model, watch) as reach:
        for one in prepared(model, inputs_of(inputs), with_logits=True):
            reach.begin()
            run(model, one)
    return {layer.name: sums[layer.name] / counts[layer.name] for layer in chosen.chosen()}


def _replacement(by: str | Means, seed: int) -> Replacement:
    if not isinstance(by, str):
        return Mean(by)
    if by not in ABLATIONS:
        raise OptionError(
            saw=f"by={describe_value(by)}",
            needed=f"one of {', '.join(ABLATIONS)}, or what mean_outputs gave",
            do='by="zero"',
        )
    return Replacement() if by == "zero" else Resample(seed)


def _losses(
    model: nn.Module, one: ModelInput, reach: AttentionCapture, loss: Loss | None
) -> Tensor:
    reach.begin()
    return losses.of_run(model, reach, run(model, one), one.given, loss)


def _tell(
    progress: Progress, before: int, inputs: int, index: int, stage: str, done: int, each: int
) -> None:
    """Tell of one input's passes as a part of those of all inputs."""
    progress(stage, before + index * each + done, before + inputs * each)


class _HeadAblation:
    """A watcher that looks at every layer, or takes one head off.

    Args:
        layers: which, and which of their heads.
        replacement: what is put in a head's place.
        statistic: what is measured.
        causal: whether every call must be causal, as the default loss needs.
    """

    def __init__(
        self,
        layers: SelectedLayers,
        replacement: Replacement,
        statistic: Importance,
        *,
        causal: bool,
    ) -> None:
        self._layers, self._replacement = layers, replacement
        self._statistic, self._causal = statistic, causal
        self._off: tuple[LayerScan, int] | None = None
        self._place = 0  # of the next call in this pass
        self._real: list[Tensor] = []  # of each call of this input, in order
        self._shapes: dict[str, torch.Size] = {}  # of each layer's head outputs, for this input
        self._sequences = self._tokens = 0

    def __call__(self, call: CapturedCall) -> Tensor | None:
        """The head outputs, one head's replaced while it is off."""
        place, self._place = self._place, self._place + 1
        outputs = known(call.outputs)
        if self._off is None:
            if self._causal:
                losses.require_causal(call)
            self._real.append(call.real_queries)
            self._shapes[call.layer] = outputs.shape
            self._layers.see(call)
            return None
        layer, head = self._off
        if call.layer != layer.name:
            return None
        without = outputs.clone()
        without[:, head] = self._replacement.of(
            outputs[:, head], self._real[place], layer=layer.name, head=head
        )
        return without

    def measure(self, losses_of: Callable[[], Tensor], tell: Progress) -> None:
        """Run one input as it is, and then once for each head."""
        self._real.clear()
        self._shapes.clear()
        as_it_is = self._run(None, losses_of)
        count = len(as_it_is)
        self._sequences += count
        self._tokens += int(self._real[0].sum()) if self._real else 0
        self._replacement.begin(count)
        chosen = [layer for layer in self._layers.chosen() if self._is_possible(layer, count)]
        off = [(layer, head) for layer in chosen for head in layer.heads]
        tell("all heads", 1, 1 + len(off))
        effects: dict[str, list[Tensor]] = {layer.name: [] for layer in chosen}
        for done, (layer, head) in enumerate(off, start=2):
            without = self._run((layer, head), losses_of)
            effects[layer.name].append((without - as_it_is).sum())
            tell(f"{layer.name}, head {head}", done, 1 + len(off))
        for layer in chosen:
            total = torch.stack(effects[layer.name]).cpu()
            counted = {"sum": total, "count": torch.full_like(total, count)}
            kept = self._replacement.kept(layer.name, layer.heads)
            layer.add(self._statistic, {**counted, **kept})

    def scan(self, model: str, notes: tuple[str, ...]) -> HeadScan:
        """What was found of each layer."""
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=notes,
            statistics=(self._statistic,),
            layer_scans=self._layers.complete(),
        )

    def _run(self, off: tuple[LayerScan, int] | None, losses_of: Callable[[], Tensor]) -> Tensor:
        self._off, self._place = off, 0
        return losses_of()

    def _is_possible(self, layer: LayerScan, count: int) -> bool:
        shape = self._shapes.get(layer.name)
        if shape is None:  # another input ran it
            return False
        reason = self._replacement.missing(layer.name, shape, count)
        if reason is not None:
            layer.missing[self._statistic.definition.name] = reason
        return reason is None


# ---- what it gives while it is off --------------------------------------------------------------


class Replacement:
    """What a head gives while it is off: by default nothing."""

    def begin(self, batch: int) -> None:
        """Another batch, of this many sequences."""

    def missing(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Why a layer with head outputs of this shape cannot have it; None where it can."""
        return None

    def kept(self, layer: str, heads: tuple[int, ...]) -> Summary:  # noqa: ARG002
        """What has to be kept of a layer beside the sums, a row for each head."""
        return {}

    def of(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """(batch, queries, value_dim) in place of a head's; ``real`` is False for padding."""
        return torch.zeros_like(outputs)


class Mean(Replacement):
    """The same at every query: the head's mean."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def kept(self, layer: str, heads: tuple[int, ...]) -> Summary:
        """The means, since sums of effects can be added only where they are the same."""
        return {"stood_in": self._means[layer][list(heads)].double().cpu()}

    def missing(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Refuse means of other layers.

        Raises:
            OptionError: there is none for this layer, or it has other sizes.
        """
        _, heads, _, value_dim = shape
        found = self._means.get(layer)
        if found is None or found.shape != (heads, value_dim):
            saw = "none" if found is None else str(tuple(found.shape))
            raise OptionError(
                saw=f"means of {layer}: {saw}",
                needed=f"(heads {heads}, value_dim {value_dim})",
                do="mean_outputs(model, inputs) of the same model and layers",
            )
        return None

    def of(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """The mean, once for each query."""
        return self._means[layer][head].to(outputs).expand_as(outputs)


class Resample(Replacement):
    """What the head gives another sequence of the batch.

    Args:
        seed: of the draw, the same for every head; the global generators are not touched.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._partner = torch.empty(0, dtype=torch.long)

    def begin(self, batch: int) -> None:
        """Draw a partner for each sequence.

        Raises:
            OptionError: a batch of one.
        """
        if batch < 2:
            raise OptionError(
                saw="resample with a batch of 1 sequence",
                needed="another sequence in the batch, for a head to speak of",
                do="batches of at least 2, also the last; or by='zero', by='mean'",
            )
        self._partner = partners(batch, self._generator)

    def missing(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Where sequences do not stand along the batch, none can be taken for another."""
        return None if shape[0] == batch else f"a batch of {shape[0]} for {batch} sequences"

    def of(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """The i-th real query takes the partner's real query i modulo their number."""
        partner = self._partner.to(real.device)
        place = (real.long().cumsum(-1) - 1).clamp(min=0)
        counts = real.sum(-1).clamp(min=1)[partner]
        # The partner's real places in order, then the others.
        order = (~real).long().argsort(dim=-1, stable=True)[partner]
        index = order.gather(1, place % counts[:, None])
        return outputs[partner[:, None], index]


def partners(batch: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
    """Another sequence for each: a random circle through all of them, so none is its own."""
    order = torch.randperm(batch, generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner

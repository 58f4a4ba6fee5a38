"""Importance by ablation: one forward pass for each head, with the head off.

The output of a head that is off is zero, its mean, or its output for another sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning import selection
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.scanning.importance import losses
from headwise.scanning.importance.losses import Loss
from headwise.scanning.inputs import (
    ModelInput,
    check_tokens_and_limit_outputs,
    list_inputs,
    require_module,
)
from headwise.scanning.layer import LayerScan
from headwise.scanning.record import Recorder, record_attention
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import SelectedLayers
from headwise.scanning.statistics.importance import ABLATIONS
from headwise.scanning.statistics.statistic import Summary
from headwise.scanning.weights import class_name_without_fsdp
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_value

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
    """Measure L(x; head off) − L(x): ``ablation_zero``, ``ablation_mean`` or ``ablation_resample``.

    Each input runs once with all heads and once without each head. ``by="mean"`` runs each input
    once more before that. The model runs in evaluation mode without gradients, and keeps its mode
    and settings.

    Args:
        model: as for `headwise.scan`.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones; or a list of
            several such inputs, which are merged.
        by: the output of a head that is off. "zero": zero. "mean": its mean output over all real
            positions of all ``inputs``; pass `mean_outputs` of other data to use their mean.
            "resample": its output for another sequence of the same input.
        loss: (output, input) -> (batch,): one number for each sequence. By default `next_token`:
            the mean cross-entropy of each next token.
        layers: names of layers, or patterns such as `"*layer.3.*"`; all if None.
        heads: numbers of heads; all if None.
        seed: the seed of the draw for "resample".
        progress: called with (layer and head, forward passes done, total). The total is known
            after the first run.

    Raises:
        OptionError: no loss for a model that is not causal, layers or heads that do not exist, an
            input of one sequence for "resample".
        ShapeError, DTypeError: a loss that is not one number for each sequence.
    """
    model = require_module(model)
    model_inputs = check_tokens_and_limit_outputs(model, list_inputs(inputs), with_logits=True)
    chosen, before = SelectedLayers(layers, heads), 0
    if by == "mean":
        by, before = mean_outputs(model, inputs, layers=layers), len(model_inputs)
    ablation = _HeadAblation(chosen, _make_replacement(by, seed), causal=loss is None)
    with record_attention(model, ablation) as recorder:
        for index, model_input in enumerate(model_inputs):
            report = partial(_report_progress, progress, before, len(model_inputs), index)
            losses_of = partial(_compute_losses, model, model_input, recorder, loss)
            ablation.measure_one_input(losses_of, report)
    return ablation.make_head_scan(class_name_without_fsdp(model), recorder.notes)


def mean_outputs(
    model: nn.Module, inputs: Any, *, layers: selection.Layers = None
) -> dict[str, Float[Tensor, "heads value_dim"]]:
    """Return the mean output of each head of each layer over all real positions of all inputs.

    Pass the means to ``ablations(..., by=means)`` of parts of the data, to merge the results.

    Args:
        model: as for `headwise.scan`.
        inputs: one input, or a list of them, as for `ablations`.
        layers: names of layers, or patterns; all if None.

    Raises:
        OptionError: layers that do not exist, or no captured attention.
    """
    model = require_module(model)
    chosen = SelectedLayers(layers)
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def watch(call: CapturedCall) -> None:
        if chosen.record_call_and_find_layer(call) is None or call.outputs is None:
            return
        real = call.real_queries
        # masked_fill, since infinite values at padding times 0 are NaN.
        outputs = call.outputs.double().masked_fill(~real[:, None, :, None], 0.0)
        sums[call.layer] = sums.get(call.layer, 0) + outputs.sum((0, 2))
        counts[call.layer] += int(real.sum())

    prepared = check_tokens_and_limit_outputs(model, list_inputs(inputs), with_logits=True)
    with record_attention(model, watch) as recorder:
        for model_input in prepared:
            recorder.run(model_input)
    return {layer.name: sums[layer.name] / counts[layer.name] for layer in chosen.selected_layers()}


def _make_replacement(by: str | Means, seed: int) -> Replacement:
    if not isinstance(by, str):
        return Mean(by)
    if by not in ABLATIONS:
        raise OptionError(
            saw=f"by={describe_value(by)}",
            needed=f"one of {', '.join(ABLATIONS)}, or the result of mean_outputs",
            do='by="zero"',
        )
    return Resample(seed) if by == Resample.by else Replacement()


def _compute_losses(
    model: nn.Module, model_input: ModelInput, recorder: Recorder, loss: Loss | None
) -> Tensor:
    output = recorder.run(model_input)
    return losses.apply_loss_per_sequence(model, recorder, output, model_input.original, loss)


def _report_progress(
    progress: Progress, before: int, inputs: int, index: int, stage: str, done: int, each: int
) -> None:
    """Report the passes of one input as a part of the passes of all inputs."""
    progress(stage, before + index * each + done, before + inputs * each)


class _HeadAblation:
    """Watcher that records the layers in a first pass, then replaces the output of one head.

    Args:
        layers: the selected layers and heads.
        replacement: the output of a head that is off.
        causal: True if every call must be causal, as for the default loss.
    """

    def __init__(self, layers: SelectedLayers, replacement: Replacement, *, causal: bool) -> None:
        self._layers, self._replacement, self._causal = layers, replacement, causal
        self._statistic = ABLATIONS[replacement.by]
        self._off: tuple[LayerScan, int] | None = None
        self._call_index = 0  # of the next call in this pass
        self._real_queries: list[Tensor] = []  # of each call of this input, in order
        self._shapes: dict[str, torch.Size] = {}  # of each layer's head outputs, for this input
        self._sequences = self._tokens = 0

    def __call__(self, call: CapturedCall) -> Tensor | None:
        """Return the head outputs with the head that is off replaced, or None in a first pass."""
        index, self._call_index = self._call_index, self._call_index + 1
        outputs = require_not_none(call.outputs)
        if self._off is None:
            if self._causal:
                losses.require_causal(call)
            self._real_queries.append(call.real_queries)
            self._shapes[call.layer] = outputs.shape
            self._layers.record_call_and_find_layer(call)
            return None
        layer, head = self._off
        if call.layer != layer.name:
            return None
        without = outputs.clone()
        without[:, head] = self._replacement.replace_outputs(
            outputs[:, head], self._real_queries[index], layer=layer.name, head=head
        )
        return without

    def measure_one_input(self, losses_of: Callable[[], Tensor], report: Progress) -> None:
        """Run one input with all heads, and then once without each head."""
        self._real_queries.clear()
        self._shapes.clear()
        baseline = self._run_without_head(None, losses_of)
        count = len(baseline)
        self._sequences += count
        self._tokens += int(self._real_queries[0].sum()) if self._real_queries else 0
        self._replacement.begin_batch(count)
        chosen = [
            layer for layer in self._layers.selected_layers() if self._is_possible(layer, count)
        ]
        off = [(layer, head) for layer in chosen for head in layer.heads]
        report("all heads", 1, 1 + len(off))
        effects: dict[str, list[Tensor]] = {layer.name: [] for layer in chosen}
        for done, (layer, head) in enumerate(off, start=2):
            without = self._run_without_head((layer, head), losses_of)
            effects[layer.name].append((without - baseline).sum())
            report(f"{layer.name}, head {head}", done, 1 + len(off))
        for layer in chosen:
            total = torch.stack(effects[layer.name]).cpu()
            counted = {"sum": total, "count": torch.full_like(total, count)}
            extra_summary = self._replacement.extra_tensors_to_save(layer.name, layer.heads)
            layer.add_summary(self._statistic, {**counted, **extra_summary})

    def make_head_scan(self, model: str, notes: tuple[str, ...]) -> HeadScan:
        """Return the scan of all inputs so far."""
        return HeadScan(
            model=model,
            sequences=self._sequences,
            tokens=self._tokens,
            notes=notes,
            statistics=(self._statistic,),
            layer_scans=self._layers.drop_incomplete_summaries(),
        )

    def _run_without_head(
        self, off: tuple[LayerScan, int] | None, losses_of: Callable[[], Tensor]
    ) -> Tensor:
        self._off, self._call_index = off, 0
        return losses_of()

    def _is_possible(self, layer: LayerScan, count: int) -> bool:
        shape = self._shapes.get(layer.name)
        if shape is None:  # this input did not run the layer
            return False
        reason = self._replacement.reason_not_replaceable(layer.name, shape, count)
        if reason is not None:
            layer.missing[self._statistic.definition.name] = reason
        return reason is None


# ---- the output of a head that is off -----------------------------------------------------------


class Replacement:
    """The output of a head that is off: zero by default.

    Attributes:
        by: its name, which is that of the statistic.
    """

    by: ClassVar[str] = "zero"

    def begin_batch(self, batch: int) -> None:
        """Start another batch of so many sequences."""

    def reason_not_replaceable(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Return why head outputs of this shape cannot be replaced, or None if they can."""
        return None

    def extra_tensors_to_save(self, layer: str, heads: tuple[int, ...]) -> Summary:  # noqa: ARG002
        """Return tensors to save with the sums of a layer, with a row for each head."""
        return {}

    def replace_outputs(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """Return the replaced outputs (batch, queries, value_dim); ``real`` is False at padding."""
        return torch.zeros_like(outputs)


class Mean(Replacement):
    """The mean output of the head, at every query."""

    by: ClassVar[str] = "mean"

    def __init__(self, means: Means) -> None:
        self._means = means

    def extra_tensors_to_save(self, layer: str, heads: tuple[int, ...]) -> Summary:
        """Return the means, since only effects of equal means can be merged."""
        return {"stood_in": self._means[layer][list(heads)].double().cpu()}

    def reason_not_replaceable(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Check that the means fit the layer.

        Raises:
            OptionError: no mean for this layer, or a mean of other sizes.
        """
        _, heads, _, value_dim = shape
        mean = self._means.get(layer)
        if mean is None or mean.shape != (heads, value_dim):
            saw = "none" if mean is None else str(tuple(mean.shape))
            raise OptionError(
                saw=f"means of {layer}: {saw}",
                needed=f"(heads {heads}, value_dim {value_dim})",
                do="mean_outputs(model, inputs) of the same model and layers",
            )
        return None

    def replace_outputs(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """Return the mean, once for each query."""
        return self._means[layer][head].to(outputs).expand_as(outputs)


class Resample(Replacement):
    """The output of the head for another sequence of the batch.

    Args:
        seed: the seed of the draw, which is the same for every head and leaves the global
            generators alone.
    """

    by: ClassVar[str] = "resample"

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._partner = torch.empty(0, dtype=torch.long)

    def begin_batch(self, batch: int) -> None:
        """Draw a partner for each sequence.

        Raises:
            OptionError: a batch of one sequence.
        """
        if batch < 2:
            raise OptionError(
                saw="by='resample' with a batch of 1 sequence",
                needed="at least 2 sequences in every batch, also in the last",
                do="larger batches, by='zero' or by='mean'",
            )
        self._partner = draw_partners(batch, self._generator)

    def reason_not_replaceable(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Return a reason if the first axis is not the batch, which resampling needs."""
        return None if shape[0] == batch else f"a batch of {shape[0]} for {batch} sequences"

    def replace_outputs(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """Give the i-th real query the output of the partner's real query i modulo their number."""
        partner = self._partner.to(real.device)
        position = (real.long().cumsum(-1) - 1).clamp(min=0)
        counts = real.sum(-1).clamp(min=1)[partner]
        # The partner's real positions in order, then the others.
        order = (~real).long().argsort(dim=-1, stable=True)[partner]
        index = order.gather(1, position % counts[:, None])
        return outputs[partner[:, None], index]


def draw_partners(batch: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
    """Return another sequence for each, by a random circle through all sequences."""
    order = torch.randperm(batch, generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner

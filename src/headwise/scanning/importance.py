"""Head importance: the effect of each head on the loss of a model.

    gradients    from the gradient of a gate on every head: one backward pass for all heads
    ablations    from the loss without a head: one forward pass for each head

Both return a `HeadScan`, so ``scan["gate_gradient"]`` is a tensor (layers, heads), and scans of
parts of the data can be merged. `headwise.scanning.statistics.catalogue` has the definition and the
source of each measure. The loss is one number for each sequence, never the mean of a batch: with
that, the importance of a head would depend on the size of the batch, and the absolute effect on
each sequence would be unknown.

    scan = gradients(tiny.load(), tiny.encode(text)[None])
    scan = gradients(model, {"input_ids": ids, "attention_mask": mask})
    scan = gradients(model, inputs, loss=lambda output, inputs: loss_of(output).mean(-1))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.checkpoints.skeleton import RUN_ERRORS
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.scanning import inputs as model_inputs
from headwise.scanning import selection, weights
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.scanning.layer import LayerScan
from headwise.scanning.record import Recorder, record_attention
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import SelectedLayers
from headwise.scanning.statistics.catalogue import ABLATIONS, GRADIENTS, Importance
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_value

__all__ = ["ablations", "gradients", "mean_outputs", "next_token"]

Key = TypeVar("Key", bound=Hashable)
# (output of the model, its inputs) -> (batch,)
Loss = Callable[[Any, Any], Tensor]
# (heads, value_dim) of each layer, by its name
Means = Mapping[str, Tensor]

UNRECORDED = "computed without a gradient: under torch.no_grad, or a reentrant checkpoint"
ONE_EACH = "one number for each sequence, (batch,)"
TAKE_MEANS = "a mean over the tokens of each sequence: loss.mean(-1)"
PASS_A_LOSS = (
    "loss=function, where function(output, inputs) returns a tensor (batch,): the loss of each "
    "sequence"
)


class _Watcher:
    """The selected layers of a model, which must be ``causal`` for the default loss."""

    def __init__(self, layers: SelectedLayers, *, causal: bool) -> None:
        self.layers, self._causal = layers, causal
        self.sequences = self.tokens = 0
        self._is_new = True

    def note_call(self, call: CapturedCall) -> LayerScan | None:
        """Count a call of a run with all heads, and return its layer if that is selected."""
        if self._causal and not is_causal(call):
            saw = f"loss=None for a model whose layer {call.layer} attends to later tokens"
            needed = "a causal model for the default loss, which predicts each next token"
            raise OptionError(saw=saw, needed=needed, do=PASS_A_LOSS)
        if self._is_new:
            self.tokens, self._is_new = self.tokens + int(call.real_queries.sum()), False
        return self.layers.record_call_and_find_layer(call)

    def end_input(self, sequences: int) -> None:
        self.sequences, self._is_new = self.sequences + sequences, True

    def make_scan(
        self, model: nn.Module, statistics: tuple[Importance, ...], *notes: str
    ) -> HeadScan:
        """Return the scan of all inputs so far, without layers that some input left out."""
        for layer in self.layers.selected_layers():
            if layer.missing:
                layer.summaries.clear()
        return HeadScan(
            model=weights.class_name_without_fsdp(model),
            sequences=self.sequences,
            tokens=self.tokens,
            notes=notes,
            statistics=statistics,
            layer_scans=self.layers.selected_layers(),
        )


def prepare(model: nn.Module, inputs: Any) -> tuple[nn.Module, list[model_inputs.ModelInput]]:
    """Return a model without its wrapper, and its inputs, which ask for all logits."""
    model = weights.unwrap_compiled(model)
    if not isinstance(model, nn.Module):
        raise model_inputs.not_a_model_error(model, "an nn.Module with its weights")
    given = model_inputs.list_inputs(inputs)
    return model, model_inputs.check_tokens_and_limit_outputs(model, given, with_logits=True)


# ---- by gradients --------------------------------------------------------------------------------


def gradients(
    model: nn.Module, inputs: Any, *, loss: Loss | None = None, layers: selection.Layers = None
) -> HeadScan:
    """Measure ``gate_gradient``, ``gate_gradient_normalised`` and ``taylor`` of every head.

    The model runs in evaluation mode and keeps its flags, parameters and gradients. For example,
    with the model of bytes that ships with headwise:

        model = tiny.load()
        scan = gradients(model, tiny.encode("def f(x):")[None])
        scan.top("gate_gradient", 3)

    Args:
        model: as for `headwise.scan`.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones; or a list of
            several such inputs, which are merged.
        loss: (output, input) -> (batch,): one number for each sequence, which depends on this
            sequence alone. By default `next_token`: the mean cross-entropy of each next token.
        layers: names of layers, or patterns such as `"*layer.3.*"`; all if None.

    Raises:
        OptionError: a loss without a gradient, no loss for a model that is not causal, layers that
            do not exist.
        ShapeError, DTypeError: a loss that is not one number for each sequence.
    """
    model, prepared = prepare(model, inputs)
    gates = Gates(SelectedLayers(layers), causal=loss is None)
    with record_attention(model, gates, gradients=True) as recorder:
        for model_input in prepared:
            gates.add_gradients_of_losses(_run_losses(model, model_input, recorder, loss))
    return gates.make_scan(model, GRADIENTS, *recorder.notes, *gates.notes)


class Gates(_Watcher):
    """Watcher that puts gates on the selected layers.

    A gate is a factor 1 on each head's output at each query. The factor changes no bit of the
    outputs, and its gradient is ⟨O[i], ∂L/∂O[i]⟩. Sequences of a batch do not interact, so the
    gradient of the summed loss at one sequence is that of its loss. One backward pass serves all
    sequences, heads and layers.
    """

    def __init__(self, layers: SelectedLayers, *, causal: bool) -> None:
        super().__init__(layers, causal=causal)
        self.notes: dict[str, None] = {}  # on layers on which the loss does not depend
        self._placed: list[tuple[LayerScan, Tensor]] = []
        self._is_backward = False

    def __call__(self, call: CapturedCall) -> Tensor | None:
        """Return the gated head outputs, or None for a layer without gates."""
        if self._is_backward:
            raise OptionError(
                saw=f"{call.layer}, which is computed again in the backward pass "
                "(torch.utils.checkpoint)",
                needed="a model that keeps its activations, since the gates are in the first pass",
                do="model.gradient_checkpointing_disable(), or your model's equivalent",
            )
        if (layer := self.note_call(call)) is None:
            return None
        if not torch.is_grad_enabled():
            _mark_layer_missing(layer, UNRECORDED)
            return None
        outputs = require_not_none(call.outputs)
        # Wider than half precision: the gradient of a gate is a sum over value_dim.
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        gate = torch.ones(outputs.shape[:3], dtype=dtype, device=outputs.device, requires_grad=True)
        self._placed.append((layer, gate))
        return (outputs * gate[..., None]).to(outputs.dtype)

    def add_gradients_of_losses(self, losses: Float[Tensor, " batch"]) -> None:
        """Add the gradients of the gates of one batch to the sums of their layers."""
        placed, self._placed, count = self._placed, [], len(losses)
        self.layers.selected_layers()  # of which there must be some
        if placed and not any(len(gate) == count for _, gate in placed):
            layer, gate = placed[0]
            saw = f"a loss that gave {count} numbers; {layer.name} has a batch of {len(gate)}"
            raise ShapeError(saw=saw, needed=ONE_EACH, do=TAKE_MEANS)
        self.end_input(count)
        if placed and not losses.requires_grad:
            needed = "a loss that torch computes from the model's output"
            do = "no detach, torch.no_grad or numpy in the loss and the model"
            raise OptionError(saw="a loss that has no gradient", needed=needed, do=do)
        self._is_backward = True
        # autograd.grad of the gates alone, so that no parameter receives a gradient.
        gates = [gate for _, gate in placed]
        given = torch.autograd.grad(losses.sum(), gates, allow_unused=True) if placed else ()
        self._is_backward = False
        by_layer: dict[str, tuple[LayerScan, list[Tensor]]] = {}
        for (layer, gate), gradient in zip(placed, given, strict=True):
            if len(gate) != count:
                _mark_layer_missing(layer, f"a batch of {len(gate)} for {count} sequences")
                continue
            if gradient is None:
                self.notes[f"{layer.name}: the loss does not depend on its heads"] = None
                gradient = torch.zeros_like(gate)
            by_layer.setdefault(layer.name, (layer, []))[1].append(gradient.double())
        for layer, gradients in by_layer.values():  # (batch, heads, queries) of each of its gates
            signed = torch.stack([gradient.sum(-1) for gradient in gradients]).sum(0)
            absolute = torch.stack([gradient.abs().sum(-1) for gradient in gradients]).sum(0)
            gate, taylor = signed.abs().sum(0).cpu(), absolute.sum(0).cpu()
            for statistic, total in zip(GRADIENTS, (gate, gate.clone(), taylor), strict=True):
                summary = {"sum": total, "count": torch.full_like(total, count)}
                layer.add_summary(statistic, summary)


def _mark_layer_missing(layer: LayerScan, reason: str) -> None:
    layer.missing |= {statistic.definition.name: reason for statistic in GRADIENTS}


# ---- by ablations --------------------------------------------------------------------------------


def ablations(
    model: nn.Module,
    inputs: Any,
    *,
    by: Literal["zero", "mean", "resample"] | Means = "zero",
    loss: Loss | None = None,
    layers: selection.Layers = None,
    heads: selection.Heads = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> HeadScan:
    """Measure L(x; head off) − L(x): ``ablation_zero``, ``ablation_mean`` or ``ablation_resample``.

    Each input runs once with all heads and once without each head: from the layer's block on, where
    such a run of the first input with all heads gives the same losses to the bit. ``by="mean"``
    runs each input once more before that. The model runs in evaluation mode without gradients, and
    keeps its mode and settings.

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
        heads: numbers of heads, also by the name of each layer; all if None.
        seed: the seed of the draw for "resample".
        progress: called with (layer and head, forward passes done, total). The total is known
            after the first run.

    Raises:
        OptionError: no loss for a model that is not causal, layers or heads that do not exist, an
            input of one sequence for "resample".
        ShapeError, DTypeError: a loss that is not one number for each sequence.
    """
    model, prepared = prepare(model, inputs)
    before = 0
    if by == "mean":
        by, before = mean_outputs(model, inputs, layers=layers), len(prepared)
    ablation = _HeadAblation(SelectedLayers(layers, heads), by, seed, causal=loss is None)

    with record_attention(model, ablation) as recorder:
        ablation.recorder = recorder
        for index, model_input in enumerate(prepared):
            run = partial(_run_losses, model, model_input, recorder, loss)
            ablation.measure_one_input(run, progress, before, (index, len(prepared)))
    return ablation.make_scan(model, (ablation.statistic,), *recorder.notes)


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
    chosen = SelectedLayers(layers)

    def measure(call: CapturedCall) -> Iterator[tuple[tuple[str, str], Tensor]]:
        if chosen.record_call_and_find_layer(call) is None or call.outputs is None:
            return
        real = call.real_queries
        # masked_fill, since infinite values at padding times 0 are NaN.
        outputs = call.outputs.double().masked_fill(~real[:, None, :, None], 0.0)
        yield (call.layer, "sum"), outputs.sum((0, 2))
        yield (call.layer, "count"), real.sum()

    sums = record_sums(model, inputs, measure)
    names = [layer.name for layer in chosen.selected_layers()]
    return {name: sums[name, "sum"] / sums[name, "count"] for name in names}


def record_sums(
    model: nn.Module,
    inputs: Any,
    measure: Callable[[CapturedCall], Iterable[tuple[Key, Tensor]]],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[Key, Tensor]:
    """Run a model; return the sums of what is measured of all calls, by its keys.

    ``progress`` is called with the number of inputs that are done, and of all.
    """
    model, prepared = prepare(model, inputs)
    sums: dict[Key, Tensor] = {}

    def watch(call: CapturedCall) -> None:
        for key, part in measure(call):
            sums[key] = sums[key] + part if key in sums else part

    with record_attention(model, watch) as recorder:
        for done, each in enumerate(prepared, start=1):
            recorder.run(each)
            progress(done, len(prepared))
    return sums


class _HeadAblation(_Watcher):
    """Watcher that records the layers in a first pass, then replaces the output of one head."""

    recorder: Recorder  # of the running model

    def __init__(self, layers: SelectedLayers, by: str | Means, seed: int, *, causal: bool) -> None:
        super().__init__(layers, causal=causal)
        if isinstance(by, str) and by not in ABLATIONS:
            needed = f"one of {', '.join(ABLATIONS)}, or the result of mean_outputs"
            raise OptionError(saw=f"by={describe_value(by)}", needed=needed, do='by="zero"')
        self.statistic = ABLATIONS[by if isinstance(by, str) else "mean"]
        self._means = None if isinstance(by, str) else by
        self._generator = torch.Generator().manual_seed(seed) if by == "resample" else None
        self._partner: Tensor | None = None  # of each sequence: the one that stands in for it
        self._off: tuple[LayerScan, int | None] | None = None
        self._real_queries: dict[str, Tensor] = {}  # of each layer, for this input
        self._earlier: dict[str, list[nn.Module]] = {}  # blocks that end before each layer attends
        self._is_resumed: dict[str, bool] = {}  # False for a layer whose runs begin at the input
        self._shapes: dict[str, torch.Size] = {}  # of each layer's head outputs, for this input

    def __call__(self, call: CapturedCall) -> Tensor | None:
        outputs = require_not_none(call.outputs)
        if self._off is None:
            self._real_queries[call.layer] = call.real_queries
            self._earlier[call.layer] = [*(self.recorder.ended or ())]
            self._shapes[call.layer] = outputs.shape
            self.note_call(call)
            return None
        layer, head = self._off
        if call.layer != layer.name or head is None:
            return None
        without = outputs.clone()
        if self._partner is not None:
            real = self._real_queries[call.layer]
            without[:, head] = outputs_of_partners(outputs[:, head], real, self._partner)
        elif self._means is not None:
            without[:, head] = self._means[layer.name][head].to(outputs)
        else:
            without[:, head] = 0
        return without

    def measure_one_input(
        self, run: Callable[[], Tensor], progress: Progress, before: int, turn: tuple[int, int]
    ) -> None:
        """Run the n-th of so many inputs with all heads, and then once without each head."""
        self._real_queries.clear()
        self._shapes.clear()
        self._off, self.recorder.ended = None, {}
        baseline = run()
        kept, self.recorder.ended = self.recorder.ended, None
        count = len(baseline)
        self.end_input(count)
        if self._generator is not None:
            self._partner = draw_partners(count, self._generator)
        chosen = [each for each in self.layers.selected_layers() if self._is_possible(each, count)]
        runs = 1 + sum(len(layer.heads) for layer in chosen)
        passed, total_passes = (before + n * runs for n in turn)
        progress("all heads", passed + 1, total_passes)
        done = passed + 1
        for layer in chosen:
            effects: list[Tensor] = []
            with self.recorder.reuse(self._outputs_before(layer, kept, run, baseline)):
                for head, place in zip(layer.heads, self.layers.places(layer), strict=True):
                    self._off, done = (layer, place), done + 1
                    effects.append((run() - baseline).sum())
                    progress(f"{layer.name}, head {head}", done, total_passes)
            total = torch.stack(effects).cpu()
            summary = {"sum": total, "count": torch.full_like(total, count)}
            if self._means is not None:  # only effects of equal means can be merged
                places = self.layers.places(layer)
                summary["stood_in"] = self._means[layer.name][places].double().cpu()
            layer.add_summary(self.statistic, summary)

    def _outputs_before(
        self,
        layer: LayerScan,
        kept: Mapping[nn.Module, Any],
        run: Callable[[], Tensor],
        baseline: Tensor,
    ) -> dict[nn.Module, Any]:
        """Return outputs of the blocks before a layer, if a run from there gives the same losses.

        That is tried with the first input. It fails where blocks hand on more than they return.
        """
        earlier = [block for block in self._earlier[layer.name] if kept[block] is not None]
        outputs = {block: kept[block] for block in earlier}
        if outputs and layer.name not in self._is_resumed:
            self._off, self._is_resumed[layer.name] = (layer, None), False
            with suppress(*RUN_ERRORS), self.recorder.reuse(outputs):
                self._is_resumed[layer.name] = torch.equal(run(), baseline)
        return outputs if self._is_resumed.get(layer.name) else {}

    def _is_possible(self, layer: LayerScan, count: int) -> bool:
        if (shape := self._shapes.get(layer.name)) is None:  # this input did not run the layer
            return False
        if self._means is not None:
            mean = self._means.get(layer.name)
            if mean is None or mean.shape != (shape[1], shape[3]):
                saw = "none" if mean is None else str(tuple(mean.shape))
                needed = f"(heads {shape[1]}, value_dim {shape[3]})"
                do = "mean_outputs(model, inputs) of the same model and layers"
                raise OptionError(saw=f"means of {layer.name}: {saw}", needed=needed, do=do)
        if self._partner is not None and shape[0] != count:
            reason = f"a batch of {shape[0]} for {count} sequences"
            layer.missing[self.statistic.definition.name] = reason
            return False
        return True


def outputs_of_partners(outputs: Tensor, real: Tensor, partner: Tensor) -> Tensor:
    """Give the i-th real query the output of its partner's real query i modulo their number."""
    partner = partner.to(real.device)
    position = (real.long().cumsum(-1) - 1).clamp(min=0)
    counts = real.sum(-1).clamp(min=1)[partner]
    # The partner's real positions in order, then the others.
    order = (~real).long().argsort(dim=-1, stable=True)[partner]
    index = order.gather(1, position % counts[:, None])
    return outputs[partner[:, None], index]


def draw_partners(batch: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
    """Return another sequence for each, by a random circle through all sequences."""
    if batch < 2:
        saw = "by='resample' with a batch of 1 sequence"
        needed = "at least 2 sequences in every batch, also in the last"
        raise OptionError(saw=saw, needed=needed, do="larger batches, by='zero' or by='mean'")
    order = torch.randperm(batch, generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner


# ---- losses --------------------------------------------------------------------------------------


def next_token(
    output: Any, inputs: Any, *, vocabularies: Collection[int] | None = None
) -> Float[Tensor, " batch"]:
    """Return the mean cross-entropy of the next token in each sequence, in nats.

    Only pairs of a real token and a real next token count.

    Args:
        output: the output of a causal language model: logits (batch, length, vocabulary), an
            object with them as ``logits``, or a tuple with them.
        inputs: the token ids, or a mapping with ``input_ids`` and, for padded inputs,
            ``attention_mask``.
        vocabularies: the possible sizes of the vocabulary. An unnamed tensor of another width is
            not taken for logits. None for any size.

    Raises:
        OptionError: no logits, no token ids, or a sequence without a next token.
        ShapeError: logits that do not fit the token ids.
    """
    named = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    if isinstance(ids, tuple) and len(ids) == 1:  # a second argument may be an unknown mask
        ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        saw = "loss=None for inputs without token ids"
        needed = "input_ids (batch, length) for the default loss, which predicts each next token"
        raise OptionError(saw=saw, needed=needed, do=PASS_A_LOSS)
    logits = find_logits(output, ids, vocabularies)
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        saw = f"logits {tuple(logits.shape)} for input ids {tuple(ids.shape)}"
        needed = "logits (batch, length, vocabulary): a next token for each token"
        raise ShapeError(saw=saw, needed=needed, do=PASS_A_LOSS)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    return _mean_cross_entropies(logits, ids, real)


def _mean_cross_entropies(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return (batch,): the mean over the pairs of a real token and a real next token."""
    predicted = real[:, 1:] & real[:, :-1]
    counts = predicted.sum(-1)
    if bool((counts == 0).any()):
        index = int((counts == 0).int().argmax())
        saw = f"sequence {index} of a batch with {int(real[index].sum())} real tokens"
        needed = "at least 2 real tokens in each sequence"
        raise OptionError(saw=saw, needed=needed, do="leave this sequence out")
    # Selected by index, since infinite values at padding times 0 are NaN.
    targets = ids[:, 1:][predicted]
    lowest, highest = int(targets.min()), int(targets.max())
    if not 0 <= lowest <= highest < logits.shape[-1]:
        saw = f"logits {tuple(logits.shape)} for tokens from {lowest} to {highest}"
        raise ShapeError(saw=saw, needed="a logit for each token of the vocabulary", do=PASS_A_LOSS)
    chosen = logits[:, :-1][predicted]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    each = F.cross_entropy(chosen, targets, reduction="none").double()
    rows = predicted.nonzero()[:, 0]
    return each.new_zeros(len(ids)).index_add(0, rows, each) / counts


def _run_losses(
    model: nn.Module, model_input: model_inputs.ModelInput, recorder: Recorder, loss: Loss | None
) -> Float[Tensor, " batch"]:
    output, inputs = recorder.run(model_input), model_input.original
    if loss is None:
        loss = partial(next_token, vocabularies=find_vocabularies(model, recorder))
    if not callable(loss):
        saw = f"loss={describe_value(loss)}"
        do = "leave it out for the mean cross-entropy of each next token"
        raise OptionError(saw=saw, needed="a function (output, inputs) -> (batch,)", do=do)
    losses = loss(output, inputs)
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        saw = f"a loss that gave {kind}"
        raise DTypeError(saw=saw, needed="a floating-point tensor (batch,)", do=PASS_A_LOSS)
    if losses.dim() == 0:
        raise ShapeError(
            saw="a loss that gave a single number",
            needed=f"{ONE_EACH}: with a mean over the batch, importance would depend on the size "
            "of the batch",
            do='reduction="none", and a mean over the tokens of each sequence',
        )
    if losses.dim() != 1:
        saw = f"a loss that gave {tuple(losses.shape)}"
        raise ShapeError(saw=saw, needed=ONE_EACH, do=TAKE_MEANS)
    return losses.double()


def find_vocabularies(model: nn.Module, recorder: Recorder) -> set[int]:
    """Return the possible sizes of the vocabulary of a model that ran."""
    _, table = weights.find_unembedding(model)
    tables = recorder.tables if table is None else recorder.tables | {tuple(table.shape)}
    # A square table is left out: a state as wide as the vocabulary could be taken for logits.
    return {rows for rows, width in tables if rows != width}


@torch.no_grad()
def is_causal(call: CapturedCall) -> bool:
    """True unless the first or the middle query attends to a later key."""
    _, _, queries, keys = call.matrix.shape
    if call.is_cross or queries != keys or keys < 2:
        return True
    rows = torch.tensor([0, (queries - 1) // 2], device=call.matrix.q.device)
    later = torch.arange(keys, device=rows.device) > rows[:, None]
    return not bool(((call.matrix.rows(rows) > 0) & later).any())


def find_logits(output: Any, ids: Tensor, vocabularies: Collection[int] | None) -> Tensor:
    """Return the logits of a model's output; raise OptionError if there are none."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if isinstance(logits, Tensor):
        return logits
    for part in output if isinstance(output, list | tuple) else [output]:
        # Only a floating-point tensor with three axes may be logits.
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim() == 3:
            is_known = vocabularies is None or part.shape[-1] in vocabularies
            if is_known and part.shape[:2] == ids.shape:
                return part
    kind = type(output).__name__
    words = describe_value(output) if isinstance(output, Tensor) else f"an output of type {kind}"
    if isinstance(output, list | tuple):
        words = f"{kind} of {', '.join(map(describe_value, output[:4]))}"
    tokens = " or ".join(map(str, sorted(vocabularies or ()))) or "tokens"
    raise OptionError(
        saw=f"loss=None for a model whose output has no logits: {words}",
        needed=f"logits (batch {len(ids)}, length {ids.shape[1]}, vocabulary {tokens}) for the "
        "default loss, which predicts each next token: alone, as .logits, or in a tuple",
        do=f"{PASS_A_LOSS}; or loss=next_token of headwise.scanning.importance, if the output is "
        "logits of another vocabulary",
    )

"""`compare`: whether two attentions are the same function, and if not, why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.checkpoints.description import open_checkpoint
from headwise.checkpoints.loading import StoredLayers
from headwise.checkpoints.source import CheckpointSource
from headwise.diagnosis import functions, model_runs, probes, watch
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.probes import ComparisonInputs
from headwise.diagnosis.simulation.model import Inputs
from headwise.diagnosis.subjects import layers, recording, steps, subject, transformers
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.parts import Parts
from headwise.diagnosis.subjects.run import (
    LayerRun,
    ModelRun,
    read_vocabulary_size,
    run_model,
    run_models,
)
from headwise.diagnosis.subjects.subject import Subject
from headwise.diagnosis.subjects.transformers import TransformersSubject
from headwise.errors import OptionError
from headwise.identify._verify import verify_opened
from headwise.identify.detection import GivenWeights, open_weights
from headwise.identify.results import Diagnosis
from headwise.layers.attention import Attention
from headwise.layouts.modules import NamedModule
from headwise.scanning.labels import describe_cuts
from headwise.support.progress import Progress

Comparable = nn.Module | Callable[..., Any] | str | Path | Mapping[str, Tensor]


def compare(
    a: Comparable,
    b: Comparable,
    inputs: ComparisonInputs | None = None,
    *,
    gradients: bool = False,
    parts: Mapping[str, nn.Module] | None = None,
    budget: float | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Diagnosis:
    """Say whether two attentions are the same function, and if not, why.

    Both run on the same inputs. Where their outputs differ, each stage of ``b`` is computed from
    the stages of ``a`` before it, which shows the stages that part by their own doing. A cause is
    named only where it makes a stage equal to rounding, in every entry.

    Args:
        a: the attention in doubt: a layer of headwise or torch, a function of (batch, tokens,
            width) tensors, or a file of activations that were recorded elsewhere (see
            `headwise.diagnosis.subjects.recording`); weights as a file, folder or state dict
            are compared with weights, those of a layer or a model too; `headwise.verify` takes
            counts that no config has. A whole model is compared with a model, or with the path of
            stored weights, attention by attention.
        b: the attention that it should equal. Of two functions, the outputs alone are compared.
        inputs: (batch, tokens, width), or `Inputs`; token ids or keyword arguments of models; None
            for inputs that headwise makes, which two functions need from you.
        gradients: compare the gradients of two layers too, if their outputs agree: a `detach()`
            or another backward pass shows in them alone.
        parts: of a function beside a layer, the modules of PyTorch within it that compute stages,
            such as {"q": port.q_proj, "k": port.k_proj}. Their outputs are compared too.
        budget: seconds after which no further input is run and no further cause is tried. At least
            one input is run. Half of it is left for the search.
        trust_remote_code: True to prove stored layers against code that is in their folder.
        progress: called with (what is tried, number, total); None for a line after 2 seconds.

    Returns:
        The verdict, the causes with their repair, and the evidence. It is true if both are the
        same function. Ctrl-C during the search, or the end of the budget, leaves what is known
        by then: ``function.stopped`` says why, ``function.untried`` what was left out.

    Raises:
        OptionError: two functions without inputs, or one that fails, has state, or returns NaN;
            weights or inputs that are not finite; or gradients of other than two layers.
        ShapeError: the two take tokens of other widths, or there are no tokens.
    """
    with watch.watching(budget, progress):
        sides = _open_side("a", a, trust_remote_code), _open_side("b", b, trust_remote_code)
        done = _compare(*sides, inputs, gradients=gradients, parts=parts)
    return done.with_notes(describe_cuts(a, b))


NAMED_LAYERS = (Attention, nn.MultiheadAttention)
FUNCTIONS = (BlackBox, TransformersSubject)  # that may have no data


@dataclass(frozen=True, eq=False)
class _Compared:
    """One of the two that are compared."""

    name: str  # of the argument, "a" or "b"
    value: Any  # the argument; of a wrapper of peft the layer that it holds
    # "recording"; "weights", by their path or as a state dict; "layer", of headwise or torch;
    # "module", an attention of transformers; "model", of several layers or with embeddings; or
    # "function" for all else.
    kind: str
    trusted: bool  # True if code in a folder may run

    @property
    def is_path(self) -> bool:
        return isinstance(self.value, str | Path)

    @property
    def is_layer(self) -> bool:
        return self.kind in ("layer", "module")

    @cached_property
    def layers(self) -> StoredLayers:
        """The layers of stored weights."""
        return StoredLayers(open_checkpoint(Path(self.value), {}, trusts_code=self.trusted))


def _open_side(name: str, given: object, trusted: bool) -> _Compared:
    value, kind = layers.layer_with_adapters(given), "function"
    if recording.is_recording(value):
        kind = "recording"
    elif isinstance(value, str | os.PathLike | Mapping):
        kind = "weights"
    elif isinstance(value, NAMED_LAYERS):
        kind = "layer"
    elif transformers.is_transformers_attention(value):
        kind = "module"
    elif isinstance(value, nn.Module):
        count = sum(isinstance(each, NAMED_LAYERS) for each in value.modules())
        kind = "model" if count > 1 or hasattr(value, "get_input_embeddings") else kind
    return _Compared(name, value, kind, trusted)


def _compare(
    first: _Compared,
    second: _Compared,
    inputs: ComparisonInputs | None,
    *,
    gradients: bool,
    parts: Mapping[str, nn.Module] | None,
) -> Diagnosis:
    given = probes.read_inputs(inputs)
    if _are_weights(first, second):
        _refuse_gradients("weights", asked=gradients)
        return _compare_weights(first, second)
    if not isinstance(given, Inputs) and (runs := _run_models((first, second), given)):
        _refuse_gradients("whole models", asked=gradients)
        return model_runs.compare_runs(*runs)
    subjects = _make_subject(first, second), _make_subject(second, first)
    for name, each in zip("ab", subjects, strict=True):
        subject.require_finite_weights(name, each)
    if parts is not None:
        _record_parts(*subjects, parts)
    if all(isinstance(each, FUNCTIONS) and each.model is None for each in subjects):
        _refuse_gradients("two functions", asked=gradients)
        return _compare_functions(subjects, given)
    comparison = Comparison(*subjects, probes.choose_inputs(*subjects, given))
    comparison.further = [] if given is not None else probes.make_further_probes(subjects)
    return comparison.diagnosis_with_gradients() if gradients else comparison.diagnosis()


def _refuse_gradients(what: str, *, asked: bool) -> None:
    if asked:
        raise OptionError(
            saw=f"gradients=True for {what}",
            needed="two attention layers",
            do="compare(a_layer, b_layer, gradients=True)",
        )


def _are_weights(first: _Compared, second: _Compared) -> bool:
    """True for weights beside weights, beside a layer, or beside a module with a config."""
    stored = [each.kind == "weights" for each in (first, second)]
    if all(stored) or not any(stored):
        return all(stored)
    weights, other = (first, second) if stored[0] else (second, first)
    has_config = isinstance(weights.value, Mapping) and hasattr(other.value, "config")
    return other.kind == "layer" or (has_config and isinstance(other.value, nn.Module))


def _compare_weights(*sides: _Compared) -> Diagnosis:
    known = next((side for side in sides if isinstance(side.value, nn.Module)), None)
    module: Any = None if known is None else known.value
    config, counts = None, {"heads": None, "kv_heads": None}
    if known is not None and known.kind == "layer":
        counts = {"heads": module.num_heads, "kv_heads": getattr(module, "num_kv_heads", None)}
    elif known is not None:
        config = module.config.to_dict()
    opened = []
    for which, side in zip(("first", "second"), sides, strict=True):
        state = module.state_dict() if side is known else side.value
        title = f"the {which} state dict"
        stored = open_weights(state, counts, config=config, title=title)
        if known is not None and side is not known:
            stored = _take_layer_like(known, stored)
        opened.append(stored)
    return verify_opened(opened[0], opened[1])


def _take_layer_like(known: _Compared, stored: GivenWeights) -> GivenWeights:
    """Return the stored weights of the layer that a module is; all for a whole model."""
    modules = matching = tuple[NamedModule, ...]()
    if known.is_layer:  # whose names decide: the stored ones may have other counts
        detection = replace(stored, known={}).detection()
        groups = (*detection.candidates, *detection.misplaced, *detection.damaged)
        modules = matching = max((group[0].modules for group in groups), key=len, default=())
    if len(modules) > 1:
        is_module = known.kind == "module"
        number = transformers.stated_layer_index(known.value) if is_module else None
        matching = tuple(each for each in modules if each.layer == number)
    if len(matching) == 1:
        start, tensors = matching[0].prefix, stored.tensors
        names = [name for name in tensors if name.startswith(start)]
        return replace(stored, tensors={n.removeprefix(start): tensors[n] for n in names})
    if not modules:
        return stored
    example = modules[-1]
    raise OptionError(
        saw=f"one layer beside weights of {len(modules)} attention layers",
        needed="the weights of the layer that it is compared with",
        do="name the layer: compare(layer, headwise.checkpoints.load_attention(path, "
        f"layer={example.layer}))"
        if isinstance(stored.tensors, CheckpointSource)
        else f"give the tensors of one layer, such as `{example.prefix}`, without this prefix",
    )


def _run_models(
    sides: tuple[_Compared, _Compared], inputs: Tensor | Mapping[str, Any] | None
) -> tuple[ModelRun, ModelRun] | None:
    """Return runs of two models, or of a model and of layers that are stored; None for others."""
    # Whatever module takes tokens or keyword arguments is a whole model.
    is_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    kinds = {"model"} | (
        {"module", "function"} if is_tokens or isinstance(inputs, Mapping) else set()
    )
    first, second = (each.kind in kinds and isinstance(each.value, nn.Module) for each in sides)
    a, b = (each.value for each in sides)
    if first and second:
        sizes = [size for model in (a, b) if (size := read_vocabulary_size(model)) is not None]
        return run_models(a, b, inputs, vocabulary=min(sizes, default=None))
    if first and sides[1].is_path:
        run = run_model(a, inputs)
        return run, _run_stored_layers(sides[1], run)
    if second and sides[0].is_path:
        run = run_model(b, inputs)
        return _run_stored_layers(sides[0], run), run
    return None


def _run_stored_layers(side: _Compared, model: ModelRun) -> ModelRun:
    """Load as many layers as a model has, and run each on the input of the model's layer."""
    path, runs = Path(side.value), []
    for number, other in enumerate(model.layers):
        stored = layers.NativeSubject(side.layers.load(number))
        name, call = f"layer {number} of {path.name}", stored.record(other.call.inputs)
        runs.append(LayerRun(name, call, stored.model, stored=stored.dtype))
    return ModelRun(path.name, runs, None, model.inputs)


def _record_parts(first: Subject, second: Subject, parts: Mapping[str, nn.Module]) -> None:
    function, known = (first, second) if isinstance(first, BlackBox) else (second, first)
    if not isinstance(function, BlackBox) or known.model is None:
        raise OptionError(
            saw=f"parts beside {first.kind} and {second.kind}",
            needed="a function, and a layer whose weights and settings are known",
            do="leave parts out, or compare(port, layer, parts=...)",
        )
    settings = known.model.settings
    function.parts = Parts(parts, settings.num_heads, settings.num_kv_heads)


def _make_subject(side: _Compared, other: _Compared) -> Subject:
    name, value = side.name, side.value
    if side.kind == "weights" and side.is_path and other.kind == "module":
        number = transformers.stated_layer_index(other.value) or 0
        return layers.NativeSubject(side.layers.load(number))
    is_whole = side.kind == "model" and other.is_layer
    if is_whole and (modules := layers.read_attention_modules(value)):
        code = re.sub(r"\.(\d+)", r"[\1]", modules[0].prefix.rstrip("."))
        raise OptionError(
            saw=f"{name} is a whole model, {type(value).__name__}, and the other is one layer",
            needed="two layers, or two models",
            do=f"give one of its layers, such as {name}={name}.{code}",
        )
    if side.kind == "weights":
        raise OptionError(
            saw=f"{name} as weights and the other as what runs",
            needed="weights on both sides, or a layer of headwise or torch on the other",
            do=f"build the layer from its tensors: {name}=headwise.Attention.from_layout(state, "
            'layout="gpt2", num_heads=12)'
            if isinstance(value, Mapping)
            else f"load the layer: {name}=headwise.checkpoints.load_attention(path, layer=3)",
        )
    if isinstance(value, Attention):
        return layers.NativeSubject(value)
    if side.kind == "layer":
        return layers.TorchSubject(value)
    if side.kind == "module":
        return TransformersSubject(value)
    if side.kind == "recording":
        return recording.Recording(Path(value))
    if (function := steps.make_function(value, type(value).__name__)) is not None:
        return function
    raise OptionError(
        saw=f"{name} of type {type(value).__name__}",
        needed="an attention layer, a function of tensors, or weights",
        do="headwise.compare(ported_layer, original_layer)",
    )


def _compare_functions(
    sides: tuple[Subject, Subject], inputs: Tensor | Inputs | Mapping[str, Any] | None
) -> Diagnosis:
    """Compare two functions; modules have the masks and the rotations of their models."""
    a, b = (x.function if isinstance(x, TransformersSubject) else x for x in sides)
    assert isinstance(a, BlackBox)
    assert isinstance(b, BlackBox)
    modules = (x for x in sides if isinstance(x, TransformersSubject))
    width = next((x.token_width for x in modules), None)
    if inputs is None and width is not None:
        [probe, *_] = probes.make_probe_inputs((width, width), crosses=False)
    else:
        [probe, *_] = probes.choose_inputs(a, b, inputs)
    diagnosis = functions.compare_functions(a, b, probe)
    assert diagnosis.function is not None
    limits = (*diagnosis.function.isolated, *sides[0].limits, *sides[1].limits)
    return replace(diagnosis, function=replace(diagnosis.function, isolated=limits))

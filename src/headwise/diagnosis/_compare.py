"""`compare`: whether two attentions are the same function, and if not, why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from headwise.checkpoints.attention import load_attention
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
        progress: called with (what is tried, number, total); None for a line on a terminal after
            2 seconds.

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
        return _compare(a, b, inputs, gradients=gradients, parts=parts)


def _compare(
    a: Comparable,
    b: Comparable,
    inputs: ComparisonInputs | None,
    *,
    gradients: bool,
    parts: Mapping[str, nn.Module] | None,
) -> Diagnosis:
    a, b = layers.layer_with_adapters(a), layers.layer_with_adapters(b)
    inputs = probes.read_inputs(inputs)
    if _can_compare_as_weights(a, b):
        _refuse_gradient_comparison("weights", asked=gradients)
        return _compare_stored_weights(a, b)
    if not isinstance(inputs, Inputs) and (runs := _run_models(a, b, inputs)):
        _refuse_gradient_comparison("whole models", asked=gradients)
        return model_runs.compare_runs(*runs)
    return _compare_layers(a, b, inputs, gradients=gradients, parts=parts)


def _compare_layers(
    a: Comparable,
    b: Comparable,
    inputs: Tensor | Inputs | Mapping[str, Any] | None,
    *,
    gradients: bool,
    parts: Mapping[str, nn.Module] | None,
) -> Diagnosis:
    _refuse_model_beside_layer("a", a, b)
    _refuse_model_beside_layer("b", b, a)
    sides = _load_layer_of_same_number(a, b), _load_layer_of_same_number(b, a)
    first, second = _make_subject("a", sides[0]), _make_subject("b", sides[1])
    subject.require_finite_weights("a", first)
    subject.require_finite_weights("b", second)
    if parts is not None:
        _record_parts_of_function(first, second, parts)
    are_functions = isinstance(first, FUNCTIONS) and isinstance(second, FUNCTIONS)
    if are_functions and first.model is None and second.model is None:
        _refuse_gradient_comparison("two functions", asked=gradients)
        return _compare_as_functions(first, second, inputs)
    chosen = probes.choose_inputs(first, second, inputs)
    comparison = Comparison(first, second, chosen)
    comparison.further = [] if inputs is not None else probes.make_further_probes((first, second))
    return comparison.diagnosis_with_gradients() if gradients else comparison.diagnosis()


def _compare_as_functions(
    first: Subject, second: Subject, inputs: Tensor | Inputs | Mapping[str, Any] | None
) -> Diagnosis:
    """Compare two functions; modules have the masks and the rotations of their models."""
    sides = (x.function if isinstance(x, TransformersSubject) else x for x in (first, second))
    a, b = (each for each in sides if isinstance(each, BlackBox))
    modules = (x for x in (first, second) if isinstance(x, TransformersSubject))
    width = next((x.token_width for x in modules), None)
    if inputs is None and width is not None:
        [probe, *_] = probes.make_probe_inputs((width, width), crosses=False)
    else:
        [probe, *_] = probes.choose_inputs(a, b, inputs)
    diagnosis = functions.compare_functions(a, b, probe)
    assert diagnosis.function is not None
    limits = (*diagnosis.function.isolated, *first.limits, *second.limits)
    return replace(diagnosis, function=replace(diagnosis.function, isolated=limits))


def _record_parts_of_function(
    first: Subject, second: Subject, parts: Mapping[str, nn.Module]
) -> None:
    function, known = (first, second) if isinstance(first, BlackBox) else (second, first)
    if not isinstance(function, BlackBox) or known.model is None:
        raise OptionError(
            saw=f"parts beside {first.kind} and {second.kind}",
            needed="a function, and a layer whose weights and settings are known",
            do="leave parts out, or compare(port, layer, parts=...)",
        )
    settings = known.model.settings
    function.parts = Parts(parts, settings.num_heads, settings.num_kv_heads)


def _refuse_gradient_comparison(what: str, *, asked: bool) -> None:
    if asked:
        raise OptionError(
            saw=f"gradients=True for {what}",
            needed="two attention layers",
            do="compare(a_layer, b_layer, gradients=True)",
        )


def _run_models(
    a: object, b: object, inputs: Tensor | Mapping[str, Any] | None
) -> tuple[ModelRun, ModelRun] | None:
    """Return runs of two models, or of a model and of layers that are stored; None for others."""
    if _is_whole_model(a, inputs) and _is_whole_model(b, inputs):
        sizes = [size for model in (a, b) if (size := read_vocabulary_size(model)) is not None]
        return run_models(a, b, inputs, vocabulary=min(sizes, default=None))
    if _is_whole_model(a, inputs) and isinstance(b, str | Path):
        run = run_model(a, inputs)
        return run, _run_stored_layers(Path(b), run)
    if _is_whole_model(b, inputs) and isinstance(a, str | Path):
        run = run_model(b, inputs)
        return _run_stored_layers(Path(a), run), run
    return None


def _is_whole_model(value: object, inputs: ComparisonInputs | None) -> TypeGuard[nn.Module]:
    """True for a model of several layers: it takes tokens or keyword arguments, or embeds."""
    if not isinstance(value, nn.Module) or isinstance(value, NAMED_LAYERS):
        return False
    takes_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    holds_several = sum(isinstance(m, NAMED_LAYERS) for m in value.modules())
    return (
        takes_tokens
        or isinstance(inputs, Mapping)
        or holds_several > 1
        or hasattr(value, "get_input_embeddings")
    )


def _refuse_model_beside_layer(name: str, model: object, other: object) -> None:
    """Raise OptionError for a whole model whose attention the caller meant."""
    if not (_is_layer(other) and _is_whole_model(model, None)):
        return
    if not (modules := layers.read_attention_modules(model)):
        return
    code = re.sub(r"\.(\d+)", r"[\1]", modules[0].prefix.rstrip("."))
    raise OptionError(
        saw=f"{name} is a whole model, {type(model).__name__}, and the other is one layer",
        needed="two layers, or two models",
        do=f"give one of its layers, such as {name}={name}.{code}",
    )


def _is_layer(value: object) -> bool:
    return isinstance(value, NAMED_LAYERS) or transformers.is_transformers_attention(value)


def _make_subject(name: str, value: object) -> Subject:
    if isinstance(value, Attention):
        return layers.NativeSubject(value)
    if isinstance(value, nn.MultiheadAttention):
        return layers.TorchSubject(value)
    if transformers.is_transformers_attention(value):
        return TransformersSubject(value)
    if isinstance(value, str | Path) and recording.is_recording(value):
        return recording.Recording(Path(value))
    if isinstance(value, WEIGHTS):
        raise OptionError(
            saw=f"{name} as weights and the other as what runs",
            needed="weights on both sides, or a layer of headwise or torch on the other",
            do=f"build the layer from its tensors: {name}=headwise.Attention.from_layout(state, "
            'layout="gpt2", num_heads=12)'
            if isinstance(value, Mapping)
            else f"load the layer: {name}=headwise.checkpoints.load_attention(path, layer=3)",
        )
    if (function := steps.make_function(value, type(value).__name__)) is not None:
        return function
    raise OptionError(
        saw=f"{name} of type {type(value).__name__}",
        needed="an attention layer, a function of tensors, or weights",
        do="headwise.compare(ported_layer, original_layer)",
    )


WEIGHTS = (str, os.PathLike, Mapping)
FUNCTIONS = (BlackBox, TransformersSubject)  # that may have no data
NAMED_LAYERS = (Attention, nn.MultiheadAttention)


def _can_compare_as_weights(a: object, b: object) -> bool:
    stored = [isinstance(each, WEIGHTS) and not recording.is_recording(each) for each in (a, b)]
    if all(stored) or not any(stored):
        return all(stored)
    weights, module = (a, b) if stored[0] else (b, a)
    has_config = isinstance(weights, Mapping) and hasattr(module, "config")
    return isinstance(module, NAMED_LAYERS) or (has_config and isinstance(module, nn.Module))


def _compare_stored_weights(*sides: Any) -> Diagnosis:
    module = next((side for side in sides if isinstance(side, nn.Module)), None)
    config = None
    if module is not None and not isinstance(module, NAMED_LAYERS):
        config = module.config.to_dict()  # type: ignore[operator, union-attr]
    heads = module.num_heads if isinstance(module, NAMED_LAYERS) else None
    kv_heads = module.num_kv_heads if isinstance(module, Attention) else None
    counts = {"heads": heads, "kv_heads": kv_heads}
    opened = []
    for which, side in zip(("first", "second"), sides, strict=True):
        state = side.state_dict() if isinstance(side, nn.Module) else side
        title = f"the {which} state dict"
        opened.append(open_weights(state, counts, config=config, title=title))
    first, second = (
        weights if module is None or side is module else _take_layer_like(module, weights)
        for side, weights in zip(sides, opened, strict=True)
    )
    return verify_opened(first, second)


def _take_layer_like(module: nn.Module, stored: GivenWeights) -> GivenWeights:
    """Return the stored weights of the layer that a module is; all for a whole model."""
    modules = matching = _find_stored_attention_modules(stored) if _is_layer(module) else ()
    if len(modules) > 1:
        number = (
            transformers.stated_layer_index(module)
            if transformers.is_transformers_attention(module)
            else None
        )
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


def _find_stored_attention_modules(stored: GivenWeights) -> tuple[NamedModule, ...]:
    detection = replace(stored, known={}).detection()  # by names: the layer may have other counts
    groups = (*detection.candidates, *detection.misplaced, *detection.damaged)
    return max((group[0].modules for group in groups), key=len, default=())


def _load_layer_of_same_number(value: object, other: object) -> object:
    """Return the stored layer of the same number, for files beside an attention of transformers."""
    is_file = isinstance(value, str | Path) and not recording.is_recording(value)
    if is_file and transformers.is_transformers_attention(other):
        return load_attention(Path(str(value)), layer=transformers.stated_layer_index(other) or 0)
    return value


def _run_stored_layers(path: Path, model: ModelRun) -> ModelRun:
    """Load as many layers as a model has, and run each on the input of the model's layer."""
    runs = []
    for number, other in enumerate(model.layers):
        stored = layers.NativeSubject(load_attention(path, layer=number))
        name, call = f"layer {number} of {path.name}", stored.record(other.call.inputs)
        runs.append(LayerRun(name, call, stored.model, stored=stored.dtype))
    return ModelRun(path.name, runs, None, model.inputs)

"""A whole model, run with the stages of each attention recorded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.diagnosis.comparison import SEED
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.diagnosis.subjects.function import FAILURES, describe_error
from headwise.diagnosis.subjects.layers import ModuleData, read_attention_modules
from headwise.diagnosis.subjects.subject import read_dropout
from headwise.errors import HeadwiseError, OptionError
from headwise.function.rounding import Roundoff, default_tolerance
from headwise.function.spec import AttentionSpec
from headwise.layers.hooks import ModuleRun, record_modules
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention
from headwise.support.quantised import require_unquantised
from headwise.support.tensors import map_leaves


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One attention of a model in a run.

    Attributes:
        name: of its module in the model.
        call: the recorded stages.
        model: the attention as data; None where its weights or settings cannot be read.
        input_rounding: the relative difference that a run in float32 makes at its input.
        stored: dtype of the weights.
        roundings: the relative difference that a run in float32 makes in each stage.
        window: the number of keys in its window by the config; None for none.
        dropout: of its weights as the model was given: 0 in eval mode, None where not known.
    """

    name: str
    call: RecordedCall
    model: AttentionModel | None = None
    input_rounding: float = 0.0
    stored: torch.dtype = torch.float64
    roundings: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None
    dropout: float | None = None

    def float32_rounding_of_stage(self, stage: str) -> float:
        """Return the relative difference that a run in float32 makes in a stage."""
        return self.roundings.get(stage, 0.0)


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A run of a model.

    Attributes:
        kind: the class of the model.
        layers: its attentions, in the order of the run.
        outputs: the tensors of the model's result by name; None where its layers run apart.
        inputs: what the model was given, in words.
        output_roundings: the relative difference that a run in float32 makes in each output.
    """

    kind: str
    layers: Sequence[LayerRun]
    outputs: Mapping[str, Tensor] | None
    inputs: str
    output_roundings: Mapping[str, float] = field(default_factory=dict)

    def float32_rounding_of_output(self, name: str) -> float:
        """Return the relative difference that a run in float32 makes in an output."""
        return self.output_roundings.get(name, 0.0)


def relative_difference_norm(first: Tensor, second: Tensor) -> float:
    """Return the norm of a difference by the norm of the second; infinity for other shapes.

    Two NaNs are equal, and so are two infinities; one beside a number makes the gap infinite.
    """
    if first.shape != second.shape:
        return torch.inf
    first, second = first.double(), second.double()
    equal = (first == second) | (first.isnan() & second.isnan())
    apart = (first - second).masked_fill(equal, 0.0)
    if not apart.isfinite().all():
        return torch.inf
    size = second.masked_fill(~second.isfinite(), 0.0).norm()
    return float(apart.norm() / size.clamp_min(torch.finfo(torch.float64).tiny))


BATCH, TOKENS = 2, 24
ModelInputs = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], ModelInputs]  # positional and named


def run_model(
    model: nn.Module,
    inputs: Tensor | ModelInputs | None = None,
    *,
    vocabulary: int | None = None,
) -> ModelRun:
    """Run a float64 copy of a model in eval mode, and record the stages of each attention.

    Queries and keys are recorded as they enter the scores, values and weights as they are, head
    outputs, and the input and output of projections that are modules of their own.

    Args:
        model: any module whose attention `headwise.scan` captures.
        inputs: a tensor, or keyword arguments; None for random tokens of its vocabulary.
        vocabulary: the number of random tokens to draw from; None for that of the model.

    Raises:
        OptionError: no attention was captured, the model needs inputs, or it fails on them.
    """
    require_unquantised(**dict(model.named_parameters()))
    arguments = _make_arguments(model, inputs, vocabulary)
    _require_known_tokens(model, arguments)
    wide, wide_output = _run_in_dtype(torch.float64, model, arguments)
    _require_repeatable(model, wide_output, _run_in_dtype(torch.float64, model, arguments)[1])
    single, single_output = _run_in_dtype(torch.float32, model, arguments)
    stored = next(model.parameters()).dtype
    layers = [
        replace(
            layer,
            stored=stored,
            input_rounding=relative_difference_norm(narrow.call.inputs.x, layer.call.inputs.x),
            roundings={
                stage: relative_difference_norm(narrow.call.stages[stage], x)
                for stage, x in layer.call.stages.items()
                if stage in narrow.call.stages
            },
        )
        for layer, narrow in zip(wide, single, strict=True)
    ]
    return ModelRun(
        kind=type(model).__name__,
        layers=layers,
        outputs=wide_output,
        inputs=_describe_inputs(inputs),
        output_roundings={
            name: relative_difference_norm(single_output[name], x)
            for name, x in wide_output.items()
            if name in single_output
        },
    )


def _run_in_dtype(
    dtype: torch.dtype, model: nn.Module, arguments: Arguments
) -> tuple[list[LayerRun], dict[str, Tensor]]:
    """Return the attentions and the outputs of a run in a dtype."""
    positional, named = arguments
    cast_arguments = (
        tuple(_cast_tensors(x, dtype) for x in positional),
        {name: _cast_tensors(x, dtype) for name, x in named.items()},
    )
    try:
        return record_layers(copy.deepcopy(model).to(dtype), cast_arguments)
    except HeadwiseError:
        raise
    except FAILURES as error:
        shapes = [
            f"{name} of shape {tuple(x.shape)}"
            for name, x in _tensor_arguments_by_name(arguments).items()
        ]
        raise OptionError(
            saw=f"a {type(model).__name__} that fails: {describe_error(error)}",
            needed=f"a model that runs in {dtype} on {', '.join(shapes) or 'these inputs'}",
            do="run it on such inputs first",
        ) from error


def _require_repeatable(
    model: nn.Module, first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> None:
    """Raise OptionError if two runs in float64 differ by a rounding of float32 or more."""
    gaps = [
        relative_difference_norm(second[name], x) if name in second else torch.inf
        for name, x in first.items()
    ]
    if max(gaps, default=0.0) >= 2 * Roundoff.of(torch.float32).u:
        raise OptionError(
            saw=f"a {type(model).__name__} with other outputs in a second run on the same input: "
            f"they differ by {max(gaps):.2g} of their size",
            needed="a model without randomness",
            do="turn off the dropout or noise that eval() leaves on",
        )


def _tensor_arguments_by_name(arguments: Arguments) -> dict[str, Tensor]:
    positional, named = arguments
    every = {f"argument {n}": x for n, x in enumerate(positional)} | dict(named)
    return {name: x for name, x in every.items() if isinstance(x, Tensor)}


def record_layers(
    model: nn.Module, arguments: Arguments
) -> tuple[list[LayerRun], dict[str, Tensor]]:
    """Run a model in eval mode; return its attentions and its outputs by name.

    Raises:
        OptionError: no attention was captured.
    """
    calls: list[CapturedCall] = []
    modules = read_attention_modules(model)
    names = {name for data in modules for name in data.projections.values()}
    dropouts = {module: read_dropout(module) for module in model.modules()}
    recording = record_attention(model, on_complete=calls.append, keep_implementation=True)
    with record_modules(map(model.get_submodule, names)) as passes, recording as recorder:
        recorder.begin_input()
        output = model(*arguments[0], **arguments[1])
    recorder.require_any_captured(type(model).__name__)
    projected = _Projections(model, modules, passes)
    # transformers computes rotations and norms in float32, whatever the dtype of the model is.
    is_single = hasattr(model, "config")
    dtype = torch.float32 if is_single else next(model.parameters()).dtype
    runs: dict[nn.Module | None, list[LayerRun]] = {}  # of each module, which may attend again
    layers = []
    for call in calls:
        before = runs.setdefault(call.module, [])
        layer = _make_layer_run(call, projected, dtype, [run.call for run in before])
        dropout = None if call.module is None else dropouts.get(call.module)
        before.append(replace(layer, dropout=dropout))
        layers.append(before[-1])
    return layers, list_output_tensors(output)


def _cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors, also those in containers, in a dtype."""

    def cast(part: Any) -> Any:
        is_floating = isinstance(part, Tensor) and part.is_floating_point()
        return part.to(dtype) if is_floating else part

    return map_leaves(cast, value)


def list_output_tensors(output: Any, name: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors of a model's result, by their names in it."""
    if isinstance(output, Tensor):
        return {name: output} if output.is_floating_point() else {}
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.items()
    elif isinstance(output, list | tuple):
        parts = enumerate(output)
    elif is_dataclass(output):
        parts = vars(output).items()
    tensors: dict[str, Tensor] = {}
    for key, part in parts:
        tensors |= list_output_tensors(part, f"{name}.{key}")
    return tensors


def find_main_tensor(output: Any) -> Tensor:
    """Return the main result of a model: a tensor, or the first of a tuple or a mapping."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def _make_arguments(
    model: nn.Module, inputs: Tensor | ModelInputs | None, vocabulary: int | None
) -> Arguments:
    """Return positional and named arguments of the model."""
    if inputs is None:
        return (), _random_tokens(model, vocabulary or read_vocabulary_size(model))
    return ((inputs,), {}) if isinstance(inputs, Tensor) else ((), inputs)


def _describe_inputs(inputs: Tensor | ModelInputs | None) -> str:
    if inputs is None:
        return f"{BATCH} x {TOKENS} random tokens"
    if isinstance(inputs, Tensor):
        return f"your input of shape {tuple(inputs.shape)}"
    return f"your {', '.join(inputs)}"


def read_vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of tokens that a model of transformers knows; None for others."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def _require_known_tokens(model: nn.Module, arguments: Arguments) -> None:
    positional, named = arguments
    vocabulary = read_vocabulary_size(model)
    for name, x in {**dict(zip(("input_ids",), positional, strict=False)), **named}.items():
        if vocabulary and isinstance(x, Tensor) and name.endswith("input_ids"):
            largest = int(x.max()) if x.numel() else 0
            if not x.is_floating_point() and largest >= vocabulary:
                raise OptionError(
                    saw=f"token {largest} in {name}, for a {type(model).__name__} with a "
                    f"vocabulary of {vocabulary}",
                    needed="tokens that both models know",
                    do="use the tokenizer of the model with the smaller vocabulary",
                )


def _random_tokens(model: nn.Module, vocabulary: int | None) -> dict[str, Tensor]:
    config = getattr(model, "config", None)
    if vocabulary is None:
        raise OptionError(
            saw=f"a {type(model).__name__} without a vocabulary, and no inputs",
            needed="inputs of the model",
            do="compare(a, b, inputs): a tensor, or a dict of keyword arguments",
        )
    generator = torch.Generator().manual_seed(SEED)
    names = ["input_ids"]
    names += ["decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else []
    return {name: torch.randint(vocabulary, (BATCH, TOKENS), generator=generator) for name in names}


@dataclass(frozen=True, eq=False)
class _Projections:
    """The attention modules of a model as data, and what their projections took and returned."""

    model: nn.Module
    modules: list[ModuleData]
    runs: Mapping[nn.Module, Sequence[ModuleRun]]

    def find_module_data(self, call: CapturedCall) -> ModuleData | None:
        """Return the module of a captured call as data."""
        name = self.name_module(call)
        return next((data for data in self.modules if data.covers_module(name)), None)

    def name_module(self, call: CapturedCall) -> str:
        """Return the name of the module of a call, without the number of its run."""
        named = self.model.named_modules()
        return next((name for name, module in named if module is call.module), call.layer)

    def read_turn(self, name: str, turn: int) -> _Turn:
        """Return the tensors of one pass of a projection; none where it did not run again."""
        module = self.model.get_submodule(name)
        run = dict(enumerate(self.runs[module])).get(turn)
        if run is None or not isinstance(run.first, Tensor):
            return _Turn()
        if not isinstance(module, nn.MultiheadAttention):
            return _Turn(run.first, run.output if isinstance(run.output, Tensor) else None)
        x, source = (_put_batch_first(module, x) for x in [*run.args, *run.kwargs.values()][:2])
        return _Turn(x, _put_batch_first(module, run.output[0]), source)


class _Turn(NamedTuple):
    """Input and output of a projection; the source too of torch's layer, as it is an argument."""

    input: Tensor | None = None
    output: Tensor | None = None
    source: Tensor | None = None


def _put_batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return x if module.batch_first or x.dim() < 3 else x.transpose(0, 1)


def _make_layer_run(
    call: CapturedCall,
    projected: _Projections,
    dtype: torch.dtype,
    before: Sequence[RecordedCall],
) -> LayerRun:
    """Return a captured call as data; ``before`` has the earlier calls of its module."""
    data = projected.find_module_data(call)
    names = {} if data is None else data.projections
    turn = len(before)
    turns = {role: projected.read_turn(name, turn) for role, name in names.items()}
    q, k, o = (turns.get(role, _Turn()) for role in "qko")
    x = q.input if o.source is None else o.input
    x = call.state if x is None else x
    source = (k.input if o.source is None else o.source) if call.is_cross else None
    matrix = call.matrix
    batch, _, queries, keys = matrix.shape
    past = 0 if call.is_cross else max(0, keys - queries)
    earlier = _find_calls_of_cached_keys(before, past)
    stages = _stages_of_operands(call, past)
    for role, heads in (("q", matrix.q.shape[1]), ("k", matrix.k.shape[1])):
        projected_rows = turns.get(role, _Turn()).output
        if projected_rows is not None and len({*names.values()}) == len(names):
            stages |= _split_stage_by_head(role, projected_rows, heads, matrix.q.shape[3])
    if data is not None and data.model is not None and "q" in stages and matrix.scale == 1:
        stages["q after rotary"] = _undo_scale_in_queries(
            matrix.q, stages["q"], data.model.settings.factor
        )
    if data is not None and data.model is not None and "q" not in stages:
        stages |= _take_unrotated_heads_as_projections(stages, data.model.settings)
    if o.output is not None and o.output.shape[:-1] == (batch, queries):
        stages["output"] = o.output
    if o.input is not None and o.source is None and call.outputs is not None:
        stages |= _split_stage_by_head("head outputs", o.input, *call.outputs.shape[1::2])
    is_readable = (
        x is not None
        and x.shape[:-1] == (batch, queries)
        and (source is not None or not call.is_cross)
        and (earlier or not past)
    )
    model = data.model if data is not None and is_readable else None
    placeholder = torch.zeros(batch, queries, 0, dtype=torch.float64)
    recorded = RecordedCall(
        Inputs(placeholder if x is None else x, source, mask=find_allowed_pairs(matrix)),
        {name: x.double() for name, x in stages.items()},
        dtype,
        earlier,
    )
    window = None if data is None else data.window
    return LayerRun(call.layer, recorded, model, window=window)


def _stages_of_operands(call: CapturedCall, past: int) -> dict[str, Tensor]:
    """Return what entered the attention and left it, without the keys of earlier calls."""
    matrix = call.matrix
    stages = {"q after rotary": matrix.q, "k after rotary": matrix.k[:, :, past:]}
    stages |= {"weights": matrix.dense()} if _operands_reproduce_head_outputs(call) else {}
    stages |= {} if call.values is None else {"v": call.values[:, :, past:]}
    return stages | ({} if call.outputs is None else {"head outputs": call.outputs})


def _find_calls_of_cached_keys(
    before: Sequence[RecordedCall], past: int
) -> tuple[RecordedCall, ...]:
    """Return the calls whose keys a cache held for the next call; () where they are not known."""
    chain = (*before[-1].earlier, before[-1]) if before and past > 0 else ()
    return chain if sum(call.inputs.x.shape[1] for call in chain) == past else ()


def _take_unrotated_heads_as_projections(
    stages: Mapping[str, Tensor], settings: AttentionSpec
) -> dict[str, Tensor]:
    """Return queries and keys as projections, where nothing comes between them and the scores."""
    if settings.rotation is not None or settings.norm is not None:
        return {}
    return {role: stages[f"{role} after rotary"] for role in "qk"}


def _undo_scale_in_queries(q: Tensor, projected: Tensor, scale: float) -> Tensor:
    """Return queries without the scale, where a layer multiplies its projection by the scale."""
    is_scaled = relative_difference_norm(projected * scale, q) <= default_tolerance(torch.float32)
    return projected if is_scaled else q


def _operands_reproduce_head_outputs(call: CapturedCall) -> bool:
    """True if the head outputs are those of the operands, so that the weights are known."""
    mixed = call.outputs if call.mixed is None else call.mixed
    if call.values is None or mixed is None:
        return True
    gap = relative_difference_norm(call.matrix @ call.values, mixed)
    return gap <= default_tolerance(torch.float32)


def _split_stage_by_head(role: str, rows: Tensor, heads: int, head_dim: int) -> dict[str, Tensor]:
    """Return the stage of a projection by head; nothing where it has other rows beside them."""
    if rows.dim() != 3 or rows.shape[2] != heads * head_dim:
        return {}
    return {role: rows.unflatten(2, (heads, head_dim)).transpose(1, 2)}


def find_allowed_pairs(matrix: AttentionMatrix) -> Tensor:
    """Return True where a query may attend, (batch or 1, heads or 1, queries, keys)."""
    return matrix.bound_mask.evaluate_rows(torch.arange(matrix.shape[2], device=matrix.q.device))

"""A whole model, run with the stages of each attention recorded."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.diagnosis.comparison import SEED
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.diagnosis.subjects.function import FAILURES, describe_error
from headwise.diagnosis.subjects.layers import ModuleData, read_attention_modules
from headwise.diagnosis.subjects.subject import read_dropout
from headwise.errors import HeadwiseError, OptionError
from headwise.function.rounding import Roundoff, default_tolerance
from headwise.layers.hooks import ModuleRun, record_modules
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention
from headwise.support.quantised import require_unquantised
from headwise.support.tensors import map_leaves

BATCH, TOKENS = 2, 24
ModelInputs = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Arguments = tuple[tuple[Any, ...], ModelInputs]  # positional and named


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One attention of a model in a run; roundings are relative differences of one in float32."""

    name: str  # of its module in the model
    call: RecordedCall
    model: AttentionModel | None = None  # None where its weights or settings cannot be read
    input_rounding: float = 0.0
    stored: torch.dtype = torch.float64  # of the weights
    roundings: Mapping[str, float] = field(default_factory=dict)  # of each stage
    window: int | None = None  # the number of keys in its window by the config
    dropout: float | None = None  # as the model was given: 0 in eval mode, None where not known


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A run of a model."""

    kind: str  # the class of the model
    layers: Sequence[LayerRun]  # in the order of the run
    outputs: Mapping[str, Tensor] | None  # by name; None where its layers run apart
    inputs: str  # in words
    output_roundings: Mapping[str, float] = field(default_factory=dict)  # by name


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


def _list_gaps(first: Tensors, second: Tensors) -> dict[str, float]:
    return {n: relative_difference_norm(x, second[n]) for n, x in first.items() if n in second}


def run_model(
    model: nn.Module, inputs: Tensor | ModelInputs | None = None, *, vocabulary: int | None = None
) -> ModelRun:
    """Run a float64 copy of a model in eval mode, and record the stages of each attention.

    Queries and keys are recorded as they enter the scores, values and weights as they are, head
    outputs, and the input and output of projections that are modules of their own. Inputs of None
    are random tokens of its vocabulary, or below ``vocabulary``.

    Raises:
        OptionError: no attention was captured, the model needs inputs, or it fails on them.
    """
    require_unquantised(**dict(model.named_parameters()))
    if inputs is None:
        inputs = _random_tokens(model, vocabulary or read_vocabulary_size(model))
        described = f"{BATCH} x {TOKENS} random tokens"
    elif isinstance(inputs, Tensor):
        described = f"your input of shape {tuple(inputs.shape)}"
    else:
        described = f"your {', '.join(inputs)}"
    arguments: Arguments = ((inputs,), {}) if isinstance(inputs, Tensor) else ((), inputs)
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
            roundings=_list_gaps(narrow.call.stages, layer.call.stages),
        )
        for layer, narrow in zip(wide, single, strict=True)
    ]
    roundings = _list_gaps(single_output, wide_output)
    return ModelRun(type(model).__name__, layers, wide_output, described, roundings)


def _run_in_dtype(
    dtype: torch.dtype, model: nn.Module, arguments: Arguments
) -> tuple[list[LayerRun], dict[str, Tensor]]:
    positional, named = arguments

    def cast(part: Any) -> Any:
        is_floating = isinstance(part, Tensor) and part.is_floating_point()
        return part.to(dtype) if is_floating else part

    cast_arguments = map_leaves(cast, (positional, {**named}))
    try:
        return record_layers(copy.deepcopy(model).to(dtype), cast_arguments)
    except HeadwiseError:
        raise
    except FAILURES as error:
        given = {f"argument {n}": x for n, x in enumerate(positional)} | {**named}
        shapes = [
            f"{name} of shape {tuple(x.shape)}"
            for name, x in given.items()
            if isinstance(x, Tensor)
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
    # transformers computes rotations and norms in float32, whatever the dtype of the model is.
    is_single = hasattr(model, "config")
    dtype = torch.float32 if is_single else next(model.parameters()).dtype
    runs: dict[nn.Module | None, list[LayerRun]] = {}  # of each module, which may attend again
    named: dict[nn.Module | None, str] = {part: name for name, part in model.named_modules()}
    layers = []
    for call in calls:
        before = runs.setdefault(call.module, [])
        place = named.get(call.module, call.layer)  # without the number of a run
        data = next((each for each in modules if each.covers_module(place)), None)
        projections = {} if data is None else data.projections
        parts = {role: model.get_submodule(name) for role, name in projections.items()}
        turns = {role: _read_turn(x, passes[x][len(before) :]) for role, x in parts.items()}
        layer = _make_layer_run(call, data, turns, dtype, [run.call for run in before])
        dropout = None if call.module is None else dropouts.get(call.module)
        before.append(replace(layer, dropout=dropout))
        layers.append(before[-1])
    return layers, list_output_tensors(output)


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


class _Turn(NamedTuple):
    """Input and output of a projection; the source too of torch's layer, as it is an argument."""

    input: Tensor | None = None
    output: Tensor | None = None
    source: Tensor | None = None


def _read_turn(module: nn.Module, runs: Sequence[ModuleRun]) -> _Turn:
    """Return the tensors of the first pass of a projection; none where it did not run again."""
    if not runs or not isinstance(runs[0].first, Tensor):
        return _Turn()
    [run, *_] = runs
    if not isinstance(module, nn.MultiheadAttention):
        return _Turn(run.first, run.output if isinstance(run.output, Tensor) else None)
    x, source = (_put_batch_first(module, x) for x in [*run.args, *run.kwargs.values()][:2])
    return _Turn(x, _put_batch_first(module, run.output[0]), source)


def _put_batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return x if module.batch_first or x.dim() < 3 else x.transpose(0, 1)


def _make_layer_run(
    call: CapturedCall,
    data: ModuleData | None,
    turns: Mapping[str, _Turn],
    dtype: torch.dtype,
    before: Sequence[RecordedCall],
) -> LayerRun:
    """Return a captured call as data; ``before`` has the earlier calls of its module."""
    q, k, o = (turns.get(role, _Turn()) for role in "qko")
    x = q.input if o.source is None else o.input
    x = call.state if x is None else x
    source = (k.input if o.source is None else o.source) if call.is_cross else None
    batch, _, queries, keys = call.matrix.shape
    past = 0 if call.is_cross else max(0, keys - queries)
    # The calls whose keys a cache held for this one; none where they are not known.
    earlier = (*before[-1].earlier, before[-1]) if before and past > 0 else ()
    earlier = earlier if sum(each.inputs.x.shape[1] for each in earlier) == past else ()
    is_readable = (
        x is not None
        and x.shape[:-1] == (batch, queries)
        and (source is not None or not call.is_cross)
        and (earlier or not past)
    )
    rows = torch.arange(queries, device=call.matrix.q.device)
    mask = call.matrix.bound_mask.evaluate_rows(rows)  # (batch or 1, heads or 1, queries, keys)
    x = torch.zeros(batch, queries, 0, dtype=torch.float64) if x is None else x
    stages = _read_stages(call, data, turns, past)
    stages = {name: stage.double() for name, stage in stages.items()}
    recorded = RecordedCall(Inputs(x, source, mask=mask), stages, dtype, earlier)
    if data is None:
        return LayerRun(call.layer, recorded)
    return LayerRun(call.layer, recorded, data.model if is_readable else None, window=data.window)


def _read_stages(
    call: CapturedCall, data: ModuleData | None, turns: Mapping[str, _Turn], past: int
) -> dict[str, Tensor]:
    """Return what entered the attention and left it, without the keys of earlier calls."""
    matrix, o = call.matrix, turns.get("o", _Turn())
    stages = {"q after rotary": matrix.q, "k after rotary": matrix.k[:, :, past:]}
    mixed = call.outputs if call.mixed is None else call.mixed
    # Where head outputs are not those of the operands, the weights are not known.
    if call.values is None or mixed is None or _is_rounding(matrix @ call.values, mixed):
        stages["weights"] = matrix.dense()
    if call.values is not None:
        stages["v"] = call.values[:, :, past:]
    if call.outputs is not None:
        stages["head outputs"] = call.outputs
    if data is not None and len({*data.projections.values()}) == len(data.projections):
        for role, operand in (("q", matrix.q), ("k", matrix.k)):
            heads, head_dim = operand.shape[1], matrix.q.shape[3]
            stages |= _split_by_head(role, turns.get(role, _Turn()).output, heads, head_dim)
    if data is not None and data.model is not None:
        settings = data.model.settings
        if "q" not in stages and settings.rotation is None and settings.norm is None:
            stages |= {role: stages[f"{role} after rotary"] for role in "qk"}
        elif "q" in stages and matrix.scale == 1:  # a layer may multiply its projection by it
            is_scaled = _is_rounding(stages["q"] * settings.factor, matrix.q)
            stages["q after rotary"] = stages["q"] if is_scaled else matrix.q
    if o.output is not None and o.output.shape[:-1] == matrix.shape[:3:2]:
        stages["output"] = o.output
    if o.source is None and call.outputs is not None:
        stages |= _split_by_head("head outputs", o.input, *call.outputs.shape[1::2])
    return stages


def _split_by_head(stage: str, rows: Tensor | None, heads: int, channels: int) -> dict[str, Tensor]:
    """Return a stage by head; nothing where a projection did not run, or has other rows."""
    if rows is None or rows.dim() != 3 or rows.shape[2] != heads * channels:
        return {}
    return {stage: rows.unflatten(2, (heads, channels)).transpose(1, 2)}


def _is_rounding(first: Tensor, second: Tensor) -> bool:
    return relative_difference_norm(first, second) <= default_tolerance(torch.float32)

"""A whole model, run with the stages of each attention recorded."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.diagnosis.outputs.runs import CLOSE, Runs
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.diagnosis.subjects.aligned import Reading, read_inputs
from headwise.diagnosis.subjects.layers import (
    ModuleData,
    read_attention_modules,
    read_captured_call,
)
from headwise.diagnosis.subjects.placed import PlacedAttention
from headwise.diagnosis.subjects.subject import (
    FAILURES,
    describe_error,
    describe_run_as_given,
    read_dropout,
)
from headwise.errors import HeadwiseError, OptionError
from headwise.function.rounding import Roundoff, coarsest, is_near, relative_difference_norm
from headwise.function.spec import Sides
from headwise.identify.comparison import SEED
from headwise.layers.hooks import ModuleRun, record_modules
from headwise.layouts._layout import require_unquantised
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention
from headwise.scanning.sites import Site, find_sites
from headwise.scanning.tape import record_tape
from headwise.support.tensors import map_leaves
from headwise.support.text import list_some

BATCH, TOKENS = 2, 24
ModelInputs = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
MOST_SITES = 4  # attentions that an error names
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
    window: Sides | None = None  # by the config
    dropout: float | None = None  # as the model was given: 0 in eval mode, None where not known
    # Makes further runs of it, of which outputs alone are read; None where it cannot be called.
    make_runs: Callable[[RecordedCall], Runs | None] = lambda _: None


# Runs a model, and returns its attentions and its outputs by name.
LayerRecorder = Callable[[nn.Module, Arguments], tuple[list[LayerRun], dict[str, Tensor]]]


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A run of a model."""

    kind: str  # the class of the model
    layers: Sequence[LayerRun]  # in the order of the run
    outputs: Mapping[str, Tensor] | None  # by name; None where its layers run apart
    inputs: str  # in words
    output_roundings: Mapping[str, float] = field(default_factory=dict)  # by name


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
    arguments, described = _choose_arguments(model, inputs, vocabulary)
    return _run_twice(model, arguments, described, record_layers, record_layers)


def run_models(
    a: nn.Module,
    b: nn.Module,
    inputs: Tensor | ModelInputs | None = None,
    *,
    vocabulary: int | None = None,
) -> tuple[ModelRun, ModelRun]:
    """Run two models, a hand-written one beside the one that is known.

    Raises:
        OptionError: as `run_model` and `run_beside`.
    """
    runs: list[ModelRun | None] = [None, None]
    for number, model in enumerate((a, b)):
        if known := [x for x in read_attention_modules(model) if x.model]:
            with suppress(OptionError):  # of one whose modules hold weights, and do not attend
                run = run_model(model, inputs, vocabulary=vocabulary)
                is_read = any(x.matches(layer.name) for x in known for layer in run.layers)
                runs[number] = run if is_read else None
    first, second = runs
    if first is None and second is not None:
        first = run_beside(second, a, inputs, vocabulary=vocabulary)
    elif second is None and first is not None:
        second = run_beside(first, b, inputs, vocabulary=vocabulary)
    first = first or run_model(a, inputs, vocabulary=vocabulary)
    second = second or run_model(b, inputs, vocabulary=vocabulary)
    return _with_roundings_of(second, first), _with_roundings_of(first, second)


def _with_roundings_of(known: ModelRun, run: ModelRun) -> ModelRun:
    """Return a run; one in a single dtype may round as much as what it is a copy of."""
    if run.output_roundings or len(run.layers) != len(known.layers):
        return run
    roundings = [layer.input_rounding for layer in known.layers]
    layers = [
        replace(layer, input_rounding=rounding)
        for layer, rounding in zip(run.layers, roundings, strict=True)
    ]
    largest = max(known.output_roundings.values(), default=0.0)
    return replace(run, layers=layers, output_roundings=dict.fromkeys(run.outputs or {}, largest))


def run_beside(
    known: ModelRun,
    model: nn.Module,
    inputs: Tensor | ModelInputs | None = None,
    *,
    vocabulary: int | None = None,
) -> ModelRun:
    """Run a model as `run_model` does, of which nothing is known but that it should equal another.

    Raises:
        OptionError: as `run_model`; or the model has other attentions than the known one.
    """
    arguments, described = _choose_arguments(model, inputs, vocabulary)
    inputs_alone = partial(record_layers_beside, known.layers, with_stages=False)
    record = partial(record_layers_beside, known.layers)
    return _run_twice(model, arguments, described, record, inputs_alone)


def _choose_arguments(
    model: nn.Module, inputs: Tensor | ModelInputs | None, vocabulary: int | None
) -> tuple[Arguments, str]:
    """Return the arguments of a model, and words for them."""
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
    return arguments, described


def _run_twice(
    model: nn.Module,
    arguments: Arguments,
    described: str,
    record: LayerRecorder,
    record_again: LayerRecorder,
) -> ModelRun:
    kind, stored = type(model).__name__, next(model.parameters()).dtype
    single, single_output = None, dict[str, Tensor]()
    try:
        wide, wide_output = _run_in_dtype(torch.float64, model, arguments, record)
        again = _run_in_dtype(torch.float64, model, arguments, record_again)[1]
        _require_repeatable(model, wide_output, again)
        with suppress(OptionError) if record is not record_again else nullcontext():
            single, single_output = _run_in_dtype(torch.float32, model, arguments, record_again)
        roundings = _list_gaps(single_output, wide_output)
        runs_as_given = any(CLOSE < gap < torch.inf for gap in roundings.values())
    except OptionError as error:
        if error.__cause__ is None:
            raise
        runs_as_given = True
    if runs_as_given:  # since a patched forward may hold the model, or code of one dtype
        wide, wide_output = _run_in_dtype(None, model, arguments, record)
        again = _run_in_dtype(None, model, arguments, record_again)[1]
        _require_repeatable(model, wide_output, again)
        single, roundings = None, {}
        kind = f"{kind} ({describe_run_as_given('which', stored)})"
    layers = [
        replace(
            layer,
            stored=stored,
            input_rounding=measure_input_gap(narrow.call.inputs, layer.call.inputs),
            roundings=_list_gaps(narrow.call.stages, layer.call.stages),
        )
        for layer, narrow in zip(wide, single or wide, strict=True)
    ]
    return ModelRun(kind, layers, wide_output, described, roundings)


def measure_input_gap(first: Inputs, second: Inputs) -> float:
    """Return the relative difference of what queries come from, or keys, if that is larger."""
    gap = relative_difference_norm(first.x, second.x)
    if first.source is None or second.source is None:
        return gap
    return max(gap, relative_difference_norm(first.source, second.source))


def _run_in_dtype(
    dtype: torch.dtype | None, model: nn.Module, arguments: Arguments, record: LayerRecorder
) -> tuple[list[LayerRun], dict[str, Tensor]]:
    """Run a copy of a model in a dtype, or the model as it was given, in that of its weights."""
    positional, named = arguments

    def cast(part: Any) -> Any:
        is_floating = isinstance(part, Tensor) and part.is_floating_point()
        return part.to(dtype) if is_floating and dtype else part

    cast_arguments = map_leaves(cast, (positional, {**named}))
    try:
        copied = copy.deepcopy(model).to(dtype) if dtype else model
        choose: Any = getattr(copied, "set_experts_implementation", None)
        if dtype and choose is not None:  # grouped products lack float64
            choose("eager")
        return record(copied, cast_arguments)
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
            needed=f"a model that runs {'' if dtype is None else f'in {dtype} '}on "
            f"{', '.join(shapes) or 'these inputs'}",
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


@torch.no_grad()
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
    dtype = next(model.parameters()).dtype
    dtype = coarsest((dtype, torch.float32)) if is_single else dtype
    runs: dict[nn.Module | None, list[LayerRun]] = {}  # of each module, which may attend again
    named: dict[nn.Module | None, str] = {part: name for name, part in model.named_modules()}
    layers: list[LayerRun] = []
    for call in calls:
        before = runs.setdefault(call.module, [])
        place = named.get(call.module, call.layer)  # without the number of a run
        data = next((each for each in modules if each.matches(place)), None)
        projections = {} if data is None else data.projections
        parts = {role: model.get_submodule(name) for role, name in projections.items()}
        turns = {role: _read_turn(x, passes[x][len(before) :]) for role, x in parts.items()}
        layer = _make_layer_run(call, data, turns, dtype, [run.call for run in before])
        dropout = None if call.module is None else dropouts.get(call.module)
        turn = len(before), sum(each.module is call.module for each in calls)
        make_runs = partial(_make_runs_on_tape, model, arguments, place, *turn)
        before.append(replace(layer, dropout=dropout, make_runs=make_runs))
        layers.append(before[-1])
    return layers, list_output_tensors(output)


@torch.no_grad()
def _make_runs_on_tape(
    model: nn.Module, arguments: Arguments, name: str, turn: int, count: int, call: RecordedCall
) -> Runs | None:
    """Return further runs of a module's attention; None where no tape shows all ``count``."""
    tape, _ = record_tape(model, *arguments)
    sites = [x for x in find_sites(tape.nodes) if f"{x.module}.".startswith(f"{name}.")]
    if len(sites) != count or call.earlier:
        return None
    return PlacedAttention(model, arguments, sites[turn], call.inputs).make_runs(call)


@torch.no_grad()
def record_layers_beside(
    known: Sequence[LayerRun], model: nn.Module, arguments: Arguments, *, with_stages: bool = True
) -> tuple[list[LayerRun], dict[str, Tensor]]:
    """Run a model; return its attentions as those of a known model state them, and its outputs.

    Without stages, the calls have their inputs alone.

    Raises:
        OptionError: the model has another number of attentions, or what enters one of them has
            other sizes.
    """
    tape, output = record_tape(model, *arguments)
    sites = find_sites(tape.nodes)
    _require_as_many_attentions(model, sites, known)
    layers, left = [], [*range(len(sites))]
    for layer in known:
        number = next((n for n in left if _is_of_kind(sites[n], layer)), left[0])
        left.remove(number)
        site = sites[number]
        call = read_inputs(site, layer.call)
        if call is None or layer.model is None:
            raise _unread_attention_error(model, site, layer)
        placed = PlacedAttention(model, arguments, site, call.inputs)
        call = Reading(site, layer.model, call).read() if with_stages else call
        layers.append(LayerRun(site.module, call, make_runs=placed.make_runs))
    return layers, list_output_tensors(output)


def _is_of_kind(site: Site, layer: LayerRun) -> bool:
    """True if both attend to their own tokens, or both to others, and to as many."""
    crosses = layer.call.inputs.source is not None
    return site.is_cross == crosses and read_inputs(site, layer.call) is not None


def _require_as_many_attentions(
    model: nn.Module, sites: Sequence[Site], known: Sequence[LayerRun]
) -> None:
    if len(sites) != len(known):
        names = list_some([f"`{site.module}`" for site in sites], MOST_SITES) or "none"
        raise OptionError(
            saw=f"{len(sites)} attentions in a {type(model).__name__}, by its products of two "
            f"activations ({names}), beside {len(known)} of the other model",
            needed="as many as the other has, each by two matrix products: scores, and values",
            do="compare layers of the two: compare(lambda x: a_layer(x), b_layer)",
        )


def _unread_attention_error(model: nn.Module, site: Site, layer: LayerRun) -> OptionError:
    shapes = [str(tuple(node.value.shape)) for node in site.sources["q"]]
    return OptionError(
        saw=f"`{site.module}` of a {type(model).__name__}, which projects q from a tensor of shape "
        f"{' or '.join(shapes) or '(none)'}",
        needed=f"the input of `{layer.name}`, {tuple(layer.call.inputs.x.shape)}, in any order of "
        "axes",
        do="compare layers of the two: compare(lambda x: a_layer(x), b_layer)",
    )


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
    bias = call.matrix.score_bias.bind_unchecked(
        queries=queries, keys=keys, device=rows.device, dtype=torch.float64
    )
    for part in bias.parts_at_rows(rows):  # -inf hides
        mask = mask & (part > -torch.inf)
    x = torch.zeros(batch, queries, 0, dtype=torch.float64) if x is None else x
    stages = _read_stages(call, data, turns, past)
    recorded = RecordedCall(Inputs(x, source, mask=mask), stages, dtype, earlier)
    if data is None:
        return LayerRun(call.layer, recorded)
    return LayerRun(call.layer, recorded, data.model if is_readable else None, window=data.window)


def _read_stages(
    call: CapturedCall, data: ModuleData | None, turns: Mapping[str, _Turn], past: int
) -> dict[str, Tensor]:
    """Return what entered the attention and left it, without the keys of earlier calls."""
    matrix, o = call.matrix, turns.get("o", _Turn())
    stages = read_captured_call(call, past or None)
    if data is not None and len({*data.projections.values()}) == len(data.projections):
        for role, operand in (("q", matrix.q), ("k", matrix.k)):
            heads, head_dim = operand.shape[1], matrix.q.shape[3]
            stages |= _split_by_head(role, turns.get(role, _Turn()).output, heads, head_dim)
    if data is not None and data.model is not None:
        settings = data.model.settings
        for name in {"k after rotary", "v"} & stages.keys():
            stages[name] = _merge_copies(stages[name], int(settings.num_kv_heads))
        if "q" not in stages and settings.rotation is None and settings.norm is None:
            stages |= {role: stages[f"{role} after rotary"] for role in "qk"}
        elif (  # a layer may multiply its projection by the scale
            "q" in stages and matrix.scale == 1 and is_near(stages["q"] * settings.factor, matrix.q)
        ):
            stages["q after rotary"] = stages["q"]
    if o.output is not None and o.output.shape[:-1] == matrix.shape[:3:2]:
        stages["output"] = o.output.double()
    if o.source is None and call.outputs is not None:
        stages |= _split_by_head("head outputs", o.input, *call.outputs.shape[1::2])
    return stages


def _merge_copies(x: Tensor, kv_heads: int) -> Tensor:
    """Return one head of each group of equal ones; all heads where groups are not equal."""
    if x.shape[1] <= kv_heads or x.shape[1] % kv_heads:
        return x
    groups = x.unflatten(1, (kv_heads, -1))
    return groups[:, :, 0] if torch.equal(groups, groups[:, :, :1].expand_as(groups)) else x


def _split_by_head(stage: str, rows: Tensor | None, heads: int, channels: int) -> dict[str, Tensor]:
    """Return a stage by head; nothing where a projection did not run, or has other rows."""
    if rows is None or rows.dim() != 3 or rows.shape[2] != heads * channels:
        return {}
    return {stage: rows.double().unflatten(2, (heads, channels)).transpose(1, 2)}

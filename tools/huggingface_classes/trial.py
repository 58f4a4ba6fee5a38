"""One class, tried: built small, run as it is, run in float64, scanned, compared."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.errors import HeadwiseError
from headwise.function.budget import Budget
from headwise.huggingface import attention
from headwise.scanning._scan import scan
from headwise.scanning.result import HeadScan
from tools.huggingface_classes import classes, comparing, inputs, layers, loads, shrink, stored
from tools.huggingface_classes.inputs import ERRORS

MOST_PARAMETERS = 30_000_000
WITHOUT_EXTRAS = {"use_cache": False, "logits_to_keep": 0}

ALL, PART, REFUSED, DIFFERS = "all", "part", "refused", "differs"
NONE, NOT_RUN, NO_CLASS = "no softmax attention", "not run", "no class"


@dataclass
class Row:
    """What the table says of a model type.

    Attributes:
        level: of `shrink.LEVELS`, the first with which the class runs.
        ran: classes of softmax attention that ran, and how many layers of each.
        seen: the same of those that the scan has.
        reached: attention calls that the scan has, by what they went through.
        softmaxes: how many ran without the scan, in all of ``ran``; ``calls``: how many it has.
        idle: the same of those that the input did not make run.
        without_softmax: classes that say attention, ran, and took no softmax.
        softmax_elsewhere: classes outside of attention that took one: routers, poolings.
        ratio: of the output nearest to its allowance, or beyond: error over allowance.
        error: there, the largest; ``scale`` is the root mean square of that output.
        layout: that the stored weights are in; ``layout_by`` is what tells it.
        loads: whether `load_attention` loads the stored layers; ``loads_not`` is why not.
    """

    model_type: str
    class_name: str | None
    verdict: str = NOT_RUN
    reason: str = ""
    implementation: str = ""
    parameters: int = 0
    level: int = 0
    inputs: list[str] = field(default_factory=list)
    ran: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    without_softmax: list[str] = field(default_factory=list)
    softmax_elsewhere: list[str] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)
    softmaxes: int = 0
    calls: int = 0
    output: str = ""
    ratio: float | None = None
    error: float | None = None
    allowed: float | None = None
    scale: float | None = None
    layout: str = ""
    layout_by: str = ""
    loads: str = ""
    loads_not: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """What is worth writing down."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "level" and value not in ("", [], {}, None)
        }


def tried(model_type: str) -> Row:
    """The row of a model type."""
    began = time.monotonic()
    row = Row(model_type, None)
    try:
        _fill(row)
    except ERRORS as error:
        row.reason = said(error)
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _fill(row: Row) -> None:
    row.reason = ""
    kind = classes.model_class(row.model_type)
    if kind is None:
        row.verdict = NO_CLASS
        return
    row.class_name = kind.__name__
    found = model_and_inputs(kind, row)
    if found is None:
        return
    model, given = found
    row.implementation = str(model.config._attn_implementation)
    row.inputs = sorted(name for name in given if name not in WITHOUT_EXTRAS)
    result, ran = layers.observed(model, lambda: comparing.run(model, given))
    row.ran, row.idle = _counted(ran.layers), _counted(ran.idle)
    row.softmaxes = sum(ran.times.values())
    row.without_softmax = ran.without_softmax
    row.softmax_elsewhere = sorted(ran.elsewhere)
    if not ran.layers:
        row.verdict = NONE
        return
    _scan_and_compare(row, model, given, ran, comparing.outputs(result, given))
    try:
        row.layout, row.layout_by = stored.layout_of(model)
        row.loads, row.loads_not = loads.load_of(model, given)
    except ERRORS as error:
        row.notes = [*row.notes, f"not stored: {said(error)}"]


# ---- the model -------------------------------------------------------------------------------


def model_and_inputs(
    kind: type[PreTrainedModel], row: Row
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """The smallest model of the class that runs, with what it runs on."""
    reasons = []
    for level in range(len(shrink.LEVELS)):
        model = given = None
        try:
            model = built(kind, row, level)
            given = None if model is None else _running(model, row)
        except ERRORS as error:
            row.reason = said(error)
        if model is not None and given is not None:
            row.reason, row.level = "", level
            return model, given
        reasons.append(row.reason)
    row.reason = reasons[0]
    return None


def built(
    kind: type[PreTrainedModel], row: Row, level: int = 0, *, implementation: str | None = None
) -> PreTrainedModel | None:
    """The class from a small configuration, with weights that make scores differ."""
    config = small_config(row.model_type, level)
    with torch.device("meta"):
        try:
            row.parameters = _parameters(kind._from_config(config))
        except ERRORS:
            row.parameters = 0  # then it is built without knowing
    if row.parameters > MOST_PARAMETERS:
        row.reason = f"{row.parameters / 1e6:.0f} M parameters, however small"
        return None
    config = small_config(row.model_type, level)
    torch.manual_seed(0)
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    model: PreTrainedModel = kind._from_config(config, dtype=torch.float32, **chosen)
    row.parameters = _parameters(model)
    shaken(model).eval()
    return model


def small_config(model_type: str, level: int) -> PreTrainedConfig:
    config = shrink.shrunk(classes.config_class(model_type), sizes=shrink.LEVELS[level])
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    return config


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def shaken(model: nn.Module) -> nn.Module:
    """With weights so large that scores differ, and a wrong mask shows, but no output explodes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 3 and weight.shape[0] == weight.shape[2] == 1:
                weight.add_(0.1 * noise)  # a factor for each channel, which may be divided by
            elif weight.dim() > 3:  # a convolution
                weight.copy_(noise / math.sqrt(weight[0].numel()))
            elif weight.dim() > 1:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))
            else:
                weight.add_(0.1 * noise)
    return model


def _running(model: PreTrainedModel, row: Row) -> dict[str, Any] | None:
    """The first inputs that the model runs on."""
    taken = inspect.signature(model.forward).parameters
    extras = {name: value for name, value in WITHOUT_EXTRAS.items() if name in taken}
    failures: list[str] = []
    attempts = inputs.attempts(model, row.model_type)
    while True:
        try:
            given = next(attempts, None)
        except ERRORS as error:
            failures.append(f"inputs: {said(error)}")
            given = None
        if given is None:
            row.reason = "; ".join(dict.fromkeys(failures)) or "no inputs are known"
            return None
        given = {**given, **extras}
        try:
            result = comparing.run(model, given)
        except ERRORS as error:
            failures.append(f"{', '.join(given)}: {said(error)}")
            continue
        if comparing.outputs(result, given):
            row.notes = list(dict.fromkeys(failures))
            return given
        failures.append(f"{', '.join(given)}: no output")


# ---- the scan --------------------------------------------------------------------------------


def scanned(model: nn.Module, given: dict[str, Any]) -> tuple[HeadScan, comparing.Outputs, int]:
    """What the scan has, the outputs of the pass that it made, and the interface's calls in it."""
    kept: list[Any] = []
    through = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal through
        through += 1
        return original(*args, **options)

    original = attention.attend

    def call(running: nn.Module, **named: Any) -> None:
        kept.append(comparing.run(running, named))

    with mock.patch.object(attention, "attend", counted):
        found = scan(model, given, statistics=["entropy"], call=call)
    return found, comparing.outputs(kept[-1], given), through


def _scan_and_compare(
    row: Row,
    model: PreTrainedModel,
    given: dict[str, Any],
    ran: layers.Ran,
    usual: comparing.Outputs,
) -> None:
    row.verdict = REFUSED
    try:
        found, outputs, through = scanned(model, given)
    except HeadwiseError as error:
        row.reason = _refusal(error, ran)
        return
    except ERRORS as error:
        row.reason = f"the scan fails: {said(error)}"
        return
    names = [layer.name.partition(" (")[0] for layer in found.layer_scans]
    seen = {name: kind for name, kind in ran.layers.items() if layers.related(name, names)}
    row.seen = _counted(seen)
    row.calls = sum(layer.calls for layer in found.layer_scans)
    row.reached = _reached(through, row.calls, row.seen)
    missed = sorted({kind for name, kind in ran.layers.items() if name not in seen})
    row.reason = f"own code: {', '.join(missed)}" if missed else ""
    try:
        budgets = comparing.budgets(model, given)
    except ERRORS as error:
        row.verdict, row.reason = DIFFERS, f"no float64 reference: {said(error)}"
        return
    _judge(row, budgets, outputs, usual, is_whole=not missed)


def _judge(
    row: Row,
    budgets: dict[str, Budget],
    outputs: comparing.Outputs,
    usual: comparing.Outputs,
    *,
    is_whole: bool,
) -> None:
    vague = comparing.vague(budgets)
    if vague:
        row.notes = [*row.notes, f"not compared: {', '.join(sorted(vague))}"]
    worst = comparing.verdict(budgets, outputs, without=vague)
    if worst is None:
        row.verdict, row.reason = DIFFERS, "no output that is fit to compare"
        return
    row.output, row.ratio = worst.name, _short(worst.ratio)
    row.error, row.allowed = _short(worst.error), _short(worst.allowed)
    row.scale = _short(comparing.size(budgets[worst.name]))
    row.verdict = (ALL if is_whole else PART) if worst.within else DIFFERS
    if not comparing.verdict(budgets, usual, without=vague):
        row.verdict, row.reason = DIFFERS, "no reference: the model does not repeat its own outputs"
    elif not worst.within:
        row.reason = f"{worst.outside} of {worst.elements} elements are outside of the budget"


def _reached(through: int, calls: int, seen: dict[str, int]) -> dict[str, int]:
    others = "nn.MultiheadAttention" if "MultiheadAttention" in seen else "SDPA"
    counts = {"interface": through, others: calls - through}
    return {name: count for name, count in counts.items() if count}


def _refusal(error: HeadwiseError, ran: layers.Ran) -> str:
    words = said(error)
    if "no attention was seen" in words:
        return f"own code: {', '.join(sorted(set(ran.layers.values())))}"
    return f"the scan refuses: {words}"


def _counted(named: dict[str, str]) -> dict[str, int]:
    kinds = list(named.values())
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def said(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:240]


def version() -> str:
    return str(transformers.__version__)

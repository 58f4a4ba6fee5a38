"""The lines of an attention, written out for its settings, and those that repair a cause.

A repair is the right form of the lines in which the fault is, in the reader's own numbers. So it
holds whatever the fault is exactly. It uses these names:

    x, source             (batch, tokens, width)
    wq, bq, ...           weights and biases as `torch.nn.Linear` stores them
    q, k, v               (batch, heads, tokens, channels); k and v may have fewer heads
    scores, weights       (batch, heads, queries, keys), before and after the softmax
    mask                  broadcasts to the scores, True may attend; None for none
    outputs               (batch, heads, tokens, channels): weights @ v
    table                 (buckets, heads), the learned numbers of a bias by distance
    past, past_k, past_v  number of tokens in the cache; its keys and values

A line is written in PyTorch, and translated to NumPy by a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from headwise.diagnosis.repairs.rows import (
    write_form,
    write_number,
    write_weight_lines,
)
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.trials import NamedCause
from headwise.function.distance import count_unshared_distances, slopes_of
from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling
from headwise.function.spec import AttentionSpec, BucketRule, NormRule, RotaryRule
from headwise.identify import catalogue
from headwise.identify.catalogue import Cause
from headwise.identify.moves.move import find_factor_formula

Lines = Iterator[str]


@dataclass(frozen=True)
class Code:
    """The code in doubt.

    Attributes:
        model: the attention that it should be.
        language: "torch" or "numpy".
        takes_mask: True if it is given masks.
        crosses: True if keys and values come from other tokens than queries.
        decodes: True if it keeps keys and values between calls.
        has_empty_rows: True if a mask hides all keys of a query.
    """

    model: AttentionModel
    language: str = "torch"
    takes_mask: bool = False
    crosses: bool = False
    decodes: bool = False
    has_empty_rows: bool = False

    @property
    def settings(self) -> AttentionSpec:
        """The settings of the model."""
        return self.model.settings


# ---- the lines of each place --------------------------------------------------------------------


def _sizes(code: Code, _: str) -> Lines:
    heads, head_dim, _width = code.model.weights["wq"].shape
    yield f"num_heads, head_dim = {heads}, {head_dim}"
    if code.settings.group > 1:
        yield f"num_kv_heads = {code.settings.num_kv_heads}"


def _channels_in_pairs(rule: RotaryRule, head_dim: int) -> list[int]:
    """Return the channels of a head: the first of each pair, the second, and those that rest."""
    width = int(rule.width) // 2 * 2
    span = rule.span or width // 2
    first, second = [*range(width // 2)], [*range(span, span + width // 2)]
    if rule.pairing == "interleaved":
        first, second = [*range(0, width, 2)], [*range(1, width, 2)]
    return [*first, *second, *sorted({*range(head_dim)} - {*first, *second})]


def _write_pairs(right: AttentionModel, wrong: AttentionModel) -> tuple[str, ...]:
    """Return lines on rows that repair another pairing, wherever it is.

    Scores are the same for rows in another order and another pairing, so that outputs cannot tell
    which of them is wrong. The line on rows is right in both cases.
    """
    rule, other = right.settings.rotation, wrong.settings.rotation
    head_dim, changes = right.weights["wq"].shape[1], {}
    if rule is None or other is None or rule.width != other.width:
        return ()
    places, taken = (_channels_in_pairs(each, head_dim) for each in (rule, other))
    index = [taken[places.index(channel)] for channel in range(head_dim)]
    for name in {"wq", "wk", "bq", "bk"} & right.weights.keys():
        changes[name] = right.weights[name][:, index]
    lines = write_weight_lines(right.with_weights(**changes).weights, right.weights)
    shown = "2i and 2i + 1"
    if rule.pairing == "half-split":
        shown = f"i and i + {rule.span or int(rule.width) // 2}"
    return (f"# or turn channels {shown} of a head together", *lines) if lines else ()


def _projections(code: Code, roles: str) -> Lines:
    for role in roles:
        if role == "o":
            yield from _output(code, roles)
            continue
        heads, channels, _ = code.model.weights[f"w{role}"].shape
        x = "source" if code.crosses and role != "q" else "x"
        bias = f" + b{role}" if f"b{role}" in code.model.weights else ""
        split = f".unflatten(2, ({heads}, {channels})).transpose(1, 2)"
        yield f"{role} = ({x} @ w{role}.T{bias}){split}"


def _norms(code: Code, roles: str) -> Lines:
    rule = code.settings.norm
    for role in roles if rule is not None else "":
        assert rule is not None
        yield from _norm_of_role(code, rule, role)


def _norm_of_role(code: Code, rule: NormRule, role: str) -> Lines:
    axes = "-1" if rule.over == "head" else "(1, 3)"
    if rule.kind == "layer":
        yield f"{role} = {role} - {role}.mean({axes}, keepdim=True)"
    size = f"({role} * {role}).{'sum' if rule.kind == 'l2' else 'mean'}({axes}, keepdim=True)"
    line, weights = f"{role} = {role} / torch.sqrt({size} + {rule.eps:g})", code.model.weights
    heads, channels, _ = weights[f"w{role}"].shape
    for suffix, verb in (("", "*"), ("_bias", "+")):
        name = f"{role}_norm{suffix}"
        if f"{role}_norms{suffix}" in weights:
            name = f"{name}.reshape({heads}, 1, {channels})"
        elif name not in weights:
            continue
        offset = f"({rule.weight_offset:g} + {name})" if rule.weight_offset and not suffix else name
        line += f" {verb} {offset}"
    yield line


def _frequencies(code: Code, _: str) -> Lines:
    if (rule := code.settings.rotation) is None:
        return
    base, scaling = rule.exponent_width or rule.width, rule.scaling
    theta = float(rule.theta)
    if isinstance(scaling, NTKScaling):
        theta *= scaling.factor ** (base / (base - 2))
    yield f"inv_freq = {write_number(theta)} ** (-torch.arange(0, {rule.width}, 2) / {base})"
    if isinstance(scaling, LinearScaling):
        yield f"inv_freq = inv_freq / {scaling.factor:g}"
    elif isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = f"{scaling.original_length} * inv_freq / {write_number(2 * math.pi)}"
        yield f"kept = (({turns} - {low:g}) / {high - low:g}).clip(0, 1)"
        yield f"inv_freq = inv_freq * (kept + (1 - kept) / {scaling.factor:g})"
    elif isinstance(scaling, YarnScaling):
        first, last = scaling.ramp_bounds(theta, int(rule.width))
        pairs = f"torch.arange({int(rule.width) // 2})"
        yield f"ramp = (({pairs} - {first:.12g}) / {last - first:.12g}).clip(0, 1)"
        yield f"inv_freq = inv_freq * (1 - ramp + ramp / {scaling.factor:g})"


def _angles(code: Code, _: str) -> Lines:
    if code.settings.rotation is not None:
        start = "past, past + x.shape[1]" if code.decodes else "x.shape[1]"
        yield f"angles = torch.arange({start})[:, None] * inv_freq"


def _tables(code: Code, _: str) -> Lines:
    if (rule := code.settings.rotation) is not None:
        factor = "" if rule.amplitude == 1.0 else f"{rule.amplitude:.12g} * "
        yield f"cos, sin = {factor}torch.cos(angles), {factor}torch.sin(angles)"


def _turn(code: Code, roles: str) -> Lines:
    if (rule := code.settings.rotation) is None:
        return
    width, head_dim = int(rule.width), code.model.weights["wq"].shape[1]
    for role in roles:
        rest = f", {role}[..., {width}:]" if width < head_dim else ""
        if rule.pairing == "half-split":
            half = width // 2
            yield f"a, b = {role}[..., :{half}], {role}[..., {half}:{width}]"
            yield f"{role} = torch.cat((a * cos - b * sin, b * cos + a * sin{rest}), -1)"
        else:
            yield f"a, b = {role}[..., 0:{width}:2], {role}[..., 1:{width}:2]"
            yield "pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)"
            turned = "pairs.flatten(-2)"
            yield f"{role} = torch.cat(({turned}{rest}), -1)" if rest else f"{role} = {turned}"


def _rotation(code: Code, roles: str) -> Lines:
    yield from _tables(code, roles)
    yield from _turn(code, roles)


def _whole_rotation(code: Code, roles: str) -> Lines:
    for write in (_frequencies, _angles, _rotation):
        yield from write(code, roles)


def _norm_and_rotation(code: Code, roles: str) -> Lines:
    rule = code.settings.norm
    order = (_norms, _rotation)
    for write in order if rule is None or rule.place == "before" else order[::-1]:
        yield from write(code, roles)


def _groups(code: Code, _: str) -> Lines:
    if (group := code.settings.group) > 1:
        yield f"k = k.repeat_interleave({group}, 1)"
        yield f"v = v.repeat_interleave({group}, 1)"


def _scores(code: Code, _: str) -> Lines:
    factor, head_dim = code.settings.factor, code.model.weights["wq"].shape[1]
    scale = f" * {write_number(factor)}"
    if math.isclose(factor, head_dim**-0.5):
        scale = f" / {head_dim}**0.5"
    yield f"scores = q @ k.mT{'' if factor == 1 else scale}"


def _write_scale(code: Code, wrong: float, heads: tuple[int, ...] | None) -> Lines:
    _, head_dim, width = code.model.weights["wq"].shape
    right, sizes = code.settings.factor, {"head_dim": head_dim, "width": width}
    form = find_factor_formula(wrong, **sizes)
    quotient = write_form(right / wrong, **sizes)
    if form and "*" not in quotient and not math.isclose(right / wrong, round(right / wrong, 3)):
        quotient = f"{write_form(right, **sizes)} / {write_form(wrong, **sizes)}"
    part = "scores" if heads is None else f"scores[:, {list(heads)}]"
    comment = f"scale {right:.6g} in place of {form or f'{wrong:.6g}'}"
    yield f"{part} = {part} * {quotient}  # {comment}"


def _softcap(code: Code, _: str) -> Lines:
    if (cap := code.settings.cap) is not None:
        yield f"scores = {cap:g} * torch.tanh(scores / {cap:g})"


def _distances(code: Code) -> Lines:
    queries = "torch.arange(scores.shape[2])[:, None]"
    queries = f"({queries} + past)" if code.decodes else queries
    yield f"ahead = torch.arange(scores.shape[3]) - {queries}"


def _bucket_bias(code: Code, rule: BucketRule) -> Lines:
    side = int(rule.buckets) // (2 if rule.bidirectional else 1)
    near = count_unshared_distances(int(rule.buckets), bidirectional=bool(rule.bidirectional))
    steps = f"{write_number(math.log(rule.max_distance / near))} * {side - near}"
    yield from _distances(code)
    yield f"far = {'abs(ahead)' if rule.bidirectional else '(-ahead).clip(0)'}"
    yield f"steps = torch.log(far.clip({near}).float() / {near}) / {steps}"
    yield f"shared = ({near} + steps.long()).clip(0, {side - 1})"
    later = f" + {side} * (ahead > 0)" if rule.bidirectional else ""
    yield f"bucket = torch.where(far < {near}, far, shared){later}"
    yield "scores = scores + table[bucket].permute(2, 0, 1)"


def _bias(code: Code, _: str) -> Lines:
    if (rule := code.settings.buckets) is not None:
        yield from _bucket_bias(code, rule)
    if (slopes := slopes_of(code.settings)) is not None:
        count = len(slopes)
        powers = 2.0 ** (-8.0 * (slopes.new_tensor(range(count)) + 1) / count)
        numbers = f"2.0 ** (-8 * torch.arange(1, {count + 1}) / {count})"
        if not bool((slopes - powers).abs().le(1e-7 * powers).all()):
            numbers = f"torch.tensor([{', '.join(f'{float(x):.9g}' for x in slopes)}])"
        yield f"slopes = {numbers}"
        yield from _distances(code)
        yield "scores = scores - slopes[:, None, None] * abs(ahead)"


def _mask(code: Code, _: str) -> Lines:
    left, right = code.settings.sides or (None, None)
    right = 0 if code.settings.causal else right
    bounds = [] if right is None else [f"ahead > {right}"]
    bounds += [] if left is None else [f"ahead < -{left}"]
    if bounds:
        yield from _distances(code)
        hidden = bounds[0] if len(bounds) == 1 else f"({bounds[0]}) | ({bounds[1]})"
        yield f"scores = scores.masked_fill({hidden}, -torch.inf)"
    if code.takes_mask:
        yield "if mask is not None:"
        yield "    scores = scores.masked_fill(~mask, -torch.inf)"


def _softmax(code: Code, _: str) -> Lines:
    if "sink" not in code.model.weights:
        empty = ".nan_to_num(0.0)" if code.has_empty_rows else ""
        yield f"weights = scores.softmax(-1){empty}"
        return
    yield "sink = sinks[:, None, None]"
    yield "top = torch.maximum(scores.amax(-1, keepdim=True), sink)"
    yield "powers = torch.exp(scores - top)"
    yield "weights = powers / (powers.sum(-1, keepdim=True) + torch.exp(sink - top))"


def _mask_and_softmax(code: Code, roles: str) -> Lines:
    yield from _mask(code, roles)
    yield from _softmax(code, roles)


def _mix(code: Code, _: str) -> Lines:
    yield "outputs = weights @ v"
    if "wg" in code.model.weights:
        heads, channels, _width = code.model.weights["wg"].shape
        bias = " + bg" if "bg" in code.model.weights else ""
        split = f".unflatten(2, ({heads}, {channels})).transpose(1, 2)"
        yield f"gate = (x @ wg.T{bias}){split}"
        yield "outputs = outputs / (1 + torch.exp(-gate))"


def _output(code: Code, _: str) -> Lines:
    bias = " + bo" if "bo" in code.model.weights else ""
    yield f"output = outputs.transpose(1, 2).flatten(2) @ wo.T{bias}"


def _cache(_code: Code, _: str) -> Lines:
    yield "k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)"


def _around(_code: Code, _: str) -> Lines:
    yield "output = function(x.transpose(0, 1)).transpose(0, 1)"


# ---- the place of each cause --------------------------------------------------------------------


@dataclass(frozen=True)
class LinePlace:
    """A place of lines in the code, in words, and the function that writes them."""

    words: str
    write: Callable[[Code, str], Lines]


SIZES = LinePlace("where the sizes are set", _sizes)
PROJECTIONS = LinePlace("where q, k and v are computed", _projections)
NORMS = LinePlace("where q and k are normalised", _norms)
NORM_AND_ROTATION = LinePlace("where q and k are normalised and rotated", _norm_and_rotation)
FREQUENCIES = LinePlace("where the frequencies are computed", _frequencies)
ANGLES = LinePlace("where the angles are computed", _angles)
ROTATION = LinePlace("where q and k are rotated", _rotation)
WHOLE_ROTATION = LinePlace("for the whole rotation", _whole_rotation)
CACHE = LinePlace("where keys are added to the cache", _cache)
GROUPS = LinePlace("where kv heads are repeated", _groups)
SCORES = LinePlace("where the scores are computed", _scores)
SOFTCAP = LinePlace("where scores are capped", _softcap)
BIAS = LinePlace("where the bias is added to the scores", _bias)
MASK = LinePlace("where keys are hidden", _mask)
MASK_AND_SOFTMAX = LinePlace("from where keys are hidden to the softmax", _mask_and_softmax)
SOFTMAX = LinePlace("in place of the softmax", _softmax)
MIX = LinePlace("where values are mixed", _mix)
OUTPUT = LinePlace("where the output is computed", _output)
AROUND = LinePlace("around the function", _around)
ON_WEIGHTS = LinePlace("once, on the weights", lambda *_: iter(()))

# By their names in the catalogue.
PLACES = {name.lower(): each for name, each in [*globals().items()] if isinstance(each, LinePlace)}
# Causes that no line repairs -> the reason.
WORDS_ALONE: Mapping[Cause, str] = {
    catalogue.ANOTHER_ROLE: "the weights are lost: load them from their own tensor",
    catalogue.ROWS_ZERO: "the weights are lost: load them again",
    catalogue.HEADS_GONE: "the weights of these heads are in the other layer",
    catalogue.KV_HEADS_MERGED: "a mean does not tell what it was made of",
    catalogue.WEIGHTS_ROUNDED: "the digits are lost: load the weights in their own dtype",
    catalogue.INITIAL_WEIGHTS: "the weights are lost: load them again",
    catalogue.ONE_HEAD_FOR_ALL: "the rows of the other heads are lost, or never read",
    catalogue.FUSED_ROW_CUT: "the rows that the slice leaves out are lost",
    catalogue.BATCH_AND_HEADS: "it may be in one of several places: the report says what it is of",
    catalogue.ADAPTERS_MERGED: "the weights of the adapter are in its own file",
    catalogue.MODULE_BYPASSED: "named of layers alone, whose modules are called or not",
    catalogue.DROPOUT_LEFT_ON: "the module is told so: eval()",
    catalogue.NORM_INSIDE: "a line that is there is left out",
    catalogue.NORM_OF_ANOTHER_ROLE: "a norm that is there is left out",
    catalogue.ROTARY_ON_VALUES: "a rotation that is there is left out",
    catalogue.ACTIVATIONS_DTYPE: "a cast that is there is left out",
    catalogue.LAYERS_EXCHANGED: "named of whole models: layers are loaded by their number",
    catalogue.LAYERS_OFF_BY_ONE: "named of whole models: layers are loaded by their number",
}


@dataclass(frozen=True)
class Repair:
    """Lines of code, and where they stand in the code in doubt, in words; or words alone."""

    lines: tuple[str, ...]
    place: str = ""


def write_repair(named: NamedCause, code: Code, before: AttentionModel) -> Repair | None:
    """Return the lines that repair a cause, or None; ``before`` is the model without the fault."""
    cause, variant, place = named.cause, named.variant, PLACES.get(named.cause.place)
    if cause in WORDS_ALONE or not _is_plain(code.settings):
        return None
    rows = write_weights(named, before)
    if place is ROTATION and any("permutation" in name for name in named.equals):
        rows = _write_pairs(before, variant.model)
    if rows:
        return Repair(translate(rows, code.language), ON_WEIGHTS.words)
    weights = variant.model.weights.items()
    is_moved = any(x is not before.weights.get(name) for name, x in weights)  # a gate, by no line
    if place in (None, ON_WEIGHTS) or (is_moved and place is MASK_AND_SOFTMAX):
        return None
    place = MASK_AND_SOFTMAX if place is MASK and code.has_empty_rows else place
    stated = variant.parameters.get("roles", "qkv")
    lines, words = [*place.write(code, stated if place is PROJECTIONS else "qk")], place.words
    if "scale" in variant.parameters and "calls" not in variant.parameters:
        lines = [*_write_scale(code, variant.parameters["scale"], named.heads)]
        words = "before scores are capped, biased or masked"
    if named_weights := dict.fromkeys(re.findall(r"\b[wb][qkvog]\b", " ".join(lines))):
        listed = ", ".join(named_weights)
        lines.append(f"# {listed}: of the right layer, as torch.nn.Linear stores them")
    return Repair(translate(tuple(lines), code.language), words) if lines else None


def write_weights(named: NamedCause, before: AttentionModel) -> tuple[str, ...]:
    """Return the lines on weights that repair a cause of weights; () where none do."""
    place, weights = PLACES.get(named.cause.place), named.variant.model.weights
    if named.cause in WORDS_ALONE or place not in (None, GROUPS, ON_WEIGHTS, MASK_AND_SOFTMAX):
        return ()
    return write_weight_lines(weights, before.weights)


def _is_plain(settings: AttentionSpec) -> bool:
    """True for settings that the lines know: no offset of a rotation, no gap in its channels."""
    rule = settings.rotation
    return rule is None or (
        isinstance(rule, RotaryRule)
        and rule.span is None
        and rule.dtype is None
        and not rule.q_offset
        and not rule.k_offset
    )


# ---- NumPy --------------------------------------------------------------------------------------

# Patterns of a line in PyTorch -> what it is in NumPy; in this order.
NUMPY: tuple[tuple[str, str], ...] = (
    (
        r"\((\w+) @ (.*)\)\.unflatten\(2, \((\d+), (\d+)\)\)",
        r"(\1 @ \2).reshape(*\1.shape[:2], \3, \4)",
    ),
    (r"\.transpose\(1, 2\)\.flatten\(2\)", r".swapaxes(1, 2).reshape(*x.shape[:2], -1)"),
    (r"pairs\.flatten\(-2\)", r"pairs.reshape(*pairs.shape[:-2], -1)"),
    (r"\.transpose\(", r".swapaxes("),
    (r"\.permute\(", r".transpose("),
    (r"\.mT", r".swapaxes(2, 3)"),
    (r"(\w+)\.repeat_interleave\(", r"np.repeat(\1, "),
    (r"(\w+) = \1\.masked_fill\((.*), (-torch\.inf)\)", r"\1 = np.where(\2, \3, \1)"),
    (
        r"^(weights = )scores\.softmax\(-1\)",
        r"powers = np.exp(scores - scores.max(-1, keepdims=True))\n"
        r"\1powers / powers.sum(-1, keepdims=True)",
    ),
    (r"(weights = )(.*)\.nan_to_num\(0\.0\)", r"\1np.nan_to_num(\2)"),
    (r"\.float\(\)", r".astype(np.float32)"),
    (r"\.long\(\)", r".astype(int)"),
    (r"amax\(-1", r"max(-1"),
    (r"keepdim=", r"keepdims="),
    (r"torch\.cat\(", r"np.concatenate("),
    (r"torch\.tensor\(", r"np.array("),
    (r"torch\.", r"np."),
)


def translate(lines: tuple[str, ...], language: str) -> tuple[str, ...]:
    """Return lines of PyTorch in another language."""
    if language != "numpy":
        return lines
    translated: list[str] = []
    for line in lines:
        for pattern, text in NUMPY:
            line = re.sub(pattern, text, line)
        translated += line.split("\n")
    return tuple(translated)

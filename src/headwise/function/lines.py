"""The lines of an attention, written out for its settings.

They use these names:

    x, source             (batch, tokens, width)
    wq, bq, ...           weights and biases as `torch.nn.Linear` stores them
    q, k, v               (batch, heads, tokens, channels); k and v may have fewer heads
    scores, weights       (batch, heads, queries, keys), before and after the softmax
    mask                  broadcasts to the scores, True may attend; None for none
    outputs               (batch, heads, tokens, channels): weights @ v
    table                 (buckets, heads), the learned numbers of a bias by distance
    place_table           (rows, width), DeBERTa's vectors of relative positions
    past, past_k, past_v  number of tokens in the cache; its keys and values
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwise.function.distance import count_unshared_distances, slopes_of
from headwise.function.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NTKScaling,
    ProportionalScaling,
    YarnScaling,
)
from headwise.function.spec import (
    AttentionSpec,
    BucketRule,
    DifferentialRule,
    DisentangledRule,
    NormRule,
    TemperatureRule,
    ValueRule,
)
from headwise.function.weights import State, bias_of

Lines = Iterator[str]


@dataclass(frozen=True)
class Code:
    """Code of an attention.

    Attributes:
        settings, weights: of the attention that it should be.
        language: "torch" or "numpy".
        takes_mask: True if it is given masks.
        crosses: True if keys and values come from other tokens than queries.
        decodes: True if it keeps keys and values between calls.
        has_empty_rows: True if a mask hides all keys of a query.
    """

    settings: AttentionSpec
    weights: State
    language: str = "torch"
    takes_mask: bool = False
    crosses: bool = False
    decodes: bool = False
    has_empty_rows: bool = False


def write_number(number: float) -> str:
    """Return a number in code: as short as gives the same float64 to 12 digits."""
    text = f"{number:.12g}"
    return text if any(mark in text for mark in ".en") else f"{text}.0"


# ---- the lines of each place --------------------------------------------------------------------


def _sizes(code: Code, _: str) -> Lines:
    heads, head_dim, _width = code.weights["wq"].shape
    yield f"num_heads, head_dim = {heads}, {head_dim}"
    if code.settings.group > 1:
        yield f"num_kv_heads = {code.settings.num_kv_heads}"


def _projections(code: Code, roles: str) -> Lines:
    for role in roles:
        if role == "o":
            yield from _output(code, roles)
            continue
        heads, channels, _ = code.weights[f"w{role}"].shape
        x = "source" if code.crosses and role != "q" else "x"
        bias = f" + b{role}" if f"b{role}" in code.weights else ""
        split = f".unflatten(2, ({heads}, {channels})).transpose(1, 2)"
        yield f"{role} = ({x} @ w{role}.T{bias}){split}"


def _norms(code: Code, roles: str) -> Lines:
    rule = code.settings.norm
    for role in roles if rule is not None else "":
        assert rule is not None
        yield from _norm_of_role(code, rule, role)
    if (bound := code.settings.bound) is not None:
        for role in roles:
            yield f"{role} = {role}.clip({-bound:g}, {bound:g})"


def _norm_of_role(code: Code, rule: NormRule, role: str) -> Lines:
    axes = "-1" if rule.over == "head" else "(1, 3)"
    if rule.kind == "layer":
        yield f"{role} = {role} - {role}.mean({axes}, keepdim=True)"
    size = f"({role} * {role}).{'sum' if rule.kind == 'l2' else 'mean'}({axes}, keepdim=True)"
    line, weights = f"{role} = {role} / torch.sqrt({size} + {rule.eps:g})", code.weights
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
    start, length = write_number(theta), f"(x.shape[1]{' + past' if code.decodes else ''})"
    if isinstance(scaling, NTKScaling):
        start = write_number(theta * scaling.factor ** (base / (base - 2)))
    elif isinstance(scaling, DynamicScaling):
        grown = f"{scaling.factor:g} * {length} / {scaling.original_length}"
        grown = f"max(1, {grown} - {scaling.factor - 1:g})"
        start = f"({start} * {grown} ** {base / (base - 2):.12g})"
    yield f"inv_freq = {start} ** (-torch.arange(0, {rule.width}, 2) / {base})"
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
    elif isinstance(scaling, LongScaling):
        long, short = list(scaling.long_factors), list(scaling.short_factors)
        yield f"factors = {long} if {length} > {scaling.original_length} else {short}"
        yield "inv_freq = inv_freq / torch.tensor(factors)"
    elif isinstance(scaling, ProportionalScaling):
        turning = int(scaling.share * rule.width // 2)
        yield f"turns = torch.arange({rule.width // 2}) < {turning}"
        yield f"inv_freq = inv_freq * turns / {scaling.factor:g}"


def _angles(code: Code, _: str) -> Lines:
    if code.settings.rotation is not None:
        start = "past, past + x.shape[1]" if code.decodes else "x.shape[1]"
        sign = "-" if code.settings.rotation.backwards else ""
        yield f"angles = {sign}torch.arange({start})[:, None] * inv_freq"


def _tables(code: Code, _: str) -> Lines:
    if (rule := code.settings.rotation) is not None:
        factor = "" if rule.amplitude == 1.0 else f"{rule.amplitude:.12g} * "
        yield f"cos, sin = {factor}torch.cos(angles), {factor}torch.sin(angles)"


def _turn(code: Code, roles: str) -> Lines:
    if (rule := code.settings.rotation) is None:
        return
    width, head_dim = int(rule.width), code.weights["wq"].shape[1]
    for role in roles:
        rest = f", {role}[..., {width}:]" if width < head_dim else ""
        if rule.pairing == "half-split":
            half, span = width // 2, rule.span or width // 2
            rest = f", {role}[..., {span + half}:]" if span + half < head_dim else ""
            between = f"{role}[..., {half}:{span}], " if span > half else ""
            yield f"a, b = {role}[..., :{half}], {role}[..., {span}:{span + half}]"
            yield f"{role} = torch.cat((a * cos - b * sin, {between}b * cos + a * sin{rest}), -1)"
        else:
            yield f"a, b = {role}[..., 0:{width}:2], {role}[..., 1:{width}:2]"
            yield "pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)"
            turned = "pairs.flatten(-2)"
            yield f"{role} = torch.cat(({turned}{rest}), -1)" if rest else f"{role} = {turned}"


def _rotation(code: Code, roles: str) -> Lines:
    yield from _tables(code, roles)
    yield from _turn(code, roles)
    if (rule := code.settings.norm) is None or rule.place == "before":
        yield from _temperature(code, roles)


def _temperature(code: Code, roles: str) -> Lines:
    rule = code.settings.temperature
    if "q" in roles and isinstance(rule, TemperatureRule):
        start = "past, past + x.shape[1]" if code.decodes else "x.shape[1]"
        yield f"share = (torch.arange({start})[:, None] + {rule.first}) / {rule.length:g}"
        grown = "share.clip(1)" if rule.kind == "smooth" else "1 + torch.floor(share)"
        yield f"q = q * (1 + {rule.factor:g} * torch.log({grown}))"


def _whole_rotation(code: Code, roles: str) -> Lines:
    for write in (_frequencies, _angles, _rotation):
        yield from write(code, roles)


def _norm_and_rotation(code: Code, roles: str) -> Lines:
    rule = code.settings.norm
    order = (_norms, _rotation)
    for write in order if rule is None or rule.place == "before" else order[::-1]:
        yield from write(code, roles)
    if rule is not None and rule.place == "after":
        yield from _temperature(code, roles)


def _groups(code: Code, _: str) -> Lines:
    if (group := code.settings.group) > 1:
        yield f"k = k.repeat_interleave({group}, 1)"
        yield f"v = v.repeat_interleave({group}, 1)"


def _scores(code: Code, _: str) -> Lines:
    factor, head_dim = code.settings.factor, code.weights["wq"].shape[1]
    scale = f" * {write_number(factor)}"
    if math.isclose(factor, head_dim**-0.5):
        scale = f" / {head_dim}**0.5"
    yield f"scores = q @ k.mT{'' if factor == 1 else scale}"


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


def _place_terms(code: Code, rule: DisentangledRule) -> Lines:
    yield "places = place_table"
    if rule.eps is not None:
        yield "places = places - places.mean(-1, keepdim=True)"
        root = f"torch.sqrt((places * places).mean(-1, keepdim=True) + {rule.eps:g})"
        yield f"places = places / {root} * place_norm + place_norm_bias"
    yield from _distances(code)
    if rule.max_distance is not None:
        mid = rule.span // 2
        steps = f"{mid - 1} / {write_number(math.log((rule.max_distance - 1) / mid))}"
        yield f"steps = torch.log(abs(ahead).clip({mid}).float() / {mid}) * {steps}"
        yield f"far = {mid} + torch.ceil(steps).long()"
        yield f"ahead = torch.where(abs(ahead) <= {mid}, ahead, far * torch.sign(ahead))"
    yield f"rows = ({rule.span} - ahead).clip(0, {2 * rule.span - 1})"
    for term in rule.terms:
        role, pair = ("k", "i") if term == "c2p" else ("q", "j")  # whose places, and who meets them
        name = f"w{role}" if rule.is_shared else f"wp{role}"
        heads, channels, _width = code.weights[name].shape
        bias = f" + {bias_of(name)}" if bias_of(name) in code.weights else ""
        yield f"place = (places @ {name}.T{bias}).reshape(-1, {heads}, {channels}).swapaxes(0, 1)"
        if heads < code.settings.num_heads:
            yield f"place = place.repeat_interleave({code.settings.group}, 0)"
        met = f"torch.einsum('bh{pair}d,hijd->bhij', {'q' if role == 'k' else 'k'}, place[:, rows])"
        yield f"scores = scores + {write_number(code.settings.factor)} * {met}"


def _bias(code: Code, _: str) -> Lines:
    if (places := code.settings.places) is not None:
        yield from _place_terms(code, places)
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
    if "sink" not in code.weights:
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


def _values(code: Code) -> Lines:
    rule, bound = code.settings.values, code.settings.bound
    if bound is not None:
        yield f"v = v.clip({-bound:g}, {bound:g})"
    if isinstance(rule, ValueRule) and rule.eps is not None:
        yield f"v = v / torch.sqrt((v * v).mean(-1, keepdim=True) + {rule.eps:g})"
    if isinstance(rule, ValueRule) and rule.factor != 1:
        yield f"v = {rule.factor:g} * v"


def _subtract_pairs(code: Code, rule: DifferentialRule) -> Lines:
    half, channels = code.settings.num_heads // 2, code.weights["wv"].shape[1]
    yield f"pairs = torch.cat((v[:, :{half}], v[:, {half}:]), -1)"
    yield "outputs = weights @ torch.cat((pairs, pairs), 1)"
    dots = (f"torch.exp((lambda_q{n} * lambda_k{n}).sum())" for n in "12")
    yield f"factor = {' - '.join(dots)} + {write_number(rule.init)}"
    yield f"outputs = outputs[:, :{half}] - factor * outputs[:, {half}:]"
    root = f"torch.sqrt((outputs * outputs).mean(-1, keepdim=True) + {rule.eps:g})"
    yield f"outputs = {write_number(1 - rule.init)} * outputs / {root}"
    yield f"outputs = outputs.reshape(*outputs.shape[:3], 2, {channels}).swapaxes(2, 3)"
    yield f"outputs = outputs.reshape(len(outputs), {2 * half}, -1, {channels})"


def _mix(code: Code, _: str) -> Lines:
    yield from _values(code)
    if (pairs := code.settings.pairs) is None:
        yield "outputs = weights @ v"
    else:
        yield from _subtract_pairs(code, pairs)
    if isinstance(rule := code.settings.output_norm, NormRule):
        axes = "(1, 3)" if rule.over == "width" else "-1"
        if rule.kind == "layer":
            yield f"outputs = outputs - outputs.mean({axes}, keepdim=True)"
        size = f"(outputs * outputs).mean({axes}, keepdim=True)"
        line = f"outputs = outputs / torch.sqrt({size} + {rule.eps:g})"
        for name, sign in (("o_norms", "*"), ("o_norms_bias", "+")):
            if name in code.weights:
                heads, channels = code.weights[name].shape
                stored = name.replace("norms", "norm")
                line += f" {sign} {stored}.reshape({heads}, 1, {channels})"
        yield line
    if "wg" in code.weights:
        heads, channels, _width = code.weights["wg"].shape
        bias = " + bg" if "bg" in code.weights else ""
        split = f".unflatten(2, ({heads}, {channels})).transpose(1, 2)"
        yield f"gate = (x @ wg.T{bias}){split}"
        is_softplus = str(code.settings.output_gate).endswith("softplus")
        opened = "* torch.log1p(torch.exp(gate))" if is_softplus else "/ (1 + torch.exp(-gate))"
        yield f"outputs = outputs {opened}"


def _output(code: Code, _: str) -> Lines:
    bias = " + bo" if "bo" in code.weights else ""
    yield f"output = outputs.transpose(1, 2).flatten(2) @ wo.T{bias}"


def _cache(_code: Code, _: str) -> Lines:
    yield "k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)"


def _around(_code: Code, _: str) -> Lines:
    yield "output = function(x.transpose(0, 1)).transpose(0, 1)"


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

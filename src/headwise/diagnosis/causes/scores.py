"""Causes in the scores and their softmax.

The scale, the softcap and the bias by distance; the axis, the dtype, the sinks and the dropout of
the softmax.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Family, Variant, Variants
from headwise.diagnosis.causes.heads import change_later_calls, fit_by_head
from headwise.diagnosis.outputs.reading import solve, with_constant
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    RecordedCall,
    key_query_distances,
)
from headwise.errors import OptionError
from headwise.function.distance import bucket_of_distances, count_unshared_distances, slopes_of
from headwise.function.records import scale_products, scaled_place_terms
from headwise.function.spec import BucketRule, DisentangledRule, Softcap
from headwise.function.stages import repeat_kv_heads
from headwise.identify.catalogue import SCORES, WEIGHTS
from headwise.identify.moves.move import find_factor_formula, format_dtype, list_formulas
from headwise.layers.distance import alibi_slopes

STEPS = (1, 2, 4, 8)  # positions after which a temperature grows
STILL = 1e-3  # of a factor: log(1000) and log(1001) differ by as much
LARGE = 1e30  # a number that hides a key when it is taken off its score


def _scale(evidence: Evidence) -> Variants:
    right, sizes = evidence.model.settings.factor, evidence.model.sizes
    head_dim, width = sizes["head_dim"], sizes["embed_dim"]

    def make(scale: float) -> Variant:
        model = evidence.model.with_settings(scale=scale)
        form = find_factor_formula(scale, head_dim=head_dim, width=width)
        repair = f"scale={right:.12g} in place of {scale:.6g}"
        return Variant(model, {"scale": scale}, repair, {"form": form} if form else {})

    starts = tuple(right * 4.0**n for n in range(-4, 5))
    forms = tuple(list_formulas(head_dim, width).values())
    yield Family(make, starts, is_log=True, forms=forms)

    def make_later(scale: float) -> Variant:
        changed = make(scale)
        model = change_later_calls(evidence, SCORES, partial(replace, model=changed.model))
        return replace(changed, model=model, parameters={"scale": scale, "calls": "with a cache"})

    if evidence.has_later_calls:
        yield Family(make_later, starts, is_log=True, forms=forms)


def _scale_twice(evidence: Evidence) -> Variants:
    right = evidence.model.settings.factor
    if right != 1.0:
        model = evidence.model.with_settings(scale=right**2)
        yield Variant(model, {"scale": right**2}, "scale q or the scores, not both")


def _temperature_by_length(evidence: Evidence) -> Variants:
    if _has_one_factor(evidence):
        return
    right, repair = evidence.model.settings.factor, "one scale for all lengths"

    def make(kind: str, number: float, text: str) -> Variant:
        model = evidence.replace_stages(SCORES, _grow_queries, kind, number)
        return Variant(model, {"temperature": text.format(number)}, repair)

    yield make("keys", -0.5, "1 / sqrt(keys)")
    yield make("keys alone", right, "1 / sqrt(keys) in place of the scale")
    for kind, logarithm in (("log keys", "log(keys) times {:.6g}"), ("over", "{:.6g} / log(keys)")):
        yield Family(partial(make, kind, text=logarithm), (0.05, 1.0), is_log=True)
    longest = max(call.key_positions.shape[1] for call in evidence.calls)
    by_position = "log(position) / log({:g}), from there on"
    for base in range(2, longest):
        yield make("log position", float(base), by_position)
    for steps in STEPS:
        kind = f"steps of {steps}"
        text = f"1 + {{:.6g}} log(1 + floor(position / {steps}))"
        yield Family(partial(make, kind, text=text), (0.03, 0.3), is_log=True)


def _has_one_factor(evidence: Evidence) -> bool:
    """True if recorded weights are those of scores times one number, in all calls and rows."""
    ratios = []
    for call in evidence.calls:
        ours, right = call.stages.get("weights"), evidence.model.predict_stage("scores", call)
        if ours is None or ours.shape != right.shape:
            return False
        is_seen = (ours > 0) & right.isfinite()
        logs, scores = (_centre(each, is_seen) for each in (ours.log(), right))
        ratios.append(((logs * scores).sum(-1) / scores.square().sum(-1)).flatten())
    every = torch.cat(ratios)
    every = every[every.isfinite()]
    return len(every) > 1 and bool(every.std() <= STILL * every.abs().mean())


def _centre(x: Tensor, is_seen: Tensor) -> Tensor:
    """Return the numbers of visible keys less their mean, and 0 for the others."""
    x = x.where(is_seen, 0.0)
    return (x - x.sum(-1, keepdim=True) / is_seen.sum(-1, keepdim=True)).where(is_seen, 0.0)


def _grow_queries(kind: str, number: float, forced: ForcedStage) -> Tensor:
    call, q = forced.call, forced["q after rotary"]
    keys, places = call.key_positions.shape[1], call.query_positions[:, None, :, None] + 1
    factor: float | Tensor
    if kind == "keys":
        factor = float(keys**number)
    elif kind == "keys alone":
        factor = keys**-0.5 / number
    elif kind == "log keys":
        factor = number * math.log(keys)
    elif kind == "over":
        factor = number / math.log(max(keys, 2))  # one key has all the weight, whatever it is
    elif kind == "log position":
        factor = (places.double().log() / math.log(number)).clamp_min(1.0)
    else:
        steps = int(kind.removeprefix("steps of "))
        factor = 1 + number * (1 + places // steps).double().log()
    grown = call.with_stages({**call.stages, "q after rotary": q * factor})
    return replace(forced, call=grown).usual_result()


def _softcap(evidence: Evidence) -> Variants:
    right = evidence.model.settings.cap
    repair = "softcap=None" if right is None else f"softcap={right:g}"
    if right is not None:
        yield Variant(evidence.model.with_settings(softcap=None), {"softcap": "none"}, repair)

    def make(softcap: float) -> Variant:
        model = evidence.model.with_settings(softcap=Softcap(softcap))
        return Variant(model, {"softcap": softcap}, repair)

    yield Family(make, tuple(2.0**n for n in range(-1, 9)), is_log=True)
    if right is None or evidence.attends_across_batch:
        return
    for text, form in CAPS.items():
        repair = "softcap * torch.tanh(scores / softcap)"
        yield Variant(evidence.replace_stages(SCORES, _cap, form), {"formula": text}, repair)


CAPS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "tanh(scores / softcap)": lambda s, cap: (s / cap).tanh(),
    "scores * tanh(scores / softcap)": lambda s, cap: s * (s / cap).tanh(),
    "scores.clamp(-softcap, softcap)": lambda s, cap: s.clamp(-cap, cap),
}


def _cap(form: Callable[[Tensor, float], Tensor], forced: ForcedStage) -> Tensor:
    """Return scores that are capped by another formula, before what is added and hidden."""
    cap, bare = forced.settings.cap, forced.model.with_settings(softcap=None)
    if cap is None:  # another change left it out
        return forced.usual_result()
    change = form(scale_products(replace(forced, model=bare)), cap) - scale_products(forced)
    return forced.usual_result() + change


def _distance_bias_coefficient(evidence: Evidence) -> Variants:
    model, slopes = evidence.model, slopes_of(evidence.model.settings)
    if model.settings.buckets is not None:
        yield from _coefficients_of_table(model)
        return
    if model.settings.places is not None:
        yield from _coefficients_of_places(evidence, model.settings.places)
        return
    is_missing = slopes is None
    if slopes is None:
        slopes = alibi_slopes(model.settings.num_heads).double()
    else:
        repair = "add the bias by distance: Alibi()"
        yield Variant(model.with_slopes(None), {"coefficient": 0.0}, repair)

    def make(factor: float) -> Variant:
        repair = f"slopes divided by {factor:.6g}"
        repair = "leave out the bias by distance" if is_missing else repair
        return Variant(model.with_slopes(factor * slopes), {"coefficient": factor}, repair)

    yield Family(make, (-1.0, 0.5, 2.0, 8.0))


def _coefficients_of_table(model: AttentionModel) -> Variants:
    table, repair = model.weights["distances"], "add the relative bias to the scores: T5Bias(...)"
    bare = model.with_settings(score_bias=None).with_weights(distances=None)
    yield Variant(bare, {"coefficient": 0.0}, repair)

    def make(factor: float) -> Variant:
        changed = model.with_weights(distances=factor * table)
        return Variant(changed, {"coefficient": factor}, f"biases divided by {factor:.6g}")

    yield Family(make, (-1.0, 0.5, 2.0))


def _coefficients_of_places(evidence: Evidence, rule: DisentangledRule) -> Variants:
    repair = "add DeBERTa's terms to the scores: DebertaBias(...)"
    bare = evidence.model.with_settings(score_bias=None)
    yield Variant(bare, {"coefficient": 0.0}, repair)
    for term in rule.terms if len(rule.terms) > 1 else ():
        rest = tuple(other for other in rule.terms if other != term)
        model = evidence.model.with_settings(score_bias=replace(rule, terms=rest))
        repair = f"add the term {term} too, of {_MEET[term]}, at the same scale"
        yield Variant(model, {"left out": term}, repair)

    def make(factor: float) -> Variant:
        model = evidence.replace_stages(SCORES, _add_places, {}, factor)
        return Variant(model, {"coefficient": factor}, f"terms divided by {factor:.6g}")

    yield Family(make, (-1.0, 0.5, 2.0, 8.0))


_MEET = {"c2p": "queries with keys of places", "p2c": "keys with queries of places"}


def _add_places(turned: Mapping[str, int], factor: float, forced: ForcedStage) -> Tensor:
    """Return scores with other terms of DeBERTa: times a factor, or with distances turned."""
    usual, distances = forced.usual_result(), forced.distances
    changed = {term: sign * distances for term, sign in turned.items()}
    right, other = scaled_place_terms(forced), scaled_place_terms(forced, **changed)
    return usual if right is None or other is None else usual + factor * other - right


def _distance_bias_slope_rule(evidence: Evidence) -> Variants:
    slopes = slopes_of(evidence.model.settings)
    if slopes is None:
        return
    for rule, other in _slopes_of_every_rule(len(slopes)).items():
        if not torch.equal(other, slopes):
            model = evidence.model.with_slopes(other)
            yield Variant(model, {"rule": rule}, "alibi_slopes(num_heads)")
    if evidence.shows_outputs_alone:
        fitted = fit_by_head(evidence, evidence.model.with_slopes, slopes)
        if fitted is not None:
            parameters = {"slopes": [round(float(x), 6) for x in fitted]}
            model = evidence.model.with_slopes(fitted)
            yield Variant(model, parameters, "alibi_slopes(num_heads)")


def _slopes_of_every_rule(heads: int) -> dict[str, Tensor]:
    index = torch.arange(heads, dtype=torch.float64)
    powers = {"lower": 2 ** math.floor(math.log2(heads)), "upper": 2 ** math.ceil(math.log2(heads))}
    rules: dict[str, Tensor] = {}
    for most in (4.0, 8.0, 16.0):
        words = "" if most == 8.0 else f", bias_max {most:g}"
        rules[f"of the paper's code{words}"] = alibi_slopes(heads, bias_max=most).double()
        rules[f"2 ** (-{most:g} (h + 1) / n){words}"] = 2 ** (-most * (index + 1) / heads)
        rules[f"2 ** (-{most:g} h / n){words}"] = 2 ** (-most * index / heads)
        for name, power in powers.items():
            rules[f"of the {name} power of two{words}"] = 2 ** (-most * (index + 1) / power)
    rules["2 ** -(h + 1)"] = 2 ** -(index + 1)
    rules["2 ** -h"] = 2**-index
    rules["1 / (h + 1)"] = 1 / (index + 1)
    return rules | {f"{name}, reversed": slopes.flip(0) for name, slopes in rules.items()}


SUMMED = {
    "queries": (2,),
    "heads": (1,),
    "batch": (0,),
    "heads and keys": (1, 3),
    "queries and keys": (2, 3),
    "batch, heads, queries and keys": (0, 1, 2, 3),
}


def _softmax_axis(evidence: Evidence) -> Variants:
    for words, axes in SUMMED.items():
        for kind in ("", "hidden by a number", "less the largest of each row"):
            model = evidence.replace_stages(WEIGHTS, _softmax_over_axes, axes, kind)
            details = {"scores": kind} if kind else {}
            repair = "scores.softmax(dim=-1), over keys"
            yield Variant(model, {"axis": words}, repair, details)


def _softmax_over_axes(axes: tuple[int, ...], kind: str, forced: ForcedStage) -> Tensor:
    """Return exponentials of the scores over their sum; equal ones where a number hides them all.

    NumPy code takes off the largest score of each row first, whatever it sums over.
    """
    scores = forced["scores"]
    if kind == "less the largest of each row":
        powers = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    else:
        scores = scores.clamp_min(-LARGE) if kind else scores
        powers = (scores - scores.amax(axes, keepdim=True)).exp().nan_to_num(0.0)
    return (powers / powers.sum(axes, keepdim=True)).nan_to_num(0.0)


def _softmax_dtype(evidence: Evidence) -> Variants:
    wide, has_slopes = torch.float64, slopes_of(evidence.model.settings) is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # The softmax itself, the scores alone, and both scores and weights in the dtype.
        for within, after in ((dtype, dtype), (wide, wide), (wide, dtype)):
            model = evidence.replace_stages(WEIGHTS, _softmax_in_dtypes, dtype, within, after)
            parameters = {"dtype": format_dtype(dtype)}
            yield Variant(model, parameters, "softmax in the dtype of the scores")
            for anchor in ("first", "last") if has_slopes else ():
                anchored = partial(_softmax_of_anchored_scores, anchor, dtype, within, after)
                details = {"bias by distance": f"from the {anchor} key"}
                model = evidence.replace_stages(WEIGHTS, anchored)
                yield Variant(model, parameters, "softmax in the dtype of the scores", details)


def _softmax_of_anchored_scores(
    anchor: str, stored: torch.dtype, within: torch.dtype, after: torch.dtype, forced: ForcedStage
) -> Tensor:
    """Return weights of scores whose bias by distance has a number in common in each row.

    Code adds slope * position of the key, from the first or the last one: the softmax is the same,
    and what is rounded is not.
    """
    slopes, call = slopes_of(forced.settings), forced.call
    if slopes is None:
        return forced.usual_result()
    base = 0 if anchor == "first" else call.key_positions[:, -1:]
    rows = slopes[:, None, None] * (call.query_positions - base)[:, None, :, None]
    shifted = forced.call.with_stages({**call.stages, "scores": forced["scores"] + rows})
    return _softmax_in_dtypes(stored, within, after, replace(forced, call=shifted))


def _softmax_in_dtypes(
    stored: torch.dtype, within: torch.dtype, after: torch.dtype, forced: ForcedStage
) -> Tensor:
    scores = forced["scores"].to(stored).to(within)
    if (sink := forced.model.weights.get("sink")) is None:
        return scores.softmax(-1).nan_to_num(0.0).to(after).double()
    return _join_sink(scores, sink).softmax(-1)[..., :-1].to(after).double()


def _join_sink(scores: Tensor, sink: Tensor) -> Tensor:
    column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1)


MOST_LOGIT = 100.0  # of a learned sink; a fit to outputs without attention has more


def _sinks(evidence: Evidence) -> Variants:
    sink = evidence.model.weights.get("sink")
    repair = "load the sinks: one logit for each head, in the denominator alone"
    if sink is not None:
        yield Variant(evidence.model.with_weights(sink=None), {"sinks": "none"}, repair)
    elif evidence.shows_outputs_alone and _loses_weight(evidence):
        zero = evidence.model.with_weights(sink=torch.zeros(evidence.model.settings.num_heads))
        yield Variant(zero, {"sinks": 0.0}, "leave out the key of zeros", is_step=True)
    stated = _infer_sink_logits(evidence)
    if evidence.shows_outputs_alone:
        heads = evidence.model.sizes["heads"]
        start = torch.zeros(heads) if sink is None else sink
        stated = fit_by_head(evidence, lambda x: evidence.model.with_weights(sink=x), start)
    if stated is not None and bool((stated < MOST_LOGIT).all()):
        model = evidence.model.with_weights(sink=stated)
        repair = repair if sink is not None else "leave the sinks out"
        yield Variant(model, {"sinks": [round(float(logit), 6) for logit in stated]}, repair)


def _loses_weight(evidence: Evidence) -> bool:
    """True if one token has not all the weight: outputs are no linear function of it."""
    runs, crosses = evidence.calls[0].runs, evidence.is_cross_attention
    if runs is None:
        return False
    with suppress(OptionError):  # of a function that fails on one token
        call = runs.single_call(evidence.model, crosses=crosses)
        solution = solve(with_constant(call.inputs.key_source[:, 0]), call.stages["output"][:, -1])
        return solution is not None and solution.residual > STILL
    return False


def _infer_sink_logits(evidence: Evidence) -> Tensor | None:
    """Return a logit for each head: exp(sink) = sum of exp(scores) * (1 / sum of weights - 1)."""
    logits = []
    for call in evidence.calls:
        weights, scores = call.stages.get("weights"), evidence.model.predict_stage("scores", call)
        scores = call.stages.get("scores", scores)
        if weights is None or scores.shape != weights.shape:
            return None
        rest = 1 / weights.sum(-1) - 1
        logits.append((scores.logsumexp(-1) + rest.log()).transpose(0, 1).flatten(1))
    each = torch.cat(logits, 1)
    stated = each.nanmedian(1).values
    return stated if bool(stated.isfinite().all()) else None


def _another_column_cut_off(evidence: Evidence) -> Variants:
    if "sink" in evidence.model.weights:
        repair = "cut off the sink's own column: weights[..., :-1] where it is the last"
        for place in ("first", "last"):
            model = evidence.replace_stages(WEIGHTS, _cut_column, place)
            yield Variant(model, {"cut": f"the {place} column"}, repair)


def _cut_column(place: str, forced: ForcedStage) -> Tensor:
    """Return weights that are one key off: the sink at one end of the keys, the other cut off."""
    if (sink := forced.model.weights.get("sink")) is None:  # another change left it out
        return forced.usual_result()
    columns = _join_sink(forced["scores"], sink)
    columns = columns if place == "first" else columns.roll(1, -1)
    weights = columns.softmax(-1)
    return weights[..., 1:] if place == "first" else weights[..., :-1]


# From which distance on all share the last bucket, numbers that people choose first.
MAX_DISTANCES = (*(2**n for n in range(12)), *range(1, 400))

Buckets = Callable[[Tensor], Tensor]  # of distances, key less query
Bias = Callable[[Tensor, Tensor], Tensor]  # of distances (batch, queries, keys) and the table


def _bias_otherwise(evidence: Evidence, bias: Bias) -> AttentionModel:
    """Return the model with another bias, (batch, heads, queries, keys), in place of its own."""

    def score(forced: ForcedStage) -> Tensor:
        table = forced.model.weights.get("distances")
        if table is None:  # another cause has left the bias out
            return forced.usual_result()
        bare = forced.model.with_settings(score_bias=None).with_weights(distances=None)
        added = bias(key_query_distances(forced.call)[:, 0], table)
        return replace(forced, model=bare).usual_result() + added

    return evidence.replace_stages(SCORES, score)


def _look_up(buckets: Buckets, distances: Tensor, table: Tensor) -> Tensor:
    return table[buckets(distances)].permute(0, 3, 1, 2)


def _buckets_of_rule(rule: BucketRule, max_exact: int | None = None) -> Buckets:
    count, most = rule.buckets, rule.max_distance
    assert isinstance(count, int)
    assert isinstance(most, int)

    def buckets(distances: Tensor) -> Tensor:
        both = bool(rule.bidirectional)
        return bucket_of_distances(distances, count, most, bidirectional=both, max_exact=max_exact)

    return buckets


def _relative_bias_buckets(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.buckets
    if rule is None:
        return
    reach = max(call.key_positions.shape[1] for call in evidence.calls)
    distances = torch.arange(1 - reach, reach)
    tried = {tuple(_buckets_of_rule(rule)(distances).tolist())}
    repair = f"buckets={rule.buckets}, max_distance={rule.max_distance}"
    repair = f"T5Bias({repair}, bidirectional={rule.bidirectional})"
    for words, buckets in _list_buckets(rule):
        numbers = tuple(buckets(distances).tolist())
        if numbers not in tried:
            tried.add(numbers)
            model = _bias_otherwise(evidence, partial(_look_up, buckets))
            yield Variant(model, words, repair)


def _list_buckets(rule: BucketRule) -> Iterator[tuple[dict[str, int], Buckets]]:
    count, most, both = rule.buckets, rule.max_distance, bool(rule.bidirectional)
    assert isinstance(count, int)
    assert isinstance(most, int)
    for is_two_sided in (both, not both):
        words = {} if is_two_sided == both else {"bidirectional": is_two_sided}
        turned = replace(rule, bidirectional=is_two_sided)
        for fewer in (count, *(2**n for n in range(1, count.bit_length()) if 2**n < count)):
            near = count_unshared_distances(fewer, bidirectional=is_two_sided)
            if 0 < near < most:
                number = {} if fewer == count else {"buckets": fewer}
                yield {**words, **number}, _buckets_of_rule(replace(turned, buckets=fewer))
        for exact in range(1, min((count // 2 if is_two_sided else count) + 1, most)):
            yield {**words, "max_exact": exact}, _buckets_of_rule(turned, exact)
        near = count_unshared_distances(count, bidirectional=is_two_sided)
        for distance in MAX_DISTANCES:
            if distance > near:
                changed = replace(turned, max_distance=distance)
                yield {**words, "max_distance": distance}, _buckets_of_rule(changed)


def _relative_bias_reversed(evidence: Evidence) -> Variants:
    rule, places = evidence.model.settings.buckets, evidence.model.settings.places
    for terms in _list_turned(places.terms) if places else ():
        turned = dict.fromkeys(terms, -1)
        model = evidence.replace_stages(SCORES, _add_places, turned, 1.0)
        repair = f"the row of i - j, query less key, in {' and '.join(terms)}"
        yield Variant(model, {"distance": "key less query", "of": " and ".join(terms)}, repair)
    if rule is not None:
        usual = _buckets_of_rule(rule)
        bias = partial(_look_up, lambda distances: usual(-distances))
        repair = "relative_position = key_position[None, :] - query_position[:, None]"
        model = _bias_otherwise(evidence, bias)
        yield Variant(model, {"distance": "query less key"}, repair)
        model = evidence.model.with_weights(distances=evidence.model.weights["distances"].flip(1))
        yield Variant(model, {"heads": "in reverse order"}, "table.flip(1), (buckets, heads)")


def _list_turned(terms: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the terms of DeBERTa that code may turn: all, or one of two, as the paper writes."""
    return [terms, *((term,) for term in terms if len(terms) > 1)]


def _relative_bias_reshaped(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.buckets
    if rule is None:
        return
    table = evidence.model.weights["distances"]
    buckets, heads = table.shape
    tables = {
        "as if it were (heads, buckets)": table.reshape(heads, buckets).T,
        "transposed and read as (buckets, heads)": table.T.reshape(buckets, heads),
    }
    if buckets == heads:
        tables["transposed"] = table.T
    for words, other in tables.items():
        model = evidence.model.with_weights(distances=other.contiguous())
        repair = "the table is (buckets, heads): transpose it, do not reshape it"
        yield Variant(model, {"table": words}, repair)
    bias = partial(_reshape_bias, _buckets_of_rule(rule))
    repair = "bias.permute(2, 0, 1), from (queries, keys, heads), in place of a reshape"
    parameters = {"bias": "(queries, keys, heads), read as (heads, queries, keys)"}
    yield Variant(_bias_otherwise(evidence, bias), parameters, repair)


def _reshape_bias(buckets: Buckets, distances: Tensor, table: Tensor) -> Tensor:
    bias = table[buckets(distances)]
    batch, queries, keys, heads = bias.shape
    return bias.reshape(batch, heads, queries, keys)


ROUND, NEAR = 3, 1e-5  # digits of usual rates, and how near one is read


@dataclass(frozen=True)
class _Dropped:
    """Entries of the weights or the output of one call that were kept, and their factor."""

    kept: Tensor
    factor: float


def _dropout_left_on(evidence: Evidence) -> Variants:
    read = _compare_weights
    if evidence.shows_outputs_alone:
        most, read = count_readable_tokens(evidence.model), _read_outputs
        if any(call.key_positions.shape[1] > most for call in evidence.calls):
            return
    dropped = {call.key: each for call in evidence.calls if (each := read(evidence.model, call))}
    if len(dropped) < len(evidence.calls):
        return
    model, rates = evidence.model, dict[str, float]()
    for part, (stage, name) in enumerate((("weights", "p"), ("output", "p of the output"))):
        of_calls = {key: each[part] for key, each in dropped.items()}
        rate = _rate(each.factor for each in of_calls.values())
        kept = {key: each.kept for key, each in of_calls.items()}
        model = model.with_stage_function(stage, partial(_drop, kept, 1 / (1 - rate)))
        rates |= {name: rate} if rate else {}
    drops_output = not all(bool(each[1].kept.all()) for each in dropped.values())
    if drops_output and [*rates] == ["p"]:  # without a bias, which would tell the factors apart
        rates = {"p of both": rates["p"]}
    if rates:
        yield Variant(model, rates, "call eval(), or pass dropout_p=0.0 outside of training")


def _compare_weights(model: AttentionModel, call: RecordedCall) -> tuple[_Dropped, _Dropped] | None:
    actual, usual = call.stages.get("weights"), model.predict_stage("weights", call)
    if actual is None or actual.shape != usual.shape:
        return None
    kept = actual != 0
    ratios = (actual / usual)[kept & (usual > 0)]
    return _Dropped(kept, float(ratios.median())), _Dropped(torch.ones(1).bool(), 1.0)


def count_readable_tokens(model: AttentionModel) -> int:
    """Return the largest number of tokens whose weights an output shows, each one."""
    heads, out_dim = model.sizes["heads"], model.sizes["out_dim"]
    return (out_dim - 1) // (2 * heads)  # half the channels may be dropped too


def _read_outputs(model: AttentionModel, call: RecordedCall) -> tuple[_Dropped, _Dropped] | None:
    """Return what the output of a call was made of; None where it does not show that."""
    (wo, bias), output = model.projection("o"), call.stages["output"]
    bare = RecordedCall(call.inputs, {})
    forced = model.prepare_stage("output", bare)
    if forced.result.shape != output.shape or not output.isfinite().all() or not output.any():
        return None
    keys = bare.key_positions.shape[1]
    weights = model.predict_stage("weights", bare)
    values = repeat_kv_heads(forced.of_all_calls("v"), heads=len(wo))
    parts = torch.einsum("bhqj,bhjd,hde->bqehj", weights, values, wo).flatten(3)
    kept_output = output != 0
    # Dropout of the output alone multiplies the bias too.
    has_bias = bias is not None and bool(bias.any())
    if bias is not None and has_bias:
        parts = torch.cat([parts, bias[:, None].expand(*parts.shape[:3], 1)], 3)
    sizes = torch.linalg.lstsq(parts * kept_output[..., None], output[..., None], driver="gelsd")
    read = sizes.solution[..., 0]
    of_output = float(read[..., -1].median()) if has_bias else 1.0
    read = read[..., : len(wo) * keys].unflatten(2, (len(wo), keys)).transpose(1, 2)
    kept = read > float(read.max()) / 2
    factor = float(read[kept].median()) / of_output
    if not has_bias and not kept_output.all() and (kept | (weights == 0)).all():
        factor, of_output = 1.0, factor
    return _Dropped(kept, factor), _Dropped(kept_output, of_output)


def _rate(factors: Iterable[float]) -> float:
    """Return the share that is dropped where the others are multiplied by these; 0 for none."""
    rate = 1 - 1 / float(torch.tensor([*factors]).double().median())
    usual = round(rate, ROUND)
    rate = usual if abs(rate - usual) < NEAR else rate
    return rate if 0 < rate < 1 else 0.0


def _drop(kept: Mapping[object, Tensor], factor: float, forced: ForcedStage) -> Tensor:
    usual, left = forced.usual_result(), kept.get(forced.call.key)
    if left is None or left.shape != usual.shape:
        return usual
    return torch.where(left, factor * usual, 0.0)

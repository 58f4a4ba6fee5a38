"""Stages of attention as records: what a stage is made of, its formula, and its rounding.

A bound holds where all that a stage is made of is the same on both sides. A sum of n products is
off by at most n u times the sum of their absolute values, where u is half the distance of
neighbouring numbers near 1 (Higham 2002, Accuracy and Stability of Numerical Algorithms, section
3.1). Products of 16-bit tensors are summed in float32, so that u is that of float32 there, and each
stored result is off by up to its own U (docs/budget.md). Frequencies of a rotation are float32 in
most libraries, so an angle is off by its size times the u of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.function import latent, lines, rotary, stages
from headwise.function.differential import (
    difference_factor,
    halve_pairs,
    pair_values,
    subtract_pairs,
)
from headwise.function.disentangled import place_terms, place_vectors
from headwise.function.distance import slopes_of
from headwise.function.gate import output_gate
from headwise.function.norm import change_values, normalise_heads
from headwise.function.rounding import Roundoff
from headwise.function.spec import (
    AttentionSpec,
    DifferentialRule,
    Latent,
    NormRule,
    RotaryRule,
    TemperatureRule,
    ValueRule,
)
from headwise.function.temperature import query_factors
from headwise.function.weights import KINDS, LAMBDAS, PLACED, SHARED

FLOAT32 = Roundoff.of(torch.float32, with_reference=False).u


class Given(Protocol):
    """All that the formula of a stage reads in one call of an attention.

    A search computes stages by the ten thousand, so each part is made when a formula reads it.

    Attributes:
        role: whose heads the stage has.
        settings: of the attention.
        tensors: those that the record names, None for one that is absent.
        parts: the stages before it; keys and values of all calls.
        tokens: (batch, length, width), of keys and values for their stages, else of queries.
        positions: of these tokens, (batch, length).
        key_positions: of all keys, (batch, keys).
        distances: of keys from queries, (batch, 1, queries, keys).
        mask: the caller's.
        dtype: of the arithmetic that is bounded.
        compute: returns a pure function of its arguments, and may remember it.
        result: the stage, whose rounding is bounded.
        at: returns what is given for another stage of the call.
    """

    @property
    def role(self) -> str: ...
    @property
    def settings(self) -> AttentionSpec: ...
    @property
    def tensors(self) -> Sequence[Any]: ...
    @property
    def parts(self) -> Sequence[Tensor]: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def key_positions(self) -> Tensor: ...
    @property
    def distances(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def compute(self) -> Callable[..., Tensor]: ...
    @property
    def result(self) -> Tensor: ...
    def at(self, stage: str, /) -> Given: ...


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of attention: what it is made of, its formula, its rounding and its lines of code."""

    name: str  # as reports print it
    role: str = "o"  # whose heads it has; "o" for those of the output projection
    before: tuple[str, ...] = ()  # the stages that it is computed from, in order
    cached: str = ""  # the one of them that is read of earlier calls too; "" for none
    tensors: tuple[str, ...]  # canonical ones that it uses
    compute: Callable[[Given], Tensor]
    bound: Callable[[Given, Roundoff], Tensor]  # of the rounding of one side
    write: tuple[lines.LinePlace, ...]  # its lines in order; faults mostly are in the last

    @property
    def is_projection(self) -> bool:
        """True if it multiplies by the weights of its role."""
        return KINDS[0].get(self.role) in self.tensors


# ---- q, k, v and the output ----------------------------------------------------------------------


def _project(given: Given) -> Tensor:
    return given.compute(stages.project_heads, given.tokens, *given.tensors)


def _bound_projection(given: Given, r: Roundoff) -> Tensor:
    return _bound_linear(r, given.tokens, *given.tensors)


def _bound_linear(r: Roundoff, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sizes = torch.einsum("ble,hde->bhld", x.double().abs(), weight.abs())
    sizes = sizes if bias is None else sizes + bias.abs()[:, None]
    return (x.shape[-1] * r.u + r.U) * sizes


def _project_output(given: Given) -> Tensor:
    return given.compute(stages.project_output, *given.parts, *given.tensors)


def _bound_output(given: Given, r: Roundoff) -> Tensor:
    (heads,), (weight, bias) = given.parts, given.tensors
    sizes: Tensor = stages.merge_heads(heads.abs()) @ weight.abs().flatten(0, 1)
    sizes = sizes if bias is None else sizes + bias.abs()
    return (heads.shape[1] * heads.shape[3] * r.u + 2 * r.U) * sizes


# ---- latents ------------------------------------------------------------------------------------


def _compress(given: Given) -> Tensor:
    weight, bias, norm = given.tensors
    return given.compute(
        _compress_tokens, given.settings.compressed, given.tokens, weight, bias, norm
    )


def _compress_tokens(rule: Latent, x: Tensor, *tensors: Tensor | None) -> Tensor:
    weight, bias, norm = tensors
    assert weight is not None
    return latent.compress(rule, x, weight, bias, norm)[:, None]


def _bound_latent(given: Given, r: Roundoff) -> Tensor:
    return _bound_compressed(given, r, given.result[:, 0], *given.tensors)[:, None]


def _bound_compressed(
    given: Given, r: Roundoff, z: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None
) -> Tensor:
    """Return the bound of a latent: of its projection, scaled by the norm, and of the norm."""
    bound = _bound_linear(r, given.tokens, weight[None], None if bias is None else bias[None])
    before: Tensor = given.compute(_project_tokens, given.tokens, weight, bias)
    gain: Tensor = z.norm(dim=-1, keepdim=True) / before.norm(dim=-1, keepdim=True).clamp_min(
        1e-300
    )
    if norm is not None:
        gain = gain * norm.abs().amax() / norm.square().mean().sqrt()
    size = z.abs().amax(-1, keepdim=True)
    return 2 * gain * bound[:, 0].amax(-1, keepdim=True) + (z.shape[-1] * r.u + 8 * r.U) * size


def _project_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return stages.project_heads(x, weight[None], None if bias is None else bias[None])[:, 0]


def _project_shared_key(given: Given) -> Tensor:
    return given.compute(_project_tokens, given.tokens, *given.tensors)[:, None]


def _bound_shared_key(given: Given, r: Roundoff) -> Tensor:
    weight, bias = given.tensors
    return _bound_linear(r, given.tokens, weight[None], None if bias is None else bias[None])


def _query_latent(given: Given) -> Tensor:
    """Return what queries are projected from."""
    weight, bias, norm = given.tensors[2:]
    if weight is None:
        return given.tokens
    rule = given.settings.compressed
    return given.compute(_compress_tokens, rule, given.tokens, weight, bias, norm)[:, 0]


def _project_queries(given: Given) -> Tensor:
    return given.compute(stages.project_heads, _query_latent(given), *given.tensors[:2])


def _bound_queries(given: Given, r: Roundoff) -> Tensor:
    a, (weight, bias, *of_latent) = _query_latent(given), given.tensors
    bound = _bound_linear(r, a, weight, bias)
    if of_latent[0] is None:
        return bound
    error = _bound_compressed(given, r, a, *of_latent)
    return bound + torch.einsum("ble,hde->bhld", error.expand_as(a), weight.abs())


def _expand_keys(given: Given) -> Tensor:
    c, shared = given.parts
    return given.compute(_expand_keys_of_heads, c, shared, *given.tensors)


def _expand_keys_of_heads(c: Tensor, shared: Tensor, *tensors: Tensor) -> Tensor:
    return latent.expand_keys(c[:, 0], shared, *tensors)


def _bound_keys(given: Given, r: Roundoff) -> Tensor:
    c, shared = given.parts
    bound = _bound_linear(r, c[:, 0], *given.tensors)
    exact = torch.zeros_like(shared) + r.U * shared.abs()
    return torch.cat((exact.expand(-1, bound.shape[1], -1, -1), bound), -1)


def _expand_values(given: Given) -> Tensor:
    return given.compute(_project_latent, given.parts[0], *given.tensors)


def _project_latent(c: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return stages.project_heads(c[:, 0], weight, bias)


def _bound_values(given: Given, r: Roundoff) -> Tensor:
    return _bound_linear(r, given.parts[0][:, 0], *given.tensors)


# ---- norms and rotation --------------------------------------------------------------------------


def _norms_of(role: str) -> tuple[str, ...]:
    return tuple(f"{role}_{kind}{bias}" for bias in ("", "_bias") for kind in ("norm", "norms"))


def _normalise_before(given: Given) -> Tensor:
    x, bound = _normalise(given, given.parts[0], "before"), given.settings.bound
    return x if bound is None else given.compute(torch.clamp, x, -bound, bound)


def _normalise(given: Given, x: Tensor, place: str) -> Tensor:
    rule = given.settings.norm
    if rule is None or rule.place != place:
        return x
    weight, rows, bias, bias_rows = given.tensors
    held = (rows, bias_rows) if weight is None else (weight, bias)
    return given.compute(normalise_heads, rule, x, *held)


def _bound_norm(given: Given, r: Roundoff) -> Tensor:
    x = given.result
    count = x.shape[1] * x.shape[3]
    # a mean that is subtracted cancels digits of the largest entry
    return (count * r.u + 8 * r.U) * x.abs().amax((1, 3), keepdim=True).expand_as(x)


def _rotate(given: Given) -> Tensor:
    (x,), rule = given.parts, given.settings.rotation
    if rule is not None:
        offset, length = rule.q_offset if given.role == "q" else rule.k_offset, None
        if rule.scaling is not None and rule.scaling.depends_on_length:
            length = given.key_positions.amax(1, keepdim=True) + 1
        x = given.compute(_rotate_from_offset, rule, x, given.positions, offset, length)
    x = _normalise(given, x, "after")
    temperature = given.settings.temperature
    if given.role == "q" and isinstance(temperature, TemperatureRule):
        x = x * given.compute(query_factors, temperature, given.positions, x.dtype)
    return x


def _rotate_from_offset(
    rule: RotaryRule, x: Tensor, positions: Tensor, offset: float, length: Tensor | None
) -> Tensor:
    return rotary.rotate_by_rule(rule, x, positions + offset, length)


def _bound_rotation(given: Given, r: Roundoff) -> Tensor:
    bound, rule = _bound_norm(given, r), given.settings.rotation
    if rule is None or not rule.width:
        return bound
    largest = given.positions.abs().max() * rotary.frequencies_of_rule(rule).max()
    size = given.parts[0].abs().amax(3, keepdim=True)
    return bound + (8 * r.U + FLOAT32 * largest) * rule.amplitude * size.expand_as(given.result)


# ---- scores and weights --------------------------------------------------------------------------


def scale_products(given: Given) -> Tensor:
    """Return scaled and softcapped products of queries and keys."""
    settings = given.settings
    options = {"scale": settings.factor, "softcap": settings.cap}
    return given.compute(stages.scaled_products, *given.parts, **options)


def _score(given: Given) -> Tensor:
    products, table = scale_products(given), given.tensors[0]
    if given.settings.places is not None and (terms := scaled_place_terms(given)) is not None:
        products = products + terms
    return given.compute(
        _bias_and_hide, given.settings, products, given.distances, given.mask, table
    )


def scaled_place_terms(given: Given, **changed: Any) -> Tensor | None:
    """Return what DeBERTa adds to scaled products, None for nothing.

    ``changed`` are distances of one term, "c2p" or "p2c", in place of the usual ones.
    """
    if (rule := given.settings.places) is None:
        return None
    (q, k), (table, norm, bias, *projections) = given.parts, given.tensors[1:]
    vectors = given.compute(place_vectors, rule, table, norm, bias)[None]
    roles = {"p2c": ("q", projections[:2]), "c2p": ("k", projections[2:])}
    terms = None
    for name in rule.terms:
        role, held = roles[name]
        used = given.at(role).tensors[:2] if rule.is_shared else held
        projected = given.compute(stages.project_heads, vectors, *used)
        pair = (projected, None) if name == "p2c" else (None, projected)
        distances = changed.get(name, given.distances)
        term = given.settings.factor * given.compute(place_terms, rule, q, k, distances, *pair)
        terms = term if terms is None else terms + term
    return terms


def _bias_and_hide(
    settings: AttentionSpec,
    products: Tensor,
    distances: Tensor,
    mask: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    bias = stages.distance_bias(settings, distances, table)
    scores = products if bias is None else products + bias
    return scores.masked_fill(~stages.visible_by_distance(settings, distances, mask), -torch.inf)


def largest_bias(slopes: Tensor, key_positions: Tensor) -> Tensor:
    """Return the largest of what code may add to a score by position, (batch, heads, 1, keys).

    A row may have a number in common, so that code adds slope * position of the key.
    """
    ends = key_positions.amax(-1, keepdim=True)
    farthest = torch.maximum(key_positions, ends - key_positions)
    return slopes.abs()[:, None, None] * farthest[:, None, None]


def _bound_products(given: Given, r: Roundoff, scores: Tensor | None = None) -> Tensor:
    (q, keys), settings = given.parts, given.settings
    keys = stages.repeat_kv_heads(keys, heads=q.shape[1])
    bound = (q.shape[-1] * r.u + 8 * r.U) * (q.abs() @ keys.abs().mT * abs(settings.factor))
    if scores is not None and scores.shape == bound.shape:
        # numbers that are added to products round at their size
        bound = bound + 8 * r.U * scores.abs().nan_to_num(0.0, posinf=0.0)
    if settings.places is not None:
        bound = bound + _bound_place_terms(given, r)
    if (slopes := slopes_of(settings)) is not None:
        bound = bound + (8 * r.U + FLOAT32) * largest_bias(slopes, given.key_positions)
    return bound


def _bound_place_terms(given: Given, r: Roundoff) -> Tensor:
    """Return a bound for the largest terms: vectors, their projections and their products."""
    (q, k), (table, norm, bias, *projections) = given.parts, given.tensors[1:]
    rule = given.settings.places
    assert rule is not None
    vectors = given.compute(place_vectors, rule, table, norm, bias)[None]
    bound = q.new_zeros(())
    for x, role, held in ((k, "q", projections[:2]), (q, "k", projections[2:])):
        weight, added = given.at(role).tensors[:2] if rule.is_shared else held
        if weight is not None:
            error = _bound_linear(r, vectors.abs() + 8 * r.U, weight, added)
            size = stages.project_heads(vectors, weight, added).abs()
            error = (2 * error + (x.shape[-1] * r.u + 8 * r.U) * size).amax((2, 3))
            bound = bound + error.amax() * x.abs().sum(-1).amax()
    return abs(given.settings.factor) * bound


def _bound_scores(given: Given, r: Roundoff) -> Tensor:
    return _bound_products(given, r, given.result)


def _softmax(given: Given) -> Tensor:
    return given.compute(stages.weights_from_scores, *given.parts, *given.tensors)


def _bound_softmax(given: Given, r: Roundoff) -> Tensor:
    (s,), weights = given.parts, given.result
    largest = s.masked_fill(~s.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    return (s.shape[-1] * r.u + (8 + 4 * largest) * r.U) * weights + torch.finfo(given.dtype).tiny


# ---- head outputs --------------------------------------------------------------------------------


def _mix(given: Given) -> Tensor:
    weights, v = given.parts
    outputs = given.compute(stages.mix_values, weights, _mixed_values(given, v))
    if (rule := given.settings.pairs) is not None:
        outputs = given.compute(subtract_pairs, rule, outputs, _difference_factor(given))
    outputs = _normalise_outputs(given, outputs)
    gates = output_gates(given)
    return outputs if gates is None else given.compute(torch.mul, outputs, gates)


def changed_values(given: Given, v: Tensor) -> Tensor:
    """Return projected values as they are mixed."""
    values, bound = given.settings.values, given.settings.bound
    rule = values if isinstance(values, ValueRule) else None
    return v if rule is None and bound is None else given.compute(change_values, rule, bound, v)


def _mixed_values(given: Given, v: Tensor) -> Tensor:
    """Return the values of each kv head; of differential attention, those of both of a pair."""
    v = changed_values(given, v)
    return v if given.settings.pairs is None else given.compute(pair_values, v)


def _difference_factor(given: Given) -> Tensor:
    return given.compute(difference_factor, given.settings.pairs, *given.tensors[4:])


def _normalise_outputs(given: Given, outputs: Tensor) -> Tensor:
    rule, held = given.settings.output_norm, given.tensors[2:4]
    if not isinstance(rule, NormRule):
        return outputs
    normed = given.compute(normalise_heads, rule, outputs, *held)
    # A query that attends to nothing has head outputs of 0.
    return normed if held[1] is None else normed * (outputs != 0).any(3, keepdim=True).any(1, True)


def output_gates(given: Given) -> Tensor | None:
    """Return the factors of the head outputs, None without an output gate."""
    (weight, bias), kind = given.tensors[:2], given.settings.output_gate or "channel"
    return None if weight is None else given.compute(output_gate, given.tokens, weight, bias, kind)


def _bound_mix(given: Given, r: Roundoff) -> Tensor:
    weights, values = given.parts
    values = stages.repeat_kv_heads(_mixed_values(given, values), heads=weights.shape[1]).abs()
    # A fused kernel computes scores and weights again, with a rounding of its own.
    again = _bound_softmax(given.at("weights"), r)
    products = _bound_products(given.at("scores"), r)
    again = again + 2 * weights.abs() * products.amax(-1, keepdim=True)
    is_changed = given.settings.values or given.settings.bound is not None
    steps = 10 if is_changed else 2  # results that are rounded
    bound = (weights.shape[-1] * r.u + steps * r.U) * (weights.abs() @ values) + again @ values
    if given.settings.pairs is not None:
        bound = _bound_pairs(given, r, given.settings.pairs, bound)
        values = halve_pairs(values[:, : len(values[0]) // 2])
    outputs, rule = weights.abs() @ values, given.settings.output_norm
    if isinstance(rule, NormRule):
        bound, outputs = _bound_normalised(given, r, rule, bound)
    if (gates := output_gates(given)) is None:
        return bound
    # A sigmoid is steepest at 0, with 1/4, and its slope is at most its value; that of a softplus
    # is at most 1.
    size, kind = _bound_linear(r, given.tokens, *given.tensors[:2]), str(given.settings.output_gate)
    steep = size if kind.endswith("softplus") else torch.minimum(size / 4, size * gates)
    return bound * gates + (steep + 6 * r.U * gates) * outputs


def _bound_pairs(given: Given, r: Roundoff, rule: DifferentialRule, bound: Tensor) -> Tensor:
    """Return the bound of normalised differences, from that of both products of each pair."""
    outputs = given.compute(stages.mix_values, given.parts[0], _mixed_values(given, given.parts[1]))
    factor = _difference_factor(given)
    (a, b), (of_a, of_b) = outputs.chunk(2, 1), bound.chunk(2, 1)
    bound = of_a + factor.abs() * of_b + (8 * r.U + FLOAT32) * (a.abs() + factor.abs() * b.abs())
    pairs = a - factor * b
    root = (pairs.square().mean(-1, keepdim=True) + rule.eps).sqrt()
    size = (pairs.shape[-1] * r.u + 8 * r.U) * pairs.abs().amax(-1, keepdim=True)
    return halve_pairs(
        ((1 - rule.init) / root * (2 * bound.amax(-1, keepdim=True) + size)).expand_as(pairs)
    )


def _bound_normalised(
    given: Given, r: Roundoff, rule: NormRule, bound: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bound of normalised head outputs, and their size."""
    v = changed_values(given, given.parts[1])
    outputs = given.compute(stages.mix_values, given.parts[0], v)
    normed = _normalise_outputs(given, outputs).abs()
    axes = (1, 3) if rule.over == "width" else (3,)
    root = outputs.square().mean(axes, keepdim=True).sqrt().clamp(min=1e-30)
    count = outputs.shape[3] * (outputs.shape[1] if rule.over == "width" else 1)
    weight = given.tensors[2]
    slope = (1.0 if weight is None else weight.abs()[:, None]) / root
    # a change of all channels moves their root by as much
    moved = 2 * slope * bound.amax(axes, keepdim=True)
    return moved + (count * r.u + 8 * r.U) * normed.amax(axes, keepdim=True), normed


# ---- all stages ----------------------------------------------------------------------------------

_PROJECTIONS = (
    Stage(
        name=role,
        role=role,
        tensors=(f"w{role}", f"b{role}"),
        compute=_project,
        bound=_bound_projection,
        write=(lines.PROJECTIONS,),
    )
    for role in "qkv"
)
_NORMS = (
    Stage(
        name=f"{role} after norm",
        role=role,
        before=(role,),
        tensors=_norms_of(role),
        compute=_normalise_before,
        bound=_bound_norm,
        write=(lines.NORMS,),
    )
    for role in "qk"
)
_ROTATIONS = (
    Stage(
        name=f"{role} after rotary",
        role=role,
        before=(f"{role} after norm",),
        tensors=_norms_of(role),
        compute=_rotate,
        bound=_bound_rotation,
        write=(lines.FREQUENCIES, lines.ANGLES, lines.ROTATION),
    )
    for role in "qk"
)
_ATTENTION = (
    Stage(
        name="scores",
        before=("q after rotary", "k after rotary"),
        cached="k after rotary",
        tensors=("distances", *SHARED[1:], *PLACED),
        compute=_score,
        bound=_bound_scores,
        write=(lines.GROUPS, lines.SCORES, lines.SOFTCAP, lines.BIAS, lines.MASK),
    ),
    Stage(
        name="weights",
        before=("scores",),
        tensors=("sink",),
        compute=_softmax,
        bound=_bound_softmax,
        write=(lines.SOFTMAX,),
    ),
    Stage(
        name="head outputs",
        before=("weights", "v"),
        cached="v",
        tensors=("wg", "bg", "o_norms", "o_norms_bias", *LAMBDAS),
        compute=_mix,
        bound=_bound_mix,
        write=(lines.MIX,),
    ),
    Stage(
        name="output",
        before=("head outputs",),
        tensors=("wo", "bo"),
        compute=_project_output,
        bound=_bound_output,
        write=(lines.OUTPUT,),
    ),
)
_USUAL = {each.name: each for each in (*_PROJECTIONS, *_NORMS, *_ROTATIONS, *_ATTENTION)}
_LATENTS = {
    each.name: each
    for each in (
        Stage(
            name="c",
            role="c",
            tensors=("wc", "bc", "c_norm"),
            compute=_compress,
            bound=_bound_latent,
            write=(lines.PROJECTIONS,),
        ),
        Stage(
            name="k_r",
            role="r",
            tensors=("wr", "br"),
            compute=_project_shared_key,
            bound=_bound_shared_key,
            write=(lines.PROJECTIONS,),
        ),
    )
}
# The stages that differ where keys and values come from a latent.
_OF_LATENTS = {
    "q": replace(
        _USUAL["q"],
        tensors=("wq", "bq", "wa", "ba", "a_norm"),
        compute=_project_queries,
        bound=_bound_queries,
    ),
    "k": replace(_USUAL["k"], before=("c", "k_r"), compute=_expand_keys, bound=_bound_keys),
    "v": replace(_USUAL["v"], before=("c",), compute=_expand_values, bound=_bound_values),
}
# All stages by name, in order; the first two where keys and values come from a latent alone.
STAGES = _LATENTS | _USUAL
_WITH_LATENT = _LATENTS | _USUAL | _OF_LATENTS


def stages_of(settings: AttentionSpec) -> Mapping[str, Stage]:
    """Return the stages of a function by name, in order."""
    return _USUAL if settings.compressed is None else _WITH_LATENT


# The role of a projection -> its stage.
STAGE_OF = {stage.role: stage.name for stage in _USUAL.values() if stage.is_projection}

"""Causes in the rotation of queries and keys."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from headwise.diagnosis.causes.decoding import read_other_cache
from headwise.diagnosis.causes.evidence import Evidence, Family, Search, Variant, Variants
from headwise.diagnosis.simulation.gaps import WHOLE, all_heads_agree_within_rounding
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.function.rotary import (
    count_channels,
    frequencies_of_rule,
    has_frequencies,
    rotate_by_angles,
    rotate_by_rule,
)
from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YarnScaling
from headwise.function.spec import Pairing, RotaryRule, TemperatureKind, TemperatureRule
from headwise.function.temperature import query_factors
from headwise.identify.catalogue import POSSIBLE, ROTATED, STATED
from headwise.identify.moves.move import format_dtype


def _of_rotation(search: Callable[[Evidence, RotaryRule], Variants]) -> Search:
    """Return the search that changes a rotation; a model without one has no such variant."""

    def search_rotation(evidence: Evidence) -> Variants:
        rotary = evidence.model.settings.rotation
        for each in () if rotary is None else search(evidence, rotary):
            if isinstance(each, Family):
                starts = tuple(n for n in each.starts if _can_turn(each.make(n).model))
                yield from (replace(each, starts=starts),) if starts else ()
            elif _can_turn(each.model):
                yield each

    search_rotation.__name__ = search.__name__
    return search_rotation


def _can_turn(model: AttentionModel) -> bool:
    rule = model.settings.rotation
    return rule is None or has_frequencies(rule)


LEAST_STATED = 1e4  # a base of configs, which have 1 or 2 digits before their zeros


@_of_rotation
def _rotary_theta(evidence: Evidence, rotary: RotaryRule) -> Variants:
    repair = f"Rotary(theta={rotary.theta:g})"

    def make(theta: float) -> Variant:
        is_stated = theta >= LEAST_STATED and math.isclose(theta, float(f"{theta:.2g}"))
        model = evidence.model.with_rotary(theta=theta)
        return Variant(model, {"theta": theta}, repair, rank=STATED if is_stated else POSSIBLE)

    yield Family(make, tuple(10.0 ** (n / 4) for n in range(4, 32)), is_log=True)


PAIRINGS: tuple[Pairing, ...] = ("half-split", "interleaved")
THETAS = tuple(10.0 ** (n / 2) for n in range(6, 17))  # from which the fit of a base starts


def _rotary_missing(evidence: Evidence) -> Variants:
    if evidence.model.settings.rotation is not None:
        model = evidence.model.with_settings(rotary=None)
        yield Variant(model, {}, "rotate q and k: Rotary(...)")
        if evidence.has_later_calls:
            model = read_other_cache(evidence, "k", _leave_cached_keys)
            yield Variant(
                model, {"of": "cached keys"}, "store keys in the cache as they are rotated"
            )
        return
    width = evidence.model.sizes["head_dim"] // 2 * 2
    for pairing in PAIRINGS:

        def make(theta: float, pairing: Pairing = pairing) -> Variant:
            rotary = RotaryRule(theta, width, pairing, scaling=None)
            model = evidence.model.with_settings(rotary=rotary)
            parameters = {"rotary": pairing, "theta": theta}
            return Variant(model, parameters, "leave out the rotation", is_unexpected=True)

        yield Family(make, THETAS, is_log=True)


def _leave_cached_keys(keys: Tensor, forced: ForcedStage) -> Tensor:
    """Return keys of which those of earlier calls are as they were before the rotation."""
    past, plain = forced.call.past_key_count, forced.of_all_calls("k after norm")
    if plain.shape != keys.shape:  # another cause repeats heads
        return keys
    return torch.cat([plain[:, :, :past], keys[:, :, past:]], 2)


@_of_rotation
def _rotary_pairing(evidence: Evidence, rotary: RotaryRule) -> Variants:
    other: Pairing = "interleaved" if rotary.pairing == "half-split" else "half-split"
    model = evidence.model.with_rotary(pairing=other, span=None)
    repair = f'Rotary(pairing="{rotary.pairing}")'
    yield Variant(model, {"pairing": other}, repair)
    for channels, tables in ((rotary.pairing, other), (other, rotary.pairing)):
        model = evidence.model.with_rotary(pairing=channels, span=None)
        for stage in ROTATED:
            model = model.with_stage_function(stage, partial(_rotate_by_tables_of, tables))
        yield Variant(model, {"pairing": channels, "pairing of the tables": tables}, repair)


def _rotate_by_tables_of(tables: Pairing, forced: ForcedStage) -> Tensor:
    if (rule := forced.settings.rotation) is None:
        return forced.usual_result()
    angles = _positions_of(forced) * frequencies_of_rule(rule)
    return _rotate_with_tables(forced, angles.cos(), angles.sin(), tables)


@_of_rotation
def _rotary_partial_width(evidence: Evidence, rotary: RotaryRule) -> Variants:
    head_dim = evidence.model.sizes["head_dim"]
    for width in range(2, head_dim + 1, 2):
        if width != rotary.width:
            for base in sorted({None, rotary.exponent_width or rotary.width}, key=str):
                model = evidence.model.with_rotary(width=width, exponent_width=base)
                yield Variant(model, {"width": width}, f"Rotary(width={rotary.width})")


@_of_rotation
def _rotary_whole_head_pairs(evidence: Evidence, rotary: RotaryRule) -> Variants:
    head_dim = evidence.model.sizes["head_dim"]
    if rotary.width != head_dim:
        span, repair = head_dim // 2, f"pair channel i with i + {rotary.width // 2}"
        model = evidence.model.with_rotary(pairing="half-split", span=span)
        yield Variant(model, {"span": span}, repair)


@_of_rotation
def _rotary_exponent_width(evidence: Evidence, rotary: RotaryRule) -> Variants:
    head_dim = evidence.model.sizes["head_dim"]
    right = rotary.exponent_width or rotary.width
    for base in range(4, 2 * head_dim + 1, 2) if rotary.width >= 4 else ():
        if base != right:
            model = evidence.model.with_rotary(exponent_width=base)
            rank = None if base == head_dim else POSSIBLE
            yield Variant(model, {"exponent width": base}, f"theta ** (-2i / {right})", rank=rank)


def _query_temperature(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.temperature
    if not isinstance(rule, TemperatureRule):
        return
    repair = f"multiply queries by their temperature: {rule}"
    yield Variant(evidence.model.with_settings(temperature=None), {"temperature": "none"}, repair)
    for first, kind in product((0, 1), get_args(TemperatureKind)):
        if (first, kind) != (rule.first, rule.kind):
            model = evidence.model.with_settings(temperature=replace(rule, first=first, kind=kind))
            parameters = {"temperature": kind, "first position": first}
            yield Variant(model, parameters, repair)
    model = evidence.replace_stages(("q after rotary",), _warm_by_column)
    yield Variant(model, {"temperature": "by column"}, "count positions, and not columns")


def _warm_by_column(forced: ForcedStage) -> Tensor:
    """Return queries whose temperature counts the tokens of the call, padding included."""
    rule, call = forced.settings.temperature, forced.call
    if not isinstance(rule, TemperatureRule):  # another cause left it out
        return forced.usual_result()
    x, start = forced.usual_result(), call.past_key_count
    columns = torch.arange(start, start + x.shape[2])
    factors = (query_factors(rule, each, x.dtype) for each in (columns, call.query_positions))
    return x * (next(factors) / next(factors))


MOST = 64
OFFSETS = tuple(offset for offset in range(-MOST, MOST + 1) if offset)


def _rotary_position_offset(evidence: Evidence) -> Variants:
    parted = [stage[0] for stage in ROTATED if evidence.parted_calls_and_heads(stage)]
    if evidence.model.settings.rotation is None or _has_equal_offsets(evidence):
        return
    for role in parted or ("q", "k"):
        for offset in OFFSETS:
            model = evidence.model.with_rotary(**{f"{role}_offset": offset})
            repair = f"positions that are {abs(offset)} {'smaller' if offset > 0 else 'larger'}"
            yield Variant(model, {"role": role, "offset": offset}, repair)


def _has_equal_offsets(evidence: Evidence) -> bool:
    """True if queries and keys are off by the same number, which changes no score."""
    if not all(evidence.parted_calls_and_heads(stage) for stage in ROTATED):
        return False
    call = min(evidence.calls, key=lambda call: call.inputs.x.shape[1])
    for offset in OFFSETS:
        model = evidence.model.with_rotary(q_offset=offset, k_offset=offset)
        if all(all_heads_agree_within_rounding(model, call, stage, [WHOLE]) for stage in ROTATED):
            return True
    return False


@_of_rotation
def _rotary_direction(evidence: Evidence, _: RotaryRule) -> Variants:
    model = evidence.replace_stages(ROTATED, _rotate_by_axis, "the position, backwards")
    yield Variant(model, {}, "turn by the position, not by minus the position: negate sin")


@_of_rotation
def _rotary_applied_twice(evidence: Evidence, _: RotaryRule) -> Variants:
    for roles, stages in (("k", ROTATED[1:]), ("q", ROTATED[:1]), ("qk", ROTATED)):
        model = evidence.replace_stages(stages, _rotate_again)
        repair = "rotate once: keys that are rotated before a cache are not rotated when it is read"
        yield Variant(model, {"turned": roles}, repair)
    if evidence.has_later_calls:
        model = read_other_cache(evidence, "k", _turn_cached_keys)
        parameters = {"turned": "cached keys, once more in each call"}
        yield Variant(model, parameters, "rotate new keys alone, before they join the cache")


def _turn_cached_keys(keys: Tensor, forced: ForcedStage) -> Tensor:
    """Return keys that turned once more in each call since theirs."""
    rule, calls = forced.settings.rotation, (*forced.call.earlier, forced.call)
    if rule is None or keys.shape[2] != forced.call.key_positions.shape[1]:
        return keys
    sizes = [call.inputs.x.shape[1] for call in calls]
    turns = torch.arange(len(calls) - 1, -1, -1).repeat_interleave(torch.tensor(sizes))
    return rotate_by_rule(rule, keys, turns * (forced.call.key_positions + rule.k_offset))


def _rotate_again(forced: ForcedStage) -> Tensor:
    x, rule = forced.usual_result(), forced.settings.rotation
    if rule is None:  # another cause removed the rotation
        return x
    is_query = forced.stage[0] == "q"
    positions = forced.call.query_positions if is_query else forced.call.new_key_positions
    return rotate_by_rule(rule, x, positions + (rule.q_offset if is_query else rule.k_offset))


@_of_rotation
def _rotary_axis(evidence: Evidence, _: RotaryRule) -> Variants:
    for axis in ("head", "position and head", "batch", "position from the end"):
        model = evidence.replace_stages(ROTATED, _rotate_by_axis, axis)
        yield Variant(model, {"axis": axis}, "rotate by the position of the token: axis 2 of 4")


def _rotate_by_axis(axis: str, forced: ForcedStage) -> Tensor:
    role, rotary = forced.stage[0], forced.settings.rotation
    x = forced[f"{role} after norm"]
    if rotary is None:  # another cause removed the rotation
        return x
    positions = forced.call.query_positions if role == "q" else forced.call.new_key_positions
    heads = torch.arange(x.shape[1])[:, None]
    places = {
        "head": heads,
        "position and head": positions[:, None] + heads,
        "batch": torch.arange(len(x))[:, None, None],
        "position from the end": positions[:, None].flip(-1),
        "the position, backwards": -positions[:, None],
    }
    angles = places[axis][..., None].double() * frequencies_of_rule(rotary)
    return rotate_by_angles(rotary, x, angles)


@_of_rotation
def _rotary_other_channels(evidence: Evidence, rotary: RotaryRule) -> Variants:
    if rotary.width < evidence.model.sizes["head_dim"]:
        model = evidence.replace_stages(ROTATED, _rotate_last_channels)
        repair = f"rotate the first {rotary.width} channels of a head, not the last"
        yield Variant(model, {"channels": "the last"}, repair)


def _rotate_last_channels(forced: ForcedStage) -> Tensor:
    x, rule = forced[f"{forced.stage[0]} after norm"], forced.settings.rotation
    if rule is None:  # another cause removed the rotation
        return forced.usual_result()
    rule = replace(rule, span=None)  # a pair of another cause lies across the whole head
    still, turning = x[..., : -rule.width], x[..., -rule.width :]
    return torch.cat((still, _rotate_at_positions(rule, turning, forced)), -1)


def _rotate_at_positions(rule: RotaryRule, x: Tensor, forced: ForcedStage) -> Tensor:
    return rotate_by_angles(rule, x, _positions_of(forced) * frequencies_of_rule(rule))


@_of_rotation
def _rotary_over_heads(evidence: Evidence, rotary: RotaryRule) -> Variants:
    heads = [evidence.model.weights[f"w{role}"].shape[:2] for role in "qk"]
    if rotary.width != heads[0][1] or any(count == 1 for count, _ in heads):
        return
    if all(has_frequencies(replace(rotary, width=shape.numel())) for shape in heads):
        model = evidence.replace_stages(ROTATED, _rotate_all_heads_at_once)
        yield Variant(model, {}, "split q and k into heads before the rotation")


def _rotate_all_heads_at_once(forced: ForcedStage) -> Tensor:
    x, rule = forced[f"{forced.stage[0]} after norm"], forced.settings.rotation
    joined = x.transpose(1, 2).flatten(2)[:, None]
    rule = None if rule is None else replace(rule, width=joined.shape[-1])
    if rule is None or not has_frequencies(rule):  # by another cause
        return forced.usual_result()
    turned = _rotate_at_positions(rule, joined, forced)
    split: Tensor = turned[:, 0].unflatten(2, (x.shape[1], -1))
    return split.transpose(1, 2)


@_of_rotation
def _rotary_on_values(evidence: Evidence, rotary: RotaryRule) -> Variants:
    if rotary.width > evidence.model.sizes["value_dim"]:
        return
    # Values may have been recorded before they are turned.
    for stage in ("v",) if evidence.shows_outputs_alone else ("v", "head outputs"):
        model = evidence.replace_stages([stage], _turn_values)
        yield Variant(model, {}, "rotate q and k, and leave v as it is")


def _turn_values(forced: ForcedStage) -> Tensor:
    rule, channels = forced.settings.rotation, forced.model.sizes["value_dim"]
    if rule is None or count_channels(rule) > channels:  # by another cause
        return forced.usual_result()
    if forced.stage == "v":
        return _rotate_at_positions(rule, forced.usual_result(), forced)

    def turn(call: RecordedCall) -> RecordedCall:
        value = ForcedStage(forced.model, call, "v")
        turned = _rotate_at_positions(rule, value.result, value)
        return call.with_stages({**call.stages, "v": turned})

    return replace(forced, call=forced.call.change(turn)).usual_result()


@_of_rotation
def _rotary_some_heads(evidence: Evidence, _: RotaryRule) -> Variants:
    if evidence.shows_outputs_alone:
        still = tuple(range(1, evidence.model.settings.num_heads))
        model = evidence.replace_stages(ROTATED, _undo_rotation_of_heads, slice(1, None))
        first = {"rotated": (0,), "rotated kv heads": (0,)}  # by code that takes [:, :1] of both
        yield Variant(model, {}, "rotate every head", first, heads=still)
        if evidence.is_limited:
            bare, none = evidence.model.with_settings(rotary=None), dict[str, object](rotated=())
            yield Variant(bare, {}, "rotate every head", none)
        return
    model, heads = evidence.model, {}
    for stage in ROTATED:
        parted = sorted({head for _, _, head in evidence.parted_calls_and_heads(stage)})
        count = evidence.model.weights[f"w{stage[0]}"].shape[0]
        if len(parted) == count or WHOLE in parted:
            return
        heads[stage[0]] = tuple(head for head in range(count) if head not in parted)
        model = model.with_stage_function(stage, partial(_undo_rotation_of_heads, parted))
    if not any(evidence.parted_calls_and_heads(*ROTATED)):
        return
    rotated, details = {"rotated": heads["q"]}, {"rotated kv heads": heads["k"]}
    yield Variant(model, rotated, "rotate every head", details)


def _undo_rotation_of_heads(heads: list[int] | slice, forced: ForcedStage) -> Tensor:
    x, bare = forced.usual_result().clone(), forced[f"{forced.stage[0]} after norm"]
    x[:, heads] = bare[:, heads]
    return x


# What is rounded to the dtype; angles are positions times frequencies, tables cosines and sines.
ROUNDED_PARTS = (
    ("frequencies",),
    ("tables",),
    ("angles",),
    ("frequencies", "angles"),
    ("angles", "tables"),
    ("frequencies", "angles", "tables"),
)


@_of_rotation
def _rotary_dtype(evidence: Evidence, _: RotaryRule) -> Variants:
    repair = "keep inv_freq in float32: load with dtype=..., without .to(dtype) afterwards"
    for dtype in (torch.bfloat16, torch.float16):
        for parts in ROUNDED_PARTS:
            model = evidence.replace_stages(ROTATED, _rotate_in_dtype, dtype, parts)
            if parts == ("frequencies",):
                model = evidence.model.with_rotary(dtype=dtype)
            details = {"of": ", ".join(parts)}
            yield Variant(model, {"dtype": format_dtype(dtype)}, repair, details)


def _rotate_in_dtype(dtype: torch.dtype, parts: Sequence[str], forced: ForcedStage) -> Tensor:
    def rounded(part: str, x: Tensor) -> Tensor:
        return x.to(dtype).double() if part in parts else x

    rule = forced.settings.rotation
    if rule is None:  # another cause removed the rotation
        return forced.usual_result()
    angles = _positions_of(forced) * rounded("frequencies", frequencies_of_rule(rule))
    angles = rounded("angles", angles)
    return _rotate_with_tables(
        forced, rounded("tables", angles.cos()), rounded("tables", angles.sin()), rule.pairing
    )


def _positions_of(forced: ForcedStage) -> Tensor:
    """Return the positions of a stage's queries or keys, (batch, 1, length, 1), float64."""
    rule, is_query = forced.settings.rotation, forced.stage[0] == "q"
    positions = forced.call.query_positions if is_query else forced.call.new_key_positions
    offset = 0.0 if rule is None else rule.q_offset if is_query else rule.k_offset
    return (positions[:, None, :, None] + offset).double()


def _rotate_with_tables(forced: ForcedStage, cos: Tensor, sin: Tensor, tables: Pairing) -> Tensor:
    """Return a stage rotated by cosines and sines (..., pairs) that are repeated for a pairing.

    Channels are paired by the rule, which may be another pairing than that of the tables.
    """
    x, rule = forced[f"{forced.stage[0]} after norm"], forced.settings.rotation
    assert rule is not None
    width = 2 * cos.shape[-1]
    leading, rest = x[..., :width], x[..., width:]
    cos, sin = (
        torch.cat((t, t), -1) if tables == "half-split" else t.repeat_interleave(2, -1)
        for t in (cos, sin)
    )
    if rule.pairing == "half-split":
        first, second = leading.chunk(2, -1)
        partner = torch.cat((-second, first), -1)
    else:
        partner = torch.stack((-leading[..., 1::2], leading[..., ::2]), -1).flatten(-2)
    return torch.cat((rule.amplitude * (leading * cos + partner * sin), rest), -1)


FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0)
LENGTHS = (32, 2048, 4096, 8192, 32768)


@_of_rotation
def _rotary_scaling_kind(evidence: Evidence, rotary: RotaryRule) -> Variants:
    length = getattr(rotary.scaling, "original_length", None)
    factors = FACTORS if rotary.scaling is None else (rotary.scaling.factor, *FACTORS)
    for scaling in _list_other_scalings(rotary, factors, LENGTHS if length is None else (length,)):
        for amplitude in (None, rotary.amplitude, 1.0):
            model = evidence.model.with_rotary(scaling=scaling, attention_factor=amplitude)
            kind = "none" if scaling is None else type(scaling).__name__
            details = {} if scaling is None else {"factor": scaling.factor}
            yield Variant(model, {"scaling": kind}, f"scaling={rotary.scaling}", details)


def _list_other_scalings(
    rotary: RotaryRule, factors: Sequence[float], lengths: Sequence[int]
) -> Iterator[Scaling | None]:
    made: list[Scaling | None] = [None]
    for factor in factors:
        made += [LinearScaling(factor), NTKScaling(factor)]
        made += [Llama3Scaling(factor, 1.0, 4.0, length) for length in lengths]
        made += [YarnScaling(factor, length) for length in lengths]
    for scaling in made:
        if type(scaling) is not type(rotary.scaling):
            yield scaling


def _rotary_scaling_factor(evidence: Evidence) -> Variants:
    rotary = evidence.model.settings.rotation
    if rotary is None or rotary.scaling is None:
        return
    scaling = rotary.scaling
    for amplitude in (None, rotary.amplitude):

        def make(factor: float, amplitude: float | None = amplitude) -> Variant:
            changed = replace(scaling, factor=factor)
            model = evidence.model.with_rotary(scaling=changed, attention_factor=amplitude)
            return Variant(model, {"factor": factor}, f"scaling={scaling}")

        yield Family(make, tuple(1.25 * 1.6**n for n in range(9)), is_log=True)


@_of_rotation
def _rotary_attention_factor(evidence: Evidence, rotary: RotaryRule) -> Variants:
    right = rotary.amplitude

    def make(factor: float) -> Variant:
        model = evidence.model.with_rotary(attention_factor=factor)
        return Variant(model, {"attention factor": factor}, f"attention_factor={right:.6g}")

    yield Family(make, (0.25 * right, 0.5 * right, right, 2 * right, 4 * right), is_log=True)

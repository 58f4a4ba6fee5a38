"""The lines of an attention (`headwise.function.lines`) that repair a cause.

A repair is the right form of the lines in which the fault is, in the reader's own numbers. So it
holds whatever the fault is exactly. A line is written in PyTorch, and translated to NumPy by a
table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headwise.diagnosis.repairs.rows import write_form, write_weight_lines
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.trials import NamedCause
from headwise.function import lines as written
from headwise.function.lines import Code, LinePlace
from headwise.function.records import STAGES
from headwise.function.spec import AttentionSpec, RotaryRule
from headwise.function.weights import sizes_of
from headwise.identify import catalogue
from headwise.identify.catalogue import Cause
from headwise.identify.moves.move import find_factor_formula


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
    head_dim, changes = right.sizes["head_dim"], {}
    if rule is None or other is None or rule.width != other.width:
        return ()
    places, taken = (_channels_in_pairs(each, head_dim) for each in (rule, other))
    index = [taken[places.index(channel)] for channel in range(head_dim)]
    for name in {*STAGES["q"].tensors, *STAGES["k"].tensors} & right.weights.keys():
        changes[name] = right.weights[name][:, index]
    lines = write_weight_lines(right.with_weights(**changes).weights, right.weights)
    shown = "2i and 2i + 1"
    if rule.pairing == "half-split":
        shown = f"i and i + {rule.span or int(rule.width) // 2}"
    return (f"# or turn channels {shown} of a head together", *lines) if lines else ()


def _write_scale(code: Code, wrong: float, heads: tuple[int, ...] | None) -> Iterator[str]:
    axes, right = sizes_of(code.weights), code.settings.factor
    sizes = {"head_dim": axes["head_dim"], "width": axes["embed_dim"]}
    form = find_factor_formula(wrong, **sizes)
    quotient = write_form(right / wrong, **sizes)
    if form and "*" not in quotient and not math.isclose(right / wrong, round(right / wrong, 3)):
        quotient = f"{write_form(right, **sizes)} / {write_form(wrong, **sizes)}"
    part = "scores" if heads is None else f"scores[:, {list(heads)}]"
    comment = f"scale {right:.6g} in place of {form or f'{wrong:.6g}'}"
    yield f"{part} = {part} * {quotient}  # {comment}"


# Causes whose lines are not the last ones of their first stage.
PLACES: Mapping[LinePlace, tuple[Cause, ...]] = {
    written.SIZES: (catalogue.NUMBER_OF_HEADS,),
    written.PROJECTIONS: (catalogue.BIAS_MISSING, catalogue.SPLIT_WITHOUT_TRANSPOSE),
    written.ON_WEIGHTS: (catalogue.NORM_WEIGHTS_ORDER,),
    written.NORM_AND_ROTATION: (catalogue.QK_NORM_PLACE,),
    written.FREQUENCIES: (
        catalogue.ROTARY_THETA,
        catalogue.ROTARY_EXPONENT_WIDTH,
        catalogue.ROTARY_SCALING_FACTOR,
    ),
    written.WHOLE_ROTATION: (
        catalogue.ROTARY_SCALING_KIND,
        catalogue.ROTARY_DTYPE,
        catalogue.ROTARY_PARTIAL_WIDTH,
        catalogue.ROTARY_MISSING,
        catalogue.ROTARY_POSITION_OFFSET,
        catalogue.ROTARY_AXIS,
        catalogue.ROTARY_ATTENTION_FACTOR,
        catalogue.ROTARY_APPLIED_TWICE,
        catalogue.ROTARY_OVER_HEADS,
    ),
    written.ANGLES: (catalogue.POSITION_IN_DECODING,),
    written.GROUPS: (catalogue.KV_HEADS_TILED, catalogue.ANOTHER_GROUP),
    written.SCORES: (catalogue.SCALE, catalogue.SCALE_TWICE, catalogue.TEMPERATURE_BY_LENGTH),
    written.SOFTCAP: (catalogue.SOFTCAP,),
    written.BIAS: (
        catalogue.DISTANCE_BIAS_COEFFICIENT,
        catalogue.DISTANCE_BIAS_SLOPE_RULE,
        catalogue.RELATIVE_BIAS_BUCKETS,
        catalogue.RELATIVE_BIAS_REVERSED,
        catalogue.RELATIVE_BIAS_RESHAPED,
    ),
    written.MASK: (catalogue.PADDING_IN_DECODING,),
    written.MASK_AND_SOFTMAX: (catalogue.MASK_AFTER_SOFTMAX, catalogue.SIGN),
    written.CACHE: (
        catalogue.EVICTED_KEYS,
        catalogue.CACHED_VALUES_LOST,
        catalogue.CACHE_JOINED_IN_ANOTHER_ORDER,
    ),
    written.OUTPUT: (
        catalogue.OUTPUT_PROJECTION_MISSING,
        catalogue.MERGE_WITHOUT_TRANSPOSE,
        catalogue.RESIDUAL_INSIDE,
    ),
    written.AROUND: (catalogue.BATCH_SEQUENCE_EXCHANGED,),
}
# Causes that no line repairs -> the reason.
WORDS_ALONE: Mapping[Cause, str] = {
    catalogue.ANOTHER_ROLE: "the weights are lost: load them from their own tensor",
    catalogue.ROWS_ZERO: "the weights are lost: load them again",
    catalogue.HEADS_GONE: "the weights of these heads are in the other layer",
    catalogue.KV_HEADS_MERGED: "a merge does not tell what it was made of",
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
    **dict.fromkeys(
        (
            catalogue.LATENT_NORM_MISSING,
            catalogue.LATENT_NORM_EPS,
            catalogue.LATENT_FACTOR_MISSING,
            catalogue.SHARED_KEY_WIDTH,
            catalogue.ROTATED_CHANNELS_PLACE,
            catalogue.MSCALE_MISSING,
            catalogue.MSCALE_OF_ANOTHER_FIELD,
        ),
        "of code with a latent, which the lines do not write: the report says what to change",
    ),
    catalogue.DIFFERENCE_FACTOR: "the vectors are lost: load them, or state lambda_init",
    catalogue.PART_LEFT_OUT: "it is one of several parts: the report names its option",
    catalogue.LAYERS_EXCHANGED: "named of whole models: layers are loaded by their number",
    catalogue.LAYERS_OFF_BY_ONE: "named of whole models: layers are loaded by their number",
}


def place_of(cause: Cause) -> LinePlace | None:
    """Return where the lines stand that repair a cause; None where weights alone are wrong."""
    stage = STAGES[cause.stages[0]]
    usual = None if cause in WORDS_ALONE or stage.is_projection else stage.write[-1]
    return next((place for place, causes in PLACES.items() if cause in causes), usual)


@dataclass(frozen=True)
class Repair:
    """Lines of code, and where they stand in the code in doubt, in words; or words alone."""

    lines: tuple[str, ...]
    place: str = ""


def write_repair(named: NamedCause, code: Code, before: AttentionModel) -> Repair | None:
    """Return the lines that repair a cause, or None; ``before`` is the model without the fault."""
    cause, variant, place = named.cause, named.variant, place_of(named.cause)
    if cause in WORDS_ALONE or not _is_plain(code.settings):
        return None
    rows = write_weights(named, before)
    if place is written.ROTATION and any("permutation" in name for name in named.equals):
        rows = _write_pairs(before, variant.model)
    if rows:
        return Repair(translate(rows, code.language), written.ON_WEIGHTS.words)
    weights = variant.model.weights.items()
    is_moved = any(x is not before.weights.get(name) for name, x in weights)  # a gate, by no line
    if place in (None, written.ON_WEIGHTS) or (is_moved and place is written.MASK_AND_SOFTMAX):
        return None
    place = written.MASK_AND_SOFTMAX if place is written.MASK and code.has_empty_rows else place
    stated = variant.parameters.get("roles", "qkv")
    lines, words = (
        [*place.write(code, stated if place is written.PROJECTIONS else "qk")],
        place.words,
    )
    if "scale" in variant.parameters and "calls" not in variant.parameters:
        lines = [*_write_scale(code, variant.parameters["scale"], named.heads)]
        words = "before scores are capped, biased or masked"
    if named_weights := dict.fromkeys(re.findall(r"\b[wb][qkvog]\b", " ".join(lines))):
        listed = ", ".join(named_weights)
        lines.append(f"# {listed}: of the right layer, as torch.nn.Linear stores them")
    return Repair(translate(tuple(lines), code.language), words) if lines else None


def write_weights(named: NamedCause, before: AttentionModel) -> tuple[str, ...]:
    """Return the lines on weights that repair a cause of weights; () where none do."""
    place, weights = place_of(named.cause), named.variant.model.weights
    if named.cause in WORDS_ALONE or place not in (
        None,
        written.GROUPS,
        written.ON_WEIGHTS,
        written.MASK_AND_SOFTMAX,
    ):
        return ()
    return write_weight_lines(weights, before.weights)


def _is_plain(settings: AttentionSpec) -> bool:
    """True for settings that the lines know: no latent, no offset of a rotation, no gap in it."""
    rule = settings.rotation
    if settings.compressed is not None:
        return False
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

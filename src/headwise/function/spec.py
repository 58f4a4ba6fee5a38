"""Description of an attention function: all that no tensor stores, such as its scale.

A field of `AttentionSpec` is a value, ABSENT, or FROM_CONFIG: the model's config then decides. A
form that has no arithmetic here is an `Other`, which is compared by its name. Nothing in a
description is a tensor, and a conversion never folds a setting into weights: a factor multiplied in
and out again changes 15 % of the entries of a bfloat16 matrix with a head_dim of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from headwise.errors import OptionError
from headwise.support.text import describe_value

if TYPE_CHECKING:  # the list of layouts starts without torch
    import torch

    from headwise.function.scaling import Scaling

Pairing = Literal["half-split", "interleaved"]
NormKind = Literal["rms", "layer", "l2"]
Over = Literal["head", "width"]
Place = Literal["before", "after"]
GateKind = Literal["head", "channel", "head softplus", "channel softplus"]
TemperatureKind = Literal["steps", "smooth"]
# A number that may be FROM_CONFIG, or a size that may be None. As any type, so that arithmetic with
# resolved numbers needs no cast.
Open = Any


class Unset(Enum):
    """Marks of a field without a value."""

    ABSENT = "absent"
    FROM_CONFIG = "from config"

    def __repr__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        return False


BIAS_MAX = 8.0  # of ALiBi: the last head's slope is 2 ** -BIAS_MAX
ABSENT: Final = Unset.ABSENT
FROM_CONFIG: Final = Unset.FROM_CONFIG


@dataclass(frozen=True)
class Other:
    """A form without arithmetic in headwise, such as Other("relative keys")."""

    name: str


# Score biases of queries, keys and places that no layer has; q, k, u, v and r are of one head.
TRANSFORMER_XL = Other("Transformer-XL's relative positions")  # (q + u).k + (q + v).r[i - j]
SHAW = Other("Shaw's relative positions")  # q.k + q.e[j - i]
SWIN = Other("a table by place in the window")  # as in Swin
SWIN_2 = Other("an MLP of the place in the window")  # as in Swin v2
SAM = Other("rows and columns of the unscaled query")  # as in SAM
WAVLM = Other("a gated table of distances")  # as in WavLM


@dataclass(frozen=True)
class ScaleRule:
    """A scale that follows from head_dim: ``head_dim ** power``."""

    power: float

    def scale(self, head_dim: int) -> float:
        """Return the factor of q.k."""
        return float(head_dim**self.power)


USUAL_SCALE: Final = ScaleRule(-0.5)
SCALE_WORDS = {USUAL_SCALE: "1/sqrt(head_dim)", 1.0: "1", ScaleRule(-1.0): "1/head_dim"}


@dataclass(frozen=True)
class RotaryRule:
    """Rotation of queries and keys.

    Attributes:
        theta: base of the frequencies.
        width: number of leading channels of a head that turn; None for all.
        pairing: which two channels turn together; in a layout, that of its rows.
        scaling: of the frequencies; None for none.
        exponent_width: pair i turns by theta ** (-2i / exponent_width); ``width`` if None.
        span: distance of the two channels of a half-split pair; half the width if None.
        attention_factor: factor of rotated channels; that of the scaling if None.
        axes: for each pair the axis of the positions by which it turns; None for one position.
        backwards: True if pairs turn by minus the angle, as in nanochat.
        numbers: for each pair the i of its frequency; 0, 1, 2 and so on if None.
        parts: equal parts of the width that have their pairs each for themselves.
        q_offset, k_offset: added to the positions.
        dtype: to which the frequencies are rounded; None for none.
    """

    theta: float | Open = FROM_CONFIG
    width: int | Open = None
    pairing: Pairing = "half-split"
    scaling: Scaling | Open | None = FROM_CONFIG
    exponent_width: int | None = None
    span: int | None = None
    attention_factor: float | None = None
    axes: tuple[int, ...] | None = None
    backwards: bool = False
    numbers: tuple[int, ...] | None = None
    parts: int = 1
    # Of ported code that is wrong.
    q_offset: float = 0.0
    k_offset: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def words(self) -> str:
        """Words such as "half-split"."""
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{self.pairing}{parts}{', backwards' if self.backwards else ''}"

    @property
    def amplitude(self) -> float:
        """Factor of rotated channels."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.scaling is None else float(self.scaling.amplitude)


@dataclass(frozen=True)
class NormRule:
    """Normalisation of queries and keys.

    Attributes:
        kind: "rms" divides by the root mean square, "layer" subtracts the mean first, "l2" divides
            by the length.
        over: the channels of a "head", or the "width" of all heads.
        place: "before" or "after" the rotation.
        weight_offset: added to the stored weight.
        eps: added to the mean square.
        has_rows: True if the weight has a row for each head.
        has_weight: False if nothing is learned.
    """

    kind: NormKind = "rms"
    over: Over = "head"
    place: Place = "before"
    weight_offset: float = 0.0
    eps: float | Open = FROM_CONFIG
    has_rows: bool = False
    has_weight: bool = True

    @property
    def words(self) -> str:
        """Words such as "rms over head, weight + 1, before rotary"."""
        parts = [f"{self.kind} over {self.over}"]
        parts += [] if self.has_weight else ["no weight"]
        parts += ["rows for heads"] if self.has_rows else []
        parts += [f"weight + {self.weight_offset:g}"] if self.weight_offset else []
        return ", ".join([*parts, f"{self.place} rotary"])


@dataclass(frozen=True)
class Softcap:
    """A bound of the scores: ``limit * tanh(scores / limit)``."""

    limit: float | Open = FROM_CONFIG


@dataclass(frozen=True)
class AlibiRule:
    """A score bias of -slope * distance; the last head's slope is ``2 ** -bias_max``.

    Attributes:
        bias_max: sets all slopes; see `headwise.layers.alibi_slopes`.
        before_scale: True if slopes in bfloat16 are added before the products are scaled (Falcon).
        slopes: of each head, where they follow another rule.
    """

    bias_max: float = BIAS_MAX
    before_scale: bool = False
    slopes: tuple[float, ...] | None = None

    @property
    def words(self) -> str:
        """Words such as "alibi before the scale"."""
        if self.before_scale:
            return "alibi before the scale"
        if self.slopes is not None:
            return "alibi with slopes of each head"
        return "alibi" if self.bias_max == BIAS_MAX else f"alibi with bias_max={self.bias_max:g}"


@dataclass(frozen=True)
class BucketRule:
    """T5's learned score bias by buckets of distances; see `headwise.layers.T5Bias`."""

    buckets: int | Open = FROM_CONFIG
    max_distance: int | Open = FROM_CONFIG
    bidirectional: bool | Open = FROM_CONFIG


@dataclass(frozen=True)
class DisentangledRule:
    """DeBERTa's terms of relative positions; see `headwise.layers.DebertaBias`.

    Attributes:
        span: half of the rows of the table; a position is from -span to span - 1.
        max_distance: positions beyond half of the span share rows, up to this one; None if each
            has its own.
        terms: "c2p" for queries with keys of places, "p2c" for keys with queries of places.
        is_shared: True if the projections of tokens serve the table.
        eps: of a layer norm of the table; None for none.
    """

    span: int
    max_distance: int | None = None
    terms: tuple[str, ...] = ("c2p", "p2c")
    is_shared: bool = False
    eps: float | None = None

    @property
    def words(self) -> str:
        """Words such as "disentangled, c2p and p2c"."""
        return f"disentangled, {' and '.join(self.terms)}"


@dataclass(frozen=True)
class DifferentialRule:
    """Head outputs that are differences of two softmaxes; see `headwise.function.differential`.

    Attributes:
        init: the constant part of the factor of the second; 0.8 - 0.6 exp(-0.3 layer) in DiffLlama.
        eps: of the root mean square norm of the outputs of a pair of heads, without a weight.
    """

    init: float | Open = FROM_CONFIG
    eps: float | Open = FROM_CONFIG


@dataclass(frozen=True)
class Latent:
    """A latent that keys and values come from, beside one rotary key for all heads.

    `headwise.function.latent` has the formulas (DeepSeek-V2, arXiv:2405.04434). The shared key
    stands before the channels that a head's key has of the latent.

    Attributes:
        rank: width of the latent c; None where the weights tell it, as for the next two.
        shared_width: width of the shared key, whose channels alone are rotated.
        query_rank: width of a latent of the queries; None without one.
        eps: of the norms of both latents.
        normed: False if c is used as it is projected.
        scaled: True if both latents are multiplied by sqrt(embed_dim / their width) (LongCat).
    """

    rank: int | Open = None
    shared_width: int | Open = None
    query_rank: int | None = None
    eps: float | Open = 1e-6
    normed: bool = True
    scaled: bool = False

    @property
    def words(self) -> str:
        """Words such as "normed, scaled"."""
        return ("normed" if self.normed else "not normed") + (", scaled" if self.scaled else "")


@dataclass(frozen=True)
class ValueRule:
    """Change of values between their projection and the attention.

    Attributes:
        eps: of a root mean square norm of each head without weight; None for no norm.
        factor: of the values.
    """

    eps: float | Open | None = None
    factor: float | Open = 1.0

    @property
    def words(self) -> str:
        """Words such as "rms over head"."""
        return "times a factor" if self.eps is None else "rms over head"


@dataclass(frozen=True)
class TemperatureRule:
    """A factor of queries that grows with their position; see `headwise.function.temperature`.

    Attributes:
        factor: of the logarithm.
        length: of a step, in tokens.
        first: the number of the first token, 0 or 1.
        kind: "steps" takes the floor of position over length, "smooth" the quotient from 1 on.
    """

    factor: float
    length: float
    first: int = 0
    kind: TemperatureKind = "steps"

    def __post_init__(self) -> None:
        """Raise OptionError for a length that is not positive, or another kind."""
        if not self.length > 0 or self.kind not in get_args(TemperatureKind):
            raise OptionError(
                saw=f"TemperatureRule(length={self.length}, kind={describe_value(self.kind)})",
                needed='a positive length, and "steps" or "smooth"',
                do="e.g. TemperatureRule(0.1, 8192, first=1), as in Llama 4",
            )


Window = tuple[int | Open | None, int | None]
Sides = tuple[int | None, int | None]  # of a window that is known


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Settings of an attention function that its weights do not hold.

    Each field has a value, or is ABSENT, or FROM_CONFIG, where the model's config decides. Sinks
    are tensors: weights tell whether there are any.

    Attributes:
        num_heads, num_kv_heads, head_dim: sizes; None where they are open.
        scale: the factor of q.k: a number, or a `ScaleRule`.
        rotary: a `RotaryRule`, or an `Other`.
        qk_norm: the normalisation of queries and keys, a `NormRule` or an `Other`.
        softcap: a `Softcap`.
        score_bias: what is added to the scores: an `AlibiRule`, a `BucketRule`, a
            `DisentangledRule` or an `Other`.
        window: (left, right), the numbers of keys before and after a query; None for no bound.
        causal: True if a query attends to no later key.
        clip: the largest size of queries and keys before the rotation, and of projected values.
        output_gate: a gate of each "head" or "channel" of the head outputs, computed from x: a
            sigmoid, or with "softplus" behind it.
        temperature: a factor of queries by their position, a `TemperatureRule`.
        values: a norm or a factor of values, a `ValueRule`.
        output_norm: the normalisation of head outputs before their gate, a `NormRule`.
        latent: what keys and values come from in place of x, a `Latent`.
        differential: head outputs as differences of pairs, a `DifferentialRule`.
    """

    num_heads: int | Open = None
    num_kv_heads: int | Open = None
    head_dim: int | Open = None
    scale: float | ScaleRule | Unset = USUAL_SCALE
    rotary: RotaryRule | Other | Unset = ABSENT
    qk_norm: NormRule | Other | Unset = ABSENT
    softcap: Softcap | Unset = ABSENT
    score_bias: AlibiRule | BucketRule | DisentangledRule | Other | Unset = ABSENT
    window: Window | Other | Unset = ABSENT
    causal: bool = False
    clip: float | Other | Unset = ABSENT
    output_gate: GateKind | Unset = ABSENT
    temperature: TemperatureRule | Unset = ABSENT
    values: ValueRule | Unset = ABSENT
    output_norm: NormRule | Unset = ABSENT
    latent: Latent | Other | Unset = ABSENT
    differential: DifferentialRule | Unset = ABSENT

    def __post_init__(self) -> None:
        """Raise OptionError for a value of another type, such as the words of a setting."""
        for name, (kinds, example) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, (*kinds, Unset)):
                listed = ", ".join(kind.__name__ for kind in kinds)
                raise OptionError(
                    saw=f"{name}={describe_value(value)}",
                    needed=f"ABSENT, FROM_CONFIG, or a value of {listed}",
                    do=f"e.g. {name}={example}, of headwise.function",
                )

    @property
    def rotation(self) -> RotaryRule | None:
        """The rotation, None where there is none that headwise computes."""
        return self.rotary if isinstance(self.rotary, RotaryRule) else None

    @cached_property
    def factor(self) -> float:
        """The scale as a number."""
        if isinstance(self.scale, ScaleRule):
            return self.scale.scale(self.head_dim)
        assert not isinstance(self.scale, Unset)
        return self.scale

    @property
    def norm(self) -> NormRule | None:
        """The normalisation of queries and keys, None where headwise computes none."""
        return self.qk_norm if isinstance(self.qk_norm, NormRule) else None

    @cached_property
    def bound(self) -> float | None:
        """The largest size of queries, keys and values, None for none."""
        return float(self.clip) if isinstance(self.clip, float | int) else None

    @cached_property
    def cap(self) -> float | None:
        """The bound of the scores, None for none."""
        return self.softcap.limit if isinstance(self.softcap, Softcap) else None

    @cached_property
    def sides(self) -> tuple[int | None, int | None] | None:
        """The window, None for none."""
        return self.window if isinstance(self.window, tuple) else None

    @cached_property
    def buckets(self) -> BucketRule | None:
        """The buckets of distances with a learned score bias, None for none."""
        return self.score_bias if isinstance(self.score_bias, BucketRule) else None

    @cached_property
    def places(self) -> DisentangledRule | None:
        """DeBERTa's terms of relative positions, None for none."""
        return self.score_bias if isinstance(self.score_bias, DisentangledRule) else None

    @cached_property
    def compressed(self) -> Latent | None:
        """The latent of keys and values, None where headwise computes none."""
        return self.latent if isinstance(self.latent, Latent) else None

    @cached_property
    def pairs(self) -> DifferentialRule | None:
        """The rule by which pairs of heads are subtracted, None for none."""
        return self.differential if isinstance(self.differential, DifferentialRule) else None

    @property
    def group(self) -> int:
        """The number of query heads that share a kv head."""
        return int(self.num_heads // self.num_kv_heads)

    @property
    def is_rotary_width_open(self) -> bool:
        """True if the config says how many channels of a head turn."""
        return self.rotation is not None and self.rotation.width is FROM_CONFIG

    def words(self) -> dict[str, str | None]:
        """Return the settings in words, as pages and files have them; None leaves it to the config.

        The names are those that ``accept`` takes in `headwise.convert`.
        """
        rotary, width = self.rotation, "head_dim"
        if rotary is not None and rotary.width not in (None, self.head_dim):
            width = f"{rotary.width} of {self.head_dim}"
        return {
            "scale": _in_words(self.scale, lambda x: SCALE_WORDS.get(x) or f"{x:g}"),
            "rotary": _in_words(self.rotary, lambda x: x.words),
            "rotary_width": None if self.is_rotary_width_open else width,
            "score_bias": _in_words(self.score_bias, lambda x: getattr(x, "words", "t5")),
            "softcap": _in_words(self.softcap, lambda _: "tanh"),
            "qk_norm": _in_words(self.qk_norm, lambda x: x.words),
            # A window without a left bound is a part of the mask that comes with each call.
            "window": _in_words(self.window, lambda x: "none" if x[0] is None else "left"),
            "clip": _in_words(self.clip, lambda x: f"{x:g}"),
            "output_gate": _in_words(self.output_gate, str),
            "temperature": _in_words(self.temperature, lambda _: "by position"),
            "values": _in_words(self.values, lambda x: x.words),
            "output_norm": _in_words(
                self.output_norm, lambda x: x.words.removesuffix(f", {x.place} rotary")
            ),
            "latent": _in_words(self.latent, lambda x: x.words),
            "differential": _in_words(self.differential, lambda _: "pairs of heads"),
        }

    @classmethod
    def from_words(cls, words: Mapping[str, str | None]) -> Self:
        """Return the description whose `words` these are; words that are not known are an `Other`.

        Files that headwise 0.1.0 converted hold such words in their metadata.
        """
        fields: dict[str, Any] = {}
        for name, word in words.items():
            if word is None:
                fields[name] = FROM_CONFIG
            elif name != "rotary_width":
                unlisted = ABSENT if word == "none" else Other(word)
                fields[name] = _VALUES.get(name, {}).get(word, unlisted)
                if name == "clip" and isinstance(fields[name], Other):
                    with suppress(ValueError):
                        fields[name] = float(word)
        width = fields.pop("rotary_width", None)
        if isinstance(fields.get("rotary"), RotaryRule):
            fields["rotary"] = replace(fields["rotary"], width=width)
        return cls(**fields)

    def conflicts(self, other: AttentionSpec) -> dict[str, tuple[str, str]]:
        """Return the settings that both know, and in which they differ: name -> (this, other).

        Two pairings of the rotation do not conflict: a conversion reorders the rows. The width of
        a rotation is compared only where both functions rotate.
        """
        differences, words = {}, other.words()
        for name, mine in self.words().items():
            theirs = words[name]
            if mine is None or theirs is None or mine == theirs:
                continue
            are_pairings = {mine, theirs} == {*get_args(Pairing)}
            if are_pairings or (name == "rotary_width" and not (self.rotary and other.rotary)):
                continue
            differences[name] = mine, theirs
        return differences

    def with_rotary_width_from_sizes(self, sizes: Mapping[str, int]) -> AttentionSpec:
        """Return this function with the rotary_width in ``sizes``, where its own is open."""
        width, head_dim = sizes.get("rotary_width"), sizes["head_dim"]
        if width is None or self.rotation is None or not self.is_rotary_width_open:
            return self
        return replace(self, head_dim=head_dim, rotary=replace(self.rotation, width=width))


# The types of a field beside `Unset`, and an example.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "scale": ((float, int, ScaleRule), "ScaleRule(-0.5)"),
    "rotary": (
        (RotaryRule, Other),
        'RotaryRule(); Layout(rows="interleaved") has the order of its channels',
    ),
    "qk_norm": ((NormRule, Other), 'NormRule(over="head")'),
    "softcap": ((Softcap,), "Softcap()"),
    "score_bias": ((AlibiRule, BucketRule, DisentangledRule, Other), "AlibiRule()"),
    "window": ((tuple, Other), "(127, 0)"),
    "clip": ((float, int, Other), "6.0"),
    "output_gate": ((str,), '"channel"'),
    "temperature": ((TemperatureRule,), "TemperatureRule(0.1, 8192)"),
    "values": ((ValueRule,), "ValueRule(eps=1e-6)"),
    "output_norm": ((NormRule,), 'NormRule(over="width")'),
    "latent": ((Latent, Other), "Latent(rank=512, shared_width=64)"),
    "differential": ((DifferentialRule,), "DifferentialRule(0.2, 1e-5)"),
}
OPEN_FIELDS = frozenset(_KINDS)  # those that may be FROM_CONFIG


def _in_words(value: Any, words: Callable[[Any], str]) -> str | None:
    """Return a field in words: None from the config, "none" for an absent one."""
    if isinstance(value, Unset):
        return None if value is FROM_CONFIG else "none"
    return value.name if isinstance(value, Other) else words(value)


_NORMS = tuple(
    NormRule(kind, over, place, offset, has_rows=has_rows, has_weight=has_weight)
    for kind, over, place, offset, has_rows, has_weight in product(
        *map(get_args, (NormKind, Over, Place)), (0.0, 1.0), (False, True), (False, True)
    )
)
_LATENTS = (Latent(normed=n, scaled=s) for n, s in product((True, False), repeat=2))
_TERMS = (("c2p", "p2c"), ("c2p",), ("p2c",))  # of a `DisentangledRule`
# The words of each setting -> its value; those of any other form are an `Other`.
_VALUES: dict[str, dict[str, Any]] = {
    "scale": {words: scale for scale, words in SCALE_WORDS.items()},
    "rotary": {
        rule.words: rule
        for pairing, backwards, parts in product(get_args(Pairing), (False, True), (1, 2))
        for rule in [RotaryRule(pairing=pairing, backwards=backwards, parts=parts)]
    },
    "qk_norm": {norm.words: norm for norm in _NORMS},
    "softcap": {"tanh": Softcap()},
    "score_bias": {
        "t5": BucketRule(),
        **{rule.words: rule for rule in (AlibiRule(), AlibiRule(before_scale=True))},
        **{DisentangledRule(1, terms=terms).words: FROM_CONFIG for terms in _TERMS},
    },
    "window": {"left": (FROM_CONFIG, None)},
    "output_gate": {gate: gate for gate in get_args(GateKind)},
    "latent": {latent.words: latent for latent in _LATENTS},
    "temperature": {"by position": FROM_CONFIG},
    "differential": {"pairs of heads": FROM_CONFIG},
    "values": {
        rule.words: rule for rule in (ValueRule(FROM_CONFIG), ValueRule(factor=FROM_CONFIG))
    },
    "output_norm": {
        norm.words.removesuffix(", before rotary"): norm for norm in _NORMS if not norm.has_rows
    },
}
SETTINGS = tuple(AttentionSpec().words())
# Settings that files of 0.1.0 do not have: "none" there.
LATER = frozenset({"differential", "latent", "output_gate", "output_norm", "temperature", "values"})


def require_conflicts_accepted(
    conflicts: Mapping[str, tuple[str, str]],
    accept: Iterable[str],
    *,
    between: str,
    do: str = "configure the model that reads the weights accordingly, and",
) -> None:
    """Raise OptionError for `AttentionSpec.conflicts` in a setting that is not accepted.

    One name may be given alone. ``do`` is the advice before 'pass accept=["rotary"]'.
    """
    accepted = {accept} if isinstance(accept, str) else {*accept}
    if unknown := sorted(accepted - {*SETTINGS}):
        raise OptionError(
            saw=f"{{accept}} {', '.join(unknown)}",
            needed=f"names among {', '.join(sorted(SETTINGS))}",
            do="leave out {accept} first: the error then names what differs",
            parameter="accept",
        )
    left = {name: both for name, both in conflicts.items() if name not in accepted}
    if left:
        listed = "; ".join(f"{name}: {a} against {b}" for name, (a, b) in left.items())
        raise OptionError(
            saw=f"{between} use the same weights differently: {listed}",
            needed="one function on both sides, since nothing of it is folded into weights",
            do=f"{do} pass {{accept}}",
            parameter={"accept": left},
        )

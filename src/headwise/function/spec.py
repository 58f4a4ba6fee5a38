"""Settings of an attention function that no tensor stores, such as its scale.

A conversion never folds a setting into weights: a factor multiplied in and out again changes 15 %
of the entries of a bfloat16 matrix with a head_dim of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from headwise.errors import OptionError

# Conventions of the call: they do not change the result, and a caller can follow either.
CALLING = ("mask", "axes")
PAIRINGS = ("half-split", "interleaved")
USUAL_SCALE = "1/sqrt(head_dim)"
# The scales that layouts name, as functions of head_dim.
SCALES: dict[str, Callable[[int], float]] = {
    USUAL_SCALE: lambda head_dim: head_dim**-0.5,
    "1": lambda _: 1.0,
    "1/head_dim": lambda head_dim: 1 / head_dim,
}
# The choices of each field that is not free text; more words may follow a pairing.
_CHOICES = {
    "rotary": ("none", *PAIRINGS),
    "softcap": ("none", "tanh"),
    "mask": ("True attends", "True hides", "added"),
    "axes": ("batch length width", "length batch width", "length width"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Settings of the function that uses the weights; the model's config sets those that are None.

    Attributes:
        scale: the factor of q.k, such as "1/sqrt(head_dim)", "1" or "1/head_dim".
        rotary: "none", or which two channels turn together, "half-split" or "interleaved".
        rotary_width: how many channels of a head turn: "head_dim", all of them.
        score_bias: "none", "alibi", "alibi before the scale", "t5", or what else is added.
        softcap: "none" or "tanh".
        qk_norm: "none", or what is normalised how, such as "rms over head, before rotary".
        window: "none" or "left".
        clip: "none", or that projected queries, keys and values are clipped.
        mask: what a layer's own mask means: "True attends", "True hides" or "added".
        axes: of its input: "batch length width" or "length batch width".
    """

    scale: str | None = USUAL_SCALE
    rotary: str | None = "none"
    rotary_width: str | None = "head_dim"
    score_bias: str | None = "none"
    softcap: str | None = "none"
    qk_norm: str | None = "none"
    window: str | None = "none"
    clip: str | None = "none"
    mask: str | None = None
    axes: str | None = "batch length width"

    def __post_init__(self) -> None:
        """Raise OptionError for a value that is not among the choices of its field."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and not value.startswith(choices):
                raise OptionError(
                    saw=f"{name}={value!r}",
                    needed=f"None, which leaves it to the config, or {', '.join(choices)}",
                    do="write it as the other layouts do: headwise layouts show NAME",
                )

    def is_same(self, other: AttentionSpec) -> bool:
        """True if both set the same fields to the same values, but for conventions of the call."""
        called = dict.fromkeys(CALLING)
        return replace(self, **called) == replace(other, **called)

    def conflicts(self, other: AttentionSpec) -> dict[str, tuple[str, str]]:
        """Return the fields that both set, to different values: name -> (this, other).

        Two pairings of the rotation do not conflict: a conversion reorders the rows. The width of
        a rotation is compared only where both functions rotate.
        """
        both_rotate = not {None, "none"} & {self.rotary, other.rotary}
        differences = {}
        for name in FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in CALLING or None in (mine, theirs) or mine == theirs:
                continue
            if name == "rotary" and {mine, theirs} == set(PAIRINGS):
                continue
            if name == "rotary_width" and not both_rotate:
                continue
            differences[name] = (mine, theirs)
        return differences

    def after_conversion_to(self, target: AttentionSpec) -> AttentionSpec:
        """Return this function for weights that were converted to a layout of ``target``.

        Only the pairing of the rotation changes: rows are then in the order of the target, or
        half-split where the target names no order.
        """
        rotary = self.rotary
        if rotary in (None, *PAIRINGS):
            rotary = target.rotary if target.rotary in PAIRINGS else rotary and "half-split"
        return replace(self, rotary=rotary, mask=target.mask, axes=target.axes)

    def with_rotary_width_from_sizes(self, sizes: Mapping[str, int]) -> AttentionSpec:
        """Return this function with the rotary_width in ``sizes``, where its own is None."""
        width, head_dim = sizes.get("rotary_width"), sizes["head_dim"]
        if width is None or self.rotary_width is not None:
            return self
        return replace(
            self, rotary_width="head_dim" if width == head_dim else f"{width} of {head_dim}"
        )


FIELDS = tuple(field.name for field in fields(AttentionSpec))


def require_conflicts_accepted(
    conflicts: Mapping[str, tuple[str, str]],
    accept: Iterable[str],
    *,
    between: str,
    do: str = "configure the model that reads the weights accordingly, and",
) -> None:
    """Raise OptionError where two functions differ in a field that is not accepted.

    Args:
        conflicts: see `AttentionSpec.conflicts`.
        accept: names of `AttentionSpec`; one name may be given alone.
        between: the two that are compared, such as "llama and gpt2".
        do: the advice before 'pass accept=["rotary"]'.
    """
    accepted = {accept} if isinstance(accept, str) else {*accept}
    if unknown := sorted(accepted - {*FIELDS}):
        raise OptionError(
            saw=f"{{accept}} {', '.join(unknown)}",
            needed=f"names among {', '.join(sorted(FIELDS))}",
            do="leave out {accept} first: the error then names what differs",
            parameter="accept",
        )
    left = {name: both for name, both in conflicts.items() if name not in accepted}
    if left:
        listed = "; ".join(
            f"{name}: {mine} against {theirs}" for name, (mine, theirs) in left.items()
        )
        raise OptionError(
            saw=f"{between} use the same weights differently: {listed}",
            needed="one function on both sides, since nothing of it is folded into weights",
            do=f"{do} pass {{accept}}",
            parameter={"accept": left},
        )

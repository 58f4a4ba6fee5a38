"""What makes the same weights another function, and is in no tensor.

None of it is ever folded into weights: a factor multiplied in and out again changes 15 % of the
entries of a bfloat16 matrix with a head_dim of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from headwise.errors import OptionError

# How a layer is called, not what it computes: a caller can follow either.
CALLING = ("mask", "axes")
PAIRINGS = ("half-split", "interleaved")
USUAL_SCALE = "1/sqrt(head_dim)"
# The scales that layouts name, as functions of head_dim.
SCALES: dict[str, Callable[[int], float]] = {
    USUAL_SCALE: lambda head_dim: head_dim**-0.5,
    "1": lambda _: 1.0,
    "1/head_dim": lambda head_dim: 1 / head_dim,
}
# What a field can say, where that is not free text; a pairing may be followed by more words.
_SAID = {
    "rotary": ("none", *PAIRINGS),
    "softcap": ("none", "tanh"),
    "mask": ("True attends", "True hides", "added"),
    "axes": ("batch length width", "length batch width", "length width"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What is said of how the weights are used; None is not said: the model's config does.

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
        """Refuse with an OptionError what no reader of the field knows."""
        for name, known in _SAID.items():
            said = getattr(self, name)
            if said is not None and not said.startswith(known):
                raise OptionError(
                    saw=f"{name}={said!r}",
                    needed=f"None, which leaves it to the config, or {', '.join(known)}",
                    do="write it as the other layouts do: headwise layouts show NAME",
                )

    def is_same(self, other: AttentionSpec) -> bool:
        """Whether both say the same, and leave the same open."""
        called = dict.fromkeys(CALLING)
        return replace(self, **called) == replace(other, **called)

    def conflicts(self, other: AttentionSpec) -> dict[str, tuple[str, str]]:
        """What both say, and say differently: name -> (this, other).

        Two pairings of the rotation are no conflict: rows are moved from one to the other. The
        width of a rotation is compared only where both say that they rotate.
        """
        both_rotate = not {None, "none"} & {self.rotary, other.rotary}
        found = {}
        for name in FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in CALLING or None in (mine, theirs) or mine == theirs:
                continue
            if name == "rotary" and {mine, theirs} == set(PAIRINGS):
                continue
            if name == "rotary_width" and not both_rotate:
                continue
            found[name] = (mine, theirs)
        return found

    def moved(self, target: AttentionSpec) -> AttentionSpec:
        """Return this function as weights have it that were moved into a layout of ``target``.

        It stays what it was, whatever the layout says or leaves open, but for the pairing of the
        rotation: rows are then in the order of the target, or half-split where it names none.
        """
        rotary = self.rotary
        if rotary in (None, *PAIRINGS):
            rotary = target.rotary if target.rotary in PAIRINGS else rotary and "half-split"
        return replace(self, rotary=rotary, mask=target.mask, axes=target.axes)

    def with_rotary_width(self, sizes: Mapping[str, int]) -> AttentionSpec:
        """This function with the rotary_width in ``sizes``, where it leaves that open."""
        width, head_dim = sizes.get("rotary_width"), sizes["head_dim"]
        if width is None or self.rotary_width is not None:
            return self
        return replace(
            self, rotary_width="head_dim" if width == head_dim else f"{width} of {head_dim}"
        )


FIELDS = tuple(field.name for field in fields(AttentionSpec))


def require_same(
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

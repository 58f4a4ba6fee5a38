"""What makes the same weights another function, and is in no tensor.

None of it is ever folded into weights: a factor multiplied in and out again changes 15 % of the
entries of a bfloat16 matrix with a head_dim of 128.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from headwise.errors import OptionError

# How a layer is called, not what it computes: a caller can follow either.
CALLING = ("mask", "axes")
PAIRINGS = ("half-split", "interleaved")
# What a field can say, where that is not free text; a pairing may be followed by more words.
_SAID = {
    "rotary": ("none", *PAIRINGS),
    "softcap": ("none", "tanh"),
    "mask": ("True attends", "True hides", "added"),
    "axes": ("batch length width", "length batch width", "length width"),
}


@dataclass(frozen=True, kw_only=True)
class Function:
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

    scale: str | None = "1/sqrt(head_dim)"
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

    def is_same(self, other: Function) -> bool:
        """Whether both say the same, and leave the same open."""
        called = dict.fromkeys(CALLING)
        return replace(self, **called) == replace(other, **called)

    def conflicts(self, other: Function) -> dict[str, tuple[str, str]]:
        """What both say, and say differently: name -> (this, other).

        Two pairings of the rotation are no conflict: rows are moved from one to the other.
        """
        found = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name in CALLING or None in (mine, theirs) or mine == theirs:
                continue
            if field.name == "rotary" and {mine, theirs} == set(PAIRINGS):
                continue
            found[field.name] = (mine, theirs)
        return found

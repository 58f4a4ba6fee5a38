"""Running a model for a while as a reader needs it, and what is said of what it did not show."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase

from headwise.errors import OptionError
from headwise.scanning.reaching import Reach
from headwise.support.axes import describe_value

SHOWN = 4  # names, before the rest is counted
MOST_LAYERS = 12  # the same, of layers to choose from
LONGEST_NAME = 80  # characters that are compared with those of the layers


def is_chosen(layer: str, patterns: tuple[str, ...] | None) -> bool:
    """Whether a layer is asked for: by its name, or by a pattern such as "*layer.3.*"."""
    return patterns is None or any(fnmatchcase(layer, pattern) for pattern in patterns)


def require_layers(found: bool, patterns: tuple[str, ...] | None, seen: list[str]) -> None:
    """Raise OptionError if no layer that was seen is one that was asked for."""
    if found:
        return
    near = get_close_matches((patterns or ("",))[0][:LONGEST_NAME], seen, n=1)
    more = f", and {len(seen) - MOST_LAYERS} more" if len(seen) > MOST_LAYERS else ""
    raise OptionError(
        saw=f"layers {describe_value(list(patterns or ()))}",
        needed=f"among {', '.join(map(repr, seen[:MOST_LAYERS])) or 'none'}{more}: the layers "
        "whose attention was seen",
        do=f'{near[0]!r}, the nearest, or a pattern such as "*"'
        if near
        else 'name some of them, or give a pattern such as "*"',
    )


def require_attention(model: str, reach: Reach) -> None:
    """Raise OptionError if nothing was seen at all."""
    if reach.layers:
        return
    similar = ", ".join(sorted(set(reach.unseen.values()))) or "none"
    raise OptionError(
        saw=f"{model}, in which no attention was seen; looking like it: {similar}",
        needed="attention that goes through transformers' interface, torch's layers, "
        "scaled_dot_product_attention, or headwise",
        do="where a module multiplies queries and keys itself, put an AttentionMatrix there",
    )


def notes_of(reach: Reach) -> tuple[str, ...]:
    """What looks like attention, ran, and was not seen."""
    unseen = reach.unseen
    if not unseen:
        return ()
    names = ", ".join(f"{name} ({kind})" for name, kind in list(unseen.items())[:SHOWN])
    more = f" and {len(unseen) - SHOWN} more" if len(unseen) > SHOWN else ""
    return (
        f"{len(reach.layers)} layers were seen; {len(unseen)} that look like attention ran and "
        "were not: they multiply matrices themselves, call the kernel of another library, or are "
        f"scripted or exported graphs: {names}{more}",
    )

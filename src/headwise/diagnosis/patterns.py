"""Positions, inputs, rows and columns in which a difference shows, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from headwise.diagnosis.simulation.model import RecordedCall
from headwise.identify.comparison import format_noun_with_numbers


def describe_positions(parted: AbstractSet[int], every: AbstractSet[int]) -> str:
    """Return the positions that part in words; "" where they are all."""
    if not parted or parted == every:
        return ""
    if parted == {min(every)}:
        return "only the first token"
    if parted == every - {min(every)}:
        return "all but the first token"
    if parted == {place for place in every if place >= min(parted)}:
        return f"from position {min(parted)} on"
    if parted == {place for place in every if place <= max(parted)}:
        return f"up to position {max(parted)}"
    return format_noun_with_numbers("position", tuple(sorted(parted)))


def _pads(call: RecordedCall, side: str) -> bool:
    if (mask := call.inputs.mask) is None or mask.shape[-1] < 3:
        return False
    hidden = ~mask[..., -1, :]
    is_left = bool(hidden[..., 0].any())
    return is_left if side == "left" else bool(hidden[..., -2].any()) and not is_left


PATTERNS: Sequence[tuple[str, Callable[[RecordedCall], bool]]] = (
    ("only where a mask is given", lambda call: call.inputs.mask is not None),
    ("only where no mask is given", lambda call: call.inputs.mask is None),
    ("only with padding on the left", lambda call: _pads(call, "left")),
    ("only with padding on the right", lambda call: _pads(call, "right")),
    ("only with padding", lambda call: _pads(call, "left") or _pads(call, "right")),
    ("only in later calls with a cache", lambda call: bool(call.earlier)),
    ("only without earlier calls", lambda call: not call.earlier),
    ("only where a source is given", lambda call: call.inputs.source is not None),
)


def describe_calls(calls: Sequence[RecordedCall], parted: AbstractSet[int]) -> str:
    """Return which calls part in words; ``parted`` are their numbers. "" for all, or no pattern."""
    numbers = set(range(len(calls)))
    if not parted or parted == numbers:
        return ""
    for words, is_so in PATTERNS:
        if parted == {number for number in numbers if is_so(calls[number])}:
            return words
    lengths = [call.key_positions.shape[1] for call in calls]
    longest = max(lengths[number] for number in numbers - parted)
    shortest = min(lengths[number] for number in parted)
    if shortest > longest > 1:
        return f"only in inputs longer than {longest} tokens"
    return ""


def list_visible_keys(first: RecordedCall, second: RecordedCall) -> Iterator[str]:
    """Yield which queries see keys by one mask that they do not see by the other."""
    masks = [call.inputs.mask for call in (first, second) if call.inputs.mask is not None]
    if len(masks) < 2 or masks[0].shape[2:] != masks[1].shape[2:]:
        return
    for side, (mine, other) in (("first", masks), ("second", masks[::-1])):
        pairs = (mine & ~other).flatten(0, 1).any(0)
        queries, keys = (pairs.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
        if queries:
            who = format_noun_with_numbers("position", queries)
            some = "" if int(pairs.sum()) == len(queries) * len(keys) else "some of "
            yield f"{who} of the {side} also see {some}{format_noun_with_numbers('key', keys)}"


def describe_matrix(name: str, other: Tensor, right: Tensor) -> str:
    """Return the rows and columns of weights that differ, and by how much, in words.

    Both are canonical: ``wo`` has a column for each channel of a head, the others a row.
    """
    apart = (other - right).flatten(0, 1)
    apart = (apart.T if name == "wo" else apart).abs()
    parts = []
    for noun, sizes in (("row", apart.amax(1)), ("column", apart.amax(0))):
        numbers = tuple(sizes.nonzero().flatten().tolist())
        is_all = len(numbers) == len(sizes)
        parts.append(
            f"all {len(sizes)} {noun}s" if is_all else format_noun_with_numbers(noun, numbers)
        )
    return (
        f"{name}, read as a matrix, differs in {' and '.join(parts)}: by "
        f"{float(apart.norm() / right.norm()):.2g} of its size, in an entry by "
        f"{float(apart.max()):.2g} at most"
    )

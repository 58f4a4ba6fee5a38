"""Sizes, lists and values as messages write them; docs/contract.md has the names of axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MATRIX_AXES = ("batch", "heads", "queries", "keys")
LONGEST_VALUE = 80  # characters of a value in a message


def describe_sizes(tensor: Tensor, axes: Sequence[str]) -> str:
    """``(batch 3, heads 6, queries 24)`` for a tensor of shape (3, 6, 24)."""
    return "(" + ", ".join(f"{a} {n}" for a, n in zip(axes, tensor.shape, strict=True)) + ")"


def describe_count(count: int, what: str) -> str:
    """``1 layer``, ``1,024 tokens``."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def list_some(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 4 more`` for seven names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest_counts(count: int, fits: Callable[[int], bool], *, most: int) -> str:
    """``8 or 16`` for 12: the nearest counts below and above that fit, of 1 to ``most``."""
    below = (n for n in range(min(count - 1, most), 0, -1) if fits(n))
    above = (n for n in range(max(count + 1, 1), most + 1) if fits(n))
    nearest = [next(counts, None) for counts in (below, above)]
    return " or ".join(str(n) for n in nearest if n is not None)


def describe_move(name: str, tensor: Tensor, device: torch.device) -> str:
    """Return the code that brings a tensor and a layer on ``device`` to one device."""
    if device.type == "meta":
        where = f'layer.to_empty(device="{tensor.device}")'
        return f"{where}, then layer.load_state_dict(...): weights on meta hold no numbers"
    if tensor.is_meta:
        return f'make {name} with device="{device}": a tensor on meta holds no numbers'
    return f'{name}.to("{device}"), or layer.to("{tensor.device}")'


def axis_broadcasts_to(size: int, wanted: int) -> bool:
    """True if an axis of this size broadcasts to ``wanted``.

    Not ``size in (1, wanted)``: compiled, that is False where only one of both is symbolic.
    """
    return size == 1 or size == wanted


def human_bytes(count: int) -> str:
    """``6.4 GB`` for 6_442_450_944: decimal units, two significant digits."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return (
        f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
    )


def describe_value(value: object) -> str:
    """Return a value as a message shows it, in at most some 80 characters.

    A tensor or an array is shown by dtype and shape, a long string or container by its length, a
    module or another object with a long repr by its type. The repr of a long container is never
    computed.
    """
    kind = type(value).__name__
    import torch  # here: the catalogue of layouts is read without it

    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, str | bytes):
        if len(value) <= LONGEST_VALUE:
            return repr(value)
        return f"{value[: LONGEST_VALUE // 2]!r}... ({kind} of length {len(value)})"
    if isinstance(value, int) and value.bit_length() > 4 * LONGEST_VALUE:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | set | frozenset | dict):
        return _describe_container(value)
    if isinstance(value, torch.nn.Module):
        return f"a module of type {kind}"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        return f"an array of type {kind}, dtype {value.dtype} and shape {value.shape}"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"an object of type {kind}"


def _describe_container(value: Collection[Any]) -> str:
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    plain = all(value is None or isinstance(value, str | int | float) for value in items)
    short = len(items) <= 8 and plain and all(len(describe_value(value)) <= 20 for value in items)
    return repr(value) if short else f"a {type(value).__name__} of length {len(value)}"


def in_quotes(word: str) -> str:
    """Put a word into quotation marks: ``“it”``; single ones if it has double ones: ``‘“’``."""
    return f"‘{word}’" if {*'"“”„'} & {*word} else f"“{word}”"


def escape_unprintable(text: str) -> str:
    """Escape characters that cannot be printed, and show a text of spaces as ``␣``.

    A control character from a file would otherwise act on the terminal.
    """
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )

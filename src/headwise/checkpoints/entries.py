"""In which entries two tensors differ, in words."""

from __future__ import annotations

import torch
from torch import Tensor


def what_differs(a: Tensor, b: Tensor) -> str:
    """The shapes or dtypes of two tensors that are not the same; else how many entries, and how."""
    for word in ("shape", "dtype"):
        mine, theirs = getattr(a, word), getattr(b, word)
        if mine != theirs:
            return f"{word} {_said(mine)} against {_said(theirs)}"
    bits = (_bytes(a) != _bytes(b)).any(1)
    if not a.is_floating_point():
        return f"{int(bits.sum())} of {a.numel()} entries"
    # Numbers of 8 bits can be compared only as wider ones.
    x, y = (tensor.double().reshape(-1)[bits] for tensor in (a, b))
    nan, infinite = (is_it(x) | is_it(y) for is_it in (torch.isnan, torch.isinf))
    most = (x - y)[~nan & ~infinite].abs()
    kinds = {
        f"by at most {float(most.max()) if len(most) else 0:.3g}": (x != y) & ~nan & ~infinite,
        "where one is infinite": infinite & ~nan,
        "where one alone is NaN": nan & (x.isnan() != y.isnan()),
        "NaN in both, of other bits": x.isnan() & y.isnan(),
        "zero in both, of another sign": x == y,
    }
    counted = {words: int(kind.sum()) for words, kind in kinds.items()}
    shown = [(number, words) for words, number in counted.items() if number]
    if len(shown) == 1:
        return f"{shown[0][0]} of {a.numel()} entries, {shown[0][1]}"
    listed = ", ".join(f"{number} {words}" for number, words in shown)
    return f"{int(bits.sum())} of {a.numel()} entries: {listed}"


def _bytes(tensor: Tensor) -> Tensor:
    """A row for each entry."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _said(value: torch.Size | torch.dtype) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)

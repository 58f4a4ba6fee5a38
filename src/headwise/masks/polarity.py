"""Signs that a mask of torch's convention has the reverse polarity, or hides nothing.

torch's layer answers a query without keys with NaN, headwise with zeros, from which a model learns
nothing. Four corners of an ``attn_mask`` are read first, then an edge, and the rest only where
these already show a sign.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from headwise.errors import PolarityWarning, join_error_lines
from headwise.support.tracing import may_check_values

ROWS = 256  # rows of an ``attn_mask`` that are read at once for signs
HIDDEN = "True (or -inf) where a key is hidden"
Sign = tuple[str, tuple[str, str, str]]  # its name, and the lines of its warning
Test = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a part of a mask, its queries and its keys


def warn_of_polarity(
    padding: Tensor | None,
    mask: Tensor | None,
    known: frozenset[str] = frozenset(),
    *,
    stacklevel: int,
    argument: str = "key_padding_mask={}",
) -> frozenset[str]:
    """Warn of each sign whose name is not in ``known``, and return the names of both.

    The masks fit their call, and ``argument`` is the code that passes the padding. Values are read
    in eager mode on the CPU alone.
    """
    find_padding = partial(_padding_signs, argument=argument)
    for each, find in ((padding, find_padding), (mask, _attn_mask_signs)):
        if each is not None and may_check_values(each) and each.numel():
            for name, lines in find(each.detach(), learned=each.requires_grad, known=known):
                known |= {name}
                warnings.warn(join_error_lines(*lines), PolarityWarning, stacklevel=stacklevel + 1)
    return known


def _padding_signs(
    mask: Tensor, *, learned: bool, known: frozenset[str], argument: str
) -> Iterator[Sign]:
    """Yield the signs of a ``key_padding_mask``: (batch, keys), or (keys,)."""
    shape = f"key_padding_mask of shape {tuple(mask.shape)}"
    needed = f"{HIDDEN}; attention_mask of Hugging Face is the reverse"
    do = f"{argument.format('attention_mask == 0')}; ignore this if"
    rows = mask.reshape(-1, mask.shape[-1])
    hides = _hides(rows)
    hidden = hides.all(-1).tolist()
    is_run = bool((hides[:, 0] & ~hides[:, -1]).all() and (hides[:, 1:] <= hides[:, :-1]).all())
    if is_run and "padding before" not in known:
        saw = f"{shape} hides the first keys of every sequence, and shows the last"
        yield "padding before", (saw, needed, f"{do} padding stands before the tokens")
    if all(hidden) and "padding of all" not in known:
        saw = f"{shape} hides every key of every sequence: no token is attended to"
        yield "padding of all", (saw, needed, f"{do} all keys are padding")
    if any(hidden) and not all(hidden) and "padding of some" not in known:
        index = hidden.index(True)
        saw = f"{shape} hides every key of sequence {index}, but not of every sequence"
        yield "padding of some", (saw, needed, f"{do} sequence {index} is empty")
    zeros_and_ones = rows.is_floating_point() and not learned and bool((rows == 1).any())
    if zeros_and_ones and "padding of 0 and 1" not in known and _holds(rows[None], _is_zero_or_one):
        yield "padding of 0 and 1", _zero_one_lines("key_padding_mask", mask)


def _attn_mask_signs(mask: Tensor, *, learned: bool, known: frozenset[str]) -> Iterator[Sign]:
    """Yield the sign of an ``attn_mask``: (queries, keys), or (batch*heads, queries, keys)."""
    matrices = mask if mask.dim() == 3 else mask[None]
    queries, keys = matrices.shape[1:]
    corners = matrices[0, :: max(queries - 1, 1), :: max(keys - 1, 1)].flatten().tolist()
    hidden = [value in (True, -torch.inf) for value in corners]
    shape = f"attn_mask of shape {tuple(mask.shape)}"
    needed = f"{HIDDEN}; a bool mask of scaled_dot_product_attention is the reverse"
    do = "attn_mask=" + ("~attn_mask" if mask.dtype == torch.bool else "(attn_mask == 0)")
    test: Test
    if mask.is_floating_point() and 1 in corners and not learned:
        name, lines = "mask of 0 and 1", _zero_one_lines("attn_mask", mask)
        test = _is_zero_or_one
    elif all(hidden):
        saw = f"{shape} hides every key of every query: no token is attended to"
        name, lines = "mask of all", (saw, needed, f"{do}, or no attn_mask")
        test = _hides
    elif hidden == [True, False, True, True] and keys >= queries:
        saw = f"{shape} hides the key of each query and all before it, and so all of the last query"
        name, lines = "mask of earlier keys", (saw, needed, do)
        test = _hides_earlier_keys
    else:
        return
    if name not in known and _holds(matrices, test):
        yield name, lines


def _zero_one_lines(name: str, mask: Tensor) -> tuple[str, str, str]:
    return (
        f"{name} of shape {tuple(mask.shape)} holds 0 and 1 in {mask.dtype}: a float mask is added"
        " to the scores, so this one hides nothing",
        "bool (True = hidden), or float with -inf where a key is hidden",
        f"{name}={name} == 0 if 1 means real or may attend, {name}={name}.bool() if 1 means hidden",
    )


def _hides(part: Tensor, _query: Tensor | None = None, _key: Tensor | None = None) -> Tensor:
    return part if part.dtype == torch.bool else part == -torch.inf


def _is_zero_or_one(part: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
    return (part == 0) | (part == 1)


def _hides_earlier_keys(part: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return where a part hides just the keys up to the query's own; both count from the end."""
    return _hides(part) == (key <= query)


def _holds(matrices: Tensor, test: Test) -> bool:
    """True if a test holds at every place: of the first column, of the last row, then of all."""
    queries, keys = matrices.shape[1:]
    query, key = torch.arange(-queries, 0)[:, None], torch.arange(-keys, 0)
    parts = [(slice(None), slice(1)), (slice(-1, None), slice(None))]
    parts += [(slice(i, i + ROWS), slice(None)) for i in range(0, queries, ROWS)]
    return all(
        bool(test(matrices[:, rows, columns], query[rows], key[columns]).all())
        for rows, columns in parts
    )

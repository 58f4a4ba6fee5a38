"""Labels of rows: equal labels for equal numbers.

Exact labels are a hash of the bits of a row, int64 with wrap-around. They decide nothing: whoever
uses them compares every entry afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 20  # entries that are widened to int64 at a time
_SEED = 16
_MULTIPLIER = -7046029254386353131
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_hash_multipliers(count: int, seed: int = 0) -> Tensor:
    """Return random odd numbers to multiply bits by, the first ones equal for every count.

    Returns:
        (count), int64.
    """
    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def mix_bits(labels: Tensor) -> Tensor:
    """Return labels whose bits depend on all bits of the given ones."""
    labels = (labels ^ (labels >> 29)) * _MULTIPLIER
    return (labels ^ (labels >> 32)) * _MULTIPLIER


def read_bits(x: Tensor) -> Tensor:
    """Return the bits of each entry as integers; -0 counts as 0."""
    whole = (x + 0.0).contiguous() if x.dtype.itemsize > 1 else x.contiguous()
    return whole.view(_INTEGERS[x.dtype.itemsize])


def hash_rows(rows: Tensor) -> Tensor:
    """Return one hash for each row.

    Args:
        rows: (rows, columns).

    Returns:
        (rows), int64.
    """
    count, columns = rows.shape
    weights, labels = make_hash_multipliers(columns), torch.zeros(count, dtype=torch.int64)
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, count, step):
        bits = read_bits(rows[start : start + step]).to(torch.int64)
        labels[start : start + step] = (bits * weights).sum(1)
    return mix_bits(labels)


def hash_columns(rows: Tensor) -> Tensor:
    """Return one hash for each column, the one that `hash_rows` has for it as a row.

    Args:
        rows: (rows, columns).

    Returns:
        (columns), int64.
    """
    count, columns = rows.shape
    weights, labels = make_hash_multipliers(count), torch.zeros(columns, dtype=torch.int64)
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, count, step):
        bits = read_bits(rows[start : start + step]).to(torch.int64)
        labels += (bits * weights[start : start + step, None]).sum(0)
    return mix_bits(labels)


def hash_label_sequences(labels: Tensor, weights: Tensor) -> Tensor:
    """Return one hash for each sequence of labels.

    Args:
        labels: (sequences, rows), int64.
        weights: (rows), int64; 0 for a row that does not count.

    Returns:
        (sequences), int64.
    """
    return (labels * weights).sum(-1)

"""Comparison of the operands and options of all ranks, before anything large is sent.

Each rank sends 15 numbers: the lengths that it holds, and for all that must be the same everywhere
a number that tells differences: a size, or a checksum. Of large tensors every n-th entry is read,
so the comparison takes less than a millisecond. A rank whose own operands are refused says so in
its numbers, and every rank raises: none waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import HeadwiseError, OptionError
from headwise.masks.clauses.predicate_clause import PredicateClause
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.sharding.collectives import gather_numbers

READ = 2**14  # entries of a tensor that a checksum reads, at most
LOCAL = ("queries", "keys")  # numbers that may differ between ranks
# Numbers that may not -> how a message names them.
SHARED = {
    "batch": "batch of q",
    "heads": "number of heads of q",
    "kv_heads": "number of kv_heads of k",
    "head_dim": "head_dim",
    "value_dim": "value_dim of v",
    "dtype": "dtype",
    "requires_grad": "set of operands that require a gradient",
    "mask": "mask",
    "score_bias": "score_bias",
    "sink": "sink",
    "options": "scale, softcap, by or limit",
    "layout": "layout",
}


@dataclass(frozen=True)
class Agreement:
    """Lengths of all ranks, where everything else agreed."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


def require_agreement_of_ranks(
    call: str, mesh: DeviceMesh, numbers: Callable[[], dict[str, float]]
) -> Agreement:
    """Compare what the ranks of a mesh pass to a call.

    Args:
        call: the call, for messages.
        mesh: of one dimension.
        numbers: checks this rank's operands, and returns the numbers of `LOCAL` and `SHARED`.

    Raises:
        HeadwiseError: of ``numbers``, on the rank that raised it.
        OptionError: the ranks differ, or another rank raised an error.
    """
    refusal: HeadwiseError | None = None
    names = (*LOCAL, *SHARED)
    try:
        known = numbers()
        mine = [0.0, *(float(known[name]) for name in names)]
    except HeadwiseError as error:
        refusal, mine = error, [1.0] + [0.0] * len(names)
    everyone = gather_numbers(mine, mesh.get_group(), mesh.device_type).tolist()
    if refusal is not None:
        raise refusal
    if refused := [rank for rank, row in enumerate(everyone) if row[0]]:
        raise OptionError(
            saw=f"{call}: rank {refused[0]} of the mesh refused its operands",
            needed="operands that fit on every rank",
            do=f"read the message of rank {refused[0]}",
        )
    columns = dict(zip(names, list(zip(*everyone, strict=True))[1:], strict=True))
    for name, described in SHARED.items():
        values = columns[name]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            raise OptionError(
                saw=f"{call}: rank {others[0]} of the mesh has another {described} than rank 0",
                needed=f"the same on all {len(everyone)} ranks; masks and biases are those of the "
                "whole sequence",
                do="build it from the same numbers everywhere, e.g. after "
                "torch.distributed.broadcast",
            )
    queries, keys = (tuple(int(n) for n in columns[name]) for name in LOCAL)
    return Agreement(queries, keys)


# ---- checksums ---------------------------------------------------------------------------------


def checksum(*values: Any) -> int:
    """Return a number for plain values and tensors; other values have another one nearly always."""
    total = 0
    for value in values:
        data = _sample_bytes(value) if isinstance(value, Tensor) else repr(value).encode()
        total = zlib.crc32(data, total)
    return total


def checksum_mask(mask: Mask) -> int:
    """Return a number for a mask; of a caller's function its code is read alone."""
    values: list[Any] = [str(mask)]
    for clause in mask.clauses:
        values += [getattr(clause, name) for name in clause.integer_fields]
        values += clause.tensors()
        if isinstance(clause, PredicateClause):
            values.append(getattr(getattr(clause.function, "__code__", None), "co_code", None))
    return checksum(*values)


def checksum_bias(bias: ScoreBias) -> int:
    """Return a number for a score bias."""
    return checksum(str(bias), *bias.all_tensors())


def _sample_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // READ)].cpu().contiguous()
    shape = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return shape + some.view(torch.uint8).numpy().tobytes()

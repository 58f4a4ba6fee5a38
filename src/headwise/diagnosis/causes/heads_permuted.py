"""Whole heads in another order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class HeadsPermutedCause(MovedProjectionsCause):
    """Whole heads of a projection are in another order.

    The order of heads is free, if q, k, v and the columns of the output projection share it.
    `compare` then answers "same function, other weights". In a single projection, another order
    makes another function.

    Repair:
        Take the heads in the order that is reported, in every projection that has another one.

    Confused with:
        shards joined in the wrong order: shards hold whole heads.
        kv heads tiled instead of repeated: both permute the heads of q and of the output.
        output heads in another group order: a permutation that kv groups make.
    """

    name: ClassVar[str] = "heads permuted"
    symptom: ClassVar[str] = "All heads are there, in another order"
    cost: ClassVar[float] = 1.05

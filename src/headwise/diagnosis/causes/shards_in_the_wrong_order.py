"""Tensor-parallel shards joined in the wrong order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class ShardOrderCause(MovedProjectionsCause):
    """Shards of a projection are joined in the wrong order."""

    name: ClassVar[str] = "shards joined in the wrong order"
    symptom: ClassVar[str] = "A checkpoint merged from several ranks gives gibberish"
    cost: ClassVar[float] = 1.06

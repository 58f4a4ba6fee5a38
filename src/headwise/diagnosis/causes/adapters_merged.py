"""Weights that differ by a matrix of low rank, as by an adapter that one side lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.collect_projection_tokens import (
    collect_projection_tokens,
    flatten_tokens,
)
from headwise.diagnosis.causes.find_projection_moves import STAGE_OF
from headwise.diagnosis.simulation.gaps import WHOLE
from headwise.diagnosis.simulation.stage_rounding import allowed_difference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LOW = 4  # a rank is low if so many times it fits into the matrix


class AdaptersMergedCause(Cause):
    """The weights of a projection differ by a matrix of low rank.

    A low-rank adapter (LoRA) adds B A to a matrix of weights. It is not merged on one side, or is
    merged twice. The rest beyond that rank is the rounding of stored weights.

    Wrong:
        model = PeftModel.from_pretrained(base, adapter)
        base.save_pretrained(path)

    Right:
        model = PeftModel.from_pretrained(base, adapter)
        model.merge_and_unload().save_pretrained(path)

    Repair:
        Merge the adapter once on both sides, or on neither.

    Confused with:
        bias missing: a constant is of rank 1 too, where there are fewer tokens than columns.
    """

    name: ClassVar[str] = "adapters merged or not"
    symptom: ClassVar[str] = "A fine-tuned model answers as the base model does after the merge"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 2.2

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the weights plus the matrix of least rank that the recorded stages state.

        All projections that part are tried together, and each alone.
        """
        stated = {role: _fit_low_rank_change(evidence, role) for role in STAGE_OF}
        added = {role: change for role, change in stated.items() if change is not None}
        for roles in dict.fromkeys((tuple(added), *((role,) for role in added))):
            if roles:
                changes = {f"w{role}": added[role][1] for role in roles}
                weights = {name: evidence.model.weights[name] + x for name, x in changes.items()}
                yield Variant(
                    evidence.model.with_weights(**weights),
                    {"roles": "".join(roles), "rank": max(added[role][0] for role in roles)},
                    f"merge the adapter of {', '.join(weights)} on both sides or on neither",
                )


def _fit_low_rank_change(evidence: Evidence, role: str) -> tuple[int, Tensor] | None:
    """Return the rank and the change of the weights, None where it is not of low rank.

    Some tokens must depend on others linearly: only they show that the stage changes linearly.
    """
    stage, weight = STAGE_OF[role], evidence.model.weights[f"w{role}"]
    heads = {head for _, _, head in evidence.parted_calls_and_heads(stage)}
    every = {WHOLE} if role == "o" else set(range(len(weight)))
    tokens = collect_projection_tokens(evidence, role) if heads == every else None
    if tokens is None:
        return None
    x, recorded = tokens
    predicted = flatten_tokens(evidence.model.predict_stage(stage, call) for call in evidence.calls)
    bound = flatten_tokens(
        allowed_difference(evidence.model.prepare_stage(stage, call)) for call in evidence.calls
    )
    if predicted.shape != recorded.shape:
        return None
    change = recorded - predicted
    matrix = weight.flatten(0, 1) if role == "o" else weight.flatten(0, 1).T
    sizes = torch.linalg.svdvals(change)
    rest = sizes.square().flip(0).cumsum(0).flip(0).sqrt()  # beyond the first ranks
    rank = int((rest > bound.norm() + _norm_of_stored_rounding(evidence, x, matrix)).sum())
    span = int(torch.linalg.matrix_rank(x))
    if not 0 < LOW * rank <= min(span, change.shape[1]) or span == len(x):
        return None
    added = torch.linalg.lstsq(x, change, driver="gelsd").solution
    changed_rows = (change.abs() > bound).any(0)
    changed_columns = added.norm(dim=1) > span * torch.finfo(x.dtype).eps * added.norm()
    if not bool(changed_rows.all() and changed_columns.all()):
        return None
    return rank, (added if role == "o" else added.T).reshape(weight.shape)


def _norm_of_stored_rounding(evidence: Evidence, x: Tensor, matrix: Tensor) -> Tensor:
    """Return the norm of the products of tokens with the rounding of stored sums of weights.

    Roundings are independent, so their squares add up. They are those of the narrowest dtype that
    holds every weight of the model.
    """
    weights = evidence.model.weights.values()
    holds = (
        dtype
        for dtype in DTYPES
        if all(torch.equal(weight.to(dtype).to(weight.dtype), weight) for weight in weights)
    )
    unit = torch.finfo(next(holds)).eps / 2
    return unit * (x.square() @ matrix.square()).sum().sqrt()

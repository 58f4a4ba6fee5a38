"""Weights that were never loaded, and have their initial values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.moves.compare_states import rows_of
from headwise.diagnosis.moves.initial_values import (
    Initialisation,
    fits,
    initialisation_of,
    initialisations,
)

LEAST_ENTRIES = 1000
# The mean square of sums of products of whitened tokens, relative to that of independent numbers.
WIDEST = 0.15


class InitialWeightsCause(Cause):
    """A projection has weights that no mistake makes of the right ones, as initialised.

    Fewer tokens than columns do not decide the weights. Their statistics are those of the stage,
    once the tokens are whitened: independent numbers of the variance of the weights.
    """

    name: ClassVar[str] = "weights at their initial values"
    symptom: ClassVar[str] = "A projection of a loaded model differs from run to run"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    cost: ClassVar[float] = 2.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return models whose weights make the recorded stage, where they look initialised."""
        rows = rows_of(evidence.model.weights)
        heads = {r: rows.matrices[r].shape[0] for r in self.stages}
        shapes = {r: (rows.flat(r).shape[0], rows.flat(r).shape[1]) for r in rows.roles}
        for role in self.stages:
            parted = {head for _, _, head in evidence.parted(role)}
            if parted != set(range(heads[role])):
                continue
            x, y = _tokens(evidence, role)
            whitened = _whitened(x, y)
            right = initialisation_of(role, rows)
            if whitened is None or right is not None:
                continue
            for kind in initialisations(role, shapes):
                if _is_drawn_from(whitened, kind):
                    yield _variant(evidence, role, x, y, kind)
                    break


def _tokens(evidence: Evidence, role: str) -> tuple[Tensor, Tensor]:
    """Return the inputs (tokens, columns) and the stage (tokens, rows)."""
    calls = [call for call in evidence.calls if role in call.stages]
    inputs = [call.inputs.x if role == "q" else call.inputs.key_source for call in calls]
    stages = [call.stages[role].transpose(1, 2).flatten(2) for call in calls]
    x, y = (
        torch.cat([part.flatten(0, 1).double() for part in parts]) for parts in (inputs, stages)
    )
    return x, y


def _whitened(x: Tensor, y: Tensor) -> Tensor | None:
    """Return combinations of tokens that have unit inputs, at right angles to each other.

    Returns:
        (combinations, rows): the products of the weights with them; None where they are too few.
    """
    x, y = x - x.mean(0), y - y.mean(0)
    tokens, lengths, _ = torch.linalg.svd(x, full_matrices=False)
    kept = lengths > 1e-6 * lengths[0]
    products = (tokens[:, kept].T @ y) / lengths[kept, None]
    return products if products.numel() >= LEAST_ENTRIES else None


def _is_drawn_from(products: Tensor, kind: Initialisation) -> bool:
    """True if products with unit vectors are independent normal numbers of the right variance."""
    combinations, rows = products.shape
    normal = Initialisation(kind.text, kind.deviation, is_uniform=False)
    if not fits(products.flatten(), normal):
        return False
    gram = (products / kind.deviation) @ (products / kind.deviation).T / rows
    apart = float((gram - torch.eye(combinations, dtype=gram.dtype)).square().sum())
    return abs(apart * rows / (combinations * (combinations + 1)) - 1) < WIDEST


def _variant(evidence: Evidence, role: str, x: Tensor, y: Tensor, kind: Initialisation) -> Variant:
    weights = evidence.model.weights
    biased = f"b{role}" in weights
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if biased else x
    solution = torch.linalg.lstsq(inputs, y, driver="gelsd").solution.T
    shape = weights[f"w{role}"].shape
    changes = {f"w{role}": solution[:, : x.shape[1]].reshape(shape)}
    if biased:
        changes[f"b{role}"] = solution[:, -1].reshape(shape[:2])
    parameters = {"role": role, "initialisation": kind.text, "bound": kind.width}
    return Variant(
        evidence.model.with_weights(**changes), parameters, f"load w{role}: it was initialised"
    )

"""Weights that were never loaded, and have their initial values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.collect_projection_tokens import collect_projection_tokens
from headwise.diagnosis.causes.find_projection_moves import STAGE_OF
from headwise.diagnosis.moves.initial_values import (
    Initialisation,
    is_drawn_from_initialisation,
    list_initialisations,
    recognise_initialisation,
)
from headwise.diagnosis.moves.moves_between_canonical_weights import extract_rows
from headwise.diagnosis.moves.row_map import MapName
from headwise.diagnosis.moves.rows_of_all_projections import Rows
from headwise.diagnosis.simulation.gaps import WHOLE

LEAST_ENTRIES = 400
PARALLEL = 0.9
# The relative distance of sorted entries times the root of their number: 1 to 3 for two draws.
MOVED = 0.1
MOST_DEVIATIONS = 4  # of the measured variance, in its standard deviations
# The mean square of sums of products of whitened tokens, relative to that of independent numbers.
WIDEST = 0.15


class InitialWeightsCause(Cause):
    """A projection has weights that no mistake makes of the right ones, as initialised.

    Fewer tokens than columns do not decide the weights. Their statistics are those of the stage,
    once the tokens are whitened: independent numbers of the variance of the weights.

    Repair:
        Load the tensor that is reported. A prefix such as `model.` in the names of the file is the
        usual reason.

    Confused with:
        rows zero: loaders that make zeros in place of usual initial values.
    """

    name: ClassVar[str] = "weights at their initial values"
    symptom: ClassVar[str] = (
        "A projection differs in every run: some weights were newly initialized, not loaded"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    is_statistical: ClassVar[bool] = True

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return models whose weights make the recorded stage, where they look initialised."""
        rows = extract_rows(evidence.model.weights)
        shapes = {
            r: (rows.matrix_of_role(r).shape[0], rows.matrix_of_role(r).shape[1])
            for r in rows.roles
        }
        for role, stage in STAGE_OF.items():
            parted = {head for _, _, head in evidence.parted_calls_and_heads(stage)}
            if parted != ({WHOLE} if role == "o" else set(range(rows.matrices[role].shape[0]))):
                continue
            tokens = collect_projection_tokens(evidence, role)
            if tokens is None:
                continue
            x, y = tokens
            whitened = _whiten_tokens(x, y)
            if whitened is None or not _has_no_trace_of_right_weights(evidence, role, x, whitened):
                continue
            kinds = list_initialisations(role, shapes)
            kind = next((each for each in kinds if _is_drawn_from(whitened, each)), None)
            if kind is None:
                continue
            variant = _fit_weights_variant(evidence, role, x, y, kind)
            if not _has_permuted_entries(variant.model.weights[f"w{role}"], rows):
                yield variant

    def remedy(self, name: MapName) -> str:
        """See `Cause.remedy`."""
        return _weight_loading_advice(name.roles)


def _weight_loading_advice(roles: Iterable[str]) -> str:
    return f"load {', '.join(f'w{role}' for role in roles)}: not loaded, but initialised"


def _has_no_trace_of_right_weights(
    evidence: Evidence, role: str, x: Tensor, products: Tensor
) -> bool:
    """True if nothing of the right weights is in the products.

    The products do not correlate with those of the right weights of any projection, which may be
    in this one's place. Where the right weights look initialised themselves, some stage must agree
    as well.
    """
    rows = extract_rows(evidence.model.weights)
    all_parted = all(evidence.parted_calls_and_heads(stage) for stage in ("q", "k", "v"))
    if all_parted and recognise_initialisation(role, rows) is not None:
        return False
    roles = [role] if role == "o" else [each for each in rows.roles if each != "o"]
    for each in roles:
        matrix = rows.matrix_of_role(each)
        if matrix.shape[0 if role == "o" else 1] != x.shape[1]:
            continue
        right = _whiten_tokens(x, x @ (matrix if role == "o" else matrix.T).double())
        if right is None or _rows_correlate(products, right):
            return False
    return True


def _rows_correlate(products: Tensor, right: Tensor) -> bool:
    """True if two rows are parallel, or all rows resemble a little those in the same places."""
    ours, theirs = (each / each.norm(dim=0) for each in (products, right))
    if float((ours.T @ theirs).abs().max()) >= PARALLEL:
        return True
    if ours.shape != theirs.shape:
        return False
    resemblance = abs(float((ours * theirs).sum(0).mean()))
    return bool(resemblance >= 5 / products.numel() ** 0.5)


def _has_permuted_entries(weights: Tensor, rows: Rows) -> bool:
    """True if the entries of the weights are those of a right projection, in another order."""
    ours = weights.flatten().sort().values
    for role in rows.roles:
        theirs = rows.matrix_of_role(role).double().flatten().sort().values
        apart = (ours - theirs).norm() / theirs.norm() if len(ours) == len(theirs) else torch.inf
        if apart * len(ours) ** 0.5 < MOVED:
            return True
    return False


def _whiten_tokens(x: Tensor, y: Tensor) -> Tensor | None:
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
    normal = Initialisation(kind.text, kind.standard_deviation, is_uniform=False)
    apart = float(products.square().mean().sqrt()) / kind.standard_deviation - 1
    if abs(apart) * (2 * products.numel()) ** 0.5 > MOST_DEVIATIONS:
        return False
    if not is_drawn_from_initialisation(products.flatten(), normal):
        return False
    gram = (products / kind.standard_deviation) @ (products / kind.standard_deviation).T / rows
    size = float((gram - torch.eye(combinations, dtype=gram.dtype)).square().sum())
    return abs(size * rows / (combinations * (combinations + 1)) - 1) < WIDEST


def _fit_weights_variant(
    evidence: Evidence, role: str, x: Tensor, y: Tensor, kind: Initialisation
) -> Variant:
    weights = evidence.model.weights
    biased = f"b{role}" in weights
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if biased else x
    solution = torch.linalg.lstsq(inputs, y, driver="gelsd").solution
    matrix, shape = solution[: x.shape[1]], weights[f"w{role}"].shape
    changes = {f"w{role}": (matrix if role == "o" else matrix.T).reshape(shape)}
    if biased:
        changes[f"b{role}"] = solution[-1].reshape(weights[f"b{role}"].shape)
    parameters = {"role": role, "initialisation": kind.text, "bound": kind.width}
    return Variant(evidence.model.with_weights(**changes), parameters, _weight_loading_advice(role))

"""Causes in the weights: not loaded, not merged, not used, or of another layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.projections import (
    STAGE_OF,
    collect_projection_tokens,
    flatten_tokens,
)
from headwise.diagnosis.moves.initial import (
    Initialisation,
    is_drawn_from_initialisation,
    list_initialisations,
    recognise_initialisation,
)
from headwise.diagnosis.moves.maps import MapName
from headwise.diagnosis.moves.rows import Rows
from headwise.diagnosis.moves.state import extract_rows
from headwise.diagnosis.simulation.gaps import WHOLE, replace_model_stage_in_heads
from headwise.diagnosis.simulation.rounding import allowed_difference

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


class ProjectionModuleBypassedCause(Cause):
    """The weights of a projection are used without a call of its module.

    A module may do more than multiply by its weights: hooks scale its output, and wrappers of
    adapters or of quantised weights add to it. Code that reads `q_proj.weight` skips this.

    Wrong:
        q = F.linear(x, layer.q_proj.weight)

    Right:
        q = layer.q_proj(x)

    Repair:
        Call the module of the projection.

    Confused with:
        factor: if a hook multiplies the output, the weights may as well be divided.
        scale: likewise, for queries or keys without a norm.
    """

    name: ClassVar[str] = "projection never called"
    symptom: ClassVar[str] = "Hooks of a projection never run, and the layer ignores an adapter"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 0.5

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the projections of the stored weights, all that part and each."""
        of_weights = evidence.model.of_weights
        if of_weights is None:
            return
        parted = tuple(
            role for role, stage in STAGE_OF.items() if evidence.parted_calls_and_heads(stage)
        )
        for roles in dict.fromkeys((parted, *((role,) for role in parted))):
            model = evidence.model
            for role in roles:
                model = replace_model_stage_in_heads(model, of_weights, STAGE_OF[role], None)
            names = "".join(roles)
            yield Variant(model, {"roles": names}, f"call the modules of {', '.join(roles)}")


class LayersOffByOneCause(Cause):
    """Each layer of a model has the weights of the next layer, or of the one before.

    Some formats count layers from 1, and some count the embedding as layer 0.

    Wrong:
        layer.load(file[f"layers.{number + 1}"])  # of a file that counts from 0

    Right:
        layer.load(file[f"layers.{number}"])

    Repair:
        Count from the first layer of the file.

    Confused with:
        layers exchanged: if some layers alone have moved.
    """

    name: ClassVar[str] = "layers off by one"
    symptom: ClassVar[str] = "Weights load, and every layer is wrong: layer numbers start at 1"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:  # noqa: ARG002
        """Return nothing for one layer. A layer that parts is computed by every other layer."""
        yield from ()


class LayersExchangedCause(Cause):
    """A layer of a model has the weights of another layer.

    Files list their tensors in the order of text: `layers.10` comes before `layers.2`. Code that
    takes them in that order puts most layers in the wrong places. All shapes fit.

    Wrong:
        for layer, name in zip(model.layers, sorted(names)):
            layer.load(file[name])

    Right:
        for number, layer in enumerate(model.layers):
            layer.load(file[f"layers.{number}"])

    Repair:
        Load each layer by its number.

    Confused with:
        layers off by one: if all layers moved by the same number of places.
    """

    name: ClassVar[str] = "layers exchanged"
    symptom: ClassVar[str] = (
        "Weights load, the model talks nonsense, and some of its layers are right: layers swapped"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:  # noqa: ARG002
        """Return nothing for one layer. A layer that parts is computed by every other layer."""
        yield from ()

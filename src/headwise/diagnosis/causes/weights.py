"""Causes in the weights of projections: exchanged, rounded, not loaded, not merged or not used.

The output gate is a projection too: it is missing, of another function, or merged otherwise.

Most mistakes in weights are moves (`headwise.identify.moves`), and have no function here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants, flatten_tokens
from headwise.diagnosis.causes.heads import narrowest_dtype, within
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.function import stages
from headwise.function.records import STAGE_OF, output_gates
from headwise.function.spec import ABSENT
from headwise.function.weights import LAMBDAS, State
from headwise.identify import catalogue
from headwise.identify.catalogue import Cause
from headwise.identify.moves import find
from headwise.identify.moves.maps import MapName, join_rows, list_roles
from headwise.identify.moves.move import ROUNDED, cast_and_back, format_dtype


def _q_and_k_exchanged(evidence: Evidence) -> Variants:
    return _exchange_two_roles(catalogue.Q_AND_K_EXCHANGED, evidence, "q", "k")


def _q_and_v_exchanged(evidence: Evidence) -> Variants:
    return _exchange_two_roles(catalogue.Q_AND_V_EXCHANGED, evidence, "q", "v")


def _exchange_two_roles(cause: Cause, evidence: Evidence, first: str, second: str) -> Variants:
    """Yield moves and, in cross attention, the weights of two roles of one shape exchanged.

    There the rows of queries are channels over other tokens than those of keys, so that they cannot
    be looked up among them.
    """
    yield from evidence.search_moves(cause)
    weights = evidence.model.weights
    if evidence.is_cross_attention and weights[f"w{first}"].shape == weights[f"w{second}"].shape:
        pairs = [(f"{kind}{first}", f"{kind}{second}") for kind in "wb"]
        changes = {a: weights.get(b) for a, b in pairs} | {b: weights.get(a) for a, b in pairs}
        repair = MapName(cause, "", (first, second)).repair
        yield Variant(evidence.model.with_weights(**changes), {"roles": first + second}, repair)


def _another_role(evidence: Evidence) -> Variants:
    yield from evidence.search_moves(catalogue.ANOTHER_ROLE)
    yield from _yield_one_matrix_for_all_roles(evidence.model)
    for role, source in permutations(STAGE_OF, 2):
        if evidence.is_cross_attention or "o" in (role, source):
            for model in _copy_weights_to_role(evidence.model, source, role):
                text = f"{role} holds the rows of {source}"
                repair = MapName(catalogue.ANOTHER_ROLE, text, (role,)).repair
                yield Variant(model, {"roles": role, "source": source}, repair)


def _yield_one_matrix_for_all_roles(model: AttentionModel) -> Iterator[Variant]:
    """Yield the models in which one matrix serves all roles, as a module that is shared does."""
    for source, has_biases in product(STAGE_OF, (False, True)):
        changed, roles = model, [role for role in STAGE_OF if role != source]
        for role in roles:
            copies = [*_copy_weights_to_role(changed, source, role)]
            if len(copies) <= has_biases:
                break
            changed = copies[has_biases]
        else:
            text = f"all hold the rows of {source}"
            repair = MapName(catalogue.ANOTHER_ROLE, text, tuple(roles)).repair
            yield Variant(changed, {"roles": "".join(roles), "source": source}, repair)


def _copy_weights_to_role(
    model: AttentionModel, source: str, role: str
) -> Iterator[AttentionModel]:
    matrix, place = model.weights[f"w{source}"].flatten(0, 1), model.weights[f"w{role}"]
    matrix = matrix.T if "o" in (role, source) else matrix
    if matrix.shape == place.flatten(0, 1).shape:
        copied = model.with_weights(**{f"w{role}": matrix.reshape(place.shape)})
        yield copied
        bias, other = (model.weights.get(f"b{each}") for each in (source, role))
        if bias is not None and other is not None:
            yield copied.with_weights(**{f"b{role}": bias.reshape(other.shape)})


STORED = (("q", "k", "v"), ("q", "k"), ("k", "v"), *((role,) for role in STAGE_OF))  # as one tensor


def _weights_rounded(evidence: Evidence) -> Variants:
    yield from evidence.search_moves(catalogue.WEIGHTS_ROUNDED)
    weights, parted = evidence.model.weights, evidence.parted_roles
    together = STORED if evidence.shows_outputs_alone else ()  # which do not tell the roles
    for dtype, roles in product(ROUNDED, dict.fromkeys((parted, *together))):
        repair = MapName(catalogue.WEIGHTS_ROUNDED, format_dtype(dtype), roles).repair
        for kinds in ("wb", "w", "b"):
            names = {f"{kind}{role}" for kind in kinds for role in roles} & weights.keys()
            rounded = {name: cast_and_back(dtype)(weights[name]) for name in names}
            parameters = {"roles": "".join(roles), "dtype": str(dtype)}
            yield Variant(evidence.model.with_weights(**rounded), parameters, repair)


def _bias_missing(evidence: Evidence) -> Variants:
    biased = [role for role in evidence.parted_roles if f"b{role}" in evidence.model.weights]
    for roles in _all_and_each(biased):
        model = evidence.model.with_weights(**dict.fromkeys(f"b{role}" for role in roles))
        repair = MapName(catalogue.BIAS_MISSING, "", roles).repair
        yield Variant(model, {"roles": "".join(roles)}, repair)
    yield from evidence.search_moves(catalogue.BIAS_MISSING)


def _all_and_each(roles: Iterable[str]) -> Iterable[tuple[str, ...]]:
    return dict.fromkeys(filter(None, (tuple(roles), *((role,) for role in roles))))


LEAST_ENTRIES = 400
PARALLEL = 0.9
# The relative distance of sorted entries times the root of their number: 1 to 3 for two draws.
MOVED = 0.1
MOST_DEVIATIONS = 4  # of the measured variance, in its standard deviations
# The mean square of sums of products of whitened tokens, relative to that of independent numbers.
WIDEST = 0.15


def _initial_weights(evidence: Evidence) -> Variants:
    rows = evidence.model.weights
    for variant in evidence.search_moves(catalogue.INITIAL_WEIGHTS):  # as outputs show them
        [role] = variant.parameters["roles"]
        matrix, right = (m.weights[f"w{role}"] for m in (variant.model, evidence.model))
        is_new = not _rows_correlate(*(x.flatten(0, 1).T for x in (matrix, right)))
        if is_new and not _has_permuted_entries(matrix, rows):
            yield variant
    for role, stage in STAGE_OF.items():
        parted = {head for _, _, head in evidence.parted_calls_and_heads(stage)}
        if parted != ({gaps.WHOLE} if role == "o" else set(range(rows[f"w{role}"].shape[0]))):
            continue
        tokens = evidence.projection_tokens(role)
        if tokens is None or (whitened := _whiten_tokens(*tokens)) is None:
            continue
        if not _has_no_trace_of_right_weights(evidence, role, tokens[0], whitened):
            continue
        for kind in find.list_initialisations(role, rows):
            if _is_drawn_from(whitened, kind):
                variant = _fit_weights_variant(evidence, role, *tokens, kind)
                if not _has_permuted_entries(variant.model.weights[f"w{role}"], rows):
                    yield variant
                break


def _has_no_trace_of_right_weights(
    evidence: Evidence, role: str, x: Tensor, products: Tensor
) -> bool:
    """True if products correlate with the right weights of no projection, as if in this place."""
    rows = evidence.model.weights
    # Where these weights look initialised themselves, some stage must agree as well.
    all_parted = all(evidence.parted_calls_and_heads(stage) for stage in ("q", "k", "v"))
    if all_parted and find.recognise_initialisation(role, rows) is not None:
        return False
    roles = [role] if role == "o" else [each for each in list_roles(rows) if each != "o"]
    for each in roles:
        matrix = join_rows(rows, each)
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


def _has_permuted_entries(weights: Tensor, rows: State) -> bool:
    ours = weights.flatten().sort().values
    for role in list_roles(rows):
        theirs = rows[f"w{role}"].double().flatten().sort().values
        apart = (ours - theirs).norm() / theirs.norm() if len(ours) == len(theirs) else torch.inf
        if apart * len(ours) ** 0.5 < MOVED:
            return True
    return False


def _whiten_tokens(x: Tensor, y: Tensor) -> Tensor | None:
    """Return products (tokens, rows) of weights with orthonormal tokens; None if too few."""
    x, y = x - x.mean(0), y - y.mean(0)
    tokens, lengths, _ = torch.linalg.svd(x, full_matrices=False)
    kept = lengths > 1e-6 * lengths[0]
    products = (tokens[:, kept].T @ y) / lengths[kept, None]
    return products if products.numel() >= LEAST_ENTRIES else None


def _is_drawn_from(products: Tensor, kind: find.Initialisation) -> bool:
    """True if products with unit vectors are independent normal numbers of the right variance."""
    combinations, rows = products.shape
    normal = find.Initialisation(kind.text, kind.standard_deviation, is_uniform=False)
    apart = float(products.square().mean().sqrt()) / kind.standard_deviation - 1
    if abs(apart) * (2 * products.numel()) ** 0.5 > MOST_DEVIATIONS:
        return False
    if find.kolmogorov_smirnov_statistic(products.flatten(), normal) >= find.CRITICAL:
        return False
    gram = (products / kind.standard_deviation) @ (products / kind.standard_deviation).T / rows
    size = float((gram - torch.eye(combinations, dtype=gram.dtype)).square().sum())
    return abs(size * rows / (combinations * (combinations + 1)) - 1) < WIDEST


def _fit_weights_variant(
    evidence: Evidence, role: str, x: Tensor, y: Tensor, kind: find.Initialisation
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
    repair = MapName(catalogue.INITIAL_WEIGHTS, "", (role,)).repair
    return Variant(evidence.model.with_weights(**changes), parameters, repair)


LOW = 4  # a rank is low if so many times it fits into the matrix


def _adapters_merged(evidence: Evidence) -> Variants:
    yield from evidence.search_moves(catalogue.ADAPTERS_MERGED)
    stated = {role: _fit_low_rank_change(evidence, role) for role in STAGE_OF}
    added = {role: change for role, change in stated.items() if change is not None}
    for roles in _all_and_each(added):
        changes = {f"w{role}": added[role][1] for role in roles}
        weights = {name: evidence.model.weights[name] + x for name, x in changes.items()}
        parameters = {"roles": "".join(roles), "rank": max(added[role][0] for role in roles)}
        repair = f"merge the adapter of {', '.join(weights)} on both sides or on neither"
        model, heads = evidence.model.with_weights(**weights), _heads_of(changes.values())
        yield Variant(model, parameters, repair, heads=heads)


def _heads_of(changes: Iterable[Tensor]) -> tuple[int, ...] | None:
    """Return the heads that all of these matrices change; None for every one."""
    changed = [change.flatten(1).any(1) for change in changes]
    is_one = all(torch.equal(each, changed[0]) for each in changed) and not changed[0].all()
    return tuple(changed[0].nonzero().flatten().tolist()) if is_one else None


def _fit_low_rank_change(evidence: Evidence, role: str) -> tuple[int, Tensor] | None:
    """Return the rank and the change of the weights, None where it is not of low rank.

    Some tokens must depend on others linearly: only they show that the stage changes linearly.
    Heads that agree are not changed.
    """
    stage, weight = STAGE_OF[role], evidence.model.weights[f"w{role}"]
    heads = sorted({head for _, _, head in evidence.parted_calls_and_heads(stage)})
    tokens = evidence.projection_tokens(role) if heads else None
    if tokens is None:
        return None
    x, recorded = tokens
    predicted = flatten_tokens(evidence.model.predict_stage(stage, call) for call in evidence.calls)
    bound = flatten_tokens(
        gaps.allowed_difference(evidence.model.prepare_stage(stage, call))
        for call in evidence.calls
    )
    if predicted.shape != recorded.shape:
        return None
    channels = torch.arange(recorded.shape[1])
    if role != "o":
        channels = channels.view(len(weight), -1)[heads].flatten()
    change, bound = (recorded - predicted)[:, channels], bound[:, channels]
    matrix = weight.flatten(0, 1) if role == "o" else weight.flatten(0, 1).T[:, channels]
    added = torch.linalg.lstsq(x, change, driver="gelsd").solution
    rounding = bound.norm() + _norm_of_stored_rounding(evidence, x, matrix + added)
    rank = _count_ranks(change, rounding)
    span = int(torch.linalg.matrix_rank(x))
    width = weight.shape[1]
    blocks = [*change.split(width, 1)]
    different = width * _count_different(blocks, bound) if role != "o" else change.shape[1]
    if not 0 < LOW * rank <= min(span, different) or span == len(x):
        return None
    # What an adapter adds has its rank in every head; a change of each head has a lower one.
    if role == "o":
        blocks = [a @ b for a, b in zip(x.split(width, 1), added.split(width), strict=True)]
    if any(_count_ranks(block, rounding) < min(rank, width) for block in blocks):
        return None
    changed_rows = (change.abs() > bound).any(0)
    changed_columns = added.norm(dim=1) > span * torch.finfo(x.dtype).eps * added.norm()
    if not bool(changed_rows.all() and changed_columns.all()):
        return None
    if role == "o":
        return rank, added.reshape(weight.shape)
    whole = weight.new_zeros(weight.shape)
    whole.flatten(0, 1)[channels] = added.T
    return rank, whole


def _count_different(blocks: Sequence[Tensor], bound: Tensor) -> int:
    """Return the number of blocks, without those that equal one before them up to rounding.

    Heads that share their rows have a change of low rank without an adapter.
    """
    different: list[Tensor] = []
    for block in blocks:
        if all(bool(((block - each).abs() > bound.amax()).any()) for each in different):
            different.append(block)
    return len(different)


def _count_ranks(change: Tensor, rounding: Tensor) -> int:
    sizes = torch.linalg.svdvals(change)
    rest = sizes.square().flip(0).cumsum(0).flip(0).sqrt()  # beyond the first ranks
    return int((rest > rounding).sum())


def _norm_of_stored_rounding(evidence: Evidence, x: Tensor, matrix: Tensor) -> Tensor:
    """Return the norm of the products of tokens with the rounding of stored sums of weights.

    Roundings are independent, so their squares add up.
    """
    unit = torch.finfo(narrowest_dtype(evidence.model.weights)).eps / 2
    return unit * (x.square() @ matrix.square()).sum().sqrt()


def _output_projection_missing(evidence: Evidence) -> Variants:
    sizes = evidence.model.sizes
    if sizes["heads"] * sizes["value_dim"] == sizes["out_dim"]:
        model = evidence.replace_stages(
            ("output",), lambda forced: forced["head outputs"].transpose(1, 2).flatten(2)
        )
        yield Variant(model, {}, "project the merged heads: o_proj(outputs)")


def _sign(evidence: Evidence) -> Variants:
    """Yield moves and negated scores; 1 less the sigmoid of a gate is that of its negative."""
    yield from evidence.search_moves(catalogue.SIGN)
    settings = evidence.model.settings
    hides = evidence.has_masks or settings.causal or settings.sides is not None
    for number in (LARGE, torch.inf) if hides else ():
        model = evidence.replace_stages(catalogue.SCORES, _negate_scores, number)
        parameters = {"of": "the scores, after keys are hidden"}
        repair = "hide keys after the scores have their sign: scores.masked_fill(~mask, -inf)"
        yield Variant(model, parameters, repair, {"hidden keys": number})


LARGE = 1e9  # what code hides keys by, with the other sign


def _negate_scores(number: float, forced: ForcedStage) -> Tensor:
    usual = forced.usual_result()
    return (-usual).masked_fill(usual == -torch.inf, number)


def _module_bypassed(evidence: Evidence) -> Variants:
    of_weights = evidence.model.of_weights
    if of_weights is None:
        return
    for roles in _all_and_each(evidence.parted_roles):
        model = evidence.model
        for role in roles:
            model = within(model, of_weights, STAGE_OF[role], None)
        repair = f"call the modules of {', '.join(roles)}"
        yield Variant(model, {"roles": "".join(roles)}, repair)


def _output_gate_missing(evidence: Evidence) -> Variants:
    if "wg" in evidence.model.weights:
        model = evidence.model.with_weights(wg=None, bg=None).with_settings(output_gate=None)
        kind = evidence.model.settings.output_gate
        repair = f'multiply the head outputs by the sigmoid of gate_proj(x): output_gate="{kind}"'
        yield Variant(model, {"gate": "none"}, repair)


def _part_left_out(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    repairs = {
        "clip": f"clip queries, keys and values: clip={settings.bound}",
        "values": f"change values before they are mixed: values={settings.values}",
        "output_norm": f"normalise the head outputs: output_norm={settings.output_norm}",
        "differential": f"subtract the heads of pairs: differential={settings.differential}",
    }
    for name, repair in repairs.items():
        if getattr(settings, name) is not ABSENT:
            model = evidence.model.with_settings(**{name: None})
            if name == "output_norm":
                model = model.with_weights(o_norms=None, o_norms_bias=None)
            if name == "differential":
                model = model.with_weights(**dict.fromkeys(LAMBDAS))
            yield Variant(model, {"part": name.replace("_", " ")}, repair)


def _gate_without_sigmoid(evidence: Evidence) -> Variants:
    if "wg" in evidence.model.weights:
        model = evidence.replace_stages(("head outputs",), _multiply_by_projection)
        yield Variant(model, {"gate": "linear"}, "multiply by torch.sigmoid(gate_proj(x))")


def _multiply_by_projection(forced: ForcedStage) -> Tensor:
    """Return head outputs times the projection of their gate, without its sigmoid."""
    weight, bias = forced.model.weights.get("wg"), forced.model.weights.get("bg")
    if weight is None:  # another change left the gate out
        return forced.usual_result()
    bare = forced.model.with_weights(wg=None, bg=None)
    gates = stages.project_heads(forced.call.inputs.x, weight, bias)
    return replace(forced, model=bare).usual_result() * gates


def _gate_merged(evidence: Evidence) -> Variants:
    if "wg" not in evidence.model.weights:
        return
    for done, change in VIEWS.items():
        model = evidence.replace_stages(("head outputs",), _gate_heads, change)
        repair = (
            f"transpose heads and length of the gate where it is {done}, as of the head outputs"
        )
        yield Variant(model, {"gate": done}, repair)


# Changes of (batch, heads, length, d): to the memory of (batch, length, heads, d), or from it.
VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "merged": lambda x: x.reshape(x.transpose(1, 2).shape).transpose(1, 2),
    "split": lambda x: x.transpose(1, 2).reshape(x.shape),
}


def _gate_heads(change: Callable[[Tensor], Tensor], forced: ForcedStage) -> Tensor:
    if (gates := output_gates(forced)) is None:  # with another cause, which leaves it out
        return forced.usual_result()
    bare = replace(forced, model=forced.model.with_weights(wg=None, bg=None)).usual_result()
    return bare * change(gates)

"""Causes in norms and residuals, of queries, keys, input and output."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Family, Variant, Variants, flatten_tokens
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.errors import OptionError
from headwise.function.norm import normalise_heads
from headwise.function.spec import Latent, NormRule
from headwise.function.stages import repeat_kv_heads

KINDS: tuple[Literal["rms", "layer", "l2"], ...] = ("rms", "layer", "l2")
OVER: tuple[Literal["head", "width"], ...] = ("head", "width")
OUTPUT = ("output",)
# What libraries add to the mean square; torch's rms_norm adds the spacing of float32.
EPSILONS = (1e-6, 1e-5, 2.0**-23, 1e-12, 1e-8)


def _qk_norm_kind(evidence: Evidence) -> Variants:
    norm = evidence.model.settings.norm
    repair = "leave out the norm of q and k"
    if norm is not None:
        repair = f"{norm.kind} norm over the {norm.over}"
        yield Variant(evidence.model.with_settings(qk_norm=None), {"norm": "none"}, repair)
    for kind, over in product(KINDS, OVER):
        words = f"{kind} over the {over}"
        if norm is None:
            words = f"{words}, without weights"
            others = [NormRule(kind, over, eps=eps) for eps in EPSILONS]
        else:
            others = [replace(norm, kind=kind, over=over)]
        for other in others if others != [norm] else ():
            yield Variant(evidence.model.with_settings(qk_norm=other), {"norm": words}, repair)


def _qk_norm_place(evidence: Evidence) -> Variants:
    norm = evidence.model.settings.norm
    if norm is not None:
        place: Literal["before", "after"] = "after" if norm.place == "before" else "before"
        model = evidence.model.with_settings(qk_norm=replace(norm, place=place))
        yield Variant(model, {"place": place}, f"normalise {norm.place} the rotation")


def _qk_norm_weight_offset(evidence: Evidence) -> Variants:
    norm = evidence.model.settings.norm
    if norm is not None:
        right = "1 + w" if norm.weight_offset else "w"
        for offset in {0.0, 1.0, norm.weight_offset + 1.0} - {norm.weight_offset}:
            model = evidence.model.with_settings(qk_norm=replace(norm, weight_offset=offset))
            yield Variant(model, {"offset": offset}, f"multiply by {right}, w the stored weight")


EPS_STARTS = (0.0, 1e-2, 0.1, 1.0)  # of a fit: outputs are about linear in a small one
LOAD_NORMS = "load the weights and the biases of the norms of q and k"


def _qk_norm_eps(evidence: Evidence) -> Variants:
    if (norm := evidence.model.settings.norm) is not None:
        yield vary_eps(evidence, "qk_norm", norm)


def vary_eps(evidence: Evidence, name: str, rule: NormRule | Latent) -> Family:
    """Return the variants of a setting with norms in which their eps is another."""

    def make(eps: float) -> Variant:
        model = evidence.model.with_settings(**{name: replace(rule, eps=max(eps, 0.0))})
        return Variant(model, {"eps": eps}, f"eps={rule.eps:g} in place of {eps:.3g}")

    return Family(make, EPS_STARTS)


def _norm_weights_missing(evidence: Evidence) -> Variants:
    norm, weights = evidence.model.settings.norm, evidence.model.weights
    if norm is None:
        return
    initial = {"": 1.0 - norm.weight_offset, "s": 1.0 - norm.weight_offset}
    parts = {"weights": initial, "biases": {"_bias": 0.0, "s_bias": 0.0}}
    for roles, words in product(("qk", "q", "k"), ("weights and biases", *parts)):
        numbers = {
            f"{role}_norm{end}": number
            for part in words.split(" and ")
            for role, (end, number) in product(roles, parts[part].items())
        }
        changes = {
            name: torch.full_like(weights[name], number)
            for name, number in numbers.items()
            if name in weights
        }
        if any(not torch.equal(weights[name], x) for name, x in changes.items()):
            model = evidence.model.with_weights(**changes)
            yield Variant(model, {"missing": words, "roles": roles}, LOAD_NORMS)


def _norm_of_another_role(evidence: Evidence) -> Variants:
    norm, weights = evidence.model.settings.norm, evidence.model.weights
    if norm is None or norm.place != "before":
        return
    for role, other in product("qk", "qkv"):
        weight, head_dim = weights.get(f"{role}_norm"), weights[f"w{other}"].shape[1]
        has_rows = f"{role}_norms" in weights
        if role == other or has_rows or weight is None or weight.shape != (head_dim,):
            continue
        of_other = weights.get(f"{other}_norm")  # which v has not
        is_same = of_other is not None and torch.equal(weight, of_other)
        for is_moved in (True,) if is_same else (True, False):
            stage = other if other == "v" else f"{other} after norm"
            model = evidence.replace_stages([stage], _normalise_by_norm_of, role)
            if is_moved:
                model = model.with_stage_function(
                    f"{role} after norm", lambda stage: stage[stage.stage[0]]
                )
            words = f"{other} in place of {role}" if is_moved else f"{other} as well"
            repair = f"normalise {role} alone by the norm of {role}"
            yield Variant(model, {"norm of": role, "on": words}, repair)


def _normalise_by_norm_of(role: str, forced: ForcedStage) -> Tensor:
    norm = forced.settings.norm
    if norm is None:  # another cause removed the norm
        return forced.usual_result()
    x = forced.usual_result() if forced.stage == "v" else forced[forced.stage[0]]
    weight, bias = (forced.model.weights.get(f"{role}_norm{end}") for end in ("", "_bias"))
    return normalise_heads(norm, x, weight, bias)


Norm = Callable[[Tensor], Tensor]
LEAST_TOKENS = 8  # of which two decide the weight and the bias of a channel


def _norm_inside(evidence: Evidence) -> Variants:
    repair = "normalise both inputs or neither"
    given = ("x", "source") if evidence.is_cross_attention else ("",)
    for kind, eps in product(("layer", "rms"), EPSILONS):
        norm = partial(_normalise_last_axis, kind, eps)
        for of in dict.fromkeys(("", *given)):
            model = evidence.replace_stages("qkv", _project_normed_input, norm, of)
            words = f"{kind} of the {'input' if of != 'source' else of}"
            yield Variant(model, {"norm": words}, repair)
        if (fit := _fit_gain(evidence, norm, has_bias=kind == "layer")) is not None:
            weighted = partial(_scale_and_shift, norm, *fit)
            of = "source" if evidence.is_cross_attention else ""  # whose tokens were fitted
            model = evidence.replace_stages("qkv", _project_normed_input, weighted, of)
            words = f"{kind} of the {of or 'input'}"
            yield Variant(model, {"norm": words, "weights": "of its own"}, repair)
        yield from _variants_of_output_norm(evidence, kind, norm)


WIDEST = 512  # tokens whose norm has weights that are fitted: the fit takes width ** 3
NEAR = 1e-3  # of what a norm with weights leaves; other numbers than the right eps leave less


def _scale_and_shift(norm: Norm, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return weight * norm(x) + bias


def _fit_gain(evidence: Evidence, norm: Norm, *, has_bias: bool) -> tuple[Tensor, Tensor] | None:
    """Return the weight and bias of a norm of the input, None where it explains nothing.

    A projection of it is linear in both: W (g * n + b). They are fitted to recorded projections, or
    to the values of one token in the output.
    """
    products = list(_products_of_tokens(evidence))
    width = evidence.model.sizes["source_dim"]
    if not products or width > WIDEST or evidence.model.settings.compressed:
        return None
    size = (1 + has_bias) * width
    square, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size).double()
    for x, matrix, y in products:
        tokens, gram, back = norm(x), matrix.T @ matrix, y @ matrix
        square[:width, :width] += gram * (tokens.T @ tokens)
        right[:width] += (tokens * back).sum(0)
        if has_bias:
            square[:width, width:] += gram * tokens.sum(0)[:, None]
            square[width:, width:] += len(tokens) * gram
            right[width:] += back.sum(0)
    square = square.triu() + square.triu(1).T
    numbers = torch.linalg.lstsq(square, right[:, None], driver="gelsd").solution[:, 0]
    weight = numbers[:width]
    bias = numbers[width:] if has_bias else torch.zeros_like(weight)
    left = [y - (weight * norm(x) + bias) @ matrix.T for x, matrix, y in products]
    is_near = sum(float(z.square().sum()) for z in left) <= NEAR**2 * sum(
        float(y.square().sum()) for *_, y in products
    )
    passes = float(weight.abs().amax()) > NEAR  # else it is a constant, and no norm
    return (weight, bias) if is_near and passes else None


def _products_of_tokens(evidence: Evidence) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens (tokens, width), a matrix (rows, width), and their products in the calls."""
    weights = evidence.model.weights
    if not evidence.shows_outputs_alone:
        for role in "qkv" if not evidence.is_cross_attention else "":
            if (recorded := evidence.projection_tokens(role)) is not None:
                (x, y), matrix = recorded, weights[f"w{role}"].flatten(0, 1)
                if y.shape[1] == len(matrix):  # else there are other heads
                    y = y if f"b{role}" not in weights else y - weights[f"b{role}"].flatten()
                    yield x.double(), matrix, y
        return
    runs = evidence.calls[0].runs
    if runs is None or "sink" in weights or evidence.model.scales_values:
        return
    heads, (kv_heads, value_dim, width) = len(weights["wo"]), weights["wv"].shape
    crosses = evidence.is_cross_attention
    batch = 2 * -(-width // (kv_heads * value_dim)) + LEAST_TOKENS
    with suppress(OptionError):
        call = runs.random_call(evidence.model, batch, 1, crosses=crosses)
        value = repeat_kv_heads(weights["wv"][None], heads=heads)[0]
        matrix = torch.einsum("hdw,hde->ew", value, weights["wo"])
        y = call.stages["output"][:, 0]
        if "bv" in weights:
            shift = repeat_kv_heads(weights["bv"][None, :, None], heads=heads)[0, :, 0]
            y = y - torch.einsum("hd,hde->e", shift, weights["wo"])
        y = y if "bo" not in weights else y - weights["bo"]
        if y.shape[1] == len(matrix):
            yield call.inputs.key_source[:, 0].double(), matrix, y


def _variants_of_output_norm(evidence: Evidence, kind: str, norm: Norm) -> Iterator[Variant]:
    repair, embed_dim = "normalise both outputs or neither", evidence.model.sizes["embed_dim"]
    for has_residual in (False, True):
        if has_residual and evidence.model.sizes["out_dim"] != embed_dim:
            continue
        words = f"{kind} of the output{' and the residual' if has_residual else ''}"
        output = partial(_add_residual, 1.0) if has_residual else ForcedStage.usual_result
        model = evidence.replace_stages(OUTPUT, lambda of, x: norm(of(x)), output)
        yield Variant(model, {"norm": words}, repair)
        if (fit := _fit_norm_weights(evidence, model)) is not None:
            weight, bias = fit
            scale = partial(lambda w, b, x: x.usual_result() * w + b, weight, bias)
            weighted = model.with_stage_function("output", scale)
            yield Variant(weighted, {"norm": words, "weights": "of its own"}, repair)


def _fit_norm_weights(evidence: Evidence, model: AttentionModel) -> tuple[Tensor, Tensor] | None:
    calls = [call for call in evidence.calls if "output" in call.stages]
    recorded = flatten_tokens(call.stages["output"] for call in calls)
    predicted = flatten_tokens(model.predict_stage("output", call) for call in calls)
    is_alike = recorded.shape == predicted.shape and len(recorded) >= LEAST_TOKENS
    if not is_alike or not recorded.isfinite().all():
        return None
    x, y = predicted - predicted.mean(0), recorded - recorded.mean(0)
    if float(y.norm()) <= NEAR * float(recorded.norm()):  # a constant, and no norm
        return None
    weight = (x * y).sum(0) / x.square().sum(0)
    return weight, recorded.mean(0) - weight * predicted.mean(0)


def _normalise_last_axis(kind: str, eps: float, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _project_normed_input(norm: Norm, of: str, forced: ForcedStage) -> Tensor:
    inputs = forced.call.inputs
    x = inputs.x if of == "source" else norm(inputs.x.double())
    source = inputs.source
    if source is not None and of != "x":
        source = norm(source.double())
    return forced.model.stages[forced.stage].compute(forced.with_inputs(x=x, source=source))


def _add_residual(factor: float, forced: ForcedStage) -> Tensor:
    return forced.usual_result() + factor * forced.call.inputs.x


def _residual_inside(evidence: Evidence) -> Variants:
    if evidence.model.sizes["out_dim"] == evidence.model.sizes["embed_dim"]:

        def make(factor: float) -> Variant:
            model = evidence.replace_stages(OUTPUT, _add_residual, factor)
            times = "" if factor == 1.0 else f"{factor:.6g} * "
            repair = f"compare without the residual: a(x) - {times}x"
            return Variant(model, {"times": factor} if times else {}, repair)

        yield make(1.0)
        yield Family(make, (-1.0, 0.5, 2.0, 8.0))

"""Repairs of a layer without some of its heads, fitted to data.

    mean     the mean output of each head that is gone goes into the output's bias
    refit    the output projection of the other heads is fitted to the layer's output

The refit is a ridge regression of the lost output on the outputs of the heads that stay. Its
penalty pulls towards the projection as it was, so that the mean is its limit for a large ridge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.surgery.cut import Cut, LayerCut
from headwise.surgery.models import ModelHeads
from headwise.surgery.steps import Take, allows

Repair = Literal["zero", "mean", "refit"]
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the mean square of a channel
Gone = Mapping[str, Collection[int]]  # numbers of heads, by layer


@dataclass(frozen=True)
class Decision:
    """Decision between the mean and the refit in one layer.

    Errors are those of the layer's output on tokens that the fit did not see, as shares of the
    output's variance. Each half of the sequences was fitted to, and the other one measured.
    """

    # that of the refit with the least error; None where the mean is better on one half
    ridge: float | None
    mean: float  # the error of the mean
    refit: float  # the least error of a refit


def cut_heads(
    heads: ModelHeads, gone: Gone, means: Mapping[str, Tensor] | None, *, zeroed: bool = False
) -> Cut:
    """Return the cut of some heads.

    They are zeroed in place of taken out where the layer's function allows no other number, or in
    all layers if ``zeroed``. The projection of their ``means`` (heads, value_dim) goes into the
    bias, or nothing if None.
    """
    layers = {}
    for name, numbers in gone.items():
        if numbers:
            layers[name] = _leave_out(heads, name, numbers, zeroed=zeroed)
            if means is not None:
                chosen, wo = sorted(numbers), heads.canonical(name)["wo"]
                lost = means[name][chosen].double(), wo[chosen].double()
                layers[name] = layers[name].shift(torch.einsum("hv,hvo->o", *lost))
    return Cut(layers)


def _leave_out(
    heads: ModelHeads, name: str, gone: Collection[int], *, zeroed: bool = False
) -> LayerCut:
    whole = heads.whole().layers[name]
    is_taken = can_leave(heads, name) and not zeroed
    return whole.drop(gone) if is_taken else whole.zero(sorted(gone))


def can_leave(heads: ModelHeads, name: str) -> bool:
    """True if the function of a layer allows another number of heads."""
    count = int(heads.specs[name].num_heads)
    taken = Take(count, tuple(range(1, count)), (0,))
    return allows(taken.require_function, heads.specs[name])


# ---- the refit -----------------------------------------------------------------------------------


def fit_projection(
    sums: Float[Tensor, "more more"],
    wo: Float[Tensor, "heads value_dim out_dim"],
    kept: Collection[int],
    ridge: float,
) -> tuple[Float[Tensor, "heads value_dim out_dim"], Float[Tensor, " out_dim"]]:
    """Fit the output projection of the heads that stay to the output of all heads.

    With the centred products C of the channels K that stay and G that go, the change D of the
    projection solves (C_KK + r I) D = C_KG wo_G, where r is ``ridge`` times the mean diagonal of
    C_KK. An infinite ridge gives D = 0: the mean alone. ``sums`` are those of `record_moments`, of
    one half or of both together.

    Returns:
        The projection, with 0 for heads that are gone, and what is added to the bias.
    """
    count, flat = len(wo), wo.double().flatten(0, 1)
    stays = torch.zeros(count, dtype=torch.bool)
    stays[sorted(kept)] = True
    stays = stays.repeat_interleave(wo.shape[1]).to(sums.device)
    mean = sums[-1, :-1] / sums[-1, -1]
    centred = sums[:-1, :-1] - sums[-1, -1] * torch.outer(mean, mean)
    fitted = torch.where(stays[:, None], flat, 0.0)
    if ridge != float("inf"):
        square = centred[stays][:, stays]
        square = square + ridge * square.diagonal().mean() * torch.eye(len(square)).to(square)
        change = torch.linalg.solve(square, centred[stays][:, ~stays] @ flat[~stays])
        fitted[stays] += change
    return fitted.unflatten(0, wo.shape[:2]), mean @ (flat - fitted)


def output_error(
    sums: Float[Tensor, "more more"],
    wo: Float[Tensor, "heads value_dim out_dim"],
    fitted: Float[Tensor, "heads value_dim out_dim"],
    bias: Float[Tensor, " out_dim"],
) -> float:
    """Return the squared error of a layer's output, as a share of the output's variance."""
    flat = wo.double().flatten(0, 1)
    wrong = torch.cat([fitted.flatten(0, 1) - flat, bias[None]])
    mean = sums[-1, :-1] / sums[-1, -1]
    centred = sums[:-1, :-1] - sums[-1, -1] * torch.outer(mean, mean)
    return float((wrong * (sums @ wrong)).sum() / (flat * (centred @ flat)).sum())


def decide(
    sums: Float[Tensor, "halves more more"],
    wo: Float[Tensor, "heads value_dim out_dim"],
    kept: Collection[int],
) -> Decision:
    """Decide between the mean and a refit by their errors on the half that they did not see.

    A refit is kept where both halves agree.
    """

    def errors(ridge: float) -> list[float]:
        pairs = ((0, 1), (1, 0))
        fits = [(other, fit_projection(sums[seen], wo, kept, ridge)) for seen, other in pairs]
        return [output_error(sums[other], wo, *fitted) for other, fitted in fits]

    mean = errors(float("inf"))
    refits = {ridge: errors(ridge) for ridge in RIDGES}
    best = min(RIDGES, key=lambda ridge: sum(refits[ridge]))
    agree = all(error < limit for error, limit in zip(refits[best], mean, strict=True))
    return Decision(best if agree else None, sum(mean) / 2, sum(refits[best]) / 2)


def refit_heads(
    heads: ModelHeads, gone: Gone, sums: Mapping[str, Tensor]
) -> tuple[Cut, dict[str, Decision]]:
    """Return the cut of some heads with a fitted projection where held-out tokens agree.

    ``sums`` are those of `record_moments`, by the layers' names in the cut.
    """
    layers, decisions = {}, {}
    for name, numbers in gone.items():
        if not numbers:
            continue
        state = heads.canonical(name)
        kept = [head for head in range(len(state["wo"])) if head not in numbers]
        layer = _leave_out(heads, name, numbers)
        chosen = decisions[name] = decide(sums[name], state["wo"], kept)
        ridge = float("inf") if chosen.ridge is None else chosen.ridge
        fitted, bias = fit_projection(sums[name].sum(0), state["wo"], kept, ridge)
        if chosen.ridge is None:
            layers[name] = layer.shift(bias)
        else:
            bias = bias + state["bo"].double() if "bo" in state else bias
            left = layer.origins.query
            layers[name] = layer.refit(fitted[list(left)], bias)
    return Cut(layers), decisions

"""Rounding floors: first-order bounds of unavoidable rounding, for every error budget.

Each function bounds the rounding error of one quantity of the attention matrix, element by element.
docs/budget.md derives every line and uses the same names. The arithmetic is float64, dense and
without gradients.

    u    unit roundoff of the accumulation (float32 for the half dtypes, otherwise the dtype's own)
    U    unit roundoff of the storage: weights and score gradients kept for a product
    eta  absolute error from storing a weight near 0

A sum of n terms is allowed ``growth(n)`` * u: n up to 16 terms, 4 * sqrt(n) beyond, since rounding
errors are nearly independent (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5)).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, Unpack

import torch
from torch import Tensor

from headwise.errors import DTypeError
from headwise.function import stages

LAMBDA = 4.0
# exp, log and tanh of common vector libraries have errors of at most 2 units in the last place.
ELEMENTARY = 4.0

Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs u and U and the smallest stored error eta of a dtype; see the module."""

    u: float
    U: float
    eta: float

    @classmethod
    def of(cls, dtype: torch.dtype, *, with_reference: bool = True) -> Self:
        """Return the roundoffs of a dtype, including those of the float64 reference itself.

        ``with_reference=False`` leaves those of the reference out, where each side has its own.

        Raises:
            DTypeError: a dtype other than float64, float32, bfloat16 and float16.
        """
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise DTypeError(
                saw=f"an error budget for {dtype}",
                needed="float64, float32, bfloat16 or float16",
                do="e.g. x.float() for each input",
            )
        half = dtype in (torch.bfloat16, torch.float16)
        store, accumulate = torch.finfo(dtype), torch.finfo(torch.float32 if half else dtype)
        # The reference rounds too, which doubles the floor in float64 and is negligible elsewhere.
        twice = 1 + with_reference * torch.finfo(torch.float64).eps / accumulate.eps
        return cls(
            u=twice * accumulate.eps / 2,
            U=twice * store.eps / 2,
            # A stored weight may lose half a subnormal; an accumulated one may be flushed to zero.
            eta=store.tiny * store.eps / 2 + accumulate.tiny,
        )


@dataclass(frozen=True)
class RowRounding:
    """Rows of one attention matrix in float64, with bounds of their rounding errors."""

    r: Roundoff
    weights: Tensor  # (batch, heads, queries, keys)
    live: Tensor  # bool: the key may be attended
    peak: Tensor  # (batch, heads, queries, 1): the largest score; 0 in an empty row
    logsumexp: Tensor  # (batch, heads, queries, 1): 0 in an empty row
    share: Tensor  # (batch, heads, queries, 1): the sink's weight
    slope: Tensor  # derivative of the softcap
    slope_error: Tensor
    score_error: Tensor  # absolute error of a score; 0 where not live
    sink_error: Tensor  # the same for the sink's logit
    mean_error: Tensor  # (batch, heads, queries, 1): score_error averaged with the weights
    over_keys: Tensor  # (batch, heads, queries, 1): growth of the live keys

    @property
    def relative_weight_error(self) -> Tensor:
        """Relative error of a weight: its score, the others, two exp, a sum and a division."""
        rest = self.mean_error + self.r.u * (2 * ELEMENTARY + 1 + self.over_keys)
        return (self.score_error + rest) * self.live

    @property
    def absolute_weight_error(self) -> Tensor:
        """Absolute error of a weight before it is stored."""
        return self.weights * self.relative_weight_error + self.r.eta * self.live


# ---- how far two runs may part -------------------------------------------------------------------

FORWARD, BACKWARD = 2.0, 3.0  # of plain torch's largest error
DRAWS, REACH = 3, 4


class MeasuredFamily(NamedTuple):
    """Results of plain torch for inputs and their neighbours, beside float64."""

    exact: tuple[Tensor, ...]  # results for the inputs themselves, in float64
    plain: tuple[float, ...]  # largest error of plain torch over the family, for each result
    sensitivity: tuple[float, ...]  # change of exact results for one unit in the inputs' last place

    def allowed(self, number: int, *, factor: float, floor: Tensor | None = None) -> Tensor:
        """Return the allowed error of each element of a result; the floor is its sensitivity."""
        exact = self.exact[number]
        if floor is None:
            floor = torch.full_like(exact, self.sensitivity[number])
        return factor * self.plain[number] + floor.double()


def measure_family(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> MeasuredFamily:
    """Run plain torch on a family of inputs, so that one lucky rounding does not count.

    The family is the inputs and DRAWS - 1 neighbours, whose elements differ by up to REACH units in
    the last place.
    """
    generator = torch.Generator().manual_seed(0)
    first: list[Tensor] = []
    plain: list[float] = []
    changes: list[float] = []
    for draw in range(DRAWS):
        near = [_perturb_within_rounding(x, generator) if draw else x.detach() for x in inputs]
        wide = [x.double() if x.is_floating_point() else x for x in near]
        exact = [x.detach() for x in function(*wide)]
        rounded = [x.detach().double() for x in function(*near)]
        first = first or exact
        plain = _update_largest_errors(plain, rounded, exact)
        changes = _update_largest_errors(changes, exact, first)
    return MeasuredFamily(tuple(first), tuple(plain), tuple(x / REACH for x in changes))


def _update_largest_errors(so_far: list[float], a: list[Tensor], b: list[Tensor]) -> list[float]:
    # An overflow of plain torch adds nothing to the allowance.
    errors = [(x - y).abs().nan_to_num(0.0, posinf=0.0) for x, y in zip(a, b, strict=True)]
    largest = [float(error.max()) if error.numel() else 0.0 for error in errors]
    return [max(pair) for pair in zip(so_far or largest, largest, strict=True)]


def _perturb_within_rounding(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    steps = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (x.detach().double() * (1 + REACH * steps.to(x.device) * torch.finfo(x.dtype).eps)).to(
        x.dtype
    )


def move_number(number: float, dtype: torch.dtype) -> float:
    """Return a number that is REACH units in the last place of ``dtype`` farther from 0."""
    return number * (1 + REACH * torch.finfo(dtype).eps)


def last_rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of storing each element of a result."""
    info = torch.finfo(dtype)
    return (exact.abs() + info.tiny) * info.eps / 2


def allow_two_runs(
    function: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return a result in float64, and how far runs in ``dtype`` may part from it, as `Budget` does.

    In float64 plain torch is the reference itself, so float32 is measured, and scaled.
    """
    is_reference = dtype == torch.float64
    measured = torch.float32 if is_reference else dtype
    family = measure_family(lambda *x: (function(*x),), [x.to(measured) for x in inputs])
    exact = function(*inputs).detach() if is_reference else family.exact[0]
    scale = torch.finfo(dtype).eps / torch.finfo(measured).eps
    return exact, scale * family.allowed(0, factor=FORWARD)


def exceeds_rounding(gap: float, *roundings: float) -> bool:
    """True if two models differ by more than a run in float32 moves them; ``roundings`` has both.

    A rounding is infinite where a number of the float64 run is NaN or infinite in float32. Where
    this is so in one of the two alone, they differ.
    """
    finite = [rounding for rounding in roundings if math.isfinite(rounding)]
    allowed = sum(finite) if finite else torch.inf  # each is apart from the exact one by its own
    return 0 < len(finite) < len(roundings) or gap > allowed


# ---- where no finer run can be measured: bounds of sums, a priori -------------------------------

WIDEST = 0.05  # the largest tolerance that a dtype has
STORED_BY_PLAIN_CODE = 17  # results, without a norm, a rotation or a loop over heads


def default_tolerance(*dtypes: torch.dtype) -> float:
    """Return the relative error that sums in these dtypes may have."""
    eps = (torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return min(WIDEST, 4096 * max(eps, default=WIDEST))


def relative_difference_norm(first: Tensor, second: Tensor) -> float:
    """Return the norm of a difference by the norm of the second; infinity for other shapes.

    Two NaNs are equal, and so are two infinities; one beside a number makes the gap infinite.
    """
    if first.shape != second.shape:
        return torch.inf
    first, second = first.double(), second.double()
    equal = (first == second) | (first.isnan() & second.isnan())
    apart = (first - second).masked_fill(equal, 0.0)
    if not apart.isfinite().all():
        return torch.inf
    size = second.masked_fill(~second.isfinite(), 0.0).norm()
    return float(apart.norm() / size.clamp_min(torch.finfo(torch.float64).tiny))


def is_near(first: Tensor, second: Tensor, tolerance: float | None = None) -> bool:
    """True if two tensors differ by a share of their norm at most; None for that of float32."""
    tolerance = default_tolerance(torch.float32) if tolerance is None else tolerance
    return relative_difference_norm(first, second) <= tolerance


def input_share(terms: int, dtype: torch.dtype) -> float:
    """Return the share by which inputs move, where rounding of sums of ``terms`` moves the output.

    Rounding in a sum of n products is that of exact sums of factors that differ by up to n u
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1). The roundings of k
    stored results are independent, and move the output by sqrt(k) of one.
    """
    r = Roundoff.of(dtype, with_reference=False)
    return terms * r.u + (math.sqrt(STORED_BY_PLAIN_CODE) * r.U if r.u < r.U else 0.0)


def allow_product(x: Tensor, w: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far two products x @ w with a bias may part, of n terms, stored twice in dtype."""
    r = Roundoff.of(dtype, with_reference=False)
    return 2 * (len(x) * r.u * (x.abs() @ w.abs()) + 2 * r.U * exact.abs())


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype whose numbers are farthest apart; bfloat16 for those of 8 bits.

    No arithmetic is done in 8 bits: such numbers are only stored.
    """
    wide = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    return max(wide, key=lambda dtype: torch.finfo(dtype).eps, default=torch.bfloat16)


def is_coarser(first: torch.dtype, second: torch.dtype) -> bool:
    """True if the numbers of the first dtype are farther apart."""
    return torch.finfo(first).eps > torch.finfo(second).eps


# ---- floors --------------------------------------------------------------------------------------


def sum_error_bound(terms: int) -> float:
    """Return the error bound of a sum in units of u, relative to the sum of magnitudes."""
    return min(float(terms), LAMBDA * math.sqrt(terms))


def _error_growth(terms: Tensor) -> Tensor:
    return torch.minimum(terms.double(), LAMBDA * terms.double().sqrt())


def row_rounding(
    q: Tensor,
    k: Tensor,
    r: Roundoff,
    *,
    sink: Tensor | None = None,
    **options: Unpack[stages.ScoreOptions],
) -> RowRounding:
    """Return scores, weights and their errors (docs/budget.md, "Scores" and "Weights")."""
    q, k = q.detach().double(), k.detach().double()
    sink = None if sink is None else sink.detach().double()
    s = stages.scores(q, k, **options).detach()  # a score bias may be a parameter
    live = s > -torch.inf
    logit = s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sink is not None:
        logit = sink[:, None, None].expand_as(logit)
    outcomes = torch.cat([s, logit], dim=-1)
    nonempty = outcomes.amax(-1, keepdim=True) > -torch.inf
    peak = outcomes.amax(-1, keepdim=True).where(nonempty, 0.0)
    logsumexp = torch.logsumexp(outcomes, -1, keepdim=True).where(nonempty, 0.0)
    share = torch.exp(logit - logsumexp)
    weights = stages.weights_from_scores(s, sink)

    capped, slope, slope_error, error = _softcapped_scores_with_errors(
        q, k, r, options.get("scale"), options.get("softcap")
    )
    error = error + r.u * ((s - capped).abs() + 2 * s.abs() + (peak - s))
    error = error.where(live, 0.0)
    sink_error = (r.u * (2 * logit.abs() + peak - logit)).where(logit > -torch.inf, 0.0)
    return RowRounding(
        r=r,
        weights=weights,
        live=live,
        peak=peak,
        logsumexp=logsumexp,
        share=share,
        slope=slope,
        slope_error=slope_error,
        score_error=error,
        sink_error=sink_error,
        mean_error=(weights * error).sum(-1, keepdim=True) + share * sink_error,
        over_keys=_error_growth(live.sum(-1, keepdim=True) + (sink is not None)),
    )


def _softcapped_scores_with_errors(
    q: Tensor, k: Tensor, r: Roundoff, scale: float | None, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scale * q.k after the softcap: value, slope, error of the slope, error of the value.

    The slope is the derivative of the softcap.
    """
    raw = stages.scores(q, k, scale=scale)
    size = stages.scores(q.abs(), k.abs(), scale=None if scale is None else abs(scale))
    error = r.u * (sum_error_bound(q.shape[-1]) + 2) * size
    if softcap is None:
        return raw, torch.ones_like(raw), torch.zeros_like(raw), error
    t = torch.tanh(raw / softcap)
    slope = 1 - t**2
    error = slope * (error + r.u * raw.abs())
    slope_error = 2 * t.abs() / softcap * error + 2 * ELEMENTARY * r.u
    capped = softcap * t
    return capped, slope, slope_error, error + (ELEMENTARY + 1) * r.u * capped.abs()


def weights_readout_floor(a: RowRounding, read: Read) -> Tensor:
    """Bound the error of a sum, a maximum or a selection of weights."""
    exact = read(a.weights)
    terms = a.weights.numel() // max(exact.numel(), 1)
    return read(a.absolute_weight_error) + sum_error_bound(terms) * a.r.u * exact


def product_floor(a: RowRounding, v: Tensor, *, transposed: bool = False) -> Tensor:
    """Bound the error of weights @ v, or weights.mT @ v; ``v`` has all heads."""
    w, error = a.weights, a.absolute_weight_error + a.r.U * a.weights
    over = sum_error_bound(w.shape[-2]) if transposed else a.over_keys
    if transposed:
        w, error = w.mT, error.mT
    return error @ v.abs() + a.r.u * (over + 1) * (w @ v.abs())


def logsumexp_floor(a: RowRounding) -> Tensor:
    """Bound the error of the logsumexp of a row, (batch, heads, queries)."""
    log = (a.logsumexp - a.peak).abs()
    floor = a.mean_error + a.r.u * (a.over_keys + ELEMENTARY * (1 + log) + a.logsumexp.abs())
    return floor.squeeze(-1) * _nonempty_row_factor(a)


def entropy_floor(a: RowRounding) -> Tensor:
    """Bound the error of H = log Z + sum p (peak - s), (batch, heads, queries)."""
    p = torch.cat([a.weights, a.share], dim=-1)
    error = torch.cat([a.score_error, a.sink_error], dim=-1) + ELEMENTARY * a.r.u
    surprise = -torch.log(p.where(p > 0, 1.0))
    entropy = (p * surprise).sum(-1)
    floor = (p * (surprise - entropy[..., None]).abs() * error).sum(-1)
    rest = a.over_keys.squeeze(-1) * (1 + 2 * entropy) + (ELEMENTARY + 4) * entropy
    return (floor + a.r.u * rest + a.r.eta) * _nonempty_row_factor(a)


def _nonempty_row_factor(a: RowRounding) -> Tensor:
    return (a.live.any(-1) | (a.share > 0).squeeze(-1)).double()


def gradient_floors(
    a: RowRounding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_output: Tensor,
    *,
    scale: float,
    bias_gradient: Read | None,
) -> dict[str, Tensor]:
    """Bound the errors of the gradients of q, k, v, the sink and the score bias.

    See docs/budget.md, "Gradients". ``k`` and ``v`` have kv_heads.
    """
    q, k, v, g = (x.detach().double() for x in (q, k, v, grad_output))
    k_heads, v_heads, heads, r = k.shape[1], v.shape[1], q.shape[1], a.r
    k, v = stages.repeat_kv_heads(k, heads=heads), stages.repeat_kv_heads(v, heads=heads)
    weight_error, ds, ds_error, d, d_error = _bound_score_gradient(a, v, g)

    # dS through the softcap; it is stored for the two products.
    dr = a.slope * ds
    dr_error = a.slope * ds_error + ds.abs() * a.slope_error + r.U * dr.abs() + r.eta * a.live
    over_queries = sum_error_bound(q.shape[2] * heads // min(k_heads, v_heads))
    dq = abs(scale) * ((dr_error + r.u * (a.over_keys + 2) * dr.abs()) @ k.abs())
    dk = abs(scale) * ((dr_error + r.u * (over_queries + 2) * dr.abs()).mT @ q.abs())
    dv = (weight_error + (r.U + r.u * (over_queries + 1)) * a.weights).mT @ g.abs()
    relative = a.sink_error + a.mean_error + r.u * (2 * ELEMENTARY + 1 + a.over_keys)
    over_rows = r.u * sum_error_bound(q.shape[0] * q.shape[2])
    dsink = a.share * ((relative + over_rows) * d.abs() + d_error)
    floors = {
        "q": dq,
        "k": _sum_errors_per_kv_head(dk, scale * (dr.mT @ q), k_heads, r),
        "v": _sum_errors_per_kv_head(dv, a.weights.mT @ g, v_heads, r),
        "sink": dsink.sum((0, 2, 3)),
    }
    if bias_gradient is not None:
        exact = bias_gradient(ds).abs()
        over = r.u * sum_error_bound(ds.numel() // max(exact.numel(), 1))
        error = ds_error + r.eta * a.live + over * ds.abs()
        floors["score_bias"] = bias_gradient(error).abs()
    return floors


def _bound_score_gradient(
    a: RowRounding, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the error of P, then dS = P * (dP - D) and D, each with its error.

    dP = dO v, and D = sum of dO * O is the weighted mean of dP over a row; O is read from storage.
    """
    r, over_values = a.r, sum_error_bound(v.shape[-1])
    out = a.weights @ v
    dp, size = g @ v.mT, g.abs() @ v.abs().mT
    d = (g * out).sum(-1, keepdim=True)
    out_error = product_floor(a, v) + r.U * out.abs() + r.eta
    d_error = (g.abs() * out_error).sum(-1, keepdim=True)
    d_error = d_error + r.u * over_values * (g * out).abs().sum(-1, keepdim=True)
    # A backward pass may recompute a weight as exp(s - logsumexp), with a rounded logsumexp.
    weight_error = a.absolute_weight_error + a.weights * r.u * a.logsumexp.abs()
    rest = r.u * ((over_values + 2) * size + 2 * (dp.abs() + d.abs())) + d_error
    ds_error = weight_error * (dp - d).abs() + a.weights * rest
    return weight_error, a.weights * (dp - d), ds_error, d, d_error


def _sum_errors_per_kv_head(error: Tensor, exact: Tensor, kv_heads: int, r: Roundoff) -> Tensor:
    """Sum errors over the query heads of a kv head; parts may be stored before the sum."""
    error, exact = (x.unflatten(1, (kv_heads, -1)) for x in (error, exact))
    if exact.shape[2] == 1:
        return error.sum(2)
    return (error + r.U * exact.abs() + r.eta).sum(2)

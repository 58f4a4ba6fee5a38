"""Error budget: the allowed difference of each element from the float64 reference.

This is clause 4 of the contract. For each element,

    allowed = factor * (largest error of plain torch over a family of inputs)  +  floor

with factor 2, or 3 for gradients. Plain torch is `headwise.function.stages` in the dtype of the
inputs. The floor bounds unavoidable rounding (`headwise.function.rounding`, derived in
docs/budget.md). With ``factor=0`` only the floor is allowed: half dtypes must compute in float32
and round only what they store.

    Budget.for_head_outputs(q, k, v, mask=mask).assert_holds(A @ v)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import ShapeError
from headwise.function import rounding, stages
from headwise.function.rounding import Read
from headwise.function.stages import AttentionOptions
from headwise.masks.score_bias import ScoreBias
from headwise.support.text import MATRIX_AXES


@dataclass(frozen=True)
class BudgetVerdict:
    """Result of a check; true if every element is within its allowance.

    Attributes:
        name: the checked quantity.
        dtype: the dtype of the inputs.
        outside: the number of elements beyond their allowance.
        elements: the number of all elements.
        place: the index of the worst element, the one with the largest ``ratio``.
        actual: the value of the worst element.
        exact: its float64 reference.
        error: its absolute error.
        allowed: its allowance.
    """

    name: str
    dtype: torch.dtype
    outside: int
    elements: int
    place: str
    actual: float
    exact: float
    error: float
    allowed: float

    @property
    def within(self) -> bool:
        """True if every element is within its allowance."""
        return self.outside == 0

    @property
    def ratio(self) -> float:
        """Error over allowance at the worst element; at most 1 within the budget."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf

    def __bool__(self) -> bool:
        return self.within

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"{self.name} ({dtype}): {self.elements - self.outside} of {self.elements} elements"
        return (
            f"{head} are within the error budget\n"
            f"  largest share of the allowance: {self.ratio:.3g} at {self.place}\n"
            f"  error {self.error:.3g}, allowed {self.allowed:.3g}: "
            f"got {self.actual:.9g}, the float64 reference is {self.exact:.9g}"
        )

    __repr__ = __str__


@dataclass(frozen=True, eq=False, repr=False)
class Budget:
    """Float64 reference of a result, and the error allowed for each of its elements.

    Attributes:
        name: the quantity, for messages.
        dtype: the dtype of the inputs.
        exact: the float64 reference.
        allowed: the allowed absolute error of the arithmetic; ``check`` adds one rounding to the
            dtype of the checked result.
        axes: the names of the axes, for messages; () for their numbers.
    """

    name: str
    dtype: torch.dtype
    exact: Float[Tensor, "*shape"]
    allowed: Float[Tensor, "*shape"]
    axes: tuple[str, ...] = ()

    # ---- construction -----------------------------------------------------------------------

    @classmethod
    def for_function(
        cls,
        function: Callable[..., Tensor],
        *inputs: Tensor,
        floor: Tensor | None = None,
        factor: float = rounding.FORWARD,
        name: str = "result",
        axes: tuple[str, ...] = (),
    ) -> Budget:
        """Make the budget of any function of the inputs.

        Args:
            function: plain torch code; it is called with ``inputs`` in their dtype and in float64.
            *inputs: the first one determines the dtype of the budget.
            floor: the rounding floor of each element. By default the change of the exact result
                when the inputs change by one unit in the last place.
            factor: factor of plain torch's largest error.
            name: the quantity, for messages.
            axes: the names of the result's axes, for messages.
        """
        family = rounding.measure_family(lambda *x: (function(*x),), inputs)
        [exact] = family.exact
        allowed = family.allowed(0, factor=factor, floor=floor)
        return cls(name, inputs[0].dtype, exact, allowed, axes)

    @classmethod
    def for_head_outputs(
        cls,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        v: Float[Tensor, "#batch heads_of_v keys value_dim"],
        *,
        factor: float = rounding.FORWARD,
        **options: Unpack[AttentionOptions],
    ) -> Budget:
        """Make the budget of ``A @ v``; options as in `headwise.AttentionMatrix`."""
        floor = rounding.product_floor(_row_rounding(q, k, options), _expand_to_all_heads(v, q))
        axes = (*MATRIX_AXES[:3], "value_dim")
        f = partial(_attention_product, options=options)
        return cls.for_function(
            f, q, k, v, floor=floor, factor=factor, name="head outputs", axes=axes
        )

    @classmethod
    def for_transposed(
        cls,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        y: Float[Tensor, "#batch heads_of_y queries y_dim"],
        *,
        factor: float = rounding.FORWARD,
        **options: Unpack[AttentionOptions],
    ) -> Budget:
        """Make the budget of ``A.mT @ y``; options as in `headwise.AttentionMatrix`."""
        floor = rounding.product_floor(
            _row_rounding(q, k, options), _expand_to_all_heads(y, q), transposed=True
        )
        axes = ("batch", "heads", "keys", "y_dim")

        def f(q: Tensor, k: Tensor, y: Tensor) -> Tensor:
            return stages.weights(q, k, **options).mT @ y

        return cls.for_function(f, q, k, y, floor=floor, factor=factor, name="A.mT @ y", axes=axes)

    @classmethod
    def for_weights(
        cls,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        *,
        read: Read | None = None,
        factor: float = rounding.FORWARD,
        **options: Unpack[AttentionOptions],
    ) -> Budget:
        """Make the budget of the weights, or of ``read(weights)``.

        Args:
            q: queries.
            k: keys.
            read: sums or selects weights, or takes their maximum, such as one row, a diagonal or
                the average over heads. It takes (batch, heads, queries, keys); None for all
                weights.
            factor: the allowed error, in errors of plain torch; 2 by default.
            **options: as in `headwise.AttentionMatrix`.
        """
        read_weights = read or (lambda w: w)
        floor = rounding.weights_readout_floor(_row_rounding(q, k, options), read_weights)
        axes = MATRIX_AXES if read is None else ()

        def f(q: Tensor, k: Tensor) -> Tensor:
            return read_weights(stages.weights(q, k, **options))

        return cls.for_function(f, q, k, floor=floor, factor=factor, name="weights", axes=axes)

    @classmethod
    def for_logsumexp(
        cls,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        *,
        factor: float = rounding.FORWARD,
        **options: Unpack[AttentionOptions],
    ) -> Budget:
        """Make the budget of the logsumexp over keys and sink; -inf in an empty row."""
        floor, axes = rounding.logsumexp_floor(_row_rounding(q, k, options)), MATRIX_AXES[:3]
        f = partial(_logsumexp_of_scores, options=options)
        return cls.for_function(f, q, k, floor=floor, factor=factor, name="logsumexp", axes=axes)

    @classmethod
    def for_entropy(
        cls,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        *,
        factor: float = rounding.FORWARD,
        **options: Unpack[AttentionOptions],
    ) -> Budget:
        """Make the budget of the entropy in nats over keys and sink; 0 in an empty row."""
        floor, axes = rounding.entropy_floor(_row_rounding(q, k, options)), MATRIX_AXES[:3]
        f = partial(_entropy_of_scores, options=options)
        return cls.for_function(f, q, k, floor=floor, factor=factor, name="entropy", axes=axes)

    @classmethod
    def for_gradients(
        cls,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        v: Float[Tensor, "batch heads_of_v keys value_dim"],
        *,
        grad_output: Float[Tensor, "batch heads queries value_dim"],
        bias_gradient: Read | None = None,
        factor: float = rounding.BACKWARD,
        **options: Unpack[AttentionOptions],
    ) -> dict[str, Budget]:
        """Make the budgets of the gradients of ``A @ v``: "q", "k", "v", and "sink" for a sink.

        ``bias_gradient`` adds "score_bias": the function sums the gradient of the scores to that
        of the bias, e.g. ``lambda g: g.sum(0)`` for a dense bias of (heads, queries, keys).
        ``grad_output`` is the gradient of the head outputs.
        """
        scale = options.get("scale")
        scale = stages.default_scale(q) if scale is None else scale
        rows, extra = _row_rounding(q, k, options), {"bias_gradient": bias_gradient}
        floors = rounding.gradient_floors(rows, q, k, v, grad_output, scale=scale, **extra)
        leaves = {"q": q, "k": k, "v": v}
        if (sink := options.get("sink")) is not None:
            leaves["sink"] = sink
        backward = partial(_compute_gradients, options=options, read=bias_gradient)
        family = rounding.measure_family(backward, (grad_output, *leaves.values()))
        names = [*leaves, "score_bias"][: len(family.exact)]
        allowed = [family.allowed(i, factor=factor, floor=floors[n]) for i, n in enumerate(names)]
        parts = zip(names, family.exact, allowed, strict=True)
        return {n: cls(f"gradient of {n}", q.dtype, exact, error) for n, exact, error in parts}

    # ---- use --------------------------------------------------------------------------------

    def check(self, actual: Tensor) -> BudgetVerdict:
        """Compare a result with the reference, element by element; NaN is never within.

        Raises:
            ShapeError: the shape of the result is not that of the reference.
        """
        if actual.shape != self.exact.shape:
            raise ShapeError(
                saw=f"{self.name} of shape {tuple(actual.shape)}",
                needed=f"{tuple(self.exact.shape)}, the shape of the reference",
                do="pass the whole result, without a squeezed or transposed axis",
            )
        allowed = self._allowed_in_dtype(actual.dtype)
        actual = actual.detach().to(self.exact.device, torch.float64)
        error = (actual - self.exact).abs().where(actual != self.exact, 0.0).nan_to_num(torch.inf)
        share = (error / allowed).where(error > 0, 0.0)
        if share.numel() == 0:
            return BudgetVerdict(self.name, self.dtype, 0, 0, "no element", 0.0, 0.0, 0.0, 0.0)
        worst = int(share.argmax())
        index = torch.unravel_index(torch.tensor(worst), share.shape)
        axes = self.axes or [f"axis {n}:" for n in range(share.dim())]
        return BudgetVerdict(
            name=self.name,
            dtype=self.dtype,
            outside=int((share > 1).sum()),
            elements=share.numel(),
            place=", ".join(f"{a} {int(n)}" for a, n in zip(axes, index, strict=True)),
            actual=float(actual.flatten()[worst]),
            exact=float(self.exact.flatten()[worst]),
            error=float(error.flatten()[worst]),
            allowed=float(allowed.flatten()[worst]),
        )

    def _allowed_in_dtype(self, dtype: torch.dtype) -> Tensor:
        """Return ``allowed`` plus one rounding to the dtype of the result."""
        # Infinite results, such as the logsumexp of an empty row, must be equal.
        allowed = self.allowed + rounding.last_rounding(self.exact, dtype)
        return allowed.where(self.exact.isfinite(), 0.0)

    def assert_holds(self, actual: Tensor) -> None:
        """Raise AssertionError with the verdict as its message, unless all elements are within.

        Raises:
            AssertionError: an element beyond its allowance.
            ShapeError: the shape of the result is not that of the reference.
        """
        verdict = self.check(actual)
        if not verdict.within:
            raise AssertionError(str(verdict))

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        largest = float(self.allowed.max()) if self.allowed.numel() else 0.0
        return f"Budget({self.name}, {dtype}, {tuple(self.exact.shape)}; at most {largest:.2g})"


# ---- the reference arithmetic of other results -----------------------------------------------


def _attention_product(q: Tensor, k: Tensor, v: Tensor, *, options: AttentionOptions) -> Tensor:
    # Like reference.head_outputs, for any number of value heads that divides that of q.
    return stages.weights(q, k, **options) @ stages.repeat_kv_heads(v, heads=q.shape[1])


def _scores_with_sink(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """Return the scores with the sink's logit as an extra key, -inf without a sink."""
    others: dict[str, Any] = {name: x for name, x in options.items() if name != "sink"}
    s, sink = stages.scores(q, k, **others), options.get("sink")
    logit = s.new_tensor(-torch.inf) if sink is None else sink.to(s.dtype)[:, None, None]
    return torch.cat([s, logit.expand(*s.shape[:-1], 1)], dim=-1)


def _logsumexp_of_scores(q: Tensor, k: Tensor, *, options: AttentionOptions) -> Tensor:
    return torch.logsumexp(_scores_with_sink(q, k, options), dim=-1)


def _entropy_of_scores(q: Tensor, k: Tensor, *, options: AttentionOptions) -> Tensor:
    s = _scores_with_sink(q, k, options)
    below = s.amax(-1, keepdim=True) - s  # NaN in an empty row
    e = torch.exp(-below).nan_to_num(0.0)
    total = e.sum(-1).clamp(min=1.0)
    return total.log() + (e * below.where(e > 0, 0.0)).sum(-1) / total


def _compute_gradients(
    grad_output: Tensor, *leaves: Tensor, options: AttentionOptions, read: Read | None
) -> tuple[Tensor, ...]:
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    q, k, v, *sink = leaves
    options = {**options, "sink": sink[0] if sink else None}
    extra: list[Tensor] = []
    if read is not None:
        # The gradient of an added bias of zeros is that of the scores.
        zeros = q.new_zeros(*q.shape[:3], k.shape[2]).requires_grad_()
        probe = ScoreBias.dense(zeros, axes=" ".join(MATRIX_AXES))
        score_bias = options.get("score_bias")
        options = {**options, "score_bias": probe if score_bias is None else score_bias + probe}
        extra = [zeros]
    with torch.enable_grad():
        out = _attention_product(q, k, v, options=options)
    grads = torch.autograd.grad(out, [*leaves, *extra], grad_output)
    return grads if read is None else (*grads[:-1], read(grads[-1]))


def _row_rounding(q: Tensor, k: Tensor, options: AttentionOptions) -> rounding.RowRounding:
    return rounding.row_rounding(q, k, rounding.Roundoff.of(q.dtype), **options)


def _expand_to_all_heads(x: Tensor, q: Tensor) -> Tensor:
    return stages.repeat_kv_heads(x.detach().double(), heads=q.shape[1])

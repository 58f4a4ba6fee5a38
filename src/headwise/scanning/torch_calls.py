"""Watch of torch's functions: attention that they compute, and attention by explicit products.

`scaled_dot_product_attention` runs unchanged, and its operands are recorded as a matrix. Calls of
`multi_head_attention_forward`, as from `torch.nn.MultiheadAttention`, run headwise's functional
form, which is the same function. While the mode is on, torch's layers leave their fused inference
path by themselves.

Attention by explicit products is a product of two activations (the scores), a softmax along the
last axis of a tensor of its size (the weights), and a product of two activations with such weights.
Parameters are no activations, so a router or a classifier is none of this. What enters the softmax
beside a multiple of the products is a mask where it hides a key, and else a score bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headwise.function import stages
from headwise.function.rounding import default_tolerance
from headwise.layers.hooks import call_hook
from headwise.layers.torch_api.layer import multi_head_attention_forward
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias, split_additive_mask
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import ModuleCall
from headwise.support.tensors import iterate_leaves
from headwise.support.tracing import cast_like_autocast, is_kernel_call

AXES = "batch heads queries keys"
HIDDEN = -1e4  # the largest number that stands for -inf in a mask, as in the first BERT
MOST = 8  # products of one size that wait for a softmax
SOFTMAXES = frozenset((torch.softmax, torch.special.softmax, Tensor.softmax, F.softmax))
_OPERATORS = (Tensor.__matmul__, Tensor.__rmatmul__, torch.einsum)
_NAMED = (getattr(place, x) for x in ("matmul", "bmm", "baddbmm") for place in (torch, Tensor))
PRODUCTS = frozenset((*_OPERATORS, *_NAMED))


class TorchCalls(TorchFunctionMode):
    """Mode in which torch's attention functions and products notify the attention hook.

    Explicit products belong to the running module that ``find_owner`` returns, if any does.
    ``on_unread`` gets the owner of those of which no `AttentionMatrix` is known.
    """

    def __init__(
        self, find_owner: Callable[[], ModuleCall | None], on_unread: Callable[[ModuleCall], None]
    ) -> None:
        super().__init__()
        self._find_owner, self._on_unread = find_owner, on_unread

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and record attention."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return multi_head_attention_forward(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not is_kernel_call():
            return _record_attention(func(*args, **kwargs), *args, **kwargs)
        result = func(*args, **kwargs)
        if func in PRODUCTS:
            operands = [x for x in iterate_leaves((args, kwargs)) if _is_batched_activation(x)]
            if len(operands) > 1 and (owner := self._find_owner()) is not None:
                return self._note_product(owner, operands, _read_equation(args), result)
        elif func in SOFTMAXES:
            x: Any = args[0] if args else kwargs.get("input")
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if _is_batched_activation(x) and dim in (-1, x.dim() - 1):
                owner = self._find_owner()
                if owner is not None and _size(x) in owner.scores:
                    owner.weights[_size(x)] = x, result
        return result

    def _note_product(
        self, owner: ModuleCall, operands: Sequence[Tensor], equation: str | None, result: Tensor
    ) -> Tensor:
        """Note a product; return what the hook makes of the head outputs if that is what it is."""
        product = _Product.of(operands, equation, result)
        size = next((_size(x) for x in operands if _size(x) in owner.weights), None)
        if size is None:
            noted = owner.scores.get(_size(result), [])
            owner.scores[_size(result)] = [*noted, *([product] if product else [])][-MOST:]
            return result
        if product is not None:
            axes = _find_axes(product, owner.state)
            matrix = _read_matrix(owner.scores[size], owner.weights[size], product, axes)
            if matrix is not None:
                del owner.weights[size], owner.scores[size]
                outputs, v = axes.split(product.arrange(result)), axes.split(product.factors()[1])
                used = call_hook(matrix, v.to(matrix.q.dtype), outputs)
                return result if used is outputs else product.put_back(axes.join(used))
        self._on_unread(owner)
        return result


def _is_batched_activation(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dim() < 3 or isinstance(x, nn.Parameter):
        return False
    return x.is_inference() or not isinstance(x._base, nn.Parameter)  # of which x is a view


def _size(x: Tensor) -> tuple[int, int]:
    """Return what broadcasts and views with other leading axes leave as it is."""
    return x.numel(), x.shape[-1]


# ---- explicit products ---------------------------------------------------------------------------


def _read_equation(args: Sequence[Any]) -> str | None:
    return args[0].replace(" ", "") if args and isinstance(args[0], str) else None


@dataclass(frozen=True, eq=False)
class _Product:
    """A product of two batches of matrices, (leading, rows, inner) and (leading, inner, columns).

    ``order`` puts the axes of the result in this order.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size  # of the result, as it was computed
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, operands: Sequence[Tensor], equation: str | None, result: Tensor
    ) -> _Product | None:
        """Return a product of torch; None for an equation of another product."""
        left, right = operands[-2:]  # an addend comes before them
        if equation is None:
            return cls(left, right, result.shape, tuple(range(result.dim())))
        inputs, _, out = equation.partition("->")
        first, _, second = inputs.partition(",")
        if not out or "." in inputs or any(len({*x}) < len(x) for x in (first, second, out)):
            return None
        if out[-1] in first:  # columns are what comes last
            (first, left), (second, right) = (second, right), (first, left)
        both = {*first} & {*second}
        alone = rows, inner, columns = {*first} - both, both - {*out}, {*second} - both
        if [*map(len, alone)] != [1, 1, 1] or {*out} != (both - inner) | rows | columns:
            return None
        (row,), (summed,), (column,) = rows, inner, columns
        leading = "".join(x for x in first if x in both and x != summed)
        return cls(
            left.permute([first.index(x) for x in leading + row + summed]),
            right.permute([second.index(x) for x in leading + summed + column]),
            result.shape,
            tuple(out.index(x) for x in leading + row + column),
        )

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading axes, in order."""
        return tuple(self.shape[axis] for axis in self.order[:-2])

    def arrange(self, x: Tensor) -> Tensor:
        """Return a tensor of the result's numbers as (leading, rows, columns)."""
        return x.reshape(self.shape).permute(self.order).flatten(0, -3)

    def put_back(self, x: Tensor) -> Tensor:
        """Return (leading, rows, columns) in the axes of the result."""
        sizes = [self.shape[axis] for axis in self.order]
        return x.reshape(sizes).permute(sorted(range(len(sizes)), key=self.order.__getitem__))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return both factors with one leading axis."""
        return tuple(  # type: ignore[return-value]
            x.expand(*self.leading, *x.shape[-2:]).flatten(0, -3) for x in (self.left, self.right)
        )


class _Leading(NamedTuple):
    """The leading axis of explicit products: batch and heads, or heads and batch."""

    batch: int
    heads: int
    is_heads_first: bool

    def split(self, x: Tensor) -> Tensor:
        """Return (batch, heads, rows, columns)."""
        sizes = (self.heads, self.batch) if self.is_heads_first else (self.batch, self.heads)
        apart: Tensor = x.unflatten(0, sizes)
        return apart.transpose(0, 1) if self.is_heads_first else apart

    def join(self, x: Tensor) -> Tensor:
        """Return the reverse of `split`."""
        return (x.transpose(0, 1) if self.is_heads_first else x).flatten(0, 1)


def _find_axes(mixing: _Product, state: Tensor | None) -> _Leading:
    """Return how leading axes are divided: by the tokens that the module got, if they show it."""
    leading, queries = mixing.leading, mixing.left.shape[-2]
    count = math.prod(leading)
    tokens = () if state is None or state.is_nested else state.shape[:-1]
    if count and len(tokens) in (1, 2) and queries in tokens:
        batch = math.prod(tokens) // queries
        if leading[0] == batch or (len(leading) == 1 and count % batch == 0):
            return _Leading(batch, count // batch, is_heads_first=False)
        if leading[1:] == (batch,):
            return _Leading(batch, leading[0], is_heads_first=True)
    heads = (leading[-1] if len(leading) > 1 else 1) or 1
    return _Leading(count // heads, heads, is_heads_first=False)


def _read_matrix(
    products: Sequence[_Product], softmax: tuple[Tensor, Tensor], mixing: _Product, axes: _Leading
) -> AttentionMatrix | None:
    """Return the matrix of one of some products whose softmax weighs values; None if none is.

    That is the product of which scores are a multiple where a key is seen, or else the first.
    """
    matrices: list[AttentionMatrix] = []
    used = mixing.factors()[0]
    for product in products:
        scores, weights = map(product.arrange, softmax)
        if weights.shape == used.shape and torch.equal(weights.to(used.dtype), used):
            q, k = cast_like_autocast(*product.factors())
            q, k, scores, weights = map(axes.split, (q, k.mT, scores, weights))
            mask, score_bias, scale = _split_scores(q, k, scores, weights)
            options: Any = {"mask": mask, "score_bias": score_bias, "scale": scale}
            matrices.append(AttentionMatrix(q, k, **options))
            if not score_bias.tensors:
                return matrices[-1]
    return next(iter(matrices), None)


@torch.no_grad()
def _split_scores(
    q: Tensor, k: Tensor, scores: Tensor, weights: Tensor
) -> tuple[Mask, ScoreBias, float]:
    """Return the mask, the score bias and the scale by which products become scores.

    A bias of positions is the same in all sequences, which tell the scale by their differences.
    """
    products, scores = q.double() @ k.double().mT, scores.double()
    seen = (scores > HIDDEN) | ((weights != 0) & scores.isfinite())
    mask, queries, keys = Mask(), *seen.shape[2:]
    if torch.equal(seen, torch.ones_like(seen).tril(keys - queries)):
        mask = Mask.causal(align="bottom-right") if queries > 1 else mask
    elif not seen.all():
        shared = seen[:, :1]
        is_shared = torch.equal(seen, shared.expand_as(seen))
        mask = Mask.may_attend(shared if is_shared else seen, axes=AXES)
    mine, theirs = scores[seen], products[seen]
    scale = float((mine @ theirs) / (theirs @ theirs)) if len(mine) else 1.0
    usual, tolerance = q.shape[-1] ** -0.5, default_tolerance(weights.dtype)
    near = (each for each in (1.0, usual) if math.isclose(scale, each, rel_tol=1e-6))
    scale = next(near, scale)
    if (mine - scale * theirs).norm() <= tolerance * mine.norm():
        return mask, ScoreBias(), scale
    everywhere = seen.all(0).expand_as(seen)
    mine, theirs = ((x - x.mean(0))[everywhere] for x in (scores, products))
    apart = (mine - usual * theirs).norm()
    is_usual = bool(theirs.any()) and float(apart) <= tolerance * float(mine.norm())
    scale = usual if is_usual else 1.0
    bias = (scores - scale * products).masked_fill(~seen, 0.0)
    return mask, ScoreBias.dense(bias.to(q.dtype), axes=AXES), scale


def _record_attention(
    outputs: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 (torch's signature)
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    axes = _Axes(outputs.shape[:-2], is_grouped=enable_gqa)
    head_outputs = axes.with_four_axes(outputs)
    heads = head_outputs.shape[1]
    query, key, value = cast_like_autocast(query, key, value)
    q, k, v = axes.with_four_axes(query, heads=heads), *map(axes.with_four_axes, (key, value))
    if k.shape[1] != v.shape[1]:  # a layer has one number of kv heads
        k, v = (stages.repeat_kv_heads(x, heads=heads) for x in (k, v))
    mask, score_bias = Mask(), ScoreBias()
    if is_causal:
        mask = Mask.causal(align="top-left")
    elif attn_mask is not None:
        torch_mask = axes.mask_with_four_axes(attn_mask)
        if torch_mask.dtype == torch.bool:
            mask = Mask.may_attend(torch_mask, axes=AXES)
        else:
            mask, score_bias = split_additive_mask(torch_mask, axes=AXES)
    matrix = AttentionMatrix(q, k, mask=mask, score_bias=score_bias, scale=scale)
    return call_hook(matrix, v, head_outputs).reshape(outputs.shape)


@dataclass(frozen=True)
class _Axes:
    """The leading axes of one call of torch, of any number, as batch and heads.

    The last is heads and the others are batch. A single axis is batch, unless heads are grouped.
    """

    leading: tuple[int, ...]  # of the outputs, to which torch broadcast all operands
    is_grouped: bool

    def with_four_axes(self, x: Tensor, *, heads: int | None = None) -> Tensor:
        """Return (batch, heads, length, width); with the heads of ``x`` if ``heads`` is None."""
        *batch, _ = self._batch_and_heads(self.leading)
        x = self._make_broadcastable(x)
        heads = x.shape[-3] if heads is None else heads
        return x.expand(*batch, heads, -1, -1).flatten(0, -4)

    def mask_with_four_axes(self, mask: Tensor) -> Tensor:
        """Return a mask with four axes; a mask for the whole batch is not repeated."""
        single = self._make_broadcastable(mask)
        is_shared = single.shape[:-3].numel() == 1
        return single.flatten(0, -4) if is_shared else self.with_four_axes(mask)

    def _make_broadcastable(self, x: Tensor) -> Tensor:
        leading = x.shape[:-2]
        missing = (1,) * (len(self.leading) - len(leading))
        return x.reshape(*self._batch_and_heads((*missing, *leading)), *x.shape[-2:])

    def _batch_and_heads(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        if len(leading) == 1 and not self.is_grouped:
            return (*leading, 1)
        return (*(1,) * (2 - len(leading)), *leading)

"""Steps of a cut: each is data, and changes the canonical tensors of one attention layer.

A step is an index map of the heads (`Take`), or a small linear map (`Merge`, `Basis`, `Zero`,
`Shift`, `Refit`). Linear maps are computed in float64 and rounded once to the tensor's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.function.spec import ABSENT, AlibiRule, AttentionSpec, NormRule, Other, ValueRule
from headwise.function.weights import HEADS, State, take_heads
from headwise.support.text import list_some

# "indices": tensors are the same numbers at other places. "rounding": another order of sums, or
# numbers rounded once. "no": outputs are others.
Equality = Literal["indices", "rounding", "no"]
KV_TENSORS = tuple(name for name, (_, axis) in HEADS.items() if axis == "kv_heads")
# tensors whose channels a map changes, beside wo
KEYS, QUERIES = ("wk", "bk", "extra_k", "wpk", "bpk"), ("wq", "bq", "wpq", "bpq")
VALUES = ("wv", "bv", "extra_v")


@dataclass(frozen=True)
class Origins:
    """The original heads that the heads of a layer are made of."""

    query: tuple[int, ...]  # for each head, its original number
    # for each kv head, the original kv heads that it is, or is the mean of
    kv: tuple[tuple[int, ...], ...]
    # original numbers of heads that are still there, and whose output is zero
    off: frozenset[int] = frozenset()

    @classmethod
    def all(cls, num_heads: int, num_kv_heads: int) -> Origins:
        """Return the heads of a layer that nothing was done to."""
        return cls(tuple(range(num_heads)), tuple((kv,) for kv in range(num_kv_heads)))

    @property
    def group(self) -> int:
        """The number of query heads that share a kv head."""
        return len(self.query) // len(self.kv)


class Step(ABC):
    """One change of a layer's heads."""

    kind: ClassVar[str]  # its name in a file

    def follow(self, origins: Origins) -> Origins:
        """Return the heads after this step; raise where it does not fit those before."""
        return origins

    @abstractmethod
    def apply(self, state: State) -> State:
        """Return the canonical tensors after this step."""

    def require_function(self, spec: AttentionSpec) -> None:  # noqa: B027 - many allow all
        """Raise OptionError where the function of a layer does not allow this step."""

    @property
    def equality(self) -> Equality:
        """Degree to which the layer's outputs stay equal: many steps change them."""
        return "no"


@dataclass(frozen=True)
class Take(Step):
    """Index map: head i becomes the head ``heads[i]``, and kv head j the one at ``kv_heads[j]``.

    Origins that are not named are gone. A kv head may be named several times: its copies.
    """

    kind: ClassVar[str] = "take"
    total: int  # the number of heads before
    # their numbers before
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    # True if the outputs of all heads that are gone are zero. That is checked.
    are_zero: bool = False

    @property
    def equality(self) -> Equality:
        return "indices" if self.are_zero or len(self.heads) == self.total else "no"

    @property
    def gone(self) -> list[int]:
        """The numbers of heads that are gone."""
        return sorted({*range(self.total)} - {*self.heads})

    def follow(self, origins: Origins) -> Origins:
        require_numbers(self.heads, len(origins.query), "heads")
        for number in self.kv_heads:
            _require_range(number, len(origins.kv), "kv_heads")
        query = tuple(origins.query[i] for i in self.heads)
        return Origins(query, tuple(origins.kv[j] for j in self.kv_heads), origins.off & {*query})

    def apply(self, state: State) -> State:
        self._require_equal_copies(state)
        if self.are_zero and bool(state["wo"][self.gone].any()):
            gone = list_some([str(number) for number in self.gone])
            raise OptionError(
                saw=f"heads {gone} with an output projection that is not 0",
                needed="rows of 0, as this cut says",
                do="take the cut of these weights: drop(heads) without are_zero=True",
            )
        return take_heads(state, self.heads, self.kv_heads)

    def _require_equal_copies(self, state: State) -> None:
        """Raise where a head would read another kv head than before, unless they are equal."""
        before, group = self.total // state["wk"].shape[0], len(self.heads) // len(self.kv_heads)
        for place, head in enumerate(self.heads):
            old, new = head // before, self.kv_heads[place // group]
            held = [n for n in KV_TENSORS if n in state]
            different = [n for n in held if not torch.equal(state[n][old], state[n][new])]
            if old != new and different:
                raise OptionError(
                    saw=f"head {head}, whose keys and values are those of kv head {old}, at a "
                    f"place that reads kv head {new}; they differ in {', '.join(different)}",
                    needed="the same kv head, or an equal copy of it",
                    do="keep the heads of a group together, or merge their kv heads first",
                )

    def require_function(self, spec: AttentionSpec) -> None:
        if len(self.heads) < self.total or len({*self.kv_heads}) < len(self.kv_heads):
            _require_own_channels(self, spec, is_fewer=len(self.heads) < self.total)
        _require_single_heads(spec)
        if isinstance(spec.score_bias, AlibiRule) and self.heads != tuple(range(self.total)):
            raise OptionError(
                saw=f"heads at other places under ALiBi, whose slopes follow from {self.total} "
                "heads and their order",
                needed="a layer without ALiBi",
                do="zero the heads in place of taking them out",
            )
        if isinstance(spec.score_bias, Other):
            _refuse_unknown("score bias", spec.score_bias)


@dataclass(frozen=True, eq=False)
class Merge(Step):
    """Grouped heads from more kv heads: each new one is made of ``count`` that follow it.

        k' = Σ key_j @ k_j,  q' = query_j @ q,  v' = Σ value_j @ v_j,  wo' = output_j @ wo

    The sums are over the kv heads j of a run; queries and output projections are those of the heads
    that read j. Without maps a new kv head is the mean, as in GQA (arXiv:2305.13245), section 2.1.
    `headwise.surgery.maps` fits maps to data. With a rotation, those of keys and queries keep its
    planes; see `require_rotary_planes`.
    """

    kind: ClassVar[str] = "merge"
    count: int  # the number of kv heads in a run
    # (kv_heads, head_dim, head_dim) before the merge; None for the mean
    key: Tensor | None = None
    query: Tensor | None = None
    # (kv_heads, value_dim, value_dim) before the merge; None for the mean
    value: Tensor | None = None
    output: Tensor | None = None

    @property
    def has_maps(self) -> bool:
        """True unless all new kv heads are means."""
        return self.key is not None or self.value is not None

    @property
    def equality(self) -> Equality:
        return "indices" if self.count == 1 and not self.has_maps else "no"

    def follow(self, origins: Origins) -> Origins:
        if self.count < 1 or len(origins.kv) % self.count:
            raise OptionError(
                saw=f"{len(origins.kv)} kv heads, merged {self.count} at a time",
                needed=f"a divisor of {len(origins.kv)}",
                do="choose a number of kv heads that divides the one before",
            )
        for names in (("key", "query"), ("value", "output")):
            maps = [getattr(self, name) for name in names]
            if (maps[0] is None) != (maps[1] is None):
                raise OptionError(
                    saw=f"a map of {names[maps[0] is None]} alone",
                    needed=f"maps of {names[0]} and {names[1]}, or none",
                    do="give both",
                )
            for name, each in zip(names, maps, strict=True):
                _require_square(name, each, len(origins.kv))
        runs = [origins.kv[j : j + self.count] for j in range(0, len(origins.kv), self.count)]
        merged = tuple(tuple(sorted({o for kv in run for o in kv})) for run in runs)
        return replace(origins, kv=merged)

    def apply(self, state: State) -> State:
        merged = _map_channels(state, self.key, self.query, self.value, self.output)
        for name in [name for name in KV_TENSORS if name in state]:
            is_sum = merged[name] is not state[name]
            exact = merged[name].double() * (self.count if is_sum else 1)
            merged[name] = exact.unflatten(0, (-1, self.count)).mean(1)
        return _round(merged, state)

    def require_function(self, spec: AttentionSpec) -> None:
        _require_single_heads(spec)
        _require_own_channels(self, spec)
        _require_maps((self.key, self.query), (self.value,), spec)


@dataclass(frozen=True, eq=False)
class Basis(Step):
    """Another basis of the channels inside each kv head and its query heads.

        k' = key @ k,  q' = inverse(key).T @ q,  v' = value @ v,  wo' = inverse(value).T @ wo

    Scores and outputs stay equal up to rounding. With a rotation ``key`` must commute with it: each
    plane of two rotated channels is turned or scaled by itself.
    """

    kind: ClassVar[str] = "basis"
    key: Tensor | None = None  # (kv_heads, head_dim, head_dim), None for no change
    value: Tensor | None = None  # (kv_heads, value_dim, value_dim), None for no change

    @property
    def equality(self) -> Equality:
        return "rounding"

    def follow(self, origins: Origins) -> Origins:
        _require_square("key", self.key, len(origins.kv))
        _require_square("value", self.value, len(origins.kv))
        return origins

    def apply(self, state: State) -> State:
        inverses = (
            None if basis is None else torch.linalg.inv(basis.double()).mT
            for basis in (self.key, self.value)
        )
        query, output = inverses
        return _round(_map_channels(state, self.key, query, self.value, output), state)

    def require_function(self, spec: AttentionSpec) -> None:
        _require_maps((self.key,), (self.value,), spec)


def _require_single_heads(spec: AttentionSpec) -> None:
    if spec.pairs is not None:
        raise OptionError(
            saw="other heads or places of heads in differential attention, which is of pairs",
            needed="a layer in which each head has outputs of its own",
            do="leave this layer whole",
        )


def require_free_values(spec: AttentionSpec) -> None:
    """Raise OptionError where something tells the channels of values apart."""
    if str(spec.output_gate).startswith("channel"):
        raise _channels_differ("values", "an output gate for each channel")
    has_norm = isinstance(spec.values, ValueRule) and spec.values.eps is not None
    if has_norm or spec.output_norm is not ABSENT or spec.pairs is not None:
        raise _channels_differ("values", "a norm of values or head outputs")
    if spec.clip is not ABSENT:
        raise _channels_differ("values", "projections that are clipped")


def require_free_keys(spec: AttentionSpec) -> None:
    """Raise OptionError where more than a rotation tells the channels of keys apart."""
    if spec.qk_norm:
        raise _channels_differ("keys", "a norm of queries and keys")
    if spec.latent:
        raise _channels_differ("keys", "a key that all heads share")
    if spec.clip is not ABSENT:
        raise _channels_differ("keys", "projections that are clipped")
    if isinstance(spec.rotary, Other):
        _refuse_unknown("rotation", spec.rotary)


def _require_maps(
    keys: Sequence[Tensor | None], values: Sequence[Tensor | None], spec: AttentionSpec
) -> None:
    """Raise OptionError where a layer's function does not allow these maps of channels."""
    if any(each is not None for each in values):
        require_free_values(spec)
    for matrix in keys:
        if matrix is not None:
            require_free_keys(spec)
            if spec.rotation is not None:
                width = spec.rotation.width
                require_rotary_planes(matrix, matrix.shape[-1] if width is None else width)


def _require_square(name: str, maps: Tensor | None, kv_heads: int) -> None:
    """Raise ShapeError unless there is one square matrix for each kv head."""
    if maps is not None and not (
        maps.dim() == 3 and maps.shape[0] == kv_heads and maps.shape[1] == maps.shape[2]
    ):
        raise ShapeError(
            saw=f"maps of {name} {tuple(maps.shape)} for {kv_heads} kv heads",
            needed=f"({kv_heads}, channels, channels)",
            do="give one square matrix for each kv head",
        )


def _map_channels(
    state: State,
    key: Tensor | None,
    query: Tensor | None,
    value: Tensor | None,
    output: Tensor | None,
) -> State:
    """Return the tensors after a matrix for each kv head, in float64 where there is one.

    All query heads of a kv head share its matrices. Other tensors are returned as they are.
    """
    maps = dict.fromkeys(KEYS, key) | dict.fromkeys(QUERIES, query)
    maps |= dict.fromkeys(VALUES, value) | {"wo": output}
    mapped = dict(state)
    for name, tensor in state.items():
        if (each := maps.get(name)) is not None:
            flat = tensor.double().reshape(*tensor.shape[:2], -1)
            each = each.to(flat).repeat_interleave(len(tensor) // len(each), 0)
            mapped[name] = (each @ flat).reshape(tensor.shape)
    return mapped


def _round(exact: State, like: State) -> State:
    """Return tensors in the dtypes of others."""
    return {name: tensor.to(like[name].dtype) for name, tensor in exact.items()}


def require_rotary_planes(basis: Tensor, width: int) -> None:
    """Raise OptionError unless a basis (..., head_dim, head_dim) commutes with the rotation.

    The canonical order is half-split: channels i and i + width / 2 turn together. A matrix commutes
    with every rotation of all planes if it keeps each plane to itself and is a turn and a factor
    there, [[a, -b], [b, a]]; channels that do not turn are free among themselves.
    """
    half = width // 2
    turned = basis[..., :width, :width].unflatten(-2, (2, half)).unflatten(-1, (2, half))
    planes = turned.diagonal(dim1=-3, dim2=-1)  # (..., 2, 2, planes)
    kept = basis.clone()
    for row in range(2):
        for column in range(2):
            place = kept[..., row * half : (row + 1) * half, column * half : (column + 1) * half]
            place.diagonal(dim1=-2, dim2=-1).zero_()
    kept[..., width:, width:] = 0
    same = torch.equal(planes[..., 0, 0, :], planes[..., 1, 1, :])
    opposite = torch.equal(planes[..., 0, 1, :], -planes[..., 1, 0, :])
    if bool(kept.any()) or not (same and opposite):
        raise OptionError(
            saw="a basis of the keys that mixes planes of the rotation",
            needed=f"for each i below {half}, a turn and a factor of the channels i and i + {half}",
            do="give such matrices, or a change of basis of the values alone",
        )


@dataclass(frozen=True)
class Zero(Step):
    """Origins whose rows of the output projection become 0: they stay, and give nothing."""

    kind: ClassVar[str] = "zero"
    heads: tuple[int, ...]

    @property
    def equality(self) -> Equality:
        return "no" if self.heads else "indices"

    def follow(self, origins: Origins) -> Origins:
        require_numbers(self.heads, len(origins.query), "heads", all_may_go=True)
        return replace(origins, off=origins.off | {origins.query[i] for i in self.heads})

    def apply(self, state: State) -> State:
        wo = state["wo"].clone()
        wo[list(self.heads)] = 0
        return {**state, "wo": wo}


@dataclass(frozen=True, eq=False)
class Shift(Step):
    """A vector (out_dim,) that is added to the output's bias: the mean of what is gone."""

    kind: ClassVar[str] = "shift"
    bias: Tensor

    def apply(self, state: State) -> State:
        wo, before = state["wo"], state.get("bo")
        added = self.bias.to(wo.device, torch.float64)
        total = added if before is None else before.double() + added
        return {**state, "bo": total.to(wo.dtype)}


@dataclass(frozen=True, eq=False)
class Refit(Step):
    """A fitted output projection: ``wo`` (heads, value_dim, out_dim), ``bo`` (out_dim,) or None."""

    kind: ClassVar[str] = "refit"
    wo: Tensor
    bo: Tensor | None = None

    def follow(self, origins: Origins) -> Origins:
        if len(self.wo) != len(origins.query):
            raise ShapeError(
                saw=f"an output projection of {len(self.wo)} heads for {len(origins.query)}",
                needed=f"wo ({len(origins.query)}, value_dim, out_dim)",
                do="fit it to the heads that are left",
            )
        return origins

    def apply(self, state: State) -> State:
        like = state["wo"]
        fitted = {name: x for name, x in state.items() if name != "bo"} | {"wo": self.wo.to(like)}
        return fitted if self.bo is None else fitted | {"bo": self.bo.to(like)}


def allows(require: Callable[[AttentionSpec], None], spec: AttentionSpec) -> bool:
    """True unless a function that raises OptionError does so for the function of a layer."""
    try:
        require(spec)
    except OptionError:
        return False
    return True


STEPS: dict[str, type[Step]] = {
    step.kind: step for step in (Take, Merge, Basis, Zero, Shift, Refit)
}


def require_numbers(
    numbers: Sequence[int], total: int, axis: str, *, all_may_go: bool = False
) -> None:
    """Raise OptionError unless these are different numbers of heads."""
    for number in numbers:
        _require_range(number, total, axis)
    twice = sorted({n for n in numbers if list(numbers).count(n) > 1})
    if twice:
        raise OptionError(
            saw=f"{axis} {list_some([str(n) for n in twice])} twice",
            needed="each head once",
            do=f"name different {axis}",
        )
    if not numbers and not all_may_go:
        raise OptionError(
            saw=f"none of {total} {axis}",
            needed="at least one",
            do="keep one, or zero all of them in place of taking them out",
        )


def _require_range(number: int, total: int, axis: str) -> None:
    if not 0 <= number < total:
        raise OptionError(
            saw=f"{axis} {number} of {total}",
            needed=f"numbers from 0 to {total - 1}",
            do="count from 0",
        )


def _require_own_channels(step: Step, spec: AttentionSpec, *, is_fewer: bool = False) -> None:
    norms = (spec.qk_norm, spec.output_norm if is_fewer else ABSENT)
    if any(isinstance(norm, NormRule) and norm.over == "width" for norm in norms):
        raise OptionError(
            saw=f"{step.kind} of heads under a norm over the width of all heads",
            needed="a norm of each head by itself: with fewer heads the others would be normed "
            "by other numbers",
            do="zero the heads in place of taking them out",
        )
    if isinstance(spec.qk_norm, Other):
        _refuse_unknown("norm of queries and keys", spec.qk_norm)


def _channels_differ(what: str, why: str) -> OptionError:
    return OptionError(
        saw=f"another basis of {what} under {why}",
        needed=f"channels of {what} that nothing tells apart",
        do="leave this basis out",
    )


def _refuse_unknown(what: str, form: Other) -> None:
    raise OptionError(
        saw=f"a {what} ({form.name}) that headwise does not compute",
        needed=f"a {what} of which it is known how it depends on the heads",
        do="zero the heads in place of taking them out",
    )

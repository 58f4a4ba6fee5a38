"""Steps of a cut: each is data, and changes the canonical tensors of one attention layer.

A step is an index map of the heads (`Take`), or a small linear map (`Merge`, `Basis`, `Zero`,
`Shift`, `Refit`). Linear maps are computed in float64 and rounded once to the tensor's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.function.spec import AlibiRule, AttentionSpec, Other
from headwise.function.weights import AXES, State, take_heads
from headwise.support.text import list_some

# "indices": tensors are the same numbers at other places. "rounding": another order of sums, or
# numbers rounded once. "no": outputs are others.
Equality = Literal["indices", "rounding", "no"]
KV_TENSORS = tuple(name for name, axes in AXES.items() if axes[0] == "kv_heads")


@dataclass(frozen=True)
class Origins:
    """The original heads that the heads of a layer are made of.

    Attributes:
        query: for each head, its original number.
        kv: for each kv head, the original kv heads that it is, or is the mean of.
        off: original numbers of heads that are still there, and whose output is zero.
    """

    query: tuple[int, ...]
    kv: tuple[tuple[int, ...], ...]
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

    @abstractmethod
    def follow(self, origins: Origins) -> Origins:
        """Return the heads after this step; raise where it does not fit those before."""

    @abstractmethod
    def apply(self, state: State) -> State:
        """Return the canonical tensors after this step."""

    def require_function(self, spec: AttentionSpec) -> None:  # noqa: B027 - many allow all
        """Raise OptionError where the function of a layer does not allow this step."""

    @property
    @abstractmethod
    def equality(self) -> Equality:
        """Degree to which the layer's outputs stay equal."""


@dataclass(frozen=True)
class Take(Step):
    """Index map: head i becomes the head ``heads[i]``, and kv head j the one at ``kv_heads[j]``.

    Origins that are not named are gone. A kv head may be named several times: its copies.

    Attributes:
        total: the number of heads before.
        heads, kv_heads: their numbers before.
        are_zero: True if the outputs of all heads that are gone are zero. That is checked.
    """

    kind: ClassVar[str] = "take"
    total: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    are_zero: bool = False

    @property
    def equality(self) -> Equality:
        """Nothing but places changes where no head is gone that had an output."""
        return "indices" if self.are_zero or len(self.heads) == self.total else "no"

    @property
    def gone(self) -> list[int]:
        """The numbers of heads that are gone."""
        return sorted({*range(self.total)} - {*self.heads})

    def follow(self, origins: Origins) -> Origins:
        """Return the heads at these places."""
        require_numbers(self.heads, len(origins.query), "heads")
        for number in self.kv_heads:
            _require_range(number, len(origins.kv), "kv_heads")
        query = tuple(origins.query[i] for i in self.heads)
        return Origins(query, tuple(origins.kv[j] for j in self.kv_heads), origins.off & {*query})

    def apply(self, state: State) -> State:
        """Return the tensors at these places; an index map changes no bit."""
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
            different = [
                n for n in KV_TENSORS if n in state and not _are_equal_rows(state[n], old, new)
            ]
            if old != new and different:
                raise OptionError(
                    saw=f"head {head}, whose keys and values are those of kv head {old}, at a "
                    f"place that reads kv head {new}; they differ in {', '.join(different)}",
                    needed="the same kv head, or an equal copy of it",
                    do="keep the heads of a group together, or merge their kv heads first",
                )

    def require_function(self, spec: AttentionSpec) -> None:
        """Raise where something counts the heads, or norms all of them together."""
        if len(self.heads) < self.total or len({*self.kv_heads}) < len(self.kv_heads):
            _require_own_channels(self, spec)
        if isinstance(spec.score_bias, AlibiRule) and self.heads != tuple(range(self.total)):
            raise OptionError(
                saw=f"heads at other places under ALiBi, whose slopes follow from {self.total} "
                "heads and their order",
                needed="a layer without ALiBi",
                do="zero the heads in place of taking them out",
            )
        if isinstance(spec.score_bias, Other):
            _refuse_unknown("score bias", spec.score_bias)


def _are_equal_rows(tensor: Tensor, row: int, other: int) -> bool:
    return bool(torch.equal(tensor[row], tensor[other]))


@dataclass(frozen=True)
class Merge(Step):
    """Grouped heads from more kv heads: each new one is the mean of ``count`` that follow it.

    GQA (arXiv:2305.13245), section 2.1, makes grouped heads in this way.
    """

    kind: ClassVar[str] = "merge"
    count: int

    @property
    def equality(self) -> Equality:
        """Outputs change, unless the merged kv heads are equal."""
        return "indices" if self.count == 1 else "no"

    def follow(self, origins: Origins) -> Origins:
        """Return the heads with merged kv heads."""
        if self.count < 1 or len(origins.kv) % self.count:
            raise OptionError(
                saw=f"{len(origins.kv)} kv heads, merged {self.count} at a time",
                needed=f"a divisor of {len(origins.kv)}",
                do="choose a number of kv heads that divides the one before",
            )
        runs = [origins.kv[j : j + self.count] for j in range(0, len(origins.kv), self.count)]
        merged = tuple(tuple(sorted({o for kv in run for o in kv})) for run in runs)
        return replace(origins, kv=merged)

    def apply(self, state: State) -> State:
        """Return the tensors with the mean of the keys' and values' matrices."""
        merged = dict(state)
        for name in KV_TENSORS:
            if name in state:
                runs = state[name].double().unflatten(0, (-1, self.count))
                merged[name] = runs.mean(1).to(state[name].dtype)
        return merged

    def require_function(self, spec: AttentionSpec) -> None:
        """Raise for a norm over the width of all heads."""
        _require_own_channels(self, spec)


@dataclass(frozen=True, eq=False)
class Basis(Step):
    """Another basis of the channels inside each kv head and its query heads.

        k' = key @ k,  q' = inverse(key).T @ q,  v' = value @ v,  wo' = inverse(value).T @ wo

    Scores and outputs stay equal up to rounding. With a rotation ``key`` must commute with it: each
    plane of two rotated channels is turned or scaled by itself.

    Attributes:
        key: (kv_heads, head_dim, head_dim), None for no change.
        value: (kv_heads, value_dim, value_dim), None for no change.
    """

    kind: ClassVar[str] = "basis"
    key: Tensor | None = None
    value: Tensor | None = None

    @property
    def equality(self) -> Equality:
        """Products of two bases are rounded."""
        return "rounding"

    def follow(self, origins: Origins) -> Origins:
        """Return the same heads."""
        for name, basis in (("key", self.key), ("value", self.value)):
            if basis is not None and (
                basis.dim() != 3
                or basis.shape[0] != len(origins.kv)
                or basis.shape[1] != basis.shape[2]
            ):
                raise ShapeError(
                    saw=f"a {name} basis {tuple(basis.shape)} for {len(origins.kv)} kv heads",
                    needed=f"({len(origins.kv)}, channels, channels)",
                    do="give one square matrix for each kv head",
                )
        return origins

    def apply(self, state: State) -> State:
        """Return the tensors in the other basis, computed in float64 and rounded once."""
        turned = dict(state)
        group = state["wq"].shape[0] // state["wk"].shape[0]
        for basis, ours, theirs in (
            (self.key, ("wk", "bk", "extra_k"), ("wq", "bq")),
            (self.value, ("wv", "bv", "extra_v"), ("wo",)),
        ):
            if basis is None:
                continue
            exact = basis.double()
            inverse = torch.linalg.inv(exact).mT.repeat_interleave(group, 0)
            for names, matrix in ((ours, exact), (theirs, inverse)):
                for name in names:
                    if name in state:
                        turned[name] = _map_channels(matrix, state[name])
        return turned

    def require_function(self, spec: AttentionSpec) -> None:
        """Raise where a norm, a gate or the rotation tells the channels of a head apart."""
        if self.value is not None and spec.output_gate == "channel":
            raise _channels_differ("values", "an output gate for each channel")
        if self.key is None:
            return
        if spec.qk_norm:
            raise _channels_differ("keys", "a norm of queries and keys")
        if isinstance(spec.rotary, Other):
            _refuse_unknown("rotation", spec.rotary)
        if spec.rotation is not None:
            width = spec.rotation.width
            require_rotary_planes(self.key, self.key.shape[-1] if width is None else width)


def _map_channels(matrix: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor (heads, channels, ...) after a matrix (heads, channels, channels)."""
    flat = tensor.double().reshape(*tensor.shape[:2], -1)
    return (matrix @ flat).reshape(tensor.shape).to(tensor.dtype)


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
        """Outputs change."""
        return "no" if self.heads else "indices"

    def follow(self, origins: Origins) -> Origins:
        """Return the heads with these ones off."""
        require_numbers(self.heads, len(origins.query), "heads", all_may_go=True)
        return replace(origins, off=origins.off | {origins.query[i] for i in self.heads})

    def apply(self, state: State) -> State:
        """Return the tensors with rows of 0."""
        wo = state["wo"].clone()
        wo[list(self.heads)] = 0
        return {**state, "wo": wo}


@dataclass(frozen=True, eq=False)
class Shift(Step):
    """A vector (out_dim,) that is added to the output's bias: the mean of what is gone."""

    kind: ClassVar[str] = "shift"
    bias: Tensor

    @property
    def equality(self) -> Equality:
        """Outputs change."""
        return "no"

    def follow(self, origins: Origins) -> Origins:
        """Return the same heads."""
        return origins

    def apply(self, state: State) -> State:
        """Return the tensors with the sum as bias."""
        wo, before = state["wo"], state.get("bo")
        added = self.bias.to(wo.device, torch.float64)
        total = added if before is None else before.double() + added
        return {**state, "bo": total.to(wo.dtype)}


@dataclass(frozen=True, eq=False)
class Refit(Step):
    """Another output projection, fitted to data.

    Attributes:
        wo: (heads, value_dim, out_dim).
        bo: (out_dim,), or None for none.
    """

    kind: ClassVar[str] = "refit"
    wo: Tensor
    bo: Tensor | None = None

    @property
    def equality(self) -> Equality:
        """Outputs change."""
        return "no"

    def follow(self, origins: Origins) -> Origins:
        """Return the same heads."""
        if len(self.wo) != len(origins.query):
            raise ShapeError(
                saw=f"an output projection of {len(self.wo)} heads for {len(origins.query)}",
                needed=f"wo ({len(origins.query)}, value_dim, out_dim)",
                do="fit it to the heads that are left",
            )
        return origins

    def apply(self, state: State) -> State:
        """Return the tensors with the fitted projection."""
        like = state["wo"]
        fitted = {name: x for name, x in state.items() if name != "bo"} | {"wo": self.wo.to(like)}
        return fitted if self.bo is None else fitted | {"bo": self.bo.to(like)}


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


def _require_own_channels(step: Step, spec: AttentionSpec) -> None:
    if spec.norm is not None and spec.norm.over == "width":
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

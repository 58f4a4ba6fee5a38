"""Lazy mask that replaces transformers' boolean mask tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.mask import Mask
from headwise.support import private_torch
from headwise.support.tensors import map_leaves

MEANING = "headwise_mask"  # attribute of a dense mask that holds its `Mask`

_aten = torch.ops.aten
_ALIASES = (_aten.detach, _aten.alias)
_SUMS = (_aten.add, _aten.add_)


class LazyMask(Tensor):
    """A `Mask` in the form of a tensor (batch, 1, queries, keys): bool, True = may attend.

    For models that add their masks, the dtype is a float: 0 if a query may attend, else the
    smallest number.

    The tensor has no memory while a model only passes it to its layers. The first operator that
    reads or changes the tensor makes it dense, once. The dense tensor is the mask from then on, so
    edits and slices in a model's code work as with a plain tensor. A move to another device keeps
    the mask lazy.

    Adding the bool form to floating-point scores raises an error, because such a model computes
    attention in its own code.
    """

    mask: Mask
    written: Tensor | None

    __torch_function__ = private_torch.no_torch_function

    @staticmethod
    def __new__(
        cls,
        mask: Mask,
        *,
        batch: int,
        queries: int,
        keys: int,
        device: torch.device,
        dtype: torch.dtype = torch.bool,
    ) -> LazyMask:
        """Make the lazy mask of these sizes, with its tensors on ``device``."""
        shape = (batch, 1, queries, keys)
        self: LazyMask = private_torch.make_wrapper(cls, shape, dtype=dtype, device=device)
        self.mask, self.written = mask, None
        return self

    def materialise(self) -> Tensor:
        """Return the dense tensor, which takes queries x keys memory."""
        if self.written is None:
            batch, _, queries, keys = self.shape
            bound = self.mask.bind(
                batch=batch, heads=1, queries=queries, keys=keys, device=self.device
            )
            rows = torch.arange(queries, device=self.device)
            allowed = bound.evaluate_rows(rows).expand(self.shape)
            self.written = (
                allowed.contiguous()
                if self.dtype == torch.bool
                else self._as_added_numbers(allowed)
            )
        return self.written

    def _as_added_numbers(self, allowed: Tensor) -> Tensor:
        """Return zeros, and the smallest number for hidden keys."""
        smallest = torch.finfo(self.dtype).min
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(~allowed, smallest)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        batch, _, queries, keys = self.shape
        meaning = self.mask if self.written is None else "written"
        return f"LazyMask(batch={batch}, queries={queries}, keys={keys}, {meaning})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the dense mask."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet in _ALIASES or (
            func.name() == private_torch.TO_COPY and _copy_only_moves(kwargs, args[0].dtype)
        ):
            return args[0]._move_to_device(kwargs.get("device", args[0].device))
        if packet in _SUMS:
            _refuse_adding_bool_mask(*args[:2])
        return func(
            *map_leaves(_materialise_if_lazy, args), **map_leaves(_materialise_if_lazy, kwargs)
        )

    def _move_to_device(self, device: torch.device) -> LazyMask:
        batch, _, queries, keys = self.shape
        moved = LazyMask(
            self.mask.to(device),
            batch=batch,
            queries=queries,
            keys=keys,
            device=device,
            dtype=self.dtype,
        )
        moved.written = None if self.written is None else self.written.to(device)
        return moved


def _materialise_if_lazy(value: Any) -> Any:
    return value.materialise() if isinstance(value, LazyMask) else value


def _copy_only_moves(options: dict[str, Any], dtype: torch.dtype) -> bool:
    """Check whether a copy changes only the device."""
    unchanged = {"dtype": dtype, "layout": torch.strided, "memory_format": torch.preserve_format}
    changed = {name for name, value in options.items() if value not in (None, unchanged.get(name))}
    return changed <= {"device", "non_blocking"}


def _refuse_adding_bool_mask(*terms: Any) -> None:
    """Raise an error for a bool mask plus floating-point scores; a float mask may be added."""
    kinds = {term.dtype for term in terms if isinstance(term, Tensor)}
    if torch.bool in kinds and any(kind.is_floating_point for kind in kinds):
        raise MaskError(
            saw='a mask of attn_implementation="headwise", added to scores by a model\'s own code',
            needed="a model that uses transformers' attention interface",
            do='load this model with attn_implementation="eager"',
        )

"""A lazy mask in the place of transformers' boolean mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.mask import Mask
from headwise.support import private_torch
from headwise.support.nested_tensors import mapped

MEANING = "headwise_mask"  # the attribute by which a written mask may carry the lazy one

_aten = torch.ops.aten
_ALIASES = (_aten.detach, _aten.alias)
_SUMS = (_aten.add, _aten.add_)


class LazyMask(Tensor):
    """A `Mask` that passes for a tensor (batch, 1, queries, keys): bool, True = may attend.

    Or a float, 0 where a query may attend and the smallest number where not, for models whose
    masks are made to be added.

    A tensor without memory: a model that only carries the mask to its layers never writes it. The
    first operator that reads or changes it writes it down, once; from then on that tensor is the
    mask, so an edit or a slice by a model's own code means what it means for a plain tensor.
    Moved to another device it stays lazy.

    Added to floating-point scores the bool form raises: such a model computes attention by its own
    code.
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
        """The mask at these sizes, with its tensors on ``device``."""
        shape = (batch, 1, queries, keys)
        self: LazyMask = private_torch.make_wrapper(cls, shape, dtype=dtype, device=device)
        self.mask, self.written = mask, None
        return self

    def write(self) -> Tensor:
        """The tensor itself, queries x keys of memory."""
        if self.written is None:
            batch, _, queries, keys = self.shape
            bound = self.mask.bind(
                batch=batch, heads=1, queries=queries, keys=keys, device=self.device
            )
            rows = torch.arange(queries, device=self.device)
            allowed = bound.at(rows).expand(self.shape)
            self.written = (
                allowed.contiguous() if self.dtype == torch.bool else self._added(allowed)
            )
        return self.written

    def _added(self, allowed: Tensor) -> Tensor:
        """Zeros, and the smallest number where a key is hidden."""
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
        """Any operator, on the written mask."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet in _ALIASES or (
            func.name() == private_torch.TO_COPY and _only_moves(kwargs, args[0].dtype)
        ):
            return args[0]._on(kwargs.get("device", args[0].device))
        if packet in _SUMS:
            _refuse_scores(*args[:2])
        return func(*mapped(_written, args), **mapped(_written, kwargs))

    def _on(self, device: torch.device) -> LazyMask:
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


def _written(value: Any) -> Any:
    return value.write() if isinstance(value, LazyMask) else value


def _only_moves(options: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether a copy asks for nothing but another device."""
    kept = {"dtype": dtype, "layout": torch.strided, "memory_format": torch.preserve_format}
    changed = {name for name, value in options.items() if value not in (None, kept.get(name))}
    return changed <= {"device", "non_blocking"}


def _refuse_scores(*terms: Any) -> None:
    """A bool mask and floating-point scores; a float mask is made to be added."""
    kinds = {term.dtype for term in terms if isinstance(term, Tensor)}
    if torch.bool in kinds and any(kind.is_floating_point for kind in kinds):
        raise MaskError(
            saw='a mask of attn_implementation="headwise", added to scores by a model\'s own code',
            needed="a model whose attention goes through transformers' attention interface",
            do='attn_implementation="eager" for this model',
        )

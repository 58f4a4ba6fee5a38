"""Key/value cache of one layer for incremental decoding.

Slots are in token order, and all sequences end at the same slot: sequences of unequal lengths are
right-aligned. Causal masks, windows and biases by distance then mean the same for each of them. A
step writes its slots in place and reads a view of the filled ones; nothing is concatenated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.support.tensors import convert_to_int64
from headwise.support.text import human_bytes


class CachedKeys(NamedTuple):
    """Keys and values of one step: the cached ones, then the new ones."""

    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch kv_heads keys value_dim"]
    starts: Int[Tensor, " batch"] | None  # as in Cache.starts
    padding: Int[Tensor, " batch"] | None  # as in Cache.padding


class Cache:
    """Keys and values of earlier tokens. Made by ``layer.cache(batch=..., length=...)``.

    Args:
        k: empty buffer of the keys, (batch, kv_heads, slots, head_dim).
        v: empty buffer of the values, (batch, kv_heads, slots, value_dim). A value_dim of 0 is that
            of a latent, which stands in ``k`` behind the shared key.
        window: the number of earlier tokens that a query may attend to; older ones are dropped
            when the slots are full. None: no token is dropped.
        owner: the ``identity`` of the layer that made the cache.

    Attributes:
        length: slots in use.
        dropped: tokens that were dropped, since they are older than the window.
        padding: (batch,), padding tokens before each sequence's first token; None for none.
        has_places: True if a call gave positions, which each later call then needs.
        reached: (batch, 1), the lengths by which keys were rotated, where the rotation changes with
            the length; None before the first call.
        needs_mask: True if a boolean mask, segments or offsets hid cached keys from every query.
            The cache stores no such mask, so each later call needs one. It stays False under
            torch.compile, where no value can be read.
    """

    def __init__(self, k: Tensor, v: Tensor, *, window: int | None = None, owner: str = "") -> None:
        self._k, self._v, self.window, self.owner = k, v, window, owner
        self.length = 0
        self.dropped = 0
        self.padding: Tensor | None = None
        self.needs_mask = False
        self.has_places = False
        self.reached: Tensor | None = None

    @property
    def form(self) -> str:
        """The numbers of a token, in words."""
        _, kv_heads, _, width = self._k.shape
        if not self._v.shape[3]:
            return f"latent and shared key, {width} numbers a token"
        return f"kv_heads={kv_heads}, head_dim={width}, value_dim={self._v.shape[3]}"

    @property
    def seen(self) -> int:
        """Number of tokens added to each sequence so far, padding and dropped ones included."""
        return self.dropped + self.length

    def key_count_after(self, new: int) -> int:
        """Return the number of keys after ``new`` tokens are added.

        Raises:
            OptionError: more tokens than free slots, in a cache without a window.
        """
        slots = self._k.shape[2]
        if self.length + new <= slots:
            return self.length + new
        if self.window is None:
            raise OptionError(
                saw=f"{new} more tokens for a cache that holds {self.length} of {slots}",
                needed=f"at most {slots - self.length} more",
                do=f"layer.cache(batch=..., length={self.length + new}), or cache.clear()",
            )
        return min(self.window, self.length) + new

    @property
    def starts(self) -> Tensor | None:
        """The slot of each sequence's first token, (batch,); None where all start at 0."""
        return self._starts_of(self.padding)

    def append(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new value_dim"],
        *,
        lengths: Integer[Tensor, " batch"] | None = None,
    ) -> CachedKeys:
        """Write new keys and values; return all keys and values that the new queries may need.

        Args:
            k: new keys, of the dtype and device of the buffers.
            v: new values.
            lengths: the number of real new tokens of each sequence, which come last. The cached
                tokens of the sequence move up to them.

        Raises:
            ShapeError, DTypeError, DeviceError: keys or values that do not fit the buffers.
            OptionError: more tokens than free slots, or keys that require a gradient.
        """
        cached = self.extend(k, v, lengths=lengths)
        self.keep(cached)
        return cached

    def extend(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new value_dim"],
        *,
        lengths: Integer[Tensor, " batch"] | None = None,
    ) -> CachedKeys:
        """Return what `append` returns. Until `keep`, the cache holds the tokens it held before.

        So a call that fails after its keys were computed can be repeated.

        Raises:
            ShapeError, DTypeError, DeviceError, OptionError: as in `append`.
        """
        self._require_fit_to_buffers(k, v, lengths)
        if self.key_count_after(k.shape[2]) < self.length + k.shape[2]:
            # The tokens that the window needs move to the front, as the new ones do not fit.
            keys, values = (buffer[:, :, : self.length] for buffer in (self._k, self._v))
            self._keep_latest(CachedKeys(keys, values, None, None))
        stop = self.length + k.shape[2]
        keys, values = self._write_tokens(self._k, k, stop), self._write_tokens(self._v, v, stop)
        padding = self.padding
        if lengths is not None:
            gaps = k.shape[2] - convert_to_int64(lengths, "lengths")
            keys, values = (self._close_gaps(tokens, gaps) for tokens in (keys, values))
            padding = gaps if padding is None else padding + gaps
        return CachedKeys(keys, values, self._starts_of(padding), padding)

    def keep(self, cached: CachedKeys) -> None:
        """Hold the keys and values that `extend` returned."""
        stop = cached.k.shape[2]
        self.length = stop
        if stop > self._k.shape[2]:
            self._keep_latest(cached)
        elif cached.padding is not self.padding:  # tokens have moved, in new memory
            self._k[:, :, :stop], self._v[:, :, :stop] = cached.k, cached.v
        self.padding = cached.padding

    def select(self, sequences: Integer[Tensor, " chosen"]) -> Cache:
        """Return a new cache with these sequences, in this order, for beams or a smaller batch."""
        sequences = convert_to_int64(sequences, "sequences").to(self._k.device)
        k, v = (buffer.index_select(0, sequences) for buffer in (self._k, self._v))
        cache = Cache(k, v, window=self.window, owner=self.owner)
        cache.length, cache.dropped = self.length, self.dropped
        cache.needs_mask, cache.has_places = self.needs_mask, self.has_places
        if self.reached is not None:
            cache.reached = self.reached.index_select(0, sequences)
        if self.padding is not None:
            cache.padding = self.padding.index_select(0, sequences)
        return cache

    def __deepcopy__(self, memo: dict[Any, Any]) -> Cache:
        """Copy the buffers; the copy belongs to the layer's copy if that is copied in this call."""
        copied = self.select(torch.arange(self._k.shape[0], device=self._k.device))
        memo[id(self)] = copied
        copied.owner = memo.get(self.owner, self.owner)
        return copied

    def clear(self) -> None:
        """Remove all tokens; the buffers are reused."""
        self.length, self.dropped, self.padding, self.needs_mask = 0, 0, None, False
        self.has_places, self.reached = False, None

    def _starts_of(self, padding: Tensor | None) -> Tensor | None:
        return None if padding is None else (padding - self.dropped).clamp(min=0)

    def _write_tokens(self, buffer: Tensor, new: Tensor, stop: int) -> Tensor:
        """Return cached and new tokens: a view, or new memory where all slots are too few."""
        if stop > buffer.shape[2]:
            return torch.cat([buffer[:, :, : self.length], new], dim=2)
        buffer[:, :, self.length : stop] = new
        return buffer[:, :, :stop]

    def _keep_latest(self, cached: CachedKeys) -> None:
        """Copy the last tokens, as many as the window needs, to the front of the buffers."""
        length = min(self.window or 0, self.length)
        dropped = self.length - length
        for buffer, tokens in ((self._k, cached.k), (self._v, cached.v)):
            # clone: source and target may overlap.
            buffer[:, :, :length] = tokens[:, :, dropped:].clone()
        self.length, self.dropped = length, self.dropped + dropped

    def _close_gaps(self, tokens: Tensor, gaps: Tensor) -> Tensor:
        """Move cached tokens up to the real new ones; the first ``gaps`` new ones are padding."""
        slots = torch.arange(tokens.shape[2], device=tokens.device)
        gap = gaps[:, None]
        source = torch.where(slots < self.length + gap, slots - gap, slots).clamp(min=0)
        return tokens.gather(2, source[:, None, :, None].expand_as(tokens))

    def _require_fit_to_buffers(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        for name, buffer, new in (("keys", self._k, k), ("values", self._v, v)):
            batch, kv_heads, _, width = buffer.shape
            if (new.shape[0], new.shape[1], new.shape[3]) != (batch, kv_heads, width):
                raise ShapeError(
                    saw=f"new {name} of shape {tuple(new.shape)}",
                    needed=f"(batch {batch}, kv_heads {kv_heads}, new, {width}), as the cache has",
                    do=f"make one with layer.cache(batch={new.shape[0]}, length=...)",
                )
            if new.dtype != buffer.dtype:
                raise DTypeError(
                    saw=f"new {name} of dtype {new.dtype} for a cache of {buffer.dtype}",
                    needed="one dtype",
                    do=f"layer.cache(..., dtype={new.dtype})",
                )
            if new.device != buffer.device:
                raise DeviceError(
                    saw=f"new {name} on {new.device} for a cache on {buffer.device}",
                    needed="one device",
                    do="move the layer first, then call layer.cache(batch=..., length=...)",
                )
            if torch.is_grad_enabled() and new.requires_grad:
                raise OptionError(
                    saw=f"new {name} that require a gradient, for a cache",
                    needed="inference: a cache is written in place and keeps no graph",
                    do="with torch.no_grad(): ..., or call the layer without a cache",
                )
        if lengths is not None and lengths.shape != k.shape[:1]:
            raise ShapeError(
                saw=f"lengths of shape {tuple(lengths.shape)} for a batch of {k.shape[0]}",
                needed=f"one integer for each sequence: ({k.shape[0]},)",
                do="e.g. Mask.lengths(queries=n, keys=n) with n = torch.tensor([24, 17, 29])",
            )

    def __repr__(self) -> str:
        batch, _, slots, _ = self._k.shape
        size = sum(buffer.numel() * buffer.element_size() for buffer in (self._k, self._v))
        options = [
            f"batch={batch}, {self.form}, {str(self._k.dtype).removeprefix('torch.')}",
            f"{self.length} of {slots} slots, {human_bytes(size)}",
        ]
        if self.window is not None:
            options.append(f"window {self.window}, {self.dropped} dropped")
        if self.padding is not None:
            options.append("right-aligned")
        return f"Cache({', '.join(options)})"

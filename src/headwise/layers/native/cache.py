"""The key/value cache of one layer: a value that is made, passed to each call and written in place.

Its slots are in the order of the tokens, and every sequence ends at the same slot: sequences of
unequal lengths are held right-aligned, so that causal masks, windows and biases by distance mean
the same for all of them, and one number says where the next token goes. Nothing is concatenated:
a step writes its own slots and reads a view of those filled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, OptionError, ShapeError
from headwise.support.axes import human_bytes
from headwise.support.integers import as_int64


class CachedKeys(NamedTuple):
    """The keys and values to attend to: those held before, and the new ones."""

    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch kv_heads keys value_dim"]
    starts: Int[Tensor, " batch"] | None


class Cache:
    """Keys and values of the tokens so far. Made by ``layer.cache(batch=..., length=...)``.

    Args:
        k, v: empty buffers, (batch, kv_heads, slots, head_dim) and (..., value_dim).
        window: how many tokens before its own a query can see; older ones are dropped when room
            is needed. None: nothing is dropped, and the slots are the most it can hold.
        owner: what the layer that made it is known by.
    """

    def __init__(self, k: Tensor, v: Tensor, *, window: int | None = None, owner: str = "") -> None:
        self._k, self._v, self.window, self.owner = k, v, window, owner
        self.length = 0  # slots in use
        self.dropped = 0  # tokens that a window no longer needs
        # How much padding each sequence has been given in all, before its first token.
        self.padding: Tensor | None = None

    @property
    def seen(self) -> int:
        """How many tokens each sequence has been given, padding included."""
        return self.dropped + self.length

    def keys_with(self, new: int) -> int:
        """How many keys there are to attend to once ``new`` tokens are added.

        Raises:
            OptionError: more tokens than there are slots.
        """
        slots = self._k.shape[2]
        if self.length + new <= slots:
            return self.length + new
        if self.window is None:
            raise OptionError(
                saw=f"{new} more tokens for a cache that holds {self.length} of {slots}",
                needed=f"at most {slots - self.length} more",
                do=f"layer.cache(length={self.length + new}) or longer, or cache.clear()",
            )
        return min(self.window, self.length) + new

    @property
    def starts(self) -> Tensor | None:
        """The slot of each sequence's first token, (batch,); None where all begin at 0."""
        return None if self.padding is None else (self.padding - self.dropped).clamp(min=0)

    def append(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new value_dim"],
        *,
        lengths: Integer[Tensor, " batch"] | None = None,
    ) -> CachedKeys:
        """Write new keys and values, and read all that a query may see.

        ``lengths``: how many of the new ones are real in each sequence, the last ones; the tokens
        held of that sequence move up to them.

        Raises:
            ShapeError, DTypeError, DeviceError: not what the buffers hold.
            OptionError: more tokens than there are slots, or a gradient would be lost.
        """
        self._check(k, v, lengths)
        self._make_room(k.shape[2])
        stop = self.length + k.shape[2]
        fits = stop <= self._k.shape[2]
        keys, values = (
            self._written(buffer, new, stop) if fits else self._joined(buffer, new)
            for buffer, new in ((self._k, k), (self._v, v))
        )
        if lengths is not None:
            self._close_gaps(keys, values, k.shape[2] - as_int64(lengths, "lengths"))
        held = CachedKeys(keys, values, self.starts)
        self.length = stop
        if not fits:
            self._keep_latest(held)
        return held

    def select(self, sequences: Integer[Tensor, " chosen"]) -> Cache:
        """A cache of its own with these sequences, in this order (beams, or a smaller batch)."""
        sequences = as_int64(sequences, "sequences")
        chosen = Cache(
            self._k.index_select(0, sequences),
            self._v.index_select(0, sequences),
            window=self.window,
            owner=self.owner,
        )
        chosen.length, chosen.dropped = self.length, self.dropped
        if self.padding is not None:
            chosen.padding = self.padding.index_select(0, sequences)
        return chosen

    def __deepcopy__(self, memo: dict[Any, Any]) -> Cache:
        """The same tokens in other buffers; for the layer's copy where that is copied too."""
        copied = self.select(torch.arange(self._k.shape[0], device=self._k.device))
        memo[id(self)] = copied
        copied.owner = memo.get(self.owner, self.owner)
        return copied

    def clear(self) -> None:
        """Forget everything; the buffers stay."""
        self.length, self.dropped, self.padding = 0, 0, None

    # ---- within -----------------------------------------------------------------------------

    def _written(self, buffer: Tensor, new: Tensor, stop: int) -> Tensor:
        buffer[:, :, self.length : stop] = new
        return buffer[:, :, :stop]

    def _joined(self, buffer: Tensor, new: Tensor) -> Tensor:
        """More new tokens than slots: they are attended to once, and then mostly forgotten."""
        return torch.cat([buffer[:, :, : self.length], new], dim=2)

    def _make_room(self, new: int) -> None:
        """Move what the window still needs to the front, once the slots are used up."""
        if self.keys_with(new) < self.length + new:
            self._keep_latest(
                CachedKeys(self._k[:, :, : self.length], self._v[:, :, : self.length], None)
            )

    def _keep_latest(self, held: CachedKeys) -> None:
        """The last tokens of these, as many as the window needs, at the front of the buffers."""
        kept = min(self.window or 0, self.length)
        gone = self.length - kept
        for buffer, tokens in ((self._k, held.k), (self._v, held.v)):
            # Both may be the same memory.
            buffer[:, :, :kept] = tokens[:, :, gone:].clone()
        self.length, self.dropped = kept, self.dropped + gone

    def _close_gaps(self, k: Tensor, v: Tensor, gaps: Tensor) -> None:
        """Move the tokens held up to the real new ones: the first ``gaps`` new ones are none."""
        slots = torch.arange(k.shape[2], device=k.device)
        gap = gaps[:, None]
        source = torch.where(slots < self.length + gap, slots - gap, slots).clamp(min=0)
        for tokens in (k, v):
            tokens.copy_(tokens.gather(2, source[:, None, :, None].expand_as(tokens)))
        self.padding = gaps if self.padding is None else self.padding + gaps

    def _check(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        for name, buffer, new in (("keys", self._k, k), ("values", self._v, v)):
            batch, kv_heads, _, width = buffer.shape
            if (new.shape[0], new.shape[1], new.shape[3]) != (batch, kv_heads, width):
                raise ShapeError(
                    saw=f"new {name} of shape {tuple(new.shape)}",
                    needed=f"(batch {batch}, kv_heads {kv_heads}, new, {width}), as the cache has",
                    do="make a cache for each layer and batch: layer.cache(batch=..., length=...)",
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
                    do="make the cache after the layer was moved",
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
        batch, kv_heads, slots, head_dim = self._k.shape
        size = sum(buffer.numel() * buffer.element_size() for buffer in (self._k, self._v))
        options = [
            f"batch={batch}, kv_heads={kv_heads}, head_dim={head_dim}",
            f"value_dim={self._v.shape[3]}, {str(self._k.dtype).removeprefix('torch.')}",
            f"{self.length} of {slots} slots, {human_bytes(size)}",
        ]
        if self.window is not None:
            options.append(f"window {self.window}, {self.dropped} dropped")
        if self.padding is not None:
            options.append("right-aligned")
        return f"Cache({', '.join(options)})"

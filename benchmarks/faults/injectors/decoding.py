"""Calls with a cache: the prefill is right, and decoding is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import QUERIES, FaultCase, Probe, decoding_probe
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import Cache, Call, ReferenceLayer


def is_decoding(cache: Cache | None) -> bool:
    """Return True if earlier calls filled the cache."""
    return cache is not None and cache.length > 0


def first_stage(geometry: Geometry) -> str:
    """Return the first stage that a wrong position changes."""
    return "scores" if geometry.rotary is None else "q after rotary"


class DecodingOffset(Injector):
    """Positions of decoded tokens start at another number; no public report."""

    name = "position offset in decoding"
    family = "decoding"

    def applies(self, geometry: Geometry) -> bool:
        """Return True where scores depend on positions."""
        return geometry.rotary is not None or geometry.alibi

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Move the positions of every call but the first."""
        offset = draw.choice((-2, -1, 1, 3))

        def prepare(layer: ReferenceLayer, *args: Any) -> Call:
            call = layer.prepare(*args)
            moved = offset * is_decoding(args[-1])
            return replace(
                call,
                positions=call.positions + moved,
                key_positions=call.key_positions + moved,
            )

        return self.case(
            layer,
            layer.with_stages(prepare=prepare),
            draw,
            stage=first_stage(layer.geometry),
            probe=decoding_probe(layer.geometry, draw),
            parameters={"offset": offset},
            step=1,
        )


def left_padded_probe(geometry: Geometry, draw: Draw) -> Probe:
    """Return a decoding probe whose sequences start with hidden keys."""
    padding = torch.tensor([0, 2, 4])[:, None]
    index = torch.arange(QUERIES)[None]
    mask = (index >= padding)[:, None, None]
    return replace(decoding_probe(geometry, draw), mask=mask, positions=index - padding)


class DecodingLeftPadding(Injector):
    """Left padding counts as tokens in decoding; no public report.

    Either decoded positions start at the length of the cache, or hidden keys are seen. A window
    may hide the padding from decoded tokens anyway.
    """

    name = "left padding in decoding"
    family = "decoding"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for self-attention where a position or a mask has an effect."""
        return not geometry.cross and bool(self.forgettable(geometry))

    def forgettable(self, geometry: Geometry) -> list[str]:
        """Return the arguments whose loss has an effect."""
        positional = geometry.rotary is not None or geometry.alibi
        arguments = ["mask"] if geometry.window is None else []
        return arguments + (["positions"] if positional else [])

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Forget the given positions or the mask in every call but the first."""
        g = layer.geometry
        forgotten = draw.choice(self.forgettable(g))

        def prepare(
            layer: ReferenceLayer,
            x: Tensor,
            source: Tensor | None,
            mask: Tensor | None,
            positions: Tensor | None,
            cache: Cache | None,
        ) -> Call:
            if is_decoding(cache):
                mask = None if forgotten == "mask" else mask
                positions = None if forgotten == "positions" else positions
            return layer.prepare(x, source, mask, positions, cache)

        return self.case(
            layer,
            layer.with_stages(prepare=prepare),
            draw,
            stage="scores" if forgotten == "mask" else first_stage(g),
            probe=left_padded_probe(g, draw),
            parameters={"forgotten": forgotten},
            step=1,
        )


class DecodingWindow(Injector):
    """The window holds in the prefill only; no public report."""

    name = "window in decoding"
    family = "decoding"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a window."""
        return geometry.window is not None

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Show all keys to decoded tokens."""
        whole = layer.with_geometry(window=None)

        def visible(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            queries, keys = scores.shape[-2:]
            return (whole if queries < keys else layer).visible(scores, call)

        return self.case(
            layer,
            layer.with_stages(visible=visible),
            draw,
            stage="scores",
            probe=decoding_probe(layer.geometry, draw),
            step=1,
        )


class EvictedKeys(Injector):
    """The cache keeps only the last keys; no public report."""

    name = "evicted keys"
    family = "decoding"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for self-attention."""
        return not geometry.cross

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Drop the oldest keys before each decoded call."""
        kept = draw.choice((2, 3, 4))

        def extend(
            layer: ReferenceLayer, cache: Cache, k: Tensor, v: Tensor, call: Call
        ) -> tuple[Tensor, Tensor, Tensor]:
            if cache.k is not None and cache.v is not None and cache.positions is not None:
                cache.k, cache.v = cache.k[:, -kept:], cache.v[:, -kept:]
                cache.positions = cache.positions[:, -kept:]
            return layer.extend(cache, k, v, call)

        probe = decoding_probe(layer.geometry, draw)
        index = torch.arange(QUERIES).expand(probe.x.shape[:2])
        return self.case(
            layer,
            layer.with_stages(extend=extend),
            draw,
            stage="scores",
            probe=replace(probe, positions=index),
            parameters={"kept": kept},
            step=1,
        )


INJECTORS = (DecodingOffset(), DecodingLeftPadding(), DecodingWindow(), EvictedKeys())

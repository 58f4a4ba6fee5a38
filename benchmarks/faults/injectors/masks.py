"""Masks that are read in another sense, place or form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase, decoding_probe, padded_probe
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import Call, ReferenceLayer


class _Padded(Injector):
    """Base of faults that a mask of padded keys shows."""

    family = "masks"

    def stages(self) -> dict[str, Any]:
        """Return the functions that replace stages."""
        raise NotImplementedError

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Replace the stages."""
        probe = padded_probe(layer.geometry, draw)
        faulty = layer.with_stages(**self.stages())
        return self.case(layer, faulty, draw, stage="scores", probe=probe)


def mask_of(call: Call) -> Tensor:
    """Return the mask of a call that has one."""
    assert call.mask is not None
    return call.mask


class MaskPolarity(_Padded):
    """True hides a key instead of showing it (pytorch #21518, LLMs-from-scratch #1061)."""

    name = "mask polarity"

    def stages(self) -> dict[str, Any]:
        """Invert the mask."""

        def visible(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            return layer.visible(scores, replace(call, mask=~mask_of(call)))

        return {"visible": visible}


class PaddingSide(_Padded):
    """Padding is taken to be at the other end; no public report."""

    name = "padding side"

    def stages(self) -> dict[str, Any]:
        """Flip the mask along the keys."""

        def visible(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            return layer.visible(scores, replace(call, mask=mask_of(call).flip(-1)))

        return {"visible": visible}


class PaddingIgnored(_Padded):
    """The mask is not used; no public report."""

    name = "padding ignored"

    def stages(self) -> dict[str, Any]:
        """Drop the mask."""

        def visible(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            return layer.visible(scores, replace(call, mask=None))

        return {"visible": visible}


class MaskAdded(_Padded):
    """The mask is added to the scores as 0 and 1 (pytorch #21518)."""

    name = "mask added as 0/1"

    def stages(self) -> dict[str, Any]:
        """Add the mask, and use it for nothing else."""

        def masked(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            added = scores + mask_of(call).to(scores.dtype)
            return layer.masked(added, replace(call, mask=None))

        return {"masked": masked}


class CausalAlignment(Injector):
    """The causal triangle starts at the first key for fewer queries (flash-attention #282)."""

    name = "causal alignment"
    family = "masks"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for causal self-attention."""
        return geometry.causal and not geometry.cross

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Align the triangle at the top left."""

        def visible(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            queries, keys = scores.shape[-2:]
            triangle = torch.ones(queries, keys, dtype=torch.bool).tril()
            return layer.visible(scores, call) & triangle

        faulty = layer.with_stages(visible=visible)
        probe = decoding_probe(layer.geometry, draw)
        return self.case(layer, faulty, draw, stage="scores", probe=probe, step=1)


class WindowOffByOne(Injector):
    """The window holds one key more or fewer (transformers #39408, vLLM #3385)."""

    name = "window off by one"
    family = "masks"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a window."""
        return geometry.window is not None

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Change the window by one key."""
        assert layer.geometry.window is not None
        window = layer.geometry.window + draw.choice((-1, 1))
        faulty = layer.with_geometry(window=window)
        return self.case(layer, faulty, draw, stage="scores", parameters={"window": window})


class RowsWithoutKeys(Injector):
    """Queries without keys give NaN, or the mean of all values (pytorch #103963).

    The good layer gives zero.
    """

    name = "rows without keys"
    family = "masks"

    def applies(self, geometry: Geometry) -> bool:
        """Return True without sinks, which leave no row empty."""
        return not geometry.sink

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Fill the empty rows of weights."""
        fill = draw.choice(("nan", "uniform"))
        probe = padded_probe(layer.geometry, draw)
        assert probe.mask is not None
        mask = probe.mask.clone()
        mask[-1] = False

        def weights(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            empty = scores.isneginf().all(-1, keepdim=True)
            value = float("nan") if fill == "nan" else 1 / scores.shape[-1]
            return torch.where(empty, value, layer.weights(scores, call))

        return self.case(
            layer,
            layer.with_stages(weights=weights),
            draw,
            stage="weights",
            probe=replace(probe, mask=mask),
            parameters={"fill": fill},
        )


INJECTORS = (
    MaskPolarity(),
    PaddingSide(),
    PaddingIgnored(),
    MaskAdded(),
    CausalAlignment(),
    WindowOffByOne(),
    RowsWithoutKeys(),
)

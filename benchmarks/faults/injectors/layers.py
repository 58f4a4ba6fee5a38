"""Layers of a model in each other's place."""

from __future__ import annotations

import torch

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase, LayerStack, Truth, default_probe
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer

LAYERS = 5


def stack_of(layer: ReferenceLayer, draw: Draw, count: int = LAYERS) -> list[ReferenceLayer]:
    """Return the layer and others of its geometry, whose weights are the layer's in random order.

    The slopes of ALiBi stay.
    """
    layers = [layer]
    while len(layers) < count:
        shuffled = {
            name: tensor.flatten()[torch.randperm(tensor.numel(), generator=draw.generator)]
            for name, tensor in layer.all_weights().items()
            if name != "slopes"
        }
        shuffled = {name: flat.view_as(layer.weight(name)) for name, flat in shuffled.items()}
        layers.append(layer.with_weights(**shuffled))
    return layers


class _Moved(Injector):
    family = "layers"

    def order(self, draw: Draw) -> list[int]:
        """Return the layer whose weights each layer has."""
        raise NotImplementedError

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Build a model of which some layers have moved."""
        layers, order = stack_of(layer, draw), self.order(draw)
        first = next(place for place, index in enumerate(order) if place != index)
        truth = Truth(self.name, "q", {"order": tuple(order)}, layer=first)
        probe = default_probe(layer.geometry, draw)
        faulty = LayerStack([layers[index] for index in order])
        return FaultCase(LayerStack(layers), faulty, probe, truth)


class LayersExchanged(_Moved):
    """Two layers have each other's weights; no public report."""

    name = "layers exchanged"

    def order(self, draw: Draw) -> list[int]:
        """Exchange two layers."""
        order = list(range(LAYERS))
        first = draw.integer(0, LAYERS - 1)
        second = draw.integer(first + 1, LAYERS)
        order[first], order[second] = second, first
        return order


class LayersOffByOne(_Moved):
    """From one layer on, each has the weights of the layer before; no public report."""

    name = "layers off by one"

    def order(self, draw: Draw) -> list[int]:
        """Repeat one layer and move the later ones by one place."""
        first = draw.integer(1, LAYERS - 1)
        return [*range(first), *range(first - 1, LAYERS - 1)]


INJECTORS = (LayersExchanged(), LayersOffByOne())

"""Time and memory of a whole model on each GPU, summed over the costs of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from headwise.sharding.costs.layer_costs import FLOAT32, LayerCosts
from headwise.sharding.costs.sharding_way import ShardingWay

GIGA, TERA = 1e9, 1e12
_ADAM = 2 * FLOAT32  # bytes of two moments for each weight
_GATHERED_LAYERS = 2  # the layer that runs, and the next


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs, as their owner states them.

    Attributes:
        within: gigabytes a second that a GPU sends within its node, in one direction.
        across: the same between nodes.
        node: GPUs of a node.
        memory: gigabytes of each GPU.
        teraflops: operations a second that each GPU reaches, in 10^12.
    """

    within: float = 450.0
    across: float = 50.0
    node: int = 8
    memory: float = 80.0
    teraflops: float = 400.0

    def communication_seconds(
        self, sent: Mapping[str, float], way: ShardingWay
    ) -> dict[str, float]:
        """Return the seconds that each group of ranks sends."""
        across = way.groups_across_nodes(self.node)
        return {
            name: size / GIGA / (self.across if name in across else self.within)
            for name, size in sent.items()
        }

    def weight_communication_seconds(self, sent: float, way: ShardingWay) -> float:
        """Return the seconds that FSDP2 sends; its ranks are in all nodes."""
        return sent / GIGA / (self.across if way.gpus > self.node else self.within)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of a forward pass and of a training step, divided in one way.

    Attributes:
        layer: the costs of the first layer; other layers may have other windows.
        machine: the GPUs.
        checkpointing: True if each layer keeps its input alone, and is computed again in backward.
    """

    layer: LayerCosts
    machine: Machine
    checkpointing: bool = False

    @property
    def way(self) -> ShardingWay:
        """The way in which every layer is divided."""
        return self.layer.way

    @cached_property
    def forward_seconds(self) -> float:
        """Seconds of a forward pass."""
        return self._sum_layer_seconds(0) + self._unembedding_seconds

    @cached_property
    def backward_seconds(self) -> float:
        """Seconds of a backward pass, with the second forward pass of checkpointing."""
        again = self._sum_layer_seconds(0) if self.checkpointing else 0
        return self._sum_layer_seconds(1) + again + 2 * self._unembedding_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of both passes."""
        return self.forward_seconds + self.backward_seconds

    def _sum_layer_seconds(self, backward: int) -> float:
        counts = Counter(self.layer.sizes.windows or (None,) * self.layer.sizes.layers)
        return sum(
            count * self._layer_seconds(replace(self.layer, window=window), backward)
            for window, count in counts.items()
        )

    def _layer_seconds(self, layer: LayerCosts, backward: int) -> float:
        """Return the seconds of a layer: operations, and what is sent and not hidden by them.

        A ring sends while its products run. Weights are gathered while the layer before runs.
        """
        peak = self.machine.teraflops * TERA
        products = layer.attention_operations()[backward] / peak
        others = layer.projection_operations()[backward] / peak
        sent = layer.sent_backward() if backward else layer.sent_forward()
        seconds = self.machine.communication_seconds(sent, self.way)
        ring = seconds.pop("ring", 0.0)
        waiting = sum(seconds.values())
        waiting += sum(self.machine.communication_seconds(layer.sent_for_mlp(), self.way).values())
        weights = self.machine.weight_communication_seconds(
            layer.sent_for_weights()[backward], self.way
        )
        return waiting + max(others + max(products, ring), ring + weights)

    @property
    def _unembedding_seconds(self) -> float:
        sizes, layer = self.layer.sizes, self.layer
        products = sizes.vocabulary * sizes.embed_dim / layer.way.heads
        return 2 * layer.local_tokens * products / (self.machine.teraflops * TERA)

    @property
    def _stored_weights(self) -> float:
        """Numbers of the weights that a GPU stores: FSDP2 divides them over all ranks."""
        sizes, layer = self.layer.sizes, self.layer
        return (
            sizes.layers * layer.weights / layer.way.token_ranks
            + sizes.vocabulary_weights / layer.way.gpus
        )

    @property
    def _vocabulary_weight_bytes(self) -> float:
        """Bytes of the embeddings, which stay gathered."""
        return self.layer.sizes.vocabulary_weights / self.way.heads * self.layer.itemsize

    def _gathered_bytes(self, layers: int) -> float:
        """Return the bytes of gathered layers and embeddings; nothing is gathered on one rank."""
        if self.way.token_ranks == 1:
            return 0
        return layers * self.layer.weight_bytes + self._vocabulary_weight_bytes

    @property
    def forward_bytes(self) -> float:
        """Bytes of a GPU in a forward pass: weights, keys and values of all layers, one layer."""
        layer = self.layer
        return (
            self._stored_weights * layer.itemsize
            + self._gathered_bytes(_GATHERED_LAYERS)
            + layer.sizes.layers * layer.keys_and_values_bytes()
            + max(layer.attention_bytes() + layer.buffer_bytes(), layer.mlp_bytes())
        )

    @property
    def step_bytes(self) -> float:
        """Bytes of a GPU in a training step: weights, gradients, AdamW, and what layers keep."""
        layer = self.layer
        kept = layer.attention_bytes() + layer.mlp_bytes()
        layers = layer.sizes.layers
        inputs = layer.local_tokens * layer.sizes.embed_dim * layer.itemsize
        return (
            self._stored_weights * (2 * layer.itemsize + _ADAM)
            + self._gathered_bytes(_GATHERED_LAYERS + 1)  # the gradient of one layer
            + (layers * inputs + kept if self.checkpointing else layers * kept)
            + layer.gradient_buffer_bytes()
        )

    @property
    def fits_forward(self) -> bool:
        """True if a forward pass fits into the memory of a GPU."""
        return self.forward_bytes <= self.machine.memory * GIGA

    @property
    def fits_step(self) -> bool:
        """True if a training step fits into the memory of a GPU."""
        return self.step_bytes <= self.machine.memory * GIGA

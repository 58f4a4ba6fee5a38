"""Formulas of one sharded layer: bytes on the wire, operations and memory of each rank.

All formulas of `headwise plan` stand here; the tests compare them with bytes that real processes
send. docs/sharding.md writes them out, with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.sharding.costs.model_sizes import ModelSizes
from headwise.sharding.costs.sharding_way import ShardingWay

FLOAT32 = 4  # bytes
# Matrix products of queries x keys: scores and outputs; backward computes the scores again, then
# the gradients of weights, values, queries and keys.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of one layer for each rank, which holds ``local_tokens`` between layers.

    Attributes:
        sizes: the sizes of the model.
        way: the way in which the layer is divided.
        batch: sequences.
        context: tokens of a sequence.
        itemsize: bytes of a number.
        causal: True if a query attends to no later key.
        window: keys that a query may attend to; None for all.
    """

    sizes: ModelSizes
    way: ShardingWay
    batch: int
    context: int
    itemsize: int
    causal: bool = True
    window: int | None = None

    @property
    def local_tokens(self) -> float:
        """Tokens of a rank between layers, of all sequences."""
        return self.batch * self.context / self.way.token_ranks

    @property
    def query_channels(self) -> float:
        """Numbers of one token's queries on a rank, before an all-to-all."""
        return self.sizes.heads / self.way.heads * self.sizes.head_dim

    @property
    def key_channels(self) -> float:
        """Numbers of one token's keys on a rank; a rank has at least one kv head."""
        return max(self.sizes.kv_heads / self.way.heads, 1) * self.sizes.head_dim

    @property
    def exchanged_key_channels(self) -> float:
        """The same for an all-to-all, which hands each rank at least one kv head."""
        return max(self.key_channels, self.way.all_to_all * self.sizes.head_dim)

    # Bytes on the wire

    def sent_forward(self) -> dict[str, float]:
        """Return the bytes that a rank sends in the forward pass of attention, for each group."""
        return self._sent_bytes_by_group(
            self._all_reduced_numbers,
            self._exchanged_numbers,
            self._passed_keys_and_values,
            ring_factor=1,
        )

    def sent_backward(self) -> dict[str, float]:
        """Return the bytes that a rank sends in the backward pass of attention, for each group.

        The gradient of the input is summed over heads; queries, keys, values and outputs are
        exchanged back. Gathered keys send their gradients home. A ring passes keys and values
        around again, and sends the gradient of each part directly to its owner.
        """
        return self._sent_bytes_by_group(
            self._all_reduced_numbers,
            self._exchanged_numbers,
            self._passed_keys_and_values,
            ring_factor=2,
        )

    def _sent_bytes_by_group(
        self, heads: float, exchanged: float, keys_and_values: float, *, ring_factor: float
    ) -> dict[str, float]:
        way = self.way
        numbers = {
            "heads": 2 * _share_that_leaves_rank(way.heads) * heads,
            "all-to-all": _share_that_leaves_rank(way.all_to_all) * exchanged,
            "gather": _share_that_leaves_rank(way.gather) * keys_and_values,
            "ring": ring_factor * _share_that_leaves_rank(way.ring) * keys_and_values,
        }
        return {name: numbers[name] * self.itemsize for name in way.groups}

    @property
    def _all_reduced_numbers(self) -> float:
        """Numbers of the outputs that an all-reduce sums over the ranks of heads."""
        return self.local_tokens * self.sizes.embed_dim

    @property
    def _exchanged_numbers(self) -> float:
        """Numbers of a rank's queries, outputs, keys and values before an all-to-all."""
        return self.local_tokens * 2 * (self.query_channels + self.exchanged_key_channels)

    @property
    def _passed_keys_and_values(self) -> float:
        """Numbers of all keys and values of a rank's kv heads, over gathered or passed ranks."""
        outer = self.way.gather * self.way.ring
        return self.local_tokens * outer * 2 * self.exchanged_key_channels

    def sent_for_mlp(self) -> dict[str, float]:
        """Return the bytes that the MLP sends in one pass: it is divided like the heads."""
        if "heads" not in self.way.groups or not self.sizes.hidden_dim:
            return {}
        return {
            "heads": 2
            * _share_that_leaves_rank(self.way.heads)
            * self._all_reduced_numbers
            * self.itemsize
        }

    def sent_for_weights(self) -> tuple[float, float]:
        """Return the bytes that FSDP2 sends for the weights of a layer, forward and backward.

        Both passes gather the weights; the backward pass sums their gradients into shards.
        """
        sent = _share_that_leaves_rank(self.way.token_ranks) * self.weight_bytes
        return sent, 2 * sent

    # Operations

    def total_attended_pairs(self) -> float:
        """Return the pairs of a query and a key that it attends to, in all sequences."""
        length, window = self.context, min(self.window or self.context, self.context)
        if self.causal:
            return self.batch * (window * (window + 1) / 2 + (length - window) * window)
        return self.batch * (length * (2 * window - 1) - window * (window - 1))

    def attention_operations(self) -> tuple[float, float]:
        """Return the operations of a rank in products of queries x keys, forward and backward."""
        heads = self.sizes.heads / self.way.gpus
        product = 2 * self.total_attended_pairs() * heads * self.sizes.head_dim
        return FORWARD_PRODUCTS * product, BACKWARD_PRODUCTS * product

    def projection_operations(self) -> tuple[float, float]:
        """Return the operations of a rank in projections and MLP, forward and backward."""
        forward = 2 * self.local_tokens * self.weights
        return forward, 2 * forward

    # Memory

    @property
    def weights(self) -> float:
        """Numbers in the weights of a layer that a rank works with."""
        sizes = self.sizes
        rows = 2 * (self.query_channels + self.key_channels)
        return rows * sizes.embed_dim + sizes.mlp_weights / self.way.heads

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of a layer that a rank works with."""
        return self.weights * self.itemsize

    def keys_and_values_bytes(self) -> float:
        """Return the bytes of a rank's keys and values: a cache, or kept for backward."""
        return self.local_tokens * 2 * self.exchanged_key_channels * self.itemsize

    def attention_bytes(self) -> float:
        """Return the bytes that attention keeps for its backward pass.

        Kept are the input, its normalised form, the queries, keys, values and head outputs, and a
        float32 log sum for each query and head. Where ranks share the tokens, the outputs are kept
        twice: by the kernel, and in the order of the output projection. Gathered keys and values
        are kept whole, and once more as the parts that the queries see. A ring keeps the largest
        score of each query and head too.
        """
        way = self.way
        keys = 2 * self.exchanged_key_channels
        numbers = 2 * self.sizes.embed_dim + 2 * self.query_channels
        numbers += keys * (2 * way.gather if way.gather > 1 else 1)
        if way.token_ranks > 1:
            numbers += self.query_channels
        row_statistics = self.query_channels / self.sizes.head_dim * FLOAT32
        row_statistics *= 2 if way.ring > 1 else 1
        return self.local_tokens * (numbers * self.itemsize + row_statistics)

    def mlp_bytes(self) -> float:
        """Return the bytes that the MLP keeps: input, normalised input, and its hidden widths.

        With a gate these are gate, up, activation and product; else two.
        """
        sizes = self.sizes
        if not sizes.hidden_dim:
            return 0
        hidden = (4 if sizes.mlp_matrices == 3 else 2) * sizes.hidden_dim / self.way.heads
        return self.local_tokens * (2 * sizes.embed_dim + hidden) * self.itemsize

    def buffer_bytes(self) -> float:
        """Return the bytes of the largest buffers: an exchange, or two blocks of a ring."""
        way, keys = self.way, self.local_tokens * 2 * self.exchanged_key_channels
        numbers = {
            "heads": self._all_reduced_numbers,
            "all-to-all": self._exchanged_numbers,
            "gather": keys * way.gather,
            "ring": 2 * keys,
        }
        return max((numbers[name] for name in way.groups), default=0) * self.itemsize

    def gradient_buffer_bytes(self) -> float:
        """Return the largest bytes in a backward pass beside what is kept: gradients, transfers.

        The formulas are those of `SequencePlan.peak`, less what the forward pass keeps.
        """
        way, keys = self.way, self.local_tokens * 2 * self.exchanged_key_channels
        queries = self.local_tokens * self.query_channels
        numbers = {
            "heads": 2 * self._all_reduced_numbers,
            "all-to-all": 2 * self._exchanged_numbers,
            "gather": queries + keys + 2 * keys * way.gather,
            "ring": 2 * queries + (8 if way.ring > 2 else 6) * keys,
        }
        return max((numbers[name] for name in way.groups), default=0) * self.itemsize


def _share_that_leaves_rank(ranks: int) -> float:
    """Return the share of a tensor that leaves a rank: (n - 1) / n."""
    return (ranks - 1) / ranks

"""What the attention layers of transformers have in common."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from headwise.studies.peers.peer import PURPOSE, Peer
from headwise.support.extras import require


class OfTransformers(Peer):
    """The first layer of a model, so that its weights start as a model's do.

    Args:
        implementation: transformers' ``attn_implementation``, the kernel.
    """

    real = True
    biased = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        implementation: str = "eager",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.implementation = implementation
        self.inner = self._layer()

    def _layer(self) -> Any:
        """The attention of a model of these sizes, in which all else is as small as it can be."""
        raise NotImplementedError

    def spell(self, may_attend: Bool[Tensor, "batch queries keys"]) -> Tensor:
        """What transformers hands to its layers, by its own function."""
        masks = require("transformers.masking_utils", purpose=PURPOSE)
        batch, queries, keys = may_attend.shape

        def allowed(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return may_attend[sequence, query, key]

        mask: Tensor = masks.ALL_MASK_ATTENTION_FUNCTIONS[self.implementation](
            batch_size=batch,
            q_length=queries,
            kv_length=keys,
            mask_function=allowed,
            allow_is_causal_skip=False,
            dtype=self._dtype,
        )
        return mask[:, 0]

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """The second result."""
        weights: Tensor | None = self.inner(x)[1]
        return weights

    @property
    def _dtype(self) -> torch.dtype:
        return self.held().q.dtype

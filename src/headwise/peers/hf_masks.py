"""Masks as transformers' models make them for their attention layers."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from headwise.extras import require
from headwise.peers.peer import PURPOSE


def mask_for(
    implementation: str, may_attend: Bool[Tensor, "batch queries keys"], *, dtype: torch.dtype
) -> Tensor:
    """What transformers hands to its layers, (batch, queries, keys), by its own function."""
    functions = require("transformers.masking_utils", purpose=PURPOSE).ALL_MASK_ATTENTION_FUNCTIONS
    batch, queries, keys = may_attend.shape

    def allowed(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return may_attend[sequence, query, key]

    mask: Tensor = functions[implementation](
        batch_size=batch,
        q_length=queries,
        kv_length=keys,
        mask_function=allowed,
        allow_is_causal_skip=False,
        dtype=dtype,
    )
    return mask[:, 0]

"""Latent attention: keys and values of all heads come from a latent c, and one key is shared.

    a   = norm(wa x)                       queries may come from a latent too; else a = x
    q   = wq a                             of each head; its first channels meet the shared key
    c   = norm(wc x),  k_r = wr x          rank and shared_width numbers of each token
    k   = [k_r | wk c],  v = wv c          expanded: keys and values of each head
    q'  = [q_r | q_n wk],  k' = [k_r | c]  absorbed: one kv head, whose values are c
    head outputs = (weights @ c) wv.T

The channels of q_r and k_r alone are rotated. Both forms give the same scores. A cache holds k'.

DeepSeek-V2 (arXiv:2405.04434); deepseek-ai/DeepSeek-V3, inference/model.py. LongCat-Flash also
multiplies the latents by sqrt(embed_dim / rank) (arXiv:2509.01322).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.function.norm import normalise
from headwise.function.spec import Latent
from headwise.function.stages import project_heads


def compress(
    rule: Latent,
    x: Float[Tensor, "batch length embed_dim"],
    weight: Float[Tensor, "rank embed_dim"],
    bias: Float[Tensor, " rank"] | None,
    norm: Float[Tensor, " rank"] | None,
) -> Float[Tensor, "batch length rank"]:
    """Return a latent of tokens; ``norm`` is the weight of its norm, None without one."""
    latent = project_heads(x, weight[None], None if bias is None else bias[None])[:, 0]
    if norm is not None:
        latent = normalise(latent, norm, None, kind="rms", eps=rule.eps)
    return scale_latent(rule, latent, x.shape[-1])


def scale_latent(
    rule: Latent, latent: Float[Tensor, "batch length rank"], embed_dim: int
) -> Float[Tensor, "batch length rank"]:
    """Return a latent after its norm, times its factor where it has one."""
    return latent * math.sqrt(embed_dim / latent.shape[-1]) if rule.scaled else latent


def expand_keys(
    c: Float[Tensor, "batch length rank"],
    shared: Float[Tensor, "batch 1 length shared_width"],
    weight: Float[Tensor, "heads key_dim rank"],
    bias: Float[Tensor, "heads key_dim"] | None = None,
) -> Float[Tensor, "batch heads length head_dim"]:
    """Return the keys of each head: the shared one, then those of the latent."""
    k = project_heads(c, weight, bias)
    return torch.cat((shared.expand(-1, k.shape[1], -1, -1), k), -1)


def absorb_queries(
    q: Float[Tensor, "batch heads queries head_dim"], weight: Float[Tensor, "heads key_dim rank"]
) -> Float[Tensor, "batch heads queries width"]:
    """Return queries of [k_r | c], for weights of keys of the latent."""
    shared_width = q.shape[-1] - weight.shape[1]
    return torch.cat((q[..., :shared_width], q[..., shared_width:] @ weight), -1)


class FormCosts(NamedTuple):
    """Multiply-adds of one sequence's attention in each form, for keys that a cache may hold."""

    expanded: int
    absorbed: int

    @property
    def is_absorbed(self) -> bool:
        """True if the absorbed form is cheaper."""
        return self.absorbed < self.expanded


def count_products(
    *, queries: int, keys: int, heads: int, head_dim: int, value_dim: int, rank: int, shared: int
) -> FormCosts:
    """Count the products after the projection of queries: of c, of scores and of values.

    Expanded, each key passes wk and wv; absorbed, each query does, and scores and values are wider.
    """
    up = rank * (head_dim - shared + value_dim)
    pairs = queries * keys
    return FormCosts(
        expanded=heads * (keys * up + pairs * (head_dim + value_dim)),
        absorbed=heads * (queries * up + pairs * (2 * rank + 2 * shared)),
    )

"""Keys and values from a latent in a layer: its projections, and the form of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.function import latent as formulas
from headwise.function.latent import scale_latent
from headwise.function.stages import split_heads
from headwise.function.temperature import query_factors
from headwise.layers import checks, linear, packing
from headwise.layers.base import AttentionBase
from headwise.layers.hooks import has_attention_hook
from headwise.matrix.operator import AttentionMatrix
from headwise.support.private_torch import has_module_hooks
from headwise.support.tracing import is_recording_operators


class Operands(NamedTuple):
    """Queries, keys and values of a call, in one of the two forms."""

    q: Tensor
    k: Tensor
    v: Tensor  # absorbed: the keys themselves
    up: Tensor | None  # (heads, value_dim, rank) of the head outputs; None where v has all heads

    def expand(self, outputs: Tensor) -> Tensor:
        """Return head outputs (batch, heads, queries, value_dim) of products with ``v``."""
        if self.up is None:
            return outputs
        return outputs[..., -self.up.shape[2] :] @ self.up.mT


class Product(NamedTuple):
    """A and v of a call; the head outputs are ``expand(A @ v)``, before an output gate."""

    matrix: AttentionMatrix
    v: Tensor
    expand: Callable[[Tensor], Tensor]

    def head_outputs(self) -> Tensor:
        """Return (batch, heads, queries, value_dim)."""
        return self.expand(self.matrix @ self.v)


def project(layer: AttentionBase, tokens: packing.Unpacked) -> tuple[Tensor, Tensor]:
    """Return rotated queries of each head, and [k_r | c] (batch, 1, keys, width)."""
    heads, queries = (
        layer._head_counts[0],
        linear.project(layer.q_proj, compress_queries(layer, tokens.x)),
    )
    q = checks.split_projection("q_proj", queries, "heads", heads, layer.head_dim)
    assert layer.shared_k_proj is not None
    shared = layer.shared_k_proj(tokens.source)[:, None]
    if (rotary := layer.rotary) is not None:
        if rotary.depends_on_length:
            tokens.reached = tokens.lengths_of_sequences()
        positions, length = tokens.positions(), tokens.reached
        q, shared = (rotary.rotate(x, positions, length=length) for x in (q, shared))
    if layer.temperature is not None:
        q = q * query_factors(layer.temperature, tokens.positions(), q.dtype)
    return q, torch.cat((shared, compress_source(layer, tokens.source)[:, None]), -1)


def project_stages(layer: AttentionBase, tokens: packing.Unpacked) -> dict[str, Tensor]:
    """Return the stages before the scores; keys and values are those of each head."""
    (heads, _), c = layer._head_counts, compress_source(layer, tokens.source)
    q = split_heads(layer.q_proj(compress_queries(layer, tokens.x)), heads=heads)
    assert layer.shared_k_proj is not None
    shared = layer.shared_k_proj(tokens.source)[:, None]
    rotated, stored = project(layer, tokens)
    k, v = _expand(layer, torch.cat((shared, c[:, None]), -1))
    before = {"c": c[:, None], "k_r": shared, "q": q, "k": k, "v": v}
    before |= {"q after norm": q, "k after norm": k}
    return before | {"q after rotary": rotated, "k after rotary": _expand(layer, stored)[0]}


def compress_queries(layer: AttentionBase, x: Tensor) -> Tensor:
    """Return what queries are projected from: their latent, or ``x`` itself."""
    latent = layer.latent
    if latent is None or layer.q_latent_proj is None or layer.q_latent_norm is None:
        return x
    a: Tensor = layer.q_latent_norm(linear.project(layer.q_latent_proj, x))
    return scale_latent(latent, a, layer.embed_dim)


def compress_source(layer: AttentionBase, source: Tensor) -> Tensor:
    """Return what keys and values are projected from: their latent c, or ``source`` itself."""
    if layer.latent is None or layer.kv_latent_proj is None:
        return source
    c = linear.project(layer.kv_latent_proj, source)
    if layer.kv_latent_norm is not None:
        c = layer.kv_latent_norm(c)
    return scale_latent(layer.latent, c, layer.embed_dim)


def choose_form(
    layer: AttentionBase, q: Tensor, stored: Tensor, *, has_cache: bool = False
) -> Operands:
    """Return the operands of queries and [k_r | c] in the form that `describe_form` names."""
    assert layer.latent is not None
    if _is_absorbed(layer, q.shape[2], stored.shape[2], has_cache)[0]:
        weights = (_read_weight(layer, each).to(q.dtype) for each in (layer.k_proj, layer.v_proj))
        wk, wv = (weight.unflatten(0, (layer._head_counts[1], -1)) for weight in weights)
        return Operands(formulas.absorb_queries(q, wk), stored, stored, wv)
    return Operands(q, *_expand(layer, stored), None)


def _expand(layer: AttentionBase, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of each head, of [k_r | c]."""
    assert layer.latent is not None
    width, kv_heads = layer.latent.shared_width, layer._head_counts[1]
    shared, c, key_dim = stored[..., :width], stored[:, 0, :, width:], layer.head_dim - width
    k, v = (linear.project(each, c) for each in (layer.k_proj, layer.v_proj))
    k = checks.split_projection("k_proj", k, "kv_heads", kv_heads, key_dim)
    v = checks.split_projection("v_proj", v, "kv_heads", kv_heads, layer.value_dim)
    return torch.cat((shared.expand(-1, kv_heads, -1, -1), k), -1), v


def describe_form(layer: AttentionBase, queries: int, keys: int, *, has_cache: bool = False) -> str:
    """Return the form of a call with so many queries and keys, and why, in words."""
    is_absorbed, why = _is_absorbed(layer, queries, keys, has_cache)
    return f"{'absorbed' if is_absorbed else 'expanded'}: {why}"


def _is_absorbed(
    layer: AttentionBase, queries: int, keys: int, has_cache: bool
) -> tuple[bool, str]:
    """Return whether a call absorbs k_proj and v_proj into queries and outputs, and why."""
    assert layer.latent is not None
    if has_attention_hook():
        return False, "an attention hook gets the values of each head"
    if watched := [n for n in ("k_proj", "v_proj") if _is_watched(layer, getattr(layer, n))]:
        return False, f"{' and '.join(watched)} may do more than multiply, and must be called"
    if is_recording_operators():  # a choice by size would hold for this size only
        return has_cache, "a graph is for all sizes"
    products = formulas.count_products(
        queries=queries,
        keys=keys,
        heads=layer._head_counts[0],
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        rank=layer.latent.rank,
        shared=layer.latent.shared_width,
    )
    expanded, absorbed = (f"{n / 1e9:.2g} G" for n in products)
    return products.is_absorbed, f"{expanded} multiply-adds expanded, {absorbed} absorbed"


def _is_watched(layer: AttentionBase, module: nn.Module) -> bool:
    """True if a projection is no plain product, or somebody sees its calls."""
    if not isinstance(module, nn.Linear) or has_module_hooks(module) or module.bias is not None:
        return True
    # Of a part, the class and the weights are those of `headwise.sharding`, and multiply too.
    is_plain = type(module) is nn.Linear and type(module._parameters["weight"]) is nn.Parameter
    return not is_plain and layer.part is None


def _read_weight(layer: AttentionBase, module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight if layer.part is None else layer.part.own_share_of_parameter(weight)

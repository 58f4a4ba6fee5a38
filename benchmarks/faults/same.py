"""Layers that are the same function with other weights or settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.geometry import Geometry, Pairing
from benchmarks.faults.injectors.head_order import rows_of
from benchmarks.faults.injectors.injector import heads_of, reordered
from benchmarks.faults.injectors.rotary import settings_of
from benchmarks.faults.injectors.rotary_rows import conversion
from benchmarks.faults.reference_layer import Call, ReferenceLayer
from benchmarks.faults.rotary_math import pairs, turn

Make = Callable[[ReferenceLayer, Draw], ReferenceLayer]


@dataclass(frozen=True)
class SamePair:
    """A change of a layer that keeps its function on every geometry to which it applies."""

    name: str
    applies: Callable[[Geometry], bool]
    make: Make


def bitwise_copy(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Return a copy."""
    return layer.with_weights()


def has_heads(g: Geometry) -> bool:
    """Return True for several kv heads, or several query heads of one, without head weights."""
    return g.num_heads > 1 and (g.qk_norm is None or g.qk_norm.over == "head")


def permuted_heads(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Permute kv heads, and the query heads within each group, in all weights."""
    g = layer.geometry
    kv_order = torch.randperm(g.num_kv_heads, generator=draw.generator)
    grouped = torch.arange(g.num_heads).view(g.num_kv_heads, g.group)[kv_order]
    order = grouped.gather(1, draw.normal(*grouped.shape).argsort(1)).flatten()
    changed: dict[str, Tensor] = {}
    for role in "qkvo":
        heads = order if role in "qo" else kv_order
        changed |= reordered(layer, role, rows_of(g, role)[heads].flatten())
    changed |= {n: layer.weight(n).detach()[order] for n in ("sink", "slopes") if n in layer.names}
    return layer.with_weights(**changed)


def basis_of_values(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Change the basis of v inside each kv head, and undo it in wo."""
    g = layer.geometry
    wo = layer.weight("wo").detach().unflatten(1, (g.num_heads, g.value_dim))
    bases = draw.normal(g.num_kv_heads, g.value_dim, g.value_dim, std=0.15) + torch.eye(
        g.value_dim, dtype=torch.float64
    )
    inverse = torch.linalg.inv(bases).repeat_interleave(g.group, 0)
    changed = {"wo": torch.einsum("ehc,hcd->ehd", wo, inverse).flatten(1)}
    return layer.with_weights(**changed, **_in_basis(layer, "v", bases))


def _in_basis(layer: ReferenceLayer, role: str, bases: Tensor) -> dict[str, Tensor]:
    """Return weight and bias of a role with the rows of each head multiplied by its basis."""
    names = [name for name in (f"w{role}", f"b{role}") if name in layer.names]
    rows = {name: layer.weight(name).detach().unflatten(0, (len(bases), -1)) for name in names}
    return {
        name: torch.einsum("hcd,hd...->hc...", bases, part).flatten(0, 1)
        for name, part in rows.items()
    }


def is_plain(g: Geometry) -> bool:
    """Return True if products of q and k have neither rotary embedding nor norm before them."""
    return g.rotary is None and g.qk_norm is None


def basis_of_keys(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Change the basis of k inside each kv head, and undo it in q."""
    g = layer.geometry
    bases = draw.normal(g.num_kv_heads, g.head_dim, g.head_dim, std=0.15) + torch.eye(
        g.head_dim, dtype=torch.float64
    )
    undo = torch.linalg.inv(bases).transpose(1, 2).repeat_interleave(g.group, 0)
    return layer.with_weights(**_in_basis(layer, "k", bases), **_in_basis(layer, "q", undo))


def has_rotary(g: Geometry) -> bool:
    """Return True for a rotary embedding without a norm over all heads."""
    return g.rotary is not None and (g.qk_norm is None or g.qk_norm.over == "head")


def other_pairing(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Take the other pairing, and reorder the rows of q and k and the norm's weights for it."""
    g, rotary = layer.geometry, settings_of(layer)
    changed: dict[str, Tensor] = {}
    for role in "qk":
        order = conversion(g, heads_of(g, role), g.head_dim).argsort()
        changed |= reordered(layer, role, order)
        if g.qk_norm is not None:
            changed[f"{role}_norm"] = layer.weight(f"{role}_norm").detach()[order[: g.head_dim]]
    other: Pairing = "interleaved" if rotary.pairing == "half-split" else "half-split"
    moved = layer.with_weights(**changed)
    return moved.with_geometry(rotary=replace(rotary, pairing=other))


def turned_planes(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Turn each rotary plane of q and k by an angle of its kv head."""
    g, rotary = layer.geometry, settings_of(layer)
    planes = pairs(rotary)
    angles = draw.spread(g.num_kv_heads, rotary.width // 2, low=-3.0, high=3.0)
    identity = torch.eye(g.head_dim, dtype=torch.float64).expand(g.num_kv_heads, -1, -1)
    bases = turn(identity, angles[:, None], planes).transpose(1, 2)
    queries = bases.repeat_interleave(g.group, 0)
    return layer.with_weights(**_in_basis(layer, "k", bases), **_in_basis(layer, "q", queries))


def offset_of_both(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Move the positions of q and of k by the same number."""
    offset = draw.integer(1, 9)

    def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
        return layer.turned(x, positions + offset, role)

    return layer.with_stages(turned=turned)


def theta_for_exponent(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Divide the exponent by head_dim, with the theta that gives the same frequencies."""
    rotary, width = settings_of(layer), layer.geometry.head_dim
    theta = rotary.theta ** (width / rotary.width)
    return layer.with_geometry(rotary=replace(rotary, theta=theta, exponent_width=width))


def scale_for_attention_factor(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Move the attention factor, squared, into the scale."""
    rotary = settings_of(layer)
    scale = layer.geometry.plain_scale * rotary.attention_factor**2
    return layer.with_geometry(scale=scale, rotary=replace(rotary, attention_factor=1.0))


def scale_in_queries(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Move the scale into the weight and bias of q."""
    factor = layer.geometry.plain_scale
    scaled = {n: layer.weight(n).detach() * factor for n in ("wq", "bq") if n in layer.names}
    return layer.with_weights(**scaled).with_geometry(scale=1.0)


def signs(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Negate q and k together."""
    roles = [n for n in ("wq", "bq", "wk", "bk") if n in layer.names]
    return layer.with_weights(**{n: -layer.weight(n).detach() for n in roles})


def cancels_key_bias(g: Geometry) -> bool:
    """Return True if a number that is added to a row of scores has no effect."""
    return g.biases and is_plain(g) and g.softcap is None and not g.sink


def without_key_bias(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Drop the key bias."""
    return layer.with_weights(bk=None)


def value_bias_in_output(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Move the value bias into the output bias, since weights sum to one."""
    g = layer.geometry
    heads = layer.weight("bv").detach().unflatten(0, (g.num_kv_heads, -1))
    added = layer.weight("wo").detach() @ heads.repeat_interleave(g.group, 0).flatten()
    bias = layer.bias_of("bo")
    return layer.with_weights(bv=None, bo=added if bias is None else bias.detach() + added)


def zero_output_bias(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Add an output bias of zeros."""
    return layer.with_weights(bo=torch.zeros(layer.geometry.embed_dim, dtype=torch.float64))


def repeated_kv_heads(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Store each kv head once for each of its query heads."""
    g = layer.geometry
    changed: dict[str, Tensor] = {}
    for role in "kv":
        rows = rows_of(g, role).repeat_interleave(g.group, 0).flatten()
        changed |= reordered(layer, role, rows)
    return layer.with_weights(**changed).with_geometry(num_kv_heads=g.num_heads)


def all_true_mask(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Combine the mask with one that shows every key."""

    def visible(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
        return layer.visible(scores, call) & torch.ones_like(scores, dtype=torch.bool)

    return layer.with_stages(visible=visible)


def l2_for_rms(layer: ReferenceLayer, draw: Draw) -> ReferenceLayer:
    """Take the L2 norm, with sqrt(width) in the weight and the eps for it."""
    norm = layer.geometry.qk_norm
    assert norm is not None
    width = layer.geometry.head_dim
    weights = {n: layer.weight(n).detach() * width**0.5 for n in ("q_norm", "k_norm")}
    changed = replace(norm, kind="l2", eps=norm.eps * width)
    return layer.with_weights(**weights).with_geometry(qk_norm=changed)


SAME = (
    SamePair("bitwise copy", lambda g: True, bitwise_copy),
    SamePair("heads permuted consistently", has_heads, permuted_heads),
    SamePair("basis of v changed", lambda g: True, basis_of_values),
    SamePair("basis of q and k changed", is_plain, basis_of_keys),
    SamePair("other pairing with reordered rows", has_rotary, other_pairing),
    SamePair(
        "rotary planes turned in q and k",
        lambda g: g.rotary is not None and g.qk_norm is None,
        turned_planes,
    ),
    SamePair("same position offset of q and k", lambda g: g.rotary is not None, offset_of_both),
    SamePair(
        "theta for exponent width",
        lambda g: g.rotary is not None and g.rotary.width < g.head_dim,
        theta_for_exponent,
    ),
    SamePair(
        "scale for attention factor",
        lambda g: (
            g.rotary is not None
            and g.rotary.attention_factor != 1.0
            and g.rotary.width == g.head_dim
        ),
        scale_for_attention_factor,
    ),
    SamePair("scale in q", lambda g: g.qk_norm is None, scale_in_queries),
    SamePair("sign of q and k", lambda g: True, signs),
    SamePair("key bias missing", cancels_key_bias, without_key_bias),
    SamePair("value bias in output bias", lambda g: g.biases and not g.sink, value_bias_in_output),
    SamePair("output bias zero", lambda g: not g.out_bias, zero_output_bias),
    SamePair(
        "kv heads repeated in the weights",
        lambda g: g.group > 1 and (g.qk_norm is None or g.qk_norm.over == "head"),
        repeated_kv_heads,
    ),
    SamePair("mask of all True", lambda g: True, all_true_mask),
    SamePair(
        "L2 norm with its factor",
        lambda g: (
            g.qk_norm is not None
            and g.qk_norm.kind == "rms"
            and g.qk_norm.over == "head"
            and g.qk_norm.weight_offset == 0.0
        ),
        l2_for_rms,
    ),
)

"""The layer written out by hand, in the dtype of its parameters: the oracle of its tests."""

import math

import torch
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary, ScoreBias
from headwise.function import stages
from headwise.function.spec import DisentangledRule, TemperatureRule
from headwise.layers.norm import QKNorm


def head_outputs(
    layer: Attention,
    x: Tensor,
    source: Tensor | None = None,
    *,
    mask: Mask | None = None,
    score_bias: ScoreBias | None = None,
    positions: Tensor | None = None,
    value_source: Tensor | None = None,
) -> Tensor:
    """(batch, heads, queries, value_dim)."""
    keys_from = x if source is None else source
    values_from = keys_from if value_source is None else value_source
    places = torch.arange(x.shape[1]).expand(1, len(x), -1)
    if positions is not None:
        places = positions if positions.dim() == 3 else positions.expand(1, len(x), -1)
    if layer.latent is not None:
        q, k, v = from_latents(layer, x, places)
    else:
        q = placed(layer, applied(layer.q_proj, x), layer.num_heads, layer.q_norm, places)
        keys = applied(layer.k_proj, keys_from)
        k = placed(layer, keys, layer.num_kv_heads, layer.k_norm, places)
        v = torch.stack(applied(layer.v_proj, values_from).chunk(layer.num_kv_heads, -1), 1)
    q, v = warmed(q, layer.temperature, places[0]), changed(v, layer)
    mask, score_bias = mask or Mask(), score_bias or ScoreBias()
    if layer.window is not None:
        mask = mask & Mask.window(*layer.window)
    if layer.score_bias is not None:
        score_bias = score_bias + bias_of(layer, q, k)
    options = {"mask": mask, "score_bias": score_bias, "scale": layer.scale}
    options |= {"softcap": layer.softcap, "sink": layer.sink}
    if layer.differential is None:
        outputs = stages.head_outputs(q, k, v, **options)
    else:
        outputs = subtracted(layer, stages.weights(q, k, **options), v)
    if (norm := layer.output_norm) is not None:
        outputs = outputs.transpose(1, 2)
        joined = outputs.flatten(2) if norm.over == "width" else outputs
        normed = normalised(joined, norm, layer.o_norm)
        if norm.over == "width":  # a query that attends to nothing has outputs of 0
            normed = normed * (joined != 0).any(-1, keepdim=True)
        outputs = normed.reshape(outputs.shape).transpose(1, 2)
    if layer.gate_proj is None:
        return outputs
    gates = torch.stack(applied(layer.gate_proj, x).chunk(layer.num_heads, -1), 1)
    if layer.output_gate.endswith("softplus"):
        return outputs * torch.log1p(torch.exp(gates))
    return outputs / (1 + torch.exp(-gates))


def from_latents(layer: Attention, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of each head; keys begin with the key that all share."""
    rule = layer.latent
    assert rule is not None

    def latent(name: str, rank: int, *, normed: bool) -> Tensor:
        z = applied(getattr(layer, f"{name}_proj"), x)
        if normed:
            weight = getattr(layer, f"{name}_norm").weight
            z = z / (z.square().mean(-1, keepdim=True) + rule.eps).sqrt() * weight
        return z * (layer.embed_dim / rank) ** 0.5 if rule.scaled else z

    a = latent("q_latent", rule.query_rank, normed=True) if rule.query_rank else x
    c, shared = latent("kv_latent", rule.rank, normed=rule.normed), applied(layer.shared_k_proj, x)
    heads = applied(layer.k_proj, c).chunk(layer.num_heads, -1)
    keys = torch.stack([torch.cat((shared, head), -1) for head in heads], 1)
    queries = torch.stack(applied(layer.q_proj, a).chunk(layer.num_heads, -1), 1)
    if layer.rotary is not None:
        queries, keys = (rotated(x, layer.rotary, places) for x in (queries, keys))
    return queries, keys, torch.stack(applied(layer.v_proj, c).chunk(layer.num_heads, -1), 1)


def bias_of(layer: Attention, q: Tensor, k: Tensor) -> ScoreBias:
    """The score bias of a layer."""
    rule = getattr(layer.score_bias, "rule", None)
    if not isinstance(rule, DisentangledRule):
        return layer.score_bias(align=None)
    scale = q.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    terms = scale * places_met(layer, rule, q, k)
    return ScoreBias.dense(terms, axes="batch heads queries keys")


def places_met(layer: Attention, rule: DisentangledRule, q: Tensor, k: Tensor) -> Tensor:
    """DeBERTa's terms before the scale, pair by pair."""
    held = layer.score_bias
    places = held.rel_embeddings.weight
    if held.norm is not None:
        places = places - places.mean(-1, keepdim=True)
        places = places / (places.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        places = places * held.norm.weight + held.norm.bias
    of_q = layer.q_proj if rule.is_shared else held.q_proj
    of_k = layer.k_proj if rule.is_shared else held.k_proj
    terms = []
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        queries, keys = q[:, head], k[:, kv]
        total = torch.zeros_like(queries @ keys.mT)
        count = keys.shape[1]
        rows = [[row_of(rule, i - j) for j in range(count)] for i in range(q.shape[2])]
        if "c2p" in rule.terms:
            place_keys = applied(of_k, places).chunk(k.shape[1], -1)[kv]
            total = total + torch.einsum("bid,ijd->bij", queries, place_keys[torch.tensor(rows)])
        if "p2c" in rule.terms:
            place_queries = applied(of_q, places).chunk(q.shape[1], -1)[head]
            total = total + torch.einsum("bjd,ijd->bij", keys, place_queries[torch.tensor(rows)])
        terms.append(total)
    return torch.stack(terms, 1)


def row_of(rule: DisentangledRule, place: int) -> int:
    """The row of one position, by DeBERTa's formula."""
    mid = rule.span // 2
    if rule.max_distance is not None and abs(place) > mid:
        steps = math.log(abs(place) / mid) / math.log((rule.max_distance - 1) / mid)
        far = math.ceil(steps * (mid - 1) - 1e-6) + mid
        place = far if place > 0 else -far
    return min(max(place + rule.span, 0), 2 * rule.span - 1)


def subtracted(layer: Attention, weights: Tensor, v: Tensor) -> Tensor:
    """Differences of heads, pair by pair, in halves."""
    rule, heads = layer.differential, layer.num_heads
    dots = [torch.dot(getattr(layer, f"lambda_q{n}"), getattr(layer, f"lambda_k{n}")) for n in "12"]
    factor = dots[0].exp() - dots[1].exp() + rule.init
    halves = []
    for pair in range(heads // 2):
        kv = pair * layer.num_kv_heads // heads
        values = torch.cat((v[:, kv], v[:, kv + layer.num_kv_heads // 2]), -1)
        difference = (weights[:, pair] - factor * weights[:, pair + heads // 2]) @ values
        size = (difference.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        halves += ((1 - rule.init) * difference / size).chunk(2, -1)
    return torch.stack(halves, 1)


def warmed(q: Tensor, rule: TemperatureRule | None, places: Tensor) -> Tensor:
    """Queries times their temperature, one by one."""
    if rule is None:
        return q
    factors = []
    for place in places.flatten().tolist():
        share = (place + rule.first) / rule.length
        grown = max(share, 1) if rule.kind == "smooth" else 1 + math.floor(share)
        factors.append(1 + rule.factor * math.log(grown))
    return q * q.new_tensor(factors).reshape(places.shape)[:, None, :, None]


def changed(v: Tensor, layer: Attention) -> Tensor:
    if layer.clip is not None:
        v = torch.where(v.abs() > layer.clip, layer.clip * v.sign(), v)
    if layer.values is not None and layer.values.eps is not None:
        v = v / (v.square().mean(-1, keepdim=True) + layer.values.eps).sqrt()
    return v if layer.values is None else v * layer.values.factor


def output(
    layer: Attention,
    x: Tensor,
    source: Tensor | None = None,
    *,
    mask: Mask | None = None,
    score_bias: ScoreBias | None = None,
    gate: Tensor | None = None,
    positions: Tensor | None = None,
    value_source: Tensor | None = None,
) -> Tensor:
    """(batch, queries, out_dim), as the sum of what each head contributes, and the bias."""
    options = {"mask": mask, "score_bias": score_bias, "positions": positions}
    options |= {"value_source": value_source}
    outputs = head_outputs(layer, x, source, **options)
    if gate is not None:
        gate = gate.expand(len(x), -1)
        outputs = torch.einsum("bhqd,bh->bhqd", outputs, gate)
    parts = layer.out_proj.weight.split(layer.value_dim, dim=1)
    out = sum(outputs[:, head] @ part.mT for head, part in enumerate(parts))
    assert isinstance(out, Tensor)
    return out if layer.out_proj.bias is None else out + layer.out_proj.bias


def applied(projection: nn.Linear, x: Tensor) -> Tensor:
    out = x @ projection.weight.mT
    return out if projection.bias is None else out + projection.bias


def placed(
    layer: Attention, x: Tensor, heads: int, norm: nn.Module | None, places: Tensor
) -> Tensor:
    spec = layer.qk_norm
    if spec is not None and spec.over == "width":
        x = normalised(x, spec, norm)
    x = torch.stack(x.chunk(heads, dim=-1), dim=1)
    if spec is not None and spec.over == "head" and spec.place == "before":
        x = normalised(x, spec, norm)
    if layer.clip is not None:
        x = torch.where(x.abs() > layer.clip, layer.clip * x.sign(), x)
    if layer.rotary is not None:
        x = rotated(x, layer.rotary, places)
    if spec is not None and spec.place == "after":
        x = normalised(x, spec, norm)
    return x


def normalised(x: Tensor, spec: QKNorm, norm: nn.Module | None) -> Tensor:
    assert norm is not None
    weight = norm.weight if spec.has_weight else x.new_ones(())
    weight = 1 + weight if spec.one_plus and spec.has_weight else weight
    if spec.kind == "rms":
        return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight
    return out if norm.bias is None else out + norm.bias


def rotated(x: Tensor, rotary: Rotary, places: Tensor) -> Tensor:
    """Pair by pair, as rotations of the plane."""
    width = rotary.rotated_width(x.shape[-1])
    reached = places.amax((0, 2))[:, None] + 1 if rotary.depends_on_length else None
    frequencies = rotary.frequencies(x.shape[-1], length=reached).to(x.dtype)
    axes = rotary.axes or (0,) * (width // 2)
    places = places.expand(max(axes) + 1, -1, -1) if len(places) == 1 else places
    out = list(x.unbind(-1))
    for pair in range(width // 2):
        half = width // 2 // rotary.parts
        i, j = pair + pair // half * half, pair + pair // half * half + half
        if rotary.pairing == "interleaved":
            i, j = 2 * pair, 2 * pair + 1
        turn = places[axes[pair]].to(x.dtype)[:, None] * frequencies[..., pair, None]
        turn = -turn if rotary.backwards else turn
        cos, sin = turn.cos(), turn.sin()
        out[i] = (x[..., i] * cos - x[..., j] * sin) * rotary.amplitude
        out[j] = (x[..., i] * sin + x[..., j] * cos) * rotary.amplitude
    return torch.stack(out, -1)

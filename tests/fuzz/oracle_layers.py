"""Both layers in NumPy float64, from the papers' formulas; imports NumPy and the oracle alone.

Parameters are arrays by their names in the layer's state_dict. Complex arrays are taken too, so
that `derivative` is exact.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.oracle import STEP, Array, Clause, Matrix, distances

Parameters = dict[str, Array]


def derivative(f: Callable[[Parameters], Array], at: Parameters, along: Parameters) -> Array:
    """Return the derivative of ``f`` at these arrays along a direction, by a complex step."""
    moved = {n: x + 1j * STEP * along[n] if n in along else x for n, x in at.items()}
    return f(moved).imag / STEP


def linear(p: Parameters, name: str, x: Array) -> Array:
    out = x @ p[f"{name}.weight"].T
    return out + p[f"{name}.bias"] if f"{name}.bias" in p else out


def split(x: Array, heads: int) -> Array:
    """(batch, length, heads * width) to (batch, heads, length, width)."""
    return np.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1)


def merged(x: Array) -> Array:
    return np.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


# ---- positions ---------------------------------------------------------------------------------


def frequencies(theta: float, width: int) -> Array:
    """Radians for each token of each pair (Su et al. 2021, section 3.2)."""
    return theta ** (-np.arange(0, width, 2) / width)


def frequencies_at(theta: float, width: int, rule: dict[str, Any], lengths: Array | None) -> Array:
    """Frequencies that change beyond ``original_length``, (batch, 1, pairs).

    A list of factors for long sequences (Ding et al. 2024, section 3.2), or a theta that grows.
    """
    lengths = np.zeros((1, 1)) if lengths is None else lengths
    most, plain = rule["original_length"], frequencies(theta, width)
    is_long = (lengths > most)[..., None]
    if "long_factors" in rule:
        factors = np.where(is_long, rule["long_factors"], rule["short_factors"])
        return plain / factors
    growth = rule["factor"] * np.maximum(lengths, most) / most - (rule["factor"] - 1)
    grown = theta * growth ** (width / (width - 2))
    return grown[..., None] ** (-np.arange(0, width, 2) / width)


def amplitude(rule: dict[str, Any]) -> float:
    """The factor of rotated vectors of a list of factors."""
    if "long_factors" not in rule:
        return 1.0
    return float(np.sqrt(1 + np.log(rule["factor"]) / np.log(rule["original_length"])))


def frequencies_of_plane(theta: float, width: int, order: str) -> Array:
    """Frequencies of rows, then of columns."""
    each = frequencies(theta, width)
    rows, columns = each[::2], each[1::2] if order == "alternating" else each[::2]
    return np.concatenate([rows, columns])


def _pairs(pairing: str, width: int) -> tuple[Array, Array]:
    """The first and the second channel of each pair."""
    channels = np.arange(width)
    if pairing == "interleaved":
        return channels[::2], channels[1::2]
    halves = channels.reshape(2 if pairing == "parts" else 1, 2, -1)
    return halves[:, 0].reshape(-1), halves[:, 1].reshape(-1)


def rotated(
    x: Array, turns: Array, pairing: str, places: Array | None = None, amplitude: float = 1.0
) -> Array:
    """Each pair of channels turned by its angle at its place; channels behind are left.

    ``places`` are those of each pair, (batch, length, pairs); tokens count without them.
    """
    angles = np.arange(x.shape[2])[:, None] * turns
    if places is not None:
        angles = (places * turns)[:, None]
    first, second = _pairs(pairing, 2 * turns.shape[-1])
    out = x.copy()
    x = x * amplitude
    out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    out[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
    return out


def slopes(heads: int, bias_max: float) -> Array:
    """ALiBi's slopes (Press et al. 2022): powers of two, and every other one between them."""
    below = 2 ** int(np.log2(heads))
    whole = 2 ** (-bias_max * np.arange(1, below + 1) / below)
    between = 2 ** (-bias_max * np.arange(1, 2 * below + 1, 2) / (2 * below))
    return np.concatenate([whole, between])[:heads]


def buckets(d: Array, count: int, most: int, both: bool) -> Array:
    """T5's bucket of each distance (Raffel et al. 2020, section 2.1), float32 as published."""
    half = count // 2 if both else count
    later = np.where(d > 0, half, 0) if both else 0
    far = np.abs(d) if both else np.maximum(-d, 0)
    near = half // 2
    over = np.maximum(far, near).astype(np.float32) / np.float32(near)
    steps = (np.log(over) / np.log(most / near)).astype(np.float32)
    shared = near + (steps * np.float32(half - near)).astype(int)
    return later + np.where(far < near, far, np.minimum(shared, half - 1))


def subtracted(p: Parameters, o: dict[str, Any], matrix: Matrix, v: Array) -> Array:
    """Differences of head p and head p + heads / 2 (Ye et al. 2024, section 2.1), in halves."""
    dots = [(p[f"lambda_q{n}"] * p[f"lambda_k{n}"]).sum() for n in "12"]
    factor = np.exp(dots[0]) - np.exp(dots[1]) + o["differential"]["init"]
    first, second = np.split(v, 2, 1)
    pairs = np.concatenate([first, second], -1)
    mixed = matrix.outputs(np.concatenate([pairs, pairs], 1))
    of_first, of_second = np.split(mixed, 2, 1)
    d = of_first - factor * of_second
    d = d / np.sqrt((d * d).mean(-1, keepdims=True) + o["differential"]["eps"])
    halves = np.split((1 - o["differential"]["init"]) * d, 2, -1)
    return np.stack(halves, 2).reshape(*mixed.shape[:3], -1)


def place_rows(d: Array, rule: dict[str, Any]) -> Array:
    """DeBERTa's row of each distance (He et al. 2021, section 3.1; its code, version 2)."""
    ahead, span, far = -d, rule["span"], rule["max_distance"]
    if far is not None:
        mid = span // 2
        over = np.maximum(np.abs(d), mid).astype(np.float32) / np.float32(mid)
        steps = np.log(over) / np.log(np.float32((far - 1) / mid)) * np.float32(mid - 1)
        shared = np.ceil(steps).astype(int) + mid
        ahead = np.where(np.abs(d) <= mid, ahead, np.sign(ahead) * shared)
    return np.clip(ahead + span, 0, 2 * span - 1)


def places_met(p: Parameters, o: dict[str, Any], q: Array, k: Array) -> Array:
    """DeBERTa's scaled terms, (batch, heads, queries, keys)."""
    rule, scale, table = o["places"], o.get("scale"), p["score_bias.rel_embeddings.weight"]
    if rule["eps"] is not None:
        norm = {"kind": "layer", "eps": rule["eps"], "one_plus": 0.0}
        table = normed(p, "score_bias.norm", table, norm)
    start = "" if rule["is_shared"] else "score_bias."
    rows = place_rows(distances(None, q.shape[2], k.shape[2]), rule)
    every, terms = np.repeat(k, q.shape[1] // k.shape[1], 1), 0
    if "c2p" in rule["terms"]:
        of_keys = split(linear(p, f"{start}k_proj", table[None]), k.shape[1])[0]
        of_keys = np.repeat(of_keys, q.shape[1] // k.shape[1], 0)
        terms = terms + np.einsum("bhid,hijd->bhij", q, of_keys[:, rows])
    if "p2c" in rule["terms"]:
        of_queries = split(linear(p, f"{start}q_proj", table[None]), q.shape[1])[0]
        terms = terms + np.einsum("bhjd,hijd->bhij", every, of_queries[:, rows])
    return terms * (q.shape[-1] ** -0.5 if scale is None else scale)


# ---- the native layer --------------------------------------------------------------------------


def normed(p: Parameters, name: str, x: Array, norm: dict[str, Any]) -> Array:
    weight = p[f"{name}.weight"] + norm["one_plus"] if f"{name}.weight" in p else 1.0
    if norm["kind"] == "layer":
        x = x - x.mean(-1, keepdims=True)
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm["eps"]) * weight
    return out + p.get(f"{name}.bias", 0.0)


def clipped(o: dict[str, Any], x: Array) -> Array:
    return x if o.get("clip") is None else np.minimum(np.maximum(x, -o["clip"]), o["clip"])


def warmed(o: dict[str, Any], q: Array, past: int) -> Array:
    """Queries times their temperature; ``past`` tokens stand before the first."""
    if "temperature" not in o:
        return q
    factor, length, first, kind = o["temperature"]
    places = past + np.arange(q.shape[2])
    if o.get("positions") is not None:
        places = o["positions"][0][:, None]
    share = (places + first) / length
    grown = np.maximum(share, 1) if kind == "smooth" else 1 + np.floor(share)
    return q * (1 + factor * np.log(grown))[..., None]


def changed(o: dict[str, Any], v: Array) -> Array:
    """Values after the clip, their norm and their factor."""
    v, (eps, factor) = clipped(o, v), o.get("values", (None, 1.0))
    if eps is not None:
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
    return v * factor


def normed_outputs(p: Parameters, o: dict[str, Any], outputs: Array) -> Array:
    norm = o.get("output_norm")
    if norm is None:
        return outputs
    if norm["over"] == "head":
        return normed(p, "o_norm", outputs, norm)
    x = merged(outputs)
    x = normed(p, "o_norm", x, norm) * (x != 0).any(-1, keepdims=True)
    return split(x, outputs.shape[1])


def placed(p: Parameters, o: dict[str, Any], x: Array, name: str, heads: int) -> Array:
    """Queries or keys of each head: normalised and rotated."""
    norm = o.get("norm")
    if norm and norm["over"] == "width":
        x = normed(p, name, x, norm)
    x = split(x, heads)
    if norm and norm["over"] == "head" and norm["place"] == "before":
        x = normed(p, name, x, norm)
    x = clipped(o, x)
    x = turned(o, x)
    return normed(p, name, x, norm) if norm and norm["place"] == "after" else x


def turned(o: dict[str, Any], x: Array) -> Array:
    if "turns" not in o:
        return x
    places = o.get("positions")
    if places is not None:
        axes = o["axes"] or (0,) * o["turns"].shape[-1]
        places = np.stack([places[axis] for axis in axes], -1)
    return rotated(x, o["turns"], o["pairing"], places, o.get("amplitude", 1.0))


def latent(p: Parameters, o: dict[str, Any], x: Array, name: str, *, normed: bool) -> Array:
    """A latent of each token (DeepSeek-AI 2024, section 2.1.2), RMS-normalised."""
    z = linear(p, f"{name}_proj", x)
    if normed:
        size = np.sqrt((z * z).mean(-1, keepdims=True) + o["eps"])
        z = z / size * p[f"{name}_norm.weight"]
    return z * np.sqrt(x.shape[-1] / z.shape[-1]) if o["scaled"] else z


def from_latents(p: Parameters, o: dict[str, Any], x: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values of each head; a key begins with the one that all heads share."""
    rule, heads = o["latent"], o["heads"]
    a = latent(p, rule, x, "q_latent", normed=True) if rule["query_rank"] else x
    c = latent(p, rule, x, "kv_latent", normed=rule["normed"])
    shared = split(linear(p, "shared_k_proj", x), 1)
    q, of_c = split(linear(p, "q_proj", a), heads), split(linear(p, "k_proj", c), heads)
    k = np.concatenate([np.broadcast_to(shared, (*of_c.shape[:3], shared.shape[-1])), of_c], -1)
    return turned(o, q), turned(o, k), split(linear(p, "v_proj", c), heads)


def attention(
    p: Parameters,
    o: dict[str, Any],
    clauses: list[Clause],
    parts: list[Clause],
) -> tuple[Matrix, Array, Array]:
    """The matrix, the head outputs and the output of `Attention`.

    Args:
        p: parameters by name, "x", and "source", "value_source" and "gate" where there are any.
        o: heads, kv_heads, window, scale, softcap, norm, turns, pairing, alibi, t5.
        clauses: of the call's mask.
        parts: of the call's score bias.
    """
    x, source = p["x"], p.get("source", p["x"])
    if "latent" in o:
        q, k, v = from_latents(p, o, x)
        q = warmed(o, q, 0)
    else:
        q = placed(p, o, linear(p, "q_proj", x), "q_norm", o["heads"])
        k = placed(p, o, linear(p, "k_proj", source), "k_norm", o["kv_heads"])
        values = linear(p, "v_proj", p.get("value_source", source))
        q, v = warmed(o, q, 0), changed(o, split(values, o["kv_heads"]))
    if o.get("window"):
        clauses = [*clauses, ("window", *o["window"], None)]
    if "alibi" in o:
        parts = [*parts, ("alibi", o["alibi"], None)]
    if "t5" in o:
        d = distances(None, x.shape[1], source.shape[1])
        table = p["score_bias.relative_attention_bias.weight"]
        parts = [*parts, ("dense", np.moveaxis(table[buckets(d, *o["t5"])], 2, 0)[None])]
    if "places" in o:
        parts = [*parts, ("dense", places_met(p, o, q, k))]
    matrix = Matrix(q, k, clauses, parts, o.get("scale"), o.get("softcap"), p.get("sink"))
    mixed = subtracted(p, o, matrix, v) if "differential" in o else matrix.outputs(v)
    outputs = normed_outputs(p, o, mixed)
    if "gate_proj.weight" in p:
        gates = split(linear(p, "gate_proj", x), o["heads"])
        is_softplus = o["output_gate"].endswith("softplus")
        opened = np.log1p(np.exp(gates)) if is_softplus else 1 / (1 + np.exp(-gates))
        outputs = outputs * opened
    gated = outputs
    if "gate" in p:
        gated = outputs * np.broadcast_to(p["gate"], outputs.shape[:2])[..., None, None]
    return matrix, outputs, linear(p, "out_proj", merged(gated))


# ---- torch's layer -----------------------------------------------------------------------------


def multihead(
    p: Parameters, heads: int, zero_slot: bool, clauses: list[Clause], parts: list[Clause]
) -> tuple[Array, Array]:
    """The output and the weights of torch's layer; batch first, masks without the slots."""
    width = p["query"].shape[-1]
    if "in_proj_weight" in p:
        weights = np.split(p["in_proj_weight"], 3)
    else:
        weights = [p[f"{x}_proj_weight"] for x in "qkv"]
    biases = np.split(p.get("in_proj_bias", np.zeros(3 * width)), 3)
    q, k, v = (
        split(p[name] @ w.T + b, heads)
        for name, w, b in zip(("query", "key", "value"), weights, biases, strict=True)
    )
    slots: list[tuple[Array | None, Array | None]] = []
    if "bias_k" in p:
        slots.append((p["bias_k"], p["bias_v"]))
    if zero_slot:
        slots.append((None, None))
    for of_k, of_v in slots:
        k, v = with_slot(k, of_k, heads), with_slot(v, of_v, heads)
    matrix = Matrix(q, k, clauses, parts)
    return linear(p, "out_proj", merged(matrix.outputs(v))), matrix.weights


def with_slot(x: Array, row: Array | None, heads: int) -> Array:
    """One key or value more: a learned row, or zeros."""
    slot = np.zeros((1, 1, heads * x.shape[-1])) if row is None else row
    slot = np.broadcast_to(split(slot, heads), (len(x), heads, 1, x.shape[-1]))
    return np.concatenate([x, slot], axis=2)

"""Attention in NumPy and float64, from neutral weights and the words of a port's ``SETTINGS``.

It is written from the formulas of the papers and shares no code with headwise, so that ports and
faults are judged apart from what they are used to test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any  # of float64; NumPy's operators on Any are Any
DEFAULTS: dict[str, Any] = {
    "num_kv_heads": None,
    "head_dim": None,
    "causal": False,
    "scale": None,
    "bias": "qkvo",
    "rotary": None,
    "window": None,
    "softcap": None,
    "sinks": False,
    "qk_norm": None,
    "alibi": None,
    "relative_bias": None,
    "source_dim": None,
    "output_gate": None,
}


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their defaults filled in.

    Raises:
        KeyError: a word that no formula knows.
    """
    if unknown := settings.keys() - DEFAULTS.keys() - {"embed_dim", "num_heads"}:
        raise KeyError(f"unknown settings: {sorted(unknown)}")
    whole = {**DEFAULTS, **settings}
    whole["num_kv_heads"] = whole["num_kv_heads"] or whole["num_heads"]
    whole["head_dim"] = whole["head_dim"] or whole["embed_dim"] // whole["num_heads"]
    if whole["scale"] is None:
        whole["scale"] = whole["head_dim"] ** -0.5
    return whole


def draw_weights(settings: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Return neutral weights: rows head after head, ``y = x @ w.T + b``."""
    s, rng = complete(settings), np.random.default_rng(seed)
    width, source = s["embed_dim"], s["source_dim"] or s["embed_dim"]
    inner, kv = s["num_heads"] * s["head_dim"], s["num_kv_heads"] * s["head_dim"]
    shapes = {"wq": (inner, width), "wk": (kv, source), "wv": (kv, source), "wo": (width, inner)}
    weights = {name: rng.normal(size=shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for role in s["bias"]:
        weights[f"b{role}"] = rng.normal(size=len(weights[f"w{role}"])) * 0.3
    if norm := s["qk_norm"]:
        sizes = (
            {"q": inner, "k": kv} if norm["over"] == "all" else dict.fromkeys("qk", s["head_dim"])
        )
        for role, size in sizes.items():
            weights[f"{role}_norm"] = 1 - norm.get("offset", 0) + 0.3 * rng.normal(size=size)
            if norm["kind"] == "layer":
                weights[f"{role}_norm_bias"] = 0.2 * rng.normal(size=size)
    if s["sinks"]:
        weights["sinks"] = rng.normal(size=s["num_heads"])
    if relative := s["relative_bias"]:
        weights["relative_bias"] = rng.normal(size=(relative["buckets"], s["num_heads"]))
    if gate := s["output_gate"]:
        rows = s["num_heads"] if gate == "head" else inner
        weights["w_gate"] = rng.normal(size=(rows, width)) * width**-0.5
    return weights


def attend(
    x: Array,
    weights: Mapping[str, Array],
    settings: Mapping[str, Any],
    *,
    mask: NDArray[np.bool_] | None = None,
    source: Array | None = None,
) -> Array:
    """Return the output of (batch, queries, embed_dim).

    Args:
        x: tokens, (batch, queries, embed_dim).
        weights: neutral weights.
        settings: the words of a port.
        mask: True attends; it broadcasts to (batch, heads, queries, keys).
        source: tokens to attend to, (batch, keys, source_dim); None for ``x``.
    """
    s, keys_of = complete(settings), x if source is None else source

    def heads(role: str, tokens: Array, count: int) -> Array:
        rows = tokens @ weights[f"w{role}"].T + weights.get(f"b{role}", 0.0)
        norm = s["qk_norm"]
        if norm and role in "qk" and norm["over"] == "all":
            rows = _norm(rows, role, weights, norm)
        split = rows.reshape(*tokens.shape[:2], count, s["head_dim"]).transpose(0, 2, 1, 3)
        if norm and role in "qk" and norm["over"] == "head":
            split = _norm(split, role, weights, norm)
        return _rotate(split, s) if s["rotary"] and role in "qk" else split

    q = heads("q", x, s["num_heads"])
    k, v = (
        np.repeat(heads(role, keys_of, s["num_kv_heads"]), s["num_heads"] // s["num_kv_heads"], 1)
        for role in "kv"
    )
    scores = q @ k.swapaxes(-1, -2) * s["scale"]
    if s["softcap"]:
        scores = s["softcap"] * np.tanh(scores / s["softcap"])
    scores = scores + _position_bias(x.shape[1], keys_of.shape[1], weights, s)
    seen = _seen(x.shape[1], keys_of.shape[1], s)
    scores = np.where(seen if mask is None else seen & mask, scores, -np.inf)
    mixed = _softmax(scores, weights.get("sinks")) @ v
    if s["output_gate"]:
        gate = 1 / (1 + np.exp(-(x @ weights["w_gate"].T)))
        mixed = mixed * gate.reshape(*x.shape[:2], s["num_heads"], -1).transpose(0, 2, 1, 3)
    merged = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return merged @ weights["wo"].T + weights.get("bo", 0.0)


def _norm(x: Array, role: str, weights: Mapping[str, Array], norm: Mapping[str, Any]) -> Array:
    if norm["kind"] == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.get("eps", 1e-6))
    gain = weights[f"{role}_norm"] + norm.get("offset", 0)
    return x * gain + weights.get(f"{role}_norm_bias", 0.0)


def _rotate(x: Array, s: Mapping[str, Any]) -> Array:
    rotary = s["rotary"]
    width = rotary.get("width") or s["head_dim"]
    frequencies = _scale_frequencies(
        rotary["theta"] ** (-np.arange(0, width, 2) / width), rotary.get("scaling")
    )
    angles = np.arange(x.shape[2])[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    turned, rest = x[..., :width], x[..., width:]
    if rotary["pairing"] == "halves":
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
    a, b = turned[..., ::2], turned[..., 1::2]
    pairs = np.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return np.concatenate([pairs.reshape(turned.shape), rest], -1)


def _scale_frequencies(frequencies: Array, scaling: Mapping[str, Any] | None) -> Array:
    if scaling is None:
        return frequencies
    factor, kind = scaling["factor"], scaling["rope_type"]
    if kind == "linear":
        return frequencies / factor
    assert kind == "llama3", kind
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _position_bias(
    queries: int, keys: int, weights: Mapping[str, Array], s: Mapping[str, Any]
) -> Array:
    distance = np.arange(keys) - np.arange(queries)[:, None]  # of a key from its query
    if s["alibi"]:
        slopes = np.array(_slopes(s["num_heads"]))
        return -slopes[:, None, None] * np.abs(distance)
    if s["relative_bias"]:
        table = weights["relative_bias"][_buckets(distance, **s["relative_bias"])]
        return table.transpose(2, 0, 1)
    return np.zeros(())


def _slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes, also where the number of heads is no power of two."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return first + between


def _buckets(
    distance: NDArray[np.int_], buckets: int, max_distance: int, *, bidirectional: bool
) -> NDArray[np.int_]:
    """Return T5's buckets of distances."""
    start = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        start = (distance > 0) * buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    share = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = np.minimum(exact + (share * (buckets - exact)).astype(int), buckets - 1)
    return start + np.where(distance < exact, distance, far)


def _seen(queries: int, keys: int, s: Mapping[str, Any]) -> NDArray[np.bool_]:
    back = np.arange(queries)[:, None] - np.arange(keys)
    seen = back >= 0 if s["causal"] else np.ones_like(back, bool)
    return seen if s["window"] is None else seen & (np.abs(back) < s["window"])


def _softmax(scores: Array, sinks: Array | None) -> Array:
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
    powers = np.exp(scores - largest)
    total = powers.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - largest)
    return powers / total

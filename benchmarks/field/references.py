"""The layer of headwise that a correct port equals, from `SETTINGS` and neutral weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from benchmarks.field import formulas
from headwise import Attention, Rotary
from headwise.function import LinearScaling, Llama3Scaling
from headwise.function.spec import Pairing
from headwise.layers import Alibi, QKNorm, T5Bias

PAIRINGS: dict[str, Pairing] = {"halves": "half-split", "interleaved": "interleaved"}
OVER: dict[str, Literal["head", "width"]] = {"head": "head", "all": "width"}


def layer(settings: Mapping[str, Any], weights: Mapping[str, formulas.Array]) -> Attention:
    """Return the layer, in float32."""
    s = formulas.complete(settings)
    past = None if s["window"] is None else s["window"] - 1
    following = 0 if s["causal"] else past
    made = Attention(
        s["embed_dim"],
        s["num_heads"],
        num_kv_heads=s["num_kv_heads"],
        head_dim=s["head_dim"],
        source_dim=s["source_dim"],
        rotary=_rotary(s["rotary"]),
        score_bias=_score_bias(s),
        qk_norm=_qk_norm(s["qk_norm"]),
        window=None if past is None and following is None else (past, following),
        scale=s["scale"],
        softcap=s["softcap"],
        sink=s["sinks"],
        output_gate=s["output_gate"],
        gate_bias=False,
        q_bias="q" in s["bias"],
        k_bias="k" in s["bias"],
        v_bias="v" in s["bias"],
        out_bias="o" in s["bias"],
    )
    tensors = {_name(name): torch.from_numpy(w).float() for name, w in weights.items()}
    made.load_state_dict(tensors, strict=True)
    return made


def _name(name: str) -> str:
    role = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    if len(name) == 2:
        return f"{role[name[1]]}.{'weight' if name[0] == 'w' else 'bias'}"
    named = {
        "sinks": "sink",
        "relative_bias": "score_bias.relative_attention_bias.weight",
        "w_gate": "gate_proj.weight",
    }
    if name in named:
        return named[name]
    return f"{name[:6]}.{'bias' if name.endswith('_bias') else 'weight'}"


def _rotary(rotary: Mapping[str, Any] | None) -> Rotary | None:
    if rotary is None:
        return None
    scaling = rotary.get("scaling")
    rule: LinearScaling | Llama3Scaling | None = None
    if scaling and scaling["rope_type"] == "linear":
        rule = LinearScaling(scaling["factor"])
    elif scaling:
        rule = Llama3Scaling(
            scaling["factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )
    return Rotary(rotary["theta"], rotary.get("width"), PAIRINGS[rotary["pairing"]], rule)


def _score_bias(s: Mapping[str, Any]) -> Alibi | T5Bias | None:
    if s["alibi"]:
        return Alibi()
    return T5Bias(**s["relative_bias"]) if s["relative_bias"] else None


def _qk_norm(norm: Mapping[str, Any] | None) -> QKNorm | None:
    if norm is None:
        return None
    over = OVER[norm["over"]]
    one_plus = bool(norm.get("offset", 0))
    return QKNorm(norm["kind"], over, one_plus=one_plus, eps=norm.get("eps", 1e-6))

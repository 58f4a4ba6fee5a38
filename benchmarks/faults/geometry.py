"""Sizes and settings of a reference attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pairing = Literal["half-split", "interleaved"]
Scaling = Literal["none", "linear", "ntk", "llama3", "yarn"]
NormKind = Literal["rms", "layer", "l2"]
Place = Literal["before rotary", "after rotary"]


@dataclass(frozen=True)
class RotarySettings:
    """Rotary embedding of the first ``width`` channels of each head."""

    pairing: Pairing
    width: int
    theta: float = 10_000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_length: int = 32  # of "llama3" and "yarn"
    attention_factor: float = 1.0  # multiplies the rotated channels of q and of k
    exponent_width: int | None = None  # frequency i is theta ** (-2i / exponent_width)


@dataclass(frozen=True)
class NormSettings:
    """Norm of queries and keys, over the channels of a head or over all heads together."""

    kind: NormKind
    place: Place = "before rotary"
    over: Literal["head", "all heads"] = "head"
    weight_offset: float = 0.0  # the factor is weight_offset + weight
    eps: float = 1e-6


@dataclass(frozen=True)
class Geometry:
    """Sizes and settings of a layer; the weights hold everything else."""

    name: str
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    source_dim: int | None = None  # of cross attention
    biases: bool = False  # of q, k and v
    out_bias: bool = False
    rotary: RotarySettings | None = None
    alibi: bool = False
    causal: bool = False
    window: int | None = None  # number of keys, the query's own included
    scale: float | None = None  # head_dim ** -0.5 if None
    softcap: float | None = None
    sink: bool = False
    qk_norm: NormSettings | None = None

    @property
    def group(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_dim(self) -> int:
        """Width of the input of k and v."""
        return self.embed_dim if self.source_dim is None else self.source_dim

    @property
    def cross(self) -> bool:
        """True if keys come from another sequence."""
        return self.source_dim is not None

    @property
    def plain_scale(self) -> float:
        """Factor of the products of q and k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

"""Attention layer written from the formulas alone, in stages that a fault can replace.

This module imports nothing of headwise. Tensors are (batch, length, heads, channels); scores and
weights are (batch, heads, queries, keys).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.geometry import Geometry, NormSettings
from benchmarks.faults.rotary_math import frequencies, pairs, turn

# In the order in which a layer computes them. "after norm" enters the rotary embedding, and
# "after rotary" enters the scores. Scores include softcap, bias and mask.
STAGES = (
    "q",
    "k",
    "v",
    "q after norm",
    "k after norm",
    "q after rotary",
    "k after rotary",
    "scores",
    "weights",
    "head outputs",
    "output",
)
Stages = dict[str, Tensor]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Call:
    """Arguments of a call: positions are (batch, queries) and (batch, keys)."""

    x: Tensor
    source: Tensor
    mask: Tensor | None  # broadcasts to the scores; True where a key may be seen
    positions: Tensor
    key_positions: Tensor


class Cache:
    """Keys after rotary, values and positions of earlier calls."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.positions: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of keys."""
        return 0 if self.k is None else self.k.shape[1]

    def extend(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append keys and values, and return all of them with their positions."""
        if self.k is not None and self.v is not None and self.positions is not None:
            k, v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
            positions = torch.cat([self.positions, positions], 1)
        self.k, self.v, self.positions = k, v, positions
        return k, v, positions


class ReferenceLayer(nn.Module):
    """Multi-head attention with explicit weights wq, wk, wv, wo and their biases bq, bk, bv, bo.

    Further weights are q_norm and k_norm, the logits of the sink, and the slopes of ALiBi, one
    a head. A stage runs through `run`, so that `with_stages` can replace it.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: Weights,
        replaced: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.names = tuple(weights)
        self.replaced = dict(replaced or {})
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def weight(self, name: str) -> Tensor:
        """Return the weight of this name."""
        tensor: Tensor = self.get_parameter(name)
        return tensor

    def bias_of(self, name: str) -> Tensor | None:
        """Return the bias of this name if the layer has it."""
        return self.weight(name) if name in self.names else None

    def all_weights(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return {name: self.weight(name).detach() for name in self.names}

    def with_weights(self, **changed: Tensor | None) -> ReferenceLayer:
        """Return a layer with some weights changed; None removes a weight."""
        weights = {
            name: tensor
            for name, tensor in (self.all_weights() | changed).items()
            if tensor is not None
        }
        return ReferenceLayer(self.geometry, weights, self.replaced)

    def with_geometry(self, **changes: Any) -> ReferenceLayer:
        """Return a layer of the same weights with other settings."""
        return ReferenceLayer(replace(self.geometry, **changes), self.all_weights(), self.replaced)

    def with_stages(self, **replaced: Callable[..., Any]) -> ReferenceLayer:
        """Return a layer with some stages replaced by functions of the layer and the arguments.

        The function may call the layer's own method of that name.
        """
        return ReferenceLayer(self.geometry, self.all_weights(), self.replaced | replaced)

    def run(self, stage: str, *args: Any) -> Any:
        """Compute a stage, by the function that replaces it or by the method of its name."""
        if stage in self.replaced:
            return self.replaced[stage](self, *args)
        return getattr(self, stage)(*args)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the output, (batch, queries, embed_dim)."""
        return self.stages(x, source, mask, positions, cache)["output"]

    def stages(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Stages:
        """Return every stage by its name in `STAGES`."""
        call = self.run("prepare", x, source, mask, positions, cache)
        q, k, v = self.run("project", call)
        stages = {"q": q, "k": k, "v": v}
        q, k = self.run("norm", q, k)
        stages |= {"q after norm": q, "k after norm": k}
        q, k = self.run("rotate", q, k, call)
        stages |= {"q after rotary": q, "k after rotary": k}
        if cache is not None:
            k, v, key_positions = self.run("extend", cache, k, v, call)
            call = replace(call, key_positions=key_positions)
        scores = self.run("scores", q, k, call)
        weights = self.run("weights", scores, call)
        heads = self.run("merge", weights, v)
        output = self.run("output", heads, call)
        return stages | {
            "scores": scores,
            "weights": weights,
            "head outputs": heads,
            "output": output,
        }

    def prepare(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
    ) -> Call:
        """Return the arguments with the positions that the caller left out."""
        source = x if source is None else source
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + x.shape[1]).expand(x.shape[:2])
        keys = positions if source is x else torch.arange(source.shape[1])
        return Call(x, source, mask, positions, keys.expand(source.shape[:2]))

    def project(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, split into heads."""
        g = self.geometry
        q = self.run("linear", "q", call.x)
        k, v = self.run("linear", "k", call.source), self.run("linear", "v", call.source)
        return (
            self.run("split", q, g.num_heads),
            self.run("split", k, g.num_kv_heads),
            self.run("split", v, g.num_kv_heads),
        )

    def linear(self, role: str, x: Tensor) -> Tensor:
        """Return the projection of the role "q", "k", "v" or "o"."""
        return F.linear(x, self.weight(f"w{role}"), self.bias_of(f"b{role}"))

    def split(self, rows: Tensor, heads: int) -> Tensor:
        """Split the channels into heads."""
        return rows.reshape(*rows.shape[:-1], heads, -1)

    def norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k after a norm that comes before the rotary embedding."""
        settings = self.geometry.qk_norm
        if settings is None or settings.place != "before rotary":
            return q, k
        return self.run("normed", q, "q_norm"), self.run("normed", k, "k_norm")

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Return x after the norm whose weight has this name."""
        settings = self.geometry.qk_norm
        assert settings is not None
        flat = x if settings.over == "head" else x.flatten(-2)
        result = normalise(flat, settings) * (settings.weight_offset + self.weight(name))
        normed: Tensor = result.reshape(x.shape)
        return normed

    def rotate(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return q and k after the rotary embedding, and after a norm that follows it."""
        q = self.run("turned", q, call.positions, "q")
        k = self.run("turned", k, call.key_positions, "k")
        settings = self.geometry.qk_norm
        if settings is None or settings.place != "after rotary":
            return q, k
        return self.run("normed", q, "q_norm"), self.run("normed", k, "k_norm")

    def turned(self, x: Tensor, positions: Tensor, role: str) -> Tensor:
        """Return x after the rotary embedding; faults read the role, "q" or "k"."""
        rotary = self.geometry.rotary
        if rotary is None:
            return x
        angles = positions[..., None, None].double() * frequencies(rotary)
        return turn(x, angles, pairs(rotary), rotary.attention_factor)

    def extend(
        self, cache: Cache, k: Tensor, v: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put new keys into the cache, and return all keys, values and key positions."""
        return cache.extend(k, v, call.key_positions)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return the logits of the softmax, -inf where a key is hidden."""
        scores = self.run("products", q, k) * self.geometry.plain_scale
        cap = self.geometry.softcap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        masked: Tensor = self.run("masked", self.run("biased", scores, call), call)
        return masked

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the products of queries and keys."""
        return torch.einsum("bqhc,bkhc->bhqk", q, self.run("repeated", k))

    def repeated(self, x: Tensor) -> Tensor:
        """Return keys or values for each query head."""
        return x.repeat_interleave(self.geometry.group, dim=2)

    def biased(self, scores: Tensor, call: Call) -> Tensor:
        """Return the scores with the bias by distance."""
        if not self.geometry.alibi:
            return scores
        distance = (call.positions[:, :, None] - call.key_positions[:, None]).abs()
        return scores - self.weight("slopes")[:, None, None] * distance[:, None].to(scores.dtype)

    def masked(self, scores: Tensor, call: Call) -> Tensor:
        """Return the scores with -inf where a key is hidden."""
        return scores.masked_fill(~self.run("visible", scores, call), float("-inf"))

    def visible(self, scores: Tensor, call: Call) -> Tensor:
        """Return True where the causal rule, the window and the mask let a query see a key."""
        g = self.geometry
        ahead = (call.key_positions[:, None] - call.positions[:, :, None])[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if g.causal:
            seen = seen & (ahead <= 0)
        if g.window is not None:
            seen = seen & (ahead.abs() < g.window)
        return seen if call.mask is None else seen & call.mask

    def weights(self, scores: Tensor, call: Call) -> Tensor:
        """Return the softmax over keys; rows without keys are zero."""
        if self.geometry.sink:
            sink = self.weight("sink")[None, :, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return scores.softmax(-1).nan_to_num(0.0)

    def merge(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return the weighted sums of values, (batch, queries, heads, value_dim)."""
        return torch.einsum("bhqk,bkhc->bqhc", weights, self.run("repeated", v))

    def output(self, heads: Tensor, call: Call) -> Tensor:
        """Return the output projection of the joined heads."""
        joined: Tensor = self.run("joined", heads)
        result: Tensor = self.run("linear", "o", joined)
        return result

    def joined(self, heads: Tensor) -> Tensor:
        """Return the channels of all heads in one axis."""
        return heads.flatten(-2)


def normalise(x: Tensor, settings: NormSettings) -> Tensor:
    """Return x divided by its size over the last axis, without a weight."""
    if settings.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=settings.eps)
    if settings.kind == "l2":
        return x * (x.square().sum(-1, keepdim=True) + settings.eps).rsqrt()
    return x * (x.square().mean(-1, keepdim=True) + settings.eps).rsqrt()

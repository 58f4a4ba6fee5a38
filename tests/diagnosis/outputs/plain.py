"""Attention as people write it: a function of weights, in torch or NumPy, apart from headwise."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise import Attention, Rotary
from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.layers import NativeSubject

State = dict[str, Tensor]
THETA = 100.0
# No two axes have the same length; heads * value_dim is more than the width in `WIDE`.
MANY: dict[str, Any] = {"embed_dim": 30, "num_heads": 5, "head_dim": 6}
GROUPED: dict[str, Any] = {
    "embed_dim": 26,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "value_dim": 3,
    "rotary": Rotary(theta=THETA),
}
WIDE: dict[str, Any] = {"embed_dim": 26, "num_heads": 4, "head_dim": 6, "value_dim": 9}


def make(seed: int = 0, **options: Any) -> tuple[Attention, State]:
    """Return a layer with weights of usual size, and its weights by short names."""
    torch.manual_seed(seed)
    layer = Attention(options.pop("embed_dim"), options.pop("num_heads"), **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            size = 0.3 if name.endswith("bias") else parameter.shape[1] ** -0.5
            parameter.copy_(size * torch.randn(parameter.shape))
    short = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
    state = {
        f"{name.split('.')[1][0]}{short[name.split('.')[0]]}": x.detach().clone()
        for name, x in layer.state_dict().items()
    }
    return layer, state


def port(
    state: Mapping[str, Tensor], layer: Attention, *, causal: bool = False, is_array: bool = False
) -> Callable[[Any], Any]:
    """Return attention of these weights, written by hand; in float32, or in NumPy."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads

    def run(x: Tensor) -> Tensor:
        given = {name: w.to(x.dtype) for name, w in state.items()} if is_array else state

        def split(role: str, count: int) -> Tensor:
            rows = x @ given[f"w{role}"].mT
            rows = rows + given[f"b{role}"] if f"b{role}" in given else rows
            return rows.unflatten(-1, (count, -1)).transpose(1, 2)

        q, k, v = split("q", heads), split("k", kv_heads), split("v", kv_heads)
        if layer.rotary is not None:
            q, k = turn(q), turn(k)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        output = mixed @ given["wo"].mT
        return output + given["bo"] if "bo" in given else output

    if not is_array:
        return run
    return lambda x: np.asarray(run(torch.from_numpy(np.asarray(x))))


def turn(x: Tensor) -> Tensor:
    """Return channels i and i + half turned by position * theta ** (-i / half)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * THETA ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def model_and_runs(layer: Attention, function: Callable[[Any], Any]) -> tuple[AttentionModel, Runs]:
    """Return the layer as data, and the runs of a function of tensors."""
    model = NativeSubject(layer).model
    assert model is not None
    return model, BlackBox(function).runs

"""The drop-in beside torch's own layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.case import ONE_TOKEN, SHAPES, Case, Make, Shape, step
from headwise import MultiheadAttention

LONG = (2, 2048, 512, 8)
MEDIANS = {"drop-in, inference, batch first": 0.62, "drop-in, training, batch first": 0.71}


def _case(
    group: str,
    shape: Shape,
    *,
    batch_first: bool,
    training: bool,
    need_weights: bool,
    limit: float | None,
) -> Case:
    batch, length, embed_dim, heads = shape
    peer = nn.MultiheadAttention(embed_dim, heads, batch_first=batch_first)
    ours = MultiheadAttention(embed_dim, heads, batch_first=batch_first)
    ours.load_state_dict(peer.state_dict())
    x = torch.randn(batch, length, embed_dim)
    x = x if batch_first else x.transpose(0, 1).contiguous()

    def output(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
        result: Tensor = layer(x, x, x, need_weights=need_weights)[0]
        return result

    ours_step, peer_step = (
        step(layer, partial(output, layer), x, training=training) for layer in (ours, peer)
    )
    return Case(group, str(shape), ours_step, {"torch": peer_step}, limit)


def _makers() -> list[Make]:
    makers: list[Make] = []
    for batch_first in (True, False):
        order = "batch first" if batch_first else "length first"
        for training, limit in ((False, 0.97), (True, 1.0)):
            group = f"drop-in, {'training' if training else 'inference'}, {order}"
            makers += [
                partial(
                    _case,
                    group,
                    shape,
                    batch_first=batch_first,
                    training=training,
                    need_weights=False,
                    # The limits are for torch's layer in the order the shapes are written in.
                    limit=limit if batch_first else None,
                )
                for shape in SHAPES
            ]
    for training in (False, True):
        mode = "training" if training else "inference"
        options = {"batch_first": True, "training": training}
        group = f"drop-in, need_weights, {mode}"
        makers.append(partial(_case, group, LONG, **options, need_weights=True, limit=0.65))
        for need_weights in (False, True):
            group = f"drop-in, one token{', need_weights' if need_weights else ''}, {mode}"
            options["need_weights"] = need_weights
            limit = 1.05 if need_weights else 1.0
            makers.append(partial(_case, group, ONE_TOKEN, **options, limit=limit))
    return makers


MAKERS = _makers()

"""Models whose head importance is known, in sizes that do not coincide."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise import Attention, Mask

BATCH, LENGTH, EMBED, HEADS, VALUE_DIM = 4, 8, 10, 6, 3
REAL = (8, 5, 2, 1)  # 16 real tokens: a mean over them is exact


class OwnToken(nn.Module):
    """Two layers whose heads attend to their own token alone, in small whole numbers.

    Every weight is 1, so that a head's output is its value and the model is linear in all of them:
    float32 holds each number exactly.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = {"value_dim": VALUE_DIM, "head_dim": 5, "window": (0, 0)}
        self.layers = nn.ModuleList(Attention(EMBED, HEADS, **sizes) for _ in range(2))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        for layer in self.layers:
            for projection in (layer.v_proj, layer.out_proj):
                projection.weight.data = torch.randint(-2, 3, projection.weight.shape).float()
                projection.bias.data = torch.randint(-2, 3, projection.bias.shape).float()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = Mask() if lengths is None else Mask.lengths(keys=lengths, queries=lengths)
        for layer in self.layers:
            x = x + layer(x, mask=mask)
        return x

    def parts(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(heads, value_dim, embed_dim), (heads, value_dim) and (heads, embed_dim, value_dim)."""
        own = self.layers[layer]
        wv = own.v_proj.weight.detach().unflatten(0, (HEADS, VALUE_DIM))
        bv = own.v_proj.bias.detach().unflatten(0, (HEADS, VALUE_DIM))
        wo = own.out_proj.weight.detach().unflatten(1, (HEADS, VALUE_DIM)).transpose(0, 1)
        return wv, bv, wo

    def by_hand(self, x: Tensor, upstream: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, outputs and dL/doutputs (batch, heads, queries, value_dim), no padding."""
        states, outputs = [x], []
        for layer in range(2):
            wv, bv, wo = self.parts(layer)
            outputs.append(torch.einsum("bqe,hve->bhqv", states[-1], wv) + bv[None, :, None])
            bias = self.layers[layer].out_proj.bias.detach()
            states.append(states[-1] + torch.einsum("bhqv,hev->bqe", outputs[-1], wo) + bias)
        found = []
        for layer in (1, 0):
            wv, _, wo = self.parts(layer)
            gradient = torch.einsum("bqe,hev->bhqv", upstream, wo)
            found.append((outputs[layer], gradient))
            upstream = upstream + torch.einsum("bhqv,hve->bqe", gradient, wv)
        return found[::-1]


class Mixing(nn.Module):
    """Two causal layers with a network between, and a tanh at the end."""

    def __init__(self, *, num_kv_heads: int = 2) -> None:
        super().__init__()
        sizes = {"value_dim": VALUE_DIM, "head_dim": 5, "num_kv_heads": num_kv_heads}
        self.first = Attention(EMBED, HEADS, **sizes)
        self.network = nn.Linear(EMBED, EMBED)
        self.second = Attention(EMBED, HEADS, **sizes)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = Mask.causal(align="top-left")
        if lengths is not None:
            mask &= Mask.lengths(keys=lengths, queries=lengths)
        x = x + self.first(x, mask=mask)
        x = x + torch.tanh(self.network(x))
        return torch.tanh(x + self.second(x, mask=mask))


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float()


def squares(output: Tensor, given: object) -> Tensor:
    """Of each sequence, the sum of squares of its real tokens' outputs."""
    each = output.square().sum(-1)
    if isinstance(given, dict) and given.get("lengths") is not None:
        place = torch.arange(output.shape[1])
        each = each * (place < given["lengths"][:, None])
    return each.sum(-1)


def linear(upstream: Tensor) -> Any:
    """A loss whose gradient is ``upstream``."""
    return lambda output, given: (output * upstream).sum((1, 2))

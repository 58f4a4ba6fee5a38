"""Random projections, and classical mistakes written with reshapes alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.function.weights import State
from headwise.identify.moves.maps import join_rows
from headwise.identify.moves.move import MoveReport

GEOMETRIES = {  # embed_dim, heads, kv_heads, head_dim
    "mha": (96, 6, 6, 16),
    "gqa-of-4": (80, 8, 2, 12),
    "square": (64, 4, 4, 16),
    "gqa-of-2": (112, 6, 3, 24),
}


def projections(geometry: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    columns, heads, kv_heads, head_dim = GEOMETRIES[geometry]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    counts = {"q": heads, "k": kv_heads, "v": kv_heads, "o": heads}
    return {
        **{f"w{role}": draw(count, head_dim, columns) for role, count in counts.items()},
        **{f"b{role}": draw(count, head_dim) for role, count in counts.items() if role != "o"},
    }


def edited(rows: State, edit: Callable[[Tensor], Tensor], *roles: str) -> State:
    """Rows of (heads, channels, columns) after an edit, of these roles; so are the biases."""
    made = dict(rows)
    for role in roles:
        made[f"w{role}"] = edit(rows[f"w{role}"]).reshape(rows[f"w{role}"].shape)
        if (bias := rows.get(f"b{role}")) is not None:
            made[f"b{role}"] = edit(bias[..., None]).reshape(bias.shape)
    return made


def refused(rows: State, edit: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> State:
    """Rows after q, k and v are one matrix, [q; k; v], and an edit makes three of it."""
    made = dict(rows)
    fused = torch.cat([join_rows(rows, role) for role in "qkv"])
    bias = torch.cat([rows[f"b{role}"].flatten() for role in "qkv"])[:, None]
    for role, weight, vector in zip("qkv", edit(fused), edit(bias), strict=True):
        made[f"w{role}"] = weight.reshape(rows[f"w{role}"].shape)
        made[f"b{role}"] = vector.reshape(rows[f"b{role}"].shape)
    return made


def without_biases(rows: State) -> State:
    return {name: x for name, x in rows.items() if name[0] == "w"}


def by_channel(x: Tensor) -> Tensor:
    """Rows stored (head_dim, heads)."""
    return x.transpose(0, 1)


def pairs(x: Tensor, heads: int | None = None) -> Tensor:
    """Half-split pairs (i, i + d/2) as interleaved ones (2i, 2i + 1)."""
    flat = x.reshape(heads or x.shape[0], 2, -1, x.shape[2])
    return flat.transpose(1, 2)


def halves(x: Tensor, heads: int | None = None) -> Tensor:
    """Interleaved pairs as half-split ones, as Hugging Face's permute does it."""
    flat = x.reshape(heads or x.shape[0], -1, 2, x.shape[2])
    return flat.transpose(1, 2)


def assert_same_rows(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(x, b[name]) for name, x in a.items())


def is_exact(report: MoveReport) -> bool:
    """Whether every role is explained to the last bit."""
    return not report.unexplained and not any(report.residual.values())

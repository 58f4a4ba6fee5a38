"""Random projections, and classical mistakes written with reshapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.diagnosis.moves.maps import Rows
from headwise.diagnosis.moves.move import MoveReport

GEOMETRIES = {  # embed_dim, heads, kv_heads, head_dim
    "mha": (96, 6, 6, 16),
    "gqa-of-4": (80, 8, 2, 12),
    "square": (64, 4, 4, 16),
    "gqa-of-2": (112, 6, 3, 24),
}


def projections(geometry: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Rows:
    columns, heads, kv_heads, head_dim = GEOMETRIES[geometry]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    counts = {"q": heads, "k": kv_heads, "v": kv_heads, "o": heads}
    return Rows(
        {role: draw(count, head_dim, columns) for role, count in counts.items()},
        {role: draw(count, head_dim) for role, count in counts.items() if role != "o"},
    )


def edited(rows: Rows, edit: Callable[[Tensor], Tensor], *roles: str) -> Rows:
    """Rows of (heads, channels, columns) after an edit, of these roles; so are the biases."""
    matrices, biases = dict(rows.matrices), dict(rows.biases)
    for role in roles:
        matrices[role] = edit(matrices[role]).reshape(matrices[role].shape)
        if role in biases:
            biases[role] = edit(biases[role][..., None]).reshape(biases[role].shape)
    return Rows(matrices, biases)


def refused(rows: Rows, edit: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> Rows:
    """Rows after q, k and v are one matrix, [q; k; v], and an edit makes three of it."""
    matrices, biases = dict(rows.matrices), dict(rows.biases)
    fused = torch.cat([rows.matrix_of_role(role) for role in "qkv"])
    bias = torch.cat([rows.biases[role].flatten() for role in "qkv"])[:, None]
    for role, weight, vector in zip("qkv", edit(fused), edit(bias), strict=True):
        matrices[role] = weight.reshape(matrices[role].shape)
        biases[role] = vector.reshape(biases[role].shape)
    return Rows(matrices, biases)


def without_biases(rows: Rows) -> Rows:
    return replace(rows, biases={})


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


def assert_same_rows(a: Rows, b: Rows) -> None:
    assert all(torch.equal(a.matrices[role], b.matrices[role]) for role in a.roles)
    assert a.biases.keys() == b.biases.keys()
    assert all(torch.equal(a.biases[role], b.biases[role]) for role in a.biases)


def is_exact(report: MoveReport) -> bool:
    """Whether every role is explained to the last bit."""
    return not report.unexplained and not any(report.residual.values())

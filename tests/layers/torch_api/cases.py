"""Layers and calls for the drop-in tests: torch's layer and ours with the same parameters."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise import MultiheadAttention

BATCH, HEADS, QUERIES, KEYS, EMBED = 3, 6, 24, 29, 60


@dataclass(frozen=True)
class Case:
    """How a layer is built and called; sizes in which no two axes coincide."""

    name: str
    layer: dict[str, Any] = field(default_factory=dict)
    attn_mask: str = "none"
    padding: str = "none"
    call: dict[str, Any] = field(default_factory=dict)
    inputs: str = "cross"  # cross, self, memory (key is value)
    unbatched: bool = False

    def __str__(self) -> str:
        return self.name


def pair(
    *, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's layer and ours, with the same parameters; biases are not zero."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name:
                parameter.normal_()
    ours = MultiheadAttention(EMBED, HEADS, dtype=dtype, **options)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return theirs, ours


def tensors(case: Case, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value for a case, in the order of axes its layer takes."""
    widths = (EMBED, case.layer.get("kdim", EMBED), case.layer.get("vdim", EMBED))
    if case.inputs == "self":
        x = laid_out(torch.randn(BATCH, QUERIES, EMBED, dtype=dtype), case)
        return x, x, x
    query = laid_out(torch.randn(BATCH, QUERIES, widths[0], dtype=dtype), case)
    key = laid_out(torch.randn(BATCH, KEYS, widths[1], dtype=dtype), case)
    if case.inputs == "memory":
        return query, key, key
    return query, key, laid_out(torch.randn(BATCH, KEYS, widths[2], dtype=dtype), case)


def laid_out(x: Tensor, case: Case) -> Tensor:
    """(batch, length, width) in the order of axes that the case's layer takes."""
    if case.unbatched:
        return x[0]
    return x if case.layer.get("batch_first") else x.transpose(0, 1).contiguous()


def masks(case: Case, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The masks of a case. Every query keeps a key: torch's layer has no answer otherwise."""
    keys = QUERIES if case.inputs == "self" else KEYS
    found: dict[str, Tensor] = {}
    batch = 1 if case.unbatched else BATCH
    shape = {"2d": (QUERIES, keys), "3d": (batch * HEADS, QUERIES, keys)}
    if case.attn_mask == "causal":
        found["attn_mask"] = torch.ones(QUERIES, keys).triu(1).bool()
    elif case.attn_mask != "none":
        kind, rank = case.attn_mask.split()
        found["attn_mask"] = blocked(shape[rank], kind, dtype)
    if case.padding != "none":
        lengths = torch.tensor([keys, keys - 11, 5])[:batch]
        padding = torch.arange(keys) >= lengths[:, None]
        if case.padding == "float":
            padding = torch.randn(batch, keys, dtype=dtype).masked_fill(padding, -torch.inf)
        found["key_padding_mask"] = padding[0] if case.unbatched else padding
    return found


def blocked(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
    """A random mask that leaves the first five keys to every query."""
    hidden = torch.rand(shape) < 0.4
    hidden[..., :5] = False
    return (
        hidden
        if kind == "bool"
        else torch.randn(shape, dtype=dtype).masked_fill(hidden, -torch.inf)
    )


def causal(length: int, dtype: torch.dtype | None = None) -> Tensor:
    """The causal mask in torch's convention: True, or -inf, above the diagonal."""
    later = torch.ones(length, length).triu(1).bool()
    return (
        later
        if dtype is None
        else torch.zeros(length, length, dtype=dtype).masked_fill(later, -torch.inf)
    )


PADDING = torch.arange(QUERIES) >= torch.tensor([QUERIES, 10, 0])[:, None]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": causal(QUERIES), "is_causal": True},
    "float": {"attn_mask": causal(QUERIES, torch.float32)},
    "both": {"attn_mask": causal(QUERIES), "key_padding_mask": PADDING},
}


def randn() -> Tensor:
    """float32 inputs for self-attention, batch first."""
    return torch.randn(BATCH, QUERIES, EMBED)

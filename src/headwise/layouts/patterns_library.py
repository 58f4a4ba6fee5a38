"""The forms that most layouts are made of: four matrices, or one that fuses three of them.

Each function gives stored names with their patterns, to be joined by ``|``. Whether a projection
may have a bias is said here; a checkpoint without it fits as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Tensors = dict[str, str]

# What a model holds beside attention: canonical name -> axes, of matrices as torch stores them. A
# bias has the first of them.
_OUTSIDE = {
    "tokens": "vocabulary embed_dim",
    "positions": "length embed_dim",
    "token_types": "types embed_dim",
    "embed_norm": "embed_dim",
    "norm_1": "embed_dim",
    "norm_2": "embed_dim",
    "gate": "hidden_dim embed_dim",
    "up": "hidden_dim embed_dim",
    "down": "embed_dim hidden_dim",
    "final_norm": "embed_dim",
    "unembedding": "vocabulary embed_dim",
    "pooler": "pooled_dim embed_dim",
}


def separate(q: str, k: str, v: str, *, kv_heads: str = "kv_heads", biases: str = "qkv") -> Tensors:
    """A linear layer each for queries, keys and values; rows head by head.

    ``kv_heads`` is "heads" where there are always as many of keys and values; ``biases`` are the
    letters of those that may have one.
    """
    found = {
        f"{q}.weight": "wq: (heads head_dim) embed_dim",
        f"{k}.weight": f"wk: ({kv_heads} head_dim) embed_dim",
        f"{v}.weight": f"wv: ({kv_heads} head_dim) embed_dim",
        f"{q}.bias": "bq: (heads head_dim)",
        f"{k}.bias": f"bk: ({kv_heads} head_dim)",
        f"{v}.bias": f"bv: ({kv_heads} head_dim)",
    }
    wanted = {f"b{letter}" for letter in biases}
    return {name: text for name, text in found.items() if text[0] == "w" or text[:2] in wanted}


def out(name: str, *, bias: bool = True, columns: bool = False) -> Tensors:
    """The output projection.

    With ``columns`` it is stored for ``x @ weight``: its inputs are rows.
    """
    text = "wo: (heads head_dim) out_dim" if columns else "wo: out_dim (heads head_dim)"
    return {f"{name}.weight": text} | ({f"{name}.bias": "bo: out_dim"} if bias else {})


def stacked(
    name: str, *, kv_heads: str = "heads", bias: bool = True, columns: bool = False
) -> Tensors:
    """All queries, then all keys, then all values, in one linear layer.

    ``kv_heads`` is "kv_heads" where keys and values have heads of their own number.
    """
    axis = f"([wq: heads head_dim | wk: {kv_heads} head_dim | wv: {kv_heads} head_dim])"
    return fused(name, axis, bias=bias, columns=columns)


def by_head(name: str, *, bias: bool = True) -> Tensors:
    """For each head its query, its key and its value, in one linear layer."""
    return fused(name, "(heads [wq: head_dim | wk: head_dim | wv: head_dim])", bias=bias)


def by_group(name: str, *, bias: bool = True) -> Tensors:
    """For each kv head the queries that read it, its key and its value, in one linear layer."""
    return fused(name, "(kv_heads [wq: group head_dim | wk: head_dim | wv: head_dim])", bias=bias)


def fused(name: str, axis: str, *, bias: bool = True, columns: bool = False) -> Tensors:
    """One linear layer of several projections, whose bias is in the order of its rows.

    ``axis`` is the pattern of its rows, such as "([wq: heads head_dim | wk: heads head_dim])"; with
    ``columns`` it is stored for ``x @ weight``: its inputs are rows.
    """
    found = {f"{name}.weight": f"embed_dim {axis}" if columns else f"{axis} embed_dim"}
    if bias:
        found[f"{name}.bias"] = re.sub(r"\bw([qkv]):", r"b\1:", axis)
    return found


def head_norms(q: str, k: str, *, bias: bool = False) -> Tensors:
    """Norms of queries and keys, of one weight for all heads."""
    found = {f"{q}.weight": "q_norm: head_dim", f"{k}.weight": "k_norm: head_dim"}
    if bias:
        found |= {f"{q}.bias": "q_norm_bias: head_dim", f"{k}.bias": "k_norm_bias: head_dim"}
    return found


def outside(
    like: Mapping[str, str] | None = None, *, columns: bool = False, **names: str
) -> Tensors:
    """What a model holds beside attention.

    Args:
        like: names, as below, in a mapping.
        columns: the matrices of the MLP and of the pooler are stored for ``x @ weight``.
        names: what it is -> stored name, with {layer} for the layer's number; one that ends in "*"
            stands for two, with "weight" and "bias" in its place. Known are tokens, positions,
            token_types, embed_norm, norm_1, norm_2, gate, up, down, final_norm, pooler and
            unembedding; of norms and of the MLP also with _bias.
    """
    turned = ("gate", "up", "down", "pooler") if columns else ()
    found: Tensors = {}
    for name, stored in {**(like or {}), **names}.items():
        whose = name.removesuffix("_bias")
        axes = _OUTSIDE[whose].split()[: None if whose == name else 1]
        whole = " ".join(reversed(axes) if name in turned else axes)
        found[stored.replace("*", "weight")] = f"{name}: {whole}"
        if stored.endswith("*"):
            found[stored[:-1] + "bias"] = f"{name}_bias: {axes[0]}"
    return found

"""Layouts by family, one file each; here, patterns that most share: four matrices, or a fused one.

Each function returns stored names with their patterns, to be joined by ``|``. A bias in a pattern
is optional: a checkpoint without it fits as well.
"""

import re
from typing import Any

from headwise.function.spec import FROM_CONFIG, OPEN_FIELDS, AttentionSpec
from headwise.layouts._layout import Layout

Tensors = dict[str, str]


def left_to_config(fields: str, **stated: Any) -> AttentionSpec:
    """Return a function with these fields, by spaces, left to the model's config."""
    left: dict[str, Any] = dict.fromkeys(fields.split(), FROM_CONFIG)
    return AttentionSpec(**left, **stated)


# The function of a layer whose options are all left to the config; weights tell of a latent.
OPEN = left_to_config(" ".join(OPEN_FIELDS - {"latent"}))

# Keys and values from another width, values of another width, and all biases at the end.
APART: dict[str, Any] = {"source": "source_dim", "value": "value_dim", "biases_last": True}

# The axes that Megatron's and Meta's tensor-parallel processes divide among themselves.
TENSOR_PARALLEL = ("heads", "kv_heads", "hidden_dim", "vocabulary")

# The end of a name that stands for two -> the ends of the weight and of the bias.
_PAIRS = {
    "scale*": ("scale", "bias"),
    "gamma*": ("gamma", "beta"),
    "kernel*": ("kernel", "bias"),
    ".w*": (".w", ".b"),
    "*": ("weight", "bias"),
}

# Weights outside of attention: canonical name -> axes, as torch stores matrices. A bias has the
# first axis.
_OUTSIDE = {
    "tokens": "vocabulary embed_dim",
    "positions": "length embed_dim",
    "token_types": "types embed_dim",
    "embed_norm": "embed_dim",
    "norm_1": "embed_dim",
    "norm_2": "embed_dim",
    "self_norm": "embed_dim",
    "cross_norm": "embed_dim",
    "norm": "embed_dim",
    "gate": "hidden_dim embed_dim",
    "up": "hidden_dim embed_dim",
    "down": "embed_dim hidden_dim",
    "final_norm": "embed_dim",
    "unembedding": "vocabulary embed_dim",
    "pooler": "pooled_dim embed_dim",
}


def describe_layout(
    name: str, *, model: str = "", outside: str | Tensors = "", columns: bool = False, **fields: Any
) -> Layout:
    """Return a layout; without a ``source``, that of the folder ``model`` of transformers.

    ``outside`` may be the words of `weights_outside_attention`, with their ``columns``.
    """
    model = model or name.replace("-", "_")
    source = {"source": f"transformers, models/{model}/modeling_{model}.py"}
    if isinstance(outside, str):
        outside = weights_outside_attention(outside, columns=columns)
    return Layout(name=name, outside=outside, **(source | fields))


def both_sides(layers: str, attention: str, cross: str) -> dict[str, str]:
    """Return the places of an encoder's and a decoder's modules; ``layers`` has {side}."""
    sides = {side: layers.replace("{side}", side) for side in ("encoder", "decoder")}
    places = {side: place + attention for side, place in sides.items()}
    return places | {"cross": sides["decoder"] + cross}


def projections(
    names: str,
    *,
    kv_heads: str = "heads",
    biases: str = "qkvo",
    source: str = "embed_dim",
    value: str = "head_dim",
    leaves: tuple[str, str] = (".weight", ".bias"),
    columns: bool = False,
    biases_last: bool = False,
) -> Tensors:
    """Return a linear layer each for queries, keys, values and, if it is named, the output.

    Args:
        names: the stored names of the three or four, by spaces.
        kv_heads: "kv_heads" where keys and values have heads of their own number.
        biases: the letters of those that may have a bias.
        source: the width that keys and values are projected from.
        value: the channels of a value.
        leaves: behind a layer's name for its weight and its bias.
        columns: the weights are stored for ``x @ weight``: their inputs are rows.
        biases_last: the biases stand behind all weights, that of the output too.
    """
    parts = {
        "q": ("(heads head_dim)", "embed_dim"),
        "k": (f"({kv_heads} head_dim)", source),
        "v": (f"({kv_heads} {value})", source),
        "o": ("out_dim", f"(heads {value})"),
    }
    layers = dict(zip(parts, names.split(), strict=False))
    patterns: Tensors = {}
    for letters in ("qkvo",) if biases_last else ("qkv", "o"):
        for letter in filter(layers.get, letters):
            outputs, inputs = parts[letter]
            axes = f"{inputs} {outputs}" if columns else f"{outputs} {inputs}"
            patterns[layers[letter] + leaves[0]] = f"w{letter}: {axes}"
        for letter in filter(layers.get, letters):
            if letter in biases:
                patterns[layers[letter] + leaves[1]] = f"b{letter}: {parts[letter][0]}"
    return patterns


def output_projection(name: str, *, bias: bool = True) -> Tensors:
    """Return the output projection."""
    text = {f"{name}.weight": "wo: out_dim (heads head_dim)"}
    return text | ({f"{name}.bias": "bo: out_dim"} if bias else {})


def qkv_fused_by_projection(
    name: str, out: str = "", *, kv_heads: str = "heads", bias: bool = True, columns: bool = False
) -> Tensors:
    """Return one linear layer of all queries, then all keys, then all values.

    ``kv_heads`` is "kv_heads" where keys and values have heads of their own number; ``out`` is the
    name of the output projection.
    """
    axis = f"([wq: heads head_dim | wk: {kv_heads} head_dim | wv: {kv_heads} head_dim])"
    patterns = fused_projection_by_pattern(name, axis, bias=bias, columns=columns)
    return patterns | (output_projection(out, bias=bias) if out else {})


def qkv_fused_by_head(name: str, *, bias: bool = True) -> Tensors:
    """Return one linear layer with query, key and value of each head side by side."""
    return fused_projection_by_pattern(
        name, "(heads [wq: head_dim | wk: head_dim | wv: head_dim])", bias=bias
    )


def qkv_fused_by_group(name: str, *, bias: bool = True) -> Tensors:
    """Return one linear layer with, for each kv head, its query heads, its key and its value."""
    return fused_projection_by_pattern(
        name, "(kv_heads [wq: group head_dim | wk: head_dim | wv: head_dim])", bias=bias
    )


def fused_projection_by_pattern(
    name: str, axis: str, *, bias: bool = True, columns: bool = False
) -> Tensors:
    """Return one linear layer of several projections; its bias is in the order of its rows.

    ``axis`` is the pattern of its rows, such as "([wq: heads head_dim | wk: heads head_dim])"; with
    ``columns`` it is stored for ``x @ weight``: its inputs are rows.
    """
    patterns = {f"{name}.weight": f"embed_dim {axis}" if columns else f"{axis} embed_dim"}
    if bias:
        patterns[f"{name}.bias"] = re.sub(r"\bw([qkv]):", r"b\1:", axis)
    return patterns


def head_norms(q: str, k: str, *, bias: bool = False, leaf: str = "weight") -> Tensors:
    """Return the norms of queries and keys, with one weight for all heads."""
    patterns = {f"{q}.{leaf}": "q_norm: head_dim", f"{k}.{leaf}": "k_norm: head_dim"}
    if bias:
        patterns |= {f"{q}.bias": "q_norm_bias: head_dim", f"{k}.bias": "k_norm_bias: head_dim"}
    return patterns


def weights_outside_attention(words: str, *, columns: bool = False) -> Tensors:
    """Return the tensors of a model outside of attention.

    Args:
        words: what each holds and its stored name, by spaces: "tokens=wte.weight". A name that ends
            in "*" stands for two, with the ends of `_PAIRS`. Known are the keys of `_OUTSIDE`,
            also with "encoder_" or "decoder_" before them or "_bias" behind; and "gate+up" for a
            matrix that fuses the two. Behind a "|" stands what the names of a layer's tensors begin
            with, with {layer} for its number, and then those tensors.
        columns: the matrices of the MLP and of the pooler are stored for ``x @ weight``.
    """
    transposed = ("gate", "up", "down", "pooler") if columns else ()
    names, *blocks = words.split("|")
    pairs = [word.split("=") for word in names.split()]
    for place, *within in map(str.split, blocks):
        pairs += [[name, place + stored] for name, stored in (w.split("=") for w in within)]
    patterns: Tensors = {}
    for name, stored in pairs:
        first, _, second = name.partition("+")
        if second:
            patterns[stored] = f"([{first}: hidden_dim | {second}: hidden_dim]) embed_dim"
            continue
        part = name.removesuffix("_bias")
        axes = _OUTSIDE[re.sub("^(en|de)coder_", "", part)].split()[: None if part == name else 1]
        pattern_axes = " ".join(reversed(axes) if name in transposed else axes)
        leaf = next((leaf for leaf in _PAIRS if stored.endswith(leaf)), "")
        weight, bias = _PAIRS.get(leaf, ("", ""))
        patterns[stored.removesuffix(leaf) + weight] = f"{name}: {pattern_axes}"
        if leaf:
            patterns[stored.removesuffix(leaf) + bias] = f"{name}_bias: {axes[0]}"
    return patterns

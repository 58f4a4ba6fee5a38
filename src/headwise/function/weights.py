"""The canonical form: one matrix for each head, as in the paper, and no fused axis.

    wq (heads, head_dim, query_dim)       bq (heads, head_dim)
    wk (kv_heads, key_dim, source_dim)    bk (kv_heads, key_dim)
    wv (kv_heads, value_dim, source_dim)  bv (kv_heads, value_dim)
    wo (heads, value_dim, out_dim)        bo (out_dim)

The queries of head h are wq[h] @ x; its keys and values are those of kv head
h // (heads / kv_heads). Two channels that are rotated together are half of the rotated width apart.
Vaswani et al. 2017, section 3.2.2, has the transposes of these matrices. Where keys and values come
from a latent, query_dim and source_dim are widths of latents, and the first channels of wq[h] are
those that meet the shared key, wr @ x (`headwise.function.latent`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]

# tensor -> its axes; a layout without an axis uses the name that `WIDER` has for it.
AXES: dict[str, tuple[str, ...]] = {
    "wq": ("heads", "head_dim", "query_dim"),
    "wk": ("kv_heads", "key_dim", "source_dim"),
    "wv": ("kv_heads", "value_dim", "source_dim"),
    "wo": ("heads", "value_dim", "out_dim"),
    "bq": ("heads", "head_dim"),
    "bk": ("kv_heads", "key_dim"),
    "bv": ("kv_heads", "value_dim"),
    "bo": ("out_dim",),
    # a learned logit in the softmax, without a value
    "sink": ("heads",),
    # an additional key and value for all queries
    "extra_k": ("kv_heads", "head_dim"),
    "extra_v": ("kv_heads", "value_dim"),
    # norms of queries and keys: shared by the heads, or one for each head
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "q_norm_bias": ("head_dim",),
    "k_norm_bias": ("head_dim",),
    "q_norms": ("heads", "head_dim"),
    "k_norms": ("kv_heads", "head_dim"),
    "q_norms_bias": ("heads", "head_dim"),
    "k_norms_bias": ("kv_heads", "head_dim"),
    # added to the scores by distance, a row for each bucket of distances
    "distances": ("buckets", "heads"),
    # a vector for each relative position, its norm, and its projections where it has its own
    "place_table": ("buckets", "embed_dim"),
    "place_norm": ("embed_dim",),
    "place_norm_bias": ("embed_dim",),
    "wpq": ("heads", "head_dim", "embed_dim"),
    "bpq": ("heads", "head_dim"),
    "wpk": ("kv_heads", "key_dim", "embed_dim"),
    "bpk": ("kv_heads", "key_dim"),
    # gates of each head's outputs: one, or one for each channel
    "wg": ("heads", "gate_width", "embed_dim"),
    "bg": ("heads", "gate_width"),
    # the norm of the head outputs, over all heads of a token
    "o_norms": ("heads", "value_dim"),
    "o_norms_bias": ("heads", "value_dim"),
    # what the factor of a difference of two softmaxes is made of
    "lambda_q1": ("lambda_dim",),
    "lambda_k1": ("lambda_dim",),
    "lambda_q2": ("lambda_dim",),
    "lambda_k2": ("lambda_dim",),
    # the latents of queries, and of keys and values; and the key that all heads share
    "wa": ("query_dim", "embed_dim"),
    "wc": ("source_dim", "embed_dim"),
    "wr": ("shared_width", "embed_dim"),
    "ba": ("query_dim",),
    "bc": ("source_dim",),
    "br": ("shared_width",),
    "a_norm": ("query_dim",),
    "c_norm": ("source_dim",),
}
# The axis of heads of a tensor: its number, and its name. Tensors without one are left out.
HEADS = {
    name: (dim, axis)
    for name, axes in AXES.items()
    for dim, axis in enumerate(axes)
    if axis in ("heads", "kv_heads")
}
WIDER = {
    "key_dim": "head_dim",
    "query_dim": "embed_dim",
    "kv_heads": "heads",
    "value_dim": "head_dim",
    "source_dim": "embed_dim",
    "out_dim": "embed_dim",
    "gate_width": "value_dim",
}
# Tensors of one kind, by the role of their heads: rows move among the tensors of a kind alone.
KINDS: tuple[dict[str, str], ...] = (
    {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "g": "wg"},
    {"q": "q_norms", "k": "k_norms", "o": "o_norms"},
    {"q": "q_norm", "k": "k_norm"},
    {"k": "extra_k", "v": "extra_v"},
    {"q": "sink"},
    {"q": "wpq", "k": "wpk"},
    {"q": "wa"},
    {"k": "wc"},
    {"k": "wr"},
    {"q": "a_norm"},
    {"k": "c_norm"},
    {"o": "bo"},
)
# The role of a projection -> what meets its input first: the latent's, where there is one.
FIRST = {"q": ("wa", "wq"), "k": ("wc", "wk"), "v": ("wc", "wv"), "o": ("wo",)}
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
BIASES = ("bq", "bk", "bv", "bo", "bg", "ba", "bc", "br", "bpq", "bpk")
NORMS = ("q_norm", "k_norm", "q_norms", "k_norms")
# Tables that serve all layers, so that one layer, or none, may hold them.
SHARED = ("distances", "place_table", "place_norm", "place_norm_bias")
# Optional tensors of every layout.
OPTIONAL = (*BIASES, *(f"{norm}_bias" for norm in (*NORMS, "o_norms")), *SHARED, "wpq", "wpk")
PLACED = ("wpq", "bpq", "wpk", "bpk")
# Tensors with a rotated head_dim, in which the order of channels matters.
ROTATED = ("wq", "wk", "bq", "bk", "extra_k", *NORMS, *(f"{norm}_bias" for norm in NORMS), *PLACED)
CHANNELS = ("head_dim", "key_dim", "shared_width")  # the axes of these channels
QUERIES = ("wq", "bq")
ROTATED_WITH_LATENT = (*QUERIES, "wr", "br")  # where all heads share a rotated key


def bias_of(name: str) -> str:
    """Return the name of the bias of a canonical tensor: bq of wq, q_norm_bias of q_norm."""
    return f"b{name[1:]}" if name.startswith("w") else f"{name}_bias"


def kinds_of(state: State) -> tuple[dict[str, str], ...]:
    """Return the kinds of tensors in a state; keys of a latent are no rows as those of queries."""
    if "wc" not in state:
        return KINDS
    of_latent = {role: name for role, name in KINDS[0].items() if role in "kv"}
    of_queries = {role: name for role, name in KINDS[0].items() if role not in "kv"}
    return (of_queries, of_latent, *KINDS[1:])


def sizes_of(state: State) -> dict[str, int]:
    """Return the length of each axis of canonical tensors."""
    sizes: dict[str, int] = {}
    for name, axes in reversed(AXES.items()):  # where tensors disagree, the first ones count
        sizes |= zip(axes, state[name].shape if name in state else (), strict=False)
    return add_wider(sizes)


def add_wider(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes with embed_dim and head_dim, where no axis has them but that of wq or wk."""
    axes = {"embed_dim": "query_dim", "head_dim": "key_dim"}
    return {wider: sizes[axis] for wider, axis in axes.items() if axis in sizes} | sizes


def take_heads(state: State, heads: Sequence[int], kv_heads: Sequence[int]) -> State:
    """Return copies of canonical tensors with these heads and kv heads, in this order."""
    import torch  # which the list of layouts starts without

    places = {"heads": torch.tensor(heads), "kv_heads": torch.tensor(kv_heads)}
    taken = {}
    for name, tensor in state.items():
        if name in HEADS:
            dim, axis = HEADS[name]
            tensor = tensor.index_select(dim, places[axis].to(tensor.device))
        taken[name] = tensor.clone()
    return taken

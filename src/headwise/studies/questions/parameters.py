"""Does the number of heads change the number of parameters?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from headwise.drop_in.layer import MultiheadAttention
from headwise.layer.attention import Attention
from headwise.models.reading import Progress
from headwise.studies.pictures.style import LINE, SERIES
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMBED_DIM = 512
HEADS = tuple(heads for heads in range(1, EMBED_DIM + 1) if EMBED_DIM % heads == 0)
SHOWN = (1, 2, 4, 8, 16)  # heads of the table and the picture
HEAD_DIM = 64  # where it is held fixed
GROUPED = 8  # heads that share kv heads


def measure(progress: Progress) -> dict[str, Any]:
    """Count the parameters of layers that differ in their number of heads alone."""
    fixed_width = {heads: MultiheadAttention(EMBED_DIM, heads) for heads in HEADS}
    fixed_head = {heads: Attention(EMBED_DIM, heads, head_dim=HEAD_DIM) for heads in SHOWN}
    grouped = {kv: Attention(EMBED_DIM, GROUPED, num_kv_heads=kv) for kv in (GROUPED, 4, 2, 1)}
    eight = fixed_width[8]
    layers = [*fixed_width.values(), *(nn.MultiheadAttention(EMBED_DIM, heads) for heads in HEADS)]
    return {
        "embed_dim": EMBED_DIM,
        "head_dim": HEAD_DIM,
        "head_counts": list(HEADS),
        "shown": list(SHOWN),
        "tensors": {name: list(p.shape) for name, p in eight.named_parameters()},
        "same_tensors": all(shapes(layer) == shapes(eight) for layer in layers),
        "width_shared": {str(heads): count(fixed_width[heads]) for heads in SHOWN},
        "width_of_a_head_fixed": {str(heads): count(layer) for heads, layer in fixed_head.items()},
        "grouped_heads": GROUPED,
        "grouped": {str(kv): count(layer) for kv, layer in grouped.items()},
        "per_head_sum": sum(3 * EMBED_DIM * eight.head_dim for _ in range(eight.num_heads)),
        "packed": eight.in_proj_weight.numel(),
    }


def shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by name."""
    return {name: tuple(p.shape) for name, p in layer.named_parameters()}


def count(layer: nn.Module) -> int:
    """How many numbers a layer learns."""
    return sum(p.numel() for p in layer.parameters())


def draw(figure: Figure, n: Numbers) -> None:
    """Parameters over the number of heads: shared width, free head_dim, shared keys and values."""
    axes = figure.subplots()
    shown = n["shown"]
    shared, own = (
        [n[key][str(heads)] / 1e6 for heads in shown]
        for key in ("width_shared", "width_of_a_head_fixed")
    )
    grouped = [count / 1e6 for count in n["grouped"].values()]
    axes.plot(shown, own, "o-", color=SERIES[1], markersize=9, markerfacecolor="none")
    axes.plot(shown, shared, "o-", color=SERIES[0], markersize=5)
    # Without the first: as many kv heads as heads share nothing.
    axes.plot([n["grouped_heads"]] * (len(grouped) - 1), grouped[1:], "D", color=SERIES[2])
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    few = ", ".join(list(n["grouped"])[1:-1])
    labels = (
        (
            (shown[-1], shared[-1]),
            (0, 14),
            "right",
            say("PyTorch: head_dim = {embed_dim} / heads", n),
        ),
        ((shown[-1], own[-1]), (-14, 0), "right", say("you choose head_dim = {head_dim}", n)),
        (
            (n["grouped_heads"], grouped[2]),
            (10, 0),
            "left",
            f"{n['grouped_heads']} query heads, {few} or {list(n['grouped'])[-1]} kv heads",
        ),
    )
    for (place, offset, side, words), colour in zip(
        labels, (SERIES[0], SERIES[1], SERIES[2]), strict=True
    ):
        axes.annotate(words, place, offset, ha=side, color=colour, **beside)
    axes.set_xticks(shown, [str(heads) for heads in shown])
    axes.set_ylim(0, 1.1 * own[-1])
    axes.set_xlabel("number of heads")
    axes.set_ylabel("parameters, millions")
    axes.grid(axis="y", color=LINE)


QUESTION = Question(
    id="parameters",
    asks="Does the number of heads change the number of parameters?",
    claim="Not while the heads share embed_dim: every tensor keeps its shape. It does where you "
    "choose head_dim yourself, and where heads share keys and values.",
    measure=measure,
    facts=(
        Fact(
            "PyTorch's layer and headwise.MultiheadAttention have the same parameters, by name and "
            "shape, for every number of heads that divides {embed_dim}: {head_counts:list}",
            lambda n: n["same_tensors"],
        ),
        Fact(
            "one projection for each head, summed over queries, keys, values and heads, makes "
            "{per_head_sum:,} numbers, as many as the packed in_proj_weight has: {packed:,}",
            lambda n: n["per_head_sum"] == n["packed"],
        ),
        Fact(
            "with head_dim = {head_dim} for any number of heads, one head has "
            "{width_of_a_head_fixed[1]:,} parameters and sixteen have "
            "{width_of_a_head_fixed[16]:,}",
            lambda n: n["width_of_a_head_fixed"]["1"] < n["width_of_a_head_fixed"]["16"],
        ),
        Fact(
            "{grouped_heads} heads that share one kv head have {grouped[1]:,} parameters, those "
            "with a kv head each {grouped[8]:,}",
            lambda n: n["grouped"]["1"] < n["grouped"]["8"],
        ),
    ),
    verdict="No: PyTorch's layer of width {embed_dim} has {width_shared[8]:,} parameters with "
    "every number of heads that divides {embed_dim}, because more heads are narrower heads; the "
    "number grows only where you choose head_dim yourself, as with Keras' key_dim.",
    why="Each head projects to head_dim = embed_dim / heads numbers, so the matrices of all heads, "
    "concatenated, always have embed_dim columns. A head_dim that you choose leaves that rule. "
    "Heads that share keys and values (grouped-query attention) need fewer parameters.",
    caption="Parameters of one layer of width {embed_dim}, over its number of heads. Dots: the "
    "heads share the width, as in PyTorch. Rings: each head is {head_dim} wide, as with "
    "headwise.Attention(head_dim={head_dim}). Diamonds: {grouped_heads} query heads that share "
    "fewer heads for keys and values (kv heads).",
    draw=draw,
    table=Table(
        columns=("PyTorch's parameter", "shape (any num_heads)"),
        rows=(
            ("in_proj_weight", "{tensors[in_proj_weight]:shape}"),
            ("in_proj_bias", "{tensors[in_proj_bias]:shape}"),
            ("out_proj.weight", "{tensors[out_proj.weight]:shape}"),
            ("out_proj.bias", "{tensors[out_proj.bias]:shape}"),
        ),
    ),
)

"""Does the number of heads change the number of parameters?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.drop_in.layer import MultiheadAttention
from headwise.layer.attention import Attention
from headwise.models.reading import Progress
from headwise.studies.pictures.style import LINE, SERIES
from headwise.studies.question import Fact, Numbers, Question, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

EMBED_DIM = 512
HEADS = tuple(heads for heads in range(1, EMBED_DIM + 1) if EMBED_DIM % heads == 0)
SHOWN = (1, 2, 4, 8, 16)  # heads of the table and the picture
HEAD_DIM = 64  # where it is held fixed


def measure(progress: Progress) -> dict[str, Any]:
    """Count the parameters of layers that differ in their number of heads alone."""
    fixed_width = {heads: MultiheadAttention(EMBED_DIM, heads) for heads in HEADS}
    fixed_head = {heads: Attention(EMBED_DIM, heads, head_dim=HEAD_DIM) for heads in SHOWN}
    grouped = {kv: Attention(EMBED_DIM, 8, num_kv_heads=kv) for kv in (8, 4, 2, 1)}
    eight = fixed_width[8]
    return {
        "embed_dim": EMBED_DIM,
        "head_dim": HEAD_DIM,
        "head_counts": list(HEADS),
        "shown": list(SHOWN),
        "tensors": {name: list(p.shape) for name, p in eight.named_parameters()},
        "same_tensors": all(shapes(layer) == shapes(eight) for layer in fixed_width.values()),
        "width_shared": {str(heads): count(fixed_width[heads]) for heads in SHOWN},
        "width_of_a_head_fixed": {str(heads): count(layer) for heads, layer in fixed_head.items()},
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
    """Parameters over the number of heads, for shared widths and for widths of their own."""
    axes = figure.subplots()
    places = range(len(n["shown"]))
    shared, own = (
        [n[key][str(heads)] / 1e6 for heads in n["shown"]]
        for key in ("width_shared", "width_of_a_head_fixed")
    )
    axes.plot(places, shared, marker="o", color=SERIES[0])
    axes.plot(places, own, marker="o", color=SERIES[1])
    axes.text(0, shared[0] + 0.1, "heads share the width", color=SERIES[0])
    words = f"each head is {n['head_dim']} wide"
    axes.text(places[-1] - 0.1, own[-1], words, color=SERIES[1], ha="right", va="center")
    axes.set_xticks(places, [str(heads) for heads in n["shown"]])
    axes.set_ylim(0, 1.1 * own[-1])
    axes.set_xlabel("number of heads")
    axes.set_ylabel("parameters, millions")
    axes.grid(axis="y", color=LINE)


QUESTION = Question(
    id="parameters",
    asks="Does the number of heads change the number of parameters?",
    claim="Not while the heads share embed_dim: every tensor keeps its shape. It does where each "
    "head keeps its own width, and where heads share keys and values.",
    measure=measure,
    facts=(
        Fact(
            "the parameters have the same names and shapes for every number of heads that divides "
            "{embed_dim}: {head_counts:list}",
            lambda n: n["same_tensors"],
        ),
        Fact(
            "the projections of all heads, one by one, are {per_head_sum:,} numbers, as many as "
            "the packed matrix has: {packed:,}",
            lambda n: n["per_head_sum"] == n["packed"],
        ),
        Fact(
            "with every head {head_dim} wide, one head has {width_of_a_head_fixed[1]:,} parameters "
            "and sixteen have {width_of_a_head_fixed[16]:,}",
            lambda n: n["width_of_a_head_fixed"]["1"] < n["width_of_a_head_fixed"]["16"],
        ),
        Fact(
            "with one kv head for eight heads {grouped[1]:,} parameters are left of {grouped[8]:,}",
            lambda n: n["grouped"]["1"] < n["grouped"]["8"],
        ),
    ),
    verdict="No: torch's layer of width {embed_dim} has {width_shared[8]:,} parameters with one "
    "head, eight or any number that divides; more heads are narrower heads.",
    why="Each head projects to head_dim = embed_dim / heads, so the heads' matrices side by side "
    "always fill the same square. The count changes where that rule is left: a head_dim of one's "
    "own (Keras' key_dim), or keys and values shared between heads (grouped heads).",
    caption="Parameters of one layer of width {embed_dim}. Flat: heads that share the width. "
    "Rising: heads that are {head_dim} wide each.",
    draw=draw,
    table=Table(
        columns=("tensor of torch's layer", "shape for every number of heads"),
        rows=(
            ("in_proj_weight", "{tensors[in_proj_weight]:shape}"),
            ("in_proj_bias", "{tensors[in_proj_bias]:shape}"),
            ("out_proj.weight", "{tensors[out_proj.weight]:shape}"),
            ("out_proj.bias", "{tensors[out_proj.bias]:shape}"),
        ),
    ),
)

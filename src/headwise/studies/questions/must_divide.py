"""Must embed_dim divide by the number of heads?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.budget import Budget
from headwise.layer.attention import Attention
from headwise.layer.einops_block import EinopsAttention
from headwise.models.reading import Progress
from headwise.studies.experiments.per_head import Weights, budget
from headwise.studies.pictures.style import BAD, LINE, SERIES
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EMBED_DIM = 40
HEADS, HEAD_DIM, VALUE_DIM = 6, 10, 7  # none of them divides the next, nor EMBED_DIM its heads
BATCH, QUERIES, KEYS = 3, 24, 29
GRID_HEADS = tuple(range(1, 13))
GRID_HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 10, 13, 20, 40)
TORCH_HEADS, KEY_WIDTH, VALUE_WIDTH = 8, 29, 23  # torch calls the widths kdim and vdim


def measure(progress: Progress) -> dict[str, Any]:
    """Check layers of free widths against the paper's formula, and ask torch's for the same."""
    x, source = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, EMBED_DIM)
    free = Attention(EMBED_DIM, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, source_dim=EMBED_DIM)
    page = EinopsAttention(EMBED_DIM, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, dropout=0.0)
    accepted = {heads: torchs_layer(heads)[0] for heads in range(1, EMBED_DIM + 1)}
    torch_counts = {count(layer) for layer in accepted.values() if layer is not None}
    return {
        "sizes": {
            "embed_dim": EMBED_DIM,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "value_dim": VALUE_DIM,
            "remainder": EMBED_DIM % HEADS,
        },
        "q_weight": list(free.q_proj.weight.shape),
        "v_weight": list(free.v_proj.weight.shape),
        "out_weight": list(free.out_proj.weight.shape),
        "free": checked(free, x, source),
        "page": checked_page(page, x, source),
        "heads_torch_takes": [heads for heads, layer in accepted.items() if layer],
        "heads_that_divide": [heads for heads in accepted if EMBED_DIM % heads == 0],
        "heads_tried": len(accepted),
        "parameters_of_torch": max(torch_counts),
        "torch_has_one_count": len(torch_counts) == 1,
        "refusal": torchs_layer(HEADS)[1],
        **grid(x[:1], source[:1]),
        **torch_widths(),
    }


# ---- layers of free widths ---------------------------------------------------------------------


def checked(layer: Attention, x: Tensor, source: Tensor) -> dict[str, Any]:
    """The layer's output against the paper's formula."""
    weights = Weights.of(layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    with torch.no_grad():
        output = layer(x, source)
    return against(output, budget(x, source, source, weights, heads=layer.num_heads))


def checked_page(block: EinopsAttention, x: Tensor, source: Tensor) -> dict[str, Any]:
    """The same for the block of einops' page, before it adds its input and normalises."""
    weights = Weights.of(block.w_qs, block.w_ks, block.w_vs, block.fc)
    attended: list[Tensor] = []
    hook = block.fc.register_forward_hook(lambda *call: attended.append(call[-1]))
    with torch.no_grad():
        block(x, source, source)
    hook.remove()
    return against(attended[0], budget(x, source, source, weights, heads=block.num_heads))


def against(output: Tensor, allowed: Budget) -> dict[str, Any]:
    """What the error budget says of an output."""
    verdict = allowed.check(output)
    return {
        "output": list(output.shape),
        "within": verdict.within,
    }


def grid(x: Tensor, source: Tensor) -> dict[str, Any]:
    """Many pairs of a number of heads and a head_dim: does it run, is it right, how large is it?"""
    right: list[list[bool]] = []
    parameters: dict[str, set[int]] = {}
    for head_dim in GRID_HEAD_DIMS:
        right.append([])
        for heads in GRID_HEADS:
            layer = Attention(EMBED_DIM, heads, head_dim=head_dim, source_dim=EMBED_DIM)
            right[-1].append(checked(layer, x, source)["within"])
            parameters.setdefault(str(heads * head_dim), set()).add(count(layer))
    return {
        "grid_heads": list(GRID_HEADS),
        "grid_head_dims": list(GRID_HEAD_DIMS),
        "grid_right": right,
        "pairs": sum(map(len, right)),
        "pairs_right": sum(map(sum, right)),
        "one_count_for_each_product": all(len(counts) == 1 for counts in parameters.values()),
        "parameters": {product: min(counts) for product, counts in parameters.items()},
    }


def count(layer: nn.Module) -> int:
    """How many numbers a layer learns."""
    return sum(p.numel() for p in layer.parameters())


# ---- torch's layer ---------------------------------------------------------------------------


def torchs_layer(heads: int) -> tuple[nn.MultiheadAttention | None, str]:
    """torch's layer with this number of heads; or none, and what it says to that."""
    try:
        return nn.MultiheadAttention(EMBED_DIM, heads), ""
    except AssertionError as refusal:
        return None, str(refusal)


def torch_widths() -> dict[str, Any]:
    """torch's layer with inputs of their own widths for keys and values."""
    widths: dict[str, Any] = {"kdim": KEY_WIDTH, "vdim": VALUE_WIDTH, "batch_first": True}
    layer = nn.MultiheadAttention(EMBED_DIM, TORCH_HEADS, **widths)
    x, keys = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, KEY_WIDTH)
    values = torch.randn(BATCH, KEYS, VALUE_WIDTH)
    with torch.no_grad():
        output, _ = layer(x, keys, values)
    rows = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight, layer.out_proj.weight]
    biases = [*layer.in_proj_bias.chunk(3), layer.out_proj.bias]
    weights = Weights(*(p.detach() for p in (*rows, *biases)))
    allowed = budget(x, keys, values, weights, heads=TORCH_HEADS)
    native = Attention(EMBED_DIM, HEADS, head_dim=HEAD_DIM, source_dim=KEY_WIDTH)
    return {
        "torch_heads": TORCH_HEADS,
        "torch_head_dim": layer.head_dim,
        "key_width": KEY_WIDTH,
        "value_width": VALUE_WIDTH,
        "k_weight_of_torch": list(layer.k_proj_weight.shape),
        "v_weight_of_torch": list(layer.v_proj_weight.shape),
        "torch_crossed": against(output, allowed),
        "crossed": checked(native, x, keys),
    }


# ---- the picture -----------------------------------------------------------------------------

RING: dict[str, Any] = {
    "color": SERIES[1],
    "linestyle": "none",
    "marker": "o",
    "markersize": 12,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
}


def draw(figure: Figure, n: Numbers) -> None:
    """Which sizes work, in both layers; and what the division keeps the same."""
    figure.set_size_inches(7.6, 4.3)
    left, right = figure.subplots(1, 2, width_ratios=(1.55, 1))
    draw_grid(left, n)
    draw_counts(right, n)


def draw_grid(axes: Axes, n: Numbers) -> None:
    """A dot for each pair of sizes that was tried; ringed, where torch's layer takes it too."""
    places = {head_dim: row for row, head_dim in enumerate(n["grid_head_dims"])}
    for wanted, colour, marker in ((True, SERIES[0], "o"), (False, BAD, "X")):
        pairs = [
            (heads, row)
            for row, rights in enumerate(n["grid_right"])
            for heads, right in zip(n["grid_heads"], rights, strict=True)
            if right is wanted
        ]
        if pairs:
            x, y = zip(*pairs, strict=True)
            axes.plot(x, y, marker=marker, color=colour, markersize=5, linestyle="none")
    taken = [heads for heads in n["heads_torch_takes"] if heads in n["grid_heads"]]
    rows = [places[n["sizes"]["embed_dim"] // heads] for heads in taken]
    axes.plot(taken, rows, **RING)
    axes.set_xticks(n["grid_heads"])
    axes.set_yticks(range(len(places)), [str(head_dim) for head_dim in places])
    axes.set_xlabel("heads")
    axes.set_ylabel("head_dim, numbers a head")
    title = (
        "{pairs_right} of {pairs} pairs are right in headwise (dots);\n"
        "torch's layer takes the rings: heads × head_dim = {sizes[embed_dim]}"
    )
    axes.set_title(say(title, n), loc="left")
    for side in axes.spines.values():
        side.set_visible(False)


def draw_counts(axes: Axes, n: Numbers) -> None:
    """Parameters over heads times head_dim: a straight line, on which torch allows one point."""
    counts = sorted((int(product), count) for product, count in n["parameters"].items())
    embed_dim, top = n["sizes"]["embed_dim"], 4 * n["sizes"]["embed_dim"]
    shown = [(product, count / 1e3) for product, count in counts if product <= top]
    axes.plot(*zip(*shown, strict=True), color=SERIES[0], marker="o", markersize=4, linewidth=1)
    y = n["parameters_of_torch"] / 1e3
    axes.plot(embed_dim, y, **RING)
    label = "torch's layer, for every\nnumber of heads: {parameters_of_torch:,}"
    axes.annotate(
        say(label, n),
        (embed_dim, y),
        xytext=(14, -16),
        textcoords="offset points",
        color=SERIES[1],
        fontsize=9,
        va="center",
    )
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("heads × head_dim")
    axes.set_ylabel("parameters, thousands")
    axes.set_title("The count depends on the product\nof heads and head_dim alone", loc="left")
    axes.grid(axis="y", color=LINE)


QUESTION = Question(
    id="must-divide",
    asks="Must embed_dim be divisible by the number of heads? And are kdim and vdim head_dim times "
    "heads?",
    claim="No: with a head_dim and a value_dim of their own the paper's formula holds for any "
    "sizes. torch's layer divides by convention. Its kdim and vdim are widths of inputs.",
    measure=measure,
    facts=(
        Fact(
            "{sizes[heads]} heads with head_dim {sizes[head_dim]} and value_dim "
            "{sizes[value_dim]} on embed_dim {sizes[embed_dim]} (remainder {sizes[remainder]}) "
            "give the paper's formula within the error budget, with weights {q_weight:shape} for "
            "queries, {v_weight:shape} for values and {out_weight:shape} for the output",
            lambda n: n["free"]["within"] and n["sizes"]["remainder"] > 0,
        ),
        Fact(
            "so do {pairs_right} of {pairs} other pairs of heads and head_dim",
            lambda n: n["pairs_right"] == n["pairs"],
        ),
        Fact(
            "so does the attention of einops' page, whose head_dim and value_dim are free as well",
            lambda n: n["page"]["within"],
        ),
        Fact(
            "of {heads_tried} numbers of heads torch's layer takes those that divide "
            "{sizes[embed_dim]}, {heads_that_divide}, and no other",
            lambda n: n["heads_torch_takes"] == n["heads_that_divide"],
        ),
        Fact(
            "the number of parameters depends on heads times head_dim alone; where that is "
            "{sizes[embed_dim]}, it is that of torch's layer with any number of heads, "
            "{parameters_of_torch:,}",
            lambda n: (
                n["one_count_for_each_product"]
                and n["torch_has_one_count"]
                and n["parameters"][str(n["sizes"]["embed_dim"])] == n["parameters_of_torch"]
            ),
        ),
        Fact(
            "torch's layer with kdim {key_width} and vdim {value_width} has weights "
            "{k_weight_of_torch:shape} and {v_weight_of_torch:shape}, {torch_heads} heads of "
            "{torch_head_dim} as ever, and gives the formula on keys and values of these widths; "
            "so does headwise with source_dim {key_width}",
            lambda n: (
                n["torch_crossed"]["within"]
                and n["crossed"]["within"]
                and n["torch_head_dim"] * n["torch_heads"] == n["sizes"]["embed_dim"]
                and n["k_weight_of_torch"] == [n["sizes"]["embed_dim"], n["key_width"]]
                and n["v_weight_of_torch"] == [n["sizes"]["embed_dim"], n["value_width"]]
            ),
        ),
    ),
    verdict="No: {sizes[heads]} heads of head_dim {sizes[head_dim]} and value_dim "
    "{sizes[value_dim]} work on embed_dim {sizes[embed_dim]} and give what the paper's formula "
    "says; only torch's convention head_dim = embed_dim / heads needs the division, and its kdim "
    "and vdim are just the widths of what comes in.",
    why="A head projects to its own head_dim, and the output projection brings heads × value_dim "
    "back to any width, so nothing in the formula divides. torch's layer derives head_dim from "
    "embed_dim: then every number of heads has the same parameters, and the price is that heads "
    "must divide. kdim and vdim say how wide the inputs of keys and values are, before they are "
    "projected, and have nothing to do with the heads.",
    caption="Left: every dot is a layer on embed_dim {sizes[embed_dim]} that gives the paper's "
    "formula; a cross would be one that does not. Rings mark what torch's layer takes: only where "
    "heads × head_dim = {sizes[embed_dim]}. Right: the parameters of these layers lie on one "
    "line, and the ring is torch's point on it.",
    draw=draw,
    table=Table(
        columns=("layer", "heads", "widths", "output", "within the error budget"),
        rows=(
            (
                "headwise",
                "{sizes[heads]}",
                "head_dim {sizes[head_dim]}, value_dim {sizes[value_dim]}",
                "{free[output]:shape}",
                "{free[within]:yesno}",
            ),
            (
                "einops' page",
                "{sizes[heads]}",
                "head_dim {sizes[head_dim]}, value_dim {sizes[value_dim]}",
                "{page[output]:shape}",
                "{page[within]:yesno}",
            ),
            ("torch's layer", "{sizes[heads]}", "embed_dim / heads", "refused", "{refusal}"),
            (
                "torch's layer",
                "{torch_heads}",
                "head_dim {torch_head_dim}, kdim {key_width}, vdim {value_width}",
                "{torch_crossed[output]:shape}",
                "{torch_crossed[within]:yesno}",
            ),
            (
                "headwise",
                "{sizes[heads]}",
                "head_dim {sizes[head_dim]}, source_dim {key_width}",
                "{crossed[output]:shape}",
                "{crossed[within]:yesno}",
            ),
        ),
    ),
    varies=frozenset({"refusal"}),
)

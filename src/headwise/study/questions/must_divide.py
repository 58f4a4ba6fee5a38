"""Must embed_dim divide by the number of heads?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.error_budget.budget import Budget
from headwise.layers.native.attention import Attention
from headwise.layers.native.einops_block import EinopsAttention
from headwise.study.charts import (
    BAD,
    INK,
    SERIES,
    SOFT,
    WIDTH,
    Axes,
    Figure,
    block,
    heading,
    inset,
    note,
    rule,
    sheet,
)
from headwise.study.experiments.measures import layer_budget, parameters
from headwise.study.implementation import SharedWeights
from headwise.study.question import Fact, FactTable, Numbers, Question, say
from headwise.support.progress import Progress

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
    torch_counts = {parameters(layer) for layer in accepted.values() if layer is not None}
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
        "parameters_of_torch": sorted(torch_counts),
        "refusal": torchs_layer(HEADS)[1],
        **grid(x[:1], source[:1]),
        **torch_widths(),
    }


# ---- layers of free widths ---------------------------------------------------------------------


def checked(layer: Attention, x: Tensor, source: Tensor) -> dict[str, Any]:
    """The layer's output against the paper's formula."""
    weights = SharedWeights.of_linears(layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    budget = layer_budget(x, source, source, weights, num_heads=layer.num_heads)
    with torch.no_grad():
        return against(layer(x, source), budget)


def checked_page(block: EinopsAttention, x: Tensor, source: Tensor) -> dict[str, Any]:
    """The same for the block as einops' page has it, before it adds its input and normalises."""
    weights = SharedWeights.of_linears(block.w_qs, block.w_ks, block.w_vs, block.fc)
    budget = layer_budget(x, source, source, weights, num_heads=block.num_heads)
    found: list[dict[str, Any]] = []
    hook = block.fc.register_forward_hook(lambda *call: found.append(against(call[-1], budget)))
    with torch.no_grad():
        block(x, source, source)
    hook.remove()
    return found[0]


def against(output: Tensor, allowed: Budget) -> dict[str, Any]:
    """Return the shape of an output, and whether its error is within the budget."""
    return {"output": list(output.shape), "within": allowed.check(output).within}


def grid(x: Tensor, source: Tensor) -> dict[str, Any]:
    """Many pairs of a number of heads and a head_dim: does it run, is it right, how large is it?"""
    right: list[list[bool]] = []
    counts: dict[int, set[int]] = {}
    for head_dim in GRID_HEAD_DIMS:
        right.append([])
        for heads in GRID_HEADS:
            layer = Attention(EMBED_DIM, heads, head_dim=head_dim, source_dim=EMBED_DIM)
            right[-1].append(checked(layer, x, source)["within"])
            counts.setdefault(heads * head_dim, set()).add(parameters(layer))
    return {
        "grid_heads": list(GRID_HEADS),
        "grid_head_dims": list(GRID_HEAD_DIMS),
        "grid_right": right,
        "pairs": sum(map(len, right)),
        "pairs_right": sum(map(sum, right)),
        "one_count_for_each_product": all(len(found) == 1 for found in counts.values()),
        "parameters": sorted(counts[EMBED_DIM]),
    }


# ---- torch's layer ---------------------------------------------------------------------------


def torchs_layer(heads: int) -> tuple[nn.MultiheadAttention | None, str]:
    """torch's layer with this number of heads; or none, and what it says to that."""
    try:
        return nn.MultiheadAttention(EMBED_DIM, heads), ""
    except AssertionError as refusal:
        return None, str(refusal)


def torch_widths() -> dict[str, Any]:
    """torch's layer with inputs of their own widths for keys and values."""
    layer = nn.MultiheadAttention(
        EMBED_DIM, TORCH_HEADS, kdim=KEY_WIDTH, vdim=VALUE_WIDTH, batch_first=True
    )
    x, keys = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, KEY_WIDTH)
    values = torch.randn(BATCH, KEYS, VALUE_WIDTH)
    rows = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight, layer.out_proj.weight]
    weights = SharedWeights.of(rows, [*layer.in_proj_bias.chunk(3), layer.out_proj.bias])
    allowed = layer_budget(x, keys, values, weights, num_heads=TORCH_HEADS)
    native = Attention(EMBED_DIM, HEADS, head_dim=HEAD_DIM, source_dim=KEY_WIDTH)
    return {
        "torch_heads": TORCH_HEADS,
        "torch_head_dim": layer.head_dim,
        "key_width": KEY_WIDTH,
        "value_width": VALUE_WIDTH,
        "q_weight_of_torch": list(layer.q_proj_weight.shape),
        "k_weight_of_torch": list(layer.k_proj_weight.shape),
        "v_weight_of_torch": list(layer.v_proj_weight.shape),
        "torch_crossed": against(layer(x, keys, values)[0].detach(), allowed),
        "crossed": checked(native, x, keys),
    }


# ---- the picture -------------------------------------------------------------------------------

WIDTHS, PITCH, THICK = 4.12, 0.5, 0.22  # top of the lower half, from row to row, of a block
INPUTS, PROJECTED, SCALE = 0.98, 4.75, 0.058  # left ends; inches a number

GRID = (0.85, 0.42, 3.7, 2.75)  # inches: left, top, width and height
KEY = 4.8  # where the marks of the grid are explained
RING: dict[str, Any] = {
    "color": SERIES[1],
    "linestyle": "none",
    "marker": "o",
    "markersize": 12,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
}
CHOSEN = RING | {"color": SERIES[2], "marker": "s", "markersize": 13}
DOT: dict[str, Any] = {"color": SERIES[0], "linestyle": "none", "marker": "o", "markersize": 5}
CROSS = DOT | {"color": BAD, "marker": "X"}


def draw(figure: Figure, n: Numbers) -> None:
    """Which sizes work, in both layers; and what kdim and vdim are."""
    axes = sheet(figure, height=5.6)
    title = "heads and head_dim that work with embed_dim {sizes[embed_dim]}"
    heading(axes, GRID[0], 0.2, say(title, n))
    draw_grid(inset(figure, *GRID, frame=False), n)
    draw_key(axes, n)
    rule(axes, WIDTHS - 0.4, 0.2, WIDTH - 0.2)
    draw_widths(axes, n)


def draw_grid(axes: Axes, n: Numbers) -> None:
    """A dot for each pair of sizes that was tried; ringed, where PyTorch's layer takes it too."""
    head_dims, sizes = n["grid_head_dims"], n["sizes"]
    for wanted, look in ((True, DOT), (False, CROSS)):
        pairs = [
            (heads, row)
            for row, found in enumerate(n["grid_right"])
            for heads, right in zip(n["grid_heads"], found, strict=True)
            if right is wanted
        ]
        axes.plot([heads for heads, _ in pairs], [row for _, row in pairs], **look)
    taken = [heads for heads in n["heads_torch_takes"] if heads in n["grid_heads"]]
    axes.plot(taken, [head_dims.index(sizes["embed_dim"] // heads) for heads in taken], **RING)
    axes.plot(sizes["heads"], head_dims.index(sizes["head_dim"]), **CHOSEN)
    axes.set_xticks(n["grid_heads"])
    axes.set_yticks(range(len(head_dims)), [str(head_dim) for head_dim in head_dims])
    axes.set(xlabel="heads", ylabel="head_dim")


def draw_key(axes: Axes, n: Numbers) -> None:
    """What the marks of the grid are."""
    for count, (mark, colour, words) in enumerate(
        (
            (
                DOT,
                SERIES[0],
                "headwise.Attention gives the\npaper's formula: {pairs_right} of {pairs}",
            ),
            (
                RING,
                SERIES[1],
                "PyTorch's layer allows it, too:\nheads × head_dim = {sizes[embed_dim]}",
            ),
            (
                CHOSEN,
                SERIES[2],
                "{sizes[heads]} heads of {sizes[head_dim]}: PyTorch refuses,\n"
                "{sizes[embed_dim]} / {sizes[heads]} leaves {sizes[remainder]}",
            ),
        ),
        start=1,
    ):
        axes.plot(KEY, 0.75 * count, **mark)
        for line, text in enumerate(say(words, n).split("\n")):
            y = 0.75 * count + 0.19 * line
            axes.text(KEY + 0.2, y, text, color=colour, fontsize=9, va="center")


def draw_widths(axes: Axes, n: Numbers) -> None:
    """The widths of three inputs of PyTorch's layer, and the one width of what they become."""
    heads, head_dim = n["torch_heads"], n["torch_head_dim"]
    heading(axes, INPUTS, WIDTHS - 0.17, "PyTorch's layer: widths of the inputs")
    title = "after wq, wk, wv: always {torch_heads} heads of {torch_head_dim}"
    heading(axes, PROJECTED, WIDTHS - 0.17, say(title, n))
    for row, (name, result, option, width, shape) in enumerate(
        (
            ("query", "q", "embed_dim", n["sizes"]["embed_dim"], n["q_weight_of_torch"]),
            ("key", "k", "kdim", n["key_width"], n["k_weight_of_torch"]),
            ("value", "v", "vdim", n["value_width"], n["v_weight_of_torch"]),
        )
    ):
        top = WIDTHS + PITCH * row
        middle = top + THICK / 2
        axes.text(INPUTS - 0.12, middle, name, color=INK, fontsize=9, ha="right", va="center")
        label = f"{option} {width}"
        block(axes, INPUTS, top, SCALE * width, THICK, colour=SOFT, label=label)
        words = say(f"w{result} {{shape:shape}}", {"shape": shape})
        note(axes, PROJECTED - 0.75, middle - 0.12, words, align="center")
        axes.annotate(
            "",
            (PROJECTED - 0.25, middle),
            xytext=(INPUTS + SCALE * width + 0.08, middle),
            arrowprops={"arrowstyle": "-|>", "color": SOFT, "lw": 0.9, "mutation_scale": 7},
        )
        axes.text(PROJECTED - 0.1, middle, result, color=INK, fontsize=9, ha="center", va="center")
        for head in range(heads):
            left = PROJECTED + SCALE * head_dim * head
            wide = SCALE * head_dim - 0.03
            block(axes, left, top, wide, THICK, colour=SERIES[1], label=str(head_dim))


QUESTION = Question(
    id="must-divide",
    asks="Must embed_dim be divisible by the number of heads? And are kdim and vdim head_dim times "
    "heads?",
    claim="Only in PyTorch's layer, by convention: with a head_dim and a value_dim of their own "
    "the paper's formula holds for any sizes. kdim and vdim are widths of inputs.",
    measure=measure,
    facts=(
        Fact(
            "{sizes[heads]} heads with head_dim {sizes[head_dim]} and value_dim "
            "{sizes[value_dim]} on embed_dim {sizes[embed_dim]} (remainder {sizes[remainder]}) "
            "give the paper's formula within the error budget; the weight matrices are "
            "{q_weight:shape} for queries, {v_weight:shape} for values and {out_weight:shape} for "
            "the output",
            lambda n: n["free"]["within"] and n["sizes"]["remainder"] > 0,
        ),
        Fact(
            "so do {pairs_right} of {pairs} other pairs of heads and head_dim",
            lambda n: n["pairs_right"] == n["pairs"],
        ),
        Fact(
            "so does headwise's EinopsAttention, the einops documentation's block, whose head_dim "
            "and value_dim are free as well",
            lambda n: n["page"]["within"],
        ),
        Fact(
            "of the numbers of heads up to {heads_tried}, PyTorch's layer takes those that divide "
            "{sizes[embed_dim]} ({heads_that_divide:list}) and no other",
            lambda n: n["heads_torch_takes"] == n["heads_that_divide"],
        ),
        Fact(
            "the number of parameters depends on heads × head_dim alone; where that is "
            "{sizes[embed_dim]}, it is {parameters[0]:,}, in PyTorch's layer with any number of "
            "heads {parameters_of_torch[0]:,}",
            lambda n: (
                n["one_count_for_each_product"]
                and len(n["parameters_of_torch"]) == 1
                and n["parameters"] == n["parameters_of_torch"]
            ),
        ),
        Fact(
            "with kdim {key_width} and vdim {value_width} PyTorch's layer has weight matrices "
            "{q_weight_of_torch:shape}, {k_weight_of_torch:shape} and {v_weight_of_torch:shape}, "
            "still {torch_heads} heads of {torch_head_dim}, and gives the formula for keys and "
            "values of these widths; so does headwise.Attention with source_dim {key_width}",
            lambda n: (
                n["torch_crossed"]["within"]
                and n["crossed"]["within"]
                and n["torch_head_dim"] * n["torch_heads"] == n["sizes"]["embed_dim"]
                and n["q_weight_of_torch"] == [n["sizes"]["embed_dim"]] * 2
                and n["k_weight_of_torch"] == [n["sizes"]["embed_dim"], n["key_width"]]
                and n["v_weight_of_torch"] == [n["sizes"]["embed_dim"], n["value_width"]]
            ),
        ),
    ),
    verdict="In PyTorch's layer yes, because it sets head_dim = embed_dim / num_heads; attention "
    "itself does not need it ({sizes[heads]} heads of {sizes[head_dim]} work on embed_dim "
    "{sizes[embed_dim]}); and no, kdim and vdim are the widths of the inputs to k and v, by "
    "default embed_dim.",
    why="A head projects to its own head_dim, and the output projection brings heads × value_dim "
    "back to any width, so no size has to divide another. PyTorch's convention has an "
    "advantage: every number of heads has the same number of parameters.",
    caption="Above: each dot is a layer that gives the formula of Attention Is All You Need (the "
    "paper); the values of head_dim are not evenly spaced. Below: the widths of the three inputs "
    "of PyTorch's layer with kdim {key_width} and vdim {value_width}, to scale, and of q, k and v "
    "made from them.",
    draw=draw,
    table=FactTable(
        columns=("layer", "heads", "head_dim", "value_dim", "key, value inputs", "result"),
        rows=(
            (
                "headwise.Attention",
                "{sizes[heads]}",
                "{sizes[head_dim]}",
                "{sizes[value_dim]}",
                "{sizes[embed_dim]}, {sizes[embed_dim]}",
                "{free[output]:shape}",
            ),
            (
                "headwise's EinopsAttention",
                "{sizes[heads]}",
                "{sizes[head_dim]}",
                "{sizes[value_dim]}",
                "{sizes[embed_dim]}, {sizes[embed_dim]}",
                "{page[output]:shape}",
            ),
            (
                "headwise.Attention",
                "{sizes[heads]}",
                "{sizes[head_dim]}",
                "{sizes[head_dim]}",
                "{key_width}, {key_width}",
                "{crossed[output]:shape}",
            ),
            (
                "PyTorch's layer",
                "{torch_heads}",
                "{torch_head_dim}",
                "{torch_head_dim}",
                "{key_width}, {value_width}",
                "{torch_crossed[output]:shape}",
            ),
            (
                "PyTorch's layer",
                "{sizes[heads]}",
                "–",
                "–",
                "{sizes[embed_dim]}, {sizes[embed_dim]}",
                "refused: {refusal}",
            ),
        ),
    ),
    varies=frozenset({"refusal"}),
)

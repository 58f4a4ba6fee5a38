"""Question: must embed_dim be divisible by the number of heads?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.function.budget import Budget
from headwise.layers.attention import Attention
from headwise.layers.hooks import record_modules
from headwise.study.drawing import BAD, INK, SERIES, SOFT, Axes, Figure, Sheet
from headwise.study.implementations import EinopsPostNormBlock, SharedWeights
from headwise.study.measures import count_parameters, layer_error_budget
from headwise.study.question import Numbers, Progress

EMBED_DIM = 40
HEADS, HEAD_DIM, VALUE_DIM = 6, 10, 7  # none of them divides the next, nor EMBED_DIM its heads
BATCH, QUERIES, KEYS = 3, 24, 29
GRID_HEADS = tuple(range(1, 13))
GRID_HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 10, 13, 20, 40)
TORCH_HEADS, KEY_WIDTH, VALUE_WIDTH = 8, 29, 23  # torch calls the widths kdim and vdim
VARIES = {"refusal"}


def measure(progress: Progress) -> dict[str, Any]:
    """Check layers of free widths against the paper's formula, and try them in torch's layer."""
    x, source = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, EMBED_DIM)
    widths: dict[str, Any] = {"head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    free = Attention(EMBED_DIM, HEADS, **widths, source_dim=EMBED_DIM)
    page = EinopsPostNormBlock(EMBED_DIM, HEADS, **widths, dropout=0.0)
    accepted = {heads: torch_layer_or_error(heads)[0] for heads in range(1, EMBED_DIM + 1)}
    torch_counts = {count_parameters(layer) for layer in accepted.values() if layer is not None}
    with torch.no_grad(), record_modules([page.fc]) as runs:  # before its residual and norm
        page(x, source, source)
    of_page = SharedWeights.of_linears(page.w_qs, page.w_ks, page.w_vs, page.fc)
    budget = layer_error_budget(x, source, source, of_page, num_heads=HEADS)
    return {
        "sizes": {"embed_dim": EMBED_DIM, "heads": HEADS, **widths, "remainder": EMBED_DIM % HEADS},
        "q_weight": list(free.q_proj.weight.shape),
        "v_weight": list(free.v_proj.weight.shape),
        "out_weight": list(free.out_proj.weight.shape),
        "free": check_layer_against_formula(free, x, source),
        "page": check_output(runs[page.fc][0].output, budget),
        "heads_torch_takes": [heads for heads, layer in accepted.items() if layer],
        "heads_that_divide": [heads for heads in accepted if EMBED_DIM % heads == 0],
        "heads_tried": len(accepted),
        "parameters_of_torch": sorted(torch_counts),
        "refusal": torch_layer_or_error(HEADS)[1],
        **check_sizes_against_formula(x[:1], source[:1]),
        **check_torch_key_value_widths(),
    }


@torch.no_grad()
def check_layer_against_formula(layer: Attention, x: Tensor, source: Tensor) -> dict[str, Any]:
    weights = SharedWeights.of_linears(layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    budget = layer_error_budget(x, source, source, weights, num_heads=layer.num_heads)
    return check_output(layer(x, source), budget)


def check_output(output: Tensor, allowed: Budget) -> dict[str, Any]:
    return {"output": list(output.shape), "within": allowed.check(output).within}


def check_sizes_against_formula(x: Tensor, source: Tensor) -> dict[str, Any]:
    right: list[list[bool]] = []
    counts: dict[int, set[int]] = {}
    for head_dim in GRID_HEAD_DIMS:
        right.append([])
        for heads in GRID_HEADS:
            layer = Attention(EMBED_DIM, heads, head_dim=head_dim, source_dim=EMBED_DIM)
            right[-1].append(check_layer_against_formula(layer, x, source)["within"])
            counts.setdefault(heads * head_dim, set()).add(count_parameters(layer))
    return {
        "grid_heads": list(GRID_HEADS),
        "grid_head_dims": list(GRID_HEAD_DIMS),
        "grid_right": right,
        "pairs": sum(map(len, right)),
        "pairs_right": sum(map(sum, right)),
        "one_count_for_each_product": all(len(sizes) == 1 for sizes in counts.values()),
        "parameters": sorted(counts[EMBED_DIM]),
    }


def torch_layer_or_error(heads: int) -> tuple[nn.MultiheadAttention | None, str]:
    try:
        return nn.MultiheadAttention(EMBED_DIM, heads), ""
    except AssertionError as refusal:
        return None, str(refusal)


def check_torch_key_value_widths() -> dict[str, Any]:
    widths = {"kdim": KEY_WIDTH, "vdim": VALUE_WIDTH}
    layer = nn.MultiheadAttention(EMBED_DIM, TORCH_HEADS, **widths, batch_first=True)
    x, keys = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, KEY_WIDTH)
    values = torch.randn(BATCH, KEYS, VALUE_WIDTH)
    rows = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight, layer.out_proj.weight]
    weights = SharedWeights.of_matrices(rows, [*layer.in_proj_bias.chunk(3), layer.out_proj.bias])
    allowed = layer_error_budget(x, keys, values, weights, num_heads=TORCH_HEADS)
    native = Attention(EMBED_DIM, HEADS, head_dim=HEAD_DIM, source_dim=KEY_WIDTH)
    return {
        "torch_heads": TORCH_HEADS,
        "torch_head_dim": layer.head_dim,
        "key_width": KEY_WIDTH,
        "value_width": VALUE_WIDTH,
        **{f"{x}_weight_of_torch": list(w.shape) for x, w in zip("qkv", rows, strict=False)},
        "torch_crossed": check_output(layer(x, keys, values)[0].detach(), allowed),
        "crossed": check_layer_against_formula(native, x, keys),
    }


def facts(n: Numbers) -> dict[str, bool]:
    width = n["sizes"]["embed_dim"]
    return {
        "free-sizes": n["free"]["within"] and n["sizes"]["remainder"] > 0,
        "pairs": n["pairs_right"] == n["pairs"],
        "einops": n["page"]["within"],
        "divisors": n["heads_torch_takes"] == n["heads_that_divide"],
        "parameters": (
            n["one_count_for_each_product"]
            and len(n["parameters_of_torch"]) == 1
            and n["parameters"] == n["parameters_of_torch"]
        ),
        "input-widths": (
            n["torch_crossed"]["within"]
            and n["crossed"]["within"]
            and n["torch_head_dim"] * n["torch_heads"] == width
            and n["q_weight_of_torch"] == [width, width]
            and n["k_weight_of_torch"] == [width, n["key_width"]]
            and n["v_weight_of_torch"] == [width, n["value_width"]]
        ),
    }


WIDTHS, PITCH, THICK = 4.12, 0.5, 0.22  # top of the lower half, row pitch, block height
INPUTS, PROJECTED, SCALE = 0.98, 4.75, 0.058  # left ends; inches a number
GRID = (0.85, 0.42, 3.7, 2.75)  # inches: left, top, width and height
KEY = 4.8  # left end of the legend
DOT: dict[str, Any] = {"color": SERIES[0], "linestyle": "none", "marker": "o", "markersize": 5}
CROSS = DOT | {"color": BAD, "marker": "X"}
OPEN: dict[str, Any] = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 2}
RING = DOT | OPEN | {"color": SERIES[1]}
CHOSEN = RING | {"color": SERIES[2], "marker": "s", "markersize": 13}
LEGEND = (
    (DOT, "headwise.Attention gives the", "paper's formula: {pairs_right} of {pairs}"),
    (RING, "PyTorch's layer accepts it too:", "heads × head_dim = {sizes[embed_dim]}"),
    (
        CHOSEN,
        "{sizes[heads]} heads of {sizes[head_dim]}: PyTorch fails,",
        "{sizes[embed_dim]} / {sizes[heads]} leaves {sizes[remainder]}",
    ),
)


def draw(figure: Figure, n: Numbers) -> None:
    sheet = Sheet(figure, n, height=5.6)
    sheet.head(GRID[0], 0.2, "heads and head_dim that work with embed_dim {sizes[embed_dim]}")
    draw_grid(sheet.inset(*GRID, frame=False), n)
    for count, (mark, *lines) in enumerate(LEGEND, start=1):
        sheet.axes.plot(KEY, 0.75 * count, **mark)
        for line, words in enumerate(lines):
            sheet.write(KEY + 0.2, 0.75 * count + 0.19 * line, words, color=mark["color"])
    sheet.line(WIDTHS - 0.4)
    draw_input_widths(sheet, n)


def draw_grid(axes: Axes, n: Numbers) -> None:
    """Draw a dot for each pair of sizes; a ring marks sizes that PyTorch's layer accepts."""
    head_dims, sizes = n["grid_head_dims"], n["sizes"]
    for is_right, look in ((True, DOT), (False, CROSS)):
        pairs = [
            (heads, row)
            for row, results in enumerate(n["grid_right"])
            for heads, right in zip(n["grid_heads"], results, strict=True)
            if right is is_right
        ]
        axes.plot([heads for heads, _ in pairs], [row for _, row in pairs], **look)
    accepted = [heads for heads in n["heads_torch_takes"] if heads in n["grid_heads"]]
    rows = [head_dims.index(sizes["embed_dim"] // heads) for heads in accepted]
    axes.plot(accepted, rows, **RING)
    axes.plot(sizes["heads"], head_dims.index(sizes["head_dim"]), **CHOSEN)
    axes.set_xticks(n["grid_heads"])
    axes.set_yticks(range(len(head_dims)), [str(head_dim) for head_dim in head_dims])
    axes.set(xlabel="heads", ylabel="head_dim")


def draw_input_widths(sheet: Sheet, n: Numbers) -> None:
    heads, head_dim = n["torch_heads"], n["torch_head_dim"]
    sheet.head(INPUTS, WIDTHS - 0.17, "PyTorch's layer: widths of the inputs")
    title = "after wq, wk, wv: always {torch_heads} heads of {torch_head_dim}"
    sheet.head(PROJECTED, WIDTHS - 0.17, title)
    inputs = (
        ("query", "q", "embed_dim", n["sizes"]["embed_dim"]),
        ("key", "k", "kdim", n["key_width"]),
        ("value", "v", "vdim", n["value_width"]),
    )
    for row, (name, result, option, width) in enumerate(inputs):
        top = WIDTHS + PITCH * row
        middle = top + THICK / 2
        sheet.write(INPUTS - 0.12, middle, name, color=INK, ha="right")
        box = (INPUTS, top, SCALE * width, THICK)
        sheet.block(*box, colour=SOFT, label=f"{option} {width}")
        shape = f"w{result} {{{result}_weight_of_torch:shape}}"
        sheet.write(PROJECTED - 0.75, middle - 0.12, shape, ha="center")
        sheet.arrow((INPUTS + SCALE * width + 0.08, middle), (PROJECTED - 0.25, middle))
        sheet.write(PROJECTED - 0.1, middle, result, color=INK, ha="center")
        for head in range(heads):
            left, wide = PROJECTED + SCALE * head_dim * head, SCALE * head_dim - 0.03
            sheet.block(left, top, wide, THICK, colour=SERIES[1], label=str(head_dim))

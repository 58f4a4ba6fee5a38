"""Question: does the number of heads change the number of parameters?"""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.layers.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.study import drawing, implementations, measures, question

EMBED_DIM = 512
HEADS = tuple(heads for heads in range(1, EMBED_DIM + 1) if EMBED_DIM % heads == 0)
SHOWN = (1, 2, 4, 8, 16)  # heads of the table and the picture
HEAD_DIM = 64  # of the layers whose head_dim is fixed
EIGHT = 8  # heads, in the paper's form and in the layers that share kv heads


def measure(progress: question.Progress) -> dict[str, Any]:
    """Count the parameters of layers that differ only in their number of heads."""
    fixed_width = {heads: nn.MultiheadAttention(EMBED_DIM, heads) for heads in HEADS}
    drop_in = [MultiheadAttention(EMBED_DIM, heads) for heads in HEADS]
    fixed_head = {heads: Attention(EMBED_DIM, heads, head_dim=HEAD_DIM) for heads in SHOWN}
    grouped = {kv: Attention(EMBED_DIM, EIGHT, num_kv_heads=kv) for kv in (EIGHT, 4, 2, 1)}
    eight, paper = fixed_width[EIGHT], implementations.Paper(EMBED_DIM, EIGHT)
    of_each_head = (paper.wq, paper.wk, paper.wv)
    return {
        "embed_dim": EMBED_DIM,
        "head_dim": HEAD_DIM,
        "head_counts": list(HEADS),
        "shown": list(SHOWN),
        "tensors": parameter_shapes(eight),
        "same_tensors": all(
            parameter_shapes(layer) == parameter_shapes(eight)
            for layer in (*fixed_width.values(), *drop_in)
        ),
        "width_shared": {
            str(heads): measures.count_parameters(fixed_width[heads]) for heads in SHOWN
        },
        "width_of_a_head_fixed": {
            str(heads): measures.count_parameters(layer) for heads, layer in fixed_head.items()
        },
        "heads": EIGHT,
        "grouped": {str(kv): measures.count_parameters(layer) for kv, layer in grouped.items()},
        "one_of_a_head": list(paper.wq[0].shape),
        "one_by_one": sum(w.numel() for w in of_each_head),
        "packed": eight.in_proj_weight.numel(),
    }


def parameter_shapes(layer: nn.Module) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in layer.named_parameters()}


def facts(n: question.Numbers) -> dict[str, bool]:
    return {
        "tensors": n["same_tensors"],
        "packed": n["one_by_one"] == n["packed"],
        "head-dim": n["width_of_a_head_fixed"]["1"] < n["width_of_a_head_fixed"]["16"],
        "kv-heads": n["grouped"]["1"] < n["grouped"]["8"],
    }


def draw(figure: drawing.Figure, n: question.Numbers) -> None:
    """Draw parameters over heads: shared width, free head_dim, shared keys and values."""
    axes = figure.subplots()
    shown = n["shown"]
    shared, fixed = (
        [n[key][str(heads)] / 1e6 for heads in shown]
        for key in ("width_shared", "width_of_a_head_fixed")
    )
    grouped = [count / 1e6 for count in n["grouped"].values()]
    axes.plot(shown, fixed, "o-", color=drawing.SERIES[1], markersize=9, markerfacecolor="none")
    axes.plot(shown, shared, "o-", color=drawing.SERIES[0], markersize=5)
    # Without the first, whose kv heads are not shared.
    axes.plot([n["heads"]] * (len(grouped) - 1), grouped[1:], "D", color=drawing.SERIES[2])
    *few, last = list(n["grouped"])[1:]
    words = f"{n['heads']} query heads, {', '.join(few)} or {last} kv heads"
    labels = (
        (shown[-1], shared[-1], (0, 14), "right", "PyTorch: head_dim = {embed_dim} / heads"),
        (shown[-1], fixed[-1], (-14, 0), "right", "you choose head_dim = {head_dim}"),
        (n["heads"], grouped[2], (10, 0), "left", words),
    )
    for (x, y, offset, side, words), colour in zip(labels, drawing.SERIES, strict=False):
        look = {"ha": side, "va": "center", "color": colour}
        drawing.label_point(axes, question.fill_template(words, n), (x, y), offset, **look)
    axes.set_xticks(shown, [str(heads) for heads in shown])
    names = {"xlabel": "number of heads", "ylabel": "parameters, millions"}
    drawing.style_axes(axes, ylim=(0, 1.1 * fixed[-1]), **names)

"""When are the heads split: before the projection or after it?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise import reference
from headwise.study.charts import (
    INK,
    SERIES,
    SOFT,
    WIDTH,
    Axes,
    Figure,
    arrow,
    block,
    heading,
    note,
    rule,
    sheet,
)
from headwise.study.experiments.measures import layer_budget
from headwise.study.experiments.tracing import (
    AXES,
    PROJECTED,
    by_axes,
    cuts,
    in_order,
    on_the_way,
    trace,
    with_head_dim,
)
from headwise.study.implementations import Native, TorchLayer
from headwise.study.question import Fact, FactTable, Numbers, Question, say
from headwise.support.progress import Progress

ASKED = {"batch": 1, "length": 12, "embed_dim": 512, "heads": 2}
OTHER = {"batch": 3, "length": 5, "embed_dim": 28, "heads": 4}  # no two products the same


def measure(progress: Progress) -> dict[str, Any]:
    """Trace both layers; find what reaches q; split first, and compare."""
    asked, other = traced(ASKED), traced(OTHER)
    return {
        "asked": with_head_dim(ASKED),
        "other": OTHER,
        "shapes": asked["shapes"],
        "by_axes": by_axes(ASKED),
        "other_shapes": other["shapes"],
        "other_by_axes": by_axes(OTHER),
        "in_order": other["in_order"],
        "right": asked["right"] and other["right"],
        "fused": asked["fused"],
        "cuts": asked["cuts"],
        "cuts_after_projection": asked["cuts_after_projection"],
        "cuts_that_are_views": asked["cuts_that_are_views"],
        **split_first_compared(),
    }


# ---- the trace -------------------------------------------------------------------------------


def traced(sizes: dict[str, int]) -> dict[str, Any]:
    """What is on the way through torch's layer and the native one, and their cuts into heads."""
    embed_dim, heads = sizes["embed_dim"], sizes["heads"]
    x = torch.randn(sizes["batch"], sizes["length"], embed_dim)
    torchs, native = TorchLayer(embed_dim, heads), Native(embed_dim, heads)
    native.fill(torchs.held())
    steps = {"torch": trace(torchs, x, torchs), "native": trace(native, x, native)}
    head_dim = embed_dim // heads
    tensors = {name: on_the_way(taken, head_dim=head_dim) for name, taken in steps.items()}
    shapes = {
        name: {stage: list(tensor.shape) for stage, tensor in found.items()}
        for name, found in tensors.items()
    }
    fused = [name for name, found in shapes.items() if "weights" not in found]
    for name in fused:  # its kernel keeps them to itself: a matrix of its own has them
        shapes[name]["weights"] = list(native.inner.matrix(x).dense().shape)
    as_called = shapes == by_axes(sizes)
    allowed = layer_budget(x, x, x, torchs.held(), num_heads=heads)
    found = [cut for taken in steps.values() for cut in cuts(taken, head_dim=head_dim)]
    return {
        "shapes": shapes,
        "fused": fused,
        "right": as_called
        and all(allowed.check(found["returned"].detach()).within for found in tensors.values()),
        "in_order": as_called
        and all(in_order(found, AXES[name], sizes) for name, found in tensors.items()),
        "cuts": len(found),
        "cuts_after_projection": sum(cut.stage == PROJECTED for cut in found),
        "cuts_that_are_views": sum(cut.is_view for cut in found),
    }


# ---- the other order -------------------------------------------------------------------------


def split_first_compared() -> dict[str, Any]:
    """Cut x before the projection: which inputs reach q, and which function it is."""
    embed_dim, heads = ASKED["embed_dim"], ASKED["heads"]
    # Frozen: the Jacobian by x must not drag those by the weights along.
    layer = Native(embed_dim, heads).requires_grad_(False)
    blocks = block_diagonal(layer)
    counts = [
        sum(int(weight.count_nonzero()) for weight in each.held().matrices[:3])
        for each in (layer, blocks)
    ]
    x = torch.randn(ASKED["batch"], ASKED["length"], embed_dim)
    reach = {"attention": reached(layer, x), "split_first": reached(blocks, x)}
    head = slice(embed_dim // heads)  # the entries of q in head 0
    output, first = layer(x), split_first(x, *layer.held().matrices, heads=heads)
    whole, parted = (
        layer_budget(x, x, x, each.held(), num_heads=heads) for each in (layer, blocks)
    )
    return {
        "reached": {name: int(r[head].sum()) for name, r in reach.items()},
        "pairs": reach["attention"][head].numel(),
        "inputs": {name: int(r[head].any(0).sum()) for name, r in reach.items()},
        "reach_map": {name: by_blocks(r, heads) for name, r in reach.items()},
        "weights": counts[0],
        "weights_split_first": counts[1],
        "equal_to_blocks": parted.check(first).within and parted.check(blocks(x)).within,
        "equal_to_attention": whole.check(first).within,
        "difference": float((first - output).norm() / output.norm()),
    }


def block_diagonal(layer: Native) -> Native:
    """A copy whose projections of q, k and v connect each head with its own part of x alone."""
    copied = copy.deepcopy(layer)
    width = layer.embed_dim // layer.num_heads
    kept = torch.block_diag(*torch.ones(layer.num_heads, width, width))
    for weight in copied.held().matrices[:3]:
        weight.mul_(kept)
    return copied


def split_first(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, *, heads: int) -> Tensor:
    """Cut x into heads, and only then project each part, by the blocks on the diagonal."""
    cut = reference.split_heads(x, heads=heads)
    q, k, v = (cut @ blocks_of(w, heads).mT for w in (wq, wk, wv))
    return F.linear(reference.merge_heads(reference.head_outputs(q, k, v)), wo)


def blocks_of(weight: Tensor, heads: int) -> Tensor:
    """(heads, width, width): the blocks on the diagonal."""
    parts = enumerate(weight.chunk(heads))
    return torch.stack([rows.chunk(heads, dim=1)[head] for head, rows in parts])


def reached(layer: Native, x: Tensor) -> Tensor:
    """(entries of q, inputs), bool: where the last token's Jacobian is not zero."""

    def q(token: Tensor) -> Tensor:
        matrix = layer.inner.matrix(torch.cat([x[:, :-1], token[None, None]], 1))
        result: Tensor = matrix.q[0, :, -1].flatten()
        return result

    result: Tensor = torch.autograd.functional.jacobian(q, x[0, -1], vectorize=True) != 0
    return result


def by_blocks(reach: Tensor, heads: int) -> list[list[float]]:
    """What share is not zero, for the entries of each head (rows) and each part of x."""
    return F.adaptive_avg_pool2d(reach.float()[None], heads)[0].tolist()


# ---- the picture -------------------------------------------------------------------------------

LEFT, FULL = 1.35, 3.35  # inches: where blocks begin, and the width of embed_dim
TOP, PITCH, THICK = 0.6, 0.55, 0.24  # of the first stage, from stage to stage, of a block
STAGES = (  # what it is, how it is drawn, what is done to get to the next
    ("x", "x", "whole", "times wq: each entry of q is made of all {asked[embed_dim]} inputs"),
    ("q", "q", "touching", "the split: a view, nothing is computed"),
    ("per_head", "per head", "apart", "softmax(q kᵀ / √{asked[head_dim]}); k is split like q"),
    ("weights", "attention weights", "square", "times v, which is split like q"),
    ("head_outputs", "head outputs", "apart", "concatenated"),
    ("merged", "concatenated", "touching", "times wo: each number is made of all heads"),
    ("output", "output", "whole", ""),
)

GAP = 0.12  # between heads
COLUMNS = {"torch": 5.42, "native": 6.85}  # middles of the two columns of shapes


def draw(figure: Figure, n: Numbers) -> None:
    """The way of the numbers through the layer, and which inputs reach which entries of q."""
    axes = sheet(figure, height=6.6)
    for layer, name, remark in (
        ("torch", "PyTorch's layer", "length first from q on"),
        ("native", "headwise.Attention", "batch first"),
    ):
        heading(axes, COLUMNS[layer], 0.17, name, align="center")
        note(axes, COLUMNS[layer], 0.36, remark, align="center")
    for row, (stage, name, form, then) in enumerate(STAGES):
        top = TOP + PITCH * row
        middle = top + THICK / 2
        axes.text(LEFT - 0.12, middle, name, color=INK, fontsize=9, ha="right", va="center")
        draw_stage(axes, n, top, form)
        for layer, x in COLUMNS.items():
            shape = say(f"{{shapes[{layer}][{stage}]:shape}}", n)
            axes.text(x, middle, shape, color=INK, fontsize=9, ha="center", va="center")
            if stage == "weights" and layer in n["fused"]:
                note(axes, x, middle + 0.19, "only in matrix(x)", align="center")
        if then:
            arrow(axes, LEFT + FULL * 0.06, top + THICK + 0.03, top + PITCH - 0.03, say(then, n))
    draw_reach(axes, n, top=4.78)


def draw_stage(axes: Axes, n: Numbers, top: float, form: str) -> None:
    """One stage: a block that is whole, or one for each head, in the colour of the head."""
    if form == "whole":
        block(axes, LEFT, top, FULL, THICK, colour=SOFT, label=say("{asked[embed_dim]}", n))
        return
    pitch = FULL / n["asked"]["heads"]
    wide = {"square": THICK, "touching": pitch, "apart": pitch - GAP}[form]
    for head in range(n["asked"]["heads"]):
        left = LEFT + pitch * (head + 0.5) - wide / 2
        label = "" if form == "square" else say(f"head {head}: {{asked[head_dim]}}", n)
        block(axes, left, top, wide, THICK, colour=SERIES[head], label=label)


def draw_reach(axes: Axes, n: Numbers, *, top: float) -> None:
    """Two squares: entries of q down, inputs across, coloured where one reaches the other."""
    rule(axes, top - 0.27, 0.2, WIDTH - 0.2)
    side = 1.3
    for left, key, name, words, weights in (
        (0.5, "attention", "Project, then split", "Attention", "weights"),
        (4.2, "split_first", "Split, then project", "Another function", "weights_split_first"),
    ):
        heading(axes, left, top + 0.03, name)
        draw_square(axes, n["reach_map"][key], left, top + 0.2, side)
        inputs = say("{asked[embed_dim]} inputs", n)
        note(axes, left + side / 2, top + side + 0.33, inputs, align="center")
        entries = say("{asked[embed_dim]} entries of q", n)
        note(axes, left - 0.13, top + 0.2 + side / 2, entries, align="center", turn=90.0)
        lines = (
            words,
            "each entry of q depends",
            f"on {{inputs[{key}]}} inputs",
            "",
            "wq, wk and wv have",
            f"{{{weights}:,}} parameters",
        )
        for line, template in enumerate(lines):
            write = heading if line == 0 else note
            write(axes, left + side + 0.14, top + 0.34 + 0.2 * line, say(template, n))


def draw_square(
    axes: Axes, shares: list[list[float]], left: float, top: float, side: float
) -> None:
    """A row for each head in its colour, as strong as the share that is reached."""
    small, right, bottom = side / len(shares), left + side, top + side
    for head, row in enumerate(shares):
        for part, share in enumerate(row):
            place = (left + small * part, top + small * head, small, small)
            block(axes, *place, colour=SERIES[head], alpha=share)
    across, down = [left, right, right, left, left], [top, top, bottom, bottom, top]
    axes.plot(across, down, color=SOFT, linewidth=0.8)


QUESTION = Question(
    id="split",
    asks="When does the split into heads happen: is x cut into pieces before the projection, or "
    "are q, k and v cut after it?",
    claim="After the projection: every entry of q is made of all of x, and only then are q, k and "
    "v cut into heads. Cutting x first is another function, with fewer parameters.",
    measure=measure,
    facts=(
        Fact(
            "in PyTorch's layer x is {shapes[torch][x]:shape}, q {shapes[torch][q]:shape}, q per "
            "head {shapes[torch][per_head]:shape}, the attention weights "
            "{shapes[torch][weights]:shape}, the concatenated head outputs "
            "{shapes[torch][merged]:shape}, the output {shapes[torch][output]:shape}; there and in "
            "headwise.Attention every shape is what the names of its axes say (its fused kernel "
            "does not return attention weights: theirs is the shape of matrix(x).dense())",
            lambda n: n["shapes"] == n["by_axes"] and n["fused"] == ["native"],
        ),
        Fact(
            "so is every shape for {other[batch]} sequences of {other[length]} tokens with "
            "embed_dim {other[embed_dim]} and {other[heads]} heads; number for number so is the "
            "order inside each axis: row b × heads + h of PyTorch's q per head is head h of "
            "sequence b",
            lambda n: n["other_shapes"] == n["other_by_axes"] and n["in_order"],
        ),
        Fact(
            "the outputs of both layers, with the same weights, are those of the paper's formula "
            "within the error budget",
            lambda n: n["right"],
        ),
        Fact(
            "of the {cuts} cuts into heads in the two forward passes, {cuts_after_projection} come "
            "after the projection, and {cuts_that_are_views} are views: nothing is computed or "
            "copied",
            lambda n: (
                n["cuts"] == 3 * len(n["shapes"])  # q, k and v in each layer
                and n["cuts"] == n["cuts_after_projection"] == n["cuts_that_are_views"]
            ),
        ),
        Fact(
            "the {asked[head_dim]} entries of q in one head depend on {inputs[attention]} "
            "of {asked[embed_dim]} inputs: {reached[attention]:,} of {pairs:,} derivatives are not "
            "zero; where x is split first, they depend on {inputs[split_first]}",
            lambda n: (
                n["reached"]["attention"] == n["pairs"]
                and n["inputs"]["split_first"] == n["asked"]["head_dim"]
                and n["reached"]["split_first"] == n["asked"]["head_dim"] ** 2
            ),
        ),
        Fact(
            "splitting x first equals attention with block-diagonal projections, within the error "
            "budget; that leaves {weights_split_first:,} of the {weights:,} parameters of wq, wk "
            "and wv",
            lambda n: (
                n["equal_to_blocks"]
                and n["weights_split_first"] * n["asked"]["heads"] == n["weights"]
            ),
        ),
        Fact(
            "splitting x first does not equal attention with the whole matrices: the relative "
            "difference of the outputs is {difference:percent}",
            lambda n: not n["equal_to_attention"],
        ),
    ),
    verdict="After the projection: all {asked[embed_dim]} numbers of a token go into every entry "
    "of q, k and v, and only these are cut into {asked[heads]} heads of {asked[head_dim]}; cutting "
    "x first is another function.",
    why="The projection mixes all of x, so no head is tied to a part of the embedding. The cut "
    "itself computes nothing: it only says which columns belong to which head. If x were cut "
    "first, each head would see its own part of x alone, as if the projections kept only the "
    "blocks on their diagonals.",
    caption="Above: the shapes in a real forward pass, from x to the output. A colour is a head; "
    "grey belongs to no head. q is computed as one piece, and the next line cuts it. "
    "headwise.Attention attends in one fused step, which does not return the attention weights; "
    "their shape is that of matrix(x), which computes them on request. Below: a cell is coloured "
    "where an entry of q (row) depends on an input (column), that is where the derivative is not "
    "zero. In attention that is everywhere; where x is split first, each head reaches only its own "
    "part of x.",
    draw=draw,
    table=FactTable(
        columns=("stage", "PyTorch's layer", "its axes", "headwise.Attention", "its axes"),
        rows=tuple(
            (
                name,
                f"{{shapes[torch][{stage}]:shape}}",
                ", ".join(AXES["torch"][stage]).replace("*", " × "),
                f"{{shapes[native][{stage}]:shape}}",
                ", ".join(AXES["native"][stage]).replace("*", " × "),
            )
            for stage, name in [
                *((stage, name) for stage, name, *_ in STAGES),
                ("returned", "returned"),
            ]
        ),
    ),
)

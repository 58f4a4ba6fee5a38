"""When are the heads split: before the projection or after it?"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import functional
from headwise.layer.attention import Attention
from headwise.models.reading import Progress
from headwise.studies.experiments.per_head import Weights, budget
from headwise.studies.experiments.tracing import PROJECTED, cuts, shapes_on_the_way, trace
from headwise.studies.pictures.canvas import (
    WIDTH,
    arrow,
    block,
    heading,
    inset,
    note,
    rule,
    sheet,
    tinted,
)
from headwise.studies.pictures.style import INK, SERIES, SOFT
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASKED = {"batch": 1, "length": 12, "embed_dim": 512, "heads": 2}
OTHER = {"batch": 3, "length": 5, "embed_dim": 28, "heads": 4}  # no two products the same
ENTRIES = 64  # of q, whose inputs are counted
CELLS = 32  # a picture of a Jacobian is this many blocks of entries by this many of inputs

# What each axis is. "a*b" is one axis that holds a and b.
AXES = {
    "torch": {
        "x": ("batch", "length", "embed_dim"),
        "q": ("length", "batch", "embed_dim"),
        "per_head": ("batch*heads", "length", "head_dim"),
        "weights": ("batch*heads", "length", "length"),
        "head_outputs": ("batch*heads", "length", "head_dim"),
        "merged": ("length*batch", "embed_dim"),
        "output": ("length", "batch", "embed_dim"),
        "returned": ("batch", "length", "embed_dim"),
    },
    "native": {
        "x": ("batch", "length", "embed_dim"),
        "q": ("batch", "length", "embed_dim"),
        "per_head": ("batch", "heads", "length", "head_dim"),
        "weights": ("batch", "heads", "length", "length"),
        "head_outputs": ("batch", "heads", "length", "head_dim"),
        "merged": ("batch", "length", "embed_dim"),
        "output": ("batch", "length", "embed_dim"),
        "returned": ("batch", "length", "embed_dim"),
    },
}


def measure(progress: Progress) -> dict[str, Any]:
    """Trace both layers; find what reaches q; split first, and compare."""
    asked, other = traced(ASKED), traced(OTHER)
    return {
        "asked": ASKED | {"head_dim": ASKED["embed_dim"] // ASKED["heads"]},
        "other": OTHER,
        "shapes": asked["shapes"],
        "by_axes": by_axes(ASKED),
        "other_shapes": other["shapes"],
        "other_by_axes": by_axes(OTHER),
        "cuts": asked["cuts"],
        "cuts_after_projection": asked["cuts_after_projection"],
        "cuts_that_are_views": asked["cuts_that_are_views"],
        **split_first_compared(),
    }


# ---- the trace -------------------------------------------------------------------------------


def traced(sizes: dict[str, int]) -> dict[str, Any]:
    """Shapes on the way through torch's layer and the native one, and their cuts into heads."""
    embed_dim, heads = sizes["embed_dim"], sizes["heads"]
    x = torch.randn(sizes["batch"], sizes["length"], embed_dim)
    packed = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
    native = Attention(embed_dim, heads)
    steps = {
        "torch": trace(packed, x, lambda x: packed(x, x, x)),
        "native": trace(native, x, native),
    }
    head_dim = embed_dim // heads
    shapes = {name: shapes_on_the_way(taken, head_dim=head_dim) for name, taken in steps.items()}
    # The fused kernel keeps its weights to itself: the layer's matrix has them.
    shapes["native"].setdefault("weights", list(native.matrix(x).dense().shape))
    found = [cut for taken in steps.values() for cut in cuts(taken, head_dim=head_dim)]
    return {
        "shapes": shapes,
        "cuts": len(found),
        "cuts_after_projection": sum(cut.stage == PROJECTED for cut in found),
        "cuts_that_are_views": sum(cut.is_view for cut in found),
    }


def by_axes(sizes: dict[str, int]) -> dict[str, dict[str, list[int]]]:
    """The shapes that the names of the axes say."""
    known = sizes | {"head_dim": sizes["embed_dim"] // sizes["heads"]}
    return {
        layer: {
            stage: [math.prod(known[part] for part in axis.split("*")) for axis in axes]
            for stage, axes in stages.items()
        }
        for layer, stages in AXES.items()
    }


def said(axes: tuple[str, ...]) -> str:
    """The names of a tensor's axes, in words."""
    return ", ".join(axis.replace("*", " × ") for axis in axes)


# ---- the other order -------------------------------------------------------------------------


def split_first_compared() -> dict[str, Any]:
    """Cut x before the projection: which inputs reach q, and which function it is."""
    embed_dim, heads = ASKED["embed_dim"], ASKED["heads"]
    # Frozen: the Jacobian by x must not drag those by the weights along.
    layer = Attention(embed_dim, heads).requires_grad_(False)
    blocks = block_diagonal(layer)
    x = torch.randn(ASKED["batch"], ASKED["length"], embed_dim)
    reach = {"attention": reached(layer, x), "split_first": reached(blocks, x)}
    weights = parts(layer)
    output, first = layer(x), split_first(x, *weights, heads=heads)
    allowed = budget(x, x, x, Weights.of(*projections(blocks)), heads=heads)
    unequal = allowed.check(output)
    return {
        "entries": ENTRIES,
        "reached": {name: int(r[:ENTRIES].sum()) for name, r in reach.items()},
        "pairs": ENTRIES * embed_dim,
        "inputs": {name: int(r[:ENTRIES].any(0).sum()) for name, r in reach.items()},
        "reach_map": {name: pooled(r) for name, r in reach.items()},
        "weights": sum(weight.numel() for weight in weights[:3]),
        "weights_split_first": sum(blocks_of(w, heads).numel() for w in weights[:3]),
        "equal_to_blocks": allowed.check(first).within and allowed.check(blocks(x)).within,
        "equal_to_attention": unequal.within,
        "difference": unequal.error,
        "largest_output": float(output.abs().max()),
    }


def projections(layer: Attention) -> tuple[nn.Linear, ...]:
    """Those of q, k, v and the output."""
    return layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj


def parts(layer: Attention) -> list[Tensor]:
    """Their weights; biases are zero in a new layer."""
    return [projection.weight for projection in projections(layer)]


def block_diagonal(layer: Attention) -> Attention:
    """A copy whose projections of q, k and v connect each head with its own part of x alone."""
    copied = copy.deepcopy(layer)
    width = layer.embed_dim // layer.num_heads
    kept = torch.block_diag(*torch.ones(layer.num_heads, width, width))
    for weight in parts(copied)[:3]:
        weight.mul_(kept)
    return copied


def split_first(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, *, heads: int) -> Tensor:
    """Cut x into heads, and only then project each part, by the blocks on the diagonal."""
    cut = functional.split_heads(x, heads=heads)
    q, k, v = (cut @ blocks_of(w, heads).mT for w in (wq, wk, wv))
    return F.linear(functional.merge_heads(functional.head_outputs(q, k, v)), wo)


def blocks_of(weight: Tensor, heads: int) -> Tensor:
    """(heads, width, width): the blocks on the diagonal."""
    blocks: Tensor = weight.unflatten(0, (heads, -1)).unflatten(-1, (heads, -1))
    return torch.stack([blocks[head, :, head] for head in range(heads)])


def reached(layer: Attention, x: Tensor) -> Tensor:
    """(entries of q, inputs), bool: where the last token's Jacobian is not zero."""

    def q(token: Tensor) -> Tensor:
        return layer.matrix(torch.cat([x[:, :-1], token[None, None]], 1)).q[0, :, -1].flatten()

    jacobian = torch.autograd.functional.jacobian(q, x[0, -1], vectorize=True)
    assert isinstance(jacobian, Tensor)
    return jacobian != 0


def pooled(reach: Tensor) -> list[list[float]]:
    """The share of each block of entries and inputs that is not zero."""
    return F.adaptive_avg_pool2d(reach.float()[None], CELLS)[0].tolist()


# ---- the picture -----------------------------------------------------------------------------

LEFT, FULL, GAP = (
    1.35,
    3.5,
    0.12,
)  # inches: where blocks begin, the width of embed_dim, between heads
PITCH, THICK = 0.54, 0.24  # from stage to stage, and of a block
COLUMNS = {"torch": 5.6, "native": 6.85}  # middles of the two columns of shapes
STAGES = (  # what it is, how it is drawn, what is done to get to the next
    ("x", "x", "whole", "times wq: each entry of q is made of all {asked[embed_dim]} inputs"),
    ("q", "q", "touching", "the split: a view, nothing is computed"),
    ("per_head", "per head", "apart", "q times k, softmax; k and v were split the same way"),
    ("weights", "weights", "square", "times v"),
    ("head_outputs", "head outputs", "apart", "side by side"),
    ("merged", "merged", "touching", "times wo: each number is made of all heads"),
    ("output", "output", "whole", ""),
)


def draw(figure: Figure, n: Numbers) -> None:
    """The way of the numbers through the layer, and which inputs reach which entries of q."""
    axes = sheet(figure, height=6.2)
    for layer, name in (("torch", "torch's layer"), ("native", "headwise")):
        heading(axes, COLUMNS[layer], 0.17, name, align="center")
    for row, (stage, name, form, then) in enumerate(STAGES):
        top = 0.36 + PITCH * row
        middle = top + THICK / 2
        axes.text(LEFT - 0.15, middle, name, color=INK, ha="right", va="center")
        draw_stage(axes, n, top, form)
        for layer, x in COLUMNS.items():
            shape = say(f"{{shapes[{layer}][{stage}]:shape}}", n)
            axes.text(x, middle, shape, color=INK, fontsize=9, ha="center", va="center")
        if then:
            arrow(axes, LEFT + FULL * 0.06, top + THICK + 0.03, top + PITCH - 0.03, say(then, n))
    draw_reach(figure, axes, n, top=4.42)


def draw_stage(axes: Axes, n: Numbers, top: float, form: str) -> None:
    """One stage: a block that is whole, or one for each head, in the colour of the head."""
    heads = n["asked"]["heads"]
    if form == "whole":
        block(axes, LEFT, top, FULL, THICK, colour=SOFT, label=say("{asked[embed_dim]}", n))
        return
    pitch = FULL / heads
    gap = 0.0 if form == "touching" else GAP
    for head in range(heads):
        wide = THICK if form == "square" else pitch - gap
        left = LEFT + pitch * (head + 0.5) - wide / 2
        label = "" if form == "square" else say("{asked[head_dim]}", n)
        block(axes, left, top, wide, THICK, colour=SERIES[head], label=label)


def draw_reach(figure: Figure, axes: Axes, n: Numbers, *, top: float) -> None:
    """Two squares: entries of q down, inputs across, coloured where one reaches the other."""
    rule(axes, top - 0.25, 0.2, WIDTH - 0.2)
    side = 1.3
    for left, key, name, words in (
        (0.55, "attention", "Project, then split", "Attention"),
        (4.25, "split_first", "Split, then project", "Another function"),
    ):
        image = inset(figure, left, top + 0.2, side, side)
        colours = tinted(n["reach_map"][key], positive=SERIES[2], negative=SERIES[2], top=1.0)
        image.imshow(colours, aspect="auto", interpolation="none")
        heading(axes, left, top + 0.05, name)
        note(
            axes,
            left + side / 2,
            top + side + 0.3,
            say("{asked[embed_dim]} inputs", n),
            align="center",
        )
        axes.text(
            left - 0.12,
            top + 0.2 + side / 2,
            say("{asked[embed_dim]} entries of q", n),
            color=SOFT,
            fontsize=8,
            ha="center",
            va="center",
            rotation=90,
        )
        lines = (
            words,
            "the first {entries} entries of q",
            f"depend on {{inputs[{key}]}} inputs",
            "",
            "wq, wk and wv hold",
            "{weights:,} numbers" if key == "attention" else "{weights_split_first:,} numbers",
        )
        for line, template in enumerate(lines):
            write = heading if line == 0 else note
            write(axes, left + side + 0.12, top + 0.35 + 0.19 * line, say(template, n))


QUESTION = Question(
    id="split",
    asks="When does the split into heads happen: is x cut into pieces before the projection, or "
    "are q, k and v cut after it?",
    claim="After the projection: every entry of q is made of all of x, and only then are q, k and "
    "v cut into heads. Cutting x first is another function, with fewer parameters.",
    measure=measure,
    facts=(
        Fact(
            "torch's layer takes x {shapes[torch][x]:shape} over q {shapes[torch][q]:shape}, per "
            "head {shapes[torch][per_head]:shape}, weights {shapes[torch][weights]:shape}, merged "
            "{shapes[torch][merged]:shape} to the output {shapes[torch][output]:shape}, and "
            "headwise over the same stages, as the names of the axes say",
            lambda n: n["shapes"] == n["by_axes"],
        ),
        Fact(
            "the names of the axes also give every shape for a batch of {other[batch]} of "
            "{other[length]} tokens, {other[embed_dim]} wide, with {other[heads]} heads",
            lambda n: n["other_shapes"] == n["other_by_axes"],
        ),
        Fact(
            "of the {cuts} cuts into heads in the two passes, {cuts_after_projection} come after "
            "the projection, and {cuts_that_are_views} are views: they compute and copy nothing",
            lambda n: (
                n["cuts"] == 3 * len(n["shapes"])  # q, k and v in each layer
                and n["cuts"] == n["cuts_after_projection"] == n["cuts_that_are_views"]
            ),
        ),
        Fact(
            "the first {entries} entries of q depend on {inputs[attention]} of "
            "{asked[embed_dim]} inputs: {reached[attention]:,} of {pairs:,} derivatives are not "
            "zero; where x is split first, on {inputs[split_first]}",
            lambda n: (
                n["reached"]["attention"] == n["pairs"]
                and n["inputs"]["split_first"] == n["asked"]["head_dim"]
            ),
        ),
        Fact(
            "splitting x first equals attention whose projections are block-diagonal, with "
            "{weights_split_first:,} of {weights:,} numbers: the share of one head",
            lambda n: (
                n["equal_to_blocks"]
                and n["weights_split_first"] * n["asked"]["heads"] == n["weights"]
            ),
        ),
        Fact(
            "splitting x first does not equal attention: they are up to {difference:.2f} apart, "
            "and the outputs are at most {largest_output:.2f}",
            lambda n: not n["equal_to_attention"],
        ),
    ),
    verdict="After the projection: all {asked[embed_dim]} numbers of a token go into every entry "
    "of q, k and v, and only these are cut into {asked[heads]} heads of {asked[head_dim]}; cutting "
    "x first is another function.",
    why="The projection mixes all of x, so no head is tied to a part of the embedding. The cut "
    "itself computes nothing: it only says which columns belong to which head. Cut first, each "
    "head would see its own part of x alone, and the projections would keep only the blocks on "
    "their diagonals.",
    caption="Above: the shapes in a real forward pass, from x to the output; a colour is a head, "
    "grey belongs to no head. x is whole, q has the heads' columns, and the next line cuts them. "
    "Below: which inputs (across) reach which entries of q (down), by the Jacobian of one token: "
    "all of them in attention, only a head's own part where x is split first.",
    draw=draw,
    table=Table(
        columns=("stage", "torch's layer", "its axes", "headwise", "its axes"),
        rows=tuple(
            (
                name,
                f"{{shapes[torch][{stage}]:shape}}",
                said(AXES["torch"][stage]),
                f"{{shapes[native][{stage}]:shape}}",
                said(AXES["native"][stage]),
            )
            for stage, name in [
                *((stage, name) for stage, name, *_ in STAGES),
                ("returned", "returned"),
            ]
        ),
    ),
)

"""The picture everybody draws: embedding, heads, concatenation, output; from a real forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headwise import reference
from headwise.bundled_models import demo_text, minilm
from headwise.layers.native.attention import Attention
from headwise.study.charts import (
    SERIES,
    WIDTH,
    Axes,
    Figure,
    arrow,
    heading,
    inset,
    note,
    rule,
    sheet,
    tinted,
    weight_map,
)
from headwise.study.experiments.measures import layer_budget
from headwise.study.experiments.same_weights import of_projections
from headwise.study.implementations import Native
from headwise.study.question import Fact, FactTable, Numbers, Question, say
from headwise.support.progress import Progress

WORDS = 9  # of the text: few enough for every map to be drawn whole
EVERY = 4  # one number in so many is drawn of what is embed_dim wide
ENLARGED = 3  # heads
NEARLY_ALL = 0.98  # share of the numbers that is below the strongest colour
PLACES = ("the token before", "the same token", "the token after")


def measure(progress: Progress) -> dict[str, Any]:
    """Read a few words with MiniLM, and take its first layer apart: its input is the embeddings."""
    sentence = " ".join(demo_text.paragraphs()[0].split()[:WORDS])
    reading = minilm.read(sentence, sentence, progress=progress)
    call = reading.calls[0]
    native = Native(call.x.shape[-1], reading.num_heads).requires_grad_(False)
    native.fill(of_projections(call.projections)).eval()
    layer, x = native.inner, call.x[:1]
    return {
        "model": reading.model,
        "tokens": list(reading.tokens),
        "length": len(reading.tokens),
        "heads": layer.num_heads,
        "head_dim": layer.head_dim,
        "embed_dim": layer.embed_dim,
        "layers": len(reading.calls),
        "layer": 0,
        "every": EVERY,
        **forward(layer, x),
        **added_up(native, x, models_own=call.output[:1]),
        "stand_out": stand_out(layer.matrix(x).dense()[0], reading.tokens),
    }


# ---- what is measured --------------------------------------------------------------------------


def forward(layer: Attention, x: Tensor) -> dict[str, Any]:
    """What is drawn, from the pass itself; and whether the parts are what they are said to be."""
    seen: dict[str, Tensor] = {}
    projections = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj}
    hooks = [
        projection.register_forward_hook(
            lambda _, given, result, name=name: seen.update(
                {name: result, f"into_{name}": given[0]}
            )
        )
        for name, projection in (projections | {"output": layer.out_proj}).items()
    ]
    layer(x)
    for hook in hooks:
        hook.remove()
    maps, outputs = layer.matrix(x).dense(), layer.head_outputs(x)
    merged, rows = seen["into_output"], maps.double().sum(-1)
    drawn = {"x": x, "merged": merged} | {name: seen[name] for name in (*projections, "output")}
    return {
        "shapes": {
            "x": list(x.shape[1:]),
            "w": list(layer.q_proj.weight.shape),
            "w_of_a_head": [layer.head_dim, layer.embed_dim],
            "q": list(layer.matrix(x).q.shape[1:]),
            "weights": list(maps.shape[1:]),
            "head_outputs": list(outputs.shape[1:]),
            "merged": list(merged.shape[1:]),
            "wo": list(layer.out_proj.weight.shape),
            "output": list(seen["output"].shape[1:]),
        },
        "reads_all_of_x": all(seen[f"into_{name}"].equal(x) for name in projections),
        "concatenated": merged.equal(torch.cat(outputs.unbind(1), -1)),
        "rows": rows.numel(),
        "row_error": float((rows - 1).abs().max()),
        # Each weight is one of n terms over their rounded sum: n - 1 additions and a division.
        "row_bound": maps.shape[-1] * torch.finfo(maps.dtype).eps,
        "maps": [[[round(w, 4) for w in row] for row in head] for head in maps[0].tolist()],
        "strips": {name: strip(values) for name, values in drawn.items()},
    }


def strip(values: Tensor) -> list[list[int]]:
    """One number in `EVERY`, in percent of a size that nearly all of them stay under."""
    shown = values[0, :, ::EVERY]
    return (shown / shown.abs().quantile(NEARLY_ALL) * 100).clamp(-100, 100).round().int().tolist()


def stand_out(maps: Tensor, tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    """Heads that differ in the place of most of their weight; for each place the strongest.

    Places are the neighbours of a token, the token itself, and each token of the text.
    """
    # Over the tokens that have such a neighbour.
    neighbours = [maps.diagonal(offset, 1, 2).mean(-1) for offset in (-1, 0, 1)]
    largest, places = torch.stack([*neighbours, *maps.mean(1).unbind(-1)]).max(0)
    found: dict[int, dict[str, Any]] = {}
    for head in largest.argsort(descending=True).tolist():
        place = int(places[head])
        name = (*PLACES, *tokens)[place]
        found.setdefault(place, {"head": head, "place": name, "share": float(largest[head])})
    return list(found.values())[:ENLARGED]


def added_up(native: Native, x: Tensor, *, models_own: Tensor) -> dict[str, Any]:
    """The output as a sum of what the heads add, and with the heads in another order."""
    layer, heads, bias = native.inner, native.num_heads, native.inner.out_proj.bias
    allowed = layer_budget(x, x, x, native.held(), num_heads=heads)
    output, turned = layer(x), reference.merge_heads(layer.head_outputs(x).flip(1))
    rows = layer.out_proj.weight.unflatten(1, (heads, -1)).flip(1).flatten(1)
    swapped = layer.out_proj(turned)
    return {
        "equal_to_model": allowed.check(models_own).within,
        "equal_to_formula": allowed.check(output).within,
        "sum_equal": allowed.check(layer.contributions(x).sum(1) + bias).within,
        "order_equal": allowed.check(swapped).within,
        "order_moved": float((swapped - output).norm() / output.norm()),
        "order_of_both_equal": allowed.check(linear(turned, rows, bias)).within,
    }


# ---- the picture -------------------------------------------------------------------------------

HEIGHT = 9.78  # inches, like everything here
LEFT, FULL = 1.14, 6.3  # where the blocks begin, and how wide embed_dim is
GAP = 0.06  # between heads
LINE = 0.138  # a token's row where it has a name
THIN = 0.4  # a block without names
CLOSE_UP = 1.54  # a side of a map that is enlarged

X, CUT, MAPS, READ, MERGED, OUTPUT, CLOSE = 0.36, 2.52, 4.29, 5.17, 5.97, 6.77, 7.79  # tops
TICKS = (0.0, 0.01, 0.1, 0.5, 1.0)  # of the colour bar


def draw(figure: Figure, n: Numbers) -> None:
    """From the embeddings at the top to the output at the bottom, and three heads enlarged."""
    axes = sheet(figure, height=HEIGHT)
    tall, middle = LINE * n["length"], LEFT + FULL / n["heads"] / 2
    heading(axes, LEFT, X - 0.17, say("x {shapes[x]:shape}: the embeddings of {length} tokens", n))
    note(axes, LEFT + FULL, X - 0.17, "green: positive, orange: negative", align="right")
    strips(figure, n["strips"]["x"], X, tall)
    names(axes, n["tokens"], LEFT - 0.06, X, LINE)
    words = (
        "times wq, wk and wv {shapes[w]:shape}: every head reads all of x with its "
        "{shapes[w_of_a_head]:shape} part of each"
    )
    arrow(axes, middle, X + tall + 0.05, CUT - 0.24, say(words, n))
    draw_heads(figure, axes, n, middle)
    label(axes, MERGED, "concatenated", say("{shapes[merged]:shape}", n))
    strips(figure, n["strips"]["merged"], MERGED, THIN)
    words = "times wo {shapes[wo]:shape}, plus its bias: every number mixes all {heads} heads"
    arrow(axes, middle, MERGED + THIN + 0.05, OUTPUT - 0.05, say(words, n))
    label(axes, OUTPUT, "output", say("{shapes[output]:shape}", n))
    strips(figure, n["strips"]["output"], OUTPUT, THIN)
    draw_close_ups(figure, axes, n)


def draw_heads(figure: Figure, axes: Axes, n: Numbers, middle: float) -> None:
    """Everything that each head has for itself: q, k, v, a map, and what it reads."""
    pitch, bottom = FULL / n["heads"], CUT + 3 * THIN + 2 * 0.06
    side = pitch - GAP
    note(axes, LEFT - 0.08, CUT - 0.12, "head", align="right")
    for head in range(n["heads"]):
        note(axes, LEFT + pitch * (head + 0.5), CUT - 0.12, str(head), align="center")
    for row, name in enumerate(("q", "k", "v")):
        top = CUT + (THIN + 0.06) * row
        label(axes, top, name, say("{shapes[q]:shape}", n))
        strips(figure, n["strips"][name], top, THIN, pieces=n["heads"])
    words = "softmax(q kᵀ / √{head_dim}): the attention weights; in every map, each row sums to one"
    arrow(axes, middle, bottom + 0.05, MAPS - 0.05, say(words, n))
    for head, weights in enumerate(n["maps"]):
        left = LEFT + pitch * head + GAP / 2
        weight_map(inset(figure, left, MAPS, side, side, frame=False), weights)
    label(axes, MAPS, "weights", say("{shapes[weights]:shape}", n))
    words = "times v: each token gets the mean of the values, weighted by its row of the map"
    arrow(axes, middle, MAPS + side + 0.05, READ - 0.05, words)
    label(axes, READ, "head outputs", say("{shapes[head_outputs]:shape}", n))
    strips(figure, n["strips"]["merged"], READ, THIN, pieces=n["heads"])
    words = "concatenated, in the order of the heads: the same numbers"
    arrow(axes, middle, READ + THIN + 0.05, MERGED - 0.05, words)


def draw_close_ups(figure: Figure, axes: Axes, n: Numbers) -> None:
    """A few heads enlarged, with the names of the tokens; the colours go by the root."""
    rule(axes, OUTPUT + THIN + 0.19, 0.2, WIDTH - 0.2)
    for column, found in enumerate(n["stand_out"]):
        left = 0.84 + 2.46 * column
        heading(axes, left, CLOSE - 0.29, say("head {head}", found))
        note(axes, left, CLOSE - 0.11, say("{share:percent} on {place}", found))
        image = inset(figure, left, CLOSE, CLOSE_UP, CLOSE_UP, frame=False)
        weight_map(image, n["maps"][found["head"]])
        names(axes, n["tokens"], left - 0.06, CLOSE, CLOSE_UP / n["length"])
    below, left, width = CLOSE + CLOSE_UP + 0.16, 5.08, 2.2
    note(axes, 0.84, below, "rows: queries, columns: keys")
    bar = inset(figure, left, below - 0.06, width, 0.11, frame=False)
    weight_map(bar, [[(cell / 200) ** 2 for cell in range(201)]])
    bar.set_aspect("auto")
    note(axes, left - 0.1, below - 0.005, "attention weight", align="right")
    for tick in TICKS:
        words = f"{100 * tick:.0f} %" if tick else "0"
        note(axes, left + width * tick**0.5, below + 0.15, words, align="center")


def strips(
    figure: Figure, rows: list[list[int]], top: float, height: float, *, pieces: int = 1
) -> None:
    """A block of numbers in percent, in one colour for each sign, cut into pieces."""
    pitch, wide, gap = FULL / pieces, len(rows[0]) // pieces, GAP if pieces > 1 else 0.0
    for piece in range(pieces):
        image = inset(figure, LEFT + pitch * piece + gap / 2, top, pitch - gap, height)
        own = [row[wide * piece : wide * (piece + 1)] for row in rows]
        colours = tinted(own, positive=SERIES[0], negative=SERIES[1], top=100.0)
        image.imshow(colours, aspect="auto", interpolation="none")


def label(axes: Axes, top: float, name: str, shape: str) -> None:
    """What a block is, and its shape, left of it."""
    heading(axes, LEFT - 0.08, top + 0.12, name, align="right")
    note(axes, LEFT - 0.08, top + 0.29, shape, align="right")


def names(axes: Axes, tokens: list[str], right: float, top: float, pitch: float) -> None:
    """The tokens beside their rows."""
    for row, token in enumerate(tokens):
        note(axes, right, top + pitch * (row + 0.5), token, align="right")


QUESTION = Question(
    id="picture",
    asks="What does the picture everybody draws look like with real numbers: embedding, heads, "
    "concatenation, output?",
    claim="Every head reads all of x with matrices of its own and has an attention map of its own; "
    "the head outputs are concatenated and multiplied by one more matrix.",
    measure=measure,
    facts=(
        Fact(
            "the layer drawn gives {model}'s own output, and that of the paper's formula, within "
            "the error budget",
            lambda n: n["equal_to_model"] and n["equal_to_formula"],
        ),
        Fact(
            "all of x {shapes[x]:shape} enters the projections; q, k and v are {shapes[q]:shape}, "
            "the maps are {shapes[weights]:shape}, and the output has the shape of x",
            lambda n: (
                n["reads_all_of_x"]
                and n["shapes"]["q"] == [n["heads"], n["length"], n["head_dim"]]
                and n["shapes"]["weights"] == [n["heads"], n["length"], n["length"]]
                and n["shapes"]["x"] == n["shapes"]["merged"] == n["shapes"]["output"]
                and n["heads"] * n["head_dim"] == n["embed_dim"]
            ),
        ),
        Fact(
            "each of the {rows} rows of the maps sums to one to {row_error:sci}; rounding may "
            "move the sum by {row_bound:sci}",
            lambda n: n["row_error"] <= n["row_bound"],
        ),
        Fact(
            "what enters the output projection is the concatenation of the head outputs, bit for "
            "bit",
            lambda n: n["concatenated"],
        ),
        Fact(
            "the contributions of the {heads} heads and the bias add up to the output, within the "
            "error budget",
            lambda n: n["sum_equal"],
        ),
        Fact(
            "concatenating the heads in reverse order changes the output (relative difference "
            "{order_moved:percent}); reversing their columns of wo as well changes nothing beyond "
            "the error budget",
            lambda n: not n["order_equal"] and n["order_of_both_equal"],
        ),
    ),
    verdict="In the trained encoder {model}, x {shapes[x]:shape} is projected to {heads} heads of "
    "{head_dim}, each head has its own {length} × {length} attention map, and the head outputs, "
    "concatenated to {shapes[merged]:shape}, are multiplied by the output projection wo.",
    why="Concatenating and multiplying by wo is a sum: each head has its own columns of wo and "
    "adds its contribution to the output. So the order of the heads means nothing by itself, but "
    "must be the same in the concatenation and in wo.",
    caption="One forward pass from top to bottom, in layer {layer} of the {layers} layers of "
    "{model}: the embeddings x, q, k and v, an attention map for each head, the head outputs, "
    "their concatenation, the output. Rows are the {length} tokens; in a map, rows are queries and "
    "columns keys. Stronger colours are larger numbers, by the square root; one number in {every} "
    "is drawn. At the bottom are three maps enlarged, each with the place that gets the largest "
    "share of the head's attention weights.",
    draw=draw,
    table=FactTable(
        columns=("tensor", "shape", "axes"),
        rows=(
            ("x", "{shapes[x]:shape}", "length, embed_dim"),
            ("wq, wk, wv, each", "{shapes[w]:shape}", "heads × head_dim, embed_dim"),
            ("one head's rows of each", "{shapes[w_of_a_head]:shape}", "head_dim, embed_dim"),
            ("q, k, v, each", "{shapes[q]:shape}", "heads, length, head_dim"),
            ("attention weights", "{shapes[weights]:shape}", "heads, queries, keys"),
            ("head outputs", "{shapes[head_outputs]:shape}", "heads, length, head_dim"),
            ("concatenated", "{shapes[merged]:shape}", "length, heads × head_dim"),
            ("wo", "{shapes[wo]:shape}", "embed_dim, heads × head_dim"),
            ("output", "{shapes[output]:shape}", "length, embed_dim"),
        ),
    ),
    varies=frozenset({"row_error"}),
)

"""Question: the usual diagram of multi-head attention, drawn from a real forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headwise.function import stages
from headwise.layers.attention import Attention
from headwise.layers.hooks import record_modules
from headwise.models.text import read_opening_paragraphs
from headwise.study import encoder
from headwise.study.drawing import SERIES, Figure, Sheet, draw_weight_map, signed_colours
from headwise.study.implementations import HeadwiseAttention
from headwise.study.measures import layer_error_budget, round_matrix
from headwise.study.question import Numbers, Progress, fill_template

WORDS = 9  # of the text: few enough for every map to be drawn whole
EVERY = 4  # one of so many numbers along embed_dim is drawn
ENLARGED = 3  # heads
NEARLY_ALL = 0.98  # share of the numbers below the strongest colour
NEIGHBOURS = ("the token before", "the same token", "the token after")
VARIES = {"row_error"}


def measure(progress: Progress) -> dict[str, Any]:
    """Run MiniLM over a few words, and trace its first layer, whose input is the embeddings."""
    sentence = " ".join(read_opening_paragraphs()[0].split()[:WORDS])
    run = encoder.run_minilm(sentence, progress=progress)
    call = run.calls[0]
    native = HeadwiseAttention(call.x.shape[-1], run.num_heads).requires_grad_(False)
    native.load_weights(call.weights).eval()
    layer, x = native.inner, call.x[:1]
    return {
        "model": run.model,
        "tokens": list(run.tokens),
        "length": len(run.tokens),
        "heads": layer.num_heads,
        "head_dim": layer.head_dim,
        "embed_dim": layer.embed_dim,
        "layers": len(run.calls),
        "layer": 0,
        "every": EVERY,
        **trace_forward(layer, x),
        **check_sum_of_contributions(native, x, model_output=call.output[:1]),
        "stand_out": strongest_head_of_each_target(layer.matrix(x).dense()[0], run.tokens),
    }


def trace_forward(layer: Attention, x: Tensor) -> dict[str, Any]:
    """Return the tensors of a forward pass, and check how the stages depend on each other."""
    projections = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj}
    parts = projections | {"output": layer.out_proj}
    with record_modules(parts.values()) as runs:
        layer(x)
    tensors = {name: runs[part][0].output for name, part in parts.items()}
    tensors |= {f"into_{name}": runs[part][0].first for name, part in parts.items()}
    maps, outputs = layer.matrix(x).dense(), layer.head_outputs(x)
    merged, rows = tensors["into_output"], maps.double().sum(-1)
    drawn = {"x": x, "merged": merged} | {name: tensors[name] for name in (*projections, "output")}
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
            "output": list(tensors["output"].shape[1:]),
        },
        "reads_all_of_x": all(tensors[f"into_{name}"].equal(x) for name in projections),
        "concatenated": merged.equal(torch.cat(outputs.unbind(1), -1)),
        "rows": rows.numel(),
        "row_error": float((rows - 1).abs().max()),
        # Each weight is a term over a rounded sum: n - 1 additions and a division.
        "row_bound": maps.shape[-1] * torch.finfo(maps.dtype).eps,
        "maps": [round_matrix(head, digits=4) for head in maps[0]],
        "strips": {name: per_cent_of_quantile(values) for name, values in drawn.items()},
    }


def per_cent_of_quantile(values: Tensor) -> list[list[int]]:
    """Return every `EVERY`-th number in per cent of the quantile `NEARLY_ALL`, clipped to 100."""
    shown = values[0, :, ::EVERY]
    return (shown / shown.abs().quantile(NEARLY_ALL) * 100).clamp(-100, 100).round().int().tolist()


def strongest_head_of_each_target(maps: Tensor, tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the strongest head of each attention target, for the most attended targets.

    Targets are the neighbours of a token, the token itself, and each token of the text.
    """
    # Means over the tokens that have such a neighbour.
    neighbours = [maps.diagonal(offset, 1, 2).mean(-1) for offset in (-1, 0, 1)]
    largest, targets = torch.stack([*neighbours, *maps.mean(1).unbind(-1)]).max(0)
    heads: dict[int, dict[str, Any]] = {}
    for head in largest.argsort(descending=True).tolist():
        target = int(targets[head])
        name = (*NEIGHBOURS, *tokens)[target]
        heads.setdefault(target, {"head": head, "place": name, "share": float(largest[head])})
    return list(heads.values())[:ENLARGED]


def check_sum_of_contributions(
    native: HeadwiseAttention, x: Tensor, *, model_output: Tensor
) -> dict[str, Any]:
    layer, heads, bias = native.inner, native.num_heads, native.inner.out_proj.bias
    allowed = layer_error_budget(x, x, x, native.as_shared_weights(), num_heads=heads)
    output, reversed_heads = layer(x), stages.merge_heads(layer.head_outputs(x).flip(1))
    rows = layer.out_proj.weight.unflatten(1, (heads, -1)).flip(1).flatten(1)
    swapped = layer.out_proj(reversed_heads)
    return {
        "equal_to_model": allowed.check(model_output).within,
        "equal_to_formula": allowed.check(output).within,
        "sum_equal": allowed.check(layer.contributions(x).sum(1) + bias).within,
        "order_equal": allowed.check(swapped).within,
        "order_moved": float((swapped - output).norm() / output.norm()),
        "order_of_both_equal": allowed.check(linear(reversed_heads, rows, bias)).within,
    }


def facts(n: Numbers) -> dict[str, bool]:
    shapes, heads, length = n["shapes"], n["heads"], n["length"]
    return {
        "model": n["equal_to_model"] and n["equal_to_formula"],
        "shapes": (
            n["reads_all_of_x"]
            and shapes["q"] == [heads, length, n["head_dim"]]
            and shapes["weights"] == [heads, length, length]
            and shapes["x"] == shapes["merged"] == shapes["output"]
            and heads * n["head_dim"] == n["embed_dim"]
        ),
        "rows": n["row_error"] <= n["row_bound"],
        "concatenated": n["concatenated"],
        "contributions": n["sum_equal"],
        "order": not n["order_equal"] and n["order_of_both_equal"],
    }


HEIGHT = 9.78  # inches, like all sizes below
LEFT, FULL = 1.14, 6.3  # left end of the blocks, and width of embed_dim
GAP = 0.06  # between heads
LINE = 0.138  # a token's row with its name
THIN = 0.4  # a block without names
CLOSE_UP = 1.54  # a side of an enlarged map

X, CUT, MAPS, READ, MERGED, OUTPUT, CLOSE = 0.36, 2.52, 4.29, 5.17, 5.97, 6.77, 7.79  # tops
TICKS = (0.0, 0.01, 0.1, 0.5, 1.0)  # of the colour bar


def draw(figure: Figure, n: Numbers) -> None:
    sheet = Sheet(figure, n, height=HEIGHT)
    tall, middle = LINE * n["length"], LEFT + FULL / n["heads"] / 2

    def arrow(top: float, bottom: float, words: str) -> None:
        sheet.arrow((middle, top + 0.05), (middle, bottom), words)

    sheet.head(LEFT, X - 0.17, "x {shapes[x]:shape}: the embeddings of {length} tokens")
    sheet.write(LEFT + FULL, X - 0.17, "green: positive, orange: negative", ha="right")
    draw_strips(sheet, "x", X, tall)
    write_tokens(sheet, LEFT - 0.06, X, LINE)
    words = (
        "times wq, wk and wv {shapes[w]:shape}: every head projects all of x with its "
        "{shapes[w_of_a_head]:shape} part of each"
    )
    arrow(X + tall, CUT - 0.24, words)
    pitch, bottom = FULL / n["heads"], CUT + 3 * THIN + 2 * 0.06
    side = pitch - GAP
    sheet.write(LEFT - 0.08, CUT - 0.12, "head", ha="right")
    for head, weights in enumerate(n["maps"]):
        sheet.write(LEFT + pitch * (head + 0.5), CUT - 0.12, str(head), ha="center")
        left = LEFT + pitch * head + GAP / 2
        draw_weight_map(sheet.inset(left, MAPS, side, side, frame=False), weights)
    for row, name in enumerate(("q", "k", "v")):
        top = CUT + (THIN + 0.06) * row
        write_label(sheet, top, name, "q")
        draw_strips(sheet, name, top, THIN, pieces=n["heads"])
    words = "softmax(q kᵀ / √{head_dim}): the attention weights; in every map, each row sums to one"
    arrow(bottom, MAPS - 0.05, words)
    write_label(sheet, MAPS, "weights", "weights")
    words = "times v: each token gets the mean of the values, weighted by its row of the map"
    arrow(MAPS + side, READ - 0.05, words)
    write_label(sheet, READ, "head outputs", "head_outputs")
    draw_strips(sheet, "merged", READ, THIN, pieces=n["heads"])
    words = "concatenated, in the order of the heads: the same numbers"
    arrow(READ + THIN, MERGED - 0.05, words)
    write_label(sheet, MERGED, "concatenated", "merged")
    draw_strips(sheet, "merged", MERGED, THIN)
    words = "times wo {shapes[wo]:shape}, plus its bias: every number mixes all {heads} heads"
    arrow(MERGED + THIN, OUTPUT - 0.05, words)
    write_label(sheet, OUTPUT, "output", "output")
    draw_strips(sheet, "output", OUTPUT, THIN)
    draw_close_ups(sheet, n)


def draw_close_ups(sheet: Sheet, n: Numbers) -> None:
    sheet.line(OUTPUT + THIN + 0.19)
    for column, head in enumerate(n["stand_out"]):
        left = 0.84 + 2.46 * column
        sheet.head(left, CLOSE - 0.29, fill_template("head {head}", head))
        sheet.write(left, CLOSE - 0.11, fill_template("{share:percent} on {place}", head))
        image = sheet.inset(left, CLOSE, CLOSE_UP, CLOSE_UP, frame=False)
        draw_weight_map(image, n["maps"][head["head"]])
        write_tokens(sheet, left - 0.06, CLOSE, CLOSE_UP / n["length"])
    below, left, width = CLOSE + CLOSE_UP + 0.16, 5.08, 2.2
    sheet.write(0.84, below, "rows: queries, columns: keys")
    bar = sheet.inset(left, below - 0.06, width, 0.11, frame=False)
    draw_weight_map(bar, [[(cell / 200) ** 2 for cell in range(201)]])
    bar.set_aspect("auto")
    sheet.write(left - 0.1, below - 0.005, "attention weight", ha="right")
    for tick in TICKS:
        words = f"{100 * tick:.0f} %" if tick else "0"
        sheet.write(left + width * tick**0.5, below + 0.15, words, ha="center")


def draw_strips(sheet: Sheet, name: str, top: float, height: float, *, pieces: int = 1) -> None:
    rows = sheet.n["strips"][name]
    pitch, wide, gap = FULL / pieces, len(rows[0]) // pieces, GAP if pieces > 1 else 0.0
    for piece in range(pieces):
        image = sheet.inset(LEFT + pitch * piece + gap / 2, top, pitch - gap, height)
        part = [row[wide * piece : wide * (piece + 1)] for row in rows]
        colours = signed_colours(part, positive=SERIES[0], negative=SERIES[1], top=100.0)
        image.imshow(colours, aspect="auto", interpolation="none")


def write_label(sheet: Sheet, top: float, name: str, shape: str) -> None:
    sheet.head(LEFT - 0.08, top + 0.12, name, ha="right")
    sheet.write(LEFT - 0.08, top + 0.29, f"{{shapes[{shape}]:shape}}", ha="right")


def write_tokens(sheet: Sheet, right: float, top: float, pitch: float) -> None:
    for row in range(sheet.n["length"]):
        sheet.write(right, top + pitch * (row + 0.5), f"{{tokens[{row}]}}", ha="right")

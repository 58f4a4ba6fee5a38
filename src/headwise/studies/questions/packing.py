"""Is one packed matrix the same as many small ones?"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.drop_in.layer import MultiheadAttention
from headwise.layer.attention import Attention
from headwise.masks import Mask
from headwise.models.reading import Progress
from headwise.studies.experiments.packing_forms import (
    PARTS,
    Form,
    attend,
    budget_of,
    drop_in,
    forms,
    native,
)
from headwise.studies.experiments.timing import times_of
from headwise.studies.pictures.style import INK, LINE, SERIES, SOFT
from headwise.studies.question import Fact, Numbers, Question, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EMBED_DIM, HEADS = 768, 12  # GPT-2's
BATCH, QUERIES, KEYS = 2, 48, 64
ROUNDS = {1: 60, 256: 12}  # tokens: how often they are timed
TITLES = {
    "per_head": "one matrix\na head\n(the paper)",
    "separate": "q, k, v\napart",
    "q_kv": "q, and\nk with v\n(decoder)",
    "packed": "q, k, v\npacked\n(torch)",
    "transposed": "packed, transposed\n(GPT-2)",
}
SHOWN_HEAD = 4  # the one that is dark in the picture


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """Store the weights of torch's layer in every form, put them back, and use each."""
    layer = nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True).eval()
    nn.init.normal_(layer.in_proj_bias, std=0.1)  # torch starts them at 0, which hides their order
    nn.init.normal_(layer.out_proj.bias, std=0.1)
    small = layer.in_proj_weight.unflatten(0, (PARTS * HEADS, -1)).mT.contiguous()
    ours = drop_in(layer), native(layer)
    x, source = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, EMBED_DIM)
    return {
        "embed_dim": EMBED_DIM,
        "heads": HEADS,
        "head_dim": EMBED_DIM // HEADS,
        "weights": small.numel(),
        "forms": len(forms(HEADS)),
        "shown_head": SHOWN_HEAD,
        "small": len(small),
        "tokens": max(ROUNDS),
        "stored": {name: stored(form.pack(small)) for name, form in forms(HEADS).items()},
        "kept": kept(small, *ours),
        "self_attention": with_largest(shares(small, layer, *ours, x, x)),
        "cross_attention": with_largest(shares(small, layer, *ours, x, source)),
        "wrong_order": wrong_order(small, layer, x),
        **same_objects(layer, *ours),
        "times": {str(tokens): times(small, layer, tokens) for tokens in ROUNDS},
    }


# ---- what is measured ------------------------------------------------------------------------


def stored(matrices: list[Tensor]) -> list[dict[str, Any]]:
    """The shapes of matrices, and how many in a row have each."""
    shapes = [tuple(matrix.shape) for matrix in matrices]
    return [{"shape": list(shape), "count": len(list(run))} for shape, run in groupby(shapes)]


def with_largest(found: dict[str, float]) -> dict[str, float]:
    """The figures of several forms, and the largest of them."""
    return found | {"largest": max(found.values())}


def kept(small: Tensor, packed: MultiheadAttention, apart: Attention) -> dict[str, bool]:
    """Whether every number comes back from each form by its index map, with no bit changed."""
    projections = (apart.q_proj, apart.k_proj, apart.v_proj)
    held: dict[str, list[Tensor]] = {
        **{name: form.pack(small) for name, form in forms(HEADS).items()},
        "MultiheadAttention": [packed.in_proj_weight],
        "Attention": [projection.weight for projection in projections],
    }
    maps = {
        name: form.places(embed_dim=EMBED_DIM, head_dim=EMBED_DIM // HEADS)
        for name, form in forms(HEADS).items()
    }
    maps |= {"MultiheadAttention": maps["packed"], "Attention": maps["separate"]}
    found = {}
    for name, matrices in held.items():
        flat = torch.cat([matrix.flatten() for matrix in matrices])
        there = torch.empty_like(flat).scatter(0, maps[name].flatten(), small.flatten())
        every_place_once = torch.equal(maps[name].flatten().sort()[0], torch.arange(len(flat)))
        found[name] = (
            every_place_once and same_bits(flat[maps[name]], small) and same_bits(there, flat)
        )
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of the bits: 0 is not -0."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def shares(
    small: Tensor,
    layer: nn.MultiheadAttention,
    packed: MultiheadAttention,
    apart: Attention,
    x: Tensor,
    source: Tensor,
) -> dict[str, float]:
    """The largest share of the error budget that the output of each form uses."""
    budget = budget_of(layer, x, source)
    outputs = {}
    for name, form in forms(HEADS).items():
        if source is x or len(form.sizes) > 1:  # a single matrix makes q, k and v of one input
            matrices, biases = form.pack(small), form.split(layer.in_proj_bias)
            products = form.products(x, source, matrices, biases)
            outputs[name] = attend(*form.heads(products), layer)
    outputs["MultiheadAttention"] = packed(x, source, source, need_weights=False)[0]
    outputs["Attention"] = apart(x, source)
    return {name: budget.check(output).ratio for name, output in outputs.items()}


def wrong_order(small: Tensor, layer: nn.MultiheadAttention, x: Tensor) -> dict[str, bool | float]:
    """The packed matrix read as q, k, v of the first head, then of the second: another function."""
    form = forms(HEADS)["packed"]
    products = form.products(x, x, form.pack(small), (layer.in_proj_bias,))
    by_head = products[0].unflatten(-1, (HEADS, PARTS, -1)).movedim(1, 3)
    q, k, v = by_head.unbind(2)
    output, budget = attend(q, k, v, layer), budget_of(layer, x, x)
    return {
        "within": budget.check(output).within,
        "difference": float((output - budget.exact).norm() / budget.exact.norm()),
    }


def same_objects(
    layer: nn.MultiheadAttention, packed: MultiheadAttention, apart: Attention
) -> dict[str, Any]:
    """The same tokens as one object and as copies, in a batch of which one text is padding only."""
    x = torch.randn(BATCH, KEYS, EMBED_DIM)
    copy, another = x.clone(), x.clone()
    ways = {"one": (x, x, x), "two": (x, copy, copy), "three": (x, copy, another)}
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[-1] = True
    mask = Mask.from_torch_padding(padding)
    budget = budget_of(layer, x, x, mask=mask)
    call = {"key_padding_mask": padding, "need_weights": False}
    outputs = {name: packed(*way, **call)[0] for name, way in ways.items()}
    outputs |= {"Attention_one": apart(x, mask=mask), "Attention_two": apart(x, copy, mask=mask)}
    torchs = {name: layer(*way, **call)[0] for name, way in ways.items()}
    return {
        "objects_outside": sum(budget.check(output).outside for output in outputs.values()),
        "torch_nan": {name: int(output.isnan().sum()) for name, output in torchs.items()},
        "nan": sum(int(output.isnan().sum()) for output in outputs.values()),
    }


def times(small: Tensor, layer: nn.MultiheadAttention, tokens: int) -> dict[str, float]:
    """How long the projections of each form take, as multiples of the packed one."""
    x = torch.randn(1, tokens, EMBED_DIM)
    works = {
        name: partial(form.products, x, x, form.pack(small), form.split(layer.in_proj_bias))
        for name, form in forms(HEADS).items()
    }
    return times_of(works, against="packed", rounds=ROUNDS[tokens])


# ---- the picture -----------------------------------------------------------------------------

GAP, STRIP, BETWEEN = 0.14, 0.03, 0.95  # between matrices, small ones and forms; a square is 1


def draw(figure: Figure, n: Numbers) -> None:
    """The stored matrices of each form to scale, one head dark; under them what they take."""
    figure.set_size_inches(7.6, 4.7)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.9, 1))
    left, centres = 0.0, []
    for name, form in forms(n["heads"]).items():
        blocks = _blocks(form, n["heads"])
        for count, (x, y, wide, high) in enumerate(blocks):
            part, head = divmod(count, n["heads"])
            shade = 1.0 if head == n["shown_head"] else 0.3
            above.bar(left + x, high, wide, y, align="edge", color=SERIES[part], alpha=shade)
        centre = left + max(x + wide for x, _, wide, _ in blocks) / 2
        bottom = max(y + high for _, y, _, high in blocks)
        shapes = "\n".join(_described(**run) for run in n["stored"][name])
        above.text(centre, -0.15, TITLES[name], ha="center", va="bottom", linespacing=1.2)
        above.text(centre, bottom + 0.1, shapes, ha="center", va="top", color=SOFT, fontsize=9)
        centres.append(centre)
        left = 2 * centre - left + BETWEEN
    for part, word in enumerate(("queries", "keys", "values")):
        above.text(centre + part - 1, 2.3, word, color=SERIES[part], ha="center")
    above.text(centre, 2.7, f"dark: one of the {n['heads']} heads", ha="center", color=SOFT)
    above.set_xlim(-0.6, left - BETWEEN + 0.15)
    above.set_ylim(4.0, -0.85)
    above.set_axis_off()
    _draw_times(below, n, centres)


def _blocks(form: Form, heads: int) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of each small matrix in the stored ones."""
    wide = 1 / heads
    if max(form.sizes) == 1:
        places = [divmod(count, heads) for count in range(len(form.sizes))]
        return [(head * (wide + STRIP), part * (1 + GAP), wide, 1.0) for part, head in places]
    if not form.by_rows:
        return [(count * wide, 0.0, wide, 1.0) for count in range(sum(form.sizes))]
    gaps = [GAP * matrix for matrix, size in enumerate(form.sizes) for _ in range(size)]
    return [(0.0, count * wide + gap, 1.0, wide) for count, gap in enumerate(gaps)]


def _described(*, count: int, shape: list[int]) -> str:
    """How many matrices of which shape."""
    size = f"{shape[0]} × {shape[1]}"
    return f"{count} of {size}" if count > 1 else size


def _draw_times(axes: Axes, n: Numbers, centres: list[float]) -> None:
    """The time of each form, for one token and for many."""
    top = max(max(times.values()) for times in n["times"].values())
    series = zip(n["times"].items(), (INK, SOFT), (-0.3, 0.3), strict=True)
    for row, ((tokens, times), colour, aside) in enumerate(series):
        for name, centre in zip(TITLES, centres, strict=True):
            at = centre + aside
            axes.bar(at, times[name], 0.54, color=colour)
            words = f"{times[name]:.2f}"
            axes.text(at, times[name], words, ha="center", va="bottom", color=colour, fontsize=9)
        word = f"{tokens} token" + "s" * (tokens != "1")
        axes.text(centres[-1] + 0.72, top * (0.8 - 0.25 * row), word, color=colour)
    axes.set_ylabel("time, relative to\nthe packed form")
    axes.set_ylim(0, 1.25 * top)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.axhline(1, color=LINE, zorder=0)


def _row(name: str, what: str, shapes: str, where: str) -> tuple[str, ...]:
    """One form in the table."""
    times = (f"{{times[{tokens}][{name}]:.2f}}" for tokens in ROUNDS)
    return what, shapes, where, f"{{self_attention[{name}]:percent}}", *times


QUESTION = Question(
    id="packing",
    asks="Is one packed matrix the same as many small ones?",
    claim="Yes. The same numbers lie in another order, and the output is the same to rounding; "
    "whether queries, keys and values are one object or copies makes no difference either.",
    measure=measure,
    facts=(
        Fact(
            "each of the {forms} forms, and each of headwise's two layers, holds all "
            "{weights:,} numbers once, where the index map says, with no bit changed",
            lambda n: all(n["kept"].values()),
        ),
        Fact(
            "on one text the outputs of all of them are within the error budget: at most "
            "{self_attention[largest]:percent} of what rounding is allowed",
            lambda n: n["self_attention"]["largest"] <= 1,
        ),
        Fact(
            "with keys and values from another text (encoder and decoder) they are too: at most "
            "{cross_attention[largest]:percent}",
            lambda n: n["cross_attention"]["largest"] <= 1,
        ),
        Fact(
            "the order counts: the packed matrix read head by head, each with its q, k and v, "
            "gives an output that is {wrong_order[difference]:percent} off, far outside the budget",
            lambda n: not n["wrong_order"]["within"],
        ),
        Fact(
            "whether q, k and v are one object, two or three, also where a text is padding only, "
            "headwise gives {nan} NaN and {objects_outside} numbers outside the budget",
            lambda n: n["nan"] == n["objects_outside"] == 0,
        ),
    ),
    verdict="Yes: the packed matrix is the {small} small ones side by side, number for number, and "
    "however they are stored the output is the same to rounding.",
    why="Each output of a projection is made from the input and one row of the matrix alone, so "
    "the rows of many matrices may be stored as one matrix, and its outputs cut apart again. What "
    "one must know is the order, and whether outputs are rows or columns. Packing saves calls, not "
    "arithmetic. Whether q, k and v are the same object should not matter either; in torch's own "
    "layer, in inference without weights, a text that is padding only gives {torch_nan[one]:,} "
    "NaN where one object is passed three times, and {torch_nan[three]:,} where copies are.",
    caption="The projections of one layer ({embed_dim} wide, {heads} heads), drawn to scale as "
    "{forms} forms store them. Colours: queries, keys, values. Dark: the same head in each. "
    "Below: how long the projections take on one thread, for one token and for {tokens} tokens, "
    "as multiples of the packed form's time.",
    draw=draw,
    table=Table(
        columns=(
            "form",
            "stored as",
            "where head h keeps the weight from input i to its channel c",
            "share of the error budget",
            "time, one token",
            "time, many tokens",
        ),
        rows=(
            _row(
                "per_head",
                "one matrix a head (the paper)",
                "{stored[per_head][0][count]} of {stored[per_head][0][shape]:shape}",
                "a matrix of its own: row i, column c",
            ),
            _row(
                "separate",
                "q, k, v apart",
                "{stored[separate][0][count]} of {stored[separate][0][shape]:shape}",
                "row h × head_dim + c, column i",
            ),
            _row(
                "q_kv",
                "q, and k with v (encoder-decoder)",
                "{stored[q_kv][0][shape]:shape} and {stored[q_kv][1][shape]:shape}",
                "the same; values embed_dim rows below the keys",
            ),
            _row(
                "packed",
                "q, k, v packed (torch)",
                "{stored[packed][0][shape]:shape}",
                "the same; keys embed_dim rows below the queries, values as far below the keys",
            ),
            _row(
                "transposed",
                "packed, transposed (GPT-2)",
                "{stored[transposed][0][shape]:shape}",
                "as packed, with row and column exchanged",
            ),
        ),
    ),
    varies=frozenset({"times", "self_attention", "cross_attention"}),
)

"""Is one packed matrix the same as many small ones?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import PolarityWarning
from headwise.masks.mask import Mask
from headwise.studies.drawing import SERIES, Axes, Figure, block, heading, note, sheet
from headwise.studies.experiments import whole_layer
from headwise.studies.experiments.measures import times_of
from headwise.studies.experiments.packing_forms import PARTS, Form, attend, forms
from headwise.studies.peers.installed import GPT2, DropIn, Native, TorchLayer
from headwise.studies.peers.peer import Weights
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.support.progress import Progress

EMBED_DIM, HEADS = 768, 12  # GPT-2's
BATCH, QUERIES, KEYS = 2, 48, 64
TOKENS, ROUNDS = 256, 16  # how many are timed, and how often
SHOWN_HEAD = 4  # the one in a strong colour in the picture


@dataclass(frozen=True, eq=False)
class Layers:
    """The same weights in layers that store them in other forms."""

    torch: TorchLayer
    packed: DropIn
    apart: Native
    gpt2: GPT2

    @classmethod
    def random(cls) -> Layers:
        """Weights as torch's layer draws them, with biases."""
        sizes = EMBED_DIM, HEADS
        layers = cls(TorchLayer(*sizes), DropIn(*sizes), Native(*sizes), GPT2(*sizes))
        # torch starts them at 0, which hides their order.
        nn.init.normal_(layers.torch.inner.in_proj_bias, std=0.1)
        nn.init.normal_(layers.torch.inner.out_proj.bias, std=0.1)
        for layer in (layers.torch, layers.packed, layers.apart, layers.gpt2):
            layer.fill(layers.weights).eval()
        return layers

    @property
    def weights(self) -> Weights:
        """Those of all of them."""
        return self.torch.held()

    @property
    def small(self) -> Tensor:
        """(matrices, embed_dim, head_dim): the small matrices."""
        by_rows: Tensor = self.torch.inner.in_proj_weight.unflatten(0, (PARTS * HEADS, -1))
        return by_rows.mT.contiguous()

    @property
    def biases(self) -> Tensor:
        """The biases of the small matrices, one after the other."""
        return self.torch.inner.in_proj_bias


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """Store the weights of torch's layer in every form, put them back, and use each."""
    layers = Layers.random()
    small = layers.small
    x, source = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, EMBED_DIM)
    return {
        "embed_dim": EMBED_DIM,
        "heads": HEADS,
        "head_dim": EMBED_DIM // HEADS,
        "weights": small.numel(),
        "forms": len(forms(HEADS)),
        "shown_head": SHOWN_HEAD,
        "small": len(small),
        "tokens": TOKENS,
        "stored": {name: stored(form.pack(small)) for name, form in forms(HEADS).items()},
        "kept": kept(layers),
        "self_attention": largest_share(layers, x, x),
        "cross_attention": largest_share(layers, x, source),
        "wrong_order": wrong_order(layers, x),
        **same_objects(layers),
        "times": times(layers),
    }


# ---- what is measured ------------------------------------------------------------------------


def stored(matrices: list[Tensor]) -> list[dict[str, Any]]:
    """The shapes of matrices, and how many in a row have each."""
    shapes = [tuple(matrix.shape) for matrix in matrices]
    return [{"shape": list(shape), "count": len(list(run))} for shape, run in groupby(shapes)]


def kept(layers: Layers) -> dict[str, bool]:
    """Whether every number comes back from each form by its index map, with no bit changed."""
    small, apart = layers.small, layers.apart.inner
    held: dict[str, list[Tensor]] = {
        **{name: form.pack(small) for name, form in forms(HEADS).items()},
        "MultiheadAttention": [layers.packed.inner.in_proj_weight],
        "Attention": [apart.q_proj.weight, apart.k_proj.weight, apart.v_proj.weight],
        "GPT-2": [layers.gpt2.inner.c_attn.weight],
    }
    maps = {
        name: form.places(embed_dim=EMBED_DIM, head_dim=EMBED_DIM // HEADS)
        for name, form in forms(HEADS).items()
    }
    maps |= {"MultiheadAttention": maps["packed"], "Attention": maps["separate"]}
    maps |= {"GPT-2": maps["transposed"]}
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


def largest_share(layers: Layers, x: Tensor, source: Tensor) -> float:
    """The largest share of the error budget that the output of any layer or form uses."""
    weights = layers.weights
    budget = whole_layer.budget(x, source, source, weights, num_heads=HEADS)
    outputs = [
        layers.torch.inner(x, source, source, need_weights=False)[0],
        layers.packed.inner(x, source, source, need_weights=False)[0],
        layers.apart.inner(x, source),
    ]
    if source is x:
        outputs.append(layers.gpt2(x))
    for form in forms(HEADS).values():
        if source is x or len(form.sizes) > 1:  # a single matrix makes q, k and v of one input
            matrices, biases = form.pack(layers.small), form.split(layers.biases)
            products = form.products(x, source, matrices, biases)
            outputs.append(attend(*form.heads(products), weights))
    return max(budget.check(output).ratio for output in outputs)


def wrong_order(layers: Layers, x: Tensor) -> dict[str, bool | float]:
    """The packed matrix read as q, k, v of the first head, then of the second: another function."""
    form = forms(HEADS)["packed"]
    products = form.products(x, x, form.pack(layers.small), (layers.biases,))
    by_head = products[0].unflatten(-1, (HEADS, PARTS, -1)).movedim(1, 3)
    q, k, v = by_head.unbind(2)
    output = attend(q, k, v, layers.weights)
    budget = whole_layer.budget(x, x, x, layers.weights, num_heads=HEADS)
    return {
        "within": budget.check(output).within,
        "difference": float((output - budget.exact).norm() / budget.exact.norm()),
    }


def same_objects(layers: Layers) -> dict[str, Any]:
    """The same tokens as one object and as copies, in a batch of which one text is padding only."""
    x = torch.randn(BATCH, KEYS, EMBED_DIM)
    copy, another = x.clone(), x.clone()
    ways = {"one": (x, x, x), "two": (x, copy, copy), "three": (x, copy, another)}
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[-1] = True
    mask = Mask.from_torch_padding(padding)
    budget = whole_layer.budget(x, x, x, layers.weights, num_heads=HEADS, mask=mask)
    call = {"key_padding_mask": padding, "need_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolarityWarning)  # a text of padding alone is asked for
        outputs = {name: layers.packed.inner(*way, **call)[0] for name, way in ways.items()}
    outputs |= {
        "Attention_one": layers.apart.inner(x, mask=mask),
        "Attention_two": layers.apart.inner(x, copy, mask=mask),
    }
    torchs = {name: layers.torch.inner(*way, **call)[0] for name, way in ways.items()}
    return {
        "objects_outside": sum(budget.check(output).outside for output in outputs.values()),
        "torch_nan": {name: int(output.isnan().sum()) for name, output in torchs.items()},
        "nan": sum(int(output.isnan().sum()) for output in outputs.values()),
    }


def times(layers: Layers) -> dict[str, float]:
    """How long the projections of each form take, as multiples of the packed one."""
    x, small = torch.randn(1, TOKENS, EMBED_DIM), layers.small
    works = {
        name: partial(form.products, x, x, form.pack(small), form.split(layers.biases))
        for name, form in forms(HEADS).items()
    }
    return times_of(works, against="packed", rounds=ROUNDS)


def _row(name: str, shapes: str, place: str) -> tuple[str, ...]:
    """One form in the table."""
    title, where = TITLES[name]
    return f"{title} ({where})", shapes, place, f"{{times[{name}]:.2f}}"


# ---- the picture -------------------------------------------------------------------------------

TITLES = {
    "per_head": ("a matrix a head", "the paper"),
    "separate": ("q, k, v", "headwise.Attention"),
    "q_kv": ("q; k with v", "cross-attention"),
    "packed": ("all in one", "PyTorch"),
    "transposed": ("all in one, transposed", "GPT-2"),
}
GAP, STRIP = 0.14, 0.03  # in units: between matrices, and between those that are small

UNIT = 0.66  # inches: embed_dim
CENTRES = (0.72, 1.98, 3.27, 4.42, 6.2)  # inches: of the forms
TOP = 0.62  # inches


def draw(figure: Figure, n: Numbers) -> None:
    """The stored matrices of each form to scale, one head in a strong colour."""
    axes = sheet(figure, height=3.3)
    for centre, (name, form) in zip(CENTRES, forms(n["heads"]).items(), strict=True):
        blocks = _blocks(form, n["heads"])
        left = centre - UNIT * max(x + wide for x, _, wide, _ in blocks) / 2
        bottom = TOP + UNIT * max(y + high for _, y, _, high in blocks)
        for count, (x, y, wide, high) in enumerate(blocks):
            part, head = divmod(count, n["heads"])
            place = (left + UNIT * x, TOP + UNIT * y, UNIT * wide, UNIT * high)
            strong = head == n["shown_head"]
            block(axes, *place, colour=SERIES[part], alpha=1.0 if strong else 0.3)
        title, where = TITLES[name]
        heading(axes, centre, 0.18, title, align="center")
        note(axes, centre, 0.38, where, align="center")
        for line, run in enumerate(n["stored"][name]):
            note(axes, centre, bottom + 0.15 + 0.18 * line, _described(**run), align="center")
    _draw_legend(axes, n, centre=CENTRES[-1], top=TOP + 2.2 * UNIT)


def _draw_legend(axes: Axes, n: Numbers, *, centre: float, top: float) -> None:
    """Which colour is what."""
    for part, word in enumerate(("queries", "keys", "values")):
        place = centre + UNIT * (part - 1)
        axes.text(place, top, word, color=SERIES[part], fontsize=9, ha="center", va="center")
    words = (f"strong colour: head {n['shown_head']},", f"pale: the others of {n['heads']} heads")
    for line, word in enumerate(words):
        note(axes, centre, top + 0.24 + 0.18 * line, word, align="center")


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


QUESTION = Question(
    id="packing",
    asks="Is one packed matrix the same as many small ones?",
    claim="Yes. The same numbers lie in another order, and the output is the same to rounding; "
    "whether queries, keys and values are one object or copies makes no difference either.",
    measure=measure,
    facts=(
        Fact(
            "each of the {forms} forms holds each of the {weights:,} weights once, where its index "
            "map says, with no bit changed; so do headwise.MultiheadAttention, headwise.Attention "
            "and GPT-2's layer, each of which stores one of the forms",
            lambda n: all(n["kept"].values()),
        ),
        Fact(
            "in self-attention the outputs of all of them and of PyTorch's layer are within the "
            "error budget: they use at most {self_attention:percent} of it",
            lambda n: n["self_attention"] <= 1,
        ),
        Fact(
            "so are those of the layers of PyTorch and headwise, and of every form with more than "
            "one matrix, where keys and values come from another text (encoder and decoder): at "
            "most {cross_attention:percent}",
            lambda n: n["cross_attention"] <= 1,
        ),
        Fact(
            "the order matters: the packed matrix read as q, k and v of one head after the other "
            "gives another output (relative difference {wrong_order[difference]:percent})",
            lambda n: not n["wrong_order"]["within"],
        ),
        Fact(
            "q, k and v as one object or as equal copies give the same output, also for a text "
            "that is all padding: {nan} NaN and {objects_outside} numbers outside the error budget "
            "in headwise (NaN in PyTorch's layer: {torch_nan[one]:,} for one object, "
            "{torch_nan[three]:,} for copies)",
            lambda n: n["nan"] == n["objects_outside"] == 0,
        ),
    ),
    verdict="Yes: the packed matrix holds the {small} small ones (q, k and v of {heads} heads) "
    "number for number, and however they are stored, the outputs are equal up to rounding.",
    why="Each output of a projection is computed from the input and its own row of the matrix, so "
    "the rows of many matrices can be stored as one matrix, and the outputs cut apart again. You "
    "only need to know the order, and whether the outputs are rows (PyTorch's Linear) or columns "
    "(GPT-2). Packing saves calls, not arithmetic: on one CPU thread the projections of {tokens} "
    "tokens take {times[per_head]:.2f} times as long with {small} small matrices as with one (the "
    "last column of the table).",
    caption="The weight matrices of q, k and v in one layer (embed_dim {embed_dim}, {heads} "
    "heads of head_dim {head_dim}), drawn to scale as {forms} forms store them. A strip is one "
    "head's small matrix: upright where its outputs are columns, flat where they are rows. The "
    "paper is Attention Is All You Need.",
    draw=draw,
    table=Table(
        columns=("form", "stored as", "head h's part", "time"),
        rows=(
            _row(
                "per_head",
                "{stored[per_head][0][count]} of {stored[per_head][0][shape]:shape}",
                "matrix h",
            ),
            _row(
                "separate",
                "{stored[separate][0][count]} of {stored[separate][0][shape]:shape}",
                "head_dim rows from h × head_dim",
            ),
            _row(
                "q_kv",
                "{stored[q_kv][0][shape]:shape}, {stored[q_kv][1][shape]:shape}",
                "the same; v below k",
            ),
            _row(
                "packed",
                "{stored[packed][0][shape]:shape}",
                "the same; k below q, v below k",
            ),
            _row(
                "transposed",
                "{stored[transposed][0][shape]:shape}",
                "the same in columns; k right of q, v right of k",
            ),
        ),
    ),
    varies=frozenset({"times", "self_attention", "cross_attention"}),
)

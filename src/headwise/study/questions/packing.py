"""Is one packed matrix the same as many small ones?

The small matrices of a layer are (matrices, embed_dim, head_dim), in the order of the paper's
formula x @ W: those of the queries of every head, then of the keys, then of the values.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import reference
from headwise.attention_matrix import AttentionMatrix
from headwise.errors import PolarityWarning
from headwise.masks.mask import Mask
from headwise.study.charts import SERIES, Figure, block, heading, note, sheet
from headwise.study.experiments.measures import layer_budget, times_of
from headwise.study.implementation import SharedWeights
from headwise.study.implementations import GPT2, DropIn, Native, TorchLayer
from headwise.study.question import Fact, FactTable, Numbers, Question, say
from headwise.support.progress import Progress

PARTS = 3  # queries, keys, values
EMBED_DIM, HEADS = 768, 12  # GPT-2's
BATCH, QUERIES, KEYS = 2, 48, 64
TOKENS, ROUNDS = 256, 16  # how many are timed, and how often
SHOWN_HEAD = 4  # the one in a strong colour in the picture


@dataclass(frozen=True)
class PackingForm:
    """One way to store the small matrices.

    Attributes:
        sizes: how many small matrices lie side by side in each stored one.
        by_rows: whether a stored matrix has a row for each output, as torch's Linear; it has a
            column for each, to be used as x @ W, otherwise.
    """

    sizes: tuple[int, ...]
    by_rows: bool

    def pack(self, small: Shaped[Tensor, "matrices embed_dim head_dim"]) -> list[Tensor]:
        """The stored matrices, made of the small ones."""
        wide = [torch.cat(list(group), dim=1) for group in small.split(self.sizes)]
        return [w.mT.contiguous() if self.by_rows else w for w in wide]

    def places(
        self, *, embed_dim: int, head_dim: int
    ) -> Int[Tensor, "matrices {embed_dim} {head_dim}"]:
        """The index map: where each number of a small matrix stands among all that are stored."""
        entry, channel = torch.arange(embed_dim)[:, None], torch.arange(head_dim)
        found, stored = [], 0
        for size in self.sizes:
            for place in range(size):
                output = place * head_dim + channel
                by_rows, by_columns = output * embed_dim + entry, entry * size * head_dim + output
                found.append(stored + (by_rows if self.by_rows else by_columns))
            stored += size * head_dim * embed_dim
        return torch.stack(found)

    def split(self, bias: Float[Tensor, " outputs"]) -> tuple[Tensor, ...]:
        """The bias of each stored matrix, of the biases of all small ones in their order."""
        head_dim = len(bias) // sum(self.sizes)
        parts: tuple[Tensor, ...] = bias.split([size * head_dim for size in self.sizes])
        return parts

    def products(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys embed_dim"],
        matrices: list[Tensor],
        biases: tuple[Tensor, ...],
    ) -> list[Tensor]:
        """The products with each stored matrix: that of the queries takes ``x``."""
        done, outputs = 0, []
        for size, matrix, bias in zip(self.sizes, matrices, biases, strict=True):
            tokens = x if done * PARTS < sum(self.sizes) else source
            outputs.append(linear(tokens, matrix if self.by_rows else matrix.mT, bias))
            done += size
        return outputs

    def heads(self, outputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, heads, length, head_dim), of these products."""
        single = [
            one
            for size, output in zip(self.sizes, outputs, strict=True)
            for one in output.unflatten(-1, (size, -1)).unbind(-2)
        ]
        count = len(single) // PARTS
        q, k, v = (torch.stack(single[n : n + count], dim=1) for n in range(0, len(single), count))
        return q, k, v


def forms(heads: int) -> dict[str, PackingForm]:
    """The forms that are in use, by the names of the study."""
    return {
        "per_head": PackingForm((1,) * (PARTS * heads), by_rows=False),
        "separate": PackingForm((heads, heads, heads), by_rows=True),
        "q_kv": PackingForm((heads, 2 * heads), by_rows=True),
        "packed": PackingForm((PARTS * heads,), by_rows=True),
        "transposed": PackingForm((PARTS * heads,), by_rows=False),
    }


class PackedLayers(NamedTuple):
    """The same weights in layers that store them in other forms, and as small matrices."""

    torch: TorchLayer
    packed: DropIn
    apart: Native
    gpt2: GPT2
    weights: SharedWeights
    small: Tensor
    biases: Tensor  # of the small matrices, one after the other


def random_layers() -> PackedLayers:
    """Weights as torch's layer draws them, with biases."""
    sizes = EMBED_DIM, HEADS
    layers = TorchLayer(*sizes), DropIn(*sizes), Native(*sizes), GPT2(*sizes)
    inner = layers[0].inner
    # torch starts them at 0, which hides their order.
    nn.init.normal_(inner.in_proj_bias, std=0.1)
    nn.init.normal_(inner.out_proj.bias, std=0.1)
    for layer in layers:
        layer.fill(layers[0].held()).eval()
    small = inner.in_proj_weight.unflatten(0, (PARTS * HEADS, -1)).mT.contiguous()
    return PackedLayers(*layers, layers[0].held(), small, inner.in_proj_bias)


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """Store the weights of torch's layer in every form, put them back, and use each."""
    layers = random_layers()
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
        # The shapes of the matrices, and how many in a row have each.
        "stored": {
            name: [
                {"shape": list(shape), "count": len(list(run))}
                for shape, run in groupby(tuple(matrix.shape) for matrix in form.pack(small))
            ]
            for name, form in forms(HEADS).items()
        },
        "kept": kept(layers),
        "self_attention": largest_share(layers, x, x),
        "cross_attention": largest_share(layers, x, source),
        "wrong_order": wrong_order(layers, x),
        **same_objects(layers),
        "times": times(layers),
    }


def kept(layers: PackedLayers) -> dict[str, bool]:
    """Whether every number comes back from each form by its index map, with no bit changed."""
    small, known, separate = layers.small, forms(HEADS), layers.apart.held().matrices[:3]
    held = {name: (form, form.pack(small)) for name, form in known.items()} | {
        "MultiheadAttention": (known["packed"], [layers.packed.inner.in_proj_weight]),
        "Attention": (known["separate"], separate),
        "GPT-2": (known["transposed"], [layers.gpt2.inner.c_attn.weight]),
    }
    found = {}
    for name, (form, matrices) in held.items():
        flat = torch.cat([matrix.flatten() for matrix in matrices])
        places = form.places(embed_dim=EMBED_DIM, head_dim=EMBED_DIM // HEADS)
        there = torch.empty_like(flat).scatter(0, places.flatten(), small.flatten())
        every_place_once = torch.equal(places.flatten().sort()[0], torch.arange(len(flat)))
        found[name] = every_place_once and same_bits(flat[places], small) and same_bits(there, flat)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of the bits: 0 is not -0."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def attend(layers: PackedLayers, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output for queries, keys and values of heads, by the output projection."""
    result: Tensor = layers.torch.inner.out_proj(reference.merge_heads(AttentionMatrix(q, k) @ v))
    return result


def largest_share(layers: PackedLayers, x: Tensor, source: Tensor) -> float:
    """The largest share of the error budget that the output of any layer or form uses."""
    budget = layer_budget(x, source, source, layers.weights, num_heads=HEADS)
    outputs = [
        layers.torch.inner(x, source, source, need_weights=False)[0],
        layers.packed.inner(x, source, source, need_weights=False)[0],
        layers.apart.inner(x, source),
        *([layers.gpt2(x)] if source is x else []),
    ]
    for form in forms(HEADS).values():
        if source is x or len(form.sizes) > 1:  # a single matrix makes q, k and v of one input
            matrices, biases = form.pack(layers.small), form.split(layers.biases)
            outputs.append(attend(layers, *form.heads(form.products(x, source, matrices, biases))))
    return max(budget.check(output).ratio for output in outputs)


def wrong_order(layers: PackedLayers, x: Tensor) -> dict[str, bool | float]:
    """The packed matrix read as q, k, v of the first head, then of the second: another function."""
    form = forms(HEADS)["packed"]
    products = form.products(x, x, form.pack(layers.small), (layers.biases,))
    by_head = products[0].unflatten(-1, (HEADS, PARTS, -1)).movedim(1, 3)
    output = attend(layers, *by_head.unbind(2))
    budget = layer_budget(x, x, x, layers.weights, num_heads=HEADS)
    return {
        "within": budget.check(output).within,
        "difference": float((output - budget.exact).norm() / budget.exact.norm()),
    }


def same_objects(layers: PackedLayers) -> dict[str, Any]:
    """The same tokens as one object and as copies, in a batch of which one text is padding only."""
    x = torch.randn(BATCH, KEYS, EMBED_DIM)
    copy = x.clone()
    ways = {"one": (x, x, x), "two": (x, copy, copy), "three": (x, copy, x.clone())}
    padding = (torch.arange(BATCH) == BATCH - 1)[:, None].expand(BATCH, KEYS)
    mask = Mask.from_torch_padding(padding)
    budget = layer_budget(x, x, x, layers.weights, num_heads=HEADS, mask=mask)
    call = {"key_padding_mask": padding, "need_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolarityWarning)  # a text of padding alone is asked for
        outputs = [layers.packed.inner(*way, **call)[0] for way in ways.values()]
    outputs += [layers.apart.inner(x, mask=mask), layers.apart.inner(x, copy, mask=mask)]
    return {
        "objects_outside": sum(budget.check(output).outside for output in outputs),
        "torch_nan": {
            name: int(layers.torch.inner(*way, **call)[0].isnan().sum())
            for name, way in ways.items()
        },
        "nan": sum(int(output.isnan().sum()) for output in outputs),
    }


def times(layers: PackedLayers) -> dict[str, float]:
    """How long the projections of each form take, as multiples of the packed one."""
    x, small = torch.randn(1, TOKENS, EMBED_DIM), layers.small
    works = {
        name: partial(form.products, x, x, form.pack(small), form.split(layers.biases))
        for name, form in forms(HEADS).items()
    }
    return times_of(works, against="packed", rounds=ROUNDS)


# ---- the picture -------------------------------------------------------------------------------

# The form, who has it, what is stored, and where head h's part is in that.
TITLES = {
    "per_head": ("a matrix a head", "the paper", "{[0][count]} of {[0][shape]:shape}", "matrix h"),
    "separate": (
        "q, k, v",
        "headwise.Attention",
        "{[0][count]} of {[0][shape]:shape}",
        "head_dim rows from h × head_dim",
    ),
    "q_kv": (
        "q; k with v",
        "cross-attention",
        "{[0][shape]:shape}, {[1][shape]:shape}",
        "the same; v below k",
    ),
    "packed": ("all in one", "PyTorch", "{[0][shape]:shape}", "the same; k below q, v below k"),
    "transposed": (
        "all in one, transposed",
        "GPT-2",
        "{[0][shape]:shape}",
        "the same in columns; k right of q, v right of k",
    ),
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
        title, where, *_ = TITLES[name]
        heading(axes, centre, 0.18, title, align="center")
        note(axes, centre, 0.38, where, align="center")
        for line, run in enumerate(n["stored"][name]):
            words = say("{count} of {shape[0]} × {shape[1]}", run).removeprefix("1 of ")
            note(axes, centre, bottom + 0.15 + 0.18 * line, words, align="center")
    centre, top = CENTRES[-1], TOP + 2.2 * UNIT  # of the legend
    for part, word in enumerate(("queries", "keys", "values")):
        x = centre + UNIT * (part - 1)
        axes.text(x, top, word, color=SERIES[part], fontsize=9, ha="center", va="center")
    note(axes, centre, top + 0.24, say("strong colour: head {shown_head},", n), align="center")
    note(axes, centre, top + 0.42, say("pale: the others of {heads} heads", n), align="center")


def _blocks(form: PackingForm, heads: int) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of each small matrix in the stored ones."""
    wide = 1 / heads
    if max(form.sizes) == 1:
        places = [divmod(count, heads) for count in range(len(form.sizes))]
        return [(head * (wide + STRIP), part * (1 + GAP), wide, 1.0) for part, head in places]
    if not form.by_rows:
        return [(count * wide, 0.0, wide, 1.0) for count in range(sum(form.sizes))]
    gaps = [GAP * matrix for matrix, size in enumerate(form.sizes) for _ in range(size)]
    return [(0.0, count * wide + gap, 1.0, wide) for count, gap in enumerate(gaps)]


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
    table=FactTable(
        columns=("form", "stored as", "head h's part", "time"),
        rows=tuple(
            (
                f"{title} ({where})",
                shapes.replace("{", f"{{stored[{name}]"),
                place,
                f"{{times[{name}]:.2f}}",
            )
            for name, (title, where, shapes, place) in TITLES.items()
        ),
    ),
    varies=frozenset({"times", "self_attention", "cross_attention"}),
)

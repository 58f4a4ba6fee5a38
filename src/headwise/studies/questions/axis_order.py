"""Is it (length, batch, embed_dim) or (batch, length, embed_dim), and what if it is the other?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from headwise.drop_in.layer import MultiheadAttention
from headwise.errors import HeadwiseError
from headwise.layer.attention import Attention
from headwise.masks import Mask
from headwise.models.reading import Progress
from headwise.studies.experiments.one_head import difference
from headwise.studies.experiments.timing import times_of
from headwise.studies.pictures.style import CARD, weight_map
from headwise.studies.question import Fact, Numbers, Question, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH, LENGTH, OTHER_LENGTH = 3, 6, 9
EMBED_DIM, HEADS = 32, 4
TIMED = {"batch": 8, "length": 128, "embed_dim": 512, "heads": 8}
ROUNDS = 9
Layer = type[nn.MultiheadAttention]
LAYERS: dict[str, Layer] = {"torch": nn.MultiheadAttention, "headwise": MultiheadAttention}


def measure(progress: Progress) -> dict[str, Any]:
    """Give one batch-first tensor to a batch-first and to a length-first layer."""
    progress("axis-order", 0, 3)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    right = {name: kind(EMBED_DIM, HEADS, batch_first=True) for name, kind in LAYERS.items()}
    wrong = {name: kind(EMBED_DIM, HEADS) for name, kind in LAYERS.items()}
    for name, layer in wrong.items():
        layer.load_state_dict(right[name].state_dict())
    maps = {
        order: {name: influence(layer, x) for name, layer in layers.items()}
        for order, layers in (("right", right), ("wrong", wrong))
    }
    progress("axis-order", 1, 3)
    told = {name: given_to(layer, x) for name, layer in wrong.items()}
    progress("axis-order", 2, 3)
    return {
        "x": list(x.shape),
        "batch": BATCH,
        "length": LENGTH,
        "others": BATCH - 1,
        "output": {name: list(layer(x, x, x)[0].shape) for name, layer in wrong.items()},
        "weights": {
            order: list(layers["torch"](x, x, x)[1].shape)
            for order, layers in (("right", right), ("wrong", wrong))
        },
        "apart": apart(wrong["headwise"], right["headwise"], x),
        "reach": {
            order: {name: reach(found) for name, found in by_layer.items()}
            for order, by_layer in maps.items()
        },
        "told": told | {"native": given_to_native(x)},
        "square": {name: square(layer) for name, layer in wrong.items()},
        "timed": TIMED,
        "times": {name: times(kind) for name, kind in LAYERS.items()},
        "maps": {order: shares(by_layer["headwise"]) for order, by_layer in maps.items()},
    }


# ---- who reaches whom --------------------------------------------------------------------------


def influence(layer: nn.Module, x: Tensor) -> Tensor:
    """The size of the derivative of each output token by each input token, (tokens, tokens).

    Tokens in the order of the tensor's first two axes, which are batch and length here.
    """
    found = jacobian(lambda x: layer(x, x, x, need_weights=False)[0], x, vectorize=True)
    sizes: Tensor = torch.linalg.vector_norm(found, dim=(2, 5))
    return sizes.flatten(2, 3).flatten(0, 1)


def reach(found: Tensor) -> dict[str, list[int]]:
    """How many tokens reach an output token, of its own sequence and of others: (least, most)."""
    batch = torch.arange(BATCH).repeat_interleave(LENGTH)
    same = batch[:, None] == batch
    counts = {"own": ((found > 0) & same).sum(1), "others": ((found > 0) & ~same).sum(1)}
    return {name: [int(count.min()), int(count.max())] for name, count in counts.items()}


def shares(found: Tensor) -> list[list[float]]:
    """The influence on each token as shares of the largest of all."""
    return [[round(x, 4) for x in row] for row in (found / found.max()).tolist()]


def apart(wrong: nn.Module, right: nn.Module, x: Tensor) -> float:
    """How far the outputs are from those of the right order, as a share of their size."""
    one, other = (layer(x, x, x, need_weights=False)[0].detach()[None] for layer in (wrong, right))
    return float(difference(one, other)[0])


# ---- what tells --------------------------------------------------------------------------------


def answer_to(call: Callable[[], object]) -> dict[str, Any]:
    """Whether the call is refused, and the first line of what is said."""
    try:
        call()
    except (AssertionError, RuntimeError, HeadwiseError) as error:
        return {"refused": True, "says": str(error).partition("\n")[0]}
    return {"refused": False, "says": "nothing"}


def given_to(layer: nn.Module, x: Tensor) -> dict[str, Any]:
    """A batch-first tensor in a length-first layer, with and without what knows the sizes."""
    batch, length, embed_dim = x.shape
    source = torch.randn(batch, OTHER_LENGTH, embed_dim)
    padding = torch.arange(length) >= torch.full((batch, 1), length - 1)
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {
        "alone": answer_to(lambda: layer(x, x, x)),
        "padding": answer_to(lambda: layer(x, x, x, key_padding_mask=padding)),
        "causal": answer_to(lambda: layer(x, x, x, attn_mask=causal)),
        "source": answer_to(lambda: layer(x, source, source)),
    }


def given_to_native(x: Tensor) -> dict[str, Any]:
    """A length-first tensor in the native layer, whose one order is batch first."""
    layer, length_first = Attention(EMBED_DIM, HEADS), x.transpose(0, 1)
    lengths = Mask.lengths(keys=torch.full((len(x),), x.shape[1] - 1))
    return {
        "alone": answer_to(lambda: layer(length_first)),
        "padding": answer_to(lambda: layer(length_first, mask=lengths)),
        "causal": answer_to(lambda: layer(length_first, mask=Mask.causal())),
    }


def square(layer: nn.Module) -> dict[str, Any]:
    """The same where the batch has as many sequences as each has tokens: every mask fits."""
    x = torch.randn(LENGTH, LENGTH, EMBED_DIM)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return answer_to(lambda: layer(x, x, x, key_padding_mask=mask & False, attn_mask=mask))


# ---- time --------------------------------------------------------------------------------------


def times(kind: Layer) -> dict[str, float]:
    """The time of a length-first layer over that of a batch-first one: inference, training."""
    batch, length, embed_dim, heads = TIMED.values()
    layers = {first: kind(embed_dim, heads, batch_first=first) for first in (True, False)}
    x = torch.randn(batch, length, embed_dim)
    tokens = {True: x, False: x.transpose(0, 1).contiguous()}

    def infer(first: bool) -> None:
        x = tokens[first]
        with torch.no_grad():
            layers[first].eval()(x, x, x, need_weights=False)

    def train(first: bool) -> None:
        x = tokens[first]
        layers[first].train()(x, x, x, need_weights=False)[0].sum().backward()

    return {
        work.__name__: times_of(
            {"batch": partial(work, True), "length": partial(work, False)},
            against="batch",
            rounds=ROUNDS,
        )["length"]
        for work in (infer, train)
    }


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """Which token reaches which, in the order that the layer was built for and in the other."""
    figure.set_size_inches(7.6, 4.3)
    titles = {
        "right": ("batch-first tensor, batch-first layer", "each token reads its own sequence"),
        "wrong": (
            "the same tensor, length-first layer",
            "each token reads its place in all sequences",
        ),
    }
    for axes, (order, (title, note)) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        weight_map(axes, n["maps"][order])
        axes.set_title(f"{title}:\n{note}", loc="left")
        edges = [n["length"] * count - 0.5 for count in range(1, n["batch"])]
        for edge in edges:
            axes.axhline(edge, color=CARD, linewidth=1)
            axes.axvline(edge, color=CARD, linewidth=1)
        centres = [n["length"] * (count + 0.5) - 0.5 for count in range(n["batch"])]
        names = [f"sequence {count + 1}" for count in range(n["batch"])]
        axes.set_xticks(centres, names)
        axes.set_yticks(centres, names, rotation=90, va="center")
        axes.set_xlabel("input tokens")
    figure.axes[0].set_ylabel("output tokens")


def silent(told: Numbers) -> bool:
    """Whether nothing is said of the order where no mask and no second length is given."""
    return not any(by_call["alone"]["refused"] for by_call in told.values())


def other_sizes_are_refused(told: Numbers) -> bool:
    """Whether torch's layer, the drop-in and the native layer refuse what has other sizes."""
    expected = {"torch": ("padding", "causal", "source"), "native": ("padding",)}
    expected["headwise"] = expected["torch"]
    return all(told[name][call]["refused"] for name, calls in expected.items() for call in calls)


QUESTION = Question(
    id="axis-order",
    asks="Is it (length, batch, embed_dim) or (batch, length, embed_dim), what if I mix them up, "
    "and which is faster?",
    claim="It is what the layer was built for. In the other order the shape of the output is "
    "right and its numbers are not: tokens attend across the batch. Nothing is said, unless a "
    "mask or a source has other sizes.",
    measure=measure,
    facts=(
        Fact(
            "a batch-first tensor {x:shape} goes through a length-first layer, torch's or the "
            "drop-in, without a word, and the output has its shape; the native layer takes a "
            "length-first tensor as silently",
            lambda n: silent(n["told"]) and all(shape == n["x"] for shape in n["output"].values()),
        ),
        Fact(
            "in the right order every token is reached by the {length} tokens of its own sequence "
            "and by {reach[right][torch][others][1]} of others",
            lambda n: all(
                found == {"own": [n["length"]] * 2, "others": [0, 0]}
                for found in n["reach"]["right"].values()
            ),
        ),
        Fact(
            "in the wrong order it is reached by itself and by {reach[wrong][torch][others][0]} "
            "tokens of other sequences, those at its own place, and by no other of its own",
            lambda n: all(
                found == {"own": [1, 1], "others": [n["others"]] * 2}
                for found in n["reach"]["wrong"].values()
            ),
        ),
        Fact(
            "a padding mask, a causal mask and a source of another length are refused by torch's "
            "layer and the drop-in, and lengths by the native layer",
            lambda n: other_sizes_are_refused(n["told"]),
        ),
        Fact(
            "nothing is refused where a mask has no sizes of its own (Mask.causal of the native "
            "layer), or where batch and length are the same number",
            lambda n: (
                not n["told"]["native"]["causal"]["refused"]
                and not any(found["refused"] for found in n["square"].values())
            ),
        ),
        Fact(
            "the weights that the layer returns show it: {weights[wrong]:shape} in place of "
            "{weights[right]:shape}",
            lambda n: (
                n["weights"]["right"] == [n["batch"], n["length"], n["length"]]
                and n["weights"]["wrong"] == [n["length"], n["batch"], n["batch"]]
            ),
        ),
    ),
    verdict="The order the layer was built for (torch's default: length first); in the other, "
    "every token silently reads the {others} tokens at its place in the other sequences instead "
    "of its own sequence, the output keeps its shape, and only masks and sources of other sizes "
    "are refused; in torch's layer length first takes {times[torch][infer]:.2f} times as long.",
    why="Both axes are only counts, and the layer cannot know which is which. It treats every "
    "place as a sequence whose tokens are the batch, and the outputs are {apart:percent} away from "
    "the right ones. What tells before the results do is a mask built for the right sizes, which "
    "does not fit, and the shape of the weights that are returned.",
    caption="How much each input token (columns) moves each output token (rows), for {batch} "
    "sequences of {length} tokens, bright is much. On the left the layer and the tensor agree: "
    "blocks, each sequence reads itself alone. On the right the same tensor in a length-first "
    "layer: stripes, each token reads those at its own place in every sequence.",
    draw=draw,
    table=Table(
        columns=("a batch-first tensor in a length-first layer", "what headwise says"),
        rows=(
            ("alone", "{told[headwise][alone][says]}"),
            ("with a padding mask (batch, length)", "{told[headwise][padding][says]}"),
            ("with a causal mask (length, length)", "{told[headwise][causal][says]}"),
            ("with a source of another length", "{told[headwise][source][says]}"),
            ("native layer, lengths of each sequence", "{told[native][padding][says]}"),
            ("native layer, Mask.causal()", "{told[native][causal][says]}"),
            (
                "time of length first over batch first, inference",
                "torch {times[torch][infer]:.2f}, headwise {times[headwise][infer]:.2f}",
            ),
            (
                "the same, training step",
                "torch {times[torch][train]:.2f}, headwise {times[headwise][train]:.2f}",
            ),
        ),
    ),
    varies=frozenset({"times"}),
)

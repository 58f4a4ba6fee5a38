"""Question: is the input (length, batch, embed_dim) or (batch, length, embed_dim)?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from headwise.errors import HeadwiseError
from headwise.layers.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.study import drawing, implementations, measures, question

BATCH, LENGTH, OTHER_LENGTH = 3, 6, 9
EMBED_DIM, HEADS = 32, 4
TIMED = {"batch": 8, "length": 128, "embed_dim": 512, "heads": 8}
ROUNDS = 21
MASKED = ("padding", "causal", "source")
REFUSED = {"torch": MASKED, "headwise": MASKED, "native": ("padding",)}  # sizes disagree
Layer = type[nn.MultiheadAttention]
LAYERS: dict[str, Layer] = {"torch": nn.MultiheadAttention, "headwise": MultiheadAttention}
VARIES = {"messages", "own_order", "times"}


def measure(progress: question.Progress) -> dict[str, Any]:
    """Call batch-first and length-first layers with the same batch-first tensor."""
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    right = {name: kind(EMBED_DIM, HEADS, batch_first=True) for name, kind in LAYERS.items()}
    wrong = {name: kind(EMBED_DIM, HEADS) for name, kind in LAYERS.items()}
    for name, layer in wrong.items():
        layer.load_state_dict(right[name].state_dict())
    orders = {"right": right, "wrong": wrong}
    maps = {
        order: {name: measure_influence(layer, x) for name, layer in layers.items()}
        for order, layers in orders.items()
    }
    outcomes = run_wrong_order(wrong, x)
    shares = [own_order_error_budget_share(each, x) for each in (*right.values(), *wrong.values())]
    return {
        "x": list(x.shape),
        "batch": BATCH,
        "length": LENGTH,
        "others": BATCH - 1,
        "own_order": max(shares),
        "output": {name: output_shapes(layer, x)[0] for name, layer in wrong.items()},
        "weights": {
            order: output_shapes(layers["torch"], x)[1] for order, layers in orders.items()
        },
        "apart": relative_difference_due_to_wrong_order(wrong["torch"], right["torch"], x),
        "reach": {
            order: {
                name: least_and_most_dependencies_per_output(sizes)
                for name, sizes in by_layer.items()
            }
            for order, by_layer in maps.items()
        },
        "told": {
            name: {call: outcome.answer for call, outcome in by_call.items()}
            for name, by_call in outcomes.items()
        },
        "messages": {
            name: {call: outcome.message for call, outcome in outcomes[name].items()}
            for name in ("headwise", "native")
        },
        "square": {name: run_square_batch(layer).answer for name, layer in wrong.items()},
        "timed": TIMED,
        "times": {name: length_first_relative_times(kind) for name, kind in LAYERS.items()},
        # 1 where an output token (row) depends on an input token (column).
        "maps": {order: (by_layer["torch"] > 0).int().tolist() for order, by_layer in maps.items()},
    }


class Outcome(NamedTuple):
    """The result of a call, or the message of its error."""

    result: Any = None
    message: str = "–"

    @property
    def answer(self) -> str:
        """The word "error" or "accepted"."""
        return "error" if self.result is None else "accepted"


def result_or_error(call: Callable[[], object]) -> Outcome:
    try:
        return Outcome(call())
    except (AssertionError, RuntimeError, HeadwiseError) as error:
        *_, last = str(error).splitlines()[:2]  # of headwise's errors, "needed: ..."
        return Outcome(message=last.strip())


def output_shapes(layer: nn.Module, x: Tensor) -> list[list[int]]:
    outputs = result_or_error(lambda: layer(x, x, x)).result or (torch.empty(0), torch.empty(0))
    return [list(each.shape) for each in outputs]


def measure_influence(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the norm of the derivative of each output token by each input token.

    The shape is (tokens, tokens), in the order of the first two axes of ``x``, here batch and
    length. After an error all values are 0.
    """

    def output(x: Tensor) -> Any:
        return layer(x, x, x, need_weights=False)[0]

    derivatives = result_or_error(lambda: jacobian(output, x, vectorize=True)).result
    if derivatives is None:
        return torch.zeros(2 * (x.shape[:2].numel(),))
    sizes: Tensor = torch.linalg.vector_norm(derivatives, dim=(2, 5))
    return sizes.flatten(2, 3).flatten(0, 1)


def least_and_most_dependencies_per_output(sizes: Tensor) -> dict[str, list[int]]:
    """Count the input tokens that an output token depends on, as [least, most].

    Counts are for tokens of its own sequence, of others, and at its own position in any.
    """
    batch = torch.arange(BATCH).repeat_interleave(LENGTH)
    position = torch.arange(LENGTH).repeat(BATCH)
    same = batch[:, None] == batch
    among = {"own": same, "others": ~same, "position": position[:, None] == position}
    counts = {name: ((sizes > 0) & pairs).sum(1) for name, pairs in among.items()}
    return {name: [int(count.min()), int(count.max())] for name, count in counts.items()}


def relative_difference_due_to_wrong_order(wrong: nn.Module, right: nn.Module, x: Tensor) -> float:
    reference = right(x, x, x)[0]
    outputs = result_or_error(lambda: wrong(x, x, x)).result
    actual = torch.zeros_like(reference) if outputs is None else outputs[0]
    return float(measures.relative_difference(actual[None], reference[None])[0])


def own_order_error_budget_share(layer: nn.MultiheadAttention, x: Tensor) -> float:
    tokens = x if layer.batch_first else x.transpose(0, 1)
    output = layer(tokens, tokens, tokens)[0]
    weights = implementations.SharedWeights.of_torch_layer(layer)
    budget = measures.layer_error_budget(x, x, x, weights, num_heads=layer.num_heads)
    return budget.check(output if layer.batch_first else output.transpose(0, 1)).ratio


def run_wrong_order(wrong: Mapping[str, nn.Module], x: Tensor) -> dict[str, dict[str, Outcome]]:
    """Call length-first layers with a batch-first tensor, with and without masks.

    The native layer, which is always batch first, gets a length-first tensor.
    """
    batch, length, embed_dim = x.shape
    source = torch.randn(batch, OTHER_LENGTH, embed_dim)
    padding = torch.arange(length) >= torch.full((batch, 1), length - 1)
    calls: dict[str, Callable[[nn.Module], object]] = {
        "alone": lambda layer: layer(x, x, x),
        "padding": lambda layer: layer(x, x, x, key_padding_mask=padding),
        "causal": lambda layer: layer(x, x, x, attn_mask=torch.ones(length, length).triu(1) > 0),
        "source": lambda layer: layer(x, source, source),
    }
    outcomes = {
        name: {call: result_or_error(partial(give, layer)) for call, give in calls.items()}
        for name, layer in wrong.items()
    }
    native, turned = Attention(EMBED_DIM, HEADS), x.transpose(0, 1)
    lengths = Mask.lengths(keys=torch.full((batch,), length - 1))
    masks = {"alone": None, "padding": lengths, "causal": Mask.causal()}
    outcomes["native"] = {
        call: result_or_error(partial(native, turned, mask=mask)) for call, mask in masks.items()
    }
    return outcomes


def run_square_batch(layer: nn.Module) -> Outcome:
    """Call with as many sequences as tokens, so that every mask has a valid shape."""
    x = torch.randn(LENGTH, LENGTH, EMBED_DIM)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return result_or_error(lambda: layer(x, x, x, key_padding_mask=mask & False, attn_mask=mask))


def length_first_relative_times(kind: Layer) -> dict[str, float]:
    batch, length, embed_dim, heads = TIMED.values()
    layers = {first: kind(embed_dim, heads, batch_first=first) for first in (True, False)}
    x = torch.randn(batch, length, embed_dim)
    tokens = {True: x, False: x.transpose(0, 1).contiguous()}

    def infer(first: bool) -> None:
        with torch.no_grad():
            layers[first].eval()(*[tokens[first]] * 3, need_weights=False)

    def train(first: bool) -> None:
        layers[first].train()(*[tokens[first]] * 3, need_weights=False)[0].sum().backward()

    return {
        work.__name__: measures.relative_times(
            {"batch": partial(work, True), "length": partial(work, False)},
            against="batch",
            rounds=ROUNDS,
        )["length"]
        for work in (infer, train)
    }


def facts(n: question.Numbers) -> dict[str, bool]:
    outcomes, length, others = n["told"], n["length"], n["others"]
    return {
        "own-order": n["own_order"] <= 1,
        "no-error": (
            all(by_call["alone"] == "accepted" for by_call in outcomes.values())
            and all(shape == n["x"] for shape in n["output"].values())
        ),
        "right-order": all(
            counts["own"] == [length] * 2 and counts["others"] == [0, 0]
            for counts in n["reach"]["right"].values()
        ),
        "wrong-order": all(
            counts == {"own": [1, 1], "others": [others] * 2, "position": [n["batch"]] * 2}
            for counts in n["reach"]["wrong"].values()
        ),
        "refused": all(
            outcomes[name][call] == "error" for name, calls in REFUSED.items() for call in calls
        ),
        "accepted": {outcomes["native"]["causal"], *n["square"].values()} == {"accepted"},
        "weights": (
            n["weights"]["right"] == [n["batch"], length, length]
            and n["weights"]["wrong"] == [length, n["batch"], n["batch"]]
        ),
    }


EXAMPLE = 8  # the token that the picture marks


def draw(figure: drawing.Figure, n: question.Numbers) -> None:
    figure.set_figheight(4.2)
    titles = {
        "right": "batch_first=True matches this tensor:\neach token attends to its own sequence",
        "wrong": "the default misreads it: each token\nattends to its position in every sequence",
    }
    for axes, (order, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        draw_dependency_map(axes, n["maps"][order], n)
        axes.set_title(title, loc="left")


def draw_dependency_map(axes: drawing.Axes, rows: list[list[int]], n: question.Numbers) -> None:
    """Draw a cell where an output token depends on an input token; mark one output token."""
    from matplotlib.patches import Rectangle

    tokens, length = len(rows), n["length"]
    for row, column in product(range(tokens), repeat=2):
        if rows[row][column]:
            colour = drawing.SERIES[1] if row == EXAMPLE else drawing.SERIES[0]
            axes.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, facecolor=colour))
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal")
    for edge in range(0, tokens + 1, length):
        axes.axhline(edge, color=drawing.SOFT, linewidth=0.8, clip_on=False)
        axes.axvline(edge, color=drawing.SOFT, linewidth=0.8, clip_on=False)
    axes.spines[:].set_visible(False)
    centres = [length * (count + 0.5) for count in range(n["batch"])]
    names = [f"sequence {count}" for count in range(n["batch"])]
    axes.set_xticks(centres, names)
    axes.set_yticks(centres, names, rotation=90, va="center")
    axes.set(xlabel="input tokens", ylabel="output tokens")

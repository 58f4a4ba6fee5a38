"""Question: is one packed matrix the same as many small ones?

The small matrices of a layer have the shape (matrices, embed_dim, head_dim), for the paper's
formula x @ W. The matrices of all heads' queries come first, then of the keys, then of the values.
"""

from __future__ import annotations

import warnings
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.errors import PolarityWarning
from headwise.function import stages
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.study import drawing, implementations, measures, question
from headwise.support.tensors import same_bytes

PARTS = 3  # queries, keys, values
EMBED_DIM, HEADS = 768, 12  # GPT-2's
BATCH, QUERIES, KEYS = 2, 48, 64
TOKENS, ROUNDS = 256, 16  # of the timing
SHOWN_HEAD = 4  # in a strong colour in the picture
VARIES = {"cross_attention", "self_attention", "times"}


class PackingForm(NamedTuple):
    """One way to store the small matrices."""

    sizes: tuple[int, ...]  # the number of small matrices side by side in each stored matrix
    by_rows: bool  # a stored matrix has a row for each output, as torch's Linear; else a column

    def pack(self, small: Shaped[Tensor, "matrices embed_dim head_dim"]) -> list[Tensor]:
        wide = [torch.cat(list(group), dim=1) for group in small.split(self.sizes)]
        return [w.mT.contiguous() if self.by_rows else w for w in wide]

    def stored_positions(
        self, *, embed_dim: int, head_dim: int
    ) -> Int[Tensor, "matrices {embed_dim} {head_dim}"]:
        entry, channel = torch.arange(embed_dim)[:, None], torch.arange(head_dim)
        positions, stored = [], 0
        for size in self.sizes:
            for count in range(size):
                output = count * head_dim + channel
                by_rows, by_columns = output * embed_dim + entry, entry * size * head_dim + output
                positions.append(stored + (by_rows if self.by_rows else by_columns))
            stored += size * head_dim * embed_dim
        return torch.stack(positions)

    def biases_of_stored_matrices(self, bias: Float[Tensor, " outputs"]) -> tuple[Tensor, ...]:
        head_dim = len(bias) // sum(self.sizes)
        parts: tuple[Tensor, ...] = bias.split([size * head_dim for size in self.sizes])
        return parts

    def project(
        self, x: Tensor, source: Tensor, matrices: list[Tensor], biases: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """Multiply by each stored matrix: ``x`` for the queries, ``source`` for the others."""
        first, outputs = 0, []
        for size, matrix, bias in zip(self.sizes, matrices, biases, strict=True):
            tokens = x if first * PARTS < sum(self.sizes) else source
            outputs.append(linear(tokens, matrix if self.by_rows else matrix.mT, bias))
            first += size
        return outputs

    def split_outputs_into_heads(self, outputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        pairs = zip(self.sizes, outputs, strict=True)
        single = [x for size, y in pairs for x in y.unflatten(-1, (size, -1)).unbind(-2)]
        count = len(single) // PARTS
        q, k, v = (torch.stack(single[n : n + count], dim=1) for n in range(0, len(single), count))
        return q, k, v


def packing_forms(heads: int) -> dict[str, PackingForm]:
    return {
        "per_head": PackingForm((1,) * (PARTS * heads), by_rows=False),
        "separate": PackingForm((heads, heads, heads), by_rows=True),
        "q_kv": PackingForm((heads, 2 * heads), by_rows=True),
        "packed": PackingForm((PARTS * heads,), by_rows=True),
        "transposed": PackingForm((PARTS * heads,), by_rows=False),
    }


class PackedLayers(NamedTuple):
    """The same weights in layers with different forms, and as small matrices."""

    torch: implementations.TorchLayer
    packed: implementations.DropIn
    apart: implementations.HeadwiseAttention
    gpt2: implementations.GPT2
    weights: implementations.SharedWeights
    small: Tensor
    biases: Tensor  # of the small matrices in their order


def random_layers() -> PackedLayers:
    sizes = EMBED_DIM, HEADS
    layers = (
        implementations.TorchLayer(*sizes),
        implementations.DropIn(*sizes),
        implementations.HeadwiseAttention(*sizes),
        implementations.GPT2(*sizes),
    )
    inner = layers[0].inner
    # torch initialises biases to 0, which would hide their order.
    nn.init.normal_(inner.in_proj_bias, std=0.1)
    nn.init.normal_(inner.out_proj.bias, std=0.1)
    weights = layers[0].as_shared_weights()
    for layer in layers:
        layer.load_weights(weights).eval()
    small = inner.in_proj_weight.unflatten(0, (PARTS * HEADS, -1)).mT.contiguous()
    return PackedLayers(*layers, weights, small, inner.in_proj_bias)


@torch.no_grad()
def measure(progress: question.Progress) -> dict[str, Any]:
    """Pack the weights of torch's layer in every form, unpack them, and compare the outputs."""
    layers = random_layers()
    small, forms = layers.small, packing_forms(HEADS)
    x, source = torch.randn(BATCH, QUERIES, EMBED_DIM), torch.randn(BATCH, KEYS, EMBED_DIM)
    return {
        "embed_dim": EMBED_DIM,
        "heads": HEADS,
        "head_dim": EMBED_DIM // HEADS,
        "weights": small.numel(),
        "forms": len(forms),
        "shown_head": SHOWN_HEAD,
        "small": len(small),
        "tokens": TOKENS,
        # The shapes of the matrices, with the length of each run of equal shapes.
        "stored": {
            name: [
                {"shape": list(shape), "count": len(list(run))}
                for shape, run in groupby(tuple(matrix.shape) for matrix in form.pack(small))
            ]
            for name, form in forms.items()
        },
        "kept": check_packing_round_trip(layers),
        "self_attention": largest_error_budget_share(layers, x, x),
        "cross_attention": largest_error_budget_share(layers, x, source),
        "wrong_order": misread_packed_weights(layers, x),
        **compare_same_and_copied_inputs(layers),
        "times": projection_times(layers),
    }


def check_packing_round_trip(layers: PackedLayers) -> dict[str, bool]:
    small, forms = layers.small, packing_forms(HEADS)
    stored = {name: (form, form.pack(small)) for name, form in forms.items()} | {
        "MultiheadAttention": (forms["packed"], [layers.packed.inner.in_proj_weight]),
        "Attention": (forms["separate"], layers.apart.as_shared_weights().matrices[:3]),
        "GPT-2": (forms["transposed"], [layers.gpt2.inner.c_attn.weight]),
    }
    intact = {}
    for name, (form, matrices) in stored.items():
        flat = torch.cat([matrix.flatten() for matrix in matrices])
        index = form.stored_positions(embed_dim=EMBED_DIM, head_dim=EMBED_DIM // HEADS)
        packed = torch.empty_like(flat).scatter(0, index.flatten(), small.flatten())
        is_permutation = torch.equal(index.flatten().sort()[0], torch.arange(len(flat)))
        same = same_bytes(flat[index], small) and same_bytes(packed, flat)
        intact[name] = is_permutation and same
    return intact


def attend_and_project(layers: PackedLayers, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result: Tensor = layers.torch.inner.out_proj(stages.merge_heads(AttentionMatrix(q, k) @ v))
    return result


def largest_error_budget_share(layers: PackedLayers, x: Tensor, source: Tensor) -> float:
    budget = measures.layer_error_budget(x, source, source, layers.weights, num_heads=HEADS)
    outputs = [
        layers.torch.inner(x, source, source, need_weights=False)[0],
        layers.packed.inner(x, source, source, need_weights=False)[0],
        layers.apart.inner(x, source),
        *([layers.gpt2(x)] if source is x else []),
    ]
    for form in packing_forms(HEADS).values():
        if source is x or len(form.sizes) > 1:  # a single matrix has a single input
            stored = form.pack(layers.small), form.biases_of_stored_matrices(layers.biases)
            products = form.project(x, source, *stored)
            outputs.append(attend_and_project(layers, *form.split_outputs_into_heads(products)))
    return max(budget.check(output).ratio for output in outputs)


def misread_packed_weights(layers: PackedLayers, x: Tensor) -> dict[str, bool | float]:
    """Misread the packed matrix as q, k, v of the first head, then of the second head."""
    form = packing_forms(HEADS)["packed"]
    products = form.project(x, x, form.pack(layers.small), (layers.biases,))
    by_head = products[0].unflatten(-1, (HEADS, PARTS, -1)).movedim(1, 3)
    output = attend_and_project(layers, *by_head.unbind(2))
    budget = measures.layer_error_budget(x, x, x, layers.weights, num_heads=HEADS)
    difference = float((output - budget.exact).norm() / budget.exact.norm())
    return {"within": budget.check(output).within, "difference": difference}


def compare_same_and_copied_inputs(layers: PackedLayers) -> dict[str, Any]:
    x = torch.randn(BATCH, KEYS, EMBED_DIM)
    copy = x.clone()
    inputs = {"one": (x, x, x), "two": (x, copy, copy), "three": (x, copy, x.clone())}
    padding = (torch.arange(BATCH) == BATCH - 1)[:, None].expand(BATCH, KEYS)
    call = {"key_padding_mask": padding, "need_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolarityWarning)  # a text of padding only is intended
        mask = Mask.from_torch_padding(padding)
        outputs = [layers.packed.inner(*tensors, **call)[0] for tensors in inputs.values()]
    budget = measures.layer_error_budget(x, x, x, layers.weights, num_heads=HEADS, mask=mask)
    outputs += [layers.apart.inner(x, mask=mask), layers.apart.inner(x, copy, mask=mask)]
    return {
        "objects_outside": sum(budget.check(output).outside for output in outputs),
        "torch_nan": {
            name: int(layers.torch.inner(*tensors, **call)[0].isnan().sum())
            for name, tensors in inputs.items()
        },
        "nan": sum(int(output.isnan().sum()) for output in outputs),
    }


def projection_times(layers: PackedLayers) -> dict[str, float]:
    x, small, biases = torch.randn(1, TOKENS, EMBED_DIM), layers.small, layers.biases
    functions = {
        name: partial(form.project, x, x, form.pack(small), form.biases_of_stored_matrices(biases))
        for name, form in packing_forms(HEADS).items()
    }
    return measures.relative_times(functions, against="packed", rounds=ROUNDS)


def facts(n: question.Numbers) -> dict[str, bool]:
    return {
        "bits": all(n["kept"].values()),
        "self-attention": n["self_attention"] <= 1,
        "cross-attention": n["cross_attention"] <= 1,
        "order": not n["wrong_order"]["within"],
        "objects": n["nan"] == n["objects_outside"] == 0,
    }


TITLES = {  # the form, and a layer that uses it
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


def draw(figure: drawing.Figure, n: question.Numbers) -> None:
    """Draw the stored matrices of each form to scale, with one head in a strong colour."""
    sheet = drawing.Sheet(figure, n, height=3.3)
    for centre, (name, form) in zip(CENTRES, packing_forms(n["heads"]).items(), strict=True):
        blocks = _matrix_rectangles(form, n["heads"])
        left = centre - UNIT * max(x + wide for x, _, wide, _ in blocks) / 2
        bottom = TOP + UNIT * max(y + high for _, y, _, high in blocks)
        for count, (x, y, wide, high) in enumerate(blocks):
            part, head = divmod(count, n["heads"])
            box = (left + UNIT * x, TOP + UNIT * y, UNIT * wide, UNIT * high)
            strong = head == n["shown_head"]
            sheet.block(*box, colour=drawing.SERIES[part], alpha=1.0 if strong else 0.3)
        title, where = TITLES[name]
        sheet.head(centre, 0.18, title, ha="center")
        sheet.write(centre, 0.38, where, ha="center")
        for line, run in enumerate(n["stored"][name]):
            words = question.fill_template("{count} of {shape[0]} × {shape[1]}", run).removeprefix(
                "1 of "
            )
            sheet.write(centre, bottom + 0.15 + 0.18 * line, words, ha="center")
    centre, top = CENTRES[-1], TOP + 2.2 * UNIT  # of the legend
    for part, word in enumerate(("queries", "keys", "values")):
        sheet.write(centre + UNIT * (part - 1), top, word, color=drawing.SERIES[part], ha="center")
    sheet.write(centre, top + 0.24, "strong colour: head {shown_head},", ha="center")
    sheet.write(centre, top + 0.24 + 0.18, "pale: the others of {heads} heads", ha="center")


def _matrix_rectangles(form: PackingForm, heads: int) -> list[tuple[float, float, float, float]]:
    """Return left, top, width and height of each small matrix in the stored ones."""
    wide = 1 / heads
    if max(form.sizes) == 1:
        places = [divmod(count, heads) for count in range(len(form.sizes))]
        return [(head * (wide + STRIP), part * (1 + GAP), wide, 1.0) for part, head in places]
    if not form.by_rows:
        return [(count * wide, 0.0, wide, 1.0) for count in range(sum(form.sizes))]
    gaps = [GAP * matrix for matrix, size in enumerate(form.sizes) for _ in range(size)]
    return [(0.0, count * wide + gap, 1.0, wide) for count, gap in enumerate(gaps)]

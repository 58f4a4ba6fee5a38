"""The distance of the weights of two heads, within a layer and across layers, against dense rows.

All is float64, and as near as `tests.scanning.statistics.calls.assert_is` allows. Layers have 6
heads of 2 kv heads and 4 heads of 4; no two axes have one length.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headwise import AttentionMatrix, Mask, scan
from headwise.errors import OptionError
from headwise.matrix.kernels import tiles
from headwise.scanning.call import CapturedCall
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics import similarity
from headwise.scanning.statistics.maps import OneKey
from headwise.scanning.statistics.similarity import HeadDistance
from headwise.scanning.statistics.statistic import compute_summaries
from tests.honest import normal
from tests.scanning.models import gpt2, tokens
from tests.scanning.scans import changed
from tests.scanning.statistics.calls import assert_is

BATCH, LENGTH, HEAD_DIM, VALUE_DIM = 3, 24, 10, 7
HEADS = ((6, 2), (4, 4), (6, 2))  # of each layer, with the kv heads
TOTAL = sum(heads for heads, _ in HEADS)
REAL = torch.tensor([24, 17, 5])
NAME = "head_distance"
CERTAIN = 1000.0  # a score above the others by so much leaves them no weight


@dataclass
class Layers:
    """A model of layers whose queries and keys do not depend on its input but on its seed."""

    seed: int = 0
    length: int = LENGTH
    batch: int = BATCH
    is_causal: bool = True
    real: Tensor | None = None
    heads: tuple[tuple[int, int], ...] = HEADS
    lengths: dict[int, int] = field(default_factory=dict)  # of layers that read another text

    def operands(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.heads[layer]
        length, seed = self.lengths.get(layer, self.length), 100 * self.seed + 3 * layer
        sizes = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, VALUE_DIM))
        return tuple(
            (3 if n == 0 else 1) * normal(self.batch, count, length, width, seed=seed + n)
            for n, (count, width) in enumerate(sizes)
        )  # type: ignore[return-value]

    def mask(self, length: int) -> Tensor | None:
        if self.real is None:
            return None
        keys = (torch.arange(length) < self.real[:, None])[:, None, None]
        return (
            keys & torch.ones(length, length, dtype=torch.bool).tril() if self.is_causal else keys
        )

    def __call__(self, x: Tensor) -> Tensor:
        for layer in range(len(self.heads)):
            q, k, v = self.operands(layer)
            mask = self.mask(q.shape[2])
            options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": True}
            scaled_dot_product_attention(
                q, k, v, is_causal=self.is_causal and mask is None, **options
            )
        return x

    def scan(self, **options: Any) -> HeadScan:
        return scan(self, torch.zeros(1), statistics=[NAME], **options)

    def weights(self) -> list[Tensor]:
        """(batch, heads, queries, keys) of each layer."""
        found = []
        for layer in range(len(self.heads)):
            q, k, _ = self.operands(layer)
            mask = Mask.causal() if self.is_causal else Mask()
            if self.real is not None:
                mask = mask & Mask.lengths(keys=self.real)
            matrix = AttentionMatrix(q, k, mask=mask)
            found.append(matrix.rows(torch.arange(q.shape[2])))
        return found

    def real_queries(self) -> Tensor:
        real = torch.full((self.batch,), self.length) if self.real is None else self.real
        return torch.arange(self.length) < real[:, None]


def dense(weights: Sequence[Tensor], counted: Tensor) -> Tensor:
    """(all heads, all heads): the mean over the queries that are counted, (batch, queries)."""
    rows = torch.cat([each.transpose(1, 2)[counted] for each in weights], 1)
    return (rows[:, :, None] - rows[:, None]).abs().sum(-1).mean(0) / 2


def all_pairs(found: HeadScan) -> Tensor:
    """(all heads, all heads) of a scan."""
    values = found[NAME]
    return torch.stack([values[layer, head] for _, layer, head in found.heads])


MODELS = {
    "causal": Layers(),
    "both sides": Layers(is_causal=False),
    "causal and padded": Layers(real=REAL),
    "padded": Layers(is_causal=False, real=REAL),
    "one sequence": Layers(batch=1),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_pair_is_that_of_the_dense_rows(kind: str) -> None:
    model = MODELS[kind]
    found = model.scan()
    assert found[NAME].shape == (3, 6, TOTAL)
    assert_is(all_pairs(found), dense(model.weights(), model.real_queries()))
    number = int(model.real_queries().sum())
    assert [found.compared_queries[n] for n in range(3)] == 3 * [(number, number, number)]


@pytest.mark.parametrize("at_once", [1, 300, 9000])
def test_whatever_is_in_memory_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "AT_ONCE", at_once)
    model = MODELS["padded"]
    assert_is(all_pairs(model.scan()), dense(model.weights(), model.real_queries()))


# ---- closed forms ------------------------------------------------------------------------------


def looking_back(*steps: int, length: int) -> Callable[[Tensor], Tensor]:
    """A layer for each step, whose one head looks so many tokens back, or at key 0."""
    k = torch.eye(length, dtype=torch.float64)[None, None]

    def model(x: Tensor) -> Tensor:
        for step in steps:
            q = CERTAIN * k[:, :, (torch.arange(length) - step).clamp(min=0)]
            scaled_dot_product_attention(q, k, k, scale=1.0)
        return x

    return model


def test_heads_of_layers_that_look_at_other_keys() -> None:
    found = scan(looking_back(0, 1, 5, 1, length=29), torch.zeros(1), statistics=[NAME])
    # Heads that look a and b > a tokens back agree where both look at key 0: at queries 0 to a.
    at_zero = {(0, 1): 1, (0, 5): 1, (1, 5): 2, (1, 1): 29, (5, 5): 29, (0, 0): 29}
    steps = (0, 1, 5, 1)
    alike = [[at_zero[min(a, b), max(a, b)] for b in steps] for a in steps]
    assert_is(all_pairs(found), 1 - torch.tensor(alike).double() / 29)
    assert found.most_similar(1, 0) == [(3, 0, 0.0), (2, 0, 27 / 29), (0, 0, 28 / 29)]
    assert found.most_similar("attention (2)", 0, n=1) == [(3, 0, 0.0)]


def test_a_sink_is_one_more_key() -> None:
    # Both heads have even weights on four keys; the sink of the second takes a half of them.
    zeros = torch.zeros(1, 2, 4, 3, dtype=torch.float64)
    sink = torch.tensor([-CERTAIN, math.log(4)], dtype=torch.float64)
    call = CapturedCall.for_self_attention(AttentionMatrix(zeros, zeros, sink=sink))
    found = HeadDistance().result(compute_summaries(call, [HeadDistance()])[NAME])
    assert_is(found, torch.tensor([[0.0, 0.5], [0.5, 0.0]]))


def test_a_query_that_one_head_cannot_use_counts_for_neither() -> None:
    # Head 0 gives all to the own key. Head 1 gives all to key 0, at queries 0 and 1, else nothing.
    zeros = torch.zeros(1, 2, 4, 3, dtype=torch.float64)
    allowed = torch.stack([torch.eye(4), torch.zeros(4, 4)]).bool()
    allowed[1, :2, 0] = True
    mask = Mask.may_attend(allowed, axes="heads queries keys")
    call = CapturedCall.for_self_attention(AttentionMatrix(zeros, zeros, mask=mask))
    found = HeadDistance().result(compute_summaries(call, [HeadDistance()])[NAME])
    # Both look at key 0 at query 0, and at two keys at query 1.
    assert_is(found, torch.tensor([[0.0, 0.5], [0.5, 0.0]]))


# ---- the queries that are read ---------------------------------------------------------------


def middles(length: int, samples: int) -> Tensor:
    """The middles of equal stretches, as a mask (1, length)."""
    chosen = torch.zeros(1, length, dtype=torch.bool)
    chosen[0, [math.floor((n + 0.5) * length / samples) for n in range(samples)]] = True
    return chosen


LONG = Layers(length=1030, batch=1, heads=((3, 1), (2, 2)))


def test_every_query_up_to_512_tokens_and_256_above() -> None:
    model = replace(LONG, length=512)
    found = model.scan()
    assert found.compared_queries[1] == (512, 512, 512)
    assert_is(all_pairs(found), dense(model.weights(), model.real_queries()), terms=512)
    model = replace(LONG, length=513)
    assert model.scan().compared_queries[0] == (256, 256, 513)
    found = LONG.scan()
    assert found.compared_queries[0] == found.compared_queries[1] == (256, 256, 1030)
    assert_is(all_pairs(found), dense(LONG.weights(), middles(1030, 256)), terms=1030)


def test_rows_that_take_too_much_memory_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first layer alone fits with 128 rows, and both with 64.
    monkeypatch.setattr(similarity, "MEMORY", 128 * 3 * 1030 * 8)
    model = replace(LONG, is_causal=False)
    found = model.scan()
    assert found.compared_queries[0] == found.compared_queries[1] == (64, 64, 1030)
    places = middles(1030, 256).nonzero()[::4, 1]
    chosen = torch.zeros(1, 1030, dtype=torch.bool)
    chosen[0, places] = True
    assert_is(all_pairs(found), dense(model.weights(), chosen), terms=1030)


@pytest.mark.slow
def test_memory_is_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of a causal matrix end at their query, so that twice as many fit.
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 3 * 1030)
    monkeypatch.setattr(similarity, "MEMORY", 256 * 3 * 1030 * 8)
    causal, whole = LONG, replace(LONG, is_causal=False)
    assert causal.scan().compared_queries[0] == (256, 256, 1030)
    assert whole.scan().compared_queries[0] == (128, 128, 1030)


def test_a_text_of_1030_tokens_may_take_the_work_of_512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "SHARE", 0.0)
    monkeypatch.setattr(similarity, "WHOLE", 256)
    # 256 x 256 differences of a pair: 63 rows of 1,030 tokens, of which 64 are a little more.
    assert LONG.scan().compared_queries[0] == (32, 32, 1030)
    assert replace(LONG, length=256).scan().compared_queries[0] == (256, 256, 256)


def test_a_comparison_takes_a_tenth_of_the_work_of_the_scan() -> None:
    # A scan of H heads at n tokens reads H n² weights, of which a tenth is worth 1.8 H n²
    # differences, and R rows of P pairs take P R n. A text of 512 tokens has 512² / n rows.
    for layers, pairs, rows in ((1, 100, 256), (7, 2800, 128), (30, 46_500, 32)):
        within = 1.8 * 10 * layers * 5000 / pairs
        assert rows <= within or rows <= 512**2 / 5000
        kept = [kept_rows(10, length=5000, read=10 * 5000**2) for _ in range(layers)]
        assert similarity.count_differences(kept) == pairs * 256 * 5000
        similarity._limit_work(kept)
        assert {len(each.places) for each in kept} == {rows}
        assert rows == 256 or 2 * rows > max(within, 512**2 / 5000)


def kept_rows(heads: int, *, length: int, read: int) -> similarity.KeptRows:
    places = [(0, (2 * n + 1) * length // 512) for n in range(256)]
    part = slice(0, heads), slice(0, length), torch.zeros(0)
    return similarity.KeptRows(
        places=places,
        parts=[[part] for _ in places],
        keys=length,
        lengths=[length],
        counted=torch.ones(256, heads, dtype=torch.bool),
        sink=torch.zeros(256, heads),
        queries=torch.full((heads,), length).double(),
        weights_read=read,
    )


@pytest.mark.slow
def test_the_count_of_differences_is_that_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def count(own: Tensor, others: Tensor) -> Tensor:
        done.append(own.numel() * others.shape[1])
        return original(own, others)

    original = similarity.half_sums_of_differences
    monkeypatch.setattr(similarity, "half_sums_of_differences", count)
    counted: list[int] = []
    limit = similarity._limit_work

    def note(layers: Sequence[similarity.KeptRows]) -> None:
        limit(layers)
        counted.append(similarity.count_differences(layers))

    monkeypatch.setattr(similarity, "_limit_work", note)
    monkeypatch.setattr(similarity, "AT_ONCE", 5 * 1031)  # one row at once
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 8 * 1030)
    replace(LONG, is_causal=False).scan()
    assert sum(done) == counted[0] == (3 * 3 + 2 * 5) * 256 * 1030
    done.clear()
    LONG.scan()
    # A row of a causal matrix has as many keys as its query sees.
    assert sum(done) == (3 * 3 + 2 * 5) * int((middles(1030, 256).nonzero()[:, 1] + 1).sum())
    assert sum(done) <= counted[1] < counted[0]


# ---- several texts -------------------------------------------------------------------------------


def test_two_texts_merged_are_the_texts_together() -> None:
    first, second = Layers(batch=2), Layers(seed=1, length=37, batch=1)
    apart = [dense(each.weights(), each.real_queries()) for each in (first, second)]
    together = (2 * LENGTH * apart[0] + 37 * apart[1]) / (2 * LENGTH + 37)
    merged = first.scan().merge(second.scan())
    assert_is(all_pairs(merged), together)
    assert merged.compared_queries[2] == (85, 85, 85)

    def either(x: Tensor) -> Tensor:
        return (first if x.numel() == 2 else second)(x)

    once = scan(either, [torch.zeros(2), torch.zeros(1)], statistics=[NAME])
    assert torch.equal(all_pairs(once), all_pairs(merged))


def test_heads_that_read_another_text_have_no_distance() -> None:
    model = Layers(lengths={1: 19})
    found, weights = model.scan(), model.weights()
    real = model.real_queries()
    with_the_text = dense([weights[0], weights[2]], real)
    expected = torch.full((TOTAL, TOTAL), torch.nan, dtype=torch.float64)
    places = torch.tensor([*range(6), *range(10, 16)])
    expected[places[:, None], places] = with_the_text
    other = torch.ones(BATCH, 19, dtype=torch.bool)
    expected[6:10, 6:10] = dense([weights[1]], other)
    assert_is(all_pairs(found), expected)
    assert found.compared_queries[1] == (57, 57, 57)
    assert {layer for layer, _, _ in found.most_similar(1, 0, n=99)} == {1}


def test_a_model_that_runs_twice_in_a_call_has_two_passes() -> None:
    first, second = Layers(), Layers(seed=1, length=19)

    def twice(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
        for each in (first, second):
            modules.now = each
            modules(x)

    modules = Modules(first)
    apart = [dense(each.weights(), each.real_queries()) for each in (first, second)]
    together = (LENGTH * apart[0] + 19 * apart[1]) / (LENGTH + 19)
    with pytest.MonkeyPatch.context() as patch:
        # The rows of a pass fit into the memory, and not those of both.
        patch.setattr(similarity, "MEMORY", BATCH * TOTAL * LENGTH**2 * 8)
        found = scan(modules, torch.zeros(1), call=twice, statistics=[NAME])
    assert_is(all_pairs(found), together)
    number = BATCH * (LENGTH + 19)
    assert found.compared_queries[0] == (number, number, number)


class Modules(nn.Module):
    """The layers as modules, whose names stay the same when the model runs again."""

    def __init__(self, now: Layers) -> None:
        super().__init__()
        self.now = now
        self.layers = nn.ModuleList(OneLayer(self, n) for n in range(len(now.heads)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer(x)
        return x


class OneLayer(nn.Module):
    def __init__(self, model: Modules, number: int) -> None:
        super().__init__()
        self.model, self.number = [model], number  # in a list: it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.model[0].now.operands(self.number)
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x


def test_cross_attention_and_a_cache_have_no_distance() -> None:
    q, k = normal(1, 4, LENGTH, HEAD_DIM), normal(1, 4, 29, HEAD_DIM, seed=1)
    call = CapturedCall.for_self_attention(AttentionMatrix(q, k), own_key=None)
    assert "cross attention" in str(HeadDistance().reason_not_computable(call))
    mask = Mask.causal(align="bottom-right")
    call = CapturedCall.for_self_attention(AttentionMatrix(q, k, mask=mask), own_key=5)
    for statistic in (HeadDistance(), OneKey()):
        assert "cache" in str(statistic.reason_not_computable(call))


def test_a_text_that_is_continued_has_the_distances_of_its_beginning() -> None:
    model, ids = gpt2(), tokens(1, LENGTH)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}

    def generate(model: Any, **given: Any) -> None:
        model.generate(**given, **options)

    found = scan(model, {"input_ids": ids}, call=generate, statistics=[NAME])
    alone = scan(model, {"input_ids": ids}, statistics=[NAME])
    assert torch.equal(found[NAME], alone[NAME])
    assert found.compared_queries == 2 * ((LENGTH, LENGTH, LENGTH),)
    assert [layer.calls for layer in found.layer_scans] == [3, 3]
    assert all(layer.missing == {} for layer in found.layer_scans)


# ---- what is done with a scan --------------------------------------------------------------------


def test_some_heads_and_some_layers() -> None:
    model = Layers()
    whole = dense(model.weights(), model.real_queries())
    found = model.scan(heads=[3, 0])
    places = torch.tensor([3, 0, 9, 6, 13, 10])
    assert_is(all_pairs(found), whole[places[:, None], places])
    assert found.most_similar(2, 3, n=1)[0][:2] in [(0, 0), (0, 3), (1, 0), (1, 3), (2, 0)]
    found = model.scan(layers=["attention", "attention (3)"])
    places = torch.tensor([*range(6), *range(10, 16)])
    assert_is(all_pairs(found), whole[places[:, None], places])


def test_a_file_keeps_it(tmp_path: Path) -> None:
    found = Layers().scan()
    loaded = HeadScan.load(found.save(tmp_path / "scan.safetensors"))
    assert torch.equal(all_pairs(loaded), all_pairs(found))
    assert loaded.compared_queries[1] == found.compared_queries[1]
    part = found.layer_scans[1].summaries[NAME]
    edited = {NAME: {**part, "sum": part["sum"][:, 1:].contiguous()}}
    with pytest.raises(OptionError, match=re.escape("(heads 4, heads so far 10) is needed")):
        changed(found, 1, summaries=edited).save(tmp_path / "edited.safetensors")


def test_a_difference_of_permuted_heads_is_none() -> None:
    statistics = [NAME, "entropy", "distance", "map"]
    model = Layers(heads=((6, 6), (6, 6)))
    order = torch.tensor([2, 0, 1, 5, 3, 4])

    class Turned(Layers):
        def operands(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().operands(layer)
            turned = order if layer == 0 else order.flip(0)
            return q[:, turned], k[:, turned], v[:, turned]

    after = scan(Turned(heads=model.heads), torch.zeros(1), statistics=statistics)
    diff = scan(model, torch.zeros(1), statistics=statistics).diff(after, match=True)
    assert_is(diff[NAME], torch.zeros_like(diff[NAME]))
    plain = scan(model, torch.zeros(1), statistics=statistics).diff(after)
    assert float(plain[NAME].abs().max()) > 0.01
    assert float(plain.apart.max()) > 0


def test_the_nearest_comes_first_and_the_farthest_last() -> None:
    model = Layers()
    whole = dense(model.weights(), model.real_queries())
    found = model.scan()
    for nth, (_, layer, head) in enumerate(found.heads):
        order = [n for n in whole[nth].argsort().tolist() if n != nth]
        listed = found.most_similar(layer, head, n=TOTAL)
        assert [(one.layer, one.head) for one in listed] == [found.heads[n][1:] for n in order]
        distances = torch.tensor([one.distance for one in listed], dtype=torch.float64)
        assert_is(distances, whole[nth, order])
        assert found.most_similar(layer, head) == listed[:5]


def test_what_is_asked_of_heads_that_are_not_there() -> None:
    found = Layers().scan(heads=[0, 3])
    for layer, head in ((0, 1), (3, 0), ("layer", 0), (-1, 0)):
        with pytest.raises(OptionError, match="most_similar") as refused:
            found.most_similar(layer, head)
        assert "the last are 2 and 3" in refused.value.needed
    with pytest.raises(OptionError, match="n="):
        found.most_similar(0, 0, n=-1)
    without = scan(Layers(), torch.zeros(1), statistics=["entropy"])
    with pytest.raises(OptionError, match=NAME):
        without.most_similar(0, 0)
    assert without.compared_queries == (None, None, None)

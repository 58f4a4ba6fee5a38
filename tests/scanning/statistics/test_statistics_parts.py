"""What statistics are made of: the catalogue, custom ones, what is missing, samples, and memory."""

import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.kernels import tiles
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning import call as captured_call
from headwise.scanning.call import CapturedCall, RepeatedTokens, evenly_spaced_positions
from headwise.scanning.statistics import similarity, statistic
from headwise.scanning.statistics.catalogue import STANDARD, find_standard_statistics
from headwise.scanning.statistics.maps import (
    Map,
    TopKeysOfChosenQueries,
    block_sizes,
    coarsen_map,
)
from headwise.scanning.statistics.statistic import MISSING, Definition, RowMean, compute_summaries
from tests.honest import normal
from tests.memory import LargestTensor
from tests.scanning.statistics.calls import KINDS, assert_is
from tests.scanning.statistics.dense_statistics import REFERENCE, block_map, top_keys


def bare(length: int = 12, **options: Any) -> CapturedCall:
    """Queries and keys, and nothing else that is known."""
    q = normal(1, 2, length, 4)
    matrix = AttentionMatrix(q, normal(1, 2, length, 4, seed=1), **options)
    return CapturedCall.for_self_attention(matrix)


# ---- the catalogue -----------------------------------------------------------------------------


def test_every_standard_statistic_has_a_reference() -> None:
    assert [s.definition.name for s in STANDARD] == list(REFERENCE)


@pytest.mark.parametrize("one", STANDARD, ids=lambda s: s.definition.name)
def test_definitions_are_complete(one: statistic.TileStatistic) -> None:
    d = one.definition
    assert d.name.replace("_", "").isalnum()
    assert d.name.islower()
    assert all((d.formula, d.unit, d.excluded, d.source))
    assert "\n" not in d.formula + d.unit + d.excluded + d.source


def test_statistics_by_name() -> None:
    assert [s.definition.name for s in find_standard_statistics(["cka", "entropy"])] == [
        "cka",
        "entropy",
    ]
    with pytest.raises(OptionError, match="statistic 'entrophy'") as refused:
        find_standard_statistics(["entropy", "entrophy", "x"])
    assert "previous_token" in refused.value.needed


# ---- missing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("one", STANDARD, ids=lambda s: s.definition.name)
def test_what_is_not_known_is_said(one: statistic.TileStatistic) -> None:
    matrix = bare().matrix
    unknown = CapturedCall.for_self_attention(matrix, own_key=None)
    reason = one.reason_not_computable(unknown)
    assert reason == (MISSING[one.needs[0]] if one.needs else None)
    if reason is not None:
        with pytest.raises(OptionError, match=one.definition.name) as refused:
            compute_summaries(unknown, [one])
        assert reason in str(refused.value)


def test_a_sweep_of_nothing_and_of_no_queries() -> None:
    assert compute_summaries(bare(), []) == {}
    empty = compute_summaries(
        bare(length=0),
        find_standard_statistics(["entropy", "map", "most_received", "total_variation"]),
    )
    for one in find_standard_statistics(empty):
        assert one.result(empty[one.definition.name]).isnan().all()


@pytest.mark.usefixtures("shapes_unchecked")
def test_what_is_said_of_tokens_has_their_number() -> None:
    matrix = bare().matrix
    with pytest.raises(ShapeError, match="tokens"):
        CapturedCall.for_self_attention(
            matrix,
            tokens=torch.zeros(1, 5, dtype=torch.long),
        )


def test_autocast_changes_nothing() -> None:
    observation = KINDS["sink"].call().observation()
    chosen = [one for one in STANDARD if one.reason_not_computable(observation) is None]
    plain = compute_summaries(observation, chosen)
    again = KINDS["sink"].call().observation()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = compute_summaries(again, chosen)
    for name, summary in plain.items():
        assert all(torch.equal(summary[key], cast[name][key]) for key in summary), name


# ---- statistics of one's own -------------------------------------------------------------------


def test_the_example_of_the_docstring_runs_as_it_stands() -> None:
    lines = (inspect.getdoc(statistic) or "").splitlines()
    start = next(n for n, line in enumerate(lines) if "class SelfWeight" in line)
    names: dict[str, Any] = {"RowMean": RowMean, "Definition": Definition}
    exec(textwrap.dedent("\n".join(lines[start:])), names)
    own = names["SelfWeight"]()
    observation = bare()
    found = own.result(compute_summaries(observation, [own])["self"])
    expected = observation.matrix.dense()[0].diagonal(dim1=1, dim2=2).mean(1)
    assert_is(found, expected)


class LargestScore(RowMean):
    definition = Definition(
        name="largest_score", formula="max", unit="nats", excluded="", source="here"
    )
    reads_scores = True

    def of_rows(self, tile: Any) -> Tensor:
        assert tile.scores.shape == tile.weights.shape
        return tile.scores.amax(-1)


def test_scores_are_there_for_those_that_read_them() -> None:
    observation = bare(mask=Mask.causal())
    matrix = observation.matrix
    found = LargestScore().result(compute_summaries(observation, [LargestScore()])["largest_score"])
    scores = (matrix.q @ matrix.k.mT / 2).masked_fill(~torch.ones(12, 12).tril().bool(), -torch.inf)
    assert_is(found, scores[0].amax(-1).mean(-1))


class Around(RowMean):
    """Reads the tile in a way of its own, and says nothing of how far."""

    definition = Definition(
        name="around", formula="A", unit="share", excluded="nothing", source="here"
    )
    needs = ("own_key",)

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        self.of_rows = read  # type: ignore[method-assign]

    def of_rows(self, tile: Any) -> Tensor:
        raise NotImplementedError


TOO_FAR: dict[str, Callable[[Any], Tensor]] = {
    "diagonal(-1)": lambda tile: tile.diagonal(-1),
    "diagonal(1)": lambda tile: tile.diagonal(1),
    "band(4)": lambda tile: tile.band(4)[..., 0],
    "band(-1)": lambda tile: tile.band(-1).sum(-1),
    "within(2)": lambda tile: tile.weight_within(2),
}


@pytest.mark.parametrize("beside", [[], ["within_16"]], ids=["alone", "beside a wider one"])
@pytest.mark.parametrize("asked", TOO_FAR)
def test_no_statistic_reads_farther_than_it_said(asked: str, beside: list[str]) -> None:
    chosen = [*find_standard_statistics(beside), Around(TOO_FAR[asked])]
    with pytest.raises(OptionError, match="by a statistic with reach 0") as refused:
        compute_summaries(bare(), chosen)
    assert asked.replace("within", "band") in refused.value.saw


def test_a_statistic_that_raises_leaves_gradients_on() -> None:
    with pytest.raises(OptionError):
        compute_summaries(bare(), [Around(TOO_FAR["band(4)"])])
    assert torch.is_grad_enabled()


def test_tiles_have_no_gradients_and_their_reader_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 30)
    q = normal(1, 2, 12, 4).requires_grad_()
    seen = 0
    for tile in AttentionMatrix(q, q.detach()).tiles():
        assert torch.is_grad_enabled()
        assert not tile.weights.requires_grad
        seen += 1
    assert seen > 1
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("read", ["diagonal", "weight_within", "band"])
def test_the_own_key_is_within_any_reach(read: str) -> None:
    observation = bare(mask=Mask.causal())
    expected = observation.matrix.dense()[0].diagonal(dim1=1, dim2=2).mean(1)

    def own(tile: Any) -> Tensor:
        found: Tensor = getattr(tile, read)(0)
        return found.squeeze(-1) if read == "band" else found

    one = Around(own)
    for beside in ([], find_standard_statistics(["within_16", "previous_token"])):
        assert_is(
            one.result(compute_summaries(observation, [*beside, one, *beside])["around"]), expected
        )


# ---- what keys are seen by ---------------------------------------------------------------------

LENGTHS = torch.tensor([5, 12, 1])
MASKS = {
    "none": {},
    "causal": {"mask": Mask.causal()},
    "window": {"mask": Mask.window(3, 1)},
    "right side": {"mask": Mask.window(0, None)},
    "empty band": {"mask": Mask.window(0, 40) & Mask.causal(align="bottom-right")},
    "lengths": {"mask": Mask.causal() & Mask.lengths(keys=LENGTHS, queries=LENGTHS.flip(0))},
    "segments": {"mask": Mask.segments(torch.arange(12).expand(3, -1) // 5) & Mask.causal()},
    "bias": {"score_bias": ScoreBias.dense(normal(6, 12, 12).log(), axes="heads queries keys")},
}


@pytest.mark.parametrize("kind", MASKS)
def test_who_sees_a_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = MASKS[kind]
    if "score_bias" in options:
        bias = normal(6, 12, 12)
        options = {
            "score_bias": ScoreBias.dense(
                bias.masked_fill(bias < 0, -torch.inf), axes="heads queries keys"
            )
        }
    matrix = AttentionMatrix(normal(3, 6, 12, 4), normal(3, 2, 12, 4, seed=1), **options)
    queries = torch.arange(12) < torch.tensor([12, 7, 3])[:, None]
    allowed = (matrix.dense() > 0) & queries[:, None, :, None]
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 100)
    found = matrix.seen_by(queries)
    assert torch.equal(found.expand(3, 6, 12), allowed.sum(2))


# ---- samples, repeats, top keys ----------------------------------------------------------------


def test_samples_are_the_middles_of_equal_stretches() -> None:
    real = torch.ones(3, 12, dtype=torch.bool)
    real[1, 7:], real[2, :9] = False, False
    places, there = evenly_spaced_positions(real, at_most=4)
    assert places[0].tolist() == [1, 4, 7, 10]
    assert places[1].tolist() == [0, 2, 4, 6]
    assert places[2, :3].tolist() == [9, 10, 11]
    assert there.tolist() == [[True] * 4, [True] * 4, [True, True, True, False]]


@pytest.mark.parametrize("name", ["copying", "total_variation", "cka"])
def test_padding_changes_no_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_call, "SAMPLES", 5)
    kind = KINDS["float64"]
    alone = kind.call().observation()
    q, k = (torch.nn.functional.pad(x, (0, 0, 4, 0)) for x in (alone.matrix.q, alone.matrix.k))
    real = torch.arange(28).expand(3, -1) >= 4
    mask = Mask.causal() & Mask.may_attend(real, axes="batch keys")
    matrix = AttentionMatrix(q, k, mask=mask)
    tokens = alone.tokens
    assert tokens is not None
    padded = CapturedCall.for_self_attention(
        matrix,
        real=real,
        tokens=torch.nn.functional.pad(tokens, (4, 0), value=1),
        outputs=torch.nn.functional.pad(alone.outputs, (0, 0, 4, 0)),
        out_proj=alone.out_proj,
        unembedding=alone.unembedding,
    )
    (one,) = find_standard_statistics([name])
    there, here = (one.result(compute_summaries(x, [one])[name]) for x in (alone, padded))
    assert_is(here, there)


def test_repeats_are_the_earlier_keys_with_the_same_token() -> None:
    tokens = torch.tensor([[7, 3, 7, 7, 3, 9], [1, 1, 1, 1, 1, 1]])
    real = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
    repeats = RepeatedTokens(tokens, real)
    assert repeats.earlier.tolist() == [[0, 0, 1, 2, 1, 0], [0, 0, 0, 1, 2, 0]]
    pairs = torch.stack(repeats.earlier_repeat_pairs(slice(0, 2), slice(1, 6)), 1).tolist()
    first = [[0, 1, 0], [0, 2, 0], [0, 2, 2], [0, 3, 1]]
    assert pairs == [*first, [1, 2, 2], [1, 3, 2], [1, 3, 3]]


def test_tokens_that_are_not_known_are_no_repeats() -> None:
    repeats = RepeatedTokens(torch.tensor([[-1, 3, -1, 3, -1]]), torch.ones(1, 5, dtype=torch.bool))
    assert repeats.earlier.tolist() == [[0, 0, 0, 1, 0]]
    assert torch.stack(repeats.earlier_repeat_pairs(slice(0, 1), slice(0, 5)), 1).tolist() == [
        [0, 3, 1]
    ]


def test_top_keys_of_chosen_queries() -> None:
    call = KINDS["left padding"].call()
    one = TopKeysOfChosenQueries(queries=(0, 5, -2))
    found = one.result(compute_summaries(call.observation(), [one])["top_keys"])
    expected = top_keys((0, 5, -2))(call.seen(*(x.double() for x in call.inputs)))
    assert found.shape == (6, 3, 8, 3)
    assert torch.equal(found[..., :2].nan_to_num(-2), expected[..., :2].nan_to_num(-2))


def test_top_keys_of_a_query_that_does_not_exist() -> None:
    one = TopKeysOfChosenQueries(queries=(50,))
    assert one.result(compute_summaries(bare(), [one])["top_keys"]).isnan().all()


def test_top_keys_keep_the_first_sequence() -> None:
    one = TopKeysOfChosenQueries()
    a, b = (
        compute_summaries(KINDS[kind].call().observation(), [one])["top_keys"]
        for kind in ("none", "sink")
    )
    nothing = {**b, "seen": torch.zeros_like(b["seen"])}
    for summaries, kept in (([a, b], a), ([b, a], b), ([nothing, a, b], a)):
        merged = one.merge(summaries)
        assert all(torch.equal(merged[name], kept[name]) for name in kept)


def test_equal_shares_are_told_apart_by_their_place() -> None:
    (one,) = find_standard_statistics(["most_received"])
    parts = []
    for tokens in ([4, 5, 6], [6, 5, 3]):
        zeros = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
        matrix = AttentionMatrix(zeros, zeros)
        call = CapturedCall.for_self_attention(matrix, tokens=torch.tensor([tokens]))
        parts.append(compute_summaries(call, [one])["most_received"])
    expected = [[0, 4], [0, 6], [1, 5], [1, 5], [2, 3], [2, 6]]
    for order in (parts, parts[::-1]):
        found = one.result(one.merge(order))
        assert found[0, :6, :2].tolist() == expected
        assert found[:, 6:].isnan().all()


# ---- maps of short sequences, and memory -------------------------------------------------------


@pytest.mark.parametrize("cells", [1, 2, 7, 16])
@pytest.mark.parametrize("kind", ["both lengths", "left padding", "cross", "cached"])
def test_blocks_of_short_sequences(kind: str, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 3 * 5 * 29)  # tiles begin and end within blocks
    call = replace(KINDS[kind], dtype=torch.float64).call()
    fine, coarse = (
        compute_summaries(call.observation(), [one])["map"] for one in (Map(), Map(cells))
    )
    expected = block_map(cells)(call.seen(*call.inputs))
    # Sums of float64 that were rounded once; and sums of what was rounded.
    size = math.prod(block_sizes(coarse))
    again = coarsen_map(fine, block_sizes(coarse))
    for found, terms in ((coarse, 1), (again, size + 1)):
        torch.testing.assert_close(
            Map().result(found), expected, rtol=terms * 2**-23, atol=0.0, equal_nan=True
        )


@pytest.mark.slow
def test_memory_never_grows_with_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**14)
    monkeypatch.setattr(captured_call, "SAMPLES", 4)
    monkeypatch.setattr(similarity, "AT_ONCE", 2**14)
    length = 1024  # a shorter text has a map of single tokens
    q, k, v = (normal(1, 2, length, 8, seed=n, dtype=torch.float32) for n in range(3))
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    tokens = torch.randint(0, 300, (1, length))
    observation = CapturedCall.for_self_attention(
        matrix,
        tokens=tokens,
        separators=tokens == 1,
        specials=tokens == 2,
        values=v,
        outputs=matrix @ v,
        out_proj=normal(2, 8, 16, dtype=torch.float32),
        residual=normal(1, length, 16, dtype=torch.float32),
        unembedding=normal(300, 16, dtype=torch.float32),
    )
    chosen = [one for one in STANDARD if one.reason_not_computable(observation) is None]
    with LargestTensor() as seen:
        compute_summaries(observation, chosen)
    assert seen.bytes < length * length * 4 / 4, seen.name

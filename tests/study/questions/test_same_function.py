"""One head against eight: each fact turns when the library, or what is drawn, is otherwise."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.study import encoder, measures
from headwise.study.measures import Projected
from headwise.study.question import Answer
from headwise.study.questions import same_function
from tests.study.asking import ask
from tests.study.readings import random_reading
from tests.study.test_questions import documented

SEEDS = 6


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few seeds, of which some say equal; an encoder with random weights.

    What `compare` says is that of the record: the tests of all questions measure it.
    """
    reading, compared = random_reading(), documented()["same-function"]["numbers"]["compared"]
    monkeypatch.setattr(same_function, "compare_published_check", lambda *_: compared)
    monkeypatch.setattr(encoder, "encoder_run", lambda *_: reading)
    monkeypatch.setattr(same_function, "SEEDS", SEEDS)


def asked() -> Answer:
    return ask("same-function")


def assert_fails(answer: Answer, *facts: int) -> None:
    """These facts do not hold, the others do, and the verdict says so."""
    failed = [number for number, (held, _) in enumerate(answer.facts) if not held]
    assert failed == list(facts), answer.verdict
    assert all(answer.facts[number][1] in answer.verdict for number in failed)


def test_the_small_experiment_holds_unperturbed() -> None:
    assert asked().holds


def test_scores_without_the_root_are_not_the_sum_over_the_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "default_scale", lambda q: 0.05)
    assert_fails(asked(), 0)


def test_a_softmax_that_ignores_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is even, whatever the number of heads: all that is left is rounding."""

    def even(s: Tensor, sink: Tensor | None = None) -> Tensor:
        return torch.full_like(s, 1 / s.shape[-1])

    monkeypatch.setattr(stages, "weights_from_scores", even)
    answer = asked()
    for number in (1, 2, 4, 5):
        held, words = answer.facts[number]
        assert not held
        assert words in answer.verdict
    said = answer.numbers["said"]["published"]
    assert said["unexplained"] == said["equal"] > 0  # by rows that read all keys


def test_tokens_and_projections_that_leave_rows_their_own_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With both signs no seed says equal, also not after the output projection."""
    own = torch.rand

    def signed(*sizes: int, **options: Any) -> Tensor:
        return own(*sizes, **options) if options else torch.randn(*sizes)

    monkeypatch.setattr(torch, "rand", signed)
    answer = asked()
    for number in (2, 4):
        held, words = answer.facts[number]
        assert not held
        assert words in answer.verdict


def test_a_softmax_that_always_picks_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the same keys are enough, whatever the size of the tokens."""

    def hard(s: Tensor, sink: Tensor | None = None) -> Tensor:
        return torch.zeros_like(s).scatter(-1, s.argmax(-1, keepdim=True), 1)

    monkeypatch.setattr(stages, "weights_from_scores", hard)
    answer = asked()
    assert_fails(answer, 3)
    said = answer.numbers["said"]["quiet"]
    assert said["equal"] == said["same_key"] > 0


def test_an_encoder_with_one_head_has_nothing_to_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    single = replace(random_reading(), num_heads=1)
    monkeypatch.setattr(encoder, "encoder_run", lambda *_: single)
    assert_fails(asked(), 5)


@pytest.mark.slow
def test_positive_tokens_are_a_condition_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With default initialisation the difference depends on the tokens."""
    answer = asked()
    cases = answer.numbers["cases"]
    assert cases["own"]["apart"] > 10 * cases["positive"]["apart"] > 0
    assert "for tokens from torch.randn and" in answer.verdict
    # Signed tokens in the place of the positive ones.
    make = same_function.make_samples
    monkeypatch.setattr(
        same_function,
        "make_samples",
        lambda tokens, matrices, *factors: make(
            "randn" if matrices == "own" else tokens, matrices, *factors
        ),
    )
    cases = asked().numbers["cases"]
    assert cases["own"]["apart"] == cases["positive"]["apart"]


# ---- what it measures with -----------------------------------------------------------------------


@pytest.fixture
def projected() -> Projected:
    return Projected(torch.randn(2, 5, 12), torch.randn(2, 7, 12), torch.randn(2, 7, 12))


def test_the_heads_are_consecutive_parts(projected: Projected) -> None:
    q, _, _ = projected.split(3)
    assert q.shape == (2, 3, 5, 4)
    assert torch.equal(q[1, 2], projected.q[1, :, 8:])
    expected = projected.q[0, :, 4:8] @ projected.k[0, :, 4:8].T / 2
    torch.testing.assert_close(projected.scores(3)[0, 1], expected)
    torch.testing.assert_close(
        projected.outputs(3)[0, :, 4:8], expected.softmax(-1) @ projected.v[0, :, 4:8]
    )
    torch.testing.assert_close(projected.weights(3)[0, 1], expected.softmax(-1))


def test_the_merged_scores_are_those_of_the_single_head(
    projected: Projected, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measures.score_sum_error(projected, 3) <= 1
    scores = Projected.scores
    monkeypatch.setattr(Projected, "scores", lambda self, heads: scores(self, heads) * (1 + 1e-4))
    assert measures.score_sum_error(projected, 3) > 1


def test_the_difference_is_a_share_of_the_reference() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    actual = reference + torch.tensor([[0.0, 5.0], [1.0, 0.0]])
    assert measures.relative_difference(actual, reference).tolist() == [1.0, 0.5]


def test_seeds_are_explained_where_they_are_equal_for_the_reason() -> None:
    found = {
        "equal": [True, True, True, False],
        "one_key": [True, False, True, True],
        "same_key": [True, True, False, True],
    }
    counts = same_function.count_seeds_by_check(found)
    assert counts["unexplained"] == 2
    assert counts["equal"] == 3


def test_all_seeds_have_the_output_projection_of_one_more() -> None:
    (own,) = same_function.make_samples("randn", "own", 1.0)
    torch.manual_seed(same_function.SEEDS)
    layer = nn.MultiheadAttention(same_function.EMBED_DIM, same_function.HEADS)
    assert torch.equal(own.wo, layer.out_proj.weight.mT)


def test_an_excess_is_error_over_allowance() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    budget = Budget("x", torch.float32, exact, torch.full_like(exact, 0.5), ("rows",))
    assert measures.error_budget_ratios(torch.tensor([1.25, 4.0]), budget).tolist() == [0.5, 4.0]


def test_a_row_reads_one_key_only_bit_by_bit(projected: Projected) -> None:
    favourites = torch.tensor([[[0, 1, 2, 3, 4], [6, 5, 4, 3, 2], [1, 1, 1, 1, 1]]] * 2)
    values = stages.split_heads(projected.v, heads=3).take_along_dim(favourites[..., None], dim=2)
    outputs = stages.merge_heads(values.clone())
    assert same_function.equals_value_of_top_key(outputs, projected.v, favourites).all()
    outputs[1, 2, 11] = outputs[1, 2, 11].nextafter(torch.tensor(math.inf))
    read = same_function.equals_value_of_top_key(outputs, projected.v, favourites)
    assert read.sum() == read.numel() - 1
    assert not read[1, 2, 2]

"""Real models: with headwise's attention they compute what they compute with transformers' own."""

from typing import Any

import pytest
import torch

from headwise.masks.clauses.dense import Dense
from headwise.masks.clauses.segments import Segments
from tests.huggingface.models import BATCH, LENGTH, MODELS, SOURCE, Pair, lengths_mask, watched

# Lengths of the three sequences: full, some, one token.
SOME = {LENGTH: [LENGTH, 7, 1], SOURCE: [SOURCE, 7, 1]}
# In float64, eager turns a query that may attend to nothing into NaN: a window must reach a key.
LONG = [LENGTH, LENGTH - 2, LENGTH - 4]


def layers(pair: Pair) -> int:
    return 6 if pair.case.source else 2  # encoder, decoder and cross attention, two each


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(MODELS[request.param])


def check(pair: Pair, real: torch.Tensor | None = None, **inputs: Any) -> list[Any]:
    x = pair.input()
    budget = pair.budget(x, real, **inputs)
    with torch.no_grad(), watched() as seen:
        out = pair.run(pair.ours, x, **inputs)
    budget.assert_holds(out if real is None else out[real])
    assert len(seen) == layers(pair)
    return seen


def test_without_padding(pair: Pair) -> None:
    check(pair)


@pytest.mark.parametrize("side", ["right", "left"])
def test_with_padding(pair: Pair, side: str) -> None:
    if pair.case.main != "inputs_embeds":
        pytest.skip("pictures and sounds carry no padding")
    eager = pair.case.reference == "eager"
    if eager and side == "left":
        pytest.skip("in float64, eager turns a query without keys into NaN")
    length = SOURCE if pair.case.source else LENGTH
    mask = lengths_mask(LONG if eager else SOME[length], length, side=side)
    # The decoder of a pair of sequences is not padded.
    seen = check(pair, None if pair.case.source else mask.bool(), attention_mask=mask)
    assert all(
        c.allowed.shape[2] == 1 for matrix in seen for c in matrix.mask.clauses_of_kind(Dense)
    )


def test_all_the_same_without_a_cache(pair: Pair) -> None:
    if not pair.case.causal_lm:
        pytest.skip("no cache")
    check(pair, use_cache=False)


def test_packed_sequences(pair: Pair) -> None:
    if not pair.case.causal_lm or pair.case.source:
        pytest.skip("not packed by position ids")
    rows = [[*range(5), *range(8)], [*range(12), 0], [*range(13)]]
    seen = check(pair, position_ids=torch.tensor(rows), use_cache=False)
    if pair.case is not MODELS["gpt_oss"]:  # its masks do not ask for the position ids
        assert all(matrix.mask.clauses_of_kind(Segments) for matrix in seen)


def test_switching_there_and_back(pair: Pair) -> None:
    x = pair.input()
    theirs = pair.theirs[torch.float32]
    budget = pair.budget(x)
    with torch.no_grad():
        before = pair.run(theirs, x)
        try:
            theirs.set_attn_implementation("headwise")
            with watched() as seen:
                budget.assert_holds(pair.run(theirs, x))
        finally:
            theirs.set_attn_implementation(pair.case.reference)
        assert len(seen) == layers(pair)
        assert torch.equal(pair.run(theirs, x), before)


def test_the_budget_can_fail(pair: Pair) -> None:
    # A wrong mask in one layer, of the smallest kind: the last key is hidden from every query.
    from headwise.huggingface import attention
    from headwise.masks.mask import Mask

    x = pair.input()
    budget = pair.budget(x)
    original = attention._read_mask_and_bias

    def less(module: Any, query: Any, key: Any, given: Any, options: Any) -> Any:
        mask, score_bias = original(module, query, key, given, options)
        hidden = torch.full((BATCH,), key.shape[2] - 1)
        return mask & Mask.lengths(keys=hidden), score_bias

    attention._read_mask_and_bias = less
    try:
        with torch.no_grad():
            assert not budget.check(pair.run(pair.ours, x))
    finally:
        attention._read_mask_and_bias = original

"""Causes in DeBERTa's terms, with faults that were made by loops over pairs of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.function.spec import DisentangledRule
from tests.diagnosis.causes.faulty_models import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    TOKENS,
    WIDTH,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.quick import others_slow

SPAN = 25  # more than the tokens: no position is cut off
NAMES = ("distance bias coefficient", "relative bias reversed", "scale")
SCALE = (3 * HEAD_DIM) ** -0.5


def right_model(*, is_shared: bool = False) -> AttentionModel:
    generator = torch.Generator().manual_seed(9)
    shapes = {"place_table": (2 * SPAN, WIDTH)}
    if not is_shared:
        shapes |= {"wpq": (HEADS, HEAD_DIM, WIDTH), "wpk": (KV_HEADS, HEAD_DIM, WIDTH)}
        shapes |= {"bpq": (HEADS, HEAD_DIM)}
    weights = {
        name: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    rule = DisentangledRule(SPAN, is_shared=is_shared)
    return model_of(score_bias=rule, rotary=None, scale=SCALE).with_weights(**weights)


Row = Callable[[int, int], int]  # of a query and a key


def usual(query: int, key: int) -> int:
    return query - key


def turned(query: int, key: int) -> int:
    return key - query


def scored(c2p: Row | None, p2c: Row | None, factor: float = SCALE) -> Callable[..., Tensor]:
    """Return scores with these rows of the two terms, None for a term that is missing."""

    def scores(forced: ForcedStage) -> Tensor:
        bare = replace(forced, model=forced.model.with_settings(score_bias=None))
        w = forced.model.weights
        names = ("wq", "bq", "wk", "bk") if forced.settings.places.is_shared else PLACED
        wq, bq, wk, bk = (w.get(name) for name in names)
        place_q = torch.einsum("re,hde->hrd", w["place_table"], wq) + bq[:, None]
        place_k = torch.einsum("re,hde->hrd", w["place_table"], wk)
        place_k = place_k if bk is None else place_k + bk[:, None]
        q, k = forced.parts
        terms = torch.zeros(len(q), HEADS, TOKENS, TOKENS, dtype=torch.float64)
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            for i in range(TOKENS):
                for j in range(TOKENS):
                    at = terms[:, head, i, j]
                    if c2p is not None:
                        at += q[:, head, i] @ place_k[kv, SPAN + c2p(i, j)]
                    if p2c is not None:
                        at += k[:, kv, j] @ place_q[head, SPAN + p2c(i, j)]
        return bare.usual_result() + factor * terms

    return scores


PLACED = ("wpq", "bpq", "wpk", "bpk")


def causes_of(
    scores: Callable[..., Tensor], *, is_shared: bool = False
) -> Sequence[tuple[str, dict[str, object]]]:
    model = right_model(is_shared=is_shared)
    faulty = model.with_stage_function("scores", scores)
    result = searched(model, recorded(faulty, inputs_of()), *NAMES)
    if result.causes:
        assert not result.left.cells_beyond_rounding
    return [(each.cause.name, dict(each.variant.parameters)) for each in result.causes]


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_loop_is_the_formula(is_shared: bool) -> None:
    model = right_model(is_shared=is_shared)
    same = model.with_stage_function("scores", scored(usual, usual))
    assert not searched(model, recorded(same, inputs_of()), *NAMES).left.cells_beyond_rounding


FAULTS = {
    "no terms": (scored(None, None), "distance bias coefficient", {"coefficient": 0.0}),
    "no p2c": (scored(usual, None), "distance bias coefficient", {"left out": "p2c"}),
    "no c2p": (scored(None, usual), "distance bias coefficient", {"left out": "c2p"}),
    "both turned": (scored(turned, turned), "relative bias reversed", {"of": "c2p and p2c"}),
    "the paper's last term": (scored(usual, turned), "relative bias reversed", {"of": "p2c"}),
    "c2p turned": (scored(turned, usual), "relative bias reversed", {"of": "c2p"}),
}


@pytest.mark.parametrize("words", others_slow(FAULTS))
def test_a_fault_of_the_terms_is_named(words: str) -> None:
    scores, name, parameters = FAULTS[words]
    [(found, shown)] = causes_of(scores)
    assert found == name
    assert parameters.items() <= shown.items()


def test_terms_at_another_scale_than_the_products() -> None:
    [(name, parameters)] = causes_of(scored(usual, usual, factor=HEAD_DIM**-0.5))
    assert name == "distance bias coefficient"
    assert parameters["coefficient"] == pytest.approx(3**0.5)


def test_a_scale_without_the_3() -> None:
    model = right_model(is_shared=True)
    faulty = model.with_settings(scale=HEAD_DIM**-0.5)
    [cause] = searched(model, recorded(faulty, inputs_of()), *NAMES).causes
    assert cause.cause.name == "scale"
    assert cause.variant.parameters["scale"] == pytest.approx(HEAD_DIM**-0.5)


def test_a_table_in_another_order_is_unknown() -> None:
    model = right_model()
    faulty = model.with_weights(place_table=model.weights["place_table"].roll(1, 0))
    assert not searched(model, recorded(faulty, inputs_of()), *NAMES).causes

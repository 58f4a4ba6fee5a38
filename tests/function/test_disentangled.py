"""DeBERTa's terms: rows of positions, closed forms, and the terms of transformers' class."""

import math

import pytest
import torch
from transformers import DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

from headwise import Attention
from headwise.function.disentangled import place_terms, row_of_distances
from headwise.function.spec import DisentangledRule
from headwise.layers import DebertaBias

HEADS, HEAD_DIM, QUERIES, KEYS, SPAN = 5, 8, 7, 9, 6


def test_each_position_of_version_1_has_a_row() -> None:
    rows = row_of_distances(DisentangledRule(3), torch.arange(-5, 6))  # key less query
    assert rows.tolist() == [5, 5, 5, 5, 4, 3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize(("span", "far"), [(2, 3), (8, 12), (32, 64), (256, 512)])
def test_rows_of_version_2_are_those_of_its_code(span: int, far: int) -> None:
    places = torch.arange(-600, 601)
    usual = theirs.make_log_bucket_position(places, span, far).long()
    expected = (usual + span).clamp(0, 2 * span - 1)
    assert torch.equal(row_of_distances(DisentangledRule(span, far), -places), expected)


@pytest.mark.parametrize("terms", [("c2p", "p2c"), ("c2p",), ("p2c",)])
def test_places_that_are_one_number_are_read_off(terms: tuple[str, ...]) -> None:
    """With queries 2, keys 3 and places of their own number: 2 row, and 3 row."""
    rule, ones = DisentangledRule(SPAN, terms=terms), torch.ones(1, 1, 1, 1)
    distances = torch.arange(KEYS) - torch.arange(QUERIES)[:, None]
    places = torch.arange(2.0 * SPAN)[None, None, :, None]
    found = place_terms(
        rule,
        2 * ones.expand(1, 1, QUERIES, 1),
        3 * ones.expand(1, 1, KEYS, 1),
        distances[None, None],
        places if "p2c" in terms else None,
        places if "c2p" in terms else None,
    )
    rows = (SPAN - distances).clamp(0, 2 * SPAN - 1)
    assert torch.equal(found[0, 0], (2.0 * ("c2p" in terms) + 3.0 * ("p2c" in terms)) * rows)


def test_the_last_term_has_the_position_of_the_code_and_not_of_the_paper() -> None:
    """A key that meets the query of the place one behind it, and no other."""
    q, k = torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    places = torch.zeros(1, 1, 2 * SPAN, 2)
    places[0, 0, SPAN + 1] = 0.5  # the query is one behind the key: i - j = 1
    distances = torch.arange(3) - torch.arange(3)[:, None]
    found = place_terms(DisentangledRule(SPAN), q, k, distances[None, None], places, None)
    assert found[0, 0].tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("is_shared", [False, True])
def test_scores_are_those_of_the_class(is_shared: bool) -> None:
    width = HEADS * HEAD_DIM
    config = DebertaV2Config(
        hidden_size=width,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=SPAN,
        max_relative_positions=11,
        share_att_key=is_shared,
    )
    torch.manual_seed(0)
    reference = theirs.DisentangledSelfAttention(config).double().eval()
    layer = Attention(
        width,
        HEADS,
        score_bias=DebertaBias(SPAN, 11, is_shared=is_shared),
        scale=1 / math.sqrt(3 * HEAD_DIM),
        dtype=torch.float64,
    )
    names = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}
    if not is_shared:
        names |= {"score_bias.k_proj": "pos_key_proj", "score_bias.q_proj": "pos_query_proj"}
    for mine, other in names.items():
        layer.get_submodule(mine).load_state_dict(reference.get_submodule(other).state_dict())
    x = torch.randn(2, 24, width, dtype=torch.float64)
    table = layer.score_bias.rel_embeddings.weight
    everywhere = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    with torch.no_grad():
        table.mul_(20)  # those of a trained model are larger than initial ones
        mixed, weights = reference(x, everywhere, output_attentions=True, rel_embeddings=table)
        torch.testing.assert_close(layer.matrix(x).dense(), weights, rtol=0, atol=1e-6)
        found = layer.head_outputs(x).transpose(1, 2).flatten(2)
        torch.testing.assert_close(found, mixed, rtol=0, atol=1e-6)  # their scale is float32

"""Links of a token in every head: closed forms, then against the dense weights in float64."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headwise import AttentionMatrix, Mask, scan
from headwise.errors import HeadwiseError, OptionError
from headwise.models import minilm, tiny
from headwise.scanning._scan import ExactRows
from headwise.scanning.links import Link
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import TopKeysOfEveryQuery
from tests.scanning.models import (
    BATCH,
    HEADS,
    LENGTH,
    SMALL,
    SOURCE,
    llama,
    own,
    spread,
    t5,
    tokens,
)

EPS = torch.finfo(torch.float32).eps
QUERIES, DIM, RANKS = 23, 7, 3
PAGE = Path(__file__).parents[2] / "docs" / "scan.md"
SENTENCE = "The trophy does not fit into the brown suitcase because it is too small."


def scan_weights(weights: Tensor, **options: Any) -> HeadScan:
    """A scan of these weights (heads, queries, keys), from scores that are their logarithms."""
    heads, _, keys = weights.shape
    q = weights.log().clamp(min=-1e4)[None]  # a query for each row of scores
    k = torch.eye(keys, dtype=q.dtype).expand(1, heads, keys, keys)
    matrix = AttentionMatrix(q, k, scale=1.0)
    return scan(matrix, torch.zeros(1, heads, keys, 1, dtype=q.dtype), **options)


def top_keys(ranks: int = RANKS) -> dict[str, Any]:
    return {"statistics": TopKeysOfEveryQuery(ranks=ranks)}


def brief(links: list[Link]) -> list[tuple[int, int, int, float, str]]:
    return [(x.head, x.query, x.key, round(x.weight, 6), x.bound) for x in links]


# ---- closed forms --------------------------------------------------------------------------------

# Head 0 looks at key 0 above all, head 1 at the query's own key, head 2 at one key alone.
CLOSED = (
    torch.tensor(  # in per cent
        [
            [[60, 30, 6, 4], [70, 10, 15, 5], [40, 30, 20, 10], [50, 30, 15, 5]],
            [[90, 5, 3, 2], [10, 80, 6, 4], [2, 3, 90, 5], [30, 10, 20, 40]],
            [[0, 100, 0, 0], [0, 100, 0, 0], [0, 0, 0, 100], [0, 100, 0, 0]],
        ]
    )
    .double()
    .div(100)
)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_token_looks_at(ranks: int) -> None:
    read = scan_weights(CLOSED, **top_keys(ranks))
    assert brief(read.links(2)) == [
        (2, 2, 3, 1.0, "exact"),
        (1, 2, 2, 0.9, "exact"),
        (0, 2, 0, 0.4, "exact"),
    ]


def test_a_pair_that_is_stored_and_one_that_is_not() -> None:
    read = scan_weights(CLOSED, **top_keys(2))
    assert brief(read.links(3, 2)) == [
        (2, 3, 2, 0.0, "exact"),  # the head gives all its weight to one key
        (1, 3, 2, 0.3, "at most"),  # the second stored key has so much
        (0, 3, 2, 0.2, "at most"),  # the two stored keys leave no more
    ]
    assert brief(read.links(3, 1))[:2] == [(2, 3, 1, 1.0, "exact"), (0, 3, 1, 0.3, "exact")]
    assert brief(scan_weights(CLOSED, **top_keys(4)).links(3, 2)) == [
        (1, 3, 2, 0.2, "exact"),
        (0, 3, 2, 0.15, "exact"),
        (2, 3, 2, 0.0, "exact"),
    ]


def test_what_looks_at_a_token() -> None:
    read = scan_weights(CLOSED, **top_keys(1))
    assert brief(read.links(1, direction="queries")) == [
        (2, 0, 1, 1.0, "exact"),
        (1, 1, 1, 0.8, "exact"),  # the first keys of the others leave at most 0.4
    ]
    read = scan_weights(CLOSED, **top_keys(2))
    assert brief(read.links(2, direction="queries")) == [
        (1, 2, 2, 0.9, "exact"),
        (0, 1, 2, 0.15, "at least"),  # query 2 may give it 0.3, and gives it 0.2
    ]


def test_a_map_of_one_token_a_cell_holds_every_weight() -> None:
    weights = torch.rand(3, 200, 200, generator=torch.Generator().manual_seed(0)).double()
    weights /= weights.sum(-1, keepdim=True)
    read = scan_weights(weights, statistics="map")
    assert read["map"].shape == (1, 3, 200, 200)
    for direction, rows in (("keys", weights), ("queries", weights.mT)):
        links = {x.head: x for x in read.links(7, direction=direction)}  # type: ignore[arg-type]
        for head in range(3):
            other = links[head].key if direction == "keys" else links[head].query
            assert other == int(rows[head, 7].argmax())
    pair = read.links(7, 41)
    assert [link.weight for link in pair] == sorted((x.weight for x in pair), reverse=True)
    for link in pair:
        assert link.bound == "exact"
        assert link.weight == pytest.approx(float(weights[link.head, 7, 41]), abs=8 * EPS)


# ---- against the dense weights -------------------------------------------------------------------


def test_answers_are_those_of_the_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (2 * torch.randn(1, HEADS, QUERIES, DIM, generator=generator) for _ in range(2))
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    read = scan(matrix, torch.zeros_like(q), **top_keys())
    dense = AttentionMatrix(q.double(), k.double(), mask=Mask.causal()).dense()[0]
    assert {link.layer_index for link in read.links(0)} == {0}
    kinds = set()
    for token in range(QUERIES):
        for link in read.links(token):
            assert link.key == int(dense[link.head, token].argmax())
            assert abs(link.weight - float(dense[link.head, token].max())) <= 8 * EPS
        for other in range(QUERIES):
            for link in read.links(token, other):
                true = float(dense[link.head, token, other])
                near = abs(link.weight - true) <= 8 * EPS
                assert near if link.bound == "exact" else true <= link.weight + 8 * EPS
        most = dense[:, :, token].amax(1)
        for link in read.links(token, direction="queries"):
            true = float(dense[link.head, link.query, token])
            assert abs(link.weight - true) <= 8 * EPS
            is_most = abs(true - float(most[link.head])) <= 8 * EPS
            assert is_most or link.bound == "at least"
            kinds.add(link.bound)
    assert kinds == {"exact", "at least"}


def minilm_scan() -> tuple[HeadScan, Any, Any, list[str]]:
    try:
        folder = minilm.model_folder()
    except HeadwiseError as missing:
        pytest.skip(str(missing))
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    encoded = tokenizer(SENTENCE, return_tensors="pt", return_offsets_mapping=True)
    written = SENTENCE, encoded.pop("offset_mapping")[0]
    inputs = {"input_ids": encoded["input_ids"]}
    read = scan(model, inputs, statistics=TopKeysOfEveryQuery(ranks=1), written=written)
    return read, model, inputs, tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])


def test_every_head_of_a_real_model() -> None:
    """The heads that link "it" to "suitcase", by one stored key a query."""
    read, model, inputs, words = minilm_scan()
    it, suitcase = words.index("it"), words.index("suitcase")
    rows = ExactRows(model, inputs)
    true = {
        (layer, head): rows.row(name, head, sequence=0, query=it)
        for layer, name in enumerate(read.layers)
        for head in range(12)
    }
    links = read.links(it)
    assert len(links) == 72
    for link in links:
        row = true[link.layer_index, link.head]
        assert link.key == int(row.argmax())
        assert link.weight == pytest.approx(float(row.max()), abs=8 * EPS)
        assert link.word in (words[link.key], SENTENCE[:3], "")  # as written; a mark has no word
    pairs = read.links(it, suitcase)
    for link in pairs:
        share = float(true[link.layer_index, link.head][suitcase])
        is_first = int(true[link.layer_index, link.head].argmax()) == suitcase
        assert link.bound == ("exact" if is_first else "at most")
        assert share <= link.weight + 8 * EPS
    linking = [link for link in links if link.word == "suitcase"]
    exact = [link for link in pairs if link.bound == "exact"]
    assert [(x.layer, x.head) for x in linking] == [(x.layer, x.head) for x in exact]
    assert len(linking) > 0


def test_the_model_that_ships() -> None:
    ids = tiny.encode("the quick brown fox jumps over the lazy dog. ")[None]
    model = tiny.load()
    read = scan(model, ids, **top_keys(4))
    rows = ExactRows(model, ids)
    links = read.links(17, name_of=chr)
    assert len(links) == 32
    for link in links:
        row = rows.row(link.layer, link.head, sequence=0, query=17)
        assert link.weight == pytest.approx(float(row.max()), abs=8 * EPS)
        assert float(row[link.key]) == pytest.approx(float(row.max()), abs=8 * EPS)
        assert link.word == chr(int(ids[0, link.key]))


def test_several_sequences_and_heads_that_were_chosen() -> None:
    model, ids = own().double(), tokens(BATCH, LENGTH)
    chosen = TopKeysOfEveryQuery([(0, 1), (1, 0), (1, 3)])
    read, alone = (scan(model, x, statistics=chosen) for x in (ids, ids[1:]))
    assert brief(read.links(5, sequence=1)) == brief(alone.links(5))
    assert brief(read.links(5)) != brief(alone.links(5))
    assert {(x.layer_index, x.head) for x in read.links(5)} == {(0, 1), (1, 0), (1, 3)}


def generate(model: Any, **given: Any) -> Any:
    return model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("kind", ["one text", "padded", "static", "window"])
def test_generated_tokens_have_the_links_of_one_pass(kind: str) -> None:
    """Those of a scan of the whole text; the last token is returned, and not read."""
    ids, options = tokens(1 if kind == "one text" else 2, 9), {"max_position_embeddings": 64}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config: Any = transformers.LlamaConfig(num_key_value_heads=2, **options, **SMALL)
    if kind == "window":  # layer 0 drops keys, layer 1 does not
        kinds = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 9}
        kinds["layer_types"] = ["sliding_attention", "full_attention"]
        config = transformers.Qwen2Config(num_key_value_heads=2, **kinds, **options, **SMALL)
    model = spread(transformers.AutoModelForCausalLM.from_config(config))
    if kind == "padded":
        given["attention_mask"][0, :3] = 0
    extra = {"cache_implementation": "static"} if kind == "static" else {}
    statistics = ["standard" if kind == "one text" else TopKeysOfEveryQuery()]
    written = [("x" * 9, [(n, n + 1) for n in range(9)])] if kind == "one text" else None
    read = generate(model, **given)[:, :-1]
    whole_mask = torch.cat([given["attention_mask"], torch.ones(len(ids), 5)], 1).long()
    whole = scan(model, {"input_ids": read, "attention_mask": whole_mask}, statistics=statistics)
    steps = scan(model, given | extra, statistics=statistics, call=generate, written=written)
    assert [text.lengths for text in steps.texts] == [text.lengths for text in whole.texts]
    assert torch.equal(steps.texts[0].ids, whole.texts[0].ids)
    for sequence, length in enumerate(whole.texts[0].lengths):
        for token, direction in [(3, "keys"), (3, "queries"), (length - 2, "keys"), (8, "queries")]:
            asked: Any = {"direction": direction, "sequence": sequence, "name_of": str}
            found, expected = (
                {(x.layer_index, x.head): x for x in each.links(token, **asked)}
                for each in (steps, whole)
            )
            assert found.keys() == expected.keys()
            for head, link in found.items():
                other = expected[head]
                assert (link.query, link.key) == (other.query, other.key)
                place = link.key if direction == "keys" else link.query
                assert link.word == ("x" if written and place < 9 else other.word)
                assert link.weight == pytest.approx(other.weight, abs=8 * EPS)


def test_the_documented_call_generates_from_ids_and_from_a_mapping() -> None:
    documented = re.findall(r"`call=(lambda model.*?)`", PAGE.read_text("utf-8"))
    documented += re.findall(r"``(lambda model.*?)``", scan.__doc__ or "")
    assert len(documented) == 2
    model = spread(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))
    ids, model.generation_config.max_new_tokens = tokens(1, 9), 6
    model.generation_config.min_new_tokens = 6
    for call in map(eval, documented):
        for given in (ids, {"input_ids": ids}):
            assert scan(model, given, statistics="map", call=call).links(13)


def test_beams_that_move_have_the_links_of_their_first_tokens() -> None:
    config = transformers.LlamaConfig(num_key_value_heads=2, **SMALL)
    model = spread(transformers.AutoModelForCausalLM.from_config(config))
    given = {"input_ids": tokens(1, 9), "num_beams": 3}
    read = scan(model, given, statistics=TopKeysOfEveryQuery(), call=generate)
    [text] = read.texts
    assert 9 <= text.lengths[0] < 14
    for layer in read.layer_scans:
        assert layer.summaries["top_keys_of_every_query"]["lengths"].tolist() == [*text.lengths]


def test_tokens_that_a_cache_gave_back_have_no_exact_links() -> None:
    """The map has a mean of two tokens at place 6; the stored keys end with what was read first."""

    def call(model: Any, input_ids: Tensor) -> None:
        cache = model(input_ids[:, :5], use_cache=True).past_key_values
        model(input_ids[:, 5:8], past_key_values=cache, use_cache=True)
        cache.crop(-2)
        model(input_ids[:, 8:], past_key_values=cache, use_cache=True)

    model, ids = llama(), tokens(1, 9)
    with pytest.raises(OptionError, match="no single tokens"):
        scan(model, {"input_ids": ids}, statistics="map", call=call).links(3)
    read = scan(model, {"input_ids": ids}, statistics=TopKeysOfEveryQuery(ranks=8), call=call)
    whole = scan(model, {"input_ids": ids[:, :8]}, statistics=TopKeysOfEveryQuery(ranks=8))
    assert torch.equal(read.texts[0].ids, whole.texts[0].ids)
    for token in (3, 6):
        assert brief(read.links(token)) == brief(whole.links(token))


def test_cross_attention() -> None:
    """A token is one of its text: layers in which it is no query have no link."""
    inputs = {"input_ids": tokens(BATCH, SOURCE), "decoder_input_ids": tokens(BATCH, LENGTH)}
    read = scan(t5(), inputs, **top_keys(4))
    kinds = [(layer.query_text, layer.key_text) for layer in read.layer_scans]
    for text in (0, 1):
        for direction, side in (("keys", 0), ("queries", 1)):
            links = read.links(2, text=text, direction=direction, sequence=1)  # type: ignore[arg-type]
            layers = {n for n, texts in enumerate(kinds) if texts[side] == text}
            assert {link.layer_index for link in links} == layers
    assert all(
        link.key < SOURCE for link in read.links(LENGTH - 1, text=1) if link.layer_index == 3
    )
    assert read.layer_scans[3].kind == "cross"
    words = {x.word for x in read.links(2, text=1, name_of=lambda token: f"w{token}")}
    assert words <= {
        f"w{int(n)}" for n in (*inputs["input_ids"][0], *inputs["decoder_input_ids"][0])
    }


# ---- refusals ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"token": 4}, r"token=4\n.*from 0 to 3: there are 4 tokens"),
    "no whole token": ({"token": 1.5}, r"token=1.5"),
    "before the first": ({"token": -1}, r"token=-1"),
    "key": ({"token": 1, "key": 4}, r"key=4\n"),
    "sequence": ({"token": 1, "sequence": 1}, r"sequence=1\n.*from 0 to 0: there is 1 sequence"),
    "text": ({"token": 1, "text": 1}, r"text=1\n"),
    "direction": ({"token": 1, "direction": "up"}, r"direction='up'"),
    "both": ({"token": 1, "key": 0, "direction": "queries"}, r"links\(0, 1\)"),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_questions_are_refused(case: str) -> None:
    asked, message = WRONG[case]
    with pytest.raises(OptionError, match=message):
        scan_weights(CLOSED, **top_keys()).links(**asked)


def test_a_scan_without_single_tokens_says_what_to_store() -> None:
    with pytest.raises(OptionError, match="TopKeysOfEveryQuery"):
        scan_weights(CLOSED, statistics="entropy").links(1)

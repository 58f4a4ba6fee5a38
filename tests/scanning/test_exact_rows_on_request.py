"""Exact rows of a model: those of its attention matrix, by sequence and query."""

import pytest
import torch

from headwise import scan
from headwise.errors import OptionError
from headwise.scanning._scan import ExactRows
from headwise.scanning.statistics.maps import TopKeysOfEveryQuery
from tests.scanning.models import HEADS, LENGTH, SOURCE, bert, own, text, tokens

EPS = torch.finfo(torch.float32).eps


def test_rows_are_those_that_the_scan_saw() -> None:
    model, inputs = own().double(), [tokens(1, LENGTH), tokens(1, SOURCE)]
    read = scan(model, inputs, statistics=TopKeysOfEveryQuery())
    rows = ExactRows(model, inputs)
    for layer, record in enumerate(read.layer_scans):
        summary = record.summaries["top_keys_of_every_query"]
        for sequence, (length, before) in enumerate(((LENGTH, 0), (SOURCE, LENGTH))):
            weights = rows.row(read.layers[layer], 2, sequence=sequence, query=length - 1)
            assert weights.shape == (length,)
            share, key = weights.topk(4)
            stored = summary["share"][2, before + length - 1]
            torch.testing.assert_close(share.float(), stored, rtol=EPS, atol=EPS)
            assert key.tolist() == summary["key"][2, before + length - 1].tolist()


def test_padding_is_left_out() -> None:
    inputs, layer = text(left=True), "encoder.layer.1.attention.self"
    lengths = inputs["attention_mask"].sum(1).tolist()
    model = bert()
    read = scan(model, inputs, statistics=TopKeysOfEveryQuery())
    stored = read.layer_scans[read.layers.index(layer)].summaries["top_keys_of_every_query"]
    rows, before = ExactRows(model, inputs), 0
    for sequence, length in enumerate(lengths):
        for query in (0, length - 1):
            weights = rows.row(layer, 0, sequence=sequence, query=query)
            assert weights.shape == (length,)
            assert float(weights.sum()) == pytest.approx(1)
            share, key = weights.topk(4)
            assert key.tolist() == stored["key"][0, before + query].tolist()
            torch.testing.assert_close(
                share.float(), stored["share"][0, before + query], rtol=EPS, atol=EPS
            )
        before += length


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("changes", "saw"),
    [
        ({"layer": "no.such"}, "sequence 0 of layer no.such"),
        ({"sequence": 1}, "sequence 1 of layer"),
        ({"query": LENGTH}, f"query {LENGTH} of head 0"),
        ({"head": HEADS}, f"query 0 of head {HEADS}"),
    ],
)
def test_what_is_not_there_is_refused(changes: dict[str, object], saw: str) -> None:
    model, ids = own(), tokens(1, LENGTH)
    (layer, _) = scan(model, ids, statistics="entropy").layers
    asked = {"layer": layer, "head": 0, "sequence": 0, "query": 0, **changes}
    with pytest.raises(OptionError, match=saw):
        ExactRows(model, ids).row(**asked)  # type: ignore[arg-type]

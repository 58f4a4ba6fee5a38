"""A scan of the planted model gives what its rules say, in closed form.

The weights are the rules' own, computed from the tokens without scores or softmax, and the
statistics of them are the slow ones of `tests.scanning.statistics.dense_statistics`, in float64.
The scan may be off by the rounding of float32 alone (`tests.scanning.statistics.calls.roundoff`).
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from headwise.models import planted
from headwise.scanning._scan import scan
from headwise.scanning.result import HeadScan
from tests.scanning.statistics.calls import roundoff
from tests.scanning.statistics.dense_statistics import REFERENCE, Seen

# Made of scores, values, the residual or the unembedding, of which the rules say nothing.
NOT_OF_RULES = {
    *("logsumexp", "score_range", "sink"),
    *("value_weighted", "relative_contribution", "copying"),
}
NAMES = [name for name in REFERENCE if name not in NOT_OF_RULES]
LENGTHS = torch.tensor([83, 51])


@cache
def text() -> Tensor:
    """Random tokens that come twice, after the begin token, with separators among them."""
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(2, planted.VOCABULARY, (2, 41), generator=generator)
    once[:, 7::11] = planted.SEPARATOR
    return torch.cat([torch.full((2, 1), planted.BEGIN), once, once], 1)


@cache
def scanned() -> HeadScan:
    return scan(
        planted.model(),
        (text(), LENGTHS),
        statistics=[*NAMES, "value_weighted"],
        separators=[planted.SEPARATOR],
        specials=[planted.BEGIN],
        call=lambda model, ids, lengths: model(ids, lengths=lengths),
    )


@cache
def truths() -> list[Seen]:
    """Each layer as its rules have it; what heads write stands in for values and outputs."""
    ids = text()
    real = torch.arange(ids.shape[1]) < LENGTHS[:, None]
    place = torch.arange(ids.shape[1])
    allowed = (place <= place[:, None]) & real[:, None, None] & real[:, None, :, None]
    found = []
    weights = planted.true_weights(ids, lengths=LENGTHS)
    written = planted.true_contributions(ids, lengths=LENGTHS)
    for own, outputs in zip(weights, written, strict=True):
        heads, width = own.shape[1], outputs.shape[-1]
        found.append(
            Seen(
                scores=torch.zeros_like(own).masked_fill(~allowed, -torch.inf),
                weights=own,
                sink_logit=None,
                real_queries=real,
                real=real,
                own_key=0,
                tokens=ids,
                separators=ids == planted.SEPARATOR,
                specials=ids == planted.BEGIN,
                values=torch.zeros(*own.shape[:2], ids.shape[1], width).double(),
                outputs=outputs,
                out_proj=torch.eye(width).double().expand(heads, width, width),
                residual=torch.zeros(*outputs.shape[::2], width).double(),
                unembedding=torch.zeros(planted.VOCABULARY, width).double(),
                samples=64,
            )
        )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_scan_is_the_closed_form(name: str) -> None:
    found = scanned()[name]
    for layer, truth in enumerate(truths()):
        expected, own = REFERENCE[name](truth), found[layer]
        if (
            name == "head_distance"
        ):  # the heads of the layer; those of all are in test_head_distance
            own = own[:, len(own) * layer : len(own) * (layer + 1)]
        if name == "most_received":  # many keys receive the same: which come first is rounding's
            expected, own = expected[..., 2], own[..., 2]
        if name == "cka":  # what never changes has no CKA; float64 leaves some 1e-17 of it
            changes = truth.outputs[0].std(1).amax(-1) > 1e-12
            assert torch.equal(own.isnan(), ~(changes[:, None] & changes))
            expected = expected.masked_fill(own.isnan(), torch.nan)
        size = expected.abs().nan_to_num(1.0).clamp(min=1.0)
        allowed = roundoff(text().shape[1], torch.float32) * size
        assert torch.equal(own.isnan(), expected.isnan())
        error = (own - expected).abs().nan_to_num(0.0)
        assert bool((error <= allowed).all()), (layer, float((error / allowed).max()))


HEADS = {
    name: (layer, head)
    for layer, names in enumerate(planted.NAMES)
    for head, name in enumerate(names)
}


def value(name: str, head: str) -> float:
    return float(scanned()[name][HEADS[head]])


def test_heads_are_what_they_are_called() -> None:
    assert value("previous_token", "previous token") == 1
    assert value("first_token", "first token") == 1
    assert value("distance", "own token") == 0
    assert value("maximum", "nearest separator") == 1
    assert value("effective_keys", "two back") == 1
    assert value("induction", "induction") == pytest.approx(1, abs=1e-6)
    assert value("duplicate_token", "induction") < 0.1
    assert value("contribution_norm", "dead") == value("value_weighted", "dead") == 0
    # A token's code is six signs.
    assert value("value_weighted", "uniform") == pytest.approx(6**0.5, abs=1e-6)
    assert value("relative_entropy", "uniform") == pytest.approx(1, abs=1e-6)
    cosine, cka, same = (scanned()[n] for n in ("output_cosine", "cka", "total_variation"))
    layer, twin = HEADS["two back, again"]
    original = HEADS["two back"][1]
    assert same[layer, original, twin] == 1
    for similarity in (cosine, cka):
        assert float(similarity[layer, original, twin]) == pytest.approx(1, abs=1e-6)
    assert scanned().top("previous_token", 1)[0][1:3] == HEADS["previous token"]


def test_padding_does_not_count() -> None:
    assert scanned().tokens == int(LENGTHS.sum())
    assert scanned().sequences == 2

"""Calls of torch's operator, as they are shown: against the arithmetic written down in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headwise import scan
from headwise.function.rounding import default_tolerance
from headwise.scanning import torch_calls
from headwise.scanning.result import HeadScan
from tests.honest import normal

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM, VALUE_DIM = 3, 6, 2, 24, 29, 10, 7
OUTER = 4  # one more leading axis
ENTROPY, RANGE = "entropy", "score_range"
EPS, LOWEST = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).min

Call = dict[str, Any]


def call(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    **options: Any,
) -> Call:
    """Operands with these leading axes, and a mask of this shape."""
    given: Call = {
        "query": normal(*q, QUERIES, HEAD_DIM, seed=1).float(),
        "key": normal(*k, KEYS, HEAD_DIM, seed=2).float(),
        "value": normal(*(k if v is None else v), KEYS, VALUE_DIM, seed=3).float(),
        **options,
    }
    if mask is not None:
        given["attn_mask"] = normal(*mask, seed=4).float()
    return given


B, H, K = BATCH, HEADS, KV_HEADS
ROWS = (QUERIES, KEYS)
SHAPES = {
    "no leading axes": call((), (), mask=ROWS),
    "(batch,), a mask for each sample": call((B,), (B,), mask=(B, *ROWS)),
    "(batch,), one mask": call((B,), (B,), mask=ROWS),
    "(batch,), one key batch": call((B,), (1,), mask=(B, 1, KEYS)),
    "(heads,) in groups": call((H,), (K,), mask=(H, *ROWS), enable_gqa=True),
    "a mask for each head": call((B, H), (B, H), mask=(H, *ROWS)),
    "a mask of the queries": call((B, H), (B, H), mask=(QUERIES, 1)),
    "one batch of queries": call((1, H), (B, H), mask=(B, 1, *ROWS)),
    "one batch of keys": call((B, H), (1, H), (B, H)),
    "one batch of values": call((B, H), (B, H), (1, H), mask=(B, 1, 1, KEYS)),
    "only values have a batch": call((1, H), (1, H), (B, H)),
    "one head of keys": call((B, H), (B, 1)),
    "one head of queries": call((B, 1), (B, H)),
    "keys and values without a batch": call((B, H), ()),
    "groups, one batch of keys": call((B, H), (1, K), enable_gqa=True),
    "groups of two sizes": call((B, H), (B, K), (B, 3), enable_gqa=True),
    "five axes, a mask of four": call((OUTER, B, H), (OUTER, B, H), mask=(B, H, *ROWS)),
    "five axes, a broadcast mask": call((OUTER, B, H), (OUTER, B, H), mask=(OUTER, 1, 1, *ROWS)),
    "five axes, one mask": call((OUTER, B, H), (OUTER, 1, H), mask=ROWS),
    "five axes in groups": call((OUTER, B, H), (OUTER, B, K), enable_gqa=True),
}


def written_down(given: Call) -> dict[str, Tensor]:
    """Entropy and score range of each head, in float64, by broadcasting alone."""
    q, k, v = (given[name].double() for name in ("query", "key", "value"))
    if given.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scale = given.get("scale")
    scores = (q @ k.mT) * (HEAD_DIM**-0.5 if scale is None else scale)
    if given.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(ROWS, dtype=torch.bool).tril(), -torch.inf)
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = (scores + mask.double()).masked_fill(mask <= LOWEST / 2, -torch.inf)
    leading = torch.broadcast_shapes(scores.shape[:-2], v.shape[:-2])
    scores = scores.expand(*leading, *ROWS)
    is_batch = scores.dim() < 4 and not given.get("enable_gqa")
    scores = scores.reshape(-1, 1 if is_batch else leading[-1], *ROWS)
    seen = (scores > -torch.inf).sum(-1)
    log_weights = torch.log_softmax(scores, -1)
    entropy = -(log_weights.exp() * log_weights.masked_fill(scores == -torch.inf, 0)).sum(-1)
    lowest = scores.masked_fill(scores == -torch.inf, torch.inf).amin(-1)
    ranges = scores.amax(-1) - lowest
    return {
        name: torch.stack([x[:, head][seen[:, head] >= least].mean() for head in range(x.shape[1])])
        for name, x, least in ((ENTROPY, entropy, 1), (RANGE, ranges, 2))
    }


def scanned(given: Call) -> HeadScan:
    """What the scan says of it; the outputs are checked to be torch's."""
    options = {name: x for name, x in given.items() if name != "query"}
    kept = []

    def model(query: Tensor) -> None:
        kept.append(F.scaled_dot_product_attention(query, **options))

    found = scan(model, given["query"], statistics=[ENTROPY, RANGE])
    theirs = F.scaled_dot_product_attention(given["query"], **options)
    assert torch.equal(kept[0], theirs)
    return found


def holds(given: Call) -> None:
    """The scan's figures are those of float64, up to what float32 may round."""
    agrees(scanned(given), given)


def agrees(found: HeadScan, given: Call) -> None:
    # A score is a sum of products, and a row's entropy moves by at most twice itself for each unit
    # by which all scores move; it is a sum over the keys, and its mean one over the queries.
    q, k = given["query"].abs().amax(), given["key"].abs().amax()
    score = (HEAD_DIM + 2) * EPS * float(HEAD_DIM * q * k)
    for name, expected in written_down(given).items():
        ours = found[name][0].double()
        assert ours.shape == expected.shape
        bound = 2 * score * (1 + expected) + (QUERIES + KEYS) * EPS * (1 + expected)
        assert bool(((ours - expected).abs() <= bound).all()), name


@pytest.mark.parametrize("given", SHAPES.values(), ids=SHAPES)
def test_every_shape_that_torch_takes(given: Call) -> None:
    holds(given)


@pytest.mark.parametrize("mask", [None, (B, 1, *ROWS)], ids=["no mask", "mask"])
def test_the_scale_is_kept(mask: tuple[int, ...] | None) -> None:
    given = call((B, H), (B, H), mask=mask, scale=0.7)
    holds(given)
    usual = {name: x for name, x in given.items() if name != "scale"}
    assert not torch.allclose(scanned(given)[ENTROPY], scanned(usual)[ENTROPY])


def test_causal_counts_from_the_first_key() -> None:
    holds(call((B, H), (B, H), is_causal=True))


@pytest.mark.parametrize("kind", ["bool", "lowest", "-inf", "added and lowest"])
@pytest.mark.parametrize("shape", [(B, 1, 1, KEYS), (B, 1, *ROWS), ROWS], ids=str)
def test_hidden_keys_are_not_counted(shape: tuple[int, ...], kind: str) -> None:
    given = call((B, H), (B, H), mask=shape)
    added = given["attn_mask"]
    hidden = added > 0.4
    kinds = {
        "bool": ~hidden,
        "lowest": torch.zeros_like(added).masked_fill(hidden, LOWEST),
        "-inf": torch.zeros_like(added).masked_fill(hidden, -torch.inf),
        "added and lowest": added.masked_fill(hidden, LOWEST),
    }
    holds({**given, "attn_mask": kinds[kind]})


def test_padding_hidden_by_a_number_is_padding() -> None:
    q = normal(B, H, KEYS, HEAD_DIM, seed=1).float()
    real = torch.arange(KEYS) < torch.tensor([KEYS, 7, 15])[:, None]
    for kept in (real[:, None, None], real[:, None, None].expand(-1, 1, KEYS, -1)):
        mask = torch.zeros(kept.shape).masked_fill(~kept, LOWEST)
        found = scan(
            lambda q, mask=mask: F.scaled_dot_product_attention(q, q, q, mask),
            q,
            statistics=[ENTROPY],
        )
        assert found.tokens == KEYS + 7 + 15


def test_autocast_settles_the_dtypes() -> None:
    given = call((B, H), (B, H), mask=ROWS)
    given["key"], given["value"] = given["key"].bfloat16(), given["value"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scanned(given)
    agrees(found, {**given, "query": given["query"].bfloat16()})


def test_a_bias_of_positions_leaves_the_scale() -> None:
    """Two sequences share the bias, and their scores differ by the products alone."""
    q, k = torch.randn(2, 2, 3, 7, 10, generator=torch.Generator().manual_seed(5))
    bias = torch.arange(49.0).sin().view(1, 1, 7, 7)
    scores = q @ k.mT * 10**-0.5 + bias
    _, found, scale = torch_calls._split_scores(q, k, scores, scores.softmax(-1))
    assert scale == 10**-0.5
    (held,) = found.tensors
    assert (held - bias).abs().max() <= default_tolerance(q.dtype) * scores.abs().max()

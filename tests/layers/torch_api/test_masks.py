"""How torch's masks are read: polarity, -inf and finfo.min, the causal mask recognised."""

import pytest
import torch
from torch import Tensor, nn

from headwise.layers.torch_api.layer import convert_masks
from headwise.masks.clauses.band import Band
from headwise.masks.mask import Mask
from tests.honest import hides_a_whole_sequence
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES, causal, pair

LONG = 300  # past where the causal mask is recognised, and no multiple of a block


def read(attn_mask: Tensor, *, slots: int = 0, hinted: bool = False) -> Mask | None:
    return convert_masks(
        None, attn_mask, num_heads=HEADS, slots=slots, hinted=hinted, dtype=torch.float32
    )[0]


def is_causal(attn_mask: Tensor, **options: object) -> bool:
    mask = read(attn_mask, **options)  # type: ignore[arg-type]
    return mask is not None and bool(mask.clauses_of_kind(Band))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("length", [LONG, 256, 512, 1025])
def test_the_causal_mask_is_recognised(
    length: int, hinted: bool, dtype: torch.dtype | None
) -> None:
    assert is_causal(causal(length, dtype), hinted=hinted)
    assert is_causal(causal(length, dtype).mT.contiguous().mT)
    # A slot may always be attended: the causal kernel would hide it.
    assert not is_causal(causal(length, dtype), slots=1, hinted=hinted)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("place", [(0, 0), (299, 299), (299, 0), (298, 299), (0, 299), (256, 255)])
def test_one_other_entry_is_noticed(place: tuple[int, int], dtype: torch.dtype | None) -> None:
    mask = causal(LONG, dtype)
    mask[place] = ~mask[place] if dtype is None else (0.0 if mask[place] else -torch.inf)
    assert not is_causal(mask)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9, torch.nan, 1.0])
@pytest.mark.parametrize("place", [(0, 1), (3, 299), (299, 3)])
def test_other_values_are_no_causal_mask(place: tuple[int, int], value: float) -> None:
    mask = causal(LONG, torch.float32)
    mask[place] = value
    assert not is_causal(mask)


def test_where_it_is_not_asked() -> None:
    assert not is_causal(causal(LONG)[:, :299])  # not square
    assert not is_causal(causal(255))  # too short to pay
    assert not is_causal(causal(LONG, torch.float32).requires_grad_())  # its gradient is wanted
    assert not is_causal(causal(LONG).expand(HEADS, -1, -1))  # 3-D
    assert not is_causal(causal(LONG).to("meta"))  # no values


@pytest.mark.parametrize("hinted", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_recognised_or_not_it_is_the_same_output(dtype: torch.dtype | None, hinted: bool) -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(2, LONG, EMBED).double()
    options = {"attn_mask": causal(LONG, dtype), "is_causal": hinted}
    # torch takes the hint for the mask only where it is right, as it is here.
    torch.testing.assert_close(ours(x, x, x, **options), theirs(x, x, x, **options))
    padding = torch.arange(LONG) >= torch.tensor([LONG, 123])[:, None]
    if dtype is not None:
        padding = torch.zeros(2, LONG).double().masked_fill(padding, -torch.inf)
    options["key_padding_mask"] = padding
    torch.testing.assert_close(ours(x, x, x, **options), theirs(x, x, x, **options))


@hides_a_whole_sequence
@pytest.mark.parametrize("where", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finfo_min_does_not_mask_and_infinity_does(dtype: torch.dtype, where: str) -> None:
    _, ours = pair(dtype=dtype, batch_first=True)
    q, k = torch.randn(BATCH, QUERIES, EMBED).to(dtype), torch.randn(BATCH, KEYS, EMBED).to(dtype)
    shape = (QUERIES, KEYS) if where == "attn_mask" else (BATCH, KEYS)
    for kind in (dtype, torch.float32, torch.float64):
        lowest = torch.full(shape, torch.finfo(kind).min, dtype=kind)
        weights = ours(q, k, k, **{where: lowest})[1]
        torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, QUERIES).to(dtype))
        assert weights.gt(0).all()
        hidden = torch.full(shape, -torch.inf, dtype=kind)
        output, weights = ours(q, k, k, **{where: hidden})
        assert weights.eq(0).all()
        torch.testing.assert_close(output, ours.out_proj.bias.expand_as(output))


def test_masks_of_mixed_kinds_have_their_own_meaning() -> None:
    # torch warns that it will stop taking these; neither is ambiguous here, so nobody is warned.
    theirs, ours = pair(batch_first=True)
    q, k = torch.randn(BATCH, QUERIES, EMBED).double(), torch.randn(BATCH, KEYS, EMBED).double()
    bias, padding = torch.randn(QUERIES, KEYS).double(), torch.rand(BATCH, KEYS) < 0.4
    output = ours(q, k, k, attn_mask=bias, key_padding_mask=padding)
    float_padding = torch.zeros(BATCH, KEYS).double().masked_fill(padding, -torch.inf)
    expected = theirs(q, k, k, attn_mask=bias, key_padding_mask=float_padding)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_nothing_given_is_changed(options: dict[str, bool]) -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True, dropout=0.5, **options)
    q, k = torch.randn(BATCH, QUERIES, EMBED), torch.randn(BATCH, KEYS, EMBED)
    for mask in (torch.rand(QUERIES, KEYS) < 0.4, torch.randn(BATCH * HEADS, QUERIES, KEYS)):
        padding = torch.rand(BATCH, KEYS) < 0.4
        given = [q, k, mask, padding]
        copies, versions = [t.clone() for t in given], [t._version for t in given]
        for training in (True, False):
            ours.train(training)(q, k, k, attn_mask=mask, key_padding_mask=padding)
        assert all(torch.equal(t, c) for t, c in zip(given, copies, strict=True))
        assert [t._version for t in given] == versions


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_learned_mask_gets_its_gradient(rank: int, need_weights: bool) -> None:
    q, k = torch.randn(BATCH, QUERIES, EMBED).double(), torch.randn(BATCH, KEYS, EMBED).double()
    shape = (QUERIES, KEYS) if rank == 2 else (BATCH * HEADS, QUERIES, KEYS)
    bias, gradients = torch.randn(shape).double(), []
    for layer in pair(batch_first=True):
        leaf = bias.clone().requires_grad_()
        output, weights = layer(q, k, k, attn_mask=leaf, need_weights=need_weights)
        loss = output.square().sum() + (weights.square().sum() if need_weights else 0)
        loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0), (3, 0, 0)]
)
def test_empty_axes(
    batch: int, queries: int, keys: int, need_weights: bool, training: bool
) -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True, dropout=0.25)
    ours.train(training)
    q = torch.randn(batch, queries, EMBED, requires_grad=True)
    k = torch.randn(batch, keys, EMBED, requires_grad=True)
    for options in ({}, {"key_padding_mask": torch.zeros(batch, keys, dtype=torch.bool)}):
        output, weights = ours(q, k, k, need_weights=need_weights, **options)
        assert output.shape == (batch, queries, EMBED)
        if keys == 0:
            torch.testing.assert_close(output, ours.out_proj.bias.expand(output.shape))
        assert weights is None or weights.shape == (batch, queries, keys)
        output.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


@hides_a_whole_sequence
@pytest.mark.parametrize("kind", ["bool", "float", "bool and float", "causal", "float causal"])
def test_dropout_keeps_masks_and_empty_rows(kind: str) -> None:
    _, ours = pair(dtype=torch.float64, batch_first=True, dropout=0.5)
    x = torch.randn(BATCH, QUERIES, EMBED).double().requires_grad_()
    hidden = torch.rand(QUERIES, QUERIES) < 0.4
    hidden[4] = True
    as_float = torch.zeros(QUERIES, QUERIES).double().masked_fill(hidden, -torch.inf)
    padding = torch.arange(QUERIES) >= torch.tensor([QUERIES, 10, 0])[:, None]
    options = {
        "bool": {"attn_mask": hidden, "key_padding_mask": padding},
        "float": {"attn_mask": as_float},
        "bool and float": {"attn_mask": as_float, "key_padding_mask": padding},
        "causal": {"attn_mask": causal(QUERIES), "key_padding_mask": padding},
        "float causal": {"attn_mask": causal(QUERIES, torch.float64)},
    }[kind]
    weights = ours(x, x, x, average_attn_weights=False, **options)[1].detach()
    empty = weights.sum((1, 3)) == 0
    outputs = []
    for seed in range(60):
        torch.manual_seed(seed)
        outputs.append(ours.train()(x, x, x, need_weights=False, **options)[0])
    mean = torch.stack(outputs).mean(0)
    exact = ours.eval()(x, x, x, **options)[0]
    assert (mean - exact).abs().max() < 0.6 * (outputs[0] - exact).abs().max()
    torch.testing.assert_close(mean[empty], ours.out_proj.bias.expand_as(mean)[empty])
    outputs[0].sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in (x, *ours.parameters()))


@pytest.mark.parametrize("hinted", [True, False])
def test_dropout_under_a_recognised_causal_mask_hides_the_future(hinted: bool) -> None:
    _, ours = pair(dtype=torch.float64, batch_first=True, dropout=0.5)
    x = torch.randn(1, LONG, EMBED).double()
    changed = x.clone()
    changed[:, 200:] += 1
    outputs = []
    for inputs in (x, changed):
        torch.manual_seed(0)
        options = {"attn_mask": causal(LONG), "is_causal": hinted, "need_weights": False}
        outputs.append(ours(inputs, inputs, inputs, **options)[0])
    torch.testing.assert_close(outputs[0][:, :200], outputs[1][:, :200])
    assert (outputs[0] - outputs[1])[:, 200:].abs().max() > 0.01


def test_scale_of_dropped_weights() -> None:
    # Closed form: equal scores and values of ones give (kept keys) / (keys * (1 - p)).
    ours = pair(batch_first=True, dropout=0.75, bias=False)[1].train()
    with torch.no_grad():
        ours.in_proj_weight.zero_()
        ours.in_proj_weight[2 * EMBED :] = torch.eye(EMBED)
        ours.out_proj = nn.Identity()
    q, k = torch.randn(1, QUERIES, EMBED).double(), torch.ones(1, 8, EMBED).double()
    output = ours(q, k, k, need_weights=False)[0]
    kept = output.detach() * 8 * 0.25
    torch.testing.assert_close(kept, kept.round())
    assert 0.15 < float(kept.mean()) / 8 < 0.35

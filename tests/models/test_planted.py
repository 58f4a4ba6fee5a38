"""The planted model does what its rules say: exactly, on every path, at any length."""

import pytest
import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.models import planted
from headwise.models.planted import (
    EMBED_DIM,
    GAP,
    LAYERS,
    SECTIONS,
    SHARPNESS,
    TOKEN_BITS,
    binary_code,
)


@pytest.fixture(scope="module")
def model() -> planted.Planted:
    return planted.model()


def texts(batch: int = 3, length: int = 83, *, tokens: int = planted.VOCABULARY) -> Tensor:
    """The begin symbol, then random tokens, separators among them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, tokens, (batch, length), generator=generator)
    ids[:, 0] = planted.BEGIN
    return ids


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def of_logits(keys: int) -> float:
    """The most that float32 may be off: a mean over keys, then a sum over the state's width."""
    return (keys + 2 + EMBED_DIM) * torch.finfo(torch.float32).eps * SHARPNESS * TOKEN_BITS


def where(name: str) -> tuple[int, int]:
    return next(
        (layer, names.index(name)) for layer, names in enumerate(planted.NAMES) if name in names
    )


def test_each_rule_on_a_text_that_can_be_read() -> None:
    # Rows: queries. a b, a separator, a b again, a c that is new.
    ids = torch.tensor([[0, 5, 9, 1, 5, 9, 20]])
    found = planted.true_weights(ids)

    def keys(name: str) -> list[list[int]]:
        layer, head = where(name)
        rows = found[layer][0, head]
        return [row.nonzero().flatten().tolist() for row in rows]

    assert keys("previous token") == [[0], [0], [1], [2], [3], [4], [5]]
    assert keys("first token") == [[0]] * 7
    assert keys("uniform") == keys("dead") == [list(range(i + 1)) for i in range(7)]
    assert keys("nearest separator") == [[0], [0], [0], [3], [3], [3], [3]]
    assert keys("same token") == [[0], [1], [2], [3], [1, 4], [2, 5], [6]]
    assert keys("induction") == [[0], [0], [0], [0], [2], [3], [0]]
    assert keys("two back") == keys("two back, again") == [[0], [0], [0], [1], [2], [3], [4]]
    assert keys("own token") == [[i] for i in range(7)]
    even = [1 / keys for keys in range(1, 8)]
    assert found[0][0, 2].amax(-1).tolist() == found[1][0, 4].amax(-1).tolist() == even


@pytest.mark.parametrize(
    "ids",
    [
        texts(),
        texts(tokens=4, length=257),  # many ties, and a separator every third token
        texts() ^ 1,  # no begin symbol in front, and several behind
        torch.ones(1, 29, dtype=torch.int64),  # separators alone
        torch.zeros(2, 1, dtype=torch.int64),
    ],
    ids=["text", "ties", "no begin", "separators", "one token"],
)
def test_weights_are_the_rules_bit_by_bit(model: planted.Planted, ids: Tensor) -> None:
    for matrix, expected in zip(model.matrices(ids), planted.true_weights(ids), strict=True):
        # 1 / n, rounded once.
        assert torch.equal(matrix.dense(), expected.float())


def test_scores_are_equal_or_a_gap_apart(model: planted.Planted) -> None:
    ids = texts(length=137)
    assert torch.exp(torch.tensor(-GAP)) == 0
    for matrix in model.matrices(ids):
        scores = (matrix.q @ matrix.k.mT).double()
        assert torch.equal(scores, matrix.q.double() @ matrix.k.double().mT)  # no rounding
        steps = scores.flatten(0, 2).sort(dim=-1).values.diff(dim=-1)
        assert bool(((steps == 0) | (steps >= GAP)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contributions(dtype: torch.dtype) -> None:
    ids = texts(tokens=7)
    model = planted.model().to(dtype)
    eps = torch.finfo(dtype).eps
    keys = torch.arange(1, ids.shape[1] + 1, dtype=torch.float64)[:, None]
    for found, expected in zip(
        model.contributions(ids), planted.true_contributions(ids), strict=True
    ):
        # A sum of n products below 1 / n, and the rounding of each weight.
        assert bool(((found.double() - expected).abs() <= (keys + 2) * eps).all())


def test_what_single_heads_write(model: planted.Planted) -> None:
    ids = texts()
    found = model.contributions(ids)
    (layer, head), before = where("previous token"), torch.cat([ids[:, :1], ids[:, :-1]], dim=1)
    expected = torch.zeros(*ids.shape, EMBED_DIM)
    expected[..., SECTIONS["previous"]] = binary_code(before, bits=TOKEN_BITS)
    assert torch.equal(found[layer][:, head], expected)
    layer, head = where("dead")
    assert not found[layer][:, head].any()
    (layer, one), (_, other) = where("two back"), where("two back, again")
    assert torch.equal(found[layer][:, one], found[layer][:, other])
    assert found[layer][:, one].any()


def test_induction_foretells_what_is_repeated(model: planted.Planted) -> None:
    # No token twice in a copy: each has one earlier occurrence.
    copy = torch.stack([2 + torch.randperm(62)[:47] for _ in range(3)])
    ids = torch.cat([torch.zeros(3, 1, dtype=torch.int64), copy, copy], dim=1)
    chances = model(ids).softmax(-1)
    foretold = chances[:, 48:-1].gather(-1, copy[:, 1:, None])
    # 64 tokens, each at least two bits away.
    assert float(foretold.min()) > 1 - 64 * float(torch.exp(torch.tensor(-8.0)))
    # Nothing has been repeated yet: the begin symbol, which is at position 0.
    assert torch.equal(chances[:, :48].argmax(-1), torch.zeros(3, 48, dtype=torch.int64))


def test_logits(model: planted.Planted) -> None:
    ids = texts(tokens=5)
    induced = planted.true_contributions(ids)[1].sum(1)[..., SECTIONS["induced"]]
    expected = SHARPNESS * induced @ binary_code(torch.arange(64), bits=TOKEN_BITS).double().mT
    assert error(model(ids), expected) <= of_logits(ids.shape[1])


def test_padding_changes_nothing(model: planted.Planted) -> None:
    ids, lengths = texts(tokens=5), torch.tensor([83, 31, 1])
    logits = model(ids, lengths=lengths)
    expected = planted.true_weights(ids, lengths=lengths)
    for matrix, weights in zip(model.matrices(ids, lengths=lengths), expected, strict=True):
        assert torch.equal(matrix.dense(), weights.float())
    for row, length in enumerate(lengths.tolist()):
        alone = ids[row : row + 1, :length]
        assert error(logits[row : row + 1, :length], model(alone)) <= 2 * of_logits(length)
        for whole, part in zip(expected, planted.true_weights(alone), strict=True):
            assert torch.equal(whole[row, :, :length, :length], part[0])
        assert not any(whole[row, :, length:].any() for whole in expected)


@pytest.mark.extra
def test_sixteen_thousand_tokens(model: planted.Planted) -> None:
    ids = texts(batch=1, length=16_000, tokens=60)
    rows = torch.tensor([0, 1, 2, 8_191, 8_192, 12_345, 15_998, 15_999])
    expected = planted.true_weights(ids, rows=rows)
    for matrix, weights in zip(model.matrices(ids), expected, strict=True):
        assert torch.equal(matrix.rows(rows), weights.float())
    # A separator in the last place but one, where scores are largest, and none elsewhere.
    ids = ids.clamp(min=2)
    ids[0, 15_998] = planted.SEPARATOR
    layer, head = where("nearest separator")
    nearest = model.matrices(ids)[layer].rows(rows)[0, head]
    assert nearest.argmax(-1).tolist() == [0, 0, 0, 0, 0, 0, 15_998, 15_998]


def test_what_it_is_made_of(model: planted.Planted) -> None:
    sizes = {
        (layer.embed_dim, layer.num_heads, layer.head_dim, layer.value_dim)
        for layer in model.layers
        if isinstance(layer, Attention)
    }
    assert sizes == {(99, 5, 14, 6)}
    assert tuple(tuple(head.name for head in layer) for layer in LAYERS) == planted.NAMES
    for names in planted.NAMES:
        for name in names:
            assert planted.__doc__ is not None
            assert name.removeprefix("two back, ") in planted.__doc__


@pytest.mark.parametrize("ids", [torch.tensor([[0, 64]]), torch.tensor([[-1]])])
def test_refuses_other_tokens(model: planted.Planted, ids: Tensor) -> None:
    with pytest.raises(OptionError, match="0 to 63"):
        model(ids)


def test_refuses_more_positions_than_it_can_write(model: planted.Planted) -> None:
    with pytest.raises(OptionError, match="16385 tokens"):
        model(torch.zeros(1, planted.LONGEST + 1, dtype=torch.int64))

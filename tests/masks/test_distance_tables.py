"""Biases by distance: -inf in their tables, gradients of every reading, and ALiBi's precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask, ScoreBias
from headwise.errors import MaskError
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics.catalogue import STANDARD
from headwise.scanning.statistics.statistic import compute_summaries
from headwise.testing import Budget
from tests.honest import normal

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 3, 6, 24, 29, 10
MASKS = {
    "everything": Mask(),
    "window": Mask.window(4, 9, align="top-left"),
    "lengths": Mask.lengths(keys=torch.tensor([29, 0, 11]), queries=torch.tensor([24, 20, 0])),
}


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    q, k = normal(BATCH, HEADS, QUERIES, HEAD_DIM), normal(BATCH, HEADS, KEYS, HEAD_DIM, seed=1)
    return q.to(dtype), k.to(dtype)


# ---- -inf in a table -----------------------------------------------------------------------------


def with_holes(heads: int) -> Tensor:
    """Distances -3 to +3, farther ones like the outermost; another one hidden for each head."""
    table = normal(heads, 7, seed=2)
    table[torch.arange(heads), torch.arange(heads) % 7] = -torch.inf
    return table


def written(bias: ScoreBias, shape: tuple[int, int, int, int]) -> ScoreBias:
    """The same bias as a dense tensor."""
    batch, heads, queries, keys = shape
    bound = bias.bind(
        batch=batch, heads=heads, queries=queries, keys=keys, device=torch.device("cpu")
    )
    (part,) = bound.parts_at_rows(torch.arange(queries))
    return ScoreBias.dense(part, axes="batch heads queries keys")


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_minus_infinity_in_a_table_hides_as_in_a_dense_bias(heads: int, kind: str) -> None:
    q, k = operands()
    bias = ScoreBias.relative(with_holes(heads), align="top-left")
    options = [(MASKS[kind], bias), (MASKS[kind], written(bias, (BATCH, HEADS, QUERIES, KEYS)))]
    ours, dense = (AttentionMatrix(q, k, mask=mask, score_bias=b) for mask, b in options)
    for tile, expected in zip(
        ours.tiles(with_lowest=True), dense.tiles(with_lowest=True), strict=True
    ):
        assert torch.equal(tile.allowed, expected.allowed)
        assert torch.equal(tile.lowest, expected.lowest)  # type: ignore[arg-type]
    some = normal(BATCH, QUERIES, seed=3) > 0
    assert torch.equal(ours.seen_by(some), dense.seen_by(some))


def test_minus_infinity_by_hand() -> None:
    # Reach 1, later keys hidden: the causal mask, as a table.
    bias = ScoreBias.relative(torch.tensor([[0.0, 0.0, -torch.inf]]))
    a = AttentionMatrix(torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), score_bias=bias)
    assert a.seen_by(torch.ones(1, 4, dtype=torch.bool)).flatten().tolist() == [4, 3, 2, 1]
    (tile,) = a.tiles(with_lowest=True)
    assert tile.allowed.flatten().tolist() == [1, 2, 3, 4]
    assert tile.lowest is not None
    assert tile.lowest.flatten().tolist() == [0, 0, 0, 0]


def test_statistics_see_what_a_table_hides() -> None:
    q, k = (x[:, :, :QUERIES] for x in operands())
    bias = ScoreBias.relative(with_holes(HEADS))
    found = []
    for score_bias in (bias, written(bias, (BATCH, HEADS, QUERIES, QUERIES))):
        matrix = AttentionMatrix(q, k, score_bias=score_bias)
        observation = CapturedCall.for_self_attention(matrix)
        known = [s for s in STANDARD if s.reason_not_computable(observation) is None]
        summaries = compute_summaries(observation, known)
        found.append({s.definition.name: s.result(summaries[s.definition.name]) for s in known})
    ours, expected = found
    assert len(ours) > 10
    for name, values in expected.items():
        assert torch.equal(ours[name].nan_to_num(-1.0), values.nan_to_num(-1.0)), name


@pytest.mark.parametrize("slope", [torch.inf, -torch.inf, torch.nan])
def test_slopes_that_are_not_finite_are_refused(slope: float) -> None:
    q, k = operands()
    slopes = torch.full((HEADS,), slope, dtype=torch.float64)
    with pytest.raises(MaskError, match=r"holds (inf|nan)"):
        AttentionMatrix(q, k, score_bias=ScoreBias.alibi(slopes, align="top-left"))


# ---- gradients -----------------------------------------------------------------------------------

BIASES: dict[str, tuple[Tensor, Callable[[Tensor], ScoreBias]]] = {
    "alibi": (normal(HEADS).abs(), lambda t: ScoreBias.alibi(t, align="top-left")),
    "relative": (normal(HEADS, 7), lambda t: ScoreBias.relative(t, align="bottom-right")),
    "of chosen heads": (
        normal(2 * HEADS, 7),
        lambda t: ScoreBias.relative(t, align="top-left").of_heads(torch.arange(HEADS)),
    ),
    "a sum": (
        normal(HEADS, 7),
        lambda t: ScoreBias.relative(t, align="top-left") + ScoreBias.relative(t, align="top-left"),
    ),
}
READINGS: tuple[Callable[[AttentionMatrix], Tensor], ...] = (
    lambda a: a @ normal(BATCH, HEADS, KEYS, 7, seed=4),
    lambda a: a.entropy(),
    lambda a: a.diagonal(2),
    lambda a: a.rows(torch.tensor([3, 20])),
)


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("under_no_grad", [False, True])
def test_each_reading_has_a_gradient_of_its_own(name: str, under_no_grad: bool) -> None:
    numbers, bias_of = BIASES[name]
    q, k = operands()

    def matrix(numbers: Tensor) -> AttentionMatrix:
        return AttentionMatrix(q, k, score_bias=bias_of(numbers))

    expected = torch.zeros_like(numbers)
    for reading in READINGS:
        leaf = numbers.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(reading(matrix(leaf)).square().sum(), leaf)
        expected += gradient

    leaf = numbers.clone().requires_grad_()
    with torch.set_grad_enabled(not under_no_grad):
        kept = matrix(leaf)
    for reading in READINGS:
        reading(kept).square().sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected)
    assert expected.abs().amax() > 0


def test_a_reading_takes_the_numbers_of_its_own_time() -> None:
    """As it takes those of q, k and a dense bias: an optimizer step lies between two readings."""
    q, k = operands()
    table = normal(HEADS, 7)
    a = AttentionMatrix(q, k, score_bias=ScoreBias.relative(table, align="top-left"))
    before = a.dense()
    table.mul_(2)
    again = AttentionMatrix(q, k, score_bias=ScoreBias.relative(table, align="top-left"))
    assert torch.equal(a.dense(), again.dense())
    assert not torch.equal(a.dense(), before)


# ---- precision -----------------------------------------------------------------------------------

# As bfloat16 they are exact; a slope times a distance is not.
SLOPES = torch.tensor([2.0**-i * 1.25 for i in range(1, 7)])


def far(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(1, HEADS, 3, HEAD_DIM, dtype=dtype), normal(1, HEADS, 300, HEAD_DIM, dtype=dtype)


def distances() -> Tensor:
    return (torch.arange(300.0, dtype=torch.float64) - torch.arange(3.0)[:, None]).abs()


@pytest.mark.parametrize("of_slopes", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_alibi_is_within_the_budget_of_the_exact_penalty(
    dtype: torch.dtype, of_slopes: torch.dtype
) -> None:
    q, k = far(dtype)
    bias = ScoreBias.alibi(SLOPES.to(of_slopes), align="top-left")
    budget = Budget.for_weights(q, k, score_bias=bias, factor=0.0)

    penalty = SLOPES.double()[:, None, None] * distances()
    scores = q.double() @ k.double().mT / HEAD_DIM**0.5 - penalty
    torch.testing.assert_close(budget.exact, scores.softmax(-1))
    budget.assert_holds(AttentionMatrix(q, k, score_bias=bias).dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_budget_sees_a_penalty_that_was_rounded(dtype: torch.dtype) -> None:
    q, k = far(dtype)
    bias = ScoreBias.alibi(SLOPES.bfloat16(), align="top-left")
    budget = Budget.for_weights(q, k, score_bias=bias, factor=0.0)
    rounded = -(SLOPES.bfloat16()[:, None] * torch.arange(-299, 300).abs())
    assert rounded.dtype == torch.bfloat16
    a = AttentionMatrix(q, k, score_bias=ScoreBias.relative(rounded.float(), align="top-left"))
    assert not budget.check(a.dense()).within


def test_a_sum_of_half_tables_is_not_rounded() -> None:
    large, small = torch.full((1, 3), 256.0), torch.full((1, 3), 1.0)  # 257 is no bfloat16
    bias = sum((ScoreBias.relative(t.bfloat16()) for t in (large, small)), start=ScoreBias())
    bound = bias.bind(batch=1, heads=1, queries=2, keys=2, device=torch.device("cpu"))
    assert bound.table is not None
    assert bound.table.unique().tolist() == [257]

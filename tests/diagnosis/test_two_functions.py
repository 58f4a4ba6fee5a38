"""`compare` of two functions, of which nothing but the outputs is known."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise import compare
from headwise.errors import OptionError, ShapeError
from headwise.identify.results import Verdict

WIDTH = 48
GENERATOR = torch.Generator().manual_seed(0)
WQ, WK, WV, WO = (torch.randn(WIDTH, WIDTH, generator=GENERATOR) * 0.15 for _ in range(4))
X = torch.randn(3, 11, WIDTH, generator=GENERATOR)


def mha(x: Tensor, heads: int, scale: float = 1.0) -> Tensor:
    """Attend as code of a question does: weights of the module, heads by reshape."""
    q, k, v = ((x @ w.to(x.dtype)).unflatten(2, (heads, -1)).transpose(1, 2) for w in (WQ, WK, WV))
    weights = (scale * q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ WO.to(x.dtype)


def fused(x: Tensor, heads: int) -> Tensor:
    q, k, v = (
        F.linear(x, w.T.to(x.dtype)).unflatten(2, (heads, -1)).transpose(1, 2) for w in (WQ, WK, WV)
    )
    heads_out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(heads_out.transpose(1, 2).flatten(2), WO.T.to(x.dtype))


def test_eight_heads_are_not_one() -> None:
    diagnosis = compare(partial(mha, heads=8), partial(mha, heads=1), X)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.function is not None
    eight, one = mha(X.double(), 8), mha(X.double(), 1)
    expected = float((eight - one).norm() / one.norm())
    assert diagnosis.function.output_gap == pytest.approx(expected, rel=1e-6)
    assert expected > 0.1
    assert diagnosis.answer.startswith("Different: the outputs are apart by ")
    assert "in float32 the outputs differ" in str(diagnosis)
    assert "in float64 the outputs differ" in str(diagnosis)
    assert "rounding explains" in str(diagnosis)


def test_the_lines_that_make_a_layer_lead_to_the_cause() -> None:
    wrong, right = partial(mha, heads=8), partial(mha, heads=4)
    printed = str(compare(wrong, right, X)).splitlines()
    code = [line.strip() for line in printed if line.startswith(" " * 6)]
    names = dict(zip(("wq", "wk", "wv", "wo"), (w.T for w in (WQ, WK, WV, WO)), strict=True))
    shown: list[Any] = []
    run = {"headwise": headwise, "HEADS": 4, "a": wrong, "print": shown.append} | names
    exec("\n".join(code), run)
    assert [cause.name for cause in shown[0].function.causes] == ["number of heads"]
    assert "    layer = " not in str(compare(right, right, X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_same_attention_written_twice(dtype: torch.dtype) -> None:
    diagnosis = compare(
        lambda x: fused(x.to(dtype), 6).to(x.dtype), lambda x: mha(x.to(dtype), 6).to(x.dtype), X
    )
    assert diagnosis.verdict is Verdict.TO_ROUNDING, str(diagnosis)
    assert compare(partial(mha, heads=6), partial(mha, heads=6), X).verdict is Verdict.SAME


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.001), (torch.bfloat16, 1.5)])
def test_another_scale_is_no_rounding(dtype: torch.dtype, scale: float) -> None:
    diagnosis = compare(
        lambda x: mha(x.to(dtype), 6, scale).float(), lambda x: mha(x.to(dtype), 6).float(), X
    )
    assert diagnosis.verdict is Verdict.DIFFERENT


def test_inputs_that_hide_the_heads_are_inconclusive() -> None:
    many, one = partial(mha, heads=8), partial(mha, heads=1)
    cases = {
        "equal tokens": X[:, :1].expand(-1, 11, -1),
        "one key": X[:, :1],
    }
    for reason, x in cases.items():
        diagnosis = compare(many, one, x)
        assert diagnosis.verdict is Verdict.INCONCLUSIVE
        assert reason in str(diagnosis)
    sharp = compare(partial(mha, heads=6, scale=1e4), partial(mha, heads=6, scale=9e3), X)
    assert sharp.verdict is Verdict.INCONCLUSIVE
    assert "saturated" in str(sharp)


def test_modules_and_arrays_are_functions() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ self.projection(x)

    module = Mean()
    weight, bias = (p.detach().double().numpy() for p in module.projection.parameters())

    def of_arrays(x: np.ndarray) -> np.ndarray:
        scores = x @ x.swapaxes(1, 2)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        weights = powers / powers.sum(-1, keepdims=True)
        result: np.ndarray = weights @ (x @ weight.T.astype(x.dtype) + bias.astype(x.dtype))
        return result

    diagnosis = compare(of_arrays, module, X / 4)
    assert diagnosis.verdict is Verdict.TO_ROUNDING, str(diagnosis)


def test_what_two_functions_need() -> None:
    many = partial(mha, heads=8)
    with pytest.raises(OptionError, match="and no inputs"):
        compare(many, many)
    with pytest.raises(ShapeError, match="as x\\[None\\]"):
        compare(many, many, X[0])
    with pytest.raises(ShapeError, match="outputs of shape"):
        compare(lambda x: many(x)[..., :24], many, X)
    with pytest.raises(OptionError, match="gradients=True for two functions"):
        compare(many, many, X, gradients=True)

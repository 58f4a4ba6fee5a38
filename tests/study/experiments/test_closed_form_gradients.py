"""The closed formulas of the gradients: by hand, against autograd, and what their bounds see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.function import stages
from headwise.masks.mask import Mask
from headwise.study.experiments.gradients import ForwardPass, projection_gradients, rounding_bounds

BATCH, HEADS, QUERIES, KEYS = 3, 5, 11, 13
EMBED, SOURCE, OUT, HEAD_DIM, VALUE_DIM = 10, 9, 8, 4, 6
SHAPES = {
    "wq": (HEADS, HEAD_DIM, EMBED),
    "wk": (HEADS, HEAD_DIM, SOURCE),
    "wv": (HEADS, VALUE_DIM, SOURCE),
    "wo": (HEADS, OUT, VALUE_DIM),
}
NAMES = tuple(SHAPES)


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape, dtype=dtype) / 3 for name, shape in SHAPES.items()}


def made(
    w: dict[str, Tensor],
    *,
    mask: Mask | None = None,
    scale: float | None = None,
) -> ForwardPass:
    torch.manual_seed(2)
    dtype = w["wq"].dtype
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=dtype)
    source = torch.randn(BATCH, KEYS, SOURCE, dtype=dtype)
    q, k, v = (
        torch.einsum("bld,hwd->bhlw", tokens, w[name]) + 0.5
        for tokens, name in ((x, "wq"), (source, "wk"), (source, "wv"))
    )
    upstream = torch.randn(BATCH, QUERIES, OUT, dtype=dtype)
    return ForwardPass(x, source, q, k, v, w["wo"], upstream, mask, scale)


def by_autograd(**options: object) -> tuple[tuple[Tensor, ...], ForwardPass]:
    w = {name: value.requires_grad_() for name, value in weights().items()}
    forward = made(w, **options)  # type: ignore[arg-type]
    heads = stages.head_outputs(*forward[2:5], mask=forward.mask, scale=forward.scale)
    output = torch.einsum("bhqv,hov->bqo", heads, forward.wo)
    found = torch.autograd.grad(output, list(w.values()), forward.upstream)
    plain = (part.detach() if isinstance(part, Tensor) else part for part in forward)
    return found, ForwardPass(*plain)  # type: ignore[arg-type]


OPTIONS = [
    {},
    {"scale": 0.7},
    {"scale": -0.2},
    {"mask": Mask.window(left=3, right=1, align="top-left")},
    {"mask": Mask.lengths(keys=torch.tensor([KEYS, 4, 0]))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formulas_are_autograd(options: dict[str, object]) -> None:
    found, forward = by_autograd(**options)
    formulas, bounds = projection_gradients(forward), rounding_bounds(forward)
    for name, ours, theirs, bound in zip(NAMES, formulas, found, bounds, strict=True):
        assert ours.shape == SHAPES[name]
        assert torch.all((ours - theirs).abs() <= bound), name
        assert bound.max() < 1e-11 * theirs.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_see_a_small_mistake(name: str) -> None:
    """A value that is off by a millionth is more than rounding, in each formula."""
    found, forward = by_autograd()
    place = NAMES.index(name)
    part = {"wq": "k", "wk": "q", "wv": "upstream", "wo": "v"}[name]
    wrong = forward._replace(**{part: getattr(forward, part) * (1 + 1e-6)})
    ours = projection_gradients(wrong)[place]
    assert torch.all((ours - found[place]).abs().max() > rounding_bounds(forward)[place].max())


def test_bounds_hold_in_float32() -> None:
    narrow = made(weights(torch.float32), mask=Mask.window(left=3, right=1, align="top-left"))
    wide = ForwardPass(*(p.double() if isinstance(p, Tensor) else p for p in narrow))  # type: ignore[arg-type]
    exact, plain = projection_gradients(wide), projection_gradients(narrow)
    for ours, theirs, bound in zip(plain, exact, rounding_bounds(narrow), strict=True):
        assert torch.all((ours - theirs).abs() <= bound)
        assert bound.max() < 1e-3 * theirs.abs().max()


def test_one_key_leaves_nothing_to_choose() -> None:
    """The weight is 1 whatever the score: queries and keys have no gradient."""
    mask = Mask.lengths(keys=torch.ones(BATCH, dtype=torch.long))
    forward = made(weights(), mask=mask)
    wq, wk, wv, wo = projection_gradients(forward)
    assert torch.equal(wq, torch.zeros_like(wq))
    assert torch.equal(wk, torch.zeros_like(wk))
    total = forward.upstream.sum(1)
    first = forward.source[:, 0]
    torch.testing.assert_close(wv, torch.einsum("bo,hov,bd->hvd", total, forward.wo, first))
    torch.testing.assert_close(wo, torch.einsum("bo,bhv->hov", total, forward.v[:, :, 0]))


def test_two_keys_by_hand() -> None:
    """One head, one query, all widths 1: p = 1 / (1 + exp(k1 - k0)), dS = p (1 - p) G (v0 - v1)."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, v = (torch.tensor([a, b]).double().view(1, 1, 2, 1) for a, b in ((0.3, -0.4), (2.0, 0.5)))
    forward = ForwardPass(
        torch.full((1, 1, 1), 3.0).double(), k[:, 0], one, k, v, one[0], 5 * one[0], scale=1.0
    )
    p = 1 / (1 + torch.exp(torch.tensor(-0.7).double()))
    ds = p * (1 - p) * 5 * 1.5
    wq, wk, wv, wo = (float(part) for part in projection_gradients(forward))
    assert wq == pytest.approx(float(ds * (0.3 + 0.4) * 3))
    assert wk == pytest.approx(float(ds * (0.3 + 0.4)))
    assert wv == pytest.approx(float(5 * (p * 0.3 - (1 - p) * 0.4)))
    assert wo == pytest.approx(float(5 * (p * 2 + (1 - p) * 0.5)))


def test_no_other_head_is_in_a_heads_gradients() -> None:
    forward = made(weights())
    alone = projection_gradients(
        forward._replace(
            **{name: getattr(forward, name)[:, 2:3] for name in "qkv"}, wo=forward.wo[2:3]
        )
    )
    for ours, whole in zip(alone, projection_gradients(forward), strict=True):
        torch.testing.assert_close(ours, whole[2:3])

"""Projections by oneDNN: F.linear's function and gradients, and F.linear itself elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import has_torch_function

from headwise.layers import linear as kernel
from headwise.layers.linear import apply_linear
from headwise.support import private_torch
from headwise.support.processor import ProductChoice

needs_onednn = pytest.mark.skipif(
    not private_torch.HAS_ONEDNN_LINEAR, reason="torch was built without oneDNN's product"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN's product was given."""
    seen: list[tuple[int, ...]] = []
    product = private_torch.onednn_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(private_torch, "onednn_linear", counted)
    monkeypatch.setattr(kernel, "PAYS_FROM", 0)
    monkeypatch.setattr(kernel, "product_here", lambda: ProductChoice("onednn", "AMD"))
    return seen


def operands(*shape: int, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(*shape, 40)
    return x, torch.randn(17, 40), torch.randn(17) if bias else None


def bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The rounding of a sum of this length, whatever its order: (n + 1) eps |x| |w|."""
    size = linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    return (x.shape[-1] + 1) * torch.finfo(torch.float32).eps * size


LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
}


@needs_onednn
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_linear_in_any_layout(layout: object, bias: bool, calls: list[object]) -> None:
    x, weight, b = operands(3, 24, bias=bias)
    assert callable(layout)
    x = layout(x)
    exact = linear(x.double(), weight.double(), None if b is None else b.double())
    found = apply_linear(x, weight, b)
    assert calls == [tuple(x.shape)]
    assert torch.all((found - exact).abs() <= bound(x, weight, b))


@needs_onednn
@pytest.mark.parametrize("shape", [(29,), (3, 24), (2, 3, 5)])
@pytest.mark.parametrize("expanded", [False, True])
def test_gradients_and_their_gradients(
    shape: tuple[int, ...], expanded: bool, calls: list[object]
) -> None:
    x, weight, bias = operands(*shape)
    assert bias is not None
    given = [t.requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in given]
    upstream = torch.randn(1).expand(*shape, 17) if expanded else torch.randn(*shape, 17)
    first = torch.autograd.grad(apply_linear(*given), given, upstream, create_graph=True)
    wanted = torch.autograd.grad(linear(*exact), exact, upstream.double(), create_graph=True)
    assert len(calls) == 3
    rows, out = upstream.flatten(0, -2), x.flatten(0, -2)
    limits = (
        bound(upstream, weight.mT, None),
        bound(rows.mT, out.mT, None),
        bound(rows.mT, torch.ones(1, len(rows)), None)[:, 0],
    )
    for gradient, own, limit in zip(first, wanted, limits, strict=True):
        assert torch.all((gradient - own).abs() <= limit)
    second = torch.autograd.grad([g.square().sum() for g in first[:2]], given[:2])
    expected = torch.autograd.grad([g.square().sum() for g in wanted[:2]], exact[:2])
    for gradient, own in zip(second, expected, strict=True):
        terms = 2 * (17 + 40 + len(rows))
        limit = terms * torch.finfo(torch.float32).eps * float(own.abs().max()) * 17**0.5
        assert torch.all((gradient - own).abs() <= limit)


@needs_onednn
def test_few_tokens_are_torchs(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(24)
    for least, expected in ((24 * 40 * 17 + 1, []), (24 * 40 * 17, [(24, 40)])):
        monkeypatch.setattr(kernel, "PAYS_FROM", least)
        apply_linear(x, weight, bias)
        assert calls == expected


@needs_onednn
def test_only_the_gradients_that_are_needed(calls: list[object]) -> None:
    x, weight, bias = operands(24)
    weight.requires_grad_()
    apply_linear(x, weight, bias).sum().backward()
    assert calls == [(24, 40), (17, 24)]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_is_torchs_where_it_is_not_plain(calls: list[object]) -> None:
    x, weight, bias = operands(24)
    assert bias is not None
    apply_linear(x.double(), weight.double(), bias.double())
    apply_linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    apply_linear(x[:0], weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert apply_linear(x, weight, bias).dtype == torch.bfloat16
    torch.func.vmap(lambda row: apply_linear(row[None], weight, bias))(x)
    torch.func.jvp(lambda t: apply_linear(t, weight, bias), (x,), (x,))
    torch.compile(apply_linear, fullgraph=True, backend="eager")(x, weight, bias)
    torch.jit.trace(apply_linear, (x, weight, bias), check_trace=False)
    apply_linear(x.to("meta"), weight.to("meta"), bias.to("meta"))
    assert calls == []


class Wrapper(Tensor):
    """A tensor around another one, without a torch function of its own: as DTensor is."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        self: Wrapper = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "aten":
            raise NotImplementedError(f"no rule for {func}")
        plain = [x.held if isinstance(x, Wrapper) else x for x in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("wrapped", ["x", "weight", "bias"])
def test_a_tensor_around_another_goes_to_torch(wrapped: str, calls: list[object]) -> None:
    given = dict(zip(("x", "weight", "bias"), operands(24), strict=True))
    assert not has_torch_function((Wrapper(given["x"]),))
    expected = linear(**given)
    given[wrapped] = Wrapper(given[wrapped])
    assert torch.equal(apply_linear(**given), expected)
    assert calls == []


@pytest.mark.parametrize(
    ("dtype", "of_bias"),
    [
        (torch.float64, torch.float16),
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_a_bias_of_another_dtype(dtype: torch.dtype, of_bias: torch.dtype, layout: str) -> None:
    x, weight, bias = operands(3, 24)
    assert bias is not None
    x, weight, bias = LAYOUTS[layout](x).to(dtype), weight.to(dtype), bias.to(of_bias)
    if layout == "rows":
        with pytest.raises(RuntimeError, match="dtype"):
            linear(x, weight, bias)  # torch takes such a bias for some strides only
    found = apply_linear(x, weight, bias.requires_grad_())
    exact = linear(x.double(), weight.double(), bias.double())
    terms = linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    # One rounding for each product and sum, and one where the result leaves the wider dtype.
    limit = (x.shape[-1] + 2) * torch.finfo(dtype).eps * terms
    assert found.dtype == dtype
    assert torch.all((found - exact).abs() <= limit)
    found.sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == of_bias
    assert torch.all(bias.grad == 3 * 24)


def test_its_errors_are_torchs() -> None:
    x, weight, bias = operands(24)
    for wrong in ((x[:, :39], weight, bias), (x, weight, torch.zeros(16))):
        with pytest.raises(RuntimeError) as error:
            linear(*wrong)
        with pytest.raises(RuntimeError) as own:
            apply_linear(*wrong)
        assert str(own.value) == str(error.value)


def test_the_output_may_be_changed_in_place() -> None:
    x, weight, bias = operands(3, 24)
    weight.requires_grad_()
    residual = torch.randn(3, 24, 17)
    out = apply_linear(x, weight, bias)
    out += residual
    torch.nn.functional.dropout(out, 0.5, inplace=True)
    out[:, 0] = 0
    out.sum().backward()
    assert weight.grad is not None

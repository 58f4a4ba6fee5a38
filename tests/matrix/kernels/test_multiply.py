"""The products of a tile: oneDNN's where it is faster, within the bound of float32 either way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.function.rounding import Roundoff
from headwise.matrix.kernels import tiles
from headwise.support import private_torch
from headwise.support.processor import ProductChoice

LANES, ROWS, WIDTH, COLUMNS = 3, 70, 60, 1100  # just beyond PRODUCT_PAYS_FROM


def _operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Rows of both are parts of longer rows, as the keys of a tile are."""
    torch.manual_seed(0)
    a, b = torch.randn(LANES, ROWS, WIDTH + 3), torch.randn(LANES, WIDTH, COLUMNS + 5)
    return a[..., :WIDTH].to(dtype), b[..., :COLUMNS].to(dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Operands of oneDNN's product, on a processor where it is faster."""
    if not private_torch.HAS_ONEDNN_LINEAR:
        pytest.skip("this build of torch has no oneDNN product")
    seen: list[tuple[Tensor, Tensor]] = []
    product: Callable[..., Tensor] = private_torch.onednn_linear

    def recorded(x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        seen.append((x, weight))
        return product(x, weight, bias)

    monkeypatch.setattr(private_torch, "onednn_linear", recorded)
    monkeypatch.setattr(tiles, "product_here", lambda: ProductChoice("onednn", "AMD"))
    monkeypatch.setattr(tiles, "PRODUCT_ELEMENTS", 32 * COLUMNS)  # two blocks of rows
    return seen


@pytest.mark.parametrize("lanes", [1, LANES])
@pytest.mark.parametrize("by_column", [False, True])
def test_it_is_the_product(
    products: list[tuple[Tensor, Tensor]], *, lanes: int, by_column: bool
) -> None:
    a, b = (x[:lanes] for x in _operands())
    b = b.mT.contiguous().mT if by_column else b
    exact = a.double() @ b.double()
    bound = WIDTH * Roundoff.of(torch.float32).u * (a.double().abs() @ b.double().abs())
    assert ((tiles.multiply(a, b).double() - exact).abs() <= bound).all()
    assert len(products) == 2 * lanes
    # Parts of rows would take a thousand times as long.
    for x, weight in products:
        assert x.is_contiguous()
        assert (weight if by_column else weight.mT).is_contiguous()


@pytest.mark.parametrize("lanes", [1, LANES])
def test_sums_of_entries_are_the_product(
    products: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    weights, entries = torch.rand(lanes, 800, COLUMNS + 5), torch.randn(lanes, 5, COLUMNS)
    weights = weights[..., :COLUMNS]
    exact = entries.double() @ weights.double().mT
    bound = COLUMNS * Roundoff.of(torch.float32).u * (entries.double().abs() @ weights.double().mT)
    assert ((tiles.sum_entries(entries, weights).double() - exact).abs() <= bound).all()
    assert len(products) == lanes
    assert all(x.is_contiguous() and weight.is_contiguous() for x, weight in products)
    tiles.sum_entries(entries[:, :4], weights)  # too small a product
    tiles.sum_entries(entries.double(), weights.double())
    monkeypatch.setattr(tiles, "product_here", lambda: ProductChoice("blas", "Intel with AMX"))
    assert ((tiles.sum_entries(entries, weights).double() - exact).abs() <= bound).all()
    assert len(products) == lanes


def test_small_products_and_other_operands_are_torchs(
    products: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _operands()
    for x, y in ((a[:, :32], b), (a, b[..., :900]), (a.mT.contiguous().mT, b)):
        assert torch.equal(tiles.multiply(x, y), torch.bmm(x, y))
    tiles.multiply(*_operands(torch.float64))
    monkeypatch.setattr(tiles, "product_here", lambda: ProductChoice("blas", "Intel with AMX"))
    assert torch.equal(tiles.multiply(a, b), torch.bmm(a, b))
    assert not products

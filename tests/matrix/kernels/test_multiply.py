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
def test_it_is_the_product(products: list[tuple[Tensor, Tensor]], lanes: int) -> None:
    a, b = (x[:lanes] for x in _operands())
    exact = a.double() @ b.double()
    bound = WIDTH * Roundoff.of(torch.float32).u * (a.double().abs() @ b.double().abs())
    assert ((tiles.multiply(a, b).double() - exact).abs() <= bound).all()
    assert len(products) == 2 * lanes
    # Parts of rows would take a thousand times as long.
    assert all(x.is_contiguous() and weight.mT.is_contiguous() for x, weight in products)


def test_small_products_and_other_operands_are_torchs(
    products: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _operands()
    for x, y in ((a[:, :32], b), (a, b[..., :900]), (a, b.mT.contiguous().mT)):
        assert torch.equal(tiles.multiply(x, y), torch.bmm(x, y))
    tiles.multiply(*_operands(torch.float64))
    monkeypatch.setattr(tiles, "product_here", lambda: ProductChoice("blas", "Intel with AMX"))
    assert torch.equal(tiles.multiply(a, b), torch.bmm(a, b))
    assert not products

"""Private functions of torch: their answers, and the substitutes where they are missing."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from headwise import AttentionMatrix
from headwise.layers import linear as kernel
from headwise.layers.linear import apply_linear
from headwise.support import private_torch
from headwise.support.private_torch import (
    find_torch_attribute,
    is_in_dispatch_mode,
    is_in_forward_mode,
    is_in_functorch,
)
from headwise.support.tracing import may_read_values

PRIVATE = (
    "_linear_pointwise",
    "_interpreter_stack",
    "_dispatch_modes",
    "_make_wrapper",
)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without any of its private functions."""
    for name in PRIVATE:
        monkeypatch.setattr(private_torch, name, None)
    for name in ("HAS_ONEDNN_LINEAR", "HAS_WRAPPERS"):
        monkeypatch.setattr(private_torch, name, False)
    public = SimpleNamespace(make_dual=torch.autograd.forward_ad.make_dual)
    monkeypatch.setattr(private_torch, "forward_ad", public)


def seen(question: Callable[[], bool], transform: Callable[..., object]) -> bool:
    """The answer while a transform runs."""
    answers = []

    def f(x: Tensor) -> Tensor:
        answers.append(question())
        return x.sin().sum()

    transform(f)
    return answers[0]


def forward_mode(f: Callable[[Tensor], Tensor]) -> None:
    with torch.autograd.forward_ad.dual_level():
        f(torch.ones(3))


def test_what_torch_answers() -> None:
    def known() -> bool:
        return is_in_functorch(unknown=False) and is_in_functorch(unknown=True)

    assert not known()
    assert seen(known, lambda f: torch.func.grad(f)(torch.ones(3)))
    assert seen(known, lambda f: torch.func.vmap(f)(torch.ones(2, 3)))
    assert not is_in_forward_mode()
    assert seen(is_in_forward_mode, forward_mode)
    assert not is_in_dispatch_mode()

    class Mode(private_torch.DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Mode():
        assert is_in_dispatch_mode()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.usefixtures("missing")
def test_what_is_assumed_of_a_torch_that_does_not_answer() -> None:
    assert (is_in_functorch(unknown=True), is_in_functorch(unknown=False)) == (True, False)
    assert is_in_dispatch_mode()
    assert not is_in_forward_mode()
    assert seen(is_in_forward_mode, forward_mode)  # by public functions, at some cost
    with pytest.raises(ImportError, match="TorchDispatchMode"):
        private_torch._NoDispatchMode()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.usefixtures("missing")
def test_results_without_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PAYS_FROM", 0)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(24, 40), torch.randn(17, 40), torch.randn(17)
    assert torch.equal(apply_linear(x, weight, bias), linear(x, weight, bias))
    assert not may_read_values(x)
    q, k, v = torch.randn(1, 2, 24, 10), torch.randn(1, 2, 29, 10), torch.randn(1, 2, 29, 7)
    found = AttentionMatrix(q, k, softcap=5.0) @ v
    weights = (5.0 * torch.tanh(q @ k.mT / (5.0 * 10**0.5))).softmax(-1)
    torch.testing.assert_close(found, weights @ v)


def test_find() -> None:
    assert find_torch_attribute("nn.functional.linear") is linear
    assert find_torch_attribute("ops.mkldnn._no_such_operator") is None
    assert find_torch_attribute("_no_such_module.inside") is None

"""Clause 7: the drop-in is torch's, nothing more; every projection that is a module is called."""

import copy
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from headwise import Attention, MultiheadAttention
from headwise.layers import linear
from headwise.support import private_torch
from headwise.support.processor import ProductChoice
from tests.contract.layers import identity_attention, identity_layer, inputs


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_signature_is_torchs(method: str) -> None:
    ours, theirs = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(cls, method)).parameters.values()
        ]
        for cls in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert ours == theirs


@pytest.mark.parametrize("options", [{}, {"kdim": 7}, {"bias": False}, {"add_bias_kv": True}])
def test_the_parameters_are_torchs(options: dict[str, object]) -> None:
    ours, theirs = (
        cls(24, 4, **options)  # type: ignore[arg-type]
        for cls in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert isinstance(ours, nn.MultiheadAttention)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [
        (n, p.shape) for n, p in theirs.named_parameters()
    ]
    assert vars(ours).keys() == vars(theirs).keys()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_out_proj_is_called(grad: bool, need_weights: bool) -> None:
    layer, x = identity_layer().eval(), inputs()
    calls: list[torch.Size] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape)
            return super().forward(x) * 2

    before = layer(x, x, x, need_weights=need_weights)[0]
    layer.out_proj.__class__ = Counting
    with torch.set_grad_enabled(grad):
        after = layer(x, x, x, need_weights=need_weights)[0]
    assert calls == [x.shape]
    torch.testing.assert_close(after, before * 2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_the_native_layer_calls_each_projection_once(name: str, grad: bool) -> None:
    layer, x = identity_attention().eval(), inputs()
    projection, calls = getattr(layer, name), []

    class Counting(type(projection)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape)
            return super().forward(x) * 2

    projection.__class__ = Counting
    with torch.set_grad_enabled(grad):
        after = layer(x)
    assert calls == [x.shape]
    other = identity_attention()
    getattr(other, name).weight.data.mul_(2)
    assert torch.equal(after, other(x))


# ---- whoever can observe a call observes one -----------------------------------------------------

NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of products in place of calls; they pay at each size here."""
    seen: list[tuple[int, ...]] = []
    compute = linear.apply_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(weight.shape))
        return compute(x, weight, bias)

    monkeypatch.setattr(linear, "apply_linear", counted)
    monkeypatch.setattr(linear, "PAYS_FROM", 0)
    monkeypatch.setattr(linear, "product_here", lambda: ProductChoice("onednn", "AMD"))
    monkeypatch.setattr(private_torch, "HAS_ONEDNN_LINEAR", True)
    return seen


def projected(**options: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(24, 3, head_dim=10, value_dim=7, **options).eval(), torch.randn(2, 5, 24)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_unobserved_a_product_serves_within_rounding(
    grad: bool, bias: bool, products: list[object]
) -> None:
    layer, x = projected(q_bias=bias, k_bias=bias, v_bias=bias, out_bias=bias)
    with torch.set_grad_enabled(grad):
        found = layer(x)
    assert products == [(30, 24), (30, 24), (21, 24), (24, 21)]
    for name in NAMES:
        getattr(layer, name).register_forward_hook(lambda *_: None)
    torch.testing.assert_close(found, layer(x))
    assert len(products) == 4


def test_the_drop_in_too(products: list[object]) -> None:
    layer, x = MultiheadAttention(24, 3, batch_first=True).eval(), torch.randn(2, 5, 24)
    layer(x, x, x, need_weights=False)
    assert products == [(72, 24), (24, 24)]
    calls: list[object] = []
    layer.out_proj.register_forward_hook(lambda *_: calls.append(1))
    layer(x, x, x, need_weights=False)
    assert calls == [1]
    assert products[2:] == [(72, 24)]


class Counting(TorchFunctionMode):
    """A function mode that counts F.linear."""

    def __init__(self, calls: list[object]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is nn.functional.linear:
            self.calls.append(f)
        return f(*args, **(kwargs or {}))


class CountingOperators(TorchDispatchMode):
    """A dispatch mode that counts the products below F.linear."""

    def __init__(self, calls: list[object]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.calls.append(f)
        return f(*args, **(kwargs or {}))


class Doubled(nn.Module):
    def __init__(self, calls: list[object]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, weight: Tensor) -> Tensor:
        self.calls.append(1)
        return weight.clone()


Watch = Callable[[Attention, list[object], pytest.MonkeyPatch, ExitStack], None]


def _each(act: Callable[[nn.Linear, list[object]], object]) -> Watch:
    def watch(
        layer: Attention, calls: list[object], _patch: pytest.MonkeyPatch, _stack: ExitStack
    ) -> None:
        for name in NAMES:
            act(getattr(layer, name), calls)

    return watch


def _wrapped(function: Callable[..., Tensor], calls: list[object]) -> Callable[..., Tensor]:
    def wrapper(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return function(*args, **options)

    return wrapper


def _call_of_instance(module: nn.Linear, calls: list[object]) -> None:
    module.forward = _wrapped(module.forward, calls)  # type: ignore[method-assign]


def _class_forward(
    _layer: Attention, calls: list[object], patch: pytest.MonkeyPatch, _stack: ExitStack
) -> None:
    patch.setattr(nn.Linear, "forward", _wrapped(nn.Linear.forward, calls))


def _module_call(
    _layer: Attention, calls: list[object], patch: pytest.MonkeyPatch, _stack: ExitStack
) -> None:
    before = nn.Module.__call__

    def wrapper(module: nn.Module, *args: Any, **options: Any) -> Any:
        if isinstance(module, nn.Linear):
            calls.append(1)
        return before(module, *args, **options)

    patch.setattr(nn.Module, "__call__", wrapper)


def _functional(
    _layer: Attention, calls: list[object], patch: pytest.MonkeyPatch, _stack: ExitStack
) -> None:
    patch.setattr(nn.functional, "linear", _wrapped(nn.functional.linear, calls))


def _global_hook(
    _layer: Attention, calls: list[object], _patch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    def hook(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.Linear):
            calls.append(1)

    handle = nn.modules.module.register_module_forward_hook(hook)
    stack.callback(handle.remove)


def _flops(
    layer: Attention, calls: list[object], _patch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    counter = stack.enter_context(FlopCounterMode(display=False))
    entries = sum(getattr(layer, name).weight.numel() for name in NAMES)

    def count() -> None:
        operations = counter.get_flop_counts()["Global"][torch.ops.aten.addmm]
        calls.extend([operations] * 4 if operations == 2 * 10 * entries else [])

    stack.callback(count)


def _profiler(
    _layer: Attention, calls: list[object], _patch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    seen = profile(activities=[ProfilerActivity.CPU])
    stack.callback(lambda: calls.extend(e for e in seen.events() if e.name == "aten::linear"))
    stack.enter_context(seen)


WATCHES: dict[str, Watch] = {
    "forward hook": _each(lambda m, c: m.register_forward_hook(lambda *_: c.append(1))),
    "forward pre-hook": _each(lambda m, c: m.register_forward_pre_hook(lambda *_: c.append(1))),
    "global hook": _global_hook,
    "forward of the instance": _each(_call_of_instance),
    "forward of the class": _class_forward,
    "call of nn.Module": _module_call,
    "F.linear": _functional,
    "parametrisation": _each(
        lambda m, c: parametrize.register_parametrization(m, "weight", Doubled(c))
    ),
    "function mode": lambda _l, c, _p, stack: stack.enter_context(Counting(c)) and None,
    "dispatch mode": lambda _l, c, _p, stack: stack.enter_context(CountingOperators(c)) and None,
    "counter of operations": _flops,
    "profiler": _profiler,
}


@pytest.mark.parametrize("name", WATCHES)
def test_whoever_observes_a_call_observes_each_of_them(
    name: str, products: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = projected()
    expected, calls = copy.deepcopy(layer)(x).detach(), []
    products.clear()
    with ExitStack() as stack, torch.no_grad():
        WATCHES[name](layer, calls, monkeypatch, stack)
        calls.clear()  # a parametrisation is called once as it is registered
        found = layer(x)
    monkeypatch.undo()
    assert products == []
    assert len(calls) == 4
    torch.testing.assert_close(found, expected)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "pruning": lambda m: prune.l1_unstructured(m, "weight", amount=0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old weight norm": nn.utils.weight_norm,
    "weight that is no parameter": lambda m: m._parameters.update(weight=m.weight.detach() * 2),
    "further parameter": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "compiled": lambda m: m.compile(backend="eager"),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated.*:FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_projection_is_never_left_out(name: str, products: list[object]) -> None:
    layer, x = projected()
    for each in NAMES:
        CHANGES[name](getattr(layer, each))
    with torch.no_grad():
        layer(x)
    assert products == []


def test_torch_func_and_tracing_call_the_modules(products: list[object]) -> None:
    layer, x = projected()
    parameters = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, parameters, (x,))
    assert products == []
    doubled = copy.deepcopy(layer)
    for parameter in doubled.parameters():
        parameter.data.mul_(2)
    torch.testing.assert_close(found, doubled(x))

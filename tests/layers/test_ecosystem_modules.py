"""The layer as a module: copied, saved, hooked, and given to torch.func."""

import copy
import io
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from headwise import Attention, Mask, Rotary
from headwise.errors import OptionError
from headwise.layers.norm import QKNorm
from headwise.matrix.kernels import varlen
from tests.layers import reference
from tests.layers.ecosystem import (
    BATCH,
    LENGTH,
    PROJECTIONS,
    SUBJECTS,
    budget_of,
    layer_of,
    tokens,
)
from tests.paths import in_eager, transformed
from tests.paths.outcomes import ONE_BY_ONE
from tests.paths.subjects import Subject
from tests.quick import others_slow

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": in_eager.through_pickle,
    "torch.save": in_eager.through_a_file,
}
REAL = torch.tensor([LENGTH, 0, 7])
MASKS = {
    "causal": Mask.causal(),
    "lengths": Mask.lengths(queries=REAL, keys=REAL),
}


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda own: own.name)
def test_a_copy_is_the_same_function_of_its_own_parameters(
    subject: Subject, how: Callable[[Any], Any]
) -> None:
    assert in_eager.copied(how)(subject).word == "works"


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_a_layer_copied_with_its_cache_goes_on(how: Callable[[Any], Any]) -> None:
    layer, x = layer_of(rotary=Rotary(), window=(5, 0)).requires_grad_(False), tokens()
    cache = layer.cache(batch=BATCH, length=LENGTH)
    layer(x[:, :-1], cache=cache)
    other, other_cache = how((layer, cache))
    alone = how(layer)
    expected = layer(x[:, -1:], cache=cache)
    if how is copy.deepcopy:  # another layer; what is loaded again is the same one
        with pytest.raises(OptionError, match="did not make"):
            alone(x[:, -1:], cache=cache)
    assert torch.equal(other(x[:, -1:], cache=other_cache), expected)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda own: own.name)
def test_a_state_dict_is_all_there_is(subject: Subject) -> None:
    module, given = subject.module(), subject.at(24, 29)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = subject.build()
    assert not torch.equal(fresh(*given)[0], module(*given)[0])
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(fresh(*given)[0], module(*given)[0])
    # Parameters alone: nothing that is fixed by the options is stored.
    assert list(module.state_dict()) == [name for name, _ in module.named_parameters()]


# ---- torch.func --------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda own: own.name)
def test_functional_call(subject: Subject) -> None:
    assert transformed.functional(subject).word == "works"


@pytest.mark.parametrize(
    "subject", others_slow(SUBJECTS, "lengths", "sink"), ids=lambda own: own.name
)
def test_gradients_of_each_sample(subject: Subject) -> None:
    found = transformed.per_sample(subject)
    assert found.word == "works"
    # torch has no batching rule for its own fused kernel, and maps it in a loop.
    assert (ONE_BY_ONE.key in found.notes) is (subject.name not in ("sink", "t5"))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # the same loop
def test_mapped_over_layers() -> None:
    options: dict[str, Any] = {"rotary": Rotary(), "qk_norm": QKNorm(), "sink": True}
    layers = [layer_of(**options) for _ in range(4)]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            for parameter in layer.parameters():
                parameter.mul_(1 + index / 8)
    stacked = stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    x = tokens()

    def one(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return functional_call(skeleton, (parameters, buffers), (x,), {"mask": Mask.causal()})

    found = vmap(one, in_dims=(0, 0, None))(*stacked, x)
    written = partial(reference.output, mask=Mask.causal())
    for layer, own in zip(layers, found, strict=True):
        budget_of(layer, written, x).assert_holds(own)


# ---- hooks -------------------------------------------------------------------------------------


class Counted(nn.Module):
    """In place of a projection: counts its calls without a hook, and adds to its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) + 0.25


@pytest.mark.parametrize("way", ["training", "eval", "no_grad", "inference_mode", "cache"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "whole"])
def test_each_projection_is_called_once(
    way: str, mask: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "CALL", 1 if packs else 2**60)
    calls: Counter[str] = Counter()
    hooked, replaced = layer_of(rotary=Rotary()), layer_of(rotary=Rotary())
    for name in PROJECTIONS:
        projection = hooked.get_submodule(name)
        projection.register_forward_hook(lambda *_, name=name: calls.update([name]))
        setattr(replaced, name, Counted(replaced.get_submodule(name)))
    plain = layer_of(rotary=Rotary())
    with torch.no_grad():
        for name in PROJECTIONS:
            plain.get_submodule(name).bias.add_(0.25)
    outputs = [called(layer, MASKS[mask], way) for layer in (hooked, replaced, plain)]
    assert calls == dict.fromkeys(PROJECTIONS, 1)
    assert [replaced.get_submodule(name).calls for name in PROJECTIONS] == [1] * 4
    # What stands in a projection's place is used: its output is not that of the weights alone.
    assert not torch.equal(outputs[1], outputs[0])
    written = partial(reference.output, mask=MASKS[mask])
    budget_of(plain, written, tokens()).assert_holds(outputs[1])


def called(layer: Attention, mask: Mask, way: str) -> Tensor:
    """One forward pass."""
    layer.train(way == "training")
    if way == "inference_mode":
        with torch.inference_mode():
            return layer(tokens(), mask=mask)
    with torch.set_grad_enabled(way in ("training", "eval")):
        cache = layer.cache(batch=BATCH, length=LENGTH) if way == "cache" else None
        return layer(tokens(), mask=mask, cache=cache)

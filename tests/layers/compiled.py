"""The layer compiled. Run by test_ecosystem_compile.py in an interpreter of its own."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from headwise import Attention, Mask, Rotary
from headwise.matrix.kernels import varlen
from tests.layers import reference
from tests.layers.ecosystem import (
    BATCH,
    BY_NAME,
    LENGTH,
    SUBJECTS,
    budget_of,
    every_size,
    layer_of,
    real,
    tokens,
)
from tests.paths.in_eager import judge
from tests.paths.measure import Call, check_close, run
from tests.paths.subjects import Subject
from tests.paths.traced import marked


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    """How many graphs are in use."""
    return int(counters["stats"]["unique_graphs"])


def compiled(module: nn.Module, *, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(module, fullgraph=True, backend=backend, **{"dynamic": True, **options})


def check_every_size(subject: Subject, call: Call, module: nn.Module, *, backward: bool) -> None:
    """Within the budget at each size, of outputs and gradients, from one compilation."""
    for lengths, inputs in every_size(subject):
        with torch.set_grad_enabled(backward), torch._dynamo.config.patch(error_on_recompile=True):
            found = run(marked(call, lengths), module, inputs, backward=backward)
        judge(subject, module, call, found, inputs)
    assert compilations() == 1


# The layer with a sink is that of `test_inductor`.
TRAINED = [subject for subject in SUBJECTS if subject.name != "sink"]


@pytest.mark.parametrize("subject", TRAINED, ids=lambda own: own.name)
def test_training(subject: Subject) -> None:
    module = subject.module()
    check_every_size(subject, compiled(module), module, backward=True)


def test_lengths_are_packed_in_eager_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, the same mask is evaluated cell by cell; both are within one budget."""
    monkeypatch.setattr(varlen, "CALL", 1)
    layer, x, lengths = layer_of(rotary=Rotary()), tokens(), torch.tensor([LENGTH, 0, 7])
    mask = real(lengths)
    allowed = budget_of(layer, partial(reference.output, mask=mask), x)
    assert "packed" in layer.explain(x, mask=mask).tokens
    with torch.no_grad():
        eager, found = layer(x, mask=mask), compiled(layer)(x, mask=mask)
    allowed.assert_holds(eager)
    allowed.assert_holds(found)
    given_up = torch.arange(LENGTH) >= lengths[:, None]
    assert torch.equal(found[given_up], layer.out_proj.bias.expand_as(found)[given_up])


# Its own modules are scripted as they are imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_inductor() -> None:
    """Its sums are in another order: gradients are those of eager mode, by torch's tolerances."""
    subject = BY_NAME["sink"]
    module = subject.module()
    call = compiled(module, backend="inductor")
    for lengths, inputs in every_size(subject):
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = run(marked(call, lengths), module, inputs)
        judge(subject, module, call, found._replace(gradients=()), inputs)
        check_close(found, run(module, module, inputs))
    assert compilations() == 1


# ---- token by token ----------------------------------------------------------------------------


def test_a_decoding_step() -> None:
    layer, x = layer_of(rotary=Rotary(), sink=True, window=(5, 0)).eval(), tokens()
    written = partial(reference.output, mask=Mask.causal())
    allowed = budget_of(layer, written, x)
    call = compiled(layer)
    with torch.no_grad():
        allowed.assert_holds(decoded(layer, layer, x))
        allowed.assert_holds(decoded(call, layer, x))
        # The first call, a step, a step that makes room, and a step after that.
        assert compilations() == 4
        with torch._dynamo.config.patch(error_on_recompile=True):
            again = decoded(call, layer, x.flip(1))
    budget_of(layer, written, x.flip(1)).assert_holds(again)


def decoded(call: Any, layer: Attention, x: Tensor) -> Tensor:
    """Seven tokens, then one at a time."""
    cache = layer.cache(batch=BATCH, length=LENGTH)
    parts = x.split([7] + [1] * (LENGTH - 7), dim=1)
    return torch.cat([call(part, mask=Mask.causal(), cache=cache) for part in parts], dim=1)

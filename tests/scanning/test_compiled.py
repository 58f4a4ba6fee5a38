"""What torch.compile has compiled is scanned as it was written, and stays compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headwise.scanning._scan import scan
from headwise.scanning.importance import gradients
from tests.scanning.models import BATCH, CASES, LENGTH, WIDTH, callers, llama, text
from tests.scanning.test_scan import close

BACKEND = "aot_eager"  # as inductor does, it leaves no call of torch's attention function


def by_method(model: Any) -> None:
    model.layers[1].self_attn.compile(backend=BACKEND)


def by_wrapper(model: Any) -> None:
    model.layers[1] = torch.compile(model.layers[1], backend=BACKEND)


def by_forward(model: Any) -> None:
    layer = model.layers[1]
    layer.forward = torch.compile(layer.forward, backend=BACKEND)


NAMES = ["entropy", "relative_contribution"]


@pytest.mark.parametrize("compiled", [by_method, by_wrapper, by_forward])
def test_a_compiled_part_is_scanned_as_it_was_written(compiled: Callable[[Any], None]) -> None:
    model, given = llama(), text(left=True)
    before = scan(model, given, statistics=NAMES)
    compiled(model)
    after = scan(model, given, statistics=NAMES)
    assert after.layers == before.layers == CASES["llama"][2]
    assert after.notes == ()
    for name in NAMES:
        assert torch.equal(after[name], before[name])


def test_a_part_is_compiled_again_after_the_scan() -> None:
    model, x = callers(), torch.randn(BATCH, LENGTH, WIDTH).double()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.layers[1].compile(backend=backend)
    scan(model, x, statistics=["entropy"])
    assert not graphs
    with torch.no_grad():
        model(x)
    assert graphs


def test_importance_of_a_compiled_model() -> None:
    model, x = callers(), torch.randn(BATCH, LENGTH, WIDTH).double()

    def loss(output: Any, _: Any) -> Any:
        return output.square().sum((-1, -2))

    plain = gradients(model, x, loss=loss)
    compiled = gradients(torch.compile(model, backend=BACKEND), x, loss=loss)
    assert (compiled.model, compiled.layers) == (plain.model, plain.layers)
    close(compiled["taylor"], plain["taylor"])


def test_a_function_that_runs_in_a_frame_without_a_name() -> None:
    """The frames of compiled code have no module's name; neither has code that was evaluated."""
    space: dict[str, Any] = {}
    code = "def attend(q):\n    return attention(q, q, q)"
    exec(code, {"attention": nn.functional.scaled_dot_product_attention}, space)
    q = torch.randn(BATCH, 3, LENGTH, 8)
    assert scan(space["attend"], q, statistics=["entropy"]).layers == ("attention",)

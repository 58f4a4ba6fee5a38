"""The layer compiled and traced. Run by test_paths.py in an interpreter of its own."""

from typing import Any

import pytest
import torch

from headwise.errors import PolarityWarning
from tests.honest import hides_a_whole_sequence
from tests.layers.torch_api.cases import BATCH, CALLS, EMBED, causal, pair, randn


@hides_a_whole_sequence
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_one_graph(name: str, train: bool) -> None:
    torch.compiler.reset()
    _, ours = pair(dtype=torch.float32, batch_first=True)
    compiled = torch.compile(ours.train(train), fullgraph=True, backend="aot_eager")
    inputs, options = randn(), CALLS[name]
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(
            compiled(inputs, inputs, inputs, **options), ours(inputs, inputs, inputs, **options)
        )


def test_a_graph_warns_of_no_polarity_and_does_not_depend_on_the_warning() -> None:
    torch.compiler.reset()
    _, ours = pair(dtype=torch.float32, batch_first=True)
    compiled = torch.compile(ours.eval(), fullgraph=True, backend="eager")
    inputs, options = randn(), CALLS["padding"]
    with torch.no_grad():
        compiled(inputs, inputs, inputs, **options)  # a warning would be an error here
        assert not ours._warned
        with pytest.warns(PolarityWarning) as found:
            expected = ours(inputs, inputs, inputs, **options)
        assert found[0].filename == __file__
        with torch.compiler.set_stance("fail_on_recompile"):
            again = compiled(inputs, inputs, inputs, **options)
    torch.testing.assert_close(again, expected)


def test_compiled_for_any_length() -> None:
    torch.compiler.reset()
    _, ours = pair(dtype=torch.float32, batch_first=True)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(ours.eval(), fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (24, 29, 300):
            inputs = torch.randn(BATCH, length, EMBED)
            options = {"attn_mask": causal(length)}
            torch.testing.assert_close(
                compiled(inputs, inputs, inputs, **options), ours(inputs, inputs, inputs, **options)
            )
    assert len(graphs) <= 2


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_traced() -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True)
    inputs, other = randn(), randn()
    with torch.no_grad():
        traced = torch.jit.trace(ours, (inputs, inputs, inputs))
        torch.testing.assert_close(traced(other, other, other), ours(other, other, other))

"""Models compiled. Run by test_compiled.py in an interpreter of its own, without shape checks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._pytree import tree_leaves

from headwise.function.budget import Budget
from headwise.huggingface import NAME
from headwise.huggingface.attention import attend
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from tests.honest import ordinary
from tests.huggingface.models import DECODER, LENGTH, MODELS, Pair, built, lengths_mask
from tests.huggingface.test_attention import SHAPES, Layer, hiding
from tests.huggingface.test_generate import prompt, tokens
from tests.huggingface.test_training import budget_of, gradients, padding

CASES = [("llama", True), ("gemma2", False), ("t5", True)]


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "padded"), CASES)
def test_forward_as_one_graph(name: str, padded: bool) -> None:
    pair = Pair(MODELS[name])
    x = pair.input()
    inputs: dict[str, Any] = {"attention_mask": padding(x.shape[1])} if padded else {}
    budget = pair.budget(x, **inputs)
    compiled = torch.compile(pair.ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        budget.assert_holds(pair.run(compiled, x, **inputs))


def test_a_step_of_training_as_one_graph() -> None:
    pair = Pair(MODELS["llama"])
    x = pair.input()
    inputs = {"attention_mask": padding(x.shape[1]), "use_cache": False}
    compiled = torch.compile(pair.ours, fullgraph=True, backend="aot_eager")
    found = gradients(pair, compiled, x, **inputs)
    budget_of(pair, x, **inputs).assert_holds(found)


def test_layers_compiled_one_by_one_take_the_lazy_mask() -> None:
    pair = Pair(MODELS["gemma2"])
    x = pair.input()
    mask = padding(LENGTH)
    budget = pair.budget(x, attention_mask=mask)
    for layer in pair.ours.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        budget.assert_holds(pair.run(pair.ours, x, attention_mask=mask))


def test_packed_sequences() -> None:
    pair = Pair(MODELS["llama"])
    x = pair.input()
    options = {"position_ids": torch.tensor([[*range(5), *range(8)]]), "use_cache": False}
    budget = pair.budget(x, **options)
    compiled = torch.compile(pair.ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        budget.assert_holds(pair.run(compiled, x, **options))


def test_more_tokens_after_a_cache() -> None:
    pair = Pair(MODELS["llama"])
    x = pair.input()
    with torch.no_grad():
        whole = pair.budget(x)

        def rest(model: Any) -> torch.Tensor:
            past = pair.ours(inputs_embeds=x[:, :7]).past_key_values
            return model(inputs_embeds=x[:, 7:], past_key_values=past).last_hidden_state

        compiled = torch.compile(pair.ours, fullgraph=True, backend="eager")
        after = replace(whole, exact=whole.exact[:, 7:], allowed=whole.allowed[:, 7:])
        after.assert_holds(rest(pair.ours))
        after.assert_holds(rest(compiled))


def test_generating_with_a_static_cache() -> None:
    theirs = built(MODELS["llama"], "sdpa", torch.float64, head=True)
    ours = built(MODELS["llama"], NAME, torch.float64, head=True)
    expected = tokens(theirs, prompt(), cache_implementation="static")
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(1)
        return graph.forward

    ours.forward = torch.compile(ours.forward, fullgraph=True, backend=backend)
    found = tokens(ours, prompt(), cache_implementation="static")
    assert torch.equal(found.sequences, expected.sequences)
    assert len(graphs) == 2  # the prompt, and one for every step after it


def test_one_graph_for_any_length() -> None:
    pair = Pair(MODELS["llama"])
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(pair.ours, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (13, 29, 60):
            x = torch.randn(3, length, 48)
            mask = lengths_mask([length, 7, 4], length, side="right")
            budget = pair.budget(x, mask.bool(), attention_mask=mask)
            out = pair.run(compiled, x, attention_mask=mask)
            budget.assert_holds(out[mask.bool()])
    assert len(graphs) == 1


def test_a_causal_mask_is_not_written() -> None:
    graphs = AotEagerAndRecordGraphs()
    length, model = 150, built(MODELS["llama"], NAME, torch.float32)
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=graphs)(torch.arange(length)[None] % 7)
    (graph,) = graphs.fw_graphs
    made = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
    sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
    assert max(sizes) == length * DECODER["intermediate_size"] < length * length


@pytest.mark.parametrize("adds", [True, False], ids=["adds", "only hides"])
def test_a_float_mask_hides_by_its_lowest_number(adds: bool) -> None:
    q, k, v = ordinary(torch.float64)
    mask, hidden = hiding(SHAPES[-1], torch.float64, adds=adds)
    graphs = AotEagerAndRecordGraphs()
    out, _ = torch.compile(attend, fullgraph=True, backend=graphs)(Layer(), q, k, v, mask)
    empty = hidden.all(-1).expand(q.shape[:3])
    assert bool((out.transpose(1, 2)[empty] == 0).all())
    budget = Budget.for_head_outputs(
        q,
        k,
        v,
        mask=Mask.from_sdpa(~hidden),
        score_bias=ScoreBias.dense(mask, axes="batch heads queries keys"),
    )
    budget.assert_holds(out.transpose(1, 2))
    # One tensor of mask and bias, so that the fused kernel takes it at any size.
    (graph,) = graphs.fw_graphs
    assert any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)

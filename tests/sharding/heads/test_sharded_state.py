"""State dicts of layers whose heads are divided: gathered, loaded, stored and divided anew."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from headwise import MultiheadAttention, Rotary
from headwise.errors import OptionError, ShapeError
from headwise.layers.distance import T5Bias
from headwise.layers.norm import QKNorm
from headwise.sharding import gather_state, heads_plan, load_state
from tests.sharding.heads.compared import (
    HEADS,
    attention,
    largest_excess,
    moved,
    results,
    world,
)
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow


class Model(nn.Module):
    """Both kinds of layers, and a parameter of neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(36, 40).double()
        self.native = attention(
            num_kv_heads=4,
            out_dim=36,
            sink=True,
            rotary=Rotary(),
            qk_norm=QKNorm(kind="layer"),
            score_bias=T5Bias(buckets=8, max_distance=20),
        )
        self.wide = attention(num_kv_heads=1, out_dim=36, qk_norm=QKNorm(over="width"))
        self.drop_in = moved(MultiheadAttention(36, HEADS, add_bias_kv=True)).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.native(self.inner(x)) + self.wide(self.inner(x))
        x = x.transpose(0, 1)
        return self.drop_in(x, x, x)[0]


def tokens() -> Tensor:
    return torch.randn(3, 23, 36, generator=torch.Generator().manual_seed(7)).double()


def call(model: nn.Module, leaves: list[Tensor]) -> Tensor:
    return model(leaves[0])


def divided_model(in_proj: str = "whole") -> nn.Module:
    model = Model()
    plan = heads_plan(model, kv="replicate", in_proj=in_proj)
    assert list(plan) == ["native", "wide", "drop_in"]
    return parallelize_module(model, world(), plan)


def changed_state(scale: float = 1.5) -> dict[str, Tensor]:
    return {name: scale * x for name, x in Model().state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        type(x) is Tensor and torch.equal(x, second[name]) for name, x in first.items()
    )


def gathered_and_loaded() -> list[bool]:
    found = []
    for in_proj in ("whole", "separate"):
        model = divided_model(in_proj)
        found.append(same(gather_state(model), dict(Model().state_dict())))
        names = set(model.state_dict())
        found.append((names == set(Model().state_dict())) == (in_proj == "whole"))
        state = changed_state()
        before = dict(state)
        load_state(model, state)
        found.append(all(state[name] is x for name, x in before.items()))
        found.append(same(state, changed_state()) and same(gather_state(model), state))
        whole = Model()
        whole.load_state_dict(state)
        leaf = tokens().requires_grad_()
        output = largest_excess({"output": model(leaf)}, {"output": whole(leaf)})
        found.append(output <= 1)
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_gathered_and_loaded(count: int) -> None:
    for found in ranks(count).run(gathered_and_loaded):
        assert found == [True] * 10


def save(folder: str, in_proj: str) -> None:
    model = divided_model(in_proj)
    load_state(model, changed_state())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load(folder: str, in_proj: str) -> float:
    """Load what other ranks stored, and compare all gradients with the unsharded model."""
    model = divided_model(in_proj)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    whole = Model()
    whole.load_state_dict(changed_state())
    assert same(gather_state(model), dict(whole.state_dict()))
    if in_proj == "separate":  # the gradient of the packed weight has another form
        whole = copy.deepcopy(whole)
        leaf = tokens()
        return largest_excess({"output": model(leaf)}, {"output": whole(leaf)}, terms=3000)
    leaves = [tokens().requires_grad_()]
    found, expected = (results(m, call, leaves) for m in (model, whole))
    return largest_excess(found, expected, terms=3000)


@pytest.mark.parametrize("in_proj", ["whole", "separate"])
def test_stored_by_two_ranks_and_loaded_by_four(in_proj: str, tmp_path: Path) -> None:
    ranks(2).run(save, str(tmp_path), in_proj)
    assert max(ranks(4).run(load, str(tmp_path), in_proj)) <= 1


def load_unsharded(folder: str) -> bool:
    """Names and shapes are those of the unsharded model, so its checkpoint loads as it is."""
    if dist.get_rank() == 0:
        dcp.save({"model": changed_state()}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    model = divided_model()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return same(gather_state(model), changed_state())


def test_a_checkpoint_of_the_unsharded_model_loads(tmp_path: Path) -> None:
    assert ranks(2).run(load_unsharded, str(tmp_path)) == [True, True]


def refused() -> list[str]:
    model, messages = divided_model(), []
    good = Model().state_dict()
    bad: list[dict[str, Any]] = [
        {name: x for name, x in good.items() if name != "native.sink"},
        {**good, "native.other": torch.zeros(1)},
        {**good, "native.sink": torch.zeros(6)},
        {**good, "native.sink": torch.full((HEADS,), float(dist.get_rank())).double()},
        dict(model.state_dict()),
    ]
    for state in bad:
        try:
            load_state(model, state)
        except (OptionError, ShapeError) as error:
            messages.append(str(error))
    assert same(gather_state(model), dict(good))
    return messages


def test_states_that_do_not_fit_are_refused() -> None:
    for messages in ranks(2).run(refused):
        words = ["native.sink is missing", "native.other is of no parameter", "of shape (6,)"]
        words += ["native.sink differs between ranks", "a plain tensor, whole"]
        for word, text in zip(words, messages, strict=True):
            assert word in text

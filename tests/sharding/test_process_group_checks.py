"""Checks of the process group and of what ranks share."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from headwise.errors import OptionError
from headwise.sharding.agreement import (
    require_mesh,
    require_process_group,
    require_same_on_every_rank,
)
from tests.sharding.ranks import RankError, ranks

pytestmark = pytest.mark.slow


def message_of(call, *arguments) -> str:
    try:
        call(*arguments)
    except OptionError as error:
        return str(error)
    return ""


def compare_inputs(kind: str) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(12.0).view(3, 4)
    if kind.startswith("many"):
        x = torch.arange(9000.0).view(9, 1000)[1:].bfloat16()
    last = dist.get_rank() == dist.get_world_size() - 1
    if last and kind.endswith("values"):
        x[1, 2] += 1e-6 if kind == "values" else 64
    if last and kind == "shape":
        x = x.view(4, 3)
    if last and kind.endswith("order"):
        x = x.flip(0)
    return message_of(require_same_on_every_rank, "x", x, mesh)


def compare_equal() -> list[str]:
    """Views, half types, NaN, bools and tensors without elements."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(35.0).view(5, 7)
    rows[2, 2] = torch.nan
    tensors = [rows, rows[1:, 1:], rows.mT, rows.half()[0, 1:], rows > 3, rows[:0], rows[0, 0]]
    return [message_of(require_same_on_every_rank, "x", x, mesh) for x in tensors]


@pytest.mark.parametrize("count", [2, 4])
def test_other_inputs_on_one_rank_are_refused_on_all(count: int) -> None:
    assert ranks(count).run(compare_inputs, "same") == [""] * count
    assert ranks(count).run(compare_equal) == [[""] * 7] * count
    for kind in ("values", "shape", "order", "many values", "many in another order"):
        messages = ranks(count).run(compare_inputs, kind)
        assert len(set(messages)) == 1
        assert f"rank {count - 1} of the mesh holds another x" in messages[0]


def mesh_messages() -> list[str]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("documents", "heads"))
    flat = init_device_mesh("cpu", (4,))
    return [
        message_of(require_mesh, mesh, "attend(...)") for mesh in (flat, square, square["heads"], 2)
    ]


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    for messages in ranks(4).run(mesh_messages):
        assert messages[0] == messages[2] == ""
        assert 'mesh["documents"] for one of documents, heads' in messages[1]
        assert "a mesh of type int" in messages[3]


def test_a_process_without_a_group_is_told_how_to_start() -> None:
    with pytest.raises(OptionError, match="without a process group") as caught:
        require_process_group("attend(q, k, v, mesh)")
    assert "torchrun --nproc-per-node" in str(caught.value)


def raise_on_rank_one() -> None:
    assert dist.get_rank() != 1, "rank one fails"


def test_a_failure_on_a_rank_fails_the_test() -> None:
    with pytest.raises(RankError, match="rank one fails"):
        ranks(2).run(raise_on_rank_one)

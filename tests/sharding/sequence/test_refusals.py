"""Bad input is refused on every rank, with a sentence, before anything waits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.sharding import SequenceLayout, attend
from tests.sharding.ranks import ranks

LENGTH = 12


def arguments(last: bool) -> dict[str, dict[str, Any]]:
    """Return bad arguments by name; ``last`` is True on the last rank."""
    size = dist.get_world_size()
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    other = ones.clone()
    other[3, 4] = False
    k = torch.randn(2, 2, LENGTH // size, 10)
    return {
        "another mask": {"mask": Mask.window(4 - last, 0)},
        "another dense mask": {
            "mask": Mask.may_attend(other if last else ones, axes="queries keys")
        },
        "another function": {
            "mask": Mask.where((lambda b, h, i, j: j < i) if last else (lambda b, h, i, j: j <= i))
        },
        "another bias": {"score_bias": ScoreBias.alibi(torch.full((6,), 0.5 + last))},
        "another sink": {"sink": torch.full((6,), 1.0 * last)},
        "another scale": {"scale": 0.1 + last},
        "another way": {"by": "ring" if last else "gather"},
        "another layout": {
            "layout": SequenceLayout.zigzag(LENGTH, size)
            if last
            else SequenceLayout.contiguous(LENGTH, size)
        },
        "another dtype": {"k": k.double() if last else k},
        "another value_dim": {"v": torch.randn(2, 2, LENGTH // size, 8 if last else 7)},
        "a gradient on one": {"k": k.requires_grad_(last)},
        "a layout of another length": {"layout": SequenceLayout.zigzag(LENGTH + 3, size)},
        "a layout of other ranks": {"layout": SequenceLayout.zigzag(LENGTH, size + 1)},
        "no layout": {"layout": "zigzag"},
        "a mask of another length": {"mask": Mask.may_attend(ones[:, :-1], axes="queries keys")},
        "lengths beyond": {"mask": Mask.lengths(keys=torch.tensor([3, LENGTH + 1]))},
        "fewer values": {"v": torch.randn(2, 2, LENGTH // size - 1, 7)},
        "heads that do not divide": {"by": "heads", "q": torch.randn(2, 10, LENGTH // size, 10)},
        "no way": {"by": "circle"},
        "no limit": {"limit": "1 GB"},
        "no mask": {"mask": ones},
        "a sharded tensor": {
            "k": distribute_tensor(
                torch.randn(2, 2, LENGTH, 10), init_device_mesh("cpu", (size,)), [Shard(2)]
            )
        },
        "good": {},
    }


def refuse_each() -> dict[str, str]:
    """Return each message; what follows a refusal works."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    each = LENGTH // mesh.size()
    messages = {}
    for name, bad in arguments(dist.get_rank() == mesh.size() - 1).items():
        given = {
            "q": torch.randn(2, 6, each, 10),
            "k": torch.randn(2, 2, each, 10),
            "v": torch.randn(2, 2, each, 7),
            **bad,
        }
        try:
            attend(*map(given.pop, "qkv"), mesh, **given)
        except HeadwiseError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


LAST = "rank 3 of the mesh has another"
EXPECTED = {
    "another mask": f"OptionError: attend(q, k, v, mesh): {LAST} mask than rank 0",
    "another dense mask": f"{LAST} mask than rank 0",
    "another function": f"{LAST} mask than rank 0",
    "another bias": f"{LAST} score_bias than rank 0",
    "another sink": f"{LAST} sink than rank 0",
    "another scale": f"{LAST} scale, softcap, by, limit or check than rank 0",
    "another way": f"{LAST} scale, softcap, by, limit or check than rank 0",
    "another layout": f"{LAST} layout than rank 0",
    "another value_dim": f"{LAST} value_dim of v than rank 0",
    "a gradient on one": f"{LAST} set of operands that require a gradient than rank 0",
    "a layout of another length": "ShapeError: attend(q, k, v, mesh): ranks hold [3, 3, 3, 3]",
    "a layout of other ranks": "layout over 5 ranks with a mesh of 4",
    "no layout": "layout='zigzag'",
    "a mask of another length": "MaskError: a mask for (batch 1, heads 1, queries 12, keys 11)",
    "lengths beyond": "MaskError: lengths between 3 and 13 for 12 keys",
    "fewer values": "ShapeError: v of shape (2, 2, 2, 7) beside k of shape (2, 2, 3, 10)",
    "heads that do not divide": 'by="heads" with 10 heads and 2 kv_heads over 4 ranks',
    "no way": "attend(by='circle')",
    "no limit": "attend(limit='1 GB')",
    "no mask": "MaskError: mask=a torch.bool tensor of shape (12, 12)",
    "a sharded tensor": "k of type DTensor",
}


@pytest.mark.slow
def test_bad_input_is_refused_on_every_rank() -> None:
    messages = ranks(4).run(refuse_each)
    for found in messages:
        assert {*found} == {*EXPECTED, "another dtype"}
        for name, message in EXPECTED.items():
            assert message in found[name]
    # A rank that refuses its own operands says why; the others name this rank.
    assert messages[3]["another dtype"].startswith("DTypeError: q of dtype torch.float32 and k of")
    for found in messages[:3]:
        assert "rank 3 of the mesh refused its operands" in found["another dtype"]


@pytest.mark.usefixtures("shapes_unchecked")
def test_without_a_process_group() -> None:
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(OptionError, match="without a process group"):
        attend(q, q, q, None)


def refuse_meshes() -> list[str]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    messages = []
    for mesh in (square, "cpu"):
        try:
            attend(*[torch.ones(1, 2, 3, 4)] * 3, mesh)
        except OptionError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_a_mesh_that_does_not_fit() -> None:
    for two, none in ranks(4).run(refuse_meshes):
        assert 'mesh["heads"] for one of heads, sequence' in two
        assert "a mesh of type str" in none

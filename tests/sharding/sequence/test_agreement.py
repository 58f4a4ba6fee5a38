"""What ranks compare before they attend: contents in the first call of some shapes, then shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise import AttentionMatrix, Mask, ScoreBias
from headwise.errors import HeadwiseError
from headwise.sharding import SequenceLayout, attend, explain_attend
from tests.sharding.counted_bytes import counted_bytes
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 24, 6, 2, 10
WINDOW = 3


def operands(length: int) -> list[Tensor]:
    return [torch.randn(2, n, length, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HeadwiseError as error:
        return str(error)
    return ""


# ---- functions and fields ----------------------------------------------------------------------


def with_default(batch: Any, head: Any, query: Any, key: Any, width: Any = 3) -> Any:
    return query - key < width


def of_global(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return with_helper(query - key)


def with_helper(distance: Any) -> Any:
    return distance < WINDOW


class Within:
    def __init__(self, width: int) -> None:
        self.width, self.lock = width, object()

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query - key < self.width

    def method(self, *indices: Any) -> Any:
        return self(*indices)


def arguments(width: int) -> dict[str, dict[str, Any]]:
    """Return masks by functions whose code is the same for every width, and others."""
    table, array = torch.arange(LENGTH) < width, np.array([width])
    code = f"lambda batch, head, query, key: query - key < {width}"
    inner = f"lambda *indices: (lambda batch, head, query, key: query - key < {width})(*indices)"
    functions: dict[str, Callable[..., Any]] = {
        "constant": eval(code),
        "constant of an inner function": eval(inner),
        "closure": lambda batch, head, query, key: query - key < width,
        "tensor in the closure": lambda batch, head, query, key: table[(query - key).abs()],
        "array in the closure": lambda batch, head, query, key: query - key < int(array[0]),
        "argument of partial": partial(with_default, width=width),
        "attribute": Within(width),
        "attribute of a method's object": Within(width).method,
        "global of a helper": of_global,
    }
    default = lambda batch, head, query, key, width=width: query - key < width  # noqa: E731
    slopes, lengths = torch.ones(HEADS), torch.tensor([LENGTH, 5])
    return {
        **{name: {"mask": Mask.where(function)} for name, function in functions.items()},
        "default": {"mask": Mask.where(default)},
        "side": {"mask": Mask.lengths(keys=lengths, side="right" if width == 3 else "left")},
        "alignment": {
            "score_bias": ScoreBias.alibi(
                slopes, align="top-left" if width == 3 else "bottom-right"
            )
        },
    }


def messages_for(difference: int) -> dict[str, str]:
    global WINDOW
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    WINDOW = 3 + difference * dist.get_rank()
    q, k, v = operands(LENGTH // mesh.size())
    return {
        name: message_of(partial(attend, q, k, v, mesh, **given, check="always"))
        for name, given in arguments(WINDOW).items()
    }


def test_functions_with_other_constants_are_other_masks() -> None:
    for found in ranks(2).run(messages_for, 1):
        for name, message in found.items():
            what = "score_bias" if name == "alignment" else "mask"
            assert f"rank 1 of the mesh has another {what} than rank 0" in message, name
    for found in ranks(2).run(messages_for, 0):
        assert found == dict.fromkeys(found, "")


# ---- calls in which they compare ---------------------------------------------------------------


def bytes_of_calls() -> dict[str, list[int]]:
    """Return the bytes of three equal calls, without those of attention itself."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    layout = SequenceLayout.zigzag(LENGTH, mesh.size())
    q, k, v = operands(LENGTH // mesh.size())

    def count(**options: Any) -> int:
        with counted_bytes() as sent:
            attend(q, k, v, mesh, layout=layout, scale=0.17, **options)
        return sent.total

    alone = count(check="never")
    for check in ("first", "always"):
        found[check] = [count(check=check) - alone for _ in range(3)]
    plan = explain_attend(q, k, v, mesh, layout=layout)
    found["never"] = [alone - plan.sent_forward]
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_later_calls_send_one_number(n: int) -> None:
    one, all_numbers = 8 * (n - 1), 8 * (n - 1) * 15
    for found in ranks(n).run(bytes_of_calls):
        assert found["first"] == [one + all_numbers, one, one]
        assert found["always"] == [one + all_numbers] * 3
        assert found["never"] == [0]


def later_calls() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, each = mesh.get_local_rank(), LENGTH // mesh.size()
    layout = SequenceLayout.contiguous(LENGTH, mesh.size())
    whole = operands(LENGTH + 1)
    q, k, v = (layout.split(x[:, :, :LENGTH], rank) for x in whole)
    longer = [x[:, :, rank * each : (rank + 1) * each + rank] for x in whole]

    def masked(last: bool) -> dict[str, Any]:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        hidden[7, 7] = not last
        return {"mask": Mask.may_attend(hidden, axes="queries keys")}

    found, other = {}, rank == mesh.size() - 1
    for check in ("first", "always"):
        options = {"check": check, "softcap": 7.0}
        calls: dict[str, Callable[[], Any]] = {
            "equal": lambda o=options: attend(q, k, v, mesh, **masked(False), **o),
            "other contents": lambda o=options: attend(q, k, v, mesh, **masked(other), **o),
            "other lengths": lambda o=options: attend(*longer, mesh, layout=layout, **o),
            "other masks": lambda o=options: attend(
                *(q, k, v, mesh), **(masked(False) if other else {}), **o
            ),
            "other check": lambda: attend(q, k, v, mesh, check="first" if other else "always"),
            "bad values": lambda o=options: attend(q, k, v[:, :, rank:], mesh, **o),
            "equal again": lambda o=options: attend(q, k, v, mesh, **masked(False), **o),
        }
        found |= {f"{check}: {name}": message_of(call) for name, call in calls.items()}
    out = attend(*longer, mesh)
    expected = AttentionMatrix(*whole[:2]) @ whole[2]
    apart = (out - expected[:, :, rank * each : (rank + 1) * each + rank]).abs().max()
    found["the longer sequence"] = "" if apart < 1e-6 else f"{apart} apart"
    found["no such check"] = message_of(lambda: attend(q, k, v, mesh, check="last"))  # type: ignore[arg-type]
    wrong = layout if rank else SequenceLayout.contiguous(LENGTH + 2, mesh.size())
    never = partial(attend, q, k, v, mesh, check="never", layout=wrong)
    found["never, own length"] = "" if rank else message_of(never)
    return found


def test_what_a_later_call_is_refused_for() -> None:
    for rank, found in enumerate(ranks(2).run(later_calls)):
        for check in ("first", "always"):
            said = {name: found.pop(f"{check}: {name}") for name in NAMES}
            assert said["equal"] == said["equal again"] == ""
            contents = "another mask" if check == "always" else ""
            assert contents in said["other contents"]
            assert bool(said["other contents"]) == bool(contents)
            assert "ranks hold [12, 13] queries" in said["other lengths"]
            assert "rank 1 of the mesh has another mask" in said["other masks"]
            assert "another scale, softcap, by, limit or check" in said["other check"]
            refusal = "v of shape (2, 2, 11, 10)" if rank else "rank 1 of the mesh refused"
            assert refusal in said["bad values"]
        assert "attend(check='last')" in found.pop("no such check")
        never = found.pop("never, own length")
        assert rank or "ranks hold [12, 13] queries" in never
        assert found == {"the longer sequence": ""}


NAMES = (
    *("equal", "other contents", "other lengths", "other masks"),
    *("other check", "bad values", "equal again"),
)

"""Readings of a matrix over ranks, and head statistics, against those of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise.errors import HeadwiseError
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics.maps import TopKeysOfChosenQueries
from headwise.scanning.statistics.statistic import compute_summaries
from headwise.sharding import SequenceLayout, SequenceMatrix, head_statistics
from headwise.sharding.scan import _choose_statistics
from tests.sharding.ranks import ranks
from tests.sharding.sequence.cases import DOUBLE, layouts_of, make, with_leaves

pytestmark = pytest.mark.slow

# (readings along this rank's queries, along its keys, whole on every rank)
QUERIES: dict[str, Callable[[Any], Tensor]] = {
    "entropy": lambda a: a.entropy(),
    "maximum": lambda a: a.maximum(),
    "logsumexp": lambda a: a.logsumexp().nan_to_num(neginf=-99.0),
    "average": lambda a: a.head_average()[:, None],
    "statistics": lambda a: a.statistics().entropy,
    "topk": lambda a: a.topk(1)[0],
}
KEYS: dict[str, Callable[[Any], Tensor]] = {
    "received": lambda a: a.received(),
    "statistics received": lambda a: a.statistics().received,
}
EVERYWHERE: dict[str, Callable[[Any], Tensor]] = {
    "pool": lambda a: a.pool(min(5, a.shape[2]), min(4, a.shape[3])),
    "fine pool": lambda a: a.pool(1, a.shape[3]),
}


def whole_and_local(name: str, kind: str) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p, _ = with_leaves(make(name))
    rows, columns = layouts_of(p, kind, mesh.size())
    tensors = [x.clone().requires_grad_() for x in (p.q, p.k)]
    whole = AttentionMatrix(*tensors, **p.kwargs)
    local = [
        layout.split(x.detach(), dist.get_rank()).clone().requires_grad_()
        for layout, x in zip((rows, columns), tensors, strict=True)
    ]
    matrix = SequenceMatrix(*local, mesh, layout=rows, key_layout=columns, **p.kwargs)
    return p, _, rows, columns, (whole, tensors), (matrix, local)


def read(names: list[str], kind: str) -> list[str]:
    """Return what differs from one process: readings and their gradients."""
    differing, rank = [], dist.get_rank()
    for name in names:
        p, _, rows, columns, (whole, tensors), (matrix, local) = whole_and_local(name, kind)
        y = torch.randn(*p.q.shape[:3], 3, dtype=DOUBLE, generator=torch.Generator())
        here = [rows.split(y, rank), columns.split(p.v, rank)]
        pairs = {
            "@": (rows, matrix @ here[1], whole @ p.v),
            "mT @": (columns, matrix.mT @ here[0], whole.mT @ y),
        }
        pairs |= {n: (rows, f(matrix), f(whole)) for n, f in QUERIES.items()}
        pairs |= {n: (columns, f(matrix), f(whole)) for n, f in KEYS.items()}
        pairs |= {n: (None, f(matrix), f(whole)) for n, f in EVERYWHERE.items()}
        for reading, (layout, found, expected) in pairs.items():
            upstream = torch.linspace(-1, 1, expected.numel(), dtype=DOUBLE).view(expected.shape)
            part = partial(layout.split, rank=rank, dim=2) if layout else (lambda x: x)
            # A result that all ranks hold has as many gradients as ranks.
            share = 1 if layout else 1 / dist.get_world_size()
            a = torch.autograd.grad(found, local, share * part(upstream), materialize_grads=True)
            b = torch.autograd.grad(expected, tensors, upstream, materialize_grads=True)
            b = [rows.split(b[0], rank), columns.split(b[1], rank)]
            for what, x, want in zip("oqk", (found, *a), (part(expected), *b), strict=True):
                if not torch.allclose(x, want, rtol=1e-9, atol=1e-10):
                    differing.append(f"{name} {reading} {what}")
    return differing


NAMES = ["causal", "lengths", "segments", "prefix", "where", "heads", "packed"]
NAMES += ["causal 3", "dense 5", "segments 1", *(f"seed {i}" for i in range(4))]
# test_attend has every mask with both layouts; these have bands, segments and tensors to cut.
ZIGZAG = ["causal", "segments", "prefix", "heads", "causal 3", "dense 5", "segments 1"]
ZIGZAG += ["seed 1", "seed 3"]


@pytest.mark.parametrize(
    ("count", "kind", "names"), [(2, "contiguous", NAMES), (4, "zigzag", ZIGZAG)]
)
def test_readings_and_their_gradients(count: int, kind: str, names: list[str]) -> None:
    assert ranks(count).run(read, names, kind) == [[]] * count


def read_rows(name: str, kind: str) -> list[bool]:
    """Read chosen rows, diagonals and keys of this rank."""
    p, _, rows, _, (whole, _), (matrix, _) = whole_and_local(name, kind)
    mine, generator = rows.positions(dist.get_rank()), torch.Generator().manual_seed(1)
    index = torch.randperm(len(mine), generator=generator)[:7]
    weights, keys = matrix.topk(3, index)
    expected = whole.topk(3, mine[index])
    same = [
        torch.allclose(matrix.rows(index), whole.rows(mine[index])),
        torch.allclose(weights, expected[0]),
        torch.equal(keys, expected[1]),
        torch.equal(matrix.positions, mine),
    ]
    for offset in (0, -1, 5, -100, p.shape[3] - 1):
        queries = torch.arange(p.shape[2])
        exists = (queries + offset >= 0) & (queries + offset < p.shape[3])
        local = torch.isin(queries[exists], mine)
        # A rank reads its early run first, as the whole matrix does.
        same.append(torch.allclose(matrix.diagonal(offset), whole.diagonal(offset)[:, :, local]))
    return same


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_rows_diagonals_and_largest_weights(kind: str) -> None:
    for name in ("causal", "prefix"):
        assert ranks(4).run(read_rows, name, kind) == [[True] * 9] * 4


def describe(kind: str) -> tuple[str, str, str]:
    *_, (matrix, _) = whole_and_local("causal", kind)
    return repr(matrix), repr(matrix.mT), str(matrix.explain())


def test_a_matrix_describes_its_part() -> None:
    (text, transposed, kernels), *_ = ranks(2).run(describe, "zigzag")
    assert text == (
        "SequenceMatrix(batch=2, heads=6, queries=61, keys=61, causal; "
        "rank 0 of 2 has queries 0 to 16 and 46 to 61)"
    )
    assert transposed == f"{text}.mT"
    assert "A @ v 0+ " in kernels
    assert "A @ v 46+ " in kernels
    assert ranks(2).run(describe, "contiguous")[1][0].endswith("rank 1 of 2 has queries 31 to 61)")


# ---- head statistics ---------------------------------------------------------------------------


def compare_statistics(length: int, kind: str) -> dict[str, float]:
    """Return the largest difference of each statistic from that of one process."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    generator = torch.Generator().manual_seed(9)
    p = make(f"causal {length}")
    layout = getattr(SequenceLayout, kind)(length, mesh.size())
    q, k, v = (layout.split(x, rank) for x in (p.q, p.k, p.v))
    whole = AttentionMatrix(p.q, p.k, **p.kwargs)
    outputs = whole @ p.v
    residual = torch.randn(2, length, 40, dtype=DOUBLE, generator=generator)
    shared = {
        "real": torch.arange(length) < torch.tensor([[length], [max(1, length - 9)]]),
        "tokens": torch.randint(0, 7, (2, length), generator=generator),
        "separators": torch.rand(2, length, generator=generator) < 0.2,
        "specials": torch.rand(2, length, generator=generator) < 0.1,
        "out_proj": torch.randn(6, 7, 40, dtype=DOUBLE, generator=generator),
    }
    matrix = SequenceMatrix(q, k, mesh, layout=layout, **p.kwargs)
    found = head_statistics(
        matrix,
        values=v,
        outputs=layout.split(outputs, rank),
        residual=layout.split(residual, rank),
        **shared,
    )
    call = CapturedCall.for_self_attention(
        whole, values=p.v, outputs=outputs, residual=residual, **shared
    )
    chosen = _choose_statistics(None, call)
    summaries = compute_summaries(call, chosen)
    assert {*found} == {*summaries}
    differences = {}
    for statistic in chosen:
        name = statistic.definition.name
        expected = statistic.result(summaries[name])
        assert torch.equal(found[name].isnan(), expected.isnan()), name
        differences[name] = float((found[name] - expected).nan_to_num().abs().max())
    return differences


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_statistics_are_those_of_one_process(kind: str) -> None:
    for length in (61, 3):
        for differences in ranks(4).run(compare_statistics, length, kind):
            assert len(differences) == 25
            assert max(differences.values()) < 1e-9, differences


def refuse_statistics() -> list[str]:
    mesh, p = init_device_mesh("cpu", (dist.get_world_size(),)), make("seed 3")
    layouts = [SequenceLayout.contiguous(n, mesh.size()) for n in p.shape[2:]]
    q, k = (layout.split(x, dist.get_rank()) for layout, x in zip(layouts, (p.q, p.k), strict=True))
    cross = SequenceMatrix(q, k, mesh, layout=layouts[0], key_layout=layouts[1])
    own = SequenceMatrix(k, k, mesh)
    messages = []
    for call in (
        lambda: head_statistics(cross),
        lambda: head_statistics(own, [TopKeysOfChosenQueries()]),
        lambda: head_statistics(own, ["induction"]),
        lambda: head_statistics(own, ["inductions"]),
        lambda: own.mT @ p.q,
        lambda: own @ p.v[:, :, :1],
        lambda: own.rows(torch.tensor([99])),
    ):
        try:
            call()
        except HeadwiseError as error:
            messages.append(str(error))
    return messages


def test_what_is_refused() -> None:
    for messages in ranks(2).run(refuse_statistics):
        expected = (
            "self-attention: queries and keys of the same tokens",
            "the statistic 'top_keys' of a sequence over ranks",
            "induction: ",
            "'induction' is the nearest",
            "A.mT @ y with an operand of shape",
            "A @ v with an operand of shape",
            "index 99 to 99",
        )
        assert len(messages) == len(expected)
        for message, words in zip(messages, expected, strict=True):
            assert words in message

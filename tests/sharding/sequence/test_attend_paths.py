"""`attend` under autocast and in compiled graphs, each way."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise import Mask
from headwise.sharding import SequenceLayout, attend, explain_attend
from headwise.testing import Budget
from tests.sharding.ranks import ranks
from tests.sharding.sequence.cases import make

pytestmark = pytest.mark.slow

WAYS = ("heads", "gather", "ring")
NAMES = ("window", "causal")  # without and with a softcap, a sink and biases


def under_autocast() -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for name in NAMES:
        p = make(name)
        layout = SequenceLayout.zigzag(p.shape[2], mesh.size())
        for by in WAYS:
            parts = [layout.split(x.float(), mesh.get_local_rank()) for x in (p.q, p.k, p.v)]
            q, k, v = (x.clone().requires_grad_() for x in parts)
            options = {"by": by, "layout": layout, **p.kwargs}
            plain = explain_attend(q, k, v, mesh, **options)
            with torch.autocast("cpu", torch.bfloat16):
                out = attend(q, k, v, mesh, **options)
                plan = explain_attend(q, k, v, mesh, **options)
            out.float().sum().backward()
            found.append(
                {
                    "dtypes": [str(x.dtype) for x in (out, q.grad, k.grad, v.grad)],
                    "bytes": plain.sent_forward / plan.sent_forward,
                    "out": out.detach().float().numpy(),
                }
            )
    return found


def test_every_way_returns_the_dtype_of_autocast() -> None:
    results = iter(zip(*ranks(2).run(under_autocast), strict=True))
    for name in NAMES:
        p = make(name)
        layout = SequenceLayout.zigzag(p.shape[2], 2)
        q, k, v = (x.float().bfloat16() for x in (p.q, p.k, p.v))
        budget = Budget.for_head_outputs(q, k, v, **p.kwargs)
        for by in WAYS:
            parts = next(results)
            for part in parts:
                assert part["dtypes"] == ["torch.bfloat16", *["torch.float32"] * 3], by
                assert part["bytes"] == 2, by
            out = torch.cat([torch.from_numpy(part["out"]) for part in parts], 2)
            budget.assert_holds(layout.to_sequence_order(out, dim=2).bfloat16())


def compiled_and_not(fullgraph: bool, by: Any) -> list[float]:
    """Return how far outputs and gradients of a compiled call and of one in eager mode differ."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = None if by == "heads" else SequenceLayout.zigzag(40, mesh.size())

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(2 * q, k, v, mesh, by=by, layout=layout, mask=Mask.causal()).sin()

    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=fullgraph)
    leaves = [torch.randn(2, n, 20, 10, requires_grad=True) for n in (6, 2, 2)]
    results = []
    for call in (compiled, f):
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("by", WAYS)
def test_compiled(by: str) -> None:
    """Exchanged heads and gathered keys are one graph; torch compiles no ring's transfers."""
    for found in ranks(2).run(compiled_and_not, by != "ring", by):
        assert max(found) < 1e-5

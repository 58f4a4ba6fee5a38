"""Shards of a weight that are joined in the wrong order."""

from __future__ import annotations

import torch

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.injectors.head_order import rows_of
from benchmarks.faults.injectors.injector import STAGE_OF_ROLE, Injector, reordered
from benchmarks.faults.reference_layer import ReferenceLayer


class ShardsReordered(Injector):
    """Shards of one role are joined in another order (vLLM #42803, slowllama #16).

    Shard i of the faulty layer is shard order[i] of the good one. Shards are rows of q, k and v,
    and columns of wo. Shards that hold whole heads give the
    same weights as permuted heads.
    """

    name = "shards joined in the wrong order"
    family = "shards"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Join two or four shards in another order."""
        role = draw.choice("qkvo")
        rows = rows_of(layer.geometry, role)
        counts = [n for n in (2, 4) if rows.numel() % n == 0]
        count = draw.choice(counts)
        order = draw.moved(count)
        joined = torch.arange(rows.numel()).unflatten(0, (count, -1))[order].flatten()
        faulty = layer.with_weights(**reordered(layer, role, joined))
        moved = (joined != torch.arange(rows.numel())).view_as(rows).any(1).nonzero().flatten()
        whole = (rows.numel() // count) % rows.shape[1] == 0
        return self.case(
            layer,
            faulty,
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role, "order": tuple(order.tolist())},
            heads=None if role == "o" else tuple(moved.tolist()),
            equals=frozenset({"heads permuted"} if whole else ()),
        )


INJECTORS = (ShardsReordered(),)

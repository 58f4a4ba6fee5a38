"""`scan_sharded`: the scan of a model whose weights or heads are divided over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from headwise.errors import OptionError
from headwise.scanning._scan import scan
from headwise.scanning.file import hash_nested_content
from headwise.scanning.result import HeadScan
from headwise.scanning.weights import use_head_joiner
from headwise.sharding.checks import require_process_group


def scan_sharded(model: nn.Module, inputs: Any, **options: Any) -> HeadScan:
    """Scan a model that is divided over the ranks of the default process group.

    The model may be divided by FSDP2, by transformers' tensor-parallel plan, by `heads_plan`, or
    by FSDP2 and one of these. All ranks make the call, with the same inputs. Where a rank computes
    some heads of a layer, these are joined before they are read: each rank gets the scan of the
    whole model, with its own numbers of heads. The scan gathers no weights but the unembedding, for
    the statistic "copying"; FSDP2 gathers those of the module that runs.

    Args:
        model: the model, divided.
        inputs: as for `headwise.scan`.
        options: other arguments of `headwise.scan`.

    Raises:
        OptionError: no process group, other inputs on other ranks, heads that are divided and
            have masks or score biases of their own, or as `headwise.scan`.
    """
    require_process_group("scan_sharded(...)")
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hash_nested_content(inputs))
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise OptionError(
            saw=f"inputs of rank {others[0]}, which differs from inputs of rank 0",
            needed=f"the same inputs on all {len(digests)} ranks",
            do="start every process with the same arguments, and load the same files",
        )
    with use_head_joiner(_gather_tensor_heads_from_ranks):
        return scan(model, inputs, **options)


def _gather_tensor_heads_from_ranks(part: Tensor, weight: DTensor) -> Tensor:
    """Return a tensor with the heads of all ranks on axis 1, in the order of the weight's inputs.

    Args:
        part: the tensor of this rank's heads.
        weight: the weight of the output projection, whose inputs are divided.
    """
    dims = [
        dim
        for dim, placement in enumerate(weight.placements)
        if isinstance(placement, Shard) and placement.dim in (1, -1)
    ]
    if len(dims) != 1:
        raise OptionError(
            saw=f"an output projection with the placements {tuple(weight.placements)}",
            needed="inputs that are divided along one dimension of the mesh",
            do="divide the heads over one dimension of the mesh",
        )
    group = weight.device_mesh.get_group(dims[0])
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, 1)

"""The heads of one rank: inputs, parameters and returned weights of a layer's part."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from headwise.errors import OptionError
from headwise.layers.part import HeadPart
from headwise.sharding.checks import (
    Check,
    require_same_on_every_rank,
    require_same_shapes_on_every_rank,
)
from headwise.sharding.heads.sums import gather_heads_of_ranks, sum_backward, sum_forward
from headwise.support.tracing import may_read_values


class RankHeads(HeadPart):
    """The heads that this process computes; each rank of the mesh has as many.

    Args:
        mesh: the ranks, in one dimension.
        num_heads: as in `HeadPart`.
        num_kv_heads: as in `HeadPart`.
        check_inputs: the calls in which all ranks compare their inputs; see `Heads`.
    """

    def __init__(
        self, mesh: DeviceMesh, *, num_heads: int, num_kv_heads: int, check_inputs: Check
    ) -> None:
        each = num_heads // mesh.size()
        first = mesh.get_local_rank() * each
        heads = range(first, first + each)
        super().__init__(heads, num_heads=num_heads, num_kv_heads=num_kv_heads)
        self.mesh = mesh
        self.has_packed_weight = False  # True if in_proj_weight was cut into three
        self._check, self._has_compared = check_inputs, False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group()

    def check_inputs_and_sum_gradients(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs; their gradients are summed over ranks."""
        for name, tensor in inputs.items():
            if isinstance(tensor, DTensor):
                raise OptionError(
                    saw=f"{name} is a DTensor, for a layer whose heads are divided over ranks",
                    needed="the same plain tensor on every rank",
                    do=f"{name}.full_tensor(), or {name}.to_local() where it is replicated",
                )
        if self._check != "never" and all(map(may_read_values, inputs.values())):
            require_same_shapes_on_every_rank(inputs, self.mesh)
            if self._check == "always" or not self._has_compared:
                for name, tensor in inputs.items():
                    require_same_on_every_rank(name, tensor, self.mesh)
                self._has_compared = True
        return dict(zip(inputs, sum_backward(list(inputs.values()), group=self.group), strict=True))

    def own_share_of_parameter(self, parameter: Tensor) -> Tensor:
        """Return what this rank holds; the gradient of what all hold is summed over ranks."""
        return local_part(parameter, heads_of_this_rank=True)

    def mean_over_heads_from_own_mean(self, weights: Tensor) -> Tensor:
        """Return the mean over all heads, from the mean over those of this rank."""
        return sum_forward(super().mean_over_heads_from_own_mean(weights), group=self.group)

    def collect_returned_weights(self, weights: Tensor) -> Tensor:
        """Return the weights of all heads."""
        return gather_heads_of_ranks(weights, group=self.group)


def local_part(parameter: Tensor, *, heads_of_this_rank: bool) -> Tensor:
    """Return what this rank holds of a parameter, as a plain tensor.

    Args:
        parameter: a DTensor on the mesh of the heads.
        heads_of_this_rank: True if the tensor is used for the heads of this rank alone: where all
            ranks hold the whole, the gradient is then the sum over ranks.

    Raises:
        OptionError: a parameter that FSDP divides as well, and has not gathered for this call.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.ndim != 1:
        raise OptionError(
            saw=f"weights that are divided over a mesh {tuple(parameter.device_mesh.shape)}, "
            "outside of the forward pass for which FSDP gathers them",
            needed="weights that are divided by heads alone",
            do='register_fsdp_forward_method(layer, "matrix") for a call of layer.matrix',
        )
    (placement,) = parameter.placements
    is_summed = heads_of_this_rank and isinstance(placement, Replicate)
    return parameter.to_local(grad_placements=[Partial() if is_summed else placement])

"""The part of one rank: its heads, and the modules that compute them.

A module keeps its object, hooks and names, and gets one of the classes here. Parameters are
DTensors; each forward pass computes with what this rank holds of them.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.layers.linear import apply_linear
from headwise.layers.norm import Norm
from headwise.layers.part import HeadPart
from headwise.sharding import agreement, collectives
from headwise.support.tracing import may_read_values

P = TypeVar("P", Tensor, Tensor | None)


class RankHeads(HeadPart):
    """The heads that this process computes; each rank of the mesh has as many."""

    def __init__(
        self, mesh: DeviceMesh, *, num_heads: int, num_kv_heads: int, check_inputs: agreement.Check
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
            agreement.require_same_shapes_on_every_rank(inputs, self.mesh)
            if self._check == "always" or not self._has_compared:
                for name, tensor in inputs.items():
                    agreement.require_same_on_every_rank(name, tensor, self.mesh)
                self._has_compared = True
        summed = collectives.sum_backward(list(inputs.values()), group=self.group)
        return dict(zip(inputs, summed, strict=True))

    def own_share_of_parameter(self, parameter: Tensor) -> Tensor:
        """Return what this rank holds; the gradient of what all hold is summed over ranks."""
        return local_part(parameter)

    def weights_of_all_heads(self, weights: Tensor, *, average: bool) -> Tensor:
        """Return the mean over all heads, or the weights of all."""
        weights = super().weights_of_all_heads(weights, average=average)
        join = collectives.sum_forward if average else collectives.gather_heads_of_ranks
        return join(weights, group=self.group)


def local_part(parameter: P, *, heads_of_this_rank: bool = True) -> P:
    """Return what this rank holds of a parameter, as a plain tensor.

    With ``heads_of_this_rank`` it is used for these alone: where all ranks hold the whole, the
    gradient is then the sum over ranks.

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


# ---- modules -----------------------------------------------------------------------------------


class HeadsProjection(nn.Linear):
    """Projection to the channels of this rank's heads.

    Attributes:
        channels: those of its heads, where each rank holds the weights of all; else None.
    """

    channels: slice | None

    @property
    def computed_widths(self) -> tuple[int, int]:
        """The input width, and the number of channels that this rank computes."""
        rows = local_part(self.weight)[self.channels or slice(None)]
        return self.in_features, len(rows)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project (..., in_features) to this rank's share of out_features."""
        weight, bias = local_part(self.weight), local_part(self.bias)
        if self.channels is not None:
            weight = weight[self.channels]
            bias = None if bias is None else bias[self.channels]
        return apply_linear(input, weight, bias)


class RankSummedOutputProjection(nn.Linear):
    """Output projection: the sum over ranks of the products of their heads, then the bias."""

    part: RankHeads

    @property
    def computed_widths(self) -> tuple[int, int]:
        """The number of channels of this rank's heads, and the output width."""
        return local_part(self.weight).shape[1], self.out_features

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project this rank's share of in_features to the output of all heads."""
        product = apply_linear(input, local_part(self.weight), None)
        output = collectives.sum_forward(product, group=self.part.group)
        if self.bias is None:
            return output
        bias = local_part(self.bias, heads_of_this_rank=False)
        return (output + bias).to(output.dtype)


class HeadsNorm(Norm):
    """Norm of what this rank holds: of each head, or of a width that every rank computes.

    Attributes:
        channels: those of this rank's heads, where the norm is of all heads together; else None.
    """

    channels: slice | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; return the channels of this rank's heads."""
        normed = self.options.normalise(x, local_part(self.weight), local_part(self.bias))
        return normed if self.channels is None else normed[..., self.channels]


class WidthNormOverRanks(Norm):
    """Norm of the width of all heads, of which each rank has its own channels.

    The sums over channels are sums over ranks: one all-reduce in each direction, two for a norm
    with a mean.
    """

    part: RankHeads
    width: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's channels by the statistics of all."""
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, bias = local_part(self.weight), local_part(self.bias)
        wide, weight = x.to(exact), weight.to(exact)
        if self.options.one_plus:
            weight = 1.0 + weight
        if bias is not None:
            wide = wide - self._mean_over_ranks(wide)
        scale = torch.rsqrt(self._mean_over_ranks(wide.square()) + self.options.eps)
        normed = wide * scale * weight
        return (normed if bias is None else normed + bias.to(exact)).to(x.dtype)

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        total = x.sum(-1, keepdim=True)
        return collectives.sum_forward_and_backward(total, group=self.part.group) / self.width


class ReplicatedEmbedding(nn.Embedding):
    """Table that every rank holds, and reads for all heads."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Return the rows of these indices."""
        return F.embedding(input, local_part(self.weight, heads_of_this_rank=False))

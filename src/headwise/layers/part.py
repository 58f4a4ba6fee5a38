"""A part of a layer's heads, for a module that computes some heads of many.

The outputs of all parts add up to the output of the layer. The arguments of a call (mask, score
bias, gate) are those of all heads.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias


class HeadPart:
    """Query heads in a row, and the kv heads that they use.

    The projections of a module with a part give the channels of these heads alone. A subclass may
    change gradients of inputs, and choose its share of a parameter.
    """

    def __init__(self, heads: range, *, num_heads: int, num_kv_heads: int) -> None:
        self.heads, self.num_heads, self.num_kv_heads = heads, num_heads, num_kv_heads
        group = num_heads // num_kv_heads
        # the kv heads that the query heads use
        self.kv_heads = range(heads.start // group, (heads.stop - 1) // group + 1)
        used = [head // group - self.kv_heads.start for head in heads]
        each = max(1, len(heads) // len(self.kv_heads))
        is_even = used == [head // each for head in range(len(heads))]
        self._kv_of_head = None if is_even else used

    def check_inputs_and_sum_gradients(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the float inputs of a call, by name, as the part computes with them."""
        return dict(inputs)

    def own_share_of_parameter(self, parameter: Tensor) -> Tensor:
        return parameter

    def weights_of_all_heads(self, weights: Tensor, *, average: bool) -> Tensor:
        """Return the weights that a call returns, from those of these heads.

        ``average`` is True for their mean, (batch, queries, keys), whose share of the mean over
        all heads is returned.
        """
        return weights * (len(self.heads) / self.num_heads) if average else weights

    def mask(self, mask: Mask, *, device: torch.device, **sizes: int) -> Mask:
        """Return the mask of these heads, for ``sizes`` of batch, queries and keys.

        Raises:
            MaskError: made for other sizes than those of all heads.
        """
        if not mask.clauses:
            return mask
        mask.bind(**sizes, heads=self.num_heads, device=device)
        return mask.of_heads(self._indices_of_own_heads(device))

    def score_bias(self, bias: ScoreBias, *, device: torch.device, **sizes: int) -> ScoreBias:
        """Return the score bias of these heads; arguments and errors as in `mask`."""
        if not bias.all_tensors():
            return bias
        bias.check(**sizes, heads=self.num_heads, device=device)
        return bias.of_heads(self._indices_of_own_heads(device))

    def cut_channels(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Return the channels of these heads of an axis that holds those of all heads."""
        width = tensor.shape[dim] // self.num_heads
        return tensor.narrow(dim, self.heads.start * width, len(self.heads) * width)

    def share_kv(self, x: Tensor) -> Tensor:
        """Return keys or values with as many heads as the queries, where groups are uneven."""
        if self._kv_of_head is None:
            return x
        return x.index_select(1, torch.tensor(self._kv_of_head, device=x.device))

    def _indices_of_own_heads(self, device: torch.device) -> Tensor:
        return torch.arange(self.heads.start, self.heads.stop, device=device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Return the part itself, which never changes."""
        return self

    def __str__(self) -> str:
        first, last = self.heads.start, self.heads.stop - 1
        return f"heads {first} to {last}" if first < last else f"head {first}"

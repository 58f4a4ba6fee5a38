"""What a head gives while it is off: nothing, its mean, or what it says of another sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.statistics.statistic import Summary

# (heads, value_dim) of each layer, by its name
Means = Mapping[str, Tensor]


class Replacement(ABC):
    """What is put in the place of a head's outputs."""

    def begin(self, batch: int) -> None:  # noqa: B027 (most draw nothing)
        """Another batch, of this many sequences."""

    def missing(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Why a layer with head outputs of this shape cannot have it; None where it can."""
        return None

    def kept(self, layer: str, heads: tuple[int, ...]) -> Summary:  # noqa: ARG002
        """What has to be kept of a layer beside the sums, a row for each head."""
        return {}

    @abstractmethod
    def of(
        self,
        outputs: Float[Tensor, "batch queries value_dim"],
        real: Bool[Tensor, "batch queries"],
        *,
        layer: str,
        head: int,
    ) -> Float[Tensor, "batch queries value_dim"]:
        """In the place of a head's outputs; ``real`` is False for padded queries."""


class Zero(Replacement):
    """Nothing."""

    def of(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """Zeros."""
        return torch.zeros_like(outputs)


class Mean(Replacement):
    """The same at every query: the head's mean."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def kept(self, layer: str, heads: tuple[int, ...]) -> Summary:
        """The means, since sums of effects can be added only where they are the same."""
        return {"stood_in": self._means[layer][list(heads)].double().cpu()}

    def missing(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Refuse means of other layers.

        Raises:
            OptionError: there is none for this layer, or it has other sizes.
        """
        _, heads, _, value_dim = shape
        found = self._means.get(layer)
        if found is None or found.shape != (heads, value_dim):
            saw = "none" if found is None else str(tuple(found.shape))
            raise OptionError(
                saw=f"means of {layer}: {saw}",
                needed=f"(heads {heads}, value_dim {value_dim})",
                do="mean_outputs(model, inputs) of the same model and layers",
            )
        return None

    def of(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """The mean, once for each query."""
        return self._means[layer][head].to(outputs).expand_as(outputs)


class Resample(Replacement):
    """What the head gives another sequence of the batch.

    Args:
        seed: of the draw, the same for every head; the global generators are not touched.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._partner = torch.empty(0, dtype=torch.long)

    def begin(self, batch: int) -> None:
        """Draw a partner for each sequence.

        Raises:
            OptionError: a batch of one.
        """
        if batch < 2:
            raise OptionError(
                saw="resample with a batch of 1 sequence",
                needed="another sequence in the batch, for a head to speak of",
                do="batches of at least 2, also the last; or by='zero', by='mean'",
            )
        self._partner = partners(batch, self._generator)

    def missing(self, layer: str, shape: torch.Size, batch: int) -> str | None:  # noqa: ARG002
        """Where sequences do not stand along the batch, none can be taken for another."""
        return None if shape[0] == batch else f"a batch of {shape[0]} for {batch} sequences"

    def of(self, outputs: Tensor, real: Tensor, *, layer: str, head: int) -> Tensor:  # noqa: ARG002
        """The i-th real query takes the partner's real query i modulo their number."""
        partner = self._partner.to(real.device)
        place = (real.long().cumsum(-1) - 1).clamp(min=0)
        counts = real.sum(-1).clamp(min=1)[partner]
        # The partner's real places in order, then the others.
        order = (~real).long().argsort(dim=-1, stable=True)[partner]
        index = order.gather(1, place % counts[:, None])
        return outputs[partner[:, None], index]


def partners(batch: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
    """Another sequence for each: a random circle through all of them, so none is its own."""
    order = torch.randperm(batch, generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner

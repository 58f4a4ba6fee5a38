"""Weights of a model as plain tensors: of quantised layers too, and of what gives its logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from headwise.support.private_torch import is_wrapper


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a weight is made of: itself, or its integers and its scales."""
    if not is_wrapper(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(weight, name))


def as_floats(weight: Tensor) -> Tensor | None:
    """Return a weight as a plain tensor of floating-point numbers; None where it has no such form.

    A quantised weight is dequantised: these are the numbers that its products are made with.
    """
    if is_wrapper(weight):
        if type(weight).dequantize is Tensor.dequantize:  # spread over devices
            return None
        weight = weight.dequantize()
    return weight if weight.is_floating_point() else None


def unembedding_of(model: Any) -> Tensor | None:
    """(vocabulary, embed_dim): what a language model of transformers, or of headwise, ends with."""
    named = getattr(model, "get_output_embeddings", None)
    module = named() if named is not None else getattr(model, "unembedding", None)
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    weight = as_floats(weight.detach()) if isinstance(weight, Tensor) else None
    return weight if weight is not None and weight.dim() == 2 else None

"""Weights that a library of quantisation holds in a class of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.errors import DTypeError

if TYPE_CHECKING:  # the catalogue of layouts is read without torch
    from torch import Tensor


def require_unquantised(**weights: Tensor) -> None:
    """Raise DTypeError for a weight of torchao or bitsandbytes; its name is the keyword."""
    for name, weight in weights.items():
        library = type(weight).__module__.partition(".")[0]
        if library in ("torchao", "bitsandbytes"):
            call = "weight.dequantize()"
            if library == "bitsandbytes":
                call = "bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state)"
            raise DTypeError(
                saw=f"{name} is quantised: its type is {type(weight).__name__} of {library}",
                needed="weights of a floating-point dtype",
                do=f"load the model without quantisation, or replace each weight by {call}",
            )

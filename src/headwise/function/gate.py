"""The output gate: each head's outputs, times the sigmoid of a projection of the tokens.

Gated attention (Qiu et al. 2025, arXiv:2505.06708), in Qwen3-Next for each channel of a head.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.function.spec import ABSENT, GateKind, Unset
from headwise.function.stages import project_heads
from headwise.support.text import describe_value


def output_gate(
    x: Float[Tensor, "batch queries embed_dim"],
    weight: Float[Tensor, "heads gate_width embed_dim"],
    bias: Float[Tensor, "heads gate_width"] | None,
) -> Float[Tensor, "batch heads queries gate_width"]:
    """Return the factors of the head outputs, from 0 to 1; gate_width is 1 or value_dim."""
    return torch.sigmoid(project_heads(x, weight, bias))


def gate_width(kind: GateKind, value_dim: int) -> int:
    """Return the number of gates of a head.

    Raises:
        OptionError: another kind than "head" and "channel".
    """
    if kind not in ("head", "channel"):
        raise OptionError(
            saw=f"output_gate={describe_value(kind)}",
            needed='"head", one gate for each head, or "channel", one for each of its value_dim '
            "channels",
            do='output_gate="channel", as in Qwen3-Next; gate= of a call is another thing',
        )
    return 1 if kind == "head" else value_dim


def kind_of_width(width: int | None) -> GateKind | Unset:
    """Return the kind of gate with so many for each head; ABSENT for None."""
    if width is None:
        return ABSENT
    return "head" if width == 1 else "channel"

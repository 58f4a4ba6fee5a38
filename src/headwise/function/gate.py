"""The output gate: each head's outputs, times the sigmoid of a projection of the tokens.

Gated attention (Qiu et al. 2025, arXiv:2505.06708), in Qwen3-Next for each channel of a head, in
Step 3.7 for each head. Laguna takes the softplus, ln(1 + exp(x)), in place of the sigmoid.
"""

from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.function.spec import ABSENT, GateKind, Unset
from headwise.function.stages import project_heads
from headwise.support.text import describe_value


def output_gate(
    x: Float[Tensor, "batch queries embed_dim"],
    weight: Float[Tensor, "heads gate_width embed_dim"],
    bias: Float[Tensor, "heads gate_width"] | None,
    kind: GateKind = "channel",
) -> Float[Tensor, "batch heads queries gate_width"]:
    """Return the factors of the head outputs, from 0 on; gate_width is 1 or value_dim."""
    return open_gates(project_heads(x, weight, bias), kind)


def open_gates(projected: Float[Tensor, "..."], kind: GateKind) -> Float[Tensor, "..."]:
    """Return the factors of a projection: its sigmoid, or its softplus."""
    is_softplus = kind.endswith("softplus")
    return F.softplus(projected) if is_softplus else torch.sigmoid(projected)


def gate_width(kind: GateKind, value_dim: int) -> int:
    """Return the number of gates of a head.

    Raises:
        OptionError: another kind than "head" and "channel".
    """
    if kind not in get_args(GateKind):
        raise OptionError(
            saw=f"output_gate={describe_value(kind)}",
            needed='"head", one gate for each head, or "channel", one for each of its value_dim '
            'channels; with " softplus" behind it in place of a sigmoid',
            do='output_gate="channel", as in Qwen3-Next; gate= of a call is another thing',
        )
    return 1 if kind.startswith("head") else value_dim


def kind_of_width(width: int | None) -> GateKind | Unset:
    """Return the kind of gate with so many for each head; ABSENT for None."""
    if width is None:
        return ABSENT
    return "head" if width == 1 else "channel"

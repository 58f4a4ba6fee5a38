"""Temperature by position: queries grow with the logarithm of their position.

    steps    1 + factor * ln(1 + floor((p + first) / length))    Llama 4 (first 1), Ministral 3
    smooth   1 + factor * ln(max((p + first) / length, 1))       Inkling (first 1)

Scalable softmax (Nakanishi 2025, arXiv:2501.19399) is its source: a softmax over more keys is
flatter. The position counts, as in Ministral 3; Llama 4 in transformers counts columns, padding
included.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from headwise.function.spec import TemperatureRule


def query_factors(
    rule: TemperatureRule, positions: Shaped[Tensor, "*axes queries"], dtype: torch.dtype
) -> Float[Tensor, "..."]:
    """Return the factor of each query, which broadcasts to (batch, heads, queries, head_dim).

    Of several axes of positions the first counts.
    """
    exact = torch.promote_types(dtype, torch.float32)
    positions = positions[0] if positions.dim() == 3 else positions
    positions = positions.clamp(min=0)  # those of padding before a sequence are negative
    share = (positions.to(exact) + rule.first) / rule.length
    grown = share.clamp(min=1).log() if rule.kind == "smooth" else share.floor().log1p()
    factors = (1 + rule.factor * grown).to(dtype)[..., None]
    return factors if factors.dim() == 2 else factors[:, None]

"""Factors that come from a formula: 1 / sqrt(head_dim), log2(e) and others."""

from __future__ import annotations

import math

CLOSE = 1e-5  # of float32 weights; forms of usual sizes are further apart


def find_factor_formula(factor: float, *, head_dim: int, width: int) -> str:
    """Return the formula that gives a factor, such as "1 / sqrt(head_dim)"; "" for none.

    Args:
        factor: of weights or of scores.
        head_dim: channels of a head.
        width: of the tokens.
    """
    forms: dict[str, float] = {}
    for name, size in (("head_dim", head_dim), ("width", width)):
        forms |= {
            f"1 / sqrt({name})": size**-0.5,
            f"1 / {name}": 1 / size,
            f"sqrt({name})": size**0.5,
            name: float(size),
        }
    forms |= {
        "sqrt(head_dim / width)": (head_dim / width) ** 0.5,
        "head_dim ** -0.25": head_dim**-0.25,
        "head_dim ** 0.25": head_dim**0.25,
        "1 / sqrt(2 * head_dim)": (2 * head_dim) ** -0.5,
        "1 / sqrt(2)": 2**-0.5,
        "sqrt(2)": 2**0.5,
        "log2(e)": math.log2(math.e),
        "ln(2)": math.log(2),
    }
    plain = abs(factor)
    near = [name for name, form in forms.items() if abs(plain - form) <= CLOSE * form != CLOSE]
    return f"{'-' if factor < 0 else ''}{near[0]}" if near else ""

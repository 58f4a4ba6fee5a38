"""Error budget: the allowed error of an attention implementation, with its rounding formulas."""

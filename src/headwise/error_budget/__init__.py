"""The error budget of an honest implementation, and the rounding formulas under it."""

"""Detection of the layout of weights, and comparison of two sets of weights."""

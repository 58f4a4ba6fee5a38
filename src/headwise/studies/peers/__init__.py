"""Multi-head attention as others wrote it, filled with given weights, to compare with."""

"""Moves: named ways in which the numbers of two sets of projections are the same, moved."""

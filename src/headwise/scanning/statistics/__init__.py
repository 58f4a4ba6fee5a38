"""Head statistics, computed in one pass over the attention weights.

    statistic.py   a part of the weights, base classes, and `compute_summaries` in one pass
    catalogue.py   the standard set, by name, and measures from runs of the model

The standard set, with formulas, sources, units and exclusions:

    rows.py        means over queries: how widely a head attends, and where
    outputs.py     head outputs: norm, rank, copying, similarity of heads
    maps.py        views of one head: weights by offset, a map, the largest weights
"""

"""Head statistics, computed in one pass over the attention weights.

    weight_tile.py               a part of the weights, with values that several statistics share
    statistic.py                 base classes, summaries, and `compute_summaries` in one pass
    catalogue.py                 the standard set, by name
    statistic_ids_by_digest.py   stable ids of the definitions
    importance_statistics.py     measures from runs of the model, not from its weights

The standard set, with formulas, sources, units and exclusions:

    row_statistics.py            means over queries: how widely a head attends, and where
    output_statistics.py         head outputs: norm, rank, copying, similarity of heads
    maps_offsets_and_largest_weights.py
                                 views of one head: weights by offset, a map, the largest weights
"""

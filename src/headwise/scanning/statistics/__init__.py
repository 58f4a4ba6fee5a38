"""Head statistics: what a head does, in numbers that are read from one pass over its weights.

    tile.py          a part of a call, with the readings that several statistics share
    statistic.py     the bases, the tensors of a summary, and `sweep`: any number in one pass
    catalogue.py     the standard set, by name
    importance.py    measures that come from runs of the model, not from its weights

The standard set, each with its formula, source, unit and what it leaves out:

    rows.py          means over queries of what a row is worth: how widely it looks, and where
    outputs.py       what a head writes, and how alike the heads of a layer are
    views.py         what a page shows of one head: weights by offset, a map, the largest weights
"""

"""Head statistics: what a head does, in numbers that are read from one pass over its weights.

    tile.py          a part of a call, with the readings that several statistics share
    statistic.py     the bases: `Statistic`, `TileStatistic`, and the mean over queries, `RowMean`
    parts.py         the tensors of a summary, as files are checked by
    sweep.py         any number of statistics in one pass
    catalogue.py     the standard set, by name
    importance.py    measures that come from runs of the model, not from its weights

The standard set, each with its formula, source, unit and what it leaves out:

    spread.py        how widely a head looks
    places.py        where, counted from the query
    keys.py          at which keys
    top_keys.py      at which keys, for one query to show
    tokens.py        at which tokens
    copying.py       whether it writes the tokens it looks at
    outputs.py       how much it writes, and in how many directions
    similarity.py    how alike the heads of a layer are
    maps.py          a picture of its weights, at several sizes
"""

"""Head statistics: what a head does, in numbers that are read from one pass over its weights.

    observation.py   one attention call, and what is known of its tokens
    tile.py          a part of its weights, with the readings that several statistics share
    statistic.py     what a statistic is, and the mean over queries that most of them are
    sweep.py         any number of statistics in one pass
    catalogue.py     the standard set, by name

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

samples.py and repeats.py hold what several of them need: rows of a few queries, and which tokens
stand more than once.
"""

"""``headwise scan``: a model reads, and each of its attention heads is looked at.

command.py   the command, its options, and the way from these to a report
asked.py     what was asked for, checked
subject.py   the model, a folder or the one that ships; and the scan of a sequence of tokens
passage.py   what it reads
"""

"""``headwise scan``: a model reads, and each of its attention heads is looked at.

command.py   the command, its options, and the way from these to a report
asked.py     what was asked for, checked
reading.py   the model, a folder's or the one that ships, and what it reads
work.py      the scan itself, of one text or of a corpus
"""

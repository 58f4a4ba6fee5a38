"""``headwise scan``: statistics of every attention head of a stored model.

command.py     the command with its options
options.py     the checked options
statistics.py  the chosen statistics
source.py      the model and the tokens that it reads
run.py         the scan, of one text or of a corpus
"""

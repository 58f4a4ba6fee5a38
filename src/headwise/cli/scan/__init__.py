"""``headwise scan``: statistics of every attention head of a stored model.

command.py          the command with its options
scan_options.py     the checked options
model_and_text.py   the model and the tokens that it reads
run_scan.py         the scan, of one text or of a corpus
"""

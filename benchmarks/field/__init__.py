"""The field bench: attention as people write it, with the faults that people make.

* `ports`: one file each, in plain PyTorch or NumPy, that knows nothing of headwise.
* `cases`: for each port its faults, as edits of its text, and what they are in plain words.
* `truth`: the names of causes that are right for each fault, written before any was compared.
* `models`: whole models written by hand, beside those of transformers, with cases of their own.
* `reports`: the public bug reports that cases follow, with their addresses.
* `second`, `third`: sets of ports and cases that were written apart, each run once.
* `formulas`: attention in NumPy and float64, from the words of `SETTINGS` alone.
* `check`: a correct port agrees with the formulas, and a fault does not.
"""

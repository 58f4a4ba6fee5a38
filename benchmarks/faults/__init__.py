"""Fault bench: attention layers with one known fault, for the tools that name the fault.

Nothing here imports headwise, so the bench is independent of the tools that it measures.

* `cases.keys` gives the keys of all single faults, and `cases.case_of` makes the case of a key. A
  key is also a line of text, such as ``softcap:gqa-rotary:trained-like:3``.
* `composed.pairs` and `composed.models` draw two faults in one layer, and one fault in a model.
* `unknown.MECHANISMS` are faults that no catalogue names; `same.SAME` and `subtle.SUBTLE` are
  pairs that are equal, or that differ a little.
* `freeze` compares the files with the hash in FROZEN.
"""

"""Second set of the fault bench: new geometries, single faults and mechanisms.

The set is written from published reports of bugs alone, without knowledge of the causes that
headwise tests. Nothing here imports headwise.

* `cases.fault_keys` gives the keys of the first set's faults on the new geometries, of the new
  single faults, or of the new mechanisms; `cases.case_of` makes the case of a key.
* `cases.pair_keys` gives the keys of pairs that are equal, or that differ a little.
* The file FROZEN has the hash of these files; `benchmarks.faults.freeze` makes and compares it.
"""

"""Small models to look at.

* `planted`: weights written by hand, so that every head is known exactly.
* `tiny`: a language model of bytes, trained; its weights ship with the package.
* `minilm` and `small`: encoders, one from another package, one trained on the spot. Each is read
  once; what its attention layers were given, and gave, comes back as a `Reading`.
"""

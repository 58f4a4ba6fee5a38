"""Small models for demos, tests and the study.

* `planted`: weights written by hand, with an exact rule for every head.
* `tiny`: a trained language model of bytes, whose weights ship with the package.
* `minilm` and `small_encoder`: encoders, one from another package, one trained on the spot. Each
  records the inputs and outputs of its attention layers in a `RecordedRun`.
"""

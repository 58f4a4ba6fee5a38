"""Small models for demos, tests and the study.

* `planted`: weights written by hand, with an exact rule for every head.
* `tiny`: a trained language model of bytes, whose weights ship with the package.
* `minilm`: the folder of a trained encoder, which another package ships.
* `text`: a book's opening, and sentences to choose heads and to measure on.
"""

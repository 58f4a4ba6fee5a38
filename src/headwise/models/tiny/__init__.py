"""Small language model of bytes, built from headwise layers; its weights ship with the package.

The model was trained on the source of Python's standard library, which is under the PSF license
(`tools/tiny` in the repository). The file ``training.json`` beside the weights holds the
measurements of the training: the loss, and when heads formed. Training used 256 ids at a time. At
1,024 ids the loss is twice as large, and the heads are less sharp.
"""

from headwise.models.tiny.model import (
    BEGIN,
    VOCABULARY,
    Block,
    Tiny,
    decode,
    encode,
    load,
    training_measurements,
)

__all__ = [
    "BEGIN",
    "VOCABULARY",
    "Block",
    "Tiny",
    "decode",
    "encode",
    "load",
    "training_measurements",
]

"""A small language model of bytes, made of this library's own layers; its weights ship with it.

It was trained on the source of Python's standard library (`tools/tiny` in the repository), which is
under the PSF license. What was measured on the way is in ``training.json`` beside the weights: the
loss, and when heads formed. It was trained on 256 ids at a time, and is at home there: at 1,024 its
loss has doubled, and its heads are blurred.
"""

from headwise.bundled_models.tiny.model import Block, Tiny
from headwise.bundled_models.tiny.symbols import BEGIN, VOCABULARY, decode, encode
from headwise.bundled_models.tiny.weights import load, training

__all__ = ["BEGIN", "VOCABULARY", "Block", "Tiny", "decode", "encode", "load", "training"]

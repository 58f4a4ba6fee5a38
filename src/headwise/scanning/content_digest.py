"""A SHA-256 digest of plain content: the same in every process and on every device."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.support.private_torch import is_wrapper

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object; other in every process


def digest_of(content: Any) -> str:
    """The SHA-256 of a text, number, tensor, or of mappings and sequences of such; in hex.

    It is the same in every process and on every device. A tensor counts with its dtype and shape,
    a mapping with its keys in sorted order, so a tokenizer's output and a ``state_dict()`` do.

    Raises:
        OptionError: something of another type, or a mapping whose keys are not text.
    """
    running = hashlib.sha256()
    _feed(running.update, content)
    return running.hexdigest()


def _feed(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Each piece with its kind and its length, so that no two contents read the same."""
    if content is None or isinstance(content, (bool, int, float)):
        _feed_piece(feed, type(content).__name__, repr(content).encode())
    elif isinstance(content, str):
        _feed_piece(feed, "str", content.encode("utf-8", "surrogatepass"))
    elif isinstance(content, Tensor) and is_wrapper(content):
        _feed_wrapper(feed, content)
    elif isinstance(content, Tensor):
        plain = content.detach().cpu().contiguous()
        _feed_piece(feed, f"{plain.dtype} {list(plain.shape)}", b"")
        feed(plain.flatten().view(torch.uint8).numpy().data)
    elif isinstance(content, Mapping):
        if odd := [key for key in content if not isinstance(key, str)]:
            raise _no_digest(f"a mapping with the key {odd[0]!r}")
        _feed_piece(feed, "mapping", str(len(content)).encode())
        for key in sorted(content):
            _feed(feed, key)
            _feed(feed, content[key])
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        _feed_piece(feed, "sequence", str(len(content)).encode())
        for item in content:
            _feed(feed, item)
    else:
        raise _no_digest(f"a {type(content).__name__}")


def _feed_wrapper(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Feed a tensor that is made of others, such as a quantised one: its class, parts and rest."""
    names, rest = content.__tensor_flatten__()
    _feed_piece(feed, type(content).__name__, _ADDRESS.sub("", repr(rest)).encode())
    _feed(feed, {name: getattr(content, name) for name in names})


def _feed_piece(feed: Callable[[bytes | memoryview], None], kind: str, value: bytes) -> None:
    feed(f"{kind} {len(value)} ".encode())
    feed(value)


def _no_digest(saw: str) -> OptionError:
    return OptionError(
        saw=f"{saw} as content",
        needed="text, numbers, tensors, sequences of such, or mappings whose keys are text",
        do="give scan_one what it needs in these; a file's text rather than its path",
    )

"""Multi-head attention that you can run, verify, convert and see, head by head, at any length.

``import headwise`` does not import torch; the first access to one of its names does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.attention_matrix import AttentionMatrix as AttentionMatrix
    from headwise.diagnosis.compare import compare as compare
    from headwise.diagnosis.detect import detect as detect
    from headwise.diagnosis.verify_byte_for_byte import verify as verify
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.huggingface import register_huggingface as register_huggingface
    from headwise.layers.native.attention import Attention as Attention
    from headwise.layers.positions.rotary import Rotary as Rotary
    from headwise.layers.torch_api.layer import MultiheadAttention as MultiheadAttention
    from headwise.layers.torch_api.upgrade import upgrade as upgrade
    from headwise.layouts.convert import convert as convert
    from headwise.layouts.layout import Layout as Layout
    from headwise.masks.mask import Mask as Mask
    from headwise.masks.score_bias import ScoreBias as ScoreBias
    from headwise.scanning.scan import scan as scan

__version__ = "0.1.0"

_HOME = {
    "Attention": "headwise.layers.native.attention",
    "AttentionMatrix": "headwise.attention_matrix",
    "HeadwiseError": "headwise.errors",
    "Layout": "headwise.layouts.layout",
    "Mask": "headwise.masks.mask",
    "MultiheadAttention": "headwise.layers.torch_api.layer",
    "Rotary": "headwise.layers.positions.rotary",
    "ScoreBias": "headwise.masks.score_bias",
    "compare": "headwise.diagnosis.compare",
    "convert": "headwise.layouts.convert",
    "detect": "headwise.diagnosis.detect",
    "register_huggingface": "headwise.huggingface",
    "scan": "headwise.scanning.scan",
    "upgrade": "headwise.layers.torch_api.upgrade",
    "verify": "headwise.diagnosis.verify_byte_for_byte",
}

__all__ = [
    "Attention",
    "AttentionMatrix",
    "HeadwiseError",
    "Layout",
    "Mask",
    "MultiheadAttention",
    "Rotary",
    "ScoreBias",
    "compare",
    "convert",
    "detect",
    "register_huggingface",
    "scan",
    "upgrade",
    "verify",
]


# Former name in this module -> the module that defines it now.
_MOVED = {"Budget": "headwise.testing"}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(
            f"module 'headwise' has no attribute {name!r}: from {_MOVED[name]} import {name}"
        )
    if name not in _HOME:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # later accesses skip this function
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

"""Errors of the drop-in layer: subclasses of headwise's errors and of the types torch raises.

Code that catches the errors of `torch.nn.MultiheadAttention` then catches these too. The first
line of a message has torch's wording.
"""

from __future__ import annotations

from headwise.errors import DeviceError, DTypeError, MaskError, OptionError, ShapeError


class AssertedShapeError(ShapeError, AssertionError):
    """Sizes that do not fit, where torch asserts."""


class RuntimeShapeError(ShapeError, RuntimeError):
    """Sizes that do not fit, where torch's operators raise RuntimeError."""


class AssertedMaskError(MaskError, AssertionError):
    """A mask for other sizes or of another rank, where torch asserts."""


class RuntimeMaskError(MaskError, RuntimeError):
    """A mask for other sizes, where torch raises RuntimeError."""


class AssertedMaskDTypeError(DTypeError, MaskError, AssertionError):
    """A mask that is neither bool nor float."""


class AssertedOptionError(OptionError, AssertionError):
    """Options that contradict each other, where torch asserts."""


class RuntimeOptionError(OptionError, RuntimeError):
    """Options that contradict each other, where torch raises RuntimeError."""


class RuntimeDTypeError(DTypeError, RuntimeError):
    """Inputs and parameters of different dtypes."""


class RuntimeDeviceError(DeviceError, RuntimeError):
    """Inputs and parameters on different devices."""

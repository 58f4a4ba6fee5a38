"""The errors of the drop-in layer: headwise's tree, and the type torch's own layer raises.

Code that catches what `torch.nn.MultiheadAttention` raises must catch it here as well, so each
class below belongs to both trees. The first line of a message holds torch's own wording.
"""

from __future__ import annotations

from headwise.errors import DeviceError, DTypeError, MaskError, OptionError, ShapeError


class AssertedShapeError(ShapeError, AssertionError):
    """Sizes that do not fit, where torch asserts."""


class RuntimeShapeError(ShapeError, RuntimeError):
    """Sizes that do not fit, where torch's own operators raise RuntimeError."""


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

"""Exceptions and the warning of headwise.

    HeadwiseError
    ├── ShapeError         (ValueError)   sizes that do not fit together
    ├── MaskError          (ValueError)   a mask or score bias that is ambiguous, or for other sizes
    ├── OptionError        (ValueError)   an option outside its range, or two that contradict
    │   └── UndecidedError            a question that the inputs leave open
    ├── DeviceError        (ValueError)   tensors on different devices
    ├── CheckpointError    (ValueError)   files of weights that are damaged or cannot be written
    ├── DTypeError         (TypeError)    a dtype that cannot be used here
    ├── ArgumentError      (TypeError)    an argument that a function does not have
    ├── LimitError         (MemoryError)  a dense matrix larger than the limit that was given
    └── MissingExtraError  (ImportError)  an optional dependency that is not installed

    PolarityWarning        (UserWarning)  a mask that may follow the reverse convention

A message has three lines: the problem, the requirement, the remedy.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOST_FRAMES = 6  # of a caller, in a notebook
# Frames that a notebook leaves out: those of headwise, of torch and of IPython.
_INNER = re.compile(rf"^{re.escape(str(Path(__file__).parent))}|-packages[/\\](torch|IPython)[/\\]")


class HeadwiseError(Exception):
    """Base class of every headwise exception. A message has three lines.

    Attributes:
        saw: the first line, the problem.
        needed: the second line, the requirement.
        do: the third line, the remedy.
        hint: the third line as it was written, with ``{heads}`` for the argument called heads.
        parameter: the arguments that the lines name in this way -> the values to give for each.
    """

    def __init__(
        self, *, saw: str, needed: str, do: str, parameter: str | Mapping[str, Any] = ""
    ) -> None:
        if isinstance(parameter, str):
            parameter = {parameter: ()} if parameter else {}
        self._lines, self.hint = (saw, needed, do), do
        self.parameter = {name: tuple(values) for name, values in parameter.items()}
        self.saw, self.needed, self.do = self.lines(_format_argument_as_python)
        super().__init__(join_error_lines(self.saw, self.needed, self.do))

    def lines(self, spell: Callable[[str, tuple[str, ...]], str]) -> tuple[str, str, str]:
        """Return the three lines, with arguments as ``spell(name, values)`` writes them."""
        saw, needed, do = self._lines
        for name, values in self.parameter.items():
            field, written = f"{{{name}}}", spell(name, values)
            saw, do = saw.replace(field, written), do.replace(field, written)
        return saw, needed, do

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints: the caller's last frames, and the message."""
        frames = [
            frame
            for frame in traceback.extract_tb(self.__traceback__)
            if not _INNER.search(frame.filename)
        ]
        lines = traceback.format_list(frames[-MOST_FRAMES:])
        return [line.rstrip("\n") for line in [*lines, f"{type(self).__name__}: {self}"]]

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments would be lost when an error crosses a process boundary.
        return _rebuild_error, (type(self), *self._lines, self.parameter)


def join_error_lines(saw: str, needed: str, do: str) -> str:
    """Return the three lines of an error as one text."""
    return f"{saw}\n  needed: {needed}\n  do:     {do}"


def _format_argument_as_python(name: str, values: tuple[str, ...]) -> str:
    return f"{name}={json.dumps(values)}" if values else name


def _rebuild_error(
    kind: type[HeadwiseError], saw: str, needed: str, do: str, parameter: dict[str, Any]
) -> HeadwiseError:
    return kind(saw=saw, needed=needed, do=do, parameter=parameter)


class ShapeError(HeadwiseError, ValueError):
    """Sizes that do not fit together."""


class MaskError(HeadwiseError, ValueError):
    """A mask or a score bias that is ambiguous, or that was made for other sizes."""


class OptionError(HeadwiseError, ValueError):
    """An option outside its range, or options that contradict each other."""


class UndecidedError(OptionError):
    """A question that the inputs leave open, such as which layout a file is in."""


class DeviceError(HeadwiseError, ValueError):
    """Tensors that live on different devices."""


class CheckpointError(HeadwiseError, ValueError):
    """Files of weights that are damaged, or that cannot be written."""


class DTypeError(HeadwiseError, TypeError):
    """A dtype that cannot be used here."""


class ArgumentError(HeadwiseError, TypeError):
    """An argument that a function does not have; the message says what to pass instead."""


class LimitError(HeadwiseError, MemoryError):
    """A dense attention matrix larger than the limit that was given."""


class MissingExtraError(HeadwiseError, ImportError):
    """An optional dependency that is not installed; the message holds the pip line."""


class PolarityWarning(UserWarning):
    """A mask that may follow the reverse of the polarity that the function documents.

    `warnings.filterwarnings("ignore", category=PolarityWarning)` switches it off.
    """

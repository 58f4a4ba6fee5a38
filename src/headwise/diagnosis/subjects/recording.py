"""Stages that were recorded elsewhere, in a file: for attention that cannot run here.

A file of ``numpy.savez`` or of safetensors holds one call:

    x                                   (batch, queries, embed_dim), required
    source                              (batch, keys, source_dim), for cross attention
    mask                                broadcasts to (batch, heads, queries, keys); True attends
    positions                           (batch, queries), where they do not count from 0
    q, k, v                             (batch, heads, length, channels)
    q_after_norm, k_after_norm          likewise, as they enter the rotation
    q_after_rotary, k_after_rotary      likewise, as they enter the scores
    scores, weights                     (batch, heads, queries, keys)
    head_outputs                        (batch, heads, queries, value_dim)
    output                              (batch, queries, out_dim), required

Any of the stages may be missing. The more there are, the more causes can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.parts import Parts
from headwise.diagnosis.subjects.subject import Subject, describe_error
from headwise.errors import OptionError, ShapeError
from headwise.function.records import STAGES
from headwise.support.files import write_whole

ENDINGS = (".npz", ".safetensors")
ARGUMENTS = ("x", "source", "mask", "positions")


class Recording(Subject):
    """A call that was recorded in a file."""

    def __init__(self, path: Path) -> None:
        tensors = _read_arrays(path)
        _require_names_and_numbers(tensors, path.name)
        self.kind = path.name
        self.dtype = tensors["output"].dtype
        self.inputs = Inputs(
            tensors["x"], tensors.get("source"), tensors.get("mask"), tensors.get("positions")
        )
        self.stages = {
            stage: tensors[name].double()
            for stage in STAGES
            if (name := stage.replace(" ", "_")) in tensors
        }
        for stage, tensor in self.stages.items():
            axes = 3 if stage == "output" else 4
            if tensor.dim() != axes:
                raise ShapeError(
                    saw=f"{stage} of shape {tuple(tensor.shape)} in {path.name}",
                    needed=f"{axes} axes"
                    + ("" if axes == 3 else ", with heads as the second: (batch, heads, ...)"),
                    do="reshape it before it is stored",
                )
        output, x = tensors["output"], self.inputs.x
        if output.shape[:2] != x.shape[:2]:
            raise ShapeError(
                saw=f"output of shape {tuple(output.shape)} and x of shape {tuple(x.shape)} in "
                f"{path.name}",
                needed="a row of output for each row of x: (batch, queries, ...)",
                do="store both of the same call",
            )
        if not output.isfinite().any():
            raise OptionError(
                saw=f"{path.name}, whose outputs are all NaN or infinite",
                needed="finite outputs, but for queries that may attend to no key",
                do="look for weights that are not finite, or for an overflow of float16",
            )

    def output(self, inputs: Inputs) -> Tensor:  # noqa: ARG002 (always those of the recording)
        """Return the recorded output."""
        return self.stages["output"].to(self.dtype)

    def record(self, inputs: Inputs) -> RecordedCall:  # noqa: ARG002
        """Return the recorded stages."""
        return RecordedCall(self.inputs, self.stages, self.dtype)

    def require_shapes_of(self, call: RecordedCall) -> None:
        """Check the stages against those of a layer that ran on the same input.

        Heads may be other ones: fewer and wider, or repeated keys and values.

        Raises:
            ShapeError: a stage has the shape of no attention like that of the layer.
        """
        for stage, tensor in self.stages.items():
            if stage in call.stages and not _may_be_same_stage(stage, tensor, call.stages[stage]):
                raise ShapeError(
                    saw=f"{stage} of shape {tuple(tensor.shape)} in {self.kind}",
                    needed=f"{tuple(call.stages[stage].shape)}, as the layer has it",
                    do="store stages of the same layer and of the same call, without padding",
                )


def _require_names_and_numbers(tensors: Mapping[str, Tensor], file: str) -> None:
    known = {*ARGUMENTS, *(stage.replace(" ", "_") for stage in STAGES)}
    if missing := {"x", "output"} - tensors.keys():
        raise OptionError(
            saw=f"{file} without {' and '.join(sorted(missing))}",
            needed="the input x and the output at least",
            do="store them by these names with numpy.savez",
        )
    if unknown := sorted(tensors.keys() - known):
        raise OptionError(
            saw=f"{file} with {', '.join(unknown[:4])}",
            needed=f"names among {', '.join(sorted(known))}",
            do="rename them, or leave them out",
        )
    for name in ("x", "output"):
        if not tensors[name].is_floating_point():
            raise OptionError(
                saw=f"{name} of {tensors[name].dtype} in {file}",
                needed="floating-point numbers",
                do="store the tensors as the layer takes and returns them",
            )


def _may_be_same_stage(stage: str, x: Tensor, y: Tensor) -> bool:
    """True if two tensors of a stage have the same axes but for the division into heads."""
    if stage == "output":
        return x.shape == y.shape
    if (x.shape[0], x.shape[2]) != (y.shape[0], y.shape[2]):
        return False
    if stage in ("scores", "weights"):
        return x.shape[3] == y.shape[3]
    is_repeated = x.shape[3] == y.shape[3] and x.shape[1] % y.shape[1] == 0
    has_same_channels = x.shape[1] * x.shape[3] == y.shape[1] * y.shape[3]
    return has_same_channels or (is_repeated and stage[0] in "kv")


def _read_arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    if not is_zipfile(path):
        raise _unreadable_error(path, "it is no zip file, as numpy.savez writes it")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (BadZipFile, EOFError, OSError, TypeError, ValueError) as error:
        raise _unreadable_error(path, describe_error(error)) from error


def _unreadable_error(path: Path, reason: str) -> OptionError:
    return OptionError(
        saw=f"{path.name}, which cannot be read: {reason}",
        needed="a file of numpy.savez that holds arrays of numbers by name",
        do="store the call again: numpy.savez(path, x=x, output=output)",
    )


def is_recording(value: object) -> bool:
    """True if a value is the path of a file that may hold a recording."""
    path = Path(value) if isinstance(value, str | Path) else Path()
    if path.suffix not in ENDINGS or not path.is_file() or path.suffix == ".npz":
        return path.suffix in ENDINGS and path.is_file()
    with suppress(SafetensorError), safe_open(path, framework="pt") as file:
        return "output" in file.keys()  # noqa: SIM118 (it is no mapping)
    return False


def record_activations(
    path: str | Path,
    call: Callable[[], Any],
    x: Tensor,
    modules: Mapping[str, nn.Module],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: Tensor | None = None,
) -> None:
    """Run a module of PyTorch and store outputs of its parts as a recording.

    Args:
        path: the file to write, of ``numpy.savez``.
        call: runs the module; its result is stored as the output (the first of a tuple).
        x: the input of the module, (batch, queries, embed_dim).
        modules: stage -> the part whose output it is, such as {"q": layer.q_proj}. An output of
            (batch, length, heads * channels) is split into heads.
        num_heads: number of query heads.
        num_kv_heads: number of heads of keys and values, num_heads by default.
        mask: as in `Inputs`.

    Raises:
        OptionError: a name that is no stage.
        ShapeError: a part whose channels do not divide into heads.
    """
    parts = Parts(modules, num_heads, num_kv_heads or num_heads)
    output, recorded = parts.record(call)
    recorded |= {"x": x, "output": output[0] if isinstance(output, tuple) else output}
    recorded |= {} if mask is None else {"mask": mask}
    arrays = {name.replace(" ", "_"): t.cpu().numpy() for name, t in recorded.items()}
    content = BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    write_whole(Path(path), content.getvalue())

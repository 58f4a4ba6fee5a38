"""One of the two normalises its input, or its output, without weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import Forced, project


class NormInsideCause(Cause):
    """One of the two normalises its input, or its output, without weights of its own.

    Many modules hold the layer norm of the block: before attention (pre-norm) or after it
    (post-norm).

    Repair:
        Compare the two without their norms, or put the norm before both.

    Confused with:
        qk-norm kind: on queries and keys alone.
        residual inside: a module that has the norm often has the residual too.
    """

    name: ClassVar[str] = "norm inside"
    symptom: ClassVar[str] = (
        "Attention blocks agree only after a layer norm: one of them normalises inside"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return layer norm and RMS norm of the input and of the output."""
        for kind in ("layer", "rms"):
            for eps in (1e-5, 1e-6, 1e-12, 1e-8):
                norm = partial(_normed, kind, eps)
                model = evidence.model
                for role in "qkv":
                    model = model.with_stage(role, partial(_of_input, norm))
                yield Variant(
                    model, {"norm": f"{kind} of the input"}, "normalise both inputs or neither"
                )
                model = evidence.model.with_stage("output", partial(_of_output, norm))
                yield Variant(
                    model, {"norm": f"{kind} of the output"}, "normalise both outputs or neither"
                )


def _normed(kind: str, eps: float, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _of_input(norm: Callable[[Tensor], Tensor], forced: Forced) -> Tensor:
    inputs = forced.call.inputs
    source = None if inputs.source is None else norm(inputs.source.double())
    normed = replace(inputs, x=norm(inputs.x.double()), source=source)
    return project(replace(forced, call=replace(forced.call, inputs=normed)))


def _of_output(norm: Callable[[Tensor], Tensor], forced: Forced) -> Tensor:
    return norm(forced.usual())

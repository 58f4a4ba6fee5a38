"""Base class of the subjects of a comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.errors import OptionError


class Subject(ABC):
    """An attention that can be run or was recorded.

    Attributes:
        kind: what it is, in a few words for reports.
        dtype: of its weights or, for a function, of its outputs.
        takes_mask: True if calls may have a mask.
        takes_source: True if keys and values may come from another sequence.
        is_causal: True if queries attend to no later key without a mask of the caller; None where
            that is said by the mask of a call.
        dropout: of the weights as it was given: 0 in eval mode, None where it is not known.
    """

    kind: str
    dtype: torch.dtype
    takes_mask: bool = True
    takes_source: bool = False
    is_causal: bool | None = None
    dropout: float | None = None

    @property
    def model(self) -> AttentionModel | None:
        """The attention as data, None where only its outputs are known."""
        return None

    @property
    def input_widths(self) -> tuple[int, int] | None:
        """Widths of ``x`` and of the source, None where they are not known."""
        model = self.model
        if model is None:
            return None
        return model.weights["wq"].shape[2], model.weights["wk"].shape[2]

    @abstractmethod
    def output(self, inputs: Inputs) -> Tensor:
        """Return the output in the dtype of the subject, (batch, queries, out_dim)."""

    def record_calls(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the recorded calls, one after the other with the same cache.

        Raises:
            OptionError: steps with a cache for a subject that takes none.
        """
        if not inputs.steps:
            return [self.record(inputs)]
        raise OptionError(
            saw=f"inputs with steps for {self.kind}",
            needed="an attention that is called with a cache",
            do="leave steps out",
        )

    @abstractmethod
    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the stages that can be reached, computed in float64 where that is possible."""

    def gradients(
        self,
        inputs: Inputs,  # noqa: ARG002 (what subjects with gradients take)
        direction: Tensor,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return the gradients of the sum of output * direction, computed in ``dtype``.

        Args:
            inputs: of the call.
            direction: of the shape of the output.
            dtype: of the arithmetic; a function computes in its own.

        Returns:
            The gradients of "x" and of "source" in the shapes of the inputs, and those of the
            weights, such as "wq", in canonical shapes where they are known.

        Raises:
            OptionError: what was recorded has no gradients.
        """
        raise OptionError(
            saw=f"gradients=True for {self.kind}",
            needed="two attentions that can be run with gradients",
            do="compare(a, b) without gradients",
        )

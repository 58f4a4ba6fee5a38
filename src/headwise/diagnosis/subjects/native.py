"""A layer of headwise as the subject of a comparison."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.diagnosis.subjects.adapters import merge_adapters
from headwise.diagnosis.subjects.subject import ModuleSubject
from headwise.errors import OptionError
from headwise.function.spec import AttentionSpec
from headwise.layers import checks, conversion, distance
from headwise.layers.attention import Attention
from headwise.masks.mask import Mask


class NativeSubject(ModuleSubject):
    """An `Attention`, without dropout."""

    module: Attention

    def __init__(self, layer: Attention, kind: str = "headwise.Attention") -> None:
        super().__init__(layer, kind)
        self.takes_source = all(getattr(layer, name) is None for name in checks.POSITIONAL_OPTIONS)

    def subject_of_module(self, module: nn.Module) -> Self:
        """Return the subject of another layer."""
        assert isinstance(module, Attention)
        return type(self)(module, self.kind)

    @cached_property
    def float64_layer(self) -> Attention:
        """The layer in float64."""
        return copy.deepcopy(self.module).double()

    @cached_property
    def model(self) -> AttentionModel:
        """The layer as data."""
        merged = merge_adapters(copy.deepcopy(self.float64_layer))
        weights = conversion.state_per_head(self.float64_layer, merged.state_dict())
        return AttentionModel(settings_from_layer(self.float64_layer), weights)

    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of a layer in its dtype."""
        dtype = next(module.parameters()).dtype
        source = None if inputs.source is None else inputs.source.to(dtype)
        output: Tensor = module(inputs.x.to(dtype), source, mask=mask_from_inputs(inputs))
        return output

    @torch.no_grad()
    def record(self, inputs: Inputs) -> RecordedCall:
        """Return all stages but the scores, each computed by the modules of the layer."""
        source = None if inputs.source is None else inputs.source.double()
        mask = mask_from_inputs(inputs)
        stages = self.float64_layer.stages(inputs.x.double(), source, mask=mask)
        del stages["scores"]  # computed from q and k, and not by the layer
        return RecordedCall(inputs, stages)


def mask_from_inputs(inputs: Inputs) -> Mask | None:
    """Return the mask of a call."""
    if inputs.mask is None:
        return None
    batch, queries = inputs.x.shape[:2]
    keys = inputs.key_source.shape[1]
    allowed = inputs.mask.expand(batch, -1, queries, keys)
    axes = "batch queries keys" if allowed.shape[1] == 1 else "batch heads queries keys"
    return Mask.may_attend(allowed.squeeze(1) if allowed.shape[1] == 1 else allowed, axes=axes)


def settings_from_layer(layer: Attention) -> AttentionSpec:
    """Return the settings of a layer as data.

    Raises:
        OptionError: a score bias whose formula is not known.
    """
    bias = layer.score_bias
    if not isinstance(bias, distance.AlibiSlopes | distance.T5BucketTable | None):
        raise OptionError(
            saw=f"a score bias of {type(bias).__name__}",
            needed="Alibi, T5Bias or none, whose formula is known",
            do="compare the layers without it, or as functions: compare(lambda x: a(x), b)",
        )
    return layer.spec

"""torch's own layer as the subject of a comparison."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.diagnosis.subjects.subject import ModuleSubject
from headwise.errors import OptionError
from headwise.function.spec import AttentionSpec
from headwise.function.stages import mix_values
from headwise.layouts.registry import layout


class TorchSubject(ModuleSubject):
    """`torch.nn.MultiheadAttention` or the drop-in.

    The stages are q, k and v from its weights, its returned weights, their products with v, and
    its output.
    """

    module: nn.MultiheadAttention
    takes_source = True

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        if layer.bias_k is not None or layer.add_zero_attn:
            raise OptionError(
                saw="a layer with add_bias_kv or add_zero_attn",
                needed="keys and values that come from tokens alone",
                do="compare its outputs on an input: compare(a, lambda x: layer(x, x, x)[0], x)",
            )
        super().__init__(layer, f"{type(layer).__module__.split('.')[0]}.{type(layer).__name__}")

    def subject_of_module(self, module: nn.Module) -> Self:
        """Return the subject of another layer."""
        assert isinstance(module, nn.MultiheadAttention)
        return type(self)(module)

    @cached_property
    def float64_layer(self) -> nn.MultiheadAttention:
        """The layer in float64."""
        return copy.deepcopy(self.module).double()

    @cached_property
    def model(self) -> AttentionModel:
        """The layer as data."""
        is_packed = self.float64_layer.in_proj_weight is not None
        stored = layout("torch-packed" if is_packed else "torch-separate")
        heads = self.float64_layer.num_heads
        weights = stored.unpack(self.float64_layer.state_dict(), heads=heads)
        spec = AttentionSpec(
            num_heads=heads, num_kv_heads=heads, head_dim=self.float64_layer.head_dim
        )
        return AttentionModel(spec, weights)

    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of a layer in its dtype."""
        assert isinstance(module, nn.MultiheadAttention)
        return self._run_torch_layer(module, inputs)[0]

    @torch.no_grad()
    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the projections, weights, head outputs and output, in float64."""
        call = RecordedCall(inputs, {})
        output, weights = self._run_torch_layer(self.float64_layer, inputs)
        stages = {role: self.model.predict_stage(role, call) for role in ("q", "k", "v")}
        heads = mix_values(weights, stages["v"])
        stages |= {"weights": weights, "head outputs": heads, "output": output}
        return call.with_stages(stages)

    def _run_torch_layer(
        self, layer: nn.MultiheadAttention, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        dtype = layer.out_proj.weight.dtype
        x, source = inputs.x.to(dtype), inputs.key_source.to(dtype)
        if not layer.batch_first:
            x, source = x.transpose(0, 1), source.transpose(0, 1)
        hidden = None
        if inputs.mask is not None:
            shape = (len(inputs.x), layer.num_heads, inputs.x.shape[1], inputs.key_source.shape[1])
            hidden = ~inputs.mask.expand(shape).flatten(0, 1)
        options = {"attn_mask": hidden, "need_weights": True, "average_attn_weights": False}
        output, weights = layer(x, source, source, **options)
        return output if layer.batch_first else output.transpose(0, 1), weights

"""The stages of a layer: each follows from those before it, and the output is that of forward."""

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary, compare
from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.function import DynamicScaling, Latent, TemperatureRule, ValueRule
from headwise.function.records import stages_of
from headwise.layers.conversion import state_per_head
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm

EMBED_DIM, HEADS, LENGTH, BATCH = 48, 6, 12, 3
OPTIONS = {
    "plain": {},
    "rotary, grouped": {"rotary": Rotary(width=6, pairing="interleaved"), "num_kv_heads": 2},
    "norm of the width": {"qk_norm": QKNorm(over="width"), "rotary": Rotary()},
    "norm after": {"qk_norm": QKNorm(place="after"), "rotary": Rotary(), "softcap": 3.0},
    "gate of channels": {"output_gate": "channel", "num_kv_heads": 2, "value_dim": 7},
    "softplus, norms": {
        "output_gate": "head softplus",
        "output_norm": QKNorm("layer", over="width"),
        "values": ValueRule(eps=1e-6, factor=0.7),
    },
    "clip, temperature": {
        "clip": 0.7,
        "temperature": TemperatureRule(0.4, 5),
        "rotary": Rotary(scaling=DynamicScaling(4.0, 9), backwards=True),
        "qk_norm": QKNorm(place="after", has_weight=False),
    },
    "alibi, sink": {"score_bias": Alibi(), "sink": True, "window": (5, 0)},
    "latent": {
        "latent": Latent(rank=9, shared_width=4, query_rank=11),
        "rotary": Rotary(),
        "value_dim": 5,
        "latent_bias": True,
    },
    "latent of keys, scaled": {
        "latent": Latent(rank=9, shared_width=4, normed=False, scaled=True),
        "rotary": Rotary(pairing="interleaved"),
        "output_gate": "head",
    },
    "buckets": {"score_bias": T5Bias(buckets=8, max_distance=9), "scale": 1.0},
}


def layer_of(name: str) -> Attention:
    torch.manual_seed(0)
    layer = Attention(EMBED_DIM, HEADS, dropout=0.5, **OPTIONS[name]).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_each_stage_follows_from_those_before_it(name: str) -> None:
    """The layer's own modules and kernels, against the one arithmetic of a description."""
    layer = layer_of(name)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM, dtype=torch.float64)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    stages = layer.stages(x, mask=Mask.may_attend(seen, axes="queries keys"))
    assert [*stages] == [*stages_of(layer.spec)]
    model = AttentionModel(layer.spec, state_per_head(layer, layer.state_dict()))
    call = RecordedCall(Inputs(x, mask=seen), stages)
    gaps = measure_gaps(model, [call])
    assert {stage for stage, _, _ in gaps.cells} == {*stages}
    assert gaps.cells_beyond_rounding == []
    assert torch.equal(stages["output"], layer.eval()(x, mask=Mask.causal()))


@torch.no_grad()
def test_stages_of_a_latent_with_a_fault_are_beyond_rounding() -> None:
    layer = layer_of("latent")
    x = torch.randn(BATCH, LENGTH, EMBED_DIM, dtype=torch.float64)
    model = AttentionModel(layer.spec, state_per_head(layer, layer.state_dict()))
    call = RecordedCall(Inputs(x), layer.stages(x))
    for name, stage in {"wa": "q", "wc": "c", "c_norm": "c", "wr": "k_r", "wk": "k"}.items():
        x = model.weights[name]
        moved = model.with_weights(**{name: x * (1 + 1e-12 * torch.randn_like(x))})
        assert measure_gaps(moved, [call]).stages_beyond_rounding == [stage]


class Doubled(Attention):
    def forward(self, *args: Tensor, **options: object) -> Tensor:
        return 1.01 * super().forward(*args, **options)


def test_a_fault_of_forward_alone_shows() -> None:
    right, wrong = Attention(EMBED_DIM, HEADS), Doubled(EMBED_DIM, HEADS)
    wrong.load_state_dict(right.state_dict())
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    assert torch.equal(wrong.stages(x)["output"], wrong(x))
    diagnosis = compare(wrong, right)
    assert not diagnosis
    assert diagnosis.function is not None
    assert [each.stage for each in diagnosis.function.parted] == ["output"]

